//! A cost model from measured steps, by [least squares of relative errors](crate::least_squares).

use super::cost::{Parts, StepShape};
use crate::{
    calculate::input::{Refused, refused},
    least_squares,
};
use serde::{Deserialize, Serialize};

/// The most samples.
pub const SAMPLES_MAX: usize = 100_000;
const PARTS: usize = 5;

/// A step that was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// Tokens of prompts.
    #[serde(default)]
    pub prefill_tokens: u64,
    /// Tokens that those of one prompt came after.
    #[serde(default)]
    pub known_tokens: u64,
    /// Sequences that generated.
    #[serde(default)]
    pub sequences: u64,
    /// Tokens that these had together.
    #[serde(default)]
    pub context_tokens: u64,
    /// How long it took.
    pub seconds: f64,
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fit {
    /// The parts of a step.
    pub parts: Parts,
    /// Root of the mean of squared relative errors.
    pub relative_error: f64,
    /// Samples that it was found from.
    pub samples: usize,
}

impl Sample {
    fn shape(&self) -> StepShape {
        StepShape {
            prefill_tokens: self.prefill_tokens,
            prefill_pairs: super::cost::pairs(self.prefill_tokens, self.known_tokens),
            sequences: self.sequences,
            context_tokens: self.context_tokens,
        }
    }

    /// What the parts are multiplied with, by the time it took.
    fn row(&self) -> [f64; PARTS] {
        let shape = self.shape();
        let counts = [1, shape.prefill_tokens, shape.prefill_pairs, shape.sequences, shape.context_tokens];
        counts.map(|count| count as f64 / self.seconds)
    }
}

/// Finds the parts.
pub fn fit(samples: &[Sample]) -> Result<Fit, Refused> {
    if samples.is_empty() || samples.len() > SAMPLES_MAX {
        return Err(refused("samples", format!("are {}: give 1 to {SAMPLES_MAX}", samples.len())));
    }
    if samples.iter().any(|sample| !(sample.seconds.is_finite() && sample.seconds > 0.0)) {
        return Err(refused("samples", "must each have seconds above 0"));
    }
    let rows: Vec<[f64; PARTS]> = samples.iter().map(Sample::row).collect();
    let best = least_squares::fit(&rows);
    let (found, squares) = best.ok_or_else(|| refused("samples", "tell nothing about how long steps take"))?;
    let [fixed, prefill_token, prefill_pair, sequence, context_token] = found;
    let parts = Parts {
        fixed_seconds: fixed,
        weights_seconds: 0.0,
        prefill_token_seconds: prefill_token,
        prefill_pair_seconds: prefill_pair,
        sequence_seconds: sequence,
        context_token_seconds: context_token,
    };
    Ok(Fit { parts, relative_error: (squares / samples.len() as f64).sqrt(), samples: samples.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(parts: &Parts, noise: f64, seed: u64) -> Vec<Sample> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..400)
            .map(|number| {
                let prefill_tokens = if number % 3 == 0 { random.u64(1..2048) } else { 0 };
                let known_tokens = if prefill_tokens > 0 { random.u64(..8192) } else { 0 };
                let sequences = random.u64(1..64);
                let context_tokens = sequences * random.u64(16..4096);
                let sample = Sample { prefill_tokens, known_tokens, sequences, context_tokens, seconds: 1.0 };
                let truth = [
                    parts.fixed_seconds,
                    parts.prefill_token_seconds,
                    parts.prefill_pair_seconds,
                    parts.sequence_seconds,
                    parts.context_token_seconds,
                ];
                let seconds: f64 = sample.row().iter().zip(truth).map(|(count, part)| count * part).sum();
                Sample { seconds: seconds * (1.0 + noise * (2.0 * random.f64() - 1.0)), ..sample }
            })
            .collect()
    }

    #[test]
    fn what_made_the_samples_is_found_again() {
        let truth = Parts {
            fixed_seconds: 6e-3,
            prefill_token_seconds: 3e-5,
            prefill_pair_seconds: 1e-9,
            sequence_seconds: 2e-5,
            context_token_seconds: 6e-8,
            ..Parts::default()
        };
        let exact = fit(&samples(&truth, 0.0, 7)).unwrap();
        let near = |found: f64, wanted: f64, share: f64| (found - wanted).abs() <= share * wanted.abs();
        assert!(near(exact.parts.prefill_pair_seconds, 1e-9, 1e-4), "{exact:?}");
        assert!(near(exact.parts.context_token_seconds, 6e-8, 1e-4) && exact.relative_error < 1e-6, "{exact:?}");
        let noisy = fit(&samples(&truth, 0.05, 7)).unwrap();
        assert!(near(noisy.parts.fixed_seconds, 6e-3, 0.05) && noisy.relative_error < 0.05, "{noisy:?}");
        let without = Parts { context_token_seconds: 0.0, sequence_seconds: 0.0, ..truth };
        let found = fit(&samples(&without, 0.1, 11)).unwrap().parts;
        assert!(found.context_token_seconds >= 0.0 && found.sequence_seconds >= 0.0, "{found:?}");
    }

    #[test]
    fn what_says_nothing_is_refused() {
        let one = Sample { prefill_tokens: 0, known_tokens: 0, sequences: 1, context_tokens: 1, seconds: 0.01 };
        assert!(fit(&[]).is_err() && fit(&[Sample { seconds: 0.0, ..one }]).is_err());
        // One sample is met exactly, by one part.
        assert!(fit(&[one]).unwrap().relative_error < 1e-9);
    }
}
