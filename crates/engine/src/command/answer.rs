//! What a server answers, whole or in pieces, in the forms that servers use.

use crate::protocol::{FinishReason, TokenLogprob, Usage};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// An answer, or one piece of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Piece {
    pub(super) choices: Vec<PieceChoice>,
    pub(super) usage: Option<WireUsage>,
    pub(super) timings: Option<WireTimings>,
    pub(super) error: Option<Value>,
}

/// A choice in it: a chat's piece has a delta, a whole chat a message, a completion text.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PieceChoice {
    pub(super) index: u32,
    #[serde(alias = "message")]
    delta: Option<Said>,
    text: Option<String>,
    finish_reason: Option<String>,
    logprobs: Option<WireLogprobs>,
    stop_reason: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    content: Option<String>,
    tool_calls: Option<Vec<WireCall>>,
}

/// A call of a function, or one piece of it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WireCall {
    /// Its place among the calls; a whole answer may leave it out.
    pub(super) index: Option<u32>,
    pub(super) function: WireFunction,
}

/// What is called.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WireFunction {
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
}

impl PieceChoice {
    /// The text in it.
    pub(super) fn text(&mut self) -> String {
        let said = self.delta.as_mut().and_then(|said| said.content.take());
        said.or(self.text.take()).unwrap_or_default()
    }

    /// The calls in it.
    pub(super) fn calls(&mut self) -> Vec<WireCall> {
        self.delta.as_mut().and_then(|said| said.tool_calls.take()).unwrap_or_default()
    }

    /// The tokens in it, if they were asked for.
    pub(super) fn logprobs(&mut self) -> Vec<TokenLogprob> {
        self.logprobs.take().map(WireLogprobs::tokens).unwrap_or_default()
    }

    /// The stop text that ended it, where the server says so.
    pub(super) fn stop_text(&self) -> Option<String> {
        self.stop_reason.as_ref()?.as_str().map(str::to_owned)
    }

    /// Why the choice ended, if it has. `Err` is an end that is no answer.
    pub(super) fn finish(&self) -> Result<Option<FinishReason>, String> {
        match self.finish_reason.as_deref() {
            None | Some("") => Ok(None),
            Some("length") => Ok(Some(FinishReason::Length)),
            Some("tool_calls" | "function_call") => Ok(Some(FinishReason::ToolCalls)),
            Some("abort" | "error") => Err("the server of the model gave the answer up".into()),
            Some(_) => Ok(Some(FinishReason::Stop)),
        }
    }
}

/// Log probabilities: a chat's in `content`, a completion's in lists of equal length.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireLogprobs {
    content: Option<Vec<WireToken>>,
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Option<Vec<Option<BTreeMap<String, f32>>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WireToken {
    token: String,
    bytes: Option<Vec<u8>>,
    logprob: Option<f32>,
    top_logprobs: Vec<WireToken>,
}

impl WireToken {
    fn pair(self) -> (Vec<u8>, f32) {
        let bytes = self.bytes.unwrap_or_else(|| self.token.into_bytes());
        (bytes, self.logprob.unwrap_or(f32::NEG_INFINITY))
    }
}

impl WireLogprobs {
    fn tokens(self) -> Vec<TokenLogprob> {
        if let Some(content) = self.content {
            let tokens = content.into_iter().map(|mut token| {
                let top = std::mem::take(&mut token.top_logprobs).into_iter().map(WireToken::pair).collect();
                let (bytes, logprob) = token.pair();
                TokenLogprob { bytes, logprob, top }
            });
            return tokens.collect();
        }
        let tops = self.top_logprobs.unwrap_or_default().into_iter().chain(std::iter::repeat(None));
        let all = self.tokens.into_iter().zip(self.token_logprobs).zip(tops);
        let tokens = all.map(|((token, logprob), top)| {
            let mut top: Vec<_> =
                top.unwrap_or_default().into_iter().map(|(token, p)| (token.into_bytes(), p)).collect();
            top.sort_by(|(_, left), (_, right)| right.total_cmp(left));
            TokenLogprob { bytes: token.into_bytes(), logprob: logprob.unwrap_or(f32::NEG_INFINITY), top }
        });
        tokens.collect()
    }
}

