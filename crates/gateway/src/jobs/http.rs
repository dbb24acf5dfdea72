//! Jobs over HTTP: 202 for those who asked for it, what became of a job, and taking one back.

use super::{
    JobStoreError, Jobs,
    document::Document,
    prefer::{PREFERENCE_APPLIED, Preference, WAIT_MAX, idempotency_key},
    run_loop::Live,
};
use crate::{
    admin::{self, AdminError, AdminState},
    batches::new_name,
    directory::Entry,
    errors::ApiError,
    openai::{Api, Call, MODEL_DIGEST, START},
};
use axum::{
    body::Body,
    extract::{Path, Query, State, rejection::PathRejection},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Priority, TenantId,
    gateway::ColdPolicy,
    jobs::{Acceptance, JobRecord, NewJob},
};

/// The longest time between two looks that is advised.
const RETRY_AFTER_MAX_SECONDS: u64 = 120;

/// A request that may become a job.
pub(crate) struct Deferral<'a> {
    pub(crate) route: &'static str,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a Bytes,
    pub(crate) model: &'a str,
    pub(crate) entry: &'a Entry,
    pub(crate) class: Priority,
}

/// Makes a request a job, if that was asked for; none if it is to be answered here and now.
pub(crate) async fn defer(api: &Api, call: &mut Call, asked: Deferral<'_>) -> Option<Response> {
    let jobs = api.later.jobs.as_ref()?;
    let mut preference = match Preference::of(asked.headers) {
        Ok(preference) => preference,
        Err(error) => return Some(refused(call, error)),
    };
    if !preference.respond_async {
        preference.wait = None;
        let is_async = asked.entry.route.cold == ColdPolicy::Async;
        let warm = api.frontend.is_ready(&asked.entry.route.digest);
        let named = asked.headers.contains_key("idempotency-key");
        match (is_async, warm, named) {
            (false, _, _) | (true, true, false) => return None,
            // The same key must mean the same job, whether the model is warm by now or not.
            (true, true, true) => preference.wait = Some(WAIT_MAX),
            (true, false, _) => {}
        }
    }
    let response = match accept(api, jobs, call, &asked).await {
        Ok(record) => respond(api, jobs, call, &record, preference, asked.entry).await,
        Err(error) => Err(error),
    };
    Some(response.unwrap_or_else(|error| refused(call, error)))
}

fn refused(call: &mut Call, error: ApiError) -> Response {
    call.failed(&error);
    let mut response = error.into_response();
    call.write_request_id(response.headers_mut());
    response
}

/// Keeps a request as a job.
pub(crate) async fn accept(api: &Api, jobs: &Jobs, call: &Call, asked: &Deferral<'_>) -> Result<JobRecord, ApiError> {
    if api.frontend.is_draining() {
        return Err(ApiError::draining());
    }
    let new = NewJob {
        name: new_name(super::PREFIX)?,
        tenant: call.tenant.clone(),
        route: asked.route.to_owned(),
        model: asked.model.to_owned(),
        digest: asked.entry.route.digest,
        class: asked.class,
        fingerprint: fingerprint(asked.route, asked.body),
        body: asked.body.to_vec(),
        idempotency_key: idempotency_key(asked.headers)?,
        time_to_live: jobs.time_to_live(),
    };
    match jobs.accept(new).await.map_err(ApiError::from)? {
        Acceptance::New(record) | Acceptance::Known(record) => Ok(record),
        Acceptance::KeyTaken => Err(ApiError::idempotency_key_reused()),
        Acceptance::Full => Err(ApiError::job_queue_full()),
    }
}

/// The answer itself if it comes in the time that the caller would wait, else 202.
async fn respond(
    api: &Api,
    jobs: &Jobs,
    call: &mut Call,
    record: &JobRecord,
    preference: Preference,
    entry: &Entry,
) -> Result<Response, ApiError> {
    if let Some(wait) = preference.wait.filter(|wait| !wait.is_zero()) {
        // Whether it ended in time is seen by the look that follows.
        let _ = tokio::time::timeout(wait, jobs.ended(record.id)).await;
    }
    let Some((record, live)) = jobs.look(&record.name).await? else { return Err(ApiError::job_not_found()) };
    if preference.wait.is_some() && record.answer.is_some() {
        call.deferred();
        return Ok(answer_of(call, record, preference));
    }
    call.deferred();
    let mut response = Response::new(Body::from(Document::new(&record, live).to_json()));
    *response.status_mut() = StatusCode::ACCEPTED;
    let cold = if api.frontend.is_ready(&entry.route.digest) { 0.0 } else { entry.route.rewarm_seconds };
    let headers = response.headers_mut();
    write_job_headers(headers, &record, cold);
    if let Ok(location) = HeaderValue::from_str(&format!("/v1/jobs/{}", record.name)) {
        headers.insert(header::LOCATION, location);
    }
    if let Some(applied) = preference.applied() {
        headers.insert(PREFERENCE_APPLIED, applied);
    }
    call.write_request_id(headers);
    Ok(response)
}

