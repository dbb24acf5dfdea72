//! One generation of the synthetic engine: its prompt, its choices, its times.

use super::{
    kv::{Prefix, token},
    text::{self, StopFilter},
};
use crate::{
    calls::{CallParser, may_call},
    kv::{Ages, Parts},
    port::Report,
    protocol::{FinishReason, FromEngine, GenerateJob, Timings, Usage},
};
use std::time::{Duration, Instant};

/// A text ends by itself after at least this many tokens ...
const NATURAL_TOKENS_MIN: u32 = 16;
/// ... and before this many more.
const NATURAL_TOKENS_SPREAD: u64 = 48;

/// One choice.
#[derive(Debug)]
struct Sequence {
    text_seed: u64,
    generated: u32,
    /// Tokens after which the text ends by itself; none if the caller ignores that.
    natural_tokens: Option<u32>,
    filter: StopFilter,
    /// The whole text, when it is not streamed.
    whole: String,
    /// Finds calls of functions in the text.
    calls: Option<CallParser>,
    finished: bool,
}

/// One generation.
pub(super) struct Generation {
    pub(super) request: u64,
    pub(super) job: GenerateJob,
    pub(super) granted: bool,
    /// What it leaves behind; while there is any, nothing of it is computed.
    pub(super) leaving: Option<Parts<Vec<u8>>>,
    pub(super) prefill_left: u32,
    pub(super) prefix: Prefix,
    prompt_tokens: u32,
    /// Tokens per choice.
    tokens_max: u32,
    stream: bool,
    logprobs: Option<u32>,
    /// What every choice says, if that is not free.
    script: Option<Vec<String>>,
    sequences: Vec<Sequence>,
    received: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    prefill: Duration,
}

impl Generation {
    pub(super) fn new(
        request: u64,
        job: GenerateJob,
        (prompt, tokens): (&[u8], Vec<u32>),
        context_tokens: u32,
        script: Option<Vec<String>>,
    ) -> Self {
        let prompt_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let scripted = script.as_ref().map(|script| u32::try_from(script.len()).unwrap_or(u32::MAX));
        let room = context_tokens.saturating_sub(prompt_tokens);
        // Greedy text does not depend on the seed.
        let seed = if job.sampling.temperature > 0.0 { job.sampling.seed.unwrap_or(0) } else { 0 };
        let spread = u64::from(job.sampling.temperature > 0.0);
        let sequences = (0..u64::from(job.choices.max(1)))
            .map(|choice| {
                let text_seed = text::hash(&[prompt, &(seed.wrapping_add(choice * spread)).to_le_bytes()]);
                let more = u32::try_from(text_seed % NATURAL_TOKENS_SPREAD).unwrap_or(0);
                Sequence {
                    text_seed,
                    generated: 0,
                    natural_tokens: scripted.or((!job.ignore_end).then_some(NATURAL_TOKENS_MIN + more)),
                    filter: StopFilter::new(&job.stop),
                    whole: String::new(),
                    calls: may_call(job.output.tools.as_ref()).then(CallParser::new),
                    finished: false,
                }
            })
            .collect();
        Self {
            request,
            granted: false,
            leaving: None,
            prefill_left: prompt_tokens,
            prefix: Prefix { tokens, domain: job.kv_domain, ..Prefix::default() },
            prompt_tokens,
            tokens_max: job.max_tokens.unwrap_or(u32::MAX).min(room),
            stream: job.stream,
            logprobs: job.output.logprobs,
            script,
            job,
            sequences,
            received: Instant::now(),
            first_token: None,
            last_token: None,
            prefill: Duration::ZERO,
        }
    }

    /// Whether steps do something for it.
    pub(super) fn is_computed(&self) -> bool {
        self.granted && self.leaving.is_none()
    }

    /// When it came, and its first and last token.
    pub(super) fn ages(&self) -> Ages {
        Ages::of([Some(self.received), self.first_token, self.last_token, None])
    }

    /// Brings it to where it was after so many tokens; what it told then is not told again.
    pub(super) fn replay(&mut self, generated: u32, prefill_seconds: f64, ages: Ages) {
        for _ in 0..generated {
            self.decode(1, &mut |_| {});
        }
        let [received, first_token, last_token, _] = ages.moments();
        self.received = received.unwrap_or(self.received);
        (self.first_token, self.last_token) = (first_token, last_token);
        self.prefill = Duration::try_from_secs_f64(prefill_seconds).unwrap_or_default();
    }

    /// Seconds that its prompt took so far.
    pub(super) fn prefill_seconds(&self) -> f64 {
        self.prefill.as_secs_f64()
    }

    /// Tokens of its prompt.
    pub(super) fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Choices that were asked for.
    pub(super) fn choices(&self) -> usize {
        self.sequences.len()
    }

    /// Tokens of its longest choice.
    pub(super) fn longest(&self) -> u32 {
        self.sequences.iter().map(|sequence| sequence.generated).max().unwrap_or(0)
    }

