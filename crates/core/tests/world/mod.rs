//! A virtual node around the real worker machine: engines that take time, grow, fail, hang, crash and ignore orders,
//! all from one seed. Time jumps from event to event.

#![allow(dead_code, unreachable_pub, clippy::allow_attributes, reason = "each test binary uses a part of the world")]

mod referee;

use referee::Referee;
use serde::{Serialize, de::DeserializeOwned};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::Duration,
};
use warmset_core::{
    Bytes, Digest, Footprint, Instant, Machine, MemoryVector, ModelName, PoolName, Priority, RequestId, TenantId,
    forecast::Parts,
    targets::Targets,
    worker::{
        Action, CancelCause, Event, Exit, Fact, Generation, LoadError, LoadTimings, ModelSpec, ModelState,
        ParkingLimits, Rejection, Settings, StartKind, Worker,
    },
};

/// What happened to a machine, and what it wanted done.
pub type Log<M> = [(Instant, <M as Machine>::Event, Vec<<M as Machine>::Action>)];

/// Tells a log again to a machine that is as that one was at its beginning. Now and then the machine is written down and
/// read back, as a recording begins in the middle of a run; events go through text, as all of them do there.
pub fn replay<M>(seed: u64, mut machine: M, log: &Log<M>)
where
    M: Machine<Event: Serialize + DeserializeOwned, Action: PartialEq + Debug> + Serialize + DeserializeOwned,
{
    for (number, (now, event, actions)) in log.iter().enumerate() {
        if number % 5 == 3 {
            let text = serde_json::to_string(&machine).expect("machines are plain data");
            machine = serde_json::from_str(&text).expect("machines are plain data");
        }
        let text = serde_json::to_string(event).expect("events are plain data");
        let event: M::Event = serde_json::from_str(&text).expect("events are plain data");
        let mut again = vec![];
        machine.handle(*now, event, &mut again);
        assert_eq!(again, *actions, "seed {seed}, event {number}");
    }
}

/// SplitMix64: small, seeded, good enough to choose schedules.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit.max(1)
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The seeds to play: one that was named, as many as were asked for, or the everyday number.
#[expect(clippy::disallowed_methods, reason = "the length of a test run is chosen by whoever runs it")]
pub fn seeds(everyday: u64) -> Vec<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    match number("WARMSET_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("WARMSET_SEEDS").unwrap_or(everyday)).collect(),
    }
}

pub fn at(milliseconds: u64) -> Instant {
    Instant::after(Duration::from_millis(milliseconds))
}

pub fn id(number: u8) -> Digest {
    Digest([number; 32])
}

/// 100 bytes of memory, one load at a time, two cores: small numbers that can be checked in the head.
pub fn settings() -> Settings {
    Settings {
        capacity: MemoryVector(vec![110, 50, 50]),
        reserve: MemoryVector(vec![10]),
        pools: vec![],
        cores: 2,
        concurrent_loads_max: 1,
        waiting_requests_max: 1_000,
        minimum_residency: Duration::from_secs(30),
        priority_protection: Duration::from_secs(300),
        demand_half_life: Duration::from_secs(600),
        load_deadline: Duration::from_secs(60),
        stop_deadline: Duration::from_secs(5),
        hang_deadline: Duration::from_secs(20),
        backoff_first: Duration::from_secs(1),
        backoff_max: Duration::from_secs(120),
        thread_quantum: Duration::from_millis(100),
        measure_interval: Duration::from_secs(10),
        thrash_window: Duration::from_secs(60),
        thrash_threshold: 0.1,
        forecast: Parts::ALL,
        parking: ParkingLimits { requests_max: 8, bytes_max: 30, times_max: 3, time_max: Duration::from_secs(20) },
    }
}

pub fn spec(number: u8, bytes: u64) -> ModelSpec {
    ModelSpec {
        digest: id(number),
        name: ModelName::parse(&format!("model-{number}")).expect("a good name"),
        pool: PoolName::default_pool(),
        priority: Priority::Standard,
        pin: false,
        parallel: 2,
        keep_alive: None,
        artifact: id(number),
        peak: Footprint::host(bytes),
        steady: Footprint::host(bytes),
        measured: false,
        rewarm_seconds: 1.0,
        memory_cap: None,
        targets: Targets::default(),
    }
}

