//! KV of an engine that computes nothing: bytes that follow from the tokens before them, so that a wrong one shows.

use super::text;
use crate::{
    kv::{
        KvMemory, Piece, Template, Write,
        reuse::{Held, View, longest},
        tier::{EARLY_SAVE_TOKENS, Expected, Tier, unused},
    },
    port::Report,
    protocol::{FromEngine, KvLayout, KvOpen, StateLayout, ToEngine},
};
use std::time::Instant;
use warmset_core::kv::{BLOCK_TOKENS, BlockKey, TrustDomain};

/// Head of a state with one stream and one plane.
const LAYOUT: StateLayout =
    StateLayout { head_bytes: 32, head_cell_bytes: 12, plane_head_bytes: 12, row_bytes: Vec::new() };

/// What a generation must know of its prompt's KV.
#[derive(Debug, Default)]
pub(super) struct Prefix {
    pub(super) tokens: Vec<u32>,
    pub(super) domain: Option<TrustDomain>,
    pub(super) keys: Vec<BlockKey>,
    /// Granted slots, until the worker is told what became of them.
    pub(super) slots: Option<Vec<u32>>,
    pub(super) known_blocks: u32,
    /// Tokens that were not computed; none while it is not known yet.
    pub(super) cached: Option<u32>,
    pub(super) offered: bool,
}

impl Prefix {
    /// Says that granted blocks are not used, unless it was said already what became of them.
    pub(super) fn settle(&mut self, request: u64, report: Report<'_>) {
        if self.slots.take().is_some() {
            report(unused(request));
        }
    }
}

/// The KV of all sequences.
#[derive(Debug, Default)]
pub(super) struct Kv {
    template: Option<Template>,
    tier: Option<Tier>,
    /// Finished sequences, as many as the engine has, with the number that saves know them by.
    held: Vec<(usize, Held<u32>)>,
    parallel: usize,
    uses: u64,
}

/// A token for a word.
pub(super) fn token(word: &str) -> u32 {
    // Below 2^31, as tokens of models are.
    (text::hash(&[word.as_bytes()]) & 0x7fff_ffff) as u32
}

impl Kv {
    /// Begins with what a model declares. The layout is none without KV.
    pub(super) fn new(token_bytes: u64, parallel: u32) -> (Self, Option<KvLayout>) {
        let row_bytes = u32::try_from(token_bytes).ok().filter(|bytes| *bytes > 0);
        let template =
            row_bytes.map(|bytes| Template::of_numbers(StateLayout { row_bytes: vec![bytes], ..LAYOUT }, 0, 0));
        let layout = template.as_ref().map(|template| KvLayout {
            description: format!("synthetic, format 1, blocks of {BLOCK_TOKENS}, {}", template.describe()),
            state: template.layout().clone(),
        });
        (Self { template, parallel: parallel as usize, ..Self::default() }, layout)
    }

    pub(super) fn open(&mut self, open: KvOpen, memory: KvMemory) {
        let Some(template) = &self.template else { return };
        match Tier::new(open, memory, template.layout().block_bytes()) {
            Ok(tier) => self.tier = Some(tier),
            Err(error) => crate::child::log(&format!("goes on without a tier for KV: {error}")),
        }
    }

