//! What administrators can do, over catalog, store, worker and gateway.

use crate::{
    clockwork::Schedules,
    coming::Coming,
    fetch_events::Told,
    link::StoredArtifacts,
    profile,
    promotion::{PromoteOptions, Promotions, check_by},
    recording::Recordings,
    reload::Configured,
    repository::{
        Added, ModelOptions, Repository, Stored, expectation_json, is_unknown, measurement_json, model_json, parse_name,
    },
    settings, warmth,
};
use anyhow::{Result, anyhow};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use warmset_catalog::{CatalogError, Measurement};
use warmset_core::{
    Digest, MemoryVector, ModelName, PoolName, WorkerId,
    memory::HOST,
    worker::{LedgerLine, ModelState, PoolMemory},
};
use warmset_gateway::{
    admin::{AdminBackend, AdminError, AdminFuture, EventLog, RecordingChunks, RecordingLimits},
    batches::Batches,
    directory::Entry,
    frontend::Frontend,
    jobs::Jobs,
    metrics::TierBytes,
    router::Later,
};
use warmset_source::{FetchError, Trust};
use warmset_store::StoreError;
use warmset_worker::{AgentGone, AgentHandle, KvHandle, MemoryReport};

/// How long a question about the queues may take.
const FIGURES_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a draining server looks whether its requests have ended.
const DRAIN_PAUSE: Duration = Duration::from_millis(20);

/// One server: everything the admin routes work on.
pub(crate) struct Server {
    pub(crate) repository: Arc<Repository>,
    pub(crate) artifacts: Arc<StoredArtifacts>,
    pub(crate) agent: AgentHandle,
    /// None where no KV is kept.
    pub(crate) kv: Option<KvHandle>,
    pub(crate) frontend: Frontend,
    pub(crate) jobs: Jobs,
    pub(crate) batches: Batches,
    pub(crate) events: Arc<EventLog>,
    pub(crate) worker: WorkerId,
    pub(crate) worker_type: String,
    pub(crate) cores: u32,
    /// Names of the memory tiers: `host`, then the devices.
    pub(crate) tiers: Vec<String>,
    /// Parts of the memory with a budget of their own.
    pub(crate) pools: Vec<PoolName>,
    /// Where inference is served.
    pub(crate) listen: String,
    /// Where catalog, store and logs are, on this machine.
    pub(crate) data: PathBuf,
    pub(crate) draining: AtomicBool,
    /// Names that are changing their meaning.
    pub(crate) promotions: Arc<Promotions>,
    /// Configured models that are not here yet.
    pub(crate) coming: Coming,
    pub(crate) configured: Configured,
    pub(crate) schedules: Schedules,
    pub(crate) recordings: Recordings,
}

impl Server {
    /// What was measured on this kind of machine, by digest.
    async fn measured(&self) -> Result<BTreeMap<Digest, Measurement>> {
        let all = self.repository.catalog.measurements().await?;
        let own = all.into_iter().filter(|(_, kind, _)| *kind == self.worker_type);
        Ok(own.map(|(digest, _, measurement)| (digest, measurement)).collect())
    }

    /// Lets the gateway's names mean what the catalog says.
    pub(crate) async fn publish(&self) -> Result<()> {
        let measured = self.measured().await?;
        let stored = self.repository.all().await?;
        let promised = stored.iter().filter(|stored| !stored.model.settings.slo.is_empty());
        let targets = promised.map(|stored| (stored.model.name.to_string(), stored.model.settings.slo));
        self.frontend.metrics().set_targets(targets.collect());
        let entries = stored.into_iter().map(|stored| Entry {
            route: settings::route(&stored, measured.get(&stored.model.digest)),
            held: self.promotions.is_held(&stored.model.name),
            created_unix_seconds: stored.model.created_unix_milliseconds / 1000,
            fallback: stored.model.settings.fallback.clone(),
            aliases: stored.model.aliases,
        });
        let entries: Vec<Entry> = entries.collect();
        let known: BTreeSet<String> = entries.iter().map(|entry| entry.route.name.to_string()).collect();
        self.frontend.publish(entries, self.promotions.unnamed());
        self.frontend.metrics().latencies().retain(|name| known.contains(name));
        Ok(())
    }

    /// Tells the worker of a model, new or changed.
    pub(crate) async fn configure(&self, stored: &Stored) -> Result<()> {
        let digest = stored.model.digest;
        self.artifacts.learn(digest, stored.manifest.files.iter().map(|file| file.sha256).collect());
        let measured = self.repository.catalog.measurement(&digest, &self.worker_type).await?;
        self.agent.configure(settings::model_config(stored, &self.repository.runtimes, measured.as_ref())?);
        self.schedules.set(digest, &stored.model.settings.schedule);
        Ok(())
    }

