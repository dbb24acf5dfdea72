//! What a directory holds, found again at the start, in the background: first what everything takes, then the blocks, from
//! the list of each segment that was closed and one by one where a crash left none.

use super::{
    Inner,
    block::{self, BlockId, PAGE_BYTES, pages_of},
    buffer::AlignedBuffer,
    format::{FOOTER_BYTES_MAX, Listed, SegmentHeader, Trailer, footer},
    layer::{Entry, LayerFile, Size},
    read::read_pages,
    seal, segment_name, segment_number,
    table::Location,
};
use std::{
    io::{self, ErrorKind},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{SyncSender, TrySendError},
    },
    thread,
    time::{Duration, Instant},
};
use warmset_core::kv::{BlockHeader, BlockKey};

/// Blocks that are reported together, at most, but for those of one segment.
pub const FOUND_PER_BATCH_MAX: usize = 4096;
/// Batches that wait for whoever builds the index.
pub(super) const BATCHES_WAITING_MAX: usize = 16;
/// Threads that read lists: each waits for the disk most of the time.
const THREADS: usize = 4;
/// Read at a segment's end at once: most lists fit.
const TAIL_PAGES: u64 = 16;
/// How often a full channel is tried again.
const FULL_CHANNEL_PAUSE: Duration = Duration::from_millis(2);

/// A block that was there. The same one may be found at two places; both can be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What it is found by.
    pub id: BlockId,
    /// The block before it, or the root.
    pub parent: BlockKey,
    /// Place of its first token in the prompt.
    pub first_token: u64,
    /// How many tokens it has.
    pub token_count: u32,
    /// When it was written, in seconds since 1970.
    pub written_at_seconds: u64,
    /// Where it lies.
    pub location: Location,
}

/// What the recovery says.
#[derive(Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Blocks that can be read from now on.
    Found(Vec<Found>),
    /// There is nothing more.
    Complete(Recovered),
}

/// What was found in all.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Recovered {
    /// Blocks that can be read.
    pub blocks: u64,
    /// Segments they lie in.
    pub segments: u64,
    /// Segments that a crash left without their list.
    pub segments_not_closed: u64,
    /// Files that had the name of a segment and were none, or held nothing; they were removed.
    pub segments_removed: u64,
    /// Segments that could not be read; they stay, and count.
    pub segments_unreadable: u64,
    /// Blocks whose key is destroyed, whose bytes are damaged, or that are not encrypted though they must be.
    pub blocks_dropped: u64,
    /// How long it took.
    pub took: Duration,
}

impl Recovered {
    fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.segments += other.segments;
        self.segments_not_closed += other.segments_not_closed;
        self.segments_removed += other.segments_removed;
        self.segments_unreadable += other.segments_unreadable;
        self.blocks_dropped += other.blocks_dropped;
    }
}

/// What a segment turned out to be.
struct Read {
    header: SegmentHeader,
    blocks: Vec<Listed>,
    was_closed: bool,
    dropped: u64,
}

pub(super) fn recover(inner: &Inner, names: Vec<String>, sender: &SyncSender<Recovery>) {
    let started = Instant::now();
    let mut segments = count(inner, names);
    // The newest first: they are the likeliest to be asked for.
    segments.sort_unstable_by(|one, other| other.cmp(one));
    let next = AtomicUsize::new(0);
    let sum = Mutex::new(Recovered::default());
    thread::scope(|scope| {
        for _ in 0..THREADS.min(segments.len()) {
            scope.spawn(|| {
                let recovered = recover_some(inner, &segments, &next, sender);
                sum.lock().unwrap_or_else(PoisonError::into_inner).add(&recovered);
            });
        }
    });
    let recovered = Recovered { took: started.elapsed(), ..sum.into_inner().unwrap_or_else(PoisonError::into_inner) };
    inner.table().complete();
    inner.recovered.notify_all();
    inner.queue.ask_to_clear();
    let Recovered { blocks, segments, blocks_dropped, segments_unreadable, took, .. } = &recovered;
    let milliseconds = took.as_millis();
    tracing::info!(
        blocks,
        segments,
        blocks_dropped,
        segments_unreadable,
        milliseconds,
        "the KV tier on disk knows what it holds"
    );
    send(inner, sender, Recovery::Complete(recovered));
}

