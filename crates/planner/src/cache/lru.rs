//! The block that was used longest ago leaves first; of one request the last.

use super::{
    Lookup,
    by_rank::{ByRank, Rank},
    trace::{BlockId, Trace},
};

pub(super) struct Lru;

impl Rank for Lru {
    type Key = u32;

    fn rank(&mut self, _block: BlockId, _is_there: bool, _place: usize, request: &Lookup<'_>) -> u32 {
        request.number
    }
}

pub(super) fn new(trace: &Trace, blocks_max: usize) -> ByRank<'_, Lru> {
    ByRank::new(trace, blocks_max, Lru)
}
