//! The front door: HTTP for callers and administrators, and the run loop that owns the gateway machine.
//!
//! It never tokenises, loads or computes: requests become [`link::Assignment`]s for a worker, replies become HTTP.
//! Modules are declared in reading order.
#![forbid(unsafe_code)]

pub mod admin;
mod attainment;
pub mod batches;
pub mod clock;
pub mod directory;
mod errors;
mod fallback;
pub mod frontend;
pub mod jobs;
mod kv_metrics;
pub mod lanes;
pub mod latency;
pub mod link;
pub mod metrics;
pub mod openai;
pub mod openapi;
pub mod proxy;
mod pump;
pub mod router;
mod run_loop;
pub mod server;
