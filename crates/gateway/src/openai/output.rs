//! What an answer may be, as asked for: formats, grammars and functions, checked before anything is loaded.

use super::{
    ask::Route,
    fields::{Bounded, Fields, Text},
};
use crate::errors::ApiError;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeSet;
use warmset_core::inference::{Function, Output, TOP_LOGPROBS_MAX, TextFormat, ToolChoice, Tools};

/// Functions of one request, as OpenAI's.
pub(crate) const TOOLS_MAX: usize = 128;
const NAME_CHARACTERS_MAX: usize = 64;
const DESCRIPTION_BYTES_MAX: usize = 16 << 10;

/// Everything beside the text.
pub(crate) fn output(route: Route, fields: &Fields<'_>) -> Result<Output, ApiError> {
    let logprobs = logprobs(route, fields)?;
    let format = format(fields)?;
    let tools = match route {
        Route::Chat => tools(fields)?,
        Route::Text => None,
    };
    checked(Output { format, tools, logprobs })
}

/// Refuses what does not go together, and grammars that no engine could keep to.
pub(crate) fn checked(output: Output) -> Result<Output, ApiError> {
    let calls = output.tools.as_ref().filter(|tools| tools.choice != ToolChoice::None);
    if let Some(format) = &output.format {
        let param = if matches!(format, TextFormat::Gbnf { .. }) { "grammar" } else { "response_format" };
        if calls.is_some() {
            let message = format!("{param} cannot be combined with tools that may be called");
            return Err(ApiError::unsupported(param, message));
        }
        warmset_grammar::format(format).map_err(|error| ApiError::param(param, format!("{param}: {error}")))?;
    }
    if let Some(tools) = calls {
        warmset_grammar::check_tools(tools).map_err(|error| ApiError::param("tools", format!("tools: {error}")))?;
    }
    Ok(output)
}

/// How many alternatives are told for each token, if log probabilities are asked for.
fn logprobs(route: Route, fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    if route == Route::Text {
        return fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX);
    }
    let wanted = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::param("top_logprobs", "top_logprobs needs logprobs to be true")),
    }
}

#[derive(Deserialize)]
struct ResponseFormat<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    json_schema: Option<NamedSchema<'a>>,
}

#[derive(Deserialize)]
struct NamedSchema<'a> {
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

fn format(fields: &Fields<'_>) -> Result<Option<TextFormat>, ApiError> {
    let expected = "an object of type text, json_object or json_schema";
    let wrong = |what: &str| ApiError::param("response_format", format!("response_format {what}"));
    let asked = match fields.read::<ResponseFormat<'_>>("response_format", expected)? {
        None => None,
        Some(format) => match &*format.kind.0 {
            "text" => None,
            "json_object" => Some(TextFormat::JsonObject),
            "json_schema" => {
                let schema = format.json_schema.and_then(|named| named.schema);
                let schema = schema.ok_or_else(|| wrong("needs json_schema.schema"))?;
                Some(TextFormat::JsonSchema { schema: schema.get().to_owned() })
            }
            _ => return Err(wrong(&format!("must be {expected}"))),
        },
    };
    let grammar = fields.text("grammar")?.filter(|grammar| !grammar.is_empty());
    match (asked, grammar) {
        (Some(_), Some(_)) => Err(ApiError::unsupported("grammar", "grammar cannot be combined with response_format")),
        (asked, grammar) => Ok(asked.or(grammar.map(|grammar| TextFormat::Gbnf { grammar }))),
    }
}

#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    function: Option<AskedFunction<'a>>,
}

#[derive(Deserialize)]
pub(crate) struct AskedFunction<'a> {
    #[serde(borrow)]
    pub(crate) name: Text<'a>,
    #[serde(default)]
    pub(crate) description: Option<String>,
    #[serde(borrow, default)]
    pub(crate) parameters: Option<&'a RawValue>,
    #[serde(default)]
    pub(crate) strict: Option<bool>,
}

/// One part of a field, with its place in the error.
pub(crate) fn part<'a, T: Deserialize<'a>>(raw: &'a RawValue, at: &str, expected: &str) -> Result<T, ApiError> {
    serde_json::from_str(raw.get()).map_err(|_| ApiError::param(at.to_owned(), format!("{at} must be {expected}")))
}

