//! What paged KV gains over reserving the longest context for each sequence (vLLM, SOSP'23, arXiv 2309.06180, section 3).
//!
//! Reserved, a sequence of `average` tokens uses `average / reserved` of its place. Paged, it takes whole blocks: on average half
//! a block less one token is lost at its end, if lengths are spread evenly over a block.

use super::input::{Refused, at_least_one, product, refused};
use serde::Serialize;

/// What is reserved and what is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paging {
    /// Tokens that are reserved for each sequence.
    pub reserved_tokens: u64,
    /// Tokens that a sequence has.
    pub average_tokens: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Bytes of a token and bytes for all sequences, if sequences are to be counted.
    pub budget: Option<(u64, u64)>,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// The part of what is reserved that is used.
    pub utilisation: f64,
    /// The rest.
    pub waste: f64,
    /// Times as many sequences if nothing were lost.
    pub gain_ideal: f64,
    /// Tokens that a sequence of average length takes in whole blocks.
    pub paged_tokens: u64,
    /// Times as many sequences of average length.
    pub gain_paged: f64,
    /// Times as many if lengths are spread over a block.
    pub gain_paged_spread: f64,
    /// Sequences that fit with reservation.
    pub sequences_reserved: Option<u64>,
    /// Sequences that fit with blocks.
    pub sequences_paged: Option<u64>,
}

impl Paging {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let reserved = at_least_one("reserved-tokens", self.reserved_tokens)?;
        let average = at_least_one("average-tokens", self.average_tokens)?;
        let block = at_least_one("block-tokens", self.block_tokens)?;
        if average > reserved {
            return Err(refused(
                "average-tokens",
                format!("is {average}: it cannot be more than the {reserved} reserved"),
            ));
        }
        let paged_tokens = product("tokens", &[average.div_ceil(block), block])?;
        let fit = |tokens: u64| {
            let count = |(token_bytes, bytes): (u64, u64)| {
                Ok(bytes / product("bytes of a sequence", &[tokens, at_least_one("bytes-per-token", token_bytes)?])?)
            };
            self.budget.map(count).transpose()
        };
        let (reserved, average) = (reserved as f64, average as f64);
        Ok(Answer {
            utilisation: average / reserved,
            waste: 1.0 - average / reserved,
            gain_ideal: reserved / average,
            paged_tokens,
            gain_paged: reserved / paged_tokens as f64,
            gain_paged_spread: reserved / (average + (block as f64 - 1.0) / 2.0),
            sequences_reserved: fit(self.reserved_tokens)?,
            sequences_paged: fit(paged_tokens)?,
        })
    }
}
