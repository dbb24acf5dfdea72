//! The thread that writes: whole batches, durable before anybody hears of them, and pages given back.
//!
//! A segment that failed once is cut back to what is durable and never appended to again, so a place in it, which is also
//! the nonce of what is encrypted there, is never written twice.

use super::{
    Inner, RETRY_AFTER_MAX,
    ahead::{Ahead, ToSeal},
    block::{self, BlockId, PAGE_BYTES},
    buffer::{AlignedBuffer, is_aligned},
    error::{AppendError, errno_of},
    format::{self, BLOCKS_PER_SEGMENT_MAX, Listed, SegmentHeader, footer_bytes_max},
    keys::SegmentSalt,
    layer::{LayerFile, Size},
    queue::{BlockBytes, Request, Results},
    segment_name,
    table::{Clearing, Location, Range},
};
use rustix::io::Errno;
use std::{
    io,
    num::NonZeroU64,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use warmset_core::kv::BlockHeader;

/// Failures one after the other after which the disk is left alone for a while. One alone is one block's.
const FAILURES_BEFORE_PAUSE: u32 = 2;
/// How long counting what is there may take: as long as it takes.
const COUNTING_PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// Zeros are written in pieces of so many pages, where a file system cannot give pages back.
const ZERO_PAGES: usize = 256;

/// A place among the answers: which request, which block of it.
type Place = (usize, usize);

struct Pending {
    listed: Listed,
    place: Place,
}

struct OpenSegment {
    number: u32,
    salt: SegmentSalt,
    file: Box<dyn LayerFile>,
    next_page: u32,
    durable: Vec<Listed>,
    pending: Vec<Pending>,
    is_named_durably: bool,
}

pub(super) struct Writer {
    inner: Arc<Inner>,
    open: Option<OpenSegment>,
    scratch: AlignedBuffer,
    /// Only where blocks are encrypted, and a thread could be started for it.
    ahead: Option<Ahead>,
    failures: u32,
    pause: Duration,
    paused_until: Option<Instant>,
    /// What may still be written by this batch: the less of the bound's and the file system's room.
    room: Room,
    /// Whether it was said that there is none.
    told_no_room: bool,
    /// Why nothing may be written or removed, as of the last look.
    lost: Option<AppendError>,
}

#[derive(Clone, Copy)]
struct Room {
    used_bytes: u64,
    /// Or why nobody knows.
    free_bytes: Result<u64, Errno>,
}

impl Writer {
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        let pause = inner.options.retry_after;
        let room = Room { used_bytes: 0, free_bytes: Ok(0) };
        let (open, scratch) = (None, AlignedBuffer::default());
        let ahead = if inner.options.encrypt { Ahead::start().ok() } else { None };
        Self {
            inner,
            open,
            scratch,
            ahead,
            failures: 0,
            pause,
            paused_until: None,
            room,
            told_no_room: false,
            lost: None,
        }
    }

    pub(super) fn run(mut self) {
        let inner = Arc::clone(&self.inner);
        // The bound holds for what was there before, so that is counted first.
        inner.wait_for(|table| table.is_counted, COUNTING_PATIENCE);
        loop {
            let work = inner.queue.take();
            if work.clear {
                let worked = self.clear();
                inner.queue.cleared(worked);
            }
            if !work.requests.is_empty() {
                self.write(work.requests);
            }
            if work.close {
                self.check_place();
                self.close_segment(&mut Vec::new());
                inner.queue.closed();
                return;
            }
            inner.queue.idle();
        }
    }

    /// Writes a batch and answers it.
    fn write(&mut self, requests: Vec<Request>) {
        let mut results: Vec<Results> = Vec::new();
        for request in &requests {
            results.push(vec![Err(AppendError::Closed); request.blocks.len()]);
        }
        self.measure_room();
        self.check_place();
        let numbered = requests.iter().enumerate();
        let blocks: Vec<(Place, &BlockBytes)> = numbered
            .flat_map(|(number, request)| {
                request.blocks.iter().enumerate().map(move |(at, block)| ((number, at), block))
            })
            .collect();
        for (number, &(place, block)) in blocks.iter().enumerate() {
            let next = blocks.get(number + 1).map(|(_, next)| *next);
            if let Err(error) = self.write_block(block, next, place, &mut results) {
                if error.is_the_disks() {
                    self.inner.note_fault(Some(error.clone()));
                }
                results[place.0][place.1] = Err(error);
            }
        }
        self.commit(&mut results);
        if let Some(ahead) = &mut self.ahead {
            ahead.settle();
        }
        let counters = &self.inner.counters;
        for (request, results) in requests.into_iter().zip(results) {
            let written = results.iter().filter(|result| result.is_ok()).count();
            counters.blocks_written.fetch_add(written as u64, Ordering::Relaxed);
            counters.blocks_not_written.fetch_add((results.len() - written) as u64, Ordering::Relaxed);
            let bytes = request.blocks.iter().map(|block| (**block).as_ref().len() as u64).sum();
            // Its memory is free before its owner hears of it.
            drop(request.blocks);
            self.inner.queue.answered(bytes);
            (request.done)(results);
        }
    }

    /// Looks whether the directory is still the one that was opened. In another one nothing is written, and nothing of
    /// the open segment's name is touched.
    fn check_place(&mut self) {
        self.lost = self.inner.lock.check().err();
        if self.lost.is_some()
            && let Some(open) = self.open.take()
        {
            self.inner.table().close(open.number);
        }
    }

    fn measure_room(&mut self) {
        let table = self.inner.table();
        self.room.used_bytes = if table.is_counted { table.used_bytes() } else { u64::MAX };
        drop(table);
        self.room.free_bytes = self.inner.layer.free_bytes().map_err(|error| errno_of(&error));
        if let Ok(free_bytes) = self.room.free_bytes {
            self.inner.free_bytes.store(free_bytes, Ordering::Relaxed);
        }
    }

    /// Appends one block; it is pending until the next [`Self::commit`].
    fn write_block(
        &mut self,
        block: &BlockBytes,
        next: Option<&BlockBytes>,
        place: Place,
        results: &mut [Results],
    ) -> Result<(), AppendError> {
        let bytes = (**block).as_ref();
        let (header, _, _) = block::read(bytes)?;
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return Err(AppendError::BackingOff);
        }
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        self.check_room(bytes.len() as u64).inspect_err(|error| self.tell_no_room(error))?;
        if self.open.as_ref().is_some_and(|open| !open.has_room(bytes.len(), self.inner.options.segment_bytes)) {
            self.close_segment(results);
        }
        if self.open.is_none() {
            self.open = Some(self.begin_segment().map_err(|error| self.failed(&error))?);
        }
        match self.put(block, &header, next, place) {
            Ok(()) => Ok(()),
            Err(error) => {
                let error = self.failed(&error);
                self.abandon_segment(results);
                Err(error)
            }
        }
    }

    /// Whether a block fits under the bound and above the watermark, with all that belongs to it.
    fn check_room(&self, block_bytes: u64) -> Result<(), AppendError> {
        let options = &self.inner.options;
        let open_blocks = self.open.as_ref().map_or(0, |open| open.durable.len() + open.pending.len());
        let around_bytes = footer_bytes_max(open_blocks + 1) + 2 * footer_bytes_max(1);
        let needed_bytes = block_bytes.saturating_add(around_bytes);
        if self.room.used_bytes.saturating_add(needed_bytes) > options.bytes_max {
            return Err(AppendError::Cap { bytes_max: options.bytes_max });
        }
        let free_bytes = self.room.free_bytes.map_err(AppendError::Disk)?;
        if free_bytes < needed_bytes.saturating_add(options.free_bytes_min) {
            return Err(AppendError::FreeSpace { free_bytes, free_bytes_min: options.free_bytes_min });
        }
        Ok(())
    }

    /// Once, until something was written again.
    fn tell_no_room(&mut self, error: &AppendError) {
        if !std::mem::replace(&mut self.told_no_room, true) {
            tracing::warn!(%error, "the KV tier's disk takes nothing");
        }
    }

    fn begin_segment(&mut self) -> io::Result<OpenSegment> {
        let inner = &self.inner;
        super::recovery::count_foreign(inner);
        let taken = inner.next_segment.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| next.checked_add(1));
        let number = taken.map_err(|_| io::Error::other("all numbers of segments are used"))?;
        let salt = inner.keys.random_bytes()?;
        let file = inner.layer.create(&segment_name(number))?;
        let mut page = AlignedBuffer::with_pages(1);
        if let Some(page) = page.as_mut().first_chunk_mut() {
            SegmentHeader { segment: number, salt }.encode(page);
        }
        inner.table().add(number, salt, Size::default(), true);
        if let Err(error) = file.write_all_at(page.as_ref(), 0) {
            self.remove_segment(number);
            return Err(error);
        }
        self.count_written(PAGE_BYTES as u64);
        let (durable, pending) = (Vec::new(), Vec::new());
        Ok(OpenSegment { number, salt, file, next_page: 1, durable, pending, is_named_durably: false })
    }

    /// Puts a block at the end of the open segment, encrypted if that is asked for.
    fn put(
        &mut self,
        block: &BlockBytes,
        header: &BlockHeader,
        next: Option<&BlockBytes>,
        place: Place,
    ) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Err(Errno::BADF.into()) };
        let bytes = (**block).as_ref();
        let is_sealed = self.inner.options.encrypt;
        let page = open.next_page;
        let offset_bytes = u64::from(page) * PAGE_BYTES as u64;
        if is_sealed {
            let scratch = &mut self.scratch;
            let is_made = self.ahead.as_mut().is_some_and(|ahead| ahead.take(block, open.number, page, scratch));
            if !is_made {
                to_seal(&self.inner, open, block, header, page)?.seal(scratch)?;
            }
            if let (Some(ahead), Some(next)) = (&mut self.ahead, next) {
                let next_page = page + (bytes.len() / PAGE_BYTES) as u32;
                seal_ahead(ahead, &self.inner, open, next, next_page);
            }
            open.file.write_all_at(&self.scratch.as_ref()[..bytes.len()], offset_bytes)?;
        } else if is_aligned(bytes) {
            open.file.write_all_at(bytes, offset_bytes)?;
        } else {
            let copy = self.scratch.pages_mut(bytes.len() / PAGE_BYTES);
            copy.copy_from_slice(bytes);
            open.file.write_all_at(copy, offset_bytes)?;
        }
        let listed = Listed {
            id: BlockId::from(header),
            parent: header.parent,
            page,
            pages: (bytes.len() / PAGE_BYTES) as u32,
            first_token: header.first_token,
            token_count: header.tokens.len() as u32,
            written_at_seconds: header.written_at_seconds,
            is_sealed,
        };
        open.next_page += listed.pages;
        open.pending.push(Pending { listed, place });
        self.count_written(bytes.len() as u64);
        Ok(())
    }

    /// Makes what is pending durable and then visible. On an error it is neither.
    fn commit(&mut self, results: &mut [Results]) {
        let Some(open) = &mut self.open else { return };
        if open.pending.is_empty() {
            return;
        }
        let synced = open.file.sync().and_then(|()| {
            if !open.is_named_durably {
                self.inner.layer.sync_names()?;
                open.is_named_durably = true;
            }
            Ok(())
        });
        if let Err(error) = synced {
            let failed: Vec<Place> = open.pending.drain(..).map(|pending| pending.place).collect();
            let error = self.failed(&error);
            self.inner.note_fault(Some(error.clone()));
            for (request, at) in failed {
                results[request][at] = Err(error.clone());
            }
            return self.abandon_segment(results);
        }
        let size = open.file.size();
        let mut wants_clearing = false;
        {
            let mut table = self.inner.table();
            for Pending { listed, place: (request, at) } in open.pending.drain(..) {
                let is_wanted = !self.inner.queue.was_purged(&listed.id.domain);
                let location = Location { segment: open.number, page: listed.page, pages: listed.pages };
                let is_published = table.publish(open.number, &listed, is_wanted);
                wants_clearing |= !is_published;
                results[request][at] = if is_published { Ok(location) } else { Err(AppendError::Purged) };
                open.durable.push(listed);
            }
            if let Ok(size) = size {
                table.resize(open.number, size);
            }
        }
        if wants_clearing {
            self.inner.queue.ask_to_clear();
        }
        self.inner.note_fault(None);
        self.failures = 0;
        self.told_no_room = false;
        self.pause = self.inner.options.retry_after;
        self.paused_until = None;
    }

    /// Ends the open segment: what is pending becomes durable, then its footer is written.
    fn close_segment(&mut self, results: &mut [Results]) {
        self.commit(results);
        if let Some(open) = self.open.take() {
            self.finish(open);
        }
    }

    /// Ends the open segment after an error: cut back to what is whole, with what is pending made durable if it can be.
    fn abandon_segment(&mut self, results: &mut [Results]) {
        let Some(open) = &mut self.open else { return };
        let end = open.pending.last().map(|pending| &pending.listed).or(open.durable.last());
        let end_page = end.map_or(1, |last| last.page + last.pages);
        open.next_page = end_page;
        // What cannot be cut is never listed, and the next start cuts it.
        let cut = open.file.set_length(u64::from(end_page) * PAGE_BYTES as u64);
        self.commit(results);
        // A commit that failed has abandoned the segment itself.
        if let Some(open) = self.open.take() {
            if cut.is_ok() {
                return self.finish(open);
            }
            self.settle(&open);
        }
    }

    /// Writes the footer. Without it the next start looks at the blocks one by one.
    fn finish(&mut self, open: OpenSegment) {
        if open.durable.is_empty() {
            return self.remove_segment(open.number);
        }
        let written = self.footer(&open);
        match written {
            Ok(bytes) => self.count_written(bytes),
            Err(error) => {
                tracing::warn!(segment = open.number, %error, "a segment of the KV tier stays without its list of blocks");
                let _ = open.file.set_length(u64::from(open.next_page) * PAGE_BYTES as u64);
            }
        }
        self.settle(&open);
    }

    fn footer(&self, open: &OpenSegment) -> io::Result<u64> {
        // What was given up meanwhile need not be found again.
        let is_live = |listed: &&Listed| {
            let location = Location { segment: open.number, page: listed.page, pages: listed.pages };
            self.inner.table().salt_of_live(&location).is_some()
        };
        let live: Vec<Listed> = open.durable.iter().filter(is_live).copied().collect();
        let bytes = format::footer(open.number, open.next_page, &live, &self.inner.keys)?;
        let mut aligned = AlignedBuffer::with_pages(bytes.len() / PAGE_BYTES);
        aligned.as_mut().copy_from_slice(&bytes);
        open.file.write_all_at(aligned.as_ref(), u64::from(open.next_page) * PAGE_BYTES as u64)?;
        open.file.sync()?;
        Ok(bytes.len() as u64)
    }

    fn settle(&self, open: &OpenSegment) {
        let size = open.file.size();
        let mut table = self.inner.table();
        if let Ok(size) = size {
            table.resize(open.number, size);
        }
        table.close(open.number);
        drop(table);
        // What died in it may have left nothing alive.
        self.inner.queue.ask_to_clear();
    }

    fn remove_segment(&self, segment: u32) {
        match self.inner.layer.remove(&segment_name(segment)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(segment, %error, "a segment of the KV tier cannot be removed and still counts");
                self.inner.table().close(segment);
            }
            _ => {
                self.inner.files.forget(segment);
                self.inner.table().remove(segment);
            }
        }
    }

    /// Gives pages back. Whether nothing is left that must not stay.
    fn clear(&mut self) -> bool {
        self.check_place();
        if self.lost.is_some() {
            return false;
        }
        let clearings = self.inner.table().clearings();
        let mut worked = true;
        let mut removed = false;
        for (segment, clearing) in clearings {
            match clearing {
                Clearing::Remove => {
                    self.remove_segment(segment);
                    removed = true;
                }
                Clearing::Punch(ranges) => worked &= self.punch(segment, &ranges),
            }
        }
        if removed && let Err(error) = self.inner.layer.sync_names() {
            tracing::warn!(%error, "the removal of segments of the KV tier may not outlast a crash");
            worked = false;
        }
        worked
    }

    fn punch(&self, segment: u32, ranges: &[Range]) -> bool {
        let mut done = Vec::new();
        let mut must_not_stay = false;
        let outcome = self.inner.files.with(segment, |file| {
            for range in ranges {
                must_not_stay |= range.must_not_stay;
                give_back(file, range, &self.inner.counters.bytes_written)?;
                done.push(*range);
            }
            if must_not_stay {
                file.sync()?;
            }
            file.size()
        });
        let mut table = self.inner.table();
        table.cleared(segment, &done);
        match outcome {
            Ok(size) => {
                table.resize(segment, size);
                true
            }
            Err(error) => {
                tracing::warn!(segment, %error, "pages of the KV tier cannot be given back and still count");
                false
            }
        }
    }

    /// Counts a failure; after a few in a row the disk is left alone, longer each time.
    fn failed(&mut self, error: &io::Error) -> AppendError {
        let errno = errno_of(error);
        self.failures += 1;
        if self.failures >= FAILURES_BEFORE_PAUSE {
            let pause_milliseconds = self.pause.as_millis();
            tracing::warn!(%errno, pause_milliseconds, "the KV tier's disk takes nothing and is left alone for a while");
            self.paused_until = Some(Instant::now() + self.pause);
            self.pause = (self.pause * 2).min(RETRY_AFTER_MAX);
        }
        AppendError::Disk(errno)
    }

    fn count_written(&mut self, bytes: u64) {
        self.inner.counters.bytes_written.fetch_add(bytes, Ordering::Relaxed);
        self.room.used_bytes = self.room.used_bytes.saturating_add(bytes);
        self.room.free_bytes = self.room.free_bytes.map(|free_bytes| free_bytes.saturating_sub(bytes));
    }
}

