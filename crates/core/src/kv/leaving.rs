//! Blocks that can leave a place, and which of them is worth least.

use super::{
    protocol::BlockNumber,
    worth::{self, Class},
};
use crate::time::Instant;
use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

/// Who can leave, by class and time of the last use.
#[derive(Debug, Clone, Default)]
pub(super) struct Leaving {
    classes: BTreeMap<Class, BTreeSet<(Instant, BlockNumber)>>,
}

/// The block that is worth least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Least {
    pub(super) number: BlockNumber,
    /// Seconds saved per second and byte.
    pub(super) worth: f64,
}

impl Leaving {
    pub(super) fn insert(&mut self, class: Class, used_at: Instant, number: BlockNumber) {
        self.classes.entry(class).or_default().insert((used_at, number));
    }

    pub(super) fn remove(&mut self, class: Class, used_at: Instant, number: BlockNumber) {
        if let Some(blocks) = self.classes.get_mut(&class) {
            blocks.remove(&(used_at, number));
            if blocks.is_empty() {
                self.classes.remove(&class);
            }
        }
    }

    pub(super) fn contains(&self, class: Class, used_at: Instant, number: BlockNumber) -> bool {
        self.classes.get(&class).is_some_and(|blocks| blocks.contains(&(used_at, number)))
    }

    pub(super) fn len(&self) -> usize {
        self.classes.values().map(BTreeSet::len).sum()
    }

    /// Of each class the block that was used longest ago.
    pub(super) fn oldest(&self) -> Vec<BlockNumber> {
        self.classes.values().filter_map(|blocks| blocks.first()).map(|(_, number)| *number).collect()
    }

    /// Of each class the oldest, and of these the one that is worth least now; of equals the one of the lower class.
    pub(super) fn least(&self, now: Instant) -> Option<Least> {
        let oldest = self.classes.iter().filter_map(|(class, blocks)| {
            let (used_at, number) = *blocks.first()?;
            Some(Least { number, worth: worth::of_class(*class, now.since(used_at)) })
        });
        oldest.reduce(|least, other| if other.worth < least.worth { other } else { least })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_least_is_the_least_of_all(
            blocks in prop::collection::vec((100u16..120, 0u64..5_000), 1..60),
            gone in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
            later in 0u64..5_000,
        ) {
            let at = |second| Instant::after(Duration::from_secs(second));
            let now = at(5_000 + later);
            let mut there: Vec<(u16, Instant, u32)> =
                blocks.iter().zip(0..).map(|((class, second), number)| (*class, at(*second), number)).collect();
            let mut leaving = Leaving::default();
            for (class, used_at, number) in &there {
                leaving.insert(*class, *used_at, *number);
            }
            for gone in gone {
                if !there.is_empty() {
                    let (class, used_at, number) = there.swap_remove(gone.index(there.len()));
                    leaving.remove(class, used_at, number);
                    prop_assert!(!leaving.contains(class, used_at, number));
                }
            }
            prop_assert_eq!(leaving.len(), there.len());
            let worth = |block: &(u16, Instant, u32)| worth::of_class(block.0, now.since(block.1));
            let least = there.iter().map(worth).reduce(f64::min);
            prop_assert_eq!(leaving.least(now).map(|least| least.worth), least);
        }
    }
}
