//! Running requests that give way to one of a higher class: for the memory of their model, or for its sequence.
//!
//! A request is stopped between two steps, its size becomes known, and if there is room its state is taken out of the
//! engine. It then waits like others, in front of its own class, and goes on where it stopped. Whatever stands against
//! that (the engine, the bounds, the memory) leaves it running: it is never lost for having been asked.

use super::{
    Worker,
    model::{Model, Phase, Running, Waiter},
    protocol::{Action, EvictionReason, Fact, Rejection},
};
use crate::{
    ids::{Digest, PoolName, Priority, RequestId},
    memory::{Bytes, Footprint, HOST},
    residency::{Charge, Held, Problem, Standing, place},
    time::Instant,
};
use alloc::{string::ToString, vec::Vec};
use core::{cmp::Reverse, time::Duration};
use serde::{Deserialize, Serialize};

/// How far the parking of a running request has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Parking {
    No,
    /// It cannot be.
    Refused,
    /// Its engine was asked to stop it.
    Asked,
    /// It is being taken out, into so many bytes.
    Taken(Bytes),
}

/// How often a request was parked, and how long in all.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Parks {
    pub(super) times: u32,
    pub(super) time: Duration,
}

/// What is parked, or on its way to it, over all models.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Parked {
    requests: u32,
    bytes: Bytes,
}

impl Parked {
    /// A waiting request is over.
    pub(super) fn leaves(&mut self, waiter: &Waiter) {
        if let Some(bytes) = waiter.parked {
            self.requests -= 1;
            self.bytes -= bytes;
        }
    }

    /// A running request is over, or runs on.
    pub(super) fn gives_up(&mut self, running: &Running) {
        match running.parking {
            Parking::No | Parking::Refused => {}
            Parking::Asked => self.requests -= 1,
            Parking::Taken(bytes) => {
                self.requests -= 1;
                self.bytes -= bytes;
            }
        }
    }

    /// A waiting request starts: how often and how long it was parked by now.
    pub(super) fn resumes(&mut self, now: Instant, waiter: &Waiter) -> Parks {
        self.leaves(waiter);
        let Parks { times, time } = waiter.parks;
        match waiter.parked {
            Some(_) => Parks { times: times + 1, time: time + now.since(waiter.since) },
            None => waiter.parks,
        }
    }
}

impl Running {
    fn is_parking(&self) -> bool {
        matches!(self.parking, Parking::Asked | Parking::Taken(_))
    }
}

impl Model {
    /// Requests that ran on it and gave way.
    pub(super) fn parked(&self) -> u32 {
        u32::try_from(self.waiting.iter().filter(|waiter| waiter.parked.is_some()).count()).unwrap_or(u32::MAX)
    }
}

/// Who gives way.
impl Worker {
    /// Whether a running request gives way to a caller of this class.
    fn gives_way(&self, running: &Running, caller: Priority) -> bool {
        let limits = &self.settings.parking;
        let bounded = running.parks.times < limits.times_max && running.parks.time < limits.time_max;
        caller < running.class && bounded && !running.aborted && running.parking != Parking::Refused
    }

    /// Whether everybody gives way to a caller of this class who runs on a model or waits for it.
    pub(super) fn yields(&self, model: &Model, caller: Priority) -> bool {
        let more = model.running.values().filter(|running| !running.is_parking()).count();
        let room = self.settings.parking.requests_max.saturating_sub(self.parked.requests) as usize;
        !model.is_idle()
            && more <= room
            && model.running.values().all(|running| self.gives_way(running, caller))
            && model.waiting.iter().all(|waiter| caller < waiter.class)
    }

