//! Files that callers handed in, and batches of the requests in them. Contents lie beside the catalog.

use crate::{
    catalog::{Catalog, count},
    error::CatalogError,
    models::{json_at, to_json},
};
use serde::de::DeserializeOwned;
use sqlx::Row;
use warmset_core::jobs::{BatchRecord, FileRecord};

/// Files that are kept, and their bytes.
pub const FILES_MAX: u64 = 10_000;
/// The bytes of all of them.
pub const FILES_BYTES_MAX: u64 = 16 << 30;
/// Batches that are kept.
pub const BATCHES_MAX: u64 = 10_000;

impl Catalog {
    /// Keeps a file's record; one that is there stays as it is. What a batch made is kept even if there is no room for
    /// files that callers hand in.
    pub async fn add_file(&self, file: &FileRecord, made_here: bool) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let row = sqlx::query("SELECT count(*) AS files, coalesce(sum(size_bytes), 0) AS bytes FROM files")
            .fetch_one(&mut *transaction)
            .await?;
        let (files, bytes) = (count(row.try_get("files")?), count(row.try_get("bytes")?));
        if !made_here && files >= FILES_MAX {
            return Err(CatalogError::Full { what: "files", limit: FILES_MAX });
        }
        if !made_here && bytes.saturating_add(file.size_bytes) > FILES_BYTES_MAX {
            return Err(CatalogError::Full { what: "bytes of files", limit: FILES_BYTES_MAX });
        }
        sqlx::query("INSERT INTO files (name, size_bytes, record) VALUES (?, ?, ?) ON CONFLICT DO NOTHING")
            .bind(&file.name)
            .bind(i64::try_from(file.size_bytes).unwrap_or(i64::MAX))
            .bind(to_json(file)?)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The file with this name.
    pub async fn file(&self, name: &str) -> Result<Option<FileRecord>, CatalogError> {
        self.record("SELECT record FROM files WHERE name = ?", name).await
    }

    /// All files, the newest first.
    pub async fn files(&self) -> Result<Vec<FileRecord>, CatalogError> {
        self.records("SELECT record FROM files ORDER BY id DESC").await
    }

    /// Forgets a file; false if there is none.
    pub async fn remove_file(&self, name: &str) -> Result<bool, CatalogError> {
        let removed = sqlx::query("DELETE FROM files WHERE name = ?").bind(name).execute(&self.pool).await?;
        Ok(removed.rows_affected() > 0)
    }

    /// Keeps a batch. At the limit the oldest one that has ended makes room.
    pub async fn add_batch(&self, batch: &BatchRecord) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let row = sqlx::query("SELECT count(*) FROM batches").fetch_one(&mut *transaction).await?;
        if count(row.try_get(0)?) >= BATCHES_MAX {
            let oldest = "DELETE FROM batches WHERE id = (SELECT min(id) FROM batches WHERE finished = 1)";
            if sqlx::query(oldest).execute(&mut *transaction).await?.rows_affected() == 0 {
                return Err(CatalogError::Full { what: "batches", limit: BATCHES_MAX });
            }
        }
        sqlx::query("INSERT INTO batches (name, finished, record) VALUES (?, ?, ?)")
            .bind(&batch.name)
            .bind(batch.status.is_final())
            .bind(to_json(batch)?)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Replaces what is kept of a batch.
    pub async fn set_batch(&self, batch: &BatchRecord) -> Result<(), CatalogError> {
        sqlx::query("UPDATE batches SET finished = ?, record = ? WHERE name = ?")
            .bind(batch.status.is_final())
            .bind(to_json(batch)?)
            .bind(&batch.name)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// The batch with this name.
    pub async fn batch(&self, name: &str) -> Result<Option<BatchRecord>, CatalogError> {
        self.record("SELECT record FROM batches WHERE name = ?", name).await
    }

    /// All batches, the newest first.
    pub async fn batches(&self) -> Result<Vec<BatchRecord>, CatalogError> {
        self.records("SELECT record FROM batches ORDER BY id DESC").await
    }

    /// Batches that have not ended, the oldest first.
    pub async fn unfinished_batches(&self) -> Result<Vec<BatchRecord>, CatalogError> {
        self.records("SELECT record FROM batches WHERE finished = 0 ORDER BY id").await
    }

    async fn record<T: DeserializeOwned>(&self, sql: &'static str, name: &str) -> Result<Option<T>, CatalogError> {
        let row = sqlx::query(sql).bind(name).fetch_optional(&self.pool).await?;
        row.map(|row| json_at(&row, "record", "file or batch")).transpose()
    }

    async fn records<T: DeserializeOwned>(&self, sql: &'static str) -> Result<Vec<T>, CatalogError> {
        let rows = sqlx::query(sql).fetch_all(&self.pool).await?;
        rows.iter().map(|row| json_at(row, "record", "file or batch")).collect()
    }
}
