//! What an engine process does from its first instruction to its last.
//!
//! The parent starts it with one end of a socket pair as standard input (so that the quick way of starting a process,
//! which runs nothing between fork and exec, is open to it). The process moves that socket away, shuts itself in,
//! initialises the backend and says `Hello`; only then is it told what to load. One thread reads messages; the main
//! thread alone drives the engine and writes. When the parent is gone the process is gone: by the parent-death signal,
//! and by the end of the socket.

mod harden;
mod inbox;

pub(crate) use inbox::DESCRIPTORS_MAX;

use crate::{
    frame,
    kv::{KvMemory, ParkedMemory},
    port::{Engine, LoadFailure, LoadFault},
    protocol::{EngineKind, FromEngine, LoadRequest, PROTOCOL_VERSION, ToEngine},
    synthetic::SyntheticEngine,
};
use inbox::Inbox;
use std::{
    io::{BufReader, BufWriter, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::ExitCode,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    time::Instant,
};

/// Exit code of a process that was not started by a worker.
pub const EXIT_NOT_A_CHILD: u8 = 2;
/// Exit code after `LoadFailed`.
pub const EXIT_LOAD_FAILED: u8 = 3;
/// Exit code when the worker is gone.
pub const EXIT_PARENT_GONE: u8 = 4;
/// Exit code when the worker sends something that is not a message.
pub const EXIT_PROTOCOL: u8 = 5;
/// The model needs more memory than there is.
pub const EXIT_OUT_OF_MEMORY: u8 = 6;
/// The server that a command started has ended by itself.
pub const EXIT_SERVER_ENDED: u8 = 7;

/// What a process of this program may do as an engine: decided here, once, for every kind of engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Computes by itself: no network, no other program.
    Sealed,
    /// Stands between the worker and a server that a command starts: keeps the network, which that server needs.
    Host,
    /// Started by a host: starts the server, and ends every process that came of it when the host is gone.
    Guard,
}

impl Role {
    /// The role that an engine of this kind needs.
    pub fn of(engine: EngineKind) -> Self {
        match engine {
            EngineKind::Llama | EngineKind::Synthetic => Self::Sealed,
            EngineKind::Command => Self::Host,
        }
    }

    /// The argument after `engine` on the command line.
    pub(crate) fn argument(self) -> Option<&'static str> {
        match self {
            Self::Sealed => None,
            Self::Host => Some("host"),
            Self::Guard => Some("guard"),
        }
    }

    fn parse(argument: Option<&str>) -> Option<Self> {
        [Self::Sealed, Self::Host, Self::Guard].into_iter().find(|role| role.argument() == argument)
    }
}

/// Runs an engine process: what the hidden command `engine` does, with the argument that follows it, if any.
pub fn run(argument: Option<&str>) -> ExitCode {
    let role = match Role::parse(argument) {
        Some(Role::Guard) => return crate::command::guard::run(),
        Some(role) => role,
        None => {
            log("this command is started by `warmset serve`, not by hand");
            return ExitCode::from(EXIT_NOT_A_CHILD);
        }
    };
    let socket = match harden::take_socket() {
        Ok(socket) => socket,
        Err(message) => {
            log(&message);
            return ExitCode::from(EXIT_NOT_A_CHILD);
        }
    };
    if let Err(message) = harden::shut_in(&socket, role) {
        log(&message);
        return ExitCode::from(EXIT_PARENT_GONE);
    }
    let served = match role {
        Role::Host => crate::command::host(socket),
        Role::Sealed | Role::Guard => serve(socket),
    };
    match served {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            log(&format!("the worker is gone: {error}"));
            ExitCode::from(EXIT_PARENT_GONE)
        }
    }
}

/// Standard error is the engine's log.
pub(crate) fn log(message: &str) {
    // A log that cannot be written must not end the process.
    let _ = writeln!(std::io::stderr(), "warmset engine: {message}");
}

/// A message and what came with it.
struct Received {
    message: ToEngine,
    descriptors: Vec<OwnedFd>,
}

