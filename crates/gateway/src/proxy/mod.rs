//! A gateway in front of plain replicas: servers with OpenAI's routes that are not this program's.
//!
//! [`core::routing`](warmset_core::routing) decides; here are the requests, the answers on their way back, and what is
//! heard of the replicas. A body goes to its replica as it came, but for one thing: a stream that leaves open whether
//! it wants its usage is asked for it, and the caller does not see it.

mod address;
mod admin;
mod dialect;
mod figures;
mod forward;
mod hint;
mod log;
mod metrics;
mod names;
mod prompt;
mod relay;
mod replica;
mod usage;
mod via;
mod watch;

pub use address::{OwnAddresses, ReplicaUrl};
pub use names::Resolver;
pub use replica::{REPLICAS_MAX, ReplicaConfig};

use crate::{clock::Clock, openai::ApiConfig};
use axum::Router as Routes;
use bytes::Bytes;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use log::DecisionLog;
use metrics::ProxyMetrics;
use names::Names;
use replica::Endpoints;
use rustls::{ClientConfig, RootCertStore};
use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, atomic::AtomicBool, atomic::Ordering},
    time::Duration,
};
use via::Via;
use warmset_core::routing::{Router, Settings};

/// How long a replica has to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections without a request that each lane keeps to each replica, and how long.
const IDLE_CONNECTIONS_MAX: usize = 256;
/// What the kernel takes from a replica ahead of a caller who reads slowly; unlimited, some systems take 32 MiB per answer.
/// Enough for 100 MB/s over a millisecond.
const RECEIVE_BUFFER_BYTES: usize = 512 << 10;
const IDLE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);

type Upstream = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// How a gateway in front of replicas behaves.
#[derive(Debug, Clone)]
pub struct ProxyConfig {
    /// Bodies and times; a request has `api.patience` until its answer begins.
    pub api: ApiConfig,
    /// How long a replica may be silent in the middle of an answer.
    pub idle_timeout: Duration,
    /// How often replicas are looked at, and how long a look may take.
    pub probe_interval: Duration,
    /// See there.
    pub probe_timeout: Duration,
    /// How often names are looked up, and where.
    pub resolve_interval: Duration,
    /// See there.
    pub resolver: Resolver,
    /// Where this gateway listens.
    pub own: OwnAddresses,
    /// How requests are routed.
    pub routing: Settings,
    /// The replicas at first.
    pub replicas: Vec<ReplicaConfig>,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            api: ApiConfig::default(),
            idle_timeout: Duration::from_secs(120),
            probe_interval: Duration::from_secs(1),
            probe_timeout: Duration::from_secs(2),
            resolve_interval: Duration::from_secs(5),
            resolver: Resolver::system(),
            own: OwnAddresses::default(),
            routing: Settings::default(),
            replicas: Vec::new(),
        }
    }
}

/// Reads the configured replicas again.
pub type ReadReplicas = Arc<dyn Fn() -> Result<Vec<ReplicaConfig>, String> + Send + Sync>;

/// What all requests share.
pub struct Proxy {
    config: ProxyConfig,
    router: Mutex<Router>,
    endpoints: RwLock<Endpoints>,
    /// The list as the configuration or an administrator has it.
    configured: Mutex<Vec<ReplicaConfig>>,
    reread: Option<ReadReplicas>,
    names: Names,
    via: Via,
    /// When all replicas were last asked for their models because a caller wanted one that nobody has.
    lists_read_at: tokio::sync::Mutex<Option<tokio::time::Instant>>,
    connector: HttpsConnector<HttpConnector>,
    /// For looks at replicas; requests have their lane's.
    upstream: Upstream,
    clock: Clock,
    log: DecisionLog,
    metrics: ProxyMetrics,
    draining: AtomicBool,
    calls: std::sync::atomic::AtomicU64,
    prefix: String,
}

/// What this machine trusts.
fn trusted() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!("a certificate authority of this system cannot be read: {error}");
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    roots
}

/// Connections to replicas, kept for the next requests.
fn upstream(connector: HttpsConnector<HttpConnector>) -> Upstream {
    let mut client = Client::builder(TokioExecutor::new());
    client.pool_timer(TokioTimer::new()).timer(TokioTimer::new());
    client.pool_idle_timeout(IDLE_CONNECTION_TIMEOUT).pool_max_idle_per_host(IDLE_CONNECTIONS_MAX);
    client.build(connector)
}

/// What the requests of one lane share: a connection to a replica is driven by the lane that opened it.
struct Shared {
    proxy: Arc<Proxy>,
    upstream: Upstream,
}

impl Proxy {
    /// Begins to look at the replicas; returns once each of them was looked at. Fails if one of them is this gateway.
    pub async fn start(config: ProxyConfig, reread: Option<ReadReplicas>) -> io::Result<Arc<Self>> {
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        http.set_recv_buffer_size(Some(RECEIVE_BUFFER_BYTES));
        let tls = ClientConfig::builder().with_root_certificates(trusted()).with_no_client_auth();
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(http);
        let mut random = [0; 6];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let prefix: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let proxy = Arc::new(Self {
            router: Mutex::new(Router::new(config.routing.clone())),
            endpoints: RwLock::default(),
            configured: Mutex::new(config.replicas.clone()),
            reread,
            names: Names::new(config.resolver.clone()),
            via: Via::new(&prefix),
            lists_read_at: tokio::sync::Mutex::default(),
            upstream: upstream(connector.clone()),
            connector,
            clock: Clock::start(),
            log: DecisionLog::default(),
            metrics: ProxyMetrics::default(),
            draining: AtomicBool::new(false),
            calls: std::sync::atomic::AtomicU64::new(0),
            prefix,
            config,
        });
        names::refuse_own(&proxy, &proxy.config.replicas).await.map_err(io::Error::other)?;
        watch::start(&proxy).await;
        Ok(proxy)
    }

    /// The routes of callers, with connections to replicas of their own.
    pub fn inference_routes(self: &Arc<Self>) -> Routes {
        forward::routes(Shared { proxy: self.clone(), upstream: upstream(self.connector.clone()) })
    }

    /// The routes of administrators.
    pub fn admin_routes(self: &Arc<Self>) -> Routes {
        admin::routes(self.clone())
    }

    /// Accepts nothing new; what runs goes on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Requests at replicas.
    pub fn running(&self) -> usize {
        self.router().totals().open
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    fn router(&self) -> MutexGuard<'_, Router> {
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn endpoints(&self) -> RwLockReadGuard<'_, Endpoints> {
        self.endpoints.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn configured(&self) -> MutexGuard<'_, Vec<ReplicaConfig>> {
        self.configured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_call_name(&self) -> String {
        format!("req-{}{:08x}", self.prefix, self.calls.fetch_add(1, Ordering::Relaxed))
    }
}
