//! Virtual time: nanoseconds since an origin that the caller chooses. Live it is the process's monotonic clock.

use core::{
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
