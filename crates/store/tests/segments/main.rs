//! The KV tier's blocks on a disk: on the real file system, on one that does wrong what it is told to, on one that is full,
//! and with processes that are killed in the middle of writing. Names with a K are cases of the KV tier.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod crash;
mod disk;
mod faults;
mod privacy;
mod support;
