//! One worker on a virtual clock: the real machine, and engines that take the time a cost model says. It may have a KV tier
//! beside it, and then what a request takes follows from its prompt and from what of it is found.

mod kv;
mod tie;

pub use kv::{KvCosts, Prompt, PromptCost, PromptOutcome, block};
pub use tie::Held;

use crate::{
    demand::Demand,
    events::{EventQueue, Rank},
    peers::Starts,
    sharing::{Job, Sharing, Slowdown},
};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Bytes, Digest, Footprint, Instant, MemoryVector, ModelName, PoolName, Priority, RequestId, TenantId,
    forecast::{Parts, WallTime},
    recording::{Recorded, Tape},
    targets::Targets,
    worker::{
        Action, Event, EvictionReason, Exit, Fact, Generation, LoadTimings, ModelSpec, ParkingLimits, PreloadOutcome,
        Settings, StartKind, Violation, Worker,
    },
};

/// How long an engine that is told to stop takes to be gone.
pub(crate) const STOP_TIME: Duration = Duration::from_millis(10);

/// What a model costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Bytes while it is loaded and while it loads.
    pub bytes: Bytes,
    /// How long a load takes.
    pub load: Duration,
    /// How long a request runs.
    pub run: Duration,
}

/// What the engines of one model are like.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineCost {
    /// What one holds while it loads.
    pub peak: Footprint,
    /// What one holds once it is loaded.
    pub steady: Footprint,
    /// How long loads take, in turn: at least one.
    pub loads: Vec<Duration>,
    /// How long one that is told to stop takes to be gone.
    pub stop: Duration,
    /// How long a request runs of which nothing else is known.
    pub run: Duration,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Its identity, which no other one has.
    pub request: RequestId,
    /// The model.
    pub digest: Digest,
    /// Its class.
    pub class: Priority,
    /// How long it runs, alone on the machine, if that is known.
    pub run: Option<Duration>,
}

/// Something that happens.
enum Happening {
    Worker(Event),
    Kv(kv::Step),
}

/// One run.
pub struct Node {
    worker: Recorded<Worker>,
    now: Instant,
    queue: EventQueue<Happening>,
    kv: Option<kv::Kv>,
    /// Prompts of requests that have not begun.
    prompts: BTreeMap<RequestId, Prompt>,
    engines: BTreeMap<Digest, EngineCost>,
    arrived: BTreeMap<RequestId, Instant>,
    runs: BTreeMap<RequestId, Duration>,
    /// Requests that run: when they came.
    running: BTreeMap<RequestId, Instant>,
    /// If what computes at the same time slows each other down: all that computes.
    sharing: Option<Sharing>,
    /// Since when each of these computes, and what the worker is told at its end.
    computing: BTreeMap<Job, (Instant, Event)>,
    /// What happens takes no time yet: what was in memory before the run comes back.
    warming: bool,
    keeps_waits: bool,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Requests by how they were started.
    pub starts: Starts,
    /// Requests that were refused.
    pub rejected: u64,
    /// Loads begun.
    pub loads: u64,
    /// Loads ahead of requests that saved a cold start.
    pub preloads_used: u64,
    /// Loads ahead of requests that nobody used.
    pub preloads_wasted: u64,
    /// Models told to leave for others.
    pub evictions: u64,
    /// How long the cold ones waited for their start, all together.
    pub cold_wait: Duration,
    /// The longest that one waited.
    pub cold_wait_max: Duration,
    /// How each request was started and how long it had waited, if they are kept, in the order of the starts.
    pub waits: Vec<(StartKind, Duration)>,
    /// How long each request took from its arrival to its end, if they are kept.
    pub answers: Vec<Duration>,
}

impl Outcome {
    /// Counts a request that was started.
    pub fn started(&mut self, start: StartKind, waited: Duration) {
        match start {
            StartKind::Warm => self.starts.warm += 1,
            StartKind::Cold => {
                self.starts.cold += 1;
                self.cold_wait += waited;
                self.cold_wait_max = self.cold_wait_max.max(waited);
            }
        }
    }

