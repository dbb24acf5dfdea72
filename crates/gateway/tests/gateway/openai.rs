//! OpenAI's routes over real sockets: the bytes that official clients read.

use crate::support::*;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use warmset_core::{
    Priority,
    gateway::{ColdPolicy, Route, Settings},
    inference::{FailureKind, FinishReason, GenerateJob, Reply, Work},
    worker::{CancelCause, LoadError, ModelState, Rejection, StartKind},
};
use warmset_gateway::{directory::Entry, openai::ApiConfig};

const STREAM: &str = "text/event-stream; charset=utf-8";

/// The events of a stream: JSON of `data:` lines; `[DONE]` and comments as texts.
fn events(body: &str) -> Vec<Value> {
    body.split_terminator("\n\n")
        .map(|event| match event.strip_prefix("data: ") {
            Some("[DONE]") => json!("[DONE]"),
            Some(data) => serde_json::from_str(data).unwrap(),
            None => json!(event),
        })
        .collect()
}

fn job(work: &Work) -> &GenerateJob {
    let Work::Generate(job) = work else { panic!("{work:?}") };
    job
}

#[tokio::test]
async fn a_whole_answer_has_its_fields_and_headers() {
    let mut harness = Harness::new().await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({"service_tier": "priority"}))).await;
    let assignment = harness.worker.assignment().await;
    assert_eq!((assignment.digest, assignment.class), (MODEL, Priority::Critical));
    answer(&assignment, "hello");
    let response = read_response(&mut stream).await;
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("warmset-model-digest"), Some(MODEL.to_string().as_str()));
    assert_eq!(response.header("warmset-start"), Some("warm"));
    assert_eq!(response.header("warmset-worker"), Some("3"));
    assert_eq!(response.header("x-request-id"), response.header("warmset-request-id"));
    let body = response.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["id"], format!("chatcmpl-{}", response.header("x-request-id").unwrap()));
    assert_eq!(body["model"], "org/model");
    assert_eq!(body["system_fingerprint"], MODEL.fingerprint());
    assert_eq!(body["service_tier"], "priority");
    assert_eq!(body["choices"][0]["message"]["content"], "hello");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(body["usage"]["total_tokens"], 7);
    harness.assert_empty().await;
    let metrics = harness.frontend.metrics().render(harness.frontend.clock().now());
    let line = "warmset_requests_total{model=\"org/model\",outcome=\"ok\",start=\"warm\"} 1\n";
    assert!(metrics.contains(line), "{metrics}");
    let line = "warmset_tokens_total{model=\"org/model\",tenant=\"anonymous\",kind=\"cached\"} 3\n";
    assert!(metrics.contains(line), "{metrics}");
}

#[tokio::test]
async fn a_stream_has_the_shape_that_clients_expect() {
    let mut harness = Harness::new().await;
    let ask = chat(json!({"stream": true, "n": 2, "stream_options": {"include_usage": true}}));
    let mut stream = harness.send("/v1/chat/completions", &ask).await;
    let assignment = harness.worker.assignment().await;
    assert!(job(&assignment.work).stream);
    for reply in [
        started(StartKind::Cold),
        delta(0, "a"),
        delta(1, "x"),
        delta(0, "b"),
        Reply::ChoiceDone { choice: 1, finish: FinishReason::Length },
        choice_done(0),
        done(4, 3, 0),
    ] {
        assignment.replies.send(reply).unwrap();
    }
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, response.header("content-type")), (200, Some(STREAM)));
    assert_eq!(response.header("warmset-start"), Some("cold"));
    assert!(response.complete);
    let events = events(response.text());
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(3)));
    for chunk in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!((&chunk["id"], &chunk["created"]), (&chunks[0]["id"], &chunks[0]["created"]));
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    let seen: Vec<(u64, Value, Value)> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0])
        .map(|choice| (choice["index"].as_u64().unwrap(), choice["delta"].clone(), choice["finish_reason"].clone()))
        .collect();
    let role = || json!({"role": "assistant", "content": ""});
    let text = |text: &str| json!({ "content": text });
    let expected = [
        (0, role(), Value::Null),
        (0, text("a"), Value::Null),
        (1, role(), Value::Null),
        (1, text("x"), Value::Null),
        (0, text("b"), Value::Null),
        (1, json!({}), json!("length")),
        (0, json!({}), json!("stop")),
    ];
    assert_eq!(seen, expected);
    harness.assert_empty().await;
}

