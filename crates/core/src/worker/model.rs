//! One model on this worker: its life cycle, its callers, its memory of failures.

use super::{
    park::{Parking, Parks},
    protocol::{EvictionReason, Generation, ModelSpec, ModelState},
};
use crate::{
    Bytes,
    forecast::{self, Forecast},
    ids::{Digest, PoolName, Priority, RequestId},
    memory::ACCELERATORS_MAX,
    residency::{Backoff, Charge, Demand},
    time::Instant,
};
use alloc::{collections::BTreeMap, vec::Vec};
use serde::{Deserialize, Deserializer, Serialize, de::Error};

/// A request that waits for its model or for a free sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Waiter {
    pub(super) request: RequestId,
    pub(super) class: Priority,
    pub(super) since: Instant,
    /// The model was not ready when it came.
    pub(super) cold: bool,
    /// It ran already, and left so many bytes.
    pub(super) parked: Option<Bytes>,
    pub(super) parks: Parks,
}

/// A request that runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Running {
    /// The engine was told to end it.
    pub(super) aborted: bool,
    pub(super) class: Priority,
    /// Tokens of its prompt, once known.
    pub(super) prompt_tokens: u32,
    pub(super) parking: Parking,
    pub(super) parks: Parks,
}

/// Bytes are kept by a device's place: one place far away would take memory for all before it.
fn accelerators_there_can_be<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    let accelerators = Vec::<usize>::deserialize(deserializer)?;
    match accelerators.iter().find(|place| **place > ACCELERATORS_MAX) {
        Some(place) => Err(D::Error::custom(format_args!("accelerator {place} of {ACCELERATORS_MAX} at most"))),
        None => Ok(accelerators),
    }
}

/// One life of an engine for this model, from the reservation of its memory to the end of its process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Life {
    pub(super) generation: Generation,
    /// The pool that gave it memory.
    pub(super) pool: PoolName,
    /// Accelerators it was given, as device indices.
    #[serde(deserialize_with = "accelerators_there_can_be")]
    pub(super) accelerators: Vec<usize>,
    /// Sequences this engine runs at once; a changed setting holds from the next life on.
    pub(super) parallel: usize,
    /// Bytes it is charged with.
    pub(super) charge: Charge,
    /// Private host bytes when it became ready, the yardstick for a runaway engine.
    pub(super) private_at_ready: u64,
    /// Host bytes that it may use beside that for a while.
    #[serde(default)]
    pub(super) working_bytes: u64,
    /// When its present phase began.
    pub(super) since: Instant,
    /// Not a victim before this.
    pub(super) protected_until: Instant,
    /// Callers that waited when it became ready and have not been started: it stays until they are.
    pub(super) promised: u32,
    /// It was loaded because it is due, and nobody has asked for it since.
    pub(super) ahead: bool,
    /// When it last made a step.
    pub(super) last_progress: Instant,
    /// When it was last measured, or last asked to be.
    pub(super) measured_at: Instant,
}

/// Where a model is in its life cycle.
///
/// ```text
/// Absent -> Verifying -> Loading -> Ready -> Draining -> Unloading -> Absent
///               |           |         |         `-> Ready (the memory is no longer needed)
///               |           |         `-> Unloading (idle victim, keep-alive, runaway, hang)
///               |           `-> Unloading (failed, abandoned, too slow)
///               `-> Absent (failed, abandoned: there is no process yet)
/// any phase with a process -> Absent (the process died)
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Phase {
    Absent,
    Verifying(Life),
    Loading(Life),
    Ready(Life),
    Draining(Life, EvictionReason),
    Unloading { life: Life, reason: EvictionReason, killed: bool },
}

impl Phase {
    pub(super) fn life(&self) -> Option<&Life> {
        match self {
            Self::Absent => None,
            Self::Verifying(life) | Self::Loading(life) | Self::Ready(life) | Self::Draining(life, _) => Some(life),
            Self::Unloading { life, .. } => Some(life),
        }
    }

    pub(super) fn life_mut(&mut self) -> Option<&mut Life> {
        match self {
            Self::Absent => None,
            Self::Verifying(life) | Self::Loading(life) | Self::Ready(life) | Self::Draining(life, _) => Some(life),
            Self::Unloading { life, .. } => Some(life),
        }
    }

    pub(super) fn is_loading(&self) -> bool {
        matches!(self, Self::Verifying(_) | Self::Loading(_))
    }

    /// Whether an engine process may exist.
    pub(super) fn has_process(&self) -> bool {
        !matches!(self, Self::Absent | Self::Verifying(_))
    }

    /// Its bytes are on their way out.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(self, Self::Draining(..) | Self::Unloading { .. })
    }
}