    /// Counts what a worker tells.
    pub fn told(&mut self, fact: &Fact) {
        match fact {
            Fact::LoadStarted { .. } => self.loads += 1,
            Fact::EvictionStarted { reason: EvictionReason::Memory, .. } => self.evictions += 1,
            Fact::Preloaded { outcome: PreloadOutcome::Used, .. } => self.preloads_used += 1,
            Fact::Preloaded { outcome: PreloadOutcome::Wasted, .. } => self.preloads_wasted += 1,
            _ => {}
        }
    }
}

/// The limits of a machine of so many bytes.
pub fn settings(capacity: Bytes, parts: Parts) -> Settings {
    Settings {
        capacity: MemoryVector::host(capacity),
        reserve: MemoryVector::default(),
        pools: Vec::new(),
        cores: 16,
        concurrent_loads_max: 2,
        waiting_requests_max: 100_000,
        minimum_residency: Duration::from_secs(30),
        priority_protection: Duration::from_secs(30),
        demand_half_life: Duration::from_secs(300),
        load_deadline: Duration::from_secs(900),
        stop_deadline: Duration::from_secs(5),
        hang_deadline: Duration::from_secs(3_600),
        backoff_first: Duration::from_secs(1),
        backoff_max: Duration::from_secs(300),
        thread_quantum: Duration::from_secs(60),
        measure_interval: Duration::from_secs(86_400),
        thrash_window: Duration::from_secs(60),
        thrash_threshold: 0.2,
        forecast: parts,
        // Demand is of one class here: nobody gives way.
        parking: ParkingLimits::OFF,
    }
}

fn digest_of(model: usize) -> Digest {
    let mut bytes = [0; 32];
    for (place, byte) in bytes.iter_mut().zip((model as u64).to_be_bytes()) {
        *place = byte;
    }
    Digest(bytes)
}

fn engine_of(cost: &Cost) -> EngineCost {
    let held = Footprint::host(cost.bytes);
    EngineCost { peak: held.clone(), steady: held, loads: vec![cost.load], stop: STOP_TIME, run: cost.run }
}

fn spec_of(digest: Digest, name: ModelName, cost: &Cost) -> ModelSpec {
    ModelSpec {
        digest,
        name,
        pool: PoolName::default_pool(),
        priority: Priority::Standard,
        pin: false,
        parallel: 8,
        keep_alive: None,
        artifact: digest,
        peak: Footprint::host(cost.bytes),
        steady: Footprint::host(cost.bytes),
        measured: true,
        rewarm_seconds: cost.load.as_secs_f64(),
        memory_cap: None,
        targets: Targets::default(),
    }
}

impl Node {
    /// A worker that knows models of these costs and holds none.
    pub fn new(settings: Settings, costs: Vec<Cost>) -> Self {
        let engines = costs.iter().enumerate().map(|(model, cost)| (digest_of(model), engine_of(cost))).collect();
        let mut node = Self::with_engines(settings, engines);
        // The demand begins on a Monday at midnight.
        let wall = WallTime { weekday: 0, second: 0 };
        node.feed(Event::WallTime { wall, asleep: Duration::ZERO });
        for (model, cost) in costs.iter().enumerate() {
            if let Ok(name) = ModelName::parse(&format!("model-{model}")) {
                node.feed(Event::Configure(spec_of(digest_of(model), name, cost)));
            }
        }
        node
    }

    /// A worker that knows no model yet, and what the engines of those are like that it will be told of.
    pub fn with_engines(settings: Settings, engines: BTreeMap<Digest, EngineCost>) -> Self {
        Self {
            worker: Recorded::new(Worker::new(settings, Instant::ZERO)),
            now: Instant::ZERO,
            queue: EventQueue::default(),
            kv: None,
            prompts: BTreeMap::new(),
            engines,
            arrived: BTreeMap::new(),
            runs: BTreeMap::new(),
            running: BTreeMap::new(),
            sharing: None,
            computing: BTreeMap::new(),
            warming: false,
            keeps_waits: false,
            outcome: Outcome::default(),
        }
    }

