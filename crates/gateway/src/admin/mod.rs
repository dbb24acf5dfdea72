//! The admin listener: models, workers, ledger, events, metrics. Reading never counts as use and never loads anything.
//!
//! In a path a model's name is one segment: a `/` in it is written `%2F` (see [`model_path`]).

mod access;
mod backend;
mod events;

pub(crate) use access::guard;
pub use access::{AdminAccess, hash_admin_key};
pub use backend::{AdminBackend, AdminError, AdminFuture, RecordingChunks, RecordingLimits};
pub use events::{EVENT_BACKLOG_MAX, EventLog, LoggedEvent, Next, Subscription};

use crate::{errors::ApiError, frontend::Frontend};
use axum::{
    body::Body,
    extract::{Path, Query, Request, State, rejection::PathRejection},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use http_body_util::{BodyExt, Limited};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use warmset_core::ModelName;

/// The largest body of an admin call.
pub const ADMIN_BODY_BYTES_MAX: usize = 1 << 20;
/// Lines of a log given if no number is asked for, and at most.
const LOG_LINES: usize = 100;
const LOG_LINES_MAX: usize = 10_000;
/// Jobs or batches in one list unless asked otherwise.
pub(crate) const LISTED: u64 = 100;
/// How often an idle stream of events shows that it is alive.
const EVENTS_HEARTBEAT: Duration = Duration::from_secs(15);
/// How long a scrape waits for the run loop.
const FIGURES_TIMEOUT: Duration = Duration::from_secs(2);

/// What the handlers share.
#[derive(Clone)]
pub(crate) struct AdminState {
    pub(crate) frontend: Frontend,
    pub(crate) backend: Arc<dyn AdminBackend>,
}

/// The path of a model's admin route; `action` is empty or one of `pin`, `unpin`, `load`, `unload`, `logs`.
pub fn model_path(name: &ModelName, action: &str) -> String {
    // Of the characters a name may have only these mean something else in a path.
    let name = name.as_str().replace('/', "%2F").replace(':', "%3A").replace('@', "%40");
    let separator = if action.is_empty() { "" } else { "/" };
    format!("/admin/v1/models/{name}{separator}{action}")
}

impl From<ApiError> for AdminError {
    fn from(error: ApiError) -> Self {
        Self { status: error.status.as_u16(), message: error.message().to_owned() }
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
        let error = json!({"message": self.message, "type": kind, "param": null, "code": null});
        (status, axum::Json(json!({ "error": error }))).into_response()
    }
}

type Name = Result<Path<String>, PathRejection>;
type Parameters = Query<BTreeMap<String, String>>;
type Answer = Result<axum::Json<Value>, AdminError>;

fn parse_name(name: Name) -> Result<ModelName, AdminError> {
    let Ok(Path(name)) = name else { return Err(AdminError::bad_request("the path is not UTF-8")) };
    ModelName::parse(&name).map_err(|error| AdminError::bad_request(error.to_string()))
}

/// The body of a call, which is small.
pub(crate) async fn read_body(request: Request) -> Result<bytes::Bytes, AdminError> {
    let body = Limited::new(request.into_body(), ADMIN_BODY_BYTES_MAX).collect().await;
    let body = body.map_err(|_| AdminError { status: 413, message: "the body is too large or ended early".into() })?;
    Ok(body.to_bytes())
}

/// The JSON object of a call; an empty body is an empty object.
async fn read_object(request: Request) -> Result<Value, AdminError> {
    let bytes = read_body(request).await?;
    if bytes.is_empty() {
        return Ok(json!({}));
    }
    match serde_json::from_slice(&bytes) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(AdminError::bad_request("the body must be a JSON object")),
        Err(error) => Err(AdminError::bad_request(format!("the body is not JSON: {error}"))),
    }
}

async fn answer(future: AdminFuture<'_>) -> Answer {
    future.await.map(axum::Json)
}

