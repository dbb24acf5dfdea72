//! A request on its way to a replica: read, decided, sent, and once more elsewhere if that can help.

use super::{
    Proxy, Shared,
    dialect::Dialect,
    hint,
    log::outcome_name,
    prompt::{self, Prompt, hash_of, key_of},
    relay::{Exchange, Relay, Shape},
    replica::Endpoint,
    watch,
};
use crate::{
    errors::ApiError,
    openai::{REQUEST_ID, parse_aside, patience, read_any_body},
};
use axum::{
    Router as Routes,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use serde_json::json;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime},
};
use tokio::time::Instant;
use warmset_core::routing::{Ask, Decision, Ended, Outcome, Refusal, ReplicaId, Verdict};

/// Names the replica that answered.
const WORKER: HeaderName = HeaderName::from_static("warmset-worker");
/// A caller that sends this with any value hears why its request went where it went.
const EXPLAIN: HeaderName = HeaderName::from_static("warmset-explain");
const DECISION: HeaderName = HeaderName::from_static("warmset-decision");

/// Routes that replicas answer. What is not here is not for callers: servers have others that unload and configure.
const PATHS: [&str; 20] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/pooling",
    "/v1/moderations",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/rerank",
    "/score",
    "/tokenize",
    "/detokenize",
    "/generate",
];

/// Headers of a caller that a replica gets. Neither credentials nor what concerns one connection are among them.
const KEPT_HEADERS: [&str; 11] = [
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "content-type",
    "idempotency-key",
    "openai-beta",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-request-id",
    "x-session-id",
];
/// Headers of an answer that concern the connection to its replica only.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

pub(super) fn routes(shared: Shared) -> Routes {
    let mut routes = Routes::new()
        .route("/health/live", get(async || axum::Json(json!({"status": "live"}))))
        .route("/health/ready", get(ready))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model));
    for path in PATHS {
        routes = routes.route(path, axum::routing::post(forward));
    }
    routes
        .fallback(nothing_here)
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .with_state(Arc::new(shared))
}

/// What looks at replicas find here where one of them is this gateway itself is said as such.
async fn nothing_here(State(shared): State<Arc<Shared>>, request: Request) -> ApiError {
    let came_round = shared.proxy.via.check(request.headers()).err();
    came_round.unwrap_or_else(|| ApiError::no_such_route(request.uri().path()))
}

async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    let proxy = &shared.proxy;
    let asked = proxy.endpoints().all().any(|endpoint| endpoint.heard().healthy);
    match (proxy.is_draining(), asked) {
        (true, _) => ApiError::draining().into_response(),
        (false, false) => ApiError::no_replica(None).into_response(),
        (false, true) => axum::Json(json!({"status": "ready"})).into_response(),
    }
}

async fn models(State(shared): State<Arc<Shared>>) -> Response {
    let proxy = &shared.proxy;
    let mut names = std::collections::BTreeSet::new();
    for endpoint in proxy.endpoints().all() {
        names.extend(endpoint.models());
    }
    names.extend(proxy.configured().iter().flat_map(|replica| replica.models.iter().cloned()));
    let models: Vec<_> = names.iter().map(|name| model_document(name)).collect();
    axum::Json(json!({"object": "list", "data": models})).into_response()
}

async fn model(State(shared): State<Arc<Shared>>, Path(name): Path<String>) -> Response {
    if !is_known(&shared.proxy, &name) {
        watch::read_lists(&shared.proxy).await;
    }
    if is_known(&shared.proxy, &name) {
        axum::Json(model_document(&name)).into_response()
    } else {
        ApiError::model_not_found(&name).into_response()
    }
}

fn model_document(name: &str) -> serde_json::Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "replica"})
}

/// A request that was read.
struct Call {
    name: String,
    head: Parts,
    body: Bytes,
    prompt: Prompt,
    tenant: u64,
    deadline: Instant,
}

