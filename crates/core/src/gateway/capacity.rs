//! Models, workers, and which request goes to which of them.

use super::{
    machine::{Gateway, Model, Phase, Worker},
    protocol::{Action, Refusal, Route},
    queue::class_index,
};
use crate::{
    ids::{Digest, RequestId, WorkerId},
    time::Instant,
    worker::{ModelState, Rejection},
};
use alloc::vec::Vec;

impl Gateway {
    pub(super) fn configure(&mut self, now: Instant, mut route: Route, actions: &mut Vec<Action>) {
        let digest = route.digest;
        route.parks &= self.settings.parks;
        match self.models.get_mut(&digest) {
            Some(model) => {
                model.route = route;
                model.forgotten = false;
            }
            None => {
                self.models.insert(digest, Model::new(route));
            }
        }
        self.dispatch(now, digest, actions);
    }

    pub(super) fn forget(&mut self, digest: Digest, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get_mut(&digest) else { return };
        model.forgotten = true;
        let waiting: Vec<RequestId> = model.queue.in_order(Instant::ZERO, self.settings.aging).collect();
        for request in waiting {
            self.refuse(request, Refusal::UnknownModel, actions);
        }
        self.drop_if_forgotten(digest);
    }

    pub(super) fn drop_if_forgotten(&mut self, digest: Digest) {
        if self.models.get(&digest).is_some_and(|model| model.forgotten && model.in_flight == 0) {
            self.models.remove(&digest);
        }
    }

    pub(super) fn worker_state(&mut self, now: Instant, worker: WorkerId, digest: Digest, state: ModelState) {
        let Some(worker) = self.workers.get_mut(&worker) else { return };
        match (state, worker.models.get(&digest)) {
            (ModelState::Absent, _) => {
                worker.models.remove(&digest);
            }
            // The hint counts from the beginning of the load, through all its steps.
            (state, Some((before, since))) if is_on_its_way(*before) && is_on_its_way(state) => {
                worker.models.insert(digest, (state, *since));
            }
            (state, _) => {
                worker.models.insert(digest, (state, now));
            }
        }
    }

    pub(super) fn worker_down(&mut self, now: Instant, worker: WorkerId, actions: &mut Vec<Action>) {
        if self.workers.remove(&worker).is_none() {
            return;
        }
        let lost: Vec<(RequestId, Phase)> = self
            .requests
            .iter()
            .filter(|(_, request)| request.phase.worker() == Some(worker))
            .map(|(id, request)| (*id, request.phase))
            .collect();
        for (request, phase) in lost {
            // Whether a running request has said anything is not known here; said twice is worse than lost.
            let output_started = matches!(phase, Phase::Running { .. });
            let rejection = Rejection::EngineLost { message: "the worker is gone".into(), output_started };
            self.rejected(now, request, rejection, actions);
        }
    }

    /// The usable worker for one more request: one that did not lose it before, that is warm, that has the least to do.
    pub(super) fn route(&self, digest: Digest, avoid: Option<WorkerId>) -> Option<WorkerId> {
        let cost = |(id, worker): &(&WorkerId, &Worker)| {
            (Some(**id) == avoid, !worker.is_ready(digest), worker.in_flight, **id)
        };
        self.workers.iter().min_by_key(cost).map(|(id, _)| *id)
    }

    pub(super) fn dispatch_all(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let digests: Vec<Digest> = self.models.keys().copied().collect();
        for digest in digests {
            self.dispatch(now, digest, actions);
        }
    }

    /// Sends waiting requests of one model to workers while permits are free.
    pub(super) fn dispatch(&mut self, now: Instant, digest: Digest, actions: &mut Vec<Action>) {
        while let Some(model) = self.models.get_mut(&digest)
            && let Some(id) = model.next(now, self.settings.aging)
            && let Some(request) = self.requests.get(&id)
            && let Some(worker) = self.route(digest, request.avoid)
        {
            self.leave_queue(id);
            let (Some(request), Some(model)) = (self.requests.get_mut(&id), self.models.get_mut(&digest)) else {
                return;
            };
            model.in_flight += 1;
            model.in_flight_of[class_index(request.class)] += 1;
            request.attempts += 1;
            request.phase = Phase::Dispatched { worker };
            if let Some(worker) = self.workers.get_mut(&worker) {
                worker.in_flight += 1;
            }
            let (tenant, class) = (request.tenant.clone(), request.class);
            actions.push(Action::Dispatch { request: id, worker, digest, tenant, class });
        }
    }

    /// Seconds until the model can answer: what is left of a load that runs, or a whole one.
    pub(super) fn cold_seconds(&self, now: Instant, model: &Model) -> f64 {
        let whole = model.route.rewarm_seconds;
        let left = self.workers.values().map(|worker| match worker.models.get(&model.route.digest) {
            Some((ModelState::Ready, _)) => 0.0,
            Some((state, since)) if is_on_its_way(*state) => whole - now.since(*since).as_secs_f64(),
            _ => whole,
        });
        left.fold(whole, f64::min)
    }
}

/// Whether a load is under way.
pub(super) fn is_on_its_way(state: ModelState) -> bool {
    matches!(state, ModelState::Waiting | ModelState::Verifying | ModelState::Loading)
}
