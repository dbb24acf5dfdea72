//! OpenAI's messages as template values. Most templates add strings together, so lists of text parts become one text
//! unless the template looks at parts itself.

use super::{MESSAGES_MAX, TemplateError, text, tools};
use minijinja::Value;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
    Nothing(()),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default = "no_content")]
    content: Content,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

fn no_content() -> Content {
    Content::Nothing(())
}

/// What a conversation's calls of functions become.
#[derive(Debug, Clone, Copy)]
pub(super) enum Calls<'a> {
    /// Values that the template renders itself.
    Values,
    /// Text, after instructions for the model if there are any.
    Text(Option<&'a str>),
}

/// Parses messages. `takes_parts` is asked only where a message has parts.
pub(super) fn parse(messages: &str, calls: Calls<'_>, takes_parts: impl Fn() -> bool) -> Result<Value, TemplateError> {
    let messages: Vec<Message> = serde_json::from_str(messages)
        .map_err(|error| TemplateError::Messages(format!("invalid messages: {error}")))?;
    if messages.is_empty() {
        return Err(TemplateError::Messages("messages must not be empty".into()));
    }
    if messages.len() > MESSAGES_MAX {
        return Err(TemplateError::Messages(format!("more than {MESSAGES_MAX} messages")));
    }
    let has_parts = messages.iter().any(|message| matches!(message.content, Content::Parts(_)));
    let takes_parts = has_parts && takes_parts();
    let mut values = Vec::with_capacity(messages.len() + 1);
    for message in messages {
        let mut fields = to_fields(message, takes_parts)?;
        match calls {
            Calls::Values => tools::open_calls(&mut fields)?,
            Calls::Text(_) => tools::as_text(&mut fields)?,
        }
        values.push(fields);
    }
    if let Calls::Text(Some(instructions)) = calls {
        instruct(&mut values, instructions);
    }
    Ok(values.into_iter().map(Value::from).collect())
}

/// Puts instructions behind those of the conversation's own system message, or before everything.
fn instruct(messages: &mut Vec<BTreeMap<String, Value>>, instructions: &str) {
    let is_system =
        |role: Option<&Value>| role.and_then(Value::as_str).is_some_and(|role| role == "system" || role == "developer");
    if let Some(first) = messages.first_mut().filter(|first| is_system(first.get("role")))
        && let Some(own) = first.get("content").and_then(Value::as_str)
    {
        let both = text(&format!("{own}\n\n{instructions}"));
        first.insert("content".into(), both);
        return;
    }
    messages.insert(0, BTreeMap::from([("role".into(), text("system")), ("content".into(), text(instructions))]));
}

/// A conversation of one message in one part, to try a template with.
pub(super) fn one_part(words: &str) -> Value {
    let content = Value::from(vec![part_value(words.to_owned())]);
    Value::from(vec![Value::from(BTreeMap::from([("role", text("user")), ("content", content)]))])
}

fn to_fields(message: Message, takes_parts: bool) -> Result<BTreeMap<String, Value>, TemplateError> {
    let content = match message.content {
        Content::Text(words) => text(&words),
        Content::Nothing(()) => text(""),
        Content::Parts(parts) if takes_parts => {
            parts.into_iter().map(|part| text_of(part).map(part_value)).collect::<Result<Value, _>>()?
        }
        Content::Parts(parts) => {
            let texts = parts.into_iter().map(text_of).collect::<Result<Vec<_>, _>>()?;
            text(&texts.join("\n"))
        }
    };
    let mut fields: BTreeMap<String, Value> = message.rest;
    fields.insert("role".into(), text(&message.role));
    fields.insert("content".into(), content);
    Ok(fields)
}

fn text_of(part: Part) -> Result<String, TemplateError> {
    match (part.kind.as_str(), part.text) {
        ("text" | "input_text" | "output_text", Some(text)) => Ok(text),
        (kind, _) => {
            Err(TemplateError::Messages(format!("content parts of type {kind:?} are not supported by this model")))
        }
    }
}

fn part_value(words: String) -> Value {
    Value::from(BTreeMap::from([("type", text("text")), ("text", text(&words))]))
}
