//! `/v1/files`: what callers hand in, and what batches made for them.

use super::{BatchStoreError, Batches, content::Writing, new_name, now};
use crate::{errors::ApiError, openai::Api};
use axum::{
    body::Body,
    extract::{Path, Query, Request, State, rejection::PathRejection},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::{collections::BTreeMap, io, time::Duration};
use tokio::io::AsyncReadExt;
use warmset_core::{TenantId, jobs::FileRecord};

/// The one purpose of files that callers hand in.
const PURPOSE: &str = "batch";
/// The longest name that a caller may give a file.
const FILENAME_BYTES_MAX: usize = 255;
/// Small fields of a form.
const FIELD_BYTES_MAX: u64 = 4096;
/// Bytes sent at once.
const PIECE_BYTES: usize = 64 << 10;
/// Records in one list.
const LISTED_MAX: usize = 10_000;

type Name = Result<Path<String>, PathRejection>;

impl From<BatchStoreError> for ApiError {
    fn from(error: BatchStoreError) -> Self {
        match error {
            BatchStoreError::Full(message) => Self::files_full(message),
            BatchStoreError::Failed(message) => {
                tracing::warn!("files or batches cannot be read or written: {message}");
                Self::files_unavailable()
            }
        }
    }
}

fn unavailable(error: &io::Error) -> ApiError {
    tracing::warn!("a file cannot be read or written: {error}");
    ApiError::files_unavailable()
}

pub(crate) fn batches_of(api: &Api) -> Result<&Batches, ApiError> {
    api.later.batches.as_ref().ok_or_else(|| ApiError::no_such_route("/v1/files on this server"))
}

/// The caller.
pub(crate) fn tenant() -> TenantId {
    TenantId::anonymous()
}

fn document(file: &FileRecord) -> Value {
    json!({
        "id": file.name, "object": "file", "bytes": file.size_bytes, "created_at": file.created_unix_seconds,
        "filename": file.filename, "purpose": file.purpose, "status": "processed",
    })
}

/// `POST /v1/files`
pub(crate) async fn upload(State(api): State<Api>, request: Request) -> Response {
    let taken = async {
        let batches = batches_of(&api)?;
        let timeout = batches.inner.config.upload_timeout;
        let file = tokio::time::timeout(timeout, take(batches, request)).await;
        file.unwrap_or_else(|_| Err(ApiError::body_too_slow()))
    };
    match taken.await {
        Ok(file) => axum::Json(document(&file)).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn take(batches: &Batches, request: Request) -> Result<FileRecord, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind)
        .map_err(|_| ApiError::body("the body must be a form, with content-type: multipart/form-data"))?;
    let config = &batches.inner.config;
    let limits =
        multer::SizeLimit::new().for_field("purpose", FIELD_BYTES_MAX).for_field("file", config.file_bytes_max);
    let constraints = multer::Constraints::new().size_limit(limits);
    let mut form = multer::Multipart::with_constraints(request.into_body().into_data_stream(), boundary, constraints);
    let (mut purpose, mut taken) = (None, None);
    while let Some(field) = next_field(&mut form, config.upload_idle_timeout).await? {
        match field.name() {
            Some("purpose") => purpose = Some(field.text().await.map_err(|error| form_error(batches, &error))?),
            Some("file") if taken.is_none() => taken = Some(take_content(batches, field).await?),
            _ => {}
        }
    }
    if purpose.as_deref() != Some(PURPOSE) {
        return Err(ApiError::param("purpose", format!("purpose must be {PURPOSE}")));
    }
    let Some((writing, file)) = taken else { return Err(ApiError::param("file", "file is missing")) };
    writing.publish().await.map_err(|error| unavailable(&error))?;
    if let Err(error) = batches.inner.store.add_file(file.clone(), false).await {
        // Without a record nobody can reach it.
        let _ = batches.inner.contents.remove(&file.name);
        return Err(error.into());
    }
    Ok(file)
}

async fn next_field<'a>(
    form: &mut multer::Multipart<'a>,
    idle: Duration,
) -> Result<Option<multer::Field<'a>>, ApiError> {
    match tokio::time::timeout(idle, form.next_field()).await {
        Err(_) => Err(ApiError::body_too_slow()),
        Ok(field) => field.map_err(|error| ApiError::body(format!("the form is not readable: {error}"))),
    }
}

fn form_error(batches: &Batches, error: &multer::Error) -> ApiError {
    match error {
        multer::Error::FieldSizeExceeded { .. } => ApiError::file_too_large(batches.inner.config.file_bytes_max),
        error => ApiError::body(format!("the form is not readable: {error}")),
    }
}

/// Writes a file as it comes: it is never in memory as a whole.
async fn take_content(batches: &Batches, mut field: multer::Field<'_>) -> Result<(Writing, FileRecord), ApiError> {
    let name = new_name("file-")?;
    let filename: String =
        field.file_name().unwrap_or("file").chars().filter(|character| !character.is_control()).collect();
    if filename.len() > FILENAME_BYTES_MAX {
        return Err(ApiError::param("file", format!("the file's name is longer than {FILENAME_BYTES_MAX} bytes")));
    }
    let mut writing = batches.inner.contents.create(&name).await.map_err(|error| unavailable(&error))?;
    let mut size_bytes = 0;
    loop {
        let piece = tokio::time::timeout(batches.inner.config.upload_idle_timeout, field.chunk()).await;
        let piece = piece.map_err(|_| ApiError::body_too_slow())?.map_err(|error| form_error(batches, &error))?;
        let Some(piece) = piece else { break };
        writing.write(&piece).await.map_err(|error| unavailable(&error))?;
        size_bytes += piece.len() as u64;
    }
    let (purpose, created_unix_seconds) = (PURPOSE.to_owned(), now());
    Ok((writing, FileRecord { name, tenant: tenant(), filename, purpose, size_bytes, created_unix_seconds }))
}

