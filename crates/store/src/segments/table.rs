//! What lies where, and what it takes: the accounts of all segments.

use super::{block::PAGE_BYTES, format::Listed, keys::SegmentSalt, layer::Size};
use std::collections::{BTreeMap, BTreeSet};
use warmset_core::kv::TrustDomain;

/// Where a block lies. It means nothing after a restart: what is there is found anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The segment's number.
    pub segment: u32,
    /// The block's first page in it.
    pub page: u32,
    /// Pages of the block, header included.
    pub pages: u32,
}

impl Location {
    /// Bytes that the block takes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES as u64
    }
}

/// What one segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentUse {
    /// Its number; later segments have higher ones.
    pub segment: u32,
    /// What it takes of the disk.
    pub allocated_bytes: u64,
    /// What of this belongs to blocks that can be read.
    pub live_bytes: u64,
    /// Blocks that can be read.
    pub live_blocks: usize,
    /// When its newest block was made, in seconds since 1970.
    pub newest_seconds: u64,
    /// Whether blocks are still appended to it.
    pub is_open: bool,
}

/// What was taken away.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// Blocks.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Dropped {
    fn add(&mut self, pages: u32) {
        self.blocks += 1;
        self.bytes += u64::from(pages) * PAGE_BYTES as u64;
    }
}

/// The life of a block's place, forwards only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// It can be read.
    Live,
    /// It cannot, and its pages go back to the disk.
    Retired,
    /// As retired, but its bytes must not stay, whatever that costs.
    Purged,
    /// Nothing more is done for it.
    Gone,
}

#[derive(Debug)]
struct Place {
    page: u32,
    pages: u32,
    domain: u32,
    written_at_seconds: u32,
    state: State,
}

#[derive(Debug)]
struct Segment {
    salt: SegmentSalt,
    size: Size,
    is_open: bool,
    places: Vec<Place>,
    live: Dropped,
    /// Whether places wait for their pages to go back.
    has_waiting: bool,
}

/// Pages that go back to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) page: u32,
    pub(crate) pages: u32,
    pub(crate) must_not_stay: bool,
}

/// What is to be done to a segment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Clearing {
    /// Nothing in it can be read, and nothing more comes.
    Remove,
    /// Some of it goes.
    Punch(Vec<Range>),
}

/// All segments of a directory.
#[derive(Debug, Default)]
pub(crate) struct Table {
    segments: BTreeMap<u32, Segment>,
    domain_numbers: BTreeMap<TrustDomain, u32>,
    /// What everything else in the directory takes.
    pub(crate) foreign_bytes: u64,
    /// Files in the directory that are not ours.
    pub(crate) foreign_files: u64,
    /// Segments whose blocks are not known yet, with what they take.
    unread: BTreeMap<u32, Size>,
    /// Whether everything that was there at the start is counted.
    pub(crate) is_counted: bool,
    /// Whether the blocks of everything that was there are known.
    pub(crate) is_complete: bool,
    /// Domains that were purged before it was.
    purged_early: BTreeSet<TrustDomain>,
}

impl Table {
    /// What the directory takes.
    pub(crate) fn used_bytes(&self) -> u64 {
        let known = self.segments.values().map(|segment| segment.size.allocated_bytes);
        let unread = self.unread.values().map(|size| size.allocated_bytes);
        known.chain(unread).fold(self.foreign_bytes, u64::saturating_add)
    }

    /// Counts a segment that is there and was not read yet.
    pub(crate) fn count_unread(&mut self, segment: u32, size: Size) {
        self.unread.insert(segment, size);
    }

    /// Forgets a segment whose file is gone.
    pub(crate) fn remove(&mut self, segment: u32) {
        self.unread.remove(&segment);
        self.segments.remove(&segment);
    }

    /// Begins a segment.
    pub(crate) fn add(&mut self, segment: u32, salt: SegmentSalt, size: Size, is_open: bool) {
        self.unread.remove(&segment);
        let places = Vec::new();
        let segment_state = Segment { salt, size, is_open, places, live: Dropped::default(), has_waiting: false };
        self.segments.insert(segment, segment_state);
    }

