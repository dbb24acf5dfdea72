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
    calls::CallParser,
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
}

impl Running {
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
