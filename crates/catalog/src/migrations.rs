//! The schema, as numbered steps that are never changed once shipped.

use crate::error::CatalogError;
use sqlx::{Connection, Row, SqliteConnection};
use std::path::Path;

/// Step `i` leads from version `i` to version `i + 1`.
const MIGRATIONS: &[&str] = &[
    "
CREATE TABLE digests (
    digest TEXT NOT NULL PRIMARY KEY,
    manifest TEXT NOT NULL,
    created_unix_milliseconds INTEGER NOT NULL
) STRICT;
CREATE TABLE models (
    name TEXT NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE REFERENCES digests (digest),
    source TEXT NOT NULL,
    settings TEXT NOT NULL,
    created_unix_milliseconds INTEGER NOT NULL,
    updated_unix_milliseconds INTEGER NOT NULL
) STRICT;
CREATE TABLE aliases (
    alias TEXT NOT NULL PRIMARY KEY,
    model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE
) STRICT;
CREATE INDEX aliases_by_model ON aliases (model);
CREATE TABLE measurements (
    digest TEXT NOT NULL,
    worker_type TEXT NOT NULL,
    measured_unix_milliseconds INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    figures TEXT NOT NULL,
    PRIMARY KEY (digest, worker_type)
) STRICT;
CREATE TABLE events (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    unix_milliseconds INTEGER NOT NULL,
    kind TEXT NOT NULL,
    model TEXT,
    digest TEXT,
    detail TEXT NOT NULL
) STRICT;
",
    "
CREATE TABLE warmth (
    worker INTEGER NOT NULL,
    digest TEXT NOT NULL,
    asked_unix_milliseconds INTEGER NOT NULL,
    demand_per_second REAL NOT NULL,
    warm INTEGER NOT NULL,
    PRIMARY KEY (worker, digest)
) STRICT;
",
    "
ALTER TABLE warmth ADD COLUMN forecast TEXT NOT NULL DEFAULT '{}';
",
    "
CREATE TABLE versions (
    digest TEXT NOT NULL PRIMARY KEY REFERENCES digests (digest),
    model TEXT NOT NULL REFERENCES models (name) DEFERRABLE INITIALLY DEFERRED,
    source TEXT NOT NULL,
    settings TEXT NOT NULL,
    added_unix_milliseconds INTEGER NOT NULL,
    approved_unix_milliseconds INTEGER,
    approved_by TEXT,
    replaced TEXT,
    canary TEXT
) STRICT;
CREATE INDEX versions_by_model ON versions (model);
CREATE INDEX events_by_model ON events (model, id);
INSERT INTO versions (digest, model, source, settings, added_unix_milliseconds, approved_unix_milliseconds, approved_by)
SELECT digest, name, source, settings, created_unix_milliseconds, created_unix_milliseconds, 'before versions'
FROM models;
",
    "
CREATE TABLE jobs (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    route TEXT NOT NULL,
    model TEXT NOT NULL,
    digest TEXT NOT NULL,
    class TEXT NOT NULL,
    status TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    idempotency_key TEXT,
    fingerprint TEXT NOT NULL,
    created_unix_milliseconds INTEGER NOT NULL,
    time_to_live_milliseconds INTEGER NOT NULL,
    expires_unix_milliseconds INTEGER NOT NULL,
    finished_unix_milliseconds INTEGER,
    body BLOB NOT NULL,
    http_status INTEGER,
    answer_digest TEXT,
    answer_start TEXT,
    answer BLOB
) STRICT;
CREATE UNIQUE INDEX jobs_by_key ON jobs (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_unfinished ON jobs (id) WHERE finished_unix_milliseconds IS NULL;
CREATE INDEX jobs_finished ON jobs (expires_unix_milliseconds) WHERE finished_unix_milliseconds IS NOT NULL;
",
    "
CREATE TABLE files (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    size_bytes INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT;
CREATE TABLE batches (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    finished INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT;
CREATE INDEX batches_unfinished ON batches (id) WHERE finished = 0;
",
];

/// The version this program reads and writes.
pub const SCHEMA_VERSION: u64 = MIGRATIONS.len() as u64;

/// Brings a database to [`SCHEMA_VERSION`]. Each step is one transaction: a kill in between leaves a whole version.
pub(crate) async fn migrate(connection: &mut SqliteConnection, path: &Path) -> Result<(), CatalogError> {
    sqlx::query("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL) STRICT")
        .execute(&mut *connection)
        .await?;
    let found = version(connection).await?;
    if found > SCHEMA_VERSION {
        return Err(CatalogError::NewerSchema { path: path.to_path_buf(), found, known: SCHEMA_VERSION });
    }
    let done = usize::try_from(found).unwrap_or(usize::MAX);
    for (step, sql) in MIGRATIONS.iter().enumerate().skip(done) {
        let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::raw_sql(*sql).execute(&mut *transaction).await?;
        sqlx::query("DELETE FROM schema_version").execute(&mut *transaction).await?;
        let next = i64::try_from(step + 1).unwrap_or(i64::MAX);
        sqlx::query("INSERT INTO schema_version (version) VALUES (?)").bind(next).execute(&mut *transaction).await?;
        transaction.commit().await?;
    }
    Ok(())
}

async fn version(connection: &mut SqliteConnection) -> Result<u64, CatalogError> {
    let row = sqlx::query("SELECT max(version) FROM schema_version").fetch_one(connection).await?;
    let version: Option<i64> = row.try_get(0)?;
    u64::try_from(version.unwrap_or(0)).map_err(|error| CatalogError::invalid("schema version", error))
}
