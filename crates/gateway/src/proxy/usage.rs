//! What a replica counted for an answer, read from the answer as it passes by.

use memchr::memmem;
use serde::Deserialize;
use warmset_core::routing::Usage;

/// The end of an answer that is kept to look for what was counted.
const TAIL_BYTES: usize = 4 << 10;
/// The longest event that is held back to see whether it is for the caller.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// What was counted, in all dialects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counted {
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    pub(super) cached_tokens: Option<u64>,
}

impl Counted {
    pub(super) fn for_router(self) -> Usage {
        Usage { prompt_tokens: self.prompt_tokens, cached_tokens: self.cached_tokens }
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Written {
    prompt_tokens: Option<u64>,
    input_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    input_tokens_details: Option<Details>,
    /// Anthropic's count leaves these out of `input_tokens`.
    cache_read_input_tokens: Option<u64>,
}

/// The last bytes of an answer.
#[derive(Debug, Default)]
pub(super) struct Tail(Vec<u8>);

impl Tail {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let over = (self.0.len() + kept.len()).saturating_sub(TAIL_BYTES);
        self.0.drain(..over.min(self.0.len()));
        self.0.extend_from_slice(kept);
    }

    /// Whether this is the last event of a stream.
    pub(super) fn is_done(&self) -> bool {
        self.0.trim_ascii_end().ends_with(b"data: [DONE]")
    }

    /// Whether what came so far is whole events.
    pub(super) fn is_between_events(&self) -> bool {
        self.0.is_empty() || self.0.ends_with(b"\n\n") || self.0.ends_with(b"\r\n\r\n")
    }

    /// What was counted, if the end of the answer says so.
    pub(super) fn counted(&self) -> Option<Counted> {
        let mut places = memmem::rfind_iter(&self.0, b"\"usage\"");
        let written = places.find_map(|place| object_behind::<Written>(&self.0[place + b"\"usage\"".len()..]))?;
        let details = written.prompt_tokens_details.or(written.input_tokens_details);
        let read = written.cache_read_input_tokens;
        let cached_tokens = details.and_then(|details| details.cached_tokens).or(read).or_else(|| self.cache_n());
        let prompt =
            written.prompt_tokens.or(written.input_tokens.map(|tokens| tokens.saturating_add(read.unwrap_or(0))));
        Some(Counted {
            prompt_tokens: prompt?,
            completion_tokens: written.completion_tokens.or(written.output_tokens).unwrap_or(0),
            cached_tokens,
        })
    }

    /// llama-server's own count.
    fn cache_n(&self) -> Option<u64> {
        let name = b"\"cache_n\":";
        let digits = &self.0[memmem::rfind(&self.0, name)? + name.len()..];
        let text = std::str::from_utf8(&digits[..digits.len().min(24)]).ok()?.trim_start();
        text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())].parse().ok()
    }
}

/// Pieces of a stream, of which servers make one for each token.
pub(super) fn pieces_in(bytes: &[u8]) -> u64 {
    memmem::find_iter(bytes, b"data: {").count() as u64
}

fn object_behind<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    let colon = bytes.iter().position(|byte| !byte.is_ascii_whitespace())?;
    let rest = bytes[colon..].strip_prefix(b":")?;
    rest.trim_ascii_start().starts_with(b"{").then_some(())?;
    serde_json::Deserializer::from_slice(rest).into_iter::<T>().next()?.ok()
}

/// Takes the event with the usage, which only the gateway asked for, out of a stream.
#[derive(Debug, Default)]
pub(super) struct Events {
    pending: Vec<u8>,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Vec<&'a serde_json::value::RawValue>,
    usage: Option<serde::de::IgnoredAny>,
}

impl Events {
    /// Whole events of what came so far, without those that are not for the caller.
    pub(super) fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.pending.extend_from_slice(bytes);
        let mut out = Vec::with_capacity(self.pending.len());
        let mut from = 0;
        while let Some(length) = event_length(&self.pending[from..]) {
            let event = &self.pending[from..from + length];
            if !is_usage_alone(event) {
                out.extend_from_slice(event);
            }
            from += length;
        }
        self.pending.drain(..from);
        if self.pending.len() > EVENT_BYTES_MAX {
            out.append(&mut self.pending);
        }
        out
    }

    /// What is left at the end.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.pending)
    }
}

/// Bytes up to and with the empty line that ends an event.
fn event_length(bytes: &[u8]) -> Option<usize> {
    let (newline, carriage) = (memmem::find(bytes, b"\n\n"), memmem::find(bytes, b"\r\n\r\n"));
    match (newline, carriage) {
        (Some(newline), Some(carriage)) if carriage < newline => Some(carriage + 4),
        (Some(newline), _) => Some(newline + 2),
        (None, Some(carriage)) => Some(carriage + 4),
        (None, None) => None,
    }
}

fn is_usage_alone(event: &[u8]) -> bool {
    let Some(data) = event.strip_prefix(b"data:") else { return false };
    if memmem::find(data, b"\"usage\"").is_none() {
        return false;
    }
    serde_json::from_slice::<Chunk<'_>>(data.trim_ascii())
        .is_ok_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counted(text: &str) -> Option<Counted> {
        let mut tail = Tail::default();
        for piece in text.as_bytes().chunks(7) {
            tail.push(piece);
        }
        tail.counted()
    }

    #[test]
    fn counts_are_read_in_every_dialect() {
        let openai = r#"{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}"#;
        let all = Counted { prompt_tokens: 10, completion_tokens: 3, cached_tokens: Some(8) };
        assert_eq!(counted(openai), Some(all));
        assert_eq!(counted(&format!("data: {openai}\n\ndata: [DONE]\n\n")), Some(all));
        let anthropic = r#"{"usage":{"input_tokens":2,"cache_read_input_tokens":8,"output_tokens":3}}"#;
        assert_eq!(counted(anthropic), Some(all));
        let responses =
            r#"{"usage" : {"input_tokens":10,"output_tokens":3,"input_tokens_details":{"cached_tokens":8}}}"#;
        assert_eq!(counted(responses), Some(all));
        let llama = r#"{"usage":{"prompt_tokens":10,"completion_tokens":3},"timings":{"cache_n":8,"prompt_n":2}}"#;
        assert_eq!(counted(llama), Some(all));
        for none in ["", r#"{"usage":null}"#, r#"{"usage":"#, r#"{"usage":{"completion_tokens":1}}"#, r#""usage""#] {
            assert_eq!(counted(none), None, "{none}");
        }
    }

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\"\"}}],\"usage\":null}\n\n: beat\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}\r\n\r\ndata: [DONE]\n\n";

    proptest! {
        #[test]
        fn the_event_that_was_not_asked_for_is_taken_out_however_it_is_cut(cut in 1..200_usize) {
            let mut events = Events::default();
            let mut out: Vec<u8> = STREAM.as_bytes().chunks(cut).flat_map(|piece| events.pass(piece)).collect();
            out.extend(events.rest());
            let out = String::from_utf8(out).unwrap();
            prop_assert!(out.contains("delta") && out.contains(": beat") && out.ends_with("data: [DONE]\n\n"));
            prop_assert!(!out.contains("prompt_tokens"), "{}", out);
        }

        #[test]
        fn any_bytes_pass(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
            let mut events = Events::default();
            let mut out = events.pass(&bytes);
            out.extend(events.rest());
            prop_assert_eq!(out, bytes.clone());
            let mut tail = Tail::default();
            tail.push(&bytes);
            let _ = tail.counted();
        }
    }
}
