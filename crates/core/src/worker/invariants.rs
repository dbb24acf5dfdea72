//! What is true of a worker after every event, by name. Tests and the simulator check all of it.

use super::{
    Worker,
    model::{Model, Phase},
    roster::Rules,
};
use crate::{
    ids::{Digest, PoolName, RequestId},
    time::Instant,
};
use alloc::collections::BTreeSet;

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// **Within budget**: loading, resident and unloading bytes never exceed a pool by what a load adds.
    OverBudget(PoolName),
    /// **One place**: a request waits or runs for exactly one model.
    RequestMisplaced(RequestId),
    /// **Nobody is forgotten**: who waits for a model that is absent waits for a due load, a pause or a drain.
    WaiterWithoutWaker(RequestId),
    /// **Never a victim in use**: an engine told to stop runs nothing, unless it was killed for cause.
    StoppedInUse(Digest),
    /// **Bounded loads**: no more loads at once than the settings allow.
    TooManyLoads,
    /// **No more sequences than the engine has.**
    TooManyRunning(Digest),
    /// **Parking is bounded**: requests, bytes and times; and the sums are right.
    ParkedTooMuch,
    /// **No more threads than cores.**
    TooManyThreads,
    /// **Work is started**: nobody waits at a ready model with a free sequence.
    IdleSequence(Digest),
    /// **Everything alive is looked after**: whatever is not absent is in the active set.
    Unwatched(Digest),
    /// **No list is out of date**: what is told of many models at once is what is true of each.
    ListsOutOfDate,
}

impl Worker {
    /// Checks every invariant; the first that does not hold.
    pub fn check(&self, now: Instant) -> Result<(), Violation> {
        self.check_requests()?;
        if *self.models.rules() != Rules::new(&self.settings) || !self.models.lists_are_true() {
            return Err(Violation::ListsOutOfDate);
        }
        for (digest, model) in self.models.iter() {
            self.check_model(now, *digest, model)?;
        }
        for pool in self.pools.keys() {
            self.check_budget(pool)?;
        }
        let loads = self.models.values().filter(|model| model.phase.is_loading()).count();
        if loads > self.settings.concurrent_loads_max as usize {
            return Err(Violation::TooManyLoads);
        }
        if !self.parking_is_sound() {
            return Err(Violation::ParkedTooMuch);
        }
        if !self.threads.within_cores() {
            return Err(Violation::TooManyThreads);
        }
        Ok(())
    }

    fn check_requests(&self) -> Result<(), Violation> {
        let mut seen = BTreeSet::new();
        let mut waiting_total = 0;
        for (digest, model) in self.models.iter() {
            waiting_total += model.waiting.len();
            let waiting = model.waiting.iter().map(|waiter| waiter.request);
            for request in waiting.chain(model.running.keys().copied()) {
                if !seen.insert(request) || self.requests.get(&request) != Some(digest) {
                    return Err(Violation::RequestMisplaced(request));
                }
            }
        }
        let lost = self.requests.keys().find(|request| !seen.contains(request));
        match lost {
            Some(request) => Err(Violation::RequestMisplaced(*request)),
            None if waiting_total != self.waiting_total as usize => Err(Violation::RequestMisplaced(RequestId(0))),
            None => Ok(()),
        }
    }

    fn check_model(&self, now: Instant, digest: Digest, model: &Model) -> Result<(), Violation> {
        if model.phase != Phase::Absent && !self.models.is_active(&digest) {
            return Err(Violation::Unwatched(digest));
        }
        if model.phase.life().is_some_and(|life| model.running.len() > life.parallel) {
            return Err(Violation::TooManyRunning(digest));
        }
        if let Phase::Unloading { killed: false, .. } = model.phase
            && !model.running.is_empty()
        {
            return Err(Violation::StoppedInUse(digest));
        }
        if let Phase::Ready(life) = &model.phase
            && !model.waiting.is_empty()
            && model.running.len() < life.parallel
        {
            return Err(Violation::IdleSequence(digest));
        }
        if model.phase == Phase::Absent
            && let Some(waiter) = model.waiting.first()
            && !model.is_due(now)
        {
            return Err(Violation::WaiterWithoutWaker(waiter.request));
        }
        Ok(())
    }

    /// A measured size may exceed what was planned; loads may not: whenever something loads, everything fits, unless
    /// a correction came after the load began, and then nothing further begins.
    fn check_budget(&self, pool: &PoolName) -> Result<(), Violation> {
        let Some(capacity) = self.pools.get(pool).map(|pool| &pool.capacity) else { return Ok(()) };
        let corrected = !self.overflow(pool, None).is_zero();
        if !corrected && !self.held_in_pool(pool).fits_in(capacity) && self.began_load_at(pool) == Some(self.now) {
            return Err(Violation::OverBudget(pool.clone()));
        }
        Ok(())
    }

    fn began_load_at(&self, pool: &PoolName) -> Option<Instant> {
        let verifying = self.models.values().filter_map(|model| match &model.phase {
            Phase::Verifying(life) if life.pool == *pool => Some(life.since),
            _ => None,
        });
        verifying.max()
    }
}
