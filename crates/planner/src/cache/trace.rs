//! Requests as chains of blocks, from a recorded trace.
//!
//! Two formats are read, line by line JSON. Mooncake's (Qin et al., FAST 2025): `timestamp` in milliseconds,
//! `input_length` in tokens, `hash_ids` with one number for each block of 512 tokens and all before it. RAGPulse's (Wang et
//! al., arXiv 2511.12979): `timestamp` in seconds, `hash_ids` with lists of numbers for the parts of the prompt; how many
//! tokens each has stands elsewhere, so all of a request's count alike. Both may say how long the answer was: `output_length`.

use super::Lookup;
use crate::demand::Demand;
use serde::Deserialize;
use std::{collections::BTreeMap, time::Duration};
use warmset_core::Instant;

/// The most requests of one trace.
const REQUESTS_MAX: usize = 10_000_000;
/// The most blocks of all requests of one trace.
const BLOCKS_MAX: usize = 100_000_000;

/// A block by number: the same content behind the same blocks.
pub type BlockId = u32;
/// No block: what the first one hangs on.
pub const NO_BLOCK: BlockId = u32::MAX;

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line is no request.
    #[error("line {line} of the trace is no request of Mooncake's or RAGPulse's form")]
    Line {
        /// Where, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A time that is none.
    #[error("line {0} of the trace: its timestamp is no time")]
    Time(usize),
    /// Another block size.
    #[error("line {line} of the trace: {tokens} tokens are not {blocks} blocks of {block_tokens}")]
    BlockSize {
        /// Where, from 1.
        line: usize,
        /// Tokens of the prompt.
        tokens: u32,
        /// Blocks that are named.
        blocks: usize,
        /// Tokens of one.
        block_tokens: u32,
    },
    /// Nothing is in it.
    #[error("the trace has no requests with blocks")]
    Empty,
    /// More than a run can hold.
    #[error("the trace has more than {REQUESTS_MAX} requests or {BLOCKS_MAX} blocks: take a part of it")]
    TooLong,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    at: Instant,
    input_tokens: u32,
    output_tokens: u32,
    full_blocks: u32,
    first_use: usize,
    end_use: usize,
}

/// Requests in the order of their arrival.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    requests: Vec<Request>,
    uses: Vec<BlockId>,
    parents: Vec<BlockId>,
    depths: Vec<u32>,
    /// Tokens of a block; none where a request's blocks share its tokens evenly.
    block_tokens: Option<u32>,
}

/// Requests that are not in their order yet.
#[derive(Debug, Default)]
pub struct Builder {
    trace: Trace,
    known: BTreeMap<(BlockId, u64), BlockId>,
}

impl Builder {
    /// Requests whose blocks have so many tokens, or share a prompt's tokens evenly.
    pub fn new(block_tokens: Option<u32>) -> Self {
        Self { trace: Trace { block_tokens, ..Trace::default() }, ..Self::default() }
    }

    /// One more request, with the tokens of its prompt and of its answer; contents are told apart by number.
    pub fn push(
        &mut self,
        at: Instant,
        (input_tokens, output_tokens): (u32, u32),
        contents: impl IntoIterator<Item = u64>,
    ) -> Result<(), TraceError> {
        let first_use = self.trace.uses.len();
        let mut parent = NO_BLOCK;
        for (depth, content) in (0..).zip(contents) {
            let next = self.trace.parents.len() as BlockId;
            let block = *self.known.entry((parent, content)).or_insert(next);
            if block == next {
                self.trace.parents.push(parent);
                self.trace.depths.push(depth);
            }
            self.trace.uses.push(block);
            parent = block;
        }
        let end_use = self.trace.uses.len();
        if end_use > BLOCKS_MAX || self.trace.requests.len() >= REQUESTS_MAX {
            return Err(TraceError::TooLong);
        }
        let blocks = (end_use - first_use) as u32;
        let full_blocks = self.trace.block_tokens.map_or(blocks, |tokens| (input_tokens / tokens).min(blocks));
        self.trace.requests.push(Request { at, input_tokens, output_tokens, full_blocks, first_use, end_use });
        Ok(())
    }

    /// All of them in the order of their arrival.
    pub fn finish(mut self) -> Result<Trace, TraceError> {
        if self.trace.uses.is_empty() {
            return Err(TraceError::Empty);
        }
        self.trace.requests.sort_by_key(|request| request.at);
        Ok(self.trace)
    }
}

impl Trace {
    /// Requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Different blocks.
    pub fn blocks(&self) -> usize {
        self.parents.len()
    }

    /// Uses of blocks by all requests.
    pub fn uses(&self) -> usize {
        self.uses.len()
    }

    /// The block before this one.
    pub fn parent(&self, block: BlockId) -> BlockId {
        self.parents[block as usize]
    }

    /// Blocks before this one.
    pub fn depth(&self, block: BlockId) -> u32 {
        self.depths[block as usize]
    }

    /// Tokens of a request.
    pub fn input_tokens(&self, number: u32) -> u64 {
        u64::from(self.requests[number as usize].input_tokens)
    }

    /// Tokens of its answer; none where the trace does not say.
    pub fn output_tokens(&self, number: u32) -> u32 {
        self.requests[number as usize].output_tokens
    }

    /// Tokens of a block, unless a request's blocks share its tokens evenly.
    pub fn block_tokens(&self) -> Option<u32> {
        self.block_tokens
    }

