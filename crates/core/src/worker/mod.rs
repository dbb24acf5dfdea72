//! The worker machine: budget, load, run, evict, measure.
//!
//! Every event is followed by the same pass over what goes on: expired timers, memory over budget, due loads, waiting
//! requests, threads. Each step of that pass looks at the present state only, so nothing can be forgotten: a victim that
//! is asked for again, a waiter whose model crashed, a reservation whose caller left. Models that are merely catalogued,
//! or in memory and at rest, cost an event nothing (see [`roster`]).

mod events;
mod invariants;
mod model;
mod park;
mod plan;
mod preload;
mod protocol;
mod roster;
mod serve;
mod sharing;
mod takeover;
mod timers;
mod view;

pub use invariants::Violation;
pub use protocol::{
    Action, CancelCause, Event, EvictionReason, Exit, Fact, Generation, LedgerLine, LoadError, LoadTimings, ModelSpec,
    ModelState, ParkingLimits, PreloadOutcome, Recollection, Rejection, Settings, StartKind,
};
pub use view::PoolMemory;

use crate::{
    ids::{Digest, PoolName, RequestId},
    machine::Machine,
    memory::MemoryVector,
    residency::Thrash,
    threads::ThreadLeases,
    time::Instant,
};
use alloc::{collections::BTreeMap, vec::Vec};
use model::Phase;
use roster::{Roster, Rules};
use serde::{Deserialize, Serialize};

/// One node's decisions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Worker {
    settings: Settings,
    pools: BTreeMap<PoolName, Pool>,
    models: Roster,
    requests: BTreeMap<RequestId, Digest>,
    waiting_total: u32,
    last_generation: u64,
    threads: ThreadLeases,
    draining: bool,
    agenda: preload::Agenda,
    parked: park::Parked,
    /// When the last event came.
    now: Instant,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Pool {
    /// Bytes per device, the reserve already taken off.
    capacity: MemoryVector,
    thrash: Thrash,
}

impl Worker {
    /// A worker that holds nothing yet.
    pub fn new(settings: Settings, now: Instant) -> Self {
        let mut rest = settings.capacity.saturating_sub(&settings.reserve);
        let mut pools = BTreeMap::new();
        for (name, capacity) in &settings.pools {
            rest = rest.saturating_sub(capacity);
            pools.insert(name.clone(), Pool { capacity: capacity.clone(), thrash: Thrash::default() });
        }
        pools.insert(PoolName::default_pool(), Pool { capacity: rest, thrash: Thrash::default() });
        let threads = ThreadLeases::new(settings.cores, settings.thread_quantum);
        Self {
            models: Roster::new(Rules::new(&settings)),
            settings,
            pools,
            requests: BTreeMap::new(),
            waiting_total: 0,
            last_generation: 0,
            threads,
            draining: false,
            agenda: preload::Agenda::default(),
            parked: park::Parked::default(),
            now,
        }
    }

    /// A model that names an unknown pool lives in the default one.
    fn pool_of(&self, name: &PoolName) -> PoolName {
        if self.pools.contains_key(name) { name.clone() } else { PoolName::default_pool() }
    }

    fn settle(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        self.serve_ready(now, actions);
        self.unload_leaving(now, actions);
        self.shrink_to_budget(now, actions);
        self.plan_loads(now, actions);
        if self.yield_to_callers(now, actions) {
            self.plan_loads(now, actions);
        }
        self.preload_due(now, actions);
        self.serve_ready(now, actions);
        self.park_for_waiting(now, actions);
        self.tell_states(now, actions);
    }

    fn tell_states(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for digest in self.models.take_changed(now) {
            let Some(model) = self.models.get(&digest).filter(|_| self.models.is_active(&digest)) else { continue };
            let (state, told_state) = (model.state(now), model.told_state);
            let is_gone = state == ModelState::Absent && model.waiting.is_empty();
            let is_forgotten = model.forgotten && model.phase == Phase::Absent;
            if state != told_state {
                actions.push(Action::Tell(Fact::StateChanged { digest, state }));
                if let Some(mut model) = self.models.get_mut(&digest) {
                    model.told_state = state;
                }
            }
            if is_gone && is_forgotten {
                self.models.remove(&digest);
            } else if is_gone {
                self.models.deactivate(&digest);
            }
        }
    }
}

impl Machine for Worker {
    type Event = Event;
    type Action = Action;

    fn handle(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        let now = now.max(self.now);
        self.now = now;
        self.take(now, event, actions);
        self.settle(now, actions);
    }

    fn next_timer(&self) -> Option<Instant> {
        self.earliest_timer()
    }
}
