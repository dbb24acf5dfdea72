//! One engine process, from the order to load to the end of the process: a task of its own.
//!
//! What the engine says to callers goes from here straight to them. The run loop hears of starts, ends and counts. At
//! the end the loop is told, last of all, and tells those who have had no last answer.

use crate::{
    canary::{Asking, CANARY_REQUEST, Step},
    config::{Clock, ModelConfig},
    handle::Command,
    kv::{Client, KvHandle, KvOrder},
    park::ParkedMemory,
    requests::{Task, Waiting},
    spare::{self, Spare},
    timer::until,
};
use std::{
    collections::HashMap,
    future::Future,
    path::PathBuf,
    pin::Pin,
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use warmset_core::{
    Bytes, Digest, Footprint, RequestId,
    inference::{Reply, Work},
    worker::{CancelCause, Event, Exit, Generation, LoadError, LoadTimings, Rejection},
};
use warmset_engine::{
    child::Role,
    measure::Measurement,
    process::{EngineProcess, Launcher},
    protocol::{FromEngine, KvGrant, KvLayout, LoadRequest, LoadedInfo, ToEngine},
};

/// Measurements asked for within this time are made once.
const MEASURE_PAUSE: Duration = Duration::from_millis(50);
/// An engine that is to stop may take so long to save what it has begun to.
const SAVE_GRACE: Duration = Duration::from_secs(1);
/// An engine that has closed its socket is ending; this is how long it may take.
const END_GRACE: Duration = Duration::from_secs(2);

/// What the run loop tells a life.
pub(crate) enum Order {
    Start { request: RequestId, caller: Waiting, started: Reply },
    Grant { request: RequestId },
    Abort { request: RequestId },
    Park { request: RequestId },
    ParkInto { request: RequestId, parked: std::io::Result<ParkedMemory> },
    ParkStop { request: RequestId },
    SetThreads { threads: u32 },
    Measure,
    Stop,
    Kill,
}

/// What a life begins with.
pub(crate) struct Birth {
    pub(crate) generation: Generation,
    pub(crate) model: ModelConfig,
    /// Device indices; 1 is the first accelerator.
    pub(crate) accelerators: Vec<usize>,
    pub(crate) memory_cap: Option<Bytes>,
    pub(crate) threads: u32,
    pub(crate) verify_seconds: f64,
    pub(crate) log: PathBuf,
    pub(crate) spare: Option<Spare>,
    pub(crate) launcher: Launcher,
    pub(crate) kv: Option<KvHandle>,
    pub(crate) commands: UnboundedSender<Command>,
    pub(crate) clock: Clock,
}

/// A caller that an engine works for.
pub(crate) struct Caller {
    pub(crate) replies: UnboundedSender<Reply>,
    pub(crate) output_started: bool,
    /// It hung up, and the loop was told.
    gone: bool,
    /// Where its request is being put.
    pub(crate) parking: Option<ParkedMemory>,
}

impl Caller {
    fn new(waiting: &Waiting) -> Self {
        let (replies, output_started) = (waiting.replies.clone(), waiting.task.output_started());
        Self { replies, output_started, gone: false, parking: None }
    }
}

type Measuring = Pin<Box<dyn Future<Output = std::io::Result<Measurement>> + Send>>;

pub(crate) struct Life {
    birth: Birth,
    digest: Digest,
    began: Instant,
    pub(crate) callers: HashMap<RequestId, Caller>,
    /// What it knows of the KV tier.
    pub(crate) kv: Option<Client>,
    /// Facts about the model, once loaded.
    info: Option<LoadedInfo>,
    /// Seconds from the order to load to the model being loaded.
    loaded_after: Duration,
    reported_loaded: bool,
    /// The question that comes before callers.
    asking: Option<Asking>,
    canary_seconds: f64,
    measuring: Option<Measuring>,
    measure_at: Option<tokio::time::Instant>,
    /// It is to stop, when it has saved what it is saving or at the latest then.
    stop_by: Option<tokio::time::Instant>,
}

/// Lives a whole life. `orders` ends when the run loop does; then the process is killed.
pub(crate) async fn live(birth: Birth, mut orders: UnboundedReceiver<Order>) {
    let digest = birth.model.spec.digest;
    let kv = birth.kv.clone().map(Client::new);
    let mut life = Life {
        birth,
        digest,
        began: Instant::now(),
        callers: HashMap::new(),
        kv,
        info: None,
        loaded_after: Duration::ZERO,
        reported_loaded: false,
        asking: None,
        canary_seconds: 0.0,
        measuring: None,
        measure_at: None,
        stop_by: None,
    };
    let exit = match life.begin(&mut orders).await {
        Ok(process) => life.accompany(process, &mut orders).await,
        Err(exit) => exit,
    };
    orders.close();
    while let Ok(order) = orders.try_recv() {
        if let Order::Start { request, caller, .. } = order {
            life.callers.insert(request, Caller::new(&caller));
        }
    }
    let lost = life.lost(&exit);
    life.tell(Command::LifeEnded(digest, life.birth.generation, exit, lost));
}

impl Life {
    /// Gets a process, caps it, tells it what to load.
    async fn begin(&mut self, orders: &mut UnboundedReceiver<Order>) -> Result<EngineProcess, Exit> {
        let (launcher, log) = (self.birth.launcher.clone(), self.birth.log.clone());
        let (spare, role) = (self.birth.spare.take(), Role::of(self.birth.model.engine));
        let getting = async move {
            let waiting = match spare {
                Some(spare) => spare.take().await,
                None => None,
            };
            match waiting {
                Some(process) => Ok(process),
                None => spare::spawn(&launcher, role, log).await,
            }
        };
        tokio::pin!(getting);
        // Orders that come before there is a process are kept: the machine counts on an answer to each.
        let mut early = Vec::new();
        let process = loop {
            tokio::select! {
                process = &mut getting => break process,
                order = orders.recv() => match order {
                    // Dropping the future ends what it has started.
                    None | Some(Order::Kill | Order::Stop) => return Err(Exit::Crashed("given up as it started".into())),
                    Some(order) => early.push(order),
                },
            }
        };
        let process = process.map_err(|error| self.fail(error.to_string(), false))?;
        process.log_to(self.birth.log.clone());
        self.tell(Command::EngineStarted(self.digest, self.birth.generation, process.pid()));
        if let Some(bytes) = self.birth.memory_cap {
            match process.limit_memory(bytes) {
                Ok(limit) => tracing::debug!(digest = %self.digest, bytes, by = limit.as_str(), "memory capped"),
                Err(error) => {
                    return Err(self.fail(format!("cannot cap the memory of an engine: {error}"), false));
                }
            }
        }
        let to_accelerator = |device: &usize| u32::try_from(device.saturating_sub(1)).unwrap_or(u32::MAX);
        process.send(ToEngine::Load(LoadRequest {
            engine: self.birth.model.engine,
            files: self.birth.model.files.clone(),
            context_tokens: self.birth.model.context_tokens,
            parallel: self.birth.model.spec.parallel,
            threads: self.birth.threads,
            accelerators: self.birth.accelerators.iter().map(to_accelerator).collect(),
            command: self.birth.model.command.clone().map(Box::new),
        }));
        for order in early {
            self.obey(order, &process);
        }
        Ok(process)
    }

    /// Reports a load that failed before the engine could say so.
    fn fail(&self, message: String, permanent: bool) -> Exit {
        self.report(Event::LoadFailed {
            digest: self.digest,
            generation: self.birth.generation,
            error: LoadError { message: message.clone(), permanent },
        });
        Exit::Crashed(message)
    }

    /// Passes messages in both directions until the process is gone.
    async fn accompany(&mut self, mut process: EngineProcess, orders: &mut UnboundedReceiver<Order>) -> Exit {
        let exited = process.exited();
        tokio::pin!(exited);
        let mut socket_open = true;
        let mut orders_open = true;
        let mut end_by: Option<tokio::time::Instant> = None;
        loop {
            tokio::select! {
                order = orders.recv(), if orders_open => match order {
                    Some(order) => self.obey(order, &process),
                    None => {
                        orders_open = false;
                        process.kill();
                    }
                },
                message = process.receive(), if socket_open => match message {
                    Ok(Some(message)) => self.hear(message, &process),
                    Ok(None) => {
                        socket_open = false;
                        end_by = Some(tokio::time::Instant::now() + END_GRACE);
                    }
                    Err(error) => {
                        tracing::error!(digest = %self.digest, %error, "an engine broke the protocol and is killed");
                        socket_open = false;
                        process.kill();
                    }
                },
                exit = &mut exited => {
                    // What it said before it ended is still in the socket.
                    while socket_open && let Ok(Some(message)) = process.receive().await {
                        self.hear(message, &process);
                    }
                    return exit;
                },
                order = next_of(&mut self.kv) => {
                    let is_opened = matches!(order, KvOrder::Open { .. } | KvOrder::Nothing);
                    if let Some(kv) = &mut self.kv {
                        kv.obey(order, &process);
                    }
                    if is_opened {
                        self.prove(&process);
                    }
                    self.stop_if_saved(&process);
                },
                () = until(self.stop_by) => {
                    self.stop_by = None;
                    process.send(ToEngine::Stop);
                },
                measured = until_done(&mut self.measuring) => {
                    self.measuring = None;
                    self.report_measured(measured);
                },
                () = until(self.measure_at) => {
                    self.measure_at = None;
                    self.measuring = Some(self.measure(process.pid()));
                },
                () = until(end_by) => {
                    end_by = None;
                    process.kill();
                },
            }
        }
    }

    fn obey(&mut self, order: Order, process: &EngineProcess) {
        match order {
            Order::Start { request, caller, started } => {
                self.callers.insert(request, Caller::new(&caller));
                match caller.task {
                    Task::Begin(work) => {
                        // A caller that is gone shows at its first piece of text.
                        let _ = caller.replies.send(started);
                        if let (Some(kv), Work::Generate(job)) = (&mut self.kv, &work) {
                            kv.begin(request, job.kv_domain);
                        }
                        process.send(to_engine(request.0, work));
                    }
                    Task::GoOn(parked) => self.go_on(request, &parked, process),
                }
            }
            Order::Grant { request } => match &mut self.kv {
                Some(kv) => kv.grant(request, process),
                None => process.send(ToEngine::Grant { request: request.0, source: KvGrant::Recompute { known: 0 } }),
            },
            Order::Abort { request } => process.send(ToEngine::Cancel { request: request.0 }),
            Order::Park { request } => process.send(ToEngine::Park { request: request.0 }),
            Order::ParkInto { request, parked } => self.park_into(request, parked, process),
            Order::ParkStop { request } => process.send(ToEngine::ParkStop { request: request.0 }),
            Order::SetThreads { threads } => process.send(ToEngine::SetThreads { threads }),
            Order::Measure => {
                if self.measure_at.is_none() {
                    self.measure_at = Some(tokio::time::Instant::now() + MEASURE_PAUSE);
                }
            }
            Order::Stop => {
                self.stop_by = Some(tokio::time::Instant::now() + SAVE_GRACE);
                self.stop_if_saved(process);
            }
            Order::Kill => process.kill(),
        }
    }

    /// The model is loaded and has what it needs: it answers its canary, if it has one, and is measured.
    fn prove(&mut self, process: &EngineProcess) {
        match self.birth.model.canary.take() {
            Some(canary) => {
                let (asking, question) = Asking::begin(canary);
                self.asking = Some(asking);
                process.send(to_engine(CANARY_REQUEST, question));
            }
            None => self.measuring = Some(self.measure(process.pid())),
        }
    }

    /// An engine that is to stop puts out first what it has begun to.
    fn stop_if_saved(&mut self, process: &EngineProcess) {
        let saving = self.kv.as_ref().is_some_and(Client::is_saving);
        if !saving && self.stop_by.take().is_some() {
            process.send(ToEngine::Stop);
        }
    }

    fn hear(&mut self, message: FromEngine, process: &EngineProcess) {
        if Asking::concerns(&message) {
            return self.hear_of_canary(message, process);
        }
        let message = match &mut self.kv {
            Some(kv) => kv.hear(message),
            None => Some(message),
        };
        let Some(message) = message else { return };
        let (digest, generation) = (self.digest, self.birth.generation);
        match message {
            FromEngine::LoadProgress { fraction } => self.tell(Command::LoadProgress(digest, fraction)),
            FromEngine::Loaded(info) => {
                self.loaded_after = self.began.elapsed();
                let waits = match (&mut self.kv, &info.kv) {
                    (Some(kv), Some(layout)) => kv.open(digest, layout.clone(), process.build(), info.context_tokens),
                    _ => false,
                };
                self.info = Some(info);
                if !waits {
                    self.prove(process);
                }
            }
            FromEngine::LoadFailed { message, permanent } => {
                self.report(Event::LoadFailed { digest, generation, error: LoadError { message, permanent } });
            }
            FromEngine::Prepared { request, prompt_tokens, .. } => {
                self.report(Event::Prepared { request: RequestId(request), prompt_tokens });
            }
            FromEngine::Beat => self.report(Event::Progress { digest, generation }),
            FromEngine::ThreadsHeld { threads } => self.report(Event::ThreadsHeld { digest, generation, threads }),
            FromEngine::ParkSized { request, bytes } => {
                self.report(Event::ParkSized { request: RequestId(request), bytes });
            }
            FromEngine::ParkRefused { request } => self.park_refused(RequestId(request)),
            FromEngine::Parked { request } => self.has_parked(RequestId(request)),
            FromEngine::Hello { .. } => {}
            answer => self.hear_answer(answer),
        }
    }

    /// What an engine says to a caller.
    fn hear_answer(&mut self, message: FromEngine) {
        let (request, reply) = match message {
            FromEngine::Logprobs { request, choice, tokens } => (request, Reply::Logprobs { choice, tokens }),
            FromEngine::Delta { request, choice, text } => (request, Reply::Delta { choice, text }),
            FromEngine::ToolCall { request, choice, call, name } => (request, Reply::ToolCall { choice, call, name }),
            FromEngine::ToolArguments { request, choice, call, text } => {
                (request, Reply::ToolArguments { choice, call, text })
            }
            FromEngine::StopText { request, choice, text } => (request, Reply::StopText { choice, text }),
            FromEngine::ChoiceDone { request, choice, finish } => (request, Reply::ChoiceDone { choice, finish }),
            FromEngine::Done { request, usage, timings } => {
                return self.answer_last(RequestId(request), Reply::Done { usage, timings });
            }
            FromEngine::Embedded { request, vectors, prompt_tokens } => {
                return self.answer_last(RequestId(request), Reply::Embedded { vectors, prompt_tokens });
            }
            FromEngine::Failed { request, kind, message, param } => {
                return self.answer_last(RequestId(request), Reply::Failed { kind, message, param });
            }
            _ => return,
        };
        self.answer(RequestId(request), reply);
    }

    fn hear_of_canary(&mut self, message: FromEngine, process: &EngineProcess) {
        let Some(asking) = &mut self.asking else { return };
        match asking.hear(message) {
            Step::Going(None) => {}
            Step::Going(Some(order)) => process.send(order),
            Step::Over(verdict) => {
                self.asking = None;
                match verdict {
                    Ok(score) => {
                        self.canary_seconds = score.seconds;
                        self.tell(Command::CanaryPassed(self.digest, score));
                        // What it computed is part of what it holds.
                        self.measuring = Some(self.measure(process.pid()));
                    }
                    Err(reason) => {
                        self.fail(reason, false);
                    }
                }
            }
        }
    }

    fn answer(&mut self, request: RequestId, reply: Reply) {
        // The engine may still speak of a request that was answered already.
        let Some(caller) = self.callers.get_mut(&request) else { return };
        caller.output_started = true;
        if caller.replies.send(reply).is_err() && !std::mem::replace(&mut caller.gone, true) {
            self.tell(Command::Cancel(request, CancelCause::Disconnected));
        }
    }

    pub(crate) fn answer_last(&mut self, request: RequestId, reply: Reply) {
        if let Some(caller) = self.callers.remove(&request) {
            if let Some(kv) = &mut self.kv {
                let done = match &reply {
                    Reply::Done { usage, timings } => Some((usage, timings)),
                    _ => None,
                };
                kv.end(request, done);
            }
            // A caller that is gone needs no answer.
            let _ = caller.replies.send(reply);
            self.tell(Command::Answered(request));
        }
    }

    /// Whoever is still waiting for this engine has lost it. The loop tells them, when it has forgotten their requests:
    /// they may come again at once.
    fn lost(&mut self, exit: &Exit) -> Vec<(UnboundedSender<Reply>, Rejection)> {
        let message = match exit {
            Exit::Stopped => "the engine stopped".to_owned(),
            Exit::Crashed(_) | Exit::OverCap(_) => format!("the engine ended: {exit}"),
        };
        let rejected = |caller: Caller| {
            let rejection = Rejection::EngineLost { message: message.clone(), output_started: caller.output_started };
            (caller.replies, rejection)
        };
        self.callers.drain().map(|(_, caller)| rejected(caller)).collect()
    }

    /// Reads the figures of the operating system, on a thread that may block.
    fn measure(&self, pid: u32) -> Measuring {
        let (files, role) = (self.birth.model.files.clone(), Role::of(self.birth.model.engine));
        let reading = tokio::task::spawn_blocking(move || match role {
            Role::Host => Measurement::of_tree(pid, &files),
            Role::Sealed | Role::Guard => Measurement::of(pid, &files),
        });
        Box::pin(async move { reading.await.map_err(std::io::Error::other).flatten() })
    }

    fn report_measured(&mut self, measured: std::io::Result<Measurement>) {
        let (digest, generation) = (self.digest, self.birth.generation);
        let Some(info) = &self.info else { return };
        let measured = match measured {
            Ok(measured) => measured,
            Err(error) => {
                // Most likely it has just ended, and its end is reported as such.
                if error.kind() == std::io::ErrorKind::NotFound {
                    tracing::debug!(%digest, %error, "an engine that has ended is not measured");
                } else {
                    tracing::warn!(%digest, %error, "an engine cannot be measured");
                }
                if !self.reported_loaded {
                    self.fail(format!("cannot measure the loaded engine: {error}"), false);
                }
                return;
            }
        };
        let (mut steady, mut peak) = (measured.steady(&info.accelerator_bytes), measured.peak(&info.accelerator_bytes));
        if let Some(declared) = info.declared_host_bytes {
            let footprint = |bytes| Footprint { private_host_bytes: bytes, shared_host_bytes: 0, ..steady.clone() };
            (steady, peak) = (footprint(declared.steady_bytes), footprint(declared.peak_bytes));
        }
        if std::mem::replace(&mut self.reported_loaded, true) {
            return self.report(Event::Measured { digest, generation, steady });
        }
        let load_seconds = (self.loaded_after.as_secs_f64() - info.warm_up_seconds).max(0.0);
        let speed = self.birth.clock.speed();
        let timings = LoadTimings {
            fetch_seconds: 0.0,
            verify_seconds: self.birth.verify_seconds,
            load_seconds: speed.inside_seconds(load_seconds),
            warm_up_seconds: speed.inside_seconds(info.warm_up_seconds),
            canary_seconds: speed.inside_seconds(self.canary_seconds),
        };
        // The kernel counts the peak in batches and may say less than what is there now.
        let peak = peak.larger(&steady);
        // Where a sequence's state is put together.
        let state_bytes = |layout: &KvLayout| layout.state.state_bytes(u64::from(info.context_tokens));
        let working_bytes = info.kv.as_ref().map_or(0, state_bytes);
        self.report(Event::Loaded { digest, generation, peak, steady, timings, working_bytes });
    }

    pub(crate) fn report(&self, event: Event) {
        self.tell(Command::Event(event));
    }

    pub(crate) fn tell(&self, command: Command) {
        // Without a run loop there is nobody to tell; the orders have ended too.
        let _ = self.birth.commands.send(command);
    }
}

fn to_engine(request: u64, work: Work) -> ToEngine {
    match work {
        Work::Generate(job) => ToEngine::Generate { request, job },
        Work::Embed { inputs } => ToEngine::Embed { request, inputs },
    }
}

/// What the KV tier wants of the engine next; never without a tier.
async fn next_of(kv: &mut Option<Client>) -> KvOrder {
    match kv {
        Some(kv) => kv.next().await,
        None => std::future::pending().await,
    }
}

/// Resolves when the measurement is done; never without one.
async fn until_done(measuring: &mut Option<Measuring>) -> std::io::Result<Measurement> {
    match measuring {
        Some(measuring) => measuring.await,
        None => std::future::pending().await,
    }
}