/// The writing end of the socket. The first failure to write is kept: then nobody is left to tell.
struct Outbox {
    writer: BufWriter<UnixStream>,
    failure: Option<frame::FrameError>,
    /// Every message leaves at once (while loading), rather than after the step.
    at_once: bool,
}

impl Outbox {
    fn put(&mut self, message: &FromEngine) {
        if self.failure.is_none() {
            self.failure = frame::write(&mut self.writer, message).err();
        }
        if self.at_once {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.failure.is_none() {
            self.failure = self.writer.flush().err().map(Into::into);
        }
    }

    fn check(&mut self) -> Result<(), frame::FrameError> {
        self.flush();
        self.failure.take().map_or(Ok(()), Err)
    }
}

fn serve(socket: UnixStream) -> Result<u8, frame::FrameError> {
    let mut outbox = Outbox { writer: BufWriter::new(socket.try_clone()?), failure: None, at_once: true };
    let accelerators = initialise();
    let (sender, messages) = channel();
    std::thread::Builder::new().name("reader".into()).spawn(move || read_messages(socket, &sender))?;
    let build = env!("CARGO_PKG_VERSION").to_owned();
    outbox.put(&FromEngine::Hello { protocol_version: PROTOCOL_VERSION, build, accelerators });
    outbox.check()?;
    let request = match messages.recv().map(|received| received.message) {
        Ok(ToEngine::Load(request)) => request,
        Ok(_) => {
            log("the first message must be load");
            return Ok(EXIT_PROTOCOL);
        }
        // The reader never ends without ending the process.
        Err(_) => return Ok(EXIT_PARENT_GONE),
    };
    let mut engine = match construct(request.engine) {
        Ok(engine) => engine,
        Err(message) => return refuse(&mut outbox, message, true),
    };
    match engine.load(&request, &mut |message| outbox.put(&message)) {
        Ok(info) => outbox.put(&FromEngine::Loaded(info)),
        // Whether this is its cap, only the worker knows: it reads the exit code.
        Err(LoadFailure { message, fault: LoadFault::Memory }) => {
            log(&message);
            return Ok(EXIT_OUT_OF_MEMORY);
        }
        Err(LoadFailure { message, fault }) => return refuse(&mut outbox, message, fault == LoadFault::Artifact),
    }
    outbox.check()?;
    outbox.at_once = false;
    drive(engine.as_mut(), &request, &messages, &mut outbox)
}

fn refuse(outbox: &mut Outbox, message: String, permanent: bool) -> Result<u8, frame::FrameError> {
    log(&message);
    outbox.put(&FromEngine::LoadFailed { message, permanent });
    outbox.check()?;
    Ok(EXIT_LOAD_FAILED)
}

/// Messages first, then one step; blocks when there is nothing to do or no thread to do it with.
fn drive(
    engine: &mut dyn Engine,
    request: &LoadRequest,
    messages: &Receiver<Received>,
    outbox: &mut Outbox,
) -> Result<u8, frame::FrameError> {
    let mut threads = request.threads;
    loop {
        let next = if threads > 0 && engine.has_work() {
            match messages.try_recv() {
                Ok(message) => Some(message),
                Err(std::sync::mpsc::TryRecvError::Empty) => None,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return Ok(EXIT_PARENT_GONE),
            }
        } else {
            outbox.check()?;
            match receive(messages, engine.next_timer()) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => {
                    engine.tidy();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(EXIT_PARENT_GONE),
            }
        };
        match next {
            Some(Received { message: ToEngine::Load(_), .. }) => {
                log("a process loads once");
                return Ok(EXIT_PROTOCOL);
            }
            Some(Received { message: ToEngine::KvOpen(open), descriptors }) => {
                match KvMemory::map(&open, descriptors) {
                    Ok(memory) => engine.open_kv(open, memory),
                    Err(message) => {
                        log(&format!("goes on without a tier for KV, whose memory cannot be used: {message}"))
                    }
                }
            }
            Some(Received { message: ToEngine::ParkTake { request, bytes }, descriptors }) => {
                match ParkedMemory::for_writing(descriptors, bytes) {
                    Ok(memory) => engine.park(request, memory, &mut |message| outbox.put(&message)),
                    Err(message) => {
                        log(&format!("does not park a request, whose memory cannot be used: {message}"));
                        engine.handle(ToEngine::ParkStop { request }, &mut |message| outbox.put(&message));
                        outbox.put(&FromEngine::ParkRefused { request });
                    }
                }
            }
            Some(Received { message: ToEngine::Resume { request, bytes }, descriptors }) => {
                match ParkedMemory::for_reading(descriptors, bytes) {
                    Ok(memory) => engine.resume(request, memory, &mut |message| outbox.put(&message)),
                    Err(message) => outbox.put(&crate::kv::not_resumed(request, &message)),
                }
            }
            Some(Received { message, .. }) => {
                if let ToEngine::SetThreads { threads: wanted } = message {
                    threads = wanted;
                }
                engine.handle(message, &mut |message| outbox.put(&message));
            }
            None => {
                // What messages brought leaves before the step: others wait for the threads that this engine gives up, and
                // a request for what is kept of its prompt.
                outbox.check()?;
                engine.step(&mut |message| outbox.put(&message));
                outbox.check()?;
            }
        }
    }
}

/// The next message, or none until then.
fn receive(messages: &Receiver<Received>, until: Option<Instant>) -> Result<Received, RecvTimeoutError> {
    match until {
        Some(until) => messages.recv_timeout(until.saturating_duration_since(Instant::now())),
        None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
    }
}

/// Whatever is worth having done before anybody asks for a model. Returns the names of the accelerators.
#[cfg(feature = "llama")]
fn initialise() -> Vec<String> {
    crate::llama::accelerators()
}

/// Whatever is worth having done before anybody asks for a model. Returns the names of the accelerators.
#[cfg(not(feature = "llama"))]
fn initialise() -> Vec<String> {
    Vec::new()
}

fn construct(kind: EngineKind) -> Result<Box<dyn Engine>, String> {
    match kind {
        EngineKind::Synthetic => Ok(Box::new(SyntheticEngine::default())),
        #[cfg(feature = "llama")]
        EngineKind::Llama => Ok(Box::new(crate::llama::LlamaEngine::new())),
        #[cfg(not(feature = "llama"))]
        EngineKind::Llama => Err("this build has no llama.cpp; build it with the feature `llama`".into()),
        EngineKind::Command => {
            Err("a process without network starts no server: the worker chose the wrong role".into())
        }
    }
}

/// How many descriptors come with a message.
fn descriptors_of(message: &ToEngine) -> usize {
    match message {
        ToEngine::KvOpen(_) => 2,
        ToEngine::ParkTake { .. } | ToEngine::Resume { .. } => 1,
        _ => 0,
    }
}

/// Reads messages until there are none. `Stop` and the end of the socket end the process from here, so that neither a
/// long load nor a long step delays them.
fn read_messages(socket: UnixStream, messages: &Sender<Received>) {
    let mut reader = BufReader::new(Inbox::new(socket));
    loop {
        match frame::read(&mut reader) {
            Ok(Some(ToEngine::Stop)) => {
                if !crate::synthetic::ignores_stop() {
                    harden::exit_at_once(0);
                }
            }
            Ok(Some(message)) => {
                let descriptors = reader.get_mut().take_descriptors(descriptors_of(&message));
                if messages.send(Received { message, descriptors }).is_err() {
                    return;
                }
            }
            Ok(None) | Err(frame::FrameError::Io(_) | frame::FrameError::Truncated) => {
                harden::exit_at_once(EXIT_PARENT_GONE)
            }
            Err(error) => {
                log(&error.to_string());
                harden::exit_at_once(EXIT_PROTOCOL)
            }
        }
    }
}
