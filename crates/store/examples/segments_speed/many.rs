//! A store of very many blocks on a disk that is too small for them: lists and first pages are written, payloads are not.

use crate::{Outcome, block};
use serde_json::{Value, json};
use std::{
    io,
    num::NonZeroU64,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use warmset_store::segments::{
    BlockBytes, Options, PAGE_BYTES, Recovery, Segments,
    layer::{Directory, Entry, Layer, LayerFile, Size},
};

/// Pages of a block here, and blocks of a segment: as many as of 2 MiB in 256 MiB.
const PAYLOAD_BYTES: usize = 7 * PAGE_BYTES;
const BLOCKS_PER_SEGMENT: usize = 127;
const SEGMENT_BYTES: u64 = 4 << 20;

/// A directory whose files hold nothing of the blocks but say that they do.
struct WithoutPayloads(Directory);
struct File(Box<dyn LayerFile>);

impl Layer for WithoutPayloads {
    fn names(&self) -> io::Result<Vec<String>> {
        self.0.names()
    }
    fn entry(&self, name: &str) -> io::Result<Entry> {
        self.0.entry(name)
    }
    fn own_bytes(&self) -> io::Result<u64> {
        self.0.own_bytes()
    }
    fn create(&self, name: &str) -> io::Result<Box<dyn LayerFile>> {
        Ok(Box::new(File(self.0.create(name)?)))
    }
    fn open(&self, name: &str) -> io::Result<Box<dyn LayerFile>> {
        Ok(Box::new(File(self.0.open(name)?)))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }
    fn sync_names(&self) -> io::Result<()> {
        Ok(())
    }
    fn free_bytes(&self) -> io::Result<u64> {
        self.0.free_bytes()
    }
}

impl LayerFile for File {
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset_bytes)
    }
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        if bytes.len() == PAYLOAD_BYTES + PAGE_BYTES {
            return Ok(bytes.len());
        }
        self.0.write_at(bytes, offset_bytes)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_length(&self, length_bytes: u64) -> io::Result<()> {
        self.0.set_length(length_bytes)
    }
    fn punch(&self, _: u64, _: NonZeroU64) -> io::Result<()> {
        Ok(())
    }
    fn size(&self) -> io::Result<Size> {
        let size = self.0.size()?;
        Ok(Size { allocated_bytes: size.length_bytes, ..size })
    }
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<(u64, u64)>> {
        Ok(Some((offset_bytes, self.0.size()?.length_bytes)))
    }
}

/// What this process holds in memory of its own.
fn resident_bytes() -> Outcome<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    Ok(pages.split(' ').nth(1).ok_or("no figures of memory")?.parse::<u64>()? * PAGE_BYTES as u64)
}

pub(crate) fn run(directory: &Path, kind: &str, blocks: usize) -> Outcome<Value> {
    let options = Options {
        bytes_max: 1 << 50,
        segment_bytes: SEGMENT_BYTES,
        free_bytes_min: 0,
        queue_bytes_max: 1 << 30,
        ..Options::default()
    };
    let before_bytes = resident_bytes()?;
    let layer = Arc::new(WithoutPayloads(Directory::open(directory)?));
    let started = Instant::now();
    let (segments, receiver) = Segments::open_on(layer, directory, options)?;
    let opened = started.elapsed();
    if kind == "fill" {
        return fill(&segments, blocks);
    }
    // One block is written while the others are still being found.
    let made = Arc::new(block(u64::MAX / 64, PAYLOAD_BYTES)?);
    for result in segments.append_and_wait(vec![made as BlockBytes]).map_err(|_| "refused")? {
        result?;
    }
    let serving = started.elapsed();
    let (mut found, mut first_found) = (0, None);
    let recovered = loop {
        match receiver.recv()? {
            Recovery::Found(batch) => {
                first_found.get_or_insert(started.elapsed());
                found += batch.len();
            }
            Recovery::Complete(recovered) => break recovered,
        }
    };
    let complete = started.elapsed();
    let bytes = resident_bytes()?.saturating_sub(before_bytes);
    let seconds = |duration: Duration| duration.as_secs_f64();
    Ok(json!({
        "blocks": found,
        "segments": recovered.segments,
        "opened_seconds": seconds(opened),
        "first_block_written_seconds": seconds(serving),
        "first_blocks_found_seconds": first_found.map(seconds),
        "all_found_seconds": seconds(complete),
        "resident_bytes_per_block": bytes as f64 / found.max(1) as f64,
    }))
}

fn fill(segments: &Segments, blocks: usize) -> Outcome<Value> {
    let numbers: Vec<u64> = (0..blocks as u64).collect();
    for batch in numbers.chunks(BLOCKS_PER_SEGMENT) {
        let made = batch.iter().map(|number| Ok(Arc::new(block(*number, PAYLOAD_BYTES)?) as BlockBytes));
        for result in segments.append_and_wait(made.collect::<Outcome<_>>()?).map_err(|_| "refused")? {
            result?;
        }
    }
    Ok(json!({ "blocks": blocks, "segments": segments.segments().len() }))
}
