//! How the rest of the server talks to a worker. Nothing here blocks; what waits is a future.

use crate::{
    config::{Clock, ModelConfig},
    requests::Waiting,
};
use serde::Serialize;
use std::{collections::VecDeque, path::PathBuf, sync::Arc, time::Duration};
use tokio::sync::{broadcast, mpsc, oneshot};
use warmset_core::{
    Bytes, Digest, Instant, MemoryVector, Priority, RequestId, TenantId,
    forecast::{Expectation, WallTime},
    inference::{Reply, Work},
    recording::Tape,
    rollout::{CanaryScore, Takeover},
    worker::{
        CancelCause, Event, Exit, Fact, Generation, LedgerLine, LoadError, PoolMemory, Recollection, Rejection, Worker,
    },
};

/// Lines of an engine's log that one question may ask for.
pub const LOG_LINES_MAX: usize = 10_000;

/// One request for this worker.
#[derive(Debug)]
pub struct Assignment {
    /// Its identity within this run.
    pub request: RequestId,
    /// The model it was admitted for.
    pub digest: Digest,
    /// Who asks.
    pub tenant: TenantId,
    /// Its class.
    pub class: Priority,
    /// What to do.
    pub work: Work,
    /// Where answers go, in order. The last one is `Done`, `Embedded`, `Failed` or `Rejected`; then the worker drops
    /// its end. An end dropped without one means that the request was cancelled or the worker lost.
    pub replies: mpsc::UnboundedSender<Reply>,
}

/// The agent has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the worker has shut down; start the server again")]
pub struct AgentGone;

impl From<AgentGone> for LoadError {
    fn from(gone: AgentGone) -> Self {
        Self { message: gone.to_string(), permanent: false }
    }
}

/// The ledger in sums, and what the reserve is used for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryReport {
    /// Capacity per device, the reserve included.
    pub capacity: MemoryVector,
    /// Kept free per device.
    pub reserve: MemoryVector,
    /// What each pool holds.
    pub pools: Vec<PoolMemory>,
    /// Host bytes of the server itself and its spare engine, as measured; they lie in the reserve.
    pub overhead_bytes: Bytes,
    /// How long the longest waiting caller of a model that is not ready has waited.
    pub oldest_pending_load: Duration,
}

/// A question to the machine, which takes its answer along.
pub(crate) type Look = Box<dyn FnOnce(&Worker, Instant) + Send>;

/// What the run loop is told.
pub(crate) enum Command {
    Configure(Box<ModelConfig>),
    Load(Digest, oneshot::Sender<Result<(), LoadError>>),
    Unload(Digest, oneshot::Sender<()>),
    Assign(Assignment),
    Cancel(RequestId, CancelCause),
    /// Somebody looks at the machine.
    Look(Look),
    /// Somebody takes down what happens to it.
    Record(Box<dyn Tape<Worker>>),
    Memory(oneshot::Sender<MemoryReport>),
    Drain(oneshot::Sender<()>),
    /// An event that needs nothing else done.
    Event(Event),
    /// The artifact was checked: how long that took, and what came of it.
    Verified(Digest, Generation, f64, Result<(), LoadError>),
    /// Share of the weights read, for those who wait.
    LoadProgress(Digest, f32),
    /// A model answered as it must.
    CanaryPassed(Digest, CanaryScore),
    CanaryScore(Digest, oneshot::Sender<Option<CanaryScore>>),
    /// A request has had its last reply.
    Answered(RequestId),
    /// A request has left its engine.
    Parked(RequestId, Waiting),
    /// A life has its engine process.
    EngineStarted(Digest, Generation, u32),
    /// Which engine processes there are.
    Engines(oneshot::Sender<Vec<(Digest, u32)>>),
    /// The engine process of a life is gone, and these callers have had no last answer.
    LifeEnded(Digest, Generation, Exit, Vec<(mpsc::UnboundedSender<Reply>, Rejection)>),
}

/// A worker, from outside. Clones talk to the same worker.
#[derive(Clone)]
pub struct AgentHandle {
    pub(crate) commands: mpsc::UnboundedSender<Command>,
    pub(crate) facts: broadcast::WeakSender<(Instant, Fact)>,
    pub(crate) logs: PathBuf,
    pub(crate) clock: Clock,
    pub(crate) worker_type: Arc<str>,
}

impl AgentHandle {
    /// Adds a model, or changes its settings; what is warm stays warm.
    pub fn configure(&self, model: ModelConfig) {
        self.send(Command::Configure(Box::new(model)));
    }

    /// Drains and forgets a model.
    pub fn forget(&self, digest: Digest) {
        self.send(Command::Event(Event::Forget { digest }));
    }

