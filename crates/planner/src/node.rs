//! One worker on a virtual clock: the real machine, and engines that take the time a cost model says.

use crate::{
    demand::Demand,
    events::{EventQueue, Rank},
    peers::Starts,
};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Bytes, Digest, Footprint, Instant, Machine, MemoryVector, ModelName, PoolName, Priority, RequestId, TenantId,
    forecast::{Parts, WallTime},
    targets::Targets,
    worker::{
        Action, Event, EvictionReason, Exit, Fact, Generation, LoadTimings, ModelSpec, ParkingLimits, PreloadOutcome,
        Settings, StartKind, Violation, Worker,
    },
};

/// How long an engine that is told to stop takes to be gone.
const STOP_TIME: Duration = Duration::from_millis(10);

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

/// One run.
#[derive(Debug, Clone)]
pub struct Node {
    worker: Worker,
    now: Instant,
    queue: EventQueue<Event>,
    costs: Vec<Cost>,
    arrived: BTreeMap<RequestId, Instant>,
    models: BTreeMap<Digest, usize>,
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

impl Node {
    /// A worker that knows models of these costs and holds none.
    pub fn new(settings: Settings, costs: Vec<Cost>) -> Self {
        let mut node = Self {
            worker: Worker::new(settings, Instant::ZERO),
            now: Instant::ZERO,
            queue: EventQueue::default(),
            models: (0..costs.len()).map(|model| (digest_of(model), model)).collect(),
            costs,
            arrived: BTreeMap::new(),
            outcome: Outcome::default(),
        };
        // The demand begins on a Monday at midnight.
        let wall = WallTime { weekday: 0, second: 0 };
        node.feed(Event::WallTime { wall, asleep: Duration::ZERO });
        for model in 0..node.costs.len() {
            node.configure(model);
        }
        node
    }

    fn configure(&mut self, model: usize) {
        let (Some(cost), Ok(name)) = (self.costs.get(model), ModelName::parse(&format!("model-{model}"))) else {
            return;
        };
        let spec = ModelSpec {
            digest: digest_of(model),
            name,
            pool: PoolName::default_pool(),
            priority: Priority::Standard,
            pin: false,
            parallel: 8,
            keep_alive: None,
            artifact: digest_of(model),
            peak: Footprint::host(cost.bytes),
            steady: Footprint::host(cost.bytes),
            measured: true,
            rewarm_seconds: cost.load.as_secs_f64(),
            memory_cap: None,
            targets: Targets::default(),
        };
        self.feed(Event::Configure(spec));
    }

    /// Lets a whole demand arrive and everything that follows from it happen. The invariants of the machine are checked
    /// at the end.
    pub fn run(&mut self, demand: &Demand) -> Result<(), Violation> {
        for (arrival, number) in demand.arrivals.iter().zip(1..) {
            let request = RequestId(number);
            self.arrived.insert(request, arrival.at);
            let (digest, tenant) = (digest_of(arrival.model), TenantId::anonymous());
            let event = Event::Assigned { request, digest, tenant, class: Priority::Standard };
            self.queue.push(arrival.at, Rank::Arrival, event);
        }
        let end = demand.arrivals.last().map_or(Instant::ZERO, |last| last.at + Duration::from_secs(3_600));
        while self.step(end) {
            if self.queue.next().is_none() && self.arrived.is_empty() {
                break;
            }
        }
        self.worker.check(self.now)
    }

    fn step(&mut self, end: Instant) -> bool {
        let timer = self.worker.next_timer().map(|at| (at, Rank::Timer));
        let queued = self.queue.next();
        match (queued, timer) {
            (Some(queued), timer) if timer.is_none_or(|timer| queued <= timer) => {
                if let Some((at, event)) = self.queue.pop() {
                    self.now = at;
                    self.feed(event);
                }
                true
            }
            (_, Some((at, _))) if at <= end => {
                self.now = at;
                self.feed(Event::Timer);
                true
            }
            _ => false,
        }
    }

    fn feed(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.worker.handle(self.now, event, &mut actions);
        for action in actions {
            self.perform(action);
        }
    }

    fn cost(&self, digest: Digest) -> Option<Cost> {
        self.costs.get(*self.models.get(&digest)?).copied()
    }

    fn later(&mut self, delay: Duration, event: Event) {
        self.queue.push(self.now + delay, Rank::Completion, event);
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Verify { digest, generation } => {
                self.later(Duration::ZERO, Event::Verified { digest, generation, seconds: 0.0 });
            }
            Action::Load { digest, generation, .. } => self.load(digest, generation),
            Action::Stop { digest, generation } | Action::Kill { digest, generation } => {
                self.later(STOP_TIME, Event::Exited { digest, generation, exit: Exit::Stopped });
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
            Action::Tell(Fact::LoadStarted { .. }) => self.outcome.loads += 1,
            Action::Tell(Fact::EvictionStarted { reason: EvictionReason::Memory, .. }) => self.outcome.evictions += 1,
            Action::Tell(Fact::Preloaded { outcome: PreloadOutcome::Used, .. }) => self.outcome.preloads_used += 1,
            Action::Tell(Fact::Preloaded { outcome: PreloadOutcome::Wasted, .. }) => self.outcome.preloads_wasted += 1,
            Action::Tell(_) => {}
        }
    }

    fn load(&mut self, digest: Digest, generation: Generation) {
        let Some(cost) = self.cost(digest) else { return };
        let (peak, steady) = (Footprint::host(cost.bytes), Footprint::host(cost.bytes));
        let timings = LoadTimings { load_seconds: cost.load.as_secs_f64(), ..LoadTimings::default() };
        self.later(cost.load, Event::Loaded { digest, generation, peak, steady, timings });
    }

    fn start(&mut self, request: RequestId, digest: Digest, start: StartKind) {
        let (Some(cost), Some(arrived)) = (self.cost(digest), self.arrived.remove(&request)) else { return };
        match start {
            StartKind::Warm => self.outcome.starts.warm += 1,
            StartKind::Cold => {
                let waited = self.now.since(arrived);
                self.outcome.starts.cold += 1;
                self.outcome.cold_wait += waited;
                self.outcome.cold_wait_max = self.outcome.cold_wait_max.max(waited);
            }
        }
        self.later(cost.run, Event::Finished { request });
    }
}