/// Counts everything in the directory, and says which segments there are.
fn count(inner: &Inner, names: Vec<String>) -> Vec<u32> {
    let mut segments = Vec::new();
    let mut foreign = Foreign::new(inner);
    for name in names {
        let entry = match inner.layer.entry(&name) {
            Ok(entry) => entry,
            Err(error) => {
                if error.kind() != ErrorKind::NotFound {
                    tracing::warn!(name, %error, "a file in the directory of the KV tier cannot be counted");
                }
                continue;
            }
        };
        match segment_number(&name).filter(|_| entry.is_file) {
            Some(number) => {
                segments.push(number);
                inner.table().count_unread(number, entry.size);
            }
            None => {
                if foreign.add(&entry) {
                    tracing::warn!(name, "a file in the directory of the KV tier is not its own; it counts and stays");
                }
            }
        }
    }
    foreign.set(inner);
    inner.table().is_counted = true;
    inner.recovered.notify_all();
    segments
}

/// Counts again what others put into the directory.
pub(super) fn count_foreign(inner: &Inner) {
    let Ok(names) = inner.layer.names() else { return };
    let mut foreign = Foreign::new(inner);
    for name in names {
        if segment_number(&name).is_none()
            && let Ok(entry) = inner.layer.entry(&name)
        {
            foreign.add(&entry);
        }
    }
    foreign.set(inner);
}

/// What in the directory is no segment.
struct Foreign {
    bytes: u64,
    files: u64,
}

impl Foreign {
    fn new(inner: &Inner) -> Self {
        Self { bytes: inner.layer.own_bytes().unwrap_or(0), files: 0 }
    }

    /// Counts an entry; whether it is somebody else's.
    fn add(&mut self, entry: &Entry) -> bool {
        self.bytes = self.bytes.saturating_add(entry.size.allocated_bytes);
        let name = entry.name.as_str();
        let is_note = name.strip_suffix(super::NOTE_SUFFIX).is_some_and(|name| name.ends_with('.'));
        let is_foreign = !is_note && ![super::lock::NAME, super::keys::FILE_NAME].contains(&name);
        self.files += u64::from(is_foreign);
        is_foreign
    }

    fn set(&self, inner: &Inner) {
        let mut table = inner.table();
        (table.foreign_bytes, table.foreign_files) = (self.bytes, self.files);
    }
}

/// Reads segments until there are no more.
fn recover_some(inner: &Inner, segments: &[u32], next: &AtomicUsize, sender: &SyncSender<Recovery>) -> Recovered {
    let mut recovered = Recovered::default();
    let mut batch = Vec::new();
    while let Some(&segment) = segments.get(next.fetch_add(1, Ordering::Relaxed)) {
        if inner.is_closing() {
            break;
        }
        match read_segment(inner, segment) {
            Ok((Some(read), size)) => {
                recovered.segments += 1;
                recovered.segments_not_closed += u64::from(!read.was_closed);
                recovered.blocks_dropped += read.dropped;
                let before = batch.len();
                publish(inner, segment, &read, size, &mut batch);
                let published = batch.len() - before;
                recovered.blocks += published as u64;
                recovered.blocks_dropped += (read.blocks.len() - published) as u64;
            }
            Ok((None, _)) => {
                recovered.segments_removed += 1;
                remove(inner, segment);
            }
            Err(error) => {
                recovered.segments_unreadable += 1;
                tracing::warn!(segment, %error, "a segment of the KV tier cannot be read; it counts and stays");
            }
        }
        if batch.len() >= FOUND_PER_BATCH_MAX {
            send(inner, sender, Recovery::Found(std::mem::take(&mut batch)));
        }
    }
    if !batch.is_empty() {
        send(inner, sender, Recovery::Found(batch));
    }
    recovered
}

fn remove(inner: &Inner, segment: u32) {
    tracing::info!(segment, "a segment of the KV tier holds nothing that can be used and is removed");
    match inner.layer.remove(&segment_name(segment)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(segment, %error, "a segment of the KV tier cannot be removed and still counts");
        }
        _ => inner.table().remove(segment),
    }
}

