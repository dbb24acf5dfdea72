//! What became of requests, and what engines did for them.

use super::cost::{PICOSECONDS_PER_SECOND, Picoseconds};
use hdrhistogram::Histogram;

/// It has not happened.
pub const NOT_YET: Picoseconds = Picoseconds::MAX;
/// Gaps between tokens are told apart to one part in a thousand, from a microsecond to an hour.
const GAP_DIGITS: u8 = 3;
const GAP_MIN: u64 = 1_000_000;
const GAP_MAX: u64 = 3600 * PICOSECONDS_PER_SECOND as u64;

/// What became of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// When an engine first took it up.
    pub admitted: Picoseconds,
    /// When its first token was there.
    pub first_token: Picoseconds,
    /// When its last one was.
    pub finished: Picoseconds,
    /// It is larger than any engine's memory.
    pub refused: bool,
}

/// What became of all of them.
#[derive(Debug, Clone)]
pub struct Outcomes {
    /// Of each request.
    pub requests: Vec<Outcome>,
    /// Times between two tokens of a request.
    gaps: Histogram<u64>,
    /// How often a running request had to begin again since there was no memory.
    pub preemptions: u64,
    /// Tokens of prompts that were looked up when a request was first taken up, and those that were there.
    pub looked_up_tokens: u64,
    /// Of these, tokens that were there.
    pub found_tokens: u64,
    /// The largest share of an engine's memory that was in use.
    pub memory_max_share: f64,
    /// Share in use, by the time of steps, and the time of steps.
    memory_share_time: f64,
    step_time: f64,
    /// Steps of all engines.
    pub steps: u64,
    /// When the last thing happened.
    pub ended: Picoseconds,
}

impl Outcomes {
    /// Of so many requests; none has happened yet.
    pub fn new(requests: usize) -> Self {
        let none = Outcome { admitted: NOT_YET, first_token: NOT_YET, finished: NOT_YET, refused: false };
        let gaps = Histogram::new_with_bounds(GAP_MIN, GAP_MAX, GAP_DIGITS).expect("a histogram can have these bounds");
        Self {
            requests: vec![none; requests],
            gaps,
            preemptions: 0,
            looked_up_tokens: 0,
            found_tokens: 0,
            memory_max_share: 0.0,
            memory_share_time: 0.0,
            step_time: 0.0,
            steps: 0,
            ended: 0,
        }
    }

    /// One of them.
    pub fn request(&mut self, number: u32) -> &mut Outcome {
        &mut self.requests[number as usize]
    }

    /// Times between tokens.
    pub fn gaps(&self) -> &Histogram<u64> {
        &self.gaps
    }

    /// So many sequences waited this long for their next token.
    pub fn gap(&mut self, time: Picoseconds, sequences: u64) {
        if sequences > 0 {
            self.gaps.saturating_record_n(time, sequences);
        }
    }

    /// So many steps, the first of this length and each longer than the one before by the same, each with a token for
    /// so many.
    pub fn gaps_alike(&mut self, mut first: Picoseconds, growth: Picoseconds, mut steps: u64, sequences: u64) {
        while steps > 0 {
            // Those that the histogram does not tell apart are recorded together.
            let alike = match self.gaps.highest_equivalent(first).saturating_sub(first).checked_div(growth) {
                Some(more) => (more + 1).min(steps),
                None => steps,
            };
            self.gap(first, alike * sequences);
            first += growth * alike;
            steps -= alike;
        }
    }

    /// An engine took so long for steps in which this share of its memory was in use.
    pub fn memory(&mut self, time: Picoseconds, share: f64) {
        self.memory_max_share = self.memory_max_share.max(share);
        self.memory_share_time += share * time as f64;
        self.step_time += time as f64;
    }

    /// Share of the memory in use, over the time in which engines worked.
    pub fn memory_mean_share(&self) -> f64 {
        self.memory_share_time / self.step_time.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_of_steps_alike_are_those_of_each_of_them() {
        let (mut one, mut all) = (Outcomes::new(0), Outcomes::new(0));
        for (first, growth, steps) in [(7_000_000_000, 900_000, 5000), (1, 0, 10), (GAP_MAX - 5, 2, 10)] {
            all.gaps_alike(first, growth, steps, 3);
            for step in 0..steps {
                one.gap(first + growth * step, 3);
            }
        }
        assert_eq!(one.gaps(), all.gaps());
        assert_eq!(all.gaps().len(), 3 * 5020);
    }
}
