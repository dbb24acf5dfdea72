//! The worker's tier as an engine sees it: keys of prompts, granted blocks that are looked at before they are believed,
//! and offers of new ones.

use super::{
    KvMemory,
    saves::Saves,
    state::InvalidState,
    verify::{Stored, verify},
};
use crate::protocol::{FromEngine, KvOpen, SaveWanted, StateLayout};
use std::time::Instant;
use warmset_core::kv::{BLOCK_TOKENS, BlockHeader, BlockKey, HEADER_BYTES, TrustDomain, chain, key::root};

/// Tokens of a prompt that must have been computed for its blocks to be saved before its answer is complete.
pub(crate) const EARLY_SAVE_TOKENS: usize = warmset_core::kv::EARLY_SAVE_TOKENS as usize;

/// The tier, once its memory has come.
#[derive(Debug)]
pub(crate) struct Tier {
    open: KvOpen,
    pub(crate) memory: KvMemory,
    pub(crate) saves: Saves,
    /// Bytes of a block's payload.
    block_bytes: u64,
}

/// Blocks of a prompt that lie in slots, the first of them so many blocks from its beginning.
#[derive(Debug)]
pub(crate) struct GrantedBlocks {
    pub(crate) first: u32,
    pub(crate) slots: Vec<u32>,
}

/// What is said of granted blocks that nobody takes in.
pub(crate) fn unused(request: u64) -> FromEngine {
    FromEngine::Restored { request, first_block: 0, blocks: 0, seconds: 0.0 }
}

/// What the caller knows of a block that it was granted.
pub(crate) struct Expected<'a> {
    pub(crate) domain: &'a TrustDomain,
    /// The prompt's keys.
    pub(crate) keys: &'a [BlockKey],
    /// The prompt's tokens.
    pub(crate) tokens: &'a [u32],
}

impl Tier {
    pub(crate) fn new(open: KvOpen, memory: KvMemory, block_bytes: u64) -> Result<Self, InvalidState> {
        let needed = HEADER_BYTES as u64 + block_bytes;
        if open.slot_bytes < needed {
            return Err(InvalidState::Length { found: open.slot_bytes, needed });
        }
        Ok(Self { open, memory, saves: Saves::default(), block_bytes })
    }

    /// Keys of the full blocks of a prompt, but for its last token.
    pub(crate) fn keys(&self, domain: &TrustDomain, prompt: &[u32]) -> Vec<BlockKey> {
        chain(&self.open.identity, domain, &prompt[..prompt.len().saturating_sub(1)])
    }

    /// The payload of the `block`-th block of a prompt, which was said to lie in a slot; why not if it does not.
    pub(crate) fn block(&self, slot: u32, block: usize, expected: &Expected<'_>) -> Result<&[u8], String> {
        let slot = self.memory.slot(slot).ok_or("there is no such slot")?;
        let header = BlockHeader::decode(slot).map_err(|error| error.as_str().to_owned())?;
        let first = block * BLOCK_TOKENS as usize;
        let tokens = expected.tokens.get(first..first + BLOCK_TOKENS as usize).ok_or("the prompt has no such block")?;
        let parent = match block.checked_sub(1) {
            Some(before) => expected.keys.get(before).copied(),
            None => Some(root(&self.open.identity, expected.domain)),
        };
        let wrong = [
            (header.identity != self.open.identity, "identity"),
            (header.domain != *expected.domain, "domain"),
            (Some(&header.key) != expected.keys.get(block), "key"),
            (Some(header.parent) != parent, "parent"),
            (header.first_token != first as u64, "place"),
            (header.tokens != tokens, "tokens"),
            (header.payload_bytes != self.block_bytes, "length"),
        ];
        if let Some((_, what)) = wrong.iter().find(|(wrong, _)| *wrong) {
            return Err((*what).to_owned());
        }
        let end = HEADER_BYTES + usize::try_from(self.block_bytes).map_err(|_| "length")?;
        Ok(slot.get(HEADER_BYTES..end).ok_or("length")?)
    }

    /// Whether restored sequences are to be compared.
    pub(crate) fn verifies(&self) -> bool {
        self.open.verify
    }

    /// Compares the state of a sequence that was made of the blocks in these slots, from one of its blocks on. The error is
    /// the first block that is another than what was saved.
    pub(crate) fn verify(
        &self,
        layout: &StateLayout,
        state: &[u8],
        (first_block, slots): (u32, &[u32]),
    ) -> Result<(), u32> {
        let stored = |slot: &u32| -> Option<Stored<'_>> {
            let slot = self.memory.slot(*slot)?;
            let end = HEADER_BYTES + usize::try_from(self.block_bytes).ok()?;
            let checksum = BlockHeader::decode(slot).ok()?.payload_checksum;
            Some(Stored { payload: slot.get(HEADER_BYTES..end)?, checksum })
        };
        let blocks: Vec<Stored<'_>> = slots.iter().map_while(stored).collect();
        verify(layout, state, (first_block, &blocks))?;
        if blocks.len() == slots.len() { Ok(()) } else { Err(first_block + blocks.len() as u32) }
    }

    /// Asks for the blocks from `first_block` on of a sequence that holds these tokens to be saved, and which is not to
    /// lose them before that for so long; none if there are none, or too many wait.
    pub(crate) fn offer(
        &mut self,
        (request, domain): (u64, TrustDomain),
        (sequence, protected_until): (usize, Instant),
        tokens: &[u32],
        first_block: u32,
    ) -> Option<SaveWanted> {
        let begin = first_block as usize * BLOCK_TOKENS as usize;
        let end = tokens.len() / BLOCK_TOKENS as usize * BLOCK_TOKENS as usize;
        if begin >= end {
            return None;
        }
        let save = self.saves.want(sequence, end, tokens.len() as u32, protected_until)?;
        let mut keys = chain(&self.open.identity, &domain, &tokens[..end]);
        let new = keys.split_off(first_block as usize);
        Some(SaveWanted {
            save,
            request,
            domain,
            first_block,
            parent: keys.last().copied().unwrap_or_else(|| root(&self.open.identity, &domain)),
            keys: new,
            tokens: tokens[begin..end].to_vec(),
            cells: tokens.len() as u32,
        })
    }
}
