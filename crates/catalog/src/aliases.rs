//! Aliases: further names for a model.

use crate::{
    catalog::{Catalog, count},
    error::CatalogError,
    models::{Model, ensure_free, name_at},
};
use sqlx::Row;
use warmset_core::ModelName;

/// Aliases one catalog may hold.
pub const ALIASES_MAX: u64 = 10_000;

impl Catalog {
    /// Lets `alias` mean `model`, which must be a model's own name. An alias of another model gives way in the same
    /// step if it is to be replaced.
    pub async fn add_alias(&self, alias: &ModelName, model: &ModelName, replace: bool) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        if replace {
            sqlx::query("DELETE FROM aliases WHERE alias = ?").bind(alias.as_str()).execute(&mut *transaction).await?;
        }
        ensure_free(&mut transaction, alias).await?;
        let known = sqlx::query("SELECT 1 FROM models WHERE name = ?")
            .bind(model.as_str())
            .fetch_optional(&mut *transaction)
            .await?;
        if known.is_none() {
            return Err(CatalogError::UnknownModel(model.clone()));
        }
        let row = sqlx::query("SELECT count(*) FROM aliases").fetch_one(&mut *transaction).await?;
        if count(row.try_get(0)?) >= ALIASES_MAX {
            return Err(CatalogError::Full { what: "aliases", limit: ALIASES_MAX });
        }
        sqlx::query("INSERT INTO aliases (alias, model) VALUES (?, ?)")
            .bind(alias.as_str())
            .bind(model.as_str())
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Takes an alias away.
    pub async fn remove_alias(&self, alias: &ModelName) -> Result<(), CatalogError> {
        let mut transaction = self.write().await?;
        let removed = sqlx::query("DELETE FROM aliases WHERE alias = ?")
            .bind(alias.as_str())
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        if removed == 0 {
            return Err(CatalogError::UnknownModel(alias.clone()));
        }
        transaction.commit().await?;
        Ok(())
    }

    /// All aliases with the models they mean, in alphabetical order.
    pub async fn aliases(&self) -> Result<Vec<(ModelName, ModelName)>, CatalogError> {
        let rows = sqlx::query("SELECT alias, model FROM aliases ORDER BY alias").fetch_all(&self.pool).await?;
        rows.iter().map(|row| Ok((name_at(row, "alias")?, name_at(row, "model")?))).collect()
    }

    /// The model that a name or an alias means.
    pub async fn resolve(&self, name: &ModelName) -> Result<Model, CatalogError> {
        let row = sqlx::query("SELECT model FROM aliases WHERE alias = ?")
            .bind(name.as_str())
            .fetch_optional(&self.pool)
            .await?;
        let own_name = row.map_or_else(|| Ok(name.clone()), |row| name_at(&row, "model"))?;
        self.model(&own_name).await.map_err(|error| match error {
            CatalogError::UnknownModel(_) => CatalogError::UnknownModel(name.clone()),
            other => other,
        })
    }

    pub(crate) async fn aliases_of(&self, model: &ModelName) -> Result<Vec<ModelName>, CatalogError> {
        let rows = sqlx::query("SELECT alias FROM aliases WHERE model = ? ORDER BY alias")
            .bind(model.as_str())
            .fetch_all(&self.pool)
            .await?;
        rows.iter().map(|row| name_at(row, "alias")).collect()
    }
}
