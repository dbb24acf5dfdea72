//! Hostile and clumsy peers: what they send is refused at the edge, in bounded time and memory, and nothing of it
//! reaches a worker.

use crate::support::*;
use serde_json::json;
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
};
use warmset_core::{inference::Reply, worker::StartKind};
use warmset_gateway::{openai::ApiConfig, server::ServerConfig};

/// Soon for a test, and long for a machine that is busy with something else between two steps of one.
const SHORT: Duration = Duration::from_secs(1);

fn short_header_timeout() -> Setup {
    let server = ServerConfig { header_timeout: SHORT, ..ServerConfig::default() };
    Setup { server, ..Setup::default() }
}

fn short_idle_timeout() -> Setup {
    let server = ServerConfig { idle_timeout: SHORT, ..ServerConfig::default() };
    Setup { server, ..Setup::default() }
}

/// Sends bytes and reads until the peer closes.
async fn exchange(harness: &Harness, bytes: &[u8]) -> String {
    let mut stream = harness.connect().await;
    // The peer may close while this is still being written.
    let _ = stream.write_all(bytes).await;
    String::from_utf8_lossy(&read_to_close(&mut stream).await).into_owned()
}

fn assert_untouched(harness: &mut Harness) {
    assert!(harness.worker.assignments.try_recv().is_err(), "it reached the worker");
}

