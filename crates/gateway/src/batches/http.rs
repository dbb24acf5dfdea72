//! `/v1/batches`, in OpenAI's form.

use super::{
    BATCHES_UNFINISHED_MAX, Batches,
    files::{batches_of, page, tenant},
    new_name, now,
};
use crate::{
    admin::{self, AdminError, AdminState},
    errors::ApiError,
    openai::{Api, Fields, read_body},
};
use axum::{
    extract::{Path, Query, Request, State, rejection::PathRejection},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use warmset_core::jobs::{BatchCounts, BatchRecord, BatchStatus};

/// The routes that answer lines.
pub(crate) const ENDPOINTS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];
/// The one window there is, as OpenAI's.
pub(crate) const WINDOW: &str = "24h";
const WINDOW_SECONDS: u64 = 24 * 3600;
/// What a caller may write on a batch, as OpenAI's.
const METADATA_MAX: usize = 16;
const METADATA_KEY_BYTES_MAX: usize = 64;
const METADATA_VALUE_BYTES_MAX: usize = 512;

/// A batch as it is kept, as `GET /v1/batches/ID` shows it.
pub fn batch_document(batch: &BatchRecord) -> Value {
    described(batch, batch.counts)
}

/// A batch as it is now.
fn document(batches: &Batches, batch: &BatchRecord) -> Value {
    described(batch, batches.counts(batch))
}

fn described(batch: &BatchRecord, counts: BatchCounts) -> Value {
    let reached = |status| batch.reached_unix_seconds.get(&status);
    let file = |is_there: bool, name: &str| if is_there { json!(name) } else { Value::Null };
    let errors = (!batch.faults.is_empty()).then(|| json!({ "object": "list", "data": batch.faults }));
    json!({
        "id": batch.name, "object": "batch", "endpoint": batch.endpoint, "errors": errors,
        "input_file_id": batch.input_file, "completion_window": WINDOW, "status": batch.status,
        "output_file_id": file(batch.has_output && batch.status.is_final(), &batch.output_file),
        "error_file_id": file(batch.has_errors && batch.status.is_final(), &batch.error_file),
        "created_at": batch.created_unix_seconds, "expires_at": batch.expires_unix_seconds,
        "in_progress_at": reached(BatchStatus::InProgress), "finalizing_at": reached(BatchStatus::Finalizing),
        "completed_at": reached(BatchStatus::Completed), "failed_at": reached(BatchStatus::Failed),
        "expired_at": reached(BatchStatus::Expired), "cancelling_at": reached(BatchStatus::Cancelling),
        "cancelled_at": reached(BatchStatus::Cancelled), "request_counts": counts, "metadata": batch.metadata,
    })
}

/// `POST /v1/batches`
pub(crate) async fn create(State(api): State<Api>, request: Request) -> Response {
    let created = async {
        let batches = batches_of(&api)?;
        let body = read_body(&api.config, request).await?;
        let batch = read(&Fields::parse(&body)?)?;
        if api.frontend.is_draining() {
            return Err(ApiError::draining());
        }
        let file = batches.file(&batch.input_file).await;
        let file = file.map_err(|error| error.of_param("input_file_id"))?;
        if file.tenant != batch.tenant || file.purpose != "batch" {
            return Err(ApiError::param("input_file_id", "input_file_id must be a file handed in for batches"));
        }
        if batches.going().len() >= BATCHES_UNFINISHED_MAX {
            return Err(ApiError::files_full(format!("{BATCHES_UNFINISHED_MAX} batches have not ended: wait for one")));
        }
        let keeper = batches.clone();
        // It is kept and begun even if whoever asked goes away meanwhile.
        let keeping = tokio::spawn(async move {
            keeper.inner.store.add_batch(batch.clone()).await?;
            keeper.begin(batch.clone());
            Ok::<_, ApiError>(batch)
        });
        let batch = keeping.await.unwrap_or_else(|error| Err(ApiError::internal(error.to_string())))?;
        Ok(document(batches, &batch))
    };
    answer(created.await)
}

fn answer(document: Result<Value, ApiError>) -> Response {
    match document {
        Ok(document) => axum::Json(document).into_response(),
        Err(error) => error.into_response(),
    }
}

