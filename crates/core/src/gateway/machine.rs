//! The machine itself: what it knows, and how each event changes that.

use super::{
    capacity::is_on_its_way,
    protocol::{Action, ColdPolicy, Event, Refusal, Route, Settings},
    queue::{Queue, Waiting, class_index},
};
use crate::{
    ids::{Digest, Priority, RequestId, TenantId, WorkerId},
    machine::Machine,
    time::Instant,
    worker::{CancelCause, ModelState, Rejection},
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// How often waiting callers are told their place.
const POSITION_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest retry hint given.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// Seconds a request is assumed to run before any was seen to end.
const SERVICE_SECONDS_ASSUMED: f64 = 1.0;
/// Weight of the newest request in the mean running time.
const SERVICE_WEIGHT: f64 = 0.2;

/// Where a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// In its model's queue.
    Queued,
    /// At a worker that has not begun it.
    Dispatched { worker: WorkerId },
    /// An engine works on it.
    Running { worker: WorkerId, since: Instant },
    /// Its caller has had the last word or is gone; the worker has not yet let go of it.
    Ending { worker: WorkerId },
}

impl Phase {
    pub(super) fn worker(self) -> Option<WorkerId> {
        match self {
            Self::Queued => None,
            Self::Dispatched { worker } | Self::Running { worker, .. } | Self::Ending { worker } => Some(worker),
        }
    }

    /// Whether the caller's patience still counts.
    pub(super) fn is_impatient(self) -> bool {
        matches!(self, Self::Queued | Self::Dispatched { .. })
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) tenant: TenantId,
    pub(super) digest: Digest,
    pub(super) class: Priority,
    pub(super) sequence: u64,
    arrived: Instant,
    pub(super) deadline: Instant,
    pub(super) attempts: u32,
    /// The worker that lost it.
    pub(super) avoid: Option<WorkerId>,
    position_told: Option<u32>,
    pub(super) phase: Phase,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Model {
    pub(super) route: Route,
    /// Kept only until its last request has ended.
    pub(super) forgotten: bool,
    pub(super) queue: Queue<RequestId>,
    /// Requests at workers.
    pub(super) in_flight: u32,
    /// The same by class.
    pub(super) in_flight_of: [u32; 3],
    /// Mean time a request runs.
    service_seconds: Option<f64>,
}

impl Model {
    pub(super) fn new(route: Route) -> Self {
        let queue = Queue::default();
        Self { route, forgotten: false, queue, in_flight: 0, in_flight_of: [0; 3], service_seconds: None }
    }

    /// Requests at once, at least one.
    pub(super) fn permits(&self) -> u32 {
        self.route.max_concurrency.max(1)
    }

    /// Permits that requests of every class may use: at least one, whatever the reserve, so that none waits for ever.
    pub(super) fn ordinary_permits(&self) -> u32 {
        self.permits().saturating_sub(self.route.critical_reserve).max(1)
    }

    /// How long the last in its queue is expected to wait for a permit.
    fn wait_seconds(&self) -> f64 {
        let service = self.service_seconds.unwrap_or(SERVICE_SECONDS_ASSUMED);
        service * (self.queue.len() as f64) / f64::from(self.permits())
    }

    /// Whom a free permit would go to.
    pub(super) fn next(&self, now: Instant, aging: Duration) -> Option<RequestId> {
        self.queue.next(now, aging, |class| self.has_permit_for(class))
    }

    /// Requests at workers that are not critical.
    pub(super) fn ordinary_in_flight(&self) -> u32 {
        self.in_flight - self.in_flight_of[class_index(Priority::Critical)]
    }

    /// Whether a request of this class may go to a worker now.
    pub(super) fn has_permit_for(&self, class: Priority) -> bool {
        let all = class_index(class) + 1;
        // Those of a lower class give way at the worker.
        let before = if self.route.parks { self.in_flight_of[..all].iter().sum() } else { self.in_flight };
        let reserved = class != Priority::Critical && self.ordinary_before(class) >= self.ordinary_permits();
        before < self.permits() && !reserved
    }

