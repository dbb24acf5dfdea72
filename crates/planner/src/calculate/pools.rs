//! How many instances read prompts and how many generate, if the two are apart, and what goes between them.
//!
//! Work by what an instance does, at the utilisation that leaves room for bursts: `ceil(requests/s * new prompt tokens / (prefill rate *
//! utilisation))`, the same with generated tokens. Sequences that generate at once: Little's law. What prompts wait for an instance is an M/D/1
//! queue of their mean length (DistServe, OSDI'24, section 3.1).

use super::{
    input::{Refused, at_least_one, finite, positive, refused, share, share_or_none, whole},
    queueing::Queue,
};
use serde::Serialize;

/// A load and what instances do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pools {
    /// Requests.
    pub requests_per_second: f64,
    /// Tokens of a prompt.
    pub prompt_tokens: u64,
    /// The part of prompts that need not be read again.
    pub cached_share: f64,
    /// Tokens of an answer.
    pub output_tokens: u64,
    /// What one instance reads.
    pub prefill_tokens_per_second: f64,
    /// What one instance generates, all sequences together.
    pub decode_tokens_per_second: f64,
    /// Sequences that it generates together.
    pub decode_batch: u64,
    /// The part of their time that instances are to work.
    pub utilisation: f64,
    /// KV of a prompt, which goes from one pool to the other.
    pub prompt_kv_bytes: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// Instances that read prompts.
    pub prefill_instances: u64,
    /// The part of the time they work.
    pub prefill_utilisation: f64,
    /// How long a prompt is read.
    pub prefill_seconds: f64,
    /// How long it waits before that, on average.
    pub prefill_mean_wait_seconds: f64,
    /// Instances that generate.
    pub decode_instances: u64,
    /// The part of the time they work.
    pub decode_utilisation: f64,
    /// Time between two tokens of a sequence.
    pub seconds_per_token: f64,
    /// Sequences that generate at once, in all instances.
    pub sequences_decoding: f64,
    /// KV on its way between the pools.
    pub transfer_bytes_per_second: f64,
    /// Instances if each did both, one after the other.
    pub instances_together: u64,
}

impl Pools {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let rate = positive("requests-per-second", self.requests_per_second)?;
        let target = share("utilisation", self.utilisation)?;
        let new = at_least_one("prompt-tokens", self.prompt_tokens)? as f64
            * (1.0 - share_or_none("cached-share", self.cached_share)?);
        if new < 1.0 {
            return Err(refused("cached-share", "leaves nothing to read: the last token of a prompt is always read"));
        }
        let output = at_least_one("output-tokens", self.output_tokens)? as f64;
        let prefill_seconds =
            finite("seconds", new / positive("prefill-tokens-per-second", self.prefill_tokens_per_second)?)?;
        let decode = positive("decode-tokens-per-second", self.decode_tokens_per_second)?;
        let (reading, generating) = (rate * prefill_seconds, rate * output / decode);
        let instances = |busy: f64| whole("instances", (busy / target).ceil()).map(|count| count.max(1));
        let (prefill, decoding) = (instances(reading)?, instances(generating)?);
        let queue = Queue { arrivals_per_second: rate / prefill as f64, service_seconds: prefill_seconds, servers: 1 };
        let wait =
            queue.constant()?.ok_or_else(|| refused("utilisation", "of 1 lets prompts wait without end: give less"))?;
        let seconds_per_token = at_least_one("decode-batch", self.decode_batch)? as f64 / decode;
        Ok(Answer {
            prefill_instances: prefill,
            prefill_utilisation: reading / prefill as f64,
            prefill_seconds,
            prefill_mean_wait_seconds: wait.mean_wait_seconds,
            decode_instances: decoding,
            decode_utilisation: generating / decoding as f64,
            seconds_per_token,
            sequences_decoding: finite("sequences", rate * output * seconds_per_token)?,
            transfer_bytes_per_second: finite("bandwidth", rate * self.prompt_kv_bytes as f64)?,
            instances_together: instances(reading + generating)?,
        })
    }
}
