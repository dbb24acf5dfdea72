//! What can happen to a worker and what it wants done.
#![expect(missing_docs, reason = "the fields of events, actions and replies say by name what they are")]

use crate::{
    forecast::{self, Forecast, WallTime},
    ids::{Digest, ModelName, PoolName, Priority, RequestId, TenantId},
    memory::{Bytes, Footprint, MemoryVector},
    targets::Targets,
    time::Instant,
};
use alloc::{string::String, vec::Vec};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// One life of one model on this worker: grows with every load, so that late news of an earlier life is ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Generation(pub u64);

/// What a worker must know of one digest to keep it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The identity.
    pub digest: Digest,
    /// The name it was added under, for messages, metrics and the log.
    pub name: ModelName,
    /// The part of memory it lives in.
    pub pool: PoolName,
    /// Its class: a load never evicts a recently used model of a more important class.
    pub priority: Priority,
    /// Never a victim; loaded at start and again after a crash.
    pub pin: bool,
    /// Sequences its engine runs at once.
    pub parallel: u32,
    /// Unloaded after this long without a request, even if nobody needs the memory.
    pub keep_alive: Option<Duration>,
    /// The file that several digests may share (the same weights under other parameters), for counting pages once.
    pub artifact: Digest,
    /// Bytes while loading: measured, or estimated before the first load.
    pub peak: Footprint,
    /// Bytes once loaded: measured, or estimated before the first load.
    pub steady: Footprint,
    /// Whether `peak` and `steady` are measurements.
    pub measured: bool,
    /// Seconds from cold to ready: measured, or estimated before the first load.
    pub rewarm_seconds: f64,
    /// The most host bytes its process may take, enforced by the operating system.
    pub memory_cap: Option<Bytes>,
    /// What its callers were promised.
    pub targets: Targets,
}

/// How long the steps of one load took.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LoadTimings {
    /// Bringing the artifact to this machine.
    pub fetch_seconds: f64,
    /// Checking it.
    pub verify_seconds: f64,
    /// Starting the engine and reading the weights.
    pub load_seconds: f64,
    /// The first, discarded computation.
    pub warm_up_seconds: f64,
    /// Asking what shows that it is the model that was approved; 0 where nothing was asked.
    #[serde(default)]
    pub canary_seconds: f64,
}

impl LoadTimings {
    /// What every load of the model costs: all but the canary, which is asked once.
    pub fn rewarm_seconds(&self) -> f64 {
        self.total_seconds() - self.canary_seconds
    }

    /// Everything a cold caller waits for.
    pub fn total_seconds(&self) -> f64 {
        self.fetch_seconds + self.verify_seconds + self.load_seconds + self.warm_up_seconds + self.canary_seconds
    }
}

/// Why a load failed, and whether trying again can help.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadError {
    /// For the caller and the log: what is wrong and what to do.
    pub message: String,
    /// The artifact or its settings are at fault: no further try will succeed until they change.
    pub permanent: bool,
}

/// How often a model is asked for, and whether that keeps it warm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recollection {
    /// The model.
    pub digest: Digest,
    /// Requests per second, decayed, when it was last asked for.
    pub demand_per_second: f64,
    /// How long ago that was.
    pub age: Duration,
    /// Whether it is in memory and not on its way out.
    pub warm: bool,
    /// When it is asked for.
    pub forecast: Forecast,
}

/// Why an engine process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It was told to stop and did.
    Stopped,
    /// It ended by itself or was killed: the reason in words (`signal 9`, `exit code 1`, ...).
    Crashed(String),
    /// It needed more host memory than its cap.
    OverCap(Bytes),
}

impl core::fmt::Display for Exit {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Stopped => formatter.write_str("the engine stopped"),
            Self::Crashed(reason) => formatter.write_str(reason),
            Self::OverCap(bytes) => {
                write!(formatter, "over its memory cap of {bytes} bytes; raise the cap or the worker's memory")
            }
        }
    }
}

/// Why a caller no longer wants its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CancelCause {
    /// The connection is gone. A load nobody else wants is given up.
    Disconnected,
    /// Its deadline passed. The load goes on, so that the next caller finds the model warm.
    DeadlinePassed,
}

