//! Where bringing KV back beats computing it again, and where it does not.
//!
//! Reload if `fixed + bytes / bandwidth < time to compute`. The inverse answers are the least bandwidth for a prefix and the least
//! prefix for a bandwidth: the time to compute grows at least as fast as the bytes do, so there is one point from which on reloading
//! pays, or none. Doing both at once from either end takes `load * compute / (load + compute)` (Cake, arXiv 2410.03065).

use super::{
    input::{Refused, at_least_one, finite, not_negative, positive, refused, share},
    model::{ElementType, Model},
    prefill,
};
use serde::Serialize;

/// The longest prefix that is looked at.
pub const PREFIX_TOKENS_MAX: u64 = 1 << 30;

/// How long computing takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Compute {
    /// At a rate that somebody measured.
    Measured {
        /// Tokens of a prompt.
        tokens_per_second: f64,
    },
    /// By the operations of the model.
    Work {
        /// Of all GPUs.
        flops_per_second: f64,
        /// The part of that which is reached.
        efficiency: f64,
    },
}

/// What a token takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvSize {
    /// As the layers of the model say.
    Kept(ElementType),
    /// So many bytes.
    PerToken(u64),
}

/// What is to be decided about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakEven<'a> {
    /// The model.
    pub model: &'a Model,
    /// What a token takes.
    pub kv: KvSize,
    /// How long computing takes.
    pub compute: Compute,
    /// What every reload takes, however small.
    pub fixed_seconds: f64,
    /// Reloads that share a tier's bandwidth.
    pub loaders: u64,
}

/// One prefix from one tier.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// Bandwidth of the tier.
    pub bytes_per_second: f64,
    /// Until it is back.
    pub reload_seconds: f64,
    /// Whether that is sooner than computing it.
    pub reload_pays: bool,
    /// Time to compute by time to reload.
    pub times_faster: f64,
    /// The shortest prefix for which it pays; none if there is none.
    pub least_prefix_tokens: Option<u64>,
    /// If one end is computed while the other is reloaded.
    pub both_at_once_seconds: f64,
}

impl BreakEven<'_> {
    /// Bytes of a prefix.
    pub fn bytes(&self, tokens: u64) -> Result<u64, Refused> {
        match self.kv {
            KvSize::Kept(element) => self.model.kv_bytes(element, tokens),
            KvSize::PerToken(bytes) => {
                super::input::product("KV bytes", &[at_least_one("kv-bytes-per-token", bytes)?, tokens])
            }
        }
    }

    /// How long computing a prefix takes.
    pub fn compute_seconds(&self, tokens: u64) -> Result<f64, Refused> {
        match self.compute {
            Compute::Measured { tokens_per_second } => {
                finite("seconds", tokens as f64 / positive("prefill-tokens-per-second", tokens_per_second)?)
            }
            Compute::Work { flops_per_second, efficiency } => {
                Ok(prefill::work(self.model, tokens, 0)?.speed(tokens, flops_per_second, efficiency)?.seconds)
            }
        }
    }

    /// How long bringing it back takes.
    pub fn reload_seconds(&self, tokens: u64, bytes_per_second: f64) -> Result<f64, Refused> {
        let loaders = at_least_one("loaders", self.loaders)? as f64;
        let bandwidth = positive("bandwidth", bytes_per_second)? / loaders;
        finite("seconds", not_negative("fixed-seconds", self.fixed_seconds)? + self.bytes(tokens)? as f64 / bandwidth)
    }

    /// The bandwidth above which a prefix is reloaded; none if computing is faster than what every reload takes.
    pub fn least_bytes_per_second(&self, tokens: u64) -> Result<Option<f64>, Refused> {
        at_least_one("prefix-tokens", tokens)?;
        let loaders = at_least_one("loaders", self.loaders)? as f64;
        let left = self.compute_seconds(tokens)? - not_negative("fixed-seconds", self.fixed_seconds)?;
        if left <= 0.0 {
            return Ok(None);
        }
        finite("bandwidth", self.bytes(tokens)? as f64 * loaders / left).map(Some)
    }

    fn pays(&self, tokens: u64, bytes_per_second: f64) -> Result<bool, Refused> {
        Ok(self.reload_seconds(tokens, bytes_per_second)? < self.compute_seconds(tokens)?)
    }

    /// The shortest prefix that is reloaded at this bandwidth.
    pub fn least_prefix_tokens(&self, bytes_per_second: f64) -> Result<Option<u64>, Refused> {
        // What computing takes is convex, what is reloaded is not more than linear, and reloading nothing saves nothing: the
        // difference, once above zero, stays there.
        let (mut loses, mut pays) = (0, PREFIX_TOKENS_MAX);
        if !self.pays(pays, bytes_per_second)? {
            return Ok(None);
        }
        while pays - loses > 1 {
            let middle = loses + (pays - loses) / 2;
            if self.pays(middle, bytes_per_second)? { pays = middle } else { loses = middle }
        }
        Ok(Some(pays))
    }

    /// Everything about one prefix from one tier.
    pub fn answer(&self, tokens: u64, bytes_per_second: f64) -> Result<Answer, Refused> {
        at_least_one("prefix-tokens", tokens)?;
        let (compute, reload) = (self.compute_seconds(tokens)?, self.reload_seconds(tokens, bytes_per_second)?);
        Ok(Answer {
            bytes_per_second,
            reload_seconds: reload,
            reload_pays: reload < compute,
            times_faster: compute / reload,
            least_prefix_tokens: self.least_prefix_tokens(bytes_per_second)?,
            both_at_once_seconds: reload * compute / (reload + compute),
        })
    }
}

