//! One engine, step by step: which sequences each step computes, and the memory they take.
//!
//! The rules are those of vLLM's scheduler (version 1): a step has a budget of tokens. Sequences that run get theirs
//! first, in the order in which they were taken up: one token each while they generate, as much of the prompt as fits
//! while they read. Memory is taken for these tokens, a page at a time; where there is none, the sequence that was
//! taken up last gives its pages back and begins again later, reading its prompt and what it had written (preemption by
//! recomputation). What is left of the budget goes to those that wait, in their order, until a prompt does not fit
//! whole, unless somebody had to give way in this step or there is no memory for the first of them. Where some
//! generate, prompts may get less than the budget (llama.cpp's engine here does that). Of a prompt whose first chunks
//! are there, only the rest is read, at least one token.
//!
//! Steps in which nobody comes, ends or runs out of memory are alike: each sequence gets one token more. They are taken
//! in one go, as [`Run`], which an arrival cuts at the end of the step it falls into. Differences from that scheduler:
//! a chunk counts as computed at the end of its step, so that two prompts in one step do not share; no pages are kept
//! back for later.

use super::{
    blocks::Blocks,
    cost::{Picoseconds, StepCost, StepShape, TIME_MAX, pairs},
    outcome::{NOT_YET, Outcomes},
    workload::Workload,
};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The most steps that are taken in one go.
const RUN_STEPS_MAX: u64 = 1 << 20;

/// What an engine is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSettings {
    /// Tokens of a step, at least as many as sequences.
    pub step_tokens: u32,
    /// Sequences at a time.
    pub max_sequences: u32,
    /// Of a step's tokens, those of prompts where somebody generates: fewer keep the times between tokens short.
    pub prefill_tokens_beside: u32,
    /// Tokens of a page.
    pub block_tokens: u32,
    /// Pages.
    pub blocks: u64,
    /// Whether prompts that begin alike share what is there.
    pub prefix_cache: bool,
}

impl EngineSettings {
    fn blocks_for(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.block_tokens))
    }

    /// How many of so many tokens a step takes of one sequence, after what it has taken of others.
    fn share(&self, tokens: u32, generates: bool, budget: u32, taken: &StepShape) -> u32 {
        let alone = generates || taken.sequences == 0;
        let beside = u64::from(self.prefill_tokens_beside).saturating_sub(taken.prefill_tokens);
        let most = if alone { u64::from(budget) } else { beside.min(u64::from(budget)) };
        u64::from(tokens).min(most) as u32
    }

    /// Whether one that has so many tokens at its end fits at all: its last token's KV is never computed.
    pub fn fits(&self, prompt_tokens: u32, output_tokens: u32) -> bool {
        self.blocks_for(prompt_tokens.saturating_add(output_tokens - 1)) <= self.blocks
    }
}

/// A request that waits, perhaps again.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    request: u32,
    emitted: u32,
    last_token: Picoseconds,
}

/// A request that runs.
#[derive(Debug, Clone, Copy)]
struct Sequence {
    request: u32,
    /// Tokens of its prompt and those it has written.
    known: u32,
    /// Tokens whose KV is there.
    computed: u32,
    emitted: u32,
    /// Tokens still to be written.
    left: u32,
    /// Chunks of its prompt that it holds, from the first on.
    shared: u32,
    /// Pages of its own.
    own: u64,
    /// Tokens of the step on the way.
    scheduled: u32,
    /// When it wrote its last token, if it has had to begin again since.
    last_token: Picoseconds,
}

/// Steps on the way that are alike, often just one.
#[derive(Debug, Clone, Copy)]
struct Run {
    began: Picoseconds,
    ends: Picoseconds,
    shape: StepShape,
    steps: u64,
    /// Somebody who comes would be taken up after the step on the way.
    open: bool,
}

/// One engine.
#[derive(Debug)]
pub struct Engine {
    settings: EngineSettings,
    cost: StepCost,
    chunk_tokens: u32,
    blocks: Blocks,
    waiting: VecDeque<Waiting>,
    running: Vec<Sequence>,
    run: Option<Run>,
}

