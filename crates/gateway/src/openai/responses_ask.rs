//! OpenAI's Responses, read: items become messages and calls of functions, everything else is as for a chat. Nothing
//! is stored but what is made in the background, and what else needs a store is refused.

use super::{
    ask::{self, Generation, MESSAGES_MAX, PARTS_MAX, Part, Shared},
    conversation::Conversation,
    fields::{Bounded, Fields, Text},
    output::{self, AskedFunction, TOOLS_MAX},
};
use crate::errors::ApiError;
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};
use warmset_core::inference::{Output, TextFormat, Tools};

const METADATA_MAX: usize = 16;

/// Reads the body of `/v1/responses`.
pub(crate) fn generation(body: &[u8]) -> Result<Generation, ApiError> {
    let fields = Fields::parse(body)?;
    let background = fields.flag("background")?;
    refuse_unsupported(&fields, background)?;
    let conversation = conversation(&fields)?;
    let output = output::checked(Output { format: format(&fields)?, tools: tools(&fields)?, logprobs: None })?;
    let max_tokens = fields.integer("max_output_tokens", 1..=ask::MAX_TOKENS_MAX)?;
    let (sampling, tier, stream) = (ask::sampling(&fields)?, ask::tier(&fields)?, fields.flag("stream")?);
    if background && stream {
        let message = "a response is made in the background or streamed, not both";
        return Err(ApiError::unsupported("stream", message));
    }
    let echo = echo(&fields, background)?;
    let shared = Shared { max_tokens, stop: Vec::new(), sampling, output, stream, tier };
    let generation = ask::single(&fields, conversation.into_json(), shared)?;
    Ok(Generation { background, echo: Some(Box::new(echo)), ..generation })
}

fn refuse_unsupported(fields: &Fields<'_>, background: bool) -> Result<(), ApiError> {
    let store: (&[&str], &str) = if background {
        (&["true"], "a response made in the background is stored until it is forgotten")
    } else {
        (&["false"], "responses are not stored here; send the whole conversation as input")
    };
    let refused: [(&str, &[&str], &str); 8] = [
        ("store", store.0, store.1),
        ("previous_response_id", &[], "responses are not stored here; send the whole conversation as input"),
        ("conversation", &[], "conversations are not stored here; send the whole conversation as input"),
        ("prompt", &[], "stored prompts are not supported"),
        ("truncation", &["\"disabled\""], "truncation is not supported: a prompt that is too long is refused"),
        ("include", &["[]"], "include is not supported"),
        ("max_tool_calls", &[], "max_tool_calls is for tools of the server, which there are none of"),
        ("top_logprobs", &["0"], "log probabilities are told by /v1/chat/completions"),
    ];
    refused.into_iter().try_for_each(|(name, harmless, message)| fields.refuse(name, harmless, message))
}

#[derive(Deserialize)]
struct Item<'a> {
    #[serde(rename = "type", borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    role: Option<Text<'a>>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    call_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    arguments: Option<Text<'a>>,
    #[serde(borrow, default)]
    output: Option<&'a RawValue>,
}

fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(instructions) = fields.text("instructions")? {
        conversation.say("system", &instructions);
    }
    let input = fields.raw("input").ok_or_else(|| ApiError::param("input", "input is missing"))?;
    if input.get().starts_with('"') {
        conversation.say("user", &output::part::<String>(input, "input", "a string")?);
        return Ok(conversation);
    }
    let expected = format!("a string or a list of 1 to {MESSAGES_MAX} items");
    let Bounded(items) = output::part::<Bounded<&RawValue, MESSAGES_MAX>>(input, "input", &expected)?;
    if items.is_empty() {
        return Err(ApiError::param("input", format!("input must be {expected}")));
    }
    for (index, raw) in items.into_iter().enumerate() {
        let at = format!("input[{index}]");
        let item: Item<'_> = output::part(raw, &at, "an item")?;
        take(&mut conversation, item, &at)?;
    }
    Ok(conversation)
}

fn take(conversation: &mut Conversation, item: Item<'_>, at: &str) -> Result<(), ApiError> {
    let kind = item.kind.map_or_else(|| "message".into(), |kind| kind.0);
    match (&*kind, item.call_id) {
        ("message", _) => {
            let role = item.role.map(|role| role.0).unwrap_or_default();
            if !["user", "assistant", "system", "developer"].contains(&&*role) {
                let message = format!("{at}.role must be user, assistant, system or developer");
                return Err(ApiError::param(format!("{at}.role"), message));
            }
            let content = item
                .content
                .ok_or_else(|| ApiError::param(format!("{at}.content"), format!("{at}.content is missing")))?;
            conversation.say(&role, &text_of(content, &format!("{at}.content"))?);
        }
        ("function_call", Some(id)) => {
            let (name, arguments) = (item.name.unwrap_or(Text("".into())), item.arguments);
            let arguments = arguments.map_or_else(|| "{}".into(), |arguments| arguments.0);
            if serde_json::from_str::<Value>(&arguments).is_err() {
                let at = format!("{at}.arguments");
                return Err(ApiError::param(at.clone(), format!("{at} must be JSON as text")));
            }
            conversation.call(&id.0, &name.0, &arguments);
        }
        ("function_call_output", Some(id)) => {
            let output = item.output.map_or_else(|| Ok(String::new()), |output| text_of(output, at))?;
            conversation.answer(&id.0, &output);
        }
        // What a model thought is not part of what it is told.
        ("reasoning", _) => {}
        (kind, _) => {
            let kind: String = kind.chars().take(32).collect();
            let message = format!("{at} is an item of type \"{kind}\" that is not supported or not complete");
            return Err(ApiError::param(at.to_owned(), message));
        }
    }
    Ok(())
}

