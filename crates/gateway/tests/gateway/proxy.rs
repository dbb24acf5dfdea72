//! The gateway of plain replicas over real sockets, where a test must be master of names, of time between looks, or of
//! who is whose replica.

use axum::{
    Json, Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::{FutureExt, future::BoxFuture};
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{net::TcpListener, task::JoinHandle};
use warmset_gateway::{
    proxy::{OwnAddresses, Proxy, ProxyConfig, ReplicaConfig, Resolver},
    server::{self, ServerConfig},
};

const CHAT: &str = "/v1/chat/completions";
/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);
const OFTEN: Duration = Duration::from_millis(20);

/// A server with OpenAI's routes that says who it is.
struct Replica {
    name: String,
    models: Mutex<Vec<String>>,
    lists_read: Mutex<u32>,
    asked: Mutex<u32>,
}

impl Replica {
    fn named(name: &str) -> Arc<Self> {
        let models = Mutex::new(vec!["m".to_owned()]);
        Arc::new(Self { name: name.to_owned(), models, lists_read: Mutex::default(), asked: Mutex::default() })
    }

    /// Serves until the task is aborted. No connection outlives its request.
    fn serve(self: &Arc<Self>, listener: TcpListener) -> JoinHandle<io::Result<()>> {
        let routes = Router::new()
            .route("/health", get(async || "{}"))
            .route("/v1/models", get(list))
            .route(CHAT, post(chat))
            .layer(axum::middleware::map_response(async |mut response: Response| {
                response.headers_mut().insert("connection", "close".parse().unwrap());
                response
            }))
            .with_state(self.clone());
        tokio::spawn(axum::serve(listener, routes).into_future())
    }

    fn asked(&self) -> u32 {
        *self.asked.lock().unwrap()
    }
}

async fn list(State(replica): State<Arc<Replica>>) -> Json<Value> {
    *replica.lists_read.lock().unwrap() += 1;
    let models: Vec<Value> = replica.models.lock().unwrap().iter().map(|name| json!({ "id": name })).collect();
    Json(json!({ "data": models }))
}

async fn chat(State(replica): State<Arc<Replica>>, _: Request) -> Response {
    *replica.asked.lock().unwrap() += 1;
    let usage = json!({ "prompt_tokens": 1000, "completion_tokens": 1 });
    Json(json!({ "content": replica.name, "usage": usage })).into_response()
}

/// A gateway with both listeners.
struct Gateway {
    proxy: Arc<Proxy>,
    address: SocketAddr,
    admin: SocketAddr,
}

impl Gateway {
    async fn start(config: ProxyConfig) -> Self {
        Self::start_at(TcpListener::bind("127.0.0.1:0").await.unwrap(), config).await
    }

    async fn start_at(listener: TcpListener, config: ProxyConfig) -> Self {
        let proxy = Proxy::start(config, None).await.unwrap();
        let admin_listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, admin) = (listener.local_addr().unwrap(), admin_listener.local_addr().unwrap());
        let serve = |listener, routes| {
            tokio::spawn(server::serve(listener, routes, ServerConfig::default(), std::future::pending()))
        };
        serve(listener, proxy.inference_routes());
        serve(admin_listener, proxy.admin_routes());
        Self { proxy, address, admin }
    }

    async fn ask(&self, model: &str) -> (StatusCode, Value) {
        let text = "You are the assistant of one tenant and answer in whole sentences. ".repeat(60);
        let body = json!({ "model": model, "messages": [{ "role": "system", "content": text }] });
        let (status, _, answer) = call(self.address, "POST", CHAT, Some(&body)).await;
        (status, answer)
    }

    /// The replicas by their names.
    async fn views(&self) -> BTreeMap<String, Value> {
        let (status, _, document) = call(self.admin, "GET", "/admin/v1/replicas", None).await;
        assert_eq!(status, 200);
        let views = document["replicas"].as_array().unwrap().iter();
        views.map(|view| (view["name"].as_str().unwrap().to_owned(), view.clone())).collect()
    }

    async fn places(&self) -> Vec<String> {
        let places = self.views().await.into_keys().map(|name| name.split('@').next_back().unwrap().to_owned());
        places.collect()
    }
}

