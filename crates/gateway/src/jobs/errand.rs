//! One request that no connection sent: the router answers it like any other.

use crate::{
    errors::ApiError,
    frontend::Update,
    openai::{MODEL_DIGEST, REQUEST_ID, START},
};
use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, header},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use std::time::Duration;
use tokio::sync::watch;
use tower::ServiceExt;
use warmset_core::{Digest, Priority, inference::Reply, jobs::JobAnswer, worker::StartKind};

/// The shortest pause before another try.
const RETRY_PAUSE_MIN: Duration = Duration::from_secs(1);

/// What handlers find with a request that no connection sent. Callers cannot send it: it is no header.
#[derive(Debug, Clone)]
pub(crate) struct Errand {
    /// Its class, whatever its body says.
    pub(crate) class: Option<Priority>,
    /// Time until it begins to be answered.
    pub(crate) patience: Duration,
    /// Hears how far it is.
    pub(crate) progress: watch::Sender<Progress>,
}

/// How far a request is.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(crate) enum Progress {
    /// Nothing was heard yet.
    #[default]
    Unknown,
    /// It waits at this place.
    Waiting(u32),
    /// This share of its model is loaded.
    Loading(f32),
    /// An engine works on it.
    Running,
}

impl Errand {
    pub(crate) fn new(class: Option<Priority>, patience: Duration) -> Self {
        Self { class, patience, progress: watch::Sender::default() }
    }

    /// Tells what an update says of how far it is.
    pub(crate) fn hear(&self, update: &Update) {
        let progress = match update {
            Update::Position(position) | Update::Reply(Reply::Queued { position }) => Progress::Waiting(*position),
            Update::Reply(Reply::Loading { fraction }) => Progress::Loading(*fraction),
            Update::Reply(Reply::Started { .. }) => Progress::Running,
            _ => return,
        };
        // Of several requests of one call the one that is furthest counts.
        self.progress.send_if_modified(|known| {
            let news = *known != progress && *known != Progress::Running;
            if news {
                *known = progress;
            }
            news
        });
    }
}

/// An answer, whole.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) http_status: u16,
    pub(crate) digest: Option<Digest>,
    pub(crate) start: Option<StartKind>,
    pub(crate) request_id: Option<String>,
    /// When trying again may help.
    pub(crate) retry_after: Option<Duration>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// What is kept of it.
    pub(crate) fn into_kept(self) -> JobAnswer {
        JobAnswer { http_status: self.http_status, digest: self.digest, start: self.start, body: self.body }
    }

    /// What it means for whoever is in no hurry. Refusals that pass are waited out; those that say that a load or a
    /// request was lost count as tries.
    pub(crate) fn verdict(&self) -> Verdict {
        if (200..300).contains(&self.http_status) {
            return Verdict::Answered;
        }
        let code = self.error_code();
        match (self.retry_after, code.as_deref()) {
            (Some(after), code) => {
                Verdict::Later { after: after.max(RETRY_PAUSE_MIN), counts: code == Some("model_load_failed") }
            }
            (None, Some("request_lost")) => Verdict::Later { after: RETRY_PAUSE_MIN, counts: true },
            (None, _) => Verdict::Failed,
        }
    }

    fn error_code(&self) -> Option<String> {
        let body: serde_json::Value = serde_json::from_slice(&self.body).ok()?;
        body["error"]["code"].as_str().map(str::to_owned)
    }
}

/// What an answer means for whoever is in no hurry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the answer.
    Answered,
    /// It is an error that stays.
    Failed,
    /// It may be another one later; `counts` says whether this was a try.
    Later { after: Duration, counts: bool },
}

impl From<ApiError> for Answer {
    fn from(error: ApiError) -> Self {
        let (http_status, body) = (error.status.as_u16(), error.json().into_bytes());
        Self { http_status, digest: None, start: None, request_id: None, retry_after: None, body }
    }
}

/// Sends a request through the router and takes its answer whole.
pub(crate) async fn perform(router: Router, route: &str, body: Bytes, errand: Errand, bytes_max: usize) -> Answer {
    let mut request = Request::new(Body::from(body));
    *request.method_mut() = Method::POST;
    let Ok(uri) = route.parse() else { return ApiError::no_such_route(route).into() };
    *request.uri_mut() = uri;
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.extensions_mut().insert(errand);
    let Ok(response) = router.oneshot(request).await;
    let (head, body) = response.into_parts();
    match Limited::new(body, bytes_max).collect().await {
        Ok(body) => Answer {
            http_status: head.status.as_u16(),
            digest: text(&head.headers, MODEL_DIGEST).and_then(|text| Digest::parse(text).ok()),
            start: text(&head.headers, START).and_then(start_kind),
            request_id: text(&head.headers, REQUEST_ID).map(str::to_owned),
            retry_after: text(&head.headers, header::RETRY_AFTER)
                .and_then(|text| text.parse().ok())
                .map(Duration::from_secs),
            body: body.to_bytes().into(),
        },
        Err(_) => ApiError::internal(format!("the answer is larger than {bytes_max} bytes")).into(),
    }
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn start_kind(text: &str) -> Option<StartKind> {
    [StartKind::Warm, StartKind::Cold].into_iter().find(|kind| kind.as_str() == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::{
        gateway::Refusal,
        worker::{LoadError, Rejection},
    };

    fn verdict(error: ApiError) -> Verdict {
        let retry_after = error.retry_after();
        Answer { retry_after, ..Answer::from(error) }.verdict()
    }

    #[test]
    fn what_passes_is_waited_out_and_what_stays_is_the_answer() {
        let after = Duration::from_secs(7);
        let later = |counts| Verdict::Later { after, counts };
        assert_eq!(verdict(Refusal::ModelLoading { retry_after: after }.into()), later(false));
        assert_eq!(verdict(Refusal::QueueFull { retry_after: after }.into()), later(false));
        let failed = |permanent| {
            let error = LoadError { message: "x".into(), permanent };
            verdict(Rejection::LoadFailed { error, retry_after: after }.into())
        };
        assert_eq!((failed(false), failed(true)), (later(true), Verdict::Failed));
        assert_eq!(verdict(ApiError::model_not_found("x")), Verdict::Failed);
        assert_eq!(verdict(ApiError::lost()), Verdict::Later { after: RETRY_PAUSE_MIN, counts: true });
    }
}
