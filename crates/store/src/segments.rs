//! Blocks of KV on a disk: append-only segment files, verified on every read, bounded in every respect.
//!
//! What to keep is decided elsewhere; here a block is durable before anybody hears where it lies, is compared with what was
//! asked for before anybody sees it, and its pages go back to the disk when it is given up, so that what is kept is never
//! written twice. One thread writes, a few read, and every answer comes through a function given with the question.

mod ahead;
mod block;
mod buffer;
mod error;
mod files;
mod format;
mod keys;
pub mod layer;
mod lock;
mod queue;
mod read;
mod reader;
mod recovery;
mod seal;
mod table;
mod writer;

pub use block::{BlockError, BlockId, PAGE_BYTES, PAYLOAD_BYTES_MAX, pages_of};
pub use buffer::AlignedBuffer;
pub use error::{AppendError, REASONS, ReadError};
pub use files::OPEN_FILES_MAX;
pub use keys::DOMAINS_MAX;
pub use queue::{BlockBytes, Refused};
pub use read::{BlockMemory, BlockRead, ReadFailed, ReadResult};
pub use reader::{READS_WAITING_MAX, STUCK_READS_MAX};
pub use recovery::{FOUND_PER_BATCH_MAX, Found, Recovered, Recovery};
pub use table::{Dropped, Location, SegmentUse};

use crate::error::StoreError;
use layer::{Directory, Layer};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
        mpsc::{self, Receiver},
    },
    time::{Duration, Instant},
};
use warmset_core::kv::TrustDomain;

/// How the store is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// The most that the directory may take, with everything that is in it.
    pub bytes_max: u64,
    /// What stays free on the file system for others.
    pub free_bytes_min: u64,
    /// Where a segment ends. A small bound makes it smaller.
    pub segment_bytes: u64,
    /// Whether blocks are encrypted. What was written before the switch was turned on is dropped.
    pub encrypt: bool,
    /// Blocks that may wait to be written, in bytes; a caller beyond them is told.
    pub queue_bytes_max: u64,
    /// Threads that read.
    pub read_threads: usize,
    /// How long a disk that failed is left alone at first; then twice as long, up to [`RETRY_AFTER_MAX`].
    pub retry_after: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bytes_max: 0,
            free_bytes_min: 1 << 30,
            segment_bytes: 256 << 20,
            encrypt: false,
            queue_bytes_max: 256 << 20,
            read_threads: 4,
            retry_after: Duration::from_millis(250),
        }
    }
}

/// The longest that a disk that failed is left alone.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// A bound holds at least so many segments.
const SEGMENTS_MIN: u64 = 16;
/// A segment is no smaller, whatever the bound: a file for every block would be too many.
const SEGMENT_BYTES_MIN: u64 = 4 << 20;
/// How long closing, and a purge, wait for a disk that does not answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was counted since the start.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Figures {
    /// What the directory takes, foreign files included.
    pub used_bytes: u64,
    /// What of it is blocks that can be read.
    pub live_bytes: u64,
    /// Blocks that can be read.
    pub live_blocks: usize,
    /// Files in the directory that are not the store's.
    pub foreign_files: u64,
    /// What is not segments takes, the directory itself included.
    pub foreign_bytes: u64,
    /// What could be written to the file system when something was written last.
    pub free_bytes: u64,
    /// Everything that was written to the disk: its wear.
    pub bytes_written: u64,
    /// Blocks that became durable.
    pub blocks_written: u64,
    /// Blocks that did not.
    pub blocks_not_written: u64,
    /// Blocks that were read.
    pub blocks_read: u64,
    /// Their bytes.
    pub bytes_read: u64,
    /// The time their callers waited for them, altogether.
    pub read_microseconds: u64,
    /// Blocks that were not read, by the reason's place in [`REASONS`].
    pub reads_failed: [u64; REASONS.len()],
    /// Blocks that wait to be written, in bytes.
    pub queued_bytes: u64,
    /// How long the write under way has taken, if one is.
    pub writing_for: Option<Duration>,
    /// Threads that the disk keeps.
    pub stuck_reads: usize,
    /// Whether these are so many that nothing more is read.
    pub is_off: bool,
    /// Why nothing is written, if that is so.
    pub fault: Option<AppendError>,
}