pub(crate) async fn metrics(State(state): State<AdminState>) -> Response {
    state.backend.refresh_metrics().await;
    let frontend = &state.frontend;
    let name_of = |digest: &warmset_core::Digest| frontend.directory().name_of(digest);
    if let Some(figures) = frontend.figures(FIGURES_TIMEOUT).await {
        frontend.metrics().set_gateway(&figures, &name_of);
    }
    if let Some(jobs) = state.backend.jobs() {
        frontend.metrics().set_jobs(&jobs.counts(FIGURES_TIMEOUT).await);
    }
    let text = frontend.metrics().render(frontend.clock().now());
    let kind = HeaderValue::from_static(prometheus_client::encoding::prometheus_text::CONTENT_TYPE);
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

pub(crate) async fn list_models(State(state): State<AdminState>) -> Answer {
    answer(state.backend.list_models()).await
}

pub(crate) async fn show_model(State(state): State<AdminState>, name: Name) -> Answer {
    answer(state.backend.show_model(parse_name(name)?)).await
}

pub(crate) async fn add_model(State(state): State<AdminState>, request: Request) -> Answer {
    let body = read_object(request).await?;
    answer(state.backend.add_model(body)).await
}

pub(crate) async fn remove_model(State(state): State<AdminState>, name: Name) -> Answer {
    answer(state.backend.remove_model(parse_name(name)?)).await
}

pub(crate) async fn pin_model(State(state): State<AdminState>, name: Name) -> Answer {
    answer(state.backend.pin_model(parse_name(name)?, true)).await
}

pub(crate) async fn unpin_model(State(state): State<AdminState>, name: Name) -> Answer {
    answer(state.backend.pin_model(parse_name(name)?, false)).await
}

pub(crate) async fn load_model(State(state): State<AdminState>, name: Name, Query(query): Parameters) -> Answer {
    only(&query, &["wait"])?;
    let wait = query.get("wait").is_none_or(|wait| wait != "false");
    answer(state.backend.load_model(parse_name(name)?, wait)).await
}

pub(crate) async fn unload_model(State(state): State<AdminState>, name: Name) -> Answer {
    answer(state.backend.unload_model(parse_name(name)?)).await
}

/// Whatever else can be done with a model.
pub(crate) async fn act_on_model(
    State(state): State<AdminState>,
    path: Result<Path<(String, String)>, PathRejection>,
    request: Request,
) -> Answer {
    let Ok(Path((name, action))) = path else { return Err(AdminError::bad_request("the path is not UTF-8")) };
    let body = read_object(request).await?;
    answer(state.backend.act_on_model(parse_name(Ok(Path(name)))?, action, body)).await
}

pub(crate) async fn model_logs(State(state): State<AdminState>, name: Name, Query(query): Parameters) -> Answer {
    only(&query, &["lines"])?;
    let lines = number(&query, "lines")?.map_or(LOG_LINES, |lines| usize::try_from(lines).unwrap_or(usize::MAX));
    answer(state.backend.model_logs(parse_name(name)?, lines.min(LOG_LINES_MAX))).await
}

pub(crate) async fn workers(State(state): State<AdminState>) -> Answer {
    answer(state.backend.workers()).await
}

pub(crate) async fn ledger(State(state): State<AdminState>) -> Answer {
    answer(state.backend.ledger()).await
}

pub(crate) async fn kv(State(state): State<AdminState>) -> Answer {
    answer(state.backend.kv()).await
}

pub(crate) async fn clear_kv(State(state): State<AdminState>) -> Answer {
    answer(state.backend.clear_kv()).await
}

pub(crate) async fn drain(State(state): State<AdminState>) -> Answer {
    answer(state.backend.drain()).await
}

pub(crate) async fn reload(State(state): State<AdminState>) -> Answer {
    answer(state.backend.reload()).await
}

/// What the machines are told and do from now on, for as long as the caller takes it.
pub(crate) async fn recording(
    State(state): State<AdminState>,
    Query(query): Parameters,
) -> Result<Response, AdminError> {
    only(&query, &["seconds", "max_bytes"])?;
    let at_least_one = |name: &str| match number(&query, name)? {
        Some(0) => Err(AdminError::bad_request(format!("{name} must be at least 1"))),
        limit => Ok(limit),
    };
    let limits = RecordingLimits { seconds: at_least_one("seconds")?, bytes_max: at_least_one("max_bytes")? };
    let chunks = stream::unfold(state.backend.record(limits)?, |mut chunks| async {
        let chunk = chunks.recv().await?;
        Some((Ok::<_, std::convert::Infallible>(chunk), chunks))
    });
    let kind = HeaderValue::from_static("application/x-ndjson");
    Ok(([(header::CONTENT_TYPE, kind)], Body::from_stream(chunks)).into_response())
}

/// Events as they happen, from the one after `?after=N` on; without it, from now on. With `?recent=N` only the last ones,
/// as one JSON document.
pub(crate) async fn events(
    State(state): State<AdminState>,
    Query(query): Parameters,
    request: Request,
) -> Result<Response, AdminError> {
    only(&query, &["recent", "after"])?;
    let log = state.backend.events();
    if let Some(count) = number(&query, "recent")? {
        let recent = log.recent(usize::try_from(count).unwrap_or(usize::MAX));
        let events = recent.iter().map(|event| json!({"id": event.id, "kind": event.kind, "data": event.data}));
        return Ok(axum::Json(json!({ "events": events.collect::<Vec<_>>() })).into_response());
    }
    // A browser's EventSource says by header where it stopped.
    let last = request.headers().get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    let after = number(&query, "after")?.or(last).unwrap_or_else(|| log.last_id());
    let subscription = log.subscribe(after);
    let events = stream::unfold(subscription, |mut subscription| async move {
        let text = match tokio::time::timeout(EVENTS_HEARTBEAT, subscription.next()).await {
            Err(_) => ": alive\n\n".to_owned(),
            Ok(Next::Event(event)) => format!("id: {}\nevent: {}\ndata: {}\n\n", event.id, event.kind, event.data),
            Ok(Next::Gap { after, next }) => {
                format!("event: gap\ndata: {}\n\n", json!({"after": after, "next": next}))
            }
        };
        Some((Ok::<_, std::convert::Infallible>(text), subscription))
    });
    let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], Body::from_stream(events)).into_response())
}

/// A parameter that is not known may be a known one misspelt, and is not left aside.
fn only(query: &BTreeMap<String, String>, known: &[&str]) -> Result<(), AdminError> {
    match query.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => {
            let message = format!("there is no parameter {name} here: there is {}", known.join(", "));
            Err(AdminError::bad_request(message))
        }
        None => Ok(()),
    }
}

pub(crate) fn number(query: &BTreeMap<String, String>, name: &str) -> Result<Option<u64>, AdminError> {
    let parse = |text: &String| text.parse().map_err(|_| AdminError::bad_request(format!("{name} must be a number")));
    query.get(name).map(parse).transpose()
}