    pub(crate) async fn lines(&self) -> Result<BTreeMap<Digest, LedgerLine>> {
        // A worker that has shut down holds nothing; what the catalog has can still be listed.
        let lines = self.agent.ledger().await.unwrap_or_default();
        Ok(lines.into_iter().map(|line| (line.digest, line)).collect())
    }

    /// A model as it is now, with every measurement.
    async fn document(&self, name: &ModelName) -> Result<Value> {
        let stored = self.repository.get(name).await?;
        let lines = self.lines().await?;
        let measurements = self.repository.measurements(&stored.model.digest).await?;
        let own = measurements.iter().find(|(kind, _)| *kind == self.worker_type).map(|(_, measurement)| measurement);
        let mut document = with_line(&stored, lines.get(&stored.model.digest), own);
        self.add_figures(&mut document, &stored, &self.queued().await);
        let shown = measurements.iter().map(|(kind, measured)| measurement_json(kind, measured, &stored));
        document["measurements"] = shown.collect();
        // A worker that has shut down expects nothing.
        let expectation = self.agent.expectation(stored.model.digest).await.unwrap_or_default();
        document["forecast"] = json!(expectation.as_ref().map(expectation_json));
        document["versions"] = self.repository.versions_json(&stored.model).await?;
        Ok(document)
    }

    async fn list(&self) -> Result<Value> {
        let (measured, lines) = (self.measured().await?, self.lines().await?);
        let stored = self.repository.all().await?;
        let queued = self.queued().await;
        let mut version_files = self.repository.version_files().await?;
        let models = stored.iter().map(|stored| {
            let digest = &stored.model.digest;
            let mut document = with_line(stored, lines.get(digest), measured.get(digest));
            self.add_figures(&mut document, stored, &queued);
            document["version_files"] = json!(version_files.remove(&stored.model.name).unwrap_or_default());
            document
        });
        Ok(json!({ "models": models.collect::<Vec<_>>(), "fetches": self.repository.fetches.documents() }))
    }

    /// Requests that wait in the gateway, by model.
    async fn queued(&self) -> BTreeMap<Digest, u32> {
        let figures = self.frontend.figures(FIGURES_TIMEOUT).await.unwrap_or_default();
        figures.waiting.into_iter().collect()
    }

    /// What callers of a model saw and see.
    fn add_figures(&self, document: &mut Value, stored: &Stored, queued: &BTreeMap<Digest, u32>) {
        document["queued"] = json!(queued.get(&stored.model.digest).copied().unwrap_or(0));
        document["latency"] = json!(self.frontend.metrics().latencies().of(stored.model.name.as_str()));
    }

    async fn add(&self, mut body: Value) -> Result<Value> {
        let by = body.as_object_mut().and_then(|body| body.remove("by"));
        let by = by.as_ref().and_then(Value::as_str).unwrap_or("unknown");
        check_by(by)?;
        let options: ModelOptions =
            serde_json::from_value(body).map_err(|error| anyhow!("not the description of a model: {error}"))?;
        // The first tier is the host.
        options.check_place(&self.pools, self.tiers.len() - 1).map_err(|reason| anyhow!(reason))?;
        let added = self.fetch_and_add(&options, by).await?;
        let name = added.model.name;
        self.configure(&self.repository.get(&name).await?).await?;
        // Its files may have been gone or damaged: they are there now.
        self.agent.lift_pause(added.model.digest);
        self.publish().await?;
        let mut document = self.document(&name).await?;
        document["existed"] = json!(added.existed);
        document["candidate"] = json!(added.candidate);
        Ok(document)
    }

    /// Adds a model; while its files come from another machine, listeners hear how far they are.
    pub(crate) async fn fetch_and_add(&self, options: &ModelOptions, by: &str) -> Result<Added> {
        let told = Told::new(self.events.clone(), options);
        let heard = told.clone();
        let added =
            self.repository.add(options, by, Trust::Caller, Box::new(move |done, total| heard.hear(done, total)));
        let added = added.await;
        told.end(&added);
        if let Ok(Added { existed: false, model, .. }) = &added
            && let Some(seconds) = model.settings.fetch_seconds
        {
            self.frontend.metrics().observe_fetch(model.name.as_str(), seconds);
        }
        added
    }

