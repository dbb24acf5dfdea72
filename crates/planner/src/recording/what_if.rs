//! A recorded run with other memory or another policy: the same requests and the same engines in the simulated world.

use super::{
    costs::Costs,
    observed::{Figures, Observed, Outside},
};
use crate::{
    node::{Ask, Node, Outcome},
    report::{POLICIES, Policy},
};
use std::time::Duration;
use warmset_core::{
    Bytes, Instant,
    forecast::Parts,
    memory::HOST,
    worker::{Event, ParkingLimits, Settings, Violation},
};

/// Whoever still waits this long after the last request is not waited for.
const LAST_WAIT: Duration = Duration::from_secs(3_600);
/// Engines of this world make no steps that could be missed.
const NEVER: Duration = Duration::from_secs(366 * 86_400);

/// What is to be other than it was.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WhatIf {
    /// Bytes of host memory, the reserve included.
    pub memory_bytes: Option<Bytes>,
    /// Bytes of it that are kept free.
    pub reserve_bytes: Option<Bytes>,
    /// Which parts of the forecast are used.
    pub parts: Option<Parts>,
    /// What engines cost, instead of what they took.
    pub costs: Option<Costs>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum WhatIfError {
    /// The recording has no worker.
    #[error("the recording says nothing of a worker: record a `warmset serve`")]
    NoWorker,
    /// The memory is none.
    #[error(
        "a reserve of {reserve_bytes} bytes leaves nothing of {memory_bytes} bytes of memory: give more, with a unit, such as 8GiB"
    )]
    NoMemory {
        /// All of it.
        memory_bytes: Bytes,
        /// What is kept free.
        reserve_bytes: Bytes,
    },
    /// There is no such policy.
    #[error("there is no policy {name} of Warmset's own machine: there are {known}")]
    Policy {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A decision broke what must always hold.
    #[error("the simulated worker broke the invariant {0:?}: please report it")]
    Violation(Violation),
}

impl WhatIf {
    /// The parts of the forecast that a policy of [`POLICIES`] uses.
    pub fn parts_of(policy: &str) -> Result<Parts, WhatIfError> {
        let own = POLICIES.into_iter().filter_map(|(name, policy)| match policy {
            Policy::Warmset(parts) => Some((name, parts)),
            _ => None,
        });
        let found = own.clone().find(|(name, _)| *name == policy).map(|(_, parts)| parts);
        let known = || own.map(|(name, _)| name).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| WhatIfError::Policy { name: policy.to_owned(), known: known() })
    }

    /// What would have come of it. Requests are not parked, and engines that broke while it was recorded do not break.
    pub fn run(&self, observed: &Observed) -> Result<Figures, WhatIfError> {
        let settings = self.settings(observed.settings.as_ref().ok_or(WhatIfError::NoWorker)?)?;
        let outcome = play(observed, settings, self.costs.as_ref()).map_err(WhatIfError::Violation)?;
        Ok(Figures::of(&outcome, observed.figures().requests))
    }

    fn settings(&self, recorded: &Settings) -> Result<Settings, WhatIfError> {
        let mut settings = recorded.clone();
        for (vector, bytes) in
            [(&mut settings.capacity, self.memory_bytes), (&mut settings.reserve, self.reserve_bytes)]
        {
            if let Some(bytes) = bytes {
                vector.add_at(HOST, 0);
                vector.0[HOST] = bytes;
            }
        }
        let (memory_bytes, reserve_bytes) = (settings.capacity.get(HOST), settings.reserve.get(HOST));
        if reserve_bytes >= memory_bytes {
            return Err(WhatIfError::NoMemory { memory_bytes, reserve_bytes });
        }
        settings.forecast = self.parts.unwrap_or(settings.forecast);
        (settings.parking, settings.hang_deadline) = (ParkingLimits::OFF, NEVER);
        Ok(settings)
    }
}

/// The recorded world around another worker: the one place that knows what simulates it.
fn play(observed: &Observed, settings: Settings, costs: Option<&Costs>) -> Result<Outcome, Violation> {
    let mut node = Node::with_engines(settings, observed.engines(costs));
    node.keep_waits();
    let known = observed.specs.iter().cloned().map(Event::Configure);
    let warm = Event::Remembered { models: observed.recollections.clone() };
    node.warm_up(known.chain([warm]));
    if let Some(costs) = costs {
        node.share(costs.request_slowdown, costs.load_slowdown);
    }
    for (place, (since, outside)) in observed.outside.iter().enumerate() {
        let at = Instant::after(*since);
        match outside {
            Outside::Ask(ask) => {
                let told =
                    costs.zip(observed.tokens_of(place)).map(|(costs, tokens)| costs.run(ask.digest, tokens, place));
                node.ask(at, Ask { run: told.or(ask.run), ..ask.clone() });
            }
            Outside::Event(event) => node.schedule(at, (**event).clone()),
        }
    }
    let end = observed.outside.last().map_or(Duration::ZERO, |(since, _)| *since) + LAST_WAIT;
    node.finish(Instant::after(end))?;
    Ok(node.outcome)
}
