//! The gateway machine: admit, queue, route, retry, refuse.
//!
//! Tokens never pass through it: it hears of arrivals, starts and ends. Every request gets exactly one last word: a
//! complete answer, a failure of its own, or a refusal; a caller that went away gets none.

mod capacity;
mod invariants;
mod machine;
#[cfg(test)]
mod properties;
mod protocol;
pub(crate) mod queue;
#[cfg(test)]
mod tests;

pub use crate::violation::Violation;
pub use machine::Gateway;
pub use protocol::{Action, ColdPolicy, Event, Refusal, Route, Settings};
