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
        self.check_state()
    }

    /// Whether what was copied was a state still when it was: each plane's rows have their length before them. Rows alone
    /// cannot be told from an area that was emptied, and their checksums are made here.
    fn check_state(&self) -> io::Result<()> {
        for (rows_at, row_bytes) in self.planes() {
            let mut found = [0; 8];
            self.staging.read(rows_at - found.len() as u64, &mut found)?;
            if u64::from_le_bytes(found) != row_bytes {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the staging area holds no such state"));
            }
        }
        Ok(())
    }

    /// Where each plane's rows begin in the state, and the bytes of a row.
    fn planes(&self) -> impl Iterator<Item = (u64, u64)> {
        let cells = u64::from(self.wanted.cells);
        let mut at = u64::from(self.layout.head_bytes) + cells * u64::from(self.layout.head_cell_bytes);
        self.layout.row_bytes.iter().map(move |row_bytes| {
            let rows_at = at + u64::from(self.layout.plane_head_bytes);
            at = rows_at + cells * u64::from(*row_bytes);
            (rows_at, u64::from(*row_bytes))
        })
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
        for (rows_at, row_bytes) in self.planes() {
            let (rows, rest) = payload.split_at_mut((u64::from(BLOCK_TOKENS) * row_bytes) as usize);
            self.staging.read(rows_at + first_cell * row_bytes, rows)?;
            payload = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::{
        Digest,
        kv::{TrustDomain, chain, key::root},
    };
    use warmset_engine::kv::{Piece, Template};

    const TOKENS: u32 = 2 * BLOCK_TOKENS + 3;
    const ROW_BYTES: [u32; 2] = [48, 16];
    const SLOT_BYTES: u64 = 2 * HEADER_BYTES as u64;

    /// Two blocks of a state that lies in a staging area as an engine writes it.
    fn gathering() -> (Gathering, Vec<u8>) {
        let layout =
            StateLayout { head_bytes: 32, head_cell_bytes: 12, plane_head_bytes: 12, row_bytes: ROW_BYTES.to_vec() };
        let payload: Vec<u8> =
            (0..TOKENS * ROW_BYTES.iter().sum::<u32>()).map(|place| (place % 251) as u8 + 1).collect();
        let mut state = vec![0; layout.state_bytes(u64::from(TOKENS)) as usize];
        let pieces = [Piece { payload: &payload, cells: TOKENS }];
        Template::of_numbers(layout.clone(), 0, 0).compose(&pieces, &mut state, 1).unwrap();
        let staging = Staging::create("warmset-test", state.len() as u64).unwrap();
        rustix::io::pwrite(staging.descriptor(), &state, 0).unwrap();
        let (identity, domain) = (KvIdentity::new(&Digest([1; 32]), "layout", "build"), TrustDomain::named("a"));
        let tokens: Vec<u32> = (0..2 * BLOCK_TOKENS).collect();
        let wanted = SaveWanted {
            save: 1,
            request: 1,
            domain,
            first_block: 0,
            parent: root(&identity, &domain),
            keys: chain(&identity, &domain, &tokens),
            tokens,
            cells: TOKENS,
        };
        let arena = Arena::create("warmset-test", SLOT_BYTES, 2).unwrap();
        let blocks = vec![(0, 1), (1, 0)];
        (Gathering { identity, layout, wanted, staging: Arc::new(staging), arena, blocks }, payload)
    }

    #[test]
    fn blocks_are_cut_out_of_a_state_plane_by_plane() {
        let (gathering, payload) = gathering();
        gathering.run().unwrap();
        let reader = gathering.arena.reader(0).unwrap();
        let header = BlockHeader::decode(reader.as_ref()).unwrap();
        assert_eq!((header.first_token, &header.key), (u64::from(BLOCK_TOKENS), &gathering.wanted.keys[1]));
        let mut at = 0;
        let mut expected: Vec<u8> = Vec::new();
        for row_bytes in ROW_BYTES.map(|bytes| bytes as usize) {
            let (first, end) = (BLOCK_TOKENS as usize, 2 * BLOCK_TOKENS as usize);
            expected.extend(&payload[at + first * row_bytes..at + end * row_bytes]);
            at += TOKENS as usize * row_bytes;
        }
        assert_eq!(&reader.as_ref()[HEADER_BYTES..HEADER_BYTES + expected.len()], expected);
    }

    /// An area that was emptied for another save holds zeros, which are rows like any other: their checksum would be right.
    #[test]
    fn an_area_that_was_emptied_holds_no_state() {
        let (gathering, _) = gathering();
        gathering.staging.clear().unwrap();
        assert_eq!(gathering.run().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
