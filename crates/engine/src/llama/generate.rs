//! Continuous batching: every step is one batch with the next token of each running choice and a piece of a prompt.
//!
//! Each sequence has cells of its own (`kv_unified` off): attention then reads a choice's own history only, and what
//! stays in an idle sequence costs the others nothing. docs/adr/0002-llama-cpp-sys.md has the measurements.

use super::{
    context::{BATCH_TOKENS_MAX, Batch},
    load::Loaded,
    logprobs::PendingLogprobs,
    request::{Clock, Generation, Refusal, grammar_param},
    sampler::{Candidates, Sampler},
    sys::Token,
    text::TextFilter,
};
use crate::{
    calls::{CallParser, may_call},
    port::Report,
    protocol::{FinishReason, FromEngine, Output, Timings, Usage},
};
use std::{collections::BTreeMap, time::Instant};
use warmset_grammar::{Constraint, GrammarError};

/// Prompt tokens in one batch while choices are being decoded: what they wait for in between.
const MIXED_PREFILL_TOKENS: usize = 128;
/// Below this many tokens llama.cpp's attention takes another path, which is slower and rounds differently. Prompts
/// are cut in multiples of it.
const PREFILL_MULTIPLE: usize = 64;

const NOT_A_NUMBER: &str = "the model's output is not a number; its weights may be damaged";

/// One choice on its sequence.
struct Running {
    request: u64,
    choice: u32,
    /// Tokens of the prompt that are computed, up to all of them.
    prefilled: usize,
    /// Generated tokens, the last of which is not computed yet.
    generated: Vec<Token>,
    sampler: Sampler,
    filter: TextFilter,
    logprobs: PendingLogprobs,
    /// What it is held to.
    constraint: Option<Constraint>,
    /// Finds calls of functions in its text.
    calls: Option<CallParser>,
    /// Where in the current batch its logits are.
    output: Option<usize>,
    finish: Option<FinishReason>,
}

impl Running {
    /// Tokens in the cache.
    fn cached(&self) -> usize {
        self.prefilled + self.generated.len().saturating_sub(1)
    }

    /// Picks its next token, which keeps to what it is held to.
    fn pick(
        &mut self,
        loaded: &Loaded,
        logits: &[f32],
        candidates: &mut Candidates,
        output: &Output,
    ) -> Result<Token, Refusal> {
        let unkept = |error: GrammarError| Refusal::invalid(grammar_param(output), error.to_string());
        if let Some(constraint) = &mut self.constraint {
            constraint.look().map_err(unkept)?;
        }
        let picked = self.sampler.pick(logits, candidates, self.constraint.as_ref());
        let token = picked.ok_or_else(|| Refusal::internal(NOT_A_NUMBER))?;
        if let Some(constraint) = &mut self.constraint {
            constraint.take(token as u32).map_err(unkept)?;
        }
        if let Some(top) = output.logprobs {
            self.logprobs.push(&loaded.model, logits, token, top);
        }
        Ok(token)
    }

    /// Sends the text that may be shown.
    fn tell_text(&mut self, report: Report<'_>) {
        let (request, choice, last) = (self.request, self.choice, self.finish.is_some());
        match &mut self.calls {
            Some(calls) => calls.push(&self.filter.take(), last, (request, choice)).into_iter().for_each(report),
            None if self.filter.is_empty() => {}
            None => report(FromEngine::Delta { request, choice, text: self.filter.take() }),
        }
    }
}

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
    /// A sequence is wanted for something else: start no more choices until it was had.
    pub(super) hold: bool,
}

impl Generations {
    pub(super) fn new(sequences: u32) -> Self {
        Self { slots: (0..sequences).map(|_| None).collect(), ..Self::default() }
    }

    /// Takes a tokenised generation, which then waits for its grant.
    pub(super) fn add(&mut self, generation: Generation) {
        self.waiting_order.push(generation.request);
        self.all.insert(generation.request, generation);
    }

    pub(super) fn grant(&mut self, request: u64) {
        if let Some(generation) = self.all.get_mut(&request) {
            generation.granted = true;
        }
    }

    pub(super) fn has_work(&self) -> bool {
        self.slots.iter().any(Option::is_some) || (!self.hold && self.all.values().any(Generation::is_waiting))
    }

