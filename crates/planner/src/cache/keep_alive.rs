//! A block that was not used for ten minutes leaves; before that LRU, where there is no room.

use super::{
    Lookup,
    by_rank::{ByRank, Rank},
    trace::{BlockId, Trace},
};
use std::time::Duration;
use warmset_core::Instant;

const KEEP_ALIVE: Duration = Duration::from_secs(600);

pub(super) struct KeepAlive;

impl Rank for KeepAlive {
    type Key = (Instant, u32);

    fn rank(&mut self, _block: BlockId, _is_there: bool, _place: usize, request: &Lookup<'_>) -> Self::Key {
        (request.at, request.number)
    }

    fn has_expired(&self, (used_at, _): Self::Key, now: Instant) -> bool {
        now.since(used_at) > KEEP_ALIVE
    }
}

pub(super) fn new(trace: &Trace, blocks_max: usize) -> ByRank<'_, KeepAlive> {
    ByRank::new(trace, blocks_max, KeepAlive)
}
