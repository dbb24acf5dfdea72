//! KV that outlives the request it was computed for.

pub mod header;
pub mod key;

pub use header::{BlockHeader, HEADER_BYTES, InvalidHeader};
pub use key::{BLOCK_TOKENS, BlockKey, KvIdentity, TrustDomain, chain};
