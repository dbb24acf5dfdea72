//! What was true of a stored file when it was last read in full, so that an untouched file is not read again.

use serde::{Deserialize, Serialize};
use std::{fs::Metadata, os::unix::fs::MetadataExt};

/// The traces a change to a file leaves: writing moves its times, replacing it moves its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fingerprint {
    pub(crate) size_bytes: u64,
    pub(crate) inode: u64,
    pub(crate) modified_nanoseconds: i128,
    pub(crate) changed_nanoseconds: i128,
}

impl Fingerprint {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Self {
            size_bytes: metadata.size(),
            inode: metadata.ino(),
            modified_nanoseconds: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_nanoseconds: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}
