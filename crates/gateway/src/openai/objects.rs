//! OpenAI's chat and completion objects, written field by field as its official clients read them.

use super::{
    ask::{Route, Tier},
    dialect::{Choice, Encoder, write_event},
    logprobs::{self, ChatLogprobs, TextLogprobs},
};
use crate::errors::ApiError;
use serde::Serialize;
use std::collections::BTreeMap;
use warmset_core::inference::{FinishReason, TokenLogprob, Usage};

/// What all objects of one response share.
#[derive(Debug, Clone)]
pub(crate) struct Envelope {
    pub(crate) route: Route,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
    pub(crate) tier: Option<Tier>,
    /// Whether chunks carry `usage`, null in all but the last.
    pub(crate) include_usage: bool,
}

#[derive(Serialize)]
struct Object<'a, Choice> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    choices: &'a [Choice],
    /// Absent, null, or there.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageObject>>,
}

#[derive(Serialize)]
struct UsageObject {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
}

#[derive(Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
        }
    }
}

#[derive(Serialize)]
struct ChatChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

/// A part of a call: its first one has identity and name.
#[derive(Serialize)]
struct CallDelta<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    message: ChatMessage<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    /// Null if there are calls and no text.
    content: Option<&'a str>,
    refusal: (),
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

#[derive(Serialize)]
struct Call<'a> {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

/// OpenAI's word for why a choice ended.
fn finish_word(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        // One that was broken off is never written.
        FinishReason::Stop | FinishReason::Cancelled => "stop",
    }
}

impl Envelope {
    /// The name of a call, which no other call has.
    fn call_id(&self, index: u32, call: u32) -> String {
        let own = self.id.rsplit('-').next().unwrap_or_default();
        format!("call_{own}{index:02x}{call:02x}")
    }

    fn object<Choice: Serialize>(
        &self,
        object: &'static str,
        choices: &[Choice],
        usage: Option<Option<Usage>>,
    ) -> Vec<u8> {
        let object = Object {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
            service_tier: self.tier.map(Tier::as_str),
            choices,
            usage: usage.map(|usage| usage.map(UsageObject::from)),
        };
        // Texts and numbers can always be written as JSON.
        serde_json::to_vec(&object).unwrap_or_default()
    }

    fn event<Choice: Serialize>(&self, choice: &[Choice], usage: Option<Usage>, out: &mut Vec<u8>) {
        let object = match self.route {
            Route::Chat => "chat.completion.chunk",
            Route::Text => "text_completion",
        };
        write_event(None, &self.object(object, choice, self.include_usage.then_some(usage)), out);
    }

    fn chunk(&self, index: u32, delta: Delta<'_>, tokens: &[TokenLogprob], out: &mut Vec<u8>) {
        let logprobs = logprobs::chat(tokens);
        self.event(&[ChatChunkChoice { index, delta, logprobs, finish_reason: None }], None, out);
    }

    fn chat_choice<'a>(&self, index: u32, choice: &'a Choice) -> ChatChoice<'a> {
        let calls = (0..).zip(&choice.calls).map(|(call, made)| Call {
            id: self.call_id(index, call),
            kind: "function",
            function: Function { name: &made.name, arguments: &made.arguments },
        });
        let content = (choice.calls.is_empty() || !choice.text.is_empty()).then_some(choice.text.as_str());
        let message = ChatMessage { role: "assistant", content, refusal: (), tool_calls: calls.collect() };
        let finish_reason = choice.finish.map_or("stop", finish_word);
        ChatChoice { index, message, logprobs: logprobs::chat(&choice.logprobs), finish_reason }
    }
}

/// Writes chats and completions.
#[derive(Debug)]
pub(crate) struct Completions {
    envelope: Envelope,
    /// Tokens of a choice that go with its next text or piece of a call.
    tokens: BTreeMap<u32, Vec<TokenLogprob>>,
    /// Characters of a choice that are written, for `text_offset`.
    offsets: BTreeMap<u32, usize>,
}

impl Completions {
    pub(crate) fn new(envelope: Envelope) -> Self {
        Self { envelope, tokens: BTreeMap::new(), offsets: BTreeMap::new() }
    }
}

impl Encoder for Completions {
    fn open(&mut self, index: u32, out: &mut Vec<u8>) {
        if self.envelope.route == Route::Chat {
            let delta = Delta { role: Some("assistant"), content: Some(""), tool_calls: None };
            self.envelope.chunk(index, delta, &[], out);
        }
    }

    fn logprobs(&mut self, index: u32, tokens: Vec<TokenLogprob>) {
        self.tokens.entry(index).or_default().extend(tokens);
    }

    fn text(&mut self, index: u32, text: &str, out: &mut Vec<u8>) {
        let tokens = self.tokens.remove(&index).unwrap_or_default();
        match self.envelope.route {
            Route::Chat => {
                let delta = Delta { content: Some(text), ..Delta::default() };
                self.envelope.chunk(index, delta, &tokens, out);
            }
            Route::Text => {
                let logprobs = logprobs::completion(&tokens, self.offsets.entry(index).or_default());
                self.envelope.event(&[TextChoice { index, text, logprobs, finish_reason: None }], None, out);
            }
        }
    }