    async fn remove(&self, name: &ModelName) -> Result<Value> {
        let name = &self.repository.catalog.resolve(name).await?.name;
        if self.promotions.is_running(name) {
            return Err(anyhow!("{name} is being promoted right now: remove it afterwards"));
        }
        let model = self.repository.remove(name).await?;
        // First no name leads to it, then it drains.
        self.publish().await?;
        self.agent.forget(model.digest);
        self.schedules.set(model.digest, &[]);
        self.artifacts.forget(&model.digest);
        crate::kv::forget_removed(self).await;
        Ok(json!({ "name": model.name, "digest": model.digest, "removed": true }))
    }

    async fn pin(&self, name: &ModelName, pin: bool) -> Result<Value> {
        let model = self.repository.pin(name, pin).await?;
        self.configure(&self.repository.get(&model.name).await?).await?;
        self.document(&model.name).await
    }

    async fn load(&self, name: &ModelName, wait: bool) -> Result<Value> {
        let digest = self.repository.catalog.resolve(name).await?.digest;
        if wait {
            self.agent.load(digest).await.map_err(|error| anyhow!("{name} cannot be loaded: {}", error.message))?;
        } else {
            self.agent.lift_pause(digest);
            self.agent.prewarm(digest);
        }
        self.document(name).await
    }

    async fn unload(&self, name: &ModelName) -> Result<Value> {
        self.agent.unload(self.repository.catalog.resolve(name).await?.digest).await?;
        self.document(name).await
    }

    async fn logs(&self, name: &ModelName, lines: usize) -> Result<Value> {
        let digest = self.repository.catalog.resolve(name).await?.digest;
        let agent = self.agent.clone();
        let tail = tokio::task::spawn_blocking(move || agent.log_tail(&digest, lines)).await??;
        Ok(json!({ "name": name, "digest": digest, "lines": tail }))
    }

    async fn act(self: &Arc<Self>, name: &ModelName, action: &str, body: Value) -> Result<Value> {
        match action {
            "alias" => self.alias(name, &body).await,
            "profile" => self.profile(name, body["digest"].as_str()).await,
            "promote" => self.promote(name, promote_options(body)?).await,
            "rollback" => self.roll_back(name, promote_options(body)?).await,
            "remove_version" => {
                let Some(digest) = body["digest"].as_str() else { return Err(anyhow!("the body must name a digest")) };
                let Some(_running) = self.promotions.begin(&self.repository.catalog.resolve(name).await?.name) else {
                    return Err(anyhow!("{name} is being promoted right now: remove the version afterwards"));
                };
                let version = self.repository.remove_version(name, digest).await?;
                crate::kv::forget_removed(self).await;
                Ok(json!({ "name": version.model, "digest": version.digest, "removed": true }))
            }
            _ => Err(NoSuchAction(action.to_owned()).into()),
        }
    }

    async fn alias(&self, name: &ModelName, body: &Value) -> Result<Value> {
        let Some(text) = body["alias"].as_str() else { return Err(anyhow!("the body must name an alias")) };
        let alias = parse_name(text)?;
        if body["remove"] == true {
            self.repository.catalog.remove_alias(&alias).await?;
        } else {
            let model = self.repository.catalog.resolve(name).await?.name;
            self.repository.catalog.add_alias(&alias, &model, body["replace"] == true).await?;
        }
        self.publish().await?;
        Ok(json!({ "alias": alias }))
    }

    /// Measures a model, or a version of it that callers do not get.
    async fn profile(&self, name: &ModelName, digest: Option<&str>) -> Result<Value> {
        let current = self.repository.get(name).await?;
        let Some(digest) = digest else { return self.profile_stored(&current).await };
        let version = self.repository.version(name, digest).await?;
        if version.digest == current.model.digest {
            return self.profile_stored(&current).await;
        }
        let Some(_running) = self.promotions.begin(&current.model.name) else {
            return Err(anyhow!("{name} is being promoted right now: profile it afterwards"));
        };
        let stored = self.repository.stored_version(&version).await?;
        self.promotions.keep(settings::route(&stored, None));
        self.configure(&stored).await?;
        self.publish().await?;
        let profiled = self.profile_stored(&stored).await;
        self.withdraw(&version.digest).await?;
        profiled
    }

    async fn profile_stored(&self, stored: &Stored) -> Result<Value> {
        let measured = profile::measure(&self.agent, stored).await?;
        let canary = profile::canary_of(&self.repository, &self.agent, stored).await?;
        profile::store(&self.repository, stored, &self.worker_type, &measured, canary.as_ref()).await
    }

