//! One engine process: its socket, its end, its limits.

use super::{
    launcher::{self, Launcher, Messages},
    limit::{MemoryGroup, MemoryLimit},
    log::EngineLog,
    outgoing::{Outgoing, write_messages},
};
use crate::{
    child::{DESCRIPTORS_MAX, EXIT_OUT_OF_MEMORY, EXIT_SERVER_ENDED},
    frame::{FrameError, FrameReader},
    protocol::{FromEngine, ToEngine},
};
use rustix::process::{Pid, Signal};
use std::{
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    path::PathBuf,
    process::{Child, ExitStatus},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    sync::{mpsc, oneshot, watch},
};
use warmset_core::{Bytes, worker::Exit};

/// How long the processes of a command may outlive the one that keeps them, which kills them first of all.
const TREE_END_DEADLINE: Duration = Duration::from_secs(30);

/// What several tasks know of one process.
#[derive(Debug)]
struct Shared {
    pidfd: OwnedFd,
    stop_asked: AtomicBool,
    killed: AtomicBool,
    group: Mutex<Group>,
}

/// The cgroup of a process.
#[derive(Debug)]
enum Group {
    None,
    Some(MemoryGroup),
    /// No cgroup can be made here; the limit on its data segment is this.
    DataSegment(Bytes),
    /// The process is gone; a group made now would stay behind.
    Over,
}

/// Kills one process; clones may be kept elsewhere. Does nothing once it is gone.
#[derive(Debug, Clone)]
pub struct EngineKiller(Arc<Shared>);

impl EngineKiller {
    /// Kills it. Its end is reported by [`EngineProcess::exited`] as always.
    pub fn kill(&self) {
        self.0.killed.store(true, Ordering::SeqCst);
        // The descriptor names this very process; the only failure is that it is gone.
        let _ = rustix::process::pidfd_send_signal(&self.0.pidfd, Signal::KILL);
    }
}

/// Sends messages to one process, without waiting.
#[derive(Debug, Clone)]
pub struct EngineSender {
    messages: mpsc::UnboundedSender<Outgoing>,
    shared: Arc<Shared>,
}

impl EngineSender {
    /// Sends a message. One that cannot be delivered is dropped: the end of the process is reported elsewhere.
    pub fn send(&self, message: ToEngine) {
        if message == ToEngine::Stop {
            self.shared.stop_asked.store(true, Ordering::SeqCst);
        }
        let _ = self.messages.send(Outgoing::Message(message));
    }

    /// Sends copies of descriptors along with the next message, at most [`DESCRIPTORS_MAX`]. Only to a process that
    /// computes by itself.
    pub fn send_descriptors(&self, descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(std::io::Error::other("more descriptors than any message needs"));
        }
        let copies = descriptors.iter().map(|descriptor| descriptor.try_clone_to_owned());
        let copies = copies.collect::<std::io::Result<Vec<OwnedFd>>>()?;
        // As for messages.
        let _ = self.messages.send(Outgoing::Descriptors(copies));
        Ok(())
    }
}

/// An initialised engine process. Dropping it kills it.
#[derive(Debug)]
pub struct EngineProcess {
    pid: u32,
    build: String,
    accelerators: Vec<String>,
    sender: EngineSender,
    messages: Messages,
    shared: Arc<Shared>,
    exit: watch::Receiver<Option<Exit>>,
    log: Arc<Mutex<EngineLog>>,
    /// The thread that started it must not end before it.
    _launcher: Launcher,
}

