//! How often something is asked for, decaying with a half-life.

use crate::time::Instant;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// An exponentially decaying count of requests.
///
/// A steady stream of `r` requests a second settles at `r * half_life / ln 2`, so the rate is read back as
/// `count * ln 2 / half_life`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Demand {
    count: f64,
    at: Instant,
}

impl Demand {
    /// A demand that was read back as `per_second` some time ago.
    pub fn remembered(now: Instant, half_life: Duration, per_second: f64, age: Duration) -> Self {
        let half_life_seconds = half_life.as_secs_f64();
        let known = if per_second.is_finite() { per_second.max(0.0) } else { 0.0 };
        let count = known * half_life_seconds / core::f64::consts::LN_2;
        Self { count: count * libm::exp2(-age.as_secs_f64() / half_life_seconds.max(1e-9)), at: now }
    }

    /// When the last request came, or it was remembered.
    pub fn last(&self) -> Instant {
        self.at
    }

    /// One more request at `now`.
    pub fn note(&mut self, now: Instant, half_life: Duration) {
        self.add(now, half_life, 1.0);
    }

    /// More of whatever is counted at `now`.
    pub fn add(&mut self, now: Instant, half_life: Duration, amount: f64) {
        self.count = self.count_at(now, half_life) + amount;
        self.at = self.at.max(now);
    }

    /// The decayed count at `now`.
    pub fn count_at(&self, now: Instant, half_life: Duration) -> f64 {
        let half_lives = now.since(self.at).as_secs_f64() / half_life.as_secs_f64().max(1e-9);
        self.count * libm::exp2(-half_lives)
    }

    /// Requests per second at `now`.
    pub fn per_second_at(&self, now: Instant, half_life: Duration) -> f64 {
        self.count_at(now, half_life) * core::f64::consts::LN_2 / half_life.as_secs_f64().max(1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HALF_LIFE: Duration = Duration::from_secs(600);

    #[test]
    fn steady_stream_reads_back_its_rate() {
        let mut demand = Demand::default();
        for second in 0..20_000_u64 {
            demand.note(Instant::after(Duration::from_secs(second)), HALF_LIFE);
        }
        let rate = demand.per_second_at(Instant::after(Duration::from_secs(19_999)), HALF_LIFE);
        assert!((rate - 1.0).abs() < 0.01, "{rate}");
    }

    #[test]
    fn what_is_remembered_has_decayed_meanwhile() {
        let now = Instant::after(Duration::from_secs(50));
        let demand = Demand::remembered(now, HALF_LIFE, 0.5, HALF_LIFE * 2);
        assert!((demand.per_second_at(now, HALF_LIFE) - 0.125).abs() < 1e-12);
        for nonsense in [f64::NAN, f64::INFINITY, -1.0] {
            let demand = Demand::remembered(now, HALF_LIFE, nonsense, Duration::ZERO);
            assert!(demand.per_second_at(now, HALF_LIFE).abs() < 1e-12, "{nonsense}");
        }
    }

    #[test]
    fn halves_in_a_half_life() {
        let mut demand = Demand::default();
        demand.note(Instant::ZERO, HALF_LIFE);
        let later = Instant::after(HALF_LIFE);
        assert!((demand.count_at(later, HALF_LIFE) - 0.5).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn never_grows_without_requests(notes in 1_usize..50, wait_seconds in 0_u64..100_000) {
            let mut demand = Demand::default();
            for _ in 0..notes {
                demand.note(Instant::ZERO, HALF_LIFE);
            }
            let now = demand.count_at(Instant::ZERO, HALF_LIFE);
            let later = demand.count_at(Instant::after(Duration::from_secs(wait_seconds)), HALF_LIFE);
            prop_assert!(later <= now && later >= 0.0);
            prop_assert!((now - notes as f64).abs() < 1e-9);
        }
    }
}
