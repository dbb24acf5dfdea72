//! Where a choice begins: on which sequence, and with what of its prompt there already.

use super::{
    super::load::Loaded,
    Generations, Running,
    running::{take_token, tokens_max},
};
use crate::{
    kv::reuse::{Start, choose},
    port::Report,
    protocol::FinishReason,
};
use std::time::Instant;
use warmset_core::kv::BLOCK_TOKENS;

impl Generations {
    pub(super) fn admit(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        self.waits_until = None;
        if self.hold {
            return;
        }
        while self.slots.iter().any(Option::is_none) {
            let next = self.waiting_order.iter().copied().find(|request| self.can_start(*request));
            let Some(request) = next else { return };
            let Some((sequence, tokens)) = self.place(loaded, request, report) else { return };
            self.start_choice(loaded, request, sequence, tokens);
        }
    }

    /// Whether a request has a choice that can begin now. Choices after the first wait until the prompt is computed.
    fn can_start(&self, request: u64) -> bool {
        self.all.get(&request).is_some_and(|one| {
            one.is_waiting()
                && (one.choices_started == 0 || one.first_logits.is_some() || one.job.max_tokens == Some(0))
        })
    }

    /// Finds a sequence for the next choice of a request and brings there what need not be computed: how many tokens of
    /// the prompt that is. None if it must wait for the next batch.
    fn place(&mut self, loaded: &mut Loaded, request: u64, report: Report<'_>) -> Option<(usize, usize)> {
        let generation = self.all.get(&request)?;
        let domain = generation.job.kv_domain.filter(|_| loaded.model.can_rewind());
        let (first, prompt_tokens) = (generation.choices_started == 0, generation.prompt.len());
        let nothing = generation.job.max_tokens == Some(0);
        // Those that do not begin with the prompt are for later.
        let blocks = generation.blocks.as_ref().filter(|blocks| blocks.first == 0);
        let granted = blocks.map_or(0, |blocks| blocks.slots.len() * BLOCK_TOKENS as usize);
        let start = choose(&self.views(), domain.as_ref().filter(|_| first && !nothing), &generation.prompt);
        let Some(start) = start else {
            let now = Instant::now();
            self.waits_until = self.tier.as_ref().and_then(|tier| tier.saves.next_unprotected(now));
            return None;
        };
        let restores = first && !nothing && granted > start.tokens;
        if restores && loaded.context.is_unsettled(start.sequence as i32) && self.slots.iter().any(Option::is_some) {
            return None;
        }
        self.uses += 1;
        let mut tokens = if restores { self.restore(loaded, request, start, report) } else { None };
        if !first && self.copy_prompt(loaded, request, prompt_tokens, start.sequence) {
            tokens = Some(prompt_tokens);
        }
        let tokens = tokens.unwrap_or_else(|| self.bring(loaded, start));
        let generation = self.all.get_mut(&request)?;
        if generation.blocks.as_ref().is_some_and(|blocks| blocks.first == 0) {
            generation.settle_grant(report);
        }
        if first {
            generation.cached_tokens = tokens as u32;
        }
        Some((start.sequence, tokens))
    }

    /// Brings a start about with what the sequences hold. Returns the tokens that are there.
    fn bring(&mut self, loaded: &mut Loaded, start: Start) -> usize {
        if let Some(from) = start.copy_from {
            self.clear_sequence(loaded, start.sequence);
            loaded.context.copy(from as i32, start.sequence as i32);
            self.held[from].last_use = self.uses;
        }
        let there = if self.cut(loaded, start.sequence, start.tokens) { start.tokens } else { 0 };
        self.held[start.sequence] = Default::default();
        there
    }

    /// Begins the next choice of a request on a sequence that holds so many tokens of its prompt.
    pub(super) fn start_choice(&mut self, loaded: &mut Loaded, request: u64, sequence: usize, tokens: usize) {
        let Some(generation) = self.all.get_mut(&request) else { return };
        let choice = generation.choices_started;
        generation.choices_started += 1;
        if !generation.is_waiting() {
            self.waiting_order.retain(|waiting| *waiting != request);
        }
        let prompt_tokens = generation.prompt.len();
        let tokens_max = tokens_max(loaded, generation);
        let computes = tokens_max > 0;
        if computes && tokens < prompt_tokens {
            generation.clock.prefill_begin.get_or_insert_with(Instant::now);
        }
        let mut running = Running::new(loaded, generation, choice, tokens);
        running.finish = (!computes).then_some(FinishReason::Length);
        self.slots[sequence] = Some(running);
        if computes && tokens == prompt_tokens {
            self.pick_from_prompt(loaded, sequence);
        }
    }

    /// Copies a prompt that another choice of the request has computed. False if none can give it.
    fn copy_prompt(&mut self, loaded: &mut Loaded, request: u64, prompt_tokens: usize, sequence: usize) -> bool {
        let rewinds = loaded.model.can_rewind();
        let donor = self.slots.iter().position(|slot| {
            slot.as_ref().is_some_and(|other| {
                other.request == request
                    && other.prefilled == prompt_tokens
                    && (rewinds || other.cached() == prompt_tokens)
            })
        });
        let Some(donor) = donor else { return false };
        self.clear_sequence(loaded, sequence);
        loaded.context.copy(donor as i32, sequence as i32);
        if loaded.context.forget(sequence as i32, prompt_tokens) {
            return true;
        }
        loaded.context.forget(sequence as i32, 0);
        false
    }

    /// Picks a choice's first token from the logits that were kept of its prompt.
    fn pick_from_prompt(&mut self, loaded: &Loaded, sequence: usize) {
        let Some(running) = self.slots[sequence].as_mut() else { return };
        let Some(generation) = self.all.get_mut(&running.request) else { return };
        let Some(logits) = generation.first_logits.as_deref() else { return };
        let picked = running.pick(loaded, logits, &mut self.candidates, &generation.job.output);
        if generation.choices_started == generation.job.choices {
            generation.first_logits = None;
        }
        match picked {
            Ok(token) => take_token(loaded, generation, running, token, &mut self.pieces),
            Err(refusal) => generation.refusal = Some(refusal),
        }
    }
}
