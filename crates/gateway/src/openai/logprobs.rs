//! Log probabilities as OpenAI's two routes write them.

use serde::Serialize;
use std::collections::BTreeMap;
use warmset_core::inference::TokenLogprob;

/// A chat's log probabilities.
#[derive(Serialize)]
pub(crate) struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
    refusal: (),
}

#[derive(Serialize)]
struct ChatToken<'a> {
    #[serde(flatten)]
    token: Token<'a>,
    top_logprobs: Vec<Token<'a>>,
}

#[derive(Serialize)]
struct Token<'a> {
    token: String,
    logprob: f32,
    bytes: &'a [u8],
}

/// The least likely that is written: a probability of nothing has no logarithm that JSON could hold.
const LOGPROB_MIN: f32 = -9999.0;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LOGPROB_MIN } else { logprob.clamp(LOGPROB_MIN, 0.0) }
}

fn token(bytes: &[u8], logprob: f32) -> Token<'_> {
    Token { token: text(bytes), logprob: finite(logprob), bytes }
}

/// None if there are none, as for a choice that nobody asked log probabilities of.
pub(crate) fn chat(tokens: &[TokenLogprob]) -> Option<ChatLogprobs<'_>> {
    let content: Vec<ChatToken<'_>> = tokens
        .iter()
        .map(|one| ChatToken {
            token: token(&one.bytes, one.logprob),
            top_logprobs: one.top.iter().map(|(bytes, logprob)| token(bytes, *logprob)).collect(),
        })
        .collect();
    (!content.is_empty()).then_some(ChatLogprobs { content, refusal: () })
}

/// A completion's log probabilities.
#[derive(Serialize)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<BTreeMap<String, f32>>,
    text_offset: Vec<usize>,
}

/// `offset` is where the first token's text begins, in characters; it moves on.
pub(crate) fn completion(tokens: &[TokenLogprob], offset: &mut usize) -> Option<TextLogprobs> {
    if tokens.is_empty() {
        return None;
    }
    let mut written = TextLogprobs {
        tokens: Vec::with_capacity(tokens.len()),
        token_logprobs: Vec::with_capacity(tokens.len()),
        top_logprobs: Vec::with_capacity(tokens.len()),
        text_offset: Vec::with_capacity(tokens.len()),
    };
    for one in tokens {
        let word = text(&one.bytes);
        written.text_offset.push(*offset);
        *offset += word.chars().count();
        written.tokens.push(word);
        written.token_logprobs.push(finite(one.logprob));
        written.top_logprobs.push(one.top.iter().map(|(bytes, logprob)| (text(bytes), finite(*logprob))).collect());
    }
    Some(written)
}
