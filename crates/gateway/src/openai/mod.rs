//! The routes that callers of models use, OpenAI's and Anthropic's: parse, resolve, submit, and write what comes back.
//! `ask` and the files named after it read a dialect, `objects` and the `encode` files write one; nothing else differs.

mod ask;
pub(crate) mod background;
mod call;
mod conversation;
mod dialect;
mod embeddings;
mod fields;
mod held;
mod logprobs;
mod messages_ask;
mod messages_encode;
mod objects;
mod output;
mod responses_ask;
mod responses_encode;
mod stream;

use crate::{
    clock::unix_seconds,
    directory::{Entry, Unresolved},
    errors::ApiError,
    frontend::{Frontend, Submission, Update},
    jobs::{self, Deferral},
    router::Later,
};
use ask::{Embedding, Generation, Route, Tier};
use axum::{
    body::Body,
    extract::{Path, Request, State, rejection::PathRejection},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use call::{Answers, reply_of};
pub(crate) use call::{Call, MODEL_DIGEST, REQUEST_ID, START};
use dialect::{Collected, Encoder};
pub(crate) use fields::{Bounded, Fields};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use objects::{Completions, Envelope};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use stream::EventStream;
use warmset_core::{
    Priority,
    inference::{Reply, Work},
};

/// The limits that the description of the routes repeats.
pub(crate) mod limits {
    pub(crate) use super::{
        ask::{MAX_TOKENS_MAX, MESSAGES_MAX, STOP_BYTES_MAX, STOPS_MAX},
        output::TOOLS_MAX,
    };
}

/// Bodies from this size on are parsed off the threads that serve connections.
const PARSE_ASIDE_BYTES: usize = 256 << 10;

/// Says whether the server is ready, and if not, why.
pub type ReadyProbe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// How the inference routes behave.
#[derive(Debug, Clone)]
pub struct ApiConfig {
    /// The largest body.
    pub body_bytes_max: usize,
    /// Time to send a body.
    pub body_timeout: Duration,
    /// Time a caller is given to get its first byte.
    pub patience: Duration,
    /// How long a stream's status line waits for its engine to begin, so that its headers are exact.
    pub stream_grace: Duration,
    /// How long a stream's status line waits while its name is changing its meaning, so that it can say which version
    /// answers. A stream that waits longer begins without.
    pub held_grace: Duration,
    /// How often a stream that waits says so.
    pub heartbeat_interval: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            body_bytes_max: 8 << 20,
            body_timeout: Duration::from_secs(60),
            patience: Duration::from_secs(600),
            stream_grace: Duration::from_millis(200),
            held_grace: Duration::from_secs(15),
            heartbeat_interval: Duration::from_secs(10),
        }
    }
}

/// What the handlers share.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) frontend: Frontend,
    pub(crate) config: Arc<ApiConfig>,
    pub(crate) ready: ReadyProbe,
    /// Where requests go that are answered later; nowhere for the router that answers those.
    pub(crate) later: Later,
}

pub(crate) async fn chat_completions(State(api): State<Api>, request: Request) -> Response {
    generate(api, Dialect::Completions(Route::Chat), request).await
}

pub(crate) async fn completions(State(api): State<Api>, request: Request) -> Response {
    generate(api, Dialect::Completions(Route::Text), request).await
}

pub(crate) async fn responses(State(api): State<Api>, request: Request) -> Response {
    generate(api, Dialect::Responses, request).await
}

pub(crate) async fn messages(State(api): State<Api>, request: Request) -> Response {
    generate(api, Dialect::Messages, request).await
}

/// Counts as a generation of nothing: the engine tokenises, so that a cold model is loaded for it.
pub(crate) async fn count_tokens(State(api): State<Api>, request: Request) -> Response {
    let mut call = Call::new(&api.frontend, request.extensions());
    let headers = request.headers().clone();
    let read = read(&api, messages_ask::counting, request).await;
    let counted = match find(&api, &mut call, read, &headers).await {
        Ok((_, mut asked, entry)) => {
            let class = class_of(&call, &entry, asked.tier);
            let work = Ask { jobs: std::mem::take(&mut asked.jobs), class, headers: &headers, counted: false };
            let mut answers = submit(&api, &call, &entry, work);
            collect(&mut call, &mut answers, asked.choices).await
        }
        Err(error) => Err(error),
    };
    match counted {
        Ok(collected) => {
            call.answered();
            json_response(&call, json!({ "input_tokens": collected.usage.prompt_tokens }).to_string().into_bytes())
        }
        Err(error) => refuse_in(call, error, Dialect::Messages),
    }
}

/// How a request is read and its answer written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    /// OpenAI's two older routes.
    Completions(Route),
    /// OpenAI's Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

