//! Taking a file into the store: one pass that copies and hashes, then an atomic rename to the content's own name.

use crate::{
    checked::Fingerprint,
    error::{StoreError, means_full},
    store::{Store, StoredFile},
};
use rustix::fs::FallocateFlags;
use sha2::{Digest as _, Sha256};
use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, ErrorKind, Read, Seek, Write},
    os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};
use warmset_core::Digest;

/// The largest file the store takes.
pub const ARTIFACT_BYTES_MAX: u64 = 16 << 40;
/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Stored files are never written again, not even by their owner.
pub(crate) const STORED_FILE_MODE: u32 = 0o444;

/// A file being written. It holds a lock so that another process opening the store does not take it for a leftover,
/// and it removes its file unless it was published.
pub(crate) struct TemporaryFile {
    pub(crate) file: File,
    path: PathBuf,
    published: bool,
}

impl TemporaryFile {
    pub(crate) fn create(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let temporary = Self { file, path, published: false };
        temporary.file.lock()?;
        Ok(temporary)
    }

    /// Takes over a file that is complete and locked.
    pub(crate) fn adopt(file: File, path: PathBuf) -> Self {
        Self { file, path, published: false }
    }

    /// Gives the file its final name. The caller makes the directory durable.
    pub(crate) fn publish(mut self, target: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, target)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.published {
            // Whatever stays behind is removed when the store is opened again.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Copies `path` into the store and returns where it lies there.
pub(crate) fn import_file(
    store: &Store,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<StoredFile, StoreError> {
    let source = open_source(path)?;
    let before = Fingerprint::of(&source.metadata().map_err(StoreError::source(path))?);
    let size_bytes = before.size_bytes;
    if size_bytes > ARTIFACT_BYTES_MAX {
        return Err(StoreError::TooLarge { path: path.to_path_buf(), size_bytes, limit_bytes: ARTIFACT_BYTES_MAX });
    }
    let temporary = store.create_temporary()?;
    let mut copy = Copy { store, path, source, temporary, before };
    let sha256 = copy.run(progress)?;
    let temporary = copy.temporary;
    temporary
        .file
        .set_permissions(Permissions::from_mode(STORED_FILE_MODE))
        .and_then(|()| temporary.file.sync_all())
        .map_err(|error| store.write_error(error, size_bytes))?;
    store.publish(temporary, sha256, size_bytes)
}

/// Opens a regular file and nothing else. A FIFO or a device is not even opened: that could block or have effects.
fn open_source(path: &Path) -> Result<File, StoreError> {
    let check = |metadata: &std::fs::Metadata| match kind_of(metadata) {
        None => Ok(()),
        Some(kind) => Err(StoreError::NotAFile { path: path.to_path_buf(), kind }),
    };
    check(&std::fs::metadata(path).map_err(StoreError::source(path))?)?;
    // The name may have been replaced since: not blocking on a FIFO, and looking again, settles it.
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(StoreError::source(path))?;
    check(&file.metadata().map_err(StoreError::source(path))?)?;
    Ok(file)
}

/// What a thing is if it is not a regular file.
fn kind_of(metadata: &std::fs::Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a directory")
    } else if kind.is_fifo() {
        Some("a FIFO")
    } else if kind.is_socket() {
        Some("a socket")
    } else {
        Some("a device")
    }
}

struct Copy<'a> {
    store: &'a Store,
    path: &'a Path,
    source: File,
    temporary: TemporaryFile,
    before: Fingerprint,
}

impl Copy<'_> {
    /// Fills the temporary file and returns the hash of exactly what is in it.
    fn run(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Digest, StoreError> {
        if self.reflink() {
            // The clone is a snapshot: only a change before this moment can have torn it.
            self.check_unchanged()?;
            return self.hash_clone(progress);
        }
        self.reserve_space()?;
        let sha256 = self.copy_and_hash(progress)?;
        self.check_unchanged()?;
        Ok(sha256)
    }

    /// Shares the source's blocks where the file system can.
    fn reflink(&self) -> bool {
        #[cfg(target_os = "linux")]
        return rustix::fs::ioctl_ficlone(&self.temporary.file, &self.source).is_ok();
        #[cfg(not(target_os = "linux"))]
        return false;
    }

    /// Fails now, not after an hour of copying, where the file system can tell.
    fn reserve_space(&self) -> Result<(), StoreError> {
        if self.before.size_bytes == 0 {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.temporary.file, FallocateFlags::empty(), 0, self.before.size_bytes) {
            Err(errno) if means_full(&errno.into()) => {
                Err(self.store.write_error(errno.into(), self.before.size_bytes))
            }
            // Not supported here: writing will tell.
            _ => Ok(()),
        }
    }

    fn check_unchanged(&self) -> Result<(), StoreError> {
        let after = self.source.metadata().map_err(StoreError::source(self.path))?;
        if Fingerprint::of(&after) == self.before { Ok(()) } else { Err(self.changed()) }
    }

    fn changed(&self) -> StoreError {
        StoreError::SourceChanged { path: self.path.to_path_buf() }
    }

    fn copy_and_hash(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Digest, StoreError> {
        let total_bytes = self.before.size_bytes;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut done_bytes = 0;
        progress(0, total_bytes);
        loop {
            let count = read_some(&mut self.source, &mut buffer).map_err(StoreError::source(self.path))?;
            if count == 0 {
                break;
            }
            done_bytes += count as u64;
            if done_bytes > total_bytes {
                return Err(self.changed());
            }
            hasher.update(&buffer[..count]);
            self.temporary
                .file
                .write_all(&buffer[..count])
                .map_err(|error| self.store.write_error(error, total_bytes))?;
            progress(done_bytes, total_bytes);
        }
        if done_bytes == total_bytes { Ok(Digest(hasher.finalize().into())) } else { Err(self.changed()) }
    }

    fn hash_clone(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Digest, StoreError> {
        let temporary = &mut self.temporary;
        let read = temporary.file.rewind().and_then(|()| hash_file(&mut temporary.file, progress));
        let (sha256, size_bytes) = read.map_err(StoreError::directory("read", &temporary.path))?;
        if size_bytes == self.before.size_bytes { Ok(sha256) } else { Err(self.changed()) }
    }
}

fn read_some(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Hashes a file from where it stands to its end and returns the bytes read.
pub(crate) fn hash_file(file: &mut File, progress: &mut dyn FnMut(u64, u64)) -> io::Result<(Digest, u64)> {
    let total_bytes = file.metadata()?.len();
    let mut hasher = Sha256::new();
    progress(0, total_bytes);
    let done_bytes = hash_rest(file, &mut hasher, &mut |done| progress(done, total_bytes.max(done)))?;
    Ok((Digest(hasher.finalize().into()), done_bytes))
}

/// Feeds a file from where it stands to its end into a hash and returns the bytes read. `progress` hears how many.
pub(crate) fn hash_rest(file: &mut File, hasher: &mut Sha256, progress: &mut dyn FnMut(u64)) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut done_bytes = 0;
    loop {
        let count = read_some(file, &mut buffer)?;
        if count == 0 {
            return Ok(done_bytes);
        }
        hasher.update(&buffer[..count]);
        done_bytes += count as u64;
        progress(done_bytes);
    }
}
