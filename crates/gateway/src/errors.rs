//! Every refusal and failure as HTTP, in one place: status, OpenAI's error object, and whether a retry can help.
//!
//! | what happened | status | code | retry |
//! |---|---|---|---|
//! | the request's own values | 400 | by case | no |
//! | unknown model | 404 | `model_not_found` | no |
//! | prompt longer than the context | 400 | `context_length_exceeded` | no |
//! | queues full | 429 | `queue_full` | after the hint |
//! | model cold and its policy is to refuse | 503 | `model_loading` | after the hint |
//! | memory held by others | 503 | `insufficient_memory` | after the hint |
//! | load failed, may pass | 503 | `model_load_failed` | after the hint |
//! | load failed, artifact or settings at fault | 503 | `model_load_failed` | no |
//! | model larger than its pool | 507 | `model_too_large` | no |
//! | first byte not in time | 504 | `deadline_passed` | no |
//! | engine lost, already tried again | 502 | `engine_lost` | no |
//! | a gateway that is its own replica | 508 | `loop_detected` | no |
//! | shutting down, or no worker | 503 | `draining`, `no_worker` | yes |
//! | too many jobs are kept | 429 | `job_queue_full` | after the hint |
//! | the catalog cannot keep or find a job | 503 | `jobs_unavailable` | after the hint |
//! | no such job, or not the caller's | 404 | `job_not_found` | no |
//! | no such response, or not one made in the background | 404 | `response_not_found` | no |
//! | a job that has ended is taken back | 409 | `job_finished` | no |
//! | a key that means another request | 422 | `idempotency_key_reused` | no |

use crate::directory::Unresolved;
use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use std::{borrow::Cow, time::Duration};
use warmset_core::{gateway::Refusal, inference::FailureKind, worker::Rejection};

/// The header that tells OpenAI's clients whether to try again.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// OpenAI's clients give up on longer hints.
const RETRY_SECONDS_MAX: f64 = 120.0;
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

const INVALID: &str = "invalid_request_error";
const UNAVAILABLE: &str = "service_unavailable_error";
const SERVER: &str = "server_error";
/// When to ask again for a model that is on its way here.
const FETCH_RETRY_AFTER: Duration = Duration::from_secs(30);
/// When to hand a job in again.
const JOB_RETRY_AFTER: Duration = Duration::from_secs(30);

/// Stands with a refusal that another model might not give: this one cannot answer now, whatever was asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unavailable;

/// The codes of such refusals.
const UNAVAILABLE_CODES: [&str; 6] =
    ["model_loading", "model_load_failed", "insufficient_memory", "model_too_large", "engine_lost", "queue_full"];

