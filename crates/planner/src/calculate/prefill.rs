//! How long a prompt takes to read, and what a part of it that is known already saves.
//!
//! `operations = 2 * parameters * new + 2 * width * pairs` with `pairs = new * known + new^2 / 2` per layer and
//! `width = query heads * (length of a key + length of a value)`; for ordinary heads this is the usual
//! `2 * N * n + 2 * L * d * n^2` (Kaplan et al., arXiv 2001.08361, section 2.1; causal attention: half of all pairs). Layers with a window
//! see no further than it. Experts count as far as a token uses them.

use super::{
    input::{Refused, at_least_one, finite, positive, refused, share},
    model::{Layers, Model},
};
use serde::Serialize;

/// Operations of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Work {
    /// Multiplying with weights.
    pub linear_flops: f64,
    /// Attention.
    pub attention_flops: f64,
    /// Both.
    pub flops: f64,
}

/// How fast it goes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Speed {
    /// Until the prompt is read.
    pub seconds: f64,
    /// New tokens by that.
    pub tokens_per_second: f64,
}

/// Pairs of tokens that one layer compares: each new token with all before it, itself by half.
fn pairs(layers: &Layers, new: f64, known: f64) -> f64 {
    let all = |new: f64, known: f64| new * known + new * new / 2.0;
    match layers.window_tokens {
        None => all(new, known),
        // Tokens before the window is full see all; the others see a window each.
        Some(window) => {
            let window = window as f64;
            let growing = (window - known).clamp(0.0, new);
            all(growing, known) + (new - growing) * window
        }
    }
}

/// Operations for so many new tokens after so many that are known already.
pub fn work(model: &Model, new_tokens: u64, known_tokens: u64) -> Result<Work, Refused> {
    at_least_one("tokens", new_tokens)?;
    let weights = model.weights.filter(|weights| weights.prompt_parameters > 0);
    let weights = weights.ok_or_else(|| refused("parameters", "are not known: give them, or a config.json"))?;
    let (new, known) = (new_tokens as f64, known_tokens as f64);
    let linear_flops = 2.0 * weights.prompt_parameters as f64 * new;
    let mut attention_flops = 0.0;
    for layers in &model.layers {
        let width = layers
            .query_width
            .ok_or_else(|| refused("heads", "are not known: give heads and head-dim, or hidden-size"))?;
        attention_flops += 2.0 * layers.count as f64 * width as f64 * pairs(layers, new, known);
    }
    let flops = positive("operations", finite("operations", linear_flops + attention_flops)?)?;
    Ok(Work { linear_flops, attention_flops, flops })
}

impl Work {
    /// How long that takes with so many operations per second, of which a part is reached.
    pub fn speed(&self, new_tokens: u64, flops_per_second: f64, efficiency: f64) -> Result<Speed, Refused> {
        let reached = positive("flops", flops_per_second)? * share("mfu", efficiency)?;
        let seconds = positive("seconds", self.flops / reached)?;
        Ok(Speed { seconds, tokens_per_second: new_tokens as f64 / seconds })
    }
}
