//! States made of blocks: what llama.cpp is given to go on from.

use super::state::{
    CELL_BYTES, CELLS_MAX, InvalidState, MAGIC, PLANE_HEAD_BYTES, SHAPE_BYTES, START_BYTES, State, check_layout, number,
};
use crate::protocol::StateLayout;
use std::sync::{Mutex, PoisonError};

/// Below this, a thread of its own costs more than it saves.
const PARALLEL_BYTES_MIN: u64 = 8 << 20;
/// More threads than this do not copy faster: memory is busy by then.
const THREADS_MAX: usize = 4;

/// Rows of some cells, as [`State::rows`] gives them.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Plane by plane.
    pub payload: &'a [u8],
    /// Whose rows they are.
    pub cells: u32,
}

/// What is the same in every state of a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    layout: StateLayout,
    shape: [u8; SHAPE_BYTES],
    plane_heads: Vec<[u8; PLANE_HEAD_BYTES]>,
}

impl Template {
    /// Reads how a context's states are cut from one that it wrote. Refused if values are transposed, or if anything
    /// is left over: then its cache holds more than rows of cells.
    pub fn probe(bytes: &[u8], streams: u32) -> Result<Self, InvalidState> {
        let head_bytes = START_BYTES + 4 * streams as usize + SHAPE_BYTES;
        let cells = number(bytes, START_BYTES + 4 * (streams as usize).saturating_sub(1));
        if streams == 0 || cells == 0 || cells > CELLS_MAX {
            return Err(InvalidState::Field("the number of cells"));
        }
        let shape_at = head_bytes - SHAPE_BYTES + CELL_BYTES * cells as usize;
        let shape: Option<[u8; SHAPE_BYTES]> =
            bytes.get(shape_at..shape_at + SHAPE_BYTES).and_then(|shape| shape.try_into().ok());
        let shape = shape.ok_or(InvalidState::Field("the shape"))?;
        let (mut row_bytes, mut plane_heads) = (Vec::new(), Vec::new());
        let mut at = shape_at + SHAPE_BYTES;
        while at < bytes.len() {
            let head: Option<[u8; PLANE_HEAD_BYTES]> =
                bytes.get(at..at + PLANE_HEAD_BYTES).and_then(|head| head.try_into().ok());
            let head = head.ok_or(InvalidState::Field("the head of a plane"))?;
            plane_heads.push(head);
            row_bytes.push(number(&head, 4));
            // Bounded by the number of bytes: a row of none ends the search by the check below.
            at += PLANE_HEAD_BYTES + number(&head, 4) as usize * cells as usize;
        }
        let (head_cell_bytes, plane_head_bytes) = (CELL_BYTES as u32, PLANE_HEAD_BYTES as u32);
        let layout = StateLayout { head_bytes: head_bytes as u32, head_cell_bytes, plane_head_bytes, row_bytes };
        check_layout(&layout)?;
        State::parse(&layout, bytes)?;
        if layout.row_bytes.len() as u64 != 2 * u64::from(number(&shape, 4)) {
            return Err(InvalidState::Field("the number of layers"));
        }
        Ok(Self { layout, shape, plane_heads })
    }

    /// The template of planes of one type of number, with layers of one plane each.
    pub fn of_numbers(layout: StateLayout, type_number: u32, rotation: u32) -> Self {
        let mut shape = [0; SHAPE_BYTES];
        shape[4..8].copy_from_slice(&(layout.row_bytes.len() as u32).to_le_bytes());
        shape[8..12].copy_from_slice(&rotation.to_le_bytes());
        let head = |row_bytes: &u32| {
            let mut head = [0; PLANE_HEAD_BYTES];
            head[..4].copy_from_slice(&type_number.to_le_bytes());
            head[4..8].copy_from_slice(&row_bytes.to_le_bytes());
            head
        };
        Self { plane_heads: layout.row_bytes.iter().map(head).collect(), layout, shape }
    }

    /// How states are cut.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The parts that shape the bytes of rows, as text: rotations, and type and size of each plane's rows.
    pub fn describe(&self) -> String {
        let mut planes: Vec<(u32, u32, usize)> = Vec::new();
        for head in &self.plane_heads {
            let (kind, bytes) = (number(head, 0), number(head, 4));
            match planes.last_mut() {
                Some((last_kind, last_bytes, count)) if (*last_kind, *last_bytes) == (kind, bytes) => *count += 1,
                _ => planes.push((kind, bytes, 1)),
            }
        }
        let planes: Vec<String> =
            planes.iter().map(|(kind, bytes, count)| format!("{count} of type {kind} with {bytes} bytes")).collect();
        let rotation = (number(&self.shape, 8), number(&self.shape, 12));
        format!("layers {}, rotation {rotation:?}, planes {}", number(&self.shape, 4), planes.join(" + "))
    }

