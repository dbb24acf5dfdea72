//! How long a step of an engine takes.
//!
//! `fixed + max(weights, prefill_tokens * a + sequences * b) + prefill_pairs * c + context_tokens * d`: matrices are
//! multiplied while their weights are read, so whichever takes longer counts (roofline: Williams et al., CACM 2009; for
//! transformers: Pope et al., arXiv 2211.05102, section 2); attention comes on top, as operations for the pairs of
//! tokens that a prompt compares and as bytes for the context that generating reads. With `weights = 0` it is linear,
//! which is what [`super::fit`] finds from measured steps.

use crate::calculate::{
    hardware::{Gpu, PREFILL_EFFICIENCY},
    input::{Refused, at_least_one, positive, refused},
    model::{ElementType, Model},
    prefill,
};
use serde::{Deserialize, Serialize};

/// Virtual time, or a stretch of it. 2^63 of them are 106 days.
pub type Picoseconds = u64;

/// Picoseconds of a second.
pub const PICOSECONDS_PER_SECOND: f64 = 1e12;
/// No run reaches this; a step that would is cut off there.
pub const TIME_MAX: Picoseconds = 1 << 62;
/// The longest that any part of a step may take for one token or step.
const PART_SECONDS_MAX: f64 = 3600.0;

/// Seconds as whole picoseconds; what is too long for a run ends it.
pub fn picoseconds(seconds: f64) -> Picoseconds {
    (seconds * PICOSECONDS_PER_SECOND).round().min(TIME_MAX as f64) as Picoseconds
}

/// Picoseconds as seconds.
pub fn seconds(time: Picoseconds) -> f64 {
    time as f64 / PICOSECONDS_PER_SECOND
}

/// What the parts of a step take, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Parts {
    /// Every step, beside everything else.
    pub fixed_seconds: f64,
    /// Reading the weights: multiplying takes at least this long.
    pub weights_seconds: f64,
    /// Multiplying for a token of a prompt.
    pub prefill_token_seconds: f64,
    /// Attention for a pair of tokens, one of a prompt and one before it.
    pub prefill_pair_seconds: f64,
    /// Multiplying for a sequence that generates.
    pub sequence_seconds: f64,
    /// Attention for a token that a sequence has when it generates: reading its KV.
    pub context_token_seconds: f64,
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepShape {
    /// Tokens of prompts.
    pub prefill_tokens: u64,
    /// Pairs of such a token with itself or one before it.
    pub prefill_pairs: u64,
    /// Sequences that generate a token.
    pub sequences: u64,
    /// Tokens that these have, with the one whose KV is computed now.
    pub context_tokens: u64,
}

/// The parts in picoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepCost {
    fixed: Picoseconds,
    weights: Picoseconds,
    prefill_token: Picoseconds,
    prefill_pair: Picoseconds,
    sequence: Picoseconds,
    context_token: Picoseconds,
}

/// Pairs for so many new tokens after so many that are known.
pub fn pairs(new_tokens: u64, known_tokens: u64) -> u64 {
    new_tokens * known_tokens + new_tokens * (new_tokens + 1) / 2
}

impl StepCost {
    /// From seconds; a step must take time.
    pub fn new(parts: &Parts) -> Result<Self, Refused> {
        let part = |name: &'static str, seconds: f64| {
            let known = seconds.is_finite() && (0.0..=PART_SECONDS_MAX).contains(&seconds);
            if known {
                Ok(picoseconds(seconds))
            } else {
                Err(refused(name, format!("is {seconds}: give a number from 0 to {PART_SECONDS_MAX}")))
            }
        };
        let cost = Self {
            fixed: part("fixed_seconds", parts.fixed_seconds)?,
            weights: part("weights_seconds", parts.weights_seconds)?,
            prefill_token: part("prefill_token_seconds", parts.prefill_token_seconds)?,
            prefill_pair: part("prefill_pair_seconds", parts.prefill_pair_seconds)?,
            sequence: part("sequence_seconds", parts.sequence_seconds)?,
            context_token: part("context_token_seconds", parts.context_token_seconds)?,
        };
        let shortest = cost
            .of(&StepShape { prefill_tokens: 1, prefill_pairs: 1, ..StepShape::default() })
            .min(cost.of(&StepShape { sequences: 1, context_tokens: 1, ..StepShape::default() }));
        at_least_one("seconds", shortest).map_err(|_| refused("cost", "takes no time: give at least fixed_seconds"))?;
        Ok(cost)
    }

    /// One step.
    pub fn of(&self, shape: &StepShape) -> Picoseconds {
        clamp(self.exact(shape))
    }

    fn exact(&self, shape: &StepShape) -> u128 {
        let times = |part: Picoseconds, count: u64| u128::from(part) * u128::from(count);
        let multiplying = times(self.prefill_token, shape.prefill_tokens) + times(self.sequence, shape.sequences);
        u128::from(self.fixed)
            + multiplying.max(u128::from(self.weights))
            + times(self.prefill_pair, shape.prefill_pairs)
            + times(self.context_token, shape.context_tokens)
    }

    /// So many steps one after the other, each with one more token in every sequence.
    pub fn of_alike(&self, shape: &StepShape, steps: u64) -> Picoseconds {
        let growing = u128::from(steps) * u128::from(steps.saturating_sub(1)) / 2;
        clamp(self.exact(shape) * u128::from(steps) + u128::from(self.growth(shape)) * growing)
    }

    /// By how much a step takes longer than the one before it, all else being alike.
    pub fn growth(&self, shape: &StepShape) -> Picoseconds {
        self.context_token * shape.sequences
    }

    /// The fewest of such steps that end after `elapsed`, at most `steps`, at least one.
    pub fn alike_until_after(&self, shape: &StepShape, steps: u64, elapsed: Picoseconds) -> u64 {
        let (mut least, mut most) = (1, steps.max(1));
        // Time grows with every step, so that halving finds the first; a run has at most a million.
        while least < most {
            let middle = least + (most - least) / 2;
            if self.of_alike(shape, middle) > elapsed {
                most = middle;
            } else {
                least = middle + 1;
            }
        }
        least
    }
}

