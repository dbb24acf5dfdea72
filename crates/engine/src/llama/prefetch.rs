//! Reading weights ahead of llama.cpp, which maps the file and would wait for the disk page by page.

use rustix::{
    fs::{Advice, fadvise},
    io::{ReadWriteFlags, preadv2},
};
use std::{
    fs::File,
    io::{self, IoSliceMut},
    num::NonZeroU64,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

/// Bytes read at once.
const CHUNK_BYTES: u64 = 4 << 20;
/// Readers at once: enough to keep a disk's queue busy.
const READERS: usize = 4;
/// How often progress is reported.
const REPORT_INTERVAL: Duration = Duration::from_millis(20);

/// A part of a file that is not in memory.
struct Missing {
    file: usize,
    offset: u64,
    length: u64,
}

/// Brings files into the page cache, with as many large reads at once as a disk likes, and reports the share done.
/// Costs next to nothing for files that are there already. Errors are left to whoever reads the file next.
pub(super) fn prefetch(paths: &[PathBuf], report: &mut dyn FnMut(f32)) {
    let Ok(files) = paths.iter().map(File::open).collect::<io::Result<Vec<_>>>() else { return };
    let missing: Vec<Missing> =
        files.iter().enumerate().flat_map(|(index, file)| missing_chunks(index, file)).collect();
    if missing.is_empty() {
        return;
    }
    let total: u64 = missing.iter().map(|chunk| chunk.length).sum();
    let (next, done, failed) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS.min(missing.len()))
            .map(|_| scope.spawn(|| read_chunks(&files, &missing, &next, &done, &failed)))
            .collect();
        while readers.iter().any(|reader| !reader.is_finished()) {
            report(done.load(Ordering::Relaxed) as f32 / total as f32);
            thread::park_timeout(REPORT_INTERVAL);
        }
    });
}

fn read_chunks(files: &[File], missing: &[Missing], next: &AtomicUsize, done: &AtomicU64, failed: &AtomicBool) {
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    while !failed.load(Ordering::Relaxed) {
        let Some(chunk) = missing.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
        let room = &mut buffer[..chunk.length as usize];
        if files[chunk.file].read_exact_at(room, chunk.offset).is_err() {
            failed.store(true, Ordering::Relaxed);
            return;
        }
        done.fetch_add(chunk.length, Ordering::Relaxed);
    }
}

/// The chunks whose first page is not in memory. (`RWF_NOWAIT` reads only what is; file systems that do not know it
/// are taken as cached, which costs them nothing but the speed-up.)
fn missing_chunks(index: usize, file: &File) -> Vec<Missing> {
    let Ok(length) = file.metadata().map(|metadata| metadata.len()) else { return Vec::new() };
    let offsets = (0..length).step_by(CHUNK_BYTES as usize);
    let missing: Vec<Missing> = offsets
        .filter(|offset| !is_resident(file, *offset) || !is_resident(file, offset + CHUNK_BYTES / 2))
        .map(|offset| Missing { file: index, offset, length: CHUNK_BYTES.min(length - offset) })
        .collect();
    if !missing.is_empty() {
        // Our own reads are large and come from several threads: the kernel's guess of the pattern only gets in the way.
        let _ = fadvise(file, 0, NonZeroU64::new(length), Advice::Random);
    }
    missing
}

fn is_resident(file: &File, offset: u64) -> bool {
    let mut byte = [0];
    match preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) {
        Ok(_) => true,
        Err(error) => error != rustix::io::Errno::AGAIN,
    }
}
