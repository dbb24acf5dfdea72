//! What loading and running a model takes, as measured, for each kind of machine.

use crate::{
    catalog::{Catalog, count, unix_milliseconds},
    error::CatalogError,
    models::{digest_at, json_at, to_json},
};
use serde::{Deserialize, Serialize};
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};
use warmset_core::{Digest, Footprint, worker::LoadTimings};

/// Pairs of digest and worker type that are kept; the one measured longest ago goes first.
pub const MEASUREMENTS_MAX: u64 = 20_000;
/// Weight of a new measurement against those before it.
const NEW_WEIGHT: f64 = 0.4;

/// Measured figures of one digest on one kind of machine. Rates are there once somebody measured them.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measurement {
    /// Seconds of each step from cold to ready.
    pub timings: LoadTimings,
    /// Bytes while loading: the most ever seen.
    pub peak: Footprint,
    /// Bytes once loaded: as last seen.
    pub steady: Footprint,
    /// By how many seconds the first request is slower than the following ones.
    pub first_request_penalty_seconds: Option<f64>,
    /// Prompt tokens computed per second.
    pub prefill_tokens_per_second: Option<f64>,
    /// Tokens generated per second by one request alone.
    pub decode_tokens_per_second: Option<f64>,
    /// KV bytes that one token takes.
    pub kv_bytes_per_token: Option<u64>,
    /// When it was last measured, in milliseconds since 1970. Set by the catalog.
    pub measured_unix_milliseconds: u64,
    /// Measurements that went into it. Set by the catalog.
    pub samples: u64,
}

impl Measurement {
    /// These figures after another measurement. Bytes at the peak only grow: a load must never surprise the budget.
    fn followed_by(&self, new: &Self) -> Self {
        let blend = |old: f64, new: f64| old + NEW_WEIGHT * (new - old);
        let blend_optional = |old: Option<f64>, new: Option<f64>| match (old, new) {
            (Some(old), Some(new)) => Some(blend(old, new)),
            (old, new) => new.or(old),
        };
        Self {
            timings: LoadTimings {
                fetch_seconds: blend(self.timings.fetch_seconds, new.timings.fetch_seconds),
                verify_seconds: blend(self.timings.verify_seconds, new.timings.verify_seconds),
                load_seconds: blend(self.timings.load_seconds, new.timings.load_seconds),
                warm_up_seconds: blend(self.timings.warm_up_seconds, new.timings.warm_up_seconds),
                canary_seconds: new.timings.canary_seconds,
            },
            peak: self.peak.larger(&new.peak),
            steady: new.steady.clone(),
            first_request_penalty_seconds: blend_optional(
                self.first_request_penalty_seconds,
                new.first_request_penalty_seconds,
            ),
            prefill_tokens_per_second: blend_optional(self.prefill_tokens_per_second, new.prefill_tokens_per_second),
            decode_tokens_per_second: blend_optional(self.decode_tokens_per_second, new.decode_tokens_per_second),
            kv_bytes_per_token: new.kv_bytes_per_token.or(self.kv_bytes_per_token),
            measured_unix_milliseconds: 0,
            samples: self.samples + 1,
        }
    }
}

impl Catalog {
    /// Adds a measurement to those of its digest and worker type and returns what is known now.
    pub async fn record_measurement(
        &self,
        digest: &Digest,
        worker_type: &str,
        new: &Measurement,
    ) -> Result<Measurement, CatalogError> {
        let mut transaction = self.write().await?;
        let mut merged = match known(&mut transaction, digest, worker_type).await? {
            Some(known) => known.followed_by(new),
            None => Measurement { samples: 1, ..new.clone() },
        };
        let now = unix_milliseconds();
        merged.measured_unix_milliseconds = count(now);
        sqlx::query(
            "INSERT INTO measurements (digest, worker_type, measured_unix_milliseconds, samples, figures)
             VALUES (?, ?, ?, ?, ?) ON CONFLICT (digest, worker_type) DO UPDATE SET
             measured_unix_milliseconds = excluded.measured_unix_milliseconds, samples = excluded.samples,
             figures = excluded.figures",
        )
        .bind(digest.to_string())
        .bind(worker_type)
        .bind(now)
        .bind(i64::try_from(merged.samples).unwrap_or(i64::MAX))
        .bind(to_json(&merged)?)
        .execute(&mut *transaction)
        .await?;
        sqlx::query(
            "DELETE FROM measurements WHERE rowid IN (SELECT rowid FROM measurements
             ORDER BY measured_unix_milliseconds DESC, rowid DESC LIMIT -1 OFFSET ?)",
        )
        .bind(i64::try_from(MEASUREMENTS_MAX).unwrap_or(i64::MAX))
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(merged)
    }

    /// Notes what a running model holds, more than it did when it was loaded. Without an earlier measurement there is
    /// nothing to correct.
    pub async fn record_growth(
        &self,
        digest: &Digest,
        worker_type: &str,
        steady: &Footprint,
    ) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let Some(mut known) = known(&mut transaction, digest, worker_type).await? else { return Ok(()) };
        known.peak = known.peak.larger(steady);
        known.steady = steady.clone();
        sqlx::query("UPDATE measurements SET figures = ? WHERE digest = ? AND worker_type = ?")
            .bind(to_json(&known)?)
            .bind(digest.to_string())
            .bind(worker_type)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// What is known of a digest on one kind of machine.
    pub async fn measurement(&self, digest: &Digest, worker_type: &str) -> Result<Option<Measurement>, CatalogError> {
        known(&mut *self.pool.acquire().await?, digest, worker_type).await
    }

    /// All measurements with their digest and worker type.
    pub async fn measurements(&self) -> Result<Vec<(Digest, String, Measurement)>, CatalogError> {
        let rows = sqlx::query("SELECT * FROM measurements ORDER BY digest, worker_type").fetch_all(&self.pool).await?;
        rows.iter()
            .map(|row| Ok((digest_at(row, "digest")?, row.try_get("worker_type")?, read_measurement(row)?)))
            .collect()
    }

    /// Drops what is known of a digest: its settings changed in a way that moves its bytes.
    pub async fn forget_measurements(&self, digest: &Digest) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        sqlx::query("DELETE FROM measurements WHERE digest = ?")
            .bind(digest.to_string())
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }
}

async fn known(
    connection: &mut SqliteConnection,
    digest: &Digest,
    worker_type: &str,
) -> Result<Option<Measurement>, CatalogError> {
    let row = sqlx::query("SELECT * FROM measurements WHERE digest = ? AND worker_type = ?")
        .bind(digest.to_string())
        .bind(worker_type)
        .fetch_optional(connection)
        .await?;
    row.map(|row| read_measurement(&row)).transpose()
}

fn read_measurement(row: &SqliteRow) -> Result<Measurement, CatalogError> {
    let figures: Measurement = json_at(row, "figures", "measurement")?;
    Ok(Measurement {
        measured_unix_milliseconds: count(row.try_get("measured_unix_milliseconds")?),
        samples: count(row.try_get("samples")?),
        ..figures
    })
}
