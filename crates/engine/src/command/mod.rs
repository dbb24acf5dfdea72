//! An engine that is a command: any server with OpenAI's routes, started for a model and ended with it.
//!
//! The engine process is a host. It lets a guard start the command on a free port of the loopback interface, waits until
//! that answers, and then stands between the worker and it: jobs become HTTP requests, answers become the worker's
//! messages. It does not implement the port of the other engines, since there is nothing here to step. Reading order:
//! `variables`, `server`, `guard`, `user`, then `upstream`, `fields`, `translate`, `answer` and `requests`.

mod answer;
mod fields;
pub(crate) mod guard;
mod requests;
mod server;
mod translate;
mod upstream;
mod user;
pub mod variables;

use crate::{
    child::{self, EXIT_LOAD_FAILED, EXIT_PARENT_GONE, EXIT_PROTOCOL, EXIT_SERVER_ENDED},
    frame::{self, FrameError, FrameReader},
    port::{LoadFailure, LoadFault},
    protocol::{
        FromEngine, GenerateJob, LoadRequest, LoadedInfo, Output, PROTOCOL_VERSION, Prompt, Sampling, ToEngine,
    },
};
use requests::Desk;
use server::Server;
use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};
use tokio::{
    io::AsyncWriteExt,
    net::unix::{OwnedReadHalf, OwnedWriteHalf},
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    task::JoinSet,
};

/// How often a server with work is asked whether it lives.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Runs a host. Returns its exit code.
pub(crate) fn host(socket: std::os::unix::net::UnixStream) -> Result<u8, FrameError> {
    socket.set_nonblocking(true)?;
    // One thread: it starts the guard, and everything here waits rather than computes.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (read, write) = tokio::net::UnixStream::from_std(socket)?.into_split();
        let (outbox, messages) = unbounded_channel();
        let writer = tokio::spawn(write_messages(write, messages));
        let code = serve(FrameReader::new(read), outbox).await;
        // What was said last goes out before the process ends.
        let _ = writer.await;
        code
    })
}

async fn write_messages(mut socket: OwnedWriteHalf, mut messages: UnboundedReceiver<FromEngine>) {
    while let Some(message) = messages.recv().await {
        match frame::encode(&message) {
            Ok(frame) => {
                if socket.write_all(&frame).await.is_err() {
                    return;
                }
            }
            Err(error) => child::log(&format!("a message cannot be written: {error}")),
        }
    }
}

/// Messages of the worker.
type Inbox = FrameReader<OwnedReadHalf>;

async fn serve(mut inbox: Inbox, outbox: UnboundedSender<FromEngine>) -> Result<u8, FrameError> {
    let tell = |message| drop(outbox.send(message));
    let build = env!("CARGO_PKG_VERSION").to_owned();
    tell(FromEngine::Hello { protocol_version: PROTOCOL_VERSION, build, accelerators: Vec::new() });
    let load = match inbox.next().await? {
        Some(ToEngine::Load(load)) => load,
        Some(_) => {
            child::log("the first message must be load");
            return Ok(EXIT_PROTOCOL);
        }
        None => return Ok(EXIT_PARENT_GONE),
    };
    let began = Instant::now();
    let mut loading = Box::pin(load_server(&load, outbox.clone()));
    let loaded = loop {
        tokio::select! {
            loaded = &mut loading => break loaded,
            message = inbox.next() => match message? {
                Some(ToEngine::SetThreads { threads }) => tell(FromEngine::ThreadsHeld { threads }),
                // Dropping the server ends it and all that came of it.
                Some(ToEngine::Stop) => return Ok(0),
                Some(_) => return Ok(EXIT_PROTOCOL),
                None => return Ok(EXIT_PARENT_GONE),
            },
        }
    };
    drop(loading);
    let (server, desk, mut info) = match loaded {
        Ok(loaded) => loaded,
        Err(LoadFailure { message, fault }) => {
            child::log(&message);
            tell(FromEngine::LoadFailed { message, permanent: fault == LoadFault::Artifact });
            return Ok(EXIT_LOAD_FAILED);
        }
    };
    info.load_seconds = began.elapsed().as_secs_f64() - info.warm_up_seconds;
    tell(FromEngine::Loaded(info));
    Host { server, desk: Arc::new(desk), running: HashMap::new(), tasks: JoinSet::new(), looks: JoinSet::new() }
        .run(inbox)
        .await
}

