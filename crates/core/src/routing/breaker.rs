//! Whether a replica, or one model of it, is asked at all, and whether a request may be tried a second time.

use crate::time::Instant;
use core::time::Duration;

/// So many failures one after another open the breaker.
pub const CONSECUTIVE_FAILURES_MAX: u32 = 3;
/// Of so many answers at least, ...
const WINDOW_ANSWERS_MIN: f32 = 16.0;
/// ... this share of failures opens it too.
const FAILURE_SHARE_MAX: f32 = 0.5;
/// How much each new answer pushes the older ones out.
const WINDOW_DECAY: f32 = 1.0 - 1.0 / 32.0;
/// Fewer failures than this, old as they are, count for nothing.
const FAILURES_FORGOTTEN: f32 = 0.05;
/// How long it stays open the first time; each time after that twice as long.
const OPEN_FIRST: Duration = Duration::from_millis(500);
/// A replica that came back is asked again within this and the answer to one request.
const OPEN_MAX: Duration = Duration::from_secs(4);

/// Tokens a request adds to the retry budget.
const RETRY_SHARE: f64 = 0.1;
/// There are always so many to begin with, however few requests there are.
const RETRY_TOKENS_MIN: f64 = 10.0;
/// No more than so many are saved up.
const RETRY_TOKENS_MAX: f64 = 1000.0;
/// A budget that was used up is back at its least after this.
const RETRY_REFILL: Duration = Duration::from_secs(10);

/// What a breaker lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Everything.
    Closed,
    /// Nothing before this moment.
    Open {
        /// The moment.
        until: Instant,
    },
    /// One request, which decides.
    HalfOpen,
}

/// The breaker of one replica, or of one model there.
#[derive(Debug, Clone)]
pub(super) struct Breaker {
    /// `None` while it is closed.
    open_until: Option<Instant>,
    open_next: Duration,
    consecutive: u32,
    answers: f32,
    failures: f32,
    /// Whether the one request of a half-open breaker is on its way.
    pub(super) trial: bool,
}

impl Breaker {
    pub(super) fn new() -> Self {
        Self { open_until: None, open_next: OPEN_FIRST, consecutive: 0, answers: 0.0, failures: 0.0, trial: false }
    }

    pub(super) fn state(&self, now: Instant) -> BreakerState {
        match self.open_until {
            None => BreakerState::Closed,
            Some(until) if now < until => BreakerState::Open { until },
            Some(_) => BreakerState::HalfOpen,
        }
    }

    /// The moment at which it may be half-open at the earliest, if it is open now.
    pub(super) fn open_until(&self, now: Instant) -> Option<Instant> {
        match self.state(now) {
            BreakerState::Open { until } => Some(until),
            BreakerState::Closed | BreakerState::HalfOpen => None,
        }
    }

    /// Whether a request may be sent now.
    pub(super) fn lets_through(&self, now: Instant) -> bool {
        match self.state(now) {
            BreakerState::Closed => true,
            BreakerState::Open { .. } => false,
            BreakerState::HalfOpen => !self.trial,
        }
    }

    /// A request is sent; true if it is the one that decides.
    pub(super) fn sent(&mut self, now: Instant) -> bool {
        let trial = self.state(now) == BreakerState::HalfOpen;
        self.trial |= trial;
        trial
    }

    pub(super) fn succeeded(&mut self, trial: bool) {
        self.count(0.0);
        self.consecutive = 0;
        if trial {
            *self = Self::new();
        }
    }

    pub(super) fn failed(&mut self, now: Instant, trial: bool) {
        self.count(1.0);
        self.consecutive += 1;
        let often = self.answers >= WINDOW_ANSWERS_MIN && self.failures > FAILURE_SHARE_MAX * self.answers;
        let closed = self.open_until.is_none();
        if trial {
            self.trial = false;
        }
        if trial || (closed && (often || self.consecutive >= CONSECUTIVE_FAILURES_MAX)) {
            self.open_until = Some(now + self.open_next);
            self.open_next = (self.open_next * 2).min(OPEN_MAX);
        }
    }

    /// Whether there is nothing worth remembering.
    pub(super) fn is_settled(&self) -> bool {
        self.open_until.is_none() && !self.trial && self.consecutive == 0 && self.failures < FAILURES_FORGOTTEN
    }

