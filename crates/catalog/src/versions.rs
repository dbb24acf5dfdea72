//! Versions of a model: the digests its name stood for, stands for, or may come to stand for.
//!
//! The current version's source and settings are those of the model; what is kept beside it is how each version is
//! loaded, who let it answer callers, and which version it replaced. The name changes its meaning in one transaction,
//! together with the event that says so.

use crate::{
    Event, NewEvent,
    catalog::{Catalog, count, unix_milliseconds},
    error::CatalogError,
    events::append,
    models::{Model, ModelSettings, NewModel, digest_at, json_at, name_at, to_json},
};
use serde::{Deserialize, Serialize};
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};
use std::collections::{BTreeMap, BTreeSet};
use warmset_core::{Digest, ModelName, rollout::Canary};

/// Versions one model may have.
pub const VERSIONS_MAX: u64 = 16;

/// Who let a version answer callers, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Approval {
    /// A person or a program, as it called itself.
    pub by: String,
    /// In milliseconds since 1970.
    pub unix_milliseconds: u64,
}

/// One version of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Version {
    /// Its identity.
    pub digest: Digest,
    /// The model it is a version of.
    pub model: ModelName,
    /// The canonical JSON that the digest is taken of.
    pub manifest: String,
    /// Where it came from.
    pub source: String,
    /// The settings that say how it is loaded count; see [`ModelSettings::with_version`].
    pub settings: ModelSettings,
    /// In milliseconds since 1970.
    pub added_unix_milliseconds: u64,
    /// None for one that no caller has ever been given to.
    pub approval: Option<Approval>,
    /// What the name stood for before it.
    pub replaced: Option<Digest>,
    /// What it must answer after a load before callers get it.
    pub canary: Option<Canary>,
}

/// A name that comes to stand for another of its versions.
#[derive(Debug, Clone, PartialEq)]
pub struct Switch {
    /// The name.
    pub model: ModelName,
    /// What it must stand for now, or nothing is changed.
    pub from: Digest,
    /// What it will stand for.
    pub to: Digest,
    /// Who says so.
    pub by: String,
    /// It goes back to what was replaced: that stays the version before the version it had replaced itself.
    pub back: bool,
    /// What is said of it beside names, digests and who.
    pub detail: serde_json::Value,
}

const SELECT: &str = "SELECT versions.*, manifest FROM versions JOIN digests ON digests.digest = versions.digest";

impl Catalog {
    /// Adds a version that nobody gets before it is approved.
    pub async fn add_version(&self, new: &NewModel) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let known = sqlx::query("SELECT 1 FROM models WHERE name = ?")
            .bind(new.name.as_str())
            .fetch_optional(&mut *transaction)
            .await?;
        if known.is_none() {
            return Err(CatalogError::UnknownModel(new.name.clone()));
        }
        let row = sqlx::query("SELECT count(*) FROM versions WHERE model = ?")
            .bind(new.name.as_str())
            .fetch_one(&mut *transaction)
            .await?;
        if count(row.try_get(0)?) >= VERSIONS_MAX {
            return Err(CatalogError::TooManyVersions { name: new.name.clone(), limit: VERSIONS_MAX });
        }
        insert(&mut transaction, new, None).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// All versions of a model, oldest first.
    pub async fn versions(&self, model: &ModelName) -> Result<Vec<Version>, CatalogError> {
        let sql =
            sqlx::AssertSqlSafe(format!("{SELECT} WHERE model = ? ORDER BY added_unix_milliseconds, versions.rowid"));
        let rows = sqlx::query(sql).bind(model.as_str()).fetch_all(&self.pool).await?;
        rows.iter().map(read_version).collect()
    }

    /// Of all versions of all models.
    pub async fn digests(&self) -> Result<BTreeSet<Digest>, CatalogError> {
        let rows = sqlx::query("SELECT digest FROM versions").fetch_all(&self.pool).await?;
        rows.iter().map(|row| digest_at(row, "digest")).collect()
    }

    /// The version with this digest, whichever model it belongs to.
    pub async fn version(&self, digest: &Digest) -> Result<Option<Version>, CatalogError> {
        let sql = sqlx::AssertSqlSafe(format!("{SELECT} WHERE versions.digest = ?"));
        let row = sqlx::query(sql).bind(digest.to_string()).fetch_optional(&self.pool).await?;
        row.as_ref().map(read_version).transpose()
    }

