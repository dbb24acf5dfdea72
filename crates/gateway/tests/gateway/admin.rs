//! The admin listener in front of a program that the test plays.

use crate::support::*;
use axum::Router;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
};
use warmset_core::ModelName;
use warmset_gateway::{
    admin::{AdminAccess, AdminBackend, AdminError, AdminFuture, EventLog, hash_admin_key, model_path},
    frontend::{Frontend, FrontendConfig},
    metrics::{Metrics, TierBytes},
    router::{admin_router, admin_routes},
    server::{ServerConfig, serve},
};

/// Answers with what it was asked.
#[derive(Default)]
struct Program {
    calls: Mutex<Vec<String>>,
    events: Arc<EventLog>,
    metrics: Arc<Metrics>,
}

impl Program {
    fn call(&self, what: String) -> AdminFuture<'_> {
        self.calls.lock().unwrap().push(what.clone());
        Box::pin(async move {
            if what.contains("missing") {
                return Err(AdminError::not_found("no such model"));
            }
            Ok(json!({ "did": what }))
        })
    }
}

impl AdminBackend for Program {
    fn list_models(&self) -> AdminFuture<'_> {
        self.call("list".into())
    }
    fn show_model(&self, name: ModelName) -> AdminFuture<'_> {
        self.call(format!("show {name}"))
    }
    fn add_model(&self, body: Value) -> AdminFuture<'_> {
        self.call(format!("add {body}"))
    }
    fn remove_model(&self, name: ModelName) -> AdminFuture<'_> {
        self.call(format!("remove {name}"))
    }
    fn pin_model(&self, name: ModelName, pin: bool) -> AdminFuture<'_> {
        self.call(format!("pin {name} {pin}"))
    }
    fn load_model(&self, name: ModelName, wait: bool) -> AdminFuture<'_> {
        self.call(format!("load {name} {wait}"))
    }
    fn unload_model(&self, name: ModelName) -> AdminFuture<'_> {
        self.call(format!("unload {name}"))
    }
    fn model_logs(&self, name: ModelName, lines: usize) -> AdminFuture<'_> {
        self.call(format!("logs {name} {lines}"))
    }
    fn workers(&self) -> AdminFuture<'_> {
        self.call("workers".into())
    }
    fn ledger(&self) -> AdminFuture<'_> {
        self.call("ledger".into())
    }

    fn kv(&self) -> AdminFuture<'_> {
        self.call("kv".into())
    }
    fn clear_kv(&self) -> AdminFuture<'_> {
        self.call("clear_kv".into())
    }
    fn drain(&self) -> AdminFuture<'_> {
        self.call("drain".into())
    }
    fn refresh_metrics(&self) -> futures_util::future::BoxFuture<'_, ()> {
        let tier = TierBytes { tier: "host".into(), capacity: 7, ..TierBytes::default() };
        self.metrics.set_ledger(&[tier], &[]);
        Box::pin(async {})
    }
    fn events(&self) -> Arc<EventLog> {
        self.events.clone()
    }
}

struct Admin {
    program: Arc<Program>,
    address: std::net::SocketAddr,
}

impl Admin {
    async fn with(access: AdminAccess) -> Self {
        let metrics = Arc::new(Metrics::default());
        let frontend = Frontend::start(FrontendConfig::default(), metrics.clone());
        frontend.publish(vec![entry(route())], vec![]);
        let program = Arc::new(Program { metrics, ..Program::default() });
        let router: Router = admin_router(frontend, program.clone(), access);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, router, ServerConfig::default(), std::future::pending()));
        Self { program, address }
    }

    async fn connect(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:8081\r\n{headers}content-length: {length}\r\n\r\n");
        stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stream
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> Response {
        read_response(&mut self.connect(method, path, "", body).await).await
    }
}