    /// Begins anew. A request that decides is still on its way.
    pub(super) fn reset(&mut self) {
        *self = Self { trial: self.trial, ..Self::new() };
    }

    /// A request ended without saying anything about the replica.
    pub(super) fn undecided(&mut self, trial: bool) {
        if trial {
            self.trial = false;
        }
    }

    /// A look at the replica's health: a sick one is asked nothing, a healthy one is tried at once.
    pub(super) fn probed(&mut self, now: Instant, healthy: bool) {
        match self.open_until {
            Some(until) if healthy => self.open_until = Some(until.min(now)),
            None if healthy => {}
            _ => self.open_until = Some(self.open_until.unwrap_or(now).max(now + OPEN_MAX)),
        }
    }

    fn count(&mut self, failure: f32) {
        self.answers = self.answers * WINDOW_DECAY + 1.0;
        self.failures = self.failures * WINDOW_DECAY + failure;
    }
}

/// How many requests may be tried a second time: a share of all, so that a fleet in trouble is not asked twice as much.
#[derive(Debug, Clone)]
pub(super) struct RetryBudget {
    tokens: f64,
    at: Instant,
}

impl RetryBudget {
    pub(super) fn new() -> Self {
        Self { tokens: RETRY_TOKENS_MIN, at: Instant::ZERO }
    }

    pub(super) fn request(&mut self) {
        self.tokens = (self.tokens + RETRY_SHARE).min(RETRY_TOKENS_MAX);
    }

    /// Takes one token if there is one.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        if self.tokens < RETRY_TOKENS_MIN {
            let refill = now.since(self.at).as_secs_f64() / RETRY_REFILL.as_secs_f64() * RETRY_TOKENS_MIN;
            self.tokens = (self.tokens + refill).min(RETRY_TOKENS_MIN);
        }
        self.at = now;
        let there = self.tokens >= 1.0;
        if there {
            self.tokens -= 1.0;
        }
        there
    }

    pub(super) fn is_sane(&self) -> bool {
        (0.0..=RETRY_TOKENS_MAX).contains(&self.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Instant {
        Instant::after(Duration::from_secs_f64(seconds))
    }

    #[test]
    fn it_opens_tries_one_and_closes() {
        let mut breaker = Breaker::new();
        for _ in 0..CONSECUTIVE_FAILURES_MAX {
            assert!(breaker.lets_through(at(1.0)));
            breaker.failed(at(1.0), false);
        }
        assert!(!breaker.lets_through(at(1.1)));
        assert!(breaker.lets_through(at(1.6)));
        assert!(breaker.sent(at(1.6)));
        assert!(!breaker.lets_through(at(1.6)), "a second one at once");
        breaker.succeeded(true);
        assert_eq!(breaker.state(at(1.7)), BreakerState::Closed);
    }

    #[test]
    fn a_replica_that_was_gone_for_long_is_tried_within_five_seconds_of_its_return_r10() {
        let mut breaker = Breaker::new();
        let mut now = 0.0;
        for _ in 0..200 {
            now += 0.1;
            if breaker.lets_through(at(now)) {
                let trial = breaker.sent(at(now));
                breaker.failed(at(now), trial);
            }
        }
        assert!(breaker.lets_through(at(now + 4.9)));
        breaker.probed(at(now), true);
        assert!(breaker.lets_through(at(now)), "a probe that finds it well does not wait");
    }

    #[test]
    fn half_of_the_answers_failing_opens_it_too() {
        let mut breaker = Breaker::new();
        for number in 0..60 {
            if number % 3 == 0 { breaker.succeeded(false) } else { breaker.failed(at(1.0), false) }
        }
        assert!(!breaker.lets_through(at(1.0)));
    }

    #[test]
    fn a_tenth_of_the_requests_and_never_less_than_ten_may_be_tried_again() {
        let mut budget = RetryBudget::new();
        assert_eq!((0..50).filter(|_| budget.take(at(1.0))).count(), 10);
        assert_eq!((0..50).filter(|_| budget.take(at(60.0))).count(), 10);
        for _ in 0..1000 {
            budget.request();
        }
        let again = (0..500).filter(|_| budget.take(at(60.0))).count();
        assert!((99..=101).contains(&again), "{again}");
    }
}
