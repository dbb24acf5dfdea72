//! Where jobs are kept. The binary puts the catalog behind it.

use futures_util::future::BoxFuture;
use warmset_core::{
    JobId,
    jobs::{Acceptance, JobAnswer, JobLimits, JobRecord, JobStatus, NewJob, Unfinished},
};

/// Why something could not be written down or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct JobStoreError {
    /// Whose fault and what to do, in lower case.
    pub message: String,
}

impl JobStoreError {
    /// The store itself failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// What a store answers, later.
pub type JobFuture<'a, T> = BoxFuture<'a, Result<T, JobStoreError>>;

/// Keeps jobs. What it acknowledged outlives the process.
pub trait JobStore: Send + Sync + 'static {
    /// Keeps a job within limits, unless its key means one that is kept.
    fn accept(&self, new: NewJob, limits: JobLimits) -> JobFuture<'_, Acceptance>;
    /// The job with this name, with its answer.
    fn job(&self, name: String) -> JobFuture<'_, Option<JobRecord>>;
    /// The newest jobs, without answers.
    fn jobs(&self, limit: u64) -> JobFuture<'_, Vec<JobRecord>>;
    /// Jobs that have not ended.
    fn unfinished(&self) -> JobFuture<'_, Vec<Unfinished>>;
    /// A job begins: its route and body; none if it has ended.
    fn begin(&self, job: JobId, attempts: u32) -> JobFuture<'_, Option<(String, Vec<u8>)>>;
    /// What a job asks; none once it has ended.
    fn body(&self, job: JobId) -> JobFuture<'_, Option<Vec<u8>>>;
    /// A job waits again.
    fn put_back(&self, job: JobId, attempts: u32) -> JobFuture<'_, ()>;
    /// A job has ended; false if it had before.
    fn finish(&self, job: JobId, status: JobStatus, answer: Option<JobAnswer>) -> JobFuture<'_, bool>;
    /// Forgets what ended too long ago.
    fn forget_ended(&self) -> JobFuture<'_, u64>;
}
