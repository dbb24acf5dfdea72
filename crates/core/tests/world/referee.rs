//! Books of the world's own about a worker, kept from what it was told and what it wanted: where the machine's own books are
//! wrong, they are wrong in its invariants, too, and only somebody else's show it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
};
use warmset_core::{
    Bytes, Digest, Instant, MemoryVector, PoolName, Priority, RequestId,
    memory::HOST,
    worker::{Action, Event, Fact, LedgerLine, ModelState, Worker},
};

#[derive(Debug, Default)]
pub struct Referee {
    artifacts: BTreeMap<Digest, Digest>,
    /// The file that the engine of a model maps: its settings may have changed since.
    mapped: BTreeMap<Digest, Digest>,
    /// Engines on their way out: what is measured of them changes nothing.
    leaving: BTreeSet<Digest>,
    classes: BTreeMap<RequestId, (Digest, Priority)>,
    waiting: BTreeSet<RequestId>,
    running: BTreeSet<RequestId>,
    /// Requests that gave way once: in the end their turn comes before that of any class.
    parked: BTreeSet<RequestId>,
    /// Until when no load of a model may begin, as its callers were told.
    paused: BTreeMap<Digest, Instant>,
}

impl Referee {
    /// Looks at one step of a worker, which is as it is afterwards.
    pub fn judge(&mut self, now: Instant, event: &Event, actions: &[Action], worker: &Worker) {
        self.hear(event);
        for action in actions {
            self.see(now, action);
        }
        let ledger = worker.ledger(now);
        self.add_up(now, &ledger, worker, &loads_begin_in(&ledger, actions));
        let leaving = |line: &&LedgerLine| line.state == ModelState::Unloading;
        self.leaving = ledger.iter().filter(leaving).map(|line| line.digest).collect();
    }

    fn hear(&mut self, event: &Event) {
        match event {
            Event::Configure(spec) => {
                self.artifacts.insert(spec.digest, spec.artifact);
                self.paused.remove(&spec.digest);
            }
            Event::PauseLifted { digest } | Event::Succeed { digest, .. } => {
                self.paused.remove(digest);
            }
            Event::Loaded { digest, .. } | Event::Measured { digest, .. } if !self.leaving.contains(digest) => {
                self.mapped.insert(*digest, self.artifacts[digest]);
            }
            Event::Assigned { request, digest, class, .. } => {
                self.classes.insert(*request, (*digest, *class));
                self.waiting.insert(*request);
            }
            Event::Parked { request } if self.running.remove(request) => {
                self.waiting.insert(*request);
                self.parked.insert(*request);
            }
            Event::Finished { request } => {
                self.running.remove(request);
            }
            Event::Cancelled { request, .. } => {
                self.waiting.remove(request);
            }
            _ => {}
        }
    }

    fn see(&mut self, now: Instant, action: &Action) {
        match action {
            Action::Reject { request, .. } => {
                self.waiting.remove(request);
                self.running.remove(request);
            }
            Action::Start { request, .. } => {
                self.waiting.remove(request);
                self.running.insert(*request);
                if !self.parked.contains(request) {
                    self.judge_order(*request);
                }
            }
            Action::Tell(Fact::LoadRefused { digest, retry_after, .. }) => {
                self.paused.insert(*digest, now + *retry_after);
            }
            Action::Tell(Fact::LoadStarted { digest, .. }) => {
                self.mapped.insert(*digest, self.artifacts[digest]);
                let paused = self.paused.get(digest).filter(|until| **until > now);
                nobody(paused.into_iter(), "is when the next load may begin, and one begins");
            }
            _ => {}
        }
    }

    fn judge_order(&self, started: RequestId) {
        let (digest, class) = self.classes[&started];
        let waiting = self.waiting.iter().map(|other| (other, self.classes[other]));
        let overtaken = waiting.filter(|(_, (of, better))| *of == digest && *better < class);
        nobody(overtaken, "has a better class than a request that starts before it");
    }

    /// Bytes over all engines, the pages of one file once: as the worker says, and within the pool where a load begins.
    fn add_up(&self, now: Instant, ledger: &[LedgerLine], worker: &Worker, loads_begin_in: &[&PoolName]) {
        for pool in worker.memory(now) {
            let held = self.held(ledger, &pool.pool);
            let mut told = pool.resident.clone();
            told.add(&pool.loading);
            told.add(&pool.unloading);
            let same = told.fits_in(&held) && held.fits_in(&told);
            assert!(same, "{told:?} held in pool {:?}, it says, and it is {held:?}: {ledger:#?}", pool.pool);
            let mut all = held;
            all.add(&pool.parked);
            let fits = all.fits_in(&pool.capacity) || !loads_begin_in.contains(&&pool.pool);
            assert!(fits, "a load begins and makes {all:?} of {:?}: {ledger:#?}", pool.capacity);
        }
    }

    fn held(&self, ledger: &[LedgerLine], pool: &PoolName) -> MemoryVector {
        let mut held = MemoryVector::default();
        let mut pages: BTreeMap<Digest, Bytes> = BTreeMap::new();
        for line in ledger.iter().filter(|line| line.pool == *pool) {
            held.add(&line.private);
            if line.shared_host_bytes > 0 {
                let bytes = pages.entry(self.mapped[&line.digest]).or_default();
                *bytes = line.shared_host_bytes.max(*bytes);
            }
        }
        pages.values().for_each(|bytes| held.add_at(HOST, *bytes));
        held
    }
}

fn loads_begin_in<'a>(ledger: &'a [LedgerLine], actions: &[Action]) -> Vec<&'a PoolName> {
    let begins = |line: &&LedgerLine| {
        actions.iter().any(|action| matches!(action, Action::Verify { digest, .. } if *digest == line.digest))
    };
    ledger.iter().filter(begins).map(|line| &line.pool).collect()
}

fn nobody<T: Debug>(mut found: impl Iterator<Item = T>, what: &str) {
    if let Some(one) = found.next() {
        panic!("{one:?} {what}");
    }
}
