//! What engines do with requests, step by step: continuous batching, chunked prefill, paged KV and its prefixes.
//!
//! Two levels behind one workload. **Step**: every iteration of every engine, as vLLM's scheduler goes about it
//! ([`engine`]); iterations that decide nothing are taken together, which changes no result. **Request**: no
//! iterations; a request is served by one of a number of servers, or shares its replica's time with the others
//! ([`service`]). Time is counted in whole picoseconds, so that a sum over iterations is the same in whatever order it
//! is made. Modules are declared in reading order.

pub mod cost;
pub mod fit;

pub mod trace;
pub mod workload;

pub mod blocks;
pub mod engine;
pub mod outcome;
pub mod soonest;

pub mod service;
pub mod simulate;

pub mod plan;
pub mod report;

pub use cost::{Picoseconds, StepCost};
pub use simulate::{Fleet, Level, Routing, simulate};
pub use workload::Workload;
