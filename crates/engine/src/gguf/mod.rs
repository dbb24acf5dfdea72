//! A bounded reader of GGUF headers, in safe Rust, for files from anybody: it runs before llama.cpp sees a file.
//!
//! It streams: whatever a header declares, it holds one 64 KiB buffer, the handful of values that Warmset needs, and
//! one hash per tensor, and it gives up at the first lie. What it accepts is at least as strict as llama.cpp's own
//! reader: tensors of known types, in order, aligned, without overlap or hole, all inside the file.

mod error;
mod estimate;
mod metadata;
mod source;
mod tensors;
mod types;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod writer;

pub use error::{GgufError, TensorProblem};
pub use estimate::{Estimate, estimate};

use metadata::Metadata;
use source::Source;
use std::{fs::File, io::Read, path::Path};

/// The longest header, tokenizer included. The largest tokenizers in use (262,144 tokens) need about 16 MiB.
pub const HEADER_BYTES_MAX: u64 = 64 << 20;
/// The most metadata keys.
pub const KEYS_MAX: u64 = 4096;
/// The longest metadata key.
pub const KEY_BYTES_MAX: u64 = 1024;
/// The longest string that is skipped (tokens, merges, licences).
pub const STRING_BYTES_MAX: u64 = 1 << 20;
/// The longest chat template.
pub const TEMPLATE_BYTES_MAX: u64 = 256 << 10;
/// The longest name (architecture, model name) that is kept.
pub const NAME_BYTES_MAX: u64 = 1024;
/// The most elements of one array.
pub const ARRAY_ELEMENTS_MAX: u64 = 1 << 21;
/// The most elements of all arrays together.
pub const ARRAY_ELEMENTS_TOTAL_MAX: u64 = 1 << 22;
/// The most tensors in one file.
pub const TENSORS_MAX: u64 = 1 << 15;
/// The longest tensor name, as in llama.cpp.
pub const TENSOR_NAME_BYTES_MAX: u64 = 63;
/// The most layers, as in llama.cpp.
pub const LAYERS_MAX: u32 = 512;
/// The largest alignment of tensors.
pub const ALIGNMENT_MAX: u32 = 64 << 10;
/// The largest token context, embedding, head count or head length that is believed.
pub const COUNT_MAX: u32 = 1 << 30;

const DEFAULT_ALIGNMENT: u32 = 32;

/// What tensors add up to, by what a step reads of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Elements of all tensors.
    pub elements: u64,
    /// Elements of routed experts.
    pub expert_elements: u64,
    /// Bytes of routed experts.
    pub expert_bytes: u64,
    /// Elements of the table of embeddings.
    pub embedding_elements: u64,
    /// Bytes of the table of embeddings.
    pub embedding_bytes: u64,
    /// Whether there is an output layer beside that table, which is only looked up then.
    pub has_output: bool,
}

impl Totals {
    fn add(&mut self, other: &Self) {
        self.elements = self.elements.saturating_add(other.elements);
        self.expert_elements = self.expert_elements.saturating_add(other.expert_elements);
        self.expert_bytes = self.expert_bytes.saturating_add(other.expert_bytes);
        self.embedding_elements = self.embedding_elements.saturating_add(other.embedding_elements);
        self.embedding_bytes = self.embedding_bytes.saturating_add(other.embedding_bytes);
        self.has_output |= other.has_output;
    }
}

/// What a GGUF header says about its model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Header {
    /// GGUF version, 2 or 3.
    pub version: u32,
    /// `general.architecture`; empty in the later files of a split model.
    pub architecture: String,
    /// `general.name`.
    pub name: Option<String>,
    /// Layers.
    pub block_count: u32,
    /// Tokens of context the model was made for.
    pub context_length: u32,
    /// Length of a hidden state.
    pub embedding_length: u32,
    /// Length of the widest feed-forward layer, over all experts used at once.
    pub feed_forward_length: u32,
    /// Attention heads, one number per layer.
    pub head_counts: Vec<u32>,
    /// Key and value heads, one number per layer.
    pub head_counts_kv: Vec<u32>,
    /// Length of one head's key.
    pub key_length: u32,
    /// Length of one head's value.
    pub value_length: u32,
    /// Rank of the compressed keys and values of multi-head latent attention.
    pub kv_lora_rank: Option<u32>,
    /// Dimensions that carry the position.
    pub rope_dimension_count: Option<u32>,
    /// Whether the compressed form is what the cache holds.
    pub compressed_kv: bool,
    /// Tokens that layers with a sliding window see.
    pub sliding_window: Option<u32>,
    /// Whether it has recurrent layers, whose state is not a row per token.
    pub recurrent: bool,
    /// Tokens in the vocabulary.
    pub vocabulary_tokens: u64,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// How token embeddings become one: 0 none, 1 mean, 2 first, 3 last, 4 rank.
    pub pooling_type: Option<u32>,
    /// `general.file_type`, llama.cpp's number for the quantisation.
    pub file_type: Option<u32>,
    /// Files the model is split over.
    pub split_count: u32,
    /// Which of them this is, from 0.
    pub split_index: u32,
    /// Tensors in this file.
    pub tensor_count: u64,
    /// Bytes of all tensors in this file.
    pub tensor_bytes: u64,
    /// What they add up to.
    pub totals: Totals,
    /// Routed experts of a layer; 0 without.
    pub expert_count: u32,
    /// How many of those a token uses.
    pub expert_used_count: u32,
    /// Bytes of the tensors that llama.cpp copies into another layout when it runs on this kind of processor.
    pub repacked_bytes: u64,
    /// Where tensor data begins.
    pub data_offset_bytes: u64,
    /// The length of the file.
    pub file_bytes: u64,
}

