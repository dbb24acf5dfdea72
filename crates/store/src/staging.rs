//! Files on their way into the store from elsewhere: they outlive the process, so that a fetch that was cut off goes on
//! where it stopped.

use crate::{
    error::{StoreError, means_full},
    import::{STORED_FILE_MODE, TemporaryFile, hash_rest},
    store::{Store, StoredFile},
};
use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{DirEntry, File, OpenOptions, Permissions, TryLockError},
    io::{self, ErrorKind, Seek, SeekFrom, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};
use warmset_core::Digest;

/// Unfinished files that are kept; beyond it the one untouched for longest goes.
pub const UNFINISHED_FILES_MAX: usize = 256;
/// An unfinished file that nobody went on with for so long is removed.
pub const UNFINISHED_AGE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest record of an unfinished file.
const RECORD_BYTES_MAX: u64 = 64 << 10;
/// Where the kernel says which start of the machine this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What the other side said of the bytes that are here, to go on only with the rest of the same.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Origin {
    /// The entity tag, as it was sent.
    pub entity_tag: Option<String>,
    /// When it was last modified, as it was sent.
    pub last_modified: Option<String>,
    /// The length of the whole.
    pub size_bytes: Option<u64>,
    /// The start of the machine in which the bytes were written. After another one what is here may be less than what
    /// its length says: nothing was made durable yet.
    pub boot: String,
}

/// One file that is being fetched. Dropping it keeps what is there.
#[derive(Debug)]
pub struct Staging {
    file: File,
    path: PathBuf,
    root: PathBuf,
    /// What the bytes are of; none while there are none.
    pub origin: Option<Origin>,
}

impl Store {
    /// Opens the unfinished file of this key, or begins one. One fetch at a time has it.
    pub fn stage(&self, key: &str) -> Result<Staging, StoreError> {
        let path = self.root().join(DIRECTORY).join(Digest(Sha256::digest(key).into()).hex());
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = open.map_err(StoreError::directory("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StoreError::BeingFetched),
            Err(TryLockError::Error(error)) => return Err(StoreError::directory("lock", &path)(error)),
        }
        let mut staging = Staging { file, path, root: self.root().to_path_buf(), origin: None };
        staging.origin = staging.read_origin();
        if staging.origin.is_none() {
            staging.restart()?;
        }
        Ok(staging)
    }

    /// Gives a complete file its place. Its bytes must have this hash.
    pub fn publish_staged(&self, staging: Staging, sha256: Digest) -> Result<StoredFile, StoreError> {
        let size_bytes = staging.length()?;
        staging
            .file
            .set_permissions(Permissions::from_mode(STORED_FILE_MODE))
            .and_then(|()| staging.file.sync_all())
            .map_err(|error| self.write_error(error, size_bytes))?;
        let record = staging.record_path();
        let stored = self.publish(TemporaryFile::adopt(staging.file, staging.path), sha256, size_bytes)?;
        // Without its file it means nothing, and the next start removes it.
        let _ = std::fs::remove_file(record);
        Ok(stored)
    }
}

/// Where unfinished files lie, below the store.
pub(crate) const DIRECTORY: &str = "unfinished";

impl Staging {
    /// Bytes that are here.
    pub fn length(&self) -> Result<u64, StoreError> {
        Ok(self.file.metadata().map_err(StoreError::directory("read", &self.path))?.len())
    }

    /// Forgets what is here and begins anew.
    pub fn restart(&mut self) -> Result<(), StoreError> {
        self.origin = None;
        let _ = std::fs::remove_file(self.record_path());
        let cut = self.file.set_len(0).and_then(|()| self.file.rewind());
        cut.map_err(StoreError::directory("write to", &self.path))
    }

    /// Remembers what the bytes that follow are of, before the first of them.
    pub fn remember(&mut self, origin: Origin) -> Result<(), StoreError> {
        let origin = Origin { boot: this_boot(), ..origin };
        let text = serde_json::to_vec(&origin).map_err(io::Error::other);
        let written = text.and_then(|text| std::fs::write(self.record_path(), text));
        written.map_err(|error| self.write_error(error, 0))?;
        self.origin = Some(origin);
        Ok(())
    }

