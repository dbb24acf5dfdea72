//! The one task that owns the gateway machine: messages become events, actions become calls and messages.

use crate::{
    frontend::{FrontendConfig, Shared, Submission, Update},
    link::{Assignment, WorkerLink},
    metrics::{GatewayFigures, Metrics},
    pump::{Pump, Tally},
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, PoisonError, atomic::Ordering},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::AbortHandle,
};
use warmset_core::{
    Digest, Machine, Priority, RequestId, TenantId, WorkerId,
    gateway::{Action, Event, Gateway, Refusal, Violation},
    inference::Work,
    recording::{Recorded, Tape},
};

/// What reaches the run loop.
pub(crate) enum Message {
    Submit {
        request: RequestId,
        submission: Box<Submission>,
        updates: mpsc::Sender<Update>,
        verdict: oneshot::Sender<Refusal>,
    },
    Dropped {
        request: RequestId,
    },
    Report {
        request: RequestId,
        attempt: u32,
        event: Event,
    },
    Tell(Event),
    WorkerUp {
        worker: WorkerId,
        link: Arc<dyn WorkerLink>,
    },
    WorkerDown {
        worker: WorkerId,
    },
    Record(Box<dyn Tape<Gateway>>),
    Figures {
        answer: oneshot::Sender<GatewayFigures>,
    },
    Check {
        answer: oneshot::Sender<Result<(), Violation>>,
    },
    RequestsOf {
        digest: Digest,
        answer: oneshot::Sender<usize>,
    },
    Requests {
        answer: oneshot::Sender<usize>,
    },
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submit { request, .. } => write!(f, "Submit({request:?})"),
            Self::Dropped { request } => write!(f, "Dropped({request:?})"),
            Self::Report { request, attempt, event } => write!(f, "Report({request:?}, {attempt}, {event:?})"),
            Self::Tell(event) => write!(f, "Tell({event:?})"),
            Self::WorkerUp { worker, .. } => write!(f, "WorkerUp({worker:?})"),
            Self::WorkerDown { worker } => write!(f, "WorkerDown({worker:?})"),
            Self::Record(_) => f.write_str("Record"),
            Self::Figures { .. } | Self::Check { .. } | Self::Requests { .. } | Self::RequestsOf { .. } => {
                f.write_str("a question")
            }
        }
    }
}

/// What the loop keeps of a request as long as the machine keeps it.
struct Job {
    /// Until the last try has taken it.
    work: Option<Work>,
    tally: Tally,
    updates: mpsc::Sender<Update>,
    verdict: Option<oneshot::Sender<Refusal>>,
    /// Grows with every try, so that late news of an earlier one is ignored.
    attempt: u32,
    at: Option<(WorkerId, AbortHandle)>,
}

pub(crate) struct RunLoop {
    gateway: Recorded<Gateway>,
    config: FrontendConfig,
    jobs: BTreeMap<RequestId, Job>,
    links: BTreeMap<WorkerId, Arc<dyn WorkerLink>>,
    /// Weak, so that the loop ends with the last handle.
    messages: mpsc::WeakUnboundedSender<Message>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    actions: Vec<Action>,
}

impl RunLoop {
    pub(crate) fn new(
        config: FrontendConfig,
        messages: mpsc::WeakUnboundedSender<Message>,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let gateway = Recorded::new(Gateway::new(config.settings.clone()));
        let (jobs, links, actions) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { gateway, config, jobs, links, messages, shared, metrics, actions }
    }

