//! Requests that wait for one model: first by class, which improves with waiting, then in order of arrival.

use crate::{
    ids::{Priority, RequestId},
    time::Instant,
};
use alloc::collections::{BTreeMap, btree_map};
use core::{iter::Peekable, time::Duration};

/// A waiting request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) request: RequestId,
    pub(super) arrived: Instant,
}

/// One line per class. Within a line, order of arrival is also order of importance, since all age alike: the best
/// candidate is always the head of one of the lines.
#[derive(Debug, Default)]
pub(super) struct Queue {
    lines: [BTreeMap<u64, Waiting>; 3],
}

/// Where a class's line is.
pub(super) fn class_index(class: Priority) -> usize {
    match class {
        Priority::Critical => 0,
        Priority::Standard => 1,
        Priority::Batch => 2,
    }
}

/// The class as it counts after waiting: one better for every `aging` passed.
fn aged_class(class: usize, waited: Duration, aging: Duration) -> usize {
    let steps = waited.as_nanos().checked_div(aging.as_nanos()).unwrap_or(0);
    class.saturating_sub(usize::try_from(steps).unwrap_or(usize::MAX))
}

impl Queue {
    pub(super) fn insert(&mut self, class: Priority, sequence: u64, waiting: Waiting) {
        self.lines[class_index(class)].insert(sequence, waiting);
    }

    pub(super) fn remove(&mut self, class: Priority, sequence: u64) -> Option<Waiting> {
        self.lines[class_index(class)].remove(&sequence)
    }

    pub(super) fn contains(&self, class: Priority, sequence: u64, request: RequestId) -> bool {
        self.lines[class_index(class)].get(&sequence).is_some_and(|waiting| waiting.request == request)
    }

    pub(super) fn len(&self) -> usize {
        self.lines.iter().map(BTreeMap::len).sum()
    }

    pub(super) fn len_of(&self, class: Priority) -> usize {
        self.lines[class_index(class)].len()
    }

    /// The request to run next; with `critical_only`, the next critical one, however old the others are: a reserved
    /// slot stays reserved.
    pub(super) fn next(&self, now: Instant, aging: Duration, critical_only: bool) -> Option<RequestId> {
        let lines = if critical_only { &self.lines[..1] } else { &self.lines[..] };
        let heads = lines.iter().enumerate().filter_map(|(class, line)| {
            let (sequence, waiting) = line.first_key_value()?;
            Some(((aged_class(class, now.since(waiting.arrived), aging), *sequence), waiting.request))
        });
        heads.min_by_key(|(key, _)| *key).map(|(_, request)| request)
    }

    /// All of them in the order in which they would run if no reserve were kept.
    pub(super) fn in_order(&self, now: Instant, aging: Duration) -> InOrder<'_> {
        InOrder { lines: self.lines.each_ref().map(|line| line.iter().peekable()), now, aging }
    }
}

/// A merge of the three lines.
pub(super) struct InOrder<'a> {
    lines: [Peekable<btree_map::Iter<'a, u64, Waiting>>; 3],
    now: Instant,
    aging: Duration,
}

impl Iterator for InOrder<'_> {
    type Item = RequestId;

    fn next(&mut self) -> Option<RequestId> {
        let (now, aging) = (self.now, self.aging);
        let heads = self.lines.iter_mut().enumerate().filter_map(|(class, line)| {
            let (sequence, waiting) = line.peek()?;
            Some((aged_class(class, now.since(waiting.arrived), aging), **sequence, class))
        });
        let (_, _, class) = heads.min()?;
        self.lines[class].next().map(|(_, waiting)| waiting.request)
    }
}