/// What is to be encrypted for a place in the open segment.
fn to_seal(
    inner: &Inner,
    open: &OpenSegment,
    block: &BlockBytes,
    header: &BlockHeader,
    page: u32,
) -> io::Result<ToSeal> {
    let domain_key = inner.keys.of_domain(&header.domain.0)?;
    let key = domain_key.in_segment(&open.salt)?;
    let (block, header) = (Arc::clone(block), header.clone());
    Ok(ToSeal { block, header, key_id: domain_key.id, key, segment: open.number, page })
}

/// Begins to encrypt the next block for the place it will have if all goes well.
fn seal_ahead(ahead: &mut Ahead, inner: &Inner, open: &OpenSegment, next: &BlockBytes, page: u32) {
    if let Ok((header, _, _)) = block::read((**next).as_ref())
        && let Ok(job) = to_seal(inner, open, next, &header, page)
    {
        ahead.begin(job);
    }
}

impl OpenSegment {
    fn has_room(&self, block_bytes: usize, segment_bytes: u64) -> bool {
        let end_bytes = u64::from(self.next_page) * PAGE_BYTES as u64 + block_bytes as u64;
        let blocks = self.durable.len() + self.pending.len();
        blocks == 0 || (end_bytes <= segment_bytes && blocks < BLOCKS_PER_SEGMENT_MAX)
    }
}

/// Gives a range back to the disk. Where a file system cannot, what must not stay is overwritten, and the rest is left.
fn give_back(file: &dyn LayerFile, range: &Range, written: &std::sync::atomic::AtomicU64) -> io::Result<()> {
    let page_bytes = PAGE_BYTES as u64;
    let (offset_bytes, length_bytes) = (u64::from(range.page) * page_bytes, u64::from(range.pages) * page_bytes);
    let Some(length) = NonZeroU64::new(length_bytes) else { return Ok(()) };
    match file.punch(offset_bytes, length) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => {}
        outcome => return outcome,
    }
    if !range.must_not_stay {
        return Ok(());
    }
    let zeros = AlignedBuffer::with_pages(ZERO_PAGES);
    let mut at = 0;
    while at < length_bytes {
        let piece = (length_bytes - at).min(zeros.as_ref().len() as u64);
        let piece_bytes = usize::try_from(piece).map_err(io::Error::other)?;
        file.write_all_at(&zeros.as_ref()[..piece_bytes], offset_bytes + at)?;
        written.fetch_add(piece, Ordering::Relaxed);
        at += piece;
    }
    Ok(())
}
