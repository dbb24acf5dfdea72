//! All models of a worker, and lists of those that have something to do.
//!
//! Most models only lie in the catalogue, and most of those in memory serve nobody at the moment: no event looks at
//! either. Whoever changes a model does so through [`Changing`], which brings the lists up to date when it goes, so that
//! none can be forgotten.

use super::{
    model::{Model, Phase},
    protocol::{ModelState, Settings},
};
use crate::{
    ids::{Digest, PoolName},
    memory::Bytes,
    residency::{Charge, HeldSum},
    time::Instant,
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};
use core::{
    ops::{Deref, DerefMut},
    time::Duration,
};
use serde::{Deserialize, Serialize};

/// Engines are not measured more often than this, whatever the settings say.
const MEASURE_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// What of the settings the lists depend on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Rules {
    pub(super) measure_interval: Duration,
    priority_protection: Duration,
}

impl Rules {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            measure_interval: settings.measure_interval.max(MEASURE_INTERVAL_MIN),
            priority_protection: settings.priority_protection,
        }
    }
}

/// Models in the order of their digests, and where their slots are.
type Listing = BTreeMap<Digest, usize>;

/// The models.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub(super) struct Roster {
    /// Where in `slots` each is: a list is gone through without looking every model up.
    places: Listing,
    /// None where one was removed.
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    lists: Lists,
    rules: Rules,
}

/// What of the models is not told by the rest.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Stored {
    models: BTreeMap<Digest, Model>,
    active: BTreeSet<Digest>,
    rules: Rules,
}

#[derive(Debug, Clone)]
struct Slot {
    place: usize,
    model: Model,
    /// It is not merely catalogued: resident, waited for, wanted or pausing after a failure.
    is_active: bool,
    listed: Listed,
    holds: Option<Holds>,
}

/// Where the lists have a model.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Listed {
    is_active: bool,
    is_absent: bool,
    is_busy: bool,
    is_loading: bool,
    is_pinned: bool,
    is_due_and_absent: bool,
    predecessor: Option<Digest>,
    wakes_at: Option<Instant>,
    pauses_until: Option<Instant>,
    protected_until: [Option<Instant>; 2],
}

/// Bytes that a model is charged with.
#[derive(Debug, Clone, PartialEq)]
struct Holds {
    pool: PoolName,
    charge: Charge,
    is_leaving: bool,
}

/// Bytes held in one pool.
#[derive(Debug, Default, Clone)]
struct PoolHeld {
    all: HeldSum,
    /// By those that are not on their way out.
    staying: HeldSum,
}

#[derive(Debug, Default, Clone)]
struct Lists {
    active: Listing,
    /// Active, without a life.
    absent: Listing,
    /// With a life in which something goes on.
    busy: Listing,
    loading: u32,
    /// In memory, and not to be evicted.
    pinned: Listing,
    /// Expected about now, and without a life.
    due_and_absent: Listing,
    /// Versions that stay until others are ready: how many of these there are.
    succeeded: BTreeMap<Digest, u32>,
    /// When those that are in memory and not busy are to be looked at next.
    wakes: BTreeSet<(Instant, Digest)>,
    /// Until when absent models pause after a failure.
    pauses: BTreeSet<(Instant, Digest)>,
    /// Until when residents are protected, by their own load and by their class.
    protections: [BTreeSet<(Instant, Digest)>; 2],
    held: BTreeMap<PoolName, PoolHeld>,
    /// Changed since that was told last.
    changed: BTreeSet<Digest>,
    /// Their successors have changed.
    unsettled: Vec<Digest>,
}

impl Slot {
    fn list(&self, rules: &Rules, is_succeeded: bool) -> Listed {
        let model = &self.model;
        let life = model.phase.life();
        let is_absent = self.is_active && life.is_none();
        let resting = life.filter(|_| model.is_at_rest());
        let by_class = |since: Instant| model.last_used.unwrap_or(since) + rules.priority_protection;
        Listed {
            is_active: self.is_active,
            is_absent,
            is_busy: life.is_some() && resting.is_none(),
            is_loading: model.phase.is_loading(),
            is_pinned: life.is_some() && model.spec.pin && !model.unwanted,
            is_due_and_absent: life.is_none() && model.window_is_open,
            predecessor: model.predecessor.filter(|_| self.is_active).map(|(predecessor, _)| predecessor),
            wakes_at: resting.map(|life| {
                let measured = life.measured_at + rules.measure_interval;
                model.keep_alive_ends(is_succeeded).map_or(measured, |ends| measured.min(ends))
            }),
            pauses_until: model.backoff.until().filter(|_| is_absent),
            protected_until: [life.map(|life| life.protected_until), life.map(|life| by_class(life.since))],
        }
    }
}

