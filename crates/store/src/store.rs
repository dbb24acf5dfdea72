//! The store's directory: `blobs/` by content, `checked/` what was verified, `tmp/` half-written,
//! `unfinished/` being fetched, `quarantine/` corrupt.

use crate::{
    checked::Fingerprint,
    error::{StoreError, means_full},
    import::{self, TemporaryFile},
    staging,
};
use std::{
    collections::BTreeSet,
    fs::{DirBuilder, File},
    io::{self, ErrorKind, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use warmset_core::{Digest, worker::LoadError};

/// Corrupt files kept for examination; the oldest goes when another comes.
pub const QUARANTINED_FILES_MAX: usize = 4;
/// Only the owner may look into the store: model weights can be confidential.
const DIRECTORY_MODE: u32 = 0o700;

/// A directory of files named by their SHA-256. One process writes to it at a time; its caller holds the lock.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    next_temporary: AtomicU64,
    publishing: Mutex<()>,
}

/// A file in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredFile {
    /// SHA-256 of its bytes, which is also its name.
    pub sha256: Digest,
    /// Its size.
    pub size_bytes: u64,
    /// Where it lies. Never written again.
    pub path: PathBuf,
    /// Whether the store had it before.
    pub existed: bool,
}

/// A file that was found to be what its name says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// Where it lies.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Whether it was read in full for this; otherwise it is untouched since it last was.
    pub read_in_full: bool,
}

/// What was removed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Removed {
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Where the file with this hash lies in the store in `root`, for those who look at a store that another process has
/// open.
pub fn path_in(root: &Path, sha256: &Digest) -> PathBuf {
    root.join("blobs").join(sha256.hex())
}