/// What a purge removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Purged {
    /// Blocks that could be read before and the bytes they took.
    pub dropped: Dropped,
    /// Whether the domain had a key, which is gone.
    pub key_destroyed: bool,
    /// Whether the bytes have left the disk too. If not, no block of the domain can be read through the store any more,
    /// and their bytes are tried again.
    pub is_complete: bool,
}

#[derive(Default)]
pub(crate) struct Counters {
    bytes_written: AtomicU64,
    blocks_written: AtomicU64,
    blocks_not_written: AtomicU64,
    blocks_read: AtomicU64,
    bytes_read: AtomicU64,
    read_microseconds: AtomicU64,
    reads_failed: [AtomicU64; REASONS.len()],
}

impl Counters {
    fn count_failed_read(&self, error: ReadError) {
        self.reads_failed[error.number()].fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) struct Inner {
    options: Options,
    directory: PathBuf,
    layer: Arc<dyn Layer>,
    keys: keys::Keys,
    files: files::Files,
    table: Mutex<table::Table>,
    /// Told when the table's `is_counted` or `is_complete` changes.
    recovered: Condvar,
    queue: queue::Queue,
    counters: Counters,
    /// What the file system had left when that was looked at last; as long as nobody has looked, there is room.
    free_bytes: AtomicU64,
    next_segment: AtomicU32,
    is_closing: AtomicBool,
    lock: lock::Lock,
    /// Why what was to be written last was not.
    fault: Mutex<Option<AppendError>>,
}

impl Inner {
    fn table(&self) -> MutexGuard<'_, table::Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps why the disk takes nothing, or that it does.
    fn note_fault(&self, fault: Option<AppendError>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// Waits until the table is so far, the store closes or patience ends. Whether it is so far.
    fn wait_for(&self, is_so_far: impl Fn(&table::Table) -> bool, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut table = self.table();
        while !is_so_far(&table) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_closing() {
                return false;
            }
            table = self.recovered.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// A directory of blocks. One process has it at a time.
pub struct Segments {
    inner: Arc<Inner>,
    readers: reader::Readers,
}

impl Segments {
    /// Opens the directory, creates it if needed, and returns at once. What is in it comes through the receiver, from the
    /// newest segment to the oldest, while blocks are already written and read.
    pub fn open(directory: &Path, options: Options) -> Result<(Self, Receiver<Recovery>), StoreError> {
        let layer = Directory::open(directory).map_err(StoreError::directory("create", directory))?;
        Self::open_on(Arc::new(layer), directory, options)
    }

    /// As [`Self::open`], over another layer. Keys and the lock lie in the directory itself.
    pub fn open_on(
        layer: Arc<dyn Layer>,
        directory: &Path,
        mut options: Options,
    ) -> Result<(Self, Receiver<Recovery>), StoreError> {
        let lock = lock::Lock::take(directory)?;
        options.segment_bytes = options.segment_bytes.min(options.bytes_max / SEGMENTS_MIN).max(SEGMENT_BYTES_MIN);
        let names = layer.names().map_err(StoreError::directory("list", directory))?;
        let last = names.iter().filter_map(|name| segment_number(name)).max();
        let inner = Arc::new(Inner {
            directory: directory.to_path_buf(),
            keys: keys::Keys::open(directory)?,
            files: files::Files::new(Arc::clone(&layer)),
            table: Mutex::default(),
            recovered: Condvar::new(),
            queue: queue::Queue::new(options.queue_bytes_max),
            counters: Counters::default(),
            free_bytes: AtomicU64::new(u64::MAX),
            next_segment: AtomicU32::new(last.map_or(0, |last| last.saturating_add(1))),
            is_closing: AtomicBool::new(false),
            lock,
            fault: Mutex::default(),
            options,
            layer,
        });
        let cannot_start = || StoreError::directory("start the threads of", directory);
        let readers = reader::Readers::start(inner.options.read_threads).map_err(cannot_start())?;
        let (sender, receiver) = mpsc::sync_channel(recovery::BATCHES_WAITING_MAX);
        let recovering = Arc::clone(&inner);
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(cannot_start())
        };
        spawn("kv-recover", Box::new(move || recovery::recover(&recovering, names, &sender)))?;
        let writing = Arc::clone(&inner);
        spawn("kv-write", Box::new(move || writer::Writer::new(writing).run()))?;
        Ok((Self { inner, readers }, receiver))
    }

    /// Where it lies.
    pub fn directory(&self) -> &Path {
        &self.inner.directory
    }

    /// Writes blocks; `done` hears, in their order, where each lies now that it is durable, or why not. It is called from
    /// the thread that writes and must not wait. When too much waits already, everything comes back at once.
    pub fn append(
        &self,
        blocks: Vec<BlockBytes>,
        done: impl FnOnce(Vec<Result<Location, AppendError>>) + Send + 'static,
    ) -> Result<(), Refused> {
        self.inner.queue.append(blocks, Box::new(done))
    }

    /// As [`Self::append`], and waits.
    pub fn append_and_wait(&self, blocks: Vec<BlockBytes>) -> Result<Vec<Result<Location, AppendError>>, Refused> {
        let count = blocks.len();
        let (sender, receiver) = mpsc::channel();
        self.append(blocks, move |results| drop(sender.send(results)))?;
        Ok(receiver.recv().unwrap_or_else(|_| vec![Err(AppendError::Closed); count]))
    }

    /// Reads a block into memory that has its length. `done` hears before the deadline, from a thread of the store.
    pub fn read<M: BlockMemory>(
        &self,
        location: Location,
        wanted: BlockId,
        memory: M,
        deadline: Instant,
        done: impl FnOnce(ReadResult<M>) + Send + 'static,
    ) {
        let reading = read::BlockReading::new(&self.inner, location, wanted, memory, Box::new(done));
        self.readers.submit(Arc::new(reading), deadline);
    }

    /// As [`Self::read`], and waits.
    pub fn read_and_wait<M: BlockMemory>(
        &self,
        location: Location,
        wanted: BlockId,
        memory: M,
        deadline: Instant,
    ) -> ReadResult<M> {
        let (sender, receiver) = mpsc::channel();
        self.read(location, wanted, memory, deadline, move |result| drop(sender.send(result)));
        receiver.recv().unwrap_or(Err(ReadFailed { error: ReadError::Gone, memory: None }))
    }

    /// Gives a block up: it cannot be read from now on, and its pages go back to the disk before the next block is written.
    /// False if it was given up already.
    pub fn retire(&self, location: &Location) -> bool {
        let was_live = self.inner.table().retire(location);
        if was_live {
            self.inner.queue.ask_to_clear();
        }
        was_live
    }

    /// Gives all blocks of a segment up, which costs the disk less than one by one.
    pub fn drop_segment(&self, segment: u32) -> Dropped {
        let dropped = self.inner.table().drop_segment(segment);
        self.inner.queue.ask_to_clear();
        dropped
    }

    /// Gives up what was made before then (in seconds since 1970), and says which blocks these were.
    pub fn expire(&self, before_seconds: u64) -> Vec<Location> {
        let expired = self.inner.table().expire(before_seconds);
        if !expired.is_empty() {
            self.inner.queue.ask_to_clear();
        }
        expired
    }

    /// Makes everything of a trust domain unreadable at once: what is written, what waits to be, and what is still to be
    /// found. Then waits, with patience, until its bytes have left the disk.
    pub fn purge(&self, domain: &TrustDomain) -> Result<Purged, StoreError> {
        let inner = &self.inner;
        let not_written = inner.queue.purge(domain);
        inner.counters.blocks_not_written.fetch_add(not_written as u64, Ordering::Relaxed);
        let mut dropped = inner.table().purge(domain);
        // The keys that lie there now may be another process's.
        inner
            .lock
            .check()
            .map_err(|error| StoreError::directory("clear", &inner.directory)(io::Error::other(error)))?;
        let key = inner.keys.destroy(&domain.0);
        let recovered = inner.wait_for(|table| table.is_complete, PATIENCE);
        // What the recovery was adding at that moment.
        let more = inner.table().purge(domain);
        dropped.blocks += more.blocks;
        dropped.bytes += more.bytes;
        let cleared = inner.queue.clear_and_wait(PATIENCE);
        let key_destroyed = key.map_err(StoreError::directory("destroy a key in", &inner.directory))?;
        Ok(Purged { dropped, key_destroyed, is_complete: recovered && cleared })
    }

    /// Waits, with patience, until all that is in the directory was found. Whether it was.
    pub fn wait_until_found(&self) -> bool {
        self.inner.wait_for(|table| table.is_complete, PATIENCE)
    }

    /// Waits, with patience, until what was given up has left the disk. Whether it has.
    pub fn wait_until_cleared(&self) -> bool {
        self.inner.queue.clear_and_wait(PATIENCE)
    }

    /// What each segment holds, in the order of their numbers.
    pub fn segments(&self) -> Vec<SegmentUse> {
        self.inner.table().segments()
    }

    /// What was counted.
    pub fn figures(&self) -> Figures {
        let (used_bytes, live, foreign_files, foreign_bytes) = {
            let table = self.inner.table();
            (table.used_bytes(), table.live(), table.foreign_files, table.foreign_bytes)
        };
        let counters = &self.inner.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (queued_bytes, writing_for) = self.inner.queue.figures();
        let (stuck_reads, is_off) = self.readers.stuck();
        Figures {
            used_bytes,
            live_bytes: live.bytes,
            live_blocks: live.blocks,
            foreign_files,
            foreign_bytes,
            free_bytes: get(&self.inner.free_bytes),
            bytes_written: get(&counters.bytes_written),
            blocks_written: get(&counters.blocks_written),
            blocks_not_written: get(&counters.blocks_not_written),
            blocks_read: get(&counters.blocks_read),
            bytes_read: get(&counters.bytes_read),
            read_microseconds: get(&counters.read_microseconds),
            reads_failed: std::array::from_fn(|reason| get(&counters.reads_failed[reason])),
            queued_bytes,
            writing_for,
            stuck_reads,
            is_off,
            fault: self.inner.fault.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

impl Drop for Segments {
    /// Writes what waits and closes the open segment, so that the next start need not look at its blocks one by one. A disk
    /// that does not answer is waited for with patience, then left.
    fn drop(&mut self) {
        self.inner.is_closing.store(true, Ordering::Relaxed);
        self.inner.recovered.notify_all();
        if !self.inner.queue.close_and_wait(PATIENCE) {
            tracing::warn!(directory = %self.inner.directory.display(), "the KV tier's disk does not answer; left as it is");
        }
    }
}

/// What files end in that whoever uses the directory keeps beside the segments: they are nobody else's.
pub const NOTE_SUFFIX: &str = "model";

/// No segment that was written here has this number or a higher one: a file of such a name is somebody else's.
const SEGMENT_NUMBER_END: u32 = 1 << 31;

/// The name of a segment's file.
pub(crate) fn segment_name(segment: u32) -> String {
    format!("{segment:08x}.segment")
}

/// The number of the segment that has this name, exactly.
pub(crate) fn segment_number(name: &str) -> Option<u32> {
    let number = u32::from_str_radix(name.strip_suffix(".segment")?, 16).ok()?;
    // Numbers only grow: so there are always some left.
    (number < SEGMENT_NUMBER_END && segment_name(number) == name).then_some(number)
}
