//! What a worker had in memory and how often it was asked for, so that a restart begins where it stopped.

use crate::{
    catalog::{Catalog, count, unix_milliseconds},
    error::CatalogError,
    models::{digest_at, json_at, to_json},
};
use sqlx::Row;
use std::time::Duration;
use warmset_core::{WorkerId, worker::Recollection};

impl Catalog {
    /// Replaces what is remembered of a worker.
    pub async fn remember(&self, worker: WorkerId, models: &[Recollection]) -> Result<(), CatalogError> {
        let now = unix_milliseconds();
        // This is called again and again for as long as a server runs.
        self.keep_room_for_removal();
        let mut transaction = self.write().await?;
        sqlx::query("DELETE FROM warmth WHERE worker = ?").bind(i64::from(worker.0)).execute(&mut *transaction).await?;
        for model in models {
            let age = i64::try_from(model.age.as_millis()).unwrap_or(i64::MAX);
            sqlx::query("INSERT INTO warmth VALUES (?, ?, ?, ?, ?, ?)")
                .bind(i64::from(worker.0))
                .bind(model.digest.to_string())
                .bind(now.saturating_sub(age))
                .bind(model.demand_per_second)
                .bind(model.warm)
                .bind(to_json(&model.forecast)?)
                .execute(&mut *transaction)
                .await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// What is remembered of a worker. A clock that was set back makes nothing older than it is.
    pub async fn recollections(&self, worker: WorkerId) -> Result<Vec<Recollection>, CatalogError> {
        let now = unix_milliseconds();
        let rows = sqlx::query("SELECT * FROM warmth WHERE worker = ? ORDER BY digest")
            .bind(i64::from(worker.0))
            .fetch_all(&self.pool)
            .await?;
        rows.iter()
            .map(|row| {
                let asked: i64 = row.try_get("asked_unix_milliseconds")?;
                Ok(Recollection {
                    digest: digest_at(row, "digest")?,
                    demand_per_second: row.try_get("demand_per_second")?,
                    age: Duration::from_millis(count(now.saturating_sub(asked))),
                    warm: row.try_get("warm")?,
                    // What an earlier version wrote in another form is learned again.
                    forecast: json_at(row, "forecast", "forecast of a model").unwrap_or_default(),
                })
            })
            .collect()
    }
}
