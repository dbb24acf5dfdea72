//! What of a request decides where it goes: its model, whether it streams, and its prompt as hashes.
//!
//! The text of a prompt is taken as it stands in the body (escapes and all), message by message, so that nothing is
//! copied: two clients that escape the same text differently share no prefix, which costs a replica's time and
//! nothing else. What cannot be read is no error here: the replica judges it.

use bytes::Bytes;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use std::{borrow::Cow, convert::Infallible};
use warmset_core::routing::{ModelKey, PrefixBuilder, PrefixChain, Salt};

/// A request as the router sees it.
#[derive(Debug)]
pub(super) struct Prompt {
    /// As the caller wrote it; empty if it named none.
    pub(super) model: String,
    pub(super) chain: PrefixChain,
    pub(super) stream: bool,
    /// Where to write that usage is wanted, if the caller did not say.
    pub(super) usage_at: Option<usize>,
}

/// The routes whose streams end with usage if that is asked for in `stream_options`.
pub(super) fn counts_on_request(path: &str) -> bool {
    path.ends_with("/chat/completions") || path.ends_with("/completions")
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    /// `null` is a word of the caller too.
    #[serde(borrow, default, deserialize_with = "written")]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
    #[serde(borrow, default)]
    system: Option<&'a RawValue>,
    #[serde(borrow, default)]
    instructions: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    role: Option<&'a RawValue>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
}

fn written<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// Reads a form, as those of recordings are: its model decides, and replicas keep nothing of it.
pub(super) async fn read_form(body: Bytes, content_type: &str) -> Prompt {
    let model = form_model(body, content_type).await.unwrap_or_default();
    let chain = PrefixBuilder::new(Salt::new(b"", model.as_bytes())).finish();
    Prompt { model, chain, stream: false, usage_at: None }
}

async fn form_model(body: Bytes, content_type: &str) -> Option<String> {
    let boundary = multer::parse_boundary(content_type).ok()?;
    let whole = futures_util::stream::iter([Ok::<_, Infallible>(body)]);
    let mut form = multer::Multipart::new(whole, boundary);
    while let Ok(Some(field)) = form.next_field().await {
        if field.name() == Some("model") {
            return field.text().await.ok();
        }
    }
    None
}

/// Reads a body. One that is no JSON object has no model and is as a whole its prompt.
pub(super) fn read(body: &[u8], path: &str) -> Prompt {
    let Ok(fields) = serde_json::from_slice::<Body<'_>>(body) else {
        let mut builder = PrefixBuilder::new(Salt::new(b"", b""));
        builder.push(body);
        return Prompt { model: String::new(), chain: builder.finish(), stream: false, usage_at: None };
    };
    let model = fields.model.and_then(|raw| serde_json::from_str::<Cow<'_, str>>(raw.get()).ok()).unwrap_or_default();
    let mut builder = PrefixBuilder::new(Salt::new(b"", model.as_bytes()));
    for raw in [fields.tools, fields.system, fields.instructions, fields.prompt].into_iter().flatten() {
        push(&mut builder, raw);
    }
    for list in [fields.messages, fields.input].into_iter().flatten() {
        push_messages(&mut builder, list);
    }
    let stream = fields.stream.is_some_and(|raw| raw.get() == "true");
    let silent = stream && fields.stream_options.is_none() && counts_on_request(path);
    let usage_at = silent.then(|| body.iter().position(|byte| *byte == b'{')).flatten().map(|at| at + 1);
    Prompt { model: model.into_owned(), chain: builder.finish(), stream, usage_at }
}

fn push(builder: &mut PrefixBuilder, raw: &RawValue) {
    builder.push(raw.get().as_bytes());
    builder.boundary();
}

/// Each message is a piece of its own; what is no list of messages is one piece.
fn push_messages(builder: &mut PrefixBuilder, list: &RawValue) {
    let Ok(messages) = serde_json::from_str::<Vec<Message<'_>>>(list.get()) else { return push(builder, list) };
    for message in messages {
        for raw in [message.role, message.content, message.tool_calls].into_iter().flatten() {
            builder.push(raw.get().as_bytes());
        }
        builder.boundary();
    }
}