#[tokio::test]
async fn every_route_reaches_its_call() {
    let admin = Admin::with(AdminAccess::default()).await;
    let name = ModelName::parse("org/model:7b").unwrap();
    for (method, path, body, call) in [
        ("GET", "/admin/v1/models".to_owned(), "", "list"),
        ("POST", "/admin/v1/models".to_owned(), "{\"name\":\"a\"}", "add {\"name\":\"a\"}"),
        ("GET", model_path(&name, ""), "", "show org/model:7b"),
        ("DELETE", model_path(&name, ""), "", "remove org/model:7b"),
        ("POST", model_path(&name, "pin"), "", "pin org/model:7b true"),
        ("POST", model_path(&name, "unpin"), "", "pin org/model:7b false"),
        ("POST", model_path(&name, "load"), "", "load org/model:7b true"),
        ("POST", model_path(&name, "load") + "?wait=false", "", "load org/model:7b false"),
        ("POST", model_path(&name, "unload"), "", "unload org/model:7b"),
        ("GET", model_path(&name, "logs"), "", "logs org/model:7b 100"),
        ("GET", model_path(&name, "logs") + "?lines=99999999", "", "logs org/model:7b 10000"),
        ("GET", "/admin/v1/workers".to_owned(), "", "workers"),
        ("GET", "/admin/v1/ledger".to_owned(), "", "ledger"),
        ("GET", "/admin/v1/kv".to_owned(), "", "kv"),
        ("DELETE", "/admin/v1/kv".to_owned(), "", "clear_kv"),
        ("POST", "/admin/v1/drain".to_owned(), "", "drain"),
    ] {
        let response = admin.ask(method, &path, body).await;
        assert_eq!((response.status, response.json()), (200, json!({ "did": call })), "{method} {path}");
    }
    for (method, path, body, status) in [
        ("GET", "/admin/v1/models/missing", "", 404),
        ("GET", "/admin/v1/models/..%2F..%2Fetc", "", 400),
        ("GET", "/admin/v1/models/m/logs?lines=x", "", 400),
        ("POST", "/admin/v1/models", "[]", 400),
        ("POST", "/admin/v1/models", "nonsense", 400),
        ("GET", "/admin/v1/nothing", "", 404),
        ("DELETE", "/admin/v1/workers", "", 405),
        ("POST", "/v1/chat/completions", "{}", 404),
    ] {
        let response = admin.ask(method, path, body).await;
        assert_eq!(response.status, status, "{method} {path}");
        assert!(response.error()["message"].is_string());
    }
}

#[tokio::test]
async fn with_a_key_nothing_answers_without_it() {
    let admin = Admin::with(AdminAccess { key_hashes: vec![hash_admin_key("secret")] }).await;
    for spec in admin_routes() {
        let path = spec.path.replace("{name}", "m");
        assert_eq!(admin.ask(spec.method, &path, "").await.status, 401, "{spec:?}");
    }
    assert_eq!(admin.ask("GET", "/nothing", "").await.status, 401);
    assert!(admin.program.calls.lock().unwrap().is_empty());
    let mut stream = admin.connect("GET", "/admin/v1/workers", "authorization: Bearer secret\r\n", "").await;
    assert_eq!(read_response(&mut stream).await.status, 200);
}

#[tokio::test]
async fn web_pages_are_kept_out_without_a_key() {
    let admin = Admin::with(AdminAccess::default()).await;
    let mut stream = admin.connect("POST", "/admin/v1/drain", "origin: https://evil.example\r\n", "").await;
    assert_eq!(read_response(&mut stream).await.status, 403);
    assert!(admin.program.calls.lock().unwrap().is_empty());
}

#[tokio::test]
async fn metrics_are_fresh_and_reading_them_changes_nothing() {
    let admin = Admin::with(AdminAccess::default()).await;
    let first = admin.ask("GET", "/metrics", "").await;
    assert!(first.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let text = first.text().to_owned();
    for line in [
        "warmset_memory_bytes{tier=\"host\",state=\"capacity\"} 7\n",
        "warmset_queue_depth{priority=\"batch\"} 0\n",
        "warmset_running_requests{model=\"org/model\"} 0\n",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert_eq!(admin.ask("GET", "/metrics", "").await.text(), text);
}

#[tokio::test]
async fn events_are_streamed_from_where_the_listener_stopped() {
    let admin = Admin::with(AdminAccess::default()).await;
    for number in 1..=3 {
        admin.program.events.publish("model_state", json!({ "n": number }));
    }
    let mut stream = admin.connect("GET", "/admin/v1/events?after=1", "", "").await;
    assert!(read_head(&mut stream).await.contains("content-type: text/event-stream"));
    for number in 2..=3 {
        let event = read_chunk(&mut stream).await.unwrap();
        let expected = format!("id: {number}\nevent: model_state\ndata: {{\"n\":{number}}}\n\n");
        assert_eq!(String::from_utf8(event).unwrap(), expected);
    }
    let mut live = admin.connect("GET", "/admin/v1/events", "", "").await;
    read_head(&mut live).await;
    admin.program.events.publish("model_state", json!({"n": 4}));
    for stream in [&mut stream, &mut live] {
        let event = String::from_utf8(read_chunk(stream).await.unwrap()).unwrap();
        assert!(event.starts_with("id: 4\n"), "{event}");
    }
    assert_eq!(admin.ask("GET", "/admin/v1/events?after=x", "").await.status, 400);
}