async fn forward(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let proxy = &shared.proxy;
    let name = proxy.next_call_name();
    let dialect = Dialect::of(request.uri().path());
    let answered = match read(proxy, name.clone(), request).await {
        Ok(call) => answer(&shared, &call).await.inspect_err(|error| {
            let model = known_model(proxy, &call.prompt.model);
            proxy.metrics.refused(&model, error.outcome());
        }),
        Err(error) => Err(error),
    };
    let mut response = answered.unwrap_or_else(|error| dialect.error_response(error));
    if let Ok(value) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

async fn read(proxy: &Proxy, name: String, request: Request) -> Result<Call, ApiError> {
    if proxy.is_draining() {
        return Err(ApiError::draining());
    }
    proxy.via.check(request.headers())?;
    let (head, body) = request.into_parts();
    let deadline = Instant::now() + patience(&proxy.config.api, &head.headers);
    let body = read_any_body(&proxy.config.api, Request::from_parts(head.clone(), body)).await?;
    let path = head.uri.path().to_owned();
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let prompt = match kind.filter(|kind| kind.starts_with("multipart/form-data")) {
        Some(kind) => prompt::read_form(body.clone(), kind).await,
        None => parse_aside(body.clone(), move |body| Ok(prompt::read(body, &path))).await?,
    };
    // Nobody's name: callers with one credential are one tenant.
    let credential = head.headers.get(header::AUTHORIZATION).or_else(|| head.headers.get("x-api-key"));
    let tenant = credential.map_or(0, |value| hash_of(value.as_bytes()));
    Ok(Call { name, head, body, prompt, tenant, deadline })
}

/// What came of one try.
enum Tried {
    Answered(Response),
    /// It can be tried elsewhere; this is the answer if it cannot after all.
    Again(ReplicaId, Result<Response, ApiError>),
}

async fn answer(shared: &Shared, call: &Call) -> Result<Response, ApiError> {
    match attempt(shared, call, None).await? {
        Tried::Answered(response) => Ok(response),
        Tried::Again(failed, first) => match attempt(shared, call, Some(failed)).await {
            Ok(Tried::Answered(response)) => Ok(response),
            Ok(Tried::Again(_, second)) => second,
            // Nobody else can answer: what the first one said stands.
            Err(_) => first.inspect(|response| {
                let outcome = outcome_of(response.status(), None);
                shared.proxy.metrics.refused(&call.prompt.model, outcome_name(outcome));
            }),
        },
    }
}

async fn attempt(shared: &Shared, call: &Call, failed: Option<ReplicaId>) -> Result<Tried, ApiError> {
    let proxy = &shared.proxy;
    let (decision, endpoint) = match decide(proxy, call, failed) {
        Err(Refusal::UnknownModel) => {
            // It may be there since a moment ago.
            let read = tokio::time::timeout_at(call.deadline, watch::read_lists(proxy)).await;
            read.map_err(|_| ApiError::from(warmset_core::gateway::Refusal::DeadlinePassed))?;
            decide(proxy, call, failed)
        }
        decided => decided,
    }
    .map_err(|refusal| refused(proxy, call, refusal))?;
    let names = named(proxy, &decision);
    let explained = call.head.headers.contains_key(EXPLAIN).then(|| explanation(&decision, &endpoint));
    let entry = proxy.log.note((&call.name, &call.prompt.model), decision, names, failed.is_some());
    let model = call.prompt.model.as_str();
    let mut exchange = Exchange::new(proxy.clone(), endpoint.clone(), &decision, entry, model, failed.is_some());
    let request = outgoing(proxy, call, &endpoint)?;
    let sent = tokio::time::timeout_at(call.deadline, shared.upstream.request(request)).await;
    let error = match sent {
        // Nobody asked it for another protocol, and there is no other answer to pass on.
        Ok(Ok(response)) if response.status().is_informational() => {
            tracing::debug!(replica = &*endpoint.name, "a replica answered with {}", response.status());
            ApiError::replica_lost(&endpoint.name)
        }
        Ok(Ok(response)) => return Ok(received(proxy, call, exchange, &endpoint, response, explained)),
        Ok(Err(error)) => {
            tracing::debug!(replica = &*endpoint.name, "a replica failed: {error}");
            endpoint.gone.fetch_or(error.is_connect(), Ordering::Relaxed);
            ApiError::replica_lost(&endpoint.name)
        }
        Err(_) => warmset_core::gateway::Refusal::DeadlinePassed.into(),
    };
    if call.deadline <= Instant::now() {
        // There is no time left for anybody else.
        exchange.leave_late();
        return Err(error);
    }
    match exchange.leave(Outcome::Lost, None) {
        Verdict::RetryElsewhere => Ok(Tried::Again(endpoint.id, Err(error))),
        Verdict::Over => Err(error),
    }
}

fn decide(proxy: &Proxy, call: &Call, excluded: Option<ReplicaId>) -> Result<(Decision, Arc<Endpoint>), Refusal> {
    let (decision, endpoint) = decide_once(proxy, call, excluded)?;
    if let Some(endpoint) = endpoint {
        return Ok((decision, endpoint));
    }
    // It was taken away this moment, and the router learns of it next.
    let (decision, endpoint) = decide_once(proxy, call, Some(decision.replica))?;
    endpoint.map(|endpoint| (decision, endpoint)).ok_or(Refusal::Unavailable { retry_at: None })
}

/// A decision that is for a replica which is gone is over at once.
fn decide_once(
    proxy: &Proxy,
    call: &Call,
    excluded: Option<ReplicaId>,
) -> Result<(Decision, Option<Arc<Endpoint>>), Refusal> {
    let ask = Ask {
        model: key_of(&call.prompt.model),
        prefix: &call.prompt.chain,
        tenant: call.tenant,
        streamed: call.prompt.stream,
        excluded,
    };
    let now = proxy.clock.now();
    let decision = proxy.router().decide(now, &ask)?;
    let endpoint = proxy.endpoints().get(decision.replica);
    if endpoint.is_none() {
        let ended = Ended { outcome: Outcome::Cancelled, output_started: false, retried: false, usage: None };
        proxy.router().ended(now, decision.ticket, ended);
    }
    Ok((decision, endpoint))
}

fn refused(proxy: &Proxy, call: &Call, refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::UnknownModel if proxy.endpoints().all().all(|endpoint| endpoint.models().is_empty()) => {
            ApiError::no_replica(None)
        }
        // It is configured, and whoever serves it has not been there yet.
        Refusal::UnknownModel if is_known(proxy, &call.prompt.model) => ApiError::no_replica(None),
        Refusal::UnknownModel => ApiError::model_not_found(&call.prompt.model),
        Refusal::Unavailable { retry_at } => ApiError::no_replica(retry_at.map(|at| at.since(proxy.clock.now()))),
        Refusal::TooMany => ApiError::too_many_requests(),
    }
}