/// What can happen to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A digest is added or its settings change. What is warm stays warm.
    Configure(ModelSpec),
    /// A digest is no longer wanted: drain and forget.
    Forget { digest: Digest },
    /// Somebody wants it loaded, without a request (admin, pin, prewarm).
    LoadWanted { digest: Digest },
    /// What another worker, most likely this one before a restart, knew of its models. Those that it had in memory come
    /// back in the order of their worth as long as there is room for them.
    Remembered { models: Vec<Recollection> },
    /// A version is to take the place of another: it is loaded, the other stays in memory until then, and what was
    /// asked of the other counts for it.
    Succeed { digest: Digest, predecessor: Digest },
    /// Whatever made its last load fail may be mended: the next one is tried at once.
    PauseLifted { digest: Digest },
    /// Somebody wants it unloaded as soon as it is idle.
    UnloadWanted { digest: Digest },
    /// The gateway sends a request.
    Assigned { request: RequestId, digest: Digest, tenant: TenantId, class: Priority },
    /// A caller no longer wants its answer.
    Cancelled { request: RequestId, cause: CancelCause },
    /// The artifact on disk is what its digest says.
    Verified { digest: Digest, generation: Generation, seconds: f64 },
    /// The engine is loaded and warmed up; bytes as measured. It may hold `working_bytes` more of host memory for a while,
    /// which is no sign of a fault: where it puts one sequence's state together.
    Loaded {
        digest: Digest,
        generation: Generation,
        peak: Footprint,
        steady: Footprint,
        timings: LoadTimings,
        #[serde(default)]
        working_bytes: Bytes,
    },
    /// The load failed; the process, if there was one, reports its own exit.
    LoadFailed { digest: Digest, generation: Generation, error: LoadError },
    /// The engine process is gone and its memory is back with the operating system.
    Exited { digest: Digest, generation: Generation, exit: Exit },
    /// Bytes of a resident engine, measured again.
    Measured { digest: Digest, generation: Generation, steady: Footprint },
    /// The engine tokenised a request and asks which cached blocks to use.
    Prepared { request: RequestId, prompt_tokens: u32 },
    /// Cached KV of this worth, in seconds saved per second and byte, leaves host memory for want of room.
    KvPressed { worth: f64 },
    /// An engine has stopped computing a request that is to be parked: its state takes so many bytes.
    ParkSized { request: RequestId, bytes: Bytes },
    /// A request cannot be parked. It runs on.
    ParkRefused { request: RequestId },
    /// A request has left its engine, with all it takes to go on.
    Parked { request: RequestId },
    /// The engine made a step.
    Progress { digest: Digest, generation: Generation },
    /// A request has ended, well or not; its slot is free.
    Finished { request: RequestId },
    /// The engine now steps with this many threads.
    ThreadsHeld { digest: Digest, generation: Generation, threads: u32 },
    /// The clock on the wall was read. The machine slept for so long since the last time.
    WallTime { wall: WallTime, asleep: Duration },
    /// The model's schedule says that it be warm from now on, or no longer.
    Scheduled { digest: Digest, warm: bool },
    /// The time asked for by `next_timer` has come.
    Timer,
    /// Take no new requests; finish what runs; then unload everything.
    Drain,
}

/// Whether a request found its model loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartKind {
    /// It was ready when the request came.
    Warm,
    /// The request waited for a load.
    Cold,
}

impl StartKind {
    /// The value of `warmset-start` and of the metrics label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// Why a worker will not run a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rejection {
    /// No such digest here.
    UnknownModel,
    /// The model cannot fit its pool, even alone.
    TooLarge { needed_bytes: Bytes, available_bytes: Bytes },
    /// The last load failed; nothing is tried before `retry_after`.
    LoadFailed { error: LoadError, retry_after: Duration },
    /// Too many requests wait for this worker.
    QueueFull { retry_after: Duration },
    /// Memory is held by models in use or protected, and will be for longer than the caller should wait.
    NoMemory { retry_after: Duration },
    /// The engine was lost; `output_started` says whether the caller already saw a part of the answer.
    EngineLost { message: String, output_started: bool },
    /// The worker is shutting down.
    Draining,
}

/// Why a model leaves memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictionReason {
    /// Another model is worth more.
    Memory,
    /// Idle longer than its keep-alive.
    KeepAlive,
    /// An administrator said so.
    Requested,
    /// It turned out larger than the budget allows.
    OverBudget,
    /// The digest is no longer configured.
    Forgotten,
    /// The worker shuts down.
    Drain,
    /// Nobody wants the load any more.
    Abandoned,
}

impl EvictionReason {
    /// The value of the metrics label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::KeepAlive => "keep_alive",
            Self::Requested => "requested",
            Self::OverBudget => "over_budget",
            Self::Forgotten => "forgotten",
            Self::Drain => "drain",
            Self::Abandoned => "abandoned",
        }
    }
}

