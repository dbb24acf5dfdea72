//! What can happen to a gateway and what it wants done.
#![expect(missing_docs, reason = "the fields of events, actions and replies say by name what they are")]

use crate::{
    ids::{Digest, ModelName, Priority, RequestId, TenantId, WorkerId},
    targets::Targets,
    worker::{CancelCause, ModelState, Rejection, StartKind},
};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// What a caller of a cold model gets.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColdPolicy {
    /// Its answer, after the load.
    #[default]
    Wait,
    /// A refusal with an honest hint, while the load begins.
    Reject,
    /// A job to come back for, where jobs are kept; a stream, which says what it waits for, waits.
    Async,
}

/// What a gateway must know of one digest to admit requests for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// The identity.
    pub digest: Digest,
    /// The name it was added under.
    pub name: ModelName,
    /// Class of requests that name none.
    pub priority: Priority,
    /// Requests running at once.
    pub max_concurrency: u32,
    /// How many of those only critical requests may use.
    pub critical_reserve: u32,
    /// Whether its requests can be parked for those of a higher class, so that only requests of the same class or a
    /// higher one hold one up.
    #[serde(default)]
    pub parks: bool,
    /// What a caller gets while it is cold.
    pub cold: ColdPolicy,
    /// Expected seconds from cold to ready, for retry hints.
    pub rewarm_seconds: f64,
    /// What its callers were promised.
    #[serde(default)]
    pub targets: Targets,
}

/// What can happen to a gateway.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A digest is added or its settings change.
    Configure(Route),
    /// A digest is no longer served; waiting requests for it are refused.
    Forget { digest: Digest },
    /// A caller asks. The digest was resolved from the name at this moment and stays.
    Arrived {
        request: RequestId,
        tenant: TenantId,
        digest: Digest,
        class: Priority,
        /// Time the caller is given to get its first byte.
        patience: Duration,
    },
    /// A caller went away.
    Cancelled { request: RequestId },
    /// The worker began to run a request.
    Started { request: RequestId, start: StartKind },
    /// A request ended with a complete answer.
    Finished { request: RequestId, prompt_tokens: u32, completion_tokens: u32 },
    /// A request ended in the engine without a complete answer: its own fault, or the caller had gone. Its slot is free.
    Failed { request: RequestId },
    /// The worker would not or could not run it.
    Rejected { request: RequestId, rejection: Rejection },
    /// A worker can be used.
    WorkerUp { worker: WorkerId },
    /// A worker cannot be used.
    WorkerDown { worker: WorkerId },
    /// What a worker holds.
    WorkerState { worker: WorkerId, digest: Digest, state: ModelState },
    /// The time asked for by `next_timer` has come.
    Timer,
    /// Accept nothing new; let the rest finish.
    Drain,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The digest is not served here.
    UnknownModel,
    /// Too many requests wait.
    QueueFull { retry_after: Duration },
    /// The model is cold and its policy is to refuse.
    ModelLoading { retry_after: Duration },
    /// Its first byte did not come in time.
    DeadlinePassed,
    /// No worker can be used.
    NoWorker { retry_after: Duration },
    /// The gateway is shutting down.
    Draining,
    /// The worker's own reason.
    Worker(Rejection),
}

/// What a gateway wants done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// Send a request to a worker.
    Dispatch { request: RequestId, worker: WorkerId, digest: Digest, tenant: TenantId, class: Priority },
    /// Tell the worker that nobody waits for this any more.
    Cancel { request: RequestId, worker: WorkerId, cause: CancelCause },
    /// Answer with a refusal.
    Refuse { request: RequestId, refusal: Refusal },
    /// Ask a worker to load a model without a request.
    Prewarm { worker: WorkerId, digest: Digest },
    /// Tell a waiting caller its place (1 is next).
    Position { request: RequestId, position: u32 },
}

/// The limits a gateway lives within.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Requests that may wait in all queues together.
    pub queue_limit: u32,
    /// Requests that may wait for one model.
    pub queue_limit_per_model: u32,
    /// Tries of a request whose engine was lost before it said anything.
    pub attempts_max: u32,
    /// A waiting request counts as one class more important after each such time.
    pub aging: Duration,
    /// The longest retry hint ever given.
    pub retry_after_max: Duration,
    /// Whether workers park requests at all.
    #[serde(default)]
    pub parks: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            queue_limit: 1024,
            queue_limit_per_model: 256,
            attempts_max: 2,
            aging: Duration::from_secs(10),
            retry_after_max: Duration::from_secs(120),
            parks: false,
        }
    }
}
