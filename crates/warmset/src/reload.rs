//! The configuration file read again while the server runs: what changed is changed, everything else stays as it is.

use crate::{
    admin_backend::Server,
    config::{self, Config},
    promotion::PromoteOptions,
    repository::{Added, Applied, CONFIGURATION, ModelOptions, Wish},
};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};
use tokio::sync::Mutex;
use warmset_catalog::{Model, ModelSettings};
use warmset_core::{Digest, ModelName};

/// What the server was configured with.
pub(crate) struct Configured {
    path: Option<PathBuf>,
    /// What only a start can change.
    at_start: Config,
    /// The file as it was last read.
    current: Mutex<Current>,
}

/// What a running server can change.
struct Current {
    models: Vec<ModelOptions>,
    sources: warmset_source::Settings,
}

impl Configured {
    pub(crate) fn new(path: Option<PathBuf>, config: &Config) -> Self {
        let current = Current { models: config.models.clone(), sources: config.sources.clone() };
        Self { path, at_start: config.clone(), current: Mutex::new(current) }
    }
}

/// What another version of the file asks for.
struct Difference {
    wishes: Vec<Wish>,
    removed: Vec<ModelName>,
    unchanged: usize,
}

impl Server {
    /// Reads the file again. If anything in it is wrong nothing is changed, and all that is wrong is said.
    ///
    /// A source that has changed is a new version, which takes the old one's place as in any promotion; one that fails
    /// leaves the old one where it is.
    pub(crate) async fn reload(self: &Arc<Self>) -> Result<Value> {
        let configured = &self.configured;
        let mut current = configured.current.lock().await;
        let path =
            configured.path.clone().context("this server was started without --config: there is no file to read")?;
        let next = tokio::task::spawn_blocking(move || config::read_file(&path)).await??;
        let misplaced: Vec<String> = next.models.iter().filter_map(|model| self.misplaced(model)).collect();
        if !misplaced.is_empty() {
            bail!("{}", misplaced.join("; "));
        }
        self.repository.set_sources(next.sources.clone());
        let before = self.repository.catalog.models().await?;
        let difference = self.difference(&current.models, &next.models).await;
        let unchanged = difference.unchanged;
        let applied = self.repository.apply(difference.wishes, &difference.removed).await;
        let applied = applied.inspect_err(|_| self.repository.set_sources(current.sources.clone()))?;
        *current = Current { models: next.models.clone(), sources: next.sources.clone() };
        let reloading = self.follow(&applied, &before).await?;
        let (added, mut changed) = told(&applied, &before);
        let unchanged = unchanged + applied.added.len() - added.len() - changed.len();
        let failed = self.promote_candidates(&applied).await;
        changed.retain(|name| !failed.iter().any(|failed| failed["name"] == name.as_str()));
        let document = json!({
            "failed": failed,
            "added": added, "changed": changed, "reloading": reloading, "unchanged": unchanged,
            "removed": applied.removed.iter().map(|model| model.name.to_string()).collect::<Vec<_>>(),
            "needs_restart": needs_restart(&configured.at_start, &next),
        });
        let mut event = document.clone();
        event["type"] = json!("configuration_reloaded");
        self.events.publish("configuration_reloaded", event);
        Ok(document)
    }

    /// Whether the file as it was last read has this model so.
    pub(crate) async fn is_configured(&self, options: &ModelOptions) -> bool {
        self.configured.current.lock().await.models.contains(options)
    }

    fn misplaced(&self, model: &ModelOptions) -> Option<String> {
        // The first tier is the host.
        let checked = model.check_place(&self.pools, self.tiers.len() - 1);
        checked.err().map(|reason| format!("the configured model {}: {reason}", model.name))
    }

    /// What differs between two lists. A model whose source has changed since it was taken counts as changed, too.
    async fn difference(&self, old: &[ModelOptions], new: &[ModelOptions]) -> Difference {
        let known: BTreeMap<&str, &ModelOptions> = old.iter().map(|model| (model.name.as_str(), model)).collect();
        let mut wishes = Vec::new();
        for model in new {
            let before = known.get(model.name.as_str());
            let as_is = self.coming.has(&model.name) || self.repository.is_as_configured(model).await;
            if before == Some(&model) && as_is {
                continue;
            }
            let aliases = before.map(|before| before.aliases.iter().filter(|alias| !model.aliases.contains(alias)));
            wishes.push(Wish {
                options: model.clone(),
                dropped_aliases: aliases.into_iter().flatten().cloned().collect(),
            });
        }
        let gone = |model: &&ModelOptions| !new.iter().any(|other| other.name == model.name);
        let removed = old.iter().filter(gone).filter_map(|model| ModelName::parse(&model.name).ok()).collect();
        Difference { unchanged: new.len() - wishes.len(), wishes, removed }
    }

