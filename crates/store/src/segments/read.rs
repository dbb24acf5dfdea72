//! One read of one block: straight into the memory it is for, compared with what was asked for before anybody sees it.

use super::{
    Inner,
    block::{self, BlockId, PAGE_BYTES},
    buffer::{AlignedBuffer, is_aligned},
    error::ReadError,
    keys::SegmentSalt,
    layer::LayerFile,
    reader::Read,
    seal, segment_name,
    table::Location,
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::Instant,
};
use warmset_core::kv::BlockHeader;

/// Memory that a block is read into. It is given away for the read and comes back with the answer; whole pages that begin
/// at a page spare a copy.
pub trait BlockMemory: AsMut<[u8]> + Send + 'static {}

impl<T: AsMut<[u8]> + Send + 'static> BlockMemory for T {}

/// A block that was read and is what was asked for.
#[derive(Debug)]
pub struct BlockRead<M> {
    /// What its page says. Its tokens are still to be compared.
    pub header: BlockHeader,
    /// The block: page, payload, padding.
    pub memory: M,
}

/// A block that was not read.
#[derive(Debug)]
pub struct ReadFailed<M> {
    /// Why.
    pub error: ReadError,
    /// The memory, zeroed. Nothing where the disk did not answer: it may still write into it.
    pub memory: Option<M>,
}

/// How a read ended.
pub type ReadResult<M> = Result<BlockRead<M>, ReadFailed<M>>;

type Done<M> = Box<dyn FnOnce(ReadResult<M>) + Send>;

pub(super) struct BlockReading<M> {
    inner: Arc<Inner>,
    location: Location,
    wanted: BlockId,
    started: Instant,
    /// Its memory until it runs, and whom to tell until somebody did.
    open: Mutex<(Option<M>, Option<Done<M>>)>,
}

impl<M: BlockMemory> BlockReading<M> {
    pub(super) fn new(inner: &Arc<Inner>, location: Location, wanted: BlockId, memory: M, done: Done<M>) -> Self {
        let open = Mutex::new((Some(memory), Some(done)));
        Self { inner: Arc::clone(inner), location, wanted, started: Instant::now(), open }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<M>, Option<Done<M>>)> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: BlockMemory> Read for BlockReading<M> {
    fn run(&self) {
        let Some(mut memory) = self.lock().0.take() else { return };
        let outcome = self.inner.read_block(&self.location, &self.wanted, memory.as_mut());
        if outcome.is_err() {
            memory.as_mut().fill(0);
        }
        let Some(done) = self.lock().1.take() else {
            // Nobody waits for it any more, and nobody shall find it in the memory.
            memory.as_mut().fill(0);
            return;
        };
        let counters = &self.inner.counters;
        match outcome {
            Ok(header) => {
                counters.blocks_read.fetch_add(1, Ordering::Relaxed);
                counters.bytes_read.fetch_add(self.location.bytes(), Ordering::Relaxed);
                let microseconds = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
                counters.read_microseconds.fetch_add(microseconds, Ordering::Relaxed);
                done(Ok(BlockRead { header, memory }));
            }
            Err(error) => {
                counters.count_failed_read(error);
                done(Err(ReadFailed { error, memory: Some(memory) }));
            }
        }
    }

    fn give_up(&self, error: ReadError) {
        let (memory, done) = {
            let mut open = self.lock();
            (open.0.take(), open.1.take())
        };
        if let Some(done) = done {
            self.inner.counters.count_failed_read(error);
            let memory = memory.map(|mut memory| {
                memory.as_mut().fill(0);
                memory
            });
            done(Err(ReadFailed { error, memory }));
        }
    }
}

impl Inner {
    /// Reads a block into memory that has its length. On an error the memory holds anything.
    fn read_block(&self, location: &Location, wanted: &BlockId, memory: &mut [u8]) -> Result<BlockHeader, ReadError> {
        if memory.len() as u64 != location.bytes() {
            return Err(ReadError::Length);
        }
        let salt = self.table().salt_of_live(location).ok_or(ReadError::Gone)?;
        let read = self.files.with(location.segment, |file| read_pages(file, location.page, memory));
        let outcome = match read {
            Ok(()) => self.opened(location, &salt, memory),
            Err(error) => Err(ReadError::of(&error)),
        };
        // What was taken away while it was read is gone, whatever was read.
        self.table().salt_of_live(location).ok_or(ReadError::Gone)?;
        let header = outcome?;
        if BlockId::from(&header) == *wanted { Ok(header) } else { Err(ReadError::WrongKey) }
    }

    /// Decrypts what was read, if it is encrypted, and compares it with its checksums.
    fn opened(&self, location: &Location, salt: &SegmentSalt, memory: &mut [u8]) -> Result<BlockHeader, ReadError> {
        let page = memory.first_chunk().ok_or(ReadError::Length)?;
        if seal::SealedHeader::is(page) {
            let sealed = seal::SealedHeader::decode(page).ok_or(ReadError::Checksum)?;
            if sealed.pages() != location.pages {
                return Err(ReadError::Checksum);
            }
            let key = seal::key_of(&sealed, &self.keys, salt).ok_or(ReadError::Gone)?;
            seal::open(memory, &sealed, &key, location.page).map_err(|_| ReadError::Checksum)?;
        }
        block::verified(memory).map_err(|error| {
            tracing::debug!(segment = segment_name(location.segment), page = location.page, %error, "a damaged block");
            ReadError::Checksum
        })
    }
}

/// Reads pages of a segment, by way of other memory where the given is not aligned.
pub(super) fn read_pages(file: &dyn LayerFile, page: u32, memory: &mut [u8]) -> std::io::Result<()> {
    let offset_bytes = u64::from(page) * PAGE_BYTES as u64;
    if is_aligned(memory) {
        return file.read_exact_at(memory, offset_bytes);
    }
    let mut aligned = AlignedBuffer::with_pages(memory.len().div_ceil(PAGE_BYTES));
    file.read_exact_at(aligned.as_mut(), offset_bytes)?;
    memory.copy_from_slice(aligned.as_ref().get(..memory.len()).unwrap_or_default());
    Ok(())
}