#[tokio::test]
async fn text_completions_take_several_prompts() {
    for stream_wanted in [false, true] {
        let mut harness = Harness::new().await;
        let ask = json!({"model": "alias", "prompt": ["a", "b"], "n": 2, "stream": stream_wanted});
        let mut stream = harness.send("/v1/completions", &ask).await;
        for name in ["first", "second"] {
            let assignment = harness.worker.assignment().await;
            assert_eq!(job(&assignment.work).choices, 2);
            assignment.replies.send(started(StartKind::Warm)).unwrap();
            for choice in 0..2 {
                assignment.replies.send(delta(choice, &format!("{name}{choice}"))).unwrap();
                assignment.replies.send(choice_done(choice)).unwrap();
            }
            assignment.replies.send(done(1, 1, 0)).unwrap();
        }
        let response = read_response(&mut stream).await;
        let mut texts = vec![String::new(); 4];
        let objects = if stream_wanted { events(response.text()) } else { vec![response.json()] };
        for object in objects.iter().filter(|object| object.is_object()) {
            assert_eq!((&object["object"], &object["model"]), (&json!("text_completion"), &json!("alias")));
            for choice in object["choices"].as_array().unwrap() {
                texts[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
            }
        }
        assert_eq!(texts, ["first0", "first1", "second0", "second1"]);
        harness.assert_empty().await;
    }
}

#[tokio::test]
async fn a_stream_that_waits_says_what_for() {
    let api = ApiConfig {
        stream_grace: Duration::ZERO,
        heartbeat_interval: Duration::from_millis(20),
        ..ApiConfig::default()
    };
    let route = Route { max_concurrency: 1, ..route() };
    let mut harness = Harness::with(Setup { api, route, ready: false, ..Setup::default() }).await;
    let ask = chat(json!({"stream": true}));
    let mut first = harness.send("/v1/chat/completions", &ask).await;
    let assignment = harness.worker.assignment().await;
    assert!(read_head(&mut first).await.contains("warmset-start: cold\r\n"));
    assert_eq!(read_chunk(&mut first).await.unwrap(), b": waiting\n\n");
    assert_eq!(read_chunk(&mut first).await.unwrap(), b": waiting\n\n", "a heartbeat");
    let mut second = harness.send("/v1/chat/completions", &ask).await;
    read_head(&mut second).await;
    let mut comment = read_chunk(&mut second).await.unwrap();
    while comment == b": waiting\n\n" {
        comment = read_chunk(&mut second).await.unwrap();
    }
    assert_eq!(comment, b": queued position=1\n\n");
    assignment.replies.send(Reply::Loading { fraction: 0.42 }).unwrap();
    let mut comment = read_chunk(&mut first).await.unwrap();
    while comment == b": waiting\n\n" {
        comment = read_chunk(&mut first).await.unwrap();
    }
    assert_eq!(comment, b": loading 42%\n\n");
    answer(&assignment, "x");
    let mut rest = Vec::new();
    while let Some(chunk) = read_chunk(&mut first).await
        && !chunk.is_empty()
    {
        rest.extend(chunk);
    }
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    answer(&harness.worker.assignment().await, "y");
}

#[tokio::test]
async fn a_stream_of_a_ready_model_that_waits_is_warm() {
    let api = ApiConfig { stream_grace: Duration::ZERO, ..ApiConfig::default() };
    let mut harness = Harness::with(Setup { api, ..Setup::default() }).await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    assert!(read_head(&mut stream).await.contains("warmset-start: warm\r\n"));
    answer(&harness.worker.assignment().await, "x");
}

#[tokio::test]
async fn a_lost_engine_breaks_the_stream_and_never_ends_it() {
    let mut harness = Harness::new().await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    let assignment = harness.worker.assignment().await;
    assignment.replies.send(started(StartKind::Warm)).unwrap();
    assignment.replies.send(delta(0, "half")).unwrap();
    let lost = Rejection::EngineLost { message: "signal 11".into(), output_started: true };
    assignment.replies.send(Reply::Rejected(lost)).unwrap();
    let response = read_response(&mut stream).await;
    assert!(!response.complete, "the body must break off");
    let events = events(response.text());
    let error = &events.last().unwrap()["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!("engine_lost"), &json!("server_error")));
    assert!(!response.text().contains("[DONE]"));
    harness.assert_empty().await;
}

#[tokio::test]
async fn replies_that_stop_without_an_end_break_the_stream() {
    let mut harness = Harness::new().await;
    for last in [None, Some(done(1, 1, 0)), Some(Reply::ChoiceDone { choice: 0, finish: FinishReason::Cancelled })] {
        let mut stream = harness.send("/v1/chat/completions", &chat(json!({"stream": true}))).await;
        let assignment = harness.worker.assignment().await;
        assignment.replies.send(started(StartKind::Warm)).unwrap();
        assignment.replies.send(delta(0, "half")).unwrap();
        if let Some(last) = last {
            assignment.replies.send(last).unwrap();
        }
        drop(assignment);
        let response = read_response(&mut stream).await;
        assert!(!response.complete && !response.text().contains("[DONE]"), "{}", response.text());
        assert!(response.text().contains("data: {\"error\":"), "{}", response.text());
    }
}

#[tokio::test]
async fn an_engine_lost_before_output_is_tried_again_unseen() {
    let mut harness = Harness::new().await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let first = harness.worker.assignment().await;
    drop(first);
    let second = harness.worker.assignment().await;
    answer(&second, "second try");
    let response = read_response(&mut stream).await;
    assert_eq!(response.json()["choices"][0]["message"]["content"], "second try");
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    for _ in 0..2 {
        drop(harness.worker.assignment().await);
    }
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, &response.error()["code"]), (502, &json!("engine_lost")));
    assert_eq!(response.header("x-should-retry"), Some("false"));
    harness.assert_empty().await;
}

