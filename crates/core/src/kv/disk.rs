//! Blocks on disk: what is written, what a full disk gives up, how much writing it is to bear.
//!
//! A block that is given up leaves room at once, wherever it lies, so that nothing is ever written twice to keep it.

use super::{
    index::{Block, Index, Work},
    leaving::Leaving,
    protocol::{Action, BlockKeyShort, BlockNumber, DiskPlace, FoundBlock, PAGE_BYTES, TierSettings, slot_bytes},
    speed::Bandwidth,
    tier::Tier,
    worth::Class,
};
use crate::{memory::Bytes, time::Instant};
use alloc::{collections::BTreeSet, string::String, vec::Vec};
use core::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Nothing is written for this long after a write has failed, and twice as long after one that failed when it was over.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// What others have of the bound is believed for so long, if there is no room without it.
const OTHERS_BELIEVED: Duration = Duration::from_secs(10);

/// What there is on disk.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    /// From disk into host memory, for all reads that go on together.
    pub(super) read: Bandwidth,
    pub(super) write: Bandwidth,
    /// What of the bound is not to be had, as it was told last, and when that was.
    others_bytes: Bytes,
    others_at: Instant,
    pub(super) queued_bytes: Bytes,
    /// Bytes of the blocks that are kept.
    pub(super) kept_bytes: Bytes,
    /// Blocks that can leave.
    pub(super) leaving: Leaving,
    /// Bytes that may be written before only what was asked for twice is.
    allowance_bytes: f64,
    allowance_at: Instant,
    pause: Duration,
    paused_until: Instant,
    /// Prefixes on disk that were computed since the last look at how fast it is.
    pub(super) passed_over: u32,
    pub(super) probe: Option<Probe>,
    pub(super) written_bytes: u64,
    pub(super) writes_refused: u64,
    pub(super) writes_failed: u64,
}

/// Blocks that are read together to see how fast the disk is.
#[derive(Debug, Clone)]
pub(super) struct Probe {
    /// Those that have not come yet.
    pub(super) blocks: Vec<BlockNumber>,
    /// Of all of them.
    pub(super) bytes: Bytes,
    /// What those that have come took at most: all were wanted at once.
    pub(super) seconds: f64,
}

/// Whether a block may leave the disk now: nothing that follows it lies there, and nobody reads it.
fn may_leave(block: &Block) -> bool {
    block.on_disk() && block.disk_children == 0 && block.pins == 0 && block.work == Work::Nothing
}

impl Disk {
    /// Puts a block into its class among those that can leave, or takes it out.
    pub(super) fn reorder(&mut self, index: &mut Index, number: BlockNumber, class: Class) {
        let block = index.get_mut(number);
        let wanted = if may_leave(block) { class } else { 0 };
        if block.disk_class != wanted {
            if block.disk_class != 0 {
                self.leaving.remove(block.disk_class, block.used_at, number);
            }
            block.disk_class = wanted;
            if wanted != 0 {
                self.leaving.insert(wanted, block.used_at, number);
            }
        }
    }

    pub(super) fn new(settings: &TierSettings, read: Bandwidth) -> Self {
        Self {
            read,
            write: read,
            others_bytes: 0,
            others_at: Instant::ZERO,
            queued_bytes: 0,
            kept_bytes: 0,
            leaving: Leaving::default(),
            allowance_bytes: settings.disk_write_bytes_per_day as f64,
            allowance_at: Instant::ZERO,
            pause: Duration::ZERO,
            paused_until: Instant::ZERO,
            passed_over: 0,
            probe: None,
            written_bytes: 0,
            writes_refused: 0,
            writes_failed: 0,
        }
    }

    /// Whether a block is to be tried although there was no room for it: others may have gone since that was told.
    fn looks_again(&self, now: Instant) -> bool {
        self.others_bytes > 0 && self.queued_bytes == 0 && now.since(self.others_at) >= OTHERS_BELIEVED
    }

    /// Lets pass what may be written by now. At most a day's worth is saved up.
    fn refill(&mut self, now: Instant, per_day: Bytes) {
        let days = now.since(self.allowance_at).as_secs_f64() / DAY.as_secs_f64();
        self.allowance_bytes = (self.allowance_bytes + days * per_day as f64).min(per_day as f64);
        self.allowance_at = now;
    }
}

impl Tier {
    /// Writes a block that lies in host memory, if the disk is to have it.
    pub(super) fn write_if_admitted(&mut self, now: Instant, number: BlockNumber, actions: &mut Vec<Action>) {
        let block = self.index.get(number);
        let is_idle = block.in_host() && block.work == Work::Nothing;
        if self.settings.disk_bytes_max == 0 || block.on_disk() || !is_idle || self.doomed.contains(&number) {
            return;
        }
        let (model, slot, seen_again) = (self.model_of(block), block.slot, block.seen_again);
        let worth = self.worth_on_disk(now, block);
        let bytes = self.host.arenas.get(&model).map_or(0, |arena| arena.slot_bytes);
        self.disk.refill(now, self.settings.disk_write_bytes_per_day);
        let affordable = seen_again || self.disk.allowance_bytes >= bytes as f64;
        // One block may always be on its way, however small the queue.
        let queued_bytes = self.disk.queued_bytes;
        let queued = queued_bytes == 0 || queued_bytes + bytes <= self.settings.disk_queue_bytes_max;
        if !affordable
            || !queued
            || now < self.disk.paused_until
            || !(self.has_disk_room(bytes, worth, actions) || self.disk.looks_again(now))
        {
            self.disk.writes_refused += 1;
            return;
        }
        self.disk.allowance_bytes = (self.disk.allowance_bytes - bytes as f64).max(0.0);
        self.disk.queued_bytes += bytes;
        self.index.set_work(number, Work::Writing);
        self.reorder(number);
        let identity = self.known[usize::from(model)].identity;
        actions.push(Action::Write { block: number, identity, slot });
    }