    /// Takes up a run where another one stood: events and what follows from them take no time and do not count.
    pub fn warm_up(&mut self, events: impl IntoIterator<Item = Event>) {
        self.warming = true;
        for event in events {
            self.feed(event);
            while self.queue.next().is_some_and(|(at, _)| at <= self.now) {
                self.step(self.now);
            }
        }
        self.warming = false;
        self.outcome = Outcome::default();
    }

    /// Takes down what happens to the worker from now on.
    pub fn record(&mut self, tape: Box<dyn Tape<Worker>>) {
        self.worker.record(self.now, tape);
    }

    /// Keeps how long each request waits and takes.
    pub fn keep_waits(&mut self) {
        self.keeps_waits = true;
    }

    /// From now on what computes at the same time slows each other down: requests and loads, each by so much.
    pub fn share(&mut self, request: Slowdown, load: Slowdown) {
        self.sharing = Some(Sharing::new(request, load));
    }

    /// Lets a request come at its time.
    pub fn ask(&mut self, at: Instant, ask: Ask) {
        let Ask { request, digest, class, run } = ask;
        self.arrived.insert(request, at);
        if let Some(run) = run {
            self.runs.insert(request, run);
        }
        self.schedule(at, Event::Assigned { request, digest, tenant: TenantId::anonymous(), class });
    }

    /// Lets something else happen at its time.
    pub fn schedule(&mut self, at: Instant, event: Event) {
        self.queue.push(at, Rank::Arrival, Happening::Worker(event));
    }

    /// Lets a whole demand arrive and everything that follows from it happen. The invariants of the machine are checked
    /// at the end.
    pub fn run(&mut self, demand: &Demand) -> Result<(), Violation> {
        for (arrival, number) in demand.arrivals.iter().zip(1..) {
            let (digest, class) = (digest_of(arrival.model), Priority::Standard);
            self.ask(arrival.at, Ask { request: RequestId(number), digest, class, run: None });
        }
        let last = demand.arrivals.last().map_or(Instant::ZERO, |last| last.at);
        self.finish(last + Duration::from_secs(3_600))
    }

    /// Lets everything happen until nobody waits any more, or until `end`. The invariants of the machine are checked at
    /// the end.
    pub fn finish(&mut self, end: Instant) -> Result<(), Violation> {
        while self.step(end) {
            if self.next_end().is_none() && self.arrived.is_empty() {
                break;
            }
        }
        self.worker.machine().check(self.now)
    }

    /// When something comes or ends next.
    fn next_end(&self) -> Option<Instant> {
        let shared = self.sharing.as_ref().and_then(Sharing::next).map(|(at, _)| at);
        self.queue.next().map(|(at, _)| at).into_iter().chain(shared).min()
    }

    /// Lets the next thing happen, a timer if it is due by `end`. False if there was none.
    pub fn step(&mut self, end: Instant) -> bool {
        let timer = self.next_timer().map(|at| (at, Rank::Timer));
        let queued = self.queue.next();
        let first = [queued, timer].into_iter().flatten().min();
        if let Some((at, job)) = self.sharing.as_ref().and_then(Sharing::next)
            && first.is_none_or(|first| (at, Rank::Completion) < first)
        {
            self.now = at;
            if let Some(event) = self.end(job) {
                self.feed(event);
            }
            return true;
        }
        match (queued, timer) {
            (Some(queued), timer) if timer.is_none_or(|timer| queued <= timer) => {
                if let Some((at, happening)) = self.queue.pop() {
                    self.now = at;
                    match happening {
                        Happening::Worker(event) => self.feed(event),
                        Happening::Kv(step) => self.kv_step(step),
                    }
                }
                true
            }
            (_, Some((at, _))) if at <= end => {
                self.now = at;
                self.turn_timers();
                true
            }
            _ => false,
        }
    }

