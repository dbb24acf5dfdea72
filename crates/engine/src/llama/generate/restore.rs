//! Granted blocks on their way into a sequence: before its prompt is computed, or while that goes on.

use super::{
    super::{load::Loaded, request::Generation},
    Generations,
};
use crate::{
    kv::{
        Piece, State,
        reuse::Start,
        tier::{Expected, GrantedBlocks, Tier},
    },
    port::Report,
    protocol::FromEngine,
};
use std::time::Instant;
use warmset_core::kv::BLOCK_TOKENS;

impl Generations {
    /// Blocks for so many tokens are on their way from the disk: the memory where they are put together can be ready by
    /// then.
    pub(in crate::llama) fn make_ready(&mut self, loaded: &Loaded, tokens: u32) {
        let Some(states) = &loaded.states else { return };
        let tokens = tokens.min(loaded.info.context_tokens);
        self.scratch.prepare(states.layout().state_bytes(u64::from(tokens)) as usize, Instant::now());
    }

    /// Puts the granted blocks of a prompt into its sequence. None if none of them can be used and nothing has changed;
    /// else how many tokens are there.
    pub(super) fn restore(
        &mut self,
        loaded: &mut Loaded,
        request: u64,
        start: Start,
        report: Report<'_>,
    ) -> Option<usize> {
        let restored = self.take_in(loaded, (request, start.sequence), (0, start.tokens), report);
        if restored.is_some() {
            self.held[start.sequence] = Default::default();
        }
        restored
    }

    /// Takes blocks in that have come for prompts which are being computed, as soon as these have come as far.
    pub(super) fn restore_on_the_way(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        for sequence in 0..self.slots.len() {
            let Some(running) = self.slots[sequence].as_ref().filter(|running| !running.stopped) else { continue };
            let (request, computed) = (running.request, running.prefilled);
            let Some(generation) = self.all.get_mut(&request) else { continue };
            let Some(blocks) = &generation.blocks else { continue };
            let begin = blocks.first as usize * BLOCK_TOKENS as usize;
            let end = begin + blocks.slots.len() * BLOCK_TOKENS as usize;
            if computed >= end || !computed.is_multiple_of(BLOCK_TOKENS as usize) {
                generation.settle_grant(report);
            } else if computed >= begin && !loaded.context.is_unsettled(sequence as i32) {
                let there = self.take_in(loaded, (request, sequence), (computed, computed), report);
                let (Some(there), Some(running)) = (there, &mut self.slots[sequence]) else { continue };
                running.prefilled = there;
                if let Some(generation) = self.all.get_mut(&request) {
                    // All is lost if llama.cpp refused it.
                    generation.cached_tokens =
                        if there == 0 { 0 } else { generation.cached_tokens + (there - computed) as u32 };
                }
            }
        }
    }

