//! What moving the KV of a prompt from where it was read to where it goes on takes.
//!
//! `bytes / bandwidth`. Sent layer by layer while the prompt is read (Splitwise, arXiv 2311.18677; Mooncake, section 5.2), what remains after
//! its end is one layer, plus what the link was slower than the computation on the layers before.

use super::input::{Refused, at_least_one, finite, not_negative, positive};
use serde::Serialize;

/// KV on its way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// KV of one prompt.
    pub bytes: u64,
    /// Layers it consists of.
    pub layers: u64,
    /// How long the prompt takes to read, if it is sent meanwhile.
    pub prefill_seconds: Option<f64>,
}

/// What one link makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// Bandwidth of the link.
    pub bytes_per_second: f64,
    /// All of it.
    pub seconds: f64,
    /// One layer: the least that remains when layers are sent as they are ready.
    pub one_layer_seconds: f64,
    /// What remains after the prompt is read.
    pub exposed_seconds: Option<f64>,
}

impl Transfer {
    /// Over a link of this bandwidth.
    pub fn answer(&self, bytes_per_second: f64) -> Result<Answer, Refused> {
        let layers = at_least_one("layers", self.layers)? as f64;
        let seconds =
            finite("seconds", at_least_one("bytes", self.bytes)? as f64 / positive("bandwidth", bytes_per_second)?)?;
        let one_layer = seconds / layers;
        let exposed = |prefill: f64| {
            let slower = (one_layer - not_negative("prefill-seconds", prefill)? / layers).max(0.0);
            Ok(one_layer + (layers - 1.0) * slower)
        };
        Ok(Answer {
            bytes_per_second,
            seconds,
            one_layer_seconds: one_layer,
            exposed_seconds: self.prefill_seconds.map(exposed).transpose()?,
        })
    }

    /// Bits per second that so many prompts per second need.
    pub fn bits_per_second(&self, prompts_per_second: f64) -> Result<f64, Refused> {
        finite("bandwidth", self.bytes as f64 * 8.0 * positive("requests-per-second", prompts_per_second)?)
    }
}