/// Tokens as OpenAI counts them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WireUsage {
    pub(super) prompt_tokens: u32,
    completion_tokens: u32,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

/// llama.cpp's own account of a request.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WireTimings {
    cache_n: u32,
    pub(super) prompt_ms: f64,
    pub(super) predicted_ms: f64,
}

/// Usage in the worker's words.
pub(super) fn usage(wire: &WireUsage, timings: Option<&WireTimings>) -> Usage {
    let told = wire.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
    let cached = told.or(timings.map(|timings| timings.cache_n)).unwrap_or(0);
    Usage {
        prompt_tokens: wire.prompt_tokens,
        completion_tokens: wire.completion_tokens,
        cached_tokens: cached.min(wire.prompt_tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(text: &str) -> PieceChoice {
        serde_json::from_str::<Piece>(text).unwrap().choices.remove(0)
    }

    #[test]
    fn pieces_of_every_route_are_read() {
        let read = |text: &str| {
            let mut choice = choice(text);
            (choice.text(), choice.finish())
        };
        let delta = r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
        assert_eq!(read(delta), ("a".into(), Ok(None)));
        let whole = r#"{"choices":[{"message":{"role":"assistant","content":"b"},"finish_reason":"length"}]}"#;
        assert_eq!(read(whole), ("b".into(), Ok(Some(FinishReason::Length))));
        let text = r#"{"choices":[{"text":"c","finish_reason":"stop","stop_reason":"END"}]}"#;
        assert_eq!(read(text), ("c".into(), Ok(Some(FinishReason::Stop))));
        assert_eq!((choice(text).stop_text(), choice(whole).stop_text()), (Some("END".into()), None));
        assert!(read(r#"{"choices":[{"delta":{},"finish_reason":"abort"}]}"#).1.is_err());
        let told = WireUsage { prompt_tokens: 9, completion_tokens: 2, prompt_tokens_details: None };
        let timings = WireTimings { cache_n: 4, ..WireTimings::default() };
        assert_eq!(usage(&told, Some(&timings)), Usage { prompt_tokens: 9, completion_tokens: 2, cached_tokens: 4 });
    }

    #[test]
    fn calls_are_read_whole_and_in_pieces() {
        let whole = r#"{"choices":[{"message":{"content":null,"tool_calls":[{"id":"x","type":"function",
            "function":{"name":"look","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#;
        let mut whole = choice(whole);
        assert_eq!((whole.text(), whole.finish()), (String::new(), Ok(Some(FinishReason::ToolCalls))));
        let calls = whole.calls();
        assert_eq!((calls[0].index, calls[0].function.name.as_deref()), (None, Some("look")));
        let piece = r#"{"choices":[{"delta":{"tool_calls":[{"index":1,"function":{"arguments":"{\""}}]}}]}"#;
        let calls = choice(piece).calls();
        assert_eq!((calls[0].index, calls[0].function.arguments.as_deref()), (Some(1), Some("{\"")));
    }

    #[test]
    fn log_probabilities_are_read_in_both_forms() {
        let chat = r#"{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","bytes":[97],
            "logprob":-0.5,"top_logprobs":[{"token":"b","logprob":-0.25}]}]}}]}"#;
        let expected = TokenLogprob { bytes: b"a".into(), logprob: -0.5, top: vec![(b"b".into(), -0.25)] };
        let expected = [expected];
        assert_eq!(choice(chat).logprobs(), expected);
        let text = r#"{"choices":[{"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.5],
            "top_logprobs":[{"b":-0.25}]}}]}"#;
        assert_eq!(choice(text).logprobs(), expected);
        assert_eq!(choice(r#"{"choices":[{"text":"a","logprobs":null}]}"#).logprobs(), []);
    }
}
