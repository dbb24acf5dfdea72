//! The run loop: the only owner of the machine. It tells the machine what happens and does what the machine wants.

use crate::{
    config::{AgentConfig, AgentError, Artifacts, Clock, ModelConfig},
    handle::{AgentHandle, Assignment, Command, MemoryReport, log_path},
    kv::KvHandle,
    life::{self, Birth, Order},
    park,
    requests::{Requests, Task, Waiting},
    spare::Spare,
    timer::until,
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::sync::{
    broadcast,
    mpsc::{self, UnboundedReceiver, UnboundedSender},
    oneshot,
};
use warmset_core::{
    Digest, Instant, Machine, ModelName, WorkerId,
    inference::Reply,
    recording::Recorded,
    rollout::CanaryScore,
    worker::{Action, Event, Exit, Fact, Generation, LoadError, ModelState, Rejection, StartKind, Worker},
};
use warmset_engine::{child::Role, process::Launcher};

/// Facts kept for a receiver that falls behind.
pub const FACTS_KEPT: usize = 4096;
/// Waiting callers hear of their place and of a load's progress at most this often.
const TELL_INTERVAL: Duration = Duration::from_millis(100);
/// A spare is started this long after the last load, so as not to take the processor from the caller it was for.
const SPARE_PAUSE: Duration = Duration::from_millis(250);
/// Commands taken before timers are looked at again.
const COMMANDS_AT_ONCE: usize = 64;

/// Starts workers.
pub struct Agent;

impl Agent {
    /// Starts a worker that keeps these models. Call it within a Tokio runtime.
    pub fn start(config: AgentConfig, models: Vec<ModelConfig>) -> Result<AgentHandle, AgentError> {
        let logs = config.data_dir.join("logs");
        std::fs::create_dir_all(&logs).map_err(|source| AgentError::File { path: logs.clone(), source })?;
        let launcher = Launcher::new(config.program).map_err(AgentError::Thread)?;
        let now = config.clock.now();
        let recorded = Recorded::new(Worker::new(config.settings, now));
        let (sender, commands) = mpsc::unbounded_channel();
        let (facts, _) = broadcast::channel(FACTS_KEPT);
        let handle = AgentHandle {
            commands: sender.clone(),
            facts: facts.downgrade(),
            logs: logs.clone(),
            clock: config.clock,
            worker_type: config.worker_type.into(),
        };
        if let Some(kv) = &config.kv {
            kv.tell_pressure_to(sender.clone());
        }
        let mut run_loop = RunLoop {
            worker: config.worker,
            clock: config.clock,
            artifacts: config.artifacts,
            logs,
            launcher,
            kv: config.kv,
            recorded,
            facts,
            commands: sender,
            models: BTreeMap::new(),
            states: BTreeMap::new(),
            errors: BTreeMap::new(),
            lives: BTreeMap::new(),
            pids: BTreeMap::new(),
            verified_seconds: BTreeMap::new(),
            requests: Requests::default(),
            progress: BTreeMap::new(),
            progress_moved: BTreeSet::new(),
            canaries: BTreeMap::new(),
            load_waiters: Vec::new(),
            unload_waiters: Vec::new(),
            drain_waiters: Vec::new(),
            draining: false,
            keep_spare: config.spare,
            spare: None,
            spare_at: None,
            tell_at: None,
        };
        // Started before the first load, which takes it.
        run_loop.start_spare();
        for model in models {
            run_loop.obey(Command::Configure(Box::new(model)));
        }
        tokio::spawn(run_loop.run(commands));
        Ok(handle)
    }
}

struct RunLoop {
    worker: WorkerId,
    clock: Clock,
    artifacts: Arc<dyn Artifacts>,
    logs: PathBuf,
    launcher: Launcher,
    kv: Option<KvHandle>,
    recorded: Recorded<Worker>,
    facts: broadcast::Sender<(Instant, Fact)>,
    /// For tasks that report back.
    commands: UnboundedSender<Command>,
    models: BTreeMap<Digest, ModelConfig>,
    states: BTreeMap<Digest, ModelState>,
    /// Why the last load of a model failed.
    errors: BTreeMap<Digest, LoadError>,
    lives: BTreeMap<(Digest, Generation), UnboundedSender<Order>>,
    /// Process identities of the engines that live.
    pids: BTreeMap<(Digest, Generation), u32>,
    /// How long the check before a load took.
    verified_seconds: BTreeMap<(Digest, Generation), f64>,
    requests: Requests,
    /// Share of the weights read, of models being loaded.
    progress: BTreeMap<Digest, f32>,
    /// Models whose share has changed since waiting callers were last told.
    progress_moved: BTreeSet<Digest>,
    /// Models that have answered as they must since this worker began: they are not asked again.
    canaries: BTreeMap<Digest, CanaryScore>,
    load_waiters: Vec<(Digest, oneshot::Sender<Result<(), LoadError>>)>,
    unload_waiters: Vec<(Digest, oneshot::Sender<()>)>,
    drain_waiters: Vec<oneshot::Sender<()>>,
    draining: bool,
    keep_spare: bool,
    spare: Option<Spare>,
    spare_at: Option<tokio::time::Instant>,
    tell_at: Option<tokio::time::Instant>,
}

impl RunLoop {
    async fn run(mut self, mut commands: UnboundedReceiver<Command>) {
        let mut batch = Vec::with_capacity(COMMANDS_AT_ONCE);
        while !self.is_over() {
            let timer = self.recorded.machine().next_timer().map(|at| self.clock.until(at));
            let timer = timer.map(|pause| tokio::time::Instant::now() + pause);
            tokio::select! {
                taken = commands.recv_many(&mut batch, COMMANDS_AT_ONCE) => {
                    if taken == 0 {
                        break;
                    }
                    for command in batch.drain(..) {
                        self.obey(command);
                    }
                },
                () = until(timer) => self.happen(Event::Timer),
                () = until(self.tell_at) => self.tell_waiting(),
                () = until(self.spare_at) => self.start_spare(),
            }
        }
        // Whoever still waits for anything sees the channel close.
        for waiter in self.drain_waiters.drain(..) {
            let _ = waiter.send(());
        }
    }

    /// Drained: nothing is loaded and nobody waits.
    fn is_over(&self) -> bool {
        self.draining && self.lives.is_empty() && self.requests.is_empty()
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Configure(model) => self.configure(*model),
            Command::Load(digest, waiter) => self.load(digest, waiter),
            Command::Unload(digest, waiter) => self.unload(digest, waiter),
            Command::Assign(assignment) => self.assign(assignment),
            Command::Cancel(request, cause) => {
                self.happen(Event::Cancelled { request, cause });
                // The machine has dropped it silently; one that runs ends by its engine's word.
                self.requests.remove_waiting(request);
            }
            Command::Look(look) => look(self.recorded.machine(), self.clock.now()),
            Command::Record(tape) => self.recorded.record(self.clock.now(), tape),
            Command::Memory(answer) => self.report_memory(answer),
            Command::Drain(waiter) => {
                self.draining = true;
                self.drain_waiters.push(waiter);
                (self.spare, self.spare_at) = (None, None);
                self.happen(Event::Drain);
            }
            Command::Event(event) => self.happen(event),
            Command::Verified(digest, generation, seconds, outcome) => {
                self.verified_seconds.insert((digest, generation), seconds);
                self.happen(match outcome {
                    Ok(()) => Event::Verified { digest, generation, seconds },
                    Err(error) => Event::LoadFailed { digest, generation, error },
                });
                // A load that goes on has taken it.
                self.verified_seconds.remove(&(digest, generation));
            }
            Command::LoadProgress(digest, fraction) => {
                self.progress.insert(digest, fraction);
                self.progress_moved.insert(digest);
            }
            Command::CanaryPassed(digest, score) => {
                self.canaries.insert(digest, score);
            }
            Command::CanaryScore(digest, answer) => reply(answer, self.canaries.get(&digest).cloned()),
            Command::Answered(request) => {
                self.requests.remove(request);
                self.happen(Event::Finished { request });
            }
            Command::Parked(request, waiting) => {
                self.requests.park(request, waiting);
                self.happen(Event::Parked { request });
            }
            Command::EngineStarted(digest, generation, pid) => {
                self.pids.insert((digest, generation), pid);
            }
            Command::Engines(answer) => {
                reply(answer, self.pids.iter().map(|((digest, _), pid)| (*digest, *pid)).collect());
            }
            Command::LifeEnded(digest, generation, exit, lost) => {
                self.life_ended(digest, generation, exit);
                // Only now: they may come again at once, as new requests.
                for (replies, rejection) in lost {
                    // A caller that is gone needs no answer.
                    let _ = replies.send(Reply::Rejected(rejection));
                }
            }
        }
        self.schedule_telling();
        self.schedule_spare();
    }

    fn life_ended(&mut self, digest: Digest, generation: Generation, exit: Exit) {
        self.lives.remove(&(digest, generation));
        self.pids.remove(&(digest, generation));
        self.requests.forget_running(digest, generation);
        self.happen(Event::Exited { digest, generation, exit });
    }

    fn configure(&mut self, model: ModelConfig) {
        let spec = model.spec.clone();
        let before = self.models.insert(spec.digest, model.clone());
        if before.is_none_or(|before| before.canary != model.canary) {
            self.canaries.remove(&spec.digest);
        }
        self.happen(Event::Configure(spec));
    }

    fn load(&mut self, digest: Digest, waiter: oneshot::Sender<Result<(), LoadError>>) {
        if !self.models.contains_key(&digest) {
            let message = "this worker has no such model; add it first".to_owned();
            reply(waiter, Err(LoadError { message, permanent: true }));
            return;
        }
        self.happen(Event::PauseLifted { digest });
        self.happen(Event::LoadWanted { digest });
        self.load_waiters.push((digest, waiter));
        self.answer_load_waiters(digest);
    }

    fn unload(&mut self, digest: Digest, waiter: oneshot::Sender<()>) {
        self.happen(Event::UnloadWanted { digest });
        self.unload_waiters.push((digest, waiter));
        // It leaves now, or callers wait for its load: then it leaves after them, unless others come.
        if !matches!(self.state(digest), ModelState::Draining | ModelState::Unloading) {
            self.answer_unload_waiters(digest);
        }
    }

    fn assign(&mut self, assignment: Assignment) {
        let Assignment { request, digest, tenant, class, work, replies } = assignment;
        if self.requests.add(request, digest, class, Waiting { task: Task::Begin(work), replies }) {
            if let Some(fraction) = self.progress.get(&digest) {
                self.requests.tell_waiting(digest, &Reply::Loading { fraction: *fraction });
            }
            self.happen(Event::Assigned { request, digest, tenant, class });
        }
    }

    /// Tells the machine, then does what it wants, and what follows from that.
    fn happen(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        let mut actions = Vec::new();
        while let Some(event) = events.pop_front() {
            let forgotten = match &event {
                Event::Forget { digest } => self.models.remove(digest).map(|model| model.spec.digest),
                _ => None,
            };
            let now = self.clock.now();
            self.recorded.handle(now, event, &mut actions);
            for action in actions.drain(..) {
                self.act(now, action, &mut events);
            }
            if let Some(digest) = forgotten {
                self.drop_traces(digest);
            }
        }
        if let Some(kv) = &self.kv {
            kv.limit_host(self.recorded.machine().kv_limit_bytes());
        }
    }

    fn act(&mut self, now: Instant, action: Action, events: &mut VecDeque<Event>) {
        match action {
            Action::Verify { digest, generation } => self.verify(digest, generation),
            Action::Load { digest, generation, accelerators, memory_cap, threads } => {
                let verify_seconds = self.verified_seconds.remove(&(digest, generation)).unwrap_or(0.0);
                let Some(mut model) = self.models.get(&digest).cloned() else {
                    let message = "the model was removed while it was checked".to_owned();
                    let error = LoadError { message: message.clone(), permanent: true };
                    events.push_back(Event::LoadFailed { digest, generation, error });
                    let exit = warmset_core::worker::Exit::Crashed(message);
                    return events.push_back(Event::Exited { digest, generation, exit });
                };
                let engine = model.engine;
                if self.canaries.contains_key(&digest) {
                    model.canary = None;
                }
                let birth = Birth {
                    generation,
                    model,
                    accelerators,
                    memory_cap,
                    threads,
                    verify_seconds,
                    log: log_path(&self.logs, &digest),
                    // The spare has given up what a command needs.
                    spare: if Role::of(engine) == Role::Sealed { self.spare.take() } else { None },
                    launcher: self.launcher.clone(),
                    kv: self.kv.clone(),
                    commands: self.commands.clone(),
                    clock: self.clock,
                };
                let (orders, receiver) = mpsc::unbounded_channel();
                self.lives.insert((digest, generation), orders);
                self.progress.insert(digest, 0.0);
                self.progress_moved.insert(digest);
                self.spare_at = None;
                tokio::spawn(life::live(birth, receiver));
            }
            Action::Stop { digest, generation } => self.order(digest, generation, Order::Stop),
            Action::Kill { digest, generation } => self.order(digest, generation, Order::Kill),
            Action::Start { request, digest, generation, start } => {
                self.start(request, digest, generation, start, events);
            }
            Action::Grant { request } => {
                if let Some((digest, generation)) = self.requests.engine_of(request) {
                    self.order(digest, generation, Order::Grant { request });
                }
            }
            Action::Abort { request, digest, generation } => {
                self.order(digest, generation, Order::Abort { request });
            }
            Action::Park { request, digest, generation } => self.order(digest, generation, Order::Park { request }),
            Action::ParkTake { request, digest, generation, bytes } => {
                if let Some(orders) = self.lives.get(&(digest, generation)) {
                    park::give_memory(request, bytes, orders.clone());
                }
            }
            Action::ParkStop { request, digest, generation } => {
                self.order(digest, generation, Order::ParkStop { request });
            }
            Action::Reject { request, rejection } => self.requests.reject(request, rejection),
            Action::SetThreads { digest, generation, threads } => {
                self.order(digest, generation, Order::SetThreads { threads });
            }
            Action::Measure { digest, generation } => self.order(digest, generation, Order::Measure),
            Action::Tell(fact) => self.tell(now, fact),
        }
    }

    fn verify(&self, digest: Digest, generation: Generation) {
        let (artifacts, commands, clock) = (Arc::clone(&self.artifacts), self.commands.clone(), self.clock);
        tokio::spawn(async move {
            let began = clock.now();
            let checking = tokio::task::spawn_blocking(move || artifacts.verify(&digest));
            let outcome = checking.await.unwrap_or_else(|error| {
                Err(LoadError { message: format!("the check of the artifact failed: {error}"), permanent: false })
            });
            let seconds = clock.now().since(began).as_secs_f64();
            // Without a run loop there is nobody to tell.
            let _ = commands.send(Command::Verified(digest, generation, seconds, outcome));
        });
    }

    fn start(
        &mut self,
        request: warmset_core::RequestId,
        digest: Digest,
        generation: Generation,
        start: StartKind,
        events: &mut VecDeque<Event>,
    ) {
        let Some(caller) = self.requests.start(request, generation) else {
            // Its caller left between two events; the machine counts it as running.
            return events.push_back(Event::Finished { request });
        };
        let started = Reply::Started { start, worker: self.worker, digest };
        let unsent = match self.lives.get(&(digest, generation)) {
            Some(orders) => orders.send(Order::Start { request, caller, started }).err().map(|unsent| unsent.0),
            None => Some(Order::Start { request, caller, started }),
        };
        if let Some(Order::Start { caller, .. }) = unsent {
            // The engine has just ended; the machine hears of that next.
            let message = "the engine ended before it could begin".to_owned();
            let output_started = caller.task.output_started();
            let _ = caller.replies.send(Reply::Rejected(Rejection::EngineLost { message, output_started }));
        }
    }

    fn order(&self, digest: Digest, generation: Generation, order: Order) {
        if let Some(orders) = self.lives.get(&(digest, generation)) {
            // A life that is over has its end on the way to us.
            let _ = orders.send(order);
        }
    }

    /// Tells the world, and whoever waits for just this.
    fn tell(&mut self, now: Instant, fact: Fact) {
        match &fact {
            Fact::StateChanged { digest, state } => {
                self.states.insert(*digest, *state);
                if *state == ModelState::Ready {
                    self.errors.remove(digest);
                }
                if !matches!(state, ModelState::Verifying | ModelState::Loading) {
                    self.progress.remove(digest);
                    self.progress_moved.remove(digest);
                }
                self.answer_load_waiters(*digest);
                if matches!(state, ModelState::Absent | ModelState::Failed) {
                    self.answer_unload_waiters(*digest);
                    self.drop_traces(*digest);
                }
            }
            Fact::EvictionFinished { digest, .. } => self.answer_unload_waiters(*digest),
            Fact::LoadRefused { digest, error, .. } => {
                self.errors.insert(*digest, error.clone());
            }
            _ => {}
        }
        let name = fact.digest().and_then(|digest| self.models.get(&digest)).map(|model| &model.spec.name);
        log_fact(&fact, name);
        // Nobody need listen.
        let _ = self.facts.send((now, fact));
    }

    /// Nothing is kept of a model that is neither configured nor there.
    fn drop_traces(&mut self, digest: Digest) {
        let is_gone = matches!(self.state(digest), ModelState::Absent | ModelState::Failed);
        if is_gone && !self.models.contains_key(&digest) {
            self.states.remove(&digest);
            self.errors.remove(&digest);
            self.canaries.remove(&digest);
        }
    }

    fn state(&self, digest: Digest) -> ModelState {
        self.states.get(&digest).copied().unwrap_or(ModelState::Absent)
    }

    fn answer_load_waiters(&mut self, digest: Digest) {
        let outcome = match self.state(digest) {
            ModelState::Ready => Ok(()),
            ModelState::Failed => Err(self.errors.get(&digest).cloned().unwrap_or_else(|| LoadError {
                message: "the last load failed; see the model's log".to_owned(),
                permanent: false,
            })),
            ModelState::Absent => Err(LoadError {
                message: "the load was given up: the model was unloaded or removed meanwhile".to_owned(),
                permanent: false,
            }),
            _ => return,
        };
        for (_, waiter) in self.load_waiters.extract_if(.., |(other, _)| *other == digest) {
            reply(waiter, outcome.clone());
        }
    }

    fn answer_unload_waiters(&mut self, digest: Digest) {
        for (_, waiter) in self.unload_waiters.extract_if(.., |(other, _)| *other == digest) {
            reply(waiter, ());
        }
    }

    fn report_memory(&self, answer: oneshot::Sender<MemoryReport>) {
        let (machine, now) = (self.recorded.machine(), self.clock.now());
        let mut report = MemoryReport {
            capacity: machine.settings().capacity.clone(),
            reserve: machine.settings().reserve.clone(),
            pools: machine.memory(now),
            overhead_bytes: 0,
            oldest_pending_load: machine.oldest_pending_load(now),
        };
        let spares: Vec<u32> = self.spare.as_ref().and_then(Spare::pid).into_iter().collect();
        tokio::task::spawn_blocking(move || {
            match warmset_engine::measure::overhead(std::process::id(), &spares) {
                Ok(bytes) => report.overhead_bytes = bytes,
                Err(error) => tracing::warn!(%error, "the server's own memory cannot be measured"),
            }
            reply(answer, report);
        });
    }

    fn tell_waiting(&mut self) {
        self.tell_at = None;
        self.requests.tell_positions();
        for digest in std::mem::take(&mut self.progress_moved) {
            if let Some(fraction) = self.progress.get(&digest) {
                self.requests.tell_waiting(digest, &Reply::Loading { fraction: *fraction });
            }
        }
    }

    fn schedule_telling(&mut self) {
        if self.tell_at.is_none() && (self.requests.has_moved() || !self.progress_moved.is_empty()) {
            self.tell_at = Some(tokio::time::Instant::now() + TELL_INTERVAL);
        }
    }

    fn is_loading(&self) -> bool {
        self.states.values().any(|state| matches!(state, ModelState::Verifying | ModelState::Loading))
    }

    fn schedule_spare(&mut self) {
        let wanted = self.keep_spare && self.spare.is_none() && !self.draining && !self.is_loading();
        if !wanted {
            self.spare_at = None;
        } else if self.spare_at.is_none() {
            self.spare_at = Some(tokio::time::Instant::now() + SPARE_PAUSE);
        }
    }

    fn start_spare(&mut self) {
        self.spare_at = None;
        if self.keep_spare && !self.draining {
            self.spare = Some(Spare::start(&self.launcher, self.logs.join("spare.log")));
        }
    }
}