/// Enters a model into a list, or takes it out.
fn enlist(list: &mut Listing, digest: Digest, place: usize, (was, is): (bool, bool)) {
    match (was, is) {
        (false, true) => drop(list.insert(digest, place)),
        (true, false) => drop(list.remove(&digest)),
        _ => {}
    }
}

/// Enters a model's moment, in place of another.
fn reschedule(set: &mut BTreeSet<(Instant, Digest)>, digest: Digest, (was, is): (Option<Instant>, Option<Instant>)) {
    if was != is {
        was.map(|at| set.remove(&(at, digest)));
        is.map(|at| set.insert((at, digest)));
    }
}

impl Lists {
    /// Brings everything up to date about one model.
    fn relist(&mut self, rules: &Rules, digest: Digest, slot: &mut Slot) {
        self.changed.insert(digest);
        let listed = slot.list(rules, self.succeeded.contains_key(&digest));
        self.enter(digest, slot, listed);
        self.charge(slot);
    }

    /// Moves a model to other lists.
    fn enter(&mut self, digest: Digest, slot: &mut Slot, listed: Listed) {
        let was = core::mem::replace(&mut slot.listed, listed);
        let place = slot.place;
        enlist(&mut self.active, digest, place, (was.is_active, listed.is_active));
        enlist(&mut self.absent, digest, place, (was.is_absent, listed.is_absent));
        enlist(&mut self.busy, digest, place, (was.is_busy, listed.is_busy));
        enlist(&mut self.pinned, digest, place, (was.is_pinned, listed.is_pinned));
        enlist(&mut self.due_and_absent, digest, place, (was.is_due_and_absent, listed.is_due_and_absent));
        self.loading = self.loading + u32::from(listed.is_loading) - u32::from(was.is_loading);
        reschedule(&mut self.wakes, digest, (was.wakes_at, listed.wakes_at));
        reschedule(&mut self.pauses, digest, (was.pauses_until, listed.pauses_until));
        for (place, set) in self.protections.iter_mut().enumerate() {
            reschedule(set, digest, (was.protected_until[place], listed.protected_until[place]));
        }
        if was.predecessor != listed.predecessor {
            was.predecessor.into_iter().for_each(|predecessor| self.lose_successor(predecessor));
            listed.predecessor.into_iter().for_each(|predecessor| self.gain_successor(predecessor));
        }
    }

    fn gain_successor(&mut self, predecessor: Digest) {
        *self.succeeded.entry(predecessor).or_default() += 1;
        self.unsettled.push(predecessor);
    }

    fn lose_successor(&mut self, predecessor: Digest) {
        if let Some(successors) = self.succeeded.get_mut(&predecessor) {
            *successors -= 1;
            if *successors == 0 {
                self.succeeded.remove(&predecessor);
            }
        }
        self.unsettled.push(predecessor);
    }

    fn charge(&mut self, slot: &mut Slot) {
        let (model, holds) = (&slot.model, &mut slot.holds);
        let is_leaving = model.phase.is_leaving();
        let (life, known) = (model.phase.life(), holds.as_ref());
        let same = match (life, known) {
            (None, None) => true,
            (Some(life), Some(known)) => {
                known.is_leaving == is_leaving && known.pool == life.pool && known.charge == life.charge
            }
            _ => false,
        };
        if same {
            return;
        }
        if let Some(old) = holds.take()
            && let Some(held) = self.held.get_mut(&old.pool)
        {
            held.all.remove(&old.charge);
            if !old.is_leaving {
                held.staying.remove(&old.charge);
            }
        }
        if let Some(life) = life {
            let held = self.held.entry(life.pool.clone()).or_default();
            held.all.add(&life.charge);
            if !is_leaving {
                held.staying.add(&life.charge);
            }
            *holds = Some(Holds { pool: life.pool.clone(), charge: life.charge.clone(), is_leaving });
        }
    }
}

/// A model that is being changed.
pub(super) struct Changing<'a> {
    digest: Digest,
    slot: &'a mut Slot,
    lists: &'a mut Lists,
    rules: &'a Rules,
}

impl Deref for Changing<'_> {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.slot.model
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut Model {
        &mut self.slot.model
    }
}

impl Changing<'_> {
    /// It is not merely catalogued any more.
    pub(super) fn activate(&mut self) {
        self.slot.is_active = true;
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.lists.relist(self.rules, self.digest, self.slot);
    }
}

/// One model.
impl Roster {
    pub(super) fn new(rules: Rules) -> Self {
        Self { places: Listing::new(), slots: Vec::new(), free: Vec::new(), lists: Lists::default(), rules }
    }

    pub(super) fn get(&self, digest: &Digest) -> Option<&Model> {
        self.at(*self.places.get(digest)?)
    }

    fn at(&self, place: usize) -> Option<&Model> {
        self.slots.get(place)?.as_ref().map(|slot| &slot.model)
    }