/// What the route answered, as it answered it.
fn answer_of(call: &Call, record: JobRecord, preference: Preference) -> Response {
    let Some(answer) = record.answer else { return ApiError::job_not_found().into_response() };
    let mut response = Response::new(Body::from(answer.body));
    *response.status_mut() = StatusCode::from_u16(answer.http_status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let is_error = !response.status().is_success();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(value) = answer.digest.and_then(|digest| HeaderValue::from_str(&digest.to_string()).ok()) {
        headers.insert(MODEL_DIGEST, value);
    }
    if let Some(start) = answer.start {
        headers.insert(START, HeaderValue::from_static(start.as_str()));
    }
    if let Some(applied) = preference.applied() {
        headers.insert(PREFERENCE_APPLIED, applied);
    }
    if is_error {
        // The same request would be told the same again.
        headers.insert(crate::errors::SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    call.write_request_id(headers);
    response
}

fn write_job_headers(headers: &mut HeaderMap, record: &JobRecord, cold_seconds: f64) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if !record.status.is_final() {
        let seconds = Duration::try_from_secs_f64(cold_seconds.max(1.0)).map_or(u64::MAX, |time| time.as_secs());
        headers.insert(header::RETRY_AFTER, seconds.clamp(1, RETRY_AFTER_MAX_SECONDS).into());
    }
}

/// Tells one request from another.
fn fingerprint(route: &str, body: &[u8]) -> String {
    let hash = Sha256::new().chain_update(route.as_bytes()).chain_update([0]).chain_update(body).finalize();
    hash.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

pub(crate) type Name = Result<Path<String>, PathRejection>;

/// A job of the caller's own; anybody else's is not there.
pub(crate) async fn find(api: &Api, name: Name) -> Result<(Jobs, JobRecord, Option<Live>), ApiError> {
    let (Some(jobs), Ok(Path(name))) = (api.later.jobs.clone(), name) else { return Err(ApiError::job_not_found()) };
    let (record, live) = jobs.look(&name).await?.ok_or_else(ApiError::job_not_found)?;
    if record.tenant != TenantId::anonymous() {
        return Err(ApiError::job_not_found());
    }
    Ok((jobs, record, live))
}

/// `GET /v1/jobs/ID`; `Prefer: wait=N` waits so long for its end.
pub(crate) async fn show(State(api): State<Api>, name: Name, headers: HeaderMap) -> Response {
    let found = async {
        let preference = Preference::of(&headers)?;
        let (jobs, record, live) = find(&api, name).await?;
        let wait = preference.wait.filter(|wait| !record.status.is_final() && !wait.is_zero());
        let Some(wait) = wait else { return Ok((record, live)) };
        let _ = tokio::time::timeout(wait, jobs.ended(record.id)).await;
        jobs.look(&record.name).await?.ok_or_else(ApiError::job_not_found)
    };
    match found.await {
        Ok((record, live)) => document_response(&record, live),
        Err(error) => error.into_response(),
    }
}

/// `DELETE /v1/jobs/ID`
pub(crate) async fn cancel(State(api): State<Api>, name: Name) -> Response {
    let cancelled = async {
        let (jobs, record, _) = find(&api, name).await?;
        take_back(&jobs, record).await
    };
    match cancelled.await {
        Ok(record) => document_response(&record, None),
        Err(error) => error.into_response(),
    }
}

/// Cancels a job; one that has ended otherwise stays as it is.
pub(crate) async fn take_back(jobs: &Jobs, record: JobRecord) -> Result<JobRecord, ApiError> {
    jobs.cancel(record.id).await;
    let (record, _) = jobs.look(&record.name).await?.ok_or_else(ApiError::job_not_found)?;
    if record.status == warmset_core::jobs::JobStatus::Cancelled {
        return Ok(record);
    }
    Err(ApiError::job_finished(record.status.as_str()))
}

fn document_response(record: &JobRecord, live: Option<Live>) -> Response {
    job_response(record, Document::new(record, live).to_json())
}

/// An answer that shows a job in whatever form.
pub(crate) fn job_response(record: &JobRecord, body: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(body));
    write_job_headers(response.headers_mut(), record, 1.0);
    response
}

type AdminAnswer = Result<axum::Json<Box<RawValue>>, AdminError>;

fn admin_jobs(state: &AdminState) -> Result<Jobs, AdminError> {
    state.backend.jobs().ok_or_else(|| AdminError::not_found("this server keeps no jobs"))
}

fn raw(document: &impl serde::Serialize) -> AdminAnswer {
    serde_json::value::to_raw_value(document).map(axum::Json).map_err(|error| AdminError::internal(error.to_string()))
}

/// `GET /admin/v1/jobs?limit=N`: the newest first.
pub(crate) async fn admin_list(
    State(state): State<AdminState>,
    Query(query): Query<BTreeMap<String, String>>,
) -> AdminAnswer {
    let limit = admin::number(&query, "limit")?.unwrap_or(admin::LISTED);
    let listed = admin_jobs(&state)?.list(limit).await?;
    let documents: Vec<Document<'_>> = listed.iter().map(|(record, live)| Document::new(record, *live)).collect();
    raw(&BTreeMap::from([("jobs", documents)]))
}

/// `GET /admin/v1/jobs/ID`
pub(crate) async fn admin_show(State(state): State<AdminState>, name: Name) -> AdminAnswer {
    let (record, live) = admin_find(&state, name).await?;
    raw(&Document::new(&record, live))
}

/// `DELETE /admin/v1/jobs/ID`
pub(crate) async fn admin_cancel(State(state): State<AdminState>, name: Name) -> AdminAnswer {
    let (record, _) = admin_find(&state, name).await?;
    raw(&Document::new(&take_back(&admin_jobs(&state)?, record).await?, None))
}

async fn admin_find(state: &AdminState, name: Name) -> Result<(JobRecord, Option<Live>), AdminError> {
    let Ok(Path(name)) = name else { return Err(AdminError::bad_request("the path is not UTF-8")) };
    let missing = || AdminError::not_found("there is no such job: see `warmset jobs list`");
    admin_jobs(state)?.look(&name).await?.ok_or_else(missing)
}

impl From<JobStoreError> for ApiError {
    fn from(error: JobStoreError) -> Self {
        tracing::warn!("jobs cannot be read or written: {error}");
        Self::jobs_unavailable()
    }
}

impl From<JobStoreError> for AdminError {
    fn from(error: JobStoreError) -> Self {
        Self::internal(error.message)
    }
}
