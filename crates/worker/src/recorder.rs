//! Writes down what the machine was told, and replays it: the same events must give the same actions.
//!
//! A recording is JSON lines. The first holds the settings; each other one an instant, an event and a hash of the
//! actions that followed. The live machine is given each event as read back from its line, so that numbers which text
//! does not keep exactly are the same for both.

use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    io::{BufRead, BufReader, BufWriter, Write},
    path::Path,
};
use warmset_core::{
    Instant, Machine,
    worker::{Action, Event, Settings, Worker},
};

/// A recording ends when it is this long; the worker goes on.
pub const RECORDING_BYTES_MAX: u64 = 1 << 30;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    began: Instant,
    settings: Settings,
}

/// Every other line.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    now: Instant,
    event: Event,
    /// FNV-1a over the actions as JSON.
    actions: String,
}

/// Why a recording does not replay.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("cannot read the recording: {0}")]
    Io(#[from] std::io::Error),
    /// A line is not what a recorder writes.
    #[error("line {line} is not a line of a recording: {source}; it was cut or made by another version")]
    Invalid {
        /// Its number, from 1.
        line: u64,
        /// Why.
        source: serde_json::Error,
    },
    /// The machine now does something else.
    #[error("line {line}: the machine now acts differently on {event}; now it does {actions}")]
    Different {
        /// The number of the first such line, from 1.
        line: u64,
        /// The event.
        event: String,
        /// What the machine does now.
        actions: String,
    },
}

/// The machine with its recording, if any.
pub(crate) struct Recorder {
    machine: Worker,
    file: Option<BufWriter<File>>,
    written_bytes: u64,
}

impl Recorder {
    pub(crate) fn new(settings: Settings, now: Instant, path: Option<&Path>) -> std::io::Result<Self> {
        let Some(path) = path else {
            return Ok(Self { machine: Worker::new(settings, now), file: None, written_bytes: 0 });
        };
        let text = serde_json::to_string(&Header { began: now, settings })?;
        let header: Header = serde_json::from_str(&text)?;
        let mut file = BufWriter::new(File::create(path)?);
        writeln!(file, "{text}")?;
        let machine = Worker::new(header.settings, header.began);
        Ok(Self { machine, file: Some(file), written_bytes: text.len() as u64 + 1 })
    }

    /// The machine, to look at.
    pub(crate) fn machine(&self) -> &Worker {
        &self.machine
    }

    /// Tells the machine, and writes it down.
    pub(crate) fn handle(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        let before = actions.len();
        if self.file.is_none() {
            return self.machine.handle(now, event, actions);
        }
        match read_back(&event) {
            Ok((text, event)) => {
                self.machine.handle(now, event, actions);
                let hash = hash_of(&actions[before..]);
                self.write(&format!("{{\"now\":{},\"event\":{text},\"actions\":\"{hash}\"}}\n", now.0));
            }
            Err(error) => {
                tracing::error!(%error, "an event cannot be written down; the recording ends here");
                self.file = None;
                self.machine.handle(now, event, actions);
            }
        }
    }

    fn write(&mut self, line: &str) {
        let Some(file) = &mut self.file else { return };
        self.written_bytes += line.len() as u64;
        let outcome = if self.written_bytes > RECORDING_BYTES_MAX {
            Err(std::io::Error::other("it has reached its largest size"))
        } else {
            file.write_all(line.as_bytes())
        };
        if let Err(error) = outcome {
            tracing::warn!(%error, "the recording ends here");
            self.flush();
            self.file = None;
        }
    }

    /// Puts what was written into the file. Called when there is nothing else to do.
    pub(crate) fn flush(&mut self) {
        if let Some(file) = &mut self.file
            && let Err(error) = file.flush()
        {
            tracing::warn!(%error, "the recording cannot be written");
        }
    }
}

fn read_back(event: &Event) -> serde_json::Result<(String, Event)> {
    let text = serde_json::to_string(event)?;
    let event = serde_json::from_str(&text)?;
    Ok((text, event))
}

fn hash_of(actions: &[Action]) -> String {
    // An action that cannot be written differs from every one that can.
    let text = serde_json::to_vec(actions).unwrap_or_default();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in text {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{hash:016x}")
}

/// Feeds a recording to a fresh machine. Returns the number of events whose actions were the same: all of them.
pub fn replay(path: &Path) -> Result<u64, ReplayError> {
    let mut lines = BufReader::new(File::open(path)?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let header: Header = serde_json::from_str(&first).map_err(|source| ReplayError::Invalid { line: 1, source })?;
    let mut machine = Worker::new(header.settings, header.began);
    let mut count = 0;
    let mut actions = Vec::new();
    for text in lines {
        let text = text?;
        let number = count + 2;
        let line: Line = serde_json::from_str(&text).map_err(|source| ReplayError::Invalid { line: number, source })?;
        actions.clear();
        let event = format!("{:?}", line.event);
        machine.handle(line.now, line.event, &mut actions);
        if hash_of(&actions) != line.actions {
            return Err(ReplayError::Different { line: number, event, actions: format!("{actions:?}") });
        }
        count += 1;
    }
    Ok(count)
}
