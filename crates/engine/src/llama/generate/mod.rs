//! Continuous batching: every step is one batch with the next token of each running choice and a piece of a prompt.
//!
//! Each sequence has cells of its own (`kv_unified` off): attention then reads a choice's own history only, and what
//! stays in an idle sequence costs the others nothing. docs/adr/0002-llama-cpp-sys.md has the measurements. `start` finds
//! the sequence that a choice begins on, `restore` brings there what is kept, `running` is a choice, `keep` is what stays
//! when it is over.

mod keep;
mod park;
mod restore;
mod running;
mod start;

use super::{
    context::{BATCH_TOKENS_MAX, Batch},
    load::Loaded,
    request::{Clock, Generation, Refusal},
    sampler::Candidates,
    sys::Token,
};
use crate::{
    calls::CallParser,
    kv::{Parts, Scratch, reuse::Held, tier::Tier},
    port::Report,
    protocol::{FinishReason, FromEngine, Timings, Usage},
};
use running::{Running, take_token};
use std::{collections::BTreeMap, time::Instant};

/// Prompt tokens in one batch while choices are being decoded: what they wait for in between.
const MIXED_PREFILL_TOKENS: usize = 128;
/// Below this many tokens llama.cpp's attention takes another path, which is slower and rounds differently. Prompts
/// are cut in multiples of it, and what is left over is computed by itself: then it does not matter for the rest where
/// the computation began.
const PREFILL_MULTIPLE: usize = warmset_core::kv::BLOCK_TOKENS as usize;

const NOT_A_NUMBER: &str = "the model's output is not a number; its weights may be damaged";

/// All generations of an engine.
#[derive(Default)]
pub(super) struct Generations {
    /// By arrival: request numbers of one worker grow.
    waiting_order: Vec<u64>,
    all: BTreeMap<u64, Generation>,
    slots: Vec<Option<Running>>,
    batch: Batch,
    candidates: Candidates,
    pieces: Vec<u8>,
    /// What each sequence holds while nobody computes on it.
    held: Vec<Held<Token>>,
    /// Uses of all sequences.
    uses: u64,
    tier: Option<Tier>,
    /// Requests that go on from where another engine stopped, as soon as they have a sequence.
    resuming: Vec<park::Resuming>,
    /// What stopped requests leave behind.
    leaving: BTreeMap<u64, Parts<Vec<u8>>>,
    /// Where states are put together.
    pub(super) scratch: Scratch,
    /// No choice can begin before then, or before a save was answered: all sequences hold what is to be saved.
    waits_until: Option<Instant>,
    /// A sequence is wanted for something else: start no more choices until it was had.
    pub(super) hold: bool,
}

impl Generations {
    pub(super) fn new(sequences: u32) -> Self {
        let slots = (0..sequences).map(|_| None).collect();
        Self { slots, held: (0..sequences).map(|_| Held::default()).collect(), ..Self::default() }
    }

    /// Takes a tokenised generation, which then waits for its grant.
    pub(super) fn add(&mut self, generation: Generation) {
        self.waiting_order.push(generation.request);
        self.all.insert(generation.request, generation);
    }

    pub(super) fn has_work(&self) -> bool {
        let computes = self.slots.iter().flatten().any(|running| !running.stopped);
        let may_begin = || self.waits_until.is_none_or(|until| until <= Instant::now());
        let begins = || may_begin() && self.all.values().any(Generation::is_waiting);
        computes || (!self.hold && (!self.resuming.is_empty() || begins()))
    }

