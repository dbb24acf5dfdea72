//! A gateway on a real socket in front of a worker that the test plays by hand.

use serde_json::{Value, json};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
};
use warmset_core::{
    Digest, ModelName, Priority, RequestId, WorkerId,
    gateway::{ColdPolicy, Route, Settings},
    inference::{FinishReason, Reply, Timings, Usage},
    targets::Targets,
    worker::{CancelCause, ModelState, StartKind},
};
use warmset_gateway::{
    directory::Entry,
    frontend::{Frontend, FrontendConfig},
    link::{Assignment, WorkerLink},
    metrics::Metrics,
    openai::ApiConfig,
    router::{Later, inference_router},
    server::{ServerConfig, serve},
};

/// So long that only a test that has gone wrong waits for it.
pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const WORKER: WorkerId = WorkerId(3);
pub(crate) const MODEL: Digest = Digest([0xab; 32]);

/// Sends what the gateway does to the test.
pub(crate) struct FakeLink {
    assignments: mpsc::UnboundedSender<Assignment>,
    cancels: mpsc::UnboundedSender<(RequestId, CancelCause)>,
    prewarms: mpsc::UnboundedSender<Digest>,
}

impl WorkerLink for FakeLink {
    fn dispatch(&self, assignment: Assignment) {
        let _ = self.assignments.send(assignment);
    }

    fn cancel(&self, request: RequestId, cause: CancelCause) {
        let _ = self.cancels.send((request, cause));
    }

    fn prewarm(&self, digest: Digest) {
        let _ = self.prewarms.send(digest);
    }
}

/// What the gateway asks of its worker.
pub(crate) struct FakeWorker {
    pub(crate) assignments: mpsc::UnboundedReceiver<Assignment>,
    pub(crate) cancels: mpsc::UnboundedReceiver<(RequestId, CancelCause)>,
    pub(crate) prewarms: mpsc::UnboundedReceiver<Digest>,
}

impl FakeWorker {
    pub(crate) fn new() -> (Arc<FakeLink>, Self) {
        let (assignments_in, assignments) = mpsc::unbounded_channel();
        let (cancels_in, cancels) = mpsc::unbounded_channel();
        let (prewarms_in, prewarms) = mpsc::unbounded_channel();
        let link = FakeLink { assignments: assignments_in, cancels: cancels_in, prewarms: prewarms_in };
        (Arc::new(link), Self { assignments, cancels, prewarms })
    }

    pub(crate) async fn assignment(&mut self) -> Assignment {
        within(self.assignments.recv()).await.expect("an assignment")
    }

    pub(crate) async fn cancel(&mut self) -> (RequestId, CancelCause) {
        within(self.cancels.recv()).await.expect("a cancellation")
    }
}

/// Fails the test instead of hanging.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, future).await.expect("in time")
}

pub(crate) fn route() -> Route {
    Route {
        digest: MODEL,
        name: ModelName::parse("org/model").unwrap(),
        priority: Priority::Standard,
        max_concurrency: 4,
        critical_reserve: 0,
        parks: false,
        cold: ColdPolicy::Wait,
        rewarm_seconds: 2.5,
        targets: Targets::default(),
    }
}

pub(crate) fn entry(route: Route) -> Entry {
    let aliases = vec![ModelName::parse("alias").unwrap()];
    Entry { route, aliases, created_unix_seconds: 1_700_000_000, held: false, fallback: None }
}

pub(crate) struct Setup {
    pub(crate) route: Route,
    pub(crate) settings: Settings,
    pub(crate) api: ApiConfig,
    pub(crate) server: ServerConfig,
    pub(crate) ready: bool,
}

impl Default for Setup {
    fn default() -> Self {
        // Headers are exact in tests unless a test wants the grace to pass.
        let api = ApiConfig { stream_grace: LONG, ..ApiConfig::default() };
        let (settings, server) = (Settings::default(), ServerConfig::default());
        Self { route: route(), settings, api, server, ready: true }
    }
}