    /// Whether everything that was written is there: the machine was not started again since.
    pub fn is_whole(&self) -> bool {
        self.origin.as_ref().is_some_and(|origin| !origin.boot.is_empty() && origin.boot == this_boot())
    }

    /// Hashes what is here, and leaves the file where writing goes on.
    pub fn hash(&mut self, progress: &mut dyn FnMut(u64)) -> Result<Sha256, StoreError> {
        let mut hasher = Sha256::new();
        let read = self.file.rewind().and_then(|()| hash_rest(&mut self.file, &mut hasher, progress));
        read.and_then(|_| self.file.seek(SeekFrom::End(0))).map_err(StoreError::directory("read", &self.path))?;
        Ok(hasher)
    }

    /// Fails now, not after an hour, if the file cannot become so long.
    pub fn reserve(&self, size_bytes: u64) -> Result<(), StoreError> {
        let missing = size_bytes.saturating_sub(self.length()?);
        if missing == 0 {
            return Ok(());
        }
        if let Ok(figures) = rustix::fs::statvfs(&self.root)
            && figures.f_bavail.saturating_mul(figures.f_frsize) < missing
        {
            return Err(StoreError::DiskFull { directory: self.root.clone(), needed_bytes: missing });
        }
        // Its length stays: that is what says where to go on.
        match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, size_bytes) {
            Err(errno) if means_full(&errno.into()) => Err(self.write_error(errno.into(), missing)),
            // Not supported here: writing will tell.
            _ => Ok(()),
        }
    }

    /// Appends bytes.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file.write_all(bytes).map_err(|error| self.write_error(error, bytes.len() as u64))
    }

    /// Another handle, to make durable what is written while more is written.
    pub fn second_handle(&self) -> Result<File, StoreError> {
        self.file.try_clone().map_err(StoreError::directory("open", &self.path))
    }

    /// Removes it.
    pub fn discard(self) {
        let _ = std::fs::remove_file(self.record_path());
        let _ = std::fs::remove_file(&self.path);
    }

    fn record_path(&self) -> PathBuf {
        self.path.with_extension("json")
    }

    fn read_origin(&self) -> Option<Origin> {
        let path = self.record_path();
        if path.metadata().ok()?.len() > RECORD_BYTES_MAX {
            return None;
        }
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    fn write_error(&self, error: io::Error, needed_bytes: u64) -> StoreError {
        StoreError::of_write(&self.root, error, needed_bytes)
    }
}

fn this_boot() -> String {
    std::fs::read_to_string(BOOT_ID).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Removes what is too old or too much, and records without a file. Files that are being fetched stay.
pub(crate) fn tidy(root: &Path) -> Result<(), StoreError> {
    let directory = root.join(DIRECTORY);
    let mut files: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in directory.read_dir().map_err(StoreError::directory("list", &directory))? {
        let entry = entry.map_err(StoreError::directory("list", &directory))?;
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            if !path.with_extension("").exists() {
                remove(&path)?;
            }
        } else if let Some(modified) = modified(&entry) {
            files.push((modified, path));
        }
    }
    files.sort_unstable();
    let excess = files.len().saturating_sub(UNFINISHED_FILES_MAX);
    for (index, (modified, path)) in files.iter().enumerate() {
        let old = modified.elapsed().is_ok_and(|age| age > UNFINISHED_AGE_MAX);
        let busy = || File::open(path).is_ok_and(|file| file.try_lock().is_err());
        if (index < excess || old) && !busy() {
            remove(path)?;
            let _ = std::fs::remove_file(path.with_extension("json"));
        }
    }
    Ok(())
}

fn modified(entry: &DirEntry) -> Option<SystemTime> {
    entry.metadata().ok()?.modified().ok()
}

fn remove(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(StoreError::directory("remove", path)(error)),
        _ => Ok(()),
    }
}