/// An error as a client sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    kind: &'static str,
    pub(crate) code: Option<&'static str>,
    param: Option<Cow<'static, str>>,
    message: String,
    retry_after: Option<Duration>,
    should_retry: bool,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, kind, code, param: None, message, retry_after: None, should_retry: false }
    }

    /// 400, with the parameter at fault.
    pub(crate) fn param(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, INVALID, None, message);
        Self { param: Some(param.into()), ..error }
    }

    /// 400, with the parameter at fault and a code.
    pub(crate) fn unsupported(param: &'static str, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::param(param, message) }
    }

    /// 400, about the body as a whole.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, None, message)
    }

    pub(crate) fn model_not_found(name: &str) -> Self {
        // A hostile name is not repeated at length.
        let shown: String = name.chars().take(64).filter(|character| !character.is_control()).collect();
        let message = format!("the model \"{shown}\" does not exist here; GET /v1/models lists those that do");
        let error = Self::new(StatusCode::NOT_FOUND, INVALID, Some("model_not_found"), message);
        Self { param: Some("model".into()), ..error }
    }

    pub(crate) fn unresolved(unresolved: Unresolved, model: &str) -> Self {
        match unresolved {
            Unresolved::Unknown => Self::model_not_found(model),
            Unresolved::Expected { reason } => {
                let message = format!("the model is not ready: {reason}");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some("model_loading"), message)
                    .retry(FETCH_RETRY_AFTER)
            }
            Unresolved::Held { rewarm_seconds, .. } => {
                let retry_after = Duration::from_secs_f64(rewarm_seconds.clamp(1.0, RETRY_SECONDS_MAX));
                Refusal::ModelLoading { retry_after }.into()
            }
        }
    }

    pub(crate) fn no_such_route(path: &str) -> Self {
        let shown: String = path.chars().take(64).collect();
        let message = format!("there is nothing at {shown}");
        Self::new(StatusCode::NOT_FOUND, INVALID, Some("unknown_url"), message)
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "this address does not answer to this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, Some("method_not_allowed"), message)
    }

    pub(crate) fn body_too_large(bytes_max: usize) -> Self {
        let message = format!("the body is larger than {bytes_max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, Some("body_too_large"), message)
    }

    pub(crate) fn body_too_slow() -> Self {
        let message = "the body did not come in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, Some("body_too_slow"), message)
    }

    pub(crate) fn not_json() -> Self {
        let message = "the body must be JSON, with content-type: application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, Some("unsupported_media_type"), message)
    }

    /// 500, for what should not happen.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("internal_error"), message)
    }

    /// 503 for a gateway that has let go of the request.
    pub(crate) fn lost() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("request_lost"), "the gateway let go of the request")
    }

    pub(crate) fn draining() -> Self {
        let message = "the server is shutting down";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some("draining"), message).retry(Duration::from_secs(1))
    }

    /// 503 where no replica can be asked.
    pub(crate) fn no_replica(after: Option<Duration>) -> Self {
        let after = after.unwrap_or(Duration::from_secs(1)).max(Duration::from_secs(1));
        let message = "no replica can answer at the moment";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some("no_worker"), message).retry(after)
    }

    /// 502 for a replica that failed before it answered.
    pub(crate) fn replica_lost(name: &str) -> Self {
        let message = format!("the replica {name} failed before it answered");
        Self::new(StatusCode::BAD_GATEWAY, SERVER, Some("engine_lost"), message)
    }

    /// For a replica that failed in the middle of its answer.
    pub(crate) fn answer_lost(message: &str) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, SERVER, Some("engine_lost"), message)
    }

    /// 508 for a request that has been here before.
    pub(crate) fn loop_detected() -> Self {
        let message = "the request comes from this gateway itself, or passed too many others: one of their replicas \
                       leads back to them";
        Self::new(StatusCode::LOOP_DETECTED, SERVER, Some("loop_detected"), message)
    }

    /// 429 for a gateway that has as much to do as it may.
    pub(crate) fn too_many_requests() -> Self {
        let message = "too many requests are on their way; try again";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("queue_full"), message)
            .retry(Duration::from_secs(1))
    }

    pub(crate) fn job_not_found() -> Self {
        let message = "there is no such job; answers are kept for a limited time";
        Self::new(StatusCode::NOT_FOUND, INVALID, Some("job_not_found"), message)
    }

    pub(crate) fn file_not_found(name: &str) -> Self {
        let shown: String = name.chars().take(64).filter(|character| !character.is_control()).collect();
        let message = format!("there is no file {shown}");
        Self::new(StatusCode::NOT_FOUND, INVALID, Some("file_not_found"), message)
    }

    pub(crate) fn batch_not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, Some("batch_not_found"), "there is no such batch")
    }

    /// 409, with a reason.
    pub(crate) fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, INVALID, Some(code), message)
    }

    /// 413 for a file.
    pub(crate) fn file_too_large(bytes_max: u64) -> Self {
        let message = format!("the file is larger than {bytes_max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, Some("file_too_large"), message)
    }

    /// 429 for a store of files or batches without room.
    pub(crate) fn files_full(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("storage_full"), message)
    }

    pub(crate) fn files_unavailable() -> Self {
        let message = "files and batches cannot be kept or read right now; try again";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some("files_unavailable"), message)
            .retry(JOB_RETRY_AFTER)
    }

    pub(crate) fn response_not_found() -> Self {
        let message = "there is no such response; those made in the background are kept for a limited time";
        Self::new(StatusCode::NOT_FOUND, INVALID, Some("response_not_found"), message)
    }

    pub(crate) fn job_finished(status: &str) -> Self {
        let message = format!("the job has {status} already");
        Self::new(StatusCode::CONFLICT, INVALID, Some("job_finished"), message)
    }

    pub(crate) fn job_queue_full() -> Self {
        let message = "too many jobs are kept; try again, or ask without `prefer: respond-async`";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("job_queue_full"), message)
            .retry(JOB_RETRY_AFTER)
    }

    pub(crate) fn jobs_unavailable() -> Self {
        let message = "jobs cannot be kept or read right now; try again, or ask without `prefer: respond-async`";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some("jobs_unavailable"), message)
            .retry(JOB_RETRY_AFTER)
    }

    pub(crate) fn idempotency_key_reused() -> Self {
        let message = "this idempotency-key was sent with another request: use a new one";
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, INVALID, Some("idempotency_key_reused"), message)
    }

    /// What stands in a job whose time was over.
    pub(crate) fn job_expired() -> Self {
        let message = "the job was not answered in the time it had";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", Some("job_expired"), message)
    }

    /// What stands in a job that was begun as often as it may be.
    pub(crate) fn job_given_up() -> Self {
        let message = "the server ended again and again while it answered this job";
        Self::new(StatusCode::BAD_GATEWAY, SERVER, Some("job_given_up"), message)
    }

    /// When trying again may help.
    #[cfg(test)]
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// What it says.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    fn retry(self, after: Duration) -> Self {
        Self { retry_after: Some(after), should_retry: true, ..self }
    }

    /// The same, about a parameter.
    pub(crate) fn of_param(self, param: &'static str) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// The error object of Anthropic's API as JSON. It has no place for a parameter: the message names it.
    pub(crate) fn anthropic_json(&self) -> String {
        let kind = match self.anthropic_status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            504 => "timeout_error",
            529 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        let message = match self.param.as_deref() {
            Some(param) if !self.message.starts_with(param) => format!("{param}: {}", self.message),
            _ => self.message.clone(),
        };
        serde_json::json!({ "type": "error", "error": { "type": kind, "message": message } }).to_string()
    }

    /// Anthropic's clients know 529 as what passes by itself.
    fn anthropic_status(&self) -> StatusCode {
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE if self.should_retry => {
                StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
            }
            other => other,
        }
    }

    /// The error as Anthropic's API answers.
    pub(crate) fn into_anthropic_response(self) -> Response {
        let (status, body) = (self.anthropic_status(), self.anthropic_json());
        let mut response = self.into_response();
        *response.status_mut() = status;
        *response.body_mut() = Body::from(body);
        response
    }

    /// The outcome label of the metrics.
    pub(crate) fn outcome(&self) -> &'static str {
        self.code.unwrap_or("invalid_request")
    }

    /// The error object as JSON.
    pub(crate) fn json(&self) -> String {
        let (param, code, kind) = (self.param.as_deref(), self.code, self.kind);
        let body = ErrorBody { error: ErrorObject { message: &self.message, kind, param, code } };
        // Plain texts can always be written as JSON.
        serde_json::to_string(&body).unwrap_or_default()
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let unavailable =
            |code, message: &str| Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some(code), message);
        match refusal {
            Refusal::UnknownModel => {
                let message = "the model is no longer served here";
                Self::new(StatusCode::NOT_FOUND, INVALID, Some("model_not_found"), message)
            }
            Refusal::QueueFull { retry_after } => queue_full(retry_after),
            Refusal::ModelLoading { retry_after } => unavailable(
                "model_loading",
                "the model is being loaded; try again, or send `prefer: respond-async` for a job",
            )
            .retry(retry_after),
            Refusal::DeadlinePassed => {
                let message = "the answer did not begin in time";
                Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", Some("deadline_passed"), message)
            }
            Refusal::NoWorker { retry_after } => {
                unavailable("no_worker", "no worker can be used right now").retry(retry_after)
            }
            Refusal::Draining => ApiError::draining(),
            Refusal::Worker(rejection) => rejection.into(),
        }
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        let unavailable =
            |code, message: String| Self::new(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, Some(code), message);
        match rejection {
            Rejection::UnknownModel => Refusal::UnknownModel.into(),
            Rejection::TooLarge { needed_bytes, available_bytes } => {
                let message = format!(
                    "the model needs {needed_bytes} bytes and its pool has {available_bytes}; \
                     an administrator must give it more memory"
                );
                Self::new(StatusCode::INSUFFICIENT_STORAGE, SERVER, Some("model_too_large"), message)
            }
            Rejection::LoadFailed { error, retry_after } => {
                let failed = unavailable("model_load_failed", format!("the model cannot be loaded: {}", error.message));
                if error.permanent { failed } else { failed.retry(retry_after) }
            }
            Rejection::QueueFull { retry_after } => queue_full(retry_after),
            Rejection::NoMemory { retry_after } => {
                let message = "memory is held by models that are in use or pinned; try again".to_owned();
                unavailable("insufficient_memory", message).retry(retry_after)
            }
            Rejection::EngineLost { message, .. } => {
                let message = format!("the model's engine was lost: {message}");
                Self::new(StatusCode::BAD_GATEWAY, SERVER, Some("engine_lost"), message)
            }
            Rejection::Draining => ApiError::draining(),
        }
    }
}

