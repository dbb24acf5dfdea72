//! A conversation put together from another dialect's parts, as the messages that models' templates are given.

use serde_json::{Value, json};

/// Messages in OpenAI's form.
#[derive(Default)]
pub(crate) struct Conversation {
    messages: Vec<Value>,
}

impl Conversation {
    /// Somebody says something.
    pub(crate) fn say(&mut self, role: &str, text: &str) {
        self.messages.push(json!({ "role": role, "content": text }));
    }

    /// The assistant calls a function, together with what it has said or called just before.
    pub(crate) fn call(&mut self, id: &str, name: &str, arguments: &str) {
        let call = json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
        let is_assistant = self.messages.last().is_some_and(|last| last["role"] == "assistant");
        if !is_assistant {
            self.messages.push(json!({ "role": "assistant", "content": null }));
        }
        if let Some(Value::Object(last)) = self.messages.last_mut() {
            let calls = last.entry("tool_calls").or_insert_with(|| json!([]));
            if let Some(calls) = calls.as_array_mut() {
                calls.push(call);
            }
        }
    }

    /// A function has answered.
    pub(crate) fn answer(&mut self, id: &str, text: &str) {
        self.messages.push(json!({ "role": "tool", "tool_call_id": id, "content": text }));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Who speaks last.
    pub(crate) fn last_role(&self) -> Option<&str> {
        self.messages.last()?["role"].as_str()
    }

    /// The messages as JSON text.
    pub(crate) fn into_json(self) -> String {
        Value::Array(self.messages).to_string()
    }
}
