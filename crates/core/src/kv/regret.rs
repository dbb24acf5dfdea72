//! What left host memory for want of room and was asked for again: what more room would be worth.
//!
//! A block that comes back so long after it left would have been there with as many bytes more as others brought in meanwhile.
//! The shorter that time, the more a byte would have saved: seconds of rewarming, over its bytes and that time.

use super::protocol::BlockKeyShort;
use crate::{memory::Bytes, time::Instant};
use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;

/// The most blocks that are remembered: a few MiB of memory.
const REMEMBERED_MAX: usize = 1 << 16;
/// No block comes back sooner: below this, times say nothing.
const SHORTEST: Duration = Duration::from_secs(1);
/// What was seen before the last telling counts for so much.
const FADING: f64 = 0.5;

/// Blocks that left, and what coming back cost those that did.
#[derive(Debug, Clone, Default)]
pub(super) struct Regrets {
    left_at: BTreeMap<BlockKeyShort, Instant>,
    /// In the order in which they left; some have come back.
    order: VecDeque<(BlockKeyShort, Instant)>,
    seconds: f64,
    byte_seconds: f64,
}

impl Regrets {
    /// A block left for want of room.
    pub(super) fn left(&mut self, now: Instant, key: BlockKeyShort) {
        self.left_at.insert(key, now);
        self.order.push_back((key, now));
        while self.order.len() > REMEMBERED_MAX
            && let Some((oldest, at)) = self.order.pop_front()
        {
            // It may have come back and left again since.
            if self.left_at.get(&oldest) == Some(&at) {
                self.left_at.remove(&oldest);
            }
        }
    }

    /// A block is asked for that is not in host memory. How long ago it left, if it left for want of room.
    pub(super) fn comes_back(&mut self, now: Instant, key: BlockKeyShort) -> Option<Duration> {
        self.left_at.remove(&key).map(|at| now.since(at))
    }

    /// It took so long to have it again.
    pub(super) fn note(&mut self, rewarm_seconds: f64, bytes: Bytes, after: Duration) {
        self.seconds += rewarm_seconds;
        self.byte_seconds += bytes as f64 * after.max(SHORTEST).as_secs_f64();
    }

    /// Seconds saved per second and byte that more room would have brought, and less of it from now on.
    pub(super) fn tell(&mut self) -> f64 {
        let worth = if self.byte_seconds > 0.0 { self.seconds / self.byte_seconds } else { 0.0 };
        (self.seconds, self.byte_seconds) = (self.seconds * FADING, self.byte_seconds * FADING);
        worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::after(Duration::from_secs(seconds))
    }

    #[test]
    fn the_sooner_something_comes_back_the_more_room_would_have_been_worth() {
        let mut regrets = Regrets::default();
        let key = BlockKeyShort(7);
        regrets.left(at(10), key);
        let after = regrets.comes_back(at(30), key).unwrap();
        assert_eq!(regrets.comes_back(at(31), key), None, "it is there again");
        regrets.note(0.5, 1000, after);
        assert!((regrets.tell() - 0.5 / 1000.0 / 20.0).abs() < 1e-12);
        regrets.note(0.5, 1000, Duration::ZERO);
        assert!(regrets.tell() > 0.5 / 1000.0 / 20.0);
        assert!(Regrets::default().tell() <= 0.0);
    }

    #[test]
    fn so_many_are_remembered_and_not_more() {
        let mut regrets = Regrets::default();
        for number in 0..=REMEMBERED_MAX {
            regrets.left(at(1), BlockKeyShort(number as u128));
        }
        assert_eq!(regrets.comes_back(at(2), BlockKeyShort(0)), None);
        assert!(regrets.comes_back(at(2), BlockKeyShort(1)).is_some());
        // What came back and left again is as new.
        regrets.left(at(3), BlockKeyShort(1));
        regrets.left(at(3), BlockKeyShort(REMEMBERED_MAX as u128 + 1));
        assert_eq!(regrets.comes_back(at(4), BlockKeyShort(1)), Some(Duration::from_secs(1)));
        assert!(regrets.order.len() <= REMEMBERED_MAX && regrets.left_at.len() <= REMEMBERED_MAX);
    }
}