fn queue_full(retry_after: Duration) -> ApiError {
    let message = "too many requests wait; try again";
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("queue_full"), message).retry(retry_after)
}

/// A request that failed in the engine.
pub(crate) fn failed(kind: FailureKind, message: String, param: Option<String>) -> ApiError {
    let error = match kind {
        FailureKind::InvalidRequest => ApiError::body(message),
        FailureKind::ContextExceeded => ApiError { code: Some("context_length_exceeded"), ..ApiError::body(message) },
        FailureKind::Template => ApiError { code: Some("template_error"), ..ApiError::body(message) },
        FailureKind::Internal => return ApiError::internal(message),
    };
    ApiError { param: param.map(Cow::Owned), ..error }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.json()));
        *response.status_mut() = self.status;
        if self.code.is_some_and(|code| UNAVAILABLE_CODES.contains(&code)) {
            response.extensions_mut().insert(Unavailable);
        }
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if !self.should_retry {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(after) = self.retry_after {
            let milliseconds = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
            headers.insert(header::RETRY_AFTER, milliseconds.div_ceil(1000).into());
            headers.insert(RETRY_AFTER_MS, milliseconds.into());
        }
        if matches!(self.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
            // The rest of the body is not wanted.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::worker::LoadError;

    fn load_failed(permanent: bool) -> Rejection {
        let error = LoadError { message: "bad file".into(), permanent };
        Rejection::LoadFailed { error, retry_after: Duration::from_millis(2500) }
    }

    #[test]
    fn the_table_holds() {
        let after = Duration::from_millis(700);
        let lost = Rejection::EngineLost { message: "signal 9".into(), output_started: false };
        let too_large = Rejection::TooLarge { needed_bytes: 2, available_bytes: 1 };
        let rows: Vec<(ApiError, u16, &str, Option<&str>)> = vec![
            (Refusal::UnknownModel.into(), 404, "model_not_found", None),
            (ApiError::model_not_found("x"), 404, "model_not_found", None),
            (Refusal::QueueFull { retry_after: after }.into(), 429, "queue_full", Some("1")),
            (Refusal::ModelLoading { retry_after: after }.into(), 503, "model_loading", Some("1")),
            (Refusal::DeadlinePassed.into(), 504, "deadline_passed", None),
            (Refusal::NoWorker { retry_after: after }.into(), 503, "no_worker", Some("1")),
            (Refusal::Draining.into(), 503, "draining", Some("1")),
            (Rejection::QueueFull { retry_after: after }.into(), 429, "queue_full", Some("1")),
            (Rejection::NoMemory { retry_after: after }.into(), 503, "insufficient_memory", Some("1")),
            (load_failed(false).into(), 503, "model_load_failed", Some("3")),
            (load_failed(true).into(), 503, "model_load_failed", None),
            (too_large.into(), 507, "model_too_large", None),
            (lost.into(), 502, "engine_lost", None),
            (failed(FailureKind::ContextExceeded, "long".into(), None), 400, "context_length_exceeded", None),
            (failed(FailureKind::Template, "no".into(), None), 400, "template_error", None),
            (failed(FailureKind::Internal, "no".into(), None), 500, "internal_error", None),
        ];
        for (error, status, code, retry_after) in rows {
            let body: serde_json::Value = serde_json::from_str(&error.json()).unwrap();
            assert_eq!(body["error"]["code"], code);
            assert!(body["error"]["type"].is_string() && body["error"]["message"].is_string());
            let response = error.into_response();
            assert_eq!(response.status(), status, "{code}");
            let header = |name| response.headers().get(name).map(|value| value.to_str().unwrap());
            assert_eq!(header("retry-after"), retry_after, "{code}");
            assert_eq!(header("x-should-retry"), if retry_after.is_some() { None } else { Some("false") }, "{code}");
            assert_eq!(header("retry-after-ms").is_some(), retry_after.is_some(), "{code}");
        }
    }

    #[test]
    fn anthropic_s_errors_have_their_own_types_and_name_the_parameter() {
        let kind = |error: &ApiError| {
            let body: serde_json::Value = serde_json::from_str(&error.anthropic_json()).unwrap();
            assert_eq!(body["type"], "error");
            (body["error"]["type"].as_str().unwrap().to_owned(), body["error"]["message"].as_str().unwrap().to_owned())
        };
        let missing = kind(&ApiError::param("max_tokens", "max_tokens is missing"));
        assert_eq!(missing, ("invalid_request_error".into(), "max_tokens is missing".into()));
        let named = kind(&ApiError::param("model", "it is missing"));
        assert_eq!(named.1, "model: it is missing");
        assert_eq!(kind(&ApiError::model_not_found("x")).0, "not_found_error");
        let loading: ApiError = Refusal::ModelLoading { retry_after: Duration::from_secs(2) }.into();
        assert_eq!(kind(&loading).0, "overloaded_error");
        let response = loading.into_anthropic_response();
        assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (529, "2"));
        assert_eq!(kind(&load_failed(true).into()).0, "api_error");
    }

    #[test]
    fn a_hostile_name_is_shown_short_and_plain() {
        let json = ApiError::model_not_found(&"\u{1b}x".repeat(4096)).json();
        assert!(json.len() < 300, "{json}");
    }
}