/// How the engine of one model behaves, whatever its specification says.
#[derive(Debug, Clone)]
pub struct Behaviour {
    pub peak: Footprint,
    pub steady: Footprint,
    /// What it may use beside that for a while.
    pub working_bytes: Bytes,
    pub load: Duration,
    pub run: Duration,
    /// Loads that fail before one succeeds.
    pub failing_loads: u32,
    /// A failure is permanent.
    pub permanent: bool,
    /// Crashes while running the n-th request it starts, counted over all its lives.
    pub crash_at_request: Option<u32>,
    /// Never finishes the n-th request and makes no step any more.
    pub hang_at_request: Option<u32>,
    pub load_never_ends: bool,
    pub ignores_stop: bool,
    /// Bytes of a request that is parked; none where none can be.
    pub parked_bytes: Option<Bytes>,
}

impl Behaviour {
    pub fn plain(bytes: u64) -> Self {
        Self {
            peak: Footprint::host(bytes),
            steady: Footprint::host(bytes),
            working_bytes: 0,
            load: Duration::from_secs(1),
            run: Duration::from_millis(100),
            failing_loads: 0,
            permanent: false,
            crash_at_request: None,
            hang_at_request: None,
            load_never_ends: false,
            ignores_stop: false,
            parked_bytes: Some(1),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Finished {
        start: StartKind,
        at: Instant,
    },
    Rejected {
        rejection: Rejection,
        at: Instant,
    },
    /// The caller left and needs no answer.
    Gone,
}

/// What a worker lets its gateway know.
#[derive(Debug, Clone, PartialEq)]
pub enum Note {
    Started(RequestId, StartKind),
    Ended(RequestId),
    /// It was waiting when its caller left, and is forgotten.
    Dropped(RequestId),
    Rejected(RequestId, Rejection),
    State(Digest, ModelState),
}

#[derive(Debug, Clone)]
struct Process {
    digest: Digest,
    steady: Footprint,
    running: BTreeMap<RequestId, StartKind>,
    hung: bool,
}

pub struct World {
    pub worker: Worker,
    pub now: Instant,
    pub behaviours: BTreeMap<Digest, Behaviour>,
    pub answers: BTreeMap<RequestId, Answer>,
    pub facts: Vec<(Instant, Fact)>,
    pub log: Vec<(Instant, Event, Vec<Action>)>,
    /// For a gateway, oldest first.
    pub notes: Vec<Note>,
    referee: Referee,
    live: BTreeSet<RequestId>,
    queue: BTreeMap<(Instant, u64), Event>,
    processes: BTreeMap<Generation, Process>,
    requests: BTreeMap<RequestId, Digest>,
    started: BTreeMap<Digest, u32>,
    cancelled: BTreeSet<RequestId>,
    /// When a request that runs will end, and what is left of one that is stopped or parked.
    ends: BTreeMap<RequestId, (Instant, u64)>,
    left: BTreeMap<RequestId, Duration>,
    sequence: u64,
    last_request: u64,
}

impl World {
    pub fn new(settings: Settings) -> Self {
        Self {
            worker: Worker::new(settings, Instant::ZERO),
            now: Instant::ZERO,
            behaviours: BTreeMap::new(),
            answers: BTreeMap::new(),
            facts: vec![],
            log: vec![],
            notes: vec![],
            referee: Referee::default(),
            live: BTreeSet::new(),
            queue: BTreeMap::new(),
            processes: BTreeMap::new(),
            requests: BTreeMap::new(),
            started: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            ends: BTreeMap::new(),
            left: BTreeMap::new(),
            sequence: 0,
            last_request: 0,
        }
    }

    pub fn add(&mut self, spec: ModelSpec, behaviour: Behaviour) {
        self.behaviours.insert(spec.digest, behaviour);
        self.feed(Event::Configure(spec));
    }

    /// A model whose estimate is right.
    pub fn add_plain(&mut self, number: u8, bytes: u64) {
        self.add(spec(number, bytes), Behaviour::plain(bytes));
    }

    pub fn ask(&mut self, number: u8) -> RequestId {
        self.ask_as(number, Priority::Standard)
    }

    pub fn ask_as(&mut self, number: u8, class: Priority) -> RequestId {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        self.requests.insert(request, id(number));
        self.feed(Event::Assigned { request, digest: id(number), tenant: TenantId::anonymous(), class });
        request
    }

    /// The running engine of a model holds this much from now on.
    pub fn grow(&mut self, number: u8, bytes: u64) {
        for process in self.processes.values_mut().filter(|process| process.digest == id(number)) {
            process.steady = Footprint::host(bytes);
        }
    }

    pub fn cancel(&mut self, request: RequestId, cause: CancelCause) {
        if !self.answers.contains_key(&request) {
            self.cancelled.insert(request);
            self.answers.insert(request, Answer::Gone);
        }
        if !self.live.contains(&request) {
            self.notes.push(Note::Dropped(request));
        }
        self.feed(Event::Cancelled { request, cause });
    }

    /// Gives the machine one event, checks it, and does what it asks.
    pub fn feed(&mut self, event: Event) {
        if let Event::Parked { request } = &event {
            self.live.remove(request);
            for process in self.processes.values_mut() {
                process.running.remove(request);
            }
        }
        if let Event::Finished { request } = &event
            && self.live.remove(request)
        {
            self.notes.push(Note::Ended(*request));
        }
        let mut actions = vec![];
        self.worker.handle(self.now, event.clone(), &mut actions);
        self.referee.judge(self.now, &event, &actions, &self.worker);
        self.log.push((self.now, event, actions.clone()));
        if let Err(violation) = self.worker.check(self.now) {
            let (time, event, actions) = self.log.last().expect("just pushed");
            panic!("{violation:?} at {time:?} after {event:?} -> {actions:?}\n{:#?}", self.worker.ledger(self.now));
        }
        for action in actions {
            self.perform(action);
        }
    }

    fn later(&mut self, delay: Duration, event: Event) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), event);
    }

    /// When something happens next.
    pub fn next_at(&self) -> Option<Instant> {
        let queued = self.queue.first_key_value().map(|((at, _), _)| *at);
        let timer = self.worker.next_timer();
        // A gateway beside it may have moved the clock to the very instant of its timer.
        assert!(timer.is_none_or(|at| at >= self.now), "a timer in the past");
        queued.into_iter().chain(timer).min()
    }

    /// Lets the next thing happen.
    pub fn step(&mut self) {
        let Some(next) = self.next_at() else { return };
        self.now = next;
        match self.queue.first_key_value() {
            Some(((at, _), _)) if *at == next => {
                let (_, event) = self.queue.pop_first().expect("it was first");
                self.feed(event);
            }
            _ => self.feed(Event::Timer),
        }
    }

    /// Runs until `until`, or until nothing is left to happen.
    pub fn run_until(&mut self, until: Instant) {
        while self.next_at().is_some_and(|next| next <= until) {
            self.step();
        }
        self.now = self.now.max(until);
    }

    pub fn run_for(&mut self, duration: Duration) {
        self.run_until(self.now + duration);
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Verify { digest, generation } => {
                self.later(Duration::from_millis(1), Event::Verified { digest, generation, seconds: 0.001 });
            }
            Action::Load { digest, generation, memory_cap, .. } => self.load(digest, generation, memory_cap),
            Action::Stop { digest, generation } if self.behaviours[&digest].ignores_stop => {
                assert!(self.processes.contains_key(&generation));
            }
            Action::Stop { generation, .. } => self.end_process(generation, Exit::Stopped),
            Action::Kill { generation, digest } => {
                self.processes.entry(generation).or_insert(Process {
                    digest,
                    steady: Footprint::default(),
                    running: BTreeMap::new(),
                    hung: false,
                });
                self.end_process(generation, Exit::Crashed("signal 9".into()));
            }
            Action::Start { request, digest, generation, start } => self.start(request, digest, generation, start),
            Action::Abort { request, generation, .. } => {
                if self.processes.get(&generation).is_some_and(|process| !process.hung) {
                    self.later(Duration::from_millis(5), Event::Finished { request });
                }
            }
            Action::Park { request, digest, generation } => self.stop_request(request, digest, generation),
            Action::ParkTake { request, .. } => self.later(Duration::from_millis(3), Event::Parked { request }),
            Action::ParkStop { request, digest, generation } => self.run_on(request, digest, generation),
            Action::Reject { request, rejection } => {
                self.live.remove(&request);
                self.notes.push(Note::Rejected(request, rejection.clone()));
                self.answer(request, Answer::Rejected { rejection, at: self.now });
            }
            Action::SetThreads { digest, generation, threads } => {
                self.later(Duration::from_millis(2), Event::ThreadsHeld { digest, generation, threads });
            }
            Action::Measure { digest, generation } => {
                if let Some(process) = self.processes.get(&generation) {
                    let steady = process.steady.clone();
                    self.later(Duration::from_millis(1), Event::Measured { digest, generation, steady });
                }
            }
            Action::Grant { .. } => {}
            Action::Tell(fact) => {
                if let Fact::StateChanged { digest, state } = &fact {
                    self.notes.push(Note::State(*digest, *state));
                }
                self.facts.push((self.now, fact));
            }
        }
    }

    fn load(&mut self, digest: Digest, generation: Generation, memory_cap: Option<Bytes>) {
        let behaviour = self.behaviours.get_mut(&digest).expect("configured");
        if behaviour.load_never_ends {
            return;
        }
        let delay = behaviour.load;
        if behaviour.failing_loads > 0 {
            behaviour.failing_loads -= 1;
            let error = LoadError { message: "broken".into(), permanent: behaviour.permanent };
            self.later(delay, Event::LoadFailed { digest, generation, error });
            return;
        }
        let (peak, steady, working_bytes) = (behaviour.peak.clone(), behaviour.steady.clone(), behaviour.working_bytes);
        if let Some(cap) = memory_cap.filter(|cap| peak.private_host_bytes > *cap) {
            self.later(delay, Event::Exited { digest, generation, exit: Exit::OverCap(cap) });
            return;
        }
        let process = Process { digest, steady: steady.clone(), running: BTreeMap::new(), hung: false };
        self.processes.insert(generation, process);
        let timings = LoadTimings { load_seconds: delay.as_secs_f64(), ..LoadTimings::default() };
        self.later(delay, Event::Loaded { digest, generation, peak, steady, timings, working_bytes });
    }

    fn start(&mut self, request: RequestId, digest: Digest, generation: Generation, start: StartKind) {
        let behaviour = self.behaviours[&digest].clone();
        let started = self.started.entry(digest).or_default();
        *started += 1;
        let number = *started;
        let process = self.processes.get_mut(&generation).expect("only a live engine is given work");
        process.running.insert(request, start);
        self.live.insert(request);
        self.notes.push(Note::Started(request, start));
        if behaviour.crash_at_request == Some(number) {
            let exit = Exit::Crashed("signal 11".into());
            self.later(behaviour.run / 2, Event::Exited { digest, generation, exit });
        } else if behaviour.hang_at_request == Some(number) {
            process.hung = true;
        } else {
            let run = self.left.remove(&request).unwrap_or(behaviour.run);
            self.end_after(request, start, run);
            self.later(run / 2, Event::Progress { digest, generation });
            self.sequence += 1;
            self.queue.insert((self.now + run, self.sequence), Event::Prepared { request, prompt_tokens: 1 });
        }
    }

    /// A running request ends after so long, unless something comes between.
    fn end_after(&mut self, request: RequestId, start: StartKind, run: Duration) {
        self.later(run, Event::Finished { request });
        self.ends.insert(request, (self.now + run, self.sequence));
        self.note_finish(request, start, run);
    }

    /// A running request is stopped, or says that it cannot be.
    fn stop_request(&mut self, request: RequestId, digest: Digest, generation: Generation) {
        let bytes = self.behaviours[&digest].parked_bytes;
        let stuck = self.processes.get(&generation).is_none_or(|process| process.hung);
        if stuck {
            return;
        }
        let key = self.ends.get(&request).copied().filter(|key| self.queue.contains_key(key));
        match key.zip(bytes) {
            Some((key, bytes)) => {
                self.queue.remove(&key);
                self.left.insert(request, key.0.since(self.now));
                if matches!(self.answers.get(&request), Some(Answer::Finished { .. })) {
                    self.answers.remove(&request);
                }
                self.later(Duration::from_millis(2), Event::ParkSized { request, bytes });
            }
            None => self.later(Duration::from_millis(2), Event::ParkRefused { request }),
        }
    }

    /// A stopped request runs on, on the engine it is on.
    fn run_on(&mut self, request: RequestId, digest: Digest, generation: Generation) {
        let running = self.processes.get(&generation).and_then(|process| process.running.get(&request)).copied();
        if let (Some(start), Some(left)) = (running, self.left.remove(&request)) {
            self.end_after(request, start, left);
            self.later(left / 2, Event::Progress { digest, generation });
        }
    }

    /// The answer is only given if the request is still running when the time comes; see `settle_answers`.
    fn note_finish(&mut self, request: RequestId, start: StartKind, run: Duration) {
        if !self.answers.contains_key(&request) {
            self.answers.insert(request, Answer::Finished { start, at: self.now + run });
        }
    }

    fn end_process(&mut self, generation: Generation, exit: Exit) {
        let Some(process) = self.processes.remove(&generation) else { return };
        self.later(Duration::from_millis(10), Event::Exited { digest: process.digest, generation, exit });
    }

    fn answer(&mut self, request: RequestId, answer: Answer) {
        let known = self.answers.get(&request);
        let replaceable = match known {
            None => true,
            // A promise to finish that an engine's death has broken.
            Some(Answer::Finished { at, .. }) => *at > self.now,
            Some(Answer::Rejected { .. }) => panic!("{request:?} is answered twice"),
            Some(Answer::Gone) => return,
        };
        assert!(replaceable, "{request:?} is answered twice: {known:?}, {answer:?}");
        self.answers.insert(request, answer);
    }

    pub fn start_of(&self, request: RequestId) -> Option<StartKind> {
        match self.answers.get(&request) {
            Some(Answer::Finished { start, at }) if *at <= self.now => Some(*start),
            _ => None,
        }
    }

    pub fn finished_at(&self, request: RequestId) -> Option<Instant> {
        match self.answers.get(&request) {
            Some(Answer::Finished { at, .. }) if *at <= self.now => Some(*at),
            _ => None,
        }
    }

    pub fn rejection_of(&self, request: RequestId) -> Option<&Rejection> {
        match self.answers.get(&request) {
            Some(Answer::Rejected { rejection, .. }) => Some(rejection),
            _ => None,
        }
    }

    /// Every caller who stayed has exactly one answer.
    pub fn unanswered(&self) -> Vec<RequestId> {
        self.requests.keys().filter(|request| !self.answers.contains_key(request)).copied().collect()
    }

    pub fn loads_of(&self, number: u8) -> usize {
        let of_it =
            |fact: &&(Instant, Fact)| matches!(&fact.1, Fact::LoadStarted { digest, .. } if *digest == id(number));
        self.facts.iter().filter(of_it).count()
    }

    pub fn evictions(&self) -> Vec<(Digest, warmset_core::worker::EvictionReason)> {
        let evicted = self.facts.iter().filter_map(|(_, fact)| match fact {
            Fact::EvictionStarted { digest, reason } => Some((*digest, *reason)),
            _ => None,
        });
        evicted.collect()
    }

    pub fn is_ready(&self, number: u8) -> bool {
        let line = self.worker.ledger(self.now).into_iter().find(|line| line.digest == id(number));
        line.is_some_and(|line| line.state == warmset_core::worker::ModelState::Ready)
    }

    /// Host bytes held over all pools.
    pub fn held_host_bytes(&self) -> u64 {
        let pools = self.worker.memory(self.now);
        pools.iter().map(|pool| pool.loading.get(0) + pool.resident.get(0) + pool.unloading.get(0)).sum()
    }
}
