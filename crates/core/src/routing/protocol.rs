//! What the router is told and what it answers.

use super::chain::PrefixChain;
use crate::time::Instant;
use alloc::vec::Vec;
use core::{fmt, time::Duration};

/// One replica, by a number that its gateway gives it and does not give again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u32);

/// What a replica serves: a hash of the model's digest, or of its identifier at a plain replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelKey(pub u64);

/// One request between its decision and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket {
    pub(super) place: u32,
    pub(super) generation: u32,
}

/// How requests are routed.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The most bytes that what replicas hold is remembered in.
    pub mirror_bytes: usize,
    /// The most tenants and conversations whose share of the traffic is measured.
    pub groups_max: usize,
    /// The most requests on their way at once.
    pub tickets_max: usize,
    /// The most requests at a replica, as a multiple of what all have on average.
    pub load_bound: f64,
    /// A replica may always have so many.
    pub load_floor: u32,
    /// The share of a model's replicas that one tenant may use. At 1 there is no cap.
    pub tenant_spread: f64,
    /// What was learnt of prompts is given back when nobody asked anything for this long.
    pub idle_after: Duration,
    /// The prices; see [`Weights`].
    pub weights: Weights,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mirror_bytes: 64 << 20,
            groups_max: 16_384,
            tickets_max: 65_536,
            load_bound: 2.0,
            load_floor: 8,
            tenant_spread: 1.0,
            idle_after: Duration::from_secs(600),
            weights: Weights::default(),
        }
    }
}

/// What is charged for what, in tokens of prefill. Found by simulation; docs/adr/0010 has the figures.
#[derive(Debug, Clone, Copy)]
pub struct Weights {
    /// Each token that another replica holds, or that a group shares, and this one must compute: more than itself,
    /// for it delays others and pushes out what they need.
    pub miss: f64,
    /// Each such token more where the memory of the replica is full.
    pub eviction: f64,
    /// What a group's owners are let off of these, and what a replica that is no owner is charged more.
    pub owner: f64,
    /// Each request on its way, at a replica with [`Weights::SLOTS`].
    pub in_flight: f64,
    /// Each request beyond the replica's slots.
    pub over_slots: f64,
    /// Owners per group: this times the replicas that its share of the traffic fills.
    pub owners_per_share: f64,
}

impl Weights {
    /// The slots for which [`Weights::in_flight`] is meant; fewer slots make each request weigh more.
    pub const SLOTS: f64 = 64.0;
}

impl Default for Weights {
    fn default() -> Self {
        Self { miss: 4.0, eviction: 4.0, owner: 0.9, in_flight: 600.0, over_slots: 1000.0, owners_per_share: 2.5 }
    }
}

/// A replica as it is configured.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaSettings {
    /// A hash of its stable name, the same at every gateway: its URL.
    pub identity: u64,
    /// The models it serves.
    pub models: Vec<ModelKey>,
    /// How many requests it computes at a time.
    pub slots: u32,
    /// How much of the traffic it should get, compared with others: from a hundredth to a hundred.
    pub weight: f64,
    /// How many tokens of prompts it keeps, if that is known.
    pub capacity_tokens: Option<u64>,
    /// How many tokens of prompts it reads in a second, if that is known.
    pub prefill_tokens_per_second: Option<f64>,
}

/// A request that wants a replica.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The model.
    pub model: ModelKey,
    /// Its prompt.
    pub prefix: &'a PrefixChain,
    /// A hash of the tenant's name: which replicas it may use where its spread is capped.
    pub tenant: u64,
    /// Whether [`super::Router::first_token`] will be called for it. If not, its prefill is taken to end by itself.
    pub streamed: bool,
    /// A replica that it has been tried at.
    pub excluded: Option<ReplicaId>,
}

/// Why a request goes where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// The replica holds as much of the prompt as any.
    Affinity,
    /// Another one holds more and has too much to do.
    Spill,
    /// Nobody holds any of it.
    LeastCost,
    /// There was only one to choose.
    Only,
}