fn read(fields: &Fields<'_>) -> Result<BatchRecord, ApiError> {
    let needed =
        |name: &'static str| fields.text(name)?.ok_or_else(|| ApiError::param(name, format!("{name} is missing")));
    let (input_file, endpoint, window) = (needed("input_file_id")?, needed("endpoint")?, needed("completion_window")?);
    if !ENDPOINTS.contains(&endpoint.as_str()) {
        return Err(ApiError::param("endpoint", format!("endpoint must be one of {}", ENDPOINTS.join(", "))));
    }
    if window != WINDOW {
        return Err(ApiError::param("completion_window", format!("completion_window must be {WINDOW}")));
    }
    let expected = format!("at most {METADATA_MAX} short texts by name");
    let metadata: BTreeMap<String, String> = fields.read("metadata", &expected)?.unwrap_or_default();
    let is_long =
        |(key, value): (&String, &String)| key.len() > METADATA_KEY_BYTES_MAX || value.len() > METADATA_VALUE_BYTES_MAX;
    if metadata.len() > METADATA_MAX || metadata.iter().any(is_long) {
        return Err(ApiError::param("metadata", format!("metadata must be {expected}")));
    }
    let created = now();
    Ok(BatchRecord {
        name: new_name("batch_")?,
        tenant: tenant(),
        endpoint,
        input_file,
        output_file: new_name("file-out-")?,
        error_file: new_name("file-err-")?,
        has_output: false,
        has_errors: false,
        status: BatchStatus::Validating,
        faults: Vec::new(),
        counts: BatchCounts::default(),
        metadata,
        created_unix_seconds: created,
        expires_unix_seconds: created + WINDOW_SECONDS,
        reached_unix_seconds: BTreeMap::new(),
    })
}

type Name = Result<Path<String>, PathRejection>;

async fn find(api: &Api, name: Name) -> Result<(Batches, BatchRecord), ApiError> {
    let batches = batches_of(api)?.clone();
    let Ok(Path(name)) = name else { return Err(ApiError::batch_not_found()) };
    let batch = batches.inner.store.batch(name).await?.filter(|batch| batch.tenant == tenant());
    batch.map(|batch| (batches, batch)).ok_or_else(ApiError::batch_not_found)
}

/// `GET /v1/batches/ID`
pub(crate) async fn show(State(api): State<Api>, name: Name) -> Response {
    answer(find(&api, name).await.map(|(batches, batch)| document(&batches, &batch)))
}

/// `GET /v1/batches`
pub(crate) async fn list(State(api): State<Api>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    let listed = async {
        let batches = batches_of(&api)?;
        let all = batches.inner.store.batches().await?;
        let own = all.iter().filter(|batch| batch.tenant == tenant());
        page(own.map(|batch| document(batches, batch)).collect(), &query)
    };
    answer(listed.await)
}

/// `POST /v1/batches/ID/cancel`
pub(crate) async fn cancel(State(api): State<Api>, name: Name) -> Response {
    let cancelled = async {
        let (batches, batch) = find(&api, name).await?;
        take_back(&batches, batch).await
    };
    answer(cancelled.await)
}

/// Begins no more lines of a batch; one that has ended otherwise stays as it is.
async fn take_back(batches: &Batches, batch: BatchRecord) -> Result<Value, ApiError> {
    let going = batches.going().get(&batch.name).cloned();
    if let Some(going) = going {
        going.take_back().await;
    }
    let batch = batches.inner.store.batch(batch.name).await?.ok_or_else(ApiError::batch_not_found)?;
    match batch.status {
        BatchStatus::Cancelling | BatchStatus::Cancelled => Ok(document(batches, &batch)),
        _ => Err(ApiError::conflict("batch_finished", "the batch has ended already")),
    }
}

type AdminAnswer = Result<axum::Json<Value>, AdminError>;

fn admin_batches(state: &AdminState) -> Result<Batches, AdminError> {
    state.backend.batches().ok_or_else(|| AdminError::not_found("this server keeps no batches"))
}

async fn admin_find(state: &AdminState, name: Name) -> Result<(Batches, BatchRecord), AdminError> {
    let batches = admin_batches(state)?;
    let Ok(Path(name)) = name else { return Err(AdminError::bad_request("the path is not UTF-8")) };
    let missing = || AdminError::not_found("there is no such batch: see `warmset batches list`");
    let batch = batches.inner.store.batch(name).await.map_err(ApiError::from)?.ok_or_else(missing)?;
    Ok((batches, batch))
}

/// `GET /admin/v1/batches?limit=N`: the newest first, of everybody.
pub(crate) async fn admin_list(
    State(state): State<AdminState>,
    Query(query): Query<BTreeMap<String, String>>,
) -> AdminAnswer {
    let limit = admin::number(&query, "limit")?.unwrap_or(admin::LISTED);
    let batches = admin_batches(&state)?;
    let all = batches.inner.store.batches().await.map_err(ApiError::from)?;
    let shown = all.iter().take(usize::try_from(limit).unwrap_or(usize::MAX));
    let documents: Vec<Value> = shown.map(|batch| document(&batches, batch)).collect();
    Ok(axum::Json(json!({ "batches": documents })))
}

/// `GET /admin/v1/batches/ID`
pub(crate) async fn admin_show(State(state): State<AdminState>, name: Name) -> AdminAnswer {
    admin_find(&state, name).await.map(|(batches, batch)| axum::Json(document(&batches, &batch)))
}

/// `DELETE /admin/v1/batches/ID`: takes it back.
pub(crate) async fn admin_cancel(State(state): State<AdminState>, name: Name) -> AdminAnswer {
    let (batches, batch) = admin_find(&state, name).await?;
    Ok(axum::Json(take_back(&batches, batch).await?))
}