/// How a model is called by the router.
pub(super) fn key_of(model: &str) -> ModelKey {
    ModelKey(hash_of(model.as_bytes()))
}

/// A number that is the same at every gateway.
pub(super) fn hash_of(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHAT: &str = "/v1/chat/completions";

    fn common(a: &Prompt, b: &Prompt) -> u64 {
        let known: Vec<u64> = a.chain.boundaries().map(|boundary| boundary.hash).collect();
        let shared = b.chain.boundaries().filter(|boundary| known.contains(&boundary.hash));
        shared.map(|boundary| boundary.end_bytes).max().unwrap_or(0)
    }

    fn chat(system: &str, question: &str) -> Vec<u8> {
        let messages =
            serde_json::json!([{"role": "system", "content": system}, {"role": "user", "content": question}]);
        serde_json::json!({"model": "m", "stream": true, "messages": messages}).to_string().into_bytes()
    }

    #[test]
    fn the_same_system_prompt_is_shared_and_nothing_else_is() {
        let (one, two) = (read(&chat(&"s".repeat(4000), "a"), CHAT), read(&chat(&"s".repeat(4000), "b"), CHAT));
        let shared = common(&one, &two);
        assert!((4000..4020).contains(&shared), "{shared}");
        assert_eq!(common(&one, &read(&chat(&"t".repeat(4000), "a"), CHAT)), 0);
        assert_eq!((one.model.as_str(), one.stream), ("m", true));
        // The same text for another model is another prompt.
        let other = String::from_utf8(chat(&"s".repeat(4000), "a")).unwrap().replace("\"m\"", "\"n\"");
        assert_eq!(common(&one, &read(other.as_bytes(), CHAT)), 0);
    }

    #[test]
    fn usage_is_asked_for_where_the_caller_left_it_open() {
        let asked = |body: &str, path| read(body.as_bytes(), path).usage_at;
        assert_eq!(asked(r#"{"stream":true}"#, CHAT), Some(1));
        assert_eq!(asked(r#" {"stream": true }"#, CHAT), Some(2));
        assert_eq!(asked(r#"{"stream":false}"#, CHAT), None);
        assert_eq!(asked(r#"{"stream":true,"stream_options":{"include_usage":false}}"#, CHAT), None);
        assert_eq!(asked(r#"{"stream":true,"stream_options":null}"#, CHAT), None);
        assert_eq!(asked(r#"{"stream":true}"#, "/v1/messages"), None);
    }

    #[tokio::test]
    async fn forms_name_their_model() {
        let form = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nname=\"model\"\r\n\r\nx\r\n\
                    --b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--b--\r\n";
        let read = async |body: &'static str, kind| read_form(Bytes::from_static(body.as_bytes()), kind).await.model;
        assert_eq!(read(form, "multipart/form-data; boundary=b").await, "whisper-1");
        for (body, kind) in [(form, "multipart/form-data"), ("--b", "multipart/form-data; boundary=b")] {
            assert_eq!(read(body, kind).await, "");
        }
    }

    #[test]
    fn other_dialects_have_prompts_too() {
        let long = "x".repeat(3000);
        for (key, value) in [
            ("prompt", serde_json::json!(long)),
            ("input", serde_json::json!(long)),
            ("input", serde_json::json!([{"role": "user", "content": [{"type": "input_text", "text": long}]}])),
            ("system", serde_json::json!(long)),
            ("messages", serde_json::json!("not a list")),
        ] {
            let body = serde_json::json!({"model": "m", key: value}).to_string();
            assert!(read(body.as_bytes(), "/v1/x").chain.text_bytes() > 10, "{key}");
        }
    }

    proptest! {
        #[test]
        fn any_body_is_read(body in prop::collection::vec(any::<u8>(), 0..2000)) {
            let prompt = read(&body, CHAT);
            prop_assert!(prompt.usage_at.is_none() && !prompt.stream);
        }
    }
}
