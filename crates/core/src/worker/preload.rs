//! Loading what is due before anybody asks for it: into memory that is free or that holds what is clearly worth less,
//! and only while no caller waits for a load. A caller who comes meanwhile and lacks its load slot or its memory gets
//! both back.

use super::{
    Worker,
    model::{Model, Phase},
    plan::Views,
    protocol::{Action, EvictionReason, Fact, PreloadOutcome},
};
use crate::{
    forecast::{Moment, Slot, WallTime},
    ids::{Digest, PoolName},
    residency::{Problem, Standing, place, worth},
    time::Instant,
};
use alloc::{collections::BTreeSet, vec::Vec};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// What is due must be worth this many times what leaves for it: less would trade one guess for another.
const PRELOAD_MARGIN: f64 = 2.0;
/// While something is due and not in memory, its chances are weighed this often.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// Due models that are tried in one look, the most valuable first.
const TRIED_MAX: usize = 4;
/// For so long nothing is loaded ahead in place of cached KV that is worth more.
const KV_PRESSED_FOR: Duration = Duration::from_secs(120);
/// How many times its load takes a model is looked at before it is due.
const LEAD_PER_REWARM: f64 = 2.0;

/// What is expected when.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Agenda {
    /// Begins of the windows ahead.
    openings: BTreeSet<(Instant, Digest)>,
    /// Ends of the windows that are open.
    closings: BTreeSet<(Instant, Digest)>,
    /// When something was looked for last and nothing found.
    looked_at: Instant,
    /// Models that could be loaded ahead, the best last, as they were weighed last.
    candidates: Vec<Digest>,
    weighed_at: Instant,
    /// What the clock on the wall said, and when.
    wall: Option<(Instant, WallTime)>,
    /// The quarter of an hour of the last event.
    slot: Option<Slot>,
    /// What cached KV was worth that left host memory for want of room, and when that was told last.
    #[serde(default)]
    kv_pressed: Option<(Instant, f64)>,
}

impl Agenda {
    fn remove(&mut self, digest: Digest, window: Option<(Instant, Instant)>) {
        if let Some((from, until)) = window {
            self.openings.remove(&(from, digest));
            self.closings.remove(&(until, digest));
        }
    }

    fn wall_at(&self, now: Instant) -> Option<WallTime> {
        self.wall.map(|(at, wall)| wall.after(now.since(at)))
    }
}

impl Worker {
    /// What a forecast is made for.
    pub(super) fn moment(&self, now: Instant) -> Moment {
        Moment { now, wall: self.agenda.wall_at(now), parts: self.settings.forecast }
    }

    /// The clock on the wall was read; the machine slept so long since it was last read.
    pub(super) fn told_time(&mut self, now: Instant, wall: WallTime, asleep: Duration) {
        self.agenda.wall = Some((now, wall));
        self.turn_slot(now, asleep);
    }

    /// A quarter of an hour ends: every model learns whether it was asked for in it.
    fn turn_slot(&mut self, now: Instant, asleep: Duration) {
        let slot = self.agenda.wall_at(now).map(Slot::of);
        let known = core::mem::replace(&mut self.agenda.slot, slot);
        let (Some(old), Some(new)) = (known, slot) else { return };
        if old == new && asleep.is_zero() {
            return;
        }
        // After a clock was set or a sleep, nobody knows what would have come.
        let watched = old.leads_to(new) && asleep.is_zero();
        for digest in self.models.digests() {
            let model = self.models.get_mut(&digest);
            let Some(mut model) = model.filter(|model| !model.forecast.is_empty()) else { continue };
            model.forecast.slept(asleep);
            if old != new {
                model.forecast.close_slot(old, watched);
            }
            drop(model);
            self.put_on_agenda(now, digest);
        }
    }

    /// Something has changed what is expected of a model.
    pub(super) fn put_on_agenda(&mut self, now: Instant, digest: Digest) {
        let moment = self.moment(now);
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let lead = Duration::from_secs_f64((LEAD_PER_REWARM * model.spec.rewarm_seconds).clamp(0.0, 3_600.0));
        let due = model.forecast.due(moment).filter(|_| !model.forgotten);
        let window = due.map(|(from, until, _)| (from - lead, until));
        let old = core::mem::replace(&mut model.window, window);
        model.window_is_open = false;
        self.agenda.remove(digest, old);
        if let Some((from, _)) = window {
            self.agenda.openings.insert((from, digest));
        }
    }

