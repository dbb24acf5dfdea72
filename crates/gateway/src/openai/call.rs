//! One call from its arrival to its last byte: what it is named, how it is counted, and the answers to its requests.

use crate::{
    clock::Clock,
    directory::Entry,
    errors::{self, ApiError},
    frontend::{Frontend, Ticket, Update},
    jobs::Errand,
    metrics::{RequestEnd, UNKNOWN_MODEL},
};
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue};
use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll},
};
use warmset_core::{
    Instant, TenantId, WorkerId,
    inference::{Reply, Usage},
    worker::StartKind,
};

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("warmset-request-id");
const OPENAI_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
pub(crate) const MODEL_DIGEST: HeaderName = HeaderName::from_static("warmset-model-digest");
pub(crate) const START: HeaderName = HeaderName::from_static("warmset-start");
const WORKER: HeaderName = HeaderName::from_static("warmset-worker");

/// What is counted of one call. Dropped without an outcome, the caller went away.
#[derive(Debug)]
pub(crate) struct Call {
    frontend: Frontend,
    clock: Clock,
    arrived: Instant,
    pub(crate) name: String,
    pub(crate) tenant: TenantId,
    entry: Option<Arc<Entry>>,
    start: Option<StartKind>,
    worker: Option<WorkerId>,
    /// Seconds from arrival to the engine's beginning.
    start_seconds: f64,
    first_token_seen: bool,
    outcome: Option<&'static str>,
    /// There if no connection sent it.
    pub(crate) errand: Option<Errand>,
}

impl Call {
    /// A call with what came along with its request.
    pub(crate) fn new(frontend: &Frontend, extensions: &Extensions) -> Self {
        let clock = frontend.clock();
        Self {
            frontend: frontend.clone(),
            clock,
            arrived: clock.now(),
            name: frontend.next_call_name(),
            tenant: TenantId::anonymous(),
            entry: None,
            start: None,
            worker: None,
            start_seconds: 0.0,
            first_token_seen: false,
            outcome: None,
            errand: extensions.get().cloned(),
        }
    }

    fn model(&self) -> &str {
        self.entry.as_ref().map_or(UNKNOWN_MODEL, |entry| entry.route.name.as_str())
    }

    fn start_label(&self) -> &'static str {
        self.start.map_or("none", StartKind::as_str)
    }

    /// The call is for this model.
    pub(crate) fn resolved(&mut self, entry: Arc<Entry>) {
        self.entry = Some(entry);
    }

    /// An engine began. Of several requests of one call the first counts, and a cold one makes the call cold.
    pub(crate) fn started(&mut self, start: StartKind, worker: WorkerId) {
        if self.start.is_none() {
            self.start_seconds = self.seconds();
        }
        self.start = self.start.max(Some(start));
        self.worker.get_or_insert(worker);
    }

    /// The first text is here.
    pub(crate) fn first_token(&mut self) {
        let seconds = self.seconds();
        self.first_token_at(seconds);
    }

    /// The first text came so long after the engine began, though the caller gets it only with the rest.
    pub(crate) fn first_token_after_start(&mut self, seconds: f64) {
        let seconds = self.start_seconds + seconds;
        self.first_token_at(seconds);
    }

    fn first_token_at(&mut self, seconds: f64) {
        if !std::mem::replace(&mut self.first_token_seen, true) {
            self.frontend.metrics().record_first_token(self.model(), self.start_label(), seconds);
        }
    }

    /// The call was answered in full.
    pub(crate) fn answered(&mut self) {
        self.outcome = Some("ok");
    }

    /// The call ends with an error.
    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.outcome = Some(error.outcome());
    }

    /// The call became a job, which is counted when it runs.
    pub(crate) fn deferred(&mut self) {
        self.outcome = Some("accepted");
    }

    fn seconds(&self) -> f64 {
        self.clock.now().since(self.arrived).as_secs_f64()
    }

    /// The headers that say which model and worker answered, and how it was found. Before an engine began, a model
    /// that is ready will be found warm, any other one cold.
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap) {
        self.write_request_id(headers);
        self.write_model(headers);
    }

    /// The header that names the call.
    pub(crate) fn write_request_id(&self, headers: &mut HeaderMap) {
        if let Ok(value) = HeaderValue::from_str(&self.name) {
            headers.insert(REQUEST_ID, value.clone());
            headers.insert(ANTHROPIC_REQUEST_ID, value.clone());
            headers.insert(OPENAI_REQUEST_ID, value);
        }
    }

    fn write_model(&self, headers: &mut HeaderMap) {
        let Some(entry) = &self.entry else { return };
        if let Ok(value) = HeaderValue::from_str(&entry.route.digest.to_string()) {
            headers.insert(MODEL_DIGEST, value);
        }
        if let Some(worker) = self.worker {
            headers.insert(WORKER, worker.0.into());
        }
        if let Some(start) = self.start {
            headers.insert(START, HeaderValue::from_static(start.as_str()));
        }
    }

    /// Whether an engine has begun.
    pub(crate) fn has_started(&self) -> bool {
        self.start.is_some()
    }

    /// For a stream that begins before its engine does.
    pub(crate) fn expect_start(&mut self) {
        if let (None, Some(entry)) = (self.start, &self.entry) {
            let ready = self.frontend.is_ready(&entry.route.digest);
            self.start = Some(if ready { StartKind::Warm } else { StartKind::Cold });
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (outcome, start) = (self.outcome.unwrap_or("cancelled"), self.start_label());
        let end = RequestEnd { model: self.model(), outcome, start };
        self.frontend.metrics().record_request(end, self.seconds());
        tracing::debug!(call = self.name, model = self.model(), outcome, start, "a call has ended");
    }
}

