//! The worker machine: budget, load, run, evict, measure.

mod protocol;

pub use protocol::{
    Action, CancelCause, Event, EvictionReason, Exit, Fact, Generation, KvSource, LedgerLine, LoadError, LoadTimings,
    ModelSpec, ModelState, Rejection, Settings, StartKind,
};