    /// Tokens of its first choice that are computed: all but the last one.
    pub(super) fn computed(&self) -> Vec<u32> {
        let Some(first) = self.sequences.first() else { return Vec::new() };
        let words = (0..first.generated.saturating_sub(1)).map(|index| match &self.script {
            Some(script) => script.get(index as usize).cloned().unwrap_or_default(),
            None => text::piece(first.text_seed, index),
        });
        words.map(|word| token(word.trim())).collect()
    }

    /// Tokens whose state there is: of the prompt, then generated ones.
    pub(super) fn held(&self) -> Vec<u32> {
        let prefilled = self.prefix.tokens.len().saturating_sub(self.prefill_left as usize);
        [&self.prefix.tokens[..prefilled], &self.computed()].concat()
    }

    /// A part of the prompt was computed.
    pub(super) fn prefilled(&mut self, tokens: u32, took: Duration) {
        self.prefill_left = self.prefill_left.saturating_sub(tokens);
        self.prefill += took;
    }

    /// One token for at most `free` unfinished choices; returns for how many.
    pub(super) fn decode(&mut self, free: u32, report: Report<'_>) -> u32 {
        let mut used = 0;
        for (choice, sequence) in (0..).zip(&mut self.sequences) {
            if sequence.finished || used == free {
                continue;
            }
            used += 1;
            let mut shown = String::new();
            if sequence.generated < self.tokens_max {
                let scripted = self.script.as_ref().and_then(|script| script.get(sequence.generated as usize));
                let piece = scripted.cloned().unwrap_or_else(|| text::piece(sequence.text_seed, sequence.generated));
                shown = sequence.filter.push(if self.script.is_some() && scripted.is_none() { "" } else { &piece });
                sequence.generated += 1;
                let now = Instant::now();
                self.first_token.get_or_insert(now);
                self.last_token = Some(now);
            }
            let natural = sequence.natural_tokens.is_some_and(|tokens| sequence.generated >= tokens);
            let finish = if sequence.filter.stopped().is_some() || natural {
                Some(FinishReason::Stop)
            } else {
                (sequence.generated >= self.tokens_max).then_some(FinishReason::Length)
            };
            if finish.is_some() {
                shown.push_str(&sequence.filter.finish());
            }
            if !self.stream {
                sequence.whole.push_str(&shown);
                shown = if finish.is_some() { std::mem::take(&mut sequence.whole) } else { String::new() };
            }
            if let Some(top) = self.logprobs.filter(|_| !shown.is_empty()) {
                let tokens = text::logprobs(&shown, top);
                report(FromEngine::Logprobs { request: self.request, choice, tokens });
            }
            if let Some(calls) = &mut sequence.calls {
                calls.push(&shown, finish.is_some(), (self.request, choice)).into_iter().for_each(&mut *report);
            } else if !shown.is_empty() {
                report(FromEngine::Delta { request: self.request, choice, text: shown });
            }
            if let Some(finish) = finish {
                let called = sequence.calls.as_ref().is_some_and(CallParser::has_called);
                let stopped = sequence.filter.stopped().is_some();
                let is_call = called && finish == FinishReason::Stop && !stopped;
                let finish = if is_call { FinishReason::ToolCalls } else { finish };
                sequence.finished = true;
                if let Some(stop) = sequence.filter.stopped() {
                    report(FromEngine::StopText { request: self.request, choice, text: stop.to_owned() });
                }
                report(FromEngine::ChoiceDone { request: self.request, choice, finish });
            }
        }
        used
    }

    /// Whether all choices have ended.
    pub(super) fn is_done(&self) -> bool {
        self.sequences.iter().all(|sequence| sequence.finished)
    }

    /// Reports the end.
    pub(super) fn close(&mut self, report: Report<'_>) {
        self.prefix.settle(self.request, report);
        report(FromEngine::Done { request: self.request, usage: self.usage(), timings: self.timings() });
    }

    /// Ends what has not ended.
    pub(super) fn cancel(&mut self, report: Report<'_>) {
        for (choice, sequence) in (0..).zip(&mut self.sequences) {
            if !sequence.finished {
                sequence.finished = true;
                let finish = FinishReason::Cancelled;
                report(FromEngine::ChoiceDone { request: self.request, choice, finish });
            }
        }
        self.close(report);
    }

    fn usage(&self) -> Usage {
        let completion_tokens = self.sequences.iter().map(|sequence| sequence.generated).sum();
        Usage { prompt_tokens: self.prompt_tokens, completion_tokens, cached_tokens: self.prefix.cached.unwrap_or(0) }
    }

    fn timings(&self) -> Timings {
        let first = self.first_token.map_or(0.0, |first| (first - self.received).as_secs_f64());
        let decode = self.first_token.zip(self.last_token).map_or(0.0, |(first, last)| (last - first).as_secs_f64());
        Timings { first_token_seconds: first, prefill_seconds: self.prefill.as_secs_f64(), decode_seconds: decode }
    }
}
