//! The named schemas: what is read of requests, and what answers always have. Fields that only one client sends and
//! that change nothing are not listed; requests may have them.

use crate::{
    batches::{ENDPOINTS, WINDOW},
    openai::limits,
};
use serde_json::{Map, Value, json};

fn reference(name: &str) -> Value {
    super::named(name)
}

/// An object with these properties, of which some are needed, and others not described.
pub(super) fn object(required: &[&str], properties: Value) -> Value {
    json!({ "type": "object", "required": required, "properties": properties })
}

pub(super) fn nullable(mut schema: Value) -> Value {
    if let Some(kind) = schema.get("type").cloned() {
        schema["type"] = json!([kind, "null"]);
    }
    schema
}

/// How tokens are chosen, the same for all that generate.
fn sampling() -> Map<String, Value> {
    let number = |low: f64, high: f64| nullable(json!({ "type": "number", "minimum": low, "maximum": high }));
    let mut fields = Map::new();
    for (name, schema) in [
        ("temperature", number(0.0, 2.0)),
        ("top_p", number(0.0, 1.0)),
        ("min_p", number(0.0, 1.0)),
        ("frequency_penalty", number(-2.0, 2.0)),
        ("presence_penalty", number(-2.0, 2.0)),
        ("repeat_penalty", number(0.01, 10.0)),
        ("top_k", nullable(json!({ "type": "integer", "minimum": 0, "maximum": 1 << 20 }))),
        ("seed", nullable(json!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX }))),
        ("stream", nullable(json!({ "type": "boolean" }))),
        ("model", json!({ "type": "string" })),
    ] {
        fields.insert(name.into(), schema);
    }
    fields
}

fn request(required: &[&str], properties: Value) -> Value {
    let mut all = sampling();
    if let Value::Object(properties) = properties {
        all.extend(properties);
    }
    object(required, Value::Object(all))
}

fn tokens() -> Value {
    nullable(json!({ "type": "integer", "minimum": 1, "maximum": limits::MAX_TOKENS_MAX }))
}

fn strings() -> Value {
    json!({ "oneOf": [
        { "type": "string", "minLength": 1, "maxLength": limits::STOP_BYTES_MAX },
        { "type": "array", "maxItems": limits::STOPS_MAX,
            "items": { "type": "string", "minLength": 1, "maxLength": limits::STOP_BYTES_MAX } },
    ]})
}

/// A text, or parts of it.
fn content(part: &str) -> Value {
    json!({ "oneOf": [{ "type": "string" }, { "type": "array", "items": object(&["type", "text"], json!({
        "type": { "const": part }, "text": { "type": "string" },
    })) }] })
}

fn function(schema: &str) -> Value {
    object(
        &["name"],
        json!({
            "name": { "type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$" },
            "description": { "type": "string" },
            schema: { "type": "object" },
            "strict": { "type": ["boolean", "null"] },
        }),
    )
}

