//! Jobs: requests that were accepted to be answered later. The catalog keeps them, a machine decides which runs when.
//!
//! Accepted means durable. A job that was running when the server died runs again, at most a bounded number of times;
//! its result is stored once. Jobs become ordinary requests of the gateway only as many at a time as leave room for
//! callers who wait.

mod batch;
#[cfg(test)]
mod properties;
mod queue;
mod record;
mod status;

pub use crate::violation::Violation;
pub use batch::{BATCH_TRANSITIONS, BatchCounts, BatchFault, BatchRecord, BatchStatus, BatchStep, FileRecord};
pub use queue::{Action, End, Event, JobQueue, Settings};
pub use record::{Acceptance, JobAnswer, JobLimits, JobRecord, NewJob, Unfinished};
pub use status::{JobStatus, Step, TRANSITIONS};