    pub(super) fn get_mut(&mut self, digest: &Digest) -> Option<Changing<'_>> {
        let slot = self.slots.get_mut(*self.places.get(digest)?)?.as_mut()?;
        Some(Changing { digest: *digest, slot, lists: &mut self.lists, rules: &self.rules })
    }

    /// A model that is new.
    pub(super) fn insert(&mut self, digest: Digest, model: Model) {
        let place = self.places.get(&digest).copied().or_else(|| self.free.pop()).unwrap_or(self.slots.len());
        let slot = Some(Slot { place, model, is_active: false, listed: Listed::default(), holds: None });
        match self.slots.get_mut(place) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        self.places.insert(digest, place);
        self.set_active(digest, false);
    }

    /// A model that is absent and of which nothing is to be known any more.
    pub(super) fn remove(&mut self, digest: &Digest) {
        let Some(place) = self.places.remove(digest) else { return };
        if let Some(mut slot) = self.slots.get_mut(place).and_then(Option::take) {
            self.lists.enter(*digest, &mut slot, Listed::default());
            self.lists.changed.remove(digest);
            self.free.push(place);
        }
    }

    pub(super) fn activate(&mut self, digest: Digest) {
        self.set_active(digest, true);
    }

    /// It is merely catalogued from now on.
    pub(super) fn deactivate(&mut self, digest: &Digest) {
        self.set_active(*digest, false);
        self.lists.changed.remove(digest);
    }

    fn set_active(&mut self, digest: Digest, is_active: bool) {
        if let Some(changing) = self.get_mut(&digest) {
            changing.slot.is_active = is_active;
        }
    }

    pub(super) fn is_active(&self, digest: &Digest) -> bool {
        self.lists.active.contains_key(digest)
    }

    /// Whether a version stays until another is ready.
    pub(super) fn has_successor(&self, digest: &Digest) -> bool {
        self.lists.succeeded.contains_key(digest)
    }

    pub(super) fn rules(&self) -> &Rules {
        &self.rules
    }
}

/// Many models, always in the order of their digests.
impl Roster {
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Digest, &Model)> {
        self.places.iter().filter_map(|(digest, place)| Some((digest, self.at(*place)?)))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Model> {
        self.all(&self.places)
    }

    pub(super) fn digests(&self) -> Vec<Digest> {
        self.places.keys().copied().collect()
    }

    fn all<'a>(&'a self, list: &'a Listing) -> impl Iterator<Item = &'a Model> + Clone {
        list.values().filter_map(|place| self.at(*place))
    }

    /// Those that are not merely catalogued. There may be many: ask only where something is to be planned or shown.
    pub(super) fn active(&self) -> impl Iterator<Item = &Model> + Clone {
        self.all(&self.lists.active)
    }

    /// Those of the active that have no life.
    pub(super) fn absent(&self) -> impl Iterator<Item = &Model> + Clone {
        self.all(&self.lists.absent)
    }

    /// Those that have a life in which something goes on.
    pub(super) fn busy(&self) -> impl Iterator<Item = &Model> + Clone {
        self.all(&self.lists.busy)
    }

    /// Of the same, what they are known by: for those who change them.
    pub(super) fn busy_digests(&self) -> Vec<Digest> {
        self.lists.busy.keys().copied().collect()
    }

    /// Of all with a life.
    pub(super) fn resident_digests(&self) -> Vec<Digest> {
        self.lists.active.keys().filter(|digest| !self.lists.absent.contains_key(digest)).copied().collect()
    }

    /// Those in memory that are not to be evicted.
    pub(super) fn pinned(&self) -> impl Iterator<Item = &Model> + Clone {
        self.all(&self.lists.pinned)
    }

    /// Those expected about now that have no life.
    pub(super) fn due_and_absent(&self) -> impl Iterator<Item = &Model> + Clone {
        self.all(&self.lists.due_and_absent)
    }

    pub(super) fn loading_count(&self) -> u32 {
        self.lists.loading
    }

    /// Bytes held in a pool, by those that stay or by all.
    pub(super) fn held(&self, pool: &PoolName, is_staying: bool) -> Option<&HeldSum> {
        self.lists.held.get(pool).map(|held| if is_staying { &held.staying } else { &held.all })
    }
}

/// What time brings about.
impl Roster {
    /// Those of which something may have become due by now.
    pub(super) fn awake(&mut self, now: Instant) -> BTreeSet<Digest> {
        self.settle_successors();
        let woken = self.lists.wakes.iter().take_while(|(at, _)| *at <= now).map(|(_, digest)| *digest);
        let succeeding = self.absent().filter(|model| model.predecessor.is_some()).map(|model| model.spec.digest);
        woken.chain(succeeding).chain(self.lists.busy.keys().copied()).collect()
    }

