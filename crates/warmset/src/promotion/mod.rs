//! A name comes to stand for another version: that one is taken in, loaded and asked its canary first; then the name
//! changes its meaning in one step; then the old version ends.
//!
//! Where both fit in memory the old version answers until the step. Where they do not, callers of the name wait from
//! the old one's end to the new one's beginning, or to the old one's return if the new one fails.

mod options;
mod state;

pub(crate) use options::{LATENCY_MAX_SECONDS, PromoteOptions, SCORE_MIN, check_by};
pub(crate) use state::Promotions;

use crate::{admin_backend::Server, config::units::format_bytes, profile, repository::Stored, settings};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use warmset_catalog::{NewEvent, Switch};
use warmset_core::{
    Digest, ModelName,
    gateway::ColdPolicy,
    rollout::{Canary, CanaryScore, Takeover},
    worker::{ModelState, Rejection},
};
use warmset_source::Trust;

/// How often a promotion looks whether the old version's requests have ended.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// How long a version that must make way may go on answering requests that were admitted for it.
const DRAIN_PATIENCE: Duration = Duration::from_secs(120);
/// How long the gateway knows a version after its last request: for whoever looked a name up just before it changed.
const LINGER: Duration = Duration::from_secs(5);

/// One promotion, decided and not yet carried out.
struct Plan {
    current: Stored,
    next: Stored,
    by: String,
    back: bool,
    takeover: Takeover,
    expected_seconds: f64,
    /// Worker and gateway did not know it before.
    fresh: bool,
}

impl Server {
    /// Lets a name stand for another of its versions.
    pub(crate) async fn promote(self: &Arc<Self>, name: &ModelName, options: PromoteOptions) -> Result<Value> {
        self.switch(name, options, false).await
    }

    /// Lets a name stand for what it stood for before.
    pub(crate) async fn roll_back(self: &Arc<Self>, name: &ModelName, options: PromoteOptions) -> Result<Value> {
        self.switch(name, options, true).await
    }

    async fn switch(self: &Arc<Self>, name: &ModelName, options: PromoteOptions, back: bool) -> Result<Value> {
        check_by(options.by())?;
        let name = self.repository.catalog.resolve(name).await?.name;
        let Some(running) = self.promotions.begin(&name) else {
            bail!("{name} is being promoted right now: wait for its end, or look at the events");
        };
        // Whoever asked may leave; what was begun is brought to an end.
        let (server, dry_run) = (self.clone(), options.dry_run);
        let work = async move {
            let _running = running;
            let plan = match server.plan(&name, &options, back).await? {
                Ok(plan) => plan,
                Err(document) => return Ok(document),
            };
            if dry_run {
                let document = server.plan_document(&plan, false).await;
                if plan.fresh {
                    server.withdraw(&plan.next.model.digest).await?;
                }
                return document;
            }
            server.carry_out(plan).await
        };
        tokio::spawn(work).await?
    }

    /// Which version, what it must answer, and how it can take over. The inner error is the answer where there is
    /// nothing to do.
    async fn plan(
        &self,
        name: &ModelName,
        options: &PromoteOptions,
        back: bool,
    ) -> Result<std::result::Result<Plan, Value>> {
        let current = self.repository.get(name).await?;
        let version = self.repository.target(&current.model, options, back, Trust::Caller).await?;
        let digest = version.digest;
        if digest == current.model.digest {
            options.check_current(&current.model.name)?;
            let document = json!({ "name": name, "digest": digest, "from": digest, "changed": false });
            return Ok(Err(document));
        }
        let mut next = self.repository.stored_version(&version).await?;
        next.canary = options.canary(&next, &current)?;
        // The worker must know it, and the gateway its name, before it can be loaded and told of.
        let measured = self.repository.catalog.measurement(&digest, &self.worker_type).await?;
        let fresh = !self.promotions.is_kept(&digest);
        let looked = async {
            if fresh || !options.dry_run {
                self.promotions.keep(settings::route(&next, measured.as_ref()));
                self.configure(&next).await?;
                self.publish().await?;
            }
            anyhow::Ok(self.agent.takeover(digest, current.model.digest).await?)
        };
        let looked = looked.await;
        if looked.is_err() && fresh {
            self.withdraw(&digest).await?;
        }
        let takeover = looked?;
        let expected_seconds = settings::rewarm_seconds(&next, measured.as_ref());
        let by = options.by().to_owned();
        Ok(Ok(Plan { current, next, by, back, takeover, expected_seconds, fresh }))
    }

