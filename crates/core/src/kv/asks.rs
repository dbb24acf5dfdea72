//! Requests that ask what of their prompt is there, and what they are given.

use super::{
    disk::Probe,
    index::{NONE, Work},
    key::{BLOCK_TOKENS, BlockKey, KvIdentity},
    protocol::{Action, BlockKeyShort, BlockNumber, ReadFailure},
    tier::Tier,
    view::HitTokens,
    worth,
};
use crate::{ids::RequestId, time::Instant};
use alloc::vec::Vec;
use core::{ops::Range, time::Duration};

/// A reload is given up when it takes this many times as long as it was expected to.
const LATE_TIMES: f64 = 2.0;
/// No reload is given up sooner: below this, no estimate of time is worth anything.
const LATE_AFTER_MIN: Duration = Duration::from_millis(20);

/// Computing one part while another is read is tried if it is expected to save so much more, in times and in seconds.
const SPLIT_GAIN: f64 = 1.02;
const SPLIT_GAIN_SECONDS: f64 = 0.001;

/// The first reload is given up when it takes this share of computing: what has come by then is used, and whatever the
/// disk's speed, half as much again is lost at most.
const FIRST_SHARE: f64 = 0.5;

/// So many prefixes are computed although they lie on disk before some of their blocks are read, to see how fast it is.
const PASSED_OVER_BEFORE_PROBE: u32 = 4;
/// Blocks that are read then: a disk shows how fast it is only when it has several to read.
const PROBE_BLOCKS: usize = 4;

/// A request whose blocks are being read.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) model: u16,
    /// What it is to get, in order; all of them are pinned.
    pub(super) blocks: Vec<BlockNumber>,
    /// Blocks of the prompt before them, which it computes meanwhile; 0 if it waits.
    pub(super) first: u32,
    pub(super) known: u32,
    pub(super) device_tokens: u32,
    /// Blocks that lay on disk when it came.
    pub(super) from_disk: u32,
    pub(super) since: Instant,
    pub(super) give_up_at: Instant,
}

/// A request whose engine takes blocks in.
#[derive(Debug, Clone)]
pub(super) struct Granted {
    pub(super) model: u16,
    pub(super) blocks: Vec<BlockNumber>,
    /// Blocks of the prompt before them.
    first: u32,
    pub(super) device_tokens: u32,
    pub(super) from_disk: u32,
    pub(super) waited_seconds: f64,
}

impl Tier {
    pub(super) fn asked(
        &mut self,
        now: Instant,
        request: RequestId,
        identity: KvIdentity,
        keys: &[BlockKey],
        (prompt_tokens, device_tokens): (u32, u32),
        actions: &mut Vec<Action>,
    ) {
        let Some(model) = self.number_of(&identity) else {
            actions.push(Action::Grant { request, identity, first: 0, slots: Vec::new(), known: 0 });
            return;
        };
        // A request asks once: whatever it held before under this number is over.
        self.ended(request, actions);
        let blocks = self.prefix(keys);
        let known = blocks.len() as u32;
        for number in &blocks {
            self.touch(now, *number);
            // What was not worth writing when it was new may be now.
            self.write_if_admitted(now, *number, actions);
        }
        self.note_regrets(model, keys, device_tokens);
        let traffic = self.traffic(&blocks);
        let figures = &mut self.known[usize::from(model)].figures;
        figures.lookup_tokens += u64::from(prompt_tokens);
        let wanted = self.best_reload(model, &blocks, device_tokens);
        let Some(wanted) = wanted else {
            let figures = &mut self.known[usize::from(model)].figures;
            if known * BLOCK_TOKENS > device_tokens {
                figures.recomputed += 1;
                self.probe_disk(model, &blocks, keys, actions);
            }
            let figures = &mut self.known[usize::from(model)].figures;
            figures.hit_tokens.device += u64::from(device_tokens);
            figures.traffic.add(traffic, device_tokens / BLOCK_TOKENS);
            actions.push(Action::Grant { request, identity, first: 0, slots: Vec::new(), known });
            return;
        };
        let computes_meanwhile = wanted.start > 0;
        if computes_meanwhile {
            actions.push(Action::Grant { request, identity, first: 0, slots: Vec::new(), known });
        }
        let blocks = blocks[wanted.clone()].to_vec();
        let first = wanted.start as u32;
        let fetched = self.fetch(now, request, (model, known, device_tokens), blocks, (first, &keys[wanted]), actions);
        let figures = &mut self.known[usize::from(model)].figures;
        // Where no slot was to be had for any of them, all is computed after all.
        if fetched > 0 {
            figures.reloaded += 1;
            figures.split += u64::from(computes_meanwhile);
            figures.traffic.add(traffic, first + fetched);
        } else {
            figures.recomputed += 1;
            figures.traffic.add(traffic, device_tokens / BLOCK_TOKENS);
        }
    }

