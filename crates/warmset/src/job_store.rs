//! Where the gateway's jobs, files and batches are kept: the catalog.

use warmset_catalog::{Catalog, CatalogError};
use warmset_core::{
    JobId,
    jobs::{Acceptance, BatchRecord, FileRecord, JobAnswer, JobLimits, JobRecord, JobStatus, NewJob, Unfinished},
};
use warmset_gateway::{
    batches::{BatchFuture, BatchStore, BatchStoreError},
    jobs::{JobFuture, JobStore, JobStoreError},
};

/// The jobs of a catalog.
pub(crate) struct CatalogJobs(pub(crate) Catalog);

fn answer<'a, T: 'a>(work: impl Future<Output = Result<T, CatalogError>> + Send + 'a) -> JobFuture<'a, T> {
    Box::pin(async move { work.await.map_err(|error| JobStoreError::failed(error.to_string())) })
}

impl JobStore for CatalogJobs {
    fn accept(&self, new: NewJob, limits: JobLimits) -> JobFuture<'_, Acceptance> {
        answer(async move { self.0.accept_job(&new, &limits).await })
    }

    fn job(&self, name: String) -> JobFuture<'_, Option<JobRecord>> {
        answer(async move { self.0.job(&name).await })
    }

    fn jobs(&self, limit: u64) -> JobFuture<'_, Vec<JobRecord>> {
        answer(self.0.jobs(limit))
    }

    fn unfinished(&self) -> JobFuture<'_, Vec<Unfinished>> {
        answer(self.0.unfinished_jobs())
    }

    fn begin(&self, job: JobId, attempts: u32) -> JobFuture<'_, Option<(String, Vec<u8>)>> {
        answer(self.0.begin_job(job, attempts))
    }

    fn body(&self, job: JobId) -> JobFuture<'_, Option<Vec<u8>>> {
        answer(self.0.job_body(job))
    }

    fn put_back(&self, job: JobId, attempts: u32) -> JobFuture<'_, ()> {
        answer(self.0.return_job(job, attempts))
    }

    fn finish(&self, job: JobId, status: JobStatus, reply: Option<JobAnswer>) -> JobFuture<'_, bool> {
        answer(async move { self.0.finish_job(job, status, reply.as_ref()).await })
    }

    fn forget_ended(&self) -> JobFuture<'_, u64> {
        answer(self.0.forget_ended_jobs())
    }
}

/// The files and batches of a catalog.
pub(crate) struct CatalogBatches(pub(crate) Catalog);

fn reply<'a, T: 'a>(work: impl Future<Output = Result<T, CatalogError>> + Send + 'a) -> BatchFuture<'a, T> {
    Box::pin(async move {
        work.await.map_err(|error| match error {
            CatalogError::Full { .. } => BatchStoreError::Full(error.to_string()),
            error => BatchStoreError::Failed(error.to_string()),
        })
    })
}

impl BatchStore for CatalogBatches {
    fn add_file(&self, file: FileRecord, made_here: bool) -> BatchFuture<'_, ()> {
        reply(async move { self.0.add_file(&file, made_here).await })
    }

    fn file(&self, name: String) -> BatchFuture<'_, Option<FileRecord>> {
        reply(async move { self.0.file(&name).await })
    }

    fn files(&self) -> BatchFuture<'_, Vec<FileRecord>> {
        reply(self.0.files())
    }

    fn remove_file(&self, name: String) -> BatchFuture<'_, bool> {
        reply(async move { self.0.remove_file(&name).await })
    }

    fn add_batch(&self, batch: BatchRecord) -> BatchFuture<'_, ()> {
        reply(async move { self.0.add_batch(&batch).await })
    }

    fn set_batch(&self, batch: BatchRecord) -> BatchFuture<'_, ()> {
        reply(async move { self.0.set_batch(&batch).await })
    }

    fn batch(&self, name: String) -> BatchFuture<'_, Option<BatchRecord>> {
        reply(async move { self.0.batch(&name).await })
    }

    fn batches(&self) -> BatchFuture<'_, Vec<BatchRecord>> {
        reply(self.0.batches())
    }

    fn unfinished_batches(&self) -> BatchFuture<'_, Vec<BatchRecord>> {
        reply(self.0.unfinished_batches())
    }
}
