//! How fast blocks go to a disk and come back, beside plain direct I/O of as many bytes; and how fast a store with very many
//! blocks starts.
//!
//! `cargo run --release -p warmset-store --example segments_speed -- DIRECTORY plain|segments|encrypted OBJECTS BYTES CONCURRENCY`
//! `cargo run --release -p warmset-store --example segments_speed -- DIRECTORY fill|start BLOCKS`

#[path = "segments_speed/many.rs"]
mod many;

use rustix::fs::OFlags;
use serde_json::{Value, json};
use std::{
    error::Error,
    fs::OpenOptions,
    io::Write,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};
use warmset_core::kv::{BlockHeader, BlockKey, KvIdentity, TrustDomain, header::payload_checksum};
use warmset_store::segments::{
    AlignedBuffer, BlockBytes, BlockId, Location, Options, PAGE_BYTES, Recovery, Segments, pages_of,
};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;
/// Blocks that are written together.
const BATCH: usize = 32;
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn id(number: u64) -> BlockId {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&number.to_le_bytes());
    BlockId { identity: KvIdentity([1; 32]), domain: TrustDomain([2; 32]), key: BlockKey(key) }
}

/// A block of bytes that cannot be compressed.
pub(crate) fn block(number: u64, payload_bytes: usize) -> Outcome<AlignedBuffer> {
    let pages = pages_of(payload_bytes as u64).ok_or("no block is so long")?;
    let mut memory = AlignedBuffer::with_pages(pages as usize);
    let payload = &mut memory.as_mut()[PAGE_BYTES..PAGE_BYTES + payload_bytes];
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for piece in payload.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        piece.copy_from_slice(&state.to_le_bytes());
    }
    let id = id(number);
    let header = BlockHeader {
        identity: id.identity,
        domain: id.domain,
        key: id.key,
        parent: BlockKey([3; 32]),
        first_token: number * 64,
        tokens: (0..64).collect(),
        payload_bytes: payload_bytes as u64,
        payload_checksum: payload_checksum(payload),
        written_at_seconds: 1_800_000_000,
    };
    header.encode(memory.as_mut().first_chunk_mut().ok_or("a block has a page")?);
    Ok(memory)
}

struct Task<'a> {
    directory: &'a Path,
    blocks: Vec<Arc<AlignedBuffer>>,
    concurrency: usize,
}

impl Task<'_> {
    fn block_bytes(&self) -> usize {
        (*self.blocks[0]).as_ref().len()
    }

    fn report(&self, store: Duration, load: Duration) -> Value {
        let bytes = (self.blocks.len() * self.block_bytes()) as f64;
        json!({
            "store_bytes_per_second": bytes / store.as_secs_f64(),
            "load_bytes_per_second": bytes / load.as_secs_f64(),
            "objects": self.blocks.len(),
        })
    }

    /// One file, the same pieces, the same syncs, as many readers: nothing but the disk.
    fn plain(&self) -> Outcome<Value> {
        let path = self.directory.join("plain");
        let direct = OFlags::DIRECT.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).custom_flags(direct).open(&path)?;
        let started = Instant::now();
        let mut at = 0;
        for batch in self.blocks.chunks(BATCH) {
            for block in batch {
                file.write_all_at((**block).as_ref(), at)?;
                at += self.block_bytes() as u64;
            }
            file.sync_data()?;
        }
        let store = started.elapsed();
        let next = AtomicUsize::new(0);
        let started = Instant::now();
        std::thread::scope(|scope| -> Outcome<()> {
            let read = || -> std::io::Result<()> {
                let mut memory = AlignedBuffer::with_pages(self.block_bytes() / PAGE_BYTES);
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= self.blocks.len() {
                        return Ok(());
                    }
                    file.read_exact_at(memory.as_mut(), (at * self.block_bytes()) as u64)?;
                }
            };
            let readers: Vec<_> = (0..self.concurrency).map(|_| scope.spawn(read)).collect();
            for reader in readers {
                reader.join().map_err(|_| "a reader failed")??;
            }
            Ok(())
        })?;
        let load = started.elapsed();
        std::fs::remove_file(path)?;
        Ok(self.report(store, load))
    }

    fn segments(&self, encrypt: bool) -> Outcome<Value> {
        let options = Options {
            bytes_max: 1 << 40,
            encrypt,
            read_threads: self.concurrency,
            queue_bytes_max: 1 << 40,
            ..Options::default()
        };
        let (segments, receiver) = Segments::open(self.directory, options)?;
        while !matches!(receiver.recv()?, Recovery::Complete(_)) {}
        let started = Instant::now();
        let (sender, results) = mpsc::channel();
        for (number, batch) in self.blocks.chunks(BATCH).enumerate() {
            let blocks = batch.iter().map(|block| Arc::clone(block) as BlockBytes).collect();
            let sender = sender.clone();
            segments.append(blocks, move |results| drop(sender.send((number, results)))).map_err(|_| "refused")?;
        }
        drop(sender);
        let mut locations: Vec<(usize, Vec<Location>)> = Vec::new();
        for (number, results) in results {
            locations.push((number, results.into_iter().collect::<Result<_, _>>()?));
        }
        let store = started.elapsed();
        locations.sort_unstable_by_key(|(number, _)| *number);
        let locations: Vec<Location> = locations.into_iter().flat_map(|(_, locations)| locations).collect();
        let load = self.load(&segments, &locations)?;
        Ok(self.report(store, load))
    }

    /// Loads every block with as many reads under way as there are readers, each into memory that is used again.
    fn load(&self, segments: &Segments, locations: &[Location]) -> Outcome<Duration> {
        let memory = || AlignedBuffer::with_pages(self.block_bytes() / PAGE_BYTES);
        let mut free: Vec<AlignedBuffer> = (0..self.concurrency).map(|_| memory()).collect();
        let (sender, receiver) = mpsc::channel();
        let started = Instant::now();
        let mut answered = 0;
        for (number, location) in locations.iter().enumerate() {
            if free.is_empty() {
                free.push(receiver.recv()??);
                answered += 1;
            }
            let (sender, memory) = (sender.clone(), free.pop().ok_or("no memory is free")?);
            segments.read(*location, id(number as u64), memory, Instant::now() + PATIENCE, move |result| {
                drop(sender.send(result.map(|read| read.memory).map_err(|failed| failed.error)));
            });
        }
        while answered < locations.len() {
            receiver.recv()??;
            answered += 1;
        }
        Ok(started.elapsed())
    }
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let report = match arguments[..] {
        [directory, kind @ ("fill" | "start"), blocks] => many::run(Path::new(directory), kind, blocks.parse()?)?,
        [directory, kind, objects, bytes, concurrency] => {
            let bytes: usize = bytes.parse()?;
            let made = (0..objects.parse()?).map(|number| Ok(Arc::new(block(number, bytes)?)));
            let blocks = made.collect::<Outcome<_>>()?;
            let task = Task { directory: Path::new(directory), blocks, concurrency: concurrency.parse()? };
            match kind {
                "plain" => task.plain()?,
                "segments" => task.segments(false)?,
                "encrypted" => task.segments(true)?,
                _ => return Err("plain, segments or encrypted".into()),
            }
        }
        _ => {
            return Err(
                "DIRECTORY plain|segments|encrypted OBJECTS BYTES CONCURRENCY, or DIRECTORY fill|start BLOCKS".into()
            );
        }
    };
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}
