//! What is heard of replicas without a request: whether they answer, what they serve, how much they have to do.

use super::{Proxy, figures, names, replica::Endpoint};
use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{HeaderMap, Request, StatusCode, header};
use serde::Deserialize;
use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::oneshot,
    time::{Instant, MissedTickBehavior},
};
use warmset_core::routing::Report;

/// How often the router hears that time passes.
const TICK: Duration = Duration::from_secs(1);
/// Whoever wants a replica looked at waits at least so long.
const LOOK_PAUSE_MIN: Duration = Duration::from_millis(50);
/// All lists are read because of unknown models no more often than this, and so many at a time.
const LISTS_PAUSE: Duration = Duration::from_secs(1);
const LISTS_AT_ONCE: usize = 64;
/// What llama-server says while it begins.
const LOADING: &[u8] = b"Loading model";
/// The longest document that is read of a replica.
const DOCUMENT_BYTES_MAX: usize = 4 << 20;
/// The models of a replica are asked for again after so many looks.
const LOOKS_PER_LIST: u32 = 30;
/// A route that is not there is asked for again after so many looks.
const LOOKS_PER_ABSENCE: u32 = 60;
/// Models of one replica.
const MODELS_MAX: usize = 1024;
const MODEL_NAME_BYTES_MAX: usize = 256;

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
}

#[derive(Deserialize)]
struct Properties {
    total_slots: u32,
    default_generation_settings: Option<Generation>,
}

#[derive(Deserialize)]
struct Generation {
    n_ctx: Option<u64>,
}

/// Looks at a replica from now on; what is returned comes with the first look.
pub(super) fn begin(proxy: &Arc<Proxy>, endpoint: Arc<Endpoint>) -> oneshot::Receiver<()> {
    let (told, first) = oneshot::channel();
    tokio::spawn(watch(Arc::downgrade(proxy), endpoint, told));
    first
}

/// Begins everything that happens by itself; returns when every replica was looked at once.
pub(super) async fn start(proxy: &Arc<Proxy>) {
    let mut first = names::follow_list(proxy).await;
    while first.join_next().await.is_some() {}
    repeat(proxy, proxy.config.resolve_interval, async |proxy| names::follow_list(&proxy).await.detach_all());
    repeat(proxy, TICK, async |proxy| proxy.router().tick(proxy.clock.now()));
}

/// Does something again and again for as long as there is a gateway. Each has a loop of its own: what is slow holds up
/// itself.
fn repeat<F>(proxy: &Arc<Proxy>, interval: Duration, what: impl Fn(Arc<Proxy>) -> F + Send + 'static)
where
    F: Future<Output = ()> + Send,
{
    let weak = Arc::downgrade(proxy);
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(proxy) = weak.upgrade() else { break };
            what(proxy).await;
        }
    });
}

/// Looks at one replica again and again, until it is no longer in the list.
async fn watch(proxy: Weak<Proxy>, endpoint: Arc<Endpoint>, told: oneshot::Sender<()>) {
    let mut told = Some(told);
    let mut looks = Looks::default();
    loop {
        let Some(strong) = proxy.upgrade() else { break };
        if strong.endpoints().get(endpoint.id).is_none() {
            break;
        }
        looks.look(&strong, &endpoint).await;
        let pause = strong.config.probe_interval;
        drop(strong);
        if let Some(told) = told.take() {
            // Nobody may wait for it.
            let _ = told.send(());
        }
        let called = async {
            endpoint.look_now.notified().await;
            tokio::time::sleep(LOOK_PAUSE_MIN).await;
        };
        // Either way it is time.
        let _ = tokio::time::timeout(pause, called).await;
    }
}

/// What a look says of the life that a replica had before it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Life {
    #[default]
    GoesOn,
    InDoubt,
    Over,
}

/// How often one replica was looked at, and when it is asked for what again.
#[derive(Default)]
struct Looks {
    until_list: u32,
    until_metrics: u32,
    was_down: bool,
    life: Life,
    /// What it has counted so far.
    counted: f64,
}