    /// Asks those to stop whose parking lets somebody of a higher class start.
    pub(super) fn park_for_waiting(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.settings.parking.requests_max == 0 {
            return;
        }
        for digest in self.models.busy_digests() {
            for request in self.to_park(now, digest) {
                let room = self.parked.requests < self.settings.parking.requests_max;
                let Some(mut model) = self.models.get_mut(&digest).filter(|_| room) else { continue };
                let Some(generation) = model.phase.life().map(|life| life.generation) else { continue };
                let Some(running) = model.running.get_mut(&request) else { continue };
                running.parking = Parking::Asked;
                self.parked.requests += 1;
                actions.push(Action::Park { request, digest, generation });
            }
        }
    }

    fn to_park(&self, now: Instant, digest: Digest) -> Vec<RequestId> {
        let Some(model) = self.models.get(&digest).filter(|model| !model.is_idle()) else { return Vec::new() };
        match &model.phase {
            Phase::Draining(life, EvictionReason::Memory) => {
                let caller = self.first_without_memory(now, &life.pool).and_then(|model| model.waiting.first());
                let yields = caller.is_some_and(|caller| self.yields(model, caller.class));
                let running = model.running.iter().filter(|(_, running)| yields && running.parking == Parking::No);
                running.map(|(request, _)| *request).collect()
            }
            Phase::Ready(life) if model.running.len() >= life.parallel => self.for_sequences(model),
            _ => Vec::new(),
        }
    }

    /// The first in line of those whose model waits for memory of a pool.
    fn first_without_memory(&self, now: Instant, pool: &PoolName) -> Option<&Model> {
        let mut due = self.due_models(now).into_iter().filter_map(|digest| self.models.get(&digest));
        due.find(|model| model.spec.pool == *pool && !model.waiting.is_empty())
    }

    /// Who leaves a sequence of a full model to a waiting caller of a higher class: first of the lowest class, then
    /// who was parked least often, then who has least to move.
    fn for_sequences(&self, model: &Model) -> Vec<RequestId> {
        let leaving = model.running.values().filter(|running| running.is_parking()).count();
        let mut candidates: Vec<_> = model
            .running
            .iter()
            .filter(|(_, running)| running.parking == Parking::No)
            .map(|(request, running)| {
                ((Reverse(running.class), running.parks.times, running.prompt_tokens, *request), running)
            })
            .collect();
        candidates.sort_unstable_by_key(|(order, _)| *order);
        let mut chosen = Vec::new();
        for waiter in model.waiting.iter().skip(leaving) {
            let place = candidates.iter().position(|(_, running)| self.gives_way(running, waiter.class));
            let Some(place) = place else { break };
            let ((.., request), _) = candidates.remove(place);
            chosen.push(request);
        }
        chosen
    }

    /// Whether what a request was asked to stop for is still there.
    fn is_still_wanted(&self, now: Instant, model: &Model, running: &Running) -> bool {
        match &model.phase {
            Phase::Draining(life, EvictionReason::Memory) => {
                let caller = self.first_without_memory(now, &life.pool).and_then(|model| model.waiting.first());
                caller.is_some_and(|caller| caller.class < running.class)
            }
            Phase::Ready(_) => {
                let leaving = model.running.values().filter(|other| other.is_parking()).count();
                model.waiting.iter().filter(|waiter| waiter.class < running.class).count() >= leaving
            }
            _ => false,
        }
    }

    /// Whether a state fits beside everything that is held now, and whoever it makes room for beside it later.
    fn has_room_to_park(&self, now: Instant, model: &Model, bytes: Bytes) -> bool {
        let default = PoolName::default_pool();
        let capacity = self.pools.get(&default).map_or(0, |pool| pool.capacity.get(HOST));
        let held = self.held_in_pool(&default).get(HOST).saturating_add(bytes);
        if self.parked.bytes.saturating_add(bytes) > self.settings.parking.bytes_max || held > capacity {
            return false;
        }
        // Everybody who is parked must find room to come back beside all that is parked.
        let mut coming_back =
            self.models.busy().chain(self.models.absent()).filter(|other| other.parked() > 0).chain([model]);
        if !coming_back.all(|model| self.fits_beside_parked(model, bytes)) {
            return false;
        }
        let Phase::Draining(life, _) = &model.phase else { return true };
        let newcomer = self.first_without_memory(now, &life.pool);
        newcomer.zip(self.pools.get(&life.pool)).is_some_and(|(newcomer, pool)| {
            let mut held = self.held_in(now, &life.pool, newcomer.class(), super::plan::Reach::Idle);
            held.extend((life.pool == default).then(|| parked_bytes(bytes)));
            let footprint = self.peak_to_plan(newcomer);
            let artifact = newcomer.spec.artifact;
            place(&Problem { capacity: &pool.capacity, held: &held, footprint: &footprint, artifact }).is_some()
        })
    }

