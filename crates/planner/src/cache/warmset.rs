//! The rule that serves: [`warmset_core::kv::Tier`] itself, with host memory alone, and a shell that does at once what it
//! wants done. It keeps whole blocks only, as engines do.

use super::{
    Lookup, Policy,
    trace::{BlockId, Trace},
};
use warmset_core::{
    Digest, Instant, Machine, RequestId,
    kv::{Action, BlockKey, Event, KvIdentity, SaveId, Tier, TierSettings, TrustDomain},
};

/// Every block takes as much.
const BLOCK_BYTES: u64 = 1 << 20;
/// What bringing blocks back takes: little.
const RESTORE_BYTES_PER_SECOND: f64 = 10e9;

pub(super) struct Warmset {
    tier: Tier,
    identity: KvIdentity,
    keys: Vec<BlockKey>,
    actions: Vec<Action>,
}

impl Warmset {
    pub(super) fn new(trace: &Trace, blocks_max: usize) -> Self {
        let mut tier = Tier::new(TierSettings {
            host_bytes_max: blocks_max as u64 * BLOCK_BYTES,
            disk_bytes_max: 0,
            disk_slack_bytes: 0,
            disk_write_bytes_per_day: 0,
            disk_queue_bytes_max: 0,
            saves_max: 1,
            saves_waiting_max: 1,
        });
        let model = Digest([0; 32]);
        let identity = KvIdentity::new(&model, "trace", "trace");
        let opened = Event::Opened { model, identity, payload_bytes: BLOCK_BYTES, slot_bytes: BLOCK_BYTES };
        tier.handle(Instant::ZERO, opened, &mut Vec::new());
        Self { tier, identity, keys: (0..trace.blocks() as BlockId).map(key).collect(), actions: Vec::new() }
    }

    fn tell(&mut self, at: Instant, event: Event) {
        self.actions.clear();
        self.tier.handle(at, event, &mut self.actions);
    }

    /// Blocks that are granted, and given back.
    fn ask(&mut self, request: &Lookup<'_>, keys: &[BlockKey]) -> usize {
        let (number, identity) = (RequestId(u64::from(request.number)), self.identity);
        let prompt_tokens =
            u32::try_from(keys.len()).unwrap_or(u32::MAX).saturating_mul(warmset_core::kv::BLOCK_TOKENS);
        let asked = Event::Asked { request: number, identity, keys: keys.to_vec(), prompt_tokens, device_tokens: 0 };
        self.tell(request.at, asked);
        let granted = self.actions.iter().find_map(|action| match action {
            Action::Grant { slots, .. } => Some(slots.len()),
            _ => None,
        });
        let found = granted.unwrap_or(0);
        if found > 0 {
            let seconds = found as f64 * BLOCK_BYTES as f64 / RESTORE_BYTES_PER_SECOND;
            self.tell(request.at, Event::Restored { request: number, first_block: 0, blocks: found as u32, seconds });
        }
        found
    }

    /// Offers the blocks that were computed.
    fn save(&mut self, request: &Lookup<'_>, found: usize, mut keys: Vec<BlockKey>) {
        let keys_after = keys.split_off(found);
        let (save, at) = (SaveId(u64::from(request.number)), request.at);
        self.tell(
            at,
            Event::SaveOffered {
                save,
                identity: self.identity,
                domain: TrustDomain::named("trace"),
                parent: keys.last().copied().unwrap_or(BlockKey([0; 32])),
                first_block: found as u32,
                keys: keys_after,
                state_bytes: 0,
            },
        );
        if self.actions.iter().any(|action| matches!(action, Action::SaveGo { .. })) {
            self.tell(at, Event::Staged { save, ok: true });
            let gathers = |action: &Action| matches!(action, Action::Gather { blocks, .. } if !blocks.is_empty());
            if self.actions.iter().any(gathers) {
                self.tell(at, Event::Gathered { save, ok: true });
            }
        }
    }
}

impl Policy for Warmset {
    fn serve(&mut self, request: &Lookup<'_>) -> usize {
        let blocks = &request.blocks[..request.full_blocks];
        let keys: Vec<BlockKey> = blocks.iter().map(|block| self.keys[*block as usize]).collect();
        if keys.is_empty() {
            return 0;
        }
        let found = self.ask(request, &keys);
        if found < keys.len() {
            self.save(request, found, keys);
        }
        found
    }
}

/// A key whose first bits are as good a hash as those of a real one (SplitMix64's finish).
fn key(block: BlockId) -> BlockKey {
    let mut mixed = u64::from(block).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
    bytes[8..12].copy_from_slice(&block.to_le_bytes());
    BlockKey(bytes)
}