    /// When there may be work without a message.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.waits_until
    }

    /// Ends a request at once and says so.
    pub(super) fn cancel(&mut self, loaded: &mut Loaded, request: u64, report: Report<'_>) {
        let Some(mut generation) = self.all.remove(&request) else { return };
        generation.settle_grant(report);
        self.forget_waiting(request);
        for sequence in 0..self.slots.len() {
            if let Some(running) = self.slots[sequence].take_if(|running| running.request == request) {
                self.keep(loaded, sequence, &running, &mut generation, report);
            }
        }
        for (choice, done) in generation.choices_done.iter().enumerate() {
            if !done {
                report(FromEngine::ChoiceDone { request, choice: choice as u32, finish: FinishReason::Cancelled });
            }
        }
        report(done(&generation));
    }

    /// A request waits for nothing any more.
    fn forget_waiting(&mut self, request: u64) {
        self.waiting_order.retain(|waiting| *waiting != request);
        self.resuming.retain(|waiting| waiting.request() != request);
        self.leaving.remove(&request);
    }

    fn fail(&mut self, loaded: &mut Loaded, request: u64, refusal: Refusal, report: Report<'_>) {
        self.forget_waiting(request);
        for sequence in 0..self.slots.len() {
            if self.slots[sequence].take_if(|running| running.request == request).is_some() {
                self.clear_sequence(loaded, sequence);
            }
        }
        if let Some(mut generation) = self.all.remove(&request) {
            generation.settle_grant(report);
            report(failed(request, refusal));
        }
    }

    /// One step: start what can start, compute one batch, pick tokens, tell.
    pub(super) fn step(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        self.admit_resumed(loaded, report);
        self.admit(loaded, report);
        self.restore_on_the_way(loaded, report);
        self.compose(loaded.model.can_rewind());
        if self.batch.len() > 0 {
            if let Err(message) = loaded.context.decode(&mut self.batch) {
                self.fail_batch(loaded, &message, report);
                return;
            }
            self.pick_tokens(loaded, report);
        }
        self.fail_refused(loaded, report);
        self.tell(loaded, report);
        self.write_saves(loaded, report);
    }

    // ---- one batch ----

    fn compose(&mut self, aligned: bool) {
        self.batch.clear();
        let computing = |running: &Running| running.finish.is_none() && !running.stopped;
        let decoding = |running: &Running| !running.generated.is_empty() && computing(running);
        let mixed = self.slots.iter().flatten().any(decoding);
        let mut budget = if mixed { MIXED_PREFILL_TOKENS } else { BATCH_TOKENS_MAX as usize };
        let shares = self.prefill_shares(&mut budget, aligned);
        for (sequence, slot) in self.slots.iter_mut().enumerate() {
            match slot.as_mut() {
                Some(running) if decoding(running) => {
                    let position = running.cached();
                    let token = running.generated[running.generated.len() - 1];
                    running.output = Some(self.batch.add(token, position, sequence, true));
                }
                Some(running) if computing(running) => {
                    let Some(generation) = self.all.get(&running.request) else { continue };
                    let begin = running.prefilled;
                    let end = begin + shares[sequence];
                    for (position, token) in generation.prompt.iter().enumerate().take(end).skip(begin) {
                        let last = position + 1 == generation.prompt.len();
                        let index = self.batch.add(*token, position, sequence, last);
                        if last {
                            running.output = Some(index);
                        }
                    }
                    running.prefilled = end;
                }
                _ => {}
            }
        }
    }

    /// How many prompt tokens each sequence computes in this step: oldest request first, in whole multiples.
    fn prefill_shares(&self, budget: &mut usize, aligned: bool) -> Vec<usize> {
        let mut shares = vec![0; self.slots.len()];
        let mut order: Vec<(u64, usize, usize)> = Vec::new();
        for (sequence, slot) in self.slots.iter().enumerate() {
            let Some(running) = slot else { continue };
            let prompt = self.all.get(&running.request).map_or(0, |generation| generation.prompt.len());
            if running.finish.is_none() && !running.stopped && running.prefilled < prompt {
                order.push((running.request, sequence, prompt - running.prefilled));
            }
        }
        order.sort_unstable();
        for (_, sequence, left) in order {
            let whole = left.min(*budget) / PREFILL_MULTIPLE * PREFILL_MULTIPLE;
            let rest = if aligned { left < PREFILL_MULTIPLE } else { true };
            let share = if left <= *budget && rest { left } else { whole };
            shares[sequence] = share;
            *budget -= share;
        }
        shares
    }

    fn fail_batch(&mut self, loaded: &mut Loaded, message: &str, report: Report<'_>) {
        let mut requests: Vec<u64> = self.slots.iter().flatten().map(|running| running.request).collect();
        requests.dedup();
        for request in requests {
            self.fail(loaded, request, Refusal::internal(format!("the computation failed: {message}")), report);
        }
    }

    // ---- what came out ----

    fn pick_tokens(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        let (mut broken, mut computed) = (Vec::new(), Vec::new());
        for (sequence, slot) in self.slots.iter_mut().enumerate() {
            let Some(running) = slot.as_mut() else { continue };
            let Some(output) = running.output.take() else { continue };
            let Some(generation) = self.all.get_mut(&running.request) else { continue };
            let Some(logits) = loaded.context.logits(output) else {
                broken.push(running.request);
                continue;
            };
            if running.generated.is_empty() {
                computed.push(sequence);
                if generation.is_waiting() && generation.first_logits.is_none() {
                    generation.first_logits = Some(logits.to_vec());
                }
            }
            match running.pick(loaded, logits, &mut self.candidates, &generation.job.output) {
                Ok(token) => take_token(loaded, generation, running, token, &mut self.pieces),
                Err(refusal) => generation.refusal = Some(refusal),
            }
        }
        for sequence in computed {
            self.offer_early(sequence, report);
        }
        for request in broken {
            self.fail(loaded, request, Refusal::internal(NOT_A_NUMBER), report);
        }
    }

    /// Ends requests that cannot go on.
    fn fail_refused(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        let mut refused = Vec::new();
        for generation in self.all.values_mut() {
            refused.extend(generation.refusal.take().map(|refusal| (generation.request, refusal)));
        }
        for (request, refusal) in refused {
            self.fail(loaded, request, refusal, report);
        }
    }

    /// Sends text, ends what is complete, and hands sequences on.
    fn tell(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        for sequence in 0..self.slots.len() {
            let Some(running) = self.slots[sequence].as_mut() else { continue };
            let (request, choice, finish) = (running.request, running.choice, running.finish);
            let Some(generation) = self.all.get_mut(&request) else { continue };
            if generation.job.stream || finish.is_some() {
                let tokens = running.logprobs.take(&running.filter);
                if !tokens.is_empty() {
                    report(FromEngine::Logprobs { request, choice, tokens });
                }
                running.tell_text(report);
            }
            let Some(finish) = finish else { continue };
            let stop_text = running.filter.stop_text();
            let called = running.calls.as_ref().is_some_and(CallParser::has_called);
            let finish = match finish {
                FinishReason::Stop if called && stop_text.is_none() => FinishReason::ToolCalls,
                other => other,
            };
            if let Some(text) = stop_text {
                report(FromEngine::StopText { request, choice, text });
            }
            report(FromEngine::ChoiceDone { request, choice, finish });
            generation.choices_done[choice as usize] = true;
            self.hand_on(loaded, sequence, report);
        }
    }

    /// A choice is complete: the next one of its request goes on from the prompt where it lies, or all stays.
    fn hand_on(&mut self, loaded: &mut Loaded, sequence: usize, report: Report<'_>) {
        let Some(running) = self.slots[sequence].take() else { return };
        let request = running.request;
        let Some(mut generation) = self.all.remove(&request) else { return };
        let prompt_tokens = generation.prompt.len();
        let more = generation.is_waiting() && generation.first_logits.is_some();
        let whole = running.prefilled == prompt_tokens && loaded.model.can_rewind();
        let goes_on = more && whole && self.cut(loaded, sequence, prompt_tokens);
        if !goes_on {
            self.keep(loaded, sequence, &running, &mut generation, report);
        }
        if generation.is_done() {
            generation.settle_grant(report);
            report(done(&generation));
            return;
        }
        self.all.insert(request, generation);
        if goes_on {
            self.start_choice(loaded, request, sequence, prompt_tokens);
        }
    }
}

fn done(generation: &Generation) -> FromEngine {
    let clock = &generation.clock;
    FromEngine::Done {
        request: generation.request,
        usage: Usage {
            prompt_tokens: generation.prompt.len() as u32,
            completion_tokens: generation.completion_tokens,
            cached_tokens: generation.cached_tokens,
        },
        timings: Timings {
            first_token_seconds: Clock::between(Some(clock.received), clock.first_token),
            prefill_seconds: Clock::between(clock.prefill_begin, clock.first_token),
            decode_seconds: Clock::between(clock.first_token, clock.last_token),
        },
    }
}

/// The message of a failed request.
pub(super) fn failed(request: u64, refusal: Refusal) -> FromEngine {
    let Refusal { kind, message, param } = refusal;
    FromEngine::Failed { request, kind, message, param: param.map(str::to_owned) }
}
