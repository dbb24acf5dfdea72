//! What the worker tells, passed on: to the gateway, to metrics, to listeners, and (in batches, never in the way of
//! anything) to the catalog.

use crate::repository::Repository;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::{broadcast::error::RecvError, mpsc};
use warmset_catalog::{Measurement, NewEvent};
use warmset_core::{Digest, Footprint, Instant, WorkerId, worker::Fact};
use warmset_gateway::{admin::EventLog, frontend::Frontend};
use warmset_worker::AgentHandle;

/// Writes that may wait for the catalog; beyond it the newest are dropped: serving goes on without a catalog.
const WRITES_WAITING_MAX: usize = 4096;
/// Events written in one step.
const BATCH_MAX: usize = 256;

/// Something for the catalog.
enum Write {
    Event(NewEvent),
    Measured(Digest, Box<Measurement>),
    Grown(Digest, Footprint),
}

/// Where facts go.
pub(crate) struct Listeners {
    pub(crate) worker: WorkerId,
    pub(crate) worker_type: String,
    pub(crate) agent: AgentHandle,
    pub(crate) frontend: Frontend,
    pub(crate) events: Arc<EventLog>,
    pub(crate) repository: Arc<Repository>,
}

/// Passes facts on until the worker has ended.
pub(crate) fn follow(listeners: Listeners) {
    let Some(mut facts) = listeners.agent.facts() else { return };
    let (writes, waiting) = mpsc::channel(WRITES_WAITING_MAX);
    tokio::spawn(write(listeners.repository.clone(), listeners.worker_type.clone(), waiting));
    tokio::spawn(async move {
        // What was told before anybody listened.
        listeners.resynchronise().await;
        loop {
            match facts.recv().await {
                Ok((now, fact)) => listeners.pass_on(now, &fact, &writes),
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "facts were missed; states are taken from the ledger");
                    listeners.resynchronise().await;
                }
                Err(RecvError::Closed) => break,
            }
        }
    });
}

impl Listeners {
    /// Tells the gateway every state as it is.
    async fn resynchronise(&self) {
        for line in self.agent.ledger().await.unwrap_or_default() {
            self.frontend.worker_state(self.worker, line.digest, line.state);
        }
    }

    fn pass_on(&self, now: Instant, fact: &Fact, writes: &mpsc::Sender<Write>) {
        let directory = self.frontend.directory();
        self.frontend.metrics().record_fact(now, fact, &|digest| directory.name_of(digest));
        if let Fact::StateChanged { digest, state } = fact {
            self.frontend.worker_state(self.worker, *digest, *state);
        }
        let told = Told::of(fact);
        let name = told.digest.and_then(|digest| directory.name_of(&digest));
        let mut document = told.detail.clone();
        document["type"] = json!(told.kind);
        document["worker"] = json!(self.worker);
        if let Some(digest) = told.digest {
            document["digest"] = json!(digest);
            document["model"] = name.as_ref().map_or_else(|| json!(digest), |name| json!(name));
        }
        self.events.publish(told.kind, document);
        if told.keep {
            let (kind, digest, detail) = (told.kind.to_owned(), told.digest, told.detail);
            queue(writes, Write::Event(NewEvent { kind, model: name, digest, detail }));
        }
        if let Fact::LoadFinished { digest, peak, steady, timings, .. } = fact {
            let (peak, steady, timings) = (peak.clone(), steady.clone(), *timings);
            let measurement = Measurement { timings, peak, steady, ..Measurement::default() };
            queue(writes, Write::Measured(*digest, Box::new(measurement)));
        }
        if let Fact::Grown { digest, steady, .. } = fact {
            queue(writes, Write::Grown(*digest, steady.clone()));
        }
    }
}

fn queue(writes: &mpsc::Sender<Write>, write: Write) {
    if writes.try_send(write).is_err() {
        tracing::warn!("the catalog cannot keep up; an event or a measurement is not written to it");
    }
}

