//! The lock that keeps a directory to one process, and whether it still does: a directory that is replaced or removed
//! takes the lock's name with it, and what lies at that path then may be another process's.

use super::error::AppendError;
use crate::error::StoreError;
use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, ErrorKind},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// How long a lock may still be held by a process, or a thread, that is ending.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);
/// Its file, held while the directory is in use.
pub(super) const NAME: &str = "lock";

/// A directory that nobody else uses.
pub(super) struct Lock {
    /// Freed with the last thread that uses the directory.
    file: File,
    path: PathBuf,
    told_lost: AtomicBool,
}

impl Lock {
    pub(super) fn take(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(NAME);
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(StoreError::directory("open", &path))?;
        let end = Instant::now() + PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { file, path, told_lost: AtomicBool::new(false) }),
                Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path }),
                Err(TryLockError::Error(error)) => return Err(StoreError::directory("lock", &path)(error)),
            }
        }
    }

    /// Whether the directory is still the one that was locked. Says so once if it is not.
    pub(super) fn check(&self) -> Result<(), AppendError> {
        let is_lost = match (self.path.symlink_metadata(), self.file.metadata()) {
            (Ok(there), Ok(held)) => (there.dev(), there.ino()) != (held.dev(), held.ino()),
            (Err(error), _) => is_gone(&error),
            // A disk that fails says nothing of who has it.
            (Ok(_), Err(_)) => false,
        };
        let told = self.told_lost.swap(is_lost, Ordering::Relaxed);
        if !is_lost {
            return Ok(());
        }
        let error = AppendError::Replaced { directory: self.path.parent().unwrap_or(&self.path).to_path_buf() };
        if !told {
            tracing::error!("no KV goes to disk any more: {error}");
        }
        Err(error)
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}
