//! The KV of one engine: pages of a few tokens, and what prompts have in common kept for those that come later.
//!
//! What is shared are chunks: so many tokens of a prompt as its workload tells apart, whole pages each. A chunk is in
//! use by some sequences, or idle and still there; the chunk that was let go of first leaves first, and a sequence lets
//! go of its last one first, so that no chunk leaves before those that hang on it. A chunk that two sequences computed
//! is kept once.

use crate::cache::trace::BlockId;
use std::collections::{BTreeMap, btree_map::Entry};

/// Pages of one engine.
#[derive(Debug, Clone)]
pub struct Blocks {
    total: u64,
    free: u64,
    /// Pages of a chunk.
    chunk_blocks: u64,
    chunks: BTreeMap<BlockId, Chunk>,
    /// Chunks that nobody uses, by when they were let go of.
    idle: BTreeMap<u64, BlockId>,
    sequence: u64,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    users: u32,
    idle_since: u64,
}

impl Blocks {
    /// So many pages, so many of them for a chunk.
    pub fn new(total: u64, chunk_blocks: u64) -> Self {
        Self { total, free: total, chunk_blocks, chunks: BTreeMap::new(), idle: BTreeMap::new(), sequence: 0 }
    }

    /// All pages.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Pages that are empty.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Pages that can be had: empty ones, and those of idle chunks.
    pub fn available(&self) -> u64 {
        self.free + self.idle.len() as u64 * self.chunk_blocks
    }

    /// Chunks that are kept.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// How many of a prompt's chunks, from the first on, are there.
    pub fn found(&self, prompt: &[BlockId]) -> usize {
        prompt.iter().take_while(|chunk| self.chunks.contains_key(chunk)).count()
    }

    /// Pages that can be had if these chunks, which are there, are taken into use.
    pub fn available_beside(&self, chunks: &[BlockId]) -> u64 {
        let idle = chunks.iter().filter(|chunk| self.chunks.get(chunk).is_some_and(|chunk| chunk.users == 0));
        self.available() - idle.count() as u64 * self.chunk_blocks
    }

    /// Takes pages; false if there are not so many.
    pub fn take(&mut self, blocks: u64) -> bool {
        if self.available() < blocks {
            return false;
        }
        while self.free < blocks {
            let Some((_, chunk)) = self.idle.pop_first() else { return false };
            self.chunks.remove(&chunk);
            self.free += self.chunk_blocks;
        }
        self.free -= blocks;
        true
    }

    /// Takes chunks that are there into use.
    pub fn hold(&mut self, chunks: &[BlockId]) {
        for id in chunks {
            if let Some(chunk) = self.chunks.get_mut(id) {
                if chunk.users == 0 {
                    self.idle.remove(&chunk.idle_since);
                }
                chunk.users += 1;
            }
        }
    }

    /// A sequence has computed a chunk in pages of its own: from now on they are the chunk's, or free if it was there
    /// already.
    pub fn publish(&mut self, id: BlockId) {
        match self.chunks.entry(id) {
            Entry::Vacant(place) => {
                place.insert(Chunk { users: 1, idle_since: 0 });
            }
            Entry::Occupied(_) => {
                self.hold(&[id]);
                self.free += self.chunk_blocks;
            }
        }
    }

    /// A sequence lets go of its chunks and of pages of its own.
    pub fn release(&mut self, chunks: &[BlockId], own_blocks: u64) {
        self.free += own_blocks;
        for id in chunks.iter().rev() {
            if let Some(chunk) = self.chunks.get_mut(id) {
                chunk.users -= 1;
                if chunk.users == 0 {
                    self.sequence += 1;
                    chunk.idle_since = self.sequence;
                    self.idle.insert(self.sequence, *id);
                }
            }
        }
    }

    /// Whether every page is either empty, a sequence's own or a chunk's, and idle chunks are those without users.
    pub fn check(&self, own_blocks: u64) -> bool {
        let idle = self.chunks.values().filter(|chunk| chunk.users == 0).count();
        let known = |(since, id): (&u64, &BlockId)| {
            self.chunks.get(id).is_some_and(|chunk| chunk.users == 0 && chunk.idle_since == *since)
        };
        self.total == self.free + own_blocks + self.chunks.len() as u64 * self.chunk_blocks
            && idle == self.idle.len()
            && self.idle.iter().all(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_stay_until_their_pages_are_needed_and_leave_from_the_end() {
        let mut blocks = Blocks::new(10, 2);
        assert!(blocks.take(7) && blocks.check(7));
        for chunk in [1, 2, 3] {
            blocks.publish(chunk);
        }
        assert!(blocks.check(1));
        blocks.release(&[1, 2, 3], 1);
        assert_eq!((blocks.available(), blocks.found(&[1, 2, 3])), (10, 3));
        assert_eq!(blocks.available_beside(&[1, 2]), 6);
        // Four pages are empty; the fifth comes from the last chunk.
        assert!(blocks.take(5) && blocks.check(5));
        assert_eq!((blocks.found(&[1, 2, 3]), blocks.chunks()), (2, 2));
        blocks.hold(&[1]);
        assert!(!blocks.take(4) && blocks.check(5), "one is in use");
        assert!(blocks.take(3) && blocks.check(8));
        assert_eq!(blocks.found(&[1, 2]), 1);
    }

    #[test]
    fn what_two_have_computed_is_kept_once() {
        let mut blocks = Blocks::new(8, 2);
        assert!(blocks.take(4));
        blocks.publish(9);
        blocks.publish(9);
        assert!(blocks.check(0) && blocks.available() == 6);
        blocks.release(&[9], 0);
        assert_eq!(blocks.available(), 6, "the other one still uses it");
        blocks.release(&[9], 0);
        assert!(blocks.available() == 8 && blocks.check(0));
    }
}
