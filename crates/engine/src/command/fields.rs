//! A request's body, written field by field: what came as JSON text stays as it came, in the caller's order and spelling.

use crate::protocol::{Function, Output, TextFormat, ToolChoice, Tools};
use serde::Serialize;
use serde_json::{json, value::RawValue};

/// The fields of one object.
#[derive(Debug, Default)]
pub(super) struct Fields(String);

impl Fields {
    fn name(&mut self, name: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&json!(name).to_string());
        self.0.push(':');
    }

    /// A field with this value.
    pub(super) fn put(&mut self, name: &str, value: impl Serialize) {
        // Plain values and texts always have a JSON form.
        if let Ok(text) = serde_json::to_string(&value) {
            self.name(name);
            self.0.push_str(&text);
        }
    }

    /// A field that is JSON already.
    pub(super) fn put_json(&mut self, name: &str, text: &str) -> Result<(), String> {
        let raw: &RawValue = serde_json::from_str(text).map_err(|error| format!("{name} is not JSON: {error}"))?;
        self.name(name);
        self.0.push_str(raw.get());
        Ok(())
    }

    /// The whole object.
    pub(super) fn finish(mut self) -> String {
        if self.0.is_empty() {
            self.0.push('{');
        }
        self.0.push('}');
        self.0
    }
}

/// What the answer may be, and what is told of it beside its text.
pub(super) fn put_output(fields: &mut Fields, output: &Output, is_chat: bool) -> Result<(), String> {
    if let Some(format) = &output.format {
        put_format(fields, format)?;
    }
    if let Some(tools) = &output.tools {
        put_tools(fields, tools)?;
    }
    match output.logprobs {
        Some(top) if is_chat => {
            fields.put("logprobs", true);
            fields.put("top_logprobs", top);
        }
        Some(top) => fields.put("logprobs", top),
        None => {}
    }
    Ok(())
}

fn put_format(fields: &mut Fields, format: &TextFormat) -> Result<(), String> {
    match format {
        TextFormat::JsonObject => fields.put("response_format", json!({ "type": "json_object" })),
        TextFormat::JsonSchema { schema } => {
            let mut inner = Fields::default();
            inner.put("name", "answer");
            inner.put_json("schema", schema)?;
            inner.put("strict", true);
            let mut whole = Fields::default();
            whole.put("type", "json_schema");
            whole.put_json("json_schema", &inner.finish())?;
            fields.put_json("response_format", &whole.finish())?;
        }
        // llama.cpp's word; other servers have no such notation.
        TextFormat::Gbnf { grammar } => fields.put("grammar", grammar),
    }
    Ok(())
}

fn put_tools(fields: &mut Fields, tools: &Tools) -> Result<(), String> {
    let written = tools.functions.iter().map(written).collect::<Result<Vec<_>, _>>()?;
    fields.put_json("tools", &format!("[{}]", written.join(",")))?;
    match &tools.choice {
        ToolChoice::None => fields.put("tool_choice", "none"),
        ToolChoice::Auto => fields.put("tool_choice", "auto"),
        ToolChoice::Required => fields.put("tool_choice", "required"),
        ToolChoice::Function { name } => {
            fields.put("tool_choice", json!({ "type": "function", "function": { "name": name } }));
        }
    }
    fields.put("parallel_tool_calls", tools.parallel);
    Ok(())
}

fn written(function: &Function) -> Result<String, String> {
    let mut inner = Fields::default();
    inner.put("name", &function.name);
    if let Some(description) = &function.description {
        inner.put("description", description);
    }
    inner.put_json("parameters", &function.parameters)?;
    if function.strict {
        inner.put("strict", true);
    }
    let mut whole = Fields::default();
    whole.put("type", "function");
    whole.put_json("function", &inner.finish())?;
    Ok(whole.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_keep_the_order_of_their_keys() {
        let schema = r#"{"type":"object","properties":{"z":{},"a":{}}}"#;
        let function = Function {
            name: "look".into(),
            description: Some("looks".into()),
            parameters: schema.into(),
            strict: true,
        };
        let choice = ToolChoice::Function { name: "look".into() };
        let output = Output {
            format: Some(TextFormat::JsonSchema { schema: schema.into() }),
            tools: Some(Tools { functions: vec![function], choice, parallel: false }),
            logprobs: Some(2),
        };
        let mut fields = Fields::default();
        put_output(&mut fields, &output, true).unwrap();
        let text = fields.finish();
        assert_eq!(text.matches(schema).count(), 2, "{text}");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["tools"][0]["function"]["name"], "look");
        assert_eq!(value["tool_choice"]["function"]["name"], "look");
        assert_eq!((&value["logprobs"], &value["top_logprobs"]), (&json!(true), &json!(2)));
        assert_eq!(value["response_format"]["json_schema"]["strict"], true);
        let mut plain = Fields::default();
        let broken = Output { format: Some(TextFormat::JsonSchema { schema: "{".into() }), ..Output::default() };
        assert!(put_output(&mut plain, &broken, true).is_err());
        let mut text = Fields::default();
        put_output(&mut text, &Output { logprobs: Some(0), ..Output::default() }, false).unwrap();
        assert_eq!(text.finish(), r#"{"logprobs":0}"#);
        assert_eq!(Fields::default().finish(), "{}");
    }
}