#[tokio::test]
async fn refusals_have_their_own_status_even_for_streams() {
    let mut harness = Harness::new().await;
    let after = Duration::from_millis(1500);
    let error = |permanent| LoadError { message: "bad magic".into(), permanent };
    let rows = [
        (Rejection::QueueFull { retry_after: after }, 429, "queue_full", Some("2")),
        (Rejection::NoMemory { retry_after: after }, 503, "insufficient_memory", Some("2")),
        (Rejection::LoadFailed { error: error(false), retry_after: after }, 503, "model_load_failed", Some("2")),
        (Rejection::LoadFailed { error: error(true), retry_after: after }, 503, "model_load_failed", None),
        (Rejection::TooLarge { needed_bytes: 2, available_bytes: 1 }, 507, "model_too_large", None),
        (Rejection::UnknownModel, 404, "model_not_found", None),
    ];
    for (rejection, status, code, retry_after) in rows {
        for stream_wanted in [true, false] {
            let mut stream = harness.send("/v1/chat/completions", &chat(json!({"stream": stream_wanted}))).await;
            let assignment = harness.worker.assignment().await;
            assignment.replies.send(Reply::Rejected(rejection.clone())).unwrap();
            let response = read_response(&mut stream).await;
            assert_eq!((response.status, &response.error()["code"]), (status, &json!(code)));
            assert_eq!(response.header("retry-after"), retry_after);
            assert_eq!(response.header("x-should-retry"), if retry_after.is_some() { None } else { Some("false") });
            assert!(response.header("warmset-request-id").is_some());
        }
    }
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let (kind, message) = (FailureKind::ContextExceeded, "4097 tokens".to_owned());
    let failed = Reply::Failed { kind, message, param: Some("messages".into()) };
    harness.worker.assignment().await.replies.send(failed).unwrap();
    let response = read_response(&mut stream).await;
    let error = response.error();
    assert_eq!((response.status, &error["code"]), (400, &json!("context_length_exceeded")));
    assert_eq!(error["param"], "messages");
    harness.assert_empty().await;
}

#[tokio::test]
async fn a_cold_model_that_refuses_says_when_to_come_back_and_loads() {
    let route = Route { cold: ColdPolicy::Reject, ..route() };
    let mut harness = Harness::with(Setup { route, ready: false, ..Setup::default() }).await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("model_loading")));
    assert_eq!((response.header("retry-after"), response.header("retry-after-ms")), (Some("3"), Some("2500")));
    assert_eq!(within(harness.worker.prewarms.recv()).await, Some(MODEL));
}

