//! KV that outlives the request it was computed for: how a sequence's state is cut into blocks and put together again,
//! and the memory through which worker and engine process hand blocks to each other.
//!
//! `state` reads a state and finds blocks in it; `compose` makes a state of blocks; `memory` is the arena and the
//! staging area; `parked` is what a request leaves behind that goes on elsewhere; `reuse` says which sequence a prompt goes
//! on from; `tier` and `saves` are an engine's part of what worker and engine say to each other; `verify` compares what
//! was restored with what was saved. Nothing here knows llama.cpp: only the form of its states, which the synthetic
//! engine writes too.

mod compose;
mod memory;
mod parked;
pub(crate) mod reuse;
mod saves;
mod state;
pub(crate) mod tier;
pub(crate) mod verify;

pub use compose::{Piece, Template};
pub use memory::{KvMemory, Scratch};
pub use parked::ParkedMemory;
pub(crate) use parked::{Ages, Parts, not_resumed};
pub(crate) use saves::Write;
pub(crate) use state::truncate;
pub use state::{InvalidState, State, check_layout};
