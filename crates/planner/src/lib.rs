//! What would happen: the machines that serve, on a virtual clock, with a cost model in place of engines.
//!
//! Nothing here is a second version of a decision. A run feeds the machines of `warmset-core` the events that engines
//! and callers would have caused, and does what they ask. Files are read by the binary; here text becomes demand, and
//! demand a report. Modules are declared in reading order.
#![forbid(unsafe_code)]

pub mod batching;
pub mod boundary;
pub mod cache;
pub mod calculate;
pub mod demand;
pub mod events;
pub mod html;
mod least_squares;
pub mod loader;
pub mod node;
pub mod peers;
pub mod pool;
pub mod recording;
pub mod report;
pub mod routing;
pub mod scenario;
pub mod sharing;
