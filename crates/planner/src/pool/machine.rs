//! One machine as a server composes it: `core::Gateway` in front of `core::Worker`, and engines that a cost model stands for.
//!
//! Nothing is decided here. What one machine wants is carried out, and what follows is told to both, in the order in which
//! the run loops of a server would.

mod promotion;

pub use promotion::{Promoted, Strategy};

use super::{
    demand::{Demand, Request},
    engine::{Engine, Progress, Sequence},
    prompts::Beginning,
    scenario::Pool,
};
use crate::node;
use promotion::Versions;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};
use warmset_core::{
    Digest, Footprint, Instant, Machine as _, MemoryVector, ModelName, PoolName, RequestId, TenantId, WorkerId,
    forecast::{Parts, WallTime},
    gateway::{self, ColdPolicy, Gateway, Refusal, Route},
    worker::{
        self, EvictionReason, Exit, Fact, Generation, LedgerLine, LoadError, LoadTimings, ModelSpec, ParkingLimits,
        PreloadOutcome, Recollection, Rejection, StartKind, Worker,
    },
};

const WORKER: WorkerId = WorkerId(0);

/// What a machine lets the world know.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Notice {
    /// An engine has begun a request.
    Started(RequestId, StartKind),
    /// The first token of its answer.
    FirstToken(RequestId),
    /// Its answer is complete; so many tokens of its prompt were there.
    Finished(RequestId, u64),
    /// It gets none.
    Refused(RequestId, Refusal),
    /// Something that takes time has begun and ends then.
    Later(Instant, worker::Event),
    /// A load waits for weights that are not here.
    Fetch(Digest, Option<Generation>),
    /// A name stands for its new version, or for the old one still.
    Promoted(Promoted),
}

/// What a machine has when it is started.
#[derive(Debug, Clone)]
pub(super) struct Start<'a> {
    /// The models that it serves.
    pub(super) models: &'a [usize],
    /// Weights that are not there.
    pub(super) lacks: BTreeSet<Digest>,
    /// Models whose name stands for the new version.
    pub(super) switched: &'a BTreeSet<usize>,
}

/// How often what happened in one machine, or in several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Loads begun.
    pub loads: u64,
    /// Loads that failed.
    pub failed_loads: u64,
    /// Models that left for others.
    pub evictions: u64,
    /// Loads ahead of requests that saved a cold start.
    pub preloads_used: u64,
    /// Loads ahead of requests that nobody used.
    pub preloads_wasted: u64,
    /// Requests that gave way to one of a higher class.
    pub parked: u64,
}

impl Counts {
    /// Both together.
    pub fn add(&mut self, other: &Self) {
        self.loads += other.loads;
        self.failed_loads += other.failed_loads;
        self.evictions += other.evictions;
        self.preloads_used += other.preloads_used;
        self.preloads_wasted += other.preloads_wasted;
        self.parked += other.parked;
    }
}

#[derive(Debug, Clone, Copy)]
struct Running {
    generation: Generation,
    output_started: bool,
    cached_tokens: u64,
}

enum Inner {
    Gateway(gateway::Event),
    Worker(worker::Event),
}

/// One machine.
pub(super) struct Machine<'a> {
    pool: &'a Pool,
    demand: &'a Demand,
    gateway: Gateway,
    worker: Worker,
    engines: BTreeMap<Generation, Engine>,
    running: BTreeMap<RequestId, Running>,
    parked: BTreeMap<RequestId, Sequence>,
    /// Models whose weights are not here.
    lacks: BTreeSet<Digest>,
    /// Models that stay as long as they are served.
    pinned: BTreeSet<usize>,
    versions: Versions,
    /// Up to when engines have computed.
    computed_at: Instant,
    now: Instant,
    inner: VecDeque<Inner>,
    random: fastrand::Rng,
    pub(super) notices: Vec<Notice>,
    /// Of each team's models.
    pub(super) counts: Vec<Counts>,
}

/// The identity of a model by its number. None is all zeros: that is nobody's.
pub(super) fn digest_of(model: usize) -> Digest {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&(model as u64 + 1).to_be_bytes());
    Digest(bytes)
}

/// The identity of a model's new version, where it gets one.
pub(super) fn successor_of(model: usize) -> Digest {
    let mut digest = digest_of(model);
    digest.0[8] = 1;
    digest
}

/// The number of a model by its identity.
pub(super) fn model_of(digest: Digest) -> usize {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest.0[..8]);
    usize::try_from(u64::from_be_bytes(bytes).saturating_sub(1)).unwrap_or(usize::MAX)
}