    async fn workers_document(&self) -> Result<Value> {
        let (lines, memory, engines) = (self.lines().await?, self.agent.memory().await?, self.agent.engines().await?);
        let engines = engines.into_iter().map(|(digest, pid)| {
            let line = lines.get(&digest);
            json!({
                "digest": digest, "pid": pid,
                "name": line.map(|line| &line.name), "state": line.map(|line| line.state),
            })
        });
        let worker = json!({
            "id": self.worker, "type": self.worker_type, "cores": self.cores,
            "draining": self.draining.load(Ordering::Acquire),
            "memory": self.memory_json(&memory), "engines": engines.collect::<Vec<_>>(),
        });
        Ok(json!({ "listen": self.listen, "data": self.data, "workers": [worker] }))
    }

    async fn ledger_document(&self) -> Result<Value> {
        let lines: Vec<LedgerLine> = self.agent.ledger().await?;
        Ok(json!({ "memory": self.memory_json(&self.agent.memory().await?), "entries": lines }))
    }

    fn memory_json(&self, report: &MemoryReport) -> Value {
        let tiers = self.tier_bytes(report).into_iter().map(|tier| {
            json!({
                "tier": tier.tier, "capacity_bytes": tier.capacity, "reserve_bytes": tier.reserve,
                "loading_bytes": tier.loading, "resident_bytes": tier.resident,
                "unloading_bytes": tier.unloading, "kv_bytes": tier.kv, "free_bytes": tier.free,
            })
        });
        json!({
            "tiers": tiers.collect::<Vec<_>>(), "pools": report.pools, "overhead_bytes": report.overhead_bytes,
            "oldest_pending_load_seconds": report.oldest_pending_load.as_secs_f64(),
        })
    }

    fn tier_bytes(&self, report: &MemoryReport) -> Vec<TierBytes> {
        let tiers = self.tiers.iter().enumerate().map(|(device, tier)| {
            let sum = |part: fn(&PoolMemory) -> &MemoryVector| {
                report.pools.iter().fold(0u64, |sum, pool| sum.saturating_add(part(pool).get(device)))
            };
            // Cached KV lies in what models and the states of parked requests leave of the host's memory.
            let free = sum(|pool| &pool.free);
            let cached = if device == HOST { self.kv.as_ref().map_or(0, KvHandle::host_bytes).min(free) } else { 0 };
            let kv = cached + sum(|pool| &pool.parked);
            TierBytes {
                tier: tier.clone(),
                capacity: report.capacity.get(device),
                reserve: report.reserve.get(device),
                loading: sum(|pool| &pool.loading),
                resident: sum(|pool| &pool.resident),
                unloading: sum(|pool| &pool.unloading),
                kv,
                free: free - cached,
            }
        });
        tiers.collect()
    }

    /// Accepts nothing new, lets every accepted request end, then unloads everything and ends the worker.
    pub(crate) async fn drain_all(&self) {
        if !self.draining.swap(true, Ordering::AcqRel) {
            warmth::write_now(self).await;
        }
        self.frontend.drain();
        // Jobs that run are let finish like other requests; the others wait for the next start.
        tokio::join!(self.jobs.drain(), self.batches.drain());
        while self.frontend.requests().await > 0 {
            tokio::time::sleep(DRAIN_PAUSE).await;
        }
        self.agent.drain().await;
    }

    /// Where requests go that are answered later.
    pub(crate) fn later(&self) -> Later {
        Later { jobs: Some(self.jobs.clone()), batches: Some(self.batches.clone()) }
    }

    async fn refresh(&self) {
        // A worker that has ended has nothing to report.
        if let (Ok(report), Ok(lines)) = (self.agent.memory().await, self.agent.ledger().await) {
            self.frontend.metrics().set_ledger(&self.tier_bytes(&report), &lines);
        }
        if let Some(kv) = &self.kv
            && let Some(view) = kv.view().await
        {
            self.frontend.metrics().set_kv(&view, &|digest| self.frontend.directory().name_of(digest));
        }
    }
}

/// A model with what the ledger says of it.
fn with_line(stored: &Stored, line: Option<&LedgerLine>, measured: Option<&Measurement>) -> Value {
    let state = line.map_or(ModelState::Absent, |line| line.state);
    let mut document = model_json(stored, state, measured);
    if let Some(line) = line {
        document["in_flight"] = json!(line.in_flight);
        document["waiting"] = json!(line.waiting);
        document["parked"] = json!(line.parked);
        document["demand_per_second"] = json!(line.demand_per_second);
        document["worth"] = json!(line.worth);
        document["held_bytes"] = json!(line.private.total().saturating_add(line.shared_host_bytes));
    }
    document
}

fn promote_options(body: Value) -> Result<PromoteOptions> {
    serde_json::from_value(body).map_err(|error| anyhow!("not the description of a promotion: {error}"))
}

