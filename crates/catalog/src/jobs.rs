//! Jobs: requests that were accepted to be answered later, and what they came to.

use crate::{
    catalog::{Catalog, count, unix_milliseconds},
    error::CatalogError,
    models::digest_at,
};
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};
use std::time::Duration;
use warmset_core::{
    Digest, JobId, Priority, TenantId,
    jobs::{Acceptance, JobAnswer, JobLimits, JobRecord, JobStatus, NewJob, Unfinished},
    worker::StartKind,
};

/// Jobs given in one list.
pub const JOBS_LISTED_MAX: u64 = 10_000;

/// Everything but the bodies.
const COLUMNS: &str =
    "id, name, tenant, route, model, coalesce(answer_digest, digest) AS digest, class, status, attempts, fingerprint,
    created_unix_milliseconds, expires_unix_milliseconds, finished_unix_milliseconds";

impl Catalog {
    /// Keeps a job. Its key, if it has one, means the same job for as long as that is kept.
    pub async fn accept_job(&self, new: &NewJob, limits: &JobLimits) -> Result<Acceptance, CatalogError> {
        let mut transaction = self.write().await?;
        if let Some(key) = &new.idempotency_key
            && let Some(known) = job_with_key(&mut transaction, &new.tenant, key).await?
        {
            let same = known.fingerprint == new.fingerprint;
            return Ok(if same { Acceptance::Known(known) } else { Acceptance::KeyTaken });
        }
        if is_full(&mut transaction, new, limits).await? {
            return Ok(Acceptance::Full);
        }
        let (now, lives) = (unix_milliseconds(), milliseconds(new.time_to_live));
        let expires = now.saturating_add(lives);
        let inserted = sqlx::query(
            "INSERT INTO jobs (name, tenant, route, model, digest, class, status, attempts, idempotency_key,
             fingerprint, created_unix_milliseconds, time_to_live_milliseconds, expires_unix_milliseconds, body)
             VALUES (?, ?, ?, ?, ?, ?, 'queued', 0, ?, ?, ?, ?, ?, ?)",
        )
        .bind(&new.name)
        .bind(new.tenant.as_str())
        .bind(&new.route)
        .bind(&new.model)
        .bind(new.digest.to_string())
        .bind(new.class.as_str())
        .bind(&new.idempotency_key)
        .bind(&new.fingerprint)
        .bind(now)
        .bind(lives)
        .bind(expires)
        .bind(&new.body)
        .execute(&mut *transaction)
        .await?;
        let id = inserted.last_insert_rowid();
        transaction.commit().await?;
        Ok(Acceptance::New(JobRecord {
            id: JobId(count(id)),
            name: new.name.clone(),
            tenant: new.tenant.clone(),
            route: new.route.clone(),
            model: new.model.clone(),
            digest: new.digest,
            class: new.class,
            status: JobStatus::Queued,
            attempts: 0,
            fingerprint: new.fingerprint.clone(),
            created_unix_milliseconds: count(now),
            expires_unix_milliseconds: count(expires),
            finished_unix_milliseconds: None,
            answer: None,
        }))
    }

    /// The job with this name, with its answer if it has one.
    pub async fn job(&self, name: &str) -> Result<Option<JobRecord>, CatalogError> {
        let answer = "http_status, answer_digest, answer_start, answer";
        let sql = format!("SELECT {COLUMNS}, {answer} FROM jobs WHERE name = ?");
        let row = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(name).fetch_optional(&self.pool).await?;
        let Some(row) = row else { return Ok(None) };
        let mut record = read_job(&row)?;
        record.answer = read_answer(&row)?;
        Ok(Some(record))
    }

    /// The newest jobs, without their answers.
    pub async fn jobs(&self, limit: u64) -> Result<Vec<JobRecord>, CatalogError> {
        let sql = sqlx::AssertSqlSafe(format!("SELECT {COLUMNS} FROM jobs ORDER BY id DESC LIMIT ?"));
        let limit = i64::try_from(limit.min(JOBS_LISTED_MAX)).unwrap_or(i64::MAX);
        let rows = sqlx::query(sql).bind(limit).fetch_all(&self.pool).await?;
        rows.iter().map(read_job).collect()
    }

    /// Jobs that have not ended, in the order in which they were accepted. A clock that was set back gives none more
    /// time than it had.
    pub async fn unfinished_jobs(&self) -> Result<Vec<Unfinished>, CatalogError> {
        let rows = sqlx::query(
            "SELECT id, name, model, class, attempts, expires_unix_milliseconds, time_to_live_milliseconds
             FROM jobs WHERE finished_unix_milliseconds IS NULL ORDER BY id",
        )
        .fetch_all(&self.pool)
        .await?;
        let now = unix_milliseconds();
        let read = |row: &SqliteRow| {
            let (expires, lives): (i64, i64) =
                (row.try_get("expires_unix_milliseconds")?, row.try_get("time_to_live_milliseconds")?);
            Ok(Unfinished {
                id: JobId(count(row.try_get("id")?)),
                name: row.try_get("name")?,
                model: row.try_get("model")?,
                class: class_at(row)?,
                attempts: attempts_at(row)?,
                time_left: Duration::from_millis(count(expires.saturating_sub(now).min(lives))),
            })
        };
        rows.iter().map(read).collect()
    }

    /// Writes down that a job begins, and gives its route and body; none if it has ended.
    pub async fn begin_job(&self, id: JobId, attempts: u32) -> Result<Option<(String, Vec<u8>)>, CatalogError> {
        let row = sqlx::query(
            "UPDATE jobs SET status = 'running', attempts = ?
             WHERE id = ? AND finished_unix_milliseconds IS NULL RETURNING route, body",
        )
        .bind(attempts)
        .bind(number(id))
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        Ok(Some((row.try_get("route")?, row.try_get("body")?)))
    }

    /// What a job asks; none if it has ended.
    pub async fn job_body(&self, id: JobId) -> Result<Option<Vec<u8>>, CatalogError> {
        let body = sqlx::query_scalar("SELECT body FROM jobs WHERE id = ? AND finished_unix_milliseconds IS NULL")
            .bind(number(id))
            .fetch_optional(&self.pool)
            .await?;
        Ok(body)
    }

    /// Writes down that a job waits again.
    pub async fn return_job(&self, id: JobId, attempts: u32) -> Result<(), CatalogError> {
        sqlx::query(
            "UPDATE jobs SET status = 'queued', attempts = ? WHERE id = ? AND finished_unix_milliseconds IS NULL",
        )
        .bind(attempts)
        .bind(number(id))
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Writes down how a job ended, once: false if it had ended before. From now on its answer is kept for the time
    /// that it had itself.
    pub async fn finish_job(
        &self,
        id: JobId,
        status: JobStatus,
        answer: Option<&JobAnswer>,
    ) -> Result<bool, CatalogError> {
        let now = unix_milliseconds();
        let changed = sqlx::query(
            "UPDATE jobs SET status = ?, finished_unix_milliseconds = ?, http_status = ?, answer_digest = ?,
             answer_start = ?, answer = ?, body = x'', expires_unix_milliseconds = ? + time_to_live_milliseconds
             WHERE id = ? AND finished_unix_milliseconds IS NULL",
        )
        .bind(status.as_str())
        .bind(now)
        .bind(answer.map(|answer| answer.http_status))
        .bind(answer.and_then(|answer| answer.digest).map(|digest| digest.to_string()))
        .bind(answer.and_then(|answer| answer.start).map(StartKind::as_str))
        .bind(answer.map(|answer| answer.body.as_slice()))
        .bind(now)
        .bind(number(id))
        .execute(&self.pool)
        .await?
        .rows_affected();
        Ok(changed > 0)
    }

    /// Forgets jobs that ended so long ago that nobody may ask for them any more.
    pub async fn forget_ended_jobs(&self) -> Result<u64, CatalogError> {
        let removed = sqlx::query(
            "DELETE FROM jobs WHERE finished_unix_milliseconds IS NOT NULL AND expires_unix_milliseconds <= ?",
        )
        .bind(unix_milliseconds())
        .execute(&self.pool)
        .await?
        .rows_affected();
        Ok(removed)
    }
}