    /// Tokens of a request's first blocks.
    pub fn tokens_of(&self, number: u32, blocks: usize) -> u64 {
        let request = &self.requests[number as usize];
        let (input, blocks) = (u64::from(request.input_tokens), blocks as u64);
        match self.block_tokens {
            Some(tokens) => (blocks * u64::from(tokens)).min(input),
            None => input * blocks / ((request.end_use - request.first_use) as u64).max(1),
        }
    }

    /// How many blocks so many tokens are; where blocks differ, by their mean.
    pub fn blocks_of(&self, tokens: u64) -> usize {
        let per_block = self.block_tokens.map_or_else(
            || {
                let all: u64 = self.requests.iter().map(|request| u64::from(request.input_tokens)).sum();
                (all / self.uses.len().max(1) as u64).max(1)
            },
            u64::from,
        );
        (tokens / per_block) as usize
    }

    /// Every request as a rule sees it.
    pub fn lookups(&self) -> impl Iterator<Item = Lookup<'_>> {
        (0..).zip(&self.requests).map(|(number, request)| Lookup {
            number,
            at: request.at,
            blocks: &self.uses[request.first_use..request.end_use],
            full_blocks: request.full_blocks as usize,
            first_use: request.first_use,
        })
    }

    /// Reads a text in one of the two formats.
    pub fn read(text: &str, block_tokens: u32) -> Result<Self, TraceError> {
        let lines = || text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
        let parts = lines().next().map(|(line, number)| parse(line, number)).transpose()?;
        let is_parts = parts.is_some_and(|line| matches!(line.hash_ids, HashIds::Parts(_)));
        let mut builder = Builder::new((!is_parts).then_some(block_tokens));
        for (line, number) in lines() {
            let line = parse(line, number)?;
            let at = line.timestamp.at(number)?;
            let tokens = (line.input_length, line.output_length);
            match line.hash_ids {
                HashIds::Prefixes(ids) => {
                    if ids.len() != line.input_length.div_ceil(block_tokens) as usize {
                        let (tokens, blocks) = (line.input_length, ids.len());
                        return Err(TraceError::BlockSize { line: number, tokens, blocks, block_tokens });
                    }
                    builder.push(at, tokens, ids)?;
                }
                HashIds::Parts(parts) => builder.push(at, tokens, parts.in_order())?,
            }
        }
        builder.finish()
    }

    /// Models as blocks of one token that hang on nothing: which of them stay is the same question.
    pub fn of_models(demand: &Demand) -> Result<Self, TraceError> {
        let mut builder = Builder::new(Some(1));
        for arrival in &demand.arrivals {
            builder.push(arrival.at, (1, 0), [arrival.model as u64])?;
        }
        builder.finish()
    }
}

fn parse(line: &str, number: usize) -> Result<Line, TraceError> {
    serde_json::from_str(line).map_err(|source| TraceError::Line { line: number, source })
}

#[derive(Debug, Deserialize)]
struct Line {
    timestamp: Timestamp,
    input_length: u32,
    #[serde(default)]
    output_length: u32,
    hash_ids: HashIds,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Timestamp {
    Milliseconds(f64),
    Seconds(String),
}

impl Timestamp {
    fn at(&self, line: usize) -> Result<Instant, TraceError> {
        let seconds = match self {
            Self::Milliseconds(milliseconds) => Some(milliseconds / 1000.0),
            Self::Seconds(text) => text.parse().ok(),
        };
        let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        duration.map(Instant::after).ok_or(TraceError::Time(line))
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum HashIds {
    Prefixes(Vec<u64>),
    Parts(Parts),
}

/// In the order in which they stand in a prompt.
#[derive(Debug, Deserialize)]
struct Parts {
    sys_prompt: Vec<u64>,
    passages_ids: Vec<u64>,
    history: Vec<u64>,
    web_search: Vec<u64>,
    user_input: Vec<u64>,
}

impl Parts {
    fn in_order(self) -> impl Iterator<Item = u64> {
        [self.sys_prompt, self.passages_ids, self.history, self.web_search, self.user_input].into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_are_read() {
        let mooncake = r#"{"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}

{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [7, 10]}"#;
        let trace = Trace::read(mooncake, 512).expect("it is well formed");
        assert_eq!((trace.len(), trace.blocks(), trace.uses()), (2, 4, 5));
        let first = trace.lookups().next().expect("there are two");
        assert_eq!((trace.block_tokens(), trace.output_tokens(first.number)), (Some(512), 5));
        assert_eq!((first.at, first.full_blocks), (Instant::after(Duration::from_millis(500)), 1));
        assert_eq!((trace.tokens_of(0, 1), trace.tokens_of(0, 2)), (512, 600));
        let pulse = r#"{"timestamp": "82", "input_length": 300, "hash_ids":
            {"sys_prompt": [1], "passages_ids": [2], "history": [], "web_search": [], "user_input": [3]}}"#;
        let trace = Trace::read(&pulse.replace('\n', " "), 512).expect("it is well formed");
        assert_eq!((trace.blocks(), trace.tokens_of(0, 2), trace.blocks_of(1000)), (3, 200, 10));
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        for (text, words) in [
            ("", "no requests"),
            ("time,tokens", "line 1"),
            ("{\"timestamp\": -1, \"input_length\": 5, \"hash_ids\": [1]}", "no time"),
            ("\n{\"timestamp\": 1, \"input_length\": 513, \"hash_ids\": [1]}", "line 2 of the trace: 513 tokens"),
        ] {
            let error = Trace::read(text, 512).expect_err("it is no trace").to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