/// The tickets of one call, one for each of its prompts.
#[derive(Debug)]
pub(crate) struct Answers {
    tickets: Vec<Ticket>,
    ended: Vec<bool>,
    /// Updates looked at before the response began.
    looked_at: VecDeque<(usize, Update)>,
    turn: usize,
    errand: Option<Errand>,
}

impl Answers {
    /// The answers to these requests; whoever waits for an errand hears how far they are.
    pub(crate) fn new(tickets: Vec<Ticket>, errand: Option<Errand>) -> Self {
        let ended = vec![false; tickets.len()];
        Self { tickets, ended, looked_at: VecDeque::new(), turn: 0, errand }
    }

    /// How many requests there are.
    pub(crate) fn len(&self) -> usize {
        self.tickets.len()
    }

    /// Whether every request has ended.
    pub(crate) fn all_ended(&self) -> bool {
        self.ended.iter().all(|ended| *ended) && self.looked_at.is_empty()
    }

    /// The next news of any of them. Safe to drop and call again.
    pub(crate) async fn next(&mut self) -> (usize, Update) {
        match self.looked_at.pop_front() {
            Some(update) => update,
            None => std::future::poll_fn(|context| self.poll_next(context)).await,
        }
    }

    /// The next news, kept to be read again.
    pub(crate) async fn look(&mut self) -> &Update {
        let update = std::future::poll_fn(|context| self.poll_next(context)).await;
        self.looked_at.push_back(update);
        let index = self.looked_at.len() - 1;
        &self.looked_at[index].1
    }

    /// What is already here.
    pub(crate) fn try_next(&mut self) -> Option<(usize, Update)> {
        if let Some(update) = self.looked_at.pop_front() {
            return Some(update);
        }
        let index = (0..self.tickets.len()).find(|index| !self.ended[*index])?;
        let update = self.tickets[index].try_next()?;
        self.ended[index] = update.is_last();
        Some((index, update))
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<(usize, Update)> {
        let count = self.tickets.len();
        for step in 0..count {
            let index = (self.turn + step) % count;
            if self.ended[index] {
                continue;
            }
            if let Poll::Ready(update) = self.tickets[index].poll_update(context) {
                self.ended[index] = update.is_last();
                self.turn = index + 1;
                if let Some(errand) = &self.errand {
                    errand.hear(&update);
                }
                return Poll::Ready((index, update));
            }
        }
        Poll::Pending
    }
}

/// An update as handlers see it: news, or the error that ends the call.
pub(crate) fn reply_of(update: Update) -> Result<Option<Reply>, ApiError> {
    match update {
        Update::Position(_) => Ok(None),
        Update::Reply(Reply::Failed { kind, message, param }) => Err(errors::failed(kind, message, param)),
        Update::Reply(Reply::Rejected(rejection)) => Err(rejection.into()),
        Update::Reply(reply) => Ok(Some(reply)),
        Update::Refused(refusal) => Err(refusal.into()),
        Update::Lost => Err(ApiError::lost()),
    }
}

/// Adds up what the requests of a call used.
pub(crate) fn add_usage(sum: &mut Usage, usage: Usage) {
    sum.prompt_tokens = sum.prompt_tokens.saturating_add(usage.prompt_tokens);
    sum.completion_tokens = sum.completion_tokens.saturating_add(usage.completion_tokens);
    sum.cached_tokens = sum.cached_tokens.saturating_add(usage.cached_tokens);
}
