//! Threads leased to engines, so that those stepping at the same time never have more threads than cores.
//!
//! An engine is told a number of threads before it is given work. A smaller number counts as free only once the
//! engine has confirmed it; an engine without work does not step and counts nothing. When more engines have work than
//! there are cores, they take turns.

use crate::{ids::Digest, time::Instant};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// What one engine does with processor time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Activity {
    /// It has no work and takes no step.
    Idle,
    /// It is about to get work; whatever it is told now reaches it before that work.
    Starting,
    /// It steps with up to this many threads.
    Stepping { threads_max: u32 },
}

/// What one engine holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Lease {
    /// The last number it was told.
    told: u32,
    /// Numbers told and not yet confirmed.
    unconfirmed: u32,
    activity: Activity,
    /// When it last got or lost its turn.
    turn_since: Instant,
}

impl Lease {
    fn counted(&self) -> u32 {
        match self.activity {
            Activity::Idle | Activity::Starting => 0,
            Activity::Stepping { threads_max } => threads_max,
        }
    }

    fn is_busy(&self) -> bool {
        self.activity != Activity::Idle
    }

    fn has_turn(&self) -> bool {
        self.told > 0 && matches!(self.activity, Activity::Stepping { .. })
    }
}

/// Turns are not shorter than this, whatever the settings say: engines that only take turns do nothing else.
const QUANTUM_MIN: Duration = Duration::from_millis(1);

/// The leases of one worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadLeases {
    cores: u32,
    quantum: Duration,
    leases: BTreeMap<Digest, Lease>,
    /// Those of them that have work: all that matters but for what they are told next.
    busy: BTreeSet<Digest>,
}

impl ThreadLeases {
    /// No leases yet.
    pub fn new(cores: u32, quantum: Duration) -> Self {
        Self { cores: cores.max(1), quantum: quantum.max(QUANTUM_MIN), leases: BTreeMap::new(), busy: BTreeSet::new() }
    }

    /// Threads that nobody is stepping with.
    pub fn free(&self) -> u32 {
        self.cores.saturating_sub(self.at_work().map(|(_, lease)| lease.counted()).sum())
    }

    fn at_work(&self) -> impl Iterator<Item = (Digest, &Lease)> {
        self.busy.iter().filter_map(|digest| Some((*digest, self.leases.get(digest)?)))
    }

    /// An engine was started with this many threads and has no work yet.
    pub fn enter(&mut self, digest: Digest, threads: u32, now: Instant) {
        let lease = Lease { told: threads, unconfirmed: 0, activity: Activity::Idle, turn_since: now };
        self.leases.insert(digest, lease);
        self.busy.remove(&digest);
    }

    /// An engine is gone.
    pub fn leave(&mut self, digest: Digest) {
        self.leases.remove(&digest);
        self.busy.remove(&digest);
    }

    /// An engine begins or ends having work. The messages of the next `settle` must be sent before its first work.
    pub fn set_busy(&mut self, digest: Digest, busy: bool, now: Instant) {
        let Some(lease) = self.leases.get_mut(&digest) else { return };
        if lease.is_busy() != busy {
            lease.activity = if busy { Activity::Starting } else { Activity::Idle };
            lease.turn_since = now;
            if busy {
                self.busy.insert(digest)
            } else {
                self.busy.remove(&digest)
            };
        }
    }

    /// An engine confirms the oldest number it has not yet confirmed.
    pub fn confirmed(&mut self, digest: Digest) {
        let Some(lease) = self.leases.get_mut(&digest) else { return };
        lease.unconfirmed = lease.unconfirmed.saturating_sub(1);
        if lease.unconfirmed == 0
            && let Activity::Stepping { threads_max } = &mut lease.activity
        {
            *threads_max = lease.told;
        }
    }

    /// Rounds in which everybody who has work gets a turn: 1 while there are cores for all.
    pub fn rounds(&self) -> u32 {
        u32::try_from(self.busy.len()).unwrap_or(u32::MAX).div_ceil(self.cores).max(1)
    }

    /// When turns change next, if engines wait for one.
    pub fn next_timer(&self) -> Option<Instant> {
        let waiting = self.at_work().any(|(_, lease)| lease.told == 0);
        let turns = self.at_work().map(|(_, lease)| lease).filter(|lease| lease.has_turn());
        waiting.then(|| turns.map(|lease| lease.turn_since + self.quantum).min()).flatten()
    }