    /// Ordinary requests at workers that hold up one of this class.
    fn ordinary_before(&self, class: Priority) -> u32 {
        let ordinary = class_index(Priority::Standard)..=class_index(class);
        if self.route.parks { self.in_flight_of[ordinary].iter().sum() } else { self.ordinary_in_flight() }
    }
}

#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Worker {
    pub(super) in_flight: u32,
    pub(super) models: BTreeMap<Digest, (ModelState, Instant)>,
}

impl Worker {
    pub(super) fn is_ready(&self, digest: Digest) -> bool {
        self.models.get(&digest).is_some_and(|(state, _)| *state == ModelState::Ready)
    }
}

/// Admits, queues, routes, retries and refuses. See the module's description.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Gateway {
    pub(super) settings: Settings,
    pub(super) models: BTreeMap<Digest, Model>,
    pub(super) requests: BTreeMap<RequestId, Request>,
    /// Workers that can be used.
    pub(super) workers: BTreeMap<WorkerId, Worker>,
    pub(super) deadlines: BTreeSet<(Instant, RequestId)>,
    /// Waiting requests per class, over all models.
    pub(super) waiting: [u32; 3],
    next_sequence: u64,
    next_positions: Option<Instant>,
    pub(super) draining: bool,
}

impl Gateway {
    /// A gateway that knows no model and no worker.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            models: BTreeMap::new(),
            requests: BTreeMap::new(),
            workers: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            waiting: [0; 3],
            next_sequence: 0,
            next_positions: None,
            draining: false,
        }
    }

    /// The limits it lives within.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Waiting requests per class, in the order of [`Priority::ALL`].
    pub fn queue_depth(&self) -> [u32; 3] {
        self.waiting
    }

    /// Every known digest and its requests at workers.
    pub fn running(&self) -> impl Iterator<Item = (Digest, u32)> {
        self.models.iter().map(|(digest, model)| (*digest, model.in_flight))
    }

    /// Requests that wait for one digest.
    pub fn waiting_for(&self, digest: Digest) -> usize {
        self.models.get(&digest).map_or(0, |model| model.queue.len())
    }

    /// Whether some usable worker holds a digest ready to answer.
    pub fn is_ready(&self, digest: Digest) -> bool {
        self.workers.values().any(|worker| worker.is_ready(digest))
    }

    /// Requests it still keeps for one digest, waiting or at workers.
    pub fn requests_of(&self, digest: Digest) -> usize {
        self.requests.values().filter(|request| request.digest == digest).count()
    }

    /// Requests it still keeps, waiting or at workers.
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Whether it still keeps this request, waiting or at a worker.
    pub fn keeps(&self, request: RequestId) -> bool {
        self.requests.contains_key(&request)
    }

    /// Workers that can be used.
    pub fn workers_up(&self) -> usize {
        self.workers.len()
    }

    /// Whether it accepts nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining
    }
}

impl Machine for Gateway {
    type Event = Event;
    type Action = Action;