/// What became of a load that nobody had asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreloadOutcome {
    /// The first request found it ready.
    Used,
    /// The first request came while it was being loaded.
    Late,
    /// It left, or was given up, before a request came.
    Wasted,
}

impl PreloadOutcome {
    /// The value of the metrics label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Late => "late",
            Self::Wasted => "wasted",
        }
    }
}

/// What a worker tells the rest of the world. Metrics, events and the log follow from these alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Fact {
    /// A load begins; its peak is in the ledger.
    LoadStarted { digest: Digest, generation: Generation },
    /// A model is ready.
    LoadFinished { digest: Digest, generation: Generation, peak: Footprint, steady: Footprint, timings: LoadTimings },
    /// A load failed; nothing is tried before `retry_after`.
    LoadRefused { digest: Digest, error: LoadError, retry_after: Duration },
    /// A model is told to leave.
    EvictionStarted { digest: Digest, reason: EvictionReason },
    /// A model's bytes are free.
    EvictionFinished { digest: Digest, reason: EvictionReason },
    /// An engine process died by itself.
    EngineCrashed { digest: Digest, message: String },
    /// A pool reloads what it has just evicted: it is too small for what is asked of it.
    ThrashAlarm { pool: PoolName, ratio: f64, raised: bool },
    /// A measured size replaces the one in use.
    SizeCorrected { digest: Digest, from_bytes: Bytes, to_bytes: Bytes },
    /// A running model holds more than it ever did: its next load must find room for it.
    Grown { digest: Digest, peak: Footprint, steady: Footprint },
    /// It is known what a load was good for that began before anybody asked.
    Preloaded { digest: Digest, outcome: PreloadOutcome },
    /// A request that ran gave way to one of a higher class.
    Parked { digest: Digest, bytes: Bytes },
    /// A parked request goes on.
    Resumed { digest: Digest, parked: Duration },
    /// A model's state changed, for routers and for `warmset model list`.
    StateChanged { digest: Digest, state: ModelState },
}

impl Fact {
    /// The model it is about; none if it is about a pool.
    pub fn digest(&self) -> Option<Digest> {
        match self {
            Self::LoadStarted { digest, .. }
            | Self::LoadFinished { digest, .. }
            | Self::LoadRefused { digest, .. }
            | Self::EvictionStarted { digest, .. }
            | Self::EvictionFinished { digest, .. }
            | Self::EngineCrashed { digest, .. }
            | Self::SizeCorrected { digest, .. }
            | Self::Grown { digest, .. }
            | Self::Preloaded { digest, .. }
            | Self::Parked { digest, .. }
            | Self::Resumed { digest, .. }
            | Self::StateChanged { digest, .. } => Some(*digest),
            Self::ThrashAlarm { .. } => None,
        }
    }
}

/// A model's state on one worker, as shown to people and to the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelState {
    /// Not in memory.
    Absent,
    /// Waits for memory or for a free loader.
    Waiting,
    /// The artifact is being checked.
    Verifying,
    /// The engine reads it.
    Loading,
    /// Answers requests.
    Ready,
    /// Finishes what runs, takes nothing new.
    Draining,
    /// Its process is ending.
    Unloading,
    /// The last load failed and its backoff has not passed.
    Failed,
}

/// What a worker wants done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// Check that the artifact on disk is what its digest says, then report `Verified` or `LoadFailed`.
    Verify { digest: Digest, generation: Generation },
    /// Start an engine and load; then report `Loaded` or `LoadFailed`, and `Exited` when its process is gone.
    Load {
        digest: Digest,
        generation: Generation,
        /// The accelerators chosen, as device indices (1 is the first accelerator).
        accelerators: Vec<usize>,
        /// The most host bytes the process may take.
        memory_cap: Option<Bytes>,
        /// Threads to begin with.
        threads: u32,
    },
    /// Ask the engine to stop; report `Exited`.
    Stop { digest: Digest, generation: Generation },
    /// Kill the engine's process; report `Exited`.
    Kill { digest: Digest, generation: Generation },
    /// Give a request to a ready engine, which goes on with it if it was parked.
    Start { request: RequestId, digest: Digest, generation: Generation, start: StartKind },
    /// Tell the engine where the KV of a prompt comes from.
    Grant { request: RequestId },
    /// Tell the engine to end a request; report `Finished`.
    Abort { request: RequestId, digest: Digest, generation: Generation },
    /// Have a request stopped at the next step; report `ParkSized` or `ParkRefused`.
    Park { request: RequestId, digest: Digest, generation: Generation },
    /// Take a stopped request out of its engine, into so many bytes of the server; report `Parked` or `ParkRefused`.
    ParkTake { request: RequestId, digest: Digest, generation: Generation, bytes: Bytes },
    /// Let a stopped request run on.
    ParkStop { request: RequestId, digest: Digest, generation: Generation },
    /// Answer a request with a refusal.
    Reject { request: RequestId, rejection: Rejection },
    /// Tell the engine how many threads to step with; report `ThreadsHeld`.
    SetThreads { digest: Digest, generation: Generation, threads: u32 },
    /// Measure a resident engine and report `Measured`.
    Measure { digest: Digest, generation: Generation },
    /// Tell the world.
    Tell(Fact),
}

