//! Whether a sequence that was restored says the same bytes again: a switch for tests and for who suspects a fault.

use super::state::State;
use crate::protocol::StateLayout;
use warmset_core::kv::header::payload_checksum;

/// A block as it is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) payload: &'a [u8],
    /// Of the payload when it was saved.
    pub(crate) checksum: u128,
}

/// Compares the state that a restored sequence writes with the blocks that it was made of, from one of its blocks on. The
/// error is the first block that is another than what was saved.
pub(crate) fn verify(
    layout: &StateLayout,
    state: &[u8],
    (first_block, blocks): (u32, &[Stored<'_>]),
) -> Result<(), u32> {
    let state = State::parse(layout, state).map_err(|_| first_block)?;
    for (number, stored) in (first_block..).zip(blocks) {
        let same = state.block(number).is_some_and(|rows| is_same(rows, stored.payload));
        if !same || payload_checksum(stored.payload) != stored.checksum {
            return Err(number);
        }
    }
    Ok(())
}

/// Whether pieces one behind the other are these bytes.
fn is_same<'a>(pieces: impl Iterator<Item = &'a [u8]>, mut bytes: &[u8]) -> bool {
    for piece in pieces {
        let Some(rest) = bytes.strip_prefix(piece) else { return false };
        bytes = rest;
    }
    bytes.is_empty()
}

#[cfg(test)]
mod tests {
    use super::super::{
        compose::{Piece, Template},
        state::tests::{layout, payload},
    };
    use super::*;
    use warmset_core::kv::BLOCK_TOKENS;

    fn composed(layout: &StateLayout, payloads: &[&Vec<u8>]) -> Vec<u8> {
        let pieces: Vec<Piece<'_>> = payloads.iter().map(|payload| Piece { payload, cells: BLOCK_TOKENS }).collect();
        let mut bytes = vec![0; layout.state_bytes(u64::from(BLOCK_TOKENS) * pieces.len() as u64) as usize];
        Template::of_numbers(layout.clone(), 1, 0).compose(&pieces, &mut bytes, 1).unwrap();
        bytes
    }

    #[test]
    fn a_wrong_composition_is_found_and_a_right_one_is_not() {
        let layout = layout(2, vec![8, 3, 5]);
        let payloads: Vec<Vec<u8>> = (0..3).map(|block| payload(&layout, block * BLOCK_TOKENS, BLOCK_TOKENS)).collect();
        let [one, two, three] = &payloads[..] else { panic!("three blocks") };
        let stored: Vec<Stored<'_>> =
            payloads.iter().map(|payload| Stored { payload, checksum: payload_checksum(payload) }).collect();
        assert_eq!(verify(&layout, &composed(&layout, &[one, two, three]), (0, &stored)), Ok(()));
        assert_eq!(verify(&layout, &composed(&layout, &[one, two, three]), (1, &stored[1..])), Ok(()));
        assert_eq!(verify(&layout, &composed(&layout, &[one, two, three]), (0, &stored[1..])), Err(0));
        // In another order, one twice, one of them missing.
        assert_eq!(verify(&layout, &composed(&layout, &[one, three, two]), (0, &stored)), Err(1));
        assert_eq!(verify(&layout, &composed(&layout, &[one, two, two]), (0, &stored)), Err(2));
        assert_eq!(verify(&layout, &composed(&layout, &[one, two]), (0, &stored)), Err(2));
        // Any byte of a row, in any plane.
        let right = composed(&layout, &[one, two, three]);
        let rows = right.len() - 3 * BLOCK_TOKENS as usize * 5;
        for (at, block) in [(right.len() - 1, 2), (rows, 0), (rows + 5 * BLOCK_TOKENS as usize, 1)] {
            let mut wrong = right.clone();
            wrong[at] ^= 0x10;
            assert_eq!(verify(&layout, &wrong, (0, &stored)), Err(block), "byte {at}");
        }
        assert_eq!(verify(&layout, &[], (0, &stored)), Err(0));
    }

    #[test]
    fn a_block_that_was_changed_since_it_was_saved_is_found() {
        let layout = layout(1, vec![4]);
        let (saved, mut now) = (payload(&layout, 0, BLOCK_TOKENS), payload(&layout, 0, BLOCK_TOKENS));
        now[17] ^= 1;
        let stored = [Stored { payload: &now, checksum: payload_checksum(&saved) }];
        assert_eq!(verify(&layout, &composed(&layout, &[&now]), (0, &stored)), Err(0));
    }
}