    /// Blocks of a prompt from the first on that are in host memory or on disk, or will be in a moment.
    fn prefix(&self, keys: &[BlockKey]) -> Vec<BlockNumber> {
        let mut blocks = Vec::new();
        for key in keys {
            let Some(number) = self.index.find(BlockKeyShort::from(key)) else { break };
            let block = self.index.get(number);
            if (block.slot == NONE && !block.on_disk()) || self.doomed.contains(&number) {
                break;
            }
            blocks.push(number);
        }
        blocks
    }

    /// Which blocks are best brought back, by the time that it saves; none if none does. Restoring replaces what the
    /// engine holds of the prompt, so all of it is moved, and only what goes beyond it is saved.
    fn best_reload(&self, model: u16, blocks: &[BlockNumber], device_tokens: u32) -> Option<Range<usize>> {
        let known = &self.known[usize::from(model)];
        let (mut best, mut best_seconds, mut disk_bytes) = (None, 0.0, 0);
        for (place, number) in blocks.iter().enumerate() {
            let count = place as u32 + 1;
            if self.index.get(*number).slot == NONE {
                disk_bytes += known.payload_bytes;
            }
            let tokens = count * BLOCK_TOKENS;
            if tokens <= device_tokens {
                continue;
            }
            let saved = known.speed.seconds(device_tokens, tokens);
            let spent =
                self.restore.seconds(u64::from(count) * known.payload_bytes) + self.disk.read.seconds(disk_bytes);
            if saved - spent > best_seconds {
                (best, best_seconds) = (Some(0..count as usize), saved - spent);
            }
        }
        self.best_split(model, blocks, device_tokens, best_seconds).or(best)
    }

    /// The blocks to read while those before them are computed, so that both end at the same time, if that saves clearly
    /// more than this. After Jin et al., "Compute Or Load KV Cache? Why Not Both?" (arXiv:2410.03065), with one meeting
    /// point that is known before.
    fn best_split(
        &self,
        model: u16,
        blocks: &[BlockNumber],
        device_tokens: u32,
        saved_otherwise: f64,
    ) -> Option<Range<usize>> {
        if !self.disk.read.is_measured() {
            return None;
        }
        let known = &self.known[usize::from(model)];
        let computing_all = known.speed.seconds(device_tokens, blocks.len() as u32 * BLOCK_TOKENS);
        let (mut best, mut best_seconds) = (None, saved_otherwise * SPLIT_GAIN + SPLIT_GAIN_SECONDS);
        let (mut disk_bytes, begin) = (0, (device_tokens / BLOCK_TOKENS) as usize + 1);
        for first in (begin..blocks.len()).rev() {
            if self.index.get(blocks[first]).slot == NONE {
                disk_bytes += known.payload_bytes;
            }
            let computing = known.speed.seconds(device_tokens, first as u32 * BLOCK_TOKENS);
            // What was computed is taken out of the engine, and all of it put in again.
            let moving = self.restore.seconds((first + blocks.len()) as u64 * known.payload_bytes);
            let saved = computing_all - computing.max(self.disk.read.seconds(disk_bytes)) - moving;
            if saved > best_seconds {
                (best, best_seconds) = (Some(first..blocks.len()), saved);
            }
        }
        best
    }