    /// What to tell engines, in order: reductions first, then what is free.
    pub fn settle(&mut self, now: Instant) -> Vec<(Digest, u32)> {
        let targets = self.targets(now);
        let mut messages = Vec::new();
        for (digest, target) in &targets {
            let Some(lease) = self.leases.get_mut(digest) else { continue };
            if matches!(lease.activity, Activity::Stepping { .. }) && lease.told > *target {
                tell(lease, *digest, *target, now, &mut messages);
            }
        }
        for (digest, target) in targets {
            let free = self.free();
            let Some(lease) = self.leases.get_mut(&digest) else { continue };
            let threads = target.min(lease.counted().saturating_add(free));
            let starting = lease.activity == Activity::Starting;
            if threads > lease.told || (starting && threads != lease.told) {
                tell(lease, digest, threads, now, &mut messages);
            }
            if starting || threads == lease.told {
                let threads_max = threads.max(lease.counted());
                lease.activity = Activity::Stepping { threads_max };
            }
        }
        messages
    }

    /// How many threads each busy engine should have: the cores shared out evenly, or one each in turns.
    fn targets(&self, now: Instant) -> Vec<(Digest, u32)> {
        let mut busy: Vec<(Digest, &Lease)> = self.at_work().collect();
        let count = u32::try_from(busy.len()).unwrap_or(u32::MAX);
        if count <= self.cores {
            let (share, extra) = (self.cores / count.max(1), self.cores % count.max(1));
            return busy
                .iter()
                .zip(0..)
                .map(|((digest, _), rank)| (*digest, share + u32::from(rank < extra)))
                .collect();
        }
        // Whoever has used up its quantum goes behind those who wait; who has waited longest comes first.
        busy.sort_by_key(|(digest, lease)| {
            let in_turn = lease.has_turn() && now.since(lease.turn_since) < self.quantum;
            (!in_turn, lease.has_turn(), lease.turn_since, *digest)
        });
        busy.iter().zip(0..).map(|((digest, _), rank)| (*digest, u32::from(rank < self.cores))).collect()
    }

    /// **Never more threads than cores**: what engines may be stepping with at this moment.
    pub fn within_cores(&self) -> bool {
        let busy: BTreeSet<Digest> =
            self.leases.iter().filter(|(_, lease)| lease.is_busy()).map(|(digest, _)| *digest).collect();
        busy == self.busy && self.leases.values().map(Lease::counted).sum::<u32>() <= self.cores
    }
}

