//! Cutting blocks out of a state that an engine has put out, and putting them into slots.

use std::{
    io,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use warmset_core::kv::{BLOCK_TOKENS, BlockHeader, HEADER_BYTES, KvIdentity, header::payload_checksum};
use warmset_engine::protocol::{SaveWanted, StateLayout};
use warmset_store::arena::{Arena, SlotWriter, Staging};

/// What is to be gathered, and from where.
pub(super) struct Gathering {
    pub(super) identity: KvIdentity,
    pub(super) layout: StateLayout,
    pub(super) wanted: SaveWanted,
    pub(super) staging: Arc<Staging>,
    pub(super) arena: Arc<Arena>,
    /// Place among the wanted blocks, and slot.
    pub(super) blocks: Vec<(u32, u32)>,
}

/// Seconds since 1970.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Gathering {
    /// Fills all slots. Reads and copies: call it where blocking is allowed. After an error, none of them is to be used.
    pub(super) fn run(&self) -> io::Result<()> {
        let written_at_seconds = unix_seconds();
        for (place, slot) in &self.blocks {
            let mut writer = self.arena.writer(*slot).ok_or_else(|| io::Error::other("a slot is in use"))?;
            self.fill(*place as usize, &mut writer, written_at_seconds)?;
        }
        Ok(())
    }

    fn fill(&self, place: usize, writer: &mut SlotWriter, written_at_seconds: u64) -> io::Result<()> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        let tokens_each = BLOCK_TOKENS as usize;
        let tokens = self.wanted.tokens.get(place * tokens_each..(place + 1) * tokens_each);
        let (Some(tokens), Some(key)) = (tokens, self.wanted.keys.get(place)) else {
            return Err(invalid("an engine offered a block without tokens"));
        };
        let parent = place.checked_sub(1).map_or(self.wanted.parent, |before| self.wanted.keys[before]);
        let payload_bytes = u64::from(BLOCK_TOKENS) * self.layout.cell_bytes();
        let (page, rest) = writer
            .as_mut()
            .split_first_chunk_mut::<HEADER_BYTES>()
            .ok_or_else(|| invalid("a slot is smaller than a header"))?;
        let (payload, padding) = usize::try_from(payload_bytes)
            .ok()
            .and_then(|bytes| rest.split_at_mut_checked(bytes))
            .ok_or_else(|| invalid("a block is larger than its slot"))?;
        // It goes to disk with the payload.
        padding.fill(0);
        let first_cell = (u64::from(self.wanted.first_block) + place as u64) * u64::from(BLOCK_TOKENS);
        self.copy_rows(first_cell, payload)?;
        let header = BlockHeader {
            identity: self.identity,
            domain: self.wanted.domain,
            key: *key,
            parent,
            first_token: first_cell,
            tokens: tokens.to_vec(),
            payload_bytes,
            payload_checksum: payload_checksum(payload),
            written_at_seconds,
        };
        header.encode(page);
        Ok(())
    }

    /// Copies the rows of a block's cells, plane by plane.
    fn copy_rows(&self, first_cell: u64, mut payload: &mut [u8]) -> io::Result<()> {
        let cells = u64::from(self.wanted.cells);
        if first_cell + u64::from(BLOCK_TOKENS) > cells {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a block lies beyond its state"));
        }
        let mut at = u64::from(self.layout.head_bytes) + cells * u64::from(self.layout.head_cell_bytes);
        for row_bytes in self.layout.row_bytes.iter().map(|bytes| u64::from(*bytes)) {
            at += u64::from(self.layout.plane_head_bytes);
            let (rows, rest) = payload.split_at_mut((u64::from(BLOCK_TOKENS) * row_bytes) as usize);
            self.staging.read(at + first_cell * row_bytes, rows)?;
            payload = rest;
            at += cells * row_bytes;
        }
        Ok(())
    }
}
