//! KV that outlives the request it was computed for: what a block is, where it lies, what is kept, and when bringing
//! it back is worth more than computing it again.
//!
//! [`Tier`] decides for one machine. It knows blocks by key only: engines put them out and take them in, a shell moves
//! the bytes. A block is in host memory, on disk, in both, or in neither. What is in an engine's own sequences the engine
//! knows.

mod asks;
mod disk;
pub mod header;
mod host;
mod index;
pub mod key;
mod leaving;
mod protocol;
mod regret;
mod saves;
mod speed;
mod tier;
mod view;
mod worth;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use header::{BlockHeader, HEADER_BYTES, InvalidHeader};
pub use index::INDEX_BYTES_PER_BLOCK;
pub use key::{BLOCK_TOKENS, BlockKey, KvIdentity, TrustDomain, chain};
pub use protocol::{
    Action, BlockKeyShort, BlockNumber, DISK_QUEUE_SHARE, DiskPlace, EARLY_SAVE_TOKENS, Event, FoundBlock, PAGE_BYTES,
    ReadFailure, SaveId, TierSettings, slot_bytes,
};
pub use tier::Tier;
pub use view::{HitTokens, ModelView, Rejected, TierView, Traffic, Verdict};
pub use worth::{HALF_LIFE, PAUSE, PAUSE_FIRST};