    /// Whether a model can be loaded beside what is pinned, what is parked, and so many bytes more.
    fn fits_beside_parked(&self, model: &Model, bytes: Bytes) -> bool {
        let mut held = self.pinned_beside(model);
        if model.spec.pool == PoolName::default_pool() {
            held.push(parked_bytes(self.parked.bytes.saturating_add(bytes)));
        }
        self.fits_beside(model, &held)
    }

    /// Whether a model can only be loaded when parked requests have gone on: it claims nothing that they need for that.
    pub(super) fn waits_for_parked(&self, digest: Digest) -> bool {
        self.parked.bytes > 0 && self.models.get(&digest).is_some_and(|model| !self.fits_beside_parked(model, 0))
    }

    /// Parked requests whose model has grown since, so that it does not fit beside them any more, would wait for
    /// themselves.
    pub(super) fn refuse_parked_in_vain(&mut self, digest: Digest, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        for waiter in model.waiting.extract_if(.., |waiter| waiter.parked.is_some()) {
            self.requests.remove(&waiter.request);
            self.waiting_total -= 1;
            self.parked.leaves(&waiter);
            let rejection = Rejection::NoMemory { retry_after: self.settings.backoff_max };
            actions.push(Action::Reject { request: waiter.request, rejection });
        }
    }

    /// States of parked requests, as somebody who holds bytes in a pool: they lie in the host memory of the default one.
    pub(super) fn parked_in(&self, pool: &PoolName) -> Option<Held> {
        let here = self.parked.bytes > 0 && *pool == PoolName::default_pool();
        here.then(|| parked_bytes(self.parked.bytes))
    }
}

/// Bytes of states: nobody's model, and they stay.
fn parked_bytes(bytes: Bytes) -> Held {
    let nobody = Digest([0; 32]);
    Held { digest: nobody, charge: Charge::new(&Footprint::host(bytes), nobody, &[]), standing: Standing::Fixed }
}

/// What engines say.
impl Worker {
    pub(super) fn park_sized(&mut self, now: Instant, request: RequestId, bytes: Bytes, actions: &mut Vec<Action>) {
        let Some(digest) = self.requests.get(&request).copied() else { return };
        let Some(model) = self.models.get(&digest) else { return };
        let Some(generation) = model.phase.life().map(|life| life.generation) else { return };
        let Some(running) = model.running.get(&request).filter(|running| running.parking == Parking::Asked) else {
            return;
        };
        if running.aborted {
            // It ends by what it was told before.
            return;
        }
        let wanted = self.is_still_wanted(now, model, running);
        let parking = match wanted {
            true if self.has_room_to_park(now, model, bytes) => Parking::Taken(bytes),
            true => Parking::Refused,
            false => Parking::No,
        };
        let taken = matches!(parking, Parking::Taken(_));
        actions.push(if taken {
            Action::ParkTake { request, digest, generation, bytes }
        } else {
            Action::ParkStop { request, digest, generation }
        });
        self.set_parking(request, digest, parking);
        if taken {
            self.parked.requests += 1;
            self.parked.bytes += bytes;
        }
    }

    pub(super) fn park_refused(&mut self, request: RequestId) {
        if let Some(digest) = self.requests.get(&request).copied() {
            self.set_parking(request, digest, Parking::Refused);
        }
    }

