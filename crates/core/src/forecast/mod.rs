//! When a model will be asked for next: from the times between its requests, from the time of day, and from schedules.
//!
//! All three speak as a demand: the chance that a request comes, over the time the model has to be kept for it. So what
//! is expected and what has been asked for of late weigh on one scale.

mod day;
mod intervals;
pub(crate) mod whole;

pub use day::{BIN_SECONDS, DayProfile, Slot, WallTime};
pub use intervals::{INTERVAL_BINS, Intervals, Window};

use crate::time::Instant;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// A model whose schedule says that it be warm weighs as if it were asked once a minute.
const SCHEDULED_PER_SECOND: f64 = 1.0 / 60.0;

/// Which parts of the forecast are used. What is not used is learned all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// What is due is loaded before it is asked for.
    pub preload: bool,
    /// The times between requests count.
    pub intervals: bool,
    /// The time of day counts.
    pub time_of_day: bool,
}

impl Parts {
    /// Everything.
    pub const ALL: Self = Self { preload: true, intervals: true, time_of_day: true };
    /// Nothing: what counts is how often a model was asked for of late.
    pub const NONE: Self = Self { preload: false, intervals: false, time_of_day: false };
}

/// What an expectation rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The configuration says that it be warm.
    Schedule,
    /// The times between its requests.
    Intervals,
    /// The time of day of its requests.
    TimeOfDay,
}

/// What became of the loads that nobody had asked for yet.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Score {
    /// A request found the model ready: a cold start less.
    pub used: u32,
    /// A request came while it was being loaded: a shorter wait.
    pub late: u32,
    /// It left, or was given up, before anybody asked.
    pub wasted: u32,
}

/// What is expected of one model, for people to see.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Expectation {
    /// What it rests on; none if there is no expectation beyond the demand of late.
    pub source: Option<Source>,
    /// When the next request is expected.
    pub next_in: Option<Duration>,
    /// When it is due for a preload.
    pub due_in: Option<Duration>,
    /// Intervals learned from.
    pub intervals: u32,
    /// How often it was right.
    pub score: Score,
}

/// What is known of one model's requests.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Forecast {
    intervals: Intervals,
    day: DayProfile,
    score: Score,
    /// When the last request came, or this was remembered.
    #[serde(skip)]
    last: Option<Instant>,
    /// How old the last request was then.
    #[serde(skip)]
    age: Duration,
    /// Its schedule says that it be warm now.
    #[serde(skip)]
    scheduled: bool,
}

/// What a forecast is made for: the moment, and what may be used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// Now.
    pub now: Instant,
    /// The time of day, if anybody has told it.
    pub wall: Option<WallTime>,
    /// What may be used.
    pub parts: Parts,
}

impl Forecast {
    /// What was learned before a restart, of a model last asked for so long ago.
    pub fn remembered(mut self, now: Instant, age: Duration) -> Self {
        let known = self.intervals.count() > 0 || !self.day.is_empty();
        (self.last, self.age) = (known.then_some(now), age);
        self
    }

    /// A request came.
    pub fn note(&mut self, now: Instant) {
        if let Some(age) = self.age_at(now) {
            self.intervals.note(age);
        }
        self.day.note();
        (self.last, self.age) = (Some(now), Duration::ZERO);
    }

    fn age_at(&self, now: Instant) -> Option<Duration> {
        Some(now.since(self.last?) + self.age)
    }

    /// The machine slept: its clock stood still for so long.
    pub fn slept(&mut self, asleep: Duration) {
        self.age += asleep;
    }

    /// The quarter of an hour is over, or unknown because the clock was set.
    pub fn close_slot(&mut self, slot: Slot, watched: bool) {
        if watched { self.day.close(slot) } else { self.day.skip() }
    }

    /// Its schedule begins or ends.
    pub fn schedule(&mut self, warm: bool) {
        self.scheduled = warm;
    }

    /// Whether its schedule says that it be warm.
    pub fn is_scheduled(&self) -> bool {
        self.scheduled
    }

    /// Whether anything was learned.
    pub fn is_empty(&self) -> bool {
        self.intervals.count() == 0 && self.day.is_empty()
    }

    /// How often it was right.
    pub fn score(&self) -> Score {
        self.score
    }

    /// How often it was right, to be counted up.
    pub fn score_mut(&mut self) -> &mut Score {
        &mut self.score
    }

    /// Requests per second to expect, where the demand of late is known.
    pub fn demand_per_second(&self, moment: Moment, of_late: f64) -> f64 {
        let by_interval = self.usable_age(moment).map(|age| self.intervals.demand_per_second(age, of_late));
        let by_day = moment.wall.filter(|_| moment.parts.time_of_day).map(|wall| self.day.demand_per_second(wall));
        let scheduled = if self.scheduled { SCHEDULED_PER_SECOND } else { 0.0 };
        by_interval.unwrap_or(of_late).max(by_day.unwrap_or(0.0)).max(scheduled)
    }

    /// How old the last request is, where its intervals may be planned by.
    fn usable_age(&self, moment: Moment) -> Option<Duration> {
        let usable = moment.parts.intervals && self.intervals.is_representative();
        self.age_at(moment.now).filter(|_| usable)
    }

    /// From when to when it is due, the next time from now on, and why.
    pub fn due(&self, moment: Moment) -> Option<(Instant, Instant, Source)> {
        if !moment.parts.preload {
            return None;
        }
        if self.scheduled {
            return Some((moment.now, Instant(u64::MAX), Source::Schedule));
        }
        let by_interval = self.usable_age(moment).and_then(|age| {
            let window = self.intervals.window()?;
            let from = moment.now + window.from.saturating_sub(age);
            (window.until > age).then(|| (from, moment.now + (window.until - age), Source::Intervals))
        });
        let by_day = moment.wall.filter(|_| moment.parts.time_of_day).and_then(|wall| {
            let (begin, end) = self.day.next_in(wall)?;
            Some((moment.now + begin, moment.now + end, Source::TimeOfDay))
        });
        by_interval.into_iter().chain(by_day).min_by_key(|(from, _, _)| *from)
    }

    /// What is expected, for people to see.
    pub fn expectation(&self, moment: Moment) -> Expectation {
        let everything = Moment { parts: Parts { preload: true, ..moment.parts }, ..moment };
        let due = self.due(everything);
        let source = due.map(|(_, _, source)| source);
        let from_now = |at: Instant| at.since(moment.now);
        let next_in = match source {
            Some(Source::Intervals) => self.usable_age(everything).and_then(|age| self.intervals.next_in(age)),
            Some(Source::Schedule | Source::TimeOfDay) => due.map(|(from, _, _)| from_now(from)),
            None => None,
        };
        Expectation {
            source,
            next_in,
            due_in: due.map(|(from, _, _)| from_now(from)),
            intervals: self.intervals.count(),
            score: self.score,
        }
    }
}
