//! What is heard of replicas without a request: whether they answer, what they serve, how much they have to do.

use super::{
    Proxy, figures,
    replica::{Endpoint, ReplicaConfig, Target},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, StatusCode, header};
use serde::Deserialize;
use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError},
};
use tokio::{task::JoinSet, time::MissedTickBehavior};
use warmset_core::routing::Report;

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

/// Begins to look; returns when every replica was looked at once.
pub(super) async fn start(proxy: &Arc<Proxy>) {
    let mut first = follow_list(proxy).await;
    while first.join_next().await.is_some() {}
    let weak = Arc::downgrade(proxy);
    let interval = proxy.config.resolve_interval;
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(proxy) = weak.upgrade() else { break };
            follow_list(&proxy).await.detach_all();
            let now = proxy.clock.now();
            proxy.router().tick(now);
        }
    });
}

/// Looks names up and lets the router know who came and who went. What is returned are the first looks at the new ones.
pub(super) async fn follow_list(proxy: &Arc<Proxy>) -> JoinSet<()> {
    let configured = proxy.configured().clone();
    let mut wanted = Vec::new();
    for config in &configured {
        let Ok(target) = Target::of(config) else { continue };
        match target.name() {
            None => wanted.push((config.clone(), target, None)),
            Some((host, port)) => wanted.extend(resolved(proxy, config, &target, (&host, port)).await),
        }
    }
    // Somebody may have changed the list meanwhile: then it is followed again at once by whoever did.
    let mut endpoints = proxy.endpoints.write().unwrap_or_else(PoisonError::into_inner);
    if *proxy.configured() != configured {
        return JoinSet::new();
    }
    let changes = endpoints.become_list(&wanted);
    drop(endpoints);
    for id in changes.removed {
        proxy.router().remove(id);
    }
    let mut looks = JoinSet::new();
    for endpoint in changes.added {
        let (proxy, (told, heard)) = (Arc::downgrade(proxy), tokio::sync::oneshot::channel());
        tokio::spawn(watch(proxy, endpoint, told));
        looks.spawn(async move { drop(heard.await) });
    }
    looks
}

/// The places that a name stands for. A name that cannot be looked up stands for what it stood for.
async fn resolved(
    proxy: &Proxy,
    config: &ReplicaConfig,
    target: &Target,
    name: (&str, u16),
) -> Vec<(ReplicaConfig, Target, Option<axum::http::uri::Authority>)> {
    let looked_up = tokio::time::timeout(proxy.config.probe_timeout, tokio::net::lookup_host(name)).await;
    let authorities: BTreeSet<String> = match looked_up {
        Ok(Ok(addresses)) => addresses.map(|address| address.to_string()).collect(),
        Ok(Err(_)) | Err(_) => {
            let endpoints = proxy.endpoints();
            let known = endpoints.all().filter(|endpoint| endpoint.config == *config);
            let known: BTreeSet<String> = known.map(|endpoint| endpoint.authority.to_string()).collect();
            if known.is_empty() {
                tracing::warn!(host = name.0, "the name of a replica cannot be looked up: nothing is sent there");
            } else {
                tracing::debug!(host = name.0, "the name of a replica cannot be looked up: it keeps its addresses");
            }
            known
        }
    };
    let parsed = authorities.into_iter().filter_map(|text| text.parse().ok());
    parsed.map(|authority| (config.clone(), target.clone(), Some(authority))).collect()
}

/// Looks at one replica again and again, until it is no longer in the list.
async fn watch(proxy: std::sync::Weak<Proxy>, endpoint: Arc<Endpoint>, told: tokio::sync::oneshot::Sender<()>) {
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
        tokio::time::sleep(pause).await;
    }
}

/// How often one replica was looked at, and when it is asked for what again.
#[derive(Default)]
struct Looks {
    until_list: u32,
    until_metrics: u32,
    lives: u64,
    was_down: bool,
}

impl Looks {
    async fn look(&mut self, proxy: &Proxy, endpoint: &Endpoint) {
        let health = get(proxy, endpoint, "/health").await;
        let trouble = match &health {
            // A server without this route answers all the same.
            Ok((status, _)) if status.is_success() || *status == StatusCode::NOT_FOUND => None,
            Ok((status, _)) => Some(format!("/health answers {status}")),
            Err(reason) => Some(reason.clone()),
        };
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
                // Whoever was gone has come back with nothing.
                self.lives += 1;
                self.until_list = 0;
                proxy.router().reported(proxy.clock.now(), endpoint.id, Report::CacheCleared);
            }
            self.read_list(proxy, endpoint).await;
            self.read_metrics(proxy, endpoint).await;
        }
        proxy.router().reported(proxy.clock.now(), endpoint.id, Report::Probe { healthy });
    }

    async fn read_list(&mut self, proxy: &Proxy, endpoint: &Endpoint) {
        if self.until_list > 0 {
            self.until_list -= 1;
            return;
        }
        let before = endpoint.heard().clone();
        if let Some(list) = read::<ModelList>(proxy, endpoint, "/v1/models").await {
            let names = list.data.into_iter().map(|model| model.id).filter(|name| name.len() <= MODEL_NAME_BYTES_MAX);
            endpoint.heard().models = names.take(MODELS_MAX).collect();
            self.until_list = LOOKS_PER_LIST;
        }
        if let Some(properties) = read::<Properties>(proxy, endpoint, "/props").await {
            let context = properties.default_generation_settings.and_then(|settings| settings.n_ctx);
            let mut heard = endpoint.heard();
            heard.slots = Some(properties.total_slots.max(1));
            heard.capacity_tokens = context.map(|tokens| tokens.saturating_mul(u64::from(properties.total_slots)));
        }
        let known = proxy.router().view(proxy.clock.now(), endpoint.id).is_some();
        if *endpoint.heard() != before || !known {
            enter(proxy, endpoint);
        }
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
    }
}

/// Tells the router of a replica, or of what it is by now, unless it has just left the list.
fn enter(proxy: &Proxy, endpoint: &Endpoint) {
    let endpoints = proxy.endpoints();
    if endpoints.get(endpoint.id).is_none() {
        return;
    }
    if !proxy.router().add(endpoint.id, endpoint.settings()) {
        tracing::warn!(replica = &*endpoint.name, "there are too many replicas: this one gets nothing");
    }
}

async fn read<T: for<'a> Deserialize<'a>>(proxy: &Proxy, endpoint: &Endpoint, path: &str) -> Option<T> {
    let (status, body) = get(proxy, endpoint, path).await.ok()?;
    status.is_success().then(|| serde_json::from_slice(&body).ok()).flatten()
}

async fn get(proxy: &Proxy, endpoint: &Endpoint, path: &str) -> Result<(StatusCode, Bytes), String> {
    let asking = async {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = endpoint.uri(path).map_err(|error| error.to_string())?;
        if let Some(authorization) = &endpoint.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
        }
        let response = proxy.upstream.request(request).await.map_err(|error| root_cause(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, DOCUMENT_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
        Ok((head.status, body.to_bytes()))
    };
    let asked = tokio::time::timeout(proxy.config.probe_timeout, asking).await;
    asked.unwrap_or_else(|_| Err("it does not answer in time".to_owned()))
}

/// The innermost reason says what happened.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
