//! Policies side by side on the same demand and the same memory.

use crate::{
    cache::{self, BuildPolicy, trace::TraceError},
    demand::Demand,
    node::{Cost, Node, Outcome, settings},
    peers::{Peer, Starts, most_called, replay, replay_as_blocks},
    scenario::Scenario,
};
use serde::Serialize;
use std::time::Duration;
use warmset_core::{forecast::Parts, worker::Violation};

/// Every model has the same size; what counts is how many fit.
const MODEL_BYTES: u64 = 1 << 30;
/// What the peer with pins pins: the most often asked for, which it knows beforehand.
const PINS: usize = 5;
/// The fixed keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(600);

/// A way to decide what stays and what is loaded when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Warmset's machine with these parts of the forecast.
    Warmset(Parts),
    /// The least recently used leaves.
    Lru,
    /// The most often asked for are pinned, the rest is LRU.
    PinnedLru,
    /// LRU, and what was not asked for ten minutes leaves.
    KeepAlive,
    /// A rule for blocks of KV by its name.
    AsBlocks(&'static str),
}

/// Why a run has no result.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// A decision broke what must always hold.
    #[error("{policy} broke the invariant {violation:?}: please report it")]
    Violation {
        /// Which policy did.
        policy: &'static str,
        /// What it broke.
        violation: Violation,
    },
    /// There are no requests.
    #[error(transparent)]
    Demand(#[from] TraceError),
}

/// Every policy by its name, Warmset whole and with each part switched off first.
pub const POLICIES: [(&str, Policy); 13] = [
    ("warmset", Policy::Warmset(Parts::ALL)),
    ("no-preload", Policy::Warmset(Parts { preload: false, ..Parts::ALL })),
    ("no-intervals", Policy::Warmset(Parts { intervals: false, ..Parts::ALL })),
    ("no-time-of-day", Policy::Warmset(Parts { time_of_day: false, ..Parts::ALL })),
    ("no-forecast", Policy::Warmset(Parts::NONE)),
    ("lru", Policy::Lru),
    ("pinned-lru", Policy::PinnedLru),
    ("keep-alive", Policy::KeepAlive),
    ("lfu", Policy::AsBlocks("lfu")),
    ("s3-fifo", Policy::AsBlocks("s3-fifo")),
    ("gdsf", Policy::AsBlocks("gdsf")),
    ("hybrid-histogram", Policy::AsBlocks("hybrid-histogram")),
    (cache::OPTIMUM, Policy::AsBlocks(cache::OPTIMUM)),
];

fn block_policy(name: &str) -> Option<BuildPolicy> {
    cache::POLICIES.into_iter().find(|(known, _)| *known == name).map(|(_, build)| build)
}

/// One policy at one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Models that fit.
    pub slots: usize,
    /// The policy's name.
    pub policy: &'static str,
    /// Requests that found their model ready.
    pub warm: u64,
    /// Requests that did not.
    pub cold: u64,
    /// Their share.
    pub cold_share: f64,
    /// What only Warmset's machine tells.
    #[serde(flatten)]
    pub machine: Option<MachineFigures>,
}

/// What happened besides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MachineFigures {
    /// Loads begun.
    pub loads: u64,
    /// Loads ahead of requests that saved a cold start.
    pub preloads_used: u64,
    /// Loads ahead of requests that nobody used.
    pub preloads_wasted: u64,
    /// How long a cold request waited for its start on average.
    pub cold_wait_mean_seconds: f64,
    /// The longest.
    pub cold_wait_max_seconds: f64,
    /// Requests that were refused.
    pub rejected: u64,
}

/// One policy on one demand with so many slots.
pub fn compare(scenario: &Scenario, demand: &Demand, slots: usize, name: &'static str) -> Result<Row, CompareError> {
    let policy = POLICIES.iter().find(|(known, _)| *known == name).map_or(Policy::Lru, |(_, policy)| *policy);
    let load = scenario.load();
    let peer = match policy {
        Policy::Warmset(parts) => {
            let cost = Cost { bytes: MODEL_BYTES, load, run: scenario.run() };
            let capacity = MODEL_BYTES.saturating_mul(slots as u64);
            let mut node = Node::new(settings(capacity, parts), vec![cost; demand.models]);
            node.run(demand).map_err(|violation| CompareError::Violation { policy: name, violation })?;
            return Ok(row(slots, name, node.outcome.starts, Some(figures(&node.outcome))));
        }
        Policy::Lru => Peer::Lru,
        Policy::PinnedLru => Peer::PinnedAndLru(most_called(demand, PINS)),
        Policy::KeepAlive => Peer::KeepAlive(KEEP_ALIVE),
        Policy::AsBlocks(rule) => match block_policy(rule) {
            Some(build) => return Ok(row(slots, name, replay_as_blocks(demand, build, slots, load)?, None)),
            None => Peer::Lru,
        },
    };
    Ok(row(slots, name, replay(demand, &peer, slots, load), None))
}

fn row(slots: usize, policy: &'static str, starts: Starts, machine: Option<MachineFigures>) -> Row {
    Row { slots, policy, warm: starts.warm, cold: starts.cold, cold_share: starts.cold_share(), machine }
}

fn figures(outcome: &Outcome) -> MachineFigures {
    let cold = outcome.starts.cold.max(1) as f64;
    MachineFigures {
        loads: outcome.loads,
        preloads_used: outcome.preloads_used,
        preloads_wasted: outcome.preloads_wasted,
        cold_wait_mean_seconds: outcome.cold_wait.as_secs_f64() / cold,
        cold_wait_max_seconds: outcome.cold_wait_max.as_secs_f64(),
        rejected: outcome.rejected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn shares(scenario: &str, slots: usize) -> BTreeMap<&'static str, f64> {
        let scenario = Scenario::shipped(scenario).expect("it is shipped");
        let demand = scenario.demand(1, None).expect("synthetic");
        let rows = POLICIES.map(|(name, _)| compare(&scenario, &demand, slots, name).expect("every invariant holds"));
        rows.into_iter().map(|row| (row.policy, row.cold_share)).collect()
    }

    #[test]
    fn rare_models_start_cold_less_often_than_with_any_peer() {
        let share = shares("rare-models", 16);
        for peer in ["lru", "pinned-lru", "keep-alive", "no-forecast", "no-preload"] {
            assert!(share["warmset"] < share[peer], "{share:?}");
        }
    }

    #[test]
    fn habits_of_the_day_are_learned_by_the_time_of_day() {
        let share = shares("office-hours", 8);
        assert!(share["warmset"] < share["no-time-of-day"], "{share:?}");
        assert!(share["warmset"] < share["lru"].min(share["keep-alive"]), "{share:?}");
    }
}