impl Dialect {
    /// Where it is.
    fn path(self) -> &'static str {
        match self {
            Self::Completions(route) => route.path(),
            Self::Responses => background::PATH,
            Self::Messages => "/v1/messages",
        }
    }

    fn read(self, body: &[u8]) -> Result<Generation, ApiError> {
        match self {
            Self::Completions(route) => ask::generation(route, body),
            Self::Responses => responses_ask::generation(body),
            Self::Messages => messages_ask::generation(body),
        }
    }
}

async fn generate(api: Api, dialect: Dialect, request: Request) -> Response {
    let mut call = Call::new(&api.frontend, request.extensions());
    let headers = request.headers().clone();
    let read = match read(&api, move |body| dialect.read(body), request).await {
        // An answer that is asked for later is given its place at once, or not.
        Ok((_, asked)) if asked.stream && !asked.background && waits_long(&api, &asked.model).await => {
            return held::respond(&api, call, dialect, asked, headers);
        }
        read => find(&api, &mut call, read, &headers).await,
    };
    match read {
        Ok((body, mut asked, entry)) => {
            // A stream says itself what it waits for.
            let class = class_of(&call, &entry, asked.tier);
            let (headers, model) = (&headers, asked.model.as_str());
            let deferral = Deferral { route: dialect.path(), headers, body: &body, model, entry: &entry, class };
            if asked.background && call.errand.is_none() {
                return background::accept(&api, &mut call, deferral).await;
            }
            if !asked.stream
                && let Some(response) = jobs::defer(&api, &mut call, deferral).await
            {
                return response;
            }
            let work = Ask { jobs: std::mem::take(&mut asked.jobs), class, headers, counted: true };
            let answers = submit(&api, &call, &entry, work);
            let encoder = encoder(dialect, &mut asked, Some(&entry), &call);
            if asked.stream {
                stream_response(&api, (call, dialect), answers, encoder, asked.choices).await
            } else {
                whole_response((call, dialect), answers, encoder, asked.choices).await
            }
        }
        Err(error) => refuse_in(call, error, dialect),
    }
}

/// Reads a request.
async fn read(
    api: &Api,
    parse: impl FnOnce(&[u8]) -> Result<Generation, ApiError> + Send + 'static,
    request: Request,
) -> Result<(Bytes, Generation), ApiError> {
    let body = read_body(&api.config, request).await?;
    let asked = parse_aside(body.clone(), parse).await?;
    Ok((body, asked))
}

/// Finds the model of a request that could be read.
async fn find(
    api: &Api,
    call: &mut Call,
    read: Result<(Bytes, Generation), ApiError>,
    headers: &HeaderMap,
) -> Result<(Bytes, Generation, Arc<Entry>), ApiError> {
    let (body, asked) = read?;
    let entry = resolve(api, call, &asked.model, headers).await?;
    Ok((body, asked, entry))
}

/// Whether a name is held for longer than the status line of a stream waits.
async fn waits_long(api: &Api, model: &str) -> bool {
    let resolved = api.frontend.directory().resolve_waiting(model, api.config.held_grace).await;
    matches!(resolved, Err(Unresolved::Held { waits: true, .. }))
}

pub(crate) async fn embeddings(State(api): State<Api>, request: Request) -> Response {
    let mut call = Call::new(&api.frontend, request.extensions());
    let headers = request.headers().clone();
    let asked = async {
        let body = read_body(&api.config, request).await?;
        let asked = parse_aside(body.clone(), ask::embedding).await?;
        let entry = resolve(&api, &mut call, &asked.model, &headers).await?;
        Ok((body, asked, entry))
    };
    let embedded = match asked.await {
        Ok((body, asked, entry)) => {
            let class = class_of(&call, &entry, asked.tier);
            let (headers, model, route) = (&headers, asked.model.as_str(), "/v1/embeddings");
            let deferral = Deferral { route, headers, body: &body, model, entry: &entry, class };
            if let Some(response) = jobs::defer(&api, &mut call, deferral).await {
                return response;
            }
            let work = Ask { jobs: vec![asked.work.clone()], class, headers, counted: true };
            let mut answers = submit(&api, &call, &entry, work);
            embed(&mut call, &mut answers, &asked).await
        }
        Err(error) => Err(error),
    };
    match embedded {
        Ok(body) => json_response(&call, body),
        Err(error) => refuse_in(call, error, Dialect::Completions(Route::Text)),
    }
}

