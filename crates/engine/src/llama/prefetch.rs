//! Reading weights ahead of llama.cpp, which maps the file only after it has read the tokenizer: the disk works meanwhile.

#![expect(unsafe_code, reason = "mapping a file")]

use rustix::{
    io::{ReadWriteFlags, preadv2},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::{
    fs::File,
    io::{self, IoSliceMut},
    path::PathBuf,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Bytes read at once.
const CHUNK_BYTES: u64 = 4 << 20;
/// Readers at once: while one waits for its pages, the disk already works on the other's.
const READERS: usize = 2;
/// How often progress is reported.
const REPORT_INTERVAL: Duration = Duration::from_millis(20);

/// What may still be missing when llama.cpp begins: it reads the tokenizer first, which takes a while and no weights.
const REST_BYTES: u64 = 256 << 20;

/// A part of a file that is not in memory.
struct Missing {
    file: usize,
    offset: u64,
    length: u64,
}

/// Reading ahead in the background; dropping it waits for what is under way and starts no more.
pub(super) struct ReadAhead {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

struct Shared {
    files: Vec<File>,
    missing: Vec<Missing>,
    next: AtomicUsize,
    done_bytes: AtomicU64,
    stop: AtomicBool,
}

impl ReadAhead {
    /// Begins to bring files into the page cache, with as many large reads at once as a disk likes. Costs next to
    /// nothing for files that are there already. Errors are left to whoever reads the file next.
    pub(super) fn begin(paths: &[PathBuf]) -> Self {
        let files = paths.iter().map(File::open).collect::<io::Result<Vec<_>>>().unwrap_or_default();
        let missing: Vec<Missing> =
            files.iter().enumerate().flat_map(|(index, file)| missing_chunks(index, file)).collect();
        let readers = READERS.min(missing.len());
        let shared = Arc::new(Shared {
            files,
            missing,
            next: AtomicUsize::new(0),
            done_bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let start = |_| {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name("read-ahead".into()).spawn(move || shared.read()).ok()
        };
        Self { readers: (0..readers).filter_map(start).collect(), shared }
    }

    /// Waits until only a rest is missing, and reports the share done.
    pub(super) fn wait(&self, report: &mut dyn FnMut(f32)) {
        let total: u64 = self.shared.missing.iter().map(|chunk| chunk.length).sum();
        while self.readers.iter().any(|reader| !reader.is_finished()) {
            let done = self.shared.done_bytes.load(Ordering::Relaxed);
            if total - done <= REST_BYTES {
                return;
            }
            report(done as f32 / total as f32);
            thread::sleep(REPORT_INTERVAL);
        }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for reader in self.readers.drain(..) {
            // A reader that panicked read nothing wrong; the file is read again by whoever needs it.
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn read(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let Some(chunk) = self.missing.get(self.next.fetch_add(1, Ordering::Relaxed)) else { return };
            if populate(&self.files[chunk.file], chunk.offset, chunk.length).is_err() {
                return;
            }
            self.done_bytes.fetch_add(chunk.length, Ordering::Relaxed);
        }
    }
}

/// Brings a part of a file into the page cache by mapping it for a moment. Unlike `read` it copies nothing, which costs
/// a fast disk more than half of its rate: figures in docs/user-guide/measuring.md.
fn populate(file: &File, offset: u64, length: u64) -> rustix::io::Result<()> {
    // SAFETY: the kernel chooses a free place, nothing is read through the mapping (so a file that shrinks meanwhile
    // does no harm), and it is unmapped whole, once.
    unsafe {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let place = mmap(ptr::null_mut(), length as usize, ProtFlags::READ, flags, file, offset)?;
        munmap(place, length as usize)
    }
}

/// The chunks whose first page is not in memory. (`RWF_NOWAIT` reads only what is; file systems that do not know it
/// are taken as cached, which costs them nothing but the speed-up.)
fn missing_chunks(index: usize, file: &File) -> Vec<Missing> {
    let Ok(length) = file.metadata().map(|metadata| metadata.len()) else { return Vec::new() };
    let offsets = (0..length).step_by(CHUNK_BYTES as usize);
    offsets
        .filter(|offset| !is_resident(file, *offset) || !is_resident(file, offset + CHUNK_BYTES / 2))
        .map(|offset| Missing { file: index, offset, length: CHUNK_BYTES.min(length - offset) })
        .collect()
}

fn is_resident(file: &File, offset: u64) -> bool {
    let mut byte = [0];
    match preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) {
        Ok(_) => true,
        Err(error) => error != rustix::io::Errno::AGAIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Advice, fadvise, fsync};
    use std::io::Write;

    #[test]
    fn what_is_not_in_memory_is_read_and_what_is_stays_untouched() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; (CHUNK_BYTES * 3 + 5) as usize]).unwrap();
        fsync(file.as_file()).unwrap();
        let paths = [file.path().to_owned()];
        assert!(ReadAhead::begin(&paths).readers.is_empty(), "just written: all of it is in memory");
        fadvise(file.as_file(), 0, None, Advice::DontNeed).unwrap();
        let read_ahead = ReadAhead::begin(&paths);
        let missing: u64 = read_ahead.shared.missing.iter().map(|chunk| chunk.length).sum();
        // Where the file system keeps everything in memory (tmpfs) there is nothing to do.
        assert!(missing == 0 || missing == CHUNK_BYTES * 3 + 5, "{missing}");
        while read_ahead.readers.iter().any(|reader| !reader.is_finished()) {
            thread::yield_now();
        }
        assert_eq!(read_ahead.shared.done_bytes.load(Ordering::Relaxed), missing);
        drop(read_ahead);
        assert!(ReadAhead::begin(&paths).readers.is_empty(), "now it is in memory");
        assert!(ReadAhead::begin(&["/nowhere".into()]).readers.is_empty(), "errors are somebody else's");
    }
}
