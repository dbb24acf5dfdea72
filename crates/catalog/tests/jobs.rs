//! What every catalog promises of jobs, written against the public interface alone.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, path::Path, time::Duration};
use warmset_catalog::{Catalog, CatalogError, FILES_BYTES_MAX};
use warmset_core::{
    Digest, JobId, Priority, TenantId,
    jobs::{
        Acceptance, BatchCounts, BatchRecord, BatchStatus, FileRecord, JobAnswer, JobLimits, JobRecord, JobStatus,
        NewJob,
    },
    worker::StartKind,
};

/// The one place that knows which database is tested.
async fn open(directory: &Path) -> Catalog {
    Catalog::open(directory.join("catalog.db").to_str().unwrap()).await.unwrap()
}

fn new_job(name: &str, key: Option<&str>) -> NewJob {
    NewJob {
        name: name.into(),
        tenant: TenantId::anonymous(),
        route: "/v1/completions".into(),
        model: "m".into(),
        digest: Digest([1; 32]),
        class: Priority::Batch,
        body: b"{}".to_vec(),
        idempotency_key: key.map(str::to_owned),
        fingerprint: "one".into(),
        time_to_live: Duration::from_secs(3600),
    }
}

fn answer(body: &[u8]) -> JobAnswer {
    JobAnswer { http_status: 200, digest: Some(Digest([2; 32])), start: Some(StartKind::Cold), body: body.to_vec() }
}

async fn accept(catalog: &Catalog, new: &NewJob) -> JobRecord {
    match catalog.accept_job(new, &JobLimits::default()).await.unwrap() {
        Acceptance::New(record) => record,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_accepted_job_outlives_the_process_and_comes_back_with_its_answer() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let accepted = accept(&catalog, &new_job("job_a", None)).await;
    assert_eq!(catalog.job("job_a").await.unwrap().unwrap(), accepted);
    assert_eq!(catalog.job("job_b").await.unwrap(), None);
    catalog.close().await;

    let catalog = open(directory.path()).await;
    let unfinished = catalog.unfinished_jobs().await.unwrap();
    assert_eq!((unfinished.len(), unfinished[0].id, unfinished[0].class), (1, accepted.id, Priority::Batch));
    assert!(
        unfinished[0].time_left <= Duration::from_secs(3600) && unfinished[0].time_left > Duration::from_secs(3000)
    );
    let begun = catalog.begin_job(accepted.id, 1).await.unwrap();
    assert_eq!(begun, Some(("/v1/completions".into(), b"{}".to_vec())));
    assert_eq!(catalog.unfinished_jobs().await.unwrap()[0].attempts, 1);
    assert!(catalog.finish_job(accepted.id, JobStatus::Succeeded, Some(&answer(b"{\"x\": 1}"))).await.unwrap());
    let found = catalog.job("job_a").await.unwrap().unwrap();
    assert_eq!((found.status, found.attempts), (JobStatus::Succeeded, 1));
    assert_eq!(found.answer, Some(answer(b"{\"x\": 1}")));
    // Accepted for one digest, answered by another: from now on that one is shown, in lists too.
    assert_eq!((accepted.digest, found.digest), (Digest([1; 32]), Digest([2; 32])));
    assert_eq!(catalog.jobs(1).await.unwrap()[0].digest, Digest([2; 32]));
    assert!(found.finished_unix_milliseconds.is_some());
    assert_eq!(catalog.unfinished_jobs().await.unwrap(), []);
}

#[tokio::test]
async fn an_end_is_written_once() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let id = accept(&catalog, &new_job("job_a", None)).await.id;
    assert!(catalog.finish_job(id, JobStatus::Cancelled, None).await.unwrap());
    assert!(!catalog.finish_job(id, JobStatus::Succeeded, Some(&answer(b"late"))).await.unwrap());
    assert_eq!(catalog.begin_job(id, 1).await.unwrap(), None);
    catalog.return_job(id, 0).await.unwrap();
    let found = catalog.job("job_a").await.unwrap().unwrap();
    assert_eq!((found.status, found.answer), (JobStatus::Cancelled, None));
    assert!(!catalog.finish_job(JobId(99), JobStatus::Cancelled, None).await.unwrap());
}

#[tokio::test]
async fn a_key_means_one_job_of_one_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let limits = JobLimits { unfinished_max: 2, ..JobLimits::default() };
    let first = accept(&catalog, &new_job("job_a", Some("k"))).await;
    let again = catalog.accept_job(&new_job("job_b", Some("k")), &limits).await.unwrap();
    assert_eq!(again, Acceptance::Known(first.clone()));
    let other = NewJob { fingerprint: "two".into(), ..new_job("job_b", Some("k")) };
    assert_eq!(catalog.accept_job(&other, &limits).await.unwrap(), Acceptance::KeyTaken);
    let of_another = NewJob { tenant: TenantId::new("b"), ..new_job("job_b", Some("k")) };
    assert!(matches!(catalog.accept_job(&of_another, &limits).await.unwrap(), Acceptance::New(_)));
    // Full for new ones, not for those that are known.
    assert_eq!(catalog.accept_job(&new_job("job_c", None), &limits).await.unwrap(), Acceptance::Full);
    assert_eq!(catalog.accept_job(&new_job("job_c", Some("k")), &limits).await.unwrap(), Acceptance::Known(first));
}

