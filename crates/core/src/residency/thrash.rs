//! The alarm of a pool that reloads what it has just evicted.

use super::Demand;
use crate::time::Instant;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Fewer reloads than this within a window are bad luck, not thrashing.
const RELOADS_MIN: f64 = 3.0;

/// Reloads of recently evicted models against requests, both decaying over a window.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct Thrash {
    reloads: Demand,
    requests: Demand,
    raised: bool,
}

impl Thrash {
    /// A request came.
    pub fn note_request(&mut self, now: Instant, window: Duration) {
        self.requests.note(now, window);
    }

    /// Something evicted within the window is loaded again.
    pub fn note_reload(&mut self, now: Instant, window: Duration) {
        self.reloads.note(now, window);
    }

    /// Reloads per request.
    pub fn ratio(&self, now: Instant, window: Duration) -> f64 {
        self.reloads.count_at(now, window) / self.requests.count_at(now, window).max(1.0)
    }

    /// Raises the alarm at the threshold and clears it at half of it; returns the new state when it changes.
    pub fn judge(&mut self, now: Instant, window: Duration, threshold: f64) -> Option<bool> {
        let ratio = self.ratio(now, window);
        let raised = if self.raised {
            ratio >= threshold / 2.0 && self.reloads.count_at(now, window) >= 1.0
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

    #[test]
    fn raised_by_reloads_and_cleared_by_quiet() {
        let mut thrash = Thrash::default();
        let mut changes = std::vec![];
        for second in 0..10 {
            let now = Instant::after(Duration::from_secs(second));
            thrash.note_request(now, WINDOW);
            thrash.note_reload(now, WINDOW);
            changes.extend(thrash.judge(now, WINDOW, 0.2));
        }
        assert_eq!(changes, [true]);
        assert!(thrash.is_raised());
        let later = Instant::after(Duration::from_secs(3_600));
        assert_eq!(thrash.judge(later, WINDOW, 0.2), Some(false));
    }

    #[test]
    fn many_requests_and_few_reloads_are_no_thrashing() {
        let mut thrash = Thrash::default();
        for request in 0..1_000 {
            thrash.note_request(Instant::ZERO, WINDOW);
            if request % 100 == 0 {
                thrash.note_reload(Instant::ZERO, WINDOW);
            }
        }
        assert_eq!(thrash.judge(Instant::ZERO, WINDOW, 0.2), None);
        assert!((thrash.ratio(Instant::ZERO, WINDOW) - 0.01).abs() < 1e-9);
    }
}
