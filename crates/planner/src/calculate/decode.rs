//! How fast tokens are generated: each step reads the weights once and the KV of every sequence.
//!
//! `tokens/s = batch * bandwidth / (weights + batch * KV of a sequence)`, unless multiplying takes longer: `2 * parameters` operations
//! for a token (roofline: Williams et al., CACM 2009; for transformers: Pope et al., arXiv 2211.05102, section 2). Of `count` routed experts
//! that tokens choose evenly, a batch reads `count * (1 - (1 - used / count) ^ batch)`. KV that is shared is read for each
//! sequence all the same.

use super::{
    input::{Refused, at_least_one, finite, positive, product, refused, share, sum, whole},
    model::Weights,
};
use serde::Serialize;

/// One step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decode {
    /// The weights.
    pub weights: Weights,
    /// KV of one sequence.
    pub kv_bytes_per_sequence: u64,
    /// Sequences together.
    pub batch: u64,
    /// Bandwidth of all GPUs.
    pub memory_bytes_per_second: f64,
    /// Operations of all GPUs, if multiplying is to be looked at.
    pub flops_per_second: Option<f64>,
}

/// What bounds a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Reading memory.
    Memory,
    /// Multiplying.
    Compute,
}

/// How fast it goes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// How long a step takes: the time between two tokens of a sequence.
    pub seconds_per_token: f64,
    /// Tokens of one sequence.
    pub tokens_per_second_per_sequence: f64,
    /// Tokens of all.
    pub tokens_per_second: f64,
}

/// What came of it: the ceiling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// Sequences together.
    pub batch: u64,
    /// Weights that a step reads.
    pub weight_bytes_read: u64,
    /// KV that a step reads.
    pub kv_bytes_read: u64,
    /// What takes longest.
    pub bound: Bound,
    /// If nothing but that took time.
    pub ceiling: Speed,
}

/// Bytes of weights that a step of so many sequences reads.
pub fn weight_bytes_read(weights: &Weights, batch: u64) -> Result<u64, Refused> {
    let Some(experts) = weights.experts else { return Ok(weights.step_bytes) };
    if experts.used == 0 || experts.used > experts.count {
        return Err(refused("experts", format!("uses {} of {}: it must be some of them", experts.used, experts.count)));
    }
    let unused = 1.0 - experts.used as f64 / experts.count as f64;
    let read = experts.bytes as f64 * (1.0 - libm::pow(unused, batch as f64));
    sum("weight bytes", [weights.step_bytes, whole("expert bytes", read.round())?])
}

impl Decode {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let batch = at_least_one("batch", self.batch)?;
        let weight_bytes_read = weight_bytes_read(&self.weights, batch)?;
        let kv_bytes_read = product("KV bytes", &[batch, self.kv_bytes_per_sequence])?;
        let bytes = weight_bytes_read as f64 + kv_bytes_read as f64;
        let memory_seconds = bytes / positive("bandwidth", self.memory_bytes_per_second)?;
        let flops = 2.0 * self.weights.token_parameters as f64 * batch as f64;
        let compute_seconds = self.flops_per_second.map_or(Ok(0.0), |rate| Ok(flops / positive("flops", rate)?))?;
        let bound = if compute_seconds > memory_seconds { Bound::Compute } else { Bound::Memory };
        let ceiling = Speed::of_step(memory_seconds.max(compute_seconds), batch)?;
        Ok(Answer { batch, weight_bytes_read, kv_bytes_read, bound, ceiling })
    }
}

impl Speed {
    fn of_step(seconds: f64, batch: u64) -> Result<Self, Refused> {
        let seconds = positive("seconds per token", finite("seconds per token", seconds)?)?;
        Ok(Self {
            seconds_per_token: seconds,
            tokens_per_second_per_sequence: 1.0 / seconds,
            tokens_per_second: batch as f64 / seconds,
        })
    }
}

impl Answer {
    /// What is expected if engines reach this part of the ceiling.
    pub fn calibrated(&self, efficiency: f64) -> Result<Speed, Refused> {
        Speed::of_step(self.ceiling.seconds_per_token / share("efficiency", efficiency)?, self.batch)
    }

    /// The part of the ceiling that somebody measured.
    pub fn efficiency_of(&self, measured_seconds_per_token: f64) -> Result<f64, Refused> {
        let measured = positive("measured seconds per token", measured_seconds_per_token)?;
        finite("efficiency", self.ceiling.seconds_per_token / measured)
    }
}
