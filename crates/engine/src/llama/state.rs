//! A sequence's state, out of a context and into it, and whether that can be relied on for a model.

#![expect(unsafe_code, reason = "the C interface of llama.cpp")]

use super::{
    context::Context,
    sys::{self, Model},
};
use crate::{
    kv::{Piece, State, Template},
    protocol::KvLayout,
};
use llama_cpp_sys_2 as c;
use warmset_core::kv::BLOCK_TOKENS;

/// The version of `llama-cpp-sys-2`: what the bytes of a state mean may change with it.
const BINDINGS_VERSION: &str = "0.1.161";
/// Grows when this program writes or reads states differently.
const FORMAT_VERSION: u32 = 1;
/// Tokens that the test of a model's states needs in its first sequence.
pub(super) const TEST_TOKENS: usize = 2;

/// Architectures whose whole state is one row of keys and one of values for each layer and token. Others may be added
/// when somebody has looked how llama.cpp keeps theirs; the test at load is the second lock, not the first. Not here:
/// those whose rotation depends on the length of the context (phi3, minicpm).
const PLAIN_ARCHITECTURES: [&str; 31] = [
    "arcee",
    "baichuan",
    "bloom",
    "codeshell",
    "command-r",
    "deepseek",
    "exaone",
    "falcon",
    "gemma",
    "gpt2",
    "gptneox",
    "granite",
    "granitemoe",
    "internlm2",
    "jais",
    "llama",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "orion",
    "phi2",
    "qwen",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "smollm3",
    "stablelm",
    "starcoder2",
];

impl Context {
    /// Bytes of the state of a sequence.
    pub(super) fn state_bytes(&self, sequence: i32) -> usize {
        if !self.has_sequence(sequence) {
            return 0;
        }
        // SAFETY: the context is valid and the sequence exists.
        unsafe { c::llama_state_seq_get_size(self.raw(), sequence) }
    }

    /// Writes the state of a sequence and says how long it is, in the form that `kv::State` reads: llama.cpp itself
    /// tells the cells of all streams in order, so that its form depends on the sequence's number.
    pub(super) fn state(&mut self, sequence: i32, into: &mut [u8]) -> Result<usize, String> {
        const START: usize = 12;
        let bytes = self.state_bytes(sequence);
        if bytes == 0 || self.is_unsettled(sequence) {
            return Err("the sequence has no state now".into());
        }
        let others = 4 * (self.sequences() as usize - 1);
        // As many streams as come after this one are left out at its end and put in at its beginning.
        let shift = others - 4 * sequence as usize;
        let room = into.get_mut(shift..shift + bytes).ok_or("the state does not fit")?;
        // SAFETY: the context is valid, the sequence exists, and the buffer is valid for the length that is given.
        let written = unsafe { c::llama_state_seq_get_data(self.raw(), room.as_mut_ptr(), room.len(), sequence) };
        if written != bytes {
            return Err(sys::complaint("llama.cpp cannot write the state"));
        }
        into.copy_within(shift..shift + START, 0);
        into[4..8].fill(0);
        into[START..START + others].fill(0);
        Ok(bytes)
    }

    /// Replaces a sequence by a state. False if llama.cpp refuses it: then the sequence is empty.
    pub(super) fn set_state(&mut self, sequence: i32, state: &[u8]) -> bool {
        if !self.has_sequence(sequence) || self.is_unsettled(sequence) {
            return false;
        }
        // SAFETY: the context is valid, the sequence exists, and the bytes are valid for their length. llama.cpp
        // checks every size in them against its own before it reads on.
        let read = unsafe { c::llama_state_seq_set_data(self.raw(), state.as_ptr(), state.len(), sequence) };
        if read != state.len() {
            self.forget(sequence, 0);
            return false;
        }
        true
    }
}

/// How a model's states are cut, found out on the first tokens of its first sequence, which are computed already; why
/// they cannot be cut otherwise.
pub(super) fn probe(
    model: &Model,
    context: &mut Context,
    architecture: &str,
    accelerators: &[String],
) -> Result<(Template, KvLayout), String> {
    if !PLAIN_ARCHITECTURES.contains(&architecture) {
        return Err(format!("nobody has looked how states of the architecture {architecture:?} are made"));
    }
    if !model.can_rewind() || model.has_several_positions() {
        return Err("a state holds more than rows of single tokens".into());
    }
    let mut first = vec![0; context.state_bytes(0) + 4 * context.sequences() as usize];
    let bytes = context.state(0, &mut first)?;
    first.truncate(bytes);
    let template = Template::probe(&first, context.sequences()).map_err(|error| error.to_string())?;
    test(context, &template, &first)?;
    let description = format!(
        "format {FORMAT_VERSION}, {} by llama-cpp-sys-2 {BINDINGS_VERSION} on {accelerators:?}, flash attention, blocks \
         of {BLOCK_TOKENS}, {}, {}",
        sys::version(),
        model.describe_positions(),
        template.describe()
    );
    let state = template.layout().clone();
    Ok((template, KvLayout { description, state }))
}

/// Cuts a state, puts it together again on the last sequence, and compares.
fn test(context: &mut Context, template: &Template, first: &[u8]) -> Result<(), String> {
    let refused = |error: crate::kv::InvalidState| error.to_string();
    let layout = template.layout();
    let state = State::parse(layout, first).map_err(refused)?;
    let cut =
        |state: &State<'_>, cell: u32| -> Option<Vec<u8>> { Some(state.rows(cell, 1)?.flatten().copied().collect()) };
    let rows: Option<Vec<Vec<u8>>> = (0..state.cells()).map(|cell| cut(&state, cell)).collect();
    let rows = rows.filter(|rows| rows.len() == TEST_TOKENS).ok_or("it does not hold the tokens that were computed")?;
    let pieces: Vec<Piece<'_>> = rows.iter().map(|payload| Piece { payload, cells: 1 }).collect();
    let mut composed = vec![0; first.len()];
    template.compose(&pieces, &mut composed, 1).map_err(refused)?;
    let last = context.sequences() as i32 - 1;
    if !context.set_state(last, &composed) {
        return Err(sys::complaint("llama.cpp does not take a state that was put together"));
    }
    let mut again = vec![0; first.len() + 4 * context.sequences() as usize];
    let bytes = context.state(last, &mut again)?;
    let again = State::parse(layout, &again[..bytes]).map_err(refused)?;
    let same = (0..again.cells()).all(|cell| cut(&again, cell).as_ref() == rows.get(cell as usize));
    if same && again.cells() as usize == rows.len() { Ok(()) } else { Err("a state changed on its way".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bindings_are_those_that_states_are_named_after() {
        let manifest = include_str!("../../../../Cargo.toml");
        assert!(manifest.contains(&format!("llama-cpp-sys-2 = {{ version = \"={BINDINGS_VERSION}\"")));
        assert!(PLAIN_ARCHITECTURES.is_sorted());
    }
}
