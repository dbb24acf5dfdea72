//! Versions of models: a new file under a known name, and the name coming to stand for it.

use super::{
    Added, Entering, ModelOptions, Repository, Stored, as_configured, runtimes::runtime_digest, said_over, take::Taken,
};
use crate::promotion::PromoteOptions;
use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use warmset_catalog::{CatalogError, Model, ModelSettings, NewModel, Switch, Version};
use warmset_core::{Digest, ModelName};
use warmset_source::Trust;
use warmset_store::Manifest;

/// Who approves what the configuration file names.
pub(crate) const CONFIGURATION: &str = "configuration";
/// The fewest digits by which a digest may be meant.
const DIGEST_DIGITS_MIN: usize = 6;

impl Repository {
    /// Another file under a known name.
    pub(super) async fn enter_version(
        &self,
        known: &Model,
        options: &ModelOptions,
        taken: &Taken,
        entering: &Entering<'_>,
    ) -> Result<Added> {
        let (name, configured) = (&known.name, !matches!(entering, Entering::By(_)));
        let versions = self.catalog.versions(name).await?;
        let there = versions.iter().any(|version| version.digest == taken.digest);
        let settings = match entering {
            Entering::Configured | Entering::Reloaded => taken.settings.clone(),
            Entering::By(_) => said_over(options, &taken.settings, known)?,
        };
        if !configured && settings.with_version(&known.settings) != known.settings {
            bail!(
                "what callers get of {name} is not changed by a new version: leave out --pin, --priority, \
                 --max-concurrency, --critical-reserve, --cold, --pool and --keep-alive, or give them with {} once it \
                 is promoted",
                known.source
            );
        }
        if !there {
            self.catalog.add_version(&taken.as_new(name, options, settings)?).await?;
        }
        let by_hand = configured && there && options.digest.is_none() && switched_by_hand(&versions, known);
        if let Entering::Reloaded = entering {
            // How the name is served changes now, how the version is loaded when the name comes to mean it.
            let served = as_configured(options, taken.settings.clone(), known).with_version(&known.settings);
            self.change_settings(known, &served).await?;
            self.ensure_aliases(name, &options.aliases).await?;
        }
        if !matches!(entering, Entering::Configured) || by_hand {
            if by_hand {
                tracing::info!(%name, digest = %known.digest, configured = %taken.digest, "a promotion by hand holds");
            }
            let (model, candidate) = (self.catalog.model(name).await?, (!by_hand).then_some(taken.digest));
            return Ok(Added { model, existed: there, replaced: None, candidate });
        }
        let model = self.configured_switch(known, taken.digest, &options.source).await?;
        self.change_settings(&model, &as_configured(options, taken.settings.clone(), known)).await?;
        self.ensure_aliases(name, &options.aliases).await?;
        let model = self.catalog.model(name).await?;
        Ok(Added { model, existed: false, replaced: Some(known.clone()), candidate: None })
    }

    /// The name stands for another version because the configuration says so.
    async fn configured_switch(&self, known: &Model, to: Digest, source: &str) -> Result<Model> {
        let switch = Switch {
            model: known.name.clone(),
            from: known.digest,
            to,
            by: CONFIGURATION.to_owned(),
            back: false,
            detail: json!({ "source": source }),
        };
        Ok(self.catalog.switch(&switch).await?)
    }

    /// Gives models whose runtime was defined anew the version that follows: they are what the configuration now says.
    /// Returns those that have changed. A runtime that is no longer there leaves its models as they are: they do not load.
    pub(crate) async fn follow_runtimes(&self) -> Result<Vec<ModelName>> {
        let _one_at_a_time = self.changes.lock().await;
        let mut changed = Vec::new();
        for model in self.catalog.models().await? {
            let Some(runtime) = model.settings.runtime.as_deref().and_then(|name| self.runtimes.get(name).ok()) else {
                continue;
            };
            let mut manifest = Manifest::from_canonical_json(&model.manifest)?;
            let now = Some(runtime_digest(runtime));
            if std::mem::replace(&mut manifest.runtime_sha256, now) == now {
                continue;
            }
            let (digest, manifest) = (manifest.digest()?, manifest.canonical_json()?);
            let (name, source, settings) = (model.name.clone(), model.source.clone(), model.settings.clone());
            if self.catalog.version(&digest).await?.is_none() {
                self.catalog.add_version(&NewModel { name, digest, manifest, source, settings }).await?;
            }
            self.configured_switch(&model, digest, &model.source).await?;
            changed.push(model.name);
        }
        Ok(changed)
    }

