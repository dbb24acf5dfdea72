//! The node agent over real engine processes of the synthetic engine.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faults;
mod kv;
mod park;
mod serving;
mod support;