/// A path below a model that leads nowhere.
#[derive(Debug, thiserror::Error)]
#[error(
    "there is no action {0}: there are pin, unpin, load, unload, alias, profile, promote, rollback and remove_version"
)]
struct NoSuchAction(String);

/// Whose fault an error is.
fn admin_error(error: anyhow::Error) -> AdminError {
    let message = format!("{error:#}");
    if is_unknown(&error) || error.is::<NoSuchAction>() {
        return AdminError::not_found(message);
    }
    if error.is::<AgentGone>() {
        return AdminError::unavailable(message);
    }
    let catalog_fails = matches!(error.downcast_ref::<CatalogError>(), Some(error) if !error.is_callers_fault());
    let store_fails = matches!(error.downcast_ref::<StoreError>(), Some(error) if !error.is_source_fault())
        || matches!(error.downcast_ref::<FetchError>(), Some(error) if !error.is_source_fault());
    if catalog_fails || store_fails { AdminError::internal(message) } else { AdminError::refused(message) }
}

fn answer<'a>(work: impl Future<Output = Result<Value>> + Send + 'a) -> AdminFuture<'a> {
    Box::pin(async move { work.await.map_err(admin_error) })
}

/// The admin routes' view of a server.
#[derive(Clone)]
pub(crate) struct Backend(pub(crate) Arc<Server>);

impl AdminBackend for Backend {
    fn list_models(&self) -> AdminFuture<'_> {
        answer(self.0.list())
    }

    fn show_model(&self, name: ModelName) -> AdminFuture<'_> {
        answer(async move { self.0.document(&name).await })
    }

    fn add_model(&self, body: Value) -> AdminFuture<'_> {
        answer(self.0.add(body))
    }

    fn remove_model(&self, name: ModelName) -> AdminFuture<'_> {
        answer(async move { self.0.remove(&name).await })
    }

    fn pin_model(&self, name: ModelName, pin: bool) -> AdminFuture<'_> {
        answer(async move { self.0.pin(&name, pin).await })
    }

    fn load_model(&self, name: ModelName, wait: bool) -> AdminFuture<'_> {
        answer(async move { self.0.load(&name, wait).await })
    }

    fn unload_model(&self, name: ModelName) -> AdminFuture<'_> {
        answer(async move { self.0.unload(&name).await })
    }

    fn act_on_model(&self, name: ModelName, action: String, body: Value) -> AdminFuture<'_> {
        answer(async move { self.0.act(&name, &action, body).await })
    }

    fn model_logs(&self, name: ModelName, lines: usize) -> AdminFuture<'_> {
        answer(async move { self.0.logs(&name, lines).await })
    }

    fn workers(&self) -> AdminFuture<'_> {
        answer(self.0.workers_document())
    }

    fn ledger(&self) -> AdminFuture<'_> {
        answer(self.0.ledger_document())
    }

    fn kv(&self) -> AdminFuture<'_> {
        answer(crate::kv::document(&self.0))
    }

    fn clear_kv(&self) -> AdminFuture<'_> {
        answer(crate::kv::clear(&self.0))
    }

    fn drain(&self) -> AdminFuture<'_> {
        let server = self.0.clone();
        tokio::spawn(async move { server.drain_all().await });
        answer(async { Ok(json!({ "draining": true })) })
    }

    fn reload(&self) -> AdminFuture<'_> {
        answer(self.0.reload())
    }

    fn record(&self, limits: RecordingLimits) -> Result<RecordingChunks, AdminError> {
        self.0.recordings.record_chunks(limits, &self.0.agent, &self.0.frontend)
    }

    fn refresh_metrics(&self) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.0.refresh())
    }

    fn jobs(&self) -> Option<Jobs> {
        Some(self.0.jobs.clone())
    }

    fn batches(&self) -> Option<Batches> {
        Some(self.0.batches.clone())
    }

    fn events(&self) -> Arc<EventLog> {
        self.0.events.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_whose_fault_they_are() {
        let name = ModelName::parse("a").unwrap();
        let status = |error: anyhow::Error| admin_error(error).status;
        assert_eq!(status(CatalogError::UnknownModel(name.clone()).into()), 404);
        assert_eq!(status(CatalogError::NameTaken(name).into()), 422);
        assert_eq!(status(CatalogError::DiskFull.into()), 500);
        assert_eq!(status(StoreError::NotAFile { path: "/".into(), kind: "a directory" }.into()), 422);
        assert_eq!(status(StoreError::DiskFull { directory: "/".into(), needed_bytes: 1 }.into()), 500);
        assert_eq!(status(anyhow!("not a model")), 422);
    }
}