    /// Lets worker and gateway follow the catalog. Returns the models whose engine has to start again.
    pub(crate) async fn follow(&self, applied: &Applied, before: &[Model]) -> Result<Vec<String>> {
        let before: BTreeMap<Digest, &ModelSettings> =
            before.iter().map(|model| (model.digest, &model.settings)).collect();
        let mut reloading = Vec::new();
        for added in &applied.added {
            self.configure(&self.repository.get(&added.model.name).await?).await?;
            let (digest, settings) = (added.model.digest, &added.model.settings);
            if before.get(&digest).is_some_and(|before| started_with(before) != started_with(settings)) {
                reloading.push(added.model.name.to_string());
                let agent = self.agent.clone();
                // It answers what it has begun; whoever asks next gets it with the new settings.
                tokio::spawn(async move { agent.unload(digest).await });
            }
        }
        // First no name leads to what goes, then it drains.
        self.publish().await?;
        for gone in &applied.removed {
            self.agent.forget(gone.digest);
            self.artifacts.forget(&gone.digest);
        }
        crate::kv::forget_removed(self).await;
        Ok(reloading)
    }

    /// Lets names stand for what the file now says, one after the other. Returns those that do not, and why.
    pub(crate) async fn promote_candidates(self: &Arc<Self>, applied: &Applied) -> Vec<Value> {
        let mut failed = Vec::new();
        for added in &applied.added {
            let Some(digest) = added.candidate else { continue };
            let by = Some(CONFIGURATION.to_owned());
            let options = PromoteOptions { digest: Some(digest.to_string()), by, ..PromoteOptions::default() };
            if let Err(error) = self.promote(&added.model.name, options).await {
                failed.push(json!({ "name": added.model.name, "digest": digest, "reason": format!("{error:#}") }));
            }
        }
        failed
    }
}

/// Names that are new, and those that mean something else or are kept otherwise than before.
fn told(applied: &Applied, before: &[Model]) -> (Vec<ModelName>, Vec<ModelName>) {
    let same = |added: &Added| {
        let kept = |model: &&Model| {
            let now = &added.model;
            (&model.name, model.digest, &model.settings, &model.aliases)
                == (&now.name, now.digest, &now.settings, &now.aliases)
        };
        added.candidate.is_none() && before.iter().any(|model| kept(&model))
    };
    let names = |wanted: &dyn Fn(&Added) -> bool| {
        applied.added.iter().filter(|added| wanted(added)).map(|added| added.model.name.clone()).collect()
    };
    (names(&|added| added.is_new()), names(&|added| !added.is_new() && !same(added)))
}

/// What an engine is told once, when it starts.
fn started_with(settings: &ModelSettings) -> (u32, u32, Option<u64>, &warmset_core::PoolName) {
    (settings.parallel, settings.accelerators, settings.memory_cap_bytes, &settings.pool)
}

/// What differs from the start and takes effect at the next one only.
fn needs_restart(running: &Config, next: &Config) -> Vec<&'static str> {
    let (gateway, worker, residency) = (&running.gateway, &running.worker, &running.residency);
    let (gateway_next, worker_next, residency_next) = (&next.gateway, &next.worker, &next.residency);
    let keys = [
        ("gateway.listen", gateway.listen == gateway_next.listen),
        ("gateway.admin_listen", gateway.admin_listen == gateway_next.admin_listen),
        ("gateway.max_body_bytes", gateway.max_body_bytes == gateway_next.max_body_bytes),
        ("gateway.queue_limit", gateway.queue_limit == gateway_next.queue_limit),
        ("gateway.queue_limit_per_model", gateway.queue_limit_per_model == gateway_next.queue_limit_per_model),
        ("gateway.first_byte_timeout", gateway.first_byte_timeout == gateway_next.first_byte_timeout),
        ("gateway.drain_timeout", gateway.drain_timeout == gateway_next.drain_timeout),
        ("worker.memory", worker.memory == worker_next.memory),
        ("worker.reserve", worker.reserve == worker_next.reserve),
        ("worker.type", worker.kind == worker_next.kind),
        ("worker.cores", worker.cores == worker_next.cores),
        ("worker.concurrent_loads", worker.concurrent_loads == worker_next.concurrent_loads),
        ("worker.load_deadline", worker.load_deadline == worker_next.load_deadline),
        ("worker.stop_deadline", worker.stop_deadline == worker_next.stop_deadline),
        ("worker.hang_deadline", worker.hang_deadline == worker_next.hang_deadline),
        ("worker.slices", worker.slices == worker_next.slices),
        ("residency", residency == residency_next),
        ("kv", running.kv == next.kv),
        ("device", running.devices == next.devices),
        ("runtime", running.runtimes == next.runtimes),
    ];
    let mut changed: Vec<&str> = keys.into_iter().filter(|(_, same)| !same).map(|(key, _)| key).collect();
    // A section that this list does not know part by part is named as a whole.
    if gateway != gateway_next && !changed.iter().any(|key| key.starts_with("gateway.")) {
        changed.push("gateway");
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_a_start_can_change_is_named() {
        let running = Config::default();
        let mut next = running.clone();
        assert!(needs_restart(&running, &next).is_empty());
        next.worker.memory = Some(1);
        next.residency.restore = Some(false);
        next.sources.allow_private = true;
        // Where the slices stand in the file is no difference.
        next.worker.slices_line = Some(7);
        assert_eq!(needs_restart(&running, &next), ["worker.memory", "residency"]);
    }
}