    /// A sequence that nobody uses.
    pub(super) fn free_sequence(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    /// Ends a request at once and says so.
    pub(super) fn cancel(&mut self, loaded: &mut Loaded, request: u64, report: Report<'_>) {
        let Some(generation) = self.all.remove(&request) else { return };
        self.free_slots_of(loaded, request);
        for (choice, done) in generation.choices_done.iter().enumerate() {
            if !done {
                report(FromEngine::ChoiceDone { request, choice: choice as u32, finish: FinishReason::Cancelled });
            }
        }
        report(done(&generation));
    }

    fn fail(&mut self, loaded: &mut Loaded, request: u64, refusal: Refusal, report: Report<'_>) {
        self.free_slots_of(loaded, request);
        if self.all.remove(&request).is_some() {
            report(failed(request, refusal));
        }
    }

    fn free_slots_of(&mut self, loaded: &mut Loaded, request: u64) {
        self.waiting_order.retain(|waiting| *waiting != request);
        for sequence in 0..self.slots.len() {
            if self.slots[sequence].as_ref().is_some_and(|running| running.request == request) {
                self.slots[sequence] = None;
                loaded.context.forget(sequence as i32, 0);
            }
        }
    }

    /// One step: start what can start, compute one batch, pick tokens, tell.
    pub(super) fn step(&mut self, loaded: &mut Loaded, report: Report<'_>) {
        self.admit(loaded);
        self.compose();
        if self.batch.len() > 0 {
            if let Err(message) = loaded.context.decode(&mut self.batch) {
                self.fail_batch(loaded, &message, report);
                return;
            }
            self.pick_tokens(loaded, report);
        }
        self.fail_refused(loaded, report);
        self.tell(loaded, report);
    }

    // ---- starting choices ----

    fn admit(&mut self, loaded: &mut Loaded) {
        if self.hold {
            return;
        }
        while let Some(sequence) = self.free_sequence() {
            let next = self.waiting_order.iter().copied().find(|request| self.can_start(*request));
            let Some(request) = next else { return };
            self.start_choice(loaded, request, sequence, false);
        }
    }

    /// Whether a request has a choice that can begin now. Choices after the first wait until the prompt is computed.
    fn can_start(&self, request: u64) -> bool {
        self.all.get(&request).is_some_and(|one| {
            one.is_waiting()
                && (one.choices_started == 0 || one.first_logits.is_some() || one.job.max_tokens == Some(0))
        })
    }

    /// Begins the next choice of a request on a free sequence, which may hold the prompt already.
    fn start_choice(&mut self, loaded: &mut Loaded, request: u64, sequence: usize, holds_prompt: bool) {
        let Some(generation) = self.all.get_mut(&request) else { return };
        let choice = generation.choices_started;
        generation.choices_started += 1;
        if !generation.is_waiting() {
            self.waiting_order.retain(|waiting| *waiting != request);
        }
        let prompt_tokens = generation.prompt.len();
        let room = loaded.info.context_tokens.saturating_sub(prompt_tokens as u32);
        let tokens_max = generation.job.max_tokens.unwrap_or(room).min(room);
        let seed = generation.seed.wrapping_add(u64::from(choice));
        let sampler = Sampler::new(&loaded.model, &generation.job.sampling, seed, &generation.prompt, tokens_max);
        let filter = TextFilter::new(&generation.job.stop);
        let mut running = Running {
            request,
            choice,
            prefilled: 0,
            generated: Vec::new(),
            sampler,
            filter,
            logprobs: PendingLogprobs::default(),
            constraint: generation.constraint.clone(),
            calls: may_call(generation.job.output.tools.as_ref()).then(CallParser::new),
            output: None,
            finish: None,
        };
        if tokens_max == 0 {
            running.finish = Some(FinishReason::Length);
            self.slots[sequence] = Some(running);
            return;
        }
        if holds_prompt || (choice > 0 && self.copy_prompt(loaded, request, prompt_tokens, sequence)) {
            running.prefilled = prompt_tokens;
            self.slots[sequence] = Some(running);
            self.pick_from_prompt(loaded, sequence);
            return;
        }
        if let Some(generation) = self.all.get_mut(&request) {
            generation.clock.prefill_begin.get_or_insert_with(Instant::now);
        }
        self.slots[sequence] = Some(running);
    }

    /// Copies a prompt that another choice of the request has computed. False if none can give it.
    fn copy_prompt(&self, loaded: &mut Loaded, request: u64, prompt_tokens: usize, sequence: usize) -> bool {
        let rewinds = loaded.model.can_rewind();
        let donor = self.slots.iter().position(|slot| {
            slot.as_ref().is_some_and(|other| {
                other.request == request
                    && other.prefilled == prompt_tokens
                    && (rewinds || other.cached() == prompt_tokens)
            })
        });
        let Some(donor) = donor else { return false };
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

    // ---- one batch ----

    fn compose(&mut self) {
        self.batch.clear();
        let decoding = |running: &Running| !running.generated.is_empty() && running.finish.is_none();
        let mixed = self.slots.iter().flatten().any(decoding);
        let mut budget = if mixed { MIXED_PREFILL_TOKENS } else { BATCH_TOKENS_MAX as usize };
        let shares = self.prefill_shares(&mut budget);
        for (sequence, slot) in self.slots.iter_mut().enumerate() {
            match slot.as_mut() {
                Some(running) if decoding(running) => {
                    let position = running.cached();
                    let token = running.generated[running.generated.len() - 1];
                    running.output = Some(self.batch.add(token, position, sequence, true));
                }
                Some(running) if running.finish.is_none() => {
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
    fn prefill_shares(&self, budget: &mut usize) -> Vec<usize> {
        let mut shares = vec![0; self.slots.len()];
        let mut order: Vec<(u64, usize, usize)> = Vec::new();
        for (sequence, slot) in self.slots.iter().enumerate() {
            let Some(running) = slot else { continue };
            let prompt = self.all.get(&running.request).map_or(0, |generation| generation.prompt.len());
            if running.finish.is_none() && running.prefilled < prompt {
                order.push((running.request, sequence, prompt - running.prefilled));
            }
        }
        order.sort_unstable();
        for (_, sequence, left) in order {
            let share = if left <= *budget { left } else { *budget / PREFILL_MULTIPLE * PREFILL_MULTIPLE };
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
        let mut broken = Vec::new();
        for slot in &mut self.slots {
            let Some(running) = slot.as_mut() else { continue };
            let Some(output) = running.output.take() else { continue };
            let Some(generation) = self.all.get_mut(&running.request) else { continue };
            let Some(logits) = loaded.context.logits(output) else {
                broken.push(running.request);
                continue;
            };
            if running.generated.is_empty() && generation.is_waiting() && generation.first_logits.is_none() {
                generation.first_logits = Some(logits.to_vec());
            }
            match running.pick(loaded, logits, &mut self.candidates, &generation.job.output) {
                Ok(token) => take_token(loaded, generation, running, token, &mut self.pieces),
                Err(refusal) => generation.refusal = Some(refusal),
            }
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
            let prompt_tokens = generation.prompt.len();
            let whole = running.prefilled == prompt_tokens;
            let more = generation.is_waiting() && generation.first_logits.is_some();
            if generation.is_done() {
                report(done(generation));
                self.all.remove(&request);
            }
            self.slots[sequence] = None;
            // The next choice of the same request can go on from the prompt where it lies.
            let rewinds = more && whole && loaded.model.can_rewind();
            if rewinds && loaded.context.forget(sequence as i32, prompt_tokens) {
                self.start_choice(loaded, request, sequence, true);
            } else {
                loaded.context.forget(sequence as i32, 0);
            }
        }
    }
}

/// Takes a picked token into a choice: text, end, limits.
fn take_token(loaded: &Loaded, generation: &mut Generation, running: &mut Running, token: Token, pieces: &mut Vec<u8>) {
    let now = Instant::now();
    generation.clock.token(now);
    generation.completion_tokens += 1;
    running.generated.push(token);
    let ended = loaded.model.is_end(token) && !generation.job.ignore_end;
    let mut stopped = false;
    if !ended {
        pieces.clear();
        let is_mark = running.calls.is_some() && loaded.words().is_ok_and(|words| words.is_mark(token));
        loaded.model.append_piece(token, is_mark, pieces);
        stopped = running.filter.push(pieces);
    }
    let complete = running.constraint.as_ref().is_some_and(Constraint::is_complete);
    let generated = running.generated.len();
    let full = generation.prompt.len() + generated >= loaded.info.context_tokens as usize;
    let limited = generation.job.max_tokens.is_some_and(|most| generated >= most as usize);
    running.finish = if ended || stopped || complete {
        Some(FinishReason::Stop)
    } else if full || limited {
        Some(FinishReason::Length)
    } else {
        None
    };
    if running.finish.is_some() {
        running.filter.finish();
    }
}

fn done(generation: &Generation) -> FromEngine {
    let clock = &generation.clock;
    FromEngine::Done {
        request: generation.request,
        usage: Usage {
            prompt_tokens: generation.prompt.len() as u32,
            completion_tokens: generation.completion_tokens,
            cached_tokens: 0,
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
