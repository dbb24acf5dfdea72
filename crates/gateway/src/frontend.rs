//! The handle on the gateway's run loop: handlers submit requests and hold a ticket for each, the rest of the program
//! tells it what models and workers there are.

use crate::{
    clock::{Clock, unix_seconds},
    directory::{Directory, Entry},
    link::WorkerLink,
    metrics::{GatewayFigures, Metrics},
    run_loop::{Message, RunLoop},
};
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::sync::{mpsc, oneshot};
use warmset_core::{
    Digest, ModelName, Priority, RequestId, TenantId, WorkerId,
    gateway::{Event, Gateway, Refusal, Route, Settings, Violation},
    inference::{Reply, Work},
    recording::Tape,
    worker::ModelState,
};

/// Replies buffered for one caller before its pump waits for it.
pub const REPLIES_BUFFERED_MAX: usize = 256;
/// Replies that may pile up behind a caller that does not read; with more its stream is cut.
pub const REPLIES_BEHIND_MAX: usize = 65_536;

/// How the run loop behaves.
#[derive(Debug, Clone)]
pub struct FrontendConfig {
    /// The machine's limits.
    pub settings: Settings,
    /// The clock, shared with whoever compares instants.
    pub clock: Clock,
    /// A caller that reads nothing for this long is cut.
    pub stall_timeout: Duration,
}

impl Default for FrontendConfig {
    fn default() -> Self {
        Self { settings: Settings::default(), clock: Clock::start(), stall_timeout: Duration::from_secs(60) }
    }
}

/// One request as a handler hands it in.
#[derive(Debug, Clone)]
pub struct Submission {
    /// Who asks.
    pub tenant: TenantId,
    /// The model, resolved from its name.
    pub digest: Digest,
    /// Its class.
    pub class: Priority,
    /// Time until its first byte.
    pub patience: Duration,
    /// The name under which its tokens are counted; none if they are not.
    pub counted_as: Option<ModelName>,
    /// What to do.
    pub work: Work,
}

/// News of one request, in order. The last one is a `Reply` that ends it, `Refused` or `Lost`.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    /// Its place in the gateway's queue; 1 is next.
    Position(u32),
    /// What the worker says.
    Reply(Reply),
    /// It will not be answered.
    Refused(Refusal),
    /// The gateway let go of it: the caller read too slowly, or the gateway itself is gone.
    Lost,
}

impl Update {
    /// Whether nothing follows.
    pub fn is_last(&self) -> bool {
        match self {
            Self::Reply(reply) => {
                matches!(reply, Reply::Done { .. } | Reply::Embedded { .. } | Reply::Failed { .. })
            }
            Self::Refused(_) | Self::Lost => true,
            Self::Position(_) => false,
        }
    }
}

/// One submitted request. Dropping it before its last update cancels the request, in whatever state it is.
#[derive(Debug)]
pub struct Ticket {
    request: RequestId,
    updates: mpsc::Receiver<Update>,
    verdict: Option<oneshot::Receiver<Refusal>>,
    messages: mpsc::UnboundedSender<Message>,
    ended: bool,
}

impl Ticket {
    /// Its identity.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// Waits for the next news. Safe to drop and call again; after the last update it is `Lost` for ever.
    pub async fn next(&mut self) -> Update {
        std::future::poll_fn(|context| self.poll_update(context)).await
    }

    /// What has already come, without waiting.
    pub fn try_next(&mut self) -> Option<Update> {
        let update = self.updates.try_recv().ok()?;
        self.ended |= update.is_last();
        Some(update)
    }

    pub(crate) fn poll_update(&mut self, context: &mut Context<'_>) -> Poll<Update> {
        // What the worker said before a refusal comes before it.
        let closed = match self.updates.poll_recv(context) {
            Poll::Ready(Some(update)) => {
                self.ended |= update.is_last();
                return Poll::Ready(update);
            }
            Poll::Ready(None) => true,
            Poll::Pending => false,
        };
        if let Some(verdict) = &mut self.verdict {
            match std::pin::Pin::new(verdict).poll(context) {
                Poll::Ready(Ok(refusal)) => {
                    (self.ended, self.verdict) = (true, None);
                    return Poll::Ready(Update::Refused(refusal));
                }
                Poll::Ready(Err(_)) => self.verdict = None,
                Poll::Pending => {}
            }
        }
        if closed && self.verdict.is_none() { Poll::Ready(Update::Lost) } else { Poll::Pending }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ended {
            // Without a run loop there is nothing left to cancel.
            let _ = self.messages.send(Message::Dropped { request: self.request });
        }
    }
}

/// What handlers may look at without asking the run loop.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) ready: RwLock<BTreeSet<Digest>>,
    pub(crate) workers_up: AtomicUsize,
    pub(crate) draining: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    messages: mpsc::UnboundedSender<Message>,
    shared: Arc<Shared>,
    directory: Arc<Directory>,
    metrics: Arc<Metrics>,
    clock: Clock,
    next_request: AtomicU64,
    /// Makes names of calls differ from those of earlier runs.
    run: u64,
    publishing: Mutex<()>,
}

/// The handle. Cheap to clone; the run loop ends when the last one is gone.
#[derive(Debug, Clone)]
pub struct Frontend {
    inner: Arc<Inner>,
}

