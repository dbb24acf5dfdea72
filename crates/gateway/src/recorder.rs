//! The record of a run, `(now, event)` and a hash of the actions that followed, and its replay: the same machine, fed
//! the same events, must do the same.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::Path,
    sync::mpsc,
    thread,
};
use warmset_core::{
    Instant, Machine,
    gateway::{Action, Event, Gateway, Settings, Violation},
};

/// Grows with every change that makes older recordings unreadable.
pub const RECORDING_VERSION: u32 = 1;
/// What the first line names.
const RECORDING_KIND: &str = "warmset-gateway";

/// Why a recording cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file.
    #[error("cannot use the recording: {0}")]
    File(#[from] io::Error),
    /// Its contents.
    #[error("line {line} of the recording is damaged: {message}")]
    Damaged {
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// Its kind or version.
    #[error("not a recording of this version of the gateway (version {RECORDING_VERSION})")]
    Foreign,
}

#[derive(Serialize, Deserialize)]
struct Header {
    recording: String,
    version: u32,
    settings: Settings,
}

#[derive(Serialize, Deserialize)]
struct Line {
    now: Instant,
    event: Event,
    actions: String,
}

/// The first 16 hexadecimal digits of the SHA-256 of the actions; empty for none.
fn hash(actions: &[Action]) -> String {
    if actions.is_empty() {
        return String::new();
    }
    let mut hasher = Sha256::new();
    // Hashing cannot fail, and every action can be written as JSON.
    let _ = serde_json::to_writer(HashWriter(&mut hasher), actions);
    hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

struct HashWriter<'a>(&'a mut Sha256);

impl Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a recording from a thread of its own: the run loop never waits for the disk.
#[derive(Debug)]
pub struct Recorder {
    lines: Option<mpsc::Sender<String>>,
    writer: Option<thread::JoinHandle<()>>,
}

impl Recorder {
    /// Begins a recording, replacing the file.
    pub fn create(path: &Path, settings: &Settings) -> Result<Self, RecordError> {
        let mut file = BufWriter::new(File::create(path)?);
        let settings = settings.clone();
        let header = Header { recording: RECORDING_KIND.to_owned(), version: RECORDING_VERSION, settings };
        serde_json::to_writer(&mut file, &header).map_err(io::Error::from)?;
        file.write_all(b"\n")?;
        let (lines, received) = mpsc::channel::<String>();
        let writer = thread::Builder::new().name("recorder".to_owned()).spawn(move || {
            if let Err(error) = write_lines(&mut file, &received) {
                tracing::error!(%error, "the recording ends here");
            }
        })?;
        Ok(Self { lines: Some(lines), writer: Some(writer) })
    }

    /// Notes one event and what followed.
    pub fn record(&self, now: Instant, event: &Event, actions: &[Action]) {
        let line = Line { now, event: event.clone(), actions: hash(actions) };
        if let (Some(lines), Ok(text)) = (&self.lines, serde_json::to_string(&line)) {
            // A writer that failed has said so.
            let _ = lines.send(text);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        drop(self.lines.take());
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn write_lines(file: &mut BufWriter<File>, lines: &mpsc::Receiver<String>) -> io::Result<()> {
    while let Ok(first) = lines.recv() {
        for line in std::iter::once(first).chain(lines.try_iter()) {
            file.write_all(line.as_bytes())?;
            file.write_all(b"\n")?;
        }
        file.flush()?;
    }
    file.flush()
}

/// What a replay found.
#[derive(Debug)]
pub struct Replay {
    /// Events replayed.
    pub events: usize,
    /// The first that led to other actions than recorded, if any.
    pub difference: Option<Difference>,
    /// The first broken invariant, if any, and the line it was found at.
    pub violation: Option<(usize, Violation)>,
}

/// Where a replay leaves the recording.
#[derive(Debug)]
pub struct Difference {
    /// The line of the recording.
    pub line: usize,
    /// When.
    pub now: Instant,
    /// What happened.
    pub event: Event,
    /// What the machine does now.
    pub actions: Vec<Action>,
}

/// Feeds a recording to a new machine. A last line without its end, as a killed process leaves it, is passed over.
pub fn replay(path: &Path) -> Result<Replay, RecordError> {
    let mut file = BufReader::new(File::open(path)?);
    let mut text = String::new();
    file.read_line(&mut text)?;
    let header: Header = serde_json::from_str(&text).map_err(|_| RecordError::Foreign)?;
    if header.recording != RECORDING_KIND || header.version != RECORDING_VERSION {
        return Err(RecordError::Foreign);
    }
    let mut gateway = Gateway::new(header.settings);
    let mut replay = Replay { events: 0, difference: None, violation: None };
    let mut actions = Vec::new();
    for number in 2.. {
        text.clear();
        file.read_line(&mut text)?;
        if !text.ends_with('\n') {
            break;
        }
        let line: Line = serde_json::from_str(&text)
            .map_err(|error| RecordError::Damaged { line: number, message: error.to_string() })?;
        actions.clear();
        gateway.handle(line.now, line.event.clone(), &mut actions);
        replay.events += 1;
        if let Err(violation) = gateway.check() {
            replay.violation.get_or_insert((number, violation));
        }
        if hash(&actions) != line.actions {
            replay.difference = Some(Difference { line: number, now: line.now, event: line.event, actions });
            break;
        }
    }
    Ok(replay)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use warmset_core::{Digest, ModelName, Priority, RequestId, TenantId, WorkerId, gateway::Route, targets::Targets};

    fn recorded(path: &Path) {
        let settings = Settings::default();
        let recorder = Recorder::create(path, &settings).unwrap();
        let mut gateway = Gateway::new(settings);
        let digest = Digest([1; 32]);
        let route = Route {
            digest,
            name: ModelName::parse("m").unwrap(),
            priority: Priority::Standard,
            max_concurrency: 1,
            critical_reserve: 0,
            parks: false,
            cold: warmset_core::gateway::ColdPolicy::Wait,
            rewarm_seconds: 1.25,
            targets: Targets::default(),
        };
        let mut events = vec![Event::Configure(route), Event::WorkerUp { worker: WorkerId(0) }];
        for request in (1..=3).map(RequestId) {
            let (tenant, class) = (TenantId::anonymous(), Priority::Standard);
            events.push(Event::Arrived { request, tenant, digest, class, patience: Duration::from_secs(60) });
        }
        events.push(Event::Finished { request: RequestId(1), prompt_tokens: 1, completion_tokens: 2 });
        for (second, event) in (0..).zip(events) {
            let (now, mut actions) = (Instant::after(Duration::from_secs(second)), Vec::new());
            gateway.handle(now, event.clone(), &mut actions);
            recorder.record(now, &event, &actions);
        }
    }

    #[test]
    fn a_recording_replays_to_the_same_actions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recording.jsonl");
        recorded(&path);
        let replay = replay(&path).unwrap();
        assert_eq!(replay.events, 6);
        assert!(replay.difference.is_none() && replay.violation.is_none(), "{replay:?}");
    }

    #[test]
    fn a_change_is_found_where_it_first_matters_and_a_torn_end_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recording.jsonl");
        recorded(&path);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 9]).unwrap();
        assert_eq!(replay(&path).unwrap().events, 5);
        std::fs::write(&path, text.replace("\"max_concurrency\":1", "\"max_concurrency\":2")).unwrap();
        let difference = replay(&path).unwrap().difference.unwrap();
        assert_eq!(difference.line, 5, "the second request need not wait any more");
        std::fs::write(&path, "{}\n").unwrap();
        assert!(matches!(replay(&path), Err(RecordError::Foreign)));
    }
}