    /// What is asked of the versions of which something is.
    pub async fn canaries(&self) -> Result<BTreeMap<Digest, Canary>, CatalogError> {
        let rows =
            sqlx::query("SELECT digest, canary FROM versions WHERE canary IS NOT NULL").fetch_all(&self.pool).await?;
        rows.iter().map(|row| Ok((digest_at(row, "digest")?, json_at(row, "canary", "canary of a version")?))).collect()
    }

    /// What every version of every model consists of.
    pub async fn manifests(&self) -> Result<Vec<String>, CatalogError> {
        Ok(sqlx::query_scalar("SELECT manifest FROM digests ORDER BY digest").fetch_all(&self.pool).await?)
    }

    /// What each version of each model consists of, in the order of names.
    pub async fn version_manifests(&self) -> Result<Vec<(ModelName, String)>, CatalogError> {
        let sql = "SELECT model, manifest FROM versions JOIN digests USING (digest) ORDER BY model, digest";
        let rows = sqlx::query(sql).fetch_all(&self.pool).await?;
        rows.iter().map(|row| Ok((name_at(row, "model")?, row.try_get("manifest")?))).collect()
    }

    /// Keeps what a version must answer, or that nothing is asked of it.
    pub async fn set_canary(&self, digest: &Digest, canary: Option<&Canary>) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let changed = sqlx::query("UPDATE versions SET canary = ? WHERE digest = ?")
            .bind(canary.map(to_json).transpose()?)
            .bind(digest.to_string())
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        if changed == 0 {
            return Err(CatalogError::UnknownVersion(*digest));
        }
        transaction.commit().await?;
        Ok(())
    }

    /// Lets a name stand for another of its versions, with the event that says so, in one step.
    pub async fn switch(&self, switch: &Switch) -> Result<Model, CatalogError> {
        let before = self.model(&switch.model).await?;
        if before.digest != switch.from {
            return Err(CatalogError::Moved { name: switch.model.clone(), to: before.digest });
        }
        let next = self.version(&switch.to).await?.filter(|version| version.model == switch.model);
        let next = next.ok_or(CatalogError::UnknownVersion(switch.to))?;
        let settings = before.settings.with_version(&next.settings);
        let now = unix_milliseconds();
        let (from, to) = (switch.from.to_string(), switch.to.to_string());
        let mut transaction = self.write().await?;
        // What the old one was loaded with is kept for the day it comes back.
        sqlx::query("UPDATE versions SET source = ?, settings = ? WHERE digest = ?")
            .bind(&before.source)
            .bind(to_json(&before.settings)?)
            .bind(&from)
            .execute(&mut *transaction)
            .await?;
        sqlx::query("UPDATE versions SET approved_unix_milliseconds = ?, approved_by = ? WHERE digest = ?")
            .bind(now)
            .bind(&switch.by)
            .bind(&to)
            .execute(&mut *transaction)
            .await?;
        if !switch.back {
            sqlx::query("UPDATE versions SET replaced = ? WHERE digest = ?")
                .bind(&from)
                .bind(&to)
                .execute(&mut *transaction)
                .await?;
        }
        let changed = sqlx::query(
            "UPDATE models SET digest = ?, source = ?, settings = ?, updated_unix_milliseconds = ?
             WHERE name = ? AND digest = ?",
        )
        .bind(&to)
        .bind(&next.source)
        .bind(to_json(&settings)?)
        .bind(now)
        .bind(switch.model.as_str())
        .bind(&from)
        .execute(&mut *transaction)
        .await?
        .rows_affected();
        if changed == 0 {
            return Err(CatalogError::UnknownModel(switch.model.clone()));
        }
        append(&mut transaction, &[switched(switch)]).await?;
        transaction.commit().await?;
        self.model(&switch.model).await
    }

    /// Removes a version that its name does not stand for.
    pub async fn remove_version(&self, model: &ModelName, digest: &Digest) -> Result<Version, CatalogError> {
        let version = self.version(digest).await?.filter(|version| version.model == *model);
        let version = version.ok_or(CatalogError::UnknownVersion(*digest))?;
        if self.model(model).await?.digest == *digest {
            return Err(CatalogError::VersionInUse { name: model.clone(), digest: *digest });
        }
        match self.delete_version(digest).await {
            Err(error) if self.has_room_for_removal(&error) => self.delete_version(digest).await?,
            done => done?,
        }
        Ok(version)
    }

    async fn delete_version(&self, digest: &Digest) -> Result<(), CatalogError> {
        let text = digest.to_string();
        let mut transaction = self.write().await?;
        for statement in [
            "UPDATE versions SET replaced = (SELECT replaced FROM versions WHERE digest = ?1) WHERE replaced = ?1",
            "DELETE FROM versions WHERE digest = ?1",
            "DELETE FROM digests WHERE digest = ?1",
        ] {
            sqlx::query(statement).bind(&text).execute(&mut *transaction).await?;
        }
        transaction.commit().await
    }

    /// The newest events of these kinds for a model, newest first, at most `limit`.
    pub async fn events_of(&self, model: &ModelName, kinds: &[&str], limit: u64) -> Result<Vec<Event>, CatalogError> {
        let rows = sqlx::query(
            "SELECT * FROM events WHERE model = ?1 AND kind IN (SELECT value FROM json_each(?2)) ORDER BY id DESC LIMIT ?3",
        )
        .bind(model.as_str())
        .bind(to_json(&kinds)?)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(&self.pool)
        .await?;
        rows.iter().map(crate::events::read_event).collect()
    }
}