impl Store {
    /// Opens the store in `root`, creates it if needed, and removes what an interrupted import left behind.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        let store = Self { root: root.to_path_buf(), next_temporary: AtomicU64::new(0), publishing: Mutex::new(()) };
        for name in ["blobs", "checked", "tmp", staging::DIRECTORY, "quarantine"] {
            let path = root.join(name);
            let mut builder = DirBuilder::new();
            builder
                .recursive(true)
                .mode(DIRECTORY_MODE)
                .create(&path)
                .map_err(StoreError::directory("create", &path))?;
        }
        store.remove_leftovers()?;
        staging::tidy(root)?;
        Ok(store)
    }

    /// Where the store lies.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the file with this hash lies or would lie.
    pub fn path_of(&self, sha256: &Digest) -> PathBuf {
        path_in(&self.root, sha256)
    }

    /// Whether there is a file with this hash, unverified.
    pub fn contains(&self, sha256: &Digest) -> bool {
        self.path_of(sha256).is_file()
    }

    /// Copies (or reflinks) a regular file into the store. `progress` hears `(done_bytes, total_bytes)`.
    pub fn import_file(&self, path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<StoredFile, StoreError> {
        import::import_file(self, path, progress)
    }

    /// Checks that the file is what its hash says. A file untouched since it was last read in full is not read again.
    pub fn verify(&self, sha256: &Digest) -> Result<Verified, LoadError> {
        let path = self.path_of(sha256);
        let metadata = path.metadata().map_err(|error| self.missing_or_unreadable(sha256, &error))?;
        if self.checked(sha256) == Some(Fingerprint::of(&metadata)) {
            return Ok(Verified { path, size_bytes: metadata.size(), read_in_full: false });
        }
        self.verify_full(sha256, &mut |_, _| {})
    }

    /// Reads the whole file and compares. A corrupt one is moved to quarantine, so that it is never served.
    pub fn verify_full(&self, sha256: &Digest, progress: &mut dyn FnMut(u64, u64)) -> Result<Verified, LoadError> {
        let path = self.path_of(sha256);
        let read = File::open(&path).and_then(|mut file| {
            let before = Fingerprint::of(&file.metadata()?);
            let (actual, size_bytes) = import::hash_file(&mut file, progress)?;
            let after = Fingerprint::of(&file.metadata()?);
            Ok((actual, size_bytes, (before == after).then_some(after)))
        });
        let (actual, size_bytes, untouched) = read.map_err(|error| self.missing_or_unreadable(sha256, &error))?;
        if actual != *sha256 {
            return Err(self.quarantine(sha256));
        }
        if let Some(fingerprint) = untouched {
            self.record_checked(sha256, fingerprint);
        }
        Ok(Verified { path, size_bytes, read_in_full: true })
    }

    /// All files in the store with their sizes, in the order of their hashes.
    pub fn list(&self) -> Result<Vec<(Digest, u64)>, StoreError> {
        let directory = self.root.join("blobs");
        let mut files = Vec::new();
        for entry in directory.read_dir().map_err(StoreError::directory("list", &directory))? {
            let entry = entry.map_err(StoreError::directory("list", &directory))?;
            let hash = entry.file_name().to_str().and_then(|name| Digest::parse(&format!("sha256:{name}")).ok());
            if let (Some(hash), Ok(metadata)) = (hash, entry.metadata()) {
                files.push((hash, metadata.len()));
            }
        }
        files.sort_unstable();
        Ok(files)
    }

    /// Removes every file that is not in `referenced`. The caller makes sure that no import is under way whose file is
    /// not referenced yet.
    pub fn remove_unreferenced(&self, referenced: &BTreeSet<Digest>) -> Result<Removed, StoreError> {
        let mut removed = Removed::default();
        for (sha256, bytes) in self.list()? {
            if referenced.contains(&sha256) {
                continue;
            }
            let path = self.path_of(&sha256);
            std::fs::remove_file(&path).map_err(StoreError::directory("remove", &path))?;
            // Without its file the record means nothing; a stale one is seen by its inode.
            let _ = std::fs::remove_file(self.checked_path(&sha256));
            removed.files += 1;
            removed.bytes += bytes;
        }
        Ok(removed)
    }

    /// A new file in `tmp/`.
    pub(crate) fn create_temporary(&self) -> Result<TemporaryFile, StoreError> {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join("tmp").join(format!("{}-{number}", std::process::id()));
        TemporaryFile::create(path.clone()).map_err(|error| {
            if means_full(&error) { self.write_error(error, 0) } else { StoreError::directory("create", &path)(error) }
        })
    }

    /// Gives a complete, durable temporary file its name, unless a good file has that name already.
    pub(crate) fn publish(
        &self,
        temporary: TemporaryFile,
        sha256: Digest,
        size_bytes: u64,
    ) -> Result<StoredFile, StoreError> {
        let _publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        let path = self.path_of(&sha256);
        let existed = path.exists() && self.verify(&sha256).is_ok();
        if !existed {
            temporary.publish(&path).map_err(|error| self.write_error(error, size_bytes))?;
            let blobs = self.root.join("blobs");
            File::open(&blobs)
                .and_then(|directory| directory.sync_all())
                .map_err(StoreError::directory("sync", &blobs))?;
            // Recorded after the rename, which itself moves the file's change time.
            let metadata = path.metadata().map_err(StoreError::directory("read", &path))?;
            self.record_checked(&sha256, Fingerprint::of(&metadata));
        }
        Ok(StoredFile { sha256, size_bytes, path, existed })
    }

    /// An error of a write into the store.
    pub(crate) fn write_error(&self, error: io::Error, needed_bytes: u64) -> StoreError {
        StoreError::of_write(&self.root, error, needed_bytes)
    }

    /// Removes files of imports that did not end; those that are locked are still being written.
    fn remove_leftovers(&self) -> Result<(), StoreError> {
        let directory = self.root.join("tmp");
        for entry in directory.read_dir().map_err(StoreError::directory("list", &directory))? {
            let path = entry.map_err(StoreError::directory("list", &directory))?.path();
            if File::open(&path).is_ok_and(|file| file.try_lock().is_err()) {
                continue;
            }
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(StoreError::directory("remove", &path)(error));
                }
                _ => tracing::info!(path = %path.display(), "removed the remains of an interrupted import"),
            }
        }
        Ok(())
    }

    fn checked_path(&self, sha256: &Digest) -> PathBuf {
        self.root.join("checked").join(sha256.hex())
    }

    fn checked(&self, sha256: &Digest) -> Option<Fingerprint> {
        serde_json::from_slice(&std::fs::read(self.checked_path(sha256)).ok()?).ok()
    }

    /// Remembers a full read. Failing costs only another full read.
    fn record_checked(&self, sha256: &Digest, fingerprint: Fingerprint) {
        let written = self.create_temporary().map_err(io::Error::other).and_then(|mut temporary| {
            temporary.file.write_all(&serde_json::to_vec(&fingerprint).map_err(io::Error::other)?)?;
            temporary.publish(&self.checked_path(sha256))
        });
        if let Err(error) = written {
            tracing::warn!(%sha256, %error, "cannot remember that a file was verified; it will be read in full again");
        }
    }

    fn missing_or_unreadable(&self, sha256: &Digest, error: &io::Error) -> LoadError {
        if error.kind() == ErrorKind::NotFound {
            let message = format!("artifact {sha256} is missing from {}: add the model again", self.root.display());
            return LoadError { message, permanent: true };
        }
        let message = format!("artifact {sha256} in {} cannot be read: {error}", self.root.display());
        LoadError { message, permanent: false }
    }

    /// Takes a corrupt file out of use.
    fn quarantine(&self, sha256: &Digest) -> LoadError {
        let directory = self.root.join("quarantine");
        let target = directory.join(sha256.hex());
        let moved = std::fs::rename(self.path_of(sha256), &target);
        let _ = std::fs::remove_file(self.checked_path(sha256));
        let place = match moved {
            Ok(()) => format!("moved to {}", target.display()),
            Err(error) => format!("and cannot be moved to {}: {error}", target.display()),
        };
        tracing::error!(%sha256, "a stored file is corrupt and {place}");
        limit_quarantine(&directory);
        let message =
            format!("artifact {sha256} is corrupt on disk ({place}): check the disk, then add the model again");
        LoadError { message, permanent: true }
    }
}

/// Keeps the newest corrupt files. Failing here harms nothing but disk space.
fn limit_quarantine(directory: &Path) {
    let Ok(entries) = directory.read_dir() else { return };
    let mut files: Vec<(i64, i64, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let metadata = entry.metadata().ok()?;
            Some((metadata.ctime(), metadata.ctime_nsec(), entry.path()))
        })
        .collect();
    files.sort_unstable();
    for (_, _, path) in files.iter().rev().skip(QUARANTINED_FILES_MAX) {
        let _ = std::fs::remove_file(path);
    }
}