#[tokio::test]
async fn ambiguous_heads_are_refused_and_the_connection_closed() {
    let mut harness = Harness::new().await;
    let body = chat(json!({})).to_string();
    let length = body.len();
    for fields in [
        format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n"),
        format!("transfer-encoding: chunked\r\ncontent-length: {length}\r\n"),
        format!("content-length: {length}\r\ncontent-length: 5\r\n"),
        format!("content-length: {length}\r\ncontent-length: {length}\r\n"),
        format!("x: a\r\n b\r\ncontent-length: {length}\r\n"),
        format!("x: a\ncontent-length: {length}\r\n"),
        format!("content-length : {length}\r\n"),
    ] {
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n";
        let response = exchange(&harness, format!("{head}{fields}\r\n{body}").as_bytes()).await;
        assert!(response.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{fields:?}: {response}");
        assert!(response.contains("connection: close\r\n") && response.contains("\"error\""), "{response}");
    }
    assert_untouched(&mut harness);
}

#[tokio::test]
async fn a_second_head_is_judged_like_the_first() {
    let mut harness = Harness::new().await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let smuggled =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(smuggled.as_bytes()).await.unwrap();
    answer(&harness.worker.assignment().await, "first");
    assert_eq!(read_response(&mut stream).await.status, 200);
    let rest = String::from_utf8(read_to_close(&mut stream).await).unwrap();
    assert!(rest.starts_with("HTTP/1.1 400 "), "{rest}");
    assert_untouched(&mut harness);
}

#[tokio::test]
async fn large_heads_are_431() {
    let mut harness = Harness::new().await;
    let start = "GET /v1/models HTTP/1.1\r\nhost: a\r\n";
    let wide = format!("{start}x: {}\r\n\r\n", "y".repeat(40 << 10));
    let many = format!("{start}{}\r\n", "x: y\r\n".repeat(65));
    for head in [wide, many] {
        let response = exchange(&harness, head.as_bytes()).await;
        assert!(response.starts_with("HTTP/1.1 431 "), "{response}");
    }
    assert_untouched(&mut harness);
}

#[tokio::test]
async fn slow_heads_and_silent_connections_are_closed() {
    let harness = Harness::with(short_header_timeout()).await;
    let mut silent = harness.connect().await;
    assert_eq!(read_to_close(&mut silent).await, b"");
    let mut half = harness.connect().await;
    half.write_all(b"GET /v1/models HT").await.unwrap();
    let said = String::from_utf8(read_to_close(&mut half).await).unwrap();
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    let harness = Harness::with(short_idle_timeout()).await;
    let mut idle = harness.connect().await;
    idle.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert_eq!(read_response(&mut idle).await.status, 200);
    assert_eq!(read_to_close(&mut idle).await, b"");
}

#[tokio::test]
async fn a_byte_now_and_then_does_not_buy_time() {
    let harness = Harness::with(short_header_timeout()).await;
    let mut stream = harness.connect().await;
    let (mut read, mut write) = stream.split();
    let trickle = async {
        for byte in b"GET /v1/models HTTP/1.1\r\n".iter().cycle() {
            if write.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(SHORT / 20).await;
        }
    };
    let closed = async {
        let mut bytes = Vec::new();
        // A reset counts as closed too.
        let _ = read.read_to_end(&mut bytes).await;
    };
    within(async {
        tokio::select! {
            () = trickle => {}
            () = closed => {}
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_may_take_longer_than_the_idle_timeout() {
    let mut harness = Harness::with(short_idle_timeout()).await;
    let mut stream = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let assignment = harness.worker.assignment().await;
    tokio::time::sleep(SHORT * 2).await;
    answer(&assignment, "slow");
    assert_eq!(read_response(&mut stream).await.status, 200);
}

#[tokio::test]
async fn large_bodies_are_413_however_they_come() {
    let api = ApiConfig { body_bytes_max: 1000, ..ApiConfig::default() };
    let mut harness = Harness::with(Setup { api, ..Setup::default() }).await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n";
    let declared = format!("{head}content-length: 200000000\r\n\r\n");
    let mut stream = harness.connect().await;
    stream.write_all(declared.as_bytes()).await.unwrap();
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, &response.error()["code"]), (413, &json!("body_too_large")));
    assert_eq!(response.header("connection"), Some("close"));
    // A caller that goes on sending still gets to read the refusal.
    let mut stream = harness.connect().await;
    stream.write_all(declared.as_bytes()).await.unwrap();
    stream.write_all(&vec![b' '; 1 << 20]).await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 413);
    let chunk = format!("{:x}\r\n{}\r\n", 600, " ".repeat(600));
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n");
    let response = exchange(&harness, chunked.as_bytes()).await;
    assert!(response.starts_with("HTTP/1.1 413 "), "{response}");
    assert_untouched(&mut harness);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_408() {
    let api = ApiConfig { body_timeout: SHORT, ..ApiConfig::default() };
    let mut harness = Harness::with(Setup { api, ..Setup::default() }).await;
    let mut stream = harness.connect().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(read_response(&mut stream).await.status, 408);
    assert_untouched(&mut harness);
}

#[tokio::test]
async fn chunked_bodies_are_read_and_their_connection_ends() {
    let mut harness = Harness::new().await;
    let body = chat(json!({})).to_string();
    let (first, second) = body.split_at(20);
    let chunked = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
         {:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n",
        first.len(),
        second.len(),
    );
    let mut stream = harness.connect().await;
    stream.write_all(chunked.as_bytes()).await.unwrap();
    answer(&harness.worker.assignment().await, "yes");
    let response = read_response(&mut stream).await;
    assert_eq!((response.status, response.header("connection")), (200, Some("close")));
    assert_eq!(read_to_close(&mut stream).await, b"");
}

#[tokio::test]
async fn hostile_bodies_name_what_is_wrong_and_reach_no_worker() {
    let mut harness = Harness::new().await;
    let stops = vec!["x"; 1_000_000];
    for (body, param) in [
        (chat(json!({"n": 1e9})).to_string(), json!("n")),
        (chat(json!({"max_tokens": 1_u64 << 63})).to_string(), json!("max_tokens")),
        (chat(json!({ "stop": stops })).to_string(), json!("stop")),
        (chat(json!({"chat_template": "{{ 1 }}"})).to_string(), json!("chat_template")),
        (chat(json!({"chat_template_kwargs": {"chat_template": "x"}})).to_string(), json!("chat_template")),
        (format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)), json!(null)),
        (format!("{{\"a\":{}", "{\"a\":".repeat(100_000)), json!(null)),
        ("not json".to_owned(), json!(null)),
        (String::new(), json!(null)),
    ] {
        let mut stream = harness.connect().await;
        stream.write_all(&post("/v1/chat/completions", &body)).await.unwrap();
        let response = read_response(&mut stream).await;
        assert_eq!((response.status, &response.error()["param"]), (400, &param), "{:.60}", body);
        assert_eq!(response.header("x-should-retry"), Some("false"));
    }
    let plain = String::from_utf8(post("/v1/chat/completions", &chat(json!({})).to_string())).unwrap();
    for kind in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx"] {
        let mut stream = harness.connect().await;
        stream.write_all(plain.replace("application/json", kind).as_bytes()).await.unwrap();
        assert_eq!(read_response(&mut stream).await.status, 415, "{kind}");
    }
    assert_untouched(&mut harness);
}

