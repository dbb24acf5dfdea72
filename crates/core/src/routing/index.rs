//! A hash table from hashes to numbers of fixed size: it never grows, moves or leaves tombstones, so that no insertion
//! is ever slow, and its bytes are known beforehand. Pages that were never written cost nothing.

use alloc::{vec, vec::Vec};

/// The most of its places that may be taken, in eighths.
const LOAD_EIGHTHS_MAX: usize = 6;

/// Numbers by hash. What a number stands for, and whether it is the one that is looked for, the caller knows.
pub(super) struct Index {
    /// The lower half of the hash above the number plus one; zero is free.
    places: Vec<u64>,
    mask: usize,
    taken: usize,
}

impl Index {
    /// Room for `places` (rounded up to a power of two), of which at most three quarters may be taken.
    pub(super) fn new(places: usize) -> Self {
        let places = places.next_power_of_two();
        Self { places: vec![0; places], mask: places - 1, taken: 0 }
    }

    /// How many numbers fit.
    pub(super) fn room(&self) -> usize {
        self.places.len() / 8 * LOAD_EIGHTHS_MAX
    }

    pub(super) fn len(&self) -> usize {
        self.taken
    }

    fn tag(hash: u64) -> u64 {
        hash & 0xffff_ffff
    }

    fn home(&self, place: u64) -> usize {
        (place >> 32) as usize & self.mask
    }

    /// The number with this hash for which `is_it` holds.
    pub(super) fn get(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = Self::tag(hash);
        let mut at = tag as usize & self.mask;
        loop {
            let place = self.places[at];
            if place == 0 {
                return None;
            }
            let number = (place & 0xffff_ffff) as u32 - 1;
            if place >> 32 == tag && is_it(number) {
                return Some(number);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Adds a number that is not in it. The caller keeps to [`Index::room`].
    pub(super) fn insert(&mut self, hash: u64, number: u32) {
        debug_assert!(self.taken < self.room().max(1));
        let tag = Self::tag(hash);
        let mut at = tag as usize & self.mask;
        while self.places[at] != 0 {
            at = (at + 1) & self.mask;
        }
        self.places[at] = (tag << 32) | (u64::from(number) + 1);
        self.taken += 1;
    }

    /// Removes a number; what follows moves up, so that no gap is left in anybody's way.
    pub(super) fn remove(&mut self, hash: u64, number: u32) {
        let wanted = (Self::tag(hash) << 32) | (u64::from(number) + 1);
        let mut gap = self.home(wanted);
        while self.places[gap] != wanted {
            if self.places[gap] == 0 {
                return;
            }
            gap = (gap + 1) & self.mask;
        }
        self.taken -= 1;
        let mut next = gap;
        loop {
            next = (next + 1) & self.mask;
            let place = self.places[next];
            if place == 0 {
                break;
            }
            let from_home = next.wrapping_sub(self.home(place)) & self.mask;
            let from_gap = next.wrapping_sub(gap) & self.mask;
            if from_home >= from_gap {
                self.places[gap] = place;
                gap = next;
            }
        }
        self.places[gap] = 0;
    }
}

/// Spreads two numbers over 64 bits: the one way in which hashes are combined here.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut bits = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits ^ (bits >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn it_knows_what_a_map_knows(steps in prop::collection::vec((any::<bool>(), 0..40_u32), 1..400)) {
            let mut index = Index::new(64);
            let mut map = BTreeMap::new();
            // Many share a hash, and homes lie at the end of the table so that it wraps.
            let hash = |number: u32| 60 + u64::from(number % 5);
            for (add, number) in steps {
                if add && !map.contains_key(&number) && map.len() < index.room() {
                    index.insert(hash(number), number);
                    map.insert(number, ());
                } else if !add {
                    index.remove(hash(number), number);
                    map.remove(&number);
                }
                prop_assert_eq!(index.len(), map.len());
                for number in 0..40 {
                    let found = index.get(hash(number), |other| other == number).is_some();
                    prop_assert_eq!(found, map.contains_key(&number));
                }
            }
        }
    }
}