/// As many digits as people read.
fn thousandths(number: f64) -> f64 {
    (1_000.0 * number).round() / 1_000.0
}

/// Once, here: what happened to a model, for people. A model that was removed meanwhile has no name.
fn log_fact(fact: &Fact, name: Option<&ModelName>) {
    let model = name.map(tracing::field::display);
    match fact {
        Fact::LoadFinished { digest, timings, steady, .. } => {
            let (seconds, bytes) = (thousandths(timings.total_seconds()), steady.total_bytes());
            tracing::info!(model, %digest, seconds, bytes, "a model is ready");
        }
        Fact::LoadRefused { digest, error, .. } => {
            tracing::warn!(model, %digest, error = error.message, permanent = error.permanent, "a load failed");
        }
        Fact::EvictionStarted { digest, reason } => {
            tracing::info!(model, %digest, reason = reason.as_str(), "a model leaves memory");
        }
        Fact::EngineCrashed { digest, message } => tracing::warn!(model, %digest, message, "an engine died"),
        Fact::ThrashAlarm { pool, ratio, raised } => {
            tracing::warn!(%pool, ratio = thousandths(*ratio), raised, "a pool reloads what it has just evicted");
        }
        Fact::Parked { digest, bytes } => tracing::info!(model, %digest, bytes, "a request gave way"),
        Fact::Resumed { digest, parked } => {
            tracing::info!(model, %digest, seconds = thousandths(parked.as_secs_f64()), "a request that gave way goes on");
        }
        Fact::LoadStarted { .. }
        | Fact::EvictionFinished { .. }
        | Fact::SizeCorrected { .. }
        | Fact::Preloaded { .. }
        | Fact::Grown { .. }
        | Fact::StateChanged { .. } => {}
    }
}

/// Answers somebody who may be gone.
fn reply<T>(asker: oneshot::Sender<T>, answer: T) {
    let _ = asker.send(answer);
}