/// Starts the server, waits for it, and asks it for a first token that nobody sees.
async fn load_server(
    load: &LoadRequest,
    outbox: UnboundedSender<FromEngine>,
) -> Result<(Server, Desk, LoadedInfo), LoadFailure> {
    let wanted = load.command.as_deref().ok_or_else(|| LoadFailure {
        message: "its runtime is not in the configuration of this server, or was defined anew: add [[runtime]] and start the \
                  server again"
            .into(),
        fault: LoadFault::Artifact,
    })?;
    let mut server = Server::start(load, wanted).await?;
    let served = server.ready(wanted).await?;
    let model = served.model.unwrap_or_else(|| wanted.name.clone());
    let desk = Desk { upstream: server.upstream, model, outbox, began: Instant::now(), beat_at: AtomicU64::new(0) };
    let warm_up = Instant::now();
    let generates = desk.warm_up().await;
    let info = LoadedInfo {
        architecture: wanted.runtime.name.clone(),
        context_tokens: served.context_tokens.unwrap_or(load.context_tokens),
        parallel: load.parallel,
        has_chat_template: true,
        generates,
        accelerator_bytes: vec![0; load.accelerators.len()],
        warm_up_seconds: warm_up.elapsed().as_secs_f64(),
        ..LoadedInfo::default()
    };
    Ok((server, desk, info))
}

impl Desk {
    /// Makes the server compute once, so that no caller pays for its first computation. Whether it generates text: a
    /// server of embeddings does not.
    async fn warm_up(&self) -> bool {
        let job = GenerateJob {
            prompt: Prompt::Text { text: "1".into() },
            choices: 1,
            max_tokens: Some(1),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: Vec::new(),
            ignore_end: false,
            stream: false,
            output: Output::default(),
            kv_domain: None,
        };
        let Ok(body) = translate::body(&job, &self.model) else { return false };
        let asked = self.upstream.send(hyper::Method::POST, translate::path(&job.prompt), Some(body)).await;
        match asked {
            Ok(answer) if answer.status.is_success() => answer.whole().await.is_ok(),
            _ => false,
        }
    }
}

/// A loaded model.
struct Host {
    server: Server,
    desk: Arc<Desk>,
    /// What cancels a request that runs.
    running: HashMap<u64, oneshot::Sender<()>>,
    tasks: JoinSet<u64>,
    /// Questions whether the server lives.
    looks: JoinSet<()>,
}

impl Host {
    async fn run(mut self, mut inbox: Inbox) -> Result<u8, FrameError> {
        let mut look_at = tokio::time::interval(ALIVE_INTERVAL);
        look_at.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = inbox.next() => match message? {
                    Some(ToEngine::Stop) => {
                        self.server.stop().await;
                        self.server.gone().await;
                        return Ok(0);
                    }
                    Some(ToEngine::Load(_)) => {
                        child::log("a process loads once");
                        return Ok(EXIT_PROTOCOL);
                    }
                    Some(message) => self.obey(message),
                    None => return Ok(EXIT_PARENT_GONE),
                },
                Some(ended) = self.tasks.join_next() => {
                    if let Ok(request) = ended {
                        self.running.remove(&request);
                    }
                },
                (how, _) = self.server.ended() => {
                    child::log(&format!("the server ended by itself: {how}"));
                    return Ok(EXIT_SERVER_ENDED);
                }
                Some(_) = self.looks.join_next() => {}
                _ = look_at.tick(), if !self.running.is_empty() => {
                    let (desk, alive) = (Arc::clone(&self.desk), self.server.alive());
                    // A request may compute for long without a word: then this is the sign of life.
                    self.looks.spawn(async move {
                        if alive.await {
                            desk.beat();
                        }
                    });
                },
            }
        }
    }

    fn obey(&mut self, message: ToEngine) {
        match message {
            ToEngine::Generate { request, job } => {
                let (desk, cancelled) = (Arc::clone(&self.desk), self.admit(request));
                self.tasks.spawn(async move {
                    desk.generate(request, &job, cancelled).await;
                    request
                });
            }
            ToEngine::Embed { request, inputs } => {
                let (desk, cancelled) = (Arc::clone(&self.desk), self.admit(request));
                self.tasks.spawn(async move {
                    desk.embed(request, &inputs, cancelled).await;
                    request
                });
            }
            ToEngine::Cancel { request } => drop(self.running.remove(&request)),
            // The server has threads of its own: what the worker leases it cannot be given or taken.
            ToEngine::SetThreads { threads } => self.desk.tell(FromEngine::ThreadsHeld { threads }),
            ToEngine::Load(_) | ToEngine::Stop => {}
            // What the server computes stays with it.
            ToEngine::Park { request } | ToEngine::ParkTake { request, .. } => {
                self.desk.tell(FromEngine::ParkRefused { request });
            }
            ToEngine::Resume { request, .. } => {
                self.desk.tell(crate::kv::not_resumed(request, "a command never parks"));
            }
            // The server keeps KV by itself.
            ToEngine::Grant { .. }
            | ToEngine::KvOpen(_)
            | ToEngine::KvComing { .. }
            | ToEngine::SaveGo { .. }
            | ToEngine::SaveSkip { .. }
            | ToEngine::SaveEnd { .. }
            | ToEngine::KvForget { .. }
            | ToEngine::ParkStop { .. } => {}
        }
    }

    fn admit(&mut self, request: u64) -> oneshot::Receiver<()> {
        let (cancel, cancelled) = oneshot::channel();
        self.running.insert(request, cancel);
        cancelled
    }
}