fn requests() -> Value {
    let messages = |roles: &[&str], part: &str| {
        json!({ "type": "array", "minItems": 1, "maxItems": limits::MESSAGES_MAX, "items": object(
            &["role", "content"],
            json!({ "role": { "enum": roles }, "content": content(part) }),
        )})
    };
    let text_or_tokens = |items: u64, length_min: u64| {
        let text = json!({ "type": "string", "minLength": length_min });
        let tokens = json!({ "type": "array", "minItems": 1,
            "items": { "type": "integer", "minimum": 0, "maximum": u32::MAX } });
        json!({ "oneOf": [
            text,
            tokens,
            { "type": "array", "items": text, "minItems": 1, "maxItems": items },
            { "type": "array", "items": tokens, "minItems": 1, "maxItems": items },
        ]})
    };
    let tool =
        object(&["type", "function"], json!({ "type": { "const": "function" }, "function": function("parameters") }));
    let format = object(&["type"], json!({ "type": { "enum": ["text", "json_object", "json_schema"] } }));
    let claude = json!({
        "messages": messages(&["user"], "text"), "system": content("text"), "stop_sequences": strings(),
        "tools": { "type": "array", "maxItems": limits::TOOLS_MAX, "items": function("input_schema") },
    });
    let mut message = claude.clone();
    message["max_tokens"] = json!({ "type": "integer", "minimum": 1, "maximum": limits::MAX_TOKENS_MAX });
    json!({
        "ChatRequest": request(&["model", "messages"], json!({
            "messages": messages(&["system", "developer", "user", "assistant"], "text"),
            "max_tokens": tokens(), "max_completion_tokens": tokens(), "stop": strings(),
            "n": { "type": ["integer", "null"], "minimum": 1, "maximum": 16 },
            "logprobs": { "type": ["boolean", "null"] }, "response_format": format,
            "tools": { "type": "array", "maxItems": limits::TOOLS_MAX, "items": tool },
            "service_tier": { "enum": ["auto", "default", "priority", "flex", null] },
        })),
        "CompletionRequest": request(&["model", "prompt"], json!({
            "prompt": text_or_tokens(16, 0), "max_tokens": tokens(), "stop": strings(),
            "logprobs": { "type": ["integer", "null"], "minimum": 0, "maximum": 20 },
        })),
        "EmbeddingRequest": object(&["model", "input"], json!({
            "model": { "type": "string" }, "input": text_or_tokens(2048, 1),
            "encoding_format": { "enum": ["float", "base64"] },
        })),
        "ResponseRequest": request(&["model", "input"], json!({
            "input": { "oneOf": [{ "type": "string" }, messages(&["user", "assistant", "system", "developer"], "input_text")] },
            "instructions": { "type": ["string", "null"] }, "max_output_tokens": tokens(),
            "store": { "type": ["boolean", "null"] }, "background": { "type": ["boolean", "null"] },
        })),
        "MessageRequest": request(&["model", "messages", "max_tokens"], message),
        "CountRequest": request(&["model", "messages"], claude),
        "Upload": object(&["file", "purpose"], json!({
            "file": { "type": "string", "contentMediaType": "application/octet-stream" },
            "purpose": { "type": "string", "enum": ["batch"] },
        })),
        "BatchRequest": object(&["input_file_id", "endpoint", "completion_window"], json!({
            "input_file_id": { "type": "string" }, "endpoint": { "enum": ENDPOINTS },
            "completion_window": { "const": WINDOW },
        })),
        "NewModel": object(&["name", "source"], json!({
            "name": { "type": "string" }, "source": { "type": "string" },
            "aliases": { "type": "array", "items": { "type": "string" } }, "pin": { "type": "boolean" },
        })),
    })
}

/// A list in OpenAI's form.
pub(super) fn list(items: Value) -> Value {
    object(&["object", "data"], json!({ "object": { "const": "list" }, "data": { "type": "array", "items": items } }))
}

fn answers() -> Value {
    let usage = object(&["prompt_tokens", "total_tokens"], json!({}));
    let choice = |field: &str| object(&["index", field, "finish_reason"], json!({ "index": { "type": "integer" } }));
    let completion = |kind: &str, field: &str| {
        object(
            &["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
            json!({
                "id": { "type": "string" }, "object": { "const": kind }, "created": { "type": "integer" },
                "model": { "type": "string" }, "choices": { "type": "array", "items": choice(field) }, "usage": usage,
            }),
        )
    };
    let text = || json!({ "type": ["string", "null"] });
    json!({
        "Event": object(&["data"], json!({ "data": { "type": "string" }, "event": { "type": "string" }, "id": { "type": "string" } })),
        "Anything": { "type": ["object", "array"] },
        "Error": object(&["error"], json!({ "error": object(&["message", "type", "param", "code"], json!({
            "message": { "type": "string" }, "type": { "type": "string" }, "param": text(), "code": text(),
        })) })),
        "AnthropicError": object(&["type", "error"], json!({ "type": { "const": "error" },
            "error": object(&["type", "message"], json!({ "type": { "type": "string" }, "message": { "type": "string" } })) })),
        "ChatCompletion": completion("chat.completion", "message"),
        "Completion": completion("text_completion", "text"),
        "EmbeddingList": list(object(&["object", "index", "embedding"], json!({ "object": { "const": "embedding" } }))),
        "Response": object(&["id", "object", "created_at", "status", "model", "output", "usage"], json!({
            "object": { "const": "response" }, "background": { "type": "boolean" },
            "status": { "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] },
            "output": { "type": "array", "items": object(&["id", "type", "status"], json!({})) },
        })),
        "Message": object(&["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"], json!({
            "type": { "const": "message" }, "role": { "const": "assistant" },
            "content": { "type": "array", "items": object(&["type"], json!({})) },
            "stop_reason": { "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"] },
        })),
        "TokenCount": object(&["input_tokens"], json!({ "input_tokens": { "type": "integer", "minimum": 0 } })),
        "Model": object(&["id", "object", "created", "owned_by", "digest", "ready"], json!({ "object": { "const": "model" } })),
        "ModelList": list(reference("Model")),
    })
}

/// Every named schema.
pub(super) fn all() -> Value {
    let mut all = requests();
    for more in [answers(), super::kept::all()] {
        if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
            all.extend(more);
        }
    }
    all
}
