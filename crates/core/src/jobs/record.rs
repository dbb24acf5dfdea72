//! What is kept of a job. Catalog and gateway both speak of it and know nothing of each other.

use super::JobStatus;
use crate::{
    ids::{Digest, JobId, Priority, TenantId},
    worker::StartKind,
};
use alloc::{string::String, vec::Vec};
use core::time::Duration;

/// A job to accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewJob {
    /// What its caller knows it by; nobody can guess it.
    pub name: String,
    /// Whose it is.
    pub tenant: TenantId,
    /// The route that would have answered it.
    pub route: String,
    /// The model as its caller named it.
    pub model: String,
    /// What the name meant when the job was accepted.
    pub digest: Digest,
    /// Its class.
    pub class: Priority,
    /// The request's body.
    pub body: Vec<u8>,
    /// The caller's own name for it: sent again, it means the same job.
    pub idempotency_key: Option<String>,
    /// Tells whether a second request with the same key is the same request.
    pub fingerprint: String,
    /// Time to be answered in, and then time in which the answer is kept.
    pub time_to_live: Duration,
}

/// What a job came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobAnswer {
    /// The HTTP status that the route would have answered with.
    pub http_status: u16,
    /// The model that answered.
    pub digest: Option<Digest>,
    /// Whether it was loaded for it.
    pub start: Option<StartKind>,
    /// The body that the route would have answered with.
    pub body: Vec<u8>,
}

/// A job as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobRecord {
    /// Its number.
    pub id: JobId,
    /// What its caller knows it by.
    pub name: String,
    /// Whose it is.
    pub tenant: TenantId,
    /// The route that answers it.
    pub route: String,
    /// The model as its caller named it.
    pub model: String,
    /// The digest that answered; before that what the name meant when the job was accepted.
    pub digest: Digest,
    /// Its class.
    pub class: Priority,
    /// Where it was when it was last written down.
    pub status: JobStatus,
    /// How often it was begun.
    pub attempts: u32,
    /// Tells whether a second request with the same key is the same request.
    pub fingerprint: String,
    /// When it was accepted, in milliseconds since 1970.
    pub created_unix_milliseconds: u64,
    /// When it is given up or, once it has ended, forgotten.
    pub expires_unix_milliseconds: u64,
    /// When it ended.
    pub finished_unix_milliseconds: Option<u64>,
    /// What it came to; not read for lists.
    pub answer: Option<JobAnswer>,
}

/// A job that has not ended, as far as its turn depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// Its number.
    pub id: JobId,
    /// What its caller knows it by.
    pub name: String,
    /// The model as its caller named it.
    pub model: String,
    /// Its class.
    pub class: Priority,
    /// How often it was begun.
    pub attempts: u32,
    /// What is left of its time.
    pub time_left: Duration,
}

/// How many jobs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobLimits {
    /// Jobs that have not ended.
    pub unfinished_max: u64,
    /// All of them.
    pub kept_max: u64,
    /// Bytes of their bodies and answers.
    pub bytes_max: u64,
}

impl Default for JobLimits {
    fn default() -> Self {
        Self { unfinished_max: 1000, kept_max: 20_000, bytes_max: 4 << 30 }
    }
}

/// What came of a job that was handed in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acceptance {
    /// It is kept.
    New(JobRecord),
    /// It was kept before, under the same key.
    Known(JobRecord),
    /// Its key means another request.
    KeyTaken,
    /// There is no room.
    Full,
}