    fn feed(&mut self, event: Event) {
        self.kv_hears(&event);
        match &event {
            Event::Cancelled { request, .. } => {
                self.arrived.remove(request);
            }
            Event::Finished { request } => {
                if let Some(arrived) = self.running.remove(request)
                    && self.keeps_waits
                {
                    self.outcome.answers.push(self.now.since(arrived));
                }
            }
            _ => {}
        }
        let mut actions = Vec::new();
        self.worker.handle(self.now, event, &mut actions);
        for action in actions {
            self.perform(action);
        }
        self.limit_kv();
    }

    /// Lets something compute that takes so long alone, and tells of it at its end.
    fn compute(&mut self, job: Job, digest: Digest, alone: Duration, ended: Event) {
        match &mut self.sharing {
            Some(sharing) => {
                sharing.begin(self.now, job, digest, alone.as_nanos() as f64);
                self.computing.insert(job, (self.now, ended));
            }
            None => self.later(alone, ended),
        }
    }

    /// Something that shares the machine is through, or given up; what is to be told of it.
    fn end(&mut self, job: Job) -> Option<Event> {
        self.sharing.as_mut()?.end(self.now, job);
        let (since, mut event) = self.computing.remove(&job)?;
        if let Event::Loaded { timings, .. } = &mut event {
            timings.load_seconds = self.now.since(since).as_secs_f64();
        }
        Some(event)
    }

    fn later(&mut self, delay: Duration, event: Event) {
        let delay = if self.warming { Duration::ZERO } else { delay };
        self.queue.push(self.now + delay, Rank::Completion, Happening::Worker(event));
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Verify { digest, generation } => {
                self.later(Duration::ZERO, Event::Verified { digest, generation, seconds: 0.0 });
            }
            Action::Load { digest, generation, .. } => self.load(digest, generation),
            Action::Stop { digest, generation } | Action::Kill { digest, generation } => {
                self.end(Job::Load(digest, generation));
                let stop = self.engines.get(&digest).map_or(STOP_TIME, |engine| engine.stop);
                self.later(stop, Event::Exited { digest, generation, exit: Exit::Stopped });
            }
            Action::Start { request, digest, start, .. } => self.start(request, digest, start),
            Action::Reject { request, .. } => {
                self.arrived.remove(&request);
                self.outcome.rejected += 1;
            }
            Action::SetThreads { digest, generation, threads } => {
                self.later(Duration::ZERO, Event::ThreadsHeld { digest, generation, threads });
            }
            Action::Abort { .. }
            | Action::Grant { .. }
            | Action::Measure { .. }
            | Action::Park { .. }
            | Action::ParkTake { .. }
            | Action::ParkStop { .. } => {}
            Action::Tell(fact) => self.outcome.told(&fact),
        }
    }

    fn load(&mut self, digest: Digest, generation: Generation) {
        let Some(engine) = self.engines.get_mut(&digest) else { return };
        let (peak, steady) = (engine.peak.clone(), engine.steady.clone());
        let load = engine.loads.first().copied().unwrap_or_default();
        let taken = engine.loads.len().min(1);
        engine.loads.rotate_left(taken);
        let timings = LoadTimings { load_seconds: load.as_secs_f64(), ..LoadTimings::default() };
        let loaded = Event::Loaded { digest, generation, peak, steady, timings, working_bytes: 0 };
        self.compute(Job::Load(digest, generation), digest, load, loaded);
    }

    fn start(&mut self, request: RequestId, digest: Digest, start: StartKind) {
        let run = self.engines.get(&digest).map(|engine| engine.run);
        let (Some(run), Some(arrived)) = (run, self.arrived.remove(&request)) else { return };
        let run = self.runs.remove(&request).unwrap_or(run);
        self.running.insert(request, arrived);
        let waited = self.now.since(arrived);
        self.outcome.started(start, waited);
        if self.keeps_waits {
            self.outcome.waits.push((start, waited));
        }
        match (&mut self.kv, self.prompts.remove(&request)) {
            (Some(kv), Some(prompt)) => kv.begin(self.now, request, digest, prompt),
            _ => self.compute(Job::Request(request), digest, run, Event::Finished { request }),
        }
    }
}
