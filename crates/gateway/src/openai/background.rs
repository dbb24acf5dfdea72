//! Responses made in the background. They are jobs, shown as their callers asked for them: the id of a response is
//! that of its job behind another prefix, so that one record is all there is.

use super::{
    Call,
    ask::{Generation, Tier},
    responses_ask,
    responses_encode::{Head, Response as Encoded},
};
use crate::{
    errors::ApiError,
    jobs::{self, Deferral, Jobs, Live, Name},
    openai::Api,
};
use axum::{
    extract::{Path, Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use warmset_core::jobs::{JobRecord, JobStatus};

/// The route whose jobs are responses.
pub(crate) const PATH: &str = "/v1/responses";
const PREFIX: &str = "resp_";

/// Keeps a request as a job and answers with the response that it will be.
pub(crate) async fn accept(api: &Api, call: &mut Call, asked: Deferral<'_>) -> Response {
    let accepted = async {
        let jobs = api.later.jobs.as_ref();
        let jobs = jobs.ok_or_else(|| ApiError::unsupported("background", "this server keeps no jobs"))?;
        let record = jobs::accept(api, jobs, call, &asked).await?;
        if record.status != JobStatus::Queued {
            // Its key means one that was handed in before.
            return shown(jobs, &record.name).await;
        }
        let object = object(&record, None, Some(asked.body));
        Ok(jobs::job_response(&record, object.to_string().into_bytes()))
    };
    let mut response = match accepted.await {
        Ok(response) => {
            call.deferred();
            response
        }
        Err(error) => {
            call.failed(&error);
            error.into_response()
        }
    };
    call.write_request_id(response.headers_mut());
    response
}

/// `GET /v1/responses/ID`
pub(crate) async fn show(
    State(api): State<Api>,
    name: Name,
    query: Result<Query<BTreeMap<String, String>>, QueryRejection>,
) -> Response {
    let found = async {
        let query = query.map_or_else(|_| BTreeMap::new(), |Query(query)| query);
        if query.get("stream").is_some_and(|stream| stream != "false") {
            let message = "a response made in the background is not streamed: ask again until it has ended";
            return Err(ApiError::unsupported("stream", message));
        }
        let (jobs, record) = find(&api, name).await?;
        shown(&jobs, &record.name).await
    };
    found.await.unwrap_or_else(IntoResponse::into_response)
}

/// `POST /v1/responses/ID/cancel`
pub(crate) async fn cancel(State(api): State<Api>, name: Name) -> Response {
    let cancelled = async {
        let (jobs, record) = find(&api, name).await?;
        let record = jobs::take_back(&jobs, record).await?;
        shown(&jobs, &record.name).await
    };
    cancelled.await.unwrap_or_else(IntoResponse::into_response)
}

async fn find(api: &Api, name: Name) -> Result<(Jobs, JobRecord), ApiError> {
    let own = name.ok().and_then(|Path(name)| name.strip_prefix(PREFIX).map(str::to_owned));
    let own = own.ok_or_else(ApiError::response_not_found)?;
    let (jobs, record, _) = jobs::find(api, Ok(Path(format!("{}{own}", jobs::PREFIX))))
        .await
        .map_err(|error| if error.status == StatusCode::NOT_FOUND { ApiError::response_not_found() } else { error })?;
    if record.route == PATH { Ok((jobs, record)) } else { Err(ApiError::response_not_found()) }
}

/// The response as it is now.
async fn shown(jobs: &Jobs, name: &str) -> Result<Response, ApiError> {
    let (record, live) = jobs.look(name).await?.ok_or_else(ApiError::response_not_found)?;
    let body = jobs.body(record.id).await?;
    let object = object(&record, live, body.as_deref());
    Ok(jobs::job_response(&record, object.to_string().into_bytes()))
}

/// `body` is what was asked, while it is kept.
fn object(record: &JobRecord, live: Option<Live>, body: Option<&[u8]>) -> Value {
    let own = record.name.strip_prefix(jobs::PREFIX).unwrap_or(&record.name).to_owned();
    let created = record.created_unix_milliseconds / 1000;
    let answer = record.answer.as_ref().and_then(|answer| serde_json::from_slice::<Value>(&answer.body).ok());
    let status = live.map_or(record.status, |live| live.status);
    if let (JobStatus::Succeeded, Some(mut answer)) = (status, answer.clone()) {
        // It was made by a call of its own, whose name nobody knows.
        answer["id"] = json!(format!("{PREFIX}{own}"));
        answer["created_at"] = json!(created);
        return answer;
    }
    let (tier, echo) = match body.and_then(|body| responses_ask::generation(body).ok()) {
        Some(Generation { tier, echo, .. }) => (tier, echo.map(|echo| *echo).unwrap_or_default()),
        None => (None, responses_ask::echo_of_nothing()),
    };
    let tier = tier.unwrap_or(Tier::Default).as_str();
    let head = Head { own, created, model: record.model.clone(), tier, echo };
    let mut object = Encoded::new(head).object(word(status), None);
    if word(status) == "failed" {
        let error = answer.map(|mut answer| answer["error"].take()).unwrap_or_default();
        let code = error["code"].as_str().unwrap_or("server_error");
        object["error"] = json!({ "code": code, "message": error["message"] });
    }
    object
}

/// OpenAI's word for where a response is.
fn word(status: JobStatus) -> &'static str {
    match status {
        JobStatus::Queued => "queued",
        JobStatus::Loading | JobStatus::Running => "in_progress",
        JobStatus::Succeeded => "completed",
        JobStatus::Failed | JobStatus::Expired => "failed",
        JobStatus::Cancelled => "cancelled",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::{Digest, JobId, Priority, TenantId, jobs::JobAnswer};

    fn record(status: JobStatus, answer: Option<(u16, &str)>) -> JobRecord {
        JobRecord {
            id: JobId(1),
            name: "job_a1".into(),
            tenant: TenantId::anonymous(),
            route: PATH.into(),
            model: "m".into(),
            digest: Digest([1; 32]),
            class: Priority::Standard,
            status,
            attempts: 0,
            fingerprint: String::new(),
            created_unix_milliseconds: 5000,
            expires_unix_milliseconds: 9000,
            finished_unix_milliseconds: answer.map(|_| 6000),
            answer: answer.map(|(http_status, body)| JobAnswer {
                http_status,
                digest: None,
                start: None,
                body: body.as_bytes().to_vec(),
            }),
        }
    }

    #[test]
    fn one_id_and_time_from_the_first_answer_to_the_last() {
        let body = br#"{"model": "m", "input": "x", "background": true, "instructions": "Be brief."}"#;
        let queued = object(&record(JobStatus::Queued, None), None, Some(body));
        assert_eq!((&queued["status"], &queued["background"]), (&json!("queued"), &json!(true)));
        assert_eq!((&queued["instructions"], &queued["output"]), (&json!("Be brief."), &json!([])));
        let live = Live { status: JobStatus::Loading, position: None, loaded: None };
        assert_eq!(object(&record(JobStatus::Queued, None), Some(live), None)["status"], "in_progress");
        let kept = r#"{"id": "resp_other", "created_at": 7, "status": "incomplete"}"#;
        let done = object(&record(JobStatus::Succeeded, Some((200, kept))), None, None);
        assert_eq!(done["status"], "incomplete");
        for field in ["id", "created_at"] {
            assert_eq!(done[field], queued[field]);
        }
    }

    #[test]
    fn what_failed_says_why() {
        let error = r#"{"error": {"code": "context_length_exceeded", "message": "too long"}}"#;
        let failed = object(&record(JobStatus::Failed, Some((400, error))), None, None);
        assert_eq!(failed["status"], "failed");
        assert_eq!(failed["error"], json!({ "code": "context_length_exceeded", "message": "too long" }));
        assert_eq!((&failed["background"], &failed["usage"]), (&json!(true), &Value::Null));
        let cancelled = object(&record(JobStatus::Cancelled, None), None, None);
        assert_eq!((&cancelled["status"], &cancelled["error"]), (&json!("cancelled"), &Value::Null));
    }
}