    /// Reads what must be read and grants the rest, now or when it is there. How many blocks it is to get.
    fn fetch(
        &mut self,
        now: Instant,
        request: RequestId,
        (model, known, device_tokens): (u16, u32, u32),
        mut blocks: Vec<BlockNumber>,
        (first, keys): (u32, &[BlockKey]),
        actions: &mut Vec<Action>,
    ) -> u32 {
        for number in &blocks {
            self.index.get_mut(*number).pins += 1;
            self.reorder(*number);
        }
        let (mut from_disk, mut there) = (0, blocks.len());
        for (place, (number, key)) in blocks.iter().zip(keys).enumerate() {
            if self.index.get(*number).slot != NONE {
                continue;
            }
            if !self.begin_read(model, *number, key, actions) {
                there = place;
                break;
            }
            from_disk += 1;
        }
        for number in blocks.split_off(there) {
            self.unpin(number, actions);
        }
        let fetched = blocks.len() as u32;
        let tokens = (first + fetched) * BLOCK_TOKENS;
        if from_disk > 0 && first == 0 {
            actions.push(Action::Coming { request, tokens });
        }
        let known_model = &self.known[usize::from(model)];
        let reading = self.disk.read.seconds(u64::from(from_disk) * known_model.payload_bytes);
        // Nobody waits longer for a reload than computing would take. Who computes meanwhile does not wait.
        let computing = known_model.speed.seconds(device_tokens.min(tokens), tokens);
        let late = match first {
            0 if self.disk.read.is_measured() => reading * LATE_TIMES,
            0 => computing * FIRST_SHARE,
            _ => computing,
        };
        let patience = Duration::from_secs_f64(late.min(computing).clamp(0.0, 3600.0));
        let give_up_at = now + patience.max(LATE_AFTER_MIN);
        let waiting = Waiting { model, blocks, first, known, device_tokens, from_disk, since: now, give_up_at };
        self.waiting.insert(request, waiting);
        self.grant_if_complete(now, request, actions);
        fetched
    }

    /// A disk that is too slow to use is tried now and then with a few blocks, for which nobody waits.
    fn probe_disk(&mut self, model: u16, blocks: &[BlockNumber], keys: &[BlockKey], actions: &mut Vec<Action>) {
        let on_disk_only = |(number, _): &(&BlockNumber, &BlockKey)| self.index.get(**number).slot == NONE;
        let wanted: Vec<(BlockNumber, BlockKey)> = blocks
            .iter()
            .zip(keys)
            .filter(on_disk_only)
            .take(PROBE_BLOCKS)
            .map(|(number, key)| (*number, *key))
            .collect();
        if wanted.is_empty() || self.disk.probe.is_some() {
            return;
        }
        self.disk.passed_over += 1;
        if self.disk.passed_over < PASSED_OVER_BEFORE_PROBE {
            return;
        }
        self.disk.passed_over = 0;
        let mut begun = Vec::new();
        for (number, key) in wanted {
            if !self.begin_read(model, number, &key, actions) {
                break;
            }
            begun.push(number);
        }
        let bytes = begun.len() as u64 * self.known[usize::from(model)].payload_bytes;
        self.disk.probe = (bytes > 0).then_some(Probe { blocks: begun, bytes, seconds: 0.0 });
    }

    /// A block was read, maybe as part of a probe, which is over then if it was the last.
    fn probed(&mut self, number: BlockNumber, seconds: f64, failed: bool) {
        let Some(probe) = &mut self.disk.probe else { return };
        let Some(place) = probe.blocks.iter().position(|other| *other == number) else { return };
        probe.blocks.swap_remove(place);
        probe.seconds = probe.seconds.max(seconds);
        if failed {
            self.disk.probe = None;
        } else if probe.blocks.is_empty() {
            self.disk.read.observe_probe(probe.bytes, probe.seconds);
            self.disk.probe = None;
        }
    }

