//! The offline optimum: the block whose next use is farthest away leaves first, also one that has just come (Belady, IBM
//! Systems Journal 1966, with bypassing).
//!
//! It is exact for blocks: no rule, whatever it knows, finds more of them with the same room. Keeping a block from one use to
//! the next is an interval, at most so many intervals may lie over each other as there is room for, and leaving out the
//! one that ends last when there are too many loses fewest. That found blocks must be a beginning of the prompt costs
//! nothing: whoever uses a block uses all before it, so that its next use is never before theirs, and of equal ones the
//! deepest leaves. In tokens it may lie below the optimum by what last blocks that are not full have less than others,
//! since it takes all blocks for equal.

use super::{
    Lookup,
    by_rank::{ByRank, Rank},
    trace::{BlockId, Trace},
};
use std::cmp::Reverse;

pub(super) struct Optimum {
    /// Of each use the number of the next request that uses the same block.
    next: Vec<u32>,
}

impl Rank for Optimum {
    type Key = Reverse<u32>;

    fn rank(&mut self, _block: BlockId, _is_there: bool, place: usize, _request: &Lookup<'_>) -> Reverse<u32> {
        Reverse(self.next[place])
    }
}

pub(super) fn new(trace: &Trace, blocks_max: usize) -> ByRank<'_, Optimum> {
    let (mut next, mut last_place) = (vec![u32::MAX; trace.uses()], vec![usize::MAX; trace.blocks()]);
    for request in trace.lookups() {
        for (block, place) in request.blocks.iter().zip(request.first_use..) {
            let before = std::mem::replace(&mut last_place[*block as usize], place);
            if let Some(next) = next.get_mut(before) {
                *next = request.number;
            }
        }
    }
    ByRank::new(trace, blocks_max, Optimum { next })
}