    /// Windows open and close as time passes.
    fn turn_agenda(&mut self, now: Instant) {
        self.turn_slot(now, Duration::ZERO);
        while let Some((at, digest)) = self.agenda.openings.first().copied().filter(|(at, _)| *at <= now) {
            self.agenda.openings.remove(&(at, digest));
            if let Some(mut model) = self.models.get_mut(&digest)
                && let Some((_, until)) = model.window
            {
                model.window_is_open = true;
                self.agenda.closings.insert((until, digest));
            }
        }
        while let Some((at, digest)) = self.agenda.closings.first().copied().filter(|(at, _)| *at <= now) {
            self.agenda.closings.remove(&(at, digest));
            self.put_on_agenda(now, digest);
        }
    }

    /// Begins the preload that is worth most, if there is one.
    pub(super) fn preload_due(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.turn_agenda(now);
        let idle_loader = self.loading_count() < self.settings.concurrent_loads_max;
        let recently = |at: Instant| at + LOOK_INTERVAL > now && at != Instant::ZERO;
        let idle = !recently(self.agenda.looked_at) && idle_loader && !self.draining;
        if !idle || self.models.due_and_absent().next().is_none() || self.load_is_waited_for(now) {
            return;
        }
        if self.agenda.candidates.is_empty() || !recently(self.agenda.weighed_at) {
            self.weigh_candidates(now);
        }
        let mut views = Views::default();
        let mut tried = 0;
        while tried < TRIED_MAX
            && let Some(digest) = self.agenda.candidates.pop()
        {
            let Some(worth) = self.models.get(&digest).and_then(|model| self.worth_of_candidate(now, model)) else {
                continue;
            };
            if self.preload(now, digest, worth, &mut views, actions) {
                // What comes next is looked for as soon as there is a load slot.
                return;
            }
            tried += 1;
        }
        self.agenda.candidates.clear();
        self.agenda.looked_at = now;
    }

    /// Puts those in order that could be loaded ahead. That takes a look at all of them, so it holds for a while: each load
    /// slot that is free in it is for the next of them.
    fn weigh_candidates(&mut self, now: Instant) {
        let due = self.models.due_and_absent();
        let worths = due.filter_map(|model| Some((self.worth_of_candidate(now, model)?, model.spec.digest)));
        let mut candidates: Vec<(f64, Digest)> = worths.collect();
        // The best is the last.
        candidates.sort_by(|(a, one), (b, other)| a.total_cmp(b).then(other.cmp(one)));
        self.agenda.candidates = candidates.into_iter().map(|(_, digest)| digest).collect();
        self.agenda.weighed_at = now;
    }

    /// Memory that models leave is not free as long as cached KV wants it.
    pub(super) fn note_kv_pressure(&mut self, now: Instant, kv_worth: f64) {
        self.agenda.kv_pressed = Some((now, kv_worth));
    }

    /// Whether cached KV would leave for it that is worth nearly as much.
    fn displaces_kv(&self, now: Instant, pool: &PoolName, worth_of_it: f64) -> bool {
        let pressed = self.agenda.kv_pressed.filter(|(at, _)| *at + KV_PRESSED_FOR > now);
        *pool == PoolName::default_pool() && pressed.is_some_and(|(_, kv)| worth_of_it < kv * PRELOAD_MARGIN)
    }

    fn load_is_waited_for(&self, now: Instant) -> bool {
        self.models.absent().any(|model| model.is_due(now))
    }

    fn worth_of_candidate(&self, now: Instant, model: &Model) -> Option<f64> {
        let absent = model.phase == Phase::Absent && !model.forgotten && !model.unwanted;
        let possible = absent && !model.preload && model.backoff.paused(now).is_none();
        possible.then(|| worth(self.loss(now, model), 1.0, model.spec.steady.total_bytes()))
    }