impl Why {
    /// The name in metrics and in the decision log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Affinity => "affinity",
            Self::Spill => "spill",
            Self::LeastCost => "least_cost",
            Self::Only => "only",
        }
    }
}

/// How many candidates a decision shows.
pub const CANDIDATES_SHOWN: usize = 4;

/// One replica that was considered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Which.
    pub replica: ReplicaId,
    /// What it was expected to cost, all charges included.
    pub cost_seconds: f64,
    /// Prompt tokens that it holds.
    pub cached_tokens: u64,
    /// Requests it had.
    pub in_flight: u32,
    /// Whether it owns the prompt's group.
    pub owner: bool,
}

/// Where a request goes.
#[derive(Debug, Clone, Copy)]
pub struct Decision {
    /// What to call this request from now on.
    pub ticket: Ticket,
    /// Where to.
    pub replica: ReplicaId,
    /// Why.
    pub why: Why,
    /// Tokens of the prompt, estimated.
    pub prompt_tokens: u64,
    /// How many of these the replica is expected to have.
    pub expected_cached_tokens: u64,
    /// Time to the first token that is expected, without any charges.
    pub expected_seconds: f64,
    /// The best candidates, best first; the first one was chosen.
    pub candidates: [Option<Candidate>; CANDIDATES_SHOWN],
}

/// Why a request goes nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No replica serves this model.
    UnknownModel,
    /// All replicas of the model are broken, drained, or have been tried.
    Unavailable {
        /// When one of them may be asked again, if that is known.
        retry_at: Option<Instant>,
    },
    /// [`Settings::tickets_max`] are on their way.
    TooMany,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnknownModel => "no replica serves this model",
            Self::Unavailable { .. } => "no replica of this model can be asked at the moment",
            Self::TooMany => "too many requests are on their way",
        })
    }
}

impl core::error::Error for Refusal {}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Answered, also with an error that is the caller's.
    Finished,
    /// The caller left.
    Cancelled,
    /// The replica was too busy or not ready (429, 503).
    Busy {
        /// Its `retry-after`.
        retry_after: Option<Duration>,
    },
    /// It answered that it failed (500, 502, 504): that says something of this model there, and nothing of its others.
    Failed,
    /// It did not answer, or broke off: no connection, no answer in time, a broken stream.
    Lost,
}

/// What a replica counted for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How many of them it had, if it says so.
    pub cached_tokens: Option<u64>,
}

/// The end of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// How.
    pub outcome: Outcome,
    /// Whether the caller has got any of the answer.
    pub output_started: bool,
    /// Whether it was the second try.
    pub retried: bool,
    /// What was counted.
    pub usage: Option<Usage>,
}

/// What becomes of a request that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is over.
    Over,
    /// It may be tried once more at another replica: decide again, with this one excluded.
    RetryElsewhere,
}

/// A model that a replica is not asked for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause {
    /// The model.
    pub model: ModelKey,
    /// Until when.
    pub until: Instant,
    /// It asked for that itself; if not, it failed too often.
    pub asked: bool,
}

/// What is heard of a replica besides its answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Report {
    /// Requests it says it has, running and waiting: what other gateways sent is among them.
    Load {
        /// How many.
        requests: u32,
    },
    /// Tokens of prompts that it can keep.
    Capacity {
        /// How many.
        tokens: u64,
    },
    /// Which life of the replica this is: another one has nothing of what the one before held.
    Instance(u64),
    /// It is another life, which has nothing of what the one before held and may do well what that one failed at.
    Restarted,
    /// It may be another life: what it counts for the next prompt that it should hold decides.
    MayHaveRestarted,
    /// It holds nothing any more.
    CacheCleared,
    /// Whether it holds the text up to a boundary.
    Holds {
        /// The place.
        boundary: super::chain::Boundary,
        /// Whether it does.
        held: bool,
    },
    /// A look at its health.
    Probe {
        /// How it went.
        healthy: bool,
    },
    /// Whether it is to get nothing new.
    Draining(bool),
}
