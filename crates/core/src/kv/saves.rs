//! Blocks on their way out of engines.

use super::{
    index::{NONE, Work},
    key::{BlockKey, KvIdentity, TrustDomain},
    protocol::{Action, BlockKeyShort, BlockNumber, SaveId},
    tier::Tier,
    worth,
};
use crate::{memory::Bytes, time::Instant};
use alloc::{
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use core::time::Duration;

/// What an engine offers.
#[derive(Debug, Clone)]
struct Offer {
    model: u16,
    root: u16,
    /// None for the first block of a prompt.
    parent: Option<BlockKey>,
    first_block: u32,
    keys: Vec<BlockKey>,
    /// What the whole state takes on its way.
    state_bytes: Bytes,
    /// Blocks that have a slot and are being filled.
    gathering: Vec<BlockNumber>,
}

/// All offers.
#[derive(Debug, Clone, Default)]
pub(super) struct Saves {
    /// Told to go on.
    active: BTreeMap<SaveId, Offer>,
    waiting: VecDeque<(SaveId, Offer)>,
    pub(super) skipped: u64,
    pub(super) lost: u64,
}

impl Tier {
    pub(super) fn save_offered(
        &mut self,
        save: SaveId,
        (identity, domain): (KvIdentity, TrustDomain),
        (parent, first_block, keys): (BlockKey, u32, Vec<BlockKey>),
        state_bytes: Bytes,
        actions: &mut Vec<Action>,
    ) {
        let model = self.number_of(&identity);
        let root = model.and_then(|model| self.root(model, domain));
        let kept = model.zip(root).filter(|(model, _)| !self.known[usize::from(*model)].is_removed);
        let Some((model, root)) = kept else {
            actions.push(Action::SaveSkip { save });
            return;
        };
        let parent = (first_block > 0).then_some(parent);
        let offer = Offer { model, root, parent, first_block, keys, state_bytes, gathering: Vec::new() };
        if !self.has_news(&offer) {
            actions.push(Action::SaveSkip { save });
        } else if (self.saves.active.len() as u32) < self.settings.saves_max {
            self.begin_save(save, offer, actions);
        } else if (self.saves.waiting.len() as u32) < self.settings.saves_waiting_max {
            self.saves.waiting.push_back((save, offer));
        } else {
            self.saves.skipped += 1;
            actions.push(Action::SaveSkip { save });
        }
    }

    /// Lets an engine put a state out, if there is room for it.
    fn begin_save(&mut self, save: SaveId, mut offer: Offer, actions: &mut Vec<Action>) {
        // Nobody leaves in vain.
        let may_fit = self.host.state_bytes.saturating_add(offer.state_bytes) <= self.host.limit_bytes;
        if may_fit && self.make_room(offer.state_bytes, actions) {
            self.host.state_bytes += offer.state_bytes;
            self.saves.active.insert(save, offer);
            actions.push(Action::SaveGo { save });
        } else {
            // It was computed all the same, and is worth what its blocks are: models may be worth less than that.
            self.places_for(self.now, &mut offer, false, actions);
            self.saves.skipped += 1;
            actions.push(Action::SaveSkip { save });
        }
    }

    /// A save that went on is over, and what it was about has left host memory.
    fn end_save(&mut self, save: SaveId) -> Option<Offer> {
        let offer = self.saves.active.remove(&save)?;
        self.host.state_bytes -= offer.state_bytes;
        Some(offer)
    }

    /// Bytes of the states that are on their way out of engines.
    pub(super) fn saves_bytes(&self) -> Bytes {
        self.saves.active.values().map(|offer| offer.state_bytes).sum()
    }

    /// Whether any of the offered blocks is nowhere yet.
    fn has_news(&self, offer: &Offer) -> bool {
        offer.keys.iter().any(|key| self.is_new(key))
    }

    fn is_new(&self, key: &BlockKey) -> bool {
        self.index.find(BlockKeyShort::from(key)).is_none_or(|number| {
            let block = self.index.get(number);
            block.slot == NONE && !block.on_disk()
        })
    }

    pub(super) fn staged(&mut self, now: Instant, save: SaveId, ok: bool, actions: &mut Vec<Action>) {
        if !ok {
            if self.end_save(save).is_some() {
                self.saves.lost += 1;
                self.next_save(actions);
            }
            return;
        }
        let Some(mut offer) = self.saves.active.remove(&save) else { return };
        let blocks = self.places_for(now, &mut offer, true, actions);
        let identity = self.known[usize::from(offer.model)].identity;
        actions.push(Action::Gather { save, identity, blocks });
        let is_over = offer.gathering.is_empty();
        self.saves.active.insert(save, offer);
        if is_over {
            self.end_save(save);
            // Others came first, or there is no room for what is worth so little. The next one comes last: it may be of
            // the same engine, which has one place for states.
            self.next_save(actions);
        }
    }

    /// Slots, if there is room for any, for the blocks of an offer that are nowhere yet: (place among its keys, slot). Blocks
    /// that get none were used all the same.
    fn places_for(
        &mut self,
        now: Instant,
        offer: &mut Offer,
        mut has_room: bool,
        actions: &mut Vec<Action>,
    ) -> Vec<(u32, u32)> {
        let known = &self.known[usize::from(offer.model)];
        let bytes = known.payload_bytes;
        let mut parent = match &offer.parent {
            None => NONE,
            Some(key) => self.index.intern(BlockKeyShort::from(key), offer.root, offer.first_block.saturating_sub(1)),
        };
        let mut places = Vec::new();
        for (place, key) in offer.keys.iter().enumerate() {
            let is_new = self.is_new(key);
            let depth = offer.first_block + place as u32;
            let number = self.index.intern(BlockKeyShort::from(key), offer.root, depth);
            if parent != NONE {
                self.index.attach(number, parent);
                self.reorder(parent);
            }
            parent = number;
            if !is_new {
                continue;
            }
            let seconds = self.known[usize::from(offer.model)].block_seconds(depth);
            let block = self.index.get_mut(number);
            let uses = worth::faded(block.uses, now.since(block.used_at)) + 1.0;
            let worth = worth::of_class(worth::class(uses, seconds, bytes), Duration::ZERO);
            // Marked first: what leaves for it may be the last that kept it in the index.
            self.index.set_work(number, Work::Gathering);
            // Whatever follows a block that has no room is of no use without it.
            let slot = has_room.then(|| self.slot_for_chain(offer.model, worth, number, actions)).flatten();
            let Some(slot) = slot else {
                has_room = false;
                self.note_pressure(worth);
                self.index.set_work(number, Work::Nothing);
                self.touch(now, number);
                self.index.collect(number);
                continue;
            };
            self.index.set_slot(number, slot);
            self.reorder(number);
            offer.gathering.push(number);
            places.push((place as u32, slot));
        }
        places
    }

    /// A slot for a block, for which the blocks before it do not leave.
    fn slot_for_chain(
        &mut self,
        model: u16,
        worth: f64,
        number: BlockNumber,
        actions: &mut Vec<Action>,
    ) -> Option<u32> {
        let parent = self.index.get(number).parent;
        if parent != NONE {
            self.index.get_mut(parent).host_children += 1;
            self.reorder(parent);
        }
        let slot = self.slot_for(model, worth, actions);
        if parent != NONE {
            self.index.get_mut(parent).host_children -= 1;
            self.reorder(parent);
        }
        slot
    }

    pub(super) fn gathered(&mut self, now: Instant, save: SaveId, ok: bool, actions: &mut Vec<Action>) {
        let Some(offer) = self.end_save(save) else { return };
        if !ok {
            self.rejected.count("state");
        }
        self.conclude(now, &offer.gathering, ok, actions);
        self.next_save(actions);
    }

    fn conclude(&mut self, now: Instant, blocks: &[BlockNumber], ok: bool, actions: &mut Vec<Action>) {
        for number in blocks {
            if ok {
                self.index.set_work(*number, Work::Nothing);
                self.touch(now, *number);
                let model = self.model_of(self.index.get(*number));
                self.known[usize::from(model)].figures.saved_blocks += 1;
                self.write_if_admitted(now, *number, actions);
            }
        }
        // Leaves first, so that nobody loses what hangs on it.
        for number in blocks.iter().rev().filter(|_| !ok) {
            self.index.set_work(*number, Work::Nothing);
            self.lose(now, *number, actions);
        }
        for number in blocks {
            if ok {
                self.settle(*number, actions);
                self.grant_those_who_waited(now, *number, actions);
            }
        }
    }

    /// The engine that made an offer is gone. What is being gathered from its memory goes on: the shell says how it ends.
    pub(super) fn save_lost(&mut self, save: SaveId, actions: &mut Vec<Action>) {
        self.saves.waiting.retain(|(waiting, _)| *waiting != save);
        if self.saves.active.get(&save).is_some_and(|offer| offer.gathering.is_empty()) {
            self.end_save(save);
            self.saves.lost += 1;
            self.next_save(actions);
        }
    }

    /// Nothing of these roots is taken in that was offered before.
    pub(super) fn forget_offers(&mut self, is_concerned: &[bool], actions: &mut Vec<Action>) {
        let concerns = |offer: &Offer| is_concerned[usize::from(offer.root)];
        let skipped = self.saves.waiting.iter().filter(|(_, offer)| concerns(offer));
        actions.extend(skipped.map(|(save, _)| Action::SaveSkip { save: *save }));
        self.saves.waiting.retain(|(_, offer)| !concerns(offer));
        // What an engine is writing down already is not looked at when it comes. What is being gathered is doomed.
        for offer in self.saves.active.values_mut().filter(|offer| concerns(offer)) {
            offer.keys.clear();
        }
    }

    fn next_save(&mut self, actions: &mut Vec<Action>) {
        while (self.saves.active.len() as u32) < self.settings.saves_max {
            let Some((save, offer)) = self.saves.waiting.pop_front() else { return };
            if self.has_news(&offer) {
                self.begin_save(save, offer, actions);
            } else {
                actions.push(Action::SaveSkip { save });
            }
        }
    }
}