impl EngineProcess {
    pub(super) fn new(
        mut child: Child,
        pidfd: OwnedFd,
        socket: std::io::Result<UnixStream>,
        log: Arc<Mutex<EngineLog>>,
        launcher: Launcher,
        tree: Option<oneshot::Receiver<()>>,
    ) -> std::io::Result<Self> {
        let parts = socket.and_then(|socket| Ok((socket, watch_for_end(rustix::io::dup(&pidfd)?)?)));
        let (socket, watched) = match parts {
            Ok(parts) => parts,
            Err(error) => {
                launcher::end(&mut child);
                return Err(error);
            }
        };
        let (read, write) = socket.into_split();
        let shared = Arc::new(Shared {
            pidfd,
            stop_asked: AtomicBool::new(false),
            killed: AtomicBool::new(false),
            group: Mutex::new(Group::None),
        });
        let (exit_sender, exit) = watch::channel(None);
        let pid = child.id();
        let reaper = Reaper { child, shared: Arc::clone(&shared), tree };
        tokio::spawn(reaper.wait(watched, exit_sender));
        let (messages, queue) = mpsc::unbounded_channel();
        tokio::spawn(write_messages(write, queue));
        let sender = EngineSender { messages, shared: Arc::clone(&shared) };
        Ok(Self {
            pid,
            build: String::new(),
            accelerators: Vec::new(),
            sender,
            messages: FrameReader::new(read),
            shared,
            exit,
            log,
            _launcher: launcher,
        })
    }

    pub(super) fn set_hello(&mut self, build: String, accelerators: Vec<String>) {
        self.build = build;
        self.accelerators = accelerators;
    }

    /// Its number. Valid until [`EngineProcess::exited`] has resolved.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The version of the program it runs.
    pub fn build(&self) -> &str {
        &self.build
    }

    /// Names of the accelerators it sees.
    pub fn accelerators(&self) -> &[String] {
        &self.accelerators
    }

    /// Sends a message, without waiting.
    pub fn send(&self, message: ToEngine) {
        self.sender.send(message);
    }

    /// Sends copies of descriptors along with the next message: see [`EngineSender::send_descriptors`].
    pub fn send_descriptors(&self, descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        self.sender.send_descriptors(descriptors)
    }

    /// A sender that may be kept elsewhere.
    pub fn sender(&self) -> EngineSender {
        self.sender.clone()
    }

    /// The next message; none once the process has closed its socket, which is when it ends. A call that is dropped
    /// loses nothing.
    pub async fn receive(&mut self) -> Result<Option<FromEngine>, FrameError> {
        match self.messages.next().await {
            // What a process leaves half said when it dies is not the worker's trouble.
            Err(FrameError::Truncated | FrameError::Io(_)) => Ok(None),
            other => other,
        }
    }

    /// Waits until the process is gone and reaped.
    pub fn exited(&self) -> impl Future<Output = Exit> + Send + 'static {
        let mut exit = self.exit.clone();
        async move {
            match exit.wait_for(Option::is_some).await.map(|exit| exit.clone()) {
                Ok(Some(exit)) => exit,
                // The task that waits was dropped with its runtime, and has killed the process.
                Ok(None) | Err(_) => Exit::Crashed("killed as the server ended".into()),
            }
        }
    }

    /// Whether it is known to be gone.
    pub fn is_gone(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Something that can kill it.
    pub fn killer(&self) -> EngineKiller {
        EngineKiller(Arc::clone(&self.shared))
    }

    /// Kills it.
    pub fn kill(&self) {
        self.killer().kill();
    }

    /// Lets it take at most `bytes` of host memory; over the cap, it alone dies. Says by what means.
    ///
    /// Writes a few small files of the kernel: call it where blocking for less than a millisecond is fine.
    pub fn limit_memory(&self, bytes: Bytes) -> Result<MemoryLimit, std::io::Error> {
        let mut group = self.shared.group.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*group, Group::Over) {
            return Err(std::io::Error::other("the engine process has ended"));
        }
        match MemoryGroup::create(self.pid, bytes) {
            Ok(created) => {
                let limit = created.limit();
                *group = Group::Some(created);
                Ok(limit)
            }
            Err(error) => {
                tracing::debug!(%error, "no cgroup for an engine; limits its data segment instead");
                let limit = MemoryLimit::set_resource_limit(self.pid, bytes)?;
                *group = Group::DataSegment(bytes);
                Ok(limit)
            }
        }
    }

    /// Writes its log to another file from now on.
    pub fn log_to(&self, path: PathBuf) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).move_to(path);
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        if !self.is_gone() {
            self.kill();
        }
    }
}

