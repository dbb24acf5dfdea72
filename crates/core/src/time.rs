//! Virtual time: nanoseconds since an origin that the caller chooses. Live it is the process's monotonic clock.

use core::{
    num::NonZeroU32,
    ops::{Add, Sub},
    time::Duration,
};
use serde::{Deserialize, Serialize};

/// A point in time, in nanoseconds since the run began.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instant(pub u64);

impl Instant {
    /// The origin.
    pub const ZERO: Self = Self(0);

    /// The instant that lies `duration` after the origin.
    pub fn after(duration: Duration) -> Self {
        Self::ZERO + duration
    }

    /// Time passed since `earlier`; zero if `earlier` lies ahead.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanoseconds))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanoseconds))
    }
}

/// How many times as fast as outside a run's time passes: once, but for replays with engines that compute nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockSpeed(NonZeroU32);

impl Default for ClockSpeed {
    fn default() -> Self {
        Self(NonZeroU32::MIN)
    }
}

impl ClockSpeed {
    /// So many times as fast; none for zero times.
    pub fn new(times: u32) -> Option<Self> {
        NonZeroU32::new(times).map(Self)
    }

    /// How many times as fast.
    pub fn times(self) -> u32 {
        self.0.get()
    }

    /// What passes in the run while this passes outside.
    pub fn inside(self, outside: Duration) -> Duration {
        outside.saturating_mul(self.times())
    }

    /// The same in seconds.
    pub fn inside_seconds(self, outside: f64) -> f64 {
        outside * f64::from(self.times())
    }

    /// What passes outside while this passes in the run.
    pub fn outside(self, inside: Duration) -> Duration {
        inside / self.times()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_as_many_times_as_fast_as_said_and_as_ever_if_nothing_is() {
        let (minute, speed) = (Duration::from_secs(60), ClockSpeed::new(240).expect("not zero"));
        assert_eq!(speed.inside(Duration::from_millis(250)), minute);
        assert_eq!(speed.outside(minute), Duration::from_millis(250));
        assert_eq!(speed.inside(Duration::MAX), Duration::MAX);
        assert_eq!(ClockSpeed::default().inside(minute), minute);
        assert_eq!(ClockSpeed::default().outside(minute), minute);
        assert_eq!(ClockSpeed::new(0), None);
    }
}
