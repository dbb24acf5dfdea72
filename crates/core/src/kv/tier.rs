//! The machine: one machine's blocks, and every event that concerns them.

use super::{
    asks::{Granted, Waiting},
    disk::Disk,
    host::{Arena, Host},
    index::{Block, Index, NONE, Work},
    key::{BlockKey, KvIdentity, TrustDomain},
    protocol::{Action, BlockKeyShort, BlockNumber, Event, TierSettings},
    regret::Regrets,
    saves::Saves,
    speed::{Bandwidth, PrefillSpeed},
    view::{Figures, Rejected},
    worth,
};
use crate::{
    Machine,
    ids::{Digest, RequestId},
    memory::Bytes,
    time::Instant,
    violation::{Violation, hold},
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    vec::Vec,
};
use core::time::Duration;

/// The most models (by identity) and trust domains of models that are told apart; more keep nothing.
const KNOWN_MAX: usize = u16::MAX as usize;
/// Want of room is told at most this often.
const PRESSED_INTERVAL: Duration = Duration::from_secs(1);
/// Before anything was restored or read: what no machine of today falls below, so that the first time is tried.
const RESTORE_BYTES_PER_SECOND_GUESS: f64 = 2e9;
const DISK_BYTES_PER_SECOND_GUESS: f64 = 1e9;

/// A model, by the identity of its KV.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) identity: KvIdentity,
    /// None before it was in memory here.
    pub(super) model: Option<Digest>,
    /// It was removed: what still comes of it is not kept.
    pub(super) is_removed: bool,
    pub(super) payload_bytes: Bytes,
    pub(super) speed: PrefillSpeed,
    pub(super) figures: Figures,
}

impl Known {
    /// Seconds to compute the block at this depth.
    pub(super) fn block_seconds(&self, depth: u32) -> f64 {
        let first = depth * super::BLOCK_TOKENS;
        self.speed.seconds(first, first + super::BLOCK_TOKENS)
    }
}

/// A model in a trust domain.
#[derive(Debug, Clone)]
pub(super) struct Root {
    pub(super) model: u16,
    pub(super) domain: TrustDomain,
}

/// One machine's blocks.
#[derive(Debug, Clone)]
pub struct Tier {
    pub(super) settings: TierSettings,
    pub(super) index: Index,
    pub(super) host: Host,
    pub(super) disk: Disk,
    pub(super) known: Vec<Known>,
    known_by_identity: BTreeMap<KvIdentity, u16>,
    pub(super) roots: Vec<Root>,
    roots_by_domain: BTreeMap<(u16, TrustDomain), u16>,
    pub(super) waiting: BTreeMap<RequestId, Waiting>,
    pub(super) granted: BTreeMap<RequestId, Granted>,
    pub(super) saves: Saves,
    /// From host memory into engines.
    pub(super) restore: Bandwidth,
    /// Blocks whose prompts were purged while they were in use: they go when nobody uses them.
    pub(super) doomed: BTreeSet<BlockNumber>,
    pub(super) rejected: Rejected,
    /// What left host memory for want of room.
    pub(super) regrets: Regrets,
    /// The most worth of what left for want of room since that was told last.
    pressed: f64,
    told_pressed_at: Instant,
    pub(super) now: Instant,
}

impl Tier {
    /// A tier that knows no model yet.
    pub fn new(settings: TierSettings) -> Self {
        Self {
            host: Host { bytes_max: settings.host_bytes_max, limit_bytes: Bytes::MAX, ..Host::default() },
            disk: Disk::new(&settings, Bandwidth::guessed(DISK_BYTES_PER_SECOND_GUESS)),
            settings,
            index: Index::default(),
            known: Vec::new(),
            known_by_identity: BTreeMap::new(),
            roots: Vec::new(),
            roots_by_domain: BTreeMap::new(),
            waiting: BTreeMap::new(),
            granted: BTreeMap::new(),
            saves: Saves::default(),
            restore: Bandwidth::guessed(RESTORE_BYTES_PER_SECOND_GUESS),
            doomed: BTreeSet::new(),
            rejected: Rejected::default(),
            regrets: Regrets::default(),
            pressed: 0.0,
            told_pressed_at: Instant::ZERO,
            now: Instant::ZERO,
        }
    }