/// Makes what was found readable, all of a segment at once.
fn publish(inner: &Inner, segment: u32, read: &Read, size: Size, batch: &mut Vec<Found>) {
    let mut table = inner.table();
    table.add(segment, read.header.salt, size, false);
    for block in &read.blocks {
        let is_wanted = block.is_sealed || !inner.options.encrypt;
        if table.publish(segment, block, is_wanted) {
            batch.push(Found {
                id: block.id,
                parent: block.parent,
                first_token: block.first_token,
                token_count: block.token_count,
                written_at_seconds: block.written_at_seconds,
                location: Location { segment, page: block.page, pages: block.pages },
            });
        }
    }
    // One without readable blocks goes.
    table.close(segment);
}

/// Gives a message to whoever builds the index; they may take their time, but closing does not wait for them.
fn send(inner: &Inner, sender: &SyncSender<Recovery>, mut message: Recovery) {
    loop {
        message = match sender.try_send(message) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => return,
            Err(TrySendError::Full(message)) => message,
        };
        if inner.is_closing() {
            return;
        }
        thread::sleep(FULL_CHANNEL_PAUSE);
    }
}

/// What a file is: nothing if it is no segment or holds no block.
fn read_segment(inner: &Inner, segment: u32) -> io::Result<(Option<Read>, Size)> {
    let file = inner.layer.open(&segment_name(segment))?;
    let file = &*file;
    let size = file.size()?;
    let pages = size.length_bytes / PAGE_BYTES as u64;
    if pages < 2 {
        return Ok((None, size));
    }
    let mut page = AlignedBuffer::with_pages(1);
    read_pages(file, 0, page.as_mut())?;
    let header = page.as_ref().first_chunk().and_then(SegmentHeader::decode);
    let Some(header) = header.filter(|header| header.segment == segment) else { return Ok((None, size)) };
    let has_holes = size.allocated_bytes < size.length_bytes;
    let is_whole = size.length_bytes.is_multiple_of(PAGE_BYTES as u64);
    let listing = if is_whole { listing(inner, file, segment, pages)? } else { None };
    let (mut read, size) = match listing {
        Some((blocks, dropped)) => (Read { header, blocks, was_closed: true, dropped }, size),
        None => scan(inner, file, &header)?,
    };
    if has_holes {
        drop_holes(file, &mut read.blocks)?;
    }
    Ok(((!read.blocks.is_empty()).then_some(read), size))
}

/// The list at the end of a segment that was closed: its blocks, and how many of them are lost with their key.
fn listing(inner: &Inner, file: &dyn LayerFile, segment: u32, pages: u64) -> io::Result<Option<(Vec<Listed>, u64)>> {
    let Ok(end) = u32::try_from(pages) else { return Ok(None) };
    let tail_pages = TAIL_PAGES.min(pages) as usize;
    let mut tail = AlignedBuffer::with_pages(tail_pages);
    read_pages(file, end - tail_pages as u32, tail.as_mut())?;
    let trailer = tail.as_ref().last_chunk().and_then(|page| Trailer::decode(page, pages));
    let Some(trailer) = trailer.filter(|trailer| trailer.segment == segment) else { return Ok(None) };
    let body_pages = trailer.body_pages();
    if body_pages * PAGE_BYTES > FOOTER_BYTES_MAX {
        return Ok(None);
    }
    let listing = if body_pages < tail_pages {
        let start = (tail_pages - 1 - body_pages) * PAGE_BYTES;
        trailer.listing(&tail.as_ref()[start..], &inner.keys)
    } else {
        let mut body = AlignedBuffer::with_pages(body_pages);
        read_pages(file, trailer.first_page, body.as_mut())?;
        trailer.listing(body.as_ref(), &inner.keys)
    };
    Ok(listing.map(|listing| (listing.blocks, listing.unreadable_blocks)))
}

