//! What can happen to the KV tier and what it wants done.
#![expect(missing_docs, reason = "the fields of events, actions and figures say by name what they are")]

use super::{
    header::HEADER_BYTES,
    key::{BlockKey, KvIdentity, TrustDomain},
};
use crate::{
    ids::{Digest, RequestId},
    memory::Bytes,
};
use alloc::{string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// Limits and first guesses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TierSettings {
    /// The most bytes of host memory for blocks.
    pub host_bytes_max: Bytes,
    /// The most bytes on disk; 0 without a disk.
    pub disk_bytes_max: Bytes,
    /// Room that the disk needs beside what is kept: for what is given up and not gone yet.
    pub disk_slack_bytes: Bytes,
    /// Bytes that may be written to disk per day before only what was asked for twice is written.
    pub disk_write_bytes_per_day: Bytes,
    /// Bytes on their way to disk at once; more are not written, and counted.
    pub disk_queue_bytes_max: Bytes,
    /// States on their way out of engines at once.
    pub saves_max: u32,
    /// States waiting to be saved; more are skipped, and counted.
    pub saves_waiting_max: u32,
}

/// States on their way out of engines at once: each takes the memory of a whole sequence meanwhile.
const SAVES_MAX: u32 = 1;
const SAVES_WAITING_MAX: u32 = 256;
/// The share of the host's KV that may be on its way to disk.
pub const DISK_QUEUE_SHARE: u64 = 4;
/// The share of the disk's KV that is kept free for what is given up and not gone yet.
const DISK_SLACK_SHARE: u64 = 16;

impl TierSettings {
    /// What follows from the three that an operator sets.
    pub fn new(host_bytes_max: Bytes, disk_bytes_max: Bytes, disk_write_bytes_per_day: Bytes) -> Self {
        Self {
            host_bytes_max,
            disk_bytes_max,
            disk_slack_bytes: disk_bytes_max / DISK_SLACK_SHARE,
            disk_write_bytes_per_day,
            disk_queue_bytes_max: host_bytes_max / DISK_QUEUE_SHARE,
            saves_max: SAVES_MAX,
            saves_waiting_max: SAVES_WAITING_MAX,
        }
    }
}

/// Tokens of a prompt that must have been computed for its blocks to be saved before its answer is complete.
pub const EARLY_SAVE_TOKENS: u32 = 512;
/// Unit of slots in host memory, and of places on disk.
pub const PAGE_BYTES: Bytes = 4096;

/// What a block takes, in host memory as on disk: a header, and whole pages.
pub fn slot_bytes(payload_bytes: Bytes) -> Bytes {
    HEADER_BYTES as u64 + payload_bytes.next_multiple_of(PAGE_BYTES)
}

/// Where a block lies on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DiskPlace {
    pub segment: u32,
    /// In pages of 4,096 bytes from the segment's beginning.
    pub page: u32,
    /// Pages that it takes, its header included.
    pub pages: u32,
}

/// A block's number within one tier.
pub type BlockNumber = u32;

/// The engine's number of a save, made unique by the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SaveId(pub u64);

/// Why a block was not read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFailure {
    pub reason: String,
    /// The disk has not answered and may still write into the slot.
    pub slot_is_held: bool,
    /// What lies there is not the block: else it may be read another time.
    pub is_lost: bool,
}

/// A block found on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundBlock {
    pub identity: KvIdentity,
    pub domain: TrustDomain,
    pub key: BlockKey,
    pub parent: BlockKey,
    /// Its place in the prompt, in blocks.
    pub depth: u32,
    pub payload_bytes: Bytes,
    pub place: DiskPlace,
}

