//! Models: a name, the digest it stands for, and the settings that do not change its output.

use crate::{
    catalog::{Catalog, count, unix_milliseconds},
    error::CatalogError,
    versions,
};
use serde::{Deserialize, Serialize};
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};
use std::collections::BTreeMap;
use warmset_core::{Bytes, Digest, ModelName, PoolName, Priority, gateway::ColdPolicy, targets::Targets};

/// Models one catalog may hold.
pub const MODELS_MAX: u64 = 10_000;

/// How a model is kept and served. What changes its output is in the manifest instead.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSettings {
    /// The implementation that serves it.
    pub engine: String,
    /// The configured runtime that serves it, for the engine `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// Never evicted; loaded at start.
    pub pin: bool,
    /// Class of requests that name none, and protection from lower classes.
    pub priority: Priority,
    /// Requests running at once; none follows `parallel`.
    pub max_concurrency: Option<u32>,
    /// How many of those only critical requests may use.
    pub critical_reserve: u32,
    /// Sequences its engine runs at once.
    pub parallel: u32,
    /// Tokens one sequence may hold; 0 is the model's own limit. Also in the manifest.
    pub context_tokens: u32,
    /// The most host bytes its process may take.
    pub memory_cap_bytes: Option<Bytes>,
    /// What callers get while it is cold.
    pub cold: ColdPolicy,
    /// Which model answers if this one cannot.
    pub fallback: Option<ModelName>,
    /// The part of memory it lives in.
    pub pool: PoolName,
    /// Unloaded after so many seconds without a request.
    pub keep_alive_seconds: Option<f64>,
    /// When it is to be warm whatever its demand, as written in the configuration.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub schedule: Vec<String>,
    /// What its callers were promised.
    #[serde(skip_serializing_if = "Targets::is_empty")]
    pub slo: Targets,
    /// Accelerators it needs; 0 runs on the processor.
    pub accelerators: u32,
    /// Size and time of the source when it was taken, to see whether it has changed since.
    pub source_stamp: Option<String>,
    /// The source as it will always mean the same files, where the one that was given may come to mean others.
    pub pinned_source: Option<String>,
    /// How long its files took to come from another machine.
    pub fetch_seconds: Option<f64>,
}

impl Default for ModelSettings {
    fn default() -> Self {
        Self {
            engine: "llama".to_owned(),
            runtime: None,
            pin: false,
            priority: Priority::Standard,
            max_concurrency: None,
            critical_reserve: 0,
            parallel: 4,
            context_tokens: 0,
            memory_cap_bytes: None,
            cold: ColdPolicy::Wait,
            fallback: None,
            pool: PoolName::default_pool(),
            keep_alive_seconds: None,
            schedule: Vec::new(),
            slo: Targets::default(),
            accelerators: 0,
            source_stamp: None,
            pinned_source: None,
            fetch_seconds: None,
        }
    }
}

impl ModelSettings {
    /// The settings of a name that comes to stand for another version: how that is loaded follows the version, how it
    /// is served stays with the name.
    pub fn with_version(&self, version: &Self) -> Self {
        Self {
            engine: version.engine.clone(),
            runtime: version.runtime.clone(),
            parallel: version.parallel,
            context_tokens: version.context_tokens,
            memory_cap_bytes: version.memory_cap_bytes,
            accelerators: version.accelerators,
            source_stamp: version.source_stamp.clone(),
            pinned_source: version.pinned_source.clone(),
            fetch_seconds: version.fetch_seconds,
            ..self.clone()
        }
    }
}

/// A model to add.
#[derive(Debug, Clone, PartialEq)]
pub struct NewModel {
    /// Its name.
    pub name: ModelName,
    /// Its identity.
    pub digest: Digest,
    /// The canonical JSON that the digest is taken of.
    pub manifest: String,
    /// Where it came from, as the user wrote it.
    pub source: String,
    /// How it is kept.
    pub settings: ModelSettings,
}

/// A model as the catalog holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its name.
    pub name: ModelName,
    /// Its identity.
    pub digest: Digest,
    /// The canonical JSON that the digest is taken of.
    pub manifest: String,
    /// Where it came from, as the user wrote it.
    pub source: String,
    /// How it is kept.
    pub settings: ModelSettings,
    /// Other names that mean it, in alphabetical order.
    pub aliases: Vec<ModelName>,
    /// When it was added, in milliseconds since 1970.
    pub created_unix_milliseconds: u64,
    /// When its settings last changed.
    pub updated_unix_milliseconds: u64,
}

const SELECT: &str = "SELECT name, models.digest AS digest, manifest, source, settings,
    models.created_unix_milliseconds AS created, updated_unix_milliseconds AS updated
    FROM models JOIN digests ON digests.digest = models.digest";