    fn take(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Opened { model, identity, payload_bytes, slot_bytes } => {
                self.open(model, identity, payload_bytes, slot_bytes);
            }
            Event::Asked { request, identity, keys, prompt_tokens, device_tokens } => {
                self.asked(now, request, identity, &keys, (prompt_tokens, device_tokens), actions);
            }
            Event::Ended { request } => self.ended(request, actions),
            Event::ReadDone { block, seconds, failure } => self.read_done(now, block, seconds, failure, actions),
            Event::SlotReleased { identity, slot } => self.slot_released(identity, slot, actions),
            Event::Restored { request, first_block, blocks, seconds } => {
                self.restored(request, (first_block, blocks), seconds, actions);
            }
            Event::Verified { request, blocks } => {
                if let Some(granted) = self.granted.get(&request) {
                    self.known[usize::from(granted.model)].figures.verified_blocks += u64::from(blocks);
                }
            }
            Event::Rejected { request, block, reason } => self.block_rejected(now, request, block, &reason, actions),
            Event::SaveOffered { save, identity, domain, parent, first_block, keys, state_bytes } => {
                self.save_offered(save, (identity, domain), (parent, first_block, keys), state_bytes, actions);
            }
            Event::Staged { save, ok } => self.staged(now, save, ok, actions),
            Event::Gathered { save, ok } => self.gathered(now, save, ok, actions),
            Event::SavesLost { saves } => {
                for save in saves {
                    self.save_lost(save, actions);
                }
            }
            Event::Written { block, outcome, seconds, others_bytes } => {
                self.written(now, block, outcome, seconds, others_bytes, actions);
            }
            Event::Found { blocks, others_bytes } => self.found(now, &blocks, others_bytes, actions),
            Event::Expired { places } => self.expired(&places, actions),
            Event::Prefilled { identity, from_token, to_token, seconds } => {
                if let Some(known) = self.known_mut(&identity) {
                    known.speed.observe(from_token, to_token, seconds);
                }
            }
            Event::Purge { domain } => self.purge(domain, actions),
            Event::Forget { identity } => self.forget_model(identity, actions),
            Event::HostLimit { bytes } => self.host.limit_bytes = bytes,
            Event::Timer => self.give_up_late_reads(now, actions),
        }
    }

    fn open(&mut self, model: Digest, identity: KvIdentity, payload_bytes: Bytes, slot_bytes: Bytes) {
        let Some(number) = self.known(identity, payload_bytes) else { return };
        let known = &mut self.known[usize::from(number)];
        (known.model, known.is_removed) = (Some(model), false);
        known.payload_bytes = payload_bytes;
        self.host.arenas.entry(number).or_insert_with(|| Arena::new(slot_bytes));
    }

    /// The number of a model, which is new if nobody knew it.
    pub(super) fn known(&mut self, identity: KvIdentity, payload_bytes: Bytes) -> Option<u16> {
        if let Some(number) = self.known_by_identity.get(&identity) {
            return Some(*number);
        }
        let number = u16::try_from(self.known.len()).ok().filter(|number| usize::from(*number) < KNOWN_MAX)?;
        self.known_by_identity.insert(identity, number);
        self.known.push(Known {
            identity,
            model: None,
            is_removed: false,
            payload_bytes,
            speed: PrefillSpeed::default(),
            figures: Figures::default(),
        });
        Some(number)
    }

    /// Slots of a model's arena in which something lies, or that something still writes into.
    pub fn host_slots(&self, identity: &KvIdentity) -> u32 {
        let arena = self.number_of(identity).and_then(|number| self.host.arenas.get(&number));
        arena.map_or(0, super::host::Arena::used)
    }

    pub(super) fn number_of(&self, identity: &KvIdentity) -> Option<u16> {
        self.known_by_identity.get(identity).copied()
    }

    pub(super) fn known_mut(&mut self, identity: &KvIdentity) -> Option<&mut Known> {
        let number = self.number_of(identity)?;
        self.known.get_mut(usize::from(number))
    }

    /// The number of a model in a trust domain.
    pub(super) fn root(&mut self, model: u16, domain: TrustDomain) -> Option<u16> {
        if let Some(number) = self.roots_by_domain.get(&(model, domain)) {
            return Some(*number);
        }
        let number = u16::try_from(self.roots.len()).ok().filter(|number| usize::from(*number) < KNOWN_MAX)?;
        self.roots.push(Root { model, domain });
        self.roots_by_domain.insert((model, domain), number);
        Some(number)
    }

    pub(super) fn model_of(&self, block: &Block) -> u16 {
        self.roots[usize::from(block.root)].model
    }

    /// What it would take to have a block again that leaves host memory: a read if it lies on disk, else computing it.
    fn rewarm_seconds(&self, block: &Block) -> f64 {
        let known = &self.known[usize::from(self.model_of(block))];
        let compute = known.block_seconds(block.depth);
        if block.on_disk() { self.disk.read.seconds(known.payload_bytes).min(compute) } else { compute }
    }

    /// What a block on disk saves when it is asked for.
    pub(super) fn disk_saves_seconds(&self, block: &Block) -> f64 {
        let known = &self.known[usize::from(self.model_of(block))];
        (known.block_seconds(block.depth) - self.disk.read.seconds(known.payload_bytes)).max(0.0)
    }

    /// What a block is worth on disk, per second and byte.
    pub(super) fn worth_on_disk(&self, now: Instant, block: &Block) -> f64 {
        let bytes = self.known[usize::from(self.model_of(block))].payload_bytes;
        worth::of_class(worth::class(block.uses, self.disk_saves_seconds(block), bytes), now.since(block.used_at))
    }

    /// Puts a block, and the one before it, where they belong among those that can leave.
    pub(super) fn reorder(&mut self, number: BlockNumber) {
        let parent = self.index.get(number).parent;
        for number in [number, parent] {
            if number == NONE {
                continue;
            }
            let block = self.index.get(number);
            let bytes = self.known[usize::from(self.model_of(block))].payload_bytes;
            let class = worth::class(block.uses, self.rewarm_seconds(block), bytes);
            let disk_class = worth::class(block.uses, self.disk_saves_seconds(block), bytes);
            self.host.reorder(&mut self.index, number, class);
            self.disk.reorder(&mut self.index, number, disk_class);
        }
    }

    /// A use of a block.
    pub(super) fn touch(&mut self, now: Instant, number: BlockNumber) {
        // Taken out first: it is found by its last use.
        self.host.reorder(&mut self.index, number, 0);
        self.disk.reorder(&mut self.index, number, 0);
        let block = self.index.get_mut(number);
        block.seen_again |= block.uses > 0.0;
        block.uses = worth::faded(block.uses, now.since(block.used_at)) + 1.0;
        block.used_at = now;
        self.reorder(number);
    }

    /// A slot for a block of a model, for which blocks of less worth leave. None if there are none.
    pub(super) fn slot_for(&mut self, model: u16, worth: f64, actions: &mut Vec<Action>) -> Option<u32> {
        self.host.arenas.get(&model)?;
        loop {
            if let Some(slot) = self.host.take_slot(model) {
                return Some(slot);
            }
            if !self.evict_least(worth, actions) {
                self.note_pressure(worth);
                return None;
            }
        }
    }

    /// Lets blocks leave until there is room for a state of so many bytes. False if there is none.
    pub(super) fn make_room(&mut self, state_bytes: Bytes, actions: &mut Vec<Action>) -> bool {
        while !self.host.has_room(0, state_bytes) {
            if !self.evict_least(f64::INFINITY, actions) {
                return false;
            }
        }
        true
    }

    /// Takes the least worthy block out of host memory, if it is worth less than this.
    fn evict_least(&mut self, below: f64, actions: &mut Vec<Action>) -> bool {
        let Some(least) = self.host.leaving.least(self.now) else { return false };
        if least.worth >= below {
            return false;
        }
        self.note_pressure(least.worth);
        self.regrets.left(self.now, self.index.get(least.number).key);
        let model = self.model_of(self.index.get(least.number));
        self.known[usize::from(model)].figures.evicted_blocks += 1;
        self.leave_host(least.number, actions);
        true
    }

    /// Something of this worth has no place in host memory, of which models take a part.
    pub(super) fn note_pressure(&mut self, worth: f64) {
        if self.host.limit_bytes < self.host.bytes_max {
            self.pressed = self.pressed.max(worth);
        }
    }

    /// Blocks of a prompt are asked for that its engine does not hold: what those cost that left for want of room says
    /// what more room would be worth.
    pub(super) fn note_regrets(&mut self, model: u16, keys: &[BlockKey], device_tokens: u32) {
        for (depth, key) in (0u32..).zip(keys).skip((device_tokens / super::BLOCK_TOKENS) as usize) {
            let key = BlockKeyShort::from(key);
            let block = self.index.find(key).map(|number| self.index.get(number));
            if block.is_some_and(|block| block.slot != NONE) {
                continue;
            }
            let on_disk = block.is_some_and(Block::on_disk);
            if let Some(after) = self.regrets.comes_back(self.now, key) {
                let known = &self.known[usize::from(model)];
                let compute = known.block_seconds(depth);
                let read = if on_disk { self.disk.read.seconds(known.payload_bytes) } else { compute };
                self.regrets.note(read.min(compute), known.payload_bytes, after);
            }
        }
    }

    /// Takes a block out of host memory. Nobody may be using it.
    pub(super) fn leave_host(&mut self, number: BlockNumber, actions: &mut Vec<Action>) {
        let block = self.index.get(number);
        let (slot, model) = (block.slot, self.model_of(block));
        if slot != NONE {
            self.index.set_slot(number, NONE);
            self.host.give_slot(model, slot);
            actions.push(Action::FreeSlot { identity: self.known[usize::from(model)].identity, slot });
            self.reorder(number);
        }
        self.index.collect(number);
    }

    /// Leaves a slot to a read that may still write into it: it counts, and nobody gets it.
    pub(super) fn leave_slot_held(&mut self, number: BlockNumber) {
        let block = self.index.get(number);
        let (slot, model) = (block.slot, self.model_of(block));
        self.host.held_slots.insert((model, slot));
        self.index.set_slot(number, NONE);
        self.reorder(number);
    }

    fn slot_released(&mut self, identity: KvIdentity, slot: u32, actions: &mut Vec<Action>) {
        if let Some(model) = self.number_of(&identity)
            && self.host.held_slots.remove(&(model, slot))
        {
            self.host.give_slot(model, slot);
            actions.push(Action::FreeSlot { identity, slot });
        }
    }

    /// Nobody uses a block any more on behalf of somebody.
    pub(super) fn unpin(&mut self, number: BlockNumber, actions: &mut Vec<Action>) {
        let block = self.index.get_mut(number);
        block.pins = block.pins.saturating_sub(1);
        self.settle(number, actions);
    }

    /// After work on a block has ended: it goes if it is doomed, else it takes its place in the order.
    pub(super) fn settle(&mut self, number: BlockNumber, actions: &mut Vec<Action>) {
        let block = self.index.get(number);
        if block.pins == 0 && block.work == Work::Nothing && self.doomed.remove(&number) {
            self.forget(number, actions);
        } else {
            self.reorder(number);
        }
    }

    /// Forgets a block everywhere.
    fn forget(&mut self, number: BlockNumber, actions: &mut Vec<Action>) {
        self.index.disown(number);
        self.leave_disk(number, actions);
        self.leave_host(number, actions);
    }

    fn purge(&mut self, domain: TrustDomain, actions: &mut Vec<Action>) {
        self.forget_roots(|root| root.domain == domain, actions);
        actions.push(Action::PurgeDisk { domain });
    }

    fn forget_model(&mut self, identity: KvIdentity, actions: &mut Vec<Action>) {
        let Some(model) = self.known(identity, 0) else { return };
        self.known[usize::from(model)].is_removed = true;
        self.forget_roots(|root| root.model == model, actions);
    }

    /// Forgets everything that hangs on some roots, and what is offered of them.
    fn forget_roots(&mut self, concerned: impl Fn(&Root) -> bool, actions: &mut Vec<Action>) {
        let is_concerned: Vec<bool> = self.roots.iter().map(concerned).collect();
        let blocks = self.index.numbers().map(|number| (self.index.get(number), number));
        let blocks = blocks.filter(|(block, _)| is_concerned[usize::from(block.root)]);
        // Leaves first: a block goes from the index when nothing hangs on it.
        let mut blocks: Vec<(u32, BlockNumber)> = blocks.map(|(block, number)| (block.depth, number)).collect();
        blocks.sort_unstable_by(|one, other| other.cmp(one));
        for (_, number) in blocks {
            self.forget_when_unused(number, actions);
        }
        self.forget_offers(&is_concerned, actions);
    }

    /// Forgets a block everywhere, at once or when nobody uses it any more.
    pub(super) fn forget_when_unused(&mut self, number: BlockNumber, actions: &mut Vec<Action>) {
        let block = self.index.get(number);
        if block.pins > 0 || block.work != Work::Nothing {
            self.doomed.insert(number);
        } else {
            self.forget(number, actions);
        }
    }

    /// What must always hold.
    pub fn check(&self) -> Result<(), Violation> {
        let (mut used, mut leaving, mut slots) = (0, (0, 0), BTreeSet::new());
        let mut pins: BTreeMap<BlockNumber, u32> = BTreeMap::new();
        let users = self.granted.values().map(|granted| &granted.blocks);
        for number in users.chain(self.waiting.values().map(|waiting| &waiting.blocks)).flatten() {
            *pins.entry(*number).or_default() += 1;
        }
        for number in self.index.numbers() {
            let block = self.index.get(number);
            let model = self.model_of(block);
            if block.slot != NONE {
                used += self.host.arenas.get(&model).map_or(0, |arena| arena.slot_bytes);
                let fresh = slots.insert((model, block.slot));
                hold(fresh, "a slot holds one block", || format!("slot {} of model {model}", block.slot))?;
            }
            let classes = (block.host_class, block.disk_class);
            leaving = (leaving.0 + usize::from(classes.0 != 0), leaving.1 + usize::from(classes.1 != 0));
            let in_order = classes.0 == 0 || self.host.leaving.contains(classes.0, block.used_at, number);
            hold(in_order, "whoever can leave is in the order", || format!("block {number}"))?;
            let wanted = pins.get(&number).copied().unwrap_or(0);
            hold(u32::from(block.pins) == wanted, "a block is held by those who use it", || {
                format!("block {number} has {} pins for {wanted} users", block.pins)
            })?;
            hold(classes.0 == 0 || block.pins == 0, "what is in use cannot leave", || format!("block {number}"))?;
        }
        for (model, slot) in &self.host.held_slots {
            used += self.host.arenas.get(model).map_or(0, |arena| arena.slot_bytes);
            let fresh = slots.insert((*model, *slot));
            hold(fresh, "a slot that is held is nobody's", || format!("slot {slot} of model {model}"))?;
        }
        self.check_counts()?;
        let orders = (self.host.leaving.len(), self.disk.leaving.len());
        hold(leaving == orders, "the orders hold nobody else", || {
            format!("{leaving:?} can leave, {orders:?} are in the orders")
        })?;
        hold(used == self.host.bytes_used, "bytes are counted once", || {
            format!("{used} bytes in slots, {} counted", self.host.bytes_used)
        })?;
        hold(self.host.state_bytes == self.saves_bytes(), "states are counted once", || {
            format!("{} bytes counted, {} on their way", self.host.state_bytes, self.saves_bytes())
        })?;
        let has_room = self.host.has_room(0, 0) || self.host.leaving.len() == 0;
        hold(has_room, "what models want has left, as far as it can", || {
            format!(
                "{} of {} bytes, {:?} can leave",
                self.host.bytes_used,
                self.host.limit_bytes,
                self.host.leaving.len()
            )
        })?;
        hold(self.host.bytes_used <= self.settings.host_bytes_max, "within the limit of host memory", || {
            format!("{} of {} bytes", self.host.bytes_used, self.settings.host_bytes_max)
        })
    }
}