/// What is told of a switch.
fn switched(switch: &Switch) -> NewEvent {
    let mut detail = switch.detail.clone();
    if !detail.is_object() {
        detail = serde_json::json!({});
    }
    detail["by"] = switch.by.clone().into();
    detail["from"] = switch.from.to_string().into();
    NewEvent {
        kind: if switch.back { "rolled_back" } else { "promoted" }.to_owned(),
        model: Some(switch.model.clone()),
        digest: Some(switch.to),
        detail,
    }
}

/// Writes a digest and its version.
pub(crate) async fn insert(
    transaction: &mut SqliteConnection,
    new: &NewModel,
    approved_by: Option<&str>,
) -> Result<(), CatalogError> {
    let digest = new.digest.to_string();
    let taken = sqlx::query("SELECT model FROM versions WHERE digest = ?")
        .bind(&digest)
        .fetch_optional(&mut *transaction)
        .await?;
    if let Some(row) = taken {
        return Err(CatalogError::DigestTaken { digest: new.digest, name: name_at(&row, "model")? });
    }
    let now = unix_milliseconds();
    sqlx::query("INSERT INTO digests (digest, manifest, created_unix_milliseconds) VALUES (?, ?, ?)")
        .bind(&digest)
        .bind(&new.manifest)
        .bind(now)
        .execute(&mut *transaction)
        .await?;
    sqlx::query(
        "INSERT INTO versions (digest, model, source, settings, added_unix_milliseconds,
         approved_unix_milliseconds, approved_by) VALUES (?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(&digest)
    .bind(new.name.as_str())
    .bind(&new.source)
    .bind(to_json(&new.settings)?)
    .bind(now)
    .bind(approved_by.map(|_| now))
    .bind(approved_by)
    .execute(&mut *transaction)
    .await?;
    Ok(())
}

fn read_version(row: &SqliteRow) -> Result<Version, CatalogError> {
    let approved: Option<i64> = row.try_get("approved_unix_milliseconds")?;
    let by: Option<String> = row.try_get("approved_by")?;
    let replaced: Option<String> = row.try_get("replaced")?;
    let replaced = replaced.map(|text| Digest::parse(&text)).transpose();
    let canary: Option<String> = row.try_get("canary")?;
    Ok(Version {
        digest: digest_at(row, "digest")?,
        model: name_at(row, "model")?,
        manifest: row.try_get("manifest")?,
        source: row.try_get("source")?,
        settings: json_at(row, "settings", "settings of a version")?,
        added_unix_milliseconds: count(row.try_get("added_unix_milliseconds")?),
        approval: by.zip(approved).map(|(by, at)| Approval { by, unix_milliseconds: count(at) }),
        replaced: replaced.map_err(|error| CatalogError::invalid("digest", error))?,
        canary: match canary {
            Some(_) => Some(json_at(row, "canary", "canary of a version")?),
            None => None,
        },
    })
}
