//! Why a block was not written or not read. Both cost a recomputation and nothing else.

use super::block::BlockError;
use rustix::io::Errno;
use std::{
    io::{self, ErrorKind},
    path::PathBuf,
};

/// Why a block did not get onto the disk. It is not visible, and takes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// What was given is no block.
    #[error("this is no block of KV: {0}")]
    Block(#[from] BlockError),
    /// More would be more than the operator allows.
    #[error("the KV tier on disk has reached its bound of {bytes_max} bytes: give blocks up, or raise kv.disk")]
    Cap {
        /// The bound.
        bytes_max: u64,
    },
    /// The file system has too little left for others.
    #[error("{free_bytes} bytes are left on the disk of the KV tier, {free_bytes_min} stay free: free space there")]
    FreeSpace {
        /// What is left.
        free_bytes: u64,
        /// What must be left.
        free_bytes_min: u64,
    },
    /// The disk failed or is full.
    #[error("the disk of the KV tier took a block not: {0}")]
    Disk(Errno),
    /// The directory that was opened is not there any more.
    #[error(
        "{directory} was replaced or removed while the server used it: put it back, or restart the server",
        directory = directory.display()
    )]
    Replaced {
        /// Where it lay.
        directory: PathBuf,
    },
    /// It failed a moment ago, and is left alone for a while.
    #[error("the disk of the KV tier failed a moment ago and is tried again later")]
    BackingOff,
    /// Its trust domain was purged while it waited.
    #[error("the block's trust domain was purged")]
    Purged,
    /// Nothing more is written: the store is being closed.
    #[error("the KV tier on disk is closed")]
    Closed,
}

impl AppendError {
    /// Whether it is for the operator to mend.
    pub(super) fn is_the_disks(&self) -> bool {
        matches!(self, Self::Cap { .. } | Self::FreeSpace { .. } | Self::Disk(_) | Self::Replaced { .. })
    }

    /// The reason as a label of a metric.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Block(_) => "block",
            Self::Cap { .. } => "bound",
            Self::FreeSpace { .. } => "free_space",
            Self::Disk(_) => "write",
            Self::Replaced { .. } => "replaced",
            Self::BackingOff => "backing_off",
            Self::Purged => "purged",
            Self::Closed => "closed",
        }
    }
}

/// Why a block was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The file ends within the block.
    #[error("the block's file is too short")]
    Short,
    /// Its bytes are not what was written.
    #[error("the block's bytes are not what was written")]
    Checksum,
    /// The disk failed.
    #[error("the disk of the KV tier cannot be read: {0}")]
    Io(Errno),
    /// Another block stands there.
    #[error("another block stands there")]
    WrongKey,
    /// It was given up, dropped or purged.
    #[error("the block is not there any more")]
    Gone,
    /// It was not there in time.
    #[error("the disk of the KV tier did not answer in time")]
    Stuck,
    /// Too many reads wait.
    #[error("too many reads of the KV tier wait")]
    Busy,
    /// Too many reads are stuck: the tier is off.
    #[error("the KV tier on disk is off: its disk does not answer")]
    Off,
    /// The memory given is not as long as the block.
    #[error("the memory given is not as long as the block")]
    Length,
}

impl ReadError {
    /// The reason as a label of a metric.
    pub fn reason(&self) -> &'static str {
        REASONS[self.number()]
    }

    /// Whether the block may be read another time: it is the disk that has no answer now.
    pub fn is_passing(self) -> bool {
        matches!(self, Self::Stuck | Self::Busy | Self::Off)
    }

    pub(crate) fn number(self) -> usize {
        match self {
            Self::Short => 0,
            Self::Checksum => 1,
            Self::Io(_) => 2,
            Self::WrongKey => 3,
            Self::Gone => 4,
            Self::Stuck => 5,
            Self::Busy => 6,
            Self::Off => 7,
            Self::Length => 8,
        }
    }

    pub(crate) fn of(error: &io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => Self::Short,
            ErrorKind::NotFound => Self::Gone,
            _ => Self::Io(errno_of(error)),
        }
    }
}

/// All reasons for which a block was not read, in the order of their numbers.
pub const REASONS: [&str; 9] = ["short", "checksum", "io", "wrong_key", "gone", "stuck", "busy", "off", "length"];

pub(crate) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
