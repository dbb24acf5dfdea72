//! The whole gateway over real sockets, in front of a worker that the tests play by hand.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod admin;
mod dialects;
mod edge;
mod openai;
mod proxy;
mod shapes;
mod storm;
mod support;