    fn views(&self) -> Vec<View<'_, u32>> {
        self.held
            .iter()
            .map(|(_, held)| View {
                idle: true,
                saving: 0,
                domain: held.domain.as_ref(),
                tokens: [held.tokens.as_slice(), &[]],
                // It rounds nothing.
                whole: 0,
                last_use: held.last_use,
            })
            .collect()
    }

    /// What is known of a prompt before its grant: its tokens here, and its keys.
    pub(super) fn look(&self, prefix: &Prefix) -> (u32, Vec<BlockKey>) {
        let Some(domain) = prefix.domain.as_ref().filter(|_| self.template.is_some()) else { return (0, Vec::new()) };
        let keys = self.tier.as_ref().map_or_else(Vec::new, |tier| tier.keys(domain, &prefix.tokens));
        (longest(&self.views(), Some(domain), &prefix.tokens) as u32, keys)
    }

    /// Brings the prompt's KV there, as far as it need not be computed. An error is a block with wrong bytes.
    pub(super) fn begin(&mut self, request: u64, prefix: &mut Prefix, report: Report<'_>) -> Result<u32, String> {
        let began = Instant::now();
        let (here, _) = self.look(prefix);
        let slots = prefix.slots.take();
        let mut blocks = 0;
        if let (Some(slots), Some(tier), Some(domain)) = (&slots, &self.tier, &prefix.domain)
            && slots.len() * BLOCK_TOKENS as usize > here as usize
        {
            let expected = Expected { domain, keys: &prefix.keys, tokens: &prefix.tokens };
            let right = rows(&prefix.tokens, self.token_bytes());
            for (block, slot) in slots.iter().take(prefix.keys.len()).enumerate() {
                let found = match tier.block(*slot, block, &expected) {
                    Ok(found) => found,
                    Err(reason) => {
                        report(FromEngine::KvRejected { request, block: block as u32, reason });
                        break;
                    }
                };
                if found != &right[block * found.len()..(block + 1) * found.len()] {
                    report(unused(request));
                    return Err(format!("wrong KV: block {block} was restored with other bytes than were saved"));
                }
                blocks += 1;
            }
        }
        let cached = here.max(blocks * BLOCK_TOKENS);
        if slots.is_some() {
            let blocks = if cached > here { blocks } else { 0 };
            let seconds = began.elapsed().as_secs_f64();
            report(FromEngine::Restored { request, first_block: 0, blocks, seconds });
        }
        prefix.cached = Some(cached);
        Ok(cached)
    }

    fn token_bytes(&self) -> usize {
        self.template.as_ref().map_or(0, |template| template.layout().cell_bytes() as usize)
    }

    /// The prompt is computed: a long one is offered at once.
    pub(super) fn prefilled(&mut self, request: u64, prefix: &mut Prefix, report: Report<'_>) {
        let computed = prefix.tokens.len() - prefix.cached.unwrap_or(0) as usize;
        if computed >= EARLY_SAVE_TOKENS {
            self.keep(request, prefix, &[], report);
        }
    }

    /// What was computed stays for the next request that begins alike, and is offered to the tier.
    pub(super) fn keep(&mut self, request: u64, prefix: &mut Prefix, generated: &[u32], report: Report<'_>) {
        let Some(domain) = prefix.domain.filter(|_| self.template.is_some()) else { return };
        let tokens = [&prefix.tokens[..], generated].concat();
        self.uses += 1;
        let number = self.uses as usize;
        let begin = if prefix.offered { prefix.tokens.len() as u32 / BLOCK_TOKENS } else { 0 };
        prefix.offered = true;
        if let Some(tier) = &mut self.tier {
            let first_block = prefix.known_blocks.max(begin);
            let wanted = tier.offer((request, domain), (number, Instant::now()), &tokens, first_block);
            wanted.into_iter().for_each(|wanted| report(FromEngine::SaveWanted(wanted)));
        }
        self.held.push((number, Held { tokens, whole: 0, domain: Some(domain), last_use: self.uses }));
        if self.held.len() > self.parallel {
            let (lost, _) = self.held.remove(0);
            if let Some(tier) = &mut self.tier {
                tier.saves.cut(lost, 0);
            }
        }
    }

    /// Finished sequences of a trust domain are forgotten, and not saved.
    pub(super) fn forget_domain(&mut self, domain: &TrustDomain) {
        for (lost, _) in self.held.extract_if(.., |(_, held)| held.domain.as_ref() == Some(domain)) {
            if let Some(tier) = &mut self.tier {
                tier.saves.cut(lost, 0);
            }
        }
    }

    /// Takes an answer about a save and writes what may be written.
    pub(super) fn answer_save(&mut self, answer: &ToEngine, report: Report<'_>) {
        let (Some(tier), Some(template)) = (&mut self.tier, &self.template) else { return };
        match answer {
            ToEngine::SaveGo { save } => tier.saves.go(*save),
            ToEngine::SaveSkip { save } => tier.saves.skip(*save),
            ToEngine::SaveEnd { save } => tier.saves.end(*save),
            _ => {}
        }
        while let Some(Write { save, sequence, .. }) = tier.saves.next() {
            let held = self.held.iter().find(|(number, _)| Some(*number) == sequence);
            let bytes = held.map_or(0, |(_, held)| write(template, &held.tokens, tier.memory.staging()));
            tier.saves.written(save);
            report(FromEngine::Saved { save, bytes });
        }
    }
}

/// States of sequences that leave and come back: every byte is looked at.
impl Kv {
    /// Bytes of the state of a sequence of so many tokens.
    pub(super) fn state_bytes(&self, tokens: usize) -> usize {
        tokens * self.token_bytes()
    }

    /// Writes the state of a sequence.
    pub(super) fn write_state(&self, tokens: &[u32], into: &mut [u8]) {
        into.copy_from_slice(&rows(tokens, self.token_bytes()));
    }

    /// Whether these bytes are the state of a sequence.
    pub(super) fn is_state(&self, tokens: &[u32], bytes: &[u8]) -> bool {
        rows(tokens, self.token_bytes()) == bytes
    }
}

/// Writes the state of a sequence with these tokens; 0 bytes if there is no room.
fn write(template: &Template, tokens: &[u32], staging: &mut [u8]) -> u64 {
    let layout = template.layout();
    let bytes = layout.state_bytes(tokens.len() as u64);
    let payload = rows(tokens, layout.cell_bytes() as usize);
    let room = usize::try_from(bytes).ok().and_then(|bytes| staging.get_mut(..bytes));
    let written =
        room.map(|room| template.compose(&[Piece { payload: &payload, cells: tokens.len() as u32 }], room, 1));
    if matches!(written, Some(Ok(()))) { bytes } else { 0 }
}

/// The rows of a sequence: each follows from its token and all before it.
fn rows(tokens: &[u32], token_bytes: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(tokens.len() * token_bytes);
    let mut state = 0_u64;
    for (position, token) in tokens.iter().enumerate() {
        state = text::hash(&[&state.to_le_bytes(), &token.to_le_bytes()]);
        let mut word = state;
        while all.len() < (position + 1) * token_bytes {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let left = (position + 1) * token_bytes - all.len();
            all.extend_from_slice(&word.to_be_bytes()[..left.min(8)]);
        }
    }
    all
}
