//! OpenAI's Responses, written: one response of items, whole or as its events, each with its number.

use super::dialect::{Choice, Encoder, FunctionCall, write_event};
use crate::errors::ApiError;
use serde_json::{Map, Value, json};
use warmset_core::inference::{FinishReason, TokenLogprob, Usage};

/// What all objects of one response share.
#[derive(Debug)]
pub(crate) struct Head {
    /// What tells this response from others.
    pub(crate) own: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) tier: &'static str,
    /// What is repeated of the request.
    pub(crate) echo: Map<String, Value>,
}

/// Writes one response.
#[derive(Debug)]
pub(crate) struct Response {
    head: Head,
    events: u64,
    /// Complete items.
    output: Vec<Value>,
    /// The text of the message that is being written.
    text: Option<String>,
    call: Option<FunctionCall>,
    finish: Option<FinishReason>,
}

impl Response {
    pub(crate) fn new(head: Head) -> Self {
        Self { head, events: 0, output: Vec::new(), text: None, call: None, finish: None }
    }

    /// The whole response.
    pub(crate) fn object(&self, status: &str, usage: Option<Usage>) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let mut object = json!({
            "id": format!("resp_{}", self.head.own),
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "model": self.head.model,
            "output": self.output,
            "service_tier": self.head.tier,
            "usage": usage.map(usage_object),
        });
        if let Some(object) = object.as_object_mut() {
            object.extend(self.head.echo.clone());
        }
        object
    }

    /// An event with the next number.
    fn event(&mut self, kind: &str, fields: Value, out: &mut Vec<u8>) {
        let mut event = json!({ "type": kind, "sequence_number": self.events });
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        self.events += 1;
        write_event(Some(kind), event.to_string().as_bytes(), out);
    }

    fn item_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}{:02x}", self.head.own, self.output.len())
    }

    fn message(&self, status: &str, content: &[Value]) -> Value {
        let id = self.item_id("msg");
        json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
    }

    fn function_call(&self, status: &str, call: &FunctionCall) -> Value {
        let (id, call_id) = (self.item_id("fc"), self.item_id("call"));
        let FunctionCall { name, arguments } = call;
        json!({ "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
            "arguments": arguments })
    }

    /// Ends the item that is being written.
    fn close(&mut self, status: &str, out: &mut Vec<u8>) {
        let index = self.output.len();
        if let Some(text) = self.text.take() {
            let id = self.item_id("msg");
            let place = |more: Value| {
                let mut fields = json!({ "item_id": id, "output_index": index, "content_index": 0 });
                if let (Some(fields), Value::Object(more)) = (fields.as_object_mut(), more) {
                    fields.extend(more);
                }
                fields
            };
            self.event("response.output_text.done", place(json!({ "text": text, "logprobs": [] })), out);
            self.event("response.content_part.done", place(json!({ "part": text_part(&text) })), out);
            let item = self.message(status, &[text_part(&text)]);
            self.event("response.output_item.done", json!({ "output_index": index, "item": item }), out);
            self.output.push(item);
        }
        if let Some(call) = self.call.take() {
            let item = self.function_call(status, &call);
            let done = json!({ "item_id": item["id"], "output_index": index, "name": call.name,
                "arguments": call.arguments });
            self.event("response.function_call_arguments.done", done, out);
            self.event("response.output_item.done", json!({ "output_index": index, "item": item }), out);
            self.output.push(item);
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn usage_object(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens, "cache_write_tokens": 0 },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    })
}

fn status(finish: Option<FinishReason>) -> &'static str {
    if finish == Some(FinishReason::Length) { "incomplete" } else { "completed" }
}

impl Encoder for Response {
    fn open(&mut self, _: u32, out: &mut Vec<u8>) {
        let response = self.object("in_progress", None);
        self.event("response.created", json!({ "response": response }), out);
        self.event("response.in_progress", json!({ "response": response }), out);
    }

    fn logprobs(&mut self, _: u32, _: Vec<TokenLogprob>) {}

    fn text(&mut self, _: u32, text: &str, out: &mut Vec<u8>) {
        if self.text.is_none() {
            self.close("completed", out);
            let (index, item) = (self.output.len(), self.message("in_progress", &[]));
            let part =
                json!({ "item_id": item["id"], "output_index": index, "content_index": 0, "part": text_part("") });
            self.event("response.output_item.added", json!({ "output_index": index, "item": item }), out);
            self.event("response.content_part.added", part, out);
        }
        let (id, index) = (self.item_id("msg"), self.output.len());
        let delta = json!({ "item_id": id, "output_index": index, "content_index": 0, "delta": text, "logprobs": [] });
        self.event("response.output_text.delta", delta, out);
        self.text.get_or_insert_default().push_str(text);
    }

    fn call(&mut self, _: u32, _: u32, name: &str, out: &mut Vec<u8>) {
        self.close("completed", out);
        let call = FunctionCall { name: name.to_owned(), arguments: String::new() };
        let item = self.function_call("in_progress", &call);
        let added = json!({ "output_index": self.output.len(), "item": item });
        self.event("response.output_item.added", added, out);
        self.call = Some(call);
    }

    fn arguments(&mut self, _: u32, _: u32, text: &str, out: &mut Vec<u8>) {
        let delta = json!({ "item_id": self.item_id("fc"), "output_index": self.output.len(), "delta": text });
        self.event("response.function_call_arguments.delta", delta, out);
        if let Some(call) = &mut self.call {
            call.arguments.push_str(text);
        }
    }

    fn finish(&mut self, _: u32, finish: FinishReason, _: Option<&str>, out: &mut Vec<u8>) {
        self.finish = Some(finish);
        self.close(status(self.finish), out);
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        let status = status(self.finish);
        let response = self.object(status, Some(usage));
        self.event(&format!("response.{status}"), json!({ "response": response }), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        // The client raises at what is under `error`; the fields beside it are those of the event.
        let body: Value = serde_json::from_str(&error.json()).unwrap_or_default();
        let object = &body["error"];
        let fields = json!({ "code": object["code"], "message": object["message"], "param": object["param"],
            "error": object });
        self.event("error", fields, out);
    }

    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Vec<u8> {
        let choice = choices.first().cloned().unwrap_or_default();
        let status = status(choice.finish);
        if !choice.text.is_empty() || choice.calls.is_empty() {
            let item = self.message(status, &[text_part(&choice.text)]);
            self.output.push(item);
        }
        for call in &choice.calls {
            let item = self.function_call(status, call);
            self.output.push(item);
        }
        self.object(status, Some(usage)).to_string().into_bytes()
    }
}