#[tokio::test]
async fn a_full_queue_is_429_and_a_passed_deadline_504() {
    let settings = Settings { queue_limit: 1, ..Settings::default() };
    let route = Route { max_concurrency: 1, ..route() };
    let mut harness = Harness::with(Setup { settings, route, ..Setup::default() }).await;
    let mut running = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let assignment = harness.worker.assignment().await;
    assignment.replies.send(started(StartKind::Warm)).unwrap();
    let waiting = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    while harness.frontend.figures(LONG).await.unwrap().queue_depth != [0, 1, 0] {
        tokio::task::yield_now().await;
    }
    let mut refused = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let response = read_response(&mut refused).await;
    assert_eq!((response.status, &response.error()["code"]), (429, &json!("queue_full")));
    drop(waiting);
    while harness.frontend.figures(LONG).await.unwrap().queue_depth != [0, 0, 0] {
        tokio::task::yield_now().await;
    }
    // OpenAI's clients say how long they wait.
    let plain = String::from_utf8(post("/v1/chat/completions", &chat(json!({})).to_string())).unwrap();
    let hurried = plain.replace("content-type", "x-stainless-read-timeout: 0.1\r\ncontent-type");
    let mut late = harness.connect().await;
    late.write_all(hurried.as_bytes()).await.unwrap();
    let response = read_response(&mut late).await;
    assert_eq!((response.status, &response.error()["code"]), (504, &json!("deadline_passed")));
    assert_eq!(response.header("x-should-retry"), Some("false"));
    answer(&assignment, "begun in time");
    assert_eq!(read_response(&mut running).await.status, 200);
}

#[tokio::test]
async fn a_caller_that_goes_away_is_cancelled_in_every_state() {
    let route = Route { max_concurrency: 1, ..route() };
    for stream_wanted in [false, true] {
        let mut harness = Harness::with(Setup { route: route.clone(), ..Setup::default() }).await;
        let ask = chat(json!({"stream": stream_wanted}));
        // Dispatched, and behind it one that waits.
        let dispatched = harness.send("/v1/chat/completions", &ask).await;
        let assignment = harness.worker.assignment().await;
        let waiting = harness.send("/v1/chat/completions", &ask).await;
        while harness.frontend.figures(LONG).await.unwrap().queue_depth != [0, 1, 0] {
            tokio::task::yield_now().await;
        }
        drop(waiting);
        while harness.frontend.figures(LONG).await.unwrap().queue_depth != [0, 0, 0] {
            tokio::task::yield_now().await;
        }
        drop(dispatched);
        assert_eq!(harness.worker.cancel().await, (assignment.request, CancelCause::Disconnected));
        assert_eq!(harness.frontend.requests().await, 1, "the worker has not let go of it");
        drop(assignment);
        // Running, in the middle of its text.
        let mut running = harness.send("/v1/chat/completions", &ask).await;
        let assignment = harness.worker.assignment().await;
        assignment.replies.send(started(StartKind::Warm)).unwrap();
        assignment.replies.send(delta(0, "half")).unwrap();
        if stream_wanted {
            read_head(&mut running).await;
            read_chunk(&mut running).await.unwrap();
        }
        drop(running);
        assert_eq!(harness.worker.cancel().await, (assignment.request, CancelCause::Disconnected));
        assignment.replies.send(Reply::ChoiceDone { choice: 0, finish: FinishReason::Cancelled }).unwrap();
        assignment.replies.send(done(1, 1, 0)).unwrap();
        while harness.frontend.requests().await != 0 {
            tokio::task::yield_now().await;
        }
        harness.assert_empty().await;
        assert!(harness.worker.assignments.try_recv().is_err(), "the one that waited is never dispatched");
    }
}

#[tokio::test]
async fn embeddings_come_as_numbers_or_base64() {
    let mut harness = Harness::new().await;
    for (extra, status) in
        [(json!({}), 200), (json!({"encoding_format": "base64"}), 200), (json!({"dimensions": 3}), 400)]
    {
        let mut ask = json!({"model": "alias", "input": ["a", "b"]});
        ask.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let mut stream = harness.send("/v1/embeddings", &ask).await;
        let assignment = harness.worker.assignment().await;
        assert!(matches!(&assignment.work, Work::Embed { inputs } if inputs.len() == 2));
        assignment.replies.send(started(StartKind::Warm)).unwrap();
        let vectors = vec![vec![1.0, -2.5], vec![0.5, 0.25]];
        assignment.replies.send(Reply::Embedded { vectors, prompt_tokens: 2 }).unwrap();
        let response = read_response(&mut stream).await;
        assert_eq!(response.status, status, "{extra}");
        let body = response.json();
        if status == 400 {
            assert_eq!(body["error"]["param"], "dimensions");
        } else if extra["encoding_format"] == "base64" {
            assert_eq!(body["data"][0]["embedding"], "AACAPwAAIMA=");
        } else {
            assert_eq!(body["data"][1], json!({"object": "embedding", "index": 1, "embedding": [0.5, 0.25]}));
            assert_eq!(body["usage"], json!({"prompt_tokens": 2, "total_tokens": 2}));
            assert_eq!(response.header("warmset-start"), Some("warm"));
        }
    }
    harness.assert_empty().await;
}

