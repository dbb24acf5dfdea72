//! What is always true of the gateway machine, by name. Tests check it after every event, replays now and then.

use super::machine::{Gateway, Phase};
use crate::{
    ids::{Priority, RequestId},
    violation::{Violation, hold},
};
use alloc::{format, vec::Vec};

impl Gateway {
    /// Checks every invariant:
    ///
    /// - `one_place`: a request is in its model's queue exactly while it waits, and nowhere else;
    /// - `permits_match_requests`: permits and worker counts are the requests at workers, no more and no less;
    /// - `queue_counts`: the depth per class is what waits;
    /// - `deadlines_match_patience`: exactly the requests that may still run out of time have a deadline;
    /// - `nothing_waits_for_a_free_permit`: with a usable worker, a free permit has no taker;
    /// - `forgotten_models_end`: a forgotten model has no queue and is kept only for requests at workers.
    pub fn check(&self) -> Result<(), Violation> {
        self.check_requests()?;
        self.check_counts()?;
        self.check_models()
    }

    fn check_requests(&self) -> Result<(), Violation> {
        for (id, request) in &self.requests {
            let model = self.models.get(&request.digest);
            let queued = model.is_some_and(|model| model.queue.contains(request.class, request.sequence, *id));
            let waits = request.phase == Phase::Queued;
            hold(model.is_some() && queued == waits, "one_place", || format!("{id:?} is {:?}", request.phase))?;
            let worker_known = request.phase.worker().is_none_or(|worker| self.workers.contains_key(&worker));
            hold(worker_known, "one_place", || format!("{id:?} is at a worker that is gone"))?;
            let timed = self.deadlines.contains(&(request.deadline, *id));
            let impatient = request.phase.is_impatient();
            hold(timed == impatient, "deadlines_match_patience", || format!("{id:?} is {:?}", request.phase))?;
        }
        let impatient = self.requests.values().filter(|request| request.phase.is_impatient()).count();
        let deadlines = self.deadlines.len();
        hold(deadlines == impatient, "deadlines_match_patience", || format!("{deadlines} for {impatient} requests"))
    }

    fn check_counts(&self) -> Result<(), Violation> {
        for (index, class) in Priority::ALL.into_iter().enumerate() {
            let queued: usize = self.models.values().map(|model| model.queue.len_of(class)).sum();
            let waiting = self.count(|request| request.class == class && request.phase == Phase::Queued);
            let counted = self.waiting[index] as usize;
            let detail = || format!("{} queued, {waiting} wait, {counted} counted for {}", queued, class.as_str());
            hold(queued == waiting && counted == waiting, "queue_counts", detail)?;
        }
        for (id, worker) in &self.workers {
            let held = self.count(|request| request.phase.worker() == Some(*id));
            let detail = || format!("{id:?} counts {} and holds {held}", worker.in_flight);
            hold(worker.in_flight as usize == held, "permits_match_requests", detail)?;
        }
        Ok(())
    }

    fn check_models(&self) -> Result<(), Violation> {
        for (digest, model) in &self.models {
            let at_workers: Vec<Priority> = self
                .requests
                .values()
                .filter(|request| request.digest == *digest && request.phase != Phase::Queued)
                .map(|request| request.class)
                .collect();
            let count = |class: Priority| at_workers.iter().filter(|other| **other == class).count();
            let by_class = Priority::ALL.map(count);
            let same = model.in_flight as usize == at_workers.len()
                && model.in_flight_of.map(|counted| counted as usize) == by_class;
            hold(same, "permits_match_requests", || {
                format!("{digest:?} counts {} and holds {}", model.in_flight, at_workers.len())
            })?;
            let ended = !model.forgotten || (model.queue.len() == 0 && model.in_flight > 0);
            hold(ended, "forgotten_models_end", || format!("{digest:?} is kept"))?;
            let may = Priority::ALL.into_iter().filter(|class| model.has_permit_for(*class));
            let takers: usize = may.map(|class| model.queue.len_of(class)).sum();
            let idle_permit = takers > 0 && !self.workers.is_empty();
            hold(!idle_permit, "nothing_waits_for_a_free_permit", || format!("{takers} wait for {digest:?}"))?;
        }
        Ok(())
    }

    fn count(&self, matches: impl Fn(&super::machine::Request) -> bool) -> usize {
        self.requests.values().filter(|request| matches(request)).count()
    }

    /// The requests it still keeps, in order.
    pub fn request_ids(&self) -> impl Iterator<Item = RequestId> {
        self.requests.keys().copied()
    }
}