/// Names of the replicas that a decision speaks of.
fn named(proxy: &Proxy, decision: &Decision) -> Vec<(ReplicaId, Arc<str>)> {
    let endpoints = proxy.endpoints();
    let candidates = decision.candidates.iter().flatten().map(|candidate| candidate.replica);
    candidates.filter_map(|id| Some((id, endpoints.get(id)?.name.clone()))).collect()
}

fn explanation(decision: &Decision, endpoint: &Endpoint) -> String {
    format!(
        "{}; replica={}; prompt_tokens={}; expected_cached_tokens={}; expected_seconds={:.3}",
        decision.why.as_str(),
        endpoint.name,
        decision.prompt_tokens,
        decision.expected_cached_tokens,
        decision.expected_seconds
    )
}

/// The request as the replica gets it.
fn outgoing(proxy: &Proxy, call: &Call, endpoint: &Endpoint) -> Result<hyper::Request<Full<Bytes>>, ApiError> {
    let path = call.head.uri.path_and_query().map_or("/", |path| path.as_str());
    let uri = endpoint.uri(path).map_err(|_| ApiError::no_such_route(path))?;
    let mut request = hyper::Request::new(Full::new(body_for(call)));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = uri;
    let headers = request.headers_mut();
    for name in KEPT_HEADERS {
        for value in call.head.headers.get_all(name) {
            headers.append(HeaderName::from_static(name), value.clone());
        }
    }
    proxy.via.extend(&call.head.headers, headers);
    headers.insert(header::HOST, endpoint.host.clone());
    if let Some(authorization) = &endpoint.authorization {
        headers.insert(header::AUTHORIZATION, authorization.clone());
    }
    if !headers.contains_key("x-request-id")
        && let Ok(name) = HeaderValue::from_str(&call.name)
    {
        headers.insert(HeaderName::from_static("x-request-id"), name);
    }
    Ok(request)
}