#[tokio::test]
async fn room_is_bounded_in_jobs_and_bytes_and_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let first = accept(&catalog, &new_job("job_a", None)).await;
    let full = |limits| {
        let catalog = catalog.clone();
        async move { catalog.accept_job(&new_job("job_x", None), &limits).await.unwrap() == Acceptance::Full }
    };
    let limits = JobLimits::default();
    assert!(full(JobLimits { unfinished_max: 1, ..limits }).await);
    assert!(full(JobLimits { kept_max: 1, ..limits }).await);
    assert!(full(JobLimits { bytes_max: 3, ..limits }).await);
    catalog.finish_job(first.id, JobStatus::Cancelled, None).await.unwrap();
    assert!(!full(JobLimits { unfinished_max: 1, bytes_max: 2, ..limits }).await);
}

#[tokio::test]
async fn what_has_ended_is_forgotten_after_its_time_and_lists_are_newest_first() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let brief = NewJob { time_to_live: Duration::ZERO, ..new_job("job_a", None) };
    let first = accept(&catalog, &brief).await;
    accept(&catalog, &new_job("job_b", None)).await;
    let names = |jobs: Vec<JobRecord>| jobs.into_iter().map(|job| job.name).collect::<Vec<_>>();
    assert_eq!(names(catalog.jobs(10).await.unwrap()), ["job_b", "job_a"]);
    assert_eq!(names(catalog.jobs(1).await.unwrap()), ["job_b"]);
    assert_eq!(catalog.forget_ended_jobs().await.unwrap(), 0, "it has not ended");
    catalog.finish_job(first.id, JobStatus::Expired, None).await.unwrap();
    assert_eq!(catalog.forget_ended_jobs().await.unwrap(), 1);
    assert_eq!(names(catalog.jobs(10).await.unwrap()), ["job_b"]);
    // A number is never given twice.
    assert!(accept(&catalog, &new_job("job_c", None)).await.id > JobId(2));
}

fn file(name: &str, size_bytes: u64) -> FileRecord {
    FileRecord {
        name: name.into(),
        tenant: TenantId::anonymous(),
        filename: "lines.jsonl".into(),
        purpose: "batch".into(),
        size_bytes,
        created_unix_seconds: 7,
    }
}

#[tokio::test]
async fn files_are_kept_within_bounds_until_they_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    catalog.add_file(&file("file-a", 5), false).await.unwrap();
    catalog.add_file(&file("file-b", 6), false).await.unwrap();
    // Written down twice it is still one: a server was killed between the two.
    catalog.add_file(&file("file-b", 9), true).await.unwrap();
    assert_eq!(catalog.file("file-b").await.unwrap(), Some(file("file-b", 6)));
    assert_eq!(catalog.files().await.unwrap(), [file("file-b", 6), file("file-a", 5)]);
    let full = catalog.add_file(&file("file-c", FILES_BYTES_MAX), false).await.unwrap_err();
    assert!(matches!(full, CatalogError::Full { .. }), "{full}");
    // What a batch made has room.
    catalog.add_file(&file("file-d", FILES_BYTES_MAX), true).await.unwrap();
    assert!(catalog.remove_file("file-a").await.unwrap() && !catalog.remove_file("file-a").await.unwrap());
    assert_eq!(catalog.file("file-a").await.unwrap(), None);
}

#[tokio::test]
async fn a_batch_comes_back_as_it_was_last_written() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let mut batch = BatchRecord {
        name: "batch_1".into(),
        tenant: TenantId::anonymous(),
        endpoint: "/v1/completions".into(),
        input_file: "file-a".into(),
        output_file: "file-out-1".into(),
        error_file: "file-err-1".into(),
        has_output: false,
        has_errors: false,
        status: BatchStatus::Validating,
        faults: Vec::new(),
        counts: BatchCounts::default(),
        metadata: BTreeMap::from([("for".to_owned(), "test".to_owned())]),
        created_unix_seconds: 7,
        expires_unix_seconds: 9,
        reached_unix_seconds: BTreeMap::new(),
    };
    catalog.add_batch(&batch).await.unwrap();
    batch.status = BatchStatus::InProgress;
    batch.counts.total = 3;
    batch.reached_unix_seconds.insert(BatchStatus::InProgress, 8);
    catalog.set_batch(&batch).await.unwrap();
    catalog.close().await;
    let catalog = open(directory.path()).await;
    assert_eq!(catalog.unfinished_batches().await.unwrap(), std::slice::from_ref(&batch));
    batch.status = BatchStatus::Completed;
    catalog.set_batch(&batch).await.unwrap();
    assert_eq!(catalog.unfinished_batches().await.unwrap(), []);
    assert_eq!(catalog.batch("batch_1").await.unwrap(), Some(batch.clone()));
    assert_eq!(catalog.batches().await.unwrap(), [batch]);
    assert_eq!(catalog.batch("batch_2").await.unwrap(), None);
}
