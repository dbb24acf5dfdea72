//! Blocks to store, and a disk that does wrong what it is told to.

use rustix::io::Errno;
use std::{
    io,
    num::NonZeroU64,
    path::Path,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
        mpsc::Receiver,
    },
    time::{Duration, Instant},
};
use warmset_core::kv::{BlockHeader, BlockKey, KvIdentity, TrustDomain, header::payload_checksum};
use warmset_store::segments::{
    AlignedBuffer, BlockBytes, BlockId, BlockRead, Found, Location, Options, PAGE_BYTES, ReadError, Recovered,
    Recovery, Segments,
    layer::{Directory, Entry, Layer, LayerFile, Size},
    pages_of,
};

/// Much longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A repeatable source of numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub(crate) fn domain(number: u8) -> TrustDomain {
    TrustDomain::named(&format!("number {number}"))
}

/// A block whose every byte follows from its number.
pub(crate) fn block(number: u64, domain_number: u8, payload_bytes: u32) -> (BlockId, Arc<AlignedBuffer>) {
    let mut random = Random(number);
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    let id = BlockId { identity: KvIdentity([7; 32]), key: BlockKey(key), domain: domain(domain_number) };
    let mut memory = AlignedBuffer::with_pages(pages_of(u64::from(payload_bytes)).unwrap() as usize);
    let payload = &mut memory.as_mut()[PAGE_BYTES..PAGE_BYTES + payload_bytes as usize];
    for piece in payload.chunks_mut(8) {
        piece.copy_from_slice(&random.next().to_le_bytes()[..piece.len()]);
    }
    let header = BlockHeader {
        identity: id.identity,
        domain: id.domain,
        key: id.key,
        parent: BlockKey([3; 32]),
        first_token: 64,
        tokens: (0..64).map(|at| (number as u32).wrapping_mul(2_654_435_761) ^ at).collect(),
        payload_bytes: u64::from(payload_bytes),
        payload_checksum: payload_checksum(payload),
        written_at_seconds: 1_000_000 + number,
    };
    header.encode(memory.as_mut().first_chunk_mut().unwrap());
    (id, Arc::new(memory))
}

pub(crate) fn bytes(block: &Arc<AlignedBuffer>) -> BlockBytes {
    Arc::clone(block) as BlockBytes
}

pub(crate) fn options(bytes_max: u64) -> Options {
    Options { bytes_max, free_bytes_min: 0, retry_after: Duration::from_millis(1), ..Options::default() }
}

/// Everything that was found, until there is nothing more.
pub(crate) fn all(receiver: &Receiver<Recovery>) -> (Vec<Found>, Recovered) {
    let mut found = Vec::new();
    loop {
        match receiver.recv_timeout(PATIENCE).expect("the recovery ends") {
            Recovery::Found(batch) => found.extend(batch),
            Recovery::Complete(recovered) => return (found, recovered),
        }
    }
}

pub(crate) fn open(directory: &Path, options: Options) -> (Segments, Vec<Found>, Recovered) {
    let (segments, receiver) = Segments::open(directory, options).unwrap();
    let (found, recovered) = all(&receiver);
    (segments, found, recovered)
}

/// Writes one block that must get there.
pub(crate) fn put(segments: &Segments, block: &Arc<AlignedBuffer>) -> Location {
    segments.append_and_wait(vec![bytes(block)]).unwrap().remove(0).unwrap()
}

/// Reads a block; on an error the memory must be zeroed.
pub(crate) fn read(
    segments: &Segments,
    location: Location,
    key: BlockId,
) -> Result<BlockRead<AlignedBuffer>, ReadError> {
    let mut memory = AlignedBuffer::with_pages(location.pages as usize);
    memory.as_mut().fill(0x55);
    segments.read_and_wait(location, key, memory, Instant::now() + PATIENCE).map_err(|failed| {
        let memory = failed.memory.expect("the memory comes back");
        assert!(memory.as_ref().iter().all(|byte| *byte == 0), "{}: bytes are left in the memory", failed.error);
        failed.error
    })
}

pub(crate) fn assert_reads(segments: &Segments, location: Location, key: BlockId, block: &Arc<AlignedBuffer>) {
    let read = read(segments, location, key).unwrap();
    assert_eq!(BlockId::from(&read.header), key);
    assert!(read.memory.as_ref() == (**block).as_ref(), "the bytes of {location:?} are others");
}

/// Waits for a condition of another thread.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What the directory takes, as `du` counts.
pub(crate) fn disk_use(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = directory.read_dir().unwrap().flatten();
    let files = entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.blocks() * 512);
    files.sum::<u64>() + directory.metadata().unwrap().blocks() * 512
}

/// What goes wrong with reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum ReadFault {
    #[default]
    None,
    Short,
    Flip(usize),
    Error,
    Hang,
}

