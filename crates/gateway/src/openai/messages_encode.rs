//! Anthropic's Messages, written: one message of blocks, whole or as its events.

use super::dialect::{Choice, Encoder, write_event};
use crate::errors::ApiError;
use serde_json::{Value, json};
use warmset_core::inference::{FinishReason, TokenLogprob, Usage};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Call,
}

/// Writes one message.
#[derive(Debug)]
pub(crate) struct Message {
    /// What tells this message from others.
    own: String,
    model: String,
    open: Option<Block>,
    /// Blocks that have begun.
    blocks: u32,
    ending: Value,
}

impl Message {
    pub(crate) fn new(own: &str, model: &str) -> Self {
        let (own, model) = (own.to_owned(), model.to_owned());
        Self { own, model, open: None, blocks: 0, ending: Value::Null }
    }

    fn object(&self, content: &[Value], ending: &Value, usage: Usage) -> Value {
        json!({
            "id": format!("msg_{}", self.own),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": ending["stop_reason"],
            "stop_sequence": ending["stop_sequence"],
            "usage": usage_object(usage),
        })
    }

    fn call_id(&self, call: u32) -> String {
        format!("toolu_{}{call:02x}", self.own)
    }

    fn begin(&mut self, block: Block, object: &Value, out: &mut Vec<u8>) {
        self.close(out);
        let event = json!({ "type": "content_block_start", "index": self.blocks, "content_block": object });
        self.open = Some(block);
        self.blocks += 1;
        write(&event, out);
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        if self.open.take().is_some() {
            write(&json!({ "type": "content_block_stop", "index": self.blocks - 1 }), out);
        }
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        let index = self.blocks.saturating_sub(1);
        write(&json!({ "type": "content_block_delta", "index": index, "delta": delta }), out);
    }
}

/// An event, named by its type.
fn write(event: &Value, out: &mut Vec<u8>) {
    write_event(event["type"].as_str(), event.to_string().as_bytes(), out);
}

/// Unlike OpenAI's, these input tokens are those that were computed.
fn usage_object(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    })
}

fn ending(finish: Option<FinishReason>, stop_text: Option<&str>) -> Value {
    let reason = match (finish, stop_text) {
        (Some(FinishReason::Length), _) => "max_tokens",
        (Some(FinishReason::ToolCalls), _) => "tool_use",
        (_, Some(_)) => "stop_sequence",
        _ => "end_turn",
    };
    json!({ "stop_reason": reason, "stop_sequence": stop_text })
}

impl Encoder for Message {
    fn open(&mut self, _: u32, out: &mut Vec<u8>) {
        let message = self.object(&[], &Value::Null, Usage::default());
        write(&json!({ "type": "message_start", "message": message }), out);
    }

    fn logprobs(&mut self, _: u32, _: Vec<TokenLogprob>) {}

    fn text(&mut self, _: u32, text: &str, out: &mut Vec<u8>) {
        if self.open != Some(Block::Text) {
            self.begin(Block::Text, &json!({ "type": "text", "text": "" }), out);
        }
        self.delta(&json!({ "type": "text_delta", "text": text }), out);
    }

    fn call(&mut self, _: u32, call: u32, name: &str, out: &mut Vec<u8>) {
        let block = json!({ "type": "tool_use", "id": self.call_id(call), "name": name, "input": {} });
        self.begin(Block::Call, &block, out);
    }

    fn arguments(&mut self, _: u32, _: u32, text: &str, out: &mut Vec<u8>) {
        self.delta(&json!({ "type": "input_json_delta", "partial_json": text }), out);
    }

    fn finish(&mut self, _: u32, finish: FinishReason, stop_text: Option<&str>, out: &mut Vec<u8>) {
        self.close(out);
        self.ending = ending(Some(finish), stop_text);
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<u8>) {
        write(&json!({ "type": "message_delta", "delta": self.ending, "usage": usage_object(usage) }), out);
        write(&json!({ "type": "message_stop" }), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        write_event(Some("error"), error.anthropic_json().as_bytes(), out);
    }

    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Vec<u8> {
        let mut content = Vec::new();
        let choice = choices.first().cloned().unwrap_or_default();
        if !choice.text.is_empty() {
            content.push(json!({ "type": "text", "text": choice.text }));
        }
        for (call, made) in (0..).zip(&choice.calls) {
            // One that was cut off has no arguments that could be read.
            let input: Value = serde_json::from_str(&made.arguments).unwrap_or_else(|_| json!({}));
            let id = self.call_id(call);
            content.push(json!({ "type": "tool_use", "id": id, "name": made.name, "input": input }));
        }
        let ending = ending(choice.finish, choice.stop_text.as_deref());
        self.object(&content, &ending, usage).to_string().into_bytes()
    }
}