impl Frontend {
    /// Starts the run loop on the current tokio runtime.
    pub fn start(config: FrontendConfig, metrics: Arc<Metrics>) -> Self {
        let (messages, received) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::default());
        let run = unix_seconds();
        let clock = config.clock;
        let run_loop = RunLoop::new(config, messages.downgrade(), shared.clone(), metrics.clone());
        tokio::spawn(run_loop.run(received));
        let directory = Arc::new(Directory::default());
        let next_request = AtomicU64::new(1);
        let publishing = Mutex::default();
        let inner = Inner { messages, shared, directory, metrics, clock, next_request, run, publishing };
        Self { inner: Arc::new(inner) }
    }

    /// Resolves once the run loop has ended. While there is a front end it does not, unless it broke.
    pub async fn ended(&self) {
        self.inner.messages.closed().await;
    }

    /// What names mean.
    pub fn directory(&self) -> &Directory {
        &self.inner.directory
    }

    /// Every metric.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// The clock of this run.
    pub fn clock(&self) -> Clock {
        self.inner.clock
    }

    /// A name for one HTTP call that no other call has, in this run or another, for headers and logs.
    pub(crate) fn next_call_name(&self) -> String {
        let call = self.inner.next_request.fetch_add(1, Ordering::Relaxed);
        format!("{:08x}{call:08x}", self.inner.run & 0xffff_ffff)
    }

    /// Hands a request in.
    pub fn submit(&self, submission: Submission) -> Ticket {
        let request = RequestId(self.inner.next_request.fetch_add(1, Ordering::Relaxed));
        let (updates_in, updates) = mpsc::channel(REPLIES_BUFFERED_MAX);
        let (verdict_in, verdict) = oneshot::channel();
        let messages = self.inner.messages.clone();
        let submission = Box::new(submission);
        // Without a run loop both ends close and the ticket says `Lost`.
        let _ = messages.send(Message::Submit { request, submission, updates: updates_in, verdict: verdict_in });
        Ticket { request, updates, verdict: Some(verdict), messages, ended: false }
    }

    /// Replaces the catalog: new models are known to the machine before any name leads to them, and those that are
    /// gone are forgotten after the last name that led to them.
    ///
    /// `retained` are digests that names meant before: who was admitted for one of them is still answered.
    pub fn publish(&self, entries: Vec<Entry>, retained: Vec<Route>) {
        let _one_at_a_time = self.inner.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.inner.directory.snapshot();
        let mut seen = BTreeSet::new();
        for route in entries.iter().map(|entry| &entry.route).chain(&retained) {
            let known = before.routes().find(|known| known.digest == route.digest);
            if seen.insert(route.digest) && known != Some(route) {
                self.tell(Event::Configure(route.clone()));
            }
        }
        self.inner.directory.replace(entries, retained);
        for digest in before.names().keys().filter(|digest| !seen.contains(*digest)) {
            self.tell(Event::Forget { digest: *digest });
        }
    }

    /// A worker can be used.
    pub fn worker_up(&self, worker: WorkerId, link: Arc<dyn WorkerLink>) {
        self.send(Message::WorkerUp { worker, link });
    }

    /// A worker cannot be used any more.
    pub fn worker_down(&self, worker: WorkerId) {
        self.send(Message::WorkerDown { worker });
    }

    /// What a worker holds (from its facts).
    pub fn worker_state(&self, worker: WorkerId, digest: Digest, state: ModelState) {
        self.tell(Event::WorkerState { worker, digest, state });
    }

    /// Takes down what happens to the machine from now on; a recording that runs ends.
    pub fn record(&self, tape: Box<dyn Tape<Gateway>>) {
        self.send(Message::Record(tape));
    }

    /// Accept nothing new; let the rest finish. Readiness fails from now on.
    pub fn drain(&self) {
        self.inner.shared.draining.store(true, Ordering::Release);
        self.tell(Event::Drain);
    }

    /// Whether nothing new is accepted.
    pub(crate) fn is_draining(&self) -> bool {
        self.inner.shared.draining.load(Ordering::Acquire)
    }

    /// Whether requests are accepted, and if not, why.
    pub fn accepts(&self) -> Result<(), &'static str> {
        if self.is_draining() {
            return Err("draining");
        }
        if self.inner.shared.workers_up.load(Ordering::Acquire) == 0 {
            return Err("no worker can be used");
        }
        Ok(())
    }

    /// Whether some worker holds a digest ready to answer, as far as is known at this moment.
    pub fn is_ready(&self, digest: &Digest) -> bool {
        self.inner.shared.ready.read().unwrap_or_else(PoisonError::into_inner).contains(digest)
    }

    /// What the run loop knows; none if it does not answer in time.
    pub async fn figures(&self, timeout: Duration) -> Option<GatewayFigures> {
        let (sender, receiver) = oneshot::channel();
        self.send(Message::Figures { answer: sender });
        tokio::time::timeout(timeout, receiver).await.ok()?.ok()
    }

    /// Checks the machine's invariants and that the run loop keeps exactly what the machine keeps. For tests and
    /// diagnosis: it looks at every request.
    pub async fn check(&self) -> Result<(), Violation> {
        let (sender, receiver) = oneshot::channel();
        self.send(Message::Check { answer: sender });
        let gone = Violation { invariant: "the_run_loop_runs", detail: "it does not answer".to_owned() };
        receiver.await.unwrap_or(Err(gone))
    }

    /// Requests the machine keeps, waiting or at workers.
    pub async fn requests(&self) -> usize {
        let (sender, receiver) = oneshot::channel();
        self.send(Message::Requests { answer: sender });
        receiver.await.unwrap_or(0)
    }

    /// Requests the machine keeps for one digest, waiting or at workers.
    pub async fn requests_of(&self, digest: Digest) -> usize {
        let (sender, receiver) = oneshot::channel();
        self.send(Message::RequestsOf { digest, answer: sender });
        receiver.await.unwrap_or(0)
    }

    fn tell(&self, event: Event) {
        self.send(Message::Tell(event));
    }

    fn send(&self, message: Message) {
        // A run loop that is gone has nothing left to be told; liveness shows it.
        let _ = self.inner.messages.send(message);
    }
}
