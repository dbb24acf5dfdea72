//! What each event changes. What follows from the change is decided afterwards, in one pass over the present state.

use super::{
    Worker,
    model::{Model, Phase, Waiter},
    park::Parks,
    protocol::{
        Action, CancelCause, Event, EvictionReason, Exit, Fact, Generation, LoadError, LoadTimings, ModelSpec,
        PreloadOutcome, Recollection, Rejection,
    },
};
use crate::{
    ids::{Digest, Priority, RequestId},
    memory::{Bytes, Footprint},
    residency::{Charge, Demand},
    time::Instant,
};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::time::Duration;

/// A model that grew is told of for each of these.
const GROWTH_TOLD_BYTES: u64 = 1 << 20;

impl Worker {
    pub(super) fn take(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Configure(spec) => self.configure(spec),
            Event::Forget { digest } => self.forget(digest, actions),
            Event::LoadWanted { digest } => self.want(digest),
            Event::Remembered { models } => self.remember(now, &models),
            Event::Succeed { digest, predecessor } => self.succeed(now, digest, predecessor),
            Event::PauseLifted { digest } => {
                if let Some(mut model) = self.models.get_mut(&digest) {
                    model.forgive();
                }
            }
            Event::UnloadWanted { digest } => self.unwant(now, digest, actions),
            Event::Assigned { request, digest, class, .. } => {
                self.assigned(now, request, digest, class, actions);
            }
            Event::Cancelled { request, cause } => self.cancelled(now, request, cause, actions),
            Event::Verified { digest, generation, .. } => self.verified(now, digest, generation, actions),
            Event::Loaded { digest, generation, peak, steady, timings, working_bytes } => {
                self.loaded(now, (digest, generation), (peak, steady, working_bytes), timings, actions);
            }
            Event::LoadFailed { digest, generation, error } => {
                self.load_failed(now, digest, generation, error, actions);
            }
            Event::Exited { digest, generation, exit } => self.exited(now, digest, generation, exit, actions),
            Event::Measured { digest, generation, steady } => self.measured(now, digest, generation, &steady, actions),
            Event::KvPressed { worth } => self.kv_pressed(now, worth, actions),
            Event::Prepared { request, prompt_tokens } => self.prepared(request, prompt_tokens, actions),
            Event::ParkSized { request, bytes } => self.park_sized(now, request, bytes, actions),
            Event::ParkRefused { request } => self.park_refused(request),
            Event::Parked { request } => self.has_parked(now, request, actions),
            Event::Progress { digest, generation } => {
                if self.is_in_life(digest, generation) {
                    self.note_progress(now, digest);
                }
            }
            Event::Finished { request } => self.finished(now, request, actions),
            Event::ThreadsHeld { digest, generation, .. } => {
                if self.is_in_life(digest, generation) {
                    self.threads.confirmed(digest);
                }
            }
            Event::WallTime { wall, asleep } => self.told_time(now, wall, asleep),
            Event::Scheduled { digest, warm } => self.scheduled(now, digest, warm),
            Event::Timer => {}
            Event::Drain => self.drain(actions),
        }
    }

    /// Whether a model is in the life with this generation; news of an earlier life concern nobody.
    fn is_in_life(&self, digest: Digest, generation: Generation) -> bool {
        let life = self.models.get(&digest).and_then(|model| model.phase.life());
        life.is_some_and(|life| life.generation == generation)
    }

    fn note_progress(&mut self, now: Instant, digest: Digest) {
        if let Some(mut model) = self.models.get_mut(&digest)
            && let Some(life) = model.phase.life_mut()
        {
            life.last_progress = now;
        }
    }

    fn configure(&mut self, mut spec: ModelSpec) {
        let digest = spec.digest;
        spec.pool = self.pool_of(&spec.pool);
        if self.models.get(&digest).is_none() {
            self.models.insert(digest, Model::new(spec));
        } else if let Some(mut model) = self.models.get_mut(&digest) {
            if model.spec.measured && !spec.measured {
                (spec.peak, spec.steady) = (model.spec.peak.clone(), model.spec.steady.clone());
                (spec.measured, spec.rewarm_seconds) = (true, model.spec.rewarm_seconds);
            }
            if model.spec != spec || model.forgotten {
                model.forgive();
            }
            model.spec = spec;
            model.forgotten = false;
        }
        self.models.activate(digest);
    }

    fn forget(&mut self, digest: Digest, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        model.forgotten = true;
        (model.wanted, model.preload, model.spec.pin, model.predecessor) = (false, false, false, None);
        model.activate();
        drop(model);
        self.reject_waiting(digest, &Rejection::UnknownModel, actions);
    }

    fn want(&mut self, digest: Digest) {
        if let Some(mut model) = self.models.get_mut(&digest).filter(|model| !model.forgotten) {
            model.unwanted = false;
            model.wanted = !matches!(model.phase, Phase::Ready(_));
            model.impossible = false;
            model.activate();
        }
    }

    fn succeed(&mut self, now: Instant, digest: Digest, predecessor: Digest) {
        if digest == predecessor {
            return;
        }
        let Some(old) = self.models.get(&predecessor) else { return };
        let (demand, forecast) = (old.demand, old.forecast.clone());
        let Some(mut model) = self.models.get_mut(&digest).filter(|model| !model.forgotten) else { return };
        (model.demand, model.forecast) = (demand, forecast);
        model.predecessor = (!matches!(model.phase, Phase::Ready(_))).then_some((predecessor, now));
        model.forgive();
        drop(model);
        self.want(digest);
        if let Some(mut predecessor) = self.models.get_mut(&predecessor) {
            predecessor.predecessor = None;
        }
    }

    fn remember(&mut self, now: Instant, models: &[Recollection]) {
        let half_life = self.settings.demand_half_life;
        for Recollection { digest, demand_per_second, age, warm, forecast } in models {
            let Some(mut model) = self.models.get_mut(digest) else { continue };
            model.demand = Demand::remembered(now, half_life, *demand_per_second, *age);
            model.restore = *warm && model.phase == Phase::Absent;
            model.forecast = forecast.clone().remembered(now, *age);
            model.activate();
            drop(model);
            self.put_on_agenda(now, *digest);
        }
    }

    fn scheduled(&mut self, now: Instant, digest: Digest, warm: bool) {
        if let Some(mut model) = self.models.get_mut(&digest) {
            model.forecast.schedule(warm);
        }
        self.put_on_agenda(now, digest);
    }

    fn unwant(&mut self, now: Instant, digest: Digest, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        (model.wanted, model.restore, model.unwanted) = (false, false, true);
        (model.preload, model.predecessor) = (false, None);
        let is_ready = matches!(model.phase, Phase::Ready(_));
        let loads_in_vain = model.phase.is_loading() && model.waiting.is_empty();
        drop(model);
        if is_ready {
            self.begin_drain(now, digest, EvictionReason::Requested, actions);
        } else if loads_in_vain {
            self.abandon_load(now, digest, EvictionReason::Requested, actions);
        }
    }

    fn assigned(
        &mut self,
        now: Instant,
        request: RequestId,
        digest: Digest,
        class: Priority,
        actions: &mut Vec<Action>,
    ) {
        if let Some(rejection) = self.refusal(now, digest) {
            actions.push(Action::Reject { request, rejection });
            return;
        }
        let half_life = self.settings.demand_half_life;
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        model.demand.note(now, half_life);
        model.forecast.note(now);
        let found = if matches!(model.phase, Phase::Ready(_)) { PreloadOutcome::Used } else { PreloadOutcome::Late };
        model.judge_preload(found, actions);
        model.last_used = Some(now);
        model.unwanted = false;
        let cold = !matches!(model.phase, Phase::Ready(_));
        model.enqueue(Waiter { request, class, since: now, cold, parked: None, parks: Parks::default() });
        model.activate();
        drop(model);
        self.requests.insert(request, digest);
        self.waiting_total += 1;
        self.put_on_agenda(now, digest);
    }

    /// Why a request for this digest cannot be taken now, if so.
    fn refusal(&self, now: Instant, digest: Digest) -> Option<Rejection> {
        if self.draining {
            return Some(Rejection::Draining);
        }
        let model = self.models.get(&digest).filter(|model| !model.forgotten);
        let Some(model) = model else { return Some(Rejection::UnknownModel) };
        // What can never be comes before what may pass.
        if model.phase == Phase::Absent
            && let Some(rejection) = self.hopeless(model)
        {
            return Some(rejection);
        }
        if let Some((error, retry_after)) = model.backoff.paused(now) {
            return Some(Rejection::LoadFailed { error: error.clone(), retry_after });
        }
        if self.waiting_total >= self.settings.waiting_requests_max {
            let retry_after = Duration::from_secs_f64(model.spec.rewarm_seconds.clamp(1.0, 60.0));
            return Some(Rejection::QueueFull { retry_after });
        }
        None
    }

    fn cancelled(&mut self, now: Instant, request: RequestId, cause: CancelCause, actions: &mut Vec<Action>) {
        let Some(digest) = self.requests.get(&request).copied() else { return };
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        if let Some(place) = model.waiting.iter().position(|waiter| waiter.request == request) {
            let waiter = model.waiting.remove(place);
            self.requests.remove(&request);
            self.waiting_total -= 1;
            self.parked.leaves(&waiter);
            if let Some(life) = model.phase.life_mut() {
                let waited_for_load = waiter.since <= life.since;
                life.promised = life.promised.saturating_sub(u32::from(waited_for_load));
            }
            model.load_outlives_callers |= cause == CancelCause::DeadlinePassed;
            drop(model);
            self.give_up_unwanted_load(now, digest, actions);
            return;
        }
        let Some(generation) = model.phase.life().map(|life| life.generation) else { return };
        if let Some(running) = model.running.get_mut(&request)
            && !running.aborted
        {
            running.aborted = true;
            actions.push(Action::Abort { request, digest, generation });
        }
    }

    /// A load that nobody waits for any more is given up, once: a second impatient caller finds it finished.
    fn give_up_unwanted_load(&mut self, now: Instant, digest: Digest, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let kept = model.wanted
            || model.restore
            || model.preload
            || model.spec.pin
            || model.load_outlives_callers
            || model.abandoned_last;
        if model.phase.is_loading() && model.waiting.is_empty() && !kept {
            model.abandoned_last = true;
            drop(model);
            self.abandon_load(now, digest, EvictionReason::Abandoned, actions);
        }
    }

    fn verified(&mut self, now: Instant, digest: Digest, generation: Generation, actions: &mut Vec<Action>) {
        let threads = self.threads.free().max(1);
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        match core::mem::replace(&mut model.phase, Phase::Absent) {
            Phase::Verifying(mut life) if life.generation == generation => {
                life.since = now;
                let pool_host = self.pools.get(&life.pool).map(|pool| pool.capacity.get(crate::memory::HOST));
                actions.push(Action::Load {
                    digest,
                    generation,
                    accelerators: life.accelerators.clone(),
                    memory_cap: model.spec.memory_cap.or(pool_host),
                    threads,
                });
                model.phase = Phase::Loading(life);
                self.threads.enter(digest, threads, now);
            }
            other => model.phase = other,
        }
    }

    fn loaded(
        &mut self,
        now: Instant,
        (digest, generation): (Digest, Generation),
        (peak, steady, working_bytes): (Footprint, Footprint, Bytes),
        timings: LoadTimings,
        actions: &mut Vec<Action>,
    ) {
        let mut protection = self.residency_protection(now, digest);
        if self.models.get(&digest).is_some_and(|model| model.predecessor.is_some()) {
            // Callers come as soon as its name is switched.
            protection = protection.max(self.settings.minimum_residency);
        }
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let Phase::Loading(life) = &model.phase else { return };
        if life.generation != generation {
            return;
        }
        let mut life = life.clone();
        let (from_bytes, to_bytes) = (model.spec.steady.total_bytes(), steady.total_bytes());
        let charge = Charge::new(&steady, model.spec.artifact, &life.accelerators);
        (life.private_at_ready, life.working_bytes) = (steady.private_host_bytes, working_bytes);
        (life.charge, life.since, life.last_progress, life.measured_at) = (charge, now, now, now);
        life.protected_until = now + protection;
        life.promised = u32::try_from(model.waiting.len()).unwrap_or(u32::MAX);
        model.phase = Phase::Ready(life);
        (model.wanted, model.restore, model.preload, model.predecessor) = (false, false, false, None);
        (model.load_outlives_callers, model.abandoned_last) = (false, false);
        let measured_before = model.spec.measured;
        let seconds = timings.rewarm_seconds();
        model.spec.rewarm_seconds = if measured_before { (model.spec.rewarm_seconds + seconds) / 2.0 } else { seconds };
        (model.spec.peak, model.spec.steady, model.spec.measured) = (peak.clone(), steady.clone(), true);
        if from_bytes != to_bytes {
            actions.push(Action::Tell(Fact::SizeCorrected { digest, from_bytes, to_bytes }));
        }
        actions.push(Action::Tell(Fact::LoadFinished { digest, generation, peak, steady, timings }));
    }

    fn load_failed(
        &mut self,
        now: Instant,
        digest: Digest,
        generation: Generation,
        error: LoadError,
        actions: &mut Vec<Action>,
    ) {
        if !self.is_in_life(digest, generation) {
            return;
        }
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        match model.phase {
            Phase::Verifying(_) => {
                model.phase = Phase::Absent;
                drop(model);
            }
            Phase::Loading(_) => {
                drop(model);
                self.kill(now, digest, EvictionReason::Abandoned, actions);
            }
            _ => return,
        }
        self.note_failed_load(now, digest, error, actions);
    }

    /// Caches the error for the pause that follows and tells everybody who waited.
    pub(super) fn note_failed_load(
        &mut self,
        now: Instant,
        digest: Digest,
        error: LoadError,
        actions: &mut Vec<Action>,
    ) {
        let (first, max) = (self.settings.backoff_first, self.settings.backoff_max);
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let retry_after = model.backoff.load_failed(now, error.clone(), first, max);
        (model.wanted, model.restore, model.load_outlives_callers) = (false, false, false);
        (model.preload, model.predecessor) = (false, None);
        drop(model);
        actions.push(Action::Tell(Fact::LoadRefused { digest, error: error.clone(), retry_after }));
        self.reject_waiting(digest, &Rejection::LoadFailed { error, retry_after }, actions);
    }

    fn exited(&mut self, now: Instant, digest: Digest, generation: Generation, exit: Exit, actions: &mut Vec<Action>) {
        if !self.is_in_life(digest, generation) {
            return;
        }
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let phase = core::mem::replace(&mut model.phase, Phase::Absent);
        if let Phase::Unloading { reason: EvictionReason::Memory | EvictionReason::OverBudget, .. } = phase {
            model.evicted_at = Some(now);
        }
        let lost = core::mem::take(&mut model.running);
        drop(model);
        self.threads.leave(digest);
        let message = exit.to_string();
        for (request, running) in lost {
            self.parked.gives_up(&running);
            self.requests.remove(&request);
            let rejection = Rejection::EngineLost { message: message.clone(), output_started: false };
            actions.push(Action::Reject { request, rejection });
        }
        match phase {
            Phase::Unloading { reason, .. } => {
                actions.push(Action::Tell(Fact::EvictionFinished { digest, reason }));
            }
            Phase::Loading(_) => {
                actions.push(Action::Tell(Fact::EngineCrashed { digest, message: message.clone() }));
                self.note_outgrown(digest, &exit, actions);
                let error =
                    LoadError { message: format!("the engine died while loading: {message}"), permanent: false };
                self.note_failed_load(now, digest, error, actions);
            }
            Phase::Ready(_) | Phase::Draining(..) => {
                actions.push(Action::Tell(Fact::EngineCrashed { digest, message: message.clone() }));
                self.note_crash(now, digest, message, actions);
            }
            Phase::Absent | Phase::Verifying(_) => {}
        }
    }

    /// A model that died of the cap that its whole pool is learns that it is larger, and its callers that it never fits.
    fn note_outgrown(&mut self, digest: Digest, exit: &Exit, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let Exit::OverCap(cap_bytes) = *exit else { return };
        if model.spec.memory_cap.is_some() {
            return;
        }
        model.outgrown_bytes = Some(cap_bytes);
        drop(model);
        let Some(model) = self.models.get(&digest) else { return };
        if let Some(rejection) = self.hopeless(model) {
            self.reject_waiting(digest, &rejection, actions);
        }
    }

    /// A ready engine died: started again at once the first time, after a pause when it keeps dying.
    pub(super) fn note_crash(&mut self, now: Instant, digest: Digest, message: String, actions: &mut Vec<Action>) {
        let (first, max) = (self.settings.backoff_first, self.settings.backoff_max);
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let error = LoadError { message: format!("the engine keeps dying: {message}"), permanent: false };
        let retry_after = model.backoff.crashed(now, error.clone(), first, max);
        drop(model);
        if !retry_after.is_zero() {
            self.reject_waiting(digest, &Rejection::LoadFailed { error, retry_after }, actions);
        }
    }

    fn measured(
        &mut self,
        now: Instant,
        digest: Digest,
        generation: Generation,
        steady: &Footprint,
        actions: &mut Vec<Action>,
    ) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let artifact = model.spec.artifact;
        let changing = &mut *model;
        let (Phase::Ready(life) | Phase::Draining(life, _)) = &mut changing.phase else { return };
        if life.generation != generation {
            return;
        }
        life.charge = Charge::new(steady, artifact, &life.accelerators);
        let limit = runaway_limit_bytes(life.private_at_ready).saturating_add(life.working_bytes);
        changing.spec.steady = steady.clone();
        let peak = changing.spec.peak.larger(steady);
        // Engines grow by pages: what is less than a unit more is planned for and no news.
        let units = |footprint: &Footprint| footprint.total_bytes() / GROWTH_TOLD_BYTES;
        if units(&peak) > units(&changing.spec.peak) {
            actions.push(Action::Tell(Fact::Grown { digest, peak: peak.clone(), steady: steady.clone() }));
        }
        changing.spec.peak = peak;
        if steady.private_host_bytes > limit {
            let message = format!(
                "its memory grew from {} to {} bytes while running, beyond the limit of {limit}",
                life.private_at_ready, steady.private_host_bytes
            );
            actions.push(Action::Tell(Fact::EngineCrashed { digest, message: message.clone() }));
            drop(model);
            self.kill(now, digest, EvictionReason::OverBudget, actions);
            self.note_crash(now, digest, message, actions);
        }
    }

    fn prepared(&mut self, request: RequestId, prompt_tokens: u32, actions: &mut Vec<Action>) {
        if let Some(digest) = self.requests.get(&request) {
            if let Some(mut model) = self.models.get_mut(digest)
                && let Some(running) = model.running.get_mut(&request)
            {
                running.prompt_tokens = prompt_tokens;
            }
            actions.push(Action::Grant { request });
        }
    }

    fn finished(&mut self, now: Instant, request: RequestId, actions: &mut Vec<Action>) {
        let Some(digest) = self.requests.get(&request).copied() else { return };
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let Some(running) = model.running.remove(&request) else { return };
        self.requests.remove(&request);
        self.parked.gives_up(&running);
        model.last_used = Some(now);
        if !running.aborted {
            model.backoff.succeeded();
        }
        drop(model);
        self.look_if_idle(now, digest, actions);
    }

    /// An engine whose last request has left steps no more, and is measured.
    pub(super) fn look_if_idle(&mut self, now: Instant, digest: Digest, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest).filter(|model| model.is_idle()) else { return };
        self.threads.set_busy(digest, false, now);
        if let Phase::Ready(life) | Phase::Draining(life, _) = &mut model.phase {
            life.measured_at = now;
            actions.push(Action::Measure { digest, generation: life.generation });
        }
    }

    fn drain(&mut self, actions: &mut Vec<Action>) {
        self.draining = true;
        for digest in self.models.digests() {
            self.reject_waiting(digest, &Rejection::Draining, actions);
            if let Some(mut model) = self.models.get_mut(&digest) {
                (model.wanted, model.restore, model.unwanted) = (false, false, true);
                (model.preload, model.predecessor) = (false, None);
                if model.phase != Phase::Absent {
                    model.activate();
                }
            }
        }
    }

    pub(super) fn reject_waiting(&mut self, digest: Digest, rejection: &Rejection, actions: &mut Vec<Action>) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        for waiter in core::mem::take(&mut model.waiting) {
            self.requests.remove(&waiter.request);
            self.waiting_total -= 1;
            self.parked.leaves(&waiter);
            actions.push(Action::Reject { request: waiter.request, rejection: rejection.clone() });
        }
        if let Some(life) = model.phase.life_mut() {
            life.promised = 0;
        }
    }
}

/// An engine that grows beyond this, and what it may use for a while, has run away: half as much again as when it was
/// ready, and 64 MiB.
fn runaway_limit_bytes(private_at_ready: u64) -> u64 {
    private_at_ready.saturating_add(private_at_ready / 2).saturating_add(64 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_of_any_size_has_a_limit() {
        assert_eq!(runaway_limit_bytes(100 << 20), (100 << 20) + (50 << 20) + (64 << 20));
        assert_eq!(runaway_limit_bytes(u64::MAX), u64::MAX);
    }
}