    async fn carry_out(self: &Arc<Self>, plan: Plan) -> Result<Value> {
        let began = Instant::now();
        let name = plan.current.model.name.clone();
        self.tell("promotion_started", &plan, self.plan_document(&plan, false).await?).await;
        let made_way = matches!(plan.takeover, Takeover::DrainThenLoad { .. });
        let switched = async {
            let (canary, score) = self.warm(&plan).await?;
            let detail = json!({
                "canary": canary, "canary_score": score, "seconds": began.elapsed().as_secs_f64(),
                "source": plan.next.model.source,
            });
            self.change_meaning(&plan, &detail).await?;
            anyhow::Ok(detail)
        };
        match switched.await {
            Ok(detail) => {
                let digest = plan.next.model.digest;
                let followed = self.follow_meaning(&plan, detail).await;
                followed.with_context(|| {
                    format!("{name} stands for {digest} in the catalog, but this server does not follow: restart it")
                })
            }
            Err(error) => {
                self.tell("promotion_failed", &plan, json!({ "reason": format!("{error:#}") })).await;
                if made_way {
                    self.agent.prewarm(plan.current.model.digest);
                }
                self.promotions.hold(&name, false);
                self.withdraw(&plan.next.model.digest).await?;
                Err(error.context(format!("{name} still stands for {}", plan.current.model.digest)))
            }
        }
    }

    /// Loads the new version and asks its canary; says how it went.
    async fn warm(&self, plan: &Plan) -> Result<(Option<Canary>, Option<CanaryScore>)> {
        let (digest, old) = (plan.next.model.digest, plan.current.model.digest);
        match &plan.takeover {
            Takeover::Impossible { rejection } => {
                bail!("{digest} cannot be loaded: {}", reason_of(rejection))
            }
            Takeover::SideBySide { .. } => self.agent.succeed(digest, old),
            Takeover::DrainThenLoad { .. } => {
                self.promotions.hold(&plan.current.model.name, true);
                self.publish().await?;
                let ended = tokio::time::timeout(DRAIN_PATIENCE, self.end_of(old)).await;
                let seconds = DRAIN_PATIENCE.as_secs();
                ended.map_err(|_| {
                    anyhow!("requests on {old} did not end within {seconds} s: promote when it is less busy")
                })?;
                self.agent.unload(old).await?;
            }
        }
        let loaded = self.lines().await?.get(&digest).is_some_and(|line| line.state == ModelState::Ready);
        if loaded && plan.next.canary.is_some() && self.agent.canary_score(digest).await?.is_none() {
            // It was loaded when nothing was asked of it.
            self.agent.unload(digest).await?;
        }
        profile::load_and_ask(&self.repository, &self.agent, &plan.next).await
    }

    /// The step: from here on the name stands for the new version, whatever fails afterwards.
    async fn change_meaning(&self, plan: &Plan, detail: &Value) -> Result<()> {
        let (digest, old) = (plan.next.model.digest, plan.current.model.digest);
        let switch = Switch {
            model: plan.current.model.name.clone(),
            from: old,
            to: digest,
            by: plan.by.clone(),
            back: plan.back,
            detail: detail.clone(),
        };
        // The gateway knows it as ready before any name leads to it: a question answered is everything before it done.
        self.frontend.worker_state(self.worker, digest, ModelState::Ready);
        self.frontend.requests_of(digest).await;
        self.repository.catalog.switch(&switch).await?;
        Ok(())
    }

    /// Worker and gateway follow the catalog; the old version ends.
    async fn follow_meaning(self: &Arc<Self>, plan: &Plan, detail: Value) -> Result<Value> {
        let (digest, old) = (plan.next.model.digest, plan.current.model.digest);
        let model = &plan.current.model;
        self.configure(&self.repository.get(&model.name).await?).await?;
        let stay = self.keep_answering(&plan.current).await?;
        self.promotions.let_go(&digest);
        self.promotions.hold(&model.name, false);
        self.publish().await?;
        // Not before: until then callers are still admitted for it.
        self.retire(old, stay);
        let kind = if plan.back { "rolled_back" } else { "promoted" };
        let (score, seconds) = (detail["canary_score"].clone(), detail["seconds"].clone());
        let mut told = detail;
        told["by"] = json!(plan.by);
        told["from"] = json!(old);
        self.show(kind, &plan.next, told);
        let mut document = self.plan_document(plan, true).await?;
        document["canary_score"] = score;
        document["seconds"] = seconds;
        Ok(document)
    }