#[tokio::test]
async fn models_are_listed_and_found_by_every_name() {
    let mut harness = Harness::new().await;
    let list = harness.get("/v1/models").await.json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("org/model")));
    assert_eq!(list["data"][0]["created"], 1_700_000_000);
    for (path, id) in
        [("/v1/models/org/model", "org/model"), ("/v1/models/org%2Fmodel", "org/model"), ("/v1/models/alias", "alias")]
    {
        let model = harness.get(path).await.json();
        assert_eq!((&model["id"], &model["object"]), (&json!(id), &json!("model")), "{path}");
    }
    for path in ["/v1/models/none", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/a%00", "/v1/models/%ff"] {
        let response = harness.get(path).await;
        assert_eq!((response.status, &response.error()["code"]), (404, &json!("model_not_found")), "{path}");
    }
    // None of this counted as use or asked a worker for anything.
    assert!(harness.worker.assignments.try_recv().is_err() && harness.worker.prewarms.try_recv().is_err());
}

#[tokio::test]
async fn everything_else_is_404_or_405_as_an_error_object() {
    let harness = Harness::new().await;
    for path in ["/", "/v1", "/v1/nothing", "/metrics", "/admin/v1/models", "/v1/chat/completions/", "/v2/models"] {
        let response = harness.get(path).await;
        assert_eq!((response.status, &response.error()["type"]), (404, &json!("invalid_request_error")), "{path}");
    }
    let response = harness.get("/v1/chat/completions").await;
    assert_eq!((response.status, &response.error()["code"]), (405, &json!("method_not_allowed")));
    for model in ["none", "../../etc/passwd", "a/..%2f", "CON", "org\u{0}", "ORG/MODEL", "\u{043e}rg/model"] {
        let mut stream = harness.send("/v1/chat/completions", &chat(json!({"model": model}))).await;
        let response = read_response(&mut stream).await;
        assert_eq!((response.status, &response.error()["code"]), (404, &json!("model_not_found")), "{model}");
    }
    let long = "a".repeat(4096);
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({"model": long}))).await;
    assert_eq!(read_response(&mut stream).await.status, 404);
}

#[tokio::test]
async fn health_tells_life_from_readiness() {
    let harness = Harness::new().await;
    assert_eq!(harness.get("/health/live").await.status, 200);
    assert_eq!(harness.get("/health/ready").await.status, 200);
    harness.frontend.drain();
    assert_eq!(harness.get("/health/live").await.status, 200);
    assert_eq!(harness.get("/health/ready").await.status, 503);
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("draining")));
}

#[tokio::test]
async fn without_a_worker_nothing_is_ready() {
    let harness = Harness::new().await;
    harness.frontend.worker_down(WORKER);
    harness.frontend.check().await.unwrap();
    assert_eq!(harness.get("/health/ready").await.status, 503);
    assert!(!harness.frontend.is_ready(&MODEL));
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("no_worker")));
    harness.frontend.worker_up(WORKER, harness.link.clone());
    harness.frontend.worker_state(WORKER, MODEL, ModelState::Ready);
    harness.frontend.check().await.unwrap();
    assert_eq!(harness.get("/health/ready").await.status, 200);
}

#[tokio::test]
async fn a_worker_that_goes_and_comes_back_finds_what_waited() {
    let mut harness = Harness::new().await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let first = harness.worker.assignment().await;
    harness.frontend.worker_down(WORKER);
    harness.frontend.worker_up(WORKER, harness.link.clone());
    let second = harness.worker.assignment().await;
    assert_eq!(first.request, second.request);
    // Late words of the first try reach nobody.
    let _ = first.replies.send(delta(0, "first"));
    answer(&second, "second");
    let response = read_response(&mut stream).await;
    assert_eq!(response.json()["choices"][0]["message"]["content"], "second");
    harness.assert_empty().await;
}