/// The limits of a machine, as a server has them unless told otherwise.
fn worker_settings(pool: &Pool) -> worker::Settings {
    worker::Settings {
        reserve: MemoryVector::host(pool.reserve_bytes),
        concurrent_loads_max: pool.concurrent_loads,
        waiting_requests_max: 4_096,
        cores: 1_024,
        parking: ParkingLimits::default(),
        ..node::settings(pool.memory_bytes, Parts::ALL)
    }
}

impl<'a> Machine<'a> {
    /// A machine that is started now.
    pub(super) fn new(pool: &'a Pool, demand: &'a Demand, start: Start<'_>, now: Instant, seed: u64) -> Self {
        let settings = gateway::Settings {
            queue_limit: pool.queue_limit,
            queue_limit_per_model: pool.queue_limit,
            parks: true,
            ..gateway::Settings::default()
        };
        let mut machine = Self {
            pool,
            demand,
            gateway: Gateway::new(settings),
            worker: Worker::new(worker_settings(pool), now),
            engines: BTreeMap::new(),
            running: BTreeMap::new(),
            parked: BTreeMap::new(),
            lacks: start.lacks,
            pinned: BTreeSet::new(),
            versions: Versions::of(start.switched.iter().copied()),
            computed_at: now,
            now,
            inner: VecDeque::new(),
            random: fastrand::Rng::with_seed(seed),
            notices: Vec::new(),
            counts: vec![Counts::default(); pool.team.len()],
        };
        let hours = pool.start_hour + now.since(Instant::ZERO).as_secs_f64() / 3_600.0;
        let (weekday, second) = ((hours / 24.0) as u64 % 7, (hours * 3_600.0) as u64 % 86_400);
        let wall = WallTime { weekday: weekday as u8, second: second as u32 };
        machine.tell_worker(worker::Event::WallTime { wall, asleep: Duration::ZERO });
        machine.tell_gateway(gateway::Event::WorkerUp { worker: WORKER });
        let mut ranks = vec![0; pool.team.len()];
        for (model, team) in demand.models.iter().enumerate() {
            if ranks[*team] < pool.team[*team].pinned {
                machine.pinned.insert(model);
            }
            ranks[*team] += 1;
            if start.models.contains(&model) {
                machine.configure(machine.versions.meaning(model), machine.pinned.contains(&model));
            }
        }
        machine
    }

    fn configure(&mut self, digest: Digest, pinned: bool) {
        let team = &self.pool.team[self.demand.models[model_of(digest)]];
        let Ok(name) = ModelName::parse(&format!("model-{}", model_of(digest))) else { return };
        self.tell_worker(worker::Event::Configure(ModelSpec {
            digest,
            name: name.clone(),
            pool: PoolName::default_pool(),
            priority: team.class,
            pin: pinned,
            parallel: team.parallel,
            keep_alive: None,
            artifact: digest,
            peak: Footprint::host(team.load_bytes()),
            steady: Footprint::host(team.model_bytes),
            measured: true,
            rewarm_seconds: team.load_seconds,
            memory_cap: None,
            targets: team.targets,
        }));
        self.tell_gateway(gateway::Event::Configure(Route {
            digest,
            name,
            priority: team.class,
            max_concurrency: team.parallel,
            critical_reserve: 0,
            parks: true,
            cold: ColdPolicy::Wait,
            rewarm_seconds: team.load_seconds,
            targets: team.targets,
        }));
    }

    /// What it knows of its models, for the machine that comes after it.
    pub(super) fn recollections(&self) -> Vec<Recollection> {
        self.worker.recollections(self.now)
    }

    /// What the machine before it knew.
    pub(super) fn remember(&mut self, now: Instant, models: Vec<Recollection>) {
        self.reach(now);
        self.tell_worker(worker::Event::Remembered { models });
    }

    /// Who holds which memory.
    pub(super) fn ledger(&self) -> Vec<LedgerLine> {
        self.worker.ledger(self.now)
    }

    /// Bytes that models may take here.
    pub(super) fn room_bytes(&self) -> u64 {
        self.pool.memory_bytes - self.pool.reserve_bytes
    }

    /// A request comes.
    pub(super) fn arrive(&mut self, now: Instant, request: RequestId, asked: &Request) {
        self.reach(now);
        let patience = Duration::from_secs_f64(self.pool.patience_seconds);
        self.admit_or_hold(request, asked, now + patience);
    }

    /// A request goes to the gateway, for the digest that its name means.
    fn admit(&mut self, request: RequestId, asked: &Request, digest: Digest, patience: Duration) {
        let team = &self.pool.team[asked.team];
        self.tell_gateway(gateway::Event::Arrived {
            request,
            tenant: TenantId::new(&team.name),
            digest,
            class: team.class,
            patience,
        });
    }

