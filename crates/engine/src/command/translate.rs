//! Between the worker's words and OpenAI's: jobs become bodies, answers become vectors and failures.

use super::{
    answer::WireUsage,
    fields::{Fields, put_output},
};
use crate::protocol::{FailureKind, GenerateJob, Prompt, Sampling, TokensOrText};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where a generation is sent.
pub(super) fn path(prompt: &Prompt) -> &'static str {
    match prompt {
        Prompt::Chat { .. } => "/v1/chat/completions",
        Prompt::Text { .. } | Prompt::Tokens { .. } => "/v1/completions",
    }
}

/// The body of a generation. The server renders the conversation itself, by the model's own template.
pub(super) fn body(job: &GenerateJob, model: &str) -> Result<Vec<u8>, String> {
    let mut fields = Fields::default();
    fields.put("model", model);
    fields.put("stream", job.stream);
    if job.stream {
        fields.put("stream_options", json!({ "include_usage": true }));
    }
    if job.choices > 1 {
        fields.put("n", job.choices);
    }
    if let Some(tokens) = job.max_tokens {
        fields.put("max_tokens", tokens);
    }
    if !job.stop.is_empty() {
        fields.put("stop", &job.stop);
    }
    if job.ignore_end {
        fields.put("ignore_eos", true);
    }
    put_sampling(&mut fields, &job.sampling);
    put_output(&mut fields, &job.output, matches!(job.prompt, Prompt::Chat { .. }))?;
    match &job.prompt {
        Prompt::Chat { messages } => fields.put_json("messages", messages)?,
        Prompt::Text { text } => fields.put("prompt", text),
        Prompt::Tokens { tokens } => fields.put("prompt", tokens),
    }
    Ok(fields.finish().into_bytes())
}

/// What is not OpenAI's is sent only where it changes something: a server may not know it.
fn put_sampling(fields: &mut Fields, sampling: &Sampling) {
    let default = Sampling::default();
    fields.put("temperature", sampling.temperature);
    fields.put("top_p", sampling.top_p);
    let penalties =
        [("frequency_penalty", sampling.frequency_penalty), ("presence_penalty", sampling.presence_penalty)];
    for (name, value) in penalties.into_iter().chain([("min_p", sampling.min_p)]) {
        if value != 0.0 {
            fields.put(name, value);
        }
    }
    if sampling.top_k != default.top_k {
        fields.put("top_k", sampling.top_k);
    }
    if sampling.repeat_penalty != default.repeat_penalty {
        // The first is llama.cpp's word, the second that of vLLM and SGLang.
        fields.put("repeat_penalty", sampling.repeat_penalty);
        fields.put("repetition_penalty", sampling.repeat_penalty);
    }
    if !sampling.logit_bias.is_empty() {
        let biases: BTreeMap<String, f32> =
            sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect();
        fields.put("logit_bias", biases);
    }
    if let Some(seed) = sampling.seed {
        // OpenAI's seeds are signed; the bits are what matters.
        fields.put("seed", seed as i64);
    }
}

/// The body of an embedding.
pub(super) fn embedding_body(inputs: &[TokensOrText], model: &str) -> Vec<u8> {
    json!({ "model": model, "input": inputs, "encoding_format": "float" }).to_string().into_bytes()
}

#[derive(Debug, Deserialize)]
struct Embeddings {
    data: Vec<EmbeddingItem>,
    #[serde(default)]
    usage: Option<WireUsage>,
}

#[derive(Debug, Deserialize)]
struct EmbeddingItem {
    #[serde(default)]
    index: usize,
    embedding: Vec<f32>,
}

/// The vectors of an answer in the order of the inputs, and the tokens of these.
pub(super) fn embeddings(body: &[u8], inputs: usize) -> Result<(Vec<Vec<f32>>, u32), String> {
    let answer: Embeddings =
        serde_json::from_slice(body).map_err(|error| format!("its answer holds no embeddings: {error}"))?;
    let mut items = answer.data;
    items.sort_by_key(|item| item.index);
    if items.len() != inputs || items.iter().any(|item| item.embedding.is_empty()) {
        return Err(format!("it answered {} vectors for {inputs} inputs", items.len()));
    }
    let vectors = items.into_iter().map(|item| item.embedding).collect();
    Ok((vectors, answer.usage.map_or(0, |usage| usage.prompt_tokens)))
}

/// What the server says of an error, in any of the forms that servers use.
pub(super) fn error_message(error: &Value) -> Option<String> {
    let text = error["message"].as_str().or(error.as_str()).or(error["detail"].as_str());
    text.map(str::to_owned)
}

