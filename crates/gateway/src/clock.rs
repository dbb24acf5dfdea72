//! The clocks: monotonic time for every decision and duration, wall time only to print dates.

use std::time::{Duration, SystemTime, UNIX_EPOCH};
use warmset_core::{ClockSpeed, Instant};

/// The monotonic clock of one run. Copies share their origin, so instants of different parts compare.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: std::time::Instant,
    speed: ClockSpeed,
}

impl Clock {
    /// A clock whose origin is `origin`.
    pub fn since(origin: std::time::Instant, speed: ClockSpeed) -> Self {
        Self { origin, speed }
    }

    /// A clock whose origin is now, as fast as time is.
    pub fn start() -> Self {
        Self::since(std::time::Instant::now(), ClockSpeed::default())
    }

    /// Time since the origin.
    pub fn now(&self) -> Instant {
        Instant::after(self.speed.inside(self.origin.elapsed()))
    }

    /// How long to wait until `instant`; zero if it has passed.
    pub fn until(&self, instant: Instant) -> Duration {
        self.speed.outside(instant.since(self.now()))
    }

    /// How fast it goes.
    pub fn speed(&self) -> ClockSpeed {
        self.speed
    }

    /// Resolves at `instant`; never without one.
    pub(crate) async fn reach(self, instant: Option<Instant>) {
        match instant {
            Some(instant) => tokio::time::sleep(self.until(instant)).await,
            None => std::future::pending().await,
        }
    }
}

/// Seconds since 1970 by the wall clock, for the `created` fields of OpenAI's objects.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_clock_is_ahead_and_waits_less() {
        let minute = Duration::from_secs(60);
        let origin =
            std::time::Instant::now().checked_sub(Duration::from_secs(1)).expect("a machine is up for a second");
        let speed = ClockSpeed::new(240).expect("not zero");
        let clock = Clock::since(origin, speed);
        assert!(clock.now() >= Instant::after(4 * minute));
        assert!(clock.until(clock.now() + minute) <= Duration::from_millis(250));
    }
}