/// What can happen to the tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A model whose KV can be cut into blocks is in memory.
    Opened { model: Digest, identity: KvIdentity, payload_bytes: Bytes, slot_bytes: Bytes },
    /// A request is tokenised and may begin. `device_tokens` of it its engine holds.
    Asked { request: RequestId, identity: KvIdentity, keys: Vec<BlockKey>, prompt_tokens: u32, device_tokens: u32 },
    /// A request has ended, was cancelled, or its engine is gone: nothing of it is in use any more.
    Ended { request: RequestId },
    /// A read from disk into a slot is over. Failed ones say why, and whether the disk may still write into the slot.
    ReadDone { block: BlockNumber, seconds: f64, failure: Option<ReadFailure> },
    /// Nobody writes into a slot any more of which a failed read said that.
    SlotReleased { identity: KvIdentity, slot: u32 },
    /// The engine has done with granted blocks: it took so many of them in, from one of its prompt's on.
    Restored { request: RequestId, first_block: u32, blocks: u32, seconds: f64 },
    /// The engine has written so many restored blocks out again and found the bytes that were saved.
    Verified { request: RequestId, blocks: u32 },
    /// The engine found that a granted block, told by its place in the prompt, is not what it must be.
    Rejected { request: RequestId, block: u32, reason: String },
    /// An engine offers blocks: those of `keys`, the first of them `first_block` blocks from the beginning. They come out
    /// with the whole state of their sequence, which takes so many bytes of host memory until it is looked at.
    SaveOffered {
        save: SaveId,
        identity: KvIdentity,
        domain: TrustDomain,
        parent: BlockKey,
        first_block: u32,
        keys: Vec<BlockKey>,
        state_bytes: Bytes,
    },
    /// The engine has put the state out; none if it could not.
    Staged { save: SaveId, ok: bool },
    /// The blocks of a save are in their slots, checked; or not.
    Gathered { save: SaveId, ok: bool },
    /// An engine is gone: its saves are void.
    SavesLost { saves: Vec<SaveId> },
    /// A block is durable on disk; or why not. `others_bytes` of the disk's bound are not to be had: others' files lie
    /// there, or its file system has less left.
    Written { block: BlockNumber, outcome: Result<DiskPlace, String>, seconds: f64, others_bytes: Bytes },
    /// Blocks found on disk.
    Found { blocks: Vec<FoundBlock>, others_bytes: Bytes },
    /// Blocks on disk have become too old and are gone from there.
    Expired { places: Vec<DiskPlace> },
    /// A prompt was computed from one token to another in so many seconds.
    Prefilled { identity: KvIdentity, from_token: u32, to_token: u32, seconds: f64 },
    /// Nothing of a trust domain is to be kept.
    Purge { domain: TrustDomain },
    /// A model is removed: nothing of its KV is to be kept, whatever still comes of it, until it is in memory again.
    Forget { identity: KvIdentity },
    /// Blocks, and states on their way to becoming some, may take so much host memory from now on.
    HostLimit { bytes: Bytes },
    /// The time asked for by `next_timer` has come.
    Timer,
}

/// What the tier wants done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Action {
    /// The request may begin: with the blocks in these slots, or by computing everything its engine does not hold. If they
    /// are not the first of its prompt, it has begun already, and takes them in when it has come as far as they begin.
    Grant {
        request: RequestId,
        identity: KvIdentity,
        first: u32,
        slots: Vec<u32>,
        known: u32,
    },
    /// Blocks of the first so many tokens of a prompt are being read: its grant comes when they are there, or too late.
    Coming {
        request: RequestId,
        tokens: u32,
    },
    /// Read a block into a slot.
    Read {
        block: BlockNumber,
        identity: KvIdentity,
        domain: TrustDomain,
        key: BlockKey,
        place: DiskPlace,
        slot: u32,
    },
    /// Let the engine put the state out, or not.
    SaveGo {
        save: SaveId,
    },
    SaveSkip {
        save: SaveId,
    },
    /// Take blocks out of a state and put them into slots: pairs of place among the save's blocks, and slot.
    Gather {
        save: SaveId,
        identity: KvIdentity,
        blocks: Vec<(u32, u32)>,
    },
    /// Write a slot's block to disk.
    Write {
        block: BlockNumber,
        identity: KvIdentity,
        slot: u32,
    },
    /// A slot holds nothing any more: its memory may go.
    FreeSlot {
        identity: KvIdentity,
        slot: u32,
    },
    /// A block on disk is not wanted any more: its room may go.
    Retire {
        place: DiskPlace,
    },
    /// Blocks of this worth, in seconds saved per second and byte, left host memory because models take the rest of it.
    Pressed {
        worth: f64,
    },
    /// Destroy what lies on disk of a trust domain.
    PurgeDisk {
        domain: TrustDomain,
    },
}

/// The first half of a key, which the index holds; the whole one stands in the block's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockKeyShort(pub u128);

impl From<&BlockKey> for BlockKeyShort {
    fn from(key: &BlockKey) -> Self {
        let mut half = [0; 16];
        half.copy_from_slice(&key.0[..16]);
        Self(u128::from_le_bytes(half))
    }
}
