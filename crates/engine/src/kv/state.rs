//! The state of one sequence, as llama.cpp writes it, read without trust.
//!
//! Little endian: magic 4, sequence 4, streams 4; for each stream but the last its cells, 4, here always 0; the cells
//! of the last stream, 4; for each cell its position 4, its sequences 4, here always 1, and a sequence 4; whether
//! values are transposed 4, layers 4, rotation of keys 4 and of values 4; then for each plane the type of its numbers
//! 4, the bytes of a row 8, and one row for each cell. An engine with several streams writes its own first: see
//! `Context::state`, which brings them into this order.

use crate::protocol::StateLayout;
use std::ops::Range;
use warmset_core::kv::BLOCK_TOKENS;

/// What each state begins with.
pub(super) const MAGIC: u32 = 0xaf14_3cd8;
/// Magic, sequence and number of streams.
pub(super) const START_BYTES: usize = 12;
/// Transposition, layers and rotations.
pub(super) const SHAPE_BYTES: usize = 16;
/// Position, number of sequences, sequence.
pub(super) const CELL_BYTES: usize = 12;
/// Type and bytes of a row.
pub(super) const PLANE_HEAD_BYTES: usize = 12;
/// More planes than any model has: keys and values of a thousand layers.
const PLANES_MAX: usize = 2048;
/// A longer row than any model has.
const ROW_BYTES_MAX: u32 = 1 << 24;
/// More cells than any context holds. With the limits above, no sum of sizes overflows.
pub(super) const CELLS_MAX: u32 = 1 << 26;
/// More streams than llama.cpp has.
const STREAMS_MAX: u32 = 256;

/// Why bytes are not the state of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidState {
    /// The layout itself has impossible sizes.
    #[error("the layout has impossible sizes")]
    Layout,
    /// There are more or fewer bytes than the number of cells needs.
    #[error("it has {found} bytes, {needed} are needed")]
    Length {
        /// How many there are.
        found: u64,
        /// How many there should be.
        needed: u64,
    },
    /// A field has another value than the layout says.
    #[error("{0} is not what it must be")]
    Field(&'static str),
}

/// Whether sizes are such that nothing overflows. Holds for every layout that an engine of this program tells.
pub fn check_layout(layout: &StateLayout) -> Result<(), InvalidState> {
    let streams = layout.streams();
    let right = (1..=STREAMS_MAX).contains(&streams)
        && layout.head_bytes as usize == START_BYTES + 4 * streams as usize + SHAPE_BYTES
        && layout.head_cell_bytes as usize == CELL_BYTES
        && layout.plane_head_bytes as usize == PLANE_HEAD_BYTES
        && (1..=PLANES_MAX).contains(&layout.row_bytes.len())
        && layout.row_bytes.iter().all(|bytes| (1..=ROW_BYTES_MAX).contains(bytes));
    if right { Ok(()) } else { Err(InvalidState::Layout) }
}

impl StateLayout {
    /// Bytes of a full block's payload.
    pub fn block_bytes(&self) -> u64 {
        u64::from(BLOCK_TOKENS) * self.cell_bytes()
    }

    /// Streams whose numbers of cells stand in the head.
    pub(super) fn streams(&self) -> u32 {
        self.head_bytes.saturating_sub((START_BYTES + SHAPE_BYTES) as u32) / 4
    }
}

/// Reads four bytes; zero where there are none.
pub(super) fn number(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// The state of a sequence whose cells have the positions from 0 on.
#[derive(Debug, Clone, Copy)]
pub struct State<'a> {
    bytes: &'a [u8],
    layout: &'a StateLayout,
    cells: u32,
}

impl<'a> State<'a> {
    /// Checks everything but the rows.
    pub fn parse(layout: &'a StateLayout, bytes: &'a [u8]) -> Result<Self, InvalidState> {
        check_layout(layout)?;
        let short = |needed: u64| InvalidState::Length { found: bytes.len() as u64, needed };
        if (bytes.len() as u64) < u64::from(layout.head_bytes) {
            return Err(short(u64::from(layout.head_bytes)));
        }
        let streams = layout.streams();
        if number(bytes, 0) != MAGIC {
            return Err(InvalidState::Field("the magic number"));
        }
        if number(bytes, 8) != streams {
            return Err(InvalidState::Field("the number of streams"));
        }
        let others = START_BYTES..START_BYTES + 4 * (streams as usize - 1);
        if bytes[others.clone()].iter().any(|byte| *byte != 0) {
            return Err(InvalidState::Field("the number of another stream's cells"));
        }
        let cells = number(bytes, others.end);
        if cells == 0 || cells > CELLS_MAX {
            return Err(InvalidState::Field("the number of cells"));
        }
        if bytes.len() as u64 != layout.state_bytes(u64::from(cells)) {
            return Err(short(layout.state_bytes(u64::from(cells))));
        }
        let state = Self { bytes, layout, cells };
        state.check_cells(others.end + 4)?;
        state.check_planes()?;
        Ok(state)
    }

