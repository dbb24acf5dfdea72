//! What stays when a choice is over: in its sequence, for the next request that begins alike, and in the worker's tier.

use super::{
    super::{
        load::Loaded,
        request::{Clock, Generation},
        sys::Token,
    },
    Generations, Running,
};
use crate::{
    kv::{
        KvMemory, Write,
        reuse::{Held, View, choose, longest, whole_blocks},
        tier::{EARLY_SAVE_TOKENS, GrantedBlocks, Tier, unused},
        truncate,
    },
    port::Report,
    protocol::{FromEngine, KvGrant, KvOpen, ToEngine},
};
use std::time::{Duration, Instant};
use warmset_core::kv::{BLOCK_TOKENS, TrustDomain};

/// A request waits so long for a save of what lies where it is to begin, as a share of the time that computing took, and
/// within these bounds.
const SAVE_PATIENCE: f64 = 0.25;
const SAVE_PATIENCE_MIN: Duration = Duration::from_millis(20);
const SAVE_PATIENCE_MAX: Duration = Duration::from_secs(1);

impl Generations {
    /// Takes the tier's memory, if this model's states can be cut into blocks.
    pub(in crate::llama) fn open_kv(&mut self, loaded: &Loaded, open: KvOpen, memory: KvMemory) {
        let Some(states) = &loaded.states else { return };
        match Tier::new(open, memory, states.layout().block_bytes()) {
            Ok(tier) => self.tier = Some(tier),
            Err(error) => {
                crate::child::log(&format!("goes on without a tier for KV, whose slots are too small: {error}"))
            }
        }
    }

    /// Takes a tokenised generation, which then waits for its grant, and says what is known of its prompt.
    pub(in crate::llama) fn prepare(&mut self, loaded: &Loaded, mut generation: Generation) -> FromEngine {
        let domain = generation.job.kv_domain.filter(|_| loaded.model.can_rewind());
        let device_tokens = longest(&self.views(), domain.as_ref(), &generation.prompt) as u32;
        if let Some((tier, domain)) = self.tier.as_ref().zip(domain) {
            generation.keys = tier.keys(&domain, &generation.prompt_numbers());
        }
        let (request, prompt_tokens) = (generation.request, generation.prompt.len() as u32);
        let keys = generation.keys.clone();
        self.add(generation);
        FromEngine::Prepared { request, prompt_tokens, device_tokens, keys }
    }

    pub(in crate::llama) fn grant(&mut self, request: u64, source: KvGrant, report: Report<'_>) {
        let (blocks, known) = match source {
            KvGrant::Recompute { known } => (None, known),
            KvGrant::Blocks { first, slots, known } => (Some(GrantedBlocks { first, slots }), known),
        };
        match self.all.get_mut(&request) {
            Some(generation) => {
                // A second grant ends the first one.
                generation.settle_grant(report);
                (generation.blocks, generation.known_blocks) = (blocks, known);
                generation.granted = true;
            }
            // It ended meanwhile.
            None if blocks.is_some() => report(unused(request)),
            None => {}
        }
    }