async fn embed(call: &mut Call, answers: &mut Answers, asked: &Embedding) -> Result<Vec<u8>, ApiError> {
    loop {
        let (_, update) = answers.next().await;
        match reply_of(update)? {
            Some(Reply::Started { start, worker, .. }) => call.started(start, worker),
            Some(Reply::Embedded { vectors, prompt_tokens }) => {
                let length = vectors.first().map_or(0, Vec::len);
                if let Some(wanted) = asked.dimensions
                    && wanted as usize != length
                {
                    let message = format!("this model's embeddings have {length} dimensions and cannot be cut");
                    return Err(ApiError::param("dimensions", message));
                }
                call.first_token();
                call.answered();
                return Ok(embeddings::embeddings(&asked.model, &vectors, prompt_tokens, asked.encoding));
            }
            Some(Reply::Done { .. }) => return Err(ApiError::internal("the engine did not embed")),
            _ => {}
        }
    }
}

pub(crate) async fn list_models(State(api): State<Api>) -> Response {
    let snapshot = api.frontend.directory().snapshot();
    let models: Vec<_> =
        snapshot.entries().iter().map(|entry| model_object(&api, entry, entry.route.name.as_str())).collect();
    axum::Json(json!({"object": "list", "data": models})).into_response()
}

pub(crate) async fn show_model(State(api): State<Api>, name: Result<Path<String>, PathRejection>) -> Response {
    let name = name.map_or_else(|_| String::new(), |Path(name)| name);
    match api.frontend.directory().resolve(&name) {
        Some(entry) => axum::Json(model_object(&api, &entry, &name)).into_response(),
        None => ApiError::model_not_found(&name).into_response(),
    }
}

fn model_object(api: &Api, entry: &Entry, name: &str) -> serde_json::Value {
    json!({
        "id": name,
        "object": "model",
        "created": entry.created_unix_seconds,
        "owned_by": "warmset",
        "aliases": entry.aliases,
        "digest": entry.route.digest,
        "ready": api.frontend.is_ready(&entry.route.digest),
    })
}

/// Reads a body within its limits. Nothing is read of one that says itself that it is too large.
pub(crate) async fn read_body(config: &ApiConfig, request: Request) -> Result<Bytes, ApiError> {
    if !is_json(request.headers()) {
        return Err(ApiError::not_json());
    }
    read_any_body(config, request).await
}

/// Reads a body of any kind within its limits.
pub(crate) async fn read_any_body(config: &ApiConfig, request: Request) -> Result<Bytes, ApiError> {
    let bytes_max = config.body_bytes_max;
    let declared = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if declared.is_some_and(|length: u64| length > bytes_max as u64) {
        return Err(ApiError::body_too_large(bytes_max));
    }
    let body = Limited::new(request.into_body(), bytes_max).collect();
    match tokio::time::timeout(config.body_timeout, body).await {
        Err(_) => Err(ApiError::body_too_slow()),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::body_too_large(bytes_max)),
        Ok(Err(_)) => Err(ApiError::body("the body ended early")),
    }
}

/// Whether the body is declared as JSON. Web pages of other origins cannot declare that without asking first.
fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

pub(crate) async fn parse_aside<T: Send + 'static>(
    body: Bytes,
    parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() < PARSE_ASIDE_BYTES {
        return parse(&body);
    }
    let parsed = tokio::task::spawn_blocking(move || parse(&body)).await;
    parsed.unwrap_or_else(|_| Err(ApiError::internal("the body could not be parsed")))
}

/// What the name means now; a name that is about to mean something else is waited for.
async fn resolve(api: &Api, call: &mut Call, model: &str, headers: &HeaderMap) -> Result<Arc<Entry>, ApiError> {
    let resolved = api.frontend.directory().resolve_waiting(model, patience(&api.config, headers)).await;
    let entry = resolved.map_err(|unresolved| ApiError::unresolved(unresolved, model))?;
    call.resolved(entry.clone());
    Ok(entry)
}

/// The requests of one call.
struct Ask<'a> {
    jobs: Vec<Work>,
    class: Priority,
    headers: &'a HeaderMap,
    /// Whether their tokens are.
    counted: bool,
}

fn submit(api: &Api, call: &Call, entry: &Entry, ask: Ask<'_>) -> Answers {
    let Ask { jobs, class, headers, counted } = ask;
    let patience = call.errand.as_ref().map_or_else(|| patience(&api.config, headers), |errand| errand.patience);
    let tickets = jobs.into_iter().map(|work| {
        let (tenant, digest) = (call.tenant.clone(), entry.route.digest);
        let counted_as = counted.then(|| entry.route.name.clone());
        api.frontend.submit(Submission { tenant, digest, class, patience, counted_as, work })
    });
    Answers::new(tickets.collect(), call.errand.clone())
}

/// The class of a request: what an errand wants, what its tier says, or its model's.
fn class_of(call: &Call, entry: &Entry, tier: Option<Tier>) -> Priority {
    let wanted = call.errand.as_ref().and_then(|errand| errand.class);
    wanted.unwrap_or_else(|| tier.map_or(entry.route.priority, Tier::class))
}

