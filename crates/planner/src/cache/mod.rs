//! Which blocks of KV stay: rules side by side on the same requests and the same room.
//!
//! A request is a chain of blocks. Of the blocks that are there, those from the first on are found; the others are of no
//! use behind a gap. Each rule is one module behind [`Policy`]; those that lose stay as what the one that serves is
//! measured against. Nothing takes time here: what was computed is there for the next request. Modules are declared in
//! reading order.

pub mod trace;

mod by_rank;
mod gdsf;
mod hybrid_histogram;
mod keep_alive;
mod lfu;
mod lru;
mod optimum;
mod s3_fifo;
mod warmset;

pub mod page;
pub mod plan;
pub mod sessions;

#[cfg(test)]
mod tests;

use serde::Serialize;
use trace::{BlockId, Trace};
use warmset_core::Instant;

/// One request, as a rule sees it.
#[derive(Debug, Clone, Copy)]
pub struct Lookup<'a> {
    /// Its place among the requests.
    pub number: u32,
    /// When it comes.
    pub at: Instant,
    /// The chain, from the beginning of its prompt.
    pub blocks: &'a [BlockId],
    /// How many of them are filled: the last one may not be.
    pub full_blocks: usize,
    /// The place of its first block among those of all requests.
    pub first_use: usize,
}

/// A way to decide which blocks stay.
pub trait Policy {
    /// How many blocks of a request, from the first on, are there. Then all of them are used.
    fn serve(&mut self, request: &Lookup<'_>) -> usize;
}

/// The rules by name, and what each is made with: a trace and how many blocks there is room for.
pub const POLICIES: [(&str, BuildPolicy); 8] = [
    ("warmset", |trace, blocks| Box::new(warmset::Warmset::new(trace, blocks))),
    ("lru", |trace, blocks| Box::new(lru::new(trace, blocks))),
    ("lfu", |trace, blocks| Box::new(lfu::new(trace, blocks))),
    ("s3-fifo", |trace, blocks| Box::new(s3_fifo::S3Fifo::new(trace, blocks))),
    ("gdsf", |trace, blocks| Box::new(gdsf::new(trace, blocks))),
    ("keep-alive", |trace, blocks| Box::new(keep_alive::new(trace, blocks))),
    ("hybrid-histogram", |trace, blocks| Box::new(hybrid_histogram::new(trace, blocks))),
    (OPTIMUM, |trace, blocks| Box::new(optimum::new(trace, blocks))),
];
/// The rule that others are compared with.
pub const LRU: &str = "lru";
/// The rule that knows the future.
pub const OPTIMUM: &str = "optimum";

/// Makes a rule.
pub type BuildPolicy = for<'a> fn(&'a Trace, usize) -> Box<dyn Policy + 'a>;

/// Tokens of requests, and of those the ones that were there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Hits {
    /// Tokens of all prompts.
    pub input_tokens: u64,
    /// Of these, tokens of blocks that were there.
    pub hit_tokens: u64,
}

impl Hits {
    /// Share of tokens that were there.
    pub fn share(&self) -> f64 {
        self.hit_tokens as f64 / self.input_tokens.max(1) as f64
    }
}

/// A replay, in two halves by the number of requests: what is tuned on one is reported on the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replay {
    /// Of the first half of the requests.
    pub first_half: Hits,
    /// Of the second.
    pub second_half: Hits,
}

impl Replay {
    /// Of both halves.
    pub fn all(&self) -> Hits {
        Hits {
            input_tokens: self.first_half.input_tokens + self.second_half.input_tokens,
            hit_tokens: self.first_half.hit_tokens + self.second_half.hit_tokens,
        }
    }
}

/// Replays a trace under a rule.
pub fn replay(trace: &Trace, policy: &mut dyn Policy) -> Replay {
    let mut replay = Replay::default();
    for request in trace.lookups() {
        let found = policy.serve(&request);
        let first = (request.number as usize) < trace.len() / 2;
        let half = if first { &mut replay.first_half } else { &mut replay.second_half };
        half.input_tokens += trace.input_tokens(request.number);
        half.hit_tokens += trace.tokens_of(request.number, found);
    }
    replay
}
