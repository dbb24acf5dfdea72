//! The warm set over a restart: what was in memory and how often it was asked for goes into the catalog, and from there
//! back to the worker.

use crate::admin_backend::Server;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use warmset_core::{Digest, worker::Recollection};

/// How often the worker is asked what there is to remember.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often demand alone is written; a change of what is in memory is written when it is seen.
const DEMAND_INTERVAL: Duration = Duration::from_secs(30);

/// Gives the worker what was remembered (if that is wanted) and remembers from now on.
pub(crate) async fn follow(server: Arc<Server>, restore: bool) {
    match server.repository.catalog.recollections(server.worker).await {
        Ok(mut models) => {
            models.iter_mut().for_each(|model| model.warm &= restore);
            server.agent.remember(models);
        }
        Err(error) => tracing::warn!("what was warm before is not known: {error}"),
    }
    tokio::spawn(async move { keep(&server).await });
}

async fn keep(server: &Server) {
    let (mut written, mut tried_at, mut failed) = (Vec::new(), Instant::now(), false);
    let mut ticks = tokio::time::interval(LOOK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Ok(models) = server.agent.recollections().await else { return };
        // What was told before the drain began is of before the drain: nothing has left for it yet.
        if server.draining.load(Ordering::Acquire) {
            return;
        }
        let moved = warm(&models) != warm(&written);
        let changed = moved || unlike(&models, &written);
        // A full disk is not tried again every second.
        let due = (moved && !failed) || (changed && tried_at.elapsed() >= DEMAND_INTERVAL);
        if due {
            failed = !write(server, &models).await;
            tried_at = Instant::now();
            if !failed {
                written = models;
            }
        }
    }
}

/// Writes what there is to remember now, before a drain empties the memory.
pub(crate) async fn write_now(server: &Server) {
    if let Ok(models) = server.agent.recollections().await {
        write(server, &models).await;
    }
}

/// Whether it was written.
async fn write(server: &Server, models: &[Recollection]) -> bool {
    let written = server.repository.catalog.remember(server.worker, models).await;
    if let Err(error) = &written {
        tracing::warn!("what is warm cannot be written down for the next start: {error}");
    }
    written.is_ok()
}

fn warm(models: &[Recollection]) -> Vec<Digest> {
    models.iter().filter(|model| model.warm).map(|model| model.digest).collect()
}

/// Whether anything but the age of what is known has changed.
fn unlike(one: &[Recollection], other: &[Recollection]) -> bool {
    let known = |models: &[Recollection]| -> Vec<(Digest, u64)> {
        models.iter().map(|model| (model.digest, model.demand_per_second.to_bits())).collect()
    };
    known(one) != known(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::forecast::Forecast;

    #[test]
    fn growing_older_is_no_news() {
        let known = |demand_per_second, seconds, warm| {
            let (digest, age, forecast) = (Digest([1; 32]), Duration::from_secs(seconds), Forecast::default());
            [Recollection { digest, demand_per_second, age, warm, forecast }]
        };
        assert!(!unlike(&known(0.5, 1, true), &known(0.5, 9, true)));
        assert!(unlike(&known(0.5, 1, true), &known(0.6, 1, true)) && unlike(&known(0.5, 1, true), &[]));
        assert_eq!(warm(&known(0.5, 1, true)), [Digest([1; 32])]);
        assert_eq!(warm(&known(0.5, 1, false)), []);
    }
}