async fn job_with_key(
    transaction: &mut SqliteConnection,
    tenant: &TenantId,
    key: &str,
) -> Result<Option<JobRecord>, CatalogError> {
    let sql = sqlx::AssertSqlSafe(format!("SELECT {COLUMNS} FROM jobs WHERE tenant = ? AND idempotency_key = ?"));
    let row = sqlx::query(sql).bind(tenant.as_str()).bind(key).fetch_optional(&mut *transaction).await?;
    row.as_ref().map(read_job).transpose()
}

async fn is_full(transaction: &mut SqliteConnection, new: &NewJob, limits: &JobLimits) -> Result<bool, CatalogError> {
    let row = sqlx::query(
        "SELECT count(*) AS kept, count(*) - count(finished_unix_milliseconds) AS unfinished,
         coalesce(sum(length(body) + coalesce(length(answer), 0)), 0) AS bytes FROM jobs",
    )
    .fetch_one(&mut *transaction)
    .await?;
    let figure = |name| row.try_get(name).map(count);
    let bytes = figure("bytes")?.saturating_add(new.body.len() as u64);
    Ok(figure("unfinished")? >= limits.unfinished_max || figure("kept")? >= limits.kept_max || bytes > limits.bytes_max)
}

fn number(id: JobId) -> i64 {
    i64::try_from(id.0).unwrap_or(i64::MAX)
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn class_at(row: &SqliteRow) -> Result<Priority, CatalogError> {
    let text: String = row.try_get("class")?;
    let found = Priority::ALL.into_iter().find(|class| class.as_str() == text);
    found.ok_or_else(|| CatalogError::invalid("class of a job", text))
}

fn attempts_at(row: &SqliteRow) -> Result<u32, CatalogError> {
    Ok(u32::try_from(row.try_get::<i64, _>("attempts")?).unwrap_or(u32::MAX))
}

fn read_job(row: &SqliteRow) -> Result<JobRecord, CatalogError> {
    let (tenant, status): (String, String) = (row.try_get("tenant")?, row.try_get("status")?);
    let finished: Option<i64> = row.try_get("finished_unix_milliseconds")?;
    Ok(JobRecord {
        id: JobId(count(row.try_get("id")?)),
        name: row.try_get("name")?,
        tenant: TenantId::new(&tenant),
        route: row.try_get("route")?,
        model: row.try_get("model")?,
        digest: digest_at(row, "digest")?,
        class: class_at(row)?,
        status: JobStatus::parse(&status).ok_or_else(|| CatalogError::invalid("status of a job", status))?,
        attempts: attempts_at(row)?,
        fingerprint: row.try_get("fingerprint")?,
        created_unix_milliseconds: count(row.try_get("created_unix_milliseconds")?),
        expires_unix_milliseconds: count(row.try_get("expires_unix_milliseconds")?),
        finished_unix_milliseconds: finished.map(count),
        answer: None,
    })
}

fn read_answer(row: &SqliteRow) -> Result<Option<JobAnswer>, CatalogError> {
    let (http_status, body): (Option<i64>, Option<Vec<u8>>) = (row.try_get("http_status")?, row.try_get("answer")?);
    let (Some(http_status), Some(body)) = (http_status, body) else { return Ok(None) };
    let digest: Option<String> = row.try_get("answer_digest")?;
    let digest = digest.map(|text| Digest::parse(&text)).transpose();
    let start: Option<String> = row.try_get("answer_start")?;
    let start =
        start.and_then(|text| [StartKind::Warm, StartKind::Cold].into_iter().find(|kind| kind.as_str() == text));
    Ok(Some(JobAnswer {
        http_status: u16::try_from(http_status).map_err(|error| CatalogError::invalid("HTTP status", error))?,
        digest: digest.map_err(|error| CatalogError::invalid("digest", error))?,
        start,
        body,
    }))
}