impl Catalog {
    /// Adds a model with its first version, approved by whoever adds it. Its name must be free and its digest new.
    pub async fn add_model(&self, new: &NewModel, by: &str) -> Result<(), CatalogError> {
        let settings = to_json(&new.settings)?;
        let mut transaction = self.write().await?;
        ensure_free(&mut transaction, &new.name).await?;
        let row = sqlx::query("SELECT count(*) FROM models").fetch_one(&mut *transaction).await?;
        if count(row.try_get(0)?) >= MODELS_MAX {
            return Err(CatalogError::Full { what: "models", limit: MODELS_MAX });
        }
        let now = unix_milliseconds();
        versions::insert(&mut transaction, new, Some(by)).await?;
        sqlx::query(
            "INSERT INTO models (name, digest, source, settings, created_unix_milliseconds, updated_unix_milliseconds)
             VALUES (?, ?, ?, ?, ?, ?)",
        )
        .bind(new.name.as_str())
        .bind(new.digest.to_string())
        .bind(&new.source)
        .bind(settings)
        .bind(now)
        .bind(now)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Removes a model with its versions and aliases and returns what it was. Its measurements stay, should it come back.
    pub async fn remove_model(&self, name: &ModelName) -> Result<Model, CatalogError> {
        let model = self.model(name).await?;
        match self.delete_model(name).await {
            Err(error) if self.has_room_for_removal(&error) => self.delete_model(name).await?,
            done => done?,
        }
        Ok(model)
    }

    async fn delete_model(&self, name: &ModelName) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let digests: Vec<String> = sqlx::query_scalar("DELETE FROM versions WHERE model = ? RETURNING digest")
            .bind(name.as_str())
            .fetch_all(&mut *transaction)
            .await?;
        let removed = sqlx::query("DELETE FROM models WHERE name = ?")
            .bind(name.as_str())
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        if removed == 0 {
            return Err(CatalogError::UnknownModel(name.clone()));
        }
        for digest in digests {
            sqlx::query("DELETE FROM digests WHERE digest = ?").bind(digest).execute(&mut *transaction).await?;
        }
        transaction.commit().await
    }

    /// The model with this name. Aliases are not looked at: see [`Catalog::resolve`].
    pub async fn model(&self, name: &ModelName) -> Result<Model, CatalogError> {
        let sql = sqlx::AssertSqlSafe(format!("{SELECT} WHERE name = ?"));
        let row = sqlx::query(sql).bind(name.as_str()).fetch_optional(&self.pool).await?;
        let row = row.ok_or_else(|| CatalogError::UnknownModel(name.clone()))?;
        let mut model = read_model(&row)?;
        model.aliases = self.aliases_of(name).await?;
        Ok(model)
    }

    /// All models in alphabetical order.
    pub async fn models(&self) -> Result<Vec<Model>, CatalogError> {
        let mut aliases: BTreeMap<ModelName, Vec<ModelName>> = BTreeMap::new();
        for (alias, model) in self.aliases().await? {
            aliases.entry(model).or_default().push(alias);
        }
        let sql = sqlx::AssertSqlSafe(format!("{SELECT} ORDER BY name"));
        let rows = sqlx::query(sql).fetch_all(&self.pool).await?;
        rows.iter()
            .map(|row| {
                let mut model = read_model(row)?;
                model.aliases = aliases.remove(&model.name).unwrap_or_default();
                Ok(model)
            })
            .collect()
    }

    /// Replaces the settings of a model.
    pub async fn set_settings(&self, name: &ModelName, settings: &ModelSettings) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let changed = sqlx::query("UPDATE models SET settings = ?, updated_unix_milliseconds = ? WHERE name = ?")
            .bind(to_json(settings)?)
            .bind(unix_milliseconds())
            .bind(name.as_str())
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        if changed == 0 {
            return Err(CatalogError::UnknownModel(name.clone()));
        }
        transaction.commit().await?;
        Ok(())
    }
}

/// Whether neither a model nor an alias has this name.
pub(crate) async fn ensure_free(transaction: &mut SqliteConnection, name: &ModelName) -> Result<(), CatalogError> {
    let taken = sqlx::query("SELECT 1 FROM models WHERE name = ?1 UNION ALL SELECT 1 FROM aliases WHERE alias = ?1")
        .bind(name.as_str())
        .fetch_optional(&mut *transaction)
        .await?;
    if taken.is_some() { Err(CatalogError::NameTaken(name.clone())) } else { Ok(()) }
}

/// A model name in a column.
pub(crate) fn name_at(row: &SqliteRow, column: &str) -> Result<ModelName, CatalogError> {
    let text: String = row.try_get(column)?;
    ModelName::parse(&text).map_err(|error| CatalogError::invalid("model name", error))
}

/// A digest in a column.
pub(crate) fn digest_at(row: &SqliteRow, column: &str) -> Result<Digest, CatalogError> {
    let text: String = row.try_get(column)?;
    Digest::parse(&text).map_err(|error| CatalogError::invalid("digest", error))
}

/// JSON in a column.
pub(crate) fn json_at<T: serde::de::DeserializeOwned>(
    row: &SqliteRow,
    column: &str,
    what: &'static str,
) -> Result<T, CatalogError> {
    let text: String = row.try_get(column)?;
    serde_json::from_str(&text).map_err(|error| CatalogError::invalid(what, error))
}

/// JSON for a column.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String, CatalogError> {
    serde_json::to_string(value).map_err(|error| CatalogError::invalid("value", error))
}

fn read_model(row: &SqliteRow) -> Result<Model, CatalogError> {
    Ok(Model {
        name: name_at(row, "name")?,
        digest: digest_at(row, "digest")?,
        manifest: row.try_get("manifest")?,
        source: row.try_get("source")?,
        settings: json_at(row, "settings", "settings of a model")?,
        aliases: Vec::new(),
        created_unix_milliseconds: count(row.try_get("created")?),
        updated_unix_milliseconds: count(row.try_get("updated")?),
    })
}
