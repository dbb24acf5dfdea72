//! Functions and calls of them in a prompt: through the model's own template where it knows the format that answers
//! are held to, and otherwise as text that any model can follow.

use super::{TemplateError, text};
use crate::protocol::{Function, ToolChoice, Tools};
use minijinja::{Value, value::Serde};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use warmset_grammar::{CALL_ARGUMENTS, CALL_BEGIN, CALL_END, CALL_NAME};

/// A call in a conversation, as OpenAI writes it.
#[derive(Deserialize)]
struct Call {
    #[serde(default)]
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    /// JSON text.
    #[serde(default)]
    arguments: String,
}

/// Whether a template renders functions and calls in the format that answers are held to.
pub(super) fn is_native(source: &str) -> bool {
    source.contains(CALL_BEGIN) && source.contains("tools")
}

/// Functions as the template's variable `tools`.
pub(super) fn value(tools: Option<&Tools>) -> Value {
    match callable(tools) {
        Some(tools) => Value::from(Serde(tools.functions.iter().map(described).collect::<Vec<Json>>())),
        None => Value::UNDEFINED,
    }
}

/// Functions that may be called; a model that is to call none is not told of any.
fn callable(tools: Option<&Tools>) -> Option<&Tools> {
    tools.filter(|tools| tools.choice != ToolChoice::None)
}

fn described(function: &Function) -> Json {
    let parameters: Json = serde_json::from_str(&function.parameters).unwrap_or_default();
    let mut described = json!({ "name": function.name });
    if let Some(description) = &function.description {
        described["description"] = Json::from(description.as_str());
    }
    described["parameters"] = parameters;
    json!({ "type": "function", "function": described })
}

/// Gives a message's calls the form that templates expect: arguments as values, not as text.
pub(super) fn open_calls(fields: &mut BTreeMap<String, Value>) -> Result<(), TemplateError> {
    if let Some(calls) = take_calls(fields)? {
        let calls: Vec<Json> = calls
            .iter()
            .map(|call| {
                let arguments: Json = serde_json::from_str(&call.function.arguments).unwrap_or_else(|_| json!({}));
                let function = json!({ "name": call.function.name, "arguments": arguments });
                json!({ "id": call.id, "type": "function", "function": function })
            })
            .collect();
        fields.insert("tool_calls".into(), Value::from(Serde(calls)));
    }
    Ok(())
}

fn take_calls(fields: &mut BTreeMap<String, Value>) -> Result<Option<Vec<Call>>, TemplateError> {
    let Some(calls) = fields.remove("tool_calls").filter(|calls| !calls.is_none()) else { return Ok(None) };
    let wrong = || TemplateError::Messages("tool_calls must be a list of calls of functions".into());
    let calls = serde_json::to_value(&calls).map_err(|_| wrong())?;
    let calls: Vec<Call> = serde_json::from_value(calls).map_err(|_| wrong())?;
    Ok((!calls.is_empty()).then_some(calls))
}

/// Writes calls and their results into the texts of a message, for templates that know of neither.
pub(super) fn as_text(fields: &mut BTreeMap<String, Value>) -> Result<(), TemplateError> {
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default().to_owned();
    let content = fields.get("content").map(ToString::to_string).unwrap_or_default();
    if let Some(calls) = take_calls(fields)? {
        let mut words = content;
        for call in calls {
            if !words.is_empty() {
                words.push('\n');
            }
            let arguments = if call.function.arguments.is_empty() { "{}" } else { &call.function.arguments };
            words.push_str(&[CALL_BEGIN, CALL_NAME, &call.function.name, CALL_ARGUMENTS, arguments, CALL_END].concat());
        }
        fields.insert("content".into(), text(&words));
    } else if role == "tool" || role == "function" {
        fields.insert("role".into(), text("user"));
        fields.insert("content".into(), text(&format!("<tool_response>\n{content}\n</tool_response>")));
    }
    Ok(())
}

/// What a model is told about functions, if its template does not do that.
pub(super) fn instructions(tools: Option<&Tools>) -> Option<String> {
    let tools = callable(tools)?;
    let functions: Vec<String> = tools.functions.iter().map(|function| python_json(&described(function))).collect();
    Some(format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function \
         signatures within <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json \
         object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": \
         <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
        functions.join("\n")
    ))
}

fn python_json(value: &Json) -> String {
    let mut bytes = Vec::new();
    let spaced = super::functions::Spaced::default();
    // Values can always be written, and JSON is text.
    let _ = value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, spaced));
    String::from_utf8(bytes).unwrap_or_default()
}
