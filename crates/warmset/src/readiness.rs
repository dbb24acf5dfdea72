//! Ready for callers: once, after the start, every pinned model must have been loaded, or its load have failed. What
//! happens to one of them later is no reason to take callers away from all others.

use crate::admin_backend::Server;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use warmset_core::{Digest, ModelName, worker::ModelState};
use warmset_gateway::openai::ReadyProbe;

/// How often the worker is asked.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Watches the pinned models; the probe says which of them is still awaited.
pub(crate) async fn follow(server: Arc<Server>) -> anyhow::Result<ReadyProbe> {
    let first = awaited_now(&server).await?;
    let awaited = Arc::new(Mutex::new(first));
    let probe = awaited.clone();
    tokio::spawn(async move {
        // A worker that has shut down has nothing to wait for.
        while let Ok(next) = awaited_now(&server).await {
            let settled = next.is_none();
            *awaited.lock().unwrap_or_else(PoisonError::into_inner) = next;
            if settled {
                break;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    });
    Ok(Arc::new(move || match &*probe.lock().unwrap_or_else(PoisonError::into_inner) {
        None => Ok(()),
        Some(reason) => Err(reason.clone()),
    }))
}

/// What callers still have to wait for, if anything.
async fn awaited_now(server: &Server) -> anyhow::Result<Option<String>> {
    if let Some(name) = server.coming.first_pinned() {
        return Ok(Some(format!("the pinned model {name} is being fetched")));
    }
    let models = server.repository.catalog.models().await?;
    let pinned = models.into_iter().filter(|model| model.settings.pin);
    let pinned: BTreeMap<Digest, ModelName> = pinned.map(|model| (model.digest, model.name)).collect();
    if pinned.is_empty() {
        return Ok(None);
    }
    let lines = server.agent.ledger().await?;
    let states = lines.iter().map(|line| (line.digest, line.state)).collect();
    Ok(first_awaited(&pinned, &states).map(|name| format!("the pinned model {name} is being loaded")))
}

/// A pinned model that is neither there nor known to fail.
fn first_awaited<'a>(
    pinned: &'a BTreeMap<Digest, ModelName>,
    states: &BTreeMap<Digest, ModelState>,
) -> Option<&'a ModelName> {
    let settled = |digest| matches!(states.get(digest), Some(ModelState::Ready | ModelState::Failed));
    pinned.iter().find(|(digest, _)| !settled(*digest)).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_awaited_until_it_is_there_or_has_failed() {
        let pinned: BTreeMap<Digest, ModelName> = [(Digest([1; 32]), "a"), (Digest([2; 32]), "b")]
            .map(|(digest, name)| (digest, ModelName::parse(name).unwrap()))
            .into();
        let mut states = BTreeMap::from([(Digest([1; 32]), ModelState::Ready)]);
        assert_eq!(first_awaited(&pinned, &states).unwrap().as_str(), "b");
        states.insert(Digest([2; 32]), ModelState::Loading);
        assert!(first_awaited(&pinned, &states).is_some());
        for settled in [ModelState::Failed, ModelState::Ready] {
            states.insert(Digest([2; 32]), settled);
            assert_eq!(first_awaited(&pinned, &states), None);
        }
    }
}
