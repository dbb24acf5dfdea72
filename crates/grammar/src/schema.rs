//! JSON schemas on their way in: bounded, and with what small models need to keep to them.

use crate::{GrammarError, SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX};
use serde_json::{Map, Value, json};

/// llguidance's own settings inside of a schema.
const SETTINGS: &str = "x-guidance";

/// Parses a schema.
pub(crate) fn parse(text: &str) -> Result<Value, GrammarError> {
    if text.len() > SCHEMA_BYTES_MAX {
        return Err(GrammarError(format!("the schema is longer than {SCHEMA_BYTES_MAX} bytes")));
    }
    let schema: Value = serde_json::from_str(text).map_err(|_| GrammarError("the schema is not JSON".into()))?;
    let Value::Object(mut schema) = schema else {
        return Err(GrammarError("the schema must be a JSON object".into()));
    };
    check(&schema, 0)?;
    close(&mut schema);
    // One way to write each value: a model that may choose between spaces may choose nothing else for ever.
    let settings = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    schema.insert(SETTINGS.into(), settings);
    Ok(Value::Object(schema))
}

fn check(schema: &Map<String, Value>, depth: usize) -> Result<(), GrammarError> {
    if depth == SCHEMA_DEPTH_MAX {
        return Err(GrammarError(format!("the schema is nested deeper than {SCHEMA_DEPTH_MAX} levels")));
    }
    if schema.contains_key(SETTINGS) {
        return Err(GrammarError(format!("{SETTINGS} cannot be set in a schema")));
    }
    schema.values().try_for_each(|value| check_value(value, depth + 1))
}

fn check_value(value: &Value, depth: usize) -> Result<(), GrammarError> {
    match value {
        Value::Object(object) => check(object, depth),
        Value::Array(values) if depth < SCHEMA_DEPTH_MAX => {
            values.iter().try_for_each(|value| check_value(value, depth + 1))
        }
        Value::Array(_) => Err(GrammarError(format!("the schema is nested deeper than {SCHEMA_DEPTH_MAX} levels"))),
        _ => Ok(()),
    }
}

/// An object that says which properties it has has no others, unless it says so: a small model that may go on goes on.
fn close(schema: &mut Map<String, Value>) {
    let open =
        ["additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"];
    if schema.get("properties").is_some_and(Value::is_object) && !open.iter().any(|key| schema.contains_key(*key)) {
        schema.insert("additionalProperties".into(), Value::Bool(false));
    }
    for (key, value) in schema.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().filter_map(Value::as_object_mut).for_each(close);
            }
            ("items" | "additionalProperties", Value::Object(inner)) => close(inner),
            ("anyOf" | "oneOf" | "prefixItems", Value::Array(several)) => {
                several.iter_mut().filter_map(Value::as_object_mut).for_each(close);
            }
            _ => {}
        }
    }
}
