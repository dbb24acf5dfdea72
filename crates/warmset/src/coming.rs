//! Configured models that are not on this machine yet: a server starts without them and brings them here while it
//! answers with those it has.

use crate::{
    admin_backend::Server,
    repository::{ModelOptions, Wish},
};
use serde_json::json;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::Semaphore;
use warmset_core::ModelName;

/// Transfers at once: more share the same line.
const TRANSFERS_MAX: usize = 2;
/// Pauses before a transfer that failed is tried again: the first, and the longest.
const PAUSE_FIRST: Duration = Duration::from_secs(15);
const PAUSE_MAX: Duration = Duration::from_secs(1800);

/// Which models are awaited.
#[derive(Debug, Default)]
pub(crate) struct Coming(Mutex<BTreeMap<ModelName, Awaited>>);

#[derive(Debug, Clone)]
struct Awaited {
    pin: bool,
    /// Why it is not here after the last try.
    failure: Option<String>,
}

impl Coming {
    fn all(&self) -> MutexGuard<'_, BTreeMap<ModelName, Awaited>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody brings it here already.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.all().keys().any(|known| known.as_str() == name)
    }

    /// A pinned one that was not tried yet: callers are not let in before.
    pub(crate) fn first_pinned(&self) -> Option<ModelName> {
        let all = self.all();
        let mut pinned = all.iter().filter(|(_, awaited)| awaited.pin && awaited.failure.is_none());
        pinned.next().map(|(name, _)| name.clone())
    }

    /// What callers of these names are told.
    fn reasons(&self) -> BTreeMap<ModelName, String> {
        let told = |awaited: &Awaited| match &awaited.failure {
            Some(failure) => format!("it is not here yet and is tried again: {failure}"),
            None => "it is being fetched".to_owned(),
        };
        self.all().iter().map(|(name, awaited)| (name.clone(), told(awaited))).collect()
    }
}

impl Server {
    /// Begins to bring these models here.
    pub(crate) fn bring(self: &Arc<Self>, models: Vec<ModelOptions>) {
        let places = Arc::new(Semaphore::new(TRANSFERS_MAX));
        for model in &models {
            if let Ok(name) = ModelName::parse(&model.name) {
                self.coming.all().insert(name, Awaited { pin: model.pin.unwrap_or(false), failure: None });
            }
        }
        self.tell_callers();
        for model in models {
            let (server, places) = (self.clone(), places.clone());
            tokio::spawn(async move { server.bring_one(model, &places).await });
        }
    }

    async fn bring_one(self: &Arc<Self>, options: ModelOptions, places: &Semaphore) {
        let Ok(name) = ModelName::parse(&options.name) else { return };
        let mut pause = PAUSE_FIRST;
        loop {
            // It is never closed.
            let Ok(place) = places.acquire().await else { return };
            if !self.is_configured(&options).await {
                break;
            }
            let failure = match self.take(&options).await {
                Ok(()) => break,
                Err(error) => format!("{error:#}"),
            };
            drop(place);
            tracing::warn!(%name, "a configured model cannot be had, it is tried again in {} s: {failure}", pause.as_secs());
            self.events.publish(
                "model_fetch_failed",
                json!({ "type": "model_fetch_failed", "model": name, "reason": failure }),
            );
            if let Some(awaited) = self.coming.all().get_mut(&name) {
                awaited.failure = Some(failure);
            }
            self.tell_callers();
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        self.coming.all().remove(&name);
        self.tell_callers();
    }

    async fn take(self: &Arc<Self>, options: &ModelOptions) -> anyhow::Result<()> {
        let before = self.repository.catalog.models().await?;
        let wish = Wish { options: options.clone(), dropped_aliases: Vec::new() };
        let applied = self.repository.apply(vec![wish], &[]).await?;
        self.follow(&applied, &before).await?;
        for failed in self.promote_candidates(&applied).await {
            tracing::warn!(model = options.name, "the configured version does not take over: {}", failed["reason"]);
        }
        Ok(())
    }

    fn tell_callers(&self) {
        self.frontend.directory().expect(self.coming.reasons());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_awaited_until_its_first_try_has_ended() {
        let coming = Coming::default();
        let name = |text| ModelName::parse(text).unwrap();
        coming.all().insert(name("a"), Awaited { pin: false, failure: None });
        assert_eq!(coming.first_pinned(), None);
        coming.all().insert(name("b"), Awaited { pin: true, failure: None });
        assert_eq!(coming.first_pinned(), Some(name("b")));
        coming.all().get_mut(&name("b")).unwrap().failure = Some("no route".into());
        assert_eq!(coming.first_pinned(), None);
        assert!(coming.reasons()[&name("b")].contains("no route") && coming.reasons()[&name("a")].contains("fetched"));
    }
}