    /// Sets what a segment takes.
    pub(crate) fn resize(&mut self, segment: u32, size: Size) {
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.size = size;
        } else if let Some(unread) = self.unread.get_mut(&segment) {
            *unread = size;
        }
    }

    /// Nothing more is appended to it.
    pub(crate) fn close(&mut self, segment: u32) {
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.is_open = false;
            segment.places.shrink_to_fit();
            // Whatever died in it may have left nothing alive.
            segment.has_waiting |= segment.live.blocks == 0;
        }
    }

    /// Makes a durable block readable, after all others of its segment. One that is not wanted any more only takes space
    /// until its pages go back; then the answer is false.
    pub(crate) fn publish(&mut self, segment: u32, block: &Listed, is_wanted: bool) -> bool {
        let is_wanted = is_wanted && (self.is_complete || !self.purged_early.contains(&block.id.domain));
        let domain = self.number_of(&block.id.domain);
        let Some(segment) = self.segments.get_mut(&segment) else { return false };
        segment.places.push(Place {
            page: block.page,
            pages: block.pages,
            domain,
            written_at_seconds: u32::try_from(block.written_at_seconds).unwrap_or(u32::MAX),
            state: if is_wanted { State::Live } else { State::Purged },
        });
        if is_wanted {
            segment.live.add(block.pages);
        } else {
            segment.has_waiting = true;
        }
        is_wanted
    }

    /// The salt of a block's segment, if the block can be read.
    pub(crate) fn salt_of_live(&self, location: &Location) -> Option<SegmentSalt> {
        let segment = self.segments.get(&location.segment)?;
        let place = segment.places.binary_search_by_key(&location.page, |place| place.page).ok()?;
        let place = &segment.places[place];
        (place.state == State::Live && place.pages == location.pages).then_some(segment.salt)
    }

    /// Takes one block away. False if it is gone already.
    pub(crate) fn retire(&mut self, location: &Location) -> bool {
        let Some(segment) = self.segments.get_mut(&location.segment) else { return false };
        let Ok(at) = segment.places.binary_search_by_key(&location.page, |place| place.page) else { return false };
        segment.places[at].pages == location.pages && segment.end(at, State::Retired)
    }

    /// Takes all blocks of a segment away.
    pub(crate) fn drop_segment(&mut self, segment: u32) -> Dropped {
        let Some(segment) = self.segments.get_mut(&segment) else { return Dropped::default() };
        let before = segment.live;
        for at in 0..segment.places.len() {
            segment.end(at, State::Retired);
        }
        segment.has_waiting = true;
        before
    }

    /// Takes all blocks of a domain away, in a way that leaves nothing of them, and those that are still to be found.
    pub(crate) fn purge(&mut self, domain: &TrustDomain) -> Dropped {
        if !self.is_complete {
            self.purged_early.insert(*domain);
        }
        let Some(number) = self.domain_numbers.get(domain).copied() else { return Dropped::default() };
        let mut dropped = Dropped::default();
        for segment in self.segments.values_mut() {
            for at in 0..segment.places.len() {
                let Place { pages, domain, .. } = segment.places[at];
                if domain == number && segment.end(at, State::Purged) {
                    dropped.add(pages);
                }
            }
        }
        dropped
    }

    /// Takes away what was made before then.
    pub(crate) fn expire(&mut self, before_seconds: u64) -> Vec<Location> {
        let mut expired = Vec::new();
        for (&number, segment) in &mut self.segments {
            for at in 0..segment.places.len() {
                let Place { page, pages, written_at_seconds, .. } = segment.places[at];
                if u64::from(written_at_seconds) < before_seconds && segment.end(at, State::Retired) {
                    expired.push(Location { segment: number, page, pages });
                }
            }
        }
        expired
    }

    /// The blocks that were there at the start are known.
    pub(crate) fn complete(&mut self) {
        self.is_complete = true;
        self.purged_early.clear();
    }

    /// What waits to be done to segments.
    pub(crate) fn clearings(&self) -> Vec<(u32, Clearing)> {
        let waiting = self.segments.iter().filter(|(_, segment)| segment.has_waiting);
        waiting.map(|(&number, segment)| (number, segment.clearing())).collect()
    }

    /// These pages, in their order, went back to the disk or never will.
    pub(crate) fn cleared(&mut self, segment: u32, ranges: &[Range]) {
        let Some(segment) = self.segments.get_mut(&segment) else { return };
        for place in &mut segment.places {
            let before = ranges.partition_point(|range| range.page <= place.page);
            let range = before.checked_sub(1).and_then(|last| ranges.get(last));
            let is_in_range = range.is_some_and(|range| place.page < range.page + range.pages);
            if place.state != State::Live && is_in_range {
                place.state = State::Gone;
            }
        }
        segment.has_waiting = segment.places.iter().any(|place| matches!(place.state, State::Retired | State::Purged));
    }

    /// What each segment holds.
    pub(crate) fn segments(&self) -> Vec<SegmentUse> {
        let report = |(&number, segment): (&u32, &Segment)| SegmentUse {
            segment: number,
            allocated_bytes: segment.size.allocated_bytes,
            live_bytes: segment.live.bytes,
            live_blocks: segment.live.blocks,
            newest_seconds: u64::from(segment.places.last().map_or(0, |place| place.written_at_seconds)),
            is_open: segment.is_open,
        };
        self.segments.iter().map(report).collect()
    }

    /// All blocks that can be read.
    pub(crate) fn live(&self) -> Dropped {
        let add = |sum: Dropped, segment: &Segment| Dropped {
            blocks: sum.blocks + segment.live.blocks,
            bytes: sum.bytes + segment.live.bytes,
        };
        self.segments.values().fold(Dropped::default(), add)
    }

    fn number_of(&mut self, domain: &TrustDomain) -> u32 {
        if let Some(number) = self.domain_numbers.get(domain) {
            return *number;
        }
        let number = self.domain_numbers.len() as u32;
        self.domain_numbers.insert(*domain, number);
        number
    }
}

impl Segment {
    /// Ends a live place, or makes a retired one purged. Whether it was live.
    fn end(&mut self, at: usize, state: State) -> bool {
        let place = &mut self.places[at];
        let was_live = place.state == State::Live;
        if place.state < state {
            place.state = state;
            self.has_waiting = true;
        }
        if was_live {
            self.live.blocks -= 1;
            self.live.bytes -= u64::from(place.pages) * PAGE_BYTES as u64;
        }
        was_live
    }

    fn clearing(&self) -> Clearing {
        if self.live.blocks == 0 && !self.is_open {
            return Clearing::Remove;
        }
        let mut ranges: Vec<Range> = Vec::new();
        for place in &self.places {
            let must_not_stay = match place.state {
                State::Retired => false,
                State::Purged => true,
                State::Live | State::Gone => continue,
            };
            match ranges.last_mut() {
                Some(last) if last.page + last.pages == place.page && last.must_not_stay == must_not_stay => {
                    last.pages += place.pages;
                }
                _ => ranges.push(Range { page: place.page, pages: place.pages, must_not_stay }),
            }
        }
        Clearing::Punch(ranges)
    }
}