    fn call(&mut self, index: u32, call: u32, name: &str, out: &mut Vec<u8>) {
        let function = FunctionDelta { name: Some(name), arguments: "" };
        let id = Some(self.envelope.call_id(index, call));
        let begun = CallDelta { index: call, id, kind: Some("function"), function };
        let tokens = self.tokens.remove(&index).unwrap_or_default();
        self.envelope.chunk(index, Delta { tool_calls: Some([begun]), ..Delta::default() }, &tokens, out);
    }

    fn arguments(&mut self, index: u32, call: u32, text: &str, out: &mut Vec<u8>) {
        let function = FunctionDelta { name: None, arguments: text };
        let more = CallDelta { index: call, id: None, kind: None, function };
        let tokens = self.tokens.remove(&index).unwrap_or_default();
        self.envelope.chunk(index, Delta { tool_calls: Some([more]), ..Delta::default() }, &tokens, out);
    }

    fn finish(&mut self, index: u32, finish: FinishReason, _: Option<&str>, out: &mut Vec<u8>) {
        if self.tokens.contains_key(&index) {
            // Tokens without any text to go with.
            self.text(index, "", out);
        }
        let finish_reason = Some(finish_word(finish));
        match self.envelope.route {
            Route::Chat => {
                let delta = Delta::default();
                self.envelope.event(&[ChatChunkChoice { index, delta, logprobs: None, finish_reason }], None, out);
            }
            Route::Text => {
                self.envelope.event(&[TextChoice { index, text: "", logprobs: None, finish_reason }], None, out);
            }
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        if self.envelope.include_usage {
            self.envelope.event::<TextChoice<'_>>(&[], Some(usage), out);
        }
        write_event(None, b"[DONE]", out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        write_event(None, error.json().as_bytes(), out);
    }

    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Vec<u8> {
        match self.envelope.route {
            Route::Chat => {
                let choices: Vec<ChatChoice<'_>> =
                    (0..).zip(choices).map(|(index, choice)| self.envelope.chat_choice(index, choice)).collect();
                self.envelope.object("chat.completion", &choices, Some(Some(usage)))
            }
            Route::Text => {
                let choices: Vec<TextChoice<'_>> = (0..)
                    .zip(choices)
                    .map(|(index, choice)| {
                        let finish_reason = Some(choice.finish.map_or("stop", finish_word));
                        let logprobs = logprobs::completion(&choice.logprobs, &mut 0);
                        TextChoice { index, text: &choice.text, logprobs, finish_reason }
                    })
                    .collect();
                self.envelope.object("text_completion", &choices, Some(Some(usage)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn envelope(route: Route, include_usage: bool) -> Completions {
        let (id, model, fingerprint) = ("x-1".into(), "m".into(), "fp_0".into());
        let tier = Some(Tier::Flex);
        Completions::new(Envelope { route, id, created: 5, model, fingerprint, tier, include_usage })
    }

    #[test]
    fn whole_answers_have_both_shapes() {
        let choices = [Choice { text: "hi".into(), finish: Some(FinishReason::Length), ..Choice::default() }];
        let usage = Usage { prompt_tokens: 4, completion_tokens: 2, cached_tokens: 1 };
        let chat: Value = serde_json::from_slice(&envelope(Route::Chat, false).whole(&choices, usage)).unwrap();
        let expected = json!({
            "id": "x-1", "object": "chat.completion", "created": 5, "model": "m", "system_fingerprint": "fp_0",
            "service_tier": "flex",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi", "refusal": null},
                "logprobs": null, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 1}},
        });
        assert_eq!(chat, expected);
        let text: Value = serde_json::from_slice(&envelope(Route::Text, false).whole(&choices, usage)).unwrap();
        assert_eq!(text["object"], "text_completion");
        let choice = json!({"index": 0, "text": "hi", "logprobs": null, "finish_reason": "length"});
        assert_eq!(text["choices"], json!([choice]));
    }

    #[test]
    fn usage_is_null_in_every_chunk_but_the_last_and_only_if_asked_for() {
        let mut out = Vec::new();
        envelope(Route::Chat, true).text(0, "a", &mut out);
        assert!(String::from_utf8_lossy(&out).contains("\"usage\":null"));
        out.clear();
        envelope(Route::Chat, false).text(0, "a", &mut out);
        assert!(!String::from_utf8_lossy(&out).contains("usage"));
        out.clear();
        envelope(Route::Chat, true).end(Usage::default(), &mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("\"choices\":[],\"usage\":{\"prompt_tokens\":0"), "{text}");
        assert!(text.ends_with("\n\ndata: [DONE]\n\n"), "{text}");
    }
}
