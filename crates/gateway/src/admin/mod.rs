//! The admin listener: models, workers, ledger, events, metrics.

mod backend;
mod events;

pub use backend::{AdminBackend, AdminError, AdminFuture};
pub use events::{EVENT_BACKLOG_MAX, EventLog, LoggedEvent, Next, Subscription};
