//! What happened: a bounded journal.

use crate::{
    catalog::{Catalog, count, unix_milliseconds},
    error::CatalogError,
    models::{json_at, to_json},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};
use warmset_core::{Digest, ModelName};

/// Events that are kept; the oldest go first.
pub const EVENTS_MAX: u64 = 10_000;
/// What people decided is kept apart from what merely happened, up to as many: who approved what stays.
const DECISIONS: &str = "('promoted', 'rolled_back')";

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewEvent {
    /// What kind of thing, in lower case with underscores.
    pub kind: String,
    /// The model it happened to.
    pub model: Option<ModelName>,
    /// The digest it happened to.
    pub digest: Option<Digest>,
    /// Everything else.
    pub detail: Value,
}

/// Something that happened, as the catalog holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Grows with every event and is never used twice.
    pub id: u64,
    /// When, in milliseconds since 1970.
    pub unix_milliseconds: u64,
    /// What.
    #[serde(flatten)]
    pub event: NewEvent,
}

impl Catalog {
    /// Writes events in their order, in one step.
    pub async fn append_events(&self, events: &[NewEvent]) -> Result<(), CatalogError> {
        if events.is_empty() {
            return Ok(());
        }
        let mut transaction = self.write().await?;
        append(&mut transaction, events).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// The events after number `after`, oldest first, at most `limit`.
    pub async fn events(&self, after: u64, limit: u64) -> Result<Vec<Event>, CatalogError> {
        let rows = sqlx::query("SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?")
            .bind(i64::try_from(after).unwrap_or(i64::MAX))
            .bind(i64::try_from(limit.min(EVENTS_MAX)).unwrap_or(i64::MAX))
            .fetch_all(&self.pool)
            .await?;
        rows.iter().map(read_event).collect()
    }
}

/// Writes events as part of a larger step.
pub(crate) async fn append(transaction: &mut SqliteConnection, events: &[NewEvent]) -> Result<(), CatalogError> {
    let now = unix_milliseconds();
    for event in events {
        sqlx::query("INSERT INTO events (unix_milliseconds, kind, model, digest, detail) VALUES (?, ?, ?, ?, ?)")
            .bind(now)
            .bind(&event.kind)
            .bind(event.model.as_ref().map(ModelName::as_str))
            .bind(event.digest.map(|digest| digest.to_string()))
            .bind(to_json(&event.detail)?)
            .execute(&mut *transaction)
            .await?;
    }
    let kept = i64::try_from(EVENTS_MAX).unwrap_or(i64::MAX);
    let sql = format!("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ? AND kind NOT IN {DECISIONS}");
    sqlx::query(sqlx::AssertSqlSafe(sql)).bind(kept).execute(&mut *transaction).await?;
    if events.iter().any(|event| DECISIONS.contains(&format!("'{}'", event.kind))) {
        let sql = format!(
            "DELETE FROM events WHERE kind IN {DECISIONS} AND id <=
             (SELECT id FROM events WHERE kind IN {DECISIONS} ORDER BY id DESC LIMIT 1 OFFSET ?)"
        );
        sqlx::query(sqlx::AssertSqlSafe(sql)).bind(kept).execute(&mut *transaction).await?;
    }
    Ok(())
}

pub(crate) fn read_event(row: &SqliteRow) -> Result<Event, CatalogError> {
    let model: Option<String> = row.try_get("model")?;
    let digest: Option<String> = row.try_get("digest")?;
    let model = model.map(|text| ModelName::parse(&text)).transpose();
    let digest = digest.map(|text| Digest::parse(&text)).transpose();
    Ok(Event {
        id: count(row.try_get("id")?),
        unix_milliseconds: count(row.try_get("unix_milliseconds")?),
        event: NewEvent {
            kind: row.try_get("kind")?,
            model: model.map_err(|error| CatalogError::invalid("model name", error))?,
            digest: digest.map_err(|error| CatalogError::invalid("digest", error))?,
            detail: json_at(row, "detail", "event")?,
        },
    })
}
