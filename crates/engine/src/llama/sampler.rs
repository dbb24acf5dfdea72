//! Choosing the next token of one choice.

#![expect(unsafe_code, reason = "the C interface of llama.cpp")]

use super::sys::{Model, Token};
use crate::protocol::Sampling;
use llama_cpp_sys_2 as c;
use std::ptr::NonNull;
use warmset_grammar::Constraint;

/// Tokens that the repetition penalty looks back on, as in llama.cpp.
const REPEAT_TOKENS: usize = 64;

/// The seed by which llama.cpp means "choose one yourself".
const RANDOM_SEED: u32 = u32::MAX;

/// Candidates for the next token, one buffer for all choices of an engine.
pub(super) type Candidates = Vec<c::llama_token_data>;

/// How one choice picks its tokens. With temperature 0 and nothing else it is a plain search for the greatest logit.
pub(super) enum Sampler {
    /// The greatest logit, the first one among equals.
    Greedy,
    /// llama.cpp's chain, in its order: bias, penalties, top k, top p, min p, temperature, draw.
    Chain(Chain),
}

/// A chain of llama.cpp's samplers.
pub(super) struct Chain {
    chain: NonNull<c::llama_sampler>,
}

impl Sampler {
    /// `seed` is the choice's own; `prompt` feeds the repetition penalty, which counts it in (the penalties of OpenAI
    /// count generated tokens only); `tokens_max` is the most that can be generated.
    pub(super) fn new(model: &Model, sampling: &Sampling, seed: u64, prompt: &[Token], tokens_max: u32) -> Self {
        let penalised = sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0;
        let repeated = sampling.repeat_penalty != 1.0;
        let biased = !sampling.logit_bias.is_empty();
        if sampling.temperature <= 0.0 && !penalised && !repeated && !biased {
            return Self::Greedy;
        }
        let vocabulary = model.vocabulary_tokens() as i32;
        // SAFETY: each sampler is made once and given to the chain, which frees it; the chain is freed on drop.
        unsafe {
            let Some(chain) =
                NonNull::new(c::llama_sampler_chain_init(c::llama_sampler_chain_params { no_perf: true }))
            else {
                return Self::Greedy;
            };
            let chain = Chain { chain };
            if biased {
                let bias: Vec<c::llama_logit_bias> = sampling
                    .logit_bias
                    .iter()
                    .map(|(token, bias)| c::llama_logit_bias { token: *token as Token, bias: *bias })
                    .collect();
                chain.add(c::llama_sampler_init_logit_bias(vocabulary, bias.len() as i32, bias.as_ptr()));
            }
            if penalised {
                let (frequency, presence) = (sampling.frequency_penalty, sampling.presence_penalty);
                let last = tokens_max.min(i32::MAX as u32) as i32;
                chain.add(c::llama_sampler_init_penalties(vocabulary, last, 1.0, frequency, presence));
            }
            if repeated {
                let penalty = sampling.repeat_penalty;
                let repeat = c::llama_sampler_init_penalties(vocabulary, REPEAT_TOKENS as i32, penalty, 0.0, 0.0);
                for token in &prompt[prompt.len().saturating_sub(REPEAT_TOKENS)..] {
                    c::llama_sampler_accept(repeat, *token);
                }
                chain.add(repeat);
            }
            chain.add_draw(sampling, seed);
            Self::Chain(chain)
        }
    }

    /// Picks the next token among those that are allowed, and remembers it. None if no logit is a number.
    pub(super) fn pick(
        &mut self,
        logits: &[f32],
        candidates: &mut Candidates,
        allowed: Option<&Constraint>,
    ) -> Option<Token> {
        match (self, allowed) {
            (Self::Greedy, None) => greatest(logits),
            (Self::Greedy, Some(allowed)) => greatest_allowed(logits, allowed),
            (Self::Chain(chain), allowed) => chain.pick(logits, candidates, allowed),
        }
    }
}

impl Sampler {
    /// Takes a token that was picked by a sampler like this one, as if it had been picked here.
    pub(super) fn replay(&mut self, token: Token) {
        if let Self::Chain(chain) = self {
            chain.replay(token);
        }
    }
}

impl Chain {
    /// Each token was one draw, whatever was drawn from: the last sampler draws once more, and all take the token.
    fn replay(&mut self, token: Token) {
        let mut only = c::llama_token_data { id: token, logit: 0.0, p: 0.0 };
        let mut array = c::llama_token_data_array { data: &raw mut only, size: 1, selected: -1, sorted: false };
        // SAFETY: the chain is valid and owns its last sampler; the array is valid for its size and outlives the calls.
        unsafe {
            let last = c::llama_sampler_chain_n(self.chain.as_ptr()) - 1;
            let draw = c::llama_sampler_chain_get(self.chain.as_ptr(), last);
            if !draw.is_null() {
                c::llama_sampler_apply(draw, &raw mut array);
            }
            c::llama_sampler_accept(self.chain.as_ptr(), token);
        }
    }

