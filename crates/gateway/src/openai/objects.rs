//! OpenAI's response objects, written field by field as its official clients read them.

use super::ask::{Encoding, Route, Tier};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Serialize, Serializer};
use warmset_core::inference::{FinishReason, Usage};

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
    logprobs: (),
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: (),
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    message: ChatMessage<'a>,
    logprobs: (),
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    content: &'a str,
    refusal: (),
}

/// One complete choice.
#[derive(Debug, Clone, Default)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) finish: Option<FinishReason>,
}

/// OpenAI's word for why a choice ended; none for one that was broken off.
pub(crate) fn finish_word(finish: FinishReason) -> Option<&'static str> {
    match finish {
        FinishReason::Stop => Some("stop"),
        FinishReason::Length => Some("length"),
        FinishReason::Cancelled => None,
    }
}

impl Envelope {
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
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.object(object, choice, self.include_usage.then_some(usage)));
        out.extend_from_slice(b"\n\n");
    }

    /// The event that opens a choice of a chat.
    pub(crate) fn write_role(&self, index: u32, out: &mut Vec<u8>) {
        if self.route == Route::Chat {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            self.event(&[ChatChunkChoice { index, delta, logprobs: (), finish_reason: None }], None, out);
        }
    }

    /// The event with more text of a choice.
    pub(crate) fn write_text(&self, index: u32, text: &str, out: &mut Vec<u8>) {
        match self.route {
            Route::Chat => {
                let delta = Delta { role: None, content: Some(text) };
                self.event(&[ChatChunkChoice { index, delta, logprobs: (), finish_reason: None }], None, out);
            }
            Route::Text => self.event(&[TextChoice { index, text, logprobs: (), finish_reason: None }], None, out),
        }
    }

    /// The event that ends a choice.
    pub(crate) fn write_finish(&self, index: u32, word: &'static str, out: &mut Vec<u8>) {
        let finish_reason = Some(word);
        match self.route {
            Route::Chat => {
                let delta = Delta::default();
                self.event(&[ChatChunkChoice { index, delta, logprobs: (), finish_reason }], None, out);
            }
            Route::Text => self.event(&[TextChoice { index, text: "", logprobs: (), finish_reason }], None, out),
        }
    }

    /// The event with what the request used, if it was asked for, and the sentinel.
    pub(crate) fn write_end(&self, usage: Usage, out: &mut Vec<u8>) {
        if self.include_usage {
            self.event::<TextChoice<'_>>(&[], Some(usage), out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// The whole answer as one object.
    pub(crate) fn whole(&self, choices: &[Choice], usage: Usage) -> Vec<u8> {
        let numbered = || (0..).zip(choices);
        let word = |choice: &Choice| choice.finish.and_then(finish_word).unwrap_or("stop");
        match self.route {
            Route::Chat => {
                let choices: Vec<ChatChoice<'_>> = numbered()
                    .map(|(index, choice)| {
                        let message = ChatMessage { role: "assistant", content: &choice.text, refusal: () };
                        ChatChoice { index, message, logprobs: (), finish_reason: word(choice) }
                    })
                    .collect();
                self.object("chat.completion", &choices, Some(Some(usage)))
            }
            Route::Text => {
                let choices: Vec<TextChoice<'_>> = numbered()
                    .map(|(index, choice)| {
                        let finish_reason = Some(word(choice));
                        TextChoice { index, text: &choice.text, logprobs: (), finish_reason }
                    })
                    .collect();
                self.object("text_completion", &choices, Some(Some(usage)))
            }
        }
    }
}

#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingObject<'a>>,
    model: &'a str,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct EmbeddingObject<'a> {
    object: &'static str,
    index: usize,
    embedding: Vector<'a>,
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: u32,
    total_tokens: u32,
}

struct Vector<'a> {
    numbers: &'a [f32],
    encoding: Encoding,
}

impl Serialize for Vector<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.encoding {
            Encoding::Float => self.numbers.serialize(serializer),
            Encoding::Base64 => {
                let bytes: Vec<u8> = self.numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                serializer.serialize_str(&STANDARD.encode(bytes))
            }
        }
    }
}

/// The answer to `/v1/embeddings`.
pub(crate) fn embeddings(model: &str, vectors: &[Vec<f32>], prompt_tokens: u32, encoding: Encoding) -> Vec<u8> {
    let objects = vectors.iter().enumerate().map(|(index, numbers)| EmbeddingObject {
        object: "embedding",
        index,
        embedding: Vector { numbers, encoding },
    });
    let usage = EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens };
    let list = EmbeddingList { object: "list", data: objects.collect(), model, usage };
    // Texts and numbers can always be written as JSON (a number that is none becomes null).
    serde_json::to_vec(&list).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn envelope(route: Route, include_usage: bool) -> Envelope {
        let (id, model, fingerprint) = ("x-1".into(), "m".into(), "fp_0".into());
        Envelope { route, id, created: 5, model, fingerprint, tier: Some(Tier::Flex), include_usage }
    }

    #[test]
    fn embeddings_are_little_endian_base64_or_numbers() {
        let vectors = [vec![1.0_f32, -2.5]];
        let float: Value = serde_json::from_slice(&embeddings("m", &vectors, 3, Encoding::Float)).unwrap();
        assert_eq!(float["data"][0]["embedding"], json!([1.0, -2.5]));
        assert_eq!(float["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
        let base64: Value = serde_json::from_slice(&embeddings("m", &vectors, 3, Encoding::Base64)).unwrap();
        assert_eq!(base64["data"][0]["embedding"], "AACAPwAAIMA=");
    }

    #[test]
    fn whole_answers_have_both_shapes() {
        let choices = [Choice { text: "hi".into(), finish: Some(FinishReason::Length) }];
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
        envelope(Route::Chat, true).write_text(0, "a", &mut out);
        assert!(String::from_utf8_lossy(&out).contains("\"usage\":null"));
        out.clear();
        envelope(Route::Chat, false).write_text(0, "a", &mut out);
        assert!(!String::from_utf8_lossy(&out).contains("usage"));
        out.clear();
        envelope(Route::Chat, true).write_end(Usage::default(), &mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("\"choices\":[],\"usage\":{\"prompt_tokens\":0"), "{text}");
        assert!(text.ends_with("\n\ndata: [DONE]\n\n"), "{text}");
    }
}