#[tokio::test]
async fn at_the_limit_idle_connections_make_room_and_busy_ones_stay() {
    let server = ServerConfig { connections_max: 8, ..ServerConfig::default() };
    let mut harness = Harness::with(Setup { server, ..Setup::default() }).await;
    let mut busy = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let assignment = harness.worker.assignment().await;
    let mut flood = Vec::new();
    for _ in 0..200 {
        let mut stream = harness.connect().await;
        stream.write_all(b"G").await.unwrap();
        flood.push(stream);
    }
    assert_eq!(harness.get("/v1/models").await.status, 200, "there is room for a normal request");
    let mut first = flood.remove(0);
    assert_eq!(read_to_close(&mut first).await, b"", "the oldest half-open one made room");
    answer(&assignment, "still here");
    assert_eq!(read_response(&mut busy).await.status, 200);
}

#[tokio::test]
async fn at_the_limit_bodies_that_trickle_in_make_room_and_callers_who_wait_stay() {
    let server = ServerConfig { connections_max: 8, ..ServerConfig::default() };
    let mut harness = Harness::with(Setup { server, ..Setup::default() }).await;
    let mut waiting = harness.send("/v1/chat/completions", &chat(json!({}))).await;
    let assignment = harness.worker.assignment().await;
    let mut flood = Vec::new();
    for framing in ["content-length: 1000\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"].repeat(50) {
        let mut stream = harness.connect().await;
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n";
        stream.write_all(format!("{head}{framing}").as_bytes()).await.unwrap();
        flood.push(stream);
    }
    assert_eq!(harness.get("/v1/models").await.status, 200, "there is room for a whole request");
    for mut stream in flood.drain(..2) {
        assert_eq!(read_to_close(&mut stream).await, b"", "the oldest ones made room");
    }
    answer(&assignment, "still here");
    assert_eq!(read_response(&mut waiting).await.status, 200);
}

#[tokio::test]
async fn a_caller_that_does_not_read_its_stream_is_cut() {
    let server = ServerConfig { write_timeout: SHORT, ..ServerConfig::default() };
    let mut harness = Harness::with(Setup { server, ..Setup::default() }).await;
    // Some systems take 32 MiB and more for a reader before it reads.
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(256 << 10).unwrap();
    let mut stream = socket.connect(harness.address).await.unwrap();
    let ask = post("/v1/chat/completions", &chat(json!({"stream": true})).to_string());
    stream.write_all(&ask).await.unwrap();
    let assignment = harness.worker.assignment().await;
    assignment.replies.send(started(StartKind::Warm)).unwrap();
    let text = "x".repeat(64 << 10);
    // More than both sockets' buffers hold.
    for _ in 0..1000 {
        assignment.replies.send(Reply::Delta { choice: 0, text: text.clone() }).unwrap();
    }
    assert_eq!(harness.worker.cancel().await.0, assignment.request);
    drop(assignment);
    drop(stream);
}

#[tokio::test]
async fn shutdown_ends_idle_connections_and_finishes_running_requests() {
    let mut harness = Harness::new().await;
    let mut idle = harness.connect().await;
    idle.write_all(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    read_response(&mut idle).await;
    let mut running = harness.send("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    let assignment = harness.worker.assignment().await;
    assignment.replies.send(started(StartKind::Warm)).unwrap();
    read_head(&mut running).await;
    harness.stop.take().unwrap().send(()).unwrap();
    assert_eq!(read_to_close(&mut idle).await, b"");
    for reply in [delta(0, "to the end"), choice_done(0), done(1, 1, 0)] {
        assignment.replies.send(reply).unwrap();
    }
    let rest = String::from_utf8(read_to_close(&mut running).await).unwrap();
    assert!(rest.contains("data: [DONE]\n\n") && rest.ends_with("0\r\n\r\n"), "{rest}");
    within(&mut harness.served).await.unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(harness.address).await.is_err(), "nobody listens any more");
}
