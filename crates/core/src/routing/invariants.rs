//! What is always true of the router, by name. Tests check it after every event.

use super::{protocol::ModelKey, router::Router};
use crate::violation::{Violation, hold};
use alloc::{collections::BTreeMap, format};

impl Router {
    /// Checks every invariant:
    ///
    /// - `in_flight_is_open_tickets`: what a replica has is its open tickets, and their tokens are its pending ones;
    /// - `open_tickets_are_counted`: as many as are open, and never more than there may be;
    /// - `one_trial`: a half-open breaker, of a replica or a model there, has one request on its way at most;
    /// - `pools_are_replicas`: a model's replicas are those that serve it and are there;
    /// - `nothing_of_the_removed`: nothing is remembered of a replica that is gone;
    /// - `mirror_is_whole`: its lists and sums agree, and are within its budget;
    /// - `retries_are_bounded`: the budget is neither negative nor endless.
    pub fn check(&self) -> Result<(), Violation> {
        self.check_tickets()?;
        self.check_pools()?;
        let mut residences = 0;
        for (place, replica) in self.replicas.iter().enumerate() {
            let held = self.mirror.residences_of(place);
            residences += held;
            hold(replica.is_some() || held == 0, "nothing_of_the_removed", || format!("{held} at place {place}"))?;
            let fault = self.mirror.fault(place);
            hold(fault.is_none(), "mirror_is_whole", || format!("place {place}: {fault:?}"))?;
        }
        let counted = self.mirror.residences();
        hold(residences == counted, "mirror_is_whole", || format!("{residences} residences, {counted} counted"))?;
        hold(self.retry_budget.is_sane(), "retries_are_bounded", || format!("{:?}", self.retry_budget))
    }

    fn check_tickets(&self) -> Result<(), Violation> {
        let open = || self.tickets.iter().filter_map(|place| place.open.as_ref());
        let count = open().count();
        let counted = self.totals.open == count && count <= self.settings.tickets_max;
        hold(counted, "open_tickets_are_counted", || format!("{count} open, {} counted", self.totals.open))?;
        let mut sums = BTreeMap::new();
        let mut model_trials = BTreeMap::new();
        for ticket in open() {
            let (requests, tokens, trials) = sums.entry(ticket.replica).or_insert((0_u32, 0_u64, 0_u32));
            *requests += 1;
            *tokens += ticket.pending_tokens;
            *trials += u32::from(ticket.trials.of_replica);
            if ticket.trials.of_model {
                *model_trials.entry((ticket.replica, ticket.model)).or_insert(0_u32) += 1;
            }
        }
        for replica in self.replicas.iter().flatten() {
            let (requests, tokens, trials) = sums.get(&replica.id).copied().unwrap_or_default();
            let same = (requests, tokens) == (replica.in_flight, replica.pending_tokens);
            hold(same, "in_flight_is_open_tickets", || format!("{:?}: {requests} open", replica.id))?;
            let trial = trials == u32::from(replica.breaker.trial);
            hold(trial, "one_trial", || format!("{:?}: {trials} on their way", replica.id))?;
            let of = |model| ((replica.id, model), 1);
            let (all, none) = ((replica.id, ModelKey(0)), (replica.id, ModelKey(u64::MAX)));
            let on_their_way = model_trials.range(all..=none).map(|(key, count)| (*key, *count));
            hold(on_their_way.eq(replica.trials().map(of)), "one_trial", || {
                format!("{:?}: of its models", replica.id)
            })?;
        }
        Ok(())
    }

    fn check_pools(&self) -> Result<(), Violation> {
        for (model, pool) in &self.pools {
            let serving = |place: &usize| {
                let replica = self.replicas.get(*place).and_then(Option::as_ref);
                replica.is_some_and(|replica| replica.settings.models.contains(model))
            };
            let members = pool.members.len() == pool.identities.len() && pool.members.iter().all(serving);
            hold(members, "pools_are_replicas", || format!("{model:?} has others"))?;
        }
        let known = self.by_id.len() == self.replicas.iter().flatten().count();
        hold(known, "pools_are_replicas", || format!("{} have a number", self.by_id.len()))
    }
}