/// Whose fault an answer with this status is, and what the server says of it.
pub(super) fn failure(status: u16, body: &[u8]) -> (FailureKind, String) {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let said = error_message(&value["error"]).or_else(|| error_message(&value));
    let message = said.unwrap_or_else(|| format!("the model's own server answered with status {status}"));
    let kind = match status {
        400..=499 if status == 408 || status == 429 => FailureKind::Internal,
        400..=499 if is_about_context(&message) => FailureKind::ContextExceeded,
        // 501: it does not do this at all.
        400..=499 | 501 => FailureKind::InvalidRequest,
        _ => FailureKind::Internal,
    };
    (kind, message)
}

/// Servers have no common word for a prompt that is too long.
pub(super) fn is_about_context(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    message.contains("context")
        && ["exceed", "maximum", "too long", "longer", "larger", "fit"].iter().any(|word| message.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Output;

    fn job(prompt: Prompt) -> GenerateJob {
        GenerateJob {
            prompt,
            choices: 1,
            max_tokens: Some(5),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: Vec::new(),
            ignore_end: false,
            stream: true,
            output: Output::default(),
            kv_domain: None,
        }
    }

    #[test]
    fn a_conversation_is_passed_on_as_it_came() {
        let messages = r#"[{"role":"user", "b":1,"a":"\u0041","content":"hi"}]"#;
        let text = String::from_utf8(body(&job(Prompt::Chat { messages: messages.into() }), "m").unwrap()).unwrap();
        assert!(text.ends_with(&format!(r#","messages":{messages}}}"#)), "{text}");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&value["model"], &value["max_tokens"], &value["temperature"]),
            (&json!("m"), &json!(5), &json!(0.0))
        );
        assert_eq!(value["stream_options"]["include_usage"], true);
        assert!(value.get("top_k").is_none() && value.get("n").is_none() && value.get("seed").is_none());
        assert!(body(&job(Prompt::Chat { messages: "[".into() }), "m").is_err());
    }

    #[test]
    fn what_a_caller_chose_is_passed_on() {
        let mut job = job(Prompt::Tokens { tokens: vec![1, 2] });
        (job.choices, job.stream, job.ignore_end) = (3, false, true);
        job.stop = vec!["x".into()];
        job.sampling = Sampling { top_k: 4, repeat_penalty: 1.5, seed: Some(u64::MAX), ..Sampling::default() };
        job.sampling.logit_bias = vec![(7, -1.0)];
        let value: Value = serde_json::from_slice(&body(&job, "m").unwrap()).unwrap();
        assert_eq!((&value["n"], &value["stream"], &value["ignore_eos"]), (&json!(3), &json!(false), &json!(true)));
        assert_eq!((&value["prompt"], &value["stop"]), (&json!([1, 2]), &json!(["x"])));
        assert_eq!((&value["top_k"], &value["seed"]), (&json!(4), &json!(-1)));
        assert_eq!((&value["repeat_penalty"], &value["repetition_penalty"]), (&json!(1.5), &json!(1.5)));
        assert_eq!(value["logit_bias"], json!({"7": -1.0}));
    }

    #[test]
    fn errors_have_an_owner() {
        let kind = |status, body: &str| failure(status, body.as_bytes());
        let exceeded = r#"{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}"#;
        assert_eq!(kind(400, exceeded).0, FailureKind::ContextExceeded);
        assert_eq!(
            kind(400, r#"{"message":"This model's maximum context length is 4 tokens"}"#).0,
            FailureKind::ContextExceeded
        );
        assert_eq!(kind(422, r#"{"detail":"bad"}"#), (FailureKind::InvalidRequest, "bad".into()));
        assert_eq!(kind(501, r#"{"error":{"message":"no embeddings"}}"#).0, FailureKind::InvalidRequest);
        assert_eq!(kind(429, "").0, FailureKind::Internal);
        assert_eq!(
            kind(502, "<html>"),
            (FailureKind::Internal, "the model's own server answered with status 502".into())
        );
    }

    #[test]
    fn vectors_come_in_the_order_of_the_inputs() {
        let body =
            br#"{"data":[{"index":1,"embedding":[2.0]},{"index":0,"embedding":[1.0]}],"usage":{"prompt_tokens":7}}"#;
        assert_eq!(embeddings(body, 2), Ok((vec![vec![1.0], vec![2.0]], 7)));
        assert!(embeddings(body, 3).unwrap_err().contains("2 vectors for 3 inputs"));
        assert!(embeddings(b"{}", 1).is_err());
    }
}