    fn begin_read(&mut self, model: u16, number: BlockNumber, key: &BlockKey, actions: &mut Vec<Action>) -> bool {
        let block = self.index.get(number);
        let (root, Some(place)) = (block.root, self.disk_place(number)) else { return false };
        let known = &self.known[usize::from(model)];
        let (identity, bytes) = (known.identity, known.payload_bytes);
        // It saves what computing it takes, as a block that is new.
        let class = worth::class(block.uses, known.block_seconds(block.depth), bytes);
        let worth = worth::of_class(class, self.now.since(block.used_at));
        let Some(slot) = self.slot_for(model, worth, actions) else { return false };
        self.index.set_slot(number, slot);
        self.index.set_work(number, Work::Reading);
        self.reorder(number);
        let domain = self.roots[usize::from(root)].domain;
        actions.push(Action::Read { block: number, identity, domain, key: *key, place, slot });
        true
    }

    pub(super) fn read_done(
        &mut self,
        now: Instant,
        number: BlockNumber,
        seconds: f64,
        failure: Option<ReadFailure>,
        actions: &mut Vec<Action>,
    ) {
        // What somebody waits for is measured when he begins.
        self.probed(number, seconds, failure.is_some());
        if self.index.get(number).work != Work::Reading {
            return;
        }
        self.index.set_work(number, Work::Nothing);
        if let Some(ReadFailure { reason, slot_is_held, is_lost }) = failure {
            self.rejected.count(&reason);
            if slot_is_held {
                self.leave_slot_held(number);
            }
            if is_lost {
                self.leave_disk(number, actions);
            }
            self.lose(now, number, actions);
        }
        self.settle(number, actions);
        self.grant_those_who_waited(now, number, actions);
    }

