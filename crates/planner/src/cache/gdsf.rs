//! Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1, 1998): uses since the block came, times cost, by size, above the
//! rank of what left last. Cost and size of blocks are equal here.

use super::{
    Lookup,
    by_rank::{ByRank, Rank},
    trace::{BlockId, Trace},
};

pub(super) struct Gdsf {
    uses: Vec<u32>,
    /// The rank of what left last.
    clock: u64,
}

impl Rank for Gdsf {
    type Key = (u64, u32);

    fn rank(&mut self, block: BlockId, is_there: bool, _place: usize, request: &Lookup<'_>) -> (u64, u32) {
        let uses = &mut self.uses[block as usize];
        *uses = if is_there { *uses + 1 } else { 1 };
        (self.clock + u64::from(*uses), request.number)
    }

    fn evicted(&mut self, (rank, _): (u64, u32)) {
        self.clock = self.clock.max(rank);
    }
}

pub(super) fn new(trace: &Trace, blocks_max: usize) -> ByRank<'_, Gdsf> {
    ByRank::new(trace, blocks_max, Gdsf { uses: vec![0; trace.blocks()], clock: 0 })
}
