//! Which replica a request goes to: prefix affinity with bounded load, over any number of replicas of each model.
//!
//! The seam, complete:
//!
//! 1. A prompt becomes a [`PrefixChain`]: `PrefixBuilder::new(salt)`, then `push` for text and `boundary` at the end
//!    of each message, then `finish`. This can be done on any thread.
//! 2. [`Router::add`], [`Router::remove`] and [`Router::reported`] tell which replicas there are and what is heard of them.
//! 3. [`Router::decide`] chooses a replica for a request, reserves it there, and gives a [`Ticket`]; then
//!    [`Router::first_token`] once, if it streams, and [`Router::ended`] exactly once, whatever happened. `ended`
//!    says whether to decide a second time, with the replica excluded.
//! 4. [`Router::tick`] every second or so; [`Router::view`] and [`Router::totals`] for metrics.
//! 5. [`Router::check`] holds after every call.
//!
//! A machine without clock, network or random source, like the others; it is asked and answers at once, so it has
//! calls where they have events.

mod breaker;
mod chain;
mod decide;
mod groups;
mod index;
mod invariants;
mod mirror;
mod plan;
mod protocol;
mod replica;
mod router;
mod standing;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use crate::violation::Violation;
pub use breaker::{BreakerState, CONSECUTIVE_FAILURES_MAX};
pub use chain::{BOUNDARIES_MAX, Boundary, PrefixBuilder, PrefixChain, Salt};
pub use protocol::{
    Ask, CANDIDATES_SHOWN, Candidate, Decision, Ended, ModelKey, Outcome, Pause, Refusal, ReplicaId, ReplicaSettings,
    Report, Settings, Ticket, Usage, Verdict, Weights, Why,
};
pub use router::{REPLICAS_MAX, ReplicaView, Router, Totals};
pub use standing::RETRY_AFTER_MAX;
