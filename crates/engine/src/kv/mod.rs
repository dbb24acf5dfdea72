//! KV that outlives the request it was computed for: how a sequence's state is cut into blocks and put together again,
//! and the memory through which worker and engine process hand blocks to each other.
//!
//! `state` reads a state and finds blocks in it; `compose` makes a state of blocks; `memory` is the arena and the
//! staging area. Nothing here knows llama.cpp: only the form of its states, which the synthetic engine writes too.

mod compose;
mod memory;
mod state;

pub use compose::{Piece, Template};
pub use memory::{KvMemory, Scratch};
pub use state::{InvalidState, State, check_layout};
