//! Anthropic's Messages, read: blocks become messages and calls of functions, everything else is as for a chat.

use super::{
    ask::{self, Generation, MESSAGES_MAX, PARTS_MAX, Shared},
    conversation::Conversation,
    fields::{Bounded, Fields, Text},
    output::{self, AskedFunction, TOOLS_MAX},
};
use crate::errors::ApiError;
use serde::Deserialize;
use serde_json::value::RawValue;
use warmset_core::inference::{Output, TextFormat, ToolChoice, Tools};

/// Reads the body of `/v1/messages`.
pub(crate) fn generation(body: &[u8]) -> Result<Generation, ApiError> {
    let fields = Fields::parse(body)?;
    let max_tokens = fields.integer("max_tokens", 1..=ask::MAX_TOKENS_MAX)?;
    let max_tokens = max_tokens.ok_or_else(|| ApiError::param("max_tokens", "max_tokens is missing"))?;
    read(&fields, Some(max_tokens), fields.flag("stream")?)
}

/// Reads the body of `/v1/messages/count_tokens`: a generation of nothing tells how long its prompt is.
pub(crate) fn counting(body: &[u8]) -> Result<Generation, ApiError> {
    read(&Fields::parse(body)?, Some(0), false)
}

fn read(fields: &Fields<'_>, max_tokens: Option<u32>, stream: bool) -> Result<Generation, ApiError> {
    refuse_unsupported(fields)?;
    let messages = conversation(fields)?.into_json();
    let output = output::checked(Output { format: format(fields)?, tools: tools(fields)?, logprobs: None })?;
    let stop = ask::stops(fields, "stop_sequences")?;
    let sampling = ask::sampling(fields)?;
    let tier = match fields.text("service_tier")?.as_deref() {
        None | Some("auto" | "standard_only") => None,
        Some(_) => return Err(ApiError::param("service_tier", "service_tier must be auto or standard_only")),
    };
    ask::single(fields, messages, Shared { max_tokens, stop, sampling, output, stream, tier })
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.refuse("mcp_servers", &["[]"], "mcp_servers are not supported")?;
    fields.refuse("container", &[], "containers are not supported")?;
    #[derive(Deserialize)]
    struct Thinking<'a> {
        #[serde(rename = "type", borrow)]
        kind: Text<'a>,
    }
    match fields.read::<Thinking<'_>>("thinking", "an object with a type")? {
        Some(thinking) if thinking.kind.0 != "disabled" => {
            Err(ApiError::unsupported("thinking", "thinking is not supported; leave it out or disable it"))
        }
        _ => Ok(()),
    }
}

#[derive(Deserialize)]
struct OutputConfig<'a> {
    #[serde(borrow, default)]
    format: Option<OutputFormat<'a>>,
}

#[derive(Deserialize)]
struct OutputFormat<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

fn format(fields: &Fields<'_>) -> Result<Option<TextFormat>, ApiError> {
    let config = fields.read::<OutputConfig<'_>>("output_config", "an object")?;
    let Some(format) = config.and_then(|config| config.format) else { return Ok(None) };
    match (&*format.kind.0, format.schema) {
        ("json_schema", Some(schema)) => Ok(Some(TextFormat::JsonSchema { schema: schema.get().to_owned() })),
        _ => Err(ApiError::param("output_config", "output_config.format must be a json_schema with its schema")),
    }
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Text<'a>,
    #[serde(borrow)]
    content: &'a RawValue,
}

#[derive(Deserialize)]
struct Block<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    id: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_use_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

fn conversation(fields: &Fields<'_>) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(system) = fields.raw("system") {
        conversation.say("system", &text_of(system, "system")?);
    }
    let expected = format!("a list of 1 to {MESSAGES_MAX} messages");
    let list = fields.read::<Bounded<&RawValue, MESSAGES_MAX>>("messages", &expected)?;
    let list = list.filter(|list| !list.0.is_empty());
    let Bounded(list) = list.ok_or_else(|| ApiError::param("messages", format!("messages must be {expected}")))?;
    for (index, raw) in list.into_iter().enumerate() {
        let at = format!("messages[{index}]");
        let message: Message<'_> = output::part(raw, &at, "an object with role and content")?;
        match &*message.role.0 {
            "user" => user(&mut conversation, message.content, &format!("{at}.content"))?,
            "assistant" => assistant(&mut conversation, message.content, &format!("{at}.content"))?,
            "system" => conversation.say("system", &text_of(message.content, &format!("{at}.content"))?),
            _ => return Err(ApiError::param(format!("{at}.role"), format!("{at}.role must be user or assistant"))),
        }
    }
    if conversation.last_role() == Some("assistant") {
        let message = "the last message must not be the assistant's: beginnings of answers are not supported";
        return Err(ApiError::param("messages", message));
    }
    if conversation.is_empty() {
        return Err(ApiError::param("messages", "messages say nothing"));
    }
    Ok(conversation)
}