    /// Whether there is room, for which blocks of less worth go.
    fn has_disk_room(&mut self, bytes: Bytes, worth: f64, actions: &mut Vec<Action>) -> bool {
        let beside = self.settings.disk_slack_bytes.saturating_add(self.disk.others_bytes);
        let max = self.settings.disk_bytes_max.saturating_sub(beside);
        while self.disk.kept_bytes + self.disk.queued_bytes + bytes > max {
            // By the speeds that are known now: after a start the classes of all of them come from guesses.
            for number in self.disk.leaving.oldest() {
                self.reorder(number);
            }
            let Some(least) = self.disk.leaving.least(self.now) else { return false };
            if least.worth >= worth {
                return false;
            }
            self.leave_disk(least.number, actions);
        }
        true
    }

    pub(super) fn written(
        &mut self,
        now: Instant,
        number: BlockNumber,
        outcome: Result<DiskPlace, String>,
        seconds: f64,
        others_bytes: Bytes,
        actions: &mut Vec<Action>,
    ) {
        if self.index.get(number).work != Work::Writing {
            return;
        }
        let model = self.model_of(self.index.get(number));
        let bytes = self.host.arenas.get(&model).map_or(0, |arena| arena.slot_bytes);
        self.disk.queued_bytes = self.disk.queued_bytes.saturating_sub(bytes);
        (self.disk.others_bytes, self.disk.others_at) = (others_bytes, now);
        self.index.set_work(number, Work::Nothing);
        match outcome {
            Ok(place) => {
                self.disk.write.observe(bytes, seconds);
                self.disk.written_bytes += bytes;
                self.disk.pause = Duration::ZERO;
                self.enter_disk(number, place);
            }
            Err(reason) => {
                self.rejected.count(&reason);
                self.disk.writes_failed += 1;
                // Blocks that were on their way together fail together, which counts once.
                if now >= self.disk.paused_until {
                    self.disk.pause = (self.disk.pause * 2).clamp(PAUSE_FIRST, PAUSE_MAX);
                    self.disk.paused_until = now + self.disk.pause;
                }
            }
        }
        self.settle(number, actions);
    }

    /// A block lies on disk from now on.
    fn enter_disk(&mut self, number: BlockNumber, place: DiskPlace) {
        self.disk.kept_bytes += self.disk_bytes_of(number);
        self.index.set_disk_place(number, Some(place));
    }

    /// Where a block lies on disk.
    pub(super) fn disk_place(&self, number: BlockNumber) -> Option<DiskPlace> {
        let pages = u32::try_from(self.disk_bytes_of(number) / PAGE_BYTES).unwrap_or(u32::MAX);
        self.index.get(number).disk_place(pages)
    }

    /// What a block takes on disk: as in host memory, whole pages with its header.
    fn disk_bytes_of(&self, number: BlockNumber) -> Bytes {
        let known = &self.known[usize::from(self.model_of(self.index.get(number)))];
        slot_bytes(known.payload_bytes)
    }

    /// Takes a block off the disk.
    pub(super) fn leave_disk(&mut self, number: BlockNumber, actions: &mut Vec<Action>) {
        if let Some(place) = self.disk_place(number) {
            actions.push(Action::Retire { place });
            self.forget_on_disk(number);
        }
    }

    /// A block lies on disk no more.
    fn forget_on_disk(&mut self, number: BlockNumber) {
        self.disk.kept_bytes -= self.disk_bytes_of(number);
        self.index.set_disk_place(number, None);
        self.reorder(number);
        self.index.collect(number);
    }

    pub(super) fn found(
        &mut self,
        now: Instant,
        blocks: &[FoundBlock],
        others_bytes: Bytes,
        actions: &mut Vec<Action>,
    ) {
        (self.disk.others_bytes, self.disk.others_at) = (others_bytes, now);
        for found in blocks {
            let model = self.known(found.identity, found.payload_bytes);
            let model = model.filter(|model| !self.known[usize::from(*model)].is_removed);
            let Some(root) = model.and_then(|model| self.root(model, found.domain)) else {
                actions.push(Action::Retire { place: found.place });
                continue;
            };
            let number = self.index.intern(BlockKeyShort::from(&found.key), root, found.depth);
            if self.index.get(number).on_disk() {
                // The same block twice: one of them is enough.
                actions.push(Action::Retire { place: found.place });
                continue;
            }
            if found.depth > 0 {
                let parent = self.index.intern(BlockKeyShort::from(&found.parent), root, found.depth - 1);
                self.index.attach(number, parent);
            }
            if self.index.get(number).uses <= 0.0 {
                // What was worth writing counts as used once.
                self.touch(now, number);
            }
            self.enter_disk(number, found.place);
            self.reorder(number);
        }
        // The bound may be lower than it was when they were written.
        self.has_disk_room(0, f64::INFINITY, actions);
    }

    /// Blocks that the disk gave up by itself, since they are too old. They leave host memory, too: else they would be
    /// written again.
    pub(super) fn expired(&mut self, places: &[DiskPlace], actions: &mut Vec<Action>) {
        let places: BTreeSet<DiskPlace> = places.iter().copied().collect();
        let there = |number: &BlockNumber| self.disk_place(*number).is_some_and(|place| places.contains(&place));
        let gone: Vec<BlockNumber> = self.index.numbers().filter(there).collect();
        for number in gone {
            self.forget_on_disk(number);
            self.forget_when_unused(number, actions);
        }
    }
}
