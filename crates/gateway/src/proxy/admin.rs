//! What an operator sees of the replicas, and changes.

use super::{Proxy, ReplicaConfig, ReplicaUrl, log::DECISIONS_MAX, names, prompt::key_of, replica::Endpoint};
use crate::{
    admin::{AdminError, read_body},
    errors::ApiError,
    openai::Fields,
};
use axum::{
    Json, Router as Routes,
    extract::{Query, Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};
use warmset_core::{Instant, routing::BreakerState};

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
        .fallback(async |request: Request| ApiError::no_such_route(request.uri().path()))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .with_state(proxy)
}

async fn metrics(State(proxy): State<Arc<Proxy>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], proxy.metrics.text(&proxy)).into_response()
}

async fn list(State(proxy): State<Arc<Proxy>>) -> Json<Value> {
    Json(document(&proxy))
}

/// The models that a replica is not asked for now, why, and until when.
fn pauses(proxy: &Proxy, now: Instant, endpoint: &Endpoint) -> Vec<Value> {
    let pauses = proxy.router().pauses(now, endpoint.id);
    let models = endpoint.models();
    let shown = pauses.iter().map(|pause| {
        // One that has no name here is what requests without a model are counted as.
        let model = models.iter().find(|model| key_of(model) == pause.model);
        let reason = if pause.asked { "retry_after" } else { "failing" };
        json!({ "model": model, "reason": reason, "until": moment(now, pause.until) })
    });
    shown.collect()
}

/// A moment of the router as seconds since 1970.
fn moment(now: Instant, at: Instant) -> f64 {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + at.since(now);
    (unix.as_secs_f64() * 1000.0).round() / 1000.0
}

/// Every replica as it is now.
fn document(proxy: &Proxy) -> Value {
    let endpoints: Vec<_> = proxy.endpoints().all().cloned().collect();
    let now = proxy.clock.now();
    let replicas = endpoints.iter().map(|endpoint| {
        let view = proxy.router().view(now, endpoint.id);
        let (models, paused_models) = (endpoint.models(), pauses(proxy, now, endpoint));
        let heard = endpoint.heard();
        json!({
            "url": endpoint.config.url.as_str(),
            "name": &*endpoint.name,
            "healthy": heard.healthy,
            "trouble": heard.trouble,
            "models": models,
            "breaker": view.map(|view| match view.breaker {
                BreakerState::Closed => "closed",
                BreakerState::HalfOpen => "half_open",
                BreakerState::Open { .. } => "open",
            }),
            "open_until": view.and_then(|view| match view.breaker {
                BreakerState::Open { until } => Some(moment(now, until)),
                BreakerState::Closed | BreakerState::HalfOpen => None,
            }),
            "paused_models": paused_models,
            "in_flight": view.map(|view| view.in_flight),
            "pending_tokens": view.map(|view| view.pending_tokens),
            "held_tokens": view.map(|view| view.held_tokens),
            "prefill_tokens_per_second": view.map(|view| view.prefill_tokens_per_second),
        })
    });
    json!({ "replicas": replicas.collect::<Vec<_>>(), "draining": proxy.is_draining() })
}

/// The fields of a replica in a call.
const FIELDS: [&str; 6] = ["url", "models", "slots", "capacity_tokens", "weight", "api_key_env"];

/// What a call says of a replica. Keys themselves are not sent: it names an environment variable of the gateway.
fn replica_of(body: &[u8]) -> Result<ReplicaConfig, AdminError> {
    let fields = Fields::parse(body)?;
    fields.only(&FIELDS)?;
    let mut config = ReplicaConfig::new(url_of(&fields)?);
    config.models = fields.read("models", "a list of strings")?.unwrap_or_default();
    config.slots = fields.integer("slots", 1..=u32::MAX)?;
    config.capacity_tokens = fields.integer("capacity_tokens", 1..=u32::MAX)?.map(u64::from);
    if let Some(weight) = fields.read("weight", "a number")? {
        config.weight = ReplicaConfig::check_weight(weight).map_err(AdminError::bad_request)?;
    }
    let key = fields.text("api_key_env")?.map(|name| ReplicaConfig::key_from_environment(&name));
    config.api_key = key.transpose().map_err(AdminError::bad_request)?;
    Ok(config)
}

fn url_of(fields: &Fields<'_>) -> Result<ReplicaUrl, AdminError> {
    let url = fields.text("url")?.ok_or_else(|| AdminError::bad_request("url is missing"))?;
    url.parse().map_err(AdminError::bad_request)
}

async fn add(State(proxy): State<Arc<Proxy>>, request: Request) -> Answer {
    let config = replica_of(&read_body(request).await?)?;
    names::refuse_own(&proxy, std::slice::from_ref(&config)).await.map_err(AdminError::bad_request)?;
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

async fn remove(State(proxy): State<Arc<Proxy>>, request: Request) -> Answer {
    let body = read_body(request).await?;
    let fields = Fields::parse(&body)?;
    fields.only(&["url"])?;
    let url = url_of(&fields)?;
    {
        let mut configured = proxy.configured();
        let before = configured.len();
        configured.retain(|known| known.url != url);
        if configured.len() == before {
            return Err(AdminError { status: 404, message: format!("there is no replica {url}") });
        }
    }
    follow(&proxy).await
}

async fn reload(State(proxy): State<Arc<Proxy>>) -> Answer {
    let reread = proxy.reread.clone();
    let reread = reread.ok_or_else(|| AdminError::bad_request("there is no configuration file to read again"))?;
    let read = tokio::task::spawn_blocking(move || reread()).await;
    let replicas = read.map_err(|error| AdminError { status: 500, message: error.to_string() })?;
    let refused = |message| AdminError { status: 422, message };
    let replicas = replicas.map_err(refused)?;
    names::refuse_own(&proxy, &replicas).await.map_err(refused)?;
    *proxy.configured() = replicas;
    follow(&proxy).await
}

/// Lets the change take effect, and waits for the first look at who is new.
async fn follow(proxy: &Arc<Proxy>) -> Answer {
    let mut looks = names::follow_list(proxy).await;
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
