//! The alarm of a pool that reloads what it has just evicted.

use super::Demand;
use crate::time::Instant;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Fewer reloads than this within a window are bad luck, not thrashing.
const RELOADS_MIN: f64 = 3.0;

/// Share of time a pool spends reloading recently evicted models, decaying over a window.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct Thrash {
    reloads: Demand,
    reload_seconds: Demand,
    raised: bool,
}

impl Thrash {
    /// Something evicted within the window is loaded again, which takes this long.
    pub fn note_reload(&mut self, now: Instant, window: Duration, seconds: f64) {
        self.reloads.note(now, window);
        self.reload_seconds.add(now, window, seconds);
    }

    /// Seconds of reloading per second.
    pub fn ratio(&self, now: Instant, window: Duration) -> f64 {
        self.reload_seconds.per_second_at(now, window)
    }

    /// Raises the alarm at the threshold and clears it at half of it; returns the new state when it changes.
    pub fn judge(&mut self, now: Instant, window: Duration, threshold: f64) -> Option<bool> {
        let ratio = self.ratio(now, window);
        let raised = if self.raised {
            ratio >= threshold / 2.0
        } else {
            ratio >= threshold && self.reloads.count_at(now, window) >= RELOADS_MIN
        };
        (raised != core::mem::replace(&mut self.raised, raised)).then_some(raised)
    }

    /// Whether the alarm is raised.
    pub fn is_raised(&self) -> bool {
        self.raised
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Instant {
        Instant::after(Duration::from_secs(seconds))
    }

    #[test]
    fn the_ratio_is_the_share_of_time_spent_reloading() {
        let mut thrash = Thrash::default();
        for round in 0..1_000 {
            thrash.note_reload(at(4 * round), WINDOW, 1.0);
        }
        let ratio = thrash.ratio(at(3_998), WINDOW);
        assert!((ratio - 0.25).abs() < 0.005, "{ratio}");
    }

    #[test]
    fn raised_by_reloads_and_cleared_by_quiet() {
        let mut thrash = Thrash::default();
        let mut changes = std::vec![];
        for round in 0..20 {
            thrash.note_reload(at(4 * round), WINDOW, 1.0);
            changes.extend(thrash.judge(at(4 * round), WINDOW, 0.1));
        }
        assert_eq!(changes, [true]);
        assert!(thrash.is_raised());
        assert_eq!(thrash.judge(at(120), WINDOW, 0.1), None, "above half of the threshold it stays");
        assert_eq!(thrash.judge(at(3_600), WINDOW, 0.1), Some(false));
    }

    #[test]
    fn two_slow_reloads_are_bad_luck() {
        let mut thrash = Thrash::default();
        thrash.note_reload(at(0), WINDOW, 60.0);
        thrash.note_reload(at(0), WINDOW, 60.0);
        assert_eq!(thrash.judge(at(0), WINDOW, 0.1), None);
        thrash.note_reload(at(0), WINDOW, 0.0);
        assert_eq!(thrash.judge(at(0), WINDOW, 0.1), Some(true));
    }
}