    fn handle(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        self.expire(now, subject(&event), actions);
        match event {
            Event::Configure(route) => self.configure(now, route, actions),
            Event::Forget { digest } => self.forget(digest, actions),
            Event::Arrived { request, tenant, digest, class, patience } => {
                self.arrived(now, request, (tenant, digest, class, patience), actions);
            }
            Event::Cancelled { request } => self.cancelled(now, request, actions),
            Event::Started { request, .. } => self.started(now, request),
            Event::Finished { request, .. } => self.finished(now, request, actions),
            Event::Failed { request } => self.released(now, request, actions),
            Event::Rejected { request, rejection } => self.rejected(now, request, rejection, actions),
            Event::WorkerUp { worker } => {
                self.workers.entry(worker).or_default();
                self.dispatch_all(now, actions);
            }
            Event::WorkerDown { worker } => self.worker_down(now, worker, actions),
            Event::WorkerState { worker, digest, state } => self.worker_state(now, worker, digest, state),
            Event::Timer => self.tell_positions(now, actions),
            Event::Drain => self.draining = true,
        }
        if self.waiting == [0; 3] {
            self.next_positions = None;
        } else {
            self.next_positions.get_or_insert(now + POSITION_INTERVAL);
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        deadline.into_iter().chain(self.next_positions).min()
    }
}

/// Requests.
impl Gateway {
    fn arrived(
        &mut self,
        now: Instant,
        id: RequestId,
        (tenant, digest, class, patience): (TenantId, Digest, Priority, Duration),
        actions: &mut Vec<Action>,
    ) {
        if self.requests.contains_key(&id) {
            return;
        }
        if let Err(refusal) = self.admit(now, digest, actions) {
            actions.push(Action::Refuse { request: id, refusal });
            return;
        }
        let (sequence, deadline) = (self.next_sequence, now + patience);
        self.next_sequence = self.next_sequence.saturating_add(1);
        let request = Request {
            tenant,
            digest,
            class,
            sequence,
            arrived: now,
            deadline,
            attempts: 0,
            avoid: None,
            position_told: None,
            phase: Phase::Queued,
        };
        self.requests.insert(id, request);
        self.deadlines.insert((deadline, id));
        self.enter_queue(id);
        self.dispatch(now, digest, actions);
        if self.requests.get(&id).is_some_and(|request| request.phase == Phase::Queued) {
            self.keep_waiting(now, id, digest, actions);
        }
    }

    /// Whether a request may come in at all.
    fn admit(&self, now: Instant, digest: Digest, actions: &mut Vec<Action>) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        let model = self.models.get(&digest).filter(|model| !model.forgotten).ok_or(Refusal::UnknownModel)?;
        let Some(worker) = self.route(digest, None) else {
            return Err(Refusal::NoWorker { retry_after: self.hint(0.0) });
        };
        if model.route.cold == ColdPolicy::Reject && !self.is_ready(digest) {
            let state =
                self.workers.get(&worker).and_then(|worker| worker.models.get(&digest)).map(|(state, _)| *state);
            match state {
                // A load that failed is not tried again before its pause is over: the worker knows the reason.
                Some(ModelState::Failed) => return Ok(()),
                Some(state) if is_on_its_way(state) => {}
                _ => actions.push(Action::Prewarm { worker, digest }),
            }
            return Err(Refusal::ModelLoading { retry_after: self.hint(self.cold_seconds(now, model)) });
        }
        Ok(())
    }

    /// A request that could not run at once stays, if there is room, and hears its place.
    fn keep_waiting(&mut self, now: Instant, id: RequestId, digest: Digest, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get(&digest) else { return };
        let total: u32 = self.waiting.iter().sum();
        let cold_seconds = self.cold_seconds(now, model);
        let wait_seconds = model.wait_seconds() + cold_seconds;
        if total > self.settings.queue_limit || model.queue.len() > self.settings.queue_limit_per_model as usize {
            let refusal = Refusal::QueueFull { retry_after: self.hint(wait_seconds) };
            self.refuse(id, refusal, actions);
            return;
        }
        if let Some(late_seconds) = self.late_seconds(id, total, model, cold_seconds) {
            // Asked again when it would be in time.
            let refusal = Refusal::QueueFull { retry_after: self.hint(late_seconds) };
            self.refuse(id, refusal, actions);
            return;
        }
        let place = model.queue.in_order(now, self.settings.aging).position(|waiting| waiting == id);
        let position = place.and_then(|place| u32::try_from(place + 1).ok());
        if let (Some(request), Some(position)) = (self.requests.get_mut(&id), position) {
            request.position_told = Some(position);
            actions.push(Action::Position { request: id, position });
        }
    }

