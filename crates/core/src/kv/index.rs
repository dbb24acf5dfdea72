//! All blocks that are known, by key, and how they hang together.
//!
//! A block is found by one look into the table and one at the block itself. Keys are cryptographic hashes, so a few of
//! their bits are as good a hash as any. A block that is nowhere any more but whose children are somewhere stays as a
//! ghost, so that the children find their place when it comes back.

use super::protocol::{BlockKeyShort, BlockNumber, DiskPlace};
use alloc::vec::Vec;
use hashbrown::HashTable;

/// No number: of a block, a slot or a segment.
pub(super) const NONE: u32 = u32::MAX;

/// Something is being done with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Nothing,
    /// Its slot is being filled from disk.
    Reading,
    /// Its slot is being filled from a state.
    Gathering,
    /// Its slot is being written to disk.
    Writing,
}

/// One block.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub(super) key: BlockKeyShort,
    /// Logarithm of its decayed count of uses, at the tier's origin.
    pub(super) score: f64,
    /// Its place in the order in which blocks leave host memory; 0 while it cannot leave.
    pub(super) order: u64,
    /// The same for the disk.
    pub(super) disk_order: u64,
    pub(super) parent: BlockNumber,
    /// Blocks that follow it, and those of them in host memory and on disk.
    pub(super) children: u32,
    pub(super) host_children: u32,
    pub(super) disk_children: u32,
    /// Its place in the prompt, in blocks.
    pub(super) depth: u32,
    pub(super) slot: u32,
    pub(super) segment: u32,
    pub(super) page: u32,
    /// Requests that may be reading its slot.
    pub(super) pins: u16,
    pub(super) root: u16,
    pub(super) work: Work,
    /// It was asked for again after it was first seen.
    pub(super) seen_again: bool,
}

impl Block {
    /// Whether an engine could read it now.
    pub(super) fn in_host(&self) -> bool {
        self.slot != NONE && !matches!(self.work, Work::Reading | Work::Gathering)
    }

    pub(super) fn on_disk(&self) -> bool {
        self.segment != NONE
    }

    /// Its place, if it is there, where it takes so many pages.
    pub(super) fn disk_place(&self, pages: u32) -> Option<DiskPlace> {
        self.on_disk().then_some(DiskPlace { segment: self.segment, page: self.page, pages })
    }

    /// Whether nothing keeps it in the index.
    fn is_idle_ghost(&self) -> bool {
        self.slot == NONE && !self.on_disk() && self.children == 0 && self.pins == 0 && self.work == Work::Nothing
    }
}

/// Bytes of memory that a block on disk takes here: its record, its share of a table that is half full, and its place in
/// the order of leaving, in nodes that are two thirds full.
pub const INDEX_BYTES_PER_BLOCK: usize =
    size_of::<Block>() + 2 * (size_of::<u32>() + 1) + size_of::<(u64, BlockNumber)>() * 3 / 2;
const _: () = assert!(INDEX_BYTES_PER_BLOCK <= 128);

/// The blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    table: HashTable<BlockNumber>,
    blocks: Vec<Block>,
    free: Vec<BlockNumber>,
}

fn hash(key: BlockKeyShort) -> u64 {
    key.0 as u64
}

impl Index {
    pub(super) fn find(&self, key: BlockKeyShort) -> Option<BlockNumber> {
        self.table.find(hash(key), |number| self.blocks[*number as usize].key == key).copied()
    }

    pub(super) fn get(&self, number: BlockNumber) -> &Block {
        &self.blocks[number as usize]
    }

