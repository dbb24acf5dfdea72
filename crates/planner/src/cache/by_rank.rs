//! Rules that keep blocks by a rank: the block of the lowest leaves first, and no block before those that hang on it.

use super::{
    Lookup, Policy,
    trace::{BlockId, NO_BLOCK, Trace},
};
use std::{cmp::Reverse, collections::BTreeSet};
use warmset_core::Instant;

/// What a rule thinks of a block.
pub(super) trait Rank {
    /// The lowest leaves first.
    type Key: Ord + Copy;

    /// A block's rank from now on. `place` is that of the use among those of all requests; `is_there` says whether the
    /// block was.
    fn rank(&mut self, block: BlockId, is_there: bool, place: usize, request: &Lookup<'_>) -> Self::Key;

    /// The request's uses begin.
    fn begin(&mut self, _request: &Lookup<'_>) {}

    /// A block of this rank left for want of room.
    fn evicted(&mut self, _key: Self::Key) {}

    /// Whether a block of this rank leaves although there is room.
    fn has_expired(&self, _key: Self::Key, _now: Instant) -> bool {
        false
    }
}

/// What is there, by rank.
pub(super) struct ByRank<'a, R: Rank> {
    trace: &'a Trace,
    rule: R,
    blocks_max: usize,
    blocks: usize,
    /// Of each block: its rank while it is there, and how many that hang on it are.
    keys: Vec<Option<R::Key>>,
    children: Vec<u32>,
    /// Blocks on which nothing hangs.
    leaves: BTreeSet<(R::Key, Reverse<u32>, BlockId)>,
}

impl<'a, R: Rank> ByRank<'a, R> {
    pub(super) fn new(trace: &'a Trace, blocks_max: usize, rule: R) -> Self {
        let (keys, children) = (vec![None; trace.blocks()], vec![0; trace.blocks()]);
        Self { trace, rule, blocks_max, blocks: 0, keys, children, leaves: BTreeSet::new() }
    }

    fn leaf(&self, key: R::Key, block: BlockId) -> (R::Key, Reverse<u32>, BlockId) {
        (key, Reverse(self.trace.depth(block)), block)
    }

    fn evict_first(&mut self) -> Option<R::Key> {
        let (key, _, block) = self.leaves.pop_first()?;
        self.keys[block as usize] = None;
        self.blocks -= 1;
        let parent = self.trace.parent(block);
        if parent != NO_BLOCK {
            self.children[parent as usize] -= 1;
            if self.children[parent as usize] == 0
                && let Some(key) = self.keys[parent as usize]
            {
                self.leaves.insert(self.leaf(key, parent));
            }
        }
        Some(key)
    }

    fn take_in(&mut self, request: &Lookup<'_>) {
        self.rule.begin(request);
        for (block, place) in request.blocks.iter().copied().zip(request.first_use..) {
            let old = self.keys[block as usize];
            if let Some(key) = old.filter(|_| self.children[block as usize] == 0) {
                self.leaves.remove(&self.leaf(key, block));
            }
            self.keys[block as usize] = Some(self.rule.rank(block, old.is_some(), place, request));
            if old.is_none() {
                self.blocks += 1;
                let parent = self.trace.parent(block);
                if parent != NO_BLOCK {
                    self.children[parent as usize] += 1;
                }
            }
        }
        for block in request.blocks.iter().copied() {
            if self.children[block as usize] == 0
                && let Some(key) = self.keys[block as usize]
            {
                self.leaves.insert(self.leaf(key, block));
            }
        }
    }
}

impl<R: Rank> Policy for ByRank<'_, R> {
    fn serve(&mut self, request: &Lookup<'_>) -> usize {
        while self.leaves.first().is_some_and(|(key, _, _)| self.rule.has_expired(*key, request.at)) {
            self.evict_first();
        }
        let found = request.blocks.iter().take_while(|block| self.keys[**block as usize].is_some()).count();
        self.take_in(request);
        while self.blocks > self.blocks_max
            && let Some(key) = self.evict_first()
        {
            self.rule.evicted(key);
        }
        found
    }
}
