//! Files that are gone from the store, or were damaged and set aside, come from their source again when a load misses
//! them. What the source has must be what was lost: nothing else is taken.

use crate::{
    admin_backend::Server,
    repository::{ModelOptions, parse_engine},
};
use anyhow::{Result, anyhow};
use serde_json::json;
use std::{collections::BTreeSet, sync::Arc};
use tokio::{sync::broadcast::error::RecvError, task::JoinSet};
use warmset_catalog::Model;
use warmset_core::{Digest, worker::Fact};

/// Models that are mended at once; the load of another one tries again later.
const MENDED_AT_ONCE_MAX: usize = 2;

/// Listens for loads that fail, for as long as there is a worker.
pub(crate) fn follow(server: Arc<Server>) {
    let Some(mut facts) = server.agent.facts() else { return };
    tokio::spawn(async move {
        let (mut running, mut mended) = (JoinSet::new(), BTreeSet::new());
        loop {
            tokio::select! {
                Some(ended) = running.join_next(), if !running.is_empty() => {
                    if let Ok(digest) = ended {
                        mended.remove(&digest);
                    }
                }
                heard = facts.recv() => match heard {
                    Ok((_, Fact::LoadRefused { digest, .. })) => {
                        if running.len() < MENDED_AT_ONCE_MAX && mended.insert(digest) {
                            let server = server.clone();
                            running.spawn(async move {
                                server.mend(digest).await;
                                digest
                            });
                        }
                    }
                    // A load that still misses its files fails again.
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => break,
                },
            }
        }
    });
}

impl Server {
    /// Takes a model's files from their source again, if any is gone.
    async fn mend(&self, digest: Digest) {
        let Ok(Some(model)) = self.repository.lost(&digest).await else { return };
        tracing::warn!(name = %model.name, "a file of a model is gone from the store: it is taken from its source again");
        let taken = self.take_again(&model).await;
        let mut told = json!({ "type": "model_restored", "model": model.name, "digest": digest });
        match taken {
            Ok(()) => self.agent.lift_pause(digest),
            Err(error) => {
                tracing::warn!(name = %model.name, "a file of a model is lost: {error:#}");
                told["reason"] = json!(format!("{error:#}"));
            }
        }
        self.events.publish("model_restored", told);
    }

    async fn take_again(&self, model: &Model) -> Result<()> {
        let settings = &model.settings;
        let options = ModelOptions {
            name: model.name.to_string(),
            // The revision that it was pinned to, where a source moves on.
            source: settings.pinned_source.clone().unwrap_or_else(|| model.source.clone()),
            digest: Some(model.digest),
            engine: Some(parse_engine(&settings.engine).map_err(|reason| anyhow!(reason))?),
            runtime: settings.runtime.clone(),
            context_tokens: Some(settings.context_tokens),
            ..ModelOptions::default()
        };
        self.fetch_and_add(&options, "store").await.map(drop)
    }
}
