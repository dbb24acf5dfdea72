//! Every decision Warmset takes, as pure state machines: no clock, no socket, no file, no thread, no random source.
//!
//! Time arrives as an argument, work leaves as an action, and its result comes back as an event. The same machines
//! run live, in the tests and in the simulator. Modules are declared in reading order.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod forecast;
pub mod gateway;
pub mod ids;
pub mod inference;
pub mod jobs;
pub mod kv;
pub mod machine;
pub mod memory;
pub mod recording;
pub mod residency;
pub mod rollout;
pub mod routing;
pub mod targets;
pub mod threads;
pub mod time;
mod violation;
pub mod worker;

pub use ids::{Digest, JobId, ModelName, PoolName, Priority, RequestId, TenantId, WorkerId};
pub use machine::Machine;
pub use memory::{Bytes, Footprint, MemoryVector};
pub use time::{ClockSpeed, Instant};
