//! The hybrid histogram policy of "Serverless in the Wild" (Shahrad et al., ATC 2020): what is idle is kept for as long as 99 %
//! of its application's idle times were, by a histogram of minutes over four hours; for all four hours while too few times
//! are known or they are spread too evenly. An application is a first block and what hangs on it. Nothing is warmed ahead,
//! since nobody knows a prompt before it is there. Where there is no room, what is to leave soonest leaves first.

use super::{
    Lookup,
    by_rank::{ByRank, Rank},
    trace::{BlockId, Trace},
};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::Instant;

const MINUTE: Duration = Duration::from_secs(60);
/// Four hours.
const MINUTES: usize = 240;
const QUANTILE: f64 = 0.99;
/// Below this coefficient of variation of its counts a histogram says nothing (section 4.2 of the paper).
const VARIATION_MIN: f64 = 2.0;
/// Idle times that must be known.
const TIMES_MIN: u32 = 10;

struct Histogram {
    counts: [u32; MINUTES],
    total: u32,
    squares: u64,
}

impl Histogram {
    fn note(&mut self, idle: Duration) {
        let minute = (idle.as_secs() / MINUTE.as_secs()) as usize;
        if let Some(count) = self.counts.get_mut(minute) {
            self.squares += 2 * u64::from(*count) + 1;
            *count += 1;
            self.total += 1;
        }
    }

    fn keep_alive(&self) -> Duration {
        let mean = f64::from(self.total) / MINUTES as f64;
        let variance = self.squares as f64 / MINUTES as f64 - mean * mean;
        if self.total < TIMES_MIN || variance.max(0.0).sqrt() < VARIATION_MIN * mean {
            return MINUTE * MINUTES as u32;
        }
        let wanted = (f64::from(self.total) * QUANTILE).ceil() as u32;
        let mut seen = 0;
        let minute = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        MINUTE * (minute.unwrap_or(MINUTES - 1) as u32 + 1)
    }
}

pub(super) struct HybridHistogram {
    applications: BTreeMap<BlockId, Histogram>,
    used_at: Vec<Option<Instant>>,
    keep_until: Instant,
}

impl Rank for HybridHistogram {
    type Key = (Instant, u32);

    fn begin(&mut self, request: &Lookup<'_>) {
        let Some(first) = request.blocks.first() else { return };
        let empty = || Histogram { counts: [0; MINUTES], total: 0, squares: 0 };
        let histogram = self.applications.entry(*first).or_insert_with(empty);
        for block in request.blocks {
            if let Some(used_at) = self.used_at[*block as usize].replace(request.at) {
                histogram.note(request.at.since(used_at));
            }
        }
        self.keep_until = request.at + histogram.keep_alive();
    }

    fn rank(&mut self, _block: BlockId, _is_there: bool, _place: usize, request: &Lookup<'_>) -> Self::Key {
        (self.keep_until, request.number)
    }

    fn has_expired(&self, (keep_until, _): Self::Key, now: Instant) -> bool {
        keep_until < now
    }
}

pub(super) fn new(trace: &Trace, blocks_max: usize) -> ByRank<'_, HybridHistogram> {
    let used_at = vec![None; trace.blocks()];
    ByRank::new(
        trace,
        blocks_max,
        HybridHistogram { applications: BTreeMap::new(), used_at, keep_until: Instant::ZERO },
    )
}