    /// Something that took time has ended.
    pub(super) fn happen(&mut self, now: Instant, event: worker::Event) {
        self.reach(now);
        self.tell_worker(event);
    }

    /// Weights that loads wait for are here.
    pub(super) fn fetched(&mut self, now: Instant, digest: Digest, seconds: f64, loads: &[Generation]) {
        self.reach(now);
        self.lacks.remove(&digest);
        for generation in loads {
            self.tell_worker(worker::Event::Verified { digest, generation: *generation, seconds });
        }
        self.go_on();
    }

    /// A moment that it asked for has come.
    pub(super) fn wake(&mut self, now: Instant) {
        self.reach(now);
        if self.worker.next_timer().is_some_and(|at| at <= now) {
            self.tell_worker(worker::Event::Timer);
        }
        if self.gateway.next_timer().is_some_and(|at| at <= now) {
            self.tell_gateway(gateway::Event::Timer);
        }
        self.go_on();
    }

    /// When it wants to be woken.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        let machines = self.worker.next_timer().into_iter().chain(self.gateway.next_timer());
        let timers = machines.chain(self.versions.next_timer());
        let slowdown = self.slowdown();
        let due = self.engines.values().filter(|engine| engine.is_busy()).filter_map(Engine::due_seconds);
        let due = due.min_by(f64::total_cmp).map(|seconds| self.computed_at + up(seconds * slowdown));
        timers.chain(due).min().map(|at| at.max(self.now))
    }

    /// How many times as long everything takes as it would alone.
    fn slowdown(&self) -> f64 {
        let busy = self.engines.values().filter(|engine| engine.is_busy()).count();
        if self.pool.shares_compute { busy.max(1) as f64 } else { 1.0 }
    }

    /// Lets engines compute up to now.
    fn reach(&mut self, now: Instant) {
        let seconds = now.since(self.computed_at).as_secs_f64() / self.slowdown();
        (self.computed_at, self.now) = (now, now);
        let (mut happened, mut held) = (Vec::new(), Vec::new());
        for (generation, engine) in self.engines.iter_mut().filter(|(_, engine)| engine.is_busy()) {
            engine.advance(seconds);
            held.extend(
                engine.take_due(&mut happened).into_iter().map(|threads| (engine.digest, *generation, threads)),
            );
        }
        for progress in happened {
            match progress {
                Progress::FirstToken(request) => self.first_token(request),
                Progress::Finished(request) => self.finished(request),
            }
        }
        for (digest, generation, threads) in held {
            self.tell_worker(worker::Event::ThreadsHeld { digest, generation, threads });
        }
    }

    fn first_token(&mut self, request: RequestId) {
        if let Some(running) = self.running.get_mut(&request) {
            running.output_started = true;
            self.notices.push(Notice::FirstToken(request));
        }
    }

    fn finished(&mut self, request: RequestId) {
        let (Some(running), Some(asked)) = (self.running.remove(&request), self.asked(request)) else { return };
        if let Some(engine) = self.engines.get_mut(&running.generation) {
            let said = u64::from(asked.prompt_tokens) + u64::from(asked.output_tokens);
            engine.prompts.keep(Beginning::Session(asked.session), said);
            let digest = engine.digest;
            self.tell_worker(worker::Event::Progress { digest, generation: running.generation });
        }
        self.versions.ended(request);
        self.notices.push(Notice::Finished(request, running.cached_tokens));
        self.tell_worker(worker::Event::Finished { request });
        let (prompt_tokens, completion_tokens) = (asked.prompt_tokens, asked.output_tokens);
        self.tell_gateway(gateway::Event::Finished { request, prompt_tokens, completion_tokens });
    }

    fn asked(&self, request: RequestId) -> Option<Request> {
        self.demand.requests.get(usize::try_from(request.0).ok()?).copied()
    }

    fn tell_gateway(&mut self, event: gateway::Event) {
        self.inner.push_back(Inner::Gateway(event));
        self.settle();
    }

    fn tell_worker(&mut self, event: worker::Event) {
        self.inner.push_back(Inner::Worker(event));
        self.settle();
    }

    /// Everything that follows at once, and what promotions make of it.
    fn settle(&mut self) {
        self.settle_machines();
        self.go_on();
    }

    fn settle_machines(&mut self) {
        while let Some(inner) = self.inner.pop_front() {
            match inner {
                Inner::Gateway(event) => {
                    let mut actions = Vec::new();
                    self.gateway.handle(self.now, event, &mut actions);
                    actions.into_iter().for_each(|action| self.do_for_gateway(action));
                }
                Inner::Worker(event) => {
                    let mut actions = Vec::new();
                    self.worker.handle(self.now, event, &mut actions);
                    actions.into_iter().for_each(|action| self.do_for_worker(action));
                }
            }
        }
    }

    fn next_gateway(&mut self, event: gateway::Event) {
        self.inner.push_back(Inner::Gateway(event));
    }

    fn next_worker(&mut self, event: worker::Event) {
        self.inner.push_back(Inner::Worker(event));
    }

    fn do_for_gateway(&mut self, action: gateway::Action) {
        match action {
            gateway::Action::Dispatch { request, digest, tenant, class, .. } => {
                self.next_worker(worker::Event::Assigned { request, digest, tenant, class });
            }
            gateway::Action::Cancel { request, cause, .. } => {
                self.next_worker(worker::Event::Cancelled { request, cause });
                if !self.running.contains_key(&request) {
                    // The worker drops who waits without a word.
                    self.next_gateway(gateway::Event::Failed { request });
                }
            }
            gateway::Action::Refuse { request, refusal } => {
                self.versions.ended(request);
                self.notices.push(Notice::Refused(request, refusal));
            }
            gateway::Action::Prewarm { digest, .. } => self.next_worker(worker::Event::LoadWanted { digest }),
            gateway::Action::Position { .. } => {}
        }
    }

    fn do_for_worker(&mut self, action: worker::Action) {
        use worker::{Action, Event};
        match action {
            Action::Verify { digest, generation } if self.lacks.contains(&digest) => {
                self.notices.push(Notice::Fetch(digest, Some(generation)));
            }
            Action::Verify { digest, generation } => {
                self.next_worker(Event::Verified { digest, generation, seconds: 0.0 });
            }
            Action::Load { digest, generation, threads, .. } => self.load(digest, generation, threads),
            Action::Stop { digest, generation } | Action::Kill { digest, generation } => {
                self.engines.remove(&generation);
                let gone = Event::Exited { digest, generation, exit: Exit::Stopped };
                self.later(self.pool.stop_seconds, gone);
            }
            Action::Start { request, digest, generation, start } => self.start(request, digest, generation, start),
            Action::Grant { .. } => {}
            Action::Abort { request, generation, .. } => self.abort(request, generation),
            Action::Park { request, generation, .. } => self.park(request, generation),
            Action::ParkTake { request, generation, .. } => self.park_take(request, generation),
            Action::ParkStop { request, generation, .. } => {
                if let Some(engine) = self.engines.get_mut(&generation) {
                    engine.set_stopped(request, false);
                }
            }
            Action::Reject { request, rejection } => self.reject(request, rejection),
            Action::SetThreads { digest, generation, threads } => {
                let engine = self.engines.get_mut(&generation);
                if engine.is_none_or(|engine| engine.set_threads(threads)) {
                    self.next_worker(Event::ThreadsHeld { digest, generation, threads });
                }
            }
            Action::Measure { digest, generation } => {
                let team = &self.pool.team[self.demand.models[model_of(digest)]];
                let steady = Footprint::host(team.model_bytes);
                self.next_worker(Event::Measured { digest, generation, steady });
            }
            Action::Tell(fact) => self.note(fact),
        }
    }

    fn later(&mut self, seconds: f64, event: worker::Event) {
        self.notices.push(Notice::Later(self.now + up(seconds), event));
    }

    fn load(&mut self, digest: Digest, generation: Generation, threads: u32) {
        let team = &self.pool.team[self.demand.models[model_of(digest)]];
        self.engines.insert(generation, Engine::new(digest, team, threads));
        let from = self.now.since(Instant::ZERO).as_secs_f64();
        let seconds = self.pool.load_seconds(from, team.load_seconds);
        let chance = self.pool.failing_share(from);
        if chance > 0.0 && self.random.f64() < chance {
            let error = LoadError { message: "the scenario says so".into(), permanent: false };
            return self.later(seconds, worker::Event::LoadFailed { digest, generation, error });
        }
        let (peak, steady) = (Footprint::host(team.load_bytes()), Footprint::host(team.model_bytes));
        let timings = LoadTimings { load_seconds: seconds, ..LoadTimings::default() };
        let loaded = worker::Event::Loaded { digest, generation, peak, steady, timings, working_bytes: 0 };
        self.later(seconds, loaded);
    }

    fn start(&mut self, request: RequestId, digest: Digest, generation: Generation, start: StartKind) {
        let (Some(asked), Some(engine)) = (self.asked(request), self.engines.get_mut(&generation)) else { return };
        self.versions.judge(request, digest);
        let team = &self.pool.team[asked.team];
        let resumed = self.parked.remove(&request);
        let sequence = resumed.unwrap_or_else(|| {
            let known = engine.prompts.find(Beginning::Session(asked.session)).min(u64::from(asked.said_tokens));
            let known = known.max(engine.prompts.find(Beginning::System));
            engine.prompts.keep(Beginning::System, u64::from(team.system_tokens));
            let tokens = u64::from(asked.prompt_tokens).saturating_sub(known).max(1);
            let first = core::mem::take(&mut engine.first_request_seconds);
            Sequence {
                cached_tokens: known,
                read_left_seconds: tokens as f64 / team.prefill_tokens_per_second + first,
                tokens_left: f64::from(asked.output_tokens),
                begun: false,
                waits_steps: 0,
                stopped: false,
            }
        });
        engine.push(request, Sequence { stopped: false, ..sequence });
        let Sequence { begun: output_started, cached_tokens, .. } = sequence;
        self.running.insert(request, Running { generation, output_started, cached_tokens });
        if resumed.is_none() {
            self.notices.push(Notice::Started(request, start));
        }
        self.next_gateway(gateway::Event::Started { request, start });
        self.next_worker(worker::Event::Prepared { request, prompt_tokens: asked.prompt_tokens });
        self.next_worker(worker::Event::Progress { digest, generation });
    }

    fn abort(&mut self, request: RequestId, generation: Generation) {
        if let Some(engine) = self.engines.get_mut(&generation) {
            engine.remove(request);
        }
        self.running.remove(&request);
        self.next_worker(worker::Event::Finished { request });
        self.next_gateway(gateway::Event::Failed { request });
    }

    fn park(&mut self, request: RequestId, generation: Generation) {
        let stopped = self.engines.get_mut(&generation).is_some_and(|engine| engine.set_stopped(request, true));
        let Some(asked) = self.asked(request).filter(|_| stopped) else {
            return self.next_worker(worker::Event::ParkRefused { request });
        };
        let tokens = u64::from(asked.prompt_tokens) + u64::from(asked.output_tokens);
        let bytes = tokens * self.pool.team[asked.team].kv_bytes_per_token;
        self.next_worker(worker::Event::ParkSized { request, bytes: bytes.max(1) });
    }

    fn park_take(&mut self, request: RequestId, generation: Generation) {
        let taken = self.engines.get_mut(&generation).and_then(|engine| engine.remove(request));
        self.running.remove(&request);
        self.parked.extend(taken.map(|sequence| (request, sequence)));
        self.next_worker(worker::Event::Parked { request });
    }

    fn reject(&mut self, request: RequestId, mut rejection: Rejection) {
        let running = self.running.remove(&request);
        self.parked.remove(&request);
        if let Rejection::EngineLost { output_started, .. } = &mut rejection {
            *output_started |= running.is_some_and(|running| running.output_started);
        }
        self.next_gateway(gateway::Event::Rejected { request, rejection });
    }

    fn note(&mut self, fact: Fact) {
        let team = fact.digest().and_then(|digest| self.demand.models.get(model_of(digest)));
        let Some(counts) = team.and_then(|team| self.counts.get_mut(*team)) else { return };
        match fact {
            Fact::StateChanged { digest, state } => {
                self.versions.told_state(digest, state);
                self.next_gateway(gateway::Event::WorkerState { worker: WORKER, digest, state });
            }
            Fact::LoadStarted { .. } => counts.loads += 1,
            Fact::LoadRefused { .. } => counts.failed_loads += 1,
            Fact::EvictionStarted { reason: EvictionReason::Memory, .. } => counts.evictions += 1,
            Fact::Preloaded { outcome: PreloadOutcome::Used, .. } => counts.preloads_used += 1,
            Fact::Preloaded { outcome: PreloadOutcome::Wasted, .. } => counts.preloads_wasted += 1,
            Fact::Parked { .. } => counts.parked += 1,
            _ => {}
        }
    }

    /// Every invariant of both machines, and that models hold no more than there is.
    pub(super) fn check(&self) -> Result<(), String> {
        self.versions.check()?;
        self.gateway.check().map_err(|violation| violation.to_string())?;
        self.worker.check(self.now).map_err(|violation| format!("{violation:?}"))?;
        let held: u64 = self.ledger().iter().map(|line| line.private.total()).sum();
        if held > self.room_bytes() {
            return Err(format!("{held} bytes of models in {}", self.room_bytes()));
        }
        Ok(())
    }
}

/// A time that is not shorter: what is due by then has happened.
fn up(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e9)) + Duration::from_nanos(1)
}
