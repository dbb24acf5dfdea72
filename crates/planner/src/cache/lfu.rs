//! The block that was used least often leaves first, of these the one that was used longest ago. Every use since the
//! beginning counts, also of blocks that are not there ("perfect LFU": Breslau et al., INFOCOM 1999).

use super::{
    Lookup,
    by_rank::{ByRank, Rank},
    trace::{BlockId, Trace},
};

pub(super) struct Lfu {
    uses: Vec<u32>,
}

impl Rank for Lfu {
    type Key = (u32, u32);

    fn rank(&mut self, block: BlockId, _is_there: bool, _place: usize, request: &Lookup<'_>) -> (u32, u32) {
        let uses = &mut self.uses[block as usize];
        *uses += 1;
        (*uses, request.number)
    }
}

pub(super) fn new(trace: &Trace, blocks_max: usize) -> ByRank<'_, Lfu> {
    ByRank::new(trace, blocks_max, Lfu { uses: vec![0; trace.blocks()] })
}