    /// Whether room could be made for it at the cost of nothing that is worth nearly as much.
    fn preload(
        &mut self,
        now: Instant,
        digest: Digest,
        worth_of_it: f64,
        views: &mut Views,
        actions: &mut Vec<Action>,
    ) -> bool {
        let Some(model) = self.models.get(&digest).filter(|model| self.hopeless(model).is_none()) else { return false };
        let (pool, footprint, artifact) = (model.spec.pool.clone(), self.peak_to_plan(model), model.spec.artifact);
        if self.displaces_kv(now, &pool, worth_of_it) {
            return false;
        }
        let loss_of_it = self.loss(now, model);
        let Some(capacity) = self.pools.get(&pool).map(|pool| pool.capacity.clone()) else { return false };
        let mut held = self.seen(now, &pool, model.spec.priority, views).to_vec();
        for holder in &mut held {
            let bytes = holder.charge.private.total() + holder.charge.shared_host_bytes;
            if let Standing::Evictable { loss } = holder.standing
                && worth(loss, PRELOAD_MARGIN, bytes) >= worth_of_it
            {
                holder.standing = Standing::Fixed;
            }
        }
        let problem = Problem { capacity: &capacity, held: &held, footprint: &footprint, artifact };
        let Some(placement) = place(&problem) else { return false };
        if placement.loss * PRELOAD_MARGIN > loss_of_it {
            return false;
        }
        for victim in &placement.victims {
            self.stop(now, *victim, EvictionReason::Memory, actions);
        }
        self.models.activate(digest);
        if let Some(mut model) = self.models.get_mut(&digest) {
            model.preload = true;
        }
        if placement.fits_now {
            self.begin_load(now, digest, &pool, &footprint, placement.accelerators, actions);
        }
        true
    }

    /// A caller waits for a load that cannot begin: preloads under way are given up for it. Whether there were any.
    pub(super) fn yield_to_callers(&mut self, now: Instant, actions: &mut Vec<Action>) -> bool {
        let ahead = |model: &&Model| model.phase.is_loading() && model.preload && !model.is_asked_for();
        if !self.models.busy().any(|model| ahead(&model)) {
            return false;
        }
        let no_slot = self.loading_count() >= self.settings.concurrent_loads_max;
        let waiting = self.models.absent().filter(|model| model.is_due(now) && !model.waiting.is_empty());
        let lacking = waiting.filter(|model| no_slot || self.lacks_room(now, model));
        let pools: Vec<_> = lacking.map(|model| model.spec.pool.clone()).collect();
        if pools.is_empty() {
            return false;
        }
        let given_up = self.models.busy().filter(ahead).filter(|model| no_slot || pools.contains(&model.spec.pool));
        let given_up: Vec<Digest> = given_up.map(|model| model.spec.digest).collect();
        for digest in &given_up {
            self.abandon_load(now, *digest, EvictionReason::Abandoned, actions);
        }
        !given_up.is_empty()
    }

    fn lacks_room(&self, now: Instant, model: &Model) -> bool {
        let (digest, footprint) = (model.spec.digest, self.peak_to_plan(model));
        self.find_place(now, digest, &model.spec.pool, &footprint, &mut Views::default()).is_none()
    }

    /// When the next window opens or closes, or what is due and absent is looked at again.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let agenda = &self.agenda;
        let turns = agenda.openings.first().into_iter().chain(agenda.closings.first()).map(|(at, _)| *at);
        let again = self.models.due_and_absent().next().map(|_| agenda.looked_at + LOOK_INTERVAL);
        let slot = agenda.wall_at(self.now).map(|wall| self.now + wall.until_next_bin());
        turns.chain(again).chain(slot).min()
    }
}

impl Model {
    /// Whether it was loaded ahead of any request; asked once.
    pub(super) fn take_ahead(&mut self) -> bool {
        self.phase.life_mut().is_some_and(|life| core::mem::take(&mut life.ahead))
    }

    /// What became of its preload, if it was one.
    pub(super) fn judge_preload(&mut self, outcome: PreloadOutcome, actions: &mut Vec<Action>) {
        if !self.take_ahead() {
            return;
        }
        let score = self.forecast.score_mut();
        match outcome {
            PreloadOutcome::Used => score.used = score.used.saturating_add(1),
            PreloadOutcome::Late => score.late = score.late.saturating_add(1),
            PreloadOutcome::Wasted => score.wasted = score.wasted.saturating_add(1),
        }
        actions.push(Action::Tell(Fact::Preloaded { digest: self.spec.digest, outcome }));
    }
}