    pub(crate) async fn run(mut self, mut received: mpsc::UnboundedReceiver<Message>) {
        loop {
            let wait = self.config.clock.reach(self.gateway.machine().next_timer());
            tokio::select! {
                biased;
                message = received.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                () = wait => self.step(Event::Timer),
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Submit { request, submission, updates, verdict } => {
                let Submission { tenant, digest, class, patience, counted_as, work } = *submission;
                let tally = Tally::new(self.metrics.clone(), counted_as, &tenant);
                let job = Job { work: Some(work), tally, updates, verdict: Some(verdict), attempt: 0, at: None };
                self.jobs.insert(request, job);
                // Callers wait outside, whatever the clock's speed.
                let patience = self.config.clock.speed().inside(patience);
                self.step(Event::Arrived { request, tenant, digest, class, patience });
                self.settle(request);
            }
            Message::Dropped { request } => {
                self.step(Event::Cancelled { request });
                self.settle(request);
            }
            Message::Report { request, attempt, event } => {
                if self.jobs.get(&request).is_some_and(|job| job.attempt == attempt) {
                    self.step(event);
                    self.settle(request);
                }
            }
            Message::Tell(event) => self.tell(event),
            Message::WorkerUp { worker, link } => {
                self.links.insert(worker, link);
                self.step(Event::WorkerUp { worker });
                self.share_workers();
            }
            Message::WorkerDown { worker } => self.worker_down(worker),
            Message::Record(tape) => self.gateway.record(self.config.clock.now(), tape),
            Message::Figures { answer } => {
                let running: Vec<(Digest, u32)> = self.gateway.machine().running().collect();
                let waiting = running.iter().map(|(digest, _)| (*digest, self.gateway.machine().waiting_for(*digest)));
                let waiting = waiting.filter(|(_, count)| *count > 0);
                let waiting =
                    waiting.map(|(digest, count)| (digest, u32::try_from(count).unwrap_or(u32::MAX))).collect();
                // Whoever asked may have gone, here and below.
                let _ =
                    answer.send(GatewayFigures { queue_depth: self.gateway.machine().queue_depth(), running, waiting });
            }
            Message::Check { answer } => {
                let _ = answer.send(self.check());
            }
            Message::RequestsOf { digest, answer } => {
                let _ = answer.send(self.gateway.machine().requests_of(digest));
            }
            Message::Requests { answer } => {
                let _ = answer.send(self.gateway.machine().requests());
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let state_of = if let Event::WorkerState { digest, .. } = event { Some(digest) } else { None };
        let forgets = matches!(event, Event::Forget { .. });
        self.step(event);
        if let Some(digest) = state_of {
            let mut ready = self.shared.ready.write().unwrap_or_else(PoisonError::into_inner);
            if self.gateway.machine().is_ready(digest) {
                ready.insert(digest);
            } else {
                ready.remove(&digest);
            }
        }
        if forgets {
            self.settle_all();
        }
    }

    fn worker_down(&mut self, worker: WorkerId) {
        for job in self.jobs.values_mut() {
            if let Some((_, pump)) = job.at.take_if(|(at, _)| *at == worker) {
                pump.abort();
                job.attempt += 1;
            }
        }
        self.step(Event::WorkerDown { worker });
        self.links.remove(&worker);
        self.share_workers();
        let mut ready = self.shared.ready.write().unwrap_or_else(PoisonError::into_inner);
        ready.retain(|digest| self.gateway.machine().is_ready(*digest));
        drop(ready);
        self.settle_all();
    }

    fn share_workers(&self) {
        self.shared.workers_up.store(self.gateway.machine().workers_up(), Ordering::Release);
    }

    /// One event through the machine, and everything that follows from it.
    fn step(&mut self, event: Event) {
        let now = self.config.clock.now();
        let mut actions = std::mem::take(&mut self.actions);
        self.gateway.handle(now, event, &mut actions);
        for action in actions.drain(..) {
            self.act(action);
        }
        self.actions = actions;
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Dispatch { request, worker, digest, tenant, class } => {
                self.dispatch(request, worker, digest, tenant, class);
            }
            Action::Cancel { request, worker, cause } => {
                if let Some(link) = self.links.get(&worker) {
                    link.cancel(request, cause);
                }
            }
            Action::Refuse { request, refusal } => {
                if let Some(verdict) = self.jobs.get_mut(&request).and_then(|job| job.verdict.take()) {
                    // The caller may have gone at the same moment.
                    let _ = verdict.send(refusal);
                }
                self.settle(request);
            }
            Action::Prewarm { worker, digest } => {
                if let Some(link) = self.links.get(&worker) {
                    link.prewarm(digest);
                }
            }
            Action::Position { request, position } => {
                if let Some(job) = self.jobs.get(&request) {
                    // A full buffer only means that the caller has not read older places yet.
                    let _ = job.updates.try_send(Update::Position(position));
                }
            }
        }
    }

    fn dispatch(&mut self, request: RequestId, worker: WorkerId, digest: Digest, tenant: TenantId, class: Priority) {
        let last_try = |job: &Job| job.attempt >= self.config.settings.attempts_max;
        let (Some(job), Some(link), Some(messages)) =
            (self.jobs.get_mut(&request), self.links.get(&worker), self.messages.upgrade())
        else {
            return;
        };
        job.attempt += 1;
        let work = if last_try(job) { job.work.take() } else { job.work.clone() };
        let Some(work) = work else { return };
        let (replies_in, replies) = mpsc::unbounded_channel();
        let (updates, attempt, stall_timeout) = (job.updates.clone(), job.attempt, self.config.stall_timeout);
        let tally = job.tally.clone();
        let pump = Pump { request, attempt, replies, updates, messages, tally, stall_timeout };
        job.at = Some((worker, tokio::spawn(pump.run()).abort_handle()));
        self.metrics.record_routed(if self.links.len() == 1 { "only" } else { "least_cost" });
        link.dispatch(Assignment { request, digest, tenant, class, work, replies: replies_in });
    }

    /// Lets go of what the machine no longer keeps.
    fn settle(&mut self, request: RequestId) {
        if !self.gateway.machine().keeps(request) {
            self.jobs.remove(&request);
        }
    }

    fn settle_all(&mut self) {
        self.jobs.retain(|request, _| self.gateway.machine().keeps(*request));
    }

    fn check(&self) -> Result<(), Violation> {
        self.gateway.machine().check()?;
        let (jobs, requests) = (self.jobs.len(), self.gateway.machine().requests());
        if jobs == requests && self.jobs.keys().all(|request| self.gateway.machine().keeps(*request)) {
            return Ok(());
        }
        let detail = format!("{jobs} jobs for {requests} requests");
        Err(Violation { invariant: "jobs_match_requests", detail })
    }
}
