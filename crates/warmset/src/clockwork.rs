//! The clock on the wall, for a worker that has none: what time of the week it is here, and whether the machine slept.

use crate::schedule::Window;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use warmset_core::{Digest, forecast::WallTime};
use warmset_worker::AgentHandle;

/// How often the worker is told. A clock that is set is noticed within this.
const TELL_INTERVAL: Duration = Duration::from_secs(20);
/// A scheduled model begins to load so long before its window, with time to be told and to be loaded.
const SCHEDULE_LEAD: Duration = Duration::from_secs(120);
/// Less than this is the time between reading two clocks.
const ASLEEP_MIN: Duration = Duration::from_secs(1);

/// The schedules of all models that have one, and what the worker was last told of each.
#[derive(Debug, Default, Clone)]
pub(crate) struct Schedules(Arc<Mutex<BTreeMap<Digest, Schedule>>>);

#[derive(Debug, Default)]
struct Schedule {
    windows: Vec<Window>,
    told: bool,
}

impl Schedules {
    /// A model's schedule is this from now on. It was checked when it was given; what cannot be read any more (a time
    /// zone may go with an update of the machine) is left out.
    pub(crate) fn set(&self, digest: Digest, texts: &[String]) {
        let windows: Vec<Window> = texts.iter().filter_map(|text| Window::parse(text).ok()).collect();
        if windows.len() < texts.len() {
            tracing::warn!(%digest, "a schedule cannot be read here and is not followed: {}", texts.join("; "));
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // One that had a schedule is told of its end.
        if !windows.is_empty() || all.contains_key(&digest) {
            all.entry(digest).or_default().windows = windows;
        }
    }

    /// Models whose window has opened or closed since the last time.
    fn turns(&self, now: jiff::Timestamp) -> Vec<(Digest, bool)> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut turns = Vec::new();
        for (digest, schedule) in all.iter_mut() {
            let open = schedule.windows.iter().any(|window| window.is_open(now, SCHEDULE_LEAD));
            if open != std::mem::replace(&mut schedule.told, open) {
                turns.push((*digest, open));
            }
        }
        all.retain(|_, schedule| !schedule.windows.is_empty());
        turns
    }
}

/// Tells the worker the time and the schedules' turns from now on. Where the server's time passes faster than outside, the
/// clock on the wall is read as if it did, too.
pub(crate) fn follow(agent: AgentHandle, schedules: Schedules) {
    tokio::spawn(async move {
        let clock = agent.clock();
        let mut asleep_in_all = asleep_since_boot();
        let mut ticks = tokio::time::interval(clock.speed().outside(TELL_INTERVAL));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while agent.facts().is_some() {
            ticks.tick().await;
            let asleep = asleep_since_boot();
            let since = asleep.saturating_sub(asleep_in_all);
            let slept = since >= ASLEEP_MIN;
            if slept {
                asleep_in_all = asleep;
            }
            let now = jiff::ZonedDateTime::now().saturating_add(clock.ahead());
            agent.tell_time(wall_time(&now), if slept { since } else { Duration::ZERO });
            for (digest, warm) in schedules.turns(now.timestamp()) {
                agent.schedule(digest, warm);
            }
        }
    });
}

fn wall_time(now: &jiff::ZonedDateTime) -> WallTime {
    let seconds = i32::from(now.hour()) * 3_600 + i32::from(now.minute()) * 60 + i32::from(now.second());
    WallTime {
        weekday: u8::try_from(now.weekday().to_monday_zero_offset()).unwrap_or(0),
        second: u32::try_from(seconds).unwrap_or(0),
    }
}

/// How long the machine has slept since it was started: one clock stands still meanwhile, the other does not.
fn asleep_since_boot() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let read = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    read(ClockId::Boottime).saturating_sub(read(ClockId::Monotonic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_turn_once_and_one_that_is_taken_away_closes() {
        let schedules = Schedules::default();
        let digest = Digest([1; 32]);
        let at = |text: &str| schedules.turns(text.parse().unwrap());
        schedules.set(digest, &["08:00-09:00 UTC".to_owned()]);
        assert_eq!(at("2026-11-29T07:57:00Z"), []);
        assert_eq!(at("2026-11-29T07:58:30Z"), [(digest, true)]);
        assert_eq!(at("2026-11-29T08:30:00Z"), []);
        assert_eq!(at("2026-11-29T09:00:00Z"), [(digest, false)]);
        assert_eq!(at("2026-11-30T08:30:00Z"), [(digest, true)]);
        schedules.set(digest, &[]);
        assert_eq!(at("2026-11-30T08:31:00Z"), [(digest, false)]);
        schedules.set(digest, &[]);
        assert_eq!(at("2026-11-30T08:32:00Z"), []);
    }

    #[test]
    fn the_week_begins_on_monday() {
        let sunday: jiff::ZonedDateTime = "2026-11-29T21:18:04+00:00[UTC]".parse().unwrap();
        assert_eq!(wall_time(&sunday), WallTime { weekday: 6, second: 21 * 3_600 + 18 * 60 + 4 });
    }

    #[test]
    fn an_hour_that_comes_twice_is_told_twice() {
        let first: jiff::ZonedDateTime = "2026-10-25T02:30:00+02:00[Europe/Berlin]".parse().unwrap();
        let second = first.checked_add(jiff::SignedDuration::from_hours(1)).unwrap();
        assert_eq!(wall_time(&first), wall_time(&second));
    }
}
