//! Pauses after failed loads and crashes, doubling up to a limit.

use crate::{time::Instant, worker::LoadError};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// What is remembered of a model's recent failures.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    failures: u32,
    pause: Option<(Instant, LoadError)>,
}

impl Backoff {
    /// A load failed: nothing is tried before the returned pause has passed. A permanent failure pauses longest.
    pub fn load_failed(&mut self, now: Instant, error: LoadError, first: Duration, max: Duration) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let doubled = first.saturating_mul(1_u32.checked_shl(self.failures - 1).unwrap_or(u32::MAX));
        let pause = if error.permanent { max } else { doubled.min(max) };
        self.pause = Some((now + pause, error));
        pause
    }

    /// A ready engine died. The first time it may be started again at once, then it pauses like a failed load.
    pub fn crashed(&mut self, now: Instant, error: LoadError, first: Duration, max: Duration) -> Duration {
        if self.failures == 0 {
            self.failures = 1;
            return Duration::ZERO;
        }
        self.load_failed(now, error, first, max)
    }

    /// A request was answered: the model works.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// The cached error and what is left of its pause, while it lasts.
    pub fn paused(&self, now: Instant) -> Option<(&LoadError, Duration)> {
        self.pause.as_ref().filter(|(until, _)| *until > now).map(|(until, error)| (error, until.since(now)))
    }

    /// When the pause ends.
    pub fn until(&self) -> Option<Instant> {
        self.pause.as_ref().map(|(until, _)| *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(1);
    const MAX: Duration = Duration::from_secs(120);

    fn error(permanent: bool) -> LoadError {
        LoadError { message: "broken".into(), permanent }
    }

    #[test]
    fn pauses_double_up_to_the_limit() {
        let mut backoff = Backoff::default();
        let pauses: std::vec::Vec<u64> =
            (0..40).map(|_| backoff.load_failed(Instant::ZERO, error(false), FIRST, MAX).as_secs()).collect();
        assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 64, 120]);
        assert!(pauses[8..].iter().all(|seconds| *seconds == 120));
    }

    #[test]
    fn a_permanent_failure_pauses_longest_at_once() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.load_failed(Instant::ZERO, error(true), FIRST, MAX), MAX);
        let last = Instant::after(MAX) - Duration::from_nanos(1);
        assert_eq!(backoff.paused(last), Some((&error(true), Duration::from_nanos(1))));
        assert_eq!(backoff.paused(Instant::after(MAX)), None);
        assert_eq!(backoff.until(), Some(Instant::after(MAX)));
    }

    #[test]
    fn one_crash_is_forgiven_and_success_forgets() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.crashed(Instant::ZERO, error(false), FIRST, MAX), Duration::ZERO);
        assert_eq!(backoff.paused(Instant::ZERO), None);
        assert_eq!(backoff.crashed(Instant::ZERO, error(false), FIRST, MAX).as_secs(), 2);
        backoff.succeeded();
        assert_eq!(backoff.crashed(Instant::ZERO, error(false), FIRST, MAX), Duration::ZERO);
    }
}