/// Everything the worker knows of one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Model {
    pub(super) spec: ModelSpec,
    pub(super) demand: Demand,
    #[serde(with = "forecast::whole")]
    pub(super) forecast: Forecast,
    /// From when to when it is due, as it stands on the agenda.
    pub(super) window: Option<(Instant, Instant)>,
    /// That window is open.
    pub(super) window_is_open: bool,
    /// It is loaded, or will be when there is room, because it is due.
    pub(super) preload: bool,
    pub(super) phase: Phase,
    /// In the order in which they will be started: by class, then by arrival.
    pub(super) waiting: Vec<Waiter>,
    pub(super) running: BTreeMap<RequestId, Running>,
    pub(super) backoff: Backoff,
    /// It is wanted and cannot be placed as things are, and that was told.
    pub(super) impossible: bool,
    /// It died of this cap while it loaded: it needs more host memory.
    pub(super) outgrown_bytes: Option<Bytes>,
    pub(super) last_used: Option<Instant>,
    pub(super) evicted_at: Option<Instant>,
    /// Somebody asked for it without a request.
    pub(super) wanted: bool,
    /// It was in memory before the worker was started: it comes back if that costs nobody anything.
    pub(super) restore: bool,
    /// The version whose place it takes, and since when, until it is ready: that one stays in memory as long.
    pub(super) predecessor: Option<(Digest, Instant)>,
    /// Somebody asked for it to be out; holds a pin back until it is wanted again.
    pub(super) unwanted: bool,
    /// A caller's deadline passed during the load: the load goes on for the next one.
    pub(super) load_outlives_callers: bool,
    /// The last load was given up; the next one will not be, or a caller with little patience never gets served.
    pub(super) abandoned_last: bool,
    /// Forgotten once it is gone.
    pub(super) forgotten: bool,
    /// What was last told of its state.
    pub(super) told_state: ModelState,
}

impl Model {
    pub(super) fn new(spec: ModelSpec) -> Self {
        Self {
            spec,
            demand: Demand::default(),
            forecast: Forecast::default(),
            window: None,
            window_is_open: false,
            preload: false,
            phase: Phase::Absent,
            waiting: Vec::new(),
            running: BTreeMap::new(),
            backoff: Backoff::default(),
            impossible: false,
            outgrown_bytes: None,
            last_used: None,
            evicted_at: None,
            wanted: false,
            restore: false,
            predecessor: None,
            unwanted: false,
            load_outlives_callers: false,
            abandoned_last: false,
            forgotten: false,
            told_state: ModelState::Absent,
        }
    }

    /// Somebody waits for it, asked for it, or it is pinned.
    pub(super) fn is_asked_for(&self) -> bool {
        let pinned = self.spec.pin && !self.unwanted;
        !self.waiting.is_empty() || self.wanted || pinned
    }

    /// A load is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let asked = self.is_asked_for() || self.restore || self.preload;
        self.phase == Phase::Absent && asked && !self.forgotten && self.backoff.paused(now).is_none()
    }

    /// The class its load competes in: its own or that of its most important caller.
    pub(super) fn class(&self) -> Priority {
        self.waiting
            .iter()
            .map(|waiter| waiter.class)
            .min()
            .map_or(self.spec.priority, |class| class.min(self.spec.priority))
    }

    /// Since when its longest waiting caller waits.
    pub(super) fn waiting_since(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiter| waiter.since).min()
    }

    /// When its load must begin for its longest waiting caller; behind every caller if nobody waits.
    pub(super) fn first_in_line(&self) -> (Instant, RequestId) {
        let slack = self.spec.targets.slack(self.spec.rewarm_seconds);
        let arrivals = self.waiting.iter().map(|waiter| (waiter.since + slack, waiter.request));
        arrivals.min().unwrap_or((Instant(u64::MAX), RequestId(u64::MAX)))
    }

    /// Forgets past failures: something about it has changed.
    pub(super) fn forgive(&mut self) {
        self.backoff = Backoff::default();
        (self.outgrown_bytes, self.impossible) = (None, false);
    }

    pub(super) fn in_flight(&self) -> u32 {
        u32::try_from(self.running.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Joins the queue behind its own class.
    pub(super) fn enqueue(&mut self, waiter: Waiter) {
        let place = self.waiting.partition_point(|other| other.class <= waiter.class);
        self.waiting.insert(place, waiter);
    }

    /// Takes its place in front of its own class: it ran before those that wait there.
    pub(super) fn enqueue_first(&mut self, waiter: Waiter) {
        let place = self.waiting.partition_point(|other| other.class < waiter.class);
        self.waiting.insert(place, waiter);
    }

    /// What is shown of its life cycle.
    pub(super) fn state(&self, now: Instant) -> ModelState {
        match &self.phase {
            Phase::Absent if self.forgotten => ModelState::Absent,
            Phase::Absent if self.impossible => ModelState::Failed,
            Phase::Absent if self.backoff.paused(now).is_some() => ModelState::Failed,
            Phase::Absent if self.is_due(now) => ModelState::Waiting,
            Phase::Absent => ModelState::Absent,
            Phase::Verifying(_) => ModelState::Verifying,
            Phase::Loading(_) => ModelState::Loading,
            Phase::Ready(_) => ModelState::Ready,
            Phase::Draining(..) => ModelState::Draining,
            Phase::Unloading { .. } => ModelState::Unloading,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[derive(Debug, Deserialize)]
    struct Holder(#[serde(deserialize_with = "accelerators_there_can_be")] Vec<usize>);

    #[test]
    fn an_accelerator_that_no_machine_has_is_refused() {
        let read = serde_json::from_str::<Holder>;
        assert_eq!(read("[1, 64]").expect("there can be so many").0, [1, 64]);
        let refused = read("[1, 1099511627776]").expect_err("bytes up to there would be terabytes");
        assert!(refused.to_string().contains("accelerator 1099511627776 of 64"), "{refused}");
    }
}