#[tokio::test]
async fn two_requests_follow_each_other_on_one_connection() {
    let mut harness = Harness::new().await;
    let mut stream = harness.connect().await;
    for text in ["one", "two"] {
        stream.write_all(&post("/v1/chat/completions", &chat(json!({})).to_string())).await.unwrap();
        answer(&harness.worker.assignment().await, text);
        let response = read_response(&mut stream).await;
        assert_eq!(response.json()["choices"][0]["message"]["content"], text);
    }
}

#[tokio::test]
async fn a_forgotten_model_is_gone_for_callers_at_once() {
    let mut harness = Harness::new().await;
    harness.frontend.publish(vec![], vec![]);
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!(read_response(&mut stream).await.status, 404);
    assert!(harness.worker.assignments.try_recv().is_err());
    harness.frontend.check().await.unwrap();
}

#[tokio::test]
async fn who_asks_while_a_name_changes_its_meaning_is_answered_by_what_it_means_afterwards() {
    let mut harness = Harness::new().await;
    let digest = warmset_core::Digest([9; 32]);
    let held = || Entry { held: true, ..entry(route()) };
    let mut admitted = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let before = harness.worker.assignment().await;
    harness.frontend.publish(vec![held()], vec![]);
    let mut waiting = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    // A later call that was answered shows that the earlier one has been read.
    assert_eq!(harness.get("/v1/models").await.status, 200);
    let next = Route { digest, ..route() };
    harness.frontend.publish(vec![entry(next)], vec![route()]);
    let after = harness.worker.assignment().await;
    assert_eq!((before.digest, after.digest), (MODEL, digest));
    answer(&before, "old");
    answer(&after, "new");
    for (stream, digest) in [(&mut admitted, MODEL), (&mut waiting, digest)] {
        let response = read_response(stream).await;
        assert_eq!(
            (response.status, response.header("warmset-model-digest")),
            (200, Some(digest.to_string().as_str()))
        );
    }
    harness.assert_empty().await;
}

#[tokio::test]
async fn a_stream_says_that_it_waits_while_its_name_changes_its_meaning() {
    let api = ApiConfig { held_grace: Duration::ZERO, ..ApiConfig::default() };
    let mut harness = Harness::with(Setup { api, ..Setup::default() }).await;
    let digest = warmset_core::Digest([9; 32]);
    let held = || Entry { held: true, ..entry(route()) };
    harness.frontend.publish(vec![held()], vec![]);
    let mut waiting = harness.send("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    let head = read_head(&mut waiting).await;
    assert!(head.starts_with("HTTP/1.1 200") && !head.contains("warmset-model-digest"), "{head}");
    assert_eq!(read_chunk(&mut waiting).await.unwrap(), b": waiting for another version\n\n");
    harness.frontend.publish(vec![entry(Route { digest, ..route() })], vec![]);
    let assignment = harness.worker.assignment().await;
    assert_eq!(assignment.digest, digest);
    answer(&assignment, "new");
    let rest = String::from_utf8(read_rest(&mut waiting).await.expect("an end")).unwrap();
    assert!(rest.contains("new") && rest.contains(&digest.fingerprint()) && rest.contains("[DONE]"), "{rest}");
    harness.assert_empty().await;
    // One whose name comes to mean nothing ends with an error, and breaks off.
    harness.frontend.publish(vec![held()], vec![]);
    let mut lost = harness.send("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    assert!(read_head(&mut lost).await.starts_with("HTTP/1.1 200"));
    assert!(read_chunk(&mut lost).await.unwrap().starts_with(b": waiting"));
    harness.frontend.publish(vec![], vec![]);
    let error = String::from_utf8(read_chunk(&mut lost).await.unwrap()).unwrap();
    assert!(error.contains("model_not_found"), "{error}");
    assert!(read_rest(&mut lost).await.is_none(), "the body must break off");
    harness.assert_empty().await;
}

#[tokio::test]
async fn callers_that_do_not_wait_hear_that_the_model_is_loading() {
    let harness = Harness::new().await;
    let refusing = Route { cold: ColdPolicy::Reject, ..route() };
    harness.frontend.publish(vec![Entry { held: true, ..entry(refusing) }], vec![]);
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, response.header("retry-after")), (503, Some("3")));
    assert_eq!(response.json()["error"]["code"], "model_loading");
}
