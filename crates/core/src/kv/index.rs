//! All blocks that are known, by key, and how they hang together.
//!
//! A block is found by one look into the table and one at the block itself. Keys are cryptographic hashes, so a few of
//! their bits are as good a hash as any. A block that is nowhere any more stays as a ghost: as long as its children are
//! somewhere, so that they find their place when it comes back; and if it was used, among the last [`GHOSTS_MAX`], so that
//! its uses count when it comes back.

use super::{
    protocol::{BlockKeyShort, BlockNumber, DiskPlace},
    worth::Class,
};
use crate::time::Instant;
use alloc::{collections::VecDeque, vec::Vec};
use hashbrown::HashTable;

/// No number: of a block, a slot or a segment.
pub(super) const NONE: u32 = u32::MAX;

/// The most blocks that are remembered although they are nowhere: a few MiB of memory.
pub(super) const GHOSTS_MAX: usize = 1 << 16;

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
    /// The last use, and the fading count of uses then.
    pub(super) used_at: Instant,
    pub(super) uses: f32,
    /// Its class among those that can leave host memory; 0 while it cannot.
    pub(super) host_class: Class,
    /// The same for the disk.
    pub(super) disk_class: Class,
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
    /// It stays although it is nowhere.
    remembered: bool,
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

    /// Whether it is nowhere, and nothing is being done about that.
    fn is_ghost(&self) -> bool {
        self.slot == NONE && !self.on_disk() && self.pins == 0 && self.work == Work::Nothing
    }

    /// Whether nothing keeps it in the index.
    fn is_idle_ghost(&self) -> bool {
        self.is_ghost() && self.children == 0 && !self.remembered
    }
}

/// Bytes of memory that a block on disk takes here: its record, its share of a table that is half full, and its place in
/// the order of leaving, in nodes that are two thirds full.
pub const INDEX_BYTES_PER_BLOCK: usize =
    size_of::<Block>() + 2 * (size_of::<u32>() + 1) + size_of::<(Instant, BlockNumber)>() * 3 / 2;
const _: () = assert!(INDEX_BYTES_PER_BLOCK <= 128);

/// How many blocks lie where.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) host: u64,
    pub(super) disk: u64,
    pub(super) anywhere: u64,
}

impl Counts {
    fn of(block: &Block) -> Self {
        let (host, disk) = (block.in_host(), block.on_disk());
        Self { host: u64::from(host), disk: u64::from(disk), anywhere: u64::from(host || disk) }
    }

    /// One count more, another less.
    fn change(&mut self, more: Self, less: Self) {
        self.host = self.host + more.host - less.host;
        self.disk = self.disk + more.disk - less.disk;
        self.anywhere = self.anywhere + more.anywhere - less.anywhere;
    }
}

/// The blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    table: HashTable<BlockNumber>,
    blocks: Vec<Block>,
    free: Vec<BlockNumber>,
    /// Blocks that are remembered, the first to be forgotten first: with the last use that is remembered.
    ghosts: VecDeque<(BlockNumber, Instant)>,
    /// By root.
    counts: Vec<Counts>,
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

    #[cfg(test)]
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
            used_at: Instant::ZERO,
            uses: 0.0,
            host_class: 0,
            disk_class: 0,
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
            remembered: false,
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

    /// Changes where a block lies, and counts it there.
    fn change(&mut self, number: BlockNumber, change: impl FnOnce(&mut Block)) {
        let block = &mut self.blocks[number as usize];
        let (before, root) = (Counts::of(block), usize::from(block.root));
        change(block);
        if self.counts.len() <= root {
            self.counts.resize(root + 1, Counts::default());
        }
        self.counts[root].change(Counts::of(block), before);
    }

    /// How many blocks of each root lie where. Roots beyond the end have none.
    pub(super) fn counts(&self) -> &[Counts] {
        &self.counts
    }

    /// Something begins or ends that is done with a block.
    pub(super) fn set_work(&mut self, number: BlockNumber, work: Work) {
        self.change(number, |block| block.work = work);
    }

    /// Gives a block a slot or takes it away.
    pub(super) fn set_slot(&mut self, number: BlockNumber, slot: u32) {
        let block = &self.blocks[number as usize];
        let (had, has, parent) = (block.slot != NONE, slot != NONE, block.parent);
        self.change(number, |block| {
            block.slot = slot;
            block.remembered &= !has;
        });
        if parent != NONE && had != has {
            let children = &mut self.blocks[parent as usize].host_children;
            *children = if has { *children + 1 } else { children.saturating_sub(1) };
        }
    }

    /// Gives a block a place on disk or takes it away.
    pub(super) fn set_disk_place(&mut self, number: BlockNumber, place: Option<DiskPlace>) {
        let block = &self.blocks[number as usize];
        let (had, parent) = (block.on_disk(), block.parent);
        self.change(number, |block| {
            (block.segment, block.page) = place.map_or((NONE, 0), |place| (place.segment, place.page));
            block.remembered &= place.is_none();
        });
        if parent != NONE && had != place.is_some() {
            let children = &mut self.blocks[parent as usize].disk_children;
            *children = if had { children.saturating_sub(1) } else { *children + 1 };
        }
    }

    /// After a block may have left the last place where it was: it is remembered if it was used, and who has been
    /// remembered for longest is forgotten for it.
    pub(super) fn collect(&mut self, number: BlockNumber) {
        let block = &mut self.blocks[number as usize];
        if block.is_ghost() && block.uses > 0.0 && !block.remembered {
            block.remembered = true;
            self.ghosts.push_back((number, block.used_at));
        }
        while self.ghosts.len() > GHOSTS_MAX
            && let Some((oldest, used_at)) = self.ghosts.pop_front()
        {
            let block = &mut self.blocks[oldest as usize];
            // Others have been somewhere again since then.
            if block.remembered && block.used_at == used_at {
                block.remembered = false;
                self.forget_idle(oldest);
            }
        }
        self.forget_idle(number);
    }

    /// Nothing of a block is to be remembered once it is nowhere.
    pub(super) fn disown(&mut self, number: BlockNumber) {
        let block = &mut self.blocks[number as usize];
        (block.uses, block.remembered) = (0.0, false);
    }

    /// Forgets a block that nothing keeps, and each of its ancestors of which the same is true then.
    fn forget_idle(&mut self, mut number: BlockNumber) {
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

    #[test]
    fn the_uses_of_so_many_blocks_are_remembered_and_not_of_more() {
        let mut index = Index::default();
        let key = |number: usize| BlockKeyShort(number as u128);
        for number in 0..=GHOSTS_MAX {
            let block = index.intern(key(number), 0, 0);
            index.get_mut(block).uses = 1.0;
            index.get_mut(block).used_at = Instant(number as u64);
            index.collect(block);
        }
        assert_eq!((index.len(), index.find(key(0))), (GHOSTS_MAX, None));
        let revived = index.find(key(1)).unwrap();
        index.set_slot(revived, 0);
        for number in GHOSTS_MAX + 1..GHOSTS_MAX + 3 {
            let block = index.intern(key(number), 0, 0);
            index.get_mut(block).uses = 1.0;
            index.collect(block);
        }
        assert_eq!(index.find(key(1)), Some(revived), "what is somewhere is not forgotten");
        assert_eq!(index.find(key(2)), None);
        index.set_slot(revived, NONE);
        index.disown(revived);
        index.collect(revived);
        assert_eq!(index.find(key(1)), None);
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
