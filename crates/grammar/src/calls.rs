//! Calls of functions as text, in the format that most models with tools were trained on: JSON between marks.

use crate::{Grammar, GrammarError, checked, schema};
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use std::fmt::Write;
use warmset_core::inference::{Function, ToolChoice, Tools};

/// What comes before the JSON of a call.
pub const CALL_BEGIN: &str = "<tool_call>";
/// What comes before the name.
pub const CALL_NAME: &str = "\n{\"name\": \"";
/// What comes between the name and the arguments.
pub const CALL_ARGUMENTS: &str = "\", \"arguments\": ";
/// What comes after the arguments.
pub const CALL_END: &str = "}\n</tool_call>";

/// The grammar of an answer that may call functions, or must.
pub fn calls(tools: &Tools) -> Result<Grammar, GrammarError> {
    let callable: Vec<&Function> = match &tools.choice {
        ToolChoice::None => Vec::new(),
        ToolChoice::Auto | ToolChoice::Required => tools.functions.iter().collect(),
        ToolChoice::Function { name } => tools.functions.iter().filter(|function| function.name == *name).collect(),
    };
    if callable.is_empty() {
        return Err(GrammarError("there is no function to call".into()));
    }
    let (first, more) = match &tools.choice {
        ToolChoice::Auto => ("said", "said"),
        _ => ("call", "call"),
    };
    let mut grammar = match (&tools.choice, tools.parallel) {
        (ToolChoice::Auto, true) => "start: said* REST\n".to_owned(),
        (ToolChoice::Auto, false) => "start: said | REST\n".to_owned(),
        (_, true) => format!("start: {first} (\"\\n\" {more})*\n"),
        (_, false) => format!("start: {first}\n"),
    };
    // Text up to a call, and text without one.
    let begin = literal(CALL_BEGIN);
    let _ = write!(grammar, "REST: /(.|\\n)*/\nspeech[lazy]: REST {begin}\nsaid: speech called\n");
    let _ = write!(grammar, "call: {begin} called\ncalled: (");
    let names: Vec<String> = (0..callable.len()).map(|index| format!("f{index}")).collect();
    let _ = writeln!(grammar, "{}) {}", names.join(" | "), literal(CALL_END));
    for (name, function) in names.iter().zip(callable) {
        let head = literal(&format!("{CALL_NAME}{}{CALL_ARGUMENTS}", function.name));
        let _ = writeln!(grammar, "{name}: {head} a{name}\na{name}: %json {}", parameters(function)?);
    }
    checked(Grammar(TopLevelGrammar::from_lark(grammar)))
}

/// The schema of a function's arguments. One that cannot be held to is passed over unless it must be kept.
fn parameters(function: &Function) -> Result<Value, GrammarError> {
    let parsed = schema::parse(&function.parameters)
        .and_then(|parsed| checked(Grammar(TopLevelGrammar::from_json_schema(parsed.clone()))).map(|_| parsed));
    match parsed {
        Ok(mut schema) => {
            if let Some(schema) = schema.as_object_mut() {
                schema.entry("type").or_insert_with(|| json!("object"));
            }
            Ok(schema)
        }
        Err(_) if !function.strict => schema::parse("{\"type\":\"object\"}"),
        Err(error) => Err(GrammarError(format!("the parameters of {} cannot be kept: {error}", function.name))),
    }
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
