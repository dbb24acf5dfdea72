//! The gateway machine: admit, queue, route, retry, refuse.

mod protocol;

pub use protocol::{Action, ColdPolicy, Event, Refusal, Route, Settings};