async fn call(at: SocketAddr, method: &str, path: &str, body: Option<&Value>) -> (StatusCode, HeaderMap, Value) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<bytes::Bytes>>();
    let body = Full::from(body.map(Value::to_string).unwrap_or_default());
    let request = hyper::Request::builder().method(method).uri(format!("http://{at}{path}")).body(body).unwrap();
    let (head, body) = client.request(request).await.unwrap().into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (head.status, head.headers, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

async fn wait_for(what: &str, condition: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !condition().await {
        assert!(began.elapsed() < Duration::from_secs(60), "{what} never came true");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn replica(url: &str) -> ReplicaConfig {
    ReplicaConfig::new(url.parse().unwrap())
}

/// In front of these, with looks that never come by themselves.
fn unwatched(urls: &[String]) -> ProxyConfig {
    let replicas = urls.iter().map(|url| replica(url)).collect();
    ProxyConfig { replicas, probe_interval: NEVER, resolve_interval: NEVER, ..ProxyConfig::default() }
}

/// Two listeners on one port of two addresses.
async fn two_places() -> (TcpListener, TcpListener, u16) {
    loop {
        let one = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = one.local_addr().unwrap().port();
        if let Ok(other) = TcpListener::bind(("127.0.0.2", port)).await {
            return (one, other, port);
        }
    }
}

type Answer = io::Result<Vec<&'static str>>;

/// A resolver whose answers the test sets; names that it does not know hang.
#[derive(Clone, Default)]
struct Zone {
    names: Arc<Mutex<BTreeMap<String, Answer>>>,
    asked: Arc<Mutex<BTreeMap<String, u32>>>,
}

impl Zone {
    fn set(&self, name: &str, addresses: Answer) {
        self.names.lock().unwrap().insert(name.to_owned(), addresses);
    }

    fn asked(&self, name: &str) -> u32 {
        self.asked.lock().unwrap().get(name).copied().unwrap_or(0)
    }

    fn resolver(&self) -> Resolver {
        let zone = self.clone();
        Resolver::new(move |name, port| -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
            *zone.asked.lock().unwrap().entry(name.clone()).or_default() += 1;
            match zone.names.lock().unwrap().get(&name) {
                None => std::future::pending().boxed(),
                Some(Err(error)) => std::future::ready(Err(error.kind().into())).boxed(),
                Some(Ok(addresses)) => {
                    let found = addresses.iter().map(|address| (address.parse::<std::net::IpAddr>().unwrap(), port));
                    std::future::ready(Ok(found.map(SocketAddr::from).collect())).boxed()
                }
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_followed_wherever_it_leads() {
    let (one, other, port) = two_places().await;
    let (first, second) = (Replica::named("first"), Replica::named("second"));
    first.serve(one);
    second.serve(other);
    let zone = Zone::default();
    zone.set("replicas.test", Ok(vec!["127.0.0.1"]));
    let config = ProxyConfig {
        replicas: vec![replica(&format!("http://replicas.test:{port}"))],
        resolver: zone.resolver(),
        resolve_interval: OFTEN,
        probe_interval: OFTEN,
        ..ProxyConfig::default()
    };
    let gateway = Gateway::start(config).await;
    let (here, there) = (format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}"));
    assert_eq!(gateway.places().await, std::slice::from_ref(&here));
    assert_eq!(gateway.ask("m").await.1["content"], "first");
    zone.set("replicas.test", Ok(vec!["127.0.0.2", "127.0.0.1", "127.0.0.1"]));
    wait_for("both places", async || gateway.places().await == [here.clone(), there.clone()]).await;
    zone.set("replicas.test", Ok(vec!["127.0.0.2"]));
    wait_for("the second place", async || gateway.places().await == std::slice::from_ref(&there)).await;
    // It is known to be healthy before it is known what it serves.
    wait_for("its answers", async || {
        let content = gateway.ask("m").await.1["content"].clone();
        assert_ne!(content, "first");
        content == "second"
    })
    .await;
    // A resolver that fails takes nobody away.
    zone.set("replicas.test", Err(io::ErrorKind::TimedOut.into()));
    let before = zone.asked("replicas.test");
    wait_for("failing looks at the name", async || zone.asked("replicas.test") > before + 3).await;
    assert_eq!((gateway.places().await, gateway.ask("m").await.0), (vec![there], StatusCode::OK));
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_hang_hold_up_nobody_and_are_asked_for_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    Replica::named("fine").serve(listener);
    let zone = Zone::default();
    zone.set("fine.test", Ok(vec!["127.0.0.1"]));
    let mut replicas: Vec<_> = (0..40).map(|number| replica(&format!("http://dead{number}.test:1"))).collect();
    replicas.push(replica(&format!("http://fine.test:{port}")));
    let config = ProxyConfig {
        replicas,
        resolver: zone.resolver(),
        resolve_interval: OFTEN,
        probe_timeout: Duration::from_millis(500),
        ..ProxyConfig::default()
    };
    let gateway = Gateway::start(config).await;
    // A first look that took too long on a busy machine is followed by another one; the other names hang for ever.
    wait_for("an answer", async || gateway.ask("m").await.0 == StatusCode::OK).await;
    wait_for("looks at a name that is fine", async || zone.asked("fine.test") > 3).await;
    for number in 0..40 {
        assert_eq!(zone.asked(&format!("dead{number}.test")), 1, "one that hangs is not asked for again");
    }
    // It has come to itself.
    zone.set("dead7.test", Ok(vec!["127.0.0.1"]));
    assert_eq!(gateway.places().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_a_replica_that_came_back_between_two_looks_is_believed_to_hold_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let victim = Replica::named("victim");
    let life = victim.serve(listener);
    let url = format!("http://{address}");
    // A request that finds nobody brings the next look by itself; one that comes before that would tell first.
    let config = ProxyConfig { probe_interval: Duration::from_secs(20), ..unwatched(std::slice::from_ref(&url)) };
    let gateway = Gateway::start(config).await;
    assert_eq!(gateway.ask("m").await.0, StatusCode::OK);
    let held = async || gateway.views().await[&url]["held_tokens"].as_u64().unwrap();
    assert!(held().await > 500);
    life.abort();
    let _ = life.await;
    // Only this request finds out that nobody is there.
    assert_eq!(gateway.ask("m").await.0, StatusCode::BAD_GATEWAY);
    victim.serve(TcpListener::bind(address).await.unwrap());
    wait_for("what it held is forgotten", async || held().await == 0).await;
    wait_for("its answer", async || gateway.ask("m").await.0 == StatusCode::OK).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_has_just_come_is_found_and_unknown_ones_cost_little() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let growing = Replica::named("growing");
    growing.serve(listener);
    let gateway = Gateway::start(unwatched(&[url])).await;
    growing.models.lock().unwrap().push("fresh".to_owned());
    assert_eq!(gateway.ask("fresh").await.0, StatusCode::OK);
    let (before, began) = (*growing.lists_read.lock().unwrap(), Instant::now());
    let strangers = (0..200).map(|number| gateway.ask(if number % 2 == 0 { "stranger" } else { "other" }).boxed());
    for (status, body) in futures_util::future::join_all(strangers).await {
        assert_eq!((status, &body["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    }
    let reads = u64::from(*growing.lists_read.lock().unwrap() - before);
    assert!(reads <= 2 + began.elapsed().as_secs(), "{reads} reads");
    growing.models.lock().unwrap().push("later".to_owned());
    wait_for("the next list", async || call(gateway.address, "GET", "/v1/models/later", None).await.0 == 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configured_model_whose_replica_was_never_there_is_known() {
    let (here, there) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (url, address) = (format!("http://{}", here.local_addr().unwrap()), there.local_addr().unwrap());
    Replica::named("present").serve(here);
    drop(there);
    let later = ReplicaConfig { models: vec!["later".to_owned()], ..replica(&format!("http://{address}")) };
    let config = unwatched(&[url]);
    let mut lost = replica("http://no-such-name.test:9");
    lost.models = vec!["lost".to_owned()];
    let replicas = [config.replicas.clone(), vec![later, lost]].concat();
    let quick = Duration::from_millis(50);
    let zone = Zone::default();
    zone.set("no-such-name.test", Err(io::ErrorKind::NotFound.into()));
    let resolver = zone.resolver();
    let gateway = Gateway::start(ProxyConfig { replicas, probe_interval: quick, resolver, ..config }).await;
    assert_eq!(gateway.ask("m").await.0, StatusCode::OK);
    let (status, body) = gateway.ask("later").await;
    assert_eq!((status, &body["error"]["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("no_worker")), "{body}");
    assert_eq!(gateway.ask("lost").await.1["error"]["code"], "no_worker", "its name leads nowhere");
    assert_eq!(gateway.ask("never").await.1["error"]["code"], "model_not_found");
    // From the moment on that it is healthy it answers: whoever waits for that is never told that there is no such model.
    Replica::named("second").serve(TcpListener::bind(address).await.unwrap());
    wait_for("its answer", async || {
        let (status, body) = gateway.ask("later").await;
        assert_ne!(status, StatusCode::NOT_FOUND, "{body}");
        status == StatusCode::OK
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_is_not_its_own_replica() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let port = address.port();
    let zone = Zone::default();
    zone.set("myself.test", Ok(vec!["192.0.2.1", "127.0.0.1"]));
    zone.set("other.test", Ok(vec!["127.0.0.2"]));
    let config = |urls: &[String]| ProxyConfig {
        own: OwnAddresses(vec![address]),
        resolver: zone.resolver(),
        ..unwatched(urls)
    };
    for own in ["127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]", "myself.test"] {
        let refused = Proxy::start(config(&[format!("http://{own}:{port}/v1")]), None).await.err().unwrap();
        assert!(refused.to_string().contains("this gateway itself"), "{own}: {refused}");
    }
    let gateway = Gateway::start_at(listener, config(&[format!("http://other.test:{port}")])).await;
    for own in [format!("http://127.0.0.1:{port}"), format!("http://MYSELF.test:{port}/v1/")] {
        let (status, _, body) = call(gateway.admin, "POST", "/admin/v1/replicas", Some(&json!({ "url": own }))).await;
        let message = body["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains("this gateway itself"), "{body}");
    }
    // A name that comes to lead here is left out.
    assert_eq!(gateway.places().await, [format!("127.0.0.2:{port}")]);
    zone.set("other.test", Ok(vec!["127.0.0.1"]));
    let another = json!({ "url": "http://192.0.2.2:1", "models": ["none"] });
    call(gateway.admin, "POST", "/admin/v1/replicas", Some(&another)).await;
    assert_eq!(gateway.places().await, ["http://192.0.2.2:1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_comes_round_ends() {
    // Where addresses tell nothing: this gateway is its own replica, and looks find that out.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let config = ProxyConfig { replicas: vec![replica(&url)], probe_interval: OFTEN, ..ProxyConfig::default() };
    let gateway = Gateway::start_at(listener, config).await;
    wait_for("the look that comes back", async || {
        gateway.views().await[&url]["trouble"].as_str().is_some_and(|trouble| trouble.contains("this gateway itself"))
    })
    .await;
    assert_eq!(gateway.ask("m").await.0, StatusCode::SERVICE_UNAVAILABLE);
    // Two that are each other's only replica.
    let (one, two) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let urls = [&one, &two].map(|listener| format!("http://{}", listener.local_addr().unwrap()));
    let config = |url: &str| {
        let replicas = vec![ReplicaConfig { models: vec!["m".into()], ..replica(url) }];
        let probe_timeout = Duration::from_millis(200);
        ProxyConfig { replicas, probe_interval: OFTEN, probe_timeout, ..ProxyConfig::default() }
    };
    let (one, two) = tokio::join!(Gateway::start_at(one, config(&urls[1])), Gateway::start_at(two, config(&urls[0])));
    for gateway in [&one, &two] {
        wait_for("each other's health", async || gateway.views().await.values().all(|view| view["healthy"] == true))
            .await;
    }
    // What it serves is known a moment after its health, and a look that takes too long on a busy machine ends that for a
    // moment: nobody is asked then.
    wait_for("a request that comes round", async || {
        let (status, body) = one.ask("m").await;
        assert_ne!(status, StatusCode::OK);
        status == StatusCode::LOOP_DETECTED && body["error"]["code"] == "loop_detected"
    })
    .await;
    wait_for("nothing is left of it", async || one.proxy.running() + two.proxy.running() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_before_a_gateway_before_a_replica_is_no_loop() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut url = format!("http://{}", listener.local_addr().unwrap());
    let last = Replica::named("last");
    last.serve(listener);
    let mut gateways = Vec::new();
    for _ in 0..3 {
        let gateway = Gateway::start(unwatched(&[url])).await;
        url = format!("http://{}", gateway.address);
        gateways.push(gateway);
    }
    assert_eq!(gateways[2].ask("m").await.1["content"], "last");
    assert_eq!(last.asked(), 1);
}