    fn check_cells(&self, begin: usize) -> Result<(), InvalidState> {
        let cells = self.bytes[begin..].chunks_exact(CELL_BYTES).take(self.cells as usize);
        for (position, cell) in (0..).zip(cells) {
            if number(cell, 0) != position || number(cell, 4) != 1 {
                return Err(InvalidState::Field("the position of a cell"));
            }
        }
        if number(self.bytes, begin + CELL_BYTES * self.cells as usize) != 0 {
            return Err(InvalidState::Field("the transposition of values"));
        }
        Ok(())
    }

    fn check_planes(&self) -> Result<(), InvalidState> {
        for (rows, row_bytes) in self.planes() {
            if number(self.bytes, rows.start - 8) != row_bytes || number(self.bytes, rows.start - 4) != 0 {
                return Err(InvalidState::Field("the size of a row"));
            }
        }
        Ok(())
    }

    /// Where each plane's rows are, and the bytes of a row.
    fn planes(&self) -> impl Iterator<Item = (Range<usize>, u32)> + use<'a> {
        let cells = self.cells as usize;
        let mut at = self.layout.head_bytes as usize + CELL_BYTES * cells;
        self.layout.row_bytes.iter().map(move |row_bytes| {
            let begin = at + PLANE_HEAD_BYTES;
            at = begin + *row_bytes as usize * cells;
            (begin..at, *row_bytes)
        })
    }

    /// Tokens it holds.
    pub fn cells(&self) -> u32 {
        self.cells
    }

    /// The payload of a full block, plane by plane; none if the state does not hold all of it.
    pub fn block(&self, block: u32) -> Option<impl Iterator<Item = &'a [u8]> + use<'a>> {
        self.rows(block.checked_mul(BLOCK_TOKENS)?, BLOCK_TOKENS)
    }

    /// The rows of some cells, plane by plane; none if the state does not hold all of them.
    pub fn rows(&self, first: u32, count: u32) -> Option<impl Iterator<Item = &'a [u8]> + use<'a>> {
        let end = first.checked_add(count).filter(|end| *end <= self.cells)?;
        let bytes = self.bytes;
        Some(self.planes().map(move |(rows, row_bytes)| {
            let row = |cell: u32| rows.start + cell as usize * row_bytes as usize;
            &bytes[row(first)..row(end)]
        }))
    }
}

