//! Requests with the tokens of their prompts and answers, made up from a seed or taken from a trace.

use super::cost::{Picoseconds, picoseconds};
use crate::cache::trace::BlockId;
use serde::{Deserialize, Serialize};

/// The most requests of one run.
pub const REQUESTS_MAX: usize = 20_000_000;
/// Tokens of a prompt or an answer.
pub const TOKENS_MAX: u32 = 1 << 24;

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// When it comes.
    pub arrives: Picoseconds,
    /// Tokens of its prompt, at least one.
    pub prompt_tokens: u32,
    /// Tokens of its answer, at least one.
    pub output_tokens: u32,
    first_chunk: u32,
    full_chunks: u32,
}

/// Requests in the order in which they come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Workload {
    requests: Vec<Request>,
    chunks: Vec<BlockId>,
    /// Tokens of a chunk; 0 where prompts are not known by their content.
    chunk_tokens: u32,
}

/// How requests are made up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Demand {
    /// How many.
    pub requests: usize,
    /// Tokens of a prompt, on average.
    pub prompt_tokens: u32,
    /// Tokens of an answer, on average.
    pub output_tokens: u32,
    /// How lengths lie around these.
    #[serde(default)]
    pub lengths: Lengths,
    /// How moments lie around the rate.
    #[serde(default)]
    pub arrivals: Arrivals,
    /// Tokens that prompts have in common with others, as a part of their length.
    #[serde(default)]
    pub shared_tokens: u32,
    /// How many different beginnings there are of that kind.
    #[serde(default)]
    pub shared_prompts: u32,
}

/// How lengths lie around their mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// All are the mean.
    #[default]
    Fixed,
    /// Exponentially, rounded up.
    Exponential,
}

/// How requests follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// At random moments: exponential gaps.
    #[default]
    Poisson,
    /// With the same gap each.
    Even,
}

fn exponential(mean: f64, random: &mut fastrand::Rng) -> f64 {
    -libm::log(1.0 - random.f64()) * mean
}

impl Demand {
    /// The requests, so many a second.
    pub fn workload(&self, requests_per_second: f64, seed: u64) -> Workload {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut workload = Workload { chunk_tokens: self.shared_tokens, ..Workload::default() };
        let (mut at, gap) = (0.0, 1.0 / requests_per_second);
        for _ in 0..self.requests {
            at += match self.arrivals {
                Arrivals::Poisson => exponential(gap, &mut random),
                Arrivals::Even => gap,
            };
            let prompt = self.length(self.prompt_tokens, &mut random).max(self.shared_tokens);
            let output = self.length(self.output_tokens, &mut random);
            let shared = (self.shared_prompts > 0).then(|| random.u32(..self.shared_prompts));
            workload.push(picoseconds(at), (prompt, output), shared);
        }
        workload
    }

    fn length(&self, mean: u32, random: &mut fastrand::Rng) -> u32 {
        match self.lengths {
            Lengths::Fixed => mean,
            Lengths::Exponential => (exponential(f64::from(mean), random).ceil() as u32).clamp(1, TOKENS_MAX),
        }
    }

    /// What makes no sense of it, if anything.
    pub fn problem(&self) -> Option<&'static str> {
        let tokens = |count: u32| (1..=TOKENS_MAX).contains(&count);
        let rules = [
            ((1..=REQUESTS_MAX).contains(&self.requests), "requests must be between 1 and 20000000"),
            (tokens(self.prompt_tokens), "prompt_tokens must be between 1 and 16777216"),
            (tokens(self.output_tokens), "output_tokens must be between 1 and 16777216"),
            (self.shared_tokens <= self.prompt_tokens, "shared_tokens must be at most prompt_tokens"),
            (
                (self.shared_tokens > 0) == (self.shared_prompts > 0),
                "shared_tokens and shared_prompts must both be there or both be missing",
            ),
        ];
        rules.iter().find(|(holds, _)| !holds).map(|(_, problem)| *problem)
    }
}

impl Workload {
    /// No requests yet, of prompts whose content is known in chunks of so many tokens, or not at all (0).
    pub fn new(chunk_tokens: u32) -> Self {
        Self { chunk_tokens, ..Self::default() }
    }

    /// One more request, not before the last one: tokens of prompt and answer, and what the whole chunks of its prompt
    /// are, each with all before it.
    pub fn push(
        &mut self,
        arrives: Picoseconds,
        (prompt_tokens, output_tokens): (u32, u32),
        chunks: impl IntoIterator<Item = BlockId>,
    ) {
        let first_chunk = self.chunks.len() as u32;
        self.chunks.extend(chunks);
        let full_chunks = self.chunks.len() as u32 - first_chunk;
        self.requests.push(Request { arrives, prompt_tokens, output_tokens, first_chunk, full_chunks });
    }

    /// The requests.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// One of them.
    pub fn request(&self, number: u32) -> &Request {
        &self.requests[number as usize]
    }

    /// The whole chunks of a prompt.
    pub fn chunks(&self, number: u32) -> &[BlockId] {
        let request = self.request(number);
        let first = request.first_chunk as usize;
        &self.chunks[first..first + request.full_chunks as usize]
    }

    /// Tokens of a chunk; 0 where prompts are not known by their content.
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// When the last one comes.
    pub fn ends(&self) -> Picoseconds {
        self.requests.last().map_or(0, |request| request.arrives)
    }

    /// The same requests, all at the beginning: as fast as it goes.
    pub fn at_once(&self) -> Self {
        let mut workload = self.clone();
        for request in &mut workload.requests {
            request.arrives = 0;
        }
        workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand() -> Demand {
        Demand {
            requests: 20_000,
            prompt_tokens: 512,
            output_tokens: 128,
            lengths: Lengths::Exponential,
            arrivals: Arrivals::Poisson,
            shared_tokens: 0,
            shared_prompts: 0,
        }
    }

    #[test]
    fn what_is_made_up_has_the_wanted_means_and_depends_on_its_seed_alone() {
        let workload = demand().workload(80.0, 5);
        assert_eq!(workload, demand().workload(80.0, 5));
        assert_ne!(workload, demand().workload(80.0, 6));
        let mean = |of: fn(&Request) -> u32| {
            workload.requests().iter().map(|request| f64::from(of(request))).sum::<f64>() / 20_000.0
        };
        let (prompt, output) = (mean(|request| request.prompt_tokens), mean(|request| request.output_tokens));
        assert!((500.0..525.0).contains(&prompt) && (124.0..132.0).contains(&output), "{prompt} {output}");
        let rate = 20_000.0 / super::super::cost::seconds(workload.ends());
        assert!((78.0..82.0).contains(&rate), "{rate}");
        assert!(workload.requests().is_sorted_by_key(|request| request.arrives));
    }

    #[test]
    fn nonsense_is_named() {
        for (wrong, word) in [
            (Demand { requests: 0, ..demand() }, "requests"),
            (Demand { prompt_tokens: 0, ..demand() }, "prompt_tokens"),
            (Demand { output_tokens: u32::MAX, ..demand() }, "output_tokens"),
            (Demand { shared_tokens: 513, ..demand() }, "shared_tokens"),
            (Demand { shared_prompts: 3, ..demand() }, "shared_prompts"),
        ] {
            assert!(wrong.problem().is_some_and(|problem| problem.contains(word)), "{wrong:?}");
        }
        assert_eq!(demand().problem(), None);
    }
}