    /// Puts granted blocks behind so many computed tokens of a sequence, if more than `least` tokens are there then. None
    /// if nothing has changed; else how many tokens are there.
    fn take_in(
        &mut self,
        loaded: &mut Loaded,
        (request, sequence): (u64, usize),
        (computed, least): (usize, usize),
        report: Report<'_>,
    ) -> Option<usize> {
        let began = Instant::now();
        let first_block = (computed / BLOCK_TOKENS as usize) as u32;
        let generation = self.all.get_mut(&request)?;
        let granted = generation.blocks.take()?;
        let payloads = match &self.tier {
            Some(tier) => usable(tier, generation, &granted, first_block, report),
            None => Vec::new(),
        };
        let there = computed + payloads.len() * BLOCK_TOKENS as usize;
        let mut restored = None;
        if there > least
            && let Some(head) = computed_rows(loaded, sequence, computed)
            && let Some(states) = &loaded.states
        {
            let head = (computed > 0).then_some(Piece { payload: &head, cells: computed as u32 });
            let blocks = payloads.into_iter().map(|payload| Piece { payload, cells: BLOCK_TOKENS });
            let pieces: Vec<Piece<'_>> = head.into_iter().chain(blocks).collect();
            let bytes = states.layout().state_bytes(there as u64) as usize;
            if let Ok(state) = self.scratch.take(bytes)
                && states.compose(&pieces, state, loaded.context.threads()).is_ok()
            {
                let taken = loaded.context.set_state(sequence as i32, state);
                restored = Some(if taken { there } else { 0 });
            }
        }
        self.scratch.settle(Instant::now());
        let seconds = began.elapsed().as_secs_f64();
        let mut blocks = (restored.unwrap_or(0).saturating_sub(computed) / BLOCK_TOKENS as usize) as u32;
        if blocks > 0
            && let Some(tier) = self.tier.as_ref().filter(|tier| tier.verifies())
        {
            let slots = granted.slots.iter().copied().skip((first_block - granted.first) as usize);
            let slots: Vec<u32> = slots.take(blocks as usize).collect();
            match verify(loaded, sequence, tier, (first_block, &slots)) {
                Ok(()) => report(FromEngine::KvVerified { request, blocks }),
                Err(block) => {
                    report(FromEngine::KvRejected { request, block, reason: "verify".into() });
                    loaded.context.forget(sequence as i32, 0);
                    (restored, blocks) = (Some(0), 0);
                }
            }
        }
        report(FromEngine::Restored { request, first_block, blocks, seconds });
        if let Some(tokens) = restored {
            self.lose(sequence, tokens.min(computed));
        }
        restored
    }
}

/// The payloads of granted blocks from one of the prompt's on, up to the first that is not what it must be.
fn usable<'a>(
    tier: &'a Tier,
    generation: &Generation,
    granted: &GrantedBlocks,
    first_block: u32,
    report: Report<'_>,
) -> Vec<&'a [u8]> {
    let Some(domain) = generation.job.kv_domain else { return Vec::new() };
    let prompt = generation.prompt_numbers();
    let expected = Expected { domain: &domain, keys: &generation.keys, tokens: &prompt };
    let all = (granted.first as usize..generation.keys.len()).zip(&granted.slots);
    let mut payloads = Vec::with_capacity(granted.slots.len());
    for (block, slot) in all.skip_while(|(block, _)| *block < first_block as usize) {
        match tier.block(*slot, block, &expected) {
            Ok(payload) => payloads.push(payload),
            Err(reason) => {
                let (request, block) = (generation.request, block as u32);
                report(FromEngine::KvRejected { request, block, reason });
                break;
            }
        }
    }
    payloads
}

/// Writes a sequence out that was restored from the blocks in these slots, from one of its blocks on, and compares. The
/// error is the first block that differs.
fn verify(loaded: &mut Loaded, sequence: usize, tier: &Tier, place: (u32, &[u32])) -> Result<(), u32> {
    let Some(states) = &loaded.states else { return Err(place.0) };
    let mut state = vec![0; loaded.context.state_bytes(sequence as i32) + 4 * loaded.context.sequences() as usize];
    let bytes = loaded.context.state(sequence as i32, &mut state).map_err(|_| place.0)?;
    tier.verify(states.layout(), &state[..bytes], place)
}

/// The rows of the first tokens of a sequence, plane by plane; nothing of none.
fn computed_rows(loaded: &mut Loaded, sequence: usize, tokens: usize) -> Option<Vec<u8>> {
    if tokens == 0 {
        return Some(Vec::new());
    }
    let layout = loaded.states.as_ref()?.layout();
    let room = loaded.context.state_bytes(sequence as i32) + 4 * loaded.context.sequences() as usize;
    let mut bytes = vec![0; room];
    let written = loaded.context.state(sequence as i32, &mut bytes).ok()?;
    let state = State::parse(layout, &bytes[..written]).ok()?;
    Some(state.rows(0, tokens as u32)?.collect::<Vec<_>>().concat())
}
