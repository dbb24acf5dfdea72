//! A worker for one model, without a server: for commands that work on a data directory.

use crate::{
    config::Config,
    link::StoredArtifacts,
    profile,
    promotion::{PromoteOptions, check_by},
    repository::{Repository, Stored, parse_name},
    settings,
};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc};
use warmset_catalog::Switch;
use warmset_core::{ModelName, WorkerId};
use warmset_source::Trust;
use warmset_worker::{Agent, AgentConfig, AgentHandle, Clock};

/// Starts a worker that knows this model and no other.
fn start(repository: &Repository, root: &Path, stored: &Stored) -> Result<(AgentHandle, String)> {
    let config = Config::default();
    let (memory, reserve) = settings::memory_and_reserve(None, None)?;
    let artifacts = Arc::new(StoredArtifacts::new(repository.store.clone()));
    artifacts.learn(stored.model.digest, stored.manifest.files.iter().map(|file| file.sha256).collect());
    let worker_type = settings::worker_type(&config);
    let agent = Agent::start(
        AgentConfig {
            worker: WorkerId(0),
            settings: settings::worker_settings(&config, memory, reserve)?,
            program: std::env::current_exe().context("cannot find this program's own file")?,
            data_dir: root.to_path_buf(),
            worker_type: worker_type.clone(),
            spare: false,
            artifacts,
            kv: None,
            clock: Clock::start(),
        },
        vec![settings::model_config(stored, &repository.runtimes, None)?],
    )?;
    Ok((agent, worker_type))
}

/// Measures a model, or a version of it, and stores the result.
pub(crate) async fn profile(repository: &Repository, root: &Path, name: &str, digest: Option<&str>) -> Result<Value> {
    let name = parse_name(name)?;
    let stored = match digest {
        Some(digest) => repository.stored_version(&repository.version(&name, digest).await?).await?,
        None => repository.get(&name).await?,
    };
    let (agent, worker_type) = start(repository, root, &stored)?;
    let work = async {
        let measured = profile::measure(&agent, &stored).await?;
        let canary = profile::canary_of(repository, &agent, &stored).await?;
        profile::store(repository, &stored, &worker_type, &measured, canary.as_ref()).await
    };
    let document = work.await;
    agent.drain().await;
    document
}

/// Lets a name stand for another of its versions, once that was loaded and has answered as it must.
pub(crate) async fn switch(
    repository: &Repository,
    root: &Path,
    name: &ModelName,
    options: PromoteOptions,
    back: bool,
) -> Result<Value> {
    check_by(options.by())?;
    let current = repository.get(name).await?;
    let version = repository.target(&current.model, &options, back, Trust::Operator).await?;
    let mut next = repository.stored_version(&version).await?;
    let mut document = json!({
        "name": current.model.name, "digest": version.digest, "from": current.model.digest, "by": options.by(),
        "changed": false, "back": back, "strategy": "no_server", "evicts": [],
        "callers": "nobody: no server runs",
        "expected_seconds": settings::rewarm_seconds(&next, None),
    });
    if version.digest == current.model.digest {
        options.check_current(&current.model.name)?;
    }
    if version.digest == current.model.digest || options.dry_run {
        return Ok(document);
    }
    next.canary = options.canary(&next, &current)?;
    let (agent, _) = start(repository, root, &next)?;
    let work = async {
        let (canary, score) = profile::load_and_ask(repository, &agent, &next).await?;
        let detail = json!({ "canary": canary, "canary_score": score, "source": version.source });
        let by = options.by().to_owned();
        let (model, from, to) = (current.model.name.clone(), current.model.digest, version.digest);
        repository.catalog.switch(&Switch { model, from, to, by, back, detail }).await?;
        Ok((canary, score))
    };
    let outcome: Result<_> = work.await;
    agent.drain().await;
    let still = || format!("{} still stands for {}", current.model.name, current.model.digest);
    let (canary, score) = outcome.with_context(still)?;
    (document["changed"], document["canary"], document["canary_score"]) = (json!(true), json!(canary), json!(score));
    Ok(document)
}