    /// Who is to be replaced, or not any more, is kept for another time.
    fn settle_successors(&mut self) {
        for digest in core::mem::take(&mut self.lists.unsettled) {
            drop(self.get_mut(&digest));
        }
    }

    /// When the first of those is due next that are neither busy nor absent.
    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        after(&self.lists.wakes, now)
    }

    /// When the first pause after a failure ends next.
    pub(super) fn next_end_of_pause(&self, now: Instant) -> Option<Instant> {
        after(&self.lists.pauses, now)
    }

    /// When the first resident loses some protection next.
    pub(super) fn next_end_of_protection(&self, now: Instant) -> Option<Instant> {
        self.lists.protections.iter().filter_map(|set| after(set, now)).min()
    }

    /// Those whose state may be another than when this was asked last: they were changed, or paused until now.
    pub(super) fn take_changed(&mut self, now: Instant) -> BTreeSet<Digest> {
        let rested = self.lists.pauses.iter().take_while(|(until, _)| *until <= now).map(|(_, digest)| *digest);
        let mut changed = core::mem::take(&mut self.lists.changed);
        changed.extend(rested);
        changed
    }
}

/// The first moment of a set that lies ahead.
fn after(set: &BTreeSet<(Instant, Digest)>, now: Instant) -> Option<Instant> {
    let last_of_now = (now, Digest([0xff; 32]));
    set.range((core::ops::Bound::Excluded(last_of_now), core::ops::Bound::Unbounded)).next().map(|(at, _)| *at)
}

impl Model {
    /// It is in memory and nothing goes on: nobody uses it or waits for it, and nothing is to be told or done about it
    /// before some time has passed.
    fn is_at_rest(&self) -> bool {
        matches!(self.phase, Phase::Ready(_))
            && self.is_idle()
            && self.waiting.is_empty()
            && !self.forgotten
            && !self.unwanted
            && self.told_state == ModelState::Ready
    }

    /// Until when an idle model is kept that nobody asks for; none if it stays.
    pub(super) fn keep_alive_ends(&self, is_succeeded: bool) -> Option<Instant> {
        let Phase::Ready(life) = &self.phase else { return None };
        let kept = self.spec.pin || self.forecast.is_scheduled() || !self.waiting.is_empty() || is_succeeded;
        let keep_alive = self.spec.keep_alive.filter(|_| !kept)?;
        let ends = self.last_used.unwrap_or(life.since).max(life.since) + keep_alive;
        // What was loaded because it is due stays as long as it is.
        let due_until = self.window.filter(|_| life.ahead).map(|(_, until)| until);
        Some(due_until.map_or(ends, |until| ends.max(until)))
    }
}

impl From<Stored> for Roster {
    fn from(stored: Stored) -> Self {
        let mut roster = Self::new(stored.rules);
        for (digest, model) in stored.models {
            roster.insert(digest, model);
        }
        stored.active.into_iter().for_each(|digest| roster.activate(digest));
        roster
    }
}

impl From<Roster> for Stored {
    fn from(roster: Roster) -> Self {
        let active = roster.lists.active.into_keys().collect();
        let models = roster.slots.into_iter().flatten().map(|slot| (slot.model.spec.digest, slot.model)).collect();
        Self { models, active, rules: roster.rules }
    }
}

/// What must hold of the lists: that they are those of the models as they are.
impl Roster {
    pub(super) fn lists_are_true(&self) -> bool {
        let settled = |mut roster: Self| {
            roster.settle_successors();
            roster.lists
        };
        let (lists, fresh) = (settled(self.clone()), settled(Self::from(Stored::from(self.clone()))));
        // Sums keep the devices that they once had.
        let bytes = |sum: &HeldSum| -> Vec<Bytes> {
            sum.total().0.iter().rev().skip_while(|bytes| **bytes == 0).copied().collect()
        };
        let held = |lists: &Lists| -> BTreeMap<PoolName, [Vec<Bytes>; 2]> {
            let pools = lists.held.iter().map(|(pool, held)| (pool.clone(), [bytes(&held.all), bytes(&held.staying)]));
            pools.filter(|(_, [all, _])| !all.is_empty()).collect()
        };
        held(&lists) == held(&fresh)
            && lists.active.keys().eq(fresh.active.keys())
            && lists.absent.keys().eq(fresh.absent.keys())
            && lists.busy.keys().eq(fresh.busy.keys())
            && lists.loading == fresh.loading
            && lists.pinned.keys().eq(fresh.pinned.keys())
            && lists.due_and_absent.keys().eq(fresh.due_and_absent.keys())
            && lists.succeeded == fresh.succeeded
            && lists.pauses == fresh.pauses
            && lists.protections == fresh.protections
            && lists.wakes == fresh.wakes
    }
}