fn text_of(raw: &RawValue, at: &str) -> Result<String, ApiError> {
    if raw.get().starts_with('"') {
        return output::part(raw, at, "a string");
    }
    let expected = "a string or a list of text parts";
    let Bounded(parts) = output::part::<Bounded<Part<'_>, PARTS_MAX>>(raw, at, expected)?;
    let texts = parts.into_iter().map(|part| match (&*part.kind.0, part.text) {
        ("input_text" | "output_text" | "text", Some(text)) => Ok(text.0.into_owned()),
        (kind, _) => {
            let kind: String = kind.chars().take(32).collect();
            let message = format!("{at} has a part of type \"{kind}\"; only text is supported");
            Err(ApiError::param(at.to_owned(), message))
        }
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

#[derive(Deserialize)]
struct TextConfig<'a> {
    #[serde(borrow, default)]
    format: Option<Format<'a>>,
}

#[derive(Deserialize)]
struct Format<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

fn format(fields: &Fields<'_>) -> Result<Option<TextFormat>, ApiError> {
    let config = fields.read::<TextConfig<'_>>("text", "an object with a format")?;
    let Some(format) = config.and_then(|config| config.format) else { return Ok(None) };
    match (&*format.kind.0, format.schema) {
        ("text", _) => Ok(None),
        ("json_object", _) => Ok(Some(TextFormat::JsonObject)),
        ("json_schema", Some(schema)) => Ok(Some(TextFormat::JsonSchema { schema: schema.get().to_owned() })),
        _ => Err(ApiError::param("text", "text.format must be text, json_object, or json_schema with its schema")),
    }
}

#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(default)]
    description: Option<String>,
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
    #[serde(default)]
    strict: Option<bool>,
}

fn tools(fields: &Fields<'_>) -> Result<Option<Tools>, ApiError> {
    let expected = format!("a list of at most {TOOLS_MAX} functions");
    let list = fields.read::<Bounded<&RawValue, TOOLS_MAX>>("tools", &expected)?.map_or_else(Vec::new, |list| list.0);
    let mut functions = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        let at = format!("tools[{index}]");
        let tool: Tool<'_> = output::part(raw, &at, "a function with a name")?;
        let Tool { name, description, parameters, strict, .. } = tool;
        let name = name.filter(|_| tool.kind.0 == "function");
        let name = name.ok_or_else(|| ApiError::param(at.clone(), format!("{at} must be a function with a name")))?;
        functions.push(output::function(AskedFunction { name, description, parameters, strict }, &at)?);
    }
    let choice = output::tool_choice(fields, !functions.is_empty())?;
    let parallel = fields.read("parallel_tool_calls", "true or false")?.unwrap_or(true);
    output::collected(functions, choice, parallel)
}

/// What a response made in the background repeats of a request that is not kept any more.
pub(crate) fn echo_of_nothing() -> Map<String, Value> {
    Fields::parse(b"{}").and_then(|fields| echo(&fields, true)).unwrap_or_default()
}

/// What the response repeats of the request.
fn echo(fields: &Fields<'_>, background: bool) -> Result<Map<String, Value>, ApiError> {
    let metadata = fields.read::<Map<String, Value>>("metadata", "an object")?.unwrap_or_default();
    if metadata.len() > METADATA_MAX || metadata.values().any(|value| !value.is_string()) {
        return Err(ApiError::param("metadata", format!("metadata must hold at most {METADATA_MAX} texts")));
    }
    let value = |name: &'static str, otherwise: Value| {
        fields.raw(name).and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or(otherwise)
    };
    let mut echo = Map::new();
    for (name, otherwise) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("parallel_tool_calls", json!(true)),
        ("temperature", json!(1.0)),
        ("top_p", json!(1.0)),
        ("text", json!({ "format": { "type": "text" } })),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("user", Value::Null),
        ("safety_identifier", Value::Null),
        ("prompt_cache_key", Value::Null),
        ("reasoning", json!({ "effort": null, "summary": null })),
    ] {
        echo.insert(name.into(), value(name, otherwise));
    }
    for (name, value) in [
        ("metadata", Value::Object(metadata)),
        ("truncation", json!("disabled")),
        ("previous_response_id", Value::Null),
        ("store", json!(background)),
        ("background", json!(background)),
    ] {
        echo.insert(name.into(), value);
    }
    Ok(echo)
}