impl Header {
    /// Whether the model turns text into vectors and cannot generate.
    pub fn is_embedding_model(&self) -> bool {
        self.pooling_type.is_some_and(|kind| kind != 0)
    }

    /// Bytes that one token of one sequence takes in the cache, with 16-bit keys and values.
    pub fn kv_bytes_per_token(&self) -> u64 {
        const ELEMENT_BYTES: u64 = 2;
        if let (true, Some(rank)) = (self.compressed_kv, self.kv_lora_rank) {
            let row = u64::from(rank) + u64::from(self.rope_dimension_count.unwrap_or(0));
            return u64::from(self.block_count) * row * ELEMENT_BYTES;
        }
        let heads: u64 = self.head_counts_kv.iter().map(|heads| u64::from(*heads)).sum();
        let row = u64::from(self.key_length) + u64::from(self.value_length);
        heads.saturating_mul(row).saturating_mul(ELEMENT_BYTES)
    }

    /// Adds the tensors of another file of the same split model.
    pub fn add_split(&mut self, other: &Self) {
        self.tensor_count += other.tensor_count;
        self.tensor_bytes = self.tensor_bytes.saturating_add(other.tensor_bytes);
        self.totals.add(&other.totals);
        self.repacked_bytes = self.repacked_bytes.saturating_add(other.repacked_bytes);
        self.file_bytes = self.file_bytes.saturating_add(other.file_bytes);
    }
}

/// Reads the header of a file and checks it against the file's length. Symbolic links are followed: what a path may
/// point at is the caller's decision.
pub fn read_header_of_file(path: &Path) -> Result<Header, GgufError> {
    let read = |error: std::io::Error| GgufError::Read { message: format!("{}: {error}", path.display()) };
    let file = File::open(path).map_err(read)?;
    let metadata = file.metadata().map_err(read)?;
    if !metadata.is_file() {
        return Err(GgufError::Read { message: "it is not a regular file".into() });
    }
    read_header(file, metadata.len())
}

/// Reads the headers of all files of a model, the first one first, as one.
pub fn read_header_of_files<P: AsRef<Path>>(paths: &[P]) -> Result<Header, GgufError> {
    let Some((first, rest)) = paths.split_first() else {
        return Err(GgufError::Read { message: "no file is given".into() });
    };
    let mut header = read_header_of_file(first.as_ref())?;
    for path in rest {
        header.add_split(&read_header_of_file(path.as_ref())?);
    }
    if header.split_count as usize != paths.len() {
        return Err(metadata::invalid("split.count", "is not the number of files given; give all files of the model"));
    }
    Ok(header)
}

/// Reads a header from the beginning of a file of `file_bytes` bytes.
pub fn read_header(reader: impl Read, file_bytes: u64) -> Result<Header, GgufError> {
    let mut source = Source::new(reader, file_bytes);
    let first = source.peek(16)?;
    if first.len() < 4 || first[..4] != *b"GGUF" {
        return Err(GgufError::NotGguf { found: types::sniff(first) });
    }
    source.skip(4, "magic")?;
    let version = source.u32("version")?;
    if !(2..=3).contains(&version) {
        if (2..=3).contains(&version.swap_bytes()) {
            return Err(GgufError::NotGguf { found: "a big-endian GGUF file" });
        }
        return Err(GgufError::Version { version });
    }
    let tensor_count = source.u64("tensor count")?;
    let key_count = source.u64("metadata count")?;
    limit("tensors", tensor_count, TENSORS_MAX)?;
    limit("metadata keys", key_count, KEYS_MAX)?;
    let metadata = Metadata::read(&mut source, key_count)?;
    let mut header = metadata.header()?;
    header.version = version;
    header.tensor_count = tensor_count;
    header.file_bytes = file_bytes;
    tensors::read(&mut source, &mut header, metadata.alignment()?)?;
    Ok(header)
}

fn limit(what: &'static str, value: u64, limit: u64) -> Result<(), GgufError> {
    if value > limit { Err(GgufError::TooLarge { what, value, limit }) } else { Ok(()) }
}