/// OpenAI's clients say how long they wait; an answer that begins later reaches nobody.
pub(crate) fn patience(config: &ApiConfig, headers: &HeaderMap) -> Duration {
    let said = headers.get("x-stainless-read-timeout").and_then(|value| value.to_str().ok()?.parse::<f64>().ok());
    let said = said.filter(|seconds| *seconds > 0.0).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    said.map_or(config.patience, |said| said.min(config.patience))
}

/// What writes an answer. Without an entry there is none, but an error.
fn encoder(dialect: Dialect, asked: &mut Generation, entry: Option<&Entry>, call: &Call) -> Box<dyn Encoder> {
    let (created, model) = (unix_seconds(), std::mem::take(&mut asked.model));
    let route = match dialect {
        Dialect::Completions(route) => route,
        Dialect::Responses => {
            let (tier, echo) = (asked.tier.unwrap_or(Tier::Default).as_str(), asked.echo.take().unwrap_or_default());
            return Box::new(responses_encode::Response::new(responses_encode::Head {
                own: call.name.clone(),
                created,
                model,
                tier,
                echo: *echo,
            }));
        }
        Dialect::Messages => return Box::new(messages_encode::Message::new(&call.name, &model)),
    };
    let prefix = if route == Route::Chat { "chatcmpl" } else { "cmpl" };
    Box::new(Completions::new(Envelope {
        route,
        id: format!("{prefix}-{}", call.name),
        created,
        model,
        fingerprint: entry.map(|entry| entry.route.digest.fingerprint()).unwrap_or_default(),
        tier: asked.tier,
        include_usage: asked.include_usage,
    }))
}

/// Refuses in OpenAI's form.
pub(crate) fn refuse(call: Call, error: ApiError) -> Response {
    refuse_in(call, error, Dialect::Responses)
}

fn refuse_in(mut call: Call, error: ApiError, dialect: Dialect) -> Response {
    call.failed(&error);
    let mut response = match dialect {
        Dialect::Messages => error.into_anthropic_response(),
        Dialect::Completions(_) | Dialect::Responses => error.into_response(),
    };
    call.write_headers(response.headers_mut());
    response
}

fn json_response(call: &Call, body: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    call.write_headers(response.headers_mut());
    response
}

async fn whole_response(
    (mut call, dialect): (Call, Dialect),
    mut answers: Answers,
    mut encoder: Box<dyn Encoder>,
    choices: u32,
) -> Response {
    let collected = collect(&mut call, &mut answers, choices).await;
    let answered = collected.and_then(|collected| Ok(encoder.whole(collected.choices()?, collected.usage)));
    match answered {
        Ok(body) => {
            call.answered();
            json_response(&call, body)
        }
        Err(error) => refuse_in(call, error, dialect),
    }
}

async fn collect(call: &mut Call, answers: &mut Answers, choices: u32) -> Result<Collected, ApiError> {
    let mut collected = Collected::new(answers.len(), choices);
    while !answers.all_ended() {
        let (request, update) = answers.next().await;
        let Some(reply) = reply_of(update)? else { continue };
        if let Reply::Started { start, worker, .. } = &reply {
            call.started(*start, *worker);
        }
        collected.take(request, reply)?;
        if let Some(seconds) = collected.first_token_seconds.take() {
            call.first_token_after_start(seconds);
        }
    }
    Ok(collected)
}

/// The status line waits a moment: a refusal gets its own status, and headers tell how the model was found. After
/// that the stream begins and says what it waits for.
async fn stream_response(
    api: &Api,
    (mut call, dialect): (Call, Dialect),
    mut answers: Answers,
    encoder: Box<dyn Encoder>,
    choices: u32,
) -> Response {
    let requests = answers.len();
    let grace = tokio::time::sleep(api.config.stream_grace);
    tokio::pin!(grace);
    let refusal = loop {
        tokio::select! {
            biased;
            update = answers.look() => match update {
                Update::Reply(Reply::Started { start, worker, .. }) => {
                    call.started(*start, *worker);
                    break None;
                }
                update if is_refusal(update) => break Some(update.clone()),
                update if update.is_last() => break None,
                _ => {}
            },
            () = &mut grace => break None,
        }
    };
    if let Some(Err(error)) = refusal.map(reply_of) {
        return refuse_in(call, error, dialect);
    }
    let started = call.has_started();
    call.expect_start();
    let mut response = event_stream_head();
    call.write_headers(response.headers_mut());
    let events =
        EventStream::new(answers, call, encoder, (requests, choices), (api.config.heartbeat_interval, started));
    *response.body_mut() = Body::from_stream(events.into_stream());
    response
}

/// A response that is a stream of events, still without them.
fn event_stream_head() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn is_refusal(update: &Update) -> bool {
    matches!(update, Update::Refused(_) | Update::Lost | Update::Reply(Reply::Failed { .. } | Reply::Rejected(_)))
}
