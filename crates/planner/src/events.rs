//! What happens when, in an order that is the same in every run.

use std::collections::BTreeMap;
use warmset_core::Instant;

/// What goes first of things that happen at the same instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Work that was begun has ended: memory and sequences are free.
    Completion,
    /// The clock reached what somebody waited for.
    Timer,
    /// Somebody asks.
    Arrival,
}

/// Events by time, then by rank, then in the order in which they were put in.
#[derive(Debug, Clone)]
pub struct EventQueue<T> {
    waiting: BTreeMap<(Instant, Rank, u64), T>,
    sequence: u64,
}

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), sequence: 0 }
    }
}

impl<T> EventQueue<T> {
    /// Puts in what happens at `at`.
    pub fn push(&mut self, at: Instant, rank: Rank, event: T) {
        self.sequence += 1;
        self.waiting.insert((at, rank, self.sequence), event);
    }

    /// When and as what the next thing happens.
    pub fn next(&self) -> Option<(Instant, Rank)> {
        self.waiting.first_key_value().map(|((at, rank, _), _)| (*at, *rank))
    }

    /// Takes out the next thing.
    pub fn pop(&mut self) -> Option<(Instant, T)> {
        self.waiting.pop_first().map(|((at, _, _), event)| (at, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_then_rank_then_order() {
        let mut queue = EventQueue::default();
        let (early, late) = (Instant(1), Instant(2));
        queue.push(late, Rank::Completion, "fourth");
        queue.push(early, Rank::Arrival, "second");
        queue.push(early, Rank::Arrival, "third");
        queue.push(early, Rank::Completion, "first");
        assert_eq!(queue.next(), Some((early, Rank::Completion)));
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, event)| event).collect();
        assert_eq!(order, ["first", "second", "third", "fourth"]);
    }
}
