//! One choice while it is generated.

use super::{
    super::{
        load::Loaded,
        logprobs::PendingLogprobs,
        request::{Generation, Refusal, grammar_param},
        sampler::{Candidates, Sampler},
        sys::Token,
        text::TextFilter,
    },
    NOT_A_NUMBER,
};
use crate::{
    calls::{CallParser, may_call},
    port::Report,
    protocol::{FinishReason, FromEngine, Output},
};
use std::time::Instant;
use warmset_grammar::{Constraint, GrammarError};

/// One choice on its sequence.
pub(super) struct Running {
    pub(super) request: u64,
    pub(super) choice: u32,
    /// Tokens of the prompt that are computed, up to all of them.
    pub(super) prefilled: usize,
    /// Generated tokens, the last of which is not computed yet.
    pub(super) generated: Vec<Token>,
    pub(super) sampler: Sampler,
    pub(super) filter: TextFilter,
    pub(super) logprobs: PendingLogprobs,
    /// What it is held to.
    pub(super) constraint: Option<Constraint>,
    /// Finds calls of functions in its text.
    pub(super) calls: Option<CallParser>,
    /// Where in the current batch its logits are.
    pub(super) output: Option<usize>,
    pub(super) finish: Option<FinishReason>,
    /// It is to leave: nothing of it is computed.
    pub(super) stopped: bool,
}

/// Tokens that a choice of a request may have.
pub(super) fn tokens_max(loaded: &Loaded, generation: &Generation) -> u32 {
    let room = loaded.info.context_tokens.saturating_sub(generation.prompt.len() as u32);
    generation.job.max_tokens.unwrap_or(room).min(room)
}

impl Running {
    /// A choice that begins with so many tokens of its prompt computed.
    pub(super) fn new(loaded: &Loaded, generation: &Generation, choice: u32, prefilled: usize) -> Self {
        let (job, tokens_max) = (&generation.job, tokens_max(loaded, generation));
        let seed = generation.seed.wrapping_add(u64::from(choice));
        Self {
            request: generation.request,
            choice,
            prefilled,
            generated: Vec::new(),
            sampler: Sampler::new(&loaded.model, &job.sampling, seed, &generation.prompt, tokens_max),
            filter: TextFilter::new(&job.stop),
            logprobs: PendingLogprobs::default(),
            constraint: generation.constraint.clone(),
            calls: may_call(job.output.tools.as_ref()).then(CallParser::new),
            output: None,
            finish: None,
            stopped: false,
        }
    }

    /// How many tokens are in the cache.
    pub(super) fn cached(&self) -> usize {
        self.prefilled + self.generated.len().saturating_sub(1)
    }

    /// Tokens in the cache: of the prompt, then generated ones.
    pub(super) fn computed<'a>(&'a self, prompt: &'a [Token]) -> [&'a [Token]; 2] {
        [&prompt[..self.prefilled], &self.generated[..self.cached() - self.prefilled]]
    }

    /// Picks its next token, which keeps to what it is held to.
    pub(super) fn pick(
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
    pub(super) fn tell_text(&mut self, report: Report<'_>) {
        let (request, choice, last) = (self.request, self.choice, self.finish.is_some());
        match &mut self.calls {
            Some(calls) => calls.push(&self.filter.take(), last, (request, choice)).into_iter().for_each(report),
            None if self.filter.is_empty() => {}
            None => report(FromEngine::Delta { request, choice, text: self.filter.take() }),
        }
    }
}

/// Writes the text of a token; marks of calls are text only where calls are looked for.
pub(super) fn text_of(loaded: &Loaded, has_calls: bool, token: Token, pieces: &mut Vec<u8>) {
    pieces.clear();
    let is_mark = has_calls && loaded.words().is_ok_and(|words| words.is_mark(token));
    loaded.model.append_piece(token, is_mark, pieces);
}

/// Takes a picked token into a choice: text, end, limits.
pub(super) fn take_token(
    loaded: &Loaded,
    generation: &mut Generation,
    running: &mut Running,
    token: Token,
    pieces: &mut Vec<u8>,
) {
    let now = Instant::now();
    generation.clock.token(now);
    generation.completion_tokens += 1;
    running.generated.push(token);
    let ended = loaded.model.is_end(token) && !generation.job.ignore_end;
    let mut stopped = false;
    if !ended {
        text_of(loaded, running.calls.is_some(), token, pieces);
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
