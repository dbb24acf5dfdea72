//! Versions of a model coming and going: what a new one must answer before callers get it, and how it takes over.
#![expect(missing_docs, reason = "the fields of enums say by name what they are")]

use crate::{ids::Digest, memory::Bytes, worker::Rejection};
use alloc::{string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// Tokens a canary may ask for.
pub const CANARY_TOKENS_MAX: u32 = 256;
/// Bytes a canary's prompt or expected text may have.
pub const CANARY_TEXT_BYTES_MAX: usize = 16 << 10;

/// A question whose answer shows that a model is the one that was approved: asked after a load, before callers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    /// What is asked, greedily: one user's message where the model has a chat template, else text to continue.
    pub prompt: String,
    /// Tokens to generate, at most [`CANARY_TOKENS_MAX`].
    pub max_tokens: u32,
    /// What must come.
    pub expected: Expected,
    /// The least score that passes, 0 to 1.
    pub score_min: f64,
    /// The longest the answer may take.
    pub latency_max_seconds: f64,
    /// A person gave it: the versions that follow must pass it too. Otherwise it is what a measurement recorded.
    pub given: bool,
}

/// What a canary must be answered with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expected {
    /// Scores 1 where it is contained, else by how alike the whole answer is.
    Text(String),
    /// Scores by its cosine with the answer.
    Embedding(Vec<f32>),
}

/// How a canary went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CanaryScore {
    pub score: f64,
    pub seconds: f64,
}

/// Why a canary failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CanaryFailure {
    /// The answer is not what was approved.
    Score { score: f64, score_min: f64 },
    /// The answer took too long.
    Latency { seconds: f64, latency_max_seconds: f64 },
}

impl core::fmt::Display for CanaryFailure {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Score { score, score_min } => write!(
                formatter,
                "the canary scored {score:.2} and {score_min:.2} is needed: the model does not answer what is expected \
                 of it"
            ),
            Self::Latency { seconds, latency_max_seconds } => write!(
                formatter,
                "the canary took {seconds:.2} s and may take {latency_max_seconds:.2} s: the machine is busy, or slower \
                 than the one it was recorded on"
            ),
        }
    }
}

impl Canary {
    /// What is wrong with it, if anything.
    pub fn check(&self) -> Result<(), &'static str> {
        let expected_bytes = match &self.expected {
            Expected::Text(text) => text.len(),
            Expected::Embedding(vector) => vector.len(),
        };
        if self.prompt.is_empty() || self.prompt.len() > CANARY_TEXT_BYTES_MAX {
            return Err("the prompt of a canary must have between 1 and 16384 bytes");
        }
        if expected_bytes == 0 || expected_bytes > CANARY_TEXT_BYTES_MAX {
            return Err("what a canary expects must have between 1 and 16384 bytes");
        }
        if !(1..=CANARY_TOKENS_MAX).contains(&self.max_tokens) {
            return Err("a canary must ask for 1 to 256 tokens");
        }
        if !(0.0..=1.0).contains(&self.score_min) {
            return Err("the least score of a canary must be between 0 and 1");
        }
        // Not finite is not positive either.
        if !(self.latency_max_seconds > 0.0 && self.latency_max_seconds <= 3600.0) {
            return Err("the latency of a canary must be more than 0 s and at most an hour");
        }
        Ok(())
    }

    /// Whether an answer with this score passes. A score that is no number does not.
    pub fn judge(&self, score: f64, seconds: f64) -> Result<CanaryScore, CanaryFailure> {
        // What is no number compares as false, and fails.
        let (good, fast) = (score >= self.score_min, seconds <= self.latency_max_seconds);
        if !good {
            return Err(CanaryFailure::Score { score, score_min: self.score_min });
        }
        if !fast {
            return Err(CanaryFailure::Latency { seconds, latency_max_seconds: self.latency_max_seconds });
        }
        Ok(CanaryScore { score, seconds })
    }
}

/// How a new version can take the place of the one that callers get now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "strategy", rename_all = "snake_case")]
pub enum Takeover {
    /// It is loaded beside the old one, which answers until the name is switched: no gap.
    SideBySide {
        /// Models that leave memory for it.
        evicts: Vec<Digest>,
    },
    /// Both do not fit: callers wait (or are refused, by the model's policy) from the old one's end to the new one's
    /// beginning.
    DrainThenLoad {
        /// What the new one needs while it loads.
        needed_bytes: Bytes,
        /// Models beside the old one that leave memory for it.
        evicts: Vec<Digest>,
    },
    /// It does not fit even alone, or beside what is pinned.
    Impossible { rejection: Rejection },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canary() -> Canary {
        Canary {
            prompt: "The capital of France is".into(),
            max_tokens: 8,
            expected: Expected::Text("Paris".into()),
            score_min: 0.5,
            latency_max_seconds: 2.0,
            given: true,
        }
    }

    #[test]
    fn what_is_no_number_never_passes() {
        assert_eq!(canary().judge(0.5, 2.0), Ok(CanaryScore { score: 0.5, seconds: 2.0 }));
        assert!(matches!(canary().judge(0.49, 0.1), Err(CanaryFailure::Score { .. })));
        assert!(matches!(canary().judge(f64::NAN, 0.1), Err(CanaryFailure::Score { .. })));
        assert!(matches!(canary().judge(1.0, 2.1), Err(CanaryFailure::Latency { .. })));
        assert!(matches!(canary().judge(1.0, f64::NAN), Err(CanaryFailure::Latency { .. })));
    }

    #[test]
    fn a_canary_has_limits() {
        assert_eq!(canary().check(), Ok(()));
        let long = || "x".repeat(CANARY_TEXT_BYTES_MAX + 1);
        for broken in [
            Canary { prompt: String::new(), ..canary() },
            Canary { prompt: long(), ..canary() },
            Canary { expected: Expected::Text(String::new()), ..canary() },
            Canary { expected: Expected::Text(long()), ..canary() },
            Canary { expected: Expected::Embedding(Vec::new()), ..canary() },
            Canary { max_tokens: 0, ..canary() },
            Canary { max_tokens: CANARY_TOKENS_MAX + 1, ..canary() },
            Canary { score_min: f64::NAN, ..canary() },
            Canary { score_min: 1.1, ..canary() },
            Canary { latency_max_seconds: f64::NAN, ..canary() },
            Canary { latency_max_seconds: 0.0, ..canary() },
        ] {
            assert!(broken.check().is_err(), "{broken:?}");
        }
    }
}
