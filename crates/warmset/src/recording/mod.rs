//! Recordings of this server's machines: made here, replayed by `warmset replay`.
//!
//! A run loop puts each step into a bounded queue and goes on; a thread turns them into lines. What cannot be kept ends
//! the recording and nothing else: a queue that is full, a disk that is full, a reader that is gone.

mod read;
mod writer;

pub(crate) use read::{Ending, Reading};

use hyper::body::Bytes;
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::sync::{
    mpsc::{self, error::TrySendError},
    oneshot,
};
use warmset_core::{
    Instant, Machine,
    recording::{StepOf, Tape},
};
use warmset_gateway::{
    admin::{AdminError, RecordingChunks, RecordingLimits},
    frontend::Frontend,
};
use warmset_planner::recording::{Entry, Line};
use warmset_worker::AgentHandle;
use writer::Writer;

/// Steps that wait to be written; with more the recording ends.
const STEPS_WAITING_MAX: usize = 65_536;
/// Pieces of a recording that wait to be sent.
const CHUNKS_WAITING_MAX: usize = 16;
/// Bytes of a recording unless asked otherwise.
pub(crate) const RECORDING_BYTES_MAX: u64 = 1 << 30;
/// Prompts are not in it, but names of models and tenants are.
const FILE_MODE: u32 = 0o600;

/// What reaches the thread that writes.
enum Message {
    Line(Box<Line>),
    /// The recording ends, for this reason.
    Stop(&'static str),
}

/// The way from a run loop to the thread that writes. Never waits.
#[derive(Clone)]
struct Queue {
    messages: mpsc::Sender<Message>,
    /// A step had no place: nothing that comes after it is taken.
    overflowed: Arc<AtomicBool>,
}

impl Queue {
    fn put(&self, line: Line) -> bool {
        if self.overflowed.load(Ordering::Acquire) {
            return false;
        }
        match self.messages.try_send(Message::Line(Box::new(line))) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                self.overflowed.store(true, Ordering::Release);
                false
            }
            Err(TrySendError::Closed(_)) => false,
        }
    }
}

impl<M: Machine + Clone> Tape<M> for Queue
where
    Line: From<Entry<M>>,
{
    fn begin(&mut self, now: Instant, machine: &M) -> bool {
        self.put(Entry::Begin { now, machine: Box::new(machine.clone()) }.into())
    }

    fn step(&mut self, step: StepOf<M>) -> bool {
        self.put(Entry::Step(step).into())
    }
}

/// A recording that is being made.
pub(crate) struct Recording {
    messages: mpsc::Sender<Message>,
    ended: oneshot::Receiver<()>,
}

impl Recording {
    /// Ends it and waits until it is written.
    pub(crate) async fn end(self, reason: &'static str) {
        // A thread that has ended has closed both.
        let _ = self.messages.send(Message::Stop(reason)).await;
        let _ = self.ended.await;
    }

    /// Ends it after so long, or when `gone` resolves.
    async fn end_after(self, time: Option<Duration>, gone: impl Future<Output = ()>) {
        let over = async {
            match time {
                Some(time) => tokio::time::sleep(time).await,
                None => std::future::pending().await,
            }
        };
        let reason = tokio::select! {
            () = over => "its time is over",
            () = gone => "nobody takes it any more",
            _ = self.ended => return,
        };
        // A thread that has ended has closed it.
        let _ = self.messages.send(Message::Stop(reason)).await;
    }
}

/// The recordings of one server: one at a time, so that none takes the other's steps.
#[derive(Debug, Default, Clone)]
pub(crate) struct Recordings {
    running: Arc<AtomicBool>,
}

/// Held by the recording that runs.
struct Turn(Arc<AtomicBool>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Another recording runs.
#[derive(Debug, thiserror::Error)]
#[error("a recording is being made already: wait for its end, or end it where it was begun")]
struct Busy;

impl Recordings {
    /// Records into a file, with the machines as they are now.
    pub(crate) fn record_file(
        &self,
        path: &Path,
        agent: &AgentHandle,
        frontend: &Frontend,
    ) -> anyhow::Result<Recording> {
        let turn = self.turn()?;
        let file = create_in_place(path)?;
        Ok(begin(turn, file, RECORDING_BYTES_MAX, (agent, frontend))?)
    }

    /// Records for whoever takes the pieces.
    pub(crate) fn record_chunks(
        &self,
        limits: RecordingLimits,
        agent: &AgentHandle,
        frontend: &Frontend,
    ) -> Result<RecordingChunks, AdminError> {
        let turn = self.turn().map_err(|busy| AdminError { status: 409, message: busy.to_string() })?;
        let (sender, chunks) = mpsc::channel(CHUNKS_WAITING_MAX);
        let bytes_max = limits.bytes_max.unwrap_or(RECORDING_BYTES_MAX);
        let recording = begin(turn, Chunks(sender.clone()), bytes_max, (agent, frontend));
        let recording = recording.map_err(|error| AdminError::internal(format!("cannot record: {error}")))?;
        tokio::spawn(
            recording.end_after(limits.seconds.map(Duration::from_secs), async move { sender.closed().await }),
        );
        Ok(chunks)
    }

    fn turn(&self) -> Result<Turn, Busy> {
        let taken = self.running.swap(true, Ordering::AcqRel);
        if taken { Err(Busy) } else { Ok(Turn(Arc::clone(&self.running))) }
    }
}

fn begin(
    turn: Turn,
    out: impl Write + Send + 'static,
    bytes_max: u64,
    (agent, frontend): (&AgentHandle, &Frontend),
) -> io::Result<Recording> {
    let (messages, received) = mpsc::channel(STEPS_WAITING_MAX);
    let overflowed = Arc::new(AtomicBool::new(false));
    let queue = Queue { messages: messages.clone(), overflowed: Arc::clone(&overflowed) };
    let (end, ended) = oneshot::channel();
    let writer = Writer::new(out, bytes_max);
    thread::Builder::new().name("recorder".to_owned()).spawn(move || {
        match writer.run(received, &overflowed) {
            Ok(reason) => tracing::info!(reason, "the recording has ended"),
            Err(error) => tracing::warn!(%error, "the recording ends here: it cannot be written"),
        }
        drop(turn);
        // Nobody may wait for it.
        let _ = end.send(());
    })?;
    frontend.record(Box::new(queue.clone()));
    agent.record(Box::new(queue));
    Ok(Recording { messages, ended })
}

/// Pieces on their way to whoever takes them.
struct Chunks(mpsc::Sender<Bytes>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Bytes::copy_from_slice(bytes));
        sent.map(|()| bytes.len()).map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "nobody takes it any more"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A new file that only its owner may read.
pub(crate) fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(path)
}

/// The same; what lies there already is kept beside it, as that of the start before.
fn create_in_place(path: &Path) -> anyhow::Result<File> {
    let before = PathBuf::from(format!("{}.before", path.display()));
    let cannot = |error: io::Error| anyhow::anyhow!("cannot record into {}: {error}", path.display());
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(cannot(error)),
        Ok(found) => {
            for (place, is_file) in [(path, found.is_file()), (&before, before.is_file())] {
                if place.symlink_metadata().is_ok() && !(is_file && Reading::is_recording(place)) {
                    anyhow::bail!("{} is no recording, and stays as it is: record into another file", place.display());
                }
            }
            std::fs::rename(path, &before).map_err(cannot)?;
        }
    }
    create_new(path).map_err(cannot)
}
