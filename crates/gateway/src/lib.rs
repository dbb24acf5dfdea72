//! The front door: HTTP for callers and administrators, and the run loop that owns the gateway machine.
//!
//! It never tokenises, loads or computes: requests become [`link::Assignment`]s for a worker, replies become HTTP.
//! Modules are declared in reading order.
#![forbid(unsafe_code)]

pub mod link;
pub mod directory;
pub mod clock;
pub mod frontend;
mod run_loop;
mod pump;
pub mod recorder;
pub mod metrics;
pub mod admin;
pub mod server;