/// The least bandwidth by Mooncake's equation 2 (FAST'25, arXiv 2407.00079): `G * 2ds / (gqa * (a * p * d + b * d^2))`, with `a` = 4 and `b` = 22
/// for a model with gated layers. `G` is what GPUs do at their best, `gqa` query heads by KV heads, `s` bytes of an element.
pub fn mooncake_least_bytes_per_second(
    flops_per_second: f64,
    prefix_tokens: u64,
    hidden_size: u64,
    queries_per_kv_head: f64,
    element_bytes: f64,
) -> Result<f64, Refused> {
    const ATTENTION: f64 = 4.0;
    const LINEAR: f64 = 22.0;
    let width = at_least_one("hidden-size", hidden_size)? as f64;
    let prefix = at_least_one("prefix-tokens", prefix_tokens)? as f64;
    let kept = 2.0 * width * positive("bytes of an element", element_bytes)?;
    let work = ATTENTION * prefix * width + LINEAR * width * width;
    let grouped = positive("heads by kv-heads", queries_per_kv_head)?;
    finite("bandwidth", positive("flops", flops_per_second)? * kept / (grouped * work))
}

/// What keeping KV costs and computing it again costs, in any currency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// All GPUs of a replica.
    pub gpus_per_hour: f64,
    /// A decimal gigabyte of the tier.
    pub tier_per_gigabyte_month: f64,
    /// How likely what is kept is asked for again.
    pub hit_probability: f64,
}

impl Prices {
    /// How long a prefix may be kept for one expected hit before that costs more than it saves:
    /// `probability * seconds saved * price of GPUs / (bytes * price of bytes)`.
    pub fn keep_seconds(&self, saved_seconds: f64, bytes: u64) -> Result<f64, Refused> {
        const MONTH_SECONDS: f64 = 30.0 * 24.0 * 3600.0;
        let gpus = positive("gpu-price-per-hour", self.gpus_per_hour)? / 3600.0;
        let byte = positive("tier-price-per-gigabyte-month", self.tier_per_gigabyte_month)? / 1e9 / MONTH_SECONDS;
        let hits = share("hit-probability", self.hit_probability)?;
        if bytes == 0 {
            return Err(refused("prefix-tokens", "is 0: give at least 1"));
        }
        finite("seconds", hits * saved_seconds.max(0.0) * gpus / (bytes as f64 * byte))
    }
}