    pub(super) fn grant_those_who_waited(&mut self, now: Instant, number: BlockNumber, actions: &mut Vec<Action>) {
        let concerned: Vec<RequestId> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.blocks.contains(&number))
            .map(|(request, _)| *request)
            .collect();
        for request in concerned {
            self.grant_if_complete(now, request, actions);
        }
    }

    /// A block turned out to be nothing: who waits for it gets what comes before it.
    pub(super) fn lose(&mut self, now: Instant, number: BlockNumber, actions: &mut Vec<Action>) {
        let mut unwanted = Vec::new();
        for waiting in self.waiting.values_mut() {
            if let Some(place) = waiting.blocks.iter().position(|other| *other == number) {
                unwanted.extend(waiting.blocks.split_off(place));
                waiting.known = waiting.known.min(waiting.first + place as u32);
            }
        }
        for other in unwanted {
            self.unpin(other, actions);
        }
        // An engine may still be reading the slot: then it goes when that has ended.
        let block = self.index.get(number);
        if block.pins == 0 && block.work == Work::Nothing {
            self.leave_host(number, actions);
        } else {
            self.doomed.insert(number);
        }
        let waiting: Vec<RequestId> = self.waiting.keys().copied().collect();
        for request in waiting {
            self.grant_if_complete(now, request, actions);
        }
    }

    fn grant_if_complete(&mut self, now: Instant, request: RequestId, actions: &mut Vec<Action>) {
        let Some(waiting) = self.waiting.get(&request) else { return };
        if waiting.blocks.iter().all(|number| self.index.get(*number).in_host()) {
            self.grant(now, request, actions);
        }
    }

    /// Grants what is there of what a request waits for.
    fn grant(&mut self, now: Instant, request: RequestId, actions: &mut Vec<Action>) {
        let Some(mut waiting) = self.waiting.remove(&request) else { return };
        let there = waiting.blocks.iter().take_while(|number| self.index.get(**number).in_host()).count();
        self.measure_disk(now, &waiting);
        for number in waiting.blocks.split_off(there) {
            self.unpin(number, actions);
        }
        let identity = self.known[usize::from(waiting.model)].identity;
        if (waiting.first + there as u32) * BLOCK_TOKENS <= waiting.device_tokens {
            for number in core::mem::take(&mut waiting.blocks) {
                self.unpin(number, actions);
            }
        }
        let slots: Vec<u32> = waiting.blocks.iter().map(|number| self.index.get(*number).slot).collect();
        let computes_meanwhile = waiting.first > 0;
        if !slots.is_empty() {
            let waited_seconds = if computes_meanwhile { 0.0 } else { now.since(waiting.since).as_secs_f64() };
            let granted = Granted {
                model: waiting.model,
                blocks: waiting.blocks,
                first: waiting.first,
                device_tokens: waiting.device_tokens,
                from_disk: waiting.from_disk,
                waited_seconds,
            };
            self.granted.insert(request, granted);
        } else if computes_meanwhile {
            // It has its grant already.
            return;
        }
        actions.push(Action::Grant { request, identity, first: waiting.first, slots, known: waiting.known });
    }

    /// How fast blocks came from disk for a request that waited for some, whether it has all of them or not.
    fn measure_disk(&mut self, now: Instant, waiting: &Waiting) {
        let missing = waiting.blocks.iter().filter(|number| !self.index.get(**number).in_host()).count() as u32;
        // Of those that had to be read, at least one counts: a read that never ends is slow, not unknown.
        let read = waiting.from_disk.saturating_sub(missing).max(waiting.from_disk.min(1));
        let bytes = u64::from(read) * self.known[usize::from(waiting.model)].payload_bytes;
        self.disk.read.observe(bytes, now.since(waiting.since).as_secs_f64());
    }

    /// Reads that have fallen behind are not waited for: they go on, for whoever comes next.
    pub(super) fn give_up_late_reads(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let late: Vec<RequestId> =
            self.waiting.iter().filter(|(_, waiting)| waiting.give_up_at <= now).map(|(request, _)| *request).collect();
        for request in late {
            if let Some(waiting) = self.waiting.get(&request) {
                self.known[usize::from(waiting.model)].figures.abandoned += 1;
            }
            self.grant(now, request, actions);
        }
    }

    pub(super) fn restored(
        &mut self,
        request: RequestId,
        (first_block, blocks): (u32, u32),
        seconds: f64,
        actions: &mut Vec<Action>,
    ) {
        let Some(granted) = self.granted.remove(&request) else { return };
        let known = &mut self.known[usize::from(granted.model)];
        let blocks = blocks.min(granted.blocks.len() as u32);
        if blocks > 0 {
            // What lay before them was moved too.
            let end = first_block.saturating_add(blocks);
            self.restore.observe(u64::from(first_block + end) * known.payload_bytes, seconds);
            let (tokens, end) = (blocks * BLOCK_TOKENS, end.saturating_mul(BLOCK_TOKENS));
            let disk = granted.from_disk.min(blocks) * BLOCK_TOKENS;
            let device = if first_block == 0 { 0 } else { granted.device_tokens };
            let hit = HitTokens { device: u64::from(device), host: u64::from(tokens - disk), disk: u64::from(disk) };
            known.figures.hit_tokens.add(hit);
            let saved = known.speed.seconds(granted.device_tokens.max(first_block * BLOCK_TOKENS).min(end), end);
            known.figures.saved_seconds += saved;
            known.figures.spent_seconds += seconds + granted.waited_seconds;
        } else {
            known.figures.hit_tokens.device += u64::from(granted.device_tokens);
        }
        for number in granted.blocks {
            self.unpin(number, actions);
        }
    }

    /// An engine looked at a block and it was something else: it is of no use to anybody.
    pub(super) fn block_rejected(
        &mut self,
        now: Instant,
        request: RequestId,
        place: u32,
        reason: &str,
        actions: &mut Vec<Action>,
    ) {
        self.rejected.count(reason);
        let Some(granted) = self.granted.get(&request) else { return };
        let place = place.checked_sub(granted.first).map(|place| place as usize);
        let Some(number) = place.and_then(|place| granted.blocks.get(place)).copied() else { return };
        self.leave_disk(number, actions);
        self.lose(now, number, actions);
    }

    pub(super) fn ended(&mut self, request: RequestId, actions: &mut Vec<Action>) {
        let waiting = self.waiting.remove(&request).map(|waiting| waiting.blocks);
        let granted = self.granted.remove(&request).map(|granted| granted.blocks);
        for number in waiting.into_iter().chain(granted).flatten() {
            self.unpin(number, actions);
        }
    }
}
