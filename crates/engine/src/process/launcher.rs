//! The one thread that starts engine processes.
//!
//! The parent-death signal follows the thread that forked, not its process: children of a pool thread would die when
//! the pool shrinks. So one thread starts them all and lives as long as any of them is wanted.

use super::{
    child::EngineProcess,
    limit,
    log::{EngineLog, pump},
};
use crate::{
    child::Role,
    frame::{FrameError, FrameReader},
    protocol::{FromEngine, PROTOCOL_VERSION},
};
use rustix::process::{Pid, PidfdFlags};
use std::{
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};
use tokio::sync::oneshot;

/// Environment that engines keep; everything else, secrets included, stays with the parent.
const KEPT_ENVIRONMENT: [&str; 2] = ["LD_LIBRARY_PATH", "RUST_LOG"];
/// How often a thread looks at a barrier before it sleeps (libgomp's own number for crowded cores). Never sleeping costs
/// engines that share cores up to fifty times their speed, sleeping at once costs a lone one a fifth of it, and a
/// thousand looks take about as long as the wake-up they save. docs/user-guide/measuring.md has the figures.
const BARRIER_SPINS: &str = "1000";
/// The hidden command that makes the program an engine process.
pub(crate) const ENGINE_ARGUMENT: &str = "engine";

/// How to start one.
#[derive(Debug, Clone)]
pub struct SpawnOptions {
    /// Where its standard output and error go.
    pub log: PathBuf,
    /// How long it may take to say `Hello`.
    pub hello_deadline: Duration,
}

/// Why a process could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The operating system refused.
    #[error("cannot start an engine process: {0}")]
    System(#[from] std::io::Error),
    /// It did not say `Hello` in time.
    #[error("an engine process did not start within {} ms; see its log", .0.as_millis())]
    Deadline(Duration),
    /// It ended or said something else first.
    #[error("an engine process ended before it was ready: {0}; see its log")]
    Ended(String),
    /// It speaks another version of the protocol.
    #[error("an engine process speaks version {found} of the protocol, this server {PROTOCOL_VERSION}; restart it")]
    Version {
        /// What it speaks.
        found: u32,
    },
}

impl From<FrameError> for SpawnError {
    fn from(error: FrameError) -> Self {
        Self::Ended(error.to_string())
    }
}

/// A process that the thread has just started.
#[derive(Debug)]
struct Started {
    child: Child,
    pidfd: OwnedFd,
}

type Order = (Box<Command>, oneshot::Sender<std::io::Result<Started>>);

/// Starts engine processes. Clones share the thread; it ends when all clones and all processes are dropped.
#[derive(Debug, Clone)]
pub struct Launcher {
    program: Arc<Path>,
    orders: mpsc::Sender<Order>,
}

impl Launcher {
    /// Starts the thread. `program` is started again as `program engine` for every engine process.
    pub fn new(program: PathBuf) -> std::io::Result<Self> {
        limit::sweep();
        let (orders, receiver) = mpsc::channel();
        std::thread::Builder::new().name("launcher".into()).spawn(move || launch(&receiver))?;
        Ok(Self { program: program.into(), orders })
    }

    /// Starts a process for any engine that needs nothing but its files, and waits until it is initialised.
    pub async fn spawn(&self, options: SpawnOptions) -> Result<EngineProcess, SpawnError> {
        self.spawn_as(Role::Sealed, options).await
    }

    /// Starts a process with the freedoms of a role and waits until it is initialised.
    pub async fn spawn_as(&self, role: Role, options: SpawnOptions) -> Result<EngineProcess, SpawnError> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let (log_reader, log_writer) = std::io::pipe()?;
        let mut command = Box::new(Command::new(&*self.program));
        command.arg(ENGINE_ARGUMENT).args(role.argument()).current_dir("/").process_group(0).env_clear();
        for name in KEPT_ENVIRONMENT {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.env("OMP_WAIT_POLICY", "passive").env("GOMP_SPINCOUNT", BARRIER_SPINS);
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(log_writer.try_clone()?).stderr(log_writer);

        let (sender, receiver) = oneshot::channel();
        let gone = || SpawnError::System(std::io::Error::other("the thread that starts engines has ended"));
        self.orders.send((command, sender)).map_err(|_| gone())?;
        let started = receiver.await.map_err(|_| gone())??;

        let log = Arc::new(Mutex::new(EngineLog::new(options.log)));
        let pipe = tokio::net::unix::pipe::Receiver::from_owned_fd(log_reader.into());
        let socket = tokio::net::UnixStream::from_std(ours);
        let (written, log_ends) = oneshot::channel();
        // A host's whole process tree holds the log's writing end: it is gone when the log ends.
        let tree = (role == Role::Host).then_some(log_ends);
        // From here on, dropping the process kills and reaps the child.
        let own = Arc::clone(&log);
        let mut process = EngineProcess::new(started.child, started.pidfd, socket, own, self.clone(), tree)?;
        let pipe = pipe?;
        tokio::spawn(async move {
            pump(pipe, log).await;
            // Nobody waits for the end of a sealed engine's log.
            let _ = written.send(());
        });
        match tokio::time::timeout(options.hello_deadline, hello(&mut process)).await {
            Ok(result) => result.map(|()| process),
            Err(_) => Err(SpawnError::Deadline(options.hello_deadline)),
        }
    }
}

async fn hello(process: &mut EngineProcess) -> Result<(), SpawnError> {
    match process.receive().await? {
        Some(FromEngine::Hello { protocol_version: PROTOCOL_VERSION, build, accelerators }) => {
            process.set_hello(build, accelerators);
            Ok(())
        }
        Some(FromEngine::Hello { protocol_version: found, .. }) => Err(SpawnError::Version { found }),
        Some(_) => Err(SpawnError::Ended("it did not begin with hello".into())),
        None => {
            let exit = process.exited().await;
            Err(SpawnError::Ended(exit.to_string()))
        }
    }
}

fn launch(orders: &mpsc::Receiver<Order>) {
    while let Ok((mut command, answer)) = orders.recv() {
        let started = start(&mut command);
        // The parent's ends of what the child inherits close with the command: the child's end is then the only one.
        drop(command);
        if let Err(Ok(unwanted)) = answer.send(started) {
            discard(unwanted);
        }
    }
}

fn start(command: &mut Command) -> std::io::Result<Started> {
    let mut child = command.spawn()?;
    let opened = i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| std::io::Error::other("a process without a number"))
        // Nobody else reaps this child, so its number is still its own.
        .and_then(|pid| Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?));
    match opened {
        Ok(pidfd) => Ok(Started { child, pidfd }),
        Err(error) => {
            end(&mut child);
            Err(error)
        }
    }
}

fn discard(mut started: Started) {
    end(&mut started.child);
}

/// Kills and reaps.
pub(super) fn end(child: &mut Child) {
    // Both fail only for a child that has been reaped already.
    let _ = child.kill();
    let _ = child.wait();
}

/// A reader of an engine's messages.
pub(super) type Messages = FrameReader<tokio::net::unix::OwnedReadHalf>;
