//! What can go wrong with the store, and what to do about it.

use rustix::io::Errno;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Why the store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The source is a directory, device, FIFO or socket.
    #[error("{path} is {kind}, not a regular file: give the path of the model file itself", path = path.display())]
    NotAFile {
        /// The source.
        path: PathBuf,
        /// What it is instead.
        kind: &'static str,
    },
    /// The source cannot be opened or read.
    #[error("cannot read {path}: {error}: check the path and its permissions", path = path.display())]
    Source {
        /// The source.
        path: PathBuf,
        /// The operating system's reason.
        error: io::Error,
    },
    /// The source changed while it was read.
    #[error("{path} changed while it was copied: wait until it is complete, then add it again", path = path.display())]
    SourceChanged {
        /// The source.
        path: PathBuf,
    },
    /// The source is larger than any artifact may be.
    #[error("{path} has {size_bytes} bytes, more than the limit of {limit_bytes}", path = path.display())]
    TooLarge {
        /// The source.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The disk, the quota or the file size limit is exhausted.
    #[error(
        "no room for {needed_bytes} bytes in {directory}: free space there, remove models, or choose another data directory",
        directory = directory.display()
    )]
    DiskFull {
        /// Where the store lies.
        directory: PathBuf,
        /// What was to be written.
        needed_bytes: u64,
    },
    /// Another fetch of the same file is under way.
    #[error("this file is being fetched already: wait until that is done")]
    BeingFetched,
    /// Another process has the directory.
    #[error("{path} is held by another process: stop it, or choose another directory", path = path.display())]
    InUse {
        /// What it holds.
        path: PathBuf,
    },
    /// The store's own directory fails.
    #[error("the store cannot {what} {path}: {error}", path = path.display())]
    Directory {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The operating system's reason.
        error: io::Error,
    },
}

impl StoreError {
    /// Whether the cause is a lack of space.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::DiskFull { .. })
    }

    /// Whether the source that was named is at fault, not the store.
    pub fn is_source_fault(&self) -> bool {
        matches!(
            self,
            Self::NotAFile { .. }
                | Self::Source { .. }
                | Self::SourceChanged { .. }
                | Self::TooLarge { .. }
                | Self::BeingFetched
        )
    }

    /// What an error of a write below `root` means.
    pub(crate) fn of_write(root: &Path, error: io::Error, needed_bytes: u64) -> Self {
        if means_full(&error) {
            Self::DiskFull { directory: root.to_path_buf(), needed_bytes }
        } else {
            Self::Directory { what: "write to", path: root.to_path_buf(), error }
        }
    }

    pub(crate) fn directory<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |error| Self::Directory { what, path: path.to_path_buf(), error }
    }

    pub(crate) fn source<'a>(path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |error| Self::Source { path: path.to_path_buf(), error }
    }
}

/// Whether an error of the operating system means that no more can be stored.
pub(crate) fn means_full(error: &io::Error) -> bool {
    let full = [Errno::NOSPC, Errno::DQUOT, Errno::FBIG];
    Errno::from_io_error(error).is_some_and(|errno| full.contains(&errno))
}