/// A text, or blocks.
fn blocks<'a>(raw: &'a RawValue, at: &str) -> Result<Result<String, Vec<Block<'a>>>, ApiError> {
    if raw.get().starts_with('"') {
        return output::part(raw, at, "a string").map(Ok);
    }
    let expected = "a string or a list of blocks with a type";
    output::part::<Bounded<Block<'a>, PARTS_MAX>>(raw, at, expected).map(|blocks| Err(blocks.0))
}

fn unsupported(kind: &str, at: &str) -> ApiError {
    let kind: String = kind.chars().take(32).collect();
    ApiError::param(at.to_owned(), format!("{at} has a block of type \"{kind}\", which is not supported here"))
}

/// The text of blocks that hold nothing else.
fn text_of(raw: &RawValue, at: &str) -> Result<String, ApiError> {
    let blocks = match blocks(raw, at)? {
        Ok(text) => return Ok(text),
        Err(blocks) => blocks,
    };
    let texts = blocks.into_iter().map(|block| match (&*block.kind.0, block.text) {
        ("text", Some(text)) => Ok(text.0.into_owned()),
        (kind, _) => Err(unsupported(kind, at)),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn user(conversation: &mut Conversation, raw: &RawValue, at: &str) -> Result<(), ApiError> {
    let blocks = match blocks(raw, at)? {
        Ok(text) => {
            conversation.say("user", &text);
            return Ok(());
        }
        Err(blocks) => blocks,
    };
    let mut texts = Vec::new();
    for block in blocks {
        match (&*block.kind.0, block.text, block.tool_use_id) {
            ("text", Some(text), _) => texts.push(text.0.into_owned()),
            ("tool_result", _, Some(id)) => {
                let text = block.content.filter(|content| content.get() != "null");
                let text = text.map_or_else(|| Ok(String::new()), |content| text_of(content, at))?;
                conversation.answer(&id.0, &text);
            }
            (kind, ..) => return Err(unsupported(kind, at)),
        }
    }
    if !texts.is_empty() {
        conversation.say("user", &texts.join("\n"));
    }
    Ok(())
}

fn assistant(conversation: &mut Conversation, raw: &RawValue, at: &str) -> Result<(), ApiError> {
    let blocks = match blocks(raw, at)? {
        Ok(text) => {
            conversation.say("assistant", &text);
            return Ok(());
        }
        Err(blocks) => blocks,
    };
    let (mut texts, mut calls) = (Vec::new(), Vec::new());
    for block in blocks {
        match (&*block.kind.0, block.text, block.id, block.name) {
            ("text", Some(text), ..) => texts.push(text.0.into_owned()),
            ("tool_use", _, Some(id), Some(name)) => calls.push((id, name, block.input)),
            // What a model thought is not part of what it is told.
            ("thinking" | "redacted_thinking", ..) => {}
            (kind, ..) => return Err(unsupported(kind, at)),
        }
    }
    conversation.say("assistant", &texts.join("\n"));
    for (id, name, input) in calls {
        conversation.call(&id.0, &name.0, input.map_or("{}", RawValue::get));
    }
    Ok(())
}

#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(rename = "type", borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow)]
    name: Text<'a>,
    #[serde(default)]
    description: Option<String>,
    #[serde(borrow, default)]
    input_schema: Option<&'a RawValue>,
    #[serde(default)]
    strict: Option<bool>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

fn tools(fields: &Fields<'_>) -> Result<Option<Tools>, ApiError> {
    let expected = format!("a list of at most {TOOLS_MAX} tools");
    let list = fields.read::<Bounded<&RawValue, TOOLS_MAX>>("tools", &expected)?.map_or_else(Vec::new, |list| list.0);
    let mut functions = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        let at = format!("tools[{index}]");
        let tool: Tool<'_> = output::part(raw, &at, "an object with name and input_schema")?;
        if tool.kind.as_ref().is_some_and(|kind| kind.0 != "custom") {
            let message = format!("{at} must be a tool of the caller's own, of type custom");
            return Err(ApiError::param(at, message));
        }
        let Tool { name, description, input_schema: parameters, strict, .. } = tool;
        functions.push(output::function(AskedFunction { name, description, parameters, strict }, &at)?);
    }
    let choice = fields.read::<Choice<'_>>("tool_choice", "an object of type auto, any, tool or none")?;
    let parallel = choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use) != Some(true);
    let choice = match choice {
        None if functions.is_empty() => ToolChoice::None,
        None => ToolChoice::Auto,
        Some(choice) => match (&*choice.kind.0, choice.name) {
            ("auto", _) => ToolChoice::Auto,
            ("any", _) => ToolChoice::Required,
            ("none", _) => ToolChoice::None,
            ("tool", Some(name)) => ToolChoice::Function { name },
            _ => return Err(ApiError::param("tool_choice", "tool_choice must be of type auto, any, tool or none")),
        },
    };
    output::collected(functions, choice, parallel)
}