    /// Loads a model and waits until it is ready or has failed.
    pub async fn load(&self, digest: Digest) -> Result<(), LoadError> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::Load(digest, sender));
        receiver.await.unwrap_or_else(|_| Err(AgentGone.into()))
    }

    /// Forgets a model's failed loads: what was wrong may be mended.
    pub fn lift_pause(&self, digest: Digest) {
        self.send(Command::Event(Event::PauseLifted { digest }));
    }

    /// Asks for a load and waits for nothing.
    pub fn prewarm(&self, digest: Digest) {
        self.send(Command::Event(Event::LoadWanted { digest }));
    }

    /// How a version could take the place of another. Both must have been configured; nothing changes.
    pub async fn takeover(&self, digest: Digest, predecessor: Digest) -> Result<Takeover, AgentGone> {
        self.look(move |machine, now| machine.takeover(now, digest, predecessor)).await
    }

    /// Loads a version beside the one it is to replace, which stays in memory meanwhile. Waits for neither.
    pub fn succeed(&self, digest: Digest, predecessor: Digest) {
        self.send(Command::Event(Event::PauseLifted { digest }));
        self.send(Command::Event(Event::Succeed { digest, predecessor }));
    }

    /// How a model's canary went here, if one was asked and passed.
    pub async fn canary_score(&self, digest: Digest) -> Result<Option<CanaryScore>, AgentGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::CanaryScore(digest, sender));
        receiver.await.map_err(|_| AgentGone)
    }

    /// Unloads a model as soon as it is idle and waits until its memory is free. While callers wait for its load it
    /// returns at once: they are answered first, and the model leaves then.
    pub async fn unload(&self, digest: Digest) -> Result<(), AgentGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::Unload(digest, sender));
        receiver.await.map_err(|_| AgentGone)
    }

    /// Hands over a request.
    pub fn assign(&self, assignment: Assignment) {
        self.send(Command::Assign(assignment));
    }

    /// Nobody waits for this request any more. Its `replies` are closed once it has ended.
    pub fn cancel(&self, request: RequestId, cause: CancelCause) {
        self.send(Command::Cancel(request, cause));
    }

    /// Who holds which bytes.
    pub async fn ledger(&self) -> Result<Vec<LedgerLine>, AgentGone> {
        self.look(Worker::ledger).await
    }

    /// What there is to remember over a restart.
    pub async fn recollections(&self) -> Result<Vec<Recollection>, AgentGone> {
        self.look(Worker::recollections).await
    }

    /// Gives back what was remembered: what was in memory comes back as far as there is room.
    pub fn remember(&self, models: Vec<Recollection>) {
        self.send(Command::Event(Event::Remembered { models }));
    }

    /// What is expected of a model; none if the worker does not know it.
    pub async fn expectation(&self, digest: Digest) -> Result<Option<Expectation>, AgentGone> {
        self.look(move |machine, now| machine.expectation(now, &digest)).await
    }

    /// What the clock on the wall says, and how long the machine has slept since it was last read.
    pub fn tell_time(&self, wall: WallTime, asleep: Duration) {
        self.send(Command::Event(Event::WallTime { wall, asleep }));
    }

    /// A model's schedule says that it be warm from now on, or no longer.
    pub fn schedule(&self, digest: Digest, warm: bool) {
        self.send(Command::Event(Event::Scheduled { digest, warm }));
    }

    /// Takes down what happens to the machine from now on; a recording that runs ends.
    pub fn record(&self, tape: Box<dyn Tape<Worker>>) {
        self.send(Command::Record(tape));
    }

    /// The ledger in sums.
    pub async fn memory(&self) -> Result<MemoryReport, AgentGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::Memory(sender));
        receiver.await.map_err(|_| AgentGone)
    }

    /// The process identities of all engines, by model. One that is ending is still there.
    pub async fn engines(&self) -> Result<Vec<(Digest, u32)>, AgentGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::Engines(sender));
        receiver.await.map_err(|_| AgentGone)
    }

    /// Resolves once the agent has ended, however that came.
    pub async fn ended(&self) {
        self.commands.closed().await;
    }

    /// What the worker tells the world from now on. A receiver that falls behind by more than
    /// [`crate::FACTS_KEPT`] facts misses the oldest. None once the agent has ended.
    pub fn facts(&self) -> Option<broadcast::Receiver<(Instant, Fact)>> {
        Some(self.facts.upgrade()?.subscribe())
    }

    /// The last lines that engines of this model wrote, oldest first. Reads a file: call it where blocking is allowed.
    pub fn log_tail(&self, digest: &Digest, lines: usize) -> std::io::Result<Vec<String>> {
        let mut tail = VecDeque::new();
        let wanted = lines.min(LOG_LINES_MAX);
        for path in warmset_engine::process::log_files(&log_path(&self.logs, digest)) {
            let text = match std::fs::read(&path) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for line in String::from_utf8_lossy(&text).lines() {
                if tail.len() == wanted {
                    tail.pop_front();
                }
                if wanted > 0 {
                    tail.push_back(line.to_owned());
                }
            }
        }
        Ok(tail.into())
    }

    /// Takes no new requests, finishes what runs, unloads everything and ends. Waits for all of it.
    pub async fn drain(&self) {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::Drain(sender));
        // A closed channel means that the agent has ended already.
        let _ = receiver.await;
    }

    /// The clock of this worker's instants.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The kind of machine, under which measurements are kept.
    pub fn worker_type(&self) -> &str {
        &self.worker_type
    }

    /// What the machine says of itself now.
    async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Worker, Instant) -> T + Send + 'static,
    ) -> Result<T, AgentGone> {
        let (sender, receiver) = oneshot::channel();
        self.send(Command::Look(Box::new(move |machine, now| {
            // Whoever asked may be gone.
            let _ = sender.send(look(machine, now));
        })));
        receiver.await.map_err(|_| AgentGone)
    }

    fn send(&self, command: Command) {
        // A closed channel means that the agent has ended: what waits for an answer sees its own channel close.
        let _ = self.commands.send(command);
    }
}

/// Where engines of a model write.
pub(crate) fn log_path(logs: &std::path::Path, digest: &Digest) -> PathBuf {
    logs.join(format!("{}.log", digest.hex()))
}