    /// By how much a request would miss its model's target, if that is a reason not to keep it: places become scarce, and
    /// one that is answered too late takes the place of one that would be in time. Estimates are of what was measured;
    /// critical requests wait as long as there is room.
    fn late_seconds(&self, id: RequestId, total: u32, model: &Model, cold_seconds: f64) -> Option<f64> {
        let scarce = total > self.settings.queue_limit / 2;
        let critical = self.requests.get(&id).is_none_or(|request| request.class == Priority::Critical);
        if !scarce || critical || model.service_seconds.is_none() {
            return None;
        }
        let target = model.route.targets.first_token_seconds(cold_seconds > 0.0)?;
        let late_seconds = model.wait_seconds() + cold_seconds - target;
        (late_seconds > 0.0).then_some(late_seconds)
    }

    fn started(&mut self, now: Instant, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if let Phase::Dispatched { worker } = request.phase {
            request.phase = Phase::Running { worker, since: now };
            self.deadlines.remove(&(request.deadline, id));
        }
    }

    fn finished(&mut self, now: Instant, id: RequestId, actions: &mut Vec<Action>) {
        if let Some(Request { digest, phase: Phase::Running { since, .. }, .. }) = self.requests.get(&id)
            && let Some(model) = self.models.get_mut(digest)
        {
            let seconds = now.since(*since).as_secs_f64();
            let mean = model.service_seconds.unwrap_or(seconds);
            model.service_seconds = Some(mean + SERVICE_WEIGHT * (seconds - mean));
        }
        self.released(now, id, actions);
    }

    /// A worker has let go of a request that needs no further word.
    fn released(&mut self, now: Instant, id: RequestId, actions: &mut Vec<Action>) {
        if self.requests.get(&id).is_none_or(|request| request.phase == Phase::Queued) {
            return;
        }
        let Some(digest) = self.give_back_permit(id) else { return };
        self.remove(id);
        self.drop_if_forgotten(digest);
        self.dispatch(now, digest, actions);
    }

    pub(super) fn rejected(&mut self, now: Instant, id: RequestId, rejection: Rejection, actions: &mut Vec<Action>) {
        let Some(request) = self.requests.get(&id) else { return };
        match request.phase {
            Phase::Queued => return,
            Phase::Ending { .. } => return self.released(now, id, actions),
            Phase::Dispatched { .. } | Phase::Running { .. } => {}
        }
        let unsaid = matches!(rejection, Rejection::EngineLost { output_started: false, .. });
        let tries_left = request.attempts < self.settings.attempts_max && request.deadline > now;
        let served = self.models.get(&request.digest).is_some_and(|model| !model.forgotten);
        let lost_by = request.phase.worker();
        let Some(digest) = self.give_back_permit(id) else { return };
        if unsaid && tries_left && served {
            if let Some(request) = self.requests.get_mut(&id) {
                request.phase = Phase::Queued;
                request.avoid = lost_by;
                self.deadlines.insert((request.deadline, id));
                self.enter_queue(id);
            }
        } else {
            let refusal = Refusal::Worker(self.cap_hints(rejection));
            self.refuse(id, refusal, actions);
        }
        self.drop_if_forgotten(digest);
        self.dispatch(now, digest, actions);
    }