impl Looks {
    async fn look(&mut self, proxy: &Proxy, endpoint: &Endpoint) {
        if endpoint.gone.swap(false, Ordering::Relaxed) {
            self.life = Life::Over;
        }
        let health = get(proxy, endpoint, "/health").await;
        let (trouble, life) = judged(&health);
        self.life = self.life.max(life);
        let healthy = trouble.is_none();
        {
            let mut heard = endpoint.heard();
            (heard.healthy, heard.trouble) = (healthy, trouble);
        }
        if health.is_err() && !std::mem::replace(&mut self.was_down, true) {
            tracing::warn!(replica = &*endpoint.name, "a replica does not answer");
        }
        if healthy {
            if std::mem::take(&mut self.was_down) {
                tracing::info!(replica = &*endpoint.name, "a replica answers again");
            }
            self.tell_life(proxy, endpoint);
            self.read_list(proxy, endpoint).await;
            self.read_metrics(proxy, endpoint).await;
        }
        proxy.router().reported(proxy.clock.now(), endpoint.id, Report::Probe { healthy });
    }

    /// Whoever was gone has come back with nothing.
    fn tell_life(&mut self, proxy: &Proxy, endpoint: &Endpoint) {
        let report = match std::mem::take(&mut self.life) {
            Life::GoesOn => return,
            Life::InDoubt => Report::MayHaveRestarted,
            Life::Over => Report::Restarted,
        };
        self.until_list = 0;
        proxy.router().reported(proxy.clock.now(), endpoint.id, report);
    }

    async fn read_list(&mut self, proxy: &Proxy, endpoint: &Endpoint) {
        if self.until_list > 0 && !endpoint.list_is_old.swap(false, Ordering::Relaxed) {
            self.until_list -= 1;
            return;
        }
        if read_models(proxy, endpoint).await {
            self.until_list = LOOKS_PER_LIST;
        }
        if let Some(properties) = read::<Properties>(proxy, endpoint, "/props").await {
            let context = properties.default_generation_settings.and_then(|settings| settings.n_ctx);
            let mut heard = endpoint.heard();
            heard.slots = Some(properties.total_slots.max(1));
            heard.capacity_tokens = context.map(|tokens| tokens.saturating_mul(u64::from(properties.total_slots)));
        }
        enter(proxy, endpoint);
    }

    async fn read_metrics(&mut self, proxy: &Proxy, endpoint: &Endpoint) {
        if self.until_metrics > 0 {
            self.until_metrics -= 1;
            return;
        }
        let Ok((status, body)) = get(proxy, endpoint, "/metrics").await else { return };
        if !status.is_success() {
            self.until_metrics = LOOKS_PER_ABSENCE;
            return;
        }
        let text = String::from_utf8_lossy(&body);
        let now = proxy.clock.now();
        let mut router = proxy.router();
        if let Some(requests) = figures::requests(&text) {
            router.reported(now, endpoint.id, Report::Load { requests });
        }
        if let Some(tokens) = figures::capacity_tokens(&text).filter(|_| endpoint.config.capacity_tokens.is_none()) {
            router.reported(now, endpoint.id, Report::Capacity { tokens });
        }
        if let Some(instance) = figures::instance(&text) {
            router.reported(now, endpoint.id, Report::Instance(instance));
        }
        // Counters only grow in one life.
        if let Some(counted) = figures::counted(&text)
            && std::mem::replace(&mut self.counted, counted) > counted
        {
            router.reported(now, endpoint.id, Report::Restarted);
        }
    }
}

/// Why a replica cannot be asked, and what that says of the life it had.
fn judged(health: &Result<(StatusCode, Bytes), LookError>) -> (Option<String>, Life) {
    match health {
        // A server without this route answers all the same.
        Ok((status, _)) if status.is_success() || *status == StatusCode::NOT_FOUND => (None, Life::GoesOn),
        Ok((StatusCode::LOOP_DETECTED, _)) => {
            (Some("it is this gateway itself, or leads back to it".to_owned()), Life::GoesOn)
        }
        Ok((status, body)) => {
            let begins = memchr::memmem::find(body, LOADING).is_some();
            (Some(format!("/health answers {status}")), if begins { Life::Over } else { Life::InDoubt })
        }
        Err(error) => (Some(error.reason.clone()), if error.is_gone { Life::Over } else { Life::InDoubt }),
    }
}