/// Looks at the blocks of a segment one by one, cuts what is torn off its end, and writes its list.
fn scan(inner: &Inner, file: &dyn LayerFile, header: &SegmentHeader) -> io::Result<(Read, Size)> {
    let end = file.size()?.length_bytes / PAGE_BYTES as u64;
    let mut read = Read { header: *header, blocks: Vec::new(), was_closed: false, dropped: 0 };
    let mut memory = AlignedBuffer::default();
    let mut page = 1;
    while let Some(data) = next_data(file, page, end)? {
        page = data;
        let Some(pages) = block_pages(file, page)?.filter(|pages| u64::from(page) + u64::from(*pages) <= end) else {
            break;
        };
        let block = memory.pages_mut(pages as usize);
        read_pages(file, page, block)?;
        match listed(inner, header, page, block) {
            Some(block) => read.blocks.push(block),
            None => read.dropped += 1,
        }
        page += pages;
    }
    let end_page = page;
    file.set_length(u64::from(end_page) * PAGE_BYTES as u64)?;
    if !read.blocks.is_empty() {
        let bytes = footer(header.segment, end_page, &read.blocks, &inner.keys)?;
        let mut aligned = AlignedBuffer::with_pages(bytes.len() / PAGE_BYTES);
        aligned.as_mut().copy_from_slice(&bytes);
        let written = file.write_all_at(aligned.as_ref(), u64::from(end_page) * PAGE_BYTES as u64);
        if let Err(error) = written.and_then(|()| file.sync()) {
            // Only the next start will be slower.
            tracing::warn!(segment = header.segment, %error, "a segment of the KV tier stays without its list of blocks");
            file.set_length(u64::from(end_page) * PAGE_BYTES as u64)?;
        } else {
            inner.counters.bytes_written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
    }
    Ok((read, file.size()?))
}

/// The first page from there on that is no hole.
fn next_data(file: &dyn LayerFile, page: u32, end: u64) -> io::Result<Option<u32>> {
    if u64::from(page) >= end {
        return Ok(None);
    }
    let offset_bytes = u64::from(page) * PAGE_BYTES as u64;
    let data = match file.next_data(offset_bytes) {
        Ok(data) => data.map(|(start, _)| start.max(offset_bytes)),
        // Without an answer nothing is known to be a hole.
        Err(_) => Some(offset_bytes),
    };
    Ok(data.and_then(|start| u32::try_from(start / PAGE_BYTES as u64).ok()).filter(|page| u64::from(*page) < end))
}

/// How many pages the block has that begins there, if one does.
fn block_pages(file: &dyn LayerFile, page: u32) -> io::Result<Option<u32>> {
    let mut memory = AlignedBuffer::with_pages(1);
    read_pages(file, page, memory.as_mut())?;
    let Some(first) = memory.as_ref().first_chunk() else { return Ok(None) };
    if let Some(sealed) = seal::SealedHeader::decode(first) {
        return Ok(Some(sealed.pages()));
    }
    Ok(BlockHeader::decode(first).ok().and_then(|header| pages_of(header.payload_bytes)))
}

/// What a whole block is, if it is sound and can be read.
fn listed(inner: &Inner, segment: &SegmentHeader, page: u32, block: &mut [u8]) -> Option<Listed> {
    let first = block.first_chunk()?;
    let is_sealed = seal::SealedHeader::is(first);
    if is_sealed {
        let sealed = seal::SealedHeader::decode(first)?;
        let key = seal::key_of(&sealed, &inner.keys, &segment.salt)?;
        seal::open(block, &sealed, &key, page).ok()?;
    }
    let header = block::verified(block).ok()?;
    Some(Listed {
        id: BlockId::from(&header),
        parent: header.parent,
        page,
        pages: (block.len() / PAGE_BYTES) as u32,
        first_token: header.first_token,
        token_count: header.tokens.len() as u32,
        written_at_seconds: header.written_at_seconds,
        is_sealed,
    })
}

/// Takes out the blocks whose pages were given back.
fn drop_holes(file: &dyn LayerFile, blocks: &mut Vec<Listed>) -> io::Result<()> {
    let page_bytes = PAGE_BYTES as u64;
    let mut data = Vec::new();
    let mut at = 0;
    while let Some((start, end)) = file.next_data(at)? {
        data.push((start, end));
        if end <= at {
            break;
        }
        at = end;
    }
    blocks.retain(|block| {
        let start = u64::from(block.page) * page_bytes;
        let end = start + u64::from(block.pages) * page_bytes;
        let before = data.partition_point(|(from, _)| *from <= start);
        before.checked_sub(1).and_then(|last| data.get(last)).is_some_and(|(_, to)| end <= *to)
    });
    Ok(())
}
