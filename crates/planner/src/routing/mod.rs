//! Routing over replicas on a virtual clock: the router that serves, and the rules it replaces, in one world.
//!
//! The world is the hard one for prefix caches: many tenants, each with a long system prompt of its own, one of them
//! with a large share of the traffic, and replicas whose memory holds about the prompts that are theirs by fair share.

pub mod plan;
pub mod policy;
pub mod replica;
pub mod run;

#[cfg(test)]
mod tests;

pub use policy::Policy;
pub use run::{Outcome, Scenario, simulate};
