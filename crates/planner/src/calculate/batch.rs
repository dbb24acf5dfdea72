//! What a batch of requests takes overnight: instances, hours and cost, by how many sequences are generated together.
//!
//! `instance seconds = requests * (new prompt tokens / prefill rate + output tokens / decode rate)`: reading and generating share an instance's
//! time. Where other traffic has a part of that time, each hour offers what is left of it.

use super::input::{Refused, at_least_one, finite, positive, refused, share, share_or_none, whole};
use serde::Serialize;

/// The longest window.
const WINDOW_HOURS_MAX: u64 = 24 * 366;

/// A batch of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job<'a> {
    /// Requests.
    pub requests: u64,
    /// Tokens of a prompt.
    pub prompt_tokens: u64,
    /// The part of prompts that need not be read again.
    pub cached_share: f64,
    /// Tokens of an answer.
    pub output_tokens: u64,
    /// Hours until it must be done.
    pub window_hours: u64,
    /// The part of an instance's time that other traffic leaves, for each hour; the last holds for those after it.
    pub free_shares: &'a [f64],
    /// Instances that are there; else as many as the window asks for.
    pub instances: Option<u64>,
    /// What an instance costs, in any currency.
    pub price_per_instance_hour: Option<f64>,
}

/// What an instance does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Profile {
    /// Sequences together.
    pub batch: u64,
    /// Prompts.
    pub prefill_tokens_per_second: f64,
    /// Answers, all sequences together.
    pub decode_tokens_per_second: f64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// What an instance does.
    #[serde(flatten)]
    pub profile: Profile,
    /// Requests of one instance that does nothing else.
    pub requests_per_hour: f64,
    /// Work of one instance that does nothing else.
    pub instance_hours: f64,
    /// Fewest that are done within the window.
    pub instances_for_window: u64,
    /// Those that it is calculated for.
    pub instances: u64,
    /// Until they are done; none if not within the window.
    pub hours: Option<f64>,
    /// What their work costs, without the time they spend on other traffic.
    pub cost: Option<f64>,
    /// The same for a million tokens that are generated.
    pub cost_per_million_output_tokens: Option<f64>,
}

impl Job<'_> {
    /// Does it.
    pub fn answer(&self, profile: Profile) -> Result<Answer, Refused> {
        let requests = at_least_one("requests", self.requests)? as f64;
        let prompt = at_least_one("prompt-tokens", self.prompt_tokens)? as f64;
        let new = (prompt * (1.0 - share_or_none("cached-share", self.cached_share)?)).max(1.0);
        let output = at_least_one("output-tokens", self.output_tokens)? as f64;
        at_least_one("batch", profile.batch)?;
        let prefill = positive("prefill-tokens-per-second", profile.prefill_tokens_per_second)?;
        let decode = positive("decode-tokens-per-second", profile.decode_tokens_per_second)?;
        let request_seconds = finite("seconds", new / prefill + output / decode)?;
        let instance_hours = finite("hours", requests * request_seconds / 3600.0)?;
        let offered = self.offered()?;
        let needed = whole("instances", (instance_hours / offered.iter().sum::<f64>()).ceil())?.max(1);
        let instances = self.instances.map_or(Ok(needed), |given| at_least_one("instances", given))?;
        let price = self.price_per_instance_hour.map(|price| positive("price-per-instance-hour", price)).transpose()?;
        let cost = price.map(|price| finite("cost", price * instance_hours)).transpose()?;
        Ok(Answer {
            profile,
            requests_per_hour: 3600.0 / request_seconds,
            instance_hours,
            instances_for_window: needed,
            instances,
            hours: hours_until(instance_hours / instances as f64, &offered),
            cost,
            cost_per_million_output_tokens: cost.map(|cost| cost / (requests * output / 1e6)),
        })
    }

    /// What each hour of the window offers.
    fn offered(&self) -> Result<Vec<f64>, Refused> {
        let hours = at_least_one("window-hours", self.window_hours)?;
        if hours > WINDOW_HOURS_MAX {
            return Err(refused("window-hours", format!("is {hours}: at most {WINDOW_HOURS_MAX} are looked at")));
        }
        let Some(last) = self.free_shares.last() else {
            return Err(refused("free-share", "is missing: give 1 if nothing else runs"));
        };
        let of_hour = |hour: u64| *self.free_shares.get(hour as usize).unwrap_or(last);
        (0..hours).map(|hour| share("free-share", of_hour(hour))).collect()
    }
}

/// Hours until so much is done, if each hour offers a part of itself; none if all of them are not enough.
fn hours_until(mut work: f64, offered: &[f64]) -> Option<f64> {
    for (hour, share) in offered.iter().enumerate() {
        // A last digit of floating point is not another night.
        if work <= share * (1.0 + 1e-12) {
            return Some(hour as f64 + (work / share).min(1.0));
        }
        work -= share;
    }
    None
}