impl Engine {
    /// One that has nothing to do, for prompts that are known by chunks of so many tokens, or not at all (0).
    pub fn new(settings: EngineSettings, cost: StepCost, chunk_tokens: u32) -> Self {
        let chunk_tokens = if settings.prefix_cache { chunk_tokens } else { 0 };
        let blocks = Blocks::new(settings.blocks, settings.blocks_for(chunk_tokens));
        Self { settings, cost, chunk_tokens, blocks, waiting: VecDeque::new(), running: Vec::new(), run: None }
    }

    /// Requests it has.
    pub fn requests(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// When the steps on the way end.
    pub fn ends(&self) -> Option<Picoseconds> {
        self.run.map(|run| run.ends)
    }

    /// Chunks of this prompt that are there, from the first on.
    pub fn found(&self, workload: &Workload, request: u32) -> usize {
        if self.chunk_tokens == 0 { 0 } else { self.blocks.found(workload.chunks(request)) }
    }

    /// A request comes; it must fit. Steps on the way are cut where they are to be looked at again.
    pub fn push(&mut self, now: Picoseconds, request: u32) {
        self.waiting.push_back(Waiting { request, emitted: 0, last_token: NOT_YET });
        if let Some(run) = self.run.as_mut().filter(|run| run.open && run.steps > 1) {
            run.steps = self.cost.alike_until_after(&run.shape, run.steps, now - run.began);
            run.ends = (run.began + self.cost.of_alike(&run.shape, run.steps)).min(TIME_MAX);
            run.open = false;
        }
    }

    /// Begins what comes next, if anything.
    pub fn begin(&mut self, now: Picoseconds, workload: &Workload, outcomes: &mut Outcomes) {
        let mut shape = StepShape::default();
        let mut budget = self.settings.step_tokens;
        let gave_way = self.schedule_running(now, &mut budget, &mut shape, workload, outcomes);
        if !gave_way {
            self.admit(now, &mut budget, &mut shape, workload, outcomes);
        }
        self.run = (!self.running.is_empty()).then(|| {
            let alike = !gave_way && shape.prefill_tokens == 0;
            let steps = if alike { self.steps_alike() } else { 1 };
            let ends = (now + self.cost.of_alike(&shape, steps)).min(TIME_MAX);
            let open = self.waiting.is_empty() && self.running.len() < self.settings.max_sequences as usize;
            Run { began: now, ends, shape, steps, open }
        });
    }

    /// Tokens and memory for those that run; whether somebody had to give way.
    fn schedule_running(
        &mut self,
        now: Picoseconds,
        budget: &mut u32,
        shape: &mut StepShape,
        workload: &Workload,
        outcomes: &mut Outcomes,
    ) -> bool {
        let mut gave_way = false;
        let mut at = 0;
        while at < self.running.len() {
            let Sequence { known, computed, emitted, own, shared, .. } = self.running[at];
            let generates = emitted > 0 && known - computed == 1;
            let scheduled = self.settings.share(known - computed, generates, *budget, shape);
            let held = own + u64::from(shared) * self.settings.blocks_for(self.chunk_tokens);
            let more = self.settings.blocks_for(computed + scheduled) - held;
            if !self.blocks.take(more) {
                gave_way = true;
                self.give_way(now, workload);
                outcomes.preemptions += 1;
                continue;
            }
            let sequence = &mut self.running[at];
            sequence.own += more;
            sequence.scheduled = scheduled;
            *budget -= scheduled;
            add(shape, sequence);
            at += 1;
        }
        gave_way
    }

    /// The sequence that was taken up last gives its memory back and waits, before all others.
    fn give_way(&mut self, now: Picoseconds, workload: &Workload) {
        let Some(sequence) = self.running.pop() else { return };
        self.release(&sequence, workload);
        let generates = sequence.known - sequence.computed == 1 && sequence.emitted > 0;
        let last_token = if generates && sequence.last_token == NOT_YET { now } else { sequence.last_token };
        self.waiting.push_front(Waiting { request: sequence.request, emitted: sequence.emitted, last_token });
    }

    fn release(&mut self, sequence: &Sequence, workload: &Workload) {
        let chunks = &workload.chunks(sequence.request)[..sequence.shared as usize];
        self.blocks.release(chunks, sequence.own);
    }

    /// What is left of the budget goes to those that wait.
    fn admit(
        &mut self,
        now: Picoseconds,
        budget: &mut u32,
        shape: &mut StepShape,
        workload: &Workload,
        outcomes: &mut Outcomes,
    ) {
        while *budget > 0 && self.running.len() < self.settings.max_sequences as usize {
            let Some(Waiting { request, emitted, last_token }) = self.waiting.front().copied() else { break };
            let asked = workload.request(request);
            let known = asked.prompt_tokens + emitted;
            let chunks = self.usable(known, workload.chunks(request));
            let found = &chunks[..self.blocks.found(chunks)];
            let computed = found.len() as u32 * self.chunk_tokens;
            let generates = emitted > 0 && known - computed == 1;
            let scheduled = self.settings.share(known - computed, generates, *budget, shape);
            if scheduled == 0 {
                break;
            }
            let own = self.settings.blocks_for(computed + scheduled) - self.settings.blocks_for(computed);
            if self.blocks.available_beside(found) < own {
                break;
            }
            self.blocks.hold(found);
            self.blocks.take(own);
            self.waiting.pop_front();
            let outcome = outcomes.request(request);
            if outcome.admitted == NOT_YET {
                outcome.admitted = now;
                outcomes.looked_up_tokens += u64::from(known);
                outcomes.found_tokens += u64::from(computed);
            }
            let left = asked.output_tokens - emitted;
            let shared = found.len() as u32;
            let sequence = Sequence { request, known, computed, emitted, left, shared, own, scheduled, last_token };
            *budget -= scheduled;
            add(shape, &sequence);
            self.running.push(sequence);
            if scheduled < known - computed {
                break;
            }
        }
    }

    /// The chunks that may be taken over: one token is always computed.
    fn usable<'a, T>(&self, known: u32, chunks: &'a [T]) -> &'a [T] {
        let most = (known - 1).checked_div(self.chunk_tokens).unwrap_or(0) as usize;
        &chunks[..chunks.len().min(most)]
    }

    /// How many steps are like the one that was scheduled, in which all generate: until one ends or memory does. While
    /// somebody waits, that is before a chunk has to leave: without it he may have to read more, but need less memory
    /// at first.
    fn steps_alike(&self) -> u64 {
        let until_end = self.running.iter().map(|sequence| u64::from(sequence.left)).min().unwrap_or(1);
        let mut steps = until_end.clamp(1, RUN_STEPS_MAX);
        let available = if self.waiting.is_empty() { self.blocks.available() } else { self.blocks.free() };
        let count = self.running.len() as u64;
        // Each needs one page more than its whole ones at most: mostly that is enough to know.
        if count * (steps / u64::from(self.settings.block_tokens) + 1) > available {
            let (mut least, mut most) = (1, steps);
            while least < most {
                let middle = least + (most - least).div_ceil(2);
                if self.blocks_more(middle) <= available { least = middle } else { most = middle - 1 }
            }
            steps = least;
        }
        steps
    }

    /// Pages that so many steps of generating take beyond those of the first.
    fn blocks_more(&self, steps: u64) -> u64 {
        self.running.iter().map(|sequence| self.blocks_of_one_more(sequence, steps)).sum()
    }

    fn blocks_of_one_more(&self, sequence: &Sequence, steps: u64) -> u64 {
        let after = |steps: u32| self.settings.blocks_for(sequence.computed + steps);
        after(steps as u32) - after(1)
    }

    /// The steps on the way are over.
    pub fn end(&mut self, workload: &Workload, outcomes: &mut Outcomes) -> usize {
        let Some(run) = self.run.take() else { return 0 };
        outcomes.steps += run.steps;
        outcomes.ended = run.ends;
        let used = if run.shape.prefill_tokens == 0 {
            self.end_alike(&run, outcomes)
        } else {
            self.end_mixed(&run, workload, outcomes)
        };
        outcomes.memory(run.ends - run.began, used);
        let before = self.running.len();
        let mut running = std::mem::take(&mut self.running);
        running.retain(|sequence| {
            if sequence.left == 0 {
                self.release(sequence, workload);
                outcomes.request(sequence.request).finished = run.ends;
            }
            sequence.left > 0
        });
        self.running = running;
        before - self.running.len()
    }

    /// Share of the pages that sequences hold.
    fn used_share(&self) -> f64 {
        (self.blocks.total() - self.blocks.available()) as f64 / self.blocks.total() as f64
    }

    /// Steps in which everybody generated.
    fn end_alike(&mut self, run: &Run, outcomes: &mut Outcomes) -> f64 {
        let mut fresh = self.running.len() as u64;
        let mut more = 0;
        for at in 0..self.running.len() {
            let own = self.blocks_of_one_more(&self.running[at], run.steps);
            let sequence = &mut self.running[at];
            sequence.computed += run.steps as u32;
            sequence.known += run.steps as u32;
            sequence.emitted += run.steps as u32;
            sequence.left -= run.steps as u32;
            sequence.own += own;
            more += own;
            if sequence.last_token != NOT_YET {
                // It comes back with no more to read than what it would have generated from.
                let first = run.began + self.cost.of(&run.shape);
                outcomes.gap(first - std::mem::replace(&mut sequence.last_token, NOT_YET), 1);
                fresh -= 1;
            }
        }
        self.blocks.take(more);
        let (first, growth) = (self.cost.of(&run.shape), self.cost.growth(&run.shape));
        outcomes.gaps_alike(first, growth, run.steps, fresh);
        let again = self.running.len() as u64 - fresh;
        outcomes.gaps_alike(first + growth, growth, run.steps - 1, again);
        self.used_share()
    }

    /// A step in which somebody read.
    fn end_mixed(&mut self, run: &Run, workload: &Workload, outcomes: &mut Outcomes) -> f64 {
        let chunk_blocks = self.settings.blocks_for(self.chunk_tokens);
        let mut gaps = 0;
        for sequence in &mut self.running {
            sequence.computed += sequence.scheduled;
            let chunks = workload.chunks(sequence.request);
            let whole = sequence.computed.checked_div(self.chunk_tokens).unwrap_or(0).min(chunks.len() as u32);
            for chunk in &chunks[sequence.shared as usize..whole.max(sequence.shared) as usize] {
                self.blocks.publish(*chunk);
                sequence.own -= chunk_blocks;
                sequence.shared += 1;
            }
            if sequence.computed < sequence.known {
                continue;
            }
            if sequence.emitted == 0 {
                outcomes.request(sequence.request).first_token = run.ends;
            } else if sequence.last_token == NOT_YET {
                gaps += 1;
            } else {
                outcomes.gap(run.ends - std::mem::replace(&mut sequence.last_token, NOT_YET), 1);
            }
            sequence.known += 1;
            sequence.emitted += 1;
            sequence.left -= 1;
        }
        outcomes.gap(run.ends - run.began, gaps);
        self.used_share()
    }

    /// Whether no page and no token is lost or counted twice.
    pub fn check(&self) -> bool {
        let own = self.running.iter().map(|sequence| sequence.own).sum();
        let chunk_blocks = self.settings.blocks_for(self.chunk_tokens);
        let sequence = |sequence: &Sequence| {
            let held = sequence.own + u64::from(sequence.shared) * chunk_blocks;
            let tokens = sequence.computed + if self.run.is_some() { sequence.scheduled } else { 0 };
            held == self.settings.blocks_for(tokens) && sequence.computed < sequence.known && sequence.left > 0
        };
        self.blocks.check(own)
            && self.running.iter().all(sequence)
            && self.running.len() <= self.settings.max_sequences as usize
    }
}

/// A sequence's tokens of a step.
fn add(shape: &mut StepShape, sequence: &Sequence) {
    let Sequence { known, computed, scheduled, emitted, .. } = *sequence;
    let (known, computed, scheduled) = (u64::from(known), u64::from(computed), u64::from(scheduled));
    if emitted > 0 && known - computed == 1 {
        shape.sequences += 1;
        shape.context_tokens += known;
    } else {
        shape.prefill_tokens += scheduled;
        shape.prefill_pairs += pairs(scheduled, computed);
    }
}
