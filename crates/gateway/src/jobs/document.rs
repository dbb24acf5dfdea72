//! A job as its caller sees it.

use super::run_loop::Live;
use serde::Serialize;
use serde_json::value::RawValue;
use warmset_core::{
    Digest, Priority,
    jobs::{JobRecord, JobStatus},
    worker::StartKind,
};

/// The object of `GET /v1/jobs/ID`.
#[derive(Serialize)]
pub(crate) struct Document<'a> {
    id: &'a str,
    object: &'static str,
    pub(crate) status: JobStatus,
    position: Option<u32>,
    /// The share of the model that is loaded, while it is.
    loaded: Option<f32>,
    model: &'a str,
    digest: Digest,
    start: Option<StartKind>,
    route: &'a str,
    class: Priority,
    attempts: u32,
    created_at: u64,
    finished_at: Option<u64>,
    expires_at: u64,
    /// What the route answered, byte for byte.
    result: Option<&'a RawValue>,
    error: Option<&'a RawValue>,
    /// The HTTP status of `result` or `error`.
    http_status: Option<u16>,
}

/// A job as it is kept, as `GET /v1/jobs/ID` shows it.
pub fn job_document(record: &JobRecord) -> serde_json::Value {
    serde_json::to_value(Document::new(record, None)).unwrap_or_default()
}

#[derive(serde::Deserialize)]
struct ErrorBody<'a> {
    #[serde(borrow)]
    error: &'a RawValue,
}

impl<'a> Document<'a> {
    pub(crate) fn new(record: &'a JobRecord, live: Option<Live>) -> Self {
        let answer = record.answer.as_ref();
        let text = answer.and_then(|answer| std::str::from_utf8(&answer.body).ok());
        let succeeded = record.status == JobStatus::Succeeded;
        let result = text.filter(|_| succeeded).and_then(|text| serde_json::from_str(text).ok());
        let error = text.filter(|_| !succeeded).and_then(|text| serde_json::from_str::<ErrorBody<'_>>(text).ok());
        Self {
            id: &record.name,
            object: "job",
            status: live.map_or(record.status, |live| live.status),
            position: live.and_then(|live| live.position),
            loaded: live.and_then(|live| live.loaded),
            model: &record.model,
            digest: record.digest,
            start: answer.and_then(|answer| answer.start),
            route: &record.route,
            class: record.class,
            attempts: record.attempts,
            created_at: record.created_unix_milliseconds / 1000,
            finished_at: record.finished_unix_milliseconds.map(|milliseconds| milliseconds / 1000),
            expires_at: record.expires_unix_milliseconds / 1000,
            result,
            error: error.map(|body| body.error),
            http_status: answer.map(|answer| answer.http_status),
        }
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        // Texts, numbers and JSON can always be written as JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use warmset_core::{JobId, TenantId, jobs::JobAnswer};

    fn record(status: JobStatus, answer: Option<(u16, &str)>) -> JobRecord {
        JobRecord {
            id: JobId(1),
            name: "job_1".into(),
            tenant: TenantId::anonymous(),
            route: "/v1/completions".into(),
            model: "m".into(),
            digest: Digest(if answer.is_some() { [2; 32] } else { [1; 32] }),
            class: Priority::Standard,
            status,
            attempts: 1,
            fingerprint: String::new(),
            created_unix_milliseconds: 5000,
            expires_unix_milliseconds: 9000,
            finished_unix_milliseconds: answer.map(|_| 6000),
            answer: answer.map(|(http_status, body)| JobAnswer {
                http_status,
                digest: Some(Digest([2; 32])),
                start: Some(StartKind::Cold),
                body: body.as_bytes().to_vec(),
            }),
        }
    }

    #[test]
    fn an_answer_is_given_byte_for_byte_and_an_error_as_its_object() {
        let done = record(JobStatus::Succeeded, Some((200, "{\"a\":  1.50, \"b\": [ ]}")));
        let text = String::from_utf8(Document::new(&done, None).to_json()).unwrap();
        assert!(text.contains("\"result\":{\"a\":  1.50, \"b\": [ ]},\"error\":null"), "{text}");
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["digest"], json!(Digest([2; 32])));
        assert_eq!((&document["start"], &document["finished_at"]), (&json!("cold"), &json!(6)));
        let failed = record(JobStatus::Failed, Some((400, "{\"error\": {\"code\": \"x\"}}")));
        let document: Value = serde_json::from_slice(&Document::new(&failed, None).to_json()).unwrap();
        assert_eq!(document["error"], json!({"code": "x"}));
        assert_eq!((&document["result"], &document["http_status"]), (&Value::Null, &json!(400)));
    }

    #[test]
    fn what_is_known_now_goes_before_what_was_written() {
        let live = Live { status: JobStatus::Loading, position: None, loaded: Some(0.5) };
        let waiting = record(JobStatus::Running, None);
        let document: Value = serde_json::from_slice(&Document::new(&waiting, Some(live)).to_json()).unwrap();
        assert_eq!((&document["status"], &document["loaded"]), (&json!("loading"), &json!(0.5)));
        assert_eq!(document["digest"], json!(Digest([1; 32])));
    }
}
