//! Engine processes from the parent's side: starting, talking, limiting, ending.
//!
//! Reading order: `launcher` starts them, all from one permanent thread; `child` is one of them, `outgoing` what is
//! written to it; `limit` caps its
//! memory; `log` keeps what it writes.

mod child;
mod launcher;
mod limit;
mod log;
mod outgoing;
pub(crate) mod tree;

pub(crate) use child::signal_name;
pub use child::{EngineKiller, EngineProcess, EngineSender};
pub(crate) use launcher::ENGINE_ARGUMENT;
pub use launcher::{Launcher, SpawnError, SpawnOptions};
pub use limit::MemoryLimit;
pub use log::{LOG_BYTES_MAX, log_files};
#[cfg(test)]
pub(crate) use outgoing::send_with_descriptors;
