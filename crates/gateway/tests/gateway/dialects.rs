//! The other dialects: the same work behind them, another way to read and to write.

use crate::support::{Harness, delta, done, read_response, started};
use serde_json::{Value, json};
use warmset_core::{
    inference::{FinishReason, GenerateJob, Prompt, Reply, Work},
    worker::StartKind,
};

/// What the worker was asked, and the answer's status and body.
async fn answered(path: &str, body: &Value, replies: Vec<Reply>) -> (GenerateJob, u16, String) {
    let mut harness = Harness::new().await;
    let mut stream = harness.send(path, body).await;
    let assignment = harness.worker.assignment().await;
    for reply in replies {
        assignment.replies.send(reply).unwrap();
    }
    let response = read_response(&mut stream).await;
    assert!(response.complete, "{response:?}");
    assert!(response.header("request-id").is_some() && response.header("warmset-model-digest").is_some());
    harness.assert_empty().await;
    let Work::Generate(job) = assignment.work else { panic!("no generation") };
    (*job, response.status, response.text().to_owned())
}

/// Names and data of a stream's events.
fn events(body: &str) -> Vec<(String, Value)> {
    body.split_terminator("\n\n")
        .filter_map(|event| {
            let (name, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
            Some((name.to_owned(), serde_json::from_str(data).unwrap()))
        })
        .collect()
}

fn replies() -> Vec<Reply> {
    vec![
        started(StartKind::Warm),
        delta(0, "Let me "),
        delta(0, "see."),
        Reply::ToolCall { choice: 0, call: 0, name: "f".into() },
        Reply::ToolArguments { choice: 0, call: 0, text: "{\"a\": ".into() },
        Reply::ToolArguments { choice: 0, call: 0, text: "1}".into() },
        Reply::ChoiceDone { choice: 0, finish: FinishReason::ToolCalls },
        done(9, 4, 3),
    ]
}

fn message(extra: Value) -> Value {
    let mut body = json!({
        "model": "org/model", "max_tokens": 9, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 2}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "two"},
                {"type": "text", "text": "so?"}]},
        ],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn messages_become_a_chat_and_its_answer_a_message() {
    let (job, status, body) = answered("/v1/messages", &message(json!({})), replies()).await;
    let Prompt::Chat { messages } = &job.prompt else { panic!("{job:?}") };
    // The body of the test is written without spaces.
    let call = json!({"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":2}"}});
    let expected = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "two"},
        {"role": "user", "content": "so?"},
    ]);
    assert_eq!(serde_json::from_str::<Value>(messages).unwrap(), expected);
    assert_eq!((job.max_tokens, job.stop.as_slice()), (Some(9), &["x".to_owned()][..]));
    assert_eq!(status, 200);
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["content"][0], json!({"type": "text", "text": "Let me see."}));
    assert_eq!((&body["content"][1]["name"], &body["content"][1]["input"]), (&json!("f"), &json!({"a": 1})));
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    assert_eq!((&body["usage"]["input_tokens"], &body["usage"]["cache_read_input_tokens"]), (&json!(6), &json!(3)));
}

#[tokio::test]
async fn a_message_s_events_come_in_anthropic_s_order() {
    let (_, _, body) = answered("/v1/messages", &message(json!({"stream": true})), replies()).await;
    let events = events(&body);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names, expected);
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()));
    assert_eq!((&events[5].1["index"], &events[5].1["content_block"]["type"]), (&json!(1), &json!("tool_use")));
    assert_eq!(events[9].1["delta"]["stop_reason"], "tool_use");
    assert_eq!(events[9].1["usage"]["output_tokens"], 4);
}

#[tokio::test]
async fn a_response_s_events_are_numbered_and_end_with_the_whole() {
    let ask = json!({"model": "org/model", "stream": true, "instructions": "Be brief.", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "two"},
    ]});
    let (job, _, body) = answered("/v1/responses", &ask, replies()).await;
    let Prompt::Chat { messages } = &job.prompt else { panic!("{job:?}") };
    let messages: Value = serde_json::from_str(messages).unwrap();
    assert_eq!(messages[2]["tool_calls"][0]["id"], "c1");
    assert_eq!(messages[3], json!({"role": "tool", "tool_call_id": "c1", "content": "two"}));
    let events = events(&body);
    let numbers: Vec<u64> = events.iter().map(|(_, data)| data["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let (last, response) = (&events.last().unwrap().0, &events.last().unwrap().1["response"]);
    assert_eq!((last.as_str(), &response["status"]), ("response.completed", &json!("completed")));
    let output = response["output"].as_array().unwrap();
    assert_eq!(output[0]["content"][0]["text"], "Let me see.");
    assert_eq!((&output[1]["type"], &output[1]["arguments"]), (&json!("function_call"), &json!("{\"a\": 1}")));
    assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], 3);
    assert_eq!((&response["store"], &response["instructions"]), (&json!(false), &json!("Be brief.")));
    let whole = json!({"model": "org/model", "input": "hi"});
    let (_, _, body) = answered("/v1/responses", &whole, replies()).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["output"].as_array().unwrap().len(), 2);
    assert_ne!(body["output"][0]["id"], body["output"][1]["id"]);
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_each_dialect_s_error() {
    for (path, ask, kind) in [
        ("/v1/messages", message(json!({"stream": true})), "error"),
        ("/v1/responses", json!({"model": "org/model", "input": "hi", "stream": true}), "error"),
    ] {
        let mut harness = Harness::new().await;
        let mut stream = harness.send(path, &ask).await;
        let assignment = harness.worker.assignment().await;
        for reply in
            [started(StartKind::Warm), delta(0, "a"), Reply::ChoiceDone { choice: 0, finish: FinishReason::Cancelled }]
        {
            assignment.replies.send(reply).unwrap();
        }
        let response = read_response(&mut stream).await;
        assert!(!response.complete, "{path}: never like a whole answer");
        let (name, data) = events(response.text()).pop().unwrap();
        assert_eq!(name, kind);
        assert!(data["error"]["message"].is_string(), "{data}");
    }
}

#[tokio::test]
async fn counting_is_a_generation_of_nothing() {
    let ask = json!({"model": "org/model", "messages": [{"role": "user", "content": "hi"}]});
    let replies =
        vec![started(StartKind::Warm), Reply::ChoiceDone { choice: 0, finish: FinishReason::Length }, done(7, 0, 0)];
    let (job, status, body) = answered("/v1/messages/count_tokens", &ask, replies).await;
    assert_eq!((job.max_tokens, status, body.as_str()), (Some(0), 200, "{\"input_tokens\":7}"));
}

#[tokio::test]
async fn refusals_have_the_form_of_their_dialect() {
    let harness = Harness::new().await;
    let mut stream = harness.send("/v1/messages", &json!({"model": "org/model", "messages": []})).await;
    let response = read_response(&mut stream).await;
    assert_eq!(response.status, 400);
    assert_eq!(response.json()["type"], "error");
    assert_eq!(response.json()["error"]["type"], "invalid_request_error");
    let mut stream = harness.send("/v1/responses", &json!({"model": "org/model", "input": "x", "store": true})).await;
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, &response.error()["param"]), (400, &json!("store")));
    assert_eq!(harness.frontend.requests().await, 0);
}