    /// The old version goes on answering, without its name and without the name's pin.
    async fn keep_answering(&self, old: &Stored) -> Result<u64> {
        let digest = old.model.digest;
        let measured = self.repository.catalog.measurement(&digest, &self.worker_type).await?;
        let stay = self.promotions.keep(settings::route(old, measured.as_ref()));
        let mut unpinned = old.clone();
        unpinned.model.settings.pin = false;
        self.configure(&unpinned).await?;
        Ok(stay)
    }

    /// The old version answers whom it was admitted for, then leaves memory.
    fn retire(self: &Arc<Self>, digest: Digest, stay: u64) {
        let server = self.clone();
        tokio::spawn(async move {
            server.end_of(digest).await;
            if server.promotions.stays(&digest, stay) && server.agent.unload(digest).await.is_ok() {
                tokio::time::sleep(LINGER).await;
                if server.promotions.stays(&digest, stay)
                    && let Err(error) = server.withdraw(&digest).await
                {
                    tracing::warn!(%digest, "a version that was replaced is still known: {error:#}");
                }
            }
        });
    }

    /// Worker and gateway forget a version that no name means.
    pub(crate) async fn withdraw(&self, digest: &Digest) -> Result<()> {
        self.promotions.let_go(digest);
        self.publish().await?;
        self.agent.forget(*digest);
        self.artifacts.forget(digest);
        Ok(())
    }

    /// Waits until the last request of a version has ended.
    async fn end_of(&self, digest: Digest) {
        while self.frontend.requests_of(digest).await > 0 {
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    async fn plan_document(&self, plan: &Plan, changed: bool) -> Result<Value> {
        let snapshot = self.frontend.directory().snapshot();
        let name_of = |digest: &Digest| snapshot.names().get(digest).cloned();
        let mut document = json!({
            "name": plan.current.model.name,
            "digest": plan.next.model.digest,
            "from": plan.current.model.digest,
            "by": plan.by,
            "changed": changed,
            "back": plan.back,
            "canary": plan.next.canary,
            "expected_seconds": plan.expected_seconds,
            "callers": callers(plan),
        });
        let takeover = serde_json::to_value(&plan.takeover)?;
        if let (Some(document), Value::Object(takeover)) = (document.as_object_mut(), takeover) {
            document.extend(takeover);
        }
        if let Takeover::SideBySide { evicts } | Takeover::DrainThenLoad { evicts, .. } = &plan.takeover {
            document["evicts"] =
                evicts.iter().map(|digest| json!({ "name": name_of(digest), "digest": digest })).collect();
        }
        Ok(document)
    }

    /// An event for listeners and for the catalog.
    async fn tell(&self, kind: &'static str, plan: &Plan, detail: Value) {
        let mut detail = detail;
        detail["by"] = json!(plan.by);
        let (model, digest) = (plan.current.model.name.clone(), plan.next.model.digest);
        let event =
            NewEvent { kind: kind.to_owned(), model: Some(model), digest: Some(digest), detail: detail.clone() };
        if let Err(error) = self.repository.catalog.append_events(&[event]).await {
            tracing::warn!("an event is lost: {error}");
        }
        self.show(kind, &plan.next, detail);
    }

    /// An event for listeners.
    fn show(&self, kind: &'static str, about: &Stored, mut detail: Value) {
        detail["type"] = json!(kind);
        detail["model"] = json!(about.model.name);
        detail["digest"] = json!(about.model.digest);
        self.events.publish(kind, detail);
    }
}

fn reason_of(rejection: &Rejection) -> String {
    match rejection {
        Rejection::TooLarge { needed_bytes, available_bytes } => format!(
            "it needs {} and its pool has {}: give the pool more memory, or the model a smaller context",
            format_bytes(*needed_bytes),
            format_bytes(*available_bytes)
        ),
        Rejection::NoMemory { .. } => {
            "pinned models leave no room for it: unpin one or give the pool more memory".to_owned()
        }
        other => format!("{other:?}"),
    }
}

/// What callers of the name see meanwhile, in words.
fn callers(plan: &Plan) -> String {
    let seconds = plan.expected_seconds;
    match &plan.takeover {
        Takeover::SideBySide { .. } => "no gap: the old version answers until the new one is ready".to_owned(),
        Takeover::DrainThenLoad { .. } if plan.current.model.settings.cold == ColdPolicy::Reject => format!(
            "a gap: both versions do not fit in memory, so callers are refused (503 model_loading, retry-after) for about \
             {seconds:.1} s after what runs has ended"
        ),
        Takeover::DrainThenLoad { .. } => format!(
            "a gap: both versions do not fit in memory, so callers wait about {seconds:.1} s after what runs has ended; \
             none is refused"
        ),
        Takeover::Impossible { .. } => "nothing changes: the version cannot be loaded".to_owned(),
    }
}
