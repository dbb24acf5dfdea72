//! What others do with the same memory: count slots, evict by recency or by the clock.

use crate::{
    cache::{
        BuildPolicy,
        trace::{Trace, TraceError},
    },
    demand::Demand,
};
use std::{collections::BTreeSet, time::Duration};
use warmset_core::Instant;

/// Another way to decide what stays.
#[derive(Debug, Clone, PartialEq)]
pub enum Peer {
    /// The least recently used model leaves for the next one.
    Lru,
    /// These models never leave; the others share what is left by recency.
    PinnedAndLru(BTreeSet<usize>),
    /// As LRU, and a model leaves when it was not asked for so long.
    KeepAlive(Duration),
}

/// Requests that found their model, and that did not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Starts {
    /// It was loaded.
    pub warm: u64,
    /// It was not, or not completely.
    pub cold: u64,
}

impl Starts {
    /// Share of cold ones.
    pub fn cold_share(&self) -> f64 {
        let all = self.warm + self.cold;
        if all == 0 { 0.0 } else { self.cold as f64 / all as f64 }
    }
}

/// The most often called models, of equals the first.
pub fn most_called(demand: &Demand, count: usize) -> BTreeSet<usize> {
    let mut calls = vec![0_u64; demand.models];
    for arrival in &demand.arrivals {
        if let Some(count) = calls.get_mut(arrival.model) {
            *count += 1;
        }
    }
    let mut order: Vec<usize> = (0..demand.models).collect();
    order.sort_by_key(|model| (std::cmp::Reverse(calls.get(*model).copied()), *model));
    order.into_iter().take(count).collect()
}

/// Replays a demand under a rule for blocks of KV: a model is a block that hangs on nothing, and takes as long to load as
/// said. Everything else is as in [`replay`].
pub fn replay_as_blocks(
    demand: &Demand,
    build: BuildPolicy,
    slots: usize,
    load: Duration,
) -> Result<Starts, TraceError> {
    let trace = Trace::of_models(demand)?;
    let (mut policy, mut ready) = (build(&trace, slots), vec![Instant::ZERO; trace.blocks()]);
    let mut starts = Starts::default();
    for request in trace.lookups() {
        let found = policy.serve(&request) > 0;
        let Some(ready) = request.blocks.first().and_then(|model| ready.get_mut(*model as usize)) else { continue };
        if !found {
            *ready = request.at + load;
        }
        let warm = found && *ready <= request.at;
        starts.warm += u64::from(warm);
        starts.cold += u64::from(!warm);
    }
    Ok(starts)
}

struct Resident {
    model: usize,
    used: Instant,
    ready: Instant,
}

/// Replays a demand with so many slots, each model taking one; pins are there from the beginning. A load takes as long as
/// said, however many there are at once, and whoever is evicted leaves at once even if it is in use: more than a real
/// machine could do.
pub fn replay(demand: &Demand, peer: &Peer, slots: usize, load: Duration) -> Starts {
    let mut starts = Starts::default();
    // Most recently used last.
    let mut residents: Vec<Resident> = Vec::new();
    let none = BTreeSet::new();
    let pinned = if let Peer::PinnedAndLru(pinned) = peer { pinned } else { &none };
    let slots = slots.saturating_sub(pinned.len());
    for arrival in &demand.arrivals {
        if pinned.contains(&arrival.model) {
            starts.warm += 1;
            continue;
        }
        if let Peer::KeepAlive(limit) = peer {
            residents.retain(|resident| arrival.at.since(resident.used) <= *limit);
        }
        let found = residents.iter().position(|resident| resident.model == arrival.model);
        let known = found.map(|place| residents.remove(place));
        let warm = known.as_ref().is_some_and(|resident| resident.ready <= arrival.at);
        starts.warm += u64::from(warm);
        starts.cold += u64::from(!warm);
        if known.is_none() && residents.len() >= slots && !residents.is_empty() {
            residents.remove(0);
        }
        let ready = known.map_or(arrival.at + load, |resident| resident.ready);
        residents.push(Resident { model: arrival.model, used: arrival.at, ready });
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cache::POLICIES, scenario::Scenario};

    #[test]
    fn lru_by_slots_and_by_blocks_is_the_same() {
        let scenario = Scenario::shipped("rare-models").expect("it is shipped");
        let demand = scenario.demand(1, None).expect("synthetic");
        let (_, lru) = POLICIES.into_iter().find(|(name, _)| *name == "lru").expect("it is one of them");
        for slots in [1, 8, 32] {
            let load = Duration::from_secs(5);
            let blocks = replay_as_blocks(&demand, lru, slots, load).expect("there are requests");
            assert_eq!(blocks, replay(&demand, &Peer::Lru, slots, load), "{slots} slots");
        }
    }
}