    /// Ends what there was of a request's parking and begins another state of it.
    fn set_parking(&mut self, request: RequestId, digest: Digest, parking: Parking) {
        if let Some(mut model) = self.models.get_mut(&digest)
            && let Some(running) = model.running.get_mut(&request)
        {
            self.parked.gives_up(running);
            running.parking = parking;
        }
    }

    pub(super) fn has_parked(&mut self, now: Instant, request: RequestId, actions: &mut Vec<Action>) {
        let Some(digest) = self.requests.get(&request).copied() else { return };
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let Some(running) = model.running.get(&request) else { return };
        let Parking::Taken(bytes) = running.parking else { return };
        let Running { aborted, class, parks, .. } = running.clone();
        model.running.remove(&request);
        model.last_used = Some(now);
        let gone = aborted || model.forgotten || self.draining;
        if gone {
            // Nobody waits for it any more, or nothing that could go on with it.
            self.parked.requests -= 1;
            self.parked.bytes -= bytes;
            self.requests.remove(&request);
            let rejection = match self.draining {
                true => Rejection::Draining,
                false => {
                    Rejection::EngineLost { message: "it was taken off its engine".to_string(), output_started: true }
                }
            };
            actions.push(Action::Reject { request, rejection });
        } else {
            let waiter = Waiter { request, class, since: now, cold: true, parked: Some(bytes), parks };
            model.enqueue_first(waiter);
            self.waiting_total += 1;
            actions.push(Action::Tell(Fact::Parked { digest, bytes }));
        }
        drop(model);
        self.look_if_idle(now, digest, actions);
    }
}

/// The bound on time, and all bounds.
impl Worker {
    fn waiters_parked(&self) -> impl Iterator<Item = &Waiter> {
        let some = self.parked.requests > 0;
        let models = self.models.busy().chain(self.models.absent()).filter(move |_| some);
        models.flat_map(|model| &model.waiting).filter(|waiter| waiter.parked.is_some())
    }

    fn too_long_at(&self, waiter: &Waiter) -> Instant {
        waiter.since + self.settings.parking.time_max.saturating_sub(waiter.parks.time)
    }

    /// When parked requests will have waited for as long as they may.
    pub(super) fn parked_too_long(&self) -> impl Iterator<Item = Instant> {
        let waiting = self.waiters_parked().filter(|waiter| waiter.class != Priority::Critical);
        waiting.map(|waiter| self.too_long_at(waiter))
    }

    /// Who was parked for too long goes first from now on.
    pub(super) fn end_waiting_of_parked(&mut self, now: Instant) {
        let due: Vec<RequestId> = self
            .waiters_parked()
            .filter(|waiter| waiter.class != Priority::Critical && self.too_long_at(waiter) <= now)
            .map(|waiter| waiter.request)
            .collect();
        for request in due {
            let model = self.requests.get(&request).and_then(|digest| self.models.get_mut(digest));
            let Some(mut model) = model else { continue };
            let Some(place) = model.waiting.iter().position(|waiter| waiter.request == request) else { continue };
            let waiter = Waiter { class: Priority::Critical, ..model.waiting.remove(place) };
            model.enqueue_first(waiter);
        }
    }

    /// Whether all bounds hold and the sums are right.
    pub(super) fn parking_is_sound(&self) -> bool {
        let mut sum = Parked::default();
        let mut sound = true;
        let limits = &self.settings.parking;
        for model in self.models.values() {
            for waiter in &model.waiting {
                sum.requests += u32::from(waiter.parked.is_some());
                sum.bytes += waiter.parked.unwrap_or(0);
                sound &= waiter.parked.is_none() || waiter.parks.times < limits.times_max;
            }
            for running in model.running.values() {
                sum.requests += u32::from(running.is_parking());
                sum.bytes += if let Parking::Taken(bytes) = running.parking { bytes } else { 0 };
                sound &= running.parks.times <= limits.times_max;
            }
        }
        sound && sum == self.parked && sum.requests <= limits.requests_max && sum.bytes <= limits.bytes_max
    }
}
