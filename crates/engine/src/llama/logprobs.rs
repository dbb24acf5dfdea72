//! How likely tokens were: from the model's own logits, before any sampling setting, as OpenAI counts them.

use super::{
    sys::{Model, Token},
    text::TextFilter,
};
use crate::protocol::TokenLogprob;
use serde::{Deserialize, Serialize};

/// Tokens of one choice whose text is still held back.
#[derive(Default, Clone, Serialize, Deserialize)]
pub(super) struct PendingLogprobs {
    tokens: Vec<TokenLogprob>,
    /// Bytes of the choice's text before the first of them.
    begin_bytes: usize,
}

impl PendingLogprobs {
    /// Keeps a picked token with its `top` likeliest alternatives.
    pub(super) fn push(&mut self, model: &Model, logits: &[f32], token: Token, top: u32) {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
        let normaliser = most + sum.ln() as f32;
        let bytes_of = |token: Token| {
            let mut bytes = Vec::new();
            model.append_piece(token, true, &mut bytes);
            bytes
        };
        let logprob = |token: Token| logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logit - normaliser);
        let top = likeliest(logits, top as usize).into_iter().map(|token| (bytes_of(token), logprob(token))).collect();
        self.tokens.push(TokenLogprob { bytes: bytes_of(token), logprob: logprob(token), top });
    }

    /// The tokens whose text begins in what was shown so far.
    pub(super) fn take(&mut self, filter: &TextFilter) -> Vec<TokenLogprob> {
        let mut count = 0;
        for token in &self.tokens {
            if self.begin_bytes >= filter.passed_bytes() {
                break;
            }
            self.begin_bytes += token.bytes.len();
            count += 1;
        }
        self.tokens.drain(..count).collect()
    }
}

/// The tokens with the greatest logits, the greatest first.
fn likeliest(logits: &[f32], count: usize) -> Vec<Token> {
    let mut order: Vec<Token> = (0..logits.len() as Token).collect();
    let greater = |one: &Token, other: &Token| logits[*other as usize].total_cmp(&logits[*one as usize]);
    if count < order.len() {
        order.select_nth_unstable_by(count, greater);
        order.truncate(count);
    }
    order.sort_unstable_by(greater);
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_likeliest_come_first(logits in prop::collection::vec(-50.0f32..50.0, 0..60), count in 0usize..30) {
            let found = likeliest(&logits, count);
            let mut expected = logits.clone();
            expected.sort_unstable_by(|one, other| other.total_cmp(one));
            expected.truncate(count);
            let found: Vec<f32> = found.into_iter().map(|token| logits[token as usize]).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