/// Asks which models a replica has; whether it said so.
async fn read_models(proxy: &Proxy, endpoint: &Endpoint) -> bool {
    let Some(list) = read::<ModelList>(proxy, endpoint, "/v1/models").await else { return false };
    let names = list.data.into_iter().map(|model| model.id).filter(|name| name.len() <= MODEL_NAME_BYTES_MAX);
    endpoint.heard().models = names.take(MODELS_MAX).collect();
    true
}

/// Asks every replica which models it has, because a caller wants one that nobody has; at most once in a while. Who comes
/// while that is done waits for it.
pub(super) async fn read_lists(proxy: &Arc<Proxy>) {
    let mut read_at = proxy.lists_read_at.lock().await;
    if read_at.is_some_and(|at| at.elapsed() < LISTS_PAUSE) {
        return;
    }
    let endpoints: Vec<_> = proxy.endpoints().all().cloned().collect();
    let healthy = endpoints.into_iter().filter(|endpoint| endpoint.heard().healthy);
    let reads = healthy.map(async |endpoint| {
        // A look may have read the list, or have found a configured one healthy, and not have told the router yet.
        if !endpoint.config.models.is_empty() || read_models(proxy, &endpoint).await {
            enter(proxy, &endpoint);
        }
    });
    futures_util::stream::iter(reads).buffer_unordered(LISTS_AT_ONCE).collect::<()>().await;
    *read_at = Some(Instant::now());
}

/// Tells the router of a replica, or of what it is by now, unless it knows that or it has just left the list.
fn enter(proxy: &Proxy, endpoint: &Endpoint) {
    let endpoints = proxy.endpoints();
    if endpoints.get(endpoint.id).is_none() {
        return;
    }
    let mut entered = endpoint.entered();
    let settings = endpoint.settings();
    if entered.as_ref() == Some(&settings) {
        return;
    }
    if proxy.router().add(endpoint.id, settings.clone()) {
        *entered = Some(settings);
    } else {
        tracing::warn!(replica = &*endpoint.name, "there are too many replicas: this one gets nothing");
    }
}

/// Why a look brought nothing.
struct LookError {
    reason: String,
    /// Nobody took the connection.
    is_gone: bool,
}

impl LookError {
    fn other(reason: impl ToString) -> Self {
        Self { reason: reason.to_string(), is_gone: false }
    }
}

async fn read<T: for<'a> Deserialize<'a>>(proxy: &Proxy, endpoint: &Endpoint, path: &str) -> Option<T> {
    let (status, body) = get(proxy, endpoint, path).await.ok()?;
    status.is_success().then(|| serde_json::from_slice(&body).ok()).flatten()
}

async fn get(proxy: &Proxy, endpoint: &Endpoint, path: &str) -> Result<(StatusCode, Bytes), LookError> {
    let asking = async {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = endpoint.uri(path).map_err(LookError::other)?;
        let headers = request.headers_mut();
        headers.insert(header::HOST, endpoint.host.clone());
        if let Some(authorization) = &endpoint.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        proxy.via.extend(&HeaderMap::new(), headers);
        let response = proxy.upstream.request(request).await;
        let response =
            response.map_err(|error| LookError { is_gone: error.is_connect(), reason: root_cause(&error) })?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, DOCUMENT_BYTES_MAX).collect().await.map_err(LookError::other)?;
        Ok((head.status, body.to_bytes()))
    };
    let asked = tokio::time::timeout(proxy.config.probe_timeout, asking).await;
    asked.unwrap_or_else(|_| Err(LookError::other("it does not answer in time")))
}

/// The innermost reason says what happened.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