    /// All sequences as they are now.
    pub(super) fn views(&self) -> Vec<View<'_, Token>> {
        (0..self.slots.len()).map(|sequence| self.view(sequence)).collect()
    }

    fn view(&self, sequence: usize) -> View<'_, Token> {
        let held = &self.held[sequence];
        let saving = self.tier.as_ref().map_or(0, |tier| tier.saves.protected(sequence, Instant::now()));
        let Some(running) = &self.slots[sequence] else {
            let (domain, tokens) = (held.domain.as_ref(), [held.tokens.as_slice(), &[]]);
            return View { idle: true, saving, domain, tokens, whole: held.whole, last_use: held.last_use };
        };
        let (domain, tokens, prompt) = match self.all.get(&running.request) {
            Some(one) => (one.job.kv_domain.as_ref(), running.computed(&one.prompt), one.prompt.len()),
            None => (None, [&[][..]; 2], 0),
        };
        View { idle: false, saving, domain, tokens, whole: whole_blocks(prompt), last_use: self.uses }
    }

    /// Makes a sequence forget all but its first tokens. False if it cannot, and has forgotten everything.
    pub(super) fn cut(&mut self, loaded: &mut Loaded, sequence: usize, tokens: usize) -> bool {
        let kept = loaded.context.forget(sequence as i32, tokens);
        if !kept {
            loaded.context.forget(sequence as i32, 0);
        }
        self.lose(sequence, if kept { tokens } else { 0 });
        kept
    }

    /// What was to be saved of a sequence beyond its first tokens is not there any more.
    pub(super) fn lose(&mut self, sequence: usize, tokens: usize) {
        if let Some(tier) = &mut self.tier {
            tier.saves.cut(sequence, tokens);
        }
    }

    /// Makes a sequence forget everything.
    pub(in crate::llama) fn clear_sequence(&mut self, loaded: &mut Loaded, sequence: usize) {
        self.cut(loaded, sequence, 0);
        if let Some(held) = self.held.get_mut(sequence) {
            *held = Held::default();
        }
    }

    /// Keeps nothing of a trust domain: idle sequences forget it, and what runs leaves nothing behind.
    pub(in crate::llama) fn forget_domain(&mut self, loaded: &mut Loaded, domain: &TrustDomain) {
        for sequence in 0..self.slots.len() {
            let running = self.slots[sequence].as_ref().and_then(|running| self.all.get(&running.request));
            if running.is_some_and(|generation| generation.job.kv_domain.as_ref() == Some(domain)) {
                self.lose(sequence, 0);
            } else if self.slots[sequence].is_none() && self.held[sequence].domain.as_ref() == Some(domain) {
                self.clear_sequence(loaded, sequence);
            }
        }
        for generation in self.all.values_mut().filter(|one| one.job.kv_domain.as_ref() == Some(domain)) {
            generation.job.kv_domain = None;
        }
    }

    /// The sequence whose loss matters least, if any is idle: also one that waits to be saved.
    pub(in crate::llama) fn free_sequence(&self) -> Option<usize> {
        let views: Vec<_> = self.views().into_iter().map(|view| View { saving: 0, ..view }).collect();
        choose(&views, None, &[]).map(|start| start.sequence)
    }

    /// A choice is over: what it computed stays for the next request that begins alike, and is offered to the tier.
    pub(super) fn keep(
        &mut self,
        loaded: &mut Loaded,
        sequence: usize,
        running: &Running,
        generation: &mut Generation,
        report: Report<'_>,
    ) {
        let tokens: Vec<Token> = running.computed(&generation.prompt).concat();
        let domain = generation.job.kv_domain.filter(|_| loaded.model.can_rewind());
        if domain.is_none() || tokens.is_empty() {
            return self.clear_sequence(loaded, sequence);
        }
        // The last token that was picked is not computed, but one that a failed batch began may be.
        self.cut(loaded, sequence, tokens.len());
        let first_block = if std::mem::replace(&mut generation.offered, true) {
            // Another choice has offered the prompt.
            (generation.prompt.len() as u32 / BLOCK_TOKENS).max(generation.known_blocks)
        } else {
            generation.known_blocks
        };
        self.offer(sequence, generation, &tokens, first_block, report);
        self.uses += 1;
        let whole = whole_blocks(generation.prompt.len());
        self.held[sequence] = Held { tokens, whole, domain, last_use: self.uses };
    }

    /// Offers a long prompt as soon as it is computed: its answer may take long.
    pub(super) fn offer_early(&mut self, sequence: usize, report: Report<'_>) {
        let Some(request) = self.slots[sequence].as_ref().map(|running| running.request) else { return };
        let Some(mut generation) = self.all.remove(&request) else { return };
        let computed = generation.prompt.len() - generation.cached_tokens as usize;
        if computed >= EARLY_SAVE_TOKENS && !std::mem::replace(&mut generation.offered, true) {
            let first_block = generation.known_blocks;
            let prompt = std::mem::take(&mut generation.prompt);
            self.offer(sequence, &generation, &prompt, first_block, report);
            generation.prompt = prompt;
        }
        self.all.insert(request, generation);
    }

    fn offer(
        &mut self,
        sequence: usize,
        generation: &Generation,
        tokens: &[Token],
        first_block: u32,
        report: Report<'_>,
    ) {
        let (Some(tier), Some(domain)) = (&mut self.tier, generation.job.kv_domain) else { return };
        let tokens = super::super::request::numbers(tokens);
        let computed_in = Clock::between(generation.clock.prefill_begin, generation.clock.first_token);
        let patience = Duration::from_secs_f64(computed_in * SAVE_PATIENCE).clamp(SAVE_PATIENCE_MIN, SAVE_PATIENCE_MAX);
        let place = (sequence, Instant::now() + patience);
        if let Some(wanted) = tier.offer((generation.request, domain), place, &tokens, first_block) {
            report(FromEngine::SaveWanted(wanted));
        }
    }

    /// Takes an answer about a save.
    pub(in crate::llama) fn answer_save(&mut self, loaded: &mut Loaded, answer: &ToEngine, report: Report<'_>) {
        if let Some(tier) = &mut self.tier {
            match answer {
                ToEngine::SaveGo { save } => tier.saves.go(*save),
                ToEngine::SaveSkip { save } => tier.saves.skip(*save),
                ToEngine::SaveEnd { save } => tier.saves.end(*save),
                _ => {}
            }
        }
        self.waits_until = None;
        self.write_saves(loaded, report);
    }

    /// Writes what may be written into the staging area.
    pub(super) fn write_saves(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        let (Some(tier), Some(states)) = (&mut self.tier, &loaded.states) else { return };
        while let Some(Write { save, sequence, cells }) = tier.saves.next() {
            let bytes = match sequence {
                // A copy that the next batch makes.
                Some(sequence) if loaded.context.is_unsettled(sequence as i32) => return,
                Some(sequence) => {
                    let staging = tier.memory.staging();
                    let written = loaded.context.state(sequence as i32, staging);
                    written.ok().and_then(|bytes| truncate(states.layout(), &mut staging[..bytes], cells))
                }
                None => None,
            };
            let bytes = bytes.unwrap_or(0) as u64;
            tier.saves.written(save);
            report(FromEngine::Saved { save, bytes });
        }
    }
}