/// Cuts a state that lies in `bytes` down to its first cells, where it lies. Returns how long it is then; none if it has
/// fewer cells, or is no state.
pub(crate) fn truncate(layout: &StateLayout, bytes: &mut [u8], cells: u32) -> Option<usize> {
    let state = State::parse(layout, bytes).ok()?;
    if cells == 0 || cells > state.cells {
        return None;
    }
    if cells == state.cells {
        return Some(bytes.len());
    }
    let shape = layout.head_bytes as usize + CELL_BYTES * state.cells as usize - SHAPE_BYTES;
    // Each plane's head lies right before its rows.
    let planes = state
        .planes()
        .map(|(plane, row_bytes)| plane.start - PLANE_HEAD_BYTES..plane.start + row_bytes as usize * cells as usize);
    let moves: Vec<Range<usize>> = std::iter::once(shape..shape + SHAPE_BYTES).chain(planes).collect();
    let mut at = layout.head_bytes as usize + CELL_BYTES * cells as usize - SHAPE_BYTES;
    for range in moves {
        let length = range.len();
        bytes.copy_within(range, at);
        at += length;
    }
    let count_at = layout.head_bytes as usize - SHAPE_BYTES - 4;
    bytes[count_at..count_at + 4].copy_from_slice(&cells.to_le_bytes());
    Some(at)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::kv::{Piece, Template};
    use proptest::prelude::*;

    pub(in crate::kv) fn layout(streams: u32, row_bytes: Vec<u32>) -> StateLayout {
        let head_bytes = (START_BYTES + SHAPE_BYTES) as u32 + 4 * streams;
        let (head_cell_bytes, plane_head_bytes) = (CELL_BYTES as u32, PLANE_HEAD_BYTES as u32);
        StateLayout { head_bytes, head_cell_bytes, plane_head_bytes, row_bytes }
    }

    /// A payload in which every byte tells its plane, its cell and its place.
    pub(in crate::kv) fn payload(layout: &StateLayout, first: u32, cells: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (plane, row_bytes) in (0u32..).zip(&layout.row_bytes) {
            for cell in first..first + cells {
                bytes.extend((0..*row_bytes).map(|place| (plane * 31 + cell * 7 + place) as u8));
            }
        }
        bytes
    }

    pub(in crate::kv) fn state(layout: &StateLayout, cells: u32) -> Vec<u8> {
        let template = Template::of_numbers(layout.clone(), 1, 0);
        let rows = payload(layout, 0, cells);
        let mut bytes = vec![0; layout.state_bytes(u64::from(cells)) as usize];
        template.compose(&[Piece { payload: &rows, cells }], &mut bytes, 1).unwrap();
        bytes
    }

    #[test]
    fn blocks_are_found_plane_by_plane() {
        let layout = layout(3, vec![8, 5, 8, 5]);
        let bytes = state(&layout, 130);
        let state = State::parse(&layout, &bytes).unwrap();
        assert_eq!(state.cells(), 130);
        assert_eq!(layout.block_bytes(), 64 * 26);
        for block in 0..2 {
            let gathered: Vec<u8> = state.block(block).unwrap().flatten().copied().collect();
            assert_eq!(gathered, payload(&layout, block * 64, 64));
        }
        assert!(state.block(2).is_none(), "two cells are no block");
        assert!(state.block(u32::MAX).is_none());
        let rest: Vec<u8> = state.rows(128, 2).unwrap().flatten().copied().collect();
        assert_eq!(rest, payload(&layout, 128, 2));
    }

    #[test]
    fn impossible_layouts_are_refused() {
        for wrong in [
            StateLayout::default(),
            StateLayout { head_bytes: 33, ..layout(1, vec![8]) },
            StateLayout { head_bytes: u32::MAX, ..layout(1, vec![8]) },
            StateLayout { plane_head_bytes: 0, ..layout(1, vec![8]) },
            layout(1, vec![]),
            layout(1, vec![u32::MAX; 4]),
            layout(0, vec![8]),
        ] {
            assert_eq!(State::parse(&wrong, &[0; 64]).unwrap_err(), InvalidState::Layout, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn a_state_that_was_cut_is_the_state_of_fewer_cells(cells in 1u32..90, kept in 0u32..100, streams in 1u32..4) {
            let layout = layout(streams, vec![8, 3, 5]);
            let mut bytes = state(&layout, cells);
            let length = truncate(&layout, &mut bytes, kept);
            prop_assert_eq!(length.is_some(), kept > 0 && kept <= cells);
            if let Some(length) = length {
                prop_assert_eq!(&bytes[..length], &state(&layout, kept));
            }
        }

        #[test]
        fn a_damaged_head_is_refused_or_changes_nothing(at in 0usize..1000, value in any::<u8>(), cut in 0usize..40) {
            let layout = layout(2, vec![8, 4]);
            let whole = state(&layout, 70);
            prop_assert!(State::parse(&layout, &whole[..whole.len() - 1 - cut]).is_err());
            let mut bytes = whole.clone();
            let at = at % (layout.head_bytes as usize + CELL_BYTES * 70 + PLANE_HEAD_BYTES);
            bytes[at] = value;
            if let Ok(state) = State::parse(&layout, &bytes) {
                prop_assert_eq!(state.cells(), 70);
                prop_assert_eq!(state.block(0).unwrap().flatten().count() as u64, layout.block_bytes());
            }
        }

        #[test]
        fn any_bytes_and_any_layout_are_safe(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            head in any::<u32>(),
            rows in prop::collection::vec(any::<u32>(), 0..4),
            cells in any::<u32>(),
        ) {
            let wild = StateLayout { head_bytes: head, head_cell_bytes: 12, plane_head_bytes: 12, row_bytes: rows };
            let _ = State::parse(&wild, &bytes);
            let layout = layout(2, vec![4]);
            let mut begun = state(&layout, 1);
            begun[16..20].copy_from_slice(&cells.to_le_bytes());
            begun.truncate(20);
            begun.extend(&bytes);
            if let Ok(state) = State::parse(&layout, &begun) {
                prop_assert_eq!(state.cells(), cells);
                prop_assert!(state.rows(0, cells).is_some());
            }
        }
    }
}