    fn cancelled(&mut self, now: Instant, id: RequestId, actions: &mut Vec<Action>) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        match request.phase {
            Phase::Queued => {
                let digest = request.digest;
                self.leave_queue(id);
                self.remove(id);
                self.dispatch(now, digest, actions);
            }
            Phase::Dispatched { worker } | Phase::Running { worker, .. } => {
                request.phase = Phase::Ending { worker };
                self.deadlines.remove(&(request.deadline, id));
                actions.push(Action::Cancel { request: id, worker, cause: CancelCause::Disconnected });
            }
            Phase::Ending { .. } => {}
        }
    }

    /// Refuses those whose first byte did not come in time. What is just being heard of one request goes before its
    /// deadline: an answer or a farewell that crosses it is not followed by a refusal.
    fn expire(&mut self, now: Instant, heard_of: Option<RequestId>, actions: &mut Vec<Action>) {
        let due: Vec<(Instant, RequestId)> =
            self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now).copied().collect();
        for (deadline, id) in due.into_iter().filter(|(_, id)| Some(*id) != heard_of) {
            self.deadlines.remove(&(deadline, id));
            let Some(request) = self.requests.get_mut(&id) else { continue };
            match request.phase {
                Phase::Queued => self.refuse(id, Refusal::DeadlinePassed, actions),
                Phase::Dispatched { worker } => {
                    request.phase = Phase::Ending { worker };
                    actions.push(Action::Refuse { request: id, refusal: Refusal::DeadlinePassed });
                    actions.push(Action::Cancel { request: id, worker, cause: CancelCause::DeadlinePassed });
                }
                Phase::Running { .. } | Phase::Ending { .. } => {}
            }
        }
    }

    /// The last word to a caller whose request holds no permit.
    pub(super) fn refuse(&mut self, id: RequestId, refusal: Refusal, actions: &mut Vec<Action>) {
        self.leave_queue(id);
        self.remove(id);
        actions.push(Action::Refuse { request: id, refusal });
    }

    fn remove(&mut self, id: RequestId) {
        if let Some(request) = self.requests.remove(&id) {
            self.deadlines.remove(&(request.deadline, id));
        }
    }

    fn enter_queue(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let Some(model) = self.models.get_mut(&request.digest) else { return };
        let waiting = Waiting { id, arrived: request.arrived };
        model.queue.insert(request.class, request.sequence, waiting);
        self.waiting[class_index(request.class)] += 1;
    }

    pub(super) fn leave_queue(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let Some(model) = self.models.get_mut(&request.digest) else { return };
        if model.queue.remove(request.class, request.sequence).is_some() {
            self.waiting[class_index(request.class)] -= 1;
        }
    }

    /// Counts a request as no longer at a worker.
    fn give_back_permit(&mut self, id: RequestId) -> Option<Digest> {
        let request = self.requests.get(&id)?;
        let worker = request.phase.worker()?;
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.in_flight -= 1;
        }
        let model = self.models.get_mut(&request.digest)?;
        model.in_flight -= 1;
        model.in_flight_of[class_index(request.class)] -= 1;
        Some(request.digest)
    }

    fn tell_positions(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.next_positions.is_none_or(|due| due > now) {
            return;
        }
        self.next_positions = None;
        for model in self.models.values() {
            for (position, id) in (1..).zip(model.queue.in_order(now, self.settings.aging)) {
                let Some(request) = self.requests.get_mut(&id) else { continue };
                if request.position_told != Some(position) {
                    request.position_told = Some(position);
                    actions.push(Action::Position { request: id, position });
                }
            }
        }
    }

    /// A retry hint from an estimate that may be anything.
    fn hint(&self, seconds: f64) -> Duration {
        let estimate = if seconds.is_nan() { Duration::ZERO } else { seconds_to_duration(seconds) };
        estimate.max(RETRY_AFTER_MIN).min(self.settings.retry_after_max)
    }

    fn cap_hints(&self, mut rejection: Rejection) -> Rejection {
        if let Rejection::LoadFailed { retry_after, .. }
        | Rejection::QueueFull { retry_after }
        | Rejection::NoMemory { retry_after } = &mut rejection
        {
            *retry_after = (*retry_after).min(self.settings.retry_after_max);
        }
        rejection
    }
}

/// The request that an event brings news of.
fn subject(event: &Event) -> Option<RequestId> {
    match event {
        Event::Cancelled { request }
        | Event::Started { request, .. }
        | Event::Finished { request, .. }
        | Event::Failed { request }
        | Event::Rejected { request, .. } => Some(*request),
        _ => None,
    }
}

fn seconds_to_duration(seconds: f64) -> Duration {
    if seconds <= 0.0 { Duration::ZERO } else { Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX) }
}
