//! Recordings of a server's machines: how they are written down, told again, and asked what would have been.
//!
//! A recording is lines of JSON. The first one says what it is; then, for each machine, the machine as it was when the
//! recording began, and every step since; the last one says why it ends. Each line carries a sum over its number and
//! its text, so that what was changed, lost or moved is not taken for what happened. Files are read and written by the
//! binary. Modules are declared in reading order.

mod costs;
mod fit;
mod limits;
mod observed;
mod profiles;
mod replay;
mod what_if;

pub use costs::Costs;
pub use limits::{DEPTH_MAX, Excess, ITEMS_MAX, TEXT_BYTES_MAX};
pub use observed::{Figures, Observed};
pub use profiles::{Profile, Profiles};
pub use replay::{Difference, MachineReplay, Replay, ReplayError};
pub use what_if::{WhatIf, WhatIfError};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};
use std::fmt::Write;
use warmset_core::{Instant, Machine, gateway::Gateway, recording::StepOf, worker::Worker};

/// Grows with every change that makes older recordings unreadable.
pub const FORMAT_VERSION: u32 = 2;
/// The longest line that is read: a machine with ten thousand models is a tenth of it.
pub const LINE_BYTES_MAX: u64 = 256 << 20;

/// Before the sum, after it, and its length in hexadecimal digits.
const SUM_BEGIN: &[u8] = b"{\"sum\":\"";
const SUM_END: u8 = b'"';
const SUM_DIGITS: usize = 16;
/// Where the rest of a line begins, at the comma behind the sum.
const REST: usize = SUM_BEGIN.len() + SUM_DIGITS + 1;

/// What a recording is, as its first line says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The form of the lines, [`FORMAT_VERSION`] when it was made.
    pub version: u32,
    /// The version of the program that made it.
    pub program: String,
}

impl Header {
    /// Whether this program reads such recordings.
    pub fn check(&self) -> Result<(), ReplayError> {
        if self.version == FORMAT_VERSION { Ok(()) } else { Err(ReplayError::Version { found: self.version }) }
    }
}

/// Why a recording ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// In words.
    pub reason: String,
}

/// What is said of one machine.
#[derive(Serialize, Deserialize)]
#[serde(
    rename_all = "snake_case",
    bound(
        serialize = "M: Serialize, M::Event: Serialize, M::Action: Serialize",
        deserialize = "M: DeserializeOwned, M::Event: DeserializeOwned, M::Action: DeserializeOwned"
    )
)]
pub enum Entry<M: Machine> {
    /// The machine as it was when its recording began.
    Begin {
        /// When.
        now: Instant,
        /// All of it.
        machine: Box<M>,
    },
    /// What happened next.
    Step(StepOf<M>),
}

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The first one.
    Recording(Header),
    /// Of the gateway.
    Gateway(Entry<Gateway>),
    /// Of the worker.
    Worker(Box<Entry<Worker>>),
    /// The last one.
    End(End),
}

impl From<Entry<Gateway>> for Line {
    fn from(entry: Entry<Gateway>) -> Self {
        Self::Gateway(entry)
    }
}

impl From<Entry<Worker>> for Line {
    fn from(entry: Entry<Worker>) -> Self {
        Self::Worker(Box::new(entry))
    }
}

/// Why a line cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// Its beginning is that of no line of a recording.
    #[error("it is no line of a recording")]
    Foreign,
    /// Its sum is not that of its number and text.
    #[error("it is not what was written there: it was changed, or lines before it are missing")]
    Changed,
    /// It holds more than any server writes.
    #[error("it holds {0}, which no server writes: it is a forgery")]
    Excess(#[from] Excess),
    /// It says what this program does not know.
    #[error("this version of warmset cannot read it ({0}): replay it with the version that made it")]
    Unknown(serde_json::Error),
}

impl Line {
    /// Appends the line with this number, counted from 1, and its line break. Fails for what JSON cannot say.
    pub fn write(&self, number: u64, out: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        let begin = out.len();
        out.extend_from_slice(SUM_BEGIN);
        out.resize(begin + REST, SUM_END);
        serde_json::to_writer(&mut *out, self)?;
        // The brace that opened the document has its place before the sum.
        out[begin + REST] = b',';
        let sum = sum(number, &out[begin + REST..]);
        out[begin + SUM_BEGIN.len()..][..SUM_DIGITS].copy_from_slice(sum.as_bytes());
        out.push(b'\n');
        Ok(())
    }

    /// Reads the line with this number, without its line break. The text is used up.
    pub fn read(number: u64, text: &mut [u8]) -> Result<Self, LineError> {
        if text.len() <= REST || !text.starts_with(SUM_BEGIN) || text[REST - 1] != SUM_END {
            return Err(LineError::Foreign);
        }
        if text[SUM_BEGIN.len()..][..SUM_DIGITS] != *sum(number, &text[REST..]).as_bytes() {
            return Err(LineError::Changed);
        }
        text[REST] = b'{';
        limits::check(&text[REST..])?;
        serde_json::from_slice(&text[REST..]).map_err(LineError::Unknown)
    }
}

/// The first half of the first half of the SHA-256 of a line's number and its text.
fn sum(number: u64, text: &[u8]) -> String {
    let hash = Sha256::new().chain_update(number.to_string()).chain_update(text).finalize();
    hash.iter().take(SUM_DIGITS / 2).fold(String::with_capacity(SUM_DIGITS), |mut digits, byte| {
        // Writing to a String cannot fail.
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}