    pub(super) fn get_mut(&mut self, number: BlockNumber) -> &mut Block {
        &mut self.blocks[number as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = BlockNumber> + '_ {
        self.table.iter().copied()
    }

    /// The block with this key, which is new if nobody knew it.
    pub(super) fn intern(&mut self, key: BlockKeyShort, root: u16, depth: u32) -> BlockNumber {
        if let Some(number) = self.find(key) {
            return number;
        }
        let block = Block {
            key,
            score: f64::NEG_INFINITY,
            order: 0,
            disk_order: 0,
            parent: NONE,
            children: 0,
            host_children: 0,
            disk_children: 0,
            depth,
            slot: NONE,
            segment: NONE,
            page: 0,
            pins: 0,
            root,
            work: Work::Nothing,
            seen_again: false,
        };
        let number = match self.free.pop() {
            Some(number) => {
                self.blocks[number as usize] = block;
                number
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as BlockNumber
            }
        };
        let blocks = &self.blocks;
        self.table.insert_unique(hash(key), number, |number| hash(blocks[*number as usize].key));
        number
    }

    /// Hangs a block under its parent, once.
    pub(super) fn attach(&mut self, number: BlockNumber, parent: BlockNumber) {
        let block = &mut self.blocks[number as usize];
        if block.parent != NONE || number == parent {
            return;
        }
        block.parent = parent;
        let (in_host, on_disk) = (block.slot != NONE, block.on_disk());
        let parent = &mut self.blocks[parent as usize];
        parent.children += 1;
        parent.host_children += u32::from(in_host);
        parent.disk_children += u32::from(on_disk);
    }

    /// Gives a block a slot or takes it away.
    pub(super) fn set_slot(&mut self, number: BlockNumber, slot: u32) {
        let block = &mut self.blocks[number as usize];
        let (had, has, parent) = (block.slot != NONE, slot != NONE, block.parent);
        block.slot = slot;
        if parent != NONE && had != has {
            let children = &mut self.blocks[parent as usize].host_children;
            *children = if has { *children + 1 } else { children.saturating_sub(1) };
        }
    }

    /// Gives a block a place on disk or takes it away.
    pub(super) fn set_disk_place(&mut self, number: BlockNumber, place: Option<DiskPlace>) {
        let block = &mut self.blocks[number as usize];
        let (had, parent) = (block.on_disk(), block.parent);
        (block.segment, block.page) = place.map_or((NONE, 0), |place| (place.segment, place.page));
        if parent != NONE && had != place.is_some() {
            let children = &mut self.blocks[parent as usize].disk_children;
            *children = if had { children.saturating_sub(1) } else { *children + 1 };
        }
    }

    /// Forgets a block that is nowhere, and each of its ancestors of which the same is true then.
    pub(super) fn collect(&mut self, mut number: BlockNumber) {
        while number != NONE && self.blocks[number as usize].is_idle_ghost() {
            let (key, parent) = (self.blocks[number as usize].key, self.blocks[number as usize].parent);
            // A number that is free already has nothing to give up a second time.
            let Ok(entry) = self.table.find_entry(hash(key), |other| *other == number) else { return };
            entry.remove();
            self.free.push(number);
            if parent != NONE {
                let children = &mut self.blocks[parent as usize].children;
                *children = children.saturating_sub(1);
            }
            number = parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_ghost_stays_as_long_as_it_has_children() {
        let mut index = Index::default();
        let parent = index.intern(BlockKeyShort(1), 0, 0);
        let child = index.intern(BlockKeyShort(2), 0, 1);
        index.attach(child, parent);
        index.set_slot(child, 5);
        index.collect(parent);
        assert_eq!(index.len(), 2);
        assert_eq!(index.get(parent).host_children, 1);
        index.set_slot(child, NONE);
        index.collect(child);
        assert_eq!(index.len(), 0);
    }

    #[test]
    fn a_block_that_is_forgotten_twice_is_missed_once() {
        let mut index = Index::default();
        let parent = index.intern(BlockKeyShort(1), 0, 0);
        let (one, other) = (index.intern(BlockKeyShort(2), 0, 1), index.intern(BlockKeyShort(3), 0, 1));
        index.attach(one, parent);
        index.attach(other, parent);
        index.set_slot(other, 7);
        index.collect(one);
        index.collect(one);
        assert_eq!(index.get(parent).children, 1);
        assert_eq!(index.find(BlockKeyShort(1)), Some(parent));
    }

    proptest! {
        #[test]
        fn what_was_taken_in_is_found_and_nothing_else(keys in prop::collection::vec(any::<u128>(), 1..200)) {
            let mut index = Index::default();
            for key in &keys {
                let number = index.intern(BlockKeyShort(*key), 0, 0);
                prop_assert_eq!(index.find(BlockKeyShort(*key)), Some(number));
            }
            for key in &keys {
                if let Some(number) = index.find(BlockKeyShort(*key)) {
                    index.collect(number);
                }
                prop_assert_eq!(index.find(BlockKeyShort(*key)), None);
            }
            prop_assert_eq!(index.len(), 0);
        }
    }
}