/// The body as it came, with the wish for usage where the caller left that open.
fn body_for(call: &Call) -> Bytes {
    const WISH: &[u8] = br#""stream_options":{"include_usage":true},"#;
    let Some(at) = call.prompt.usage_at else { return call.body.clone() };
    let (before, after) = call.body.split_at(at);
    [before, WISH, after].concat().into()
}

/// What a status says of whoever sent it.
fn outcome_of(status: StatusCode, retry_after: Option<Duration>) -> Outcome {
    match status.as_u16() {
        429 | 503 => Outcome::Busy { retry_after },
        500 | 502 | 504 => Outcome::Failed,
        // It leads back to here.
        508 => Outcome::Lost,
        _ => Outcome::Finished,
    }
}

/// An answer has begun.
fn received(
    proxy: &Proxy,
    call: &Call,
    mut exchange: Exchange,
    endpoint: &Endpoint,
    response: hyper::Response<Incoming>,
    explained: Option<String>,
) -> Tried {
    let (mut head, body) = response.into_parts();
    let retry_after = hint::tame(&mut head.headers, SystemTime::now());
    let outcome = outcome_of(head.status, retry_after);
    if head.status == StatusCode::NOT_FOUND {
        // Perhaps the model is no longer there.
        endpoint.list_is_old.store(true, Ordering::Relaxed);
    }
    let again = outcome != Outcome::Finished && exchange.end(outcome, None) == Verdict::RetryElsewhere;
    remove_hop_by_hop(&mut head.headers);
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_stream = kind.starts_with("text/event-stream");
    let hides_usage = call.prompt.usage_at.is_some();
    if is_stream && hides_usage {
        head.headers.remove(header::CONTENT_LENGTH);
    }
    if let Ok(name) = HeaderValue::from_str(&endpoint.name) {
        head.headers.insert(WORKER, name);
    }
    if let Some(Ok(value)) = explained.map(|text| HeaderValue::from_str(&text)) {
        head.headers.insert(DECISION, value);
    }
    let shape = Shape { is_stream, hides_usage, dialect: Dialect::of(call.head.uri.path()) };
    let relay = Relay::new(body, exchange, outcome, shape, (call.deadline, proxy.config.idle_timeout));
    let response = Response::from_parts(head, Body::new(relay));
    if again { Tried::Again(endpoint.id, Ok(response)) } else { Tried::Answered(response) }
}

/// Takes out what concerns the connection to the replica: also what that connection names itself.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| !matches!(*name, header::CONTENT_LENGTH | header::CONTENT_TYPE))
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

fn is_known(proxy: &Proxy, model: &str) -> bool {
    proxy.endpoints().all().any(|endpoint| endpoint.models().contains(model)) || is_configured(proxy, model)
}

/// Whether a configured replica is to serve it, wherever that may be: its name may lead nowhere yet.
fn is_configured(proxy: &Proxy, model: &str) -> bool {
    proxy.configured().iter().any(|replica| replica.models.iter().any(|name| name == model))
}

/// The label of a model in metrics: hostile names make no series.
fn known_model(proxy: &Proxy, model: &str) -> String {
    if is_known(proxy, model) { model.to_owned() } else { crate::metrics::UNKNOWN_MODEL.to_owned() }
}