pub(crate) struct Harness {
    pub(crate) frontend: Frontend,
    pub(crate) address: SocketAddr,
    pub(crate) worker: FakeWorker,
    pub(crate) link: Arc<FakeLink>,
    pub(crate) stop: Option<oneshot::Sender<()>>,
    pub(crate) served: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Harness {
    pub(crate) async fn new() -> Self {
        Self::with(Setup::default()).await
    }

    pub(crate) async fn with(setup: Setup) -> Self {
        let config = FrontendConfig { settings: setup.settings, ..FrontendConfig::default() };
        let frontend = Frontend::start(config, Arc::new(Metrics::default()));
        let (link, worker) = FakeWorker::new();
        frontend.worker_up(WORKER, link.clone());
        frontend.publish(vec![entry(setup.route)], vec![]);
        if setup.ready {
            frontend.worker_state(WORKER, MODEL, ModelState::Ready);
        }
        // A question answered is everything before it done.
        frontend.check().await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = inference_router(frontend.clone(), setup.api, Arc::new(|| Ok(())), Later::default());
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async move {
            let _ = stopped.await;
        };
        let served = tokio::spawn(serve(listener, router, setup.server, shutdown));
        Self { frontend, address, worker, link, stop: Some(stop), served }
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends a request and leaves the connection to the caller.
    pub(crate) async fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(&post(path, &body.to_string())).await.unwrap();
        stream
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        let mut stream = self.connect().await;
        let request = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        read_response(&mut stream).await
    }

    /// No request is left, anywhere.
    pub(crate) async fn assert_empty(&self) {
        self.frontend.check().await.unwrap();
        assert_eq!(self.frontend.requests().await, 0);
        let figures = self.frontend.figures(LONG).await.unwrap();
        assert_eq!(figures.queue_depth, [0; 3]);
        assert!(figures.running.iter().all(|(_, count)| *count == 0), "{figures:?}");
    }
}

pub(crate) fn post(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

pub(crate) fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "org/model", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// A response with its body, however it was delimited.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// The body had the end that its head promised.
    pub(crate) complete: bool,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn error(&self) -> Value {
        self.json()["error"].clone()
    }
}

/// Reads one head.
pub(crate) async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = within(stream.read_u8()).await.unwrap_or_else(|error| {
            panic!("{error} after {:?}", String::from_utf8_lossy(&head));
        });
        head.push(byte);
    }
    String::from_utf8(head).unwrap()
}

/// Reads one response to its end.
pub(crate) async fn read_response(stream: &mut TcpStream) -> Response {
    let head = read_head(stream).await;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut response = Response { status, head, body: Vec::new(), complete: false };
    if let Some(length) = response.header("content-length") {
        response.body = vec![0; length.parse().unwrap()];
        within(stream.read_exact(&mut response.body)).await.unwrap();
        response.complete = true;
    } else {
        while let Some(chunk) = read_chunk(stream).await {
            if chunk.is_empty() {
                response.complete = true;
                break;
            }
            response.body.extend(chunk);
        }
    }
    response
}

/// One chunk of a chunked body: empty for the last one, none if the connection broke.
pub(crate) async fn read_chunk(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        line.push(within(stream.read_u8()).await.ok()?);
    }
    let size = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim(), 16).unwrap();
    let mut chunk = vec![0; size + 2];
    within(stream.read_exact(&mut chunk)).await.ok()?;
    chunk.truncate(size);
    Some(chunk)
}

/// The rest of a chunked body; none if the connection broke.
pub(crate) async fn read_rest(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut rest = Vec::new();
    loop {
        match read_chunk(stream).await? {
            chunk if chunk.is_empty() => return Some(rest),
            chunk => rest.extend(chunk),
        }
    }
}

/// What is left to read until the peer closes; an error counts as the end too.
pub(crate) async fn read_to_close(stream: &mut TcpStream) -> Vec<u8> {
    let (mut all, mut bytes) = (Vec::new(), [0; 4096]);
    while let Ok(count) = within(stream.read(&mut bytes)).await
        && count > 0
    {
        all.extend(&bytes[..count]);
    }
    all
}

pub(crate) fn started(start: StartKind) -> Reply {
    Reply::Started { start, worker: WORKER, digest: MODEL }
}

pub(crate) fn delta(choice: u32, text: &str) -> Reply {
    Reply::Delta { choice, text: text.to_owned() }
}

pub(crate) fn choice_done(choice: u32) -> Reply {
    Reply::ChoiceDone { choice, finish: FinishReason::Stop }
}

pub(crate) fn done(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Reply {
    Reply::Done { usage: Usage { prompt_tokens, completion_tokens, cached_tokens }, timings: Timings::default() }
}

/// A whole warm answer.
pub(crate) fn answer(assignment: &Assignment, text: &str) {
    for reply in [started(StartKind::Warm), delta(0, text), choice_done(0), done(5, 2, 3)] {
        assignment.replies.send(reply).unwrap();
    }
}