/// Writes to the catalog, many events at once. Failing loses events and nothing else.
async fn write(repository: Arc<Repository>, worker_type: String, mut waiting: mpsc::Receiver<Write>) {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    while waiting.recv_many(&mut batch, BATCH_MAX).await > 0 {
        let mut events = Vec::new();
        for write in batch.drain(..) {
            match write {
                Write::Event(event) => events.push(event),
                Write::Measured(digest, measurement) => {
                    let recorded = repository.catalog.record_measurement(&digest, &worker_type, &measurement).await;
                    if let Err(error) = recorded {
                        tracing::warn!(%digest, "a measurement is lost: {error}");
                    }
                }
                Write::Grown(digest, steady) => {
                    if let Err(error) = repository.catalog.record_growth(&digest, &worker_type, &steady).await {
                        tracing::warn!(%digest, "a measurement is lost: {error}");
                    }
                }
            }
        }
        if let Err(error) = repository.catalog.append_events(&events).await {
            tracing::warn!("{} events are lost: {error}", events.len());
        }
    }
}

/// A fact in words.
struct Told {
    kind: &'static str,
    digest: Option<Digest>,
    detail: Value,
    /// Whether it goes into the catalog; changes of state are too many and follow from the others.
    keep: bool,
}

impl Told {
    fn of(fact: &Fact) -> Self {
        let told = |kind, detail| Self { kind, digest: fact.digest(), detail, keep: true };
        match fact {
            Fact::LoadStarted { .. } => Self { keep: false, ..told("load_started", json!({})) },
            Fact::LoadFinished { peak, steady, timings, .. } => {
                let detail = json!({
                    "seconds": timings.total_seconds(), "timings": timings,
                    "peak_bytes": peak.total_bytes(), "steady_bytes": steady.total_bytes(),
                });
                told("load_finished", detail)
            }
            Fact::LoadRefused { error, retry_after, .. } => {
                let detail = json!({
                    "message": error.message, "permanent": error.permanent,
                    "retry_after_seconds": retry_after.as_secs_f64(),
                });
                told("load_refused", detail)
            }
            Fact::EvictionStarted { reason, .. } => told("eviction_started", json!({ "reason": reason })),
            Fact::EvictionFinished { reason, .. } => {
                Self { keep: false, ..told("eviction_finished", json!({ "reason": reason })) }
            }
            Fact::EngineCrashed { message, .. } => told("engine_crashed", json!({ "message": message })),
            Fact::ThrashAlarm { pool, ratio, raised } => {
                let detail = json!({ "pool": pool, "ratio": ratio, "raised": raised });
                told("thrash_alarm", detail)
            }
            Fact::SizeCorrected { from_bytes, to_bytes, .. } => {
                let detail = json!({ "from_bytes": from_bytes, "to_bytes": to_bytes });
                Self { keep: false, ..told("size_corrected", detail) }
            }
            Fact::Grown { peak, steady, .. } => {
                let detail = json!({ "peak_bytes": peak.total_bytes(), "steady_bytes": steady.total_bytes() });
                told("model_grown", detail)
            }
            Fact::Parked { bytes, .. } => told("request_parked", json!({ "bytes": bytes })),
            Fact::Resumed { parked, .. } => told("request_resumed", json!({ "parked_seconds": parked.as_secs_f64() })),
            Fact::Preloaded { outcome, .. } => told("preloaded", json!({ "outcome": outcome })),
            Fact::StateChanged { state, .. } => {
                Self { keep: false, ..told("state_changed", json!({ "state": state })) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::{PoolName, worker::EvictionReason};

    #[test]
    fn facts_are_told_by_kind_and_details() {
        let digest = Digest([1; 32]);
        let told = Told::of(&Fact::EvictionStarted { digest, reason: EvictionReason::Memory });
        assert_eq!((told.kind, told.digest, told.keep), ("eviction_started", Some(digest), true));
        assert_eq!(told.detail, json!({ "reason": "memory" }));
        let alarm = Fact::ThrashAlarm { pool: PoolName::new("small"), ratio: 0.5, raised: true };
        let told = Told::of(&alarm);
        assert_eq!((told.kind, told.digest), ("thrash_alarm", None));
        assert_eq!(told.detail, json!({ "pool": "small", "ratio": 0.5, "raised": true }));
    }
}
