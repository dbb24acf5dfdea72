//! What a model's callers were promised: times to the first token, warm and cold.

use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Every second that a cold start takes beyond its target weighs as much as so many within it.
const BEYOND_TARGET_WEIGHT: f64 = 4.0;
/// A caller of a model without a target is served as if it had to begin to load within this.
const PATIENCE_WITHOUT_TARGET: Duration = Duration::from_secs(30);

/// Targets for the 99th percentile of the time to the first token. What is not promised is none.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Targets {
    /// Of requests that find the model ready, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_p99_warm_ms: Option<u32>,
    /// Of requests that wait for a load, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_p99_cold_ms: Option<u32>,
}

impl Targets {
    /// Whether nothing was promised.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The promised seconds to the first token of a request that finds its model cold, or ready.
    pub fn first_token_seconds(&self, is_cold: bool) -> Option<f64> {
        let target = if is_cold { self.ttft_p99_cold_ms } else { self.ttft_p99_warm_ms };
        target.map(|milliseconds| f64::from(milliseconds) / 1_000.0)
    }

    fn cold(&self) -> Option<Duration> {
        self.ttft_p99_cold_ms.map(|milliseconds| Duration::from_millis(u64::from(milliseconds)))
    }

    /// How far beyond its target a cold start of so many seconds ends; none if it meets it or there is none.
    pub fn cold_excess_seconds(&self, rewarm_seconds: f64) -> Option<f64> {
        let excess = rewarm_seconds - self.cold()?.as_secs_f64();
        (excess > 0.0).then_some(excess)
    }

    /// What a cold start costs, in seconds: those it takes, and more for those beyond the target. At most
    /// [`BEYOND_TARGET_WEIGHT`] times as many; without a target just as many.
    pub fn weigh(&self, rewarm_seconds: f64) -> f64 {
        let excess = self.cold_excess_seconds(rewarm_seconds).unwrap_or(0.0);
        rewarm_seconds + (BEYOND_TARGET_WEIGHT - 1.0) * excess
    }

    /// How long a caller may wait until its load begins. A target that no load can meet any more is in no hurry either
    /// way: its callers are served as they came. Never negative, so that whoever waits is passed by a bounded number.
    pub fn slack(&self, rewarm_seconds: f64) -> Duration {
        let Some(target) = self.cold() else { return PATIENCE_WITHOUT_TARGET };
        let slack = target.as_secs_f64() - rewarm_seconds;
        if slack < 0.0 {
            return PATIENCE_WITHOUT_TARGET;
        }
        Duration::from_secs_f64(slack).min(PATIENCE_WITHOUT_TARGET)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cold(milliseconds: u32) -> Targets {
        Targets { ttft_p99_cold_ms: Some(milliseconds), ttft_p99_warm_ms: None }
    }

    #[test]
    fn seconds_beyond_the_target_weigh_four_times() {
        assert!((Targets::default().weigh(7.0) - 7.0).abs() < 1e-12);
        assert!((cold(10_000).weigh(7.0) - 7.0).abs() < 1e-12);
        assert!((cold(5_000).weigh(7.0) - (5.0 + 4.0 * 2.0)).abs() < 1e-12);
    }

    #[test]
    fn a_tight_target_goes_first_and_a_hopeless_one_waits_its_turn() {
        assert_eq!(cold(9_000).slack(7.0), Duration::from_secs(2));
        assert_eq!(cold(1_000).slack(7.0), PATIENCE_WITHOUT_TARGET);
        assert_eq!(cold(600_000).slack(7.0), Targets::default().slack(7.0));
    }

    proptest! {
        #[test]
        fn a_target_never_makes_a_model_cheaper_and_costs_are_bounded(
            rewarm in 0.0_f64..10_000.0, milliseconds in 0_u32..10_000_000,
        ) {
            let weighed = cold(milliseconds).weigh(rewarm);
            prop_assert!(weighed >= rewarm && weighed <= BEYOND_TARGET_WEIGHT * rewarm + 1e-9);
            prop_assert!(cold(milliseconds).slack(rewarm) <= PATIENCE_WITHOUT_TARGET);
        }
    }
}
