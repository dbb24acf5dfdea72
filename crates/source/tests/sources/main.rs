//! What the fetcher promises, against servers that lie, stall, break off, redirect and want credentials.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod local;
mod server;
mod transfers;
mod trust;
