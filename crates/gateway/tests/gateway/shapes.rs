//! What an answer holds beside its text: log probabilities, calls of functions, the stop text.

use crate::support::{Harness, chat, choice_done, delta, done, read_response, started};
use serde_json::{Value, json};
use warmset_core::{
    inference::{FinishReason, Reply, TokenLogprob},
    worker::StartKind,
};

fn token(text: &str, logprob: f32) -> TokenLogprob {
    TokenLogprob { bytes: text.into(), logprob, top: vec![(text.into(), logprob), (b"\xff".to_vec(), -7.5)] }
}

/// What the worker says to one request, and the answer's body.
async fn answered(path: &str, body: &Value, replies: Vec<Reply>) -> String {
    let mut harness = Harness::new().await;
    let mut stream = harness.send(path, body).await;
    let assignment = harness.worker.assignment().await;
    for reply in replies {
        assignment.replies.send(reply).unwrap();
    }
    let response = read_response(&mut stream).await;
    assert_eq!(response.status, 200, "{response:?}");
    harness.assert_empty().await;
    response.text().to_owned()
}

/// The chunks of a stream.
fn chunks(body: &str) -> Vec<Value> {
    body.split_terminator("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

#[tokio::test]
async fn log_probabilities_go_with_the_text_they_belong_to() {
    let replies = || {
        vec![
            started(StartKind::Warm),
            Reply::Logprobs { choice: 0, tokens: vec![token("He", -0.5), token("y", -0.25)] },
            delta(0, "Hey"),
            choice_done(0),
            done(1, 2, 0),
        ]
    };
    let ask = chat(json!({"logprobs": true, "top_logprobs": 2}));
    let whole: Value = serde_json::from_str(&answered("/v1/chat/completions", &ask, replies()).await).unwrap();
    let content = &whole["choices"][0]["logprobs"]["content"];
    let unknown = json!({"token": "\u{fffd}", "logprob": -7.5, "bytes": [255]});
    let first = json!({"token": "He", "logprob": -0.5, "bytes": [72, 101]});
    assert_eq!(content[0]["top_logprobs"], json!([first, unknown]));
    assert_eq!((&content[0]["token"], &content[1]["logprob"]), (&json!("He"), &json!(-0.25)));

    let ask = chat(json!({"logprobs": true, "stream": true}));
    let chunks = chunks(&answered("/v1/chat/completions", &ask, replies()).await);
    let with: Vec<&Value> = chunks.iter().filter(|chunk| !chunk["choices"][0]["logprobs"].is_null()).collect();
    assert_eq!(with.len(), 1);
    assert_eq!(with[0]["choices"][0]["delta"]["content"], "Hey");
    assert_eq!(with[0]["choices"][0]["logprobs"]["content"].as_array().unwrap().len(), 2);

    let ask = json!({"model": "org/model", "prompt": "x", "logprobs": 2});
    let whole: Value = serde_json::from_str(&answered("/v1/completions", &ask, replies()).await).unwrap();
    let expected = json!({
        "tokens": ["He", "y"], "token_logprobs": [-0.5, -0.25], "text_offset": [0, 2],
        "top_logprobs": [{"He": -0.5, "\u{fffd}": -7.5}, {"y": -0.25, "\u{fffd}": -7.5}],
    });
    assert_eq!(whole["choices"][0]["logprobs"], expected);
}

#[tokio::test]
async fn calls_of_functions_are_told_as_openai_does() {
    let call = |call, name: &str| Reply::ToolCall { choice: 0, call, name: name.into() };
    let arguments = |call, text: &str| Reply::ToolArguments { choice: 0, call, text: text.into() };
    let replies = || {
        vec![
            started(StartKind::Warm),
            call(0, "add"),
            arguments(0, "{\"a\":"),
            arguments(0, "1}"),
            call(1, "stop"),
            arguments(1, "{}"),
            Reply::ChoiceDone { choice: 0, finish: FinishReason::ToolCalls },
            done(1, 2, 0),
        ]
    };
    let whole: Value =
        serde_json::from_str(&answered("/v1/chat/completions", &chat(json!({})), replies()).await).unwrap();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls[0]["function"], json!({"name": "add", "arguments": "{\"a\":1}"}));
    assert_eq!((&calls[1]["type"], &calls[1]["function"]["name"]), (&json!("function"), &json!("stop")));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let streamed = answered("/v1/chat/completions", &chat(json!({"stream": true})), replies()).await;
    let deltas: Vec<Value> =
        chunks(&streamed).iter().map(|chunk| chunk["choices"][0]["delta"]["tool_calls"][0].clone()).collect();
    let begun: Vec<&Value> = deltas.iter().filter(|delta| delta["id"].is_string()).collect();
    assert_eq!(begun.len(), 2);
    assert_eq!(begun[1]["index"], 1);
    assert_eq!(begun[0]["function"], json!({"name": "add", "arguments": ""}));
    let more: String = deltas
        .iter()
        .filter(|delta| delta["index"] == 0)
        .filter_map(|delta| delta["function"]["arguments"].as_str())
        .collect();
    assert_eq!(more, "{\"a\":1}");
    assert!(streamed.contains("\"finish_reason\":\"tool_calls\""), "{streamed}");
}