/// One page of a list in OpenAI's form: `limit`, and `after` the last one of the page before.
pub(crate) fn page(documents: Vec<Value>, query: &BTreeMap<String, String>) -> Result<Value, ApiError> {
    let limit =
        match query.get("limit") {
            Some(text) => text.parse().ok().filter(|limit| (1..=LISTED_MAX).contains(limit)).ok_or_else(|| {
                ApiError::param("limit", format!("limit must be a whole number from 1 to {LISTED_MAX}"))
            })?,
            None => LISTED_MAX,
        };
    let begin = match query.get("after") {
        Some(after) => {
            let place = documents.iter().position(|document| document["id"] == **after);
            place.ok_or_else(|| ApiError::param("after", "after must be an id of the same list"))? + 1
        }
        None => 0,
    };
    let rest = &documents[begin.min(documents.len())..];
    let shown = &rest[..limit.min(rest.len())];
    let id = |document: Option<&Value>| document.map_or(Value::Null, |document| document["id"].clone());
    Ok(json!({
        "object": "list", "data": shown, "first_id": id(shown.first()), "last_id": id(shown.last()),
        "has_more": shown.len() < rest.len(),
    }))
}

/// `GET /v1/files`
pub(crate) async fn list(State(api): State<Api>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    let listed = async {
        let mut files = batches_of(&api)?.inner.store.files().await?;
        files.retain(|file| {
            file.tenant == tenant() && query.get("purpose").is_none_or(|purpose| *purpose == file.purpose)
        });
        match query.get("order").map(String::as_str) {
            None | Some("desc") => {}
            Some("asc") => files.reverse(),
            Some(_) => return Err(ApiError::param("order", "order must be asc or desc")),
        }
        page(files.iter().map(document).collect(), &query)
    };
    match listed.await {
        Ok(page) => axum::Json(page).into_response(),
        Err(error) => error.into_response(),
    }
}

async fn find(api: &Api, name: Name) -> Result<(Batches, FileRecord), ApiError> {
    let batches = batches_of(api)?.clone();
    let Ok(Path(name)) = name else { return Err(ApiError::file_not_found("")) };
    let file = batches.file(&name).await?;
    if file.tenant == tenant() { Ok((batches, file)) } else { Err(ApiError::file_not_found(&name)) }
}

/// `GET /v1/files/ID`
pub(crate) async fn show(State(api): State<Api>, name: Name) -> Response {
    match find(&api, name).await {
        Ok((_, file)) => axum::Json(document(&file)).into_response(),
        Err(error) => error.into_response(),
    }
}

/// `GET /v1/files/ID/content`
pub(crate) async fn download(State(api): State<Api>, name: Name) -> Response {
    let opened = async {
        let (batches, file) = find(&api, name).await?;
        let content = tokio::fs::File::open(batches.inner.contents.path(&file.name)).await;
        Ok((file, content.map_err(|error| unavailable(&error))?))
    };
    let (file, content) = match opened.await {
        Ok(opened) => opened,
        Err::<_, ApiError>(error) => return error.into_response(),
    };
    let pieces = stream::unfold(content, |mut content| async move {
        let mut piece = vec![0; PIECE_BYTES];
        match content.read(&mut piece).await {
            Ok(0) => None,
            Ok(count) => {
                piece.truncate(count);
                Some((Ok(piece), content))
            }
            Err(error) => Some((Err(error), content)),
        }
    });
    // A read that fails breaks the body off: its length is announced.
    let mut response = Response::new(Body::from_stream(pieces.boxed()));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, file.size_bytes.into());
    response
}

/// `DELETE /v1/files/ID`
pub(crate) async fn delete(State(api): State<Api>, name: Name) -> Response {
    let deleted = async {
        let (batches, file) = find(&api, name).await?;
        let unfinished = batches.inner.store.unfinished_batches().await?;
        if unfinished.iter().any(|batch| batch.input_file == file.name) {
            return Err(ApiError::conflict("file_in_use", "a batch still needs this file: cancel the batch first"));
        }
        batches.inner.store.remove_file(file.name.clone()).await?;
        // What cannot be removed now is removed at the next start.
        let _ = batches.inner.contents.remove(&file.name);
        Ok(json!({ "id": file.name, "object": "file", "deleted": true }))
    };
    match deleted.await {
        Ok(document) => axum::Json(document).into_response(),
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_go_on_where_the_last_one_ended() {
        let all: Vec<Value> = (1..=5).map(|number| json!({"id": number.to_string()})).collect();
        let query = |pairs: &[(&str, &str)]| {
            let query = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            page(all.clone(), &query)
        };
        let first = query(&[("limit", "2")]).unwrap();
        assert_eq!((&first["last_id"], &first["has_more"]), (&json!("2"), &json!(true)));
        let next = query(&[("limit", "3"), ("after", "2")]).unwrap();
        assert_eq!((&next["first_id"], &next["last_id"], &next["has_more"]), (&json!("3"), &json!("5"), &json!(false)));
        assert_eq!(query(&[("after", "5")]).unwrap()["data"], json!([]));
        assert!(query(&[("limit", "0")]).is_err() && query(&[("limit", "x")]).is_err());
        assert!(query(&[("after", "zzz")]).unwrap_err().message().contains("after"));
    }
}
