//! What waits for one model (requests, and jobs before they become requests): first by class, which improves with
//! waiting, then in order of arrival.

use crate::{ids::Priority, time::Instant};
use alloc::collections::{BTreeMap, btree_map};
use core::{iter::Peekable, time::Duration};
use serde::{Deserialize, Serialize};

/// A waiting request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waiting<Id> {
    pub(crate) id: Id,
    pub(crate) arrived: Instant,
}

/// One line per class. Within a line, order of arrival is also order of importance, since all age alike: the best
/// candidate is always the head of one of the lines.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Queue<Id> {
    lines: [BTreeMap<u64, Waiting<Id>>; 3],
}

impl<Id> Default for Queue<Id> {
    fn default() -> Self {
        Self { lines: Default::default() }
    }
}

/// Where a class's line is.
pub(crate) fn class_index(class: Priority) -> usize {
    match class {
        Priority::Critical => 0,
        Priority::Standard => 1,
        Priority::Batch => 2,
    }
}

/// The class as it counts after waiting: one better for every `aging` passed.
pub(crate) fn aged_class(class: usize, waited: Duration, aging: Duration) -> usize {
    let steps = waited.as_nanos().checked_div(aging.as_nanos()).unwrap_or(0);
    class.saturating_sub(usize::try_from(steps).unwrap_or(usize::MAX))
}

impl<Id: Copy + PartialEq> Queue<Id> {
    pub(crate) fn insert(&mut self, class: Priority, sequence: u64, waiting: Waiting<Id>) {
        self.lines[class_index(class)].insert(sequence, waiting);
    }

    pub(crate) fn remove(&mut self, class: Priority, sequence: u64) -> Option<Waiting<Id>> {
        self.lines[class_index(class)].remove(&sequence)
    }

    pub(crate) fn contains(&self, class: Priority, sequence: u64, id: Id) -> bool {
        self.lines[class_index(class)].get(&sequence).is_some_and(|waiting| waiting.id == id)
    }

    pub(crate) fn len(&self) -> usize {
        self.lines.iter().map(BTreeMap::len).sum()
    }

    pub(crate) fn len_of(&self, class: Priority) -> usize {
        self.lines[class_index(class)].len()
    }

    /// Whom to run next among the classes that may, however old the others are: a reserved slot stays reserved.
    pub(crate) fn next(&self, now: Instant, aging: Duration, may: impl Fn(Priority) -> bool) -> Option<Id> {
        let heads = Priority::ALL.into_iter().enumerate().filter_map(|(class, priority)| {
            let (sequence, waiting) = self.lines[class].first_key_value().filter(|_| may(priority))?;
            Some(((aged_class(class, now.since(waiting.arrived), aging), *sequence), waiting.id))
        });
        heads.min_by_key(|(key, _)| *key).map(|(_, request)| request)
    }

    /// All of them in the order in which they would run if no reserve were kept.
    pub(crate) fn in_order(&self, now: Instant, aging: Duration) -> InOrder<'_, Id> {
        InOrder { lines: self.lines.each_ref().map(|line| line.iter().peekable()), now, aging }
    }
}

/// A merge of the three lines.
pub(crate) struct InOrder<'a, Id> {
    lines: [Peekable<btree_map::Iter<'a, u64, Waiting<Id>>>; 3],
    now: Instant,
    aging: Duration,
}

impl<Id: Copy> Iterator for InOrder<'_, Id> {
    type Item = Id;

    fn next(&mut self) -> Option<Id> {
        let (now, aging) = (self.now, self.aging);
        let heads = self.lines.iter_mut().enumerate().filter_map(|(class, line)| {
            let (sequence, waiting) = line.peek()?;
            Some((aged_class(class, now.since(waiting.arrived), aging), **sequence, class))
        });
        let (_, _, class) = heads.min()?;
        self.lines[class].next().map(|(_, waiting)| waiting.id)
    }
}
