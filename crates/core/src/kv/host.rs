//! Host memory for blocks: slots of one size in each model's arena, and who leaves first when room is wanted.

use super::{
    index::{Block, Index, NONE, Work},
    leaving::Leaving,
    protocol::BlockNumber,
    worth::Class,
};
use crate::memory::Bytes;
use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

/// One model's slots.
#[derive(Debug, Clone, Default)]
pub(super) struct Arena {
    pub(super) slot_bytes: Bytes,
    /// Slots below this number have been used.
    fresh: u32,
    free: Vec<u32>,
}

impl Arena {
    pub(super) fn new(slot_bytes: Bytes) -> Self {
        Self { slot_bytes, ..Self::default() }
    }

    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        })
    }

    pub(super) fn used(&self) -> u32 {
        self.fresh - self.free.len() as u32
    }
}

/// Host memory.
#[derive(Debug, Clone, Default)]
pub(super) struct Host {
    /// For blocks, whatever models leave.
    pub(super) bytes_max: Bytes,
    pub(super) bytes_used: Bytes,
    /// For blocks and states: what models leave.
    pub(super) limit_bytes: Bytes,
    /// States on their way out of engines.
    pub(super) state_bytes: Bytes,
    /// By number of the model.
    pub(super) arenas: BTreeMap<u16, Arena>,
    /// Slots that a hanging read may still write into, by number of the model.
    pub(super) held_slots: BTreeSet<(u16, u32)>,
    /// Blocks that can leave.
    pub(super) leaving: Leaving,
}

/// Whether a block may lose its slot now: nobody uses it, and no block that follows it lies in host memory (blocks
/// behind a gap are of no use).
pub(super) fn may_leave(block: &Block) -> bool {
    block.slot != NONE && block.pins == 0 && block.host_children == 0 && block.work == Work::Nothing
}

impl Host {
    /// A slot, if there is room.
    pub(super) fn take_slot(&mut self, model: u16) -> Option<u32> {
        let slot_bytes = self.arenas.get(&model)?.slot_bytes;
        if !self.has_room(slot_bytes, 0) {
            return None;
        }
        self.bytes_used += slot_bytes;
        self.arenas.get_mut(&model).map(Arena::take)
    }

    /// Whether so many more bytes of blocks and of states may come.
    pub(super) fn has_room(&self, block_bytes: Bytes, state_bytes: Bytes) -> bool {
        let used = self.bytes_used.saturating_add(block_bytes);
        let states = self.state_bytes.saturating_add(state_bytes);
        used <= self.bytes_max && used.saturating_add(states) <= self.limit_bytes
    }

    /// Gives a slot back.
    pub(super) fn give_slot(&mut self, model: u16, slot: u32) {
        if let Some(arena) = self.arenas.get_mut(&model) {
            self.bytes_used -= arena.slot_bytes;
            arena.free.push(slot);
        }
    }

    /// Puts a block into its class among those that can leave, or takes it out.
    pub(super) fn reorder(&mut self, index: &mut Index, number: BlockNumber, class: Class) {
        let block = index.get_mut(number);
        let wanted = if may_leave(block) { class } else { 0 };
        if block.host_class != wanted {
            if block.host_class != 0 {
                self.leaving.remove(block.host_class, block.used_at, number);
            }
            block.host_class = wanted;
            if wanted != 0 {
                self.leaving.insert(wanted, block.used_at, number);
            }
        }
    }
}