/// The limits a worker lives within.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Capacity per device; device 0 is host memory.
    pub capacity: MemoryVector,
    /// Kept free per device for buffers, the parent process and runtime overhead.
    pub reserve: MemoryVector,
    /// Pools with a budget of their own, carved out of the capacity; what is left is the default pool.
    pub pools: Vec<(PoolName, MemoryVector)>,
    /// Processor cores that engines may use at once.
    pub cores: u32,
    /// Loads at the same time.
    pub concurrent_loads_max: u32,
    /// Requests that may wait on this worker.
    pub waiting_requests_max: u32,
    /// A model stays at least this long after it became ready.
    pub minimum_residency: Duration,
    /// A class is protected from lower ones for this long after a model's last request.
    pub priority_protection: Duration,
    /// Half-life of demand.
    pub demand_half_life: Duration,
    /// A load that takes longer is killed.
    pub load_deadline: Duration,
    /// An engine that does not stop within this time is killed.
    pub stop_deadline: Duration,
    /// An engine with work, threads and no step for this long is killed.
    pub hang_deadline: Duration,
    /// The first pause after a failed load; doubles with each failure.
    pub backoff_first: Duration,
    /// The longest pause after a failed load.
    pub backoff_max: Duration,
    /// How long an engine keeps its threads while others wait for some.
    pub thread_quantum: Duration,
    /// How often a resident engine is measured again.
    pub measure_interval: Duration,
    /// Window over which thrashing is judged.
    pub thrash_window: Duration,
    /// Share of time spent reloading what was recently evicted at which the alarm is raised.
    pub thrash_threshold: f64,
    /// Which parts of the forecast are used.
    pub forecast: forecast::Parts,
    /// How far requests give way that run already.
    pub parking: ParkingLimits,
}

/// How far requests give way that run already. What does not fit within runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParkingLimits {
    /// Requests parked at the same time; 0 parks none.
    pub requests_max: u32,
    /// Bytes of host memory that their states take together.
    pub bytes_max: Bytes,
    /// How often one request is parked.
    pub times_max: u32,
    /// How long one request is parked, all times together. From then on it waits like a critical one, and is not parked
    /// again.
    pub time_max: Duration,
}

impl ParkingLimits {
    /// Requests that run are left alone.
    pub const OFF: Self = Self { requests_max: 0, bytes_max: 0, times_max: 0, time_max: Duration::ZERO };
}

impl Default for ParkingLimits {
    fn default() -> Self {
        Self { requests_max: 64, bytes_max: 2 << 30, times_max: 4, time_max: Duration::from_secs(60) }
    }
}

/// One line of the ledger: who holds which bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LedgerLine {
    /// The model.
    pub digest: Digest,
    /// Its name.
    pub name: ModelName,
    /// Its pool.
    pub pool: PoolName,
    /// Its state.
    pub state: ModelState,
    /// Bytes it alone holds, per device.
    pub private: MemoryVector,
    /// Host bytes it shares with others of the same artifact.
    pub shared_host_bytes: Bytes,
    /// Requests running on it.
    pub in_flight: u32,
    /// Requests waiting for it, those included that were parked.
    pub waiting: u32,
    /// Requests that ran on it and gave way.
    pub parked: u32,
    /// What dropping it would lose, in seconds of rewarming per second and byte.
    pub worth: f64,
    /// Requests per second, decayed.
    pub demand_per_second: f64,
    /// When it last began or ended a request.
    pub last_used: Option<Instant>,
    /// Whether its sizes are measurements.
    pub measured: bool,
    /// Whether it is pinned.
    pub pin: bool,
}
