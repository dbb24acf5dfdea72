//! `warmset run`: one prompt or a chat, streamed to the terminal.

use super::{
    arguments::{GlobalArguments, RunArguments},
    place::Place,
};
use crate::{
    client::{CallError, Client},
    config::units::format_bytes,
    output::{self, Output},
    repository::parse_name,
};
use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Read};

/// The longest prompt that is read from a pipe.
const PIPED_BYTES_MAX: u64 = 8 << 20;

/// One answer.
#[derive(Debug, Default)]
struct Answer {
    text: String,
    finish_reason: Value,
    usage: Value,
    digest: Option<String>,
    start: Option<String>,
}

/// A conversation with one model.
struct Chat {
    client: Client,
    model: String,
    options: RunArguments,
    messages: Vec<Value>,
}

/// Sends the prompt, what comes through a pipe, or line after line from the terminal.
pub(crate) async fn run(arguments: RunArguments, global: &GlobalArguments, output: Output) -> Result<()> {
    let model = parse_name(&arguments.name)?.to_string();
    let client = inference(global).await?;
    let prompt = if !arguments.prompt.is_empty() {
        Some(arguments.prompt.join(" "))
    } else if std::io::stdin().is_terminal() && !output.json {
        None
    } else {
        Some(tokio::task::spawn_blocking(read_pipe).await??)
    };
    let mut chat = Chat { client, model, options: arguments, messages: Vec::new() };
    if let Some(system) = &chat.options.system {
        chat.messages.push(json!({ "role": "system", "content": system }));
    }
    match prompt {
        Some(prompt) => chat.once(prompt, output).await,
        None => chat.converse().await,
    }
}

/// The inference listener of the running server.
async fn inference(global: &GlobalArguments) -> Result<Client> {
    let Place::Server(admin) = Place::find(global).await? else {
        bail!("no server runs: start `warmset serve` first");
    };
    let workers = admin.get("/admin/v1/workers").await?;
    let address = workers["listen"].as_str().ok_or_else(|| anyhow!("the server does not say where it listens"))?;
    admin.sibling(address)
}

fn read_pipe() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().take(PIPED_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > PIPED_BYTES_MAX {
        bail!("the prompt has more than {}: shorten it", format_bytes(PIPED_BYTES_MAX));
    }
    let text = utf8(bytes)?;
    if text.trim().is_empty() {
        bail!("the prompt is empty: give it as an argument or through a pipe");
    }
    Ok(text)
}

fn utf8(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        anyhow!("the input is not UTF-8 text from its byte {} on: convert it first", valid + 1)
    })
}

/// Says where the names are, if the server does not know this one.
fn with_names(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(CallError::Refused { status: 404, message }) => {
            anyhow!("{message}: see `warmset model list` for what there is")
        }
        _ => error,
    }
}

impl Chat {
    /// One prompt, one answer.
    async fn once(&mut self, prompt: String, output: Output) -> Result<()> {
        let answer = self.ask(prompt, !output.json).await?;
        if output.json {
            let document = json!({
                "model": self.model, "content": answer.text, "finish_reason": answer.finish_reason,
                "usage": answer.usage, "digest": answer.digest, "start": answer.start,
            });
            output.result(&document, |_| String::new());
        } else {
            output::print_line("");
        }
        Ok(())
    }

    /// Line after line until the end of the input.
    async fn converse(&mut self) -> Result<()> {
        output::note("write a message and press enter; /clear forgets the conversation, /bye or ctrl-d ends it");
        loop {
            output::print_text("> ");
            let line = tokio::task::spawn_blocking(|| {
                let mut line = Vec::new();
                std::io::stdin().lock().read_until(b'\n', &mut line).map(|bytes| (bytes > 0).then_some(line))
            });
            let Some(line) = line.await?? else { break };
            let line = utf8(line)?;
            match line.trim() {
                "" => {}
                "/bye" => return Ok(()),
                "/clear" => self.messages.retain(|message| message["role"] == "system"),
                text => {
                    // A failed answer ends neither the conversation nor what was said before.
                    if let Err(error) = self.ask(text.to_owned(), true).await {
                        self.messages.pop();
                        output::error(&error);
                    }
                    output::print_line("");
                }
            }
        }
        output::print_line("");
        Ok(())
    }

    /// Sends the conversation with one more message; the answer becomes a part of it.
    async fn ask(&mut self, prompt: String, print: bool) -> Result<Answer> {
        self.messages.push(json!({ "role": "user", "content": prompt }));
        let mut body = json!({
            "model": self.model, "messages": self.messages, "stream": true,
            "stream_options": { "include_usage": true },
        });
        if let Some(tokens) = self.options.max_tokens {
            body["max_tokens"] = json!(tokens);
        }
        if let Some(temperature) = self.options.temperature {
            body["temperature"] = json!(temperature);
        }
        let mut answer = Answer::default();
        let mut complete = false;
        let headers = self.client.stream("/v1/chat/completions", &body, |line| {
            let Some(data) = line.strip_prefix("data: ") else { return Ok(()) };
            if data == "[DONE]" {
                complete = true;
                return Ok(());
            }
            let text = answer.take(&serde_json::from_str(data)?)?;
            if print {
                output::print_text(&text);
            }
            Ok(())
        });
        let headers = headers.await.map_err(with_names)?;
        if !complete {
            bail!("the answer broke off: see `warmset model logs {}`", self.model);
        }
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        (answer.digest, answer.start) = (header("warmset-model-digest"), header("warmset-start"));
        self.messages.push(json!({ "role": "assistant", "content": answer.text }));
        Ok(answer)
    }
}

impl Answer {
    /// Adds a chunk and returns its text.
    fn take(&mut self, chunk: &Value) -> Result<String> {
        if let Some(message) = chunk["error"]["message"].as_str() {
            bail!("{message}");
        }
        if !chunk["usage"].is_null() {
            self.usage = chunk["usage"].clone();
        }
        let choice = &chunk["choices"][0];
        if !choice["finish_reason"].is_null() {
            self.finish_reason = choice["finish_reason"].clone();
        }
        let text = choice["delta"]["content"].as_str().unwrap_or_default();
        self.text += text;
        Ok(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_add_up_to_an_answer() {
        let mut answer = Answer::default();
        let chunks = [
            json!({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}),
            json!({"choices": [{"delta": {"content": "Hel"}}]}),
            json!({"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 3}}),
        ];
        let texts: Vec<String> = chunks.iter().map(|chunk| answer.take(chunk).unwrap()).collect();
        assert_eq!(texts, ["", "Hel", "lo", ""]);
        assert_eq!((answer.text.as_str(), &answer.finish_reason), ("Hello", &json!("stop")));
        assert_eq!(answer.usage["prompt_tokens"], 3);
        let error = answer.take(&json!({"error": {"message": "the engine was lost"}})).unwrap_err();
        assert_eq!(error.to_string(), "the engine was lost");
    }

    #[test]
    fn input_that_is_no_text_and_unknown_names_are_told_apart() {
        assert_eq!(utf8("né".into()).unwrap(), "né");
        let error = utf8(b"abc\xff".to_vec()).unwrap_err().to_string();
        assert!(error.contains("not UTF-8 text from its byte 4 on"), "{error}");
        let refused = |status| with_names(CallError::Refused { status, message: "no such model".into() }.into());
        assert!(refused(404).to_string().contains("`warmset model list`"));
        assert_eq!(refused(503).to_string(), "no such model");
    }
}
