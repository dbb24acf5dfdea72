//! Memory that models and KV share: the boundary that worth moves, beside fixed ones.
//!
//! Callers ask many models for a word, or a few for long conversations, by phases. [`crate::node`] plays one machine: its
//! `core::Worker` and its `core::kv::Tier`, tied together as they are live.

pub mod demand;
pub mod page;
pub mod plan;
pub mod run;

pub use plan::Plan;