fn tools(fields: &Fields<'_>) -> Result<Option<Tools>, ApiError> {
    let expected = format!("a list of at most {TOOLS_MAX} functions");
    let list = fields.read::<Bounded<&RawValue, TOOLS_MAX>>("tools", &expected)?.map_or_else(Vec::new, |list| list.0);
    let mut functions = Vec::with_capacity(list.len());
    for (index, raw) in list.into_iter().enumerate() {
        let at = format!("tools[{index}]");
        let tool: Tool<'_> = part(raw, &at, "an object with type and function")?;
        let function = tool.function.filter(|_| tool.kind.0 == "function");
        let function = function.ok_or_else(|| ApiError::param(at.clone(), format!("{at} must be of type function")))?;
        functions.push(self::function(function, &format!("{at}.function"))?);
    }
    let choice = tool_choice(fields, !functions.is_empty())?;
    let parallel = fields.read("parallel_tool_calls", "true or false")?.unwrap_or(true);
    collected(functions, choice, parallel)
}

/// Functions and the choice between them, which must fit each other.
pub(crate) fn collected(
    functions: Vec<Function>,
    choice: ToolChoice,
    parallel: bool,
) -> Result<Option<Tools>, ApiError> {
    let names: BTreeSet<&str> = functions.iter().map(|function| function.name.as_str()).collect();
    if names.len() < functions.len() {
        return Err(ApiError::param("tools", "tools names a function twice"));
    }
    match &choice {
        ToolChoice::Function { name } if !names.contains(name.as_str()) => {
            Err(ApiError::param("tool_choice", "tool_choice names a function that is not in tools"))
        }
        ToolChoice::Required if functions.is_empty() => {
            Err(ApiError::param("tool_choice", "tool_choice needs tools to choose from"))
        }
        _ if functions.is_empty() => Ok(None),
        _ => Ok(Some(Tools { functions, choice, parallel })),
    }
}

/// Checks one function.
pub(crate) fn function(asked: AskedFunction<'_>, at: &str) -> Result<Function, ApiError> {
    let name = asked.name.0.into_owned();
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-.".contains(letter);
    if name.is_empty() || name.len() > NAME_CHARACTERS_MAX || !name.chars().all(is_plain) {
        let message =
            format!("{at}.name must have 1 to {NAME_CHARACTERS_MAX} letters, digits, dots, dashes, underscores");
        return Err(ApiError::param(format!("{at}.name"), message));
    }
    if asked.description.as_ref().is_some_and(|description| description.len() > DESCRIPTION_BYTES_MAX) {
        let message = format!("{at}.description must have at most {DESCRIPTION_BYTES_MAX} bytes");
        return Err(ApiError::param(format!("{at}.description"), message));
    }
    let strict = asked.strict.unwrap_or(false);
    let parameters = asked.parameters.filter(|parameters| parameters.get() != "null");
    let parameters = parameters.map_or("{\"type\":\"object\",\"properties\":{}}", RawValue::get).to_owned();
    if !parameters.starts_with('{') {
        let message = format!("{at}.parameters must be a JSON schema of an object");
        return Err(ApiError::param(format!("{at}.parameters"), message));
    }
    if strict {
        warmset_grammar::check_parameters(&parameters).map_err(|error| {
            ApiError::param(format!("{at}.parameters"), format!("{at}.parameters cannot be kept strictly: {error}"))
        })?;
    }
    Ok(Function { name, description: asked.description, parameters, strict })
}

#[derive(Deserialize)]
struct NamedChoice<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    function: Option<NamedFunction>,
}

#[derive(Deserialize)]
struct NamedFunction {
    name: String,
}

/// Which functions are called; one that is named at the top, or inside of `function` as a chat names it.
pub(crate) fn tool_choice(fields: &Fields<'_>, has_tools: bool) -> Result<ToolChoice, ApiError> {
    let wrong = || ApiError::param("tool_choice", "tool_choice must be none, auto, required, or name a function");
    let Some(raw) = fields.raw("tool_choice") else {
        return Ok(if has_tools { ToolChoice::Auto } else { ToolChoice::None });
    };
    match raw.get() {
        "\"none\"" => return Ok(ToolChoice::None),
        "\"auto\"" => return Ok(ToolChoice::Auto),
        "\"required\"" => return Ok(ToolChoice::Required),
        _ => {}
    }
    let named: NamedChoice<'_> = serde_json::from_str(raw.get()).map_err(|_| wrong())?;
    let name = named.name.or(named.function.map(|function| function.name));
    match name {
        Some(name) if named.kind.0 == "function" => Ok(ToolChoice::Function { name }),
        _ => Err(wrong()),
    }
}