    /// # Safety
    /// `sampler` is a sampler that nobody else owns.
    unsafe fn add(&self, sampler: *mut c::llama_sampler) {
        // SAFETY: both are valid, and the chain becomes the owner.
        unsafe { c::llama_sampler_chain_add(self.chain.as_ptr(), sampler) };
    }

    /// # Safety
    /// To be called once per chain.
    unsafe fn add_draw(&self, sampling: &Sampling, seed: u64) {
        // SAFETY: as for `add`.
        unsafe {
            if sampling.temperature <= 0.0 {
                self.add(c::llama_sampler_init_greedy());
                return;
            }
            if sampling.top_k > 0 {
                self.add(c::llama_sampler_init_top_k(sampling.top_k.min(i32::MAX as u32) as i32));
            }
            if sampling.top_p < 1.0 {
                self.add(c::llama_sampler_init_top_p(sampling.top_p, 1));
            }
            if sampling.min_p > 0.0 {
                self.add(c::llama_sampler_init_min_p(sampling.min_p, 1));
            }
            if sampling.temperature != 1.0 {
                self.add(c::llama_sampler_init_temp(sampling.temperature));
            }
            self.add(c::llama_sampler_init_dist(fold(seed)));
        }
    }

    fn pick(&mut self, logits: &[f32], candidates: &mut Candidates, allowed: Option<&Constraint>) -> Option<Token> {
        candidates.clear();
        let all = logits.iter().enumerate().filter(|(id, _)| allowed.is_none_or(|allowed| allowed.allows(*id)));
        candidates.extend(all.map(|(id, logit)| c::llama_token_data { id: id as Token, logit: *logit, p: 0.0 }));
        if candidates.is_empty() {
            return None;
        }
        let mut array = c::llama_token_data_array {
            data: candidates.as_mut_ptr(),
            size: candidates.len(),
            selected: -1,
            sorted: false,
        };
        // SAFETY: the array is valid for its size, and samplers keep `data` within it or point it at memory they own,
        // which lives as long as the chain.
        unsafe {
            c::llama_sampler_apply(self.chain.as_ptr(), &raw mut array);
            let selected = usize::try_from(array.selected).ok().filter(|index| *index < array.size)?;
            let chosen = *array.data.add(selected);
            if chosen.logit.is_nan() {
                return None;
            }
            c::llama_sampler_accept(self.chain.as_ptr(), chosen.id);
            Some(chosen.id)
        }
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // SAFETY: the chain is valid, and not used again.
        unsafe { c::llama_sampler_free(self.chain.as_ptr()) };
    }
}

/// llama.cpp's random generator takes 32 bits, one value of which it reads as "choose yourself".
fn fold(seed: u64) -> u32 {
    // The finaliser of SplitMix64, so that neighbouring seeds have nothing in common.
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let folded = (mixed ^ (mixed >> 31)) as u32;
    if folded == RANDOM_SEED { 0 } else { folded }
}

/// The index of the greatest number, the first one among equals; none if all are NaN.
fn greatest(logits: &[f32]) -> Option<Token> {
    // Two passes, so that the first one, over independent lanes, becomes vector instructions.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = logits.chunks_exact(16);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    let most =
        lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |most, value| if *value > most { *value } else { most });
    logits.iter().position(|value| *value == most).map(|index| index as Token)
}

fn greatest_allowed(logits: &[f32], allowed: &Constraint) -> Option<Token> {
    let candidates = logits.iter().enumerate().filter(|(token, logit)| allowed.allows(*token) && !logit.is_nan());
    // Among equals the first one, as without a constraint.
    let best = candidates.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map(|(token, _)| token as Token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_numbers_no_choice() {
        assert_eq!(greatest(&[]), None);
        assert_eq!(greatest(&[f32::NAN; 40]), None);
        assert_eq!(greatest(&[f32::NAN, 1.0, f32::NAN]), Some(1));
    }

    proptest! {
        #[test]
        fn the_greatest_is_found_where_it_first_is(logits in prop::collection::vec(-5i8..5, 1..200)) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(greatest(&logits), logits.iter().position(|value| *value == most).map(|index| index as Token));
        }

        #[test]
        fn seeds_never_become_the_random_one(seed in any::<u64>()) {
            prop_assert_ne!(fold(seed), RANDOM_SEED);
        }
    }
}