    /// The version of a model that is meant by a digest or by the beginning of one.
    pub(crate) async fn version(&self, name: &ModelName, digest: &str) -> Result<Version> {
        let model = self.catalog.resolve(name).await?.name;
        let digits = digest.strip_prefix("sha256:").unwrap_or(digest);
        if digits.len() < DIGEST_DIGITS_MIN {
            bail!("{digest} is too short for a digest: give at least {DIGEST_DIGITS_MIN} digits");
        }
        let mut versions = self.catalog.versions(&model).await?;
        versions.retain(|version| version.digest.hex().starts_with(&digits.to_lowercase()));
        match versions.len() {
            1 => Ok(versions.remove(0)),
            0 => bail!("{model} has no version {digest}: add it with `warmset model add {model} SOURCE`"),
            _ => bail!("{model} has several versions that begin with {digest}: give more digits"),
        }
    }

    /// The version that a name is to stand for: what it stood for before, or what is asked for.
    pub(crate) async fn target(
        &self,
        current: &Model,
        options: &PromoteOptions,
        back: bool,
        trust: Trust,
    ) -> Result<Version> {
        let digest =
            if back { self.replaced(current).await? } else { self.wanted(&current.name, options, trust).await? };
        let version = self.catalog.version(&digest).await?.ok_or(CatalogError::UnknownVersion(digest))?;
        if !self.holds(&version.manifest) {
            let (name, source) = (&current.name, &version.source);
            bail!("a file of {digest} is gone from the store: add it again with `warmset model add {name} {source}`");
        }
        Ok(version)
    }

    /// The version that is to be promoted; taken in first if a source is given.
    async fn wanted(&self, name: &ModelName, options: &PromoteOptions, trust: Trust) -> Result<Digest> {
        let wanted = options.digest.as_deref();
        let Some(source) = &options.source else {
            let Some(wanted) = wanted else { bail!("give the digest of a version, or a source to take one from") };
            return Ok(self.version(name, wanted).await?.digest);
        };
        let new = ModelOptions { name: name.to_string(), source: source.clone(), ..ModelOptions::default() };
        let added = self.add(&new, options.by(), trust, Box::new(|_, _| {})).await?;
        let digest = added.candidate.unwrap_or(added.model.digest);
        if let Some(wanted) = wanted
            && self.version(name, wanted).await?.digest != digest
        {
            bail!("{source} has digest {digest}, not {wanted}: check the source");
        }
        Ok(digest)
    }

    /// What a name stood for before what it stands for now.
    async fn replaced(&self, current: &Model) -> Result<Digest> {
        let version = self.catalog.version(&current.digest).await?;
        let replaced = version.and_then(|version| version.replaced);
        replaced.ok_or_else(|| anyhow!("{} has stood for nothing before: there is nothing to go back to", current.name))
    }

    /// A version as if its name stood for it, without the pin: it is loaded because somebody says so.
    pub(crate) async fn stored_version(&self, version: &Version) -> Result<Stored> {
        let model = self.catalog.model(&version.model).await?;
        let settings = ModelSettings { pin: false, ..model.settings.with_version(&version.settings) };
        let as_current = Model {
            digest: version.digest,
            manifest: version.manifest.clone(),
            source: version.source.clone(),
            settings,
            ..model
        };
        self.read(as_current, version.canary.clone()).await
    }

    /// Removes a version that its name does not stand for, and the files that nothing else uses.
    pub(crate) async fn remove_version(&self, name: &ModelName, digest: &str) -> Result<Version> {
        let version = self.version(name, digest).await?;
        let _one_at_a_time = self.changes.lock().await;
        let version = self.catalog.remove_version(&version.model, &version.digest).await?;
        self.shapes.forget(&version.digest);
        self.remove_unreferenced().await;
        Ok(version)
    }

    /// All versions of a model as `model show` tells them.
    pub(crate) async fn versions_json(&self, model: &Model) -> Result<Value> {
        let versions = self.catalog.versions(&model.name).await?;
        Ok(versions.iter().map(|version| version_json(version, version.digest == model.digest)).collect())
    }
}

/// Whether somebody, and not the configuration, chose what the name stands for.
fn switched_by_hand(versions: &[Version], known: &Model) -> bool {
    let current = versions.iter().find(|version| version.digest == known.digest);
    let approval = current.and_then(|version| version.approval.as_ref());
    approval.is_some_and(|approval| approval.by != CONFIGURATION)
}

fn version_json(version: &Version, current: bool) -> Value {
    json!({
        "digest": version.digest,
        "current": current,
        "source": version.source,
        "added_unix_milliseconds": version.added_unix_milliseconds,
        "approved_by": version.approval.as_ref().map(|approval| &approval.by),
        "approved_unix_milliseconds": version.approval.as_ref().map(|approval| approval.unix_milliseconds),
        "replaced": version.replaced,
        "canary": version.canary,
    })
}
