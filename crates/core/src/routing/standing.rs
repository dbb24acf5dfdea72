//! How one model stands at one replica: whether it fails there, and whether the replica asked to be left alone with it.

use super::{breaker::Breaker, protocol::Outcome};
use crate::time::Instant;
use core::time::Duration;

/// The longest time a replica's `retry-after` is believed.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// One model's trouble.
#[derive(Debug, Clone)]
pub(super) struct Standing {
    pub(super) breaker: Breaker,
    /// What the replica asked for: not a failure, and no probe cuts it short.
    asked_until: Option<Instant>,
}

impl Standing {
    pub(super) fn new() -> Self {
        Self { breaker: Breaker::new(), asked_until: None }
    }

    pub(super) fn may_be_asked(&self, now: Instant) -> bool {
        self.breaker.lets_through(now) && self.asked(now).is_none()
    }

    fn asked(&self, now: Instant) -> Option<Instant> {
        self.asked_until.filter(|until| now < *until)
    }

    /// Until when it is not asked, and whether the replica wants it so.
    pub(super) fn pause(&self, now: Instant) -> Option<(Instant, bool)> {
        let (open, asked) = (self.breaker.open_until(now), self.asked(now));
        open.max(asked).map(|until| (until, asked >= open))
    }

    pub(super) fn ended(&mut self, now: Instant, trial: bool, outcome: Outcome) {
        match outcome {
            Outcome::Finished => self.breaker.succeeded(trial),
            Outcome::Cancelled | Outcome::Lost => self.breaker.undecided(trial),
            Outcome::Failed | Outcome::Busy { retry_after: None } => self.breaker.failed(now, trial),
            Outcome::Busy { retry_after: Some(wait) } => {
                self.breaker.undecided(trial);
                self.asked_until = self.asked_until.max(Some(now + wait.min(RETRY_AFTER_MAX)));
            }
        }
    }

    pub(super) fn reset(&mut self) {
        self.breaker.reset();
        self.asked_until = None;
    }

    /// Whether there is nothing to remember.
    pub(super) fn is_settled(&self, now: Instant) -> bool {
        self.breaker.is_settled() && self.asked(now).is_none()
    }
}