fn tell(lease: &mut Lease, digest: Digest, threads: u32, now: Instant, messages: &mut Vec<(Digest, u32)>) {
    if (lease.told == 0) != (threads == 0) {
        lease.turn_since = now;
    }
    lease.told = threads;
    lease.unconfirmed += 1;
    messages.push((digest, threads));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap as Map, VecDeque};
    use std::vec;

    const QUANTUM: Duration = Duration::from_millis(100);

    fn id(number: u8) -> Digest {
        Digest([number; 32])
    }

    fn at(milliseconds: u64) -> Instant {
        Instant::after(Duration::from_millis(milliseconds))
    }

    #[test]
    fn one_engine_alone_is_told_once() {
        let mut leases = ThreadLeases::new(2, QUANTUM);
        leases.enter(id(1), 1, at(0));
        leases.set_busy(id(1), true, at(0));
        assert_eq!(leases.settle(at(0)), [(id(1), 2)]);
        leases.confirmed(id(1));
        for round in 1..5 {
            leases.set_busy(id(1), false, at(round));
            leases.set_busy(id(1), true, at(round));
            assert_eq!(leases.settle(at(round)), [], "nothing new to say on the warm path");
            assert_eq!(leases.free(), 0);
        }
    }

    #[test]
    fn a_second_engine_waits_for_the_first_to_give_way() {
        let mut leases = ThreadLeases::new(2, QUANTUM);
        leases.enter(id(1), 2, at(0));
        leases.enter(id(2), 2, at(0));
        leases.set_busy(id(1), true, at(0));
        assert_eq!(leases.settle(at(0)), []);
        leases.set_busy(id(2), true, at(1));
        assert_eq!(leases.settle(at(1)), [(id(1), 1), (id(2), 0)]);
        leases.confirmed(id(2));
        assert_eq!(leases.settle(at(2)), []);
        leases.confirmed(id(1));
        assert_eq!(leases.settle(at(3)), [(id(2), 1)]);
        leases.set_busy(id(1), false, at(4));
        assert_eq!(leases.settle(at(4)), [(id(2), 2)]);
    }

    #[test]
    fn more_engines_than_cores_take_turns() {
        let mut leases = ThreadLeases::new(1, QUANTUM);
        for number in 1..=3 {
            leases.enter(id(number), 0, at(0));
            leases.set_busy(id(number), true, at(u64::from(number)));
        }
        let mut turns = vec![];
        let mut now = at(10);
        for _ in 0..7 {
            for (digest, threads) in leases.settle(now) {
                if threads > 0 {
                    turns.push(digest.0[0]);
                }
                leases.confirmed(digest);
            }
            for (digest, threads) in leases.settle(now) {
                assert_eq!(threads, 1);
                turns.push(digest.0[0]);
                leases.confirmed(digest);
            }
            now = leases.next_timer().expect("others wait");
        }
        assert_eq!(turns, [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!(leases.rounds(), 3);
    }

    #[test]
    fn with_one_engine_more_than_cores_the_one_whose_quantum_is_over_gives_way() {
        let mut leases = ThreadLeases::new(1, QUANTUM);
        for number in 1..=2 {
            leases.enter(id(number), 0, at(0));
            leases.set_busy(id(number), true, at(0));
        }
        assert_eq!(leases.settle(at(0)), [(id(1), 1)]);
        leases.confirmed(id(1));
        assert_eq!(leases.settle(at(99)), [], "a turn lasts its quantum");
        assert_eq!(leases.next_timer(), Some(at(100)));
        assert_eq!(leases.settle(at(100)), [(id(1), 0)]);
        leases.confirmed(id(1));
        assert_eq!(leases.settle(at(101)), [(id(2), 1)]);
    }

    #[test]
    fn nobody_is_woken_for_a_turn_that_nobody_waits_for() {
        let mut leases = ThreadLeases::new(1, QUANTUM);
        leases.enter(id(1), 1, at(0));
        leases.enter(id(2), 0, at(0));
        leases.set_busy(id(1), true, at(0));
        leases.settle(at(0));
        assert_eq!(leases.next_timer(), None, "an engine without work or threads waits for nothing");
        leases.set_busy(id(2), true, at(1));
        leases.settle(at(1));
        assert_eq!(leases.next_timer(), Some(at(100)));
    }

    #[test]
    fn the_threads_of_an_engine_that_is_gone_are_free() {
        let mut leases = ThreadLeases::new(2, QUANTUM);
        for number in 1..=2 {
            leases.enter(id(number), 1, at(0));
            leases.set_busy(id(number), true, at(0));
        }
        assert_eq!((leases.settle(at(0)), leases.free()), (vec![], 0));
        leases.leave(id(1));
        assert_eq!(leases.free(), 1);
        assert_eq!(leases.settle(at(1)), [(id(2), 2)]);
    }

    #[test]
    fn confirming_an_older_number_frees_nothing_while_a_later_one_is_on_its_way() {
        let mut leases = ThreadLeases::new(4, QUANTUM);
        leases.enter(id(1), 4, at(0));
        leases.enter(id(2), 0, at(0));
        leases.set_busy(id(1), true, at(0));
        leases.settle(at(0));
        leases.set_busy(id(2), true, at(1));
        assert_eq!(leases.settle(at(1)), [(id(1), 2)]);
        leases.set_busy(id(2), false, at(2));
        assert_eq!(leases.settle(at(2)), [(id(1), 4)]);
        leases.set_busy(id(2), true, at(3));
        assert_eq!(leases.settle(at(3)), [(id(1), 2)]);
        // Having read the first 2, it may still read the 4 and step with it.
        for _ in 0..2 {
            leases.confirmed(id(1));
            assert_eq!((leases.free(), leases.settle(at(4))), (0, vec![]));
        }
        leases.confirmed(id(1));
        assert_eq!((leases.free(), leases.settle(at(5))), (2, vec![(id(2), 2)]));
    }

    #[test]
    fn a_machine_that_promised_too_much_would_be_noticed() {
        let mut leases = ThreadLeases::new(2, QUANTUM);
        leases.enter(id(1), 2, at(0));
        leases.set_busy(id(1), true, at(0));
        for (threads_max, within) in [(2, true), (3, false)] {
            if let Some(lease) = leases.leases.get_mut(&id(1)) {
                lease.activity = Activity::Stepping { threads_max };
            }
            assert_eq!(leases.within_cores(), within);
        }
    }

    /// Engines as they really behave: messages arrive in order, take effect at a step, and are confirmed later.
    #[derive(Debug, Default)]
    struct Engine {
        inbox: VecDeque<Message>,
        threads: u32,
        working: bool,
        confirmations: u32,
    }

    #[derive(Debug)]
    enum Message {
        Threads(u32),
        Work,
    }

    #[derive(Debug, Clone)]
    enum Op {
        Busy(u8),
        Idle(u8),
        Read(u8),
        Confirm(u8),
        Pass(u64),
        Restart(u8),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0_u8..4).prop_map(Op::Busy),
            (0_u8..4).prop_map(Op::Idle),
            (0_u8..4).prop_map(Op::Read),
            (0_u8..4).prop_map(Op::Confirm),
            (1_u64..150).prop_map(Op::Pass),
            (0_u8..4).prop_map(Op::Restart),
        ]
    }

    struct World {
        leases: ThreadLeases,
        engines: Map<u8, Engine>,
        now: u64,
    }

    impl World {
        fn new(cores: u32) -> Self {
            let mut world = Self { leases: ThreadLeases::new(cores, QUANTUM), engines: Map::new(), now: 0 };
            (0..4).for_each(|number| world.restart(number));
            world
        }

        fn restart(&mut self, number: u8) {
            self.leases.leave(id(number));
            self.leases.enter(id(number), 1, at(self.now));
            self.engines.insert(number, Engine { threads: 1, ..Engine::default() });
        }

        fn engine(&mut self, number: u8) -> &mut Engine {
            self.engines.get_mut(&number).expect("all four exist")
        }

        fn apply(&mut self, op: &Op) {
            let mut starts = None;
            match *op {
                Op::Busy(number) if !self.leases.leases[&id(number)].is_busy() => {
                    self.leases.set_busy(id(number), true, at(self.now));
                    starts = Some(number);
                }
                Op::Idle(number) if self.engine(number).working => {
                    self.engine(number).working = false;
                    self.leases.set_busy(id(number), false, at(self.now));
                }
                Op::Read(number) => self.read(number),
                Op::Confirm(number) if self.engine(number).confirmations > 0 => {
                    self.engine(number).confirmations -= 1;
                    self.leases.confirmed(id(number));
                }
                Op::Pass(milliseconds) => self.now += milliseconds,
                Op::Restart(number) => self.restart(number),
                Op::Busy(_) | Op::Idle(_) | Op::Confirm(_) => {}
            }
            for (digest, threads) in self.leases.settle(at(self.now)) {
                self.engine(digest.0[0]).inbox.push_back(Message::Threads(threads));
            }
            if let Some(number) = starts {
                self.engine(number).inbox.push_back(Message::Work);
            }
        }

        fn read(&mut self, number: u8) {
            let engine = self.engine(number);
            match engine.inbox.pop_front() {
                Some(Message::Threads(threads)) => {
                    engine.threads = threads;
                    engine.confirmations += 1;
                }
                Some(Message::Work) => engine.working = true,
                None => {}
            }
        }

        fn stepping(&self) -> u32 {
            self.engines.values().filter(|engine| engine.working).map(|engine| engine.threads).sum()
        }
    }

    proptest! {
        #[test]
        fn engines_never_step_with_more_threads_than_cores(
            cores in 1_u32..5, ops in prop::collection::vec(any_op(), 1..120),
        ) {
            let mut world = World::new(cores);
            for op in &ops {
                world.apply(op);
                prop_assert!(world.leases.within_cores());
                prop_assert!(world.stepping() <= cores, "{op:?}");
            }
            // Once every message has arrived and been confirmed, all cores are in use and nobody is forgotten.
            for _ in 0..200 {
                for number in 0..4 {
                    world.apply(&Op::Read(number));
                    world.apply(&Op::Confirm(number));
                }
            }
            let busy = world.engines.values().filter(|engine| engine.working).count();
            let running = world.engines.values().filter(|engine| engine.working && engine.threads > 0).count();
            prop_assert_eq!(world.stepping(), if busy == 0 { 0 } else { cores });
            prop_assert_eq!(running, busy.min(cores as usize));
        }
    }
}