/// What goes wrong; shared by everybody who looks at the disk.
#[derive(Default)]
pub(crate) struct Faults {
    /// Writes that still succeed before one fails; never if negative.
    pub(crate) writes_until_failure: AtomicI64,
    pub(crate) write_error: Mutex<Option<Errno>>,
    pub(crate) is_full: AtomicBool,
    pub(crate) fails_sync: AtomicBool,
    pub(crate) cannot_punch: AtomicBool,
    pub(crate) read: Mutex<ReadFault>,
    pub(crate) released: Condvar,
    /// Bytes per second, if not zero.
    pub(crate) bandwidth: AtomicU64,
    /// Holds every write while it is held.
    pub(crate) write_gate: Mutex<()>,
}

impl Faults {
    pub(crate) fn set_read(&self, fault: ReadFault) {
        *self.read.lock().unwrap() = fault;
        self.released.notify_all();
    }
}

pub(crate) struct FaultyDirectory {
    inner: Directory,
    faults: Arc<Faults>,
}

struct FaultyFile {
    inner: Box<dyn LayerFile>,
    faults: Arc<Faults>,
}

/// A store over a disk that does wrong what `faults` say.
pub(crate) fn open_faulty(directory: &Path, options: Options) -> (Segments, Arc<Faults>, Vec<Found>) {
    let faults = Arc::new(Faults::default());
    faults.writes_until_failure.store(-1, Ordering::Relaxed);
    let layer = FaultyDirectory { inner: Directory::open(directory).unwrap(), faults: Arc::clone(&faults) };
    let (segments, receiver) = Segments::open_on(Arc::new(layer), directory, options).unwrap();
    let (found, _) = all(&receiver);
    (segments, faults, found)
}

impl FaultyDirectory {
    fn wrap(&self, inner: io::Result<Box<dyn LayerFile>>) -> io::Result<Box<dyn LayerFile>> {
        Ok(Box::new(FaultyFile { inner: inner?, faults: Arc::clone(&self.faults) }))
    }
}

impl Layer for FaultyDirectory {
    fn names(&self) -> io::Result<Vec<String>> {
        self.inner.names()
    }
    fn entry(&self, name: &str) -> io::Result<Entry> {
        self.inner.entry(name)
    }
    fn own_bytes(&self) -> io::Result<u64> {
        self.inner.own_bytes()
    }
    fn create(&self, name: &str) -> io::Result<Box<dyn LayerFile>> {
        self.wrap(self.inner.create(name))
    }
    fn open(&self, name: &str) -> io::Result<Box<dyn LayerFile>> {
        self.wrap(self.inner.open(name))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }
    fn sync_names(&self) -> io::Result<()> {
        self.inner.sync_names()
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.inner.free_bytes()
    }
}

impl LayerFile for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let faults = &self.faults;
        let bandwidth = faults.bandwidth.load(Ordering::Relaxed);
        if bandwidth > 0 {
            std::thread::sleep(Duration::from_secs_f64(buffer.len() as f64 / bandwidth as f64));
        }
        let fault = {
            let fault = faults.read.lock().unwrap();
            let hanging = faults.released.wait_while(fault, |fault| *fault == ReadFault::Hang).unwrap();
            *hanging
        };
        match fault {
            ReadFault::Error => return Err(Errno::IO.into()),
            ReadFault::Short => return self.inner.read_at(&mut buffer[..PAGE_BYTES / 2], offset_bytes).map(|_| 100),
            _ => {}
        }
        let read = self.inner.read_at(buffer, offset_bytes)?;
        if let ReadFault::Flip(at) = fault {
            buffer[at] ^= 0x10;
        }
        Ok(read)
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        let faults = &self.faults;
        drop(faults.write_gate.lock().unwrap());
        if faults.is_full.load(Ordering::Relaxed) {
            // As a disk does it: some of it, then nothing.
            if bytes.len() > PAGE_BYTES {
                return self.inner.write_at(&bytes[..PAGE_BYTES], offset_bytes);
            }
            return Err(Errno::NOSPC.into());
        }
        let left = faults.writes_until_failure.fetch_sub(1, Ordering::Relaxed);
        if left == 0 {
            let half = bytes.len() / 2 / PAGE_BYTES * PAGE_BYTES;
            self.inner.write_at(&bytes[..half], offset_bytes)?;
            return Err(faults.write_error.lock().unwrap().unwrap_or(Errno::IO).into());
        }
        if left < 0 {
            faults.writes_until_failure.store(-1, Ordering::Relaxed);
        }
        self.inner.write_at(bytes, offset_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        if self.faults.fails_sync.swap(false, Ordering::Relaxed) { Err(Errno::IO.into()) } else { self.inner.sync() }
    }

    fn set_length(&self, length_bytes: u64) -> io::Result<()> {
        self.inner.set_length(length_bytes)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: NonZeroU64) -> io::Result<()> {
        if self.faults.cannot_punch.load(Ordering::Relaxed) {
            return Err(Errno::OPNOTSUPP.into());
        }
        self.inner.punch(offset_bytes, length_bytes)
    }

    fn size(&self) -> io::Result<Size> {
        self.inner.size()
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<(u64, u64)>> {
        self.inner.next_data(offset_bytes)
    }
}