    /// Writes the state of a sequence that begins with these pieces. `into` is as long as the state. Large ones are
    /// copied by as many threads as there may be: most of the time goes into memory that is touched for the first time.
    pub fn compose(&self, pieces: &[Piece<'_>], into: &mut [u8], threads: usize) -> Result<(), InvalidState> {
        let cells: u64 = pieces.iter().map(|piece| u64::from(piece.cells)).sum();
        if cells == 0 || cells > u64::from(CELLS_MAX) {
            return Err(InvalidState::Field("the number of cells"));
        }
        let cell_bytes = self.layout.cell_bytes();
        let needed = self.layout.state_bytes(cells);
        let exact = pieces.iter().all(|piece| piece.payload.len() as u64 == u64::from(piece.cells) * cell_bytes);
        if into.len() as u64 != needed || !exact {
            return Err(InvalidState::Length { found: into.len() as u64, needed });
        }
        let head_bytes = self.layout.head_bytes as usize + CELL_BYTES * cells as usize;
        let (head, planes) = into.split_at_mut(head_bytes);
        self.compose_head(cells as u32, head);
        let parts = self.planes(cells as usize, planes);
        let helpers = if needed < PARALLEL_BYTES_MIN { 0 } else { threads.clamp(1, THREADS_MAX) - 1 };
        let take = || parts.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let copy = || {
            while let Some(plane) = take() {
                plane.write(pieces);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..helpers {
                // Where no thread is to be had, this one copies alone.
                let _ = std::thread::Builder::new().spawn_scoped(scope, copy);
            }
            copy();
        });
        Ok(())
    }

    /// What each plane consists of, and where it goes.
    fn planes<'a>(&'a self, cells: usize, mut into: &'a mut [u8]) -> Mutex<Vec<Plane<'a>>> {
        let mut planes = Vec::with_capacity(self.plane_heads.len());
        let mut row_begin = 0;
        for (head, row_bytes) in self.plane_heads.iter().zip(&self.layout.row_bytes) {
            let row_bytes = *row_bytes as usize;
            let (part, rest) = into.split_at_mut(PLANE_HEAD_BYTES + row_bytes * cells);
            into = rest;
            planes.push(Plane { head, row_begin, row_bytes, into: part });
            row_begin += row_bytes;
        }
        Mutex::new(planes)
    }

    fn compose_head(&self, cells: u32, into: &mut [u8]) {
        let mut writer = Writer { into, at: 0 };
        writer.put(&MAGIC.to_le_bytes());
        writer.put(&[0; 4]);
        writer.put(&self.layout.streams().to_le_bytes());
        for _ in 1..self.layout.streams() {
            writer.put(&[0; 4]);
        }
        writer.put(&cells.to_le_bytes());
        for position in 0..cells {
            writer.put(&position.to_le_bytes());
            writer.put(&1u32.to_le_bytes());
            writer.put(&[0; 4]);
        }
        writer.put(&self.shape);
    }
}

/// A plane of a state that is being written.
struct Plane<'a> {
    head: &'a [u8; PLANE_HEAD_BYTES],
    /// Where its row begins in a cell of a payload, and how long it is.
    row_begin: usize,
    row_bytes: usize,
    into: &'a mut [u8],
}

impl Plane<'_> {
    fn write(self, pieces: &[Piece<'_>]) {
        let mut writer = Writer { into: self.into, at: 0 };
        writer.put(self.head);
        for piece in pieces {
            let cells = piece.cells as usize;
            // Planes lie one behind the other in a payload, too.
            let begin = self.row_begin * cells;
            writer.put(&piece.payload[begin..begin + self.row_bytes * cells]);
        }
    }
}

struct Writer<'a> {
    into: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.into[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::tests::{layout, payload, state};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_cut_gives_the_same_state(cuts in prop::collection::vec(1u32..70, 1..6), streams in 1u32..5) {
            let layout = layout(streams, vec![6, 6, 3, 3]);
            let template = Template::of_numbers(layout.clone(), 1, 0);
            let mut first = 0;
            let payloads: Vec<Vec<u8>> = cuts.iter().map(|cells| {
                let payload = payload(&layout, first, *cells);
                first += cells;
                payload
            }).collect();
            let pieces: Vec<Piece<'_>> =
                cuts.iter().zip(&payloads).map(|(cells, payload)| Piece { payload, cells: *cells }).collect();
            let mut bytes = vec![0xee; layout.state_bytes(u64::from(first)) as usize];
            template.compose(&pieces, &mut bytes, 1).unwrap();
            prop_assert_eq!(bytes, state(&layout, first));
        }

        #[test]
        fn any_bytes_may_be_probed(bytes in prop::collection::vec(any::<u8>(), 0..200), streams in 0u32..4) {
            let _ = Template::probe(&bytes, streams);
            let mut begun = state(&layout(1, vec![4, 4]), 2);
            begun.truncate(60);
            begun.extend(bytes);
            let _ = Template::probe(&begun, 1);
        }
    }

    #[test]
    fn many_threads_write_what_one_does() {
        let layout = layout(2, vec![60_000, 7, 60_000, 5, 40_000]);
        let template = Template::of_numbers(layout.clone(), 1, 0);
        let (one, other) = (payload(&layout, 0, 64), payload(&layout, 64, 3));
        let pieces = [Piece { payload: &one, cells: 64 }, Piece { payload: &other, cells: 3 }];
        let wanted = state(&layout, 67);
        assert!(wanted.len() as u64 > PARALLEL_BYTES_MIN);
        for threads in 0..8 {
            let mut bytes = vec![0xee; wanted.len()];
            template.compose(&pieces, &mut bytes, threads).unwrap();
            assert!(bytes == wanted, "{threads} threads");
        }
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let layout = layout(1, vec![4]);
        let template = Template::of_numbers(layout.clone(), 1, 0);
        let rows = payload(&layout, 0, 2);
        let mut bytes = vec![0; layout.state_bytes(2) as usize];
        for (payload, cells) in [(&rows[..], 3), (&rows[1..], 2), (&rows[..], 0), (&rows[..], u32::MAX)] {
            assert!(template.compose(&[Piece { payload, cells }], &mut bytes, 1).is_err());
        }
        assert!(template.compose(&[], &mut bytes, 1).is_err());
        assert!(template.compose(&[Piece { payload: &rows, cells: 2 }], &mut bytes[1..], 1).is_err());
    }
}
