//! Starting waiting requests on ready models, sharing out threads, and letting models go.

use super::{
    Worker,
    model::{Life, Phase, Running},
    park::Parking,
    protocol::{Action, EvictionReason, Fact, PreloadOutcome, StartKind},
};
use crate::{ids::Digest, time::Instant};
use alloc::vec::Vec;

impl Worker {
    /// Starts what can be started, and tells engines their threads before their work.
    pub(super) fn serve_ready(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let mut starts = Vec::new();
        for digest in self.models.busy_digests() {
            self.start_waiting(now, digest, &mut starts);
        }
        for (digest, threads) in self.threads.settle(now) {
            let life = self.models.get(&digest).and_then(|model| model.phase.life());
            if let Some(generation) = life.map(|life| life.generation) {
                actions.push(Action::SetThreads { digest, generation, threads });
            }
        }
        actions.append(&mut starts);
    }

    fn start_waiting(&mut self, now: Instant, digest: Digest, starts: &mut Vec<Action>) {
        if self.models.get(&digest).is_none_or(|model| model.waiting.is_empty()) {
            return;
        }
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        let model = &mut *model;
        let Phase::Ready(life) = &mut model.phase else { return };
        let generation = life.generation;
        while model.running.len() < life.parallel && !model.waiting.is_empty() {
            let waiter = model.waiting.remove(0);
            life.promised = life.promised.saturating_sub(u32::from(waiter.since <= life.since));
            if model.running.is_empty() {
                life.last_progress = now;
                self.threads.set_busy(digest, true, now);
            }
            let parks = self.parked.resumes(now, &waiter);
            if waiter.parked.is_some() {
                starts.push(Action::Tell(Fact::Resumed { digest, parked: now.since(waiter.since) }));
            }
            let running =
                Running { aborted: false, class: waiter.class, prompt_tokens: 0, parking: Parking::No, parks };
            model.running.insert(waiter.request, running);
            self.waiting_total -= 1;
            let start = if waiter.cold { StartKind::Cold } else { StartKind::Warm };
            starts.push(Action::Start { request: waiter.request, digest, generation, start });
        }
    }

    /// From now on it takes nothing new; it leaves when what runs has ended.
    pub(super) fn begin_drain(
        &mut self,
        now: Instant,
        digest: Digest,
        reason: EvictionReason,
        actions: &mut Vec<Action>,
    ) {
        let Some(model) = self.models.get(&digest) else { return };
        let Phase::Ready(life) = &model.phase else { return };
        if model.running.is_empty() {
            self.stop(now, digest, reason, actions);
            return;
        }
        let phase = Phase::Draining(life.clone(), reason);
        if let Some(mut model) = self.models.get_mut(&digest) {
            model.phase = phase;
        }
    }

    /// Asks an idle engine to end. Its bytes count until its process is gone.
    pub(super) fn stop(&mut self, now: Instant, digest: Digest, reason: EvictionReason, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get(&digest) else { return };
        let (Phase::Ready(life) | Phase::Draining(life, _)) = &model.phase else { return };
        let life = life.clone();
        actions.push(Action::Tell(Fact::EvictionStarted { digest, reason }));
        actions.push(Action::Stop { digest, generation: life.generation });
        self.begin_unload(now, digest, life, (reason, false), actions);
    }

    /// Ends an engine's process whatever it does. Who runs on it hears of it when the process is gone.
    pub(super) fn kill(&mut self, now: Instant, digest: Digest, reason: EvictionReason, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get(&digest) else { return };
        let Some(life) = model.phase.life().filter(|_| model.phase.has_process()) else { return };
        let life = life.clone();
        actions.push(Action::Tell(Fact::EvictionStarted { digest, reason }));
        actions.push(Action::Kill { digest, generation: life.generation });
        self.begin_unload(now, digest, life, (reason, true), actions);
    }

    fn begin_unload(
        &mut self,
        now: Instant,
        digest: Digest,
        life: Life,
        (reason, killed): (EvictionReason, bool),
        actions: &mut Vec<Action>,
    ) {
        if let Some(mut model) = self.models.get_mut(&digest) {
            model.phase = Phase::Unloading { life: Life { since: now, ..life }, reason, killed };
            model.judge_preload(PreloadOutcome::Wasted, actions);
            self.threads.leave(digest);
        }
    }

    /// Gives up a load that nobody wants.
    pub(super) fn abandon_load(
        &mut self,
        now: Instant,
        digest: Digest,
        reason: EvictionReason,
        actions: &mut Vec<Action>,
    ) {
        let Some(mut model) = self.models.get_mut(&digest) else { return };
        model.preload = false;
        if matches!(model.phase, Phase::Verifying(_)) {
            model.judge_preload(PreloadOutcome::Wasted, actions);
            model.phase = Phase::Absent;
        } else {
            drop(model);
            self.kill(now, digest, reason, actions);
        }
    }

    /// Drained models that have fallen idle leave; so does everything that is no longer configured or wanted.
    pub(super) fn unload_leaving(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let concerned = if self.draining { self.models.resident_digests() } else { self.models.busy_digests() };
        for digest in concerned {
            let Some(model) = self.models.get(&digest) else { continue };
            let reason = match &model.phase {
                Phase::Draining(_, reason) => Some(*reason),
                Phase::Ready(_) if self.draining => Some(EvictionReason::Drain),
                Phase::Ready(_) if model.forgotten => Some(EvictionReason::Forgotten),
                // Told to leave while callers waited for its load: they have been answered, nobody came since.
                Phase::Ready(_) if model.unwanted && model.is_idle() && model.waiting.is_empty() => {
                    Some(EvictionReason::Requested)
                }
                _ => None,
            };
            let loading_in_vain = model.phase.is_loading() && (model.forgotten || self.draining);
            let idle = model.is_idle();
            match reason {
                Some(reason) if idle => self.stop(now, digest, reason, actions),
                Some(reason) => self.begin_drain(now, digest, reason, actions),
                None if loading_in_vain => self.abandon_load(now, digest, EvictionReason::Abandoned, actions),
                None => {}
            }
        }
    }
}