impl Tier {
    fn check_counts(&self) -> Result<(), Violation> {
        let mut counts = BTreeMap::new();
        for number in self.index.numbers() {
            let block = self.index.get(number);
            let (host, disk) = counts.entry(block.root).or_insert((0, 0));
            *host += u64::from(block.in_host());
            *disk += u64::from(block.on_disk());
        }
        for (root, counted) in (0..).zip(self.index.counts()) {
            let wanted = counts.get(&root).copied().unwrap_or_default();
            hold((counted.host, counted.disk) == wanted, "blocks are counted where they lie", || {
                format!("{counted:?} of root {root}, {wanted:?} are there")
            })?;
        }
        Ok(())
    }
}

impl Machine for Tier {
    type Event = Event;
    type Action = Action;

    fn handle(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        self.now = now.max(self.now);
        self.take(self.now, event, actions);
        // What models want leaves at once, and what was in use or on its way then as soon as it is not any more.
        if !self.host.has_room(0, 0) {
            self.make_room(0, actions);
        }
        if self.pressed > 0.0 && self.now.since(self.told_pressed_at) >= PRESSED_INTERVAL {
            let worth = core::mem::take(&mut self.pressed).max(self.regrets.tell());
            actions.push(Action::Pressed { worth });
            self.told_pressed_at = self.now;
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        self.waiting.values().map(|waiting| waiting.give_up_at).min()
    }
}
