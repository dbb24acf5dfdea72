//! What an operator sees of the replicas, and changes.

use super::{Proxy, ReplicaConfig, log::DECISIONS_MAX, watch};
use crate::admin::{ADMIN_BODY_BYTES_MAX, AdminError};
use axum::{
    Json, Router as Routes,
    extract::{DefaultBodyLimit, Query, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc};
use warmset_core::routing::BreakerState;

/// Decisions in one list unless asked otherwise.
const LISTED: usize = 20;

type Answer = Result<Json<Value>, AdminError>;
type Parameters = Query<BTreeMap<String, String>>;

pub(super) fn routes(proxy: Arc<Proxy>) -> Routes {
    Routes::new()
        .route("/metrics", get(metrics))
        .route("/admin/v1/replicas", get(list).post(add).delete(remove))
        .route("/admin/v1/decisions", get(decisions))
        .route("/admin/v1/reload", post(reload))
        .route("/admin/v1/drain", post(drain))
        .layer(DefaultBodyLimit::max(ADMIN_BODY_BYTES_MAX))
        .with_state(proxy)
}

async fn metrics(State(proxy): State<Arc<Proxy>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], proxy.metrics.text(&proxy)).into_response()
}

async fn list(State(proxy): State<Arc<Proxy>>) -> Json<Value> {
    Json(document(&proxy))
}

/// Every replica as it is now.
fn document(proxy: &Proxy) -> Value {
    let endpoints: Vec<_> = proxy.endpoints().all().cloned().collect();
    let now = proxy.clock.now();
    let replicas = endpoints.iter().map(|endpoint| {
        let view = proxy.router().view(now, endpoint.id);
        let models = endpoint.models();
        let heard = endpoint.heard();
        json!({
            "url": endpoint.config.url,
            "name": &*endpoint.name,
            "healthy": heard.healthy,
            "trouble": heard.trouble,
            "models": models,
            "breaker": view.map(|view| match view.breaker {
                BreakerState::Closed => "closed",
                BreakerState::HalfOpen => "half_open",
                BreakerState::Open { .. } => "open",
            }),
            "in_flight": view.map(|view| view.in_flight),
            "pending_tokens": view.map(|view| view.pending_tokens),
            "held_tokens": view.map(|view| view.held_tokens),
            "prefill_tokens_per_second": view.map(|view| view.prefill_tokens_per_second),
        })
    });
    json!({ "replicas": replicas.collect::<Vec<_>>(), "draining": proxy.is_draining() })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    url: String,
    #[serde(default)]
    models: Vec<String>,
    #[serde(default)]
    slots: Option<u32>,
    #[serde(default)]
    capacity_tokens: Option<u64>,
    #[serde(default)]
    weight: Option<f64>,
    /// The name of an environment variable of the gateway. Keys themselves are not sent.
    #[serde(default)]
    api_key_env: Option<String>,
}

fn parse(body: &[u8]) -> Result<Named, AdminError> {
    serde_json::from_slice(body).map_err(|error| AdminError::bad_request(format!("the body is no replica: {error}")))
}

async fn add(State(proxy): State<Arc<Proxy>>, body: axum::body::Bytes) -> Answer {
    let named = parse(&body)?;
    if named.slots == Some(0) || named.capacity_tokens == Some(0) {
        return Err(AdminError::bad_request("slots and capacity_tokens must be at least 1"));
    }
    let key = named.api_key_env.as_deref().map(ReplicaConfig::key_from_environment);
    let config = ReplicaConfig {
        models: named.models,
        slots: named.slots,
        capacity_tokens: named.capacity_tokens,
        weight: named.weight.map_or(Ok(1.0), ReplicaConfig::check_weight).map_err(AdminError::bad_request)?,
        api_key: key.transpose().map_err(AdminError::bad_request)?,
        ..ReplicaConfig::new(&named.url)
    };
    config.check().map_err(AdminError::bad_request)?;
    {
        let mut configured = proxy.configured();
        if configured.len() >= super::REPLICAS_MAX {
            return Err(AdminError { status: 409, message: "there are as many replicas as there may be".into() });
        }
        configured.retain(|known| known.url != config.url);
        configured.push(config);
    }
    follow(&proxy).await
}

async fn remove(State(proxy): State<Arc<Proxy>>, body: axum::body::Bytes) -> Answer {
    let named = parse(&body)?;
    {
        let mut configured = proxy.configured();
        let before = configured.len();
        configured.retain(|known| known.url != named.url);
        if configured.len() == before {
            return Err(AdminError { status: 404, message: format!("there is no replica {}", named.url) });
        }
    }
    follow(&proxy).await
}

async fn reload(State(proxy): State<Arc<Proxy>>) -> Answer {
    let reread = proxy.reread.clone();
    let reread = reread.ok_or_else(|| AdminError::bad_request("there is no configuration file to read again"))?;
    let read = tokio::task::spawn_blocking(move || reread()).await;
    let replicas = read.map_err(|error| AdminError { status: 500, message: error.to_string() })?;
    *proxy.configured() = replicas.map_err(|message| AdminError { status: 422, message })?;
    follow(&proxy).await
}

/// Lets the change take effect, and waits for the first look at who is new.
async fn follow(proxy: &Arc<Proxy>) -> Answer {
    let mut looks = watch::follow_list(proxy).await;
    while looks.join_next().await.is_some() {}
    Ok(Json(document(proxy)))
}

async fn decisions(State(proxy): State<Arc<Proxy>>, Query(parameters): Parameters) -> Answer {
    let limit = parameters.get("limit").map_or(Ok(LISTED), |text| text.parse());
    let limit: usize =
        limit.map_err(|_| AdminError::bad_request(format!("limit must be a number up to {DECISIONS_MAX}")))?;
    Ok(Json(json!({ "decisions": proxy.log.documents(limit) })))
}

async fn drain(State(proxy): State<Arc<Proxy>>) -> Json<Value> {
    proxy.drain();
    Json(json!({ "running": proxy.running() }))
}
