//! The clock on the wall, for a worker that has none: what time of the week it is here, and whether the machine slept.

use std::time::Duration;
use warmset_core::forecast::WallTime;
use warmset_worker::AgentHandle;

/// How often the worker is told. A clock that is set is noticed within this.
const TELL_INTERVAL: Duration = Duration::from_secs(20);
/// Less than this is the time between reading two clocks.
const ASLEEP_MIN: Duration = Duration::from_secs(1);

/// Tells the worker the time from now on.
pub(crate) fn follow(agent: AgentHandle) {
    tokio::spawn(async move {
        let mut asleep_in_all = asleep_since_boot();
        let mut ticks = tokio::time::interval(TELL_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while agent.facts().is_some() {
            ticks.tick().await;
            let asleep = asleep_since_boot();
            let since = asleep.saturating_sub(asleep_in_all);
            let slept = since >= ASLEEP_MIN;
            if slept {
                asleep_in_all = asleep;
            }
            agent.tell_time(wall_time(&jiff::ZonedDateTime::now()), if slept { since } else { Duration::ZERO });
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
