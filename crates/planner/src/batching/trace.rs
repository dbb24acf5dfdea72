//! Recorded requests with the lengths of their prompts and answers.
//!
//! Mooncake's form (Qin et al., FAST 2025), with the blocks of each prompt: read by [`crate::cache::trace`]. Azure's of
//! language models (AzurePublicDataset, 2023 and later; Patel et al., ISCA 2024):
//! `TIMESTAMP,ContextTokens,GeneratedTokens`.

use super::{
    cost::Picoseconds,
    workload::{REQUESTS_MAX, TOKENS_MAX, Workload},
};
use crate::cache::trace::{Trace, TraceError as LinesError};
use serde::Deserialize;
use warmset_core::Instant;

/// Tokens of a block in Mooncake's traces.
pub const MOONCAKE_BLOCK_TOKENS: u32 = 512;
const PICOSECONDS_PER_NANOSECOND: u64 = 1000;

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Lines of JSON that are no requests.
    #[error(transparent)]
    Lines(#[from] LinesError),
    /// Parts of prompts, as in RAGPulse.
    #[error(
        "the trace does not say how many tokens the parts of a prompt have: give one of Mooncake's or Azure's form"
    )]
    Parts,
    /// A table that is none.
    #[error("the trace is no table with TIMESTAMP, ContextTokens and GeneratedTokens")]
    Table(#[from] csv::Error),
    /// A time that is none.
    #[error("row {row} of the trace: {text:?} is no time")]
    Time {
        /// Which, from 1.
        row: usize,
        /// What stands there.
        text: String,
    },
    /// Lengths that are not believed.
    #[error("request {0} of the trace has more than {TOKENS_MAX} tokens")]
    Tokens(usize),
    /// Nothing is in it.
    #[error("the trace has no requests")]
    Empty,
    /// More than a run can hold.
    #[error("the trace has more than {REQUESTS_MAX} requests: take a part of it")]
    TooLong,
}

/// Reads a text in one of the two forms; the first request comes at the beginning.
pub fn read(text: &str) -> Result<Workload, TraceError> {
    if text.trim_start().starts_with('{') { read_lines(text) } else { read_table(text) }
}

fn read_lines(text: &str) -> Result<Workload, TraceError> {
    let trace = Trace::read(text, MOONCAKE_BLOCK_TOKENS)?;
    let chunk_tokens = trace.block_tokens().ok_or(TraceError::Parts)?;
    let mut workload = Workload::new(chunk_tokens);
    let mut begins = None;
    for lookup in trace.lookups() {
        let begins = *begins.get_or_insert(lookup.at);
        let input = u32::try_from(trace.input_tokens(lookup.number)).unwrap_or(u32::MAX);
        let tokens = lengths(lookup.number as usize, input, trace.output_tokens(lookup.number))?;
        let chunks = lookup.blocks[..lookup.full_blocks].iter().copied();
        workload.push(since(lookup.at, begins), tokens, chunks);
    }
    Ok(workload)
}

#[derive(Debug, Deserialize)]
struct Row<'a> {
    #[serde(rename = "TIMESTAMP")]
    timestamp: &'a str,
    #[serde(rename = "ContextTokens")]
    context_tokens: u32,
    #[serde(rename = "GeneratedTokens")]
    generated_tokens: u32,
}

fn read_table(text: &str) -> Result<Workload, TraceError> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let head = reader.headers()?.clone();
    let mut record = csv::StringRecord::new();
    let mut requests = Vec::new();
    while reader.read_record(&mut record)? {
        let number = requests.len();
        let row: Row<'_> = record.deserialize(Some(&head))?;
        let tokens = lengths(number, row.context_tokens, row.generated_tokens)?;
        requests.push((instant(row.timestamp, number + 1)?, tokens));
        if requests.len() > REQUESTS_MAX {
            return Err(TraceError::TooLong);
        }
    }
    requests.sort_by_key(|(at, _)| *at);
    let begins = requests.first().ok_or(TraceError::Empty)?.0;
    let mut workload = Workload::new(0);
    for (at, tokens) in requests {
        workload.push(since(at, begins), tokens, None);
    }
    Ok(workload)
}

/// A prompt that has no token and an answer that has none are one token long: nothing is computed otherwise.
fn lengths(number: usize, prompt: u32, output: u32) -> Result<(u32, u32), TraceError> {
    if prompt.max(output) > TOKENS_MAX {
        return Err(TraceError::Tokens(number + 1));
    }
    Ok((prompt.max(1), output.max(1)))
}

/// Nanoseconds since 1970, by a calendar without leap seconds or zones.
fn instant(text: &str, row: usize) -> Result<Instant, TraceError> {
    let wrong = || TraceError::Time { row, text: text.to_owned() };
    // Later traces end with a zone, which is the same in every row.
    let time: jiff::civil::DateTime = text.trim().trim_end_matches("+00:00").parse().map_err(|_| wrong())?;
    let since = time.duration_since(jiff::civil::date(1970, 1, 1).at(0, 0, 0, 0));
    u64::try_from(since.as_nanos()).map(Instant).map_err(|_| wrong())
}

fn since(at: Instant, begins: Instant) -> Picoseconds {
    at.0.saturating_sub(begins.0).saturating_mul(PICOSECONDS_PER_NANOSECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let mooncake = r#"{"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 2500, "input_length": 600, "output_length": 0, "hash_ids": [7, 10]}"#;
        let workload = read(mooncake).unwrap();
        let (first, second) = (workload.request(0), workload.request(1));
        assert_eq!((first.arrives, first.prompt_tokens, first.output_tokens), (0, 1100, 5));
        assert_eq!((second.arrives, second.output_tokens), (1_000_000_000_000, 1));
        assert_eq!((workload.chunks(0).len(), workload.chunks(1).len()), (2, 1));
        assert_eq!(workload.chunks(0)[0], workload.chunks(1)[0]);

        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n\
                     2023-11-17 00:00:00.7500000,396,109\n";
        let workload = read(azure).unwrap();
        assert_eq!(workload.request(1).arrives, 1_250_000_000_000);
        assert_eq!((workload.request(1).prompt_tokens, workload.request(1).output_tokens), (396, 109));
        assert_eq!(workload.chunk_tokens(), 0);
        let zoned = azure.replace("0000,", "0000+00:00,");
        assert_eq!(read(&zoned).unwrap(), workload);
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        let pulse = r#"{"timestamp": "82", "input_length": 300, "hash_ids": {"sys_prompt": [1], "passages_ids": [2],
            "history": [], "web_search": [], "user_input": [3]}}"#;
        for (text, words) in [
            ("", "no requests"),
            ("a,b\n1,2\n", "is no table"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "row 1"),
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,20000000\n", "request 1"),
            ("{\"timestamp\": 1}", "line 1"),
            (&pulse.replace('\n', " "), "parts of a prompt"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