/// Registers a process descriptor, which becomes readable when the process is gone.
#[expect(unsafe_code, reason = "registering a descriptor has no safe interface")]
fn watch_for_end(pidfd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` gives the same open descriptor for its whole life, and the `AsyncFd` owns it.
    let registered = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
    registered.map_err(Into::into)
}

/// What a cap on memory did to a process that has ended.
#[derive(Debug, Clone, Copy)]
enum Cap {
    None,
    /// The kernel killed it for going over.
    KilledProcess(Bytes),
    /// It got no memory beyond this many bytes, whatever it made of that.
    RefusesMemory(Bytes),
}

/// Waits for one child. Dropped before its end, it kills and reaps it.
struct Reaper {
    child: Child,
    shared: Arc<Shared>,
    /// Resolves when the processes that it started are gone too; none if it starts none.
    tree: Option<oneshot::Receiver<()>>,
}

impl Reaper {
    async fn wait(mut self, watched: AsyncFd<OwnedFd>, exit: watch::Sender<Option<Exit>>) {
        let status = loop {
            // Readable when the process is gone; an error of the descriptor itself leaves only the blocking way.
            let ready = watched.readable().await;
            match self.child.try_wait() {
                Ok(Some(status)) => break Ok(status),
                Ok(None) => {
                    if let Ok(mut guard) = ready {
                        guard.clear_ready();
                    }
                }
                Err(error) => break Err(error),
            }
        };
        if let Some(tree) = self.tree.take()
            && tokio::time::timeout(TREE_END_DEADLINE, tree).await.is_err()
        {
            let pid = self.child.id();
            tracing::error!(
                pid,
                "processes of an engine that has ended are still there; their memory is counted as free"
            );
        }
        let cap = self.close_group();
        let described = match status {
            Ok(status) => self.describe(status, cap),
            Err(error) => Exit::Crashed(format!("lost track of it: {error}")),
        };
        exit.send_replace(Some(described));
    }

    /// Removes the cgroup; returns the cap that was in force.
    fn close_group(&self) -> Cap {
        let mut group = self.shared.group.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *group, Group::Over) {
            Group::Some(group) if group.killed_over_cap() => Cap::KilledProcess(group.bytes()),
            Group::DataSegment(bytes) => Cap::RefusesMemory(bytes),
            Group::Some(_) | Group::None | Group::Over => Cap::None,
        }
    }

    fn describe(&self, status: ExitStatus, cap: Cap) -> Exit {
        match (cap, status.code()) {
            (Cap::KilledProcess(bytes), _) => return Exit::OverCap(bytes),
            (Cap::RefusesMemory(bytes), Some(code)) if code == i32::from(EXIT_OUT_OF_MEMORY) => {
                return Exit::OverCap(bytes);
            }
            _ => {}
        }
        if let Some(signal) = status.signal() {
            let by_us = if self.shared.killed.load(Ordering::SeqCst) { " from the worker" } else { "" };
            return Exit::Crashed(format!("{}{by_us}", signal_name(signal)));
        }
        match status.code() {
            Some(0) if self.shared.stop_asked.load(Ordering::SeqCst) => Exit::Stopped,
            Some(code) if code == i32::from(EXIT_OUT_OF_MEMORY) => {
                Exit::Crashed("it got no more memory; its log says for what (`warmset model logs`)".into())
            }
            Some(code) if code == i32::from(EXIT_SERVER_ENDED) => Exit::Crashed(
                "the server that its command had started ended; its log says how (`warmset model logs`)".into(),
            ),
            Some(code) => Exit::Crashed(format!("exit code {code}")),
            None => Exit::Crashed(status.to_string()),
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            launcher::end(&mut self.child);
        }
        self.close_group();
    }
}

/// A signal as people know it.
pub(crate) fn signal_name(number: i32) -> String {
    let name = match Signal::from_named_raw(number) {
        Some(Signal::ABORT) => " (aborted)",
        Some(Signal::BUS) => " (bad memory access; a mapped file may have been cut)",
        Some(Signal::FPE) => " (arithmetic error)",
        Some(Signal::ILL) => " (instruction unknown to this processor)",
        Some(Signal::KILL) => " (killed)",
        Some(Signal::SEGV) => " (segmentation fault)",
        Some(Signal::TERM) => " (terminated)",
        _ => "",
    };
    format!("signal {number}{name}")
}

/// The number of a process in the kernel's own type.
pub(super) fn raw_pid(pid: u32) -> std::io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| std::io::Error::other("not a process number"))
}
