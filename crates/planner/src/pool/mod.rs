//! A pool of machines on a virtual clock: `core::Gateway` in front of `core::Worker` on each, `core::Router` in front of all.
//!
//! Teams ask their models, machines are lost and come back, disks become slow, loads fail, one team asks ten times as often.
//! What is decided is decided by the machines that serve; here is only what the world around them does, what it costs, and
//! what callers see of it: shared by all teams, or with machines of each team's own.

pub mod scenario;

pub mod course;
pub mod regions;

pub mod demand;
mod faults;

mod engine;
mod links;
mod machine;
mod placement;
mod prompts;
mod turns;

pub mod record;
pub mod world;

pub mod changes;
pub mod changes_page;
pub mod compared;
pub mod export;
pub mod figures;
pub mod live;
pub mod page;
pub mod report;

pub use machine::{Counts, Promoted, Strategy};
