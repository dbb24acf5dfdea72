//! Blocks on their way from a sequence to the worker: wanted, written, gathered.
//!
//! The sequence goes on meanwhile. For a while it is not used for something else; what it lost after that is not saved.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

/// Saves that wait for an answer at the same time. More are not asked for: the worker is far behind.
const WANTED_MAX: usize = 256;

#[derive(Debug)]
struct Wanted {
    sequence: usize,
    /// The sequence must hold this many tokens still.
    tokens: usize,
    /// Cells that its state is to have.
    cells: u32,
    lost: bool,
    /// How long the sequence is not to lose it.
    until: Instant,
}

/// A save that is to be written now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) save: u64,
    /// None if it lost what was to be saved.
    pub(crate) sequence: Option<usize>,
    /// Cells that its state is to have; the sequence may have grown.
    pub(crate) cells: u32,
}

/// All saves of an engine.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    asked: u64,
    wanted: BTreeMap<u64, Wanted>,
    /// Allowed, in order.
    ready: VecDeque<u64>,
    /// For whose sake the worker has the staging area: from the moment that it is told of a save, whatever became of that,
    /// until it says that it has done with it. It empties the area meanwhile.
    staged: Option<u64>,
}

impl Saves {
    /// Numbers a new one; none if too many wait.
    pub(crate) fn want(&mut self, sequence: usize, tokens: usize, cells: u32, until: Instant) -> Option<u64> {
        if self.wanted.len() >= WANTED_MAX {
            return None;
        }
        self.asked += 1;
        self.wanted.insert(self.asked, Wanted { sequence, tokens, cells, lost: false, until });
        Some(self.asked)
    }

    /// A sequence now holds only its first tokens of before.
    pub(crate) fn cut(&mut self, sequence: usize, tokens: usize) {
        for wanted in self.wanted.values_mut().filter(|wanted| wanted.sequence == sequence) {
            wanted.lost |= wanted.tokens > tokens;
        }
    }

    /// How many of a sequence's first tokens are not to be lost now, since they are to be saved.
    pub(crate) fn protected(&self, sequence: usize, now: Instant) -> usize {
        let wanted = self.wanted.values().filter(|wanted| wanted.sequence == sequence && !wanted.lost);
        wanted.filter(|wanted| now < wanted.until).map(|wanted| wanted.tokens).max().unwrap_or(0)
    }

    /// When some tokens can be lost that cannot be now.
    pub(crate) fn next_unprotected(&self, now: Instant) -> Option<Instant> {
        self.wanted.values().filter(|wanted| !wanted.lost && now < wanted.until).map(|wanted| wanted.until).min()
    }

    /// The worker allows it.
    pub(crate) fn go(&mut self, save: u64) {
        if self.wanted.contains_key(&save) && !self.ready.contains(&save) {
            self.ready.push_back(save);
        }
    }

    /// The worker does not want it.
    pub(crate) fn skip(&mut self, save: u64) {
        self.wanted.remove(&save);
        self.ready.retain(|ready| *ready != save);
    }

    /// The staging area is free again.
    pub(crate) fn end(&mut self, save: u64) {
        self.staged.take_if(|staged| *staged == save);
    }

    /// What to write now, if anything.
    pub(crate) fn next(&self) -> Option<Write> {
        if self.staged.is_some() {
            return None;
        }
        let save = *self.ready.front()?;
        let wanted = self.wanted.get(&save)?;
        Some(Write { save, sequence: (!wanted.lost).then_some(wanted.sequence), cells: wanted.cells })
    }

    /// It was written, or given up, and the worker is told.
    pub(crate) fn written(&mut self, save: u64) {
        self.skip(save);
        self.staged = Some(save);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn one_after_the_other_is_written() {
        let mut saves = Saves::default();
        let (one, other) = (saves.want(3, 128, 130, soon()).unwrap(), saves.want(4, 64, 64, soon()).unwrap());
        assert_eq!(saves.next(), None);
        saves.go(other);
        saves.go(one);
        saves.go(other);
        assert_eq!(saves.next(), Some(Write { save: other, sequence: Some(4), cells: 64 }));
        saves.written(other);
        assert_eq!(saves.next(), None, "the staging area is in use");
        saves.end(one);
        assert_eq!(saves.next(), None, "by the other one");
        saves.end(other);
        assert_eq!(saves.next(), Some(Write { save: one, sequence: Some(3), cells: 130 }));
        saves.written(one);
        saves.go(one);
        saves.end(one);
        assert_eq!(saves.next(), None);
        assert_eq!(saves.protected(3, Instant::now()), 0);
    }

    /// The worker empties the area after a save that was given up too: whatever were written before would be gone.
    #[test]
    fn nothing_is_written_before_the_worker_has_done_with_a_save_that_was_given_up() {
        let mut saves = Saves::default();
        let (lost, next) = (saves.want(0, 128, 130, soon()).unwrap(), saves.want(1, 128, 130, soon()).unwrap());
        saves.cut(0, 0);
        saves.go(lost);
        saves.go(next);
        assert_eq!(saves.next().and_then(|write| write.sequence), None);
        saves.written(lost);
        assert_eq!(saves.next(), None);
        saves.end(lost);
        assert_eq!(saves.next(), Some(Write { save: next, sequence: Some(1), cells: 130 }));
    }

    #[test]
    fn what_a_sequence_lost_is_not_saved() {
        let mut saves = Saves::default();
        let (now, until) = (Instant::now(), soon());
        let (one, other) = (saves.want(0, 128, 130, until).unwrap(), saves.want(1, 128, 130, until).unwrap());
        saves.cut(0, 128);
        assert_eq!(saves.protected(0, now), 128);
        saves.cut(0, 127);
        saves.cut(0, 500);
        assert_eq!((saves.protected(0, now), saves.protected(1, now)), (0, 128));
        saves.go(one);
        assert_eq!(saves.next(), Some(Write { save: one, sequence: None, cells: 130 }));
        saves.skip(one);
        saves.go(other);
        assert_eq!(saves.next(), Some(Write { save: other, sequence: Some(1), cells: 130 }));
    }

    #[test]
    fn nobody_waits_for_ever() {
        let mut saves = Saves::default();
        let now = Instant::now();
        let (sooner, later) = (now + Duration::from_millis(5), now + Duration::from_millis(9));
        saves.want(0, 128, 130, later).unwrap();
        saves.want(0, 64, 64, sooner).unwrap();
        assert_eq!((saves.protected(0, now), saves.next_unprotected(now)), (128, Some(sooner)));
        assert_eq!((saves.protected(0, sooner), saves.next_unprotected(sooner)), (128, Some(later)));
        assert_eq!((saves.protected(0, later), saves.next_unprotected(later)), (0, None));
    }

    #[test]
    fn too_many_are_not_asked_for() {
        let mut saves = Saves::default();
        assert!((0..WANTED_MAX).all(|_| saves.want(0, 1, 1, soon()).is_some()));
        assert_eq!(saves.want(0, 1, 1, soon()), None);
    }
}