fn clamp(time: u128) -> Picoseconds {
    time.min(u128::from(TIME_MAX)) as Picoseconds
}

/// GPUs that share a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// What each is.
    pub gpu: Gpu,
    /// How many.
    pub gpus: u64,
}

impl Machine {
    /// What steps of a model are expected to take, with the efficiencies that were measured or assumed for such GPUs
    /// ([`crate::calculate::hardware`]). All experts of a layer are taken to be read; windows are not looked at.
    pub fn parts(&self, model: &Model, kv: ElementType) -> Result<Parts, Refused> {
        let gpus = at_least_one("gpus", self.gpus)? as f64;
        let bytes_per_second = self.gpu.memory_bytes_per_second * gpus * self.gpu.decode_efficiency;
        let flops_per_second = self.gpu.bf16_flops_per_second * gpus * PREFILL_EFFICIENCY;
        let weights = model.weights.ok_or_else(|| refused("parameters", "are not known: give them"))?;
        let experts = weights.experts.map_or(0, |experts| experts.bytes);
        let one = prefill::work(model, 1, 0)?;
        let token_flops = 2.0 * weights.token_parameters as f64;
        Ok(Parts {
            fixed_seconds: 0.0,
            weights_seconds: positive("weights", (weights.step_bytes + experts) as f64)? / bytes_per_second,
            prefill_token_seconds: one.linear_flops / flops_per_second,
            // A token compares itself with itself by half a pair.
            prefill_pair_seconds: 2.0 * one.attention_flops / flops_per_second,
            sequence_seconds: token_flops / flops_per_second,
            context_token_seconds: model.kv_bytes_per_token(kv)? as f64 / bytes_per_second,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calculate::model::{Attention, Weights};

    fn llama_8b() -> Model {
        let attention = Attention::Heads { kv_heads: 8, key_length: 128, value_length: 128 };
        let mut model = Model::uniform(32, attention);
        let dense = Weights::dense(8_030_000_000, ElementType::named("bf16").unwrap()).unwrap();
        // The table of embeddings is looked up, not read.
        let read = 7_504_000_000;
        model.weights =
            Some(Weights { step_bytes: 2 * read, prompt_parameters: read, token_parameters: read, ..dense });
        model.layers[0].query_width = Some(32 * 256);
        model
    }

    /// AIConfigurator 0.12's database for Llama-3.1-8B bf16, 1,024 tokens and 128 generated: milliseconds of a step
    /// with 1, 8 and 32 sequences, and of the prompt.
    #[test]
    fn steps_of_known_gpus_take_about_what_was_measured() {
        for (gpu, steps, prompt) in [
            ("a100-80gb-sxm", [11.48, 12.53, 14.45], 65.9),
            ("h100-sxm", [6.58, 7.14, 8.56], 23.5),
            ("h200-sxm", [5.02, 5.55, 6.82], 22.6),
            ("l40s", [18.73, 22.00, 29.04], 79.1),
        ] {
            let machine = Machine { gpu: Gpu::named(gpu).unwrap(), gpus: 1 };
            let parts = machine.parts(&llama_8b(), ElementType::named("bf16").unwrap()).unwrap();
            let cost = StepCost::new(&parts).unwrap();
            for (sequences, measured) in [1, 8, 32].into_iter().zip(steps) {
                let shape = StepShape { sequences, context_tokens: sequences * 1088, ..StepShape::default() };
                let ratio = seconds(cost.of(&shape)) * 1e3 / measured;
                assert!((0.85..1.15).contains(&ratio), "{gpu} {sequences}: {ratio}");
            }
            let shape = StepShape { prefill_tokens: 1024, prefill_pairs: pairs(1024, 0), ..StepShape::default() };
            let ratio = seconds(cost.of(&shape)) * 1e3 / prompt;
            // Half of the operations is assumed of all; up to 0.77 of them were measured, with what is multiplied only.
            assert!((0.95..1.55).contains(&ratio), "{gpu} prompt: {ratio}");
        }
    }

    #[test]
    fn steps_that_are_alike_add_up_exactly() {
        let parts = Parts { fixed_seconds: 1.3e-3, context_token_seconds: 7e-9, ..Parts::default() };
        let cost = StepCost::new(&parts).unwrap();
        let first = StepShape { sequences: 3, context_tokens: 100, ..StepShape::default() };
        let mut sum = 0;
        for step in 0..50 {
            sum += cost.of(&StepShape { context_tokens: 100 + 3 * step, ..first });
            assert_eq!(cost.of_alike(&first, step + 1), sum);
            assert_eq!(cost.alike_until_after(&first, 50, sum - 1), step + 1);
            assert_eq!(cost.alike_until_after(&first, 50, sum), (step + 2).min(50));
        }
    }

    #[test]
    fn what_is_no_cost_is_refused() {
        for value in [f64::NAN, -1.0, 1e9] {
            let error = StepCost::new(&Parts { sequence_seconds: value, ..Parts::default() }).unwrap_err();
            assert_eq!(error.name, "sequence_seconds");
        }
        assert!(StepCost::new(&Parts::default()).unwrap_err().to_string().contains("takes no time"));
    }
}
