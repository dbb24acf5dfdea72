//! What listeners hear of a fetch: that it began, how far it is, how it ended.

use crate::repository::{Added, ModelOptions};
use anyhow::Result;
use serde_json::{Value, json};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use warmset_gateway::admin::EventLog;
use warmset_source::Location;

/// Progress is told at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Tells of one fetch. Files of this machine are copied, which nobody is told.
#[derive(Clone)]
pub(crate) struct Told {
    events: Arc<EventLog>,
    model: String,
    /// As it may be shown; none for a file of this machine.
    source: Option<String>,
    last: Arc<Mutex<Option<Instant>>>,
}

impl Told {
    pub(crate) fn new(events: Arc<EventLog>, options: &ModelOptions) -> Self {
        let location = Location::parse(&options.source).ok().filter(|location| location.path().is_none());
        let source = location.map(|location| location.to_string());
        Self { events, model: options.name.clone(), source, last: Arc::default() }
    }

    /// Something came.
    pub(crate) fn hear(&self, done: u64, total: u64) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL && done < total) {
            return;
        }
        let kind = if last.is_none() { "fetch_started" } else { "fetch_progress" };
        *last = Some(Instant::now());
        drop(last);
        self.publish(kind, json!({ "done_bytes": done, "total_bytes": (total > 0).then_some(total) }));
    }

    /// It is over, well or not.
    pub(crate) fn end(&self, outcome: &Result<Added>) {
        if self.last.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return;
        }
        match outcome {
            Ok(added) => {
                let (digest, seconds) = (added.model.digest, added.model.settings.fetch_seconds);
                self.publish("fetch_finished", json!({ "digest": digest, "seconds": seconds }));
            }
            Err(error) => self.publish("fetch_failed", json!({ "message": format!("{error:#}") })),
        }
    }

    fn publish(&self, kind: &'static str, mut document: Value) {
        let Some(source) = &self.source else { return };
        document["type"] = json!(kind);
        document["model"] = json!(self.model);
        document["source"] = json!(source);
        self.events.publish(kind, document);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(source: &str) -> Vec<&'static str> {
        let events = Arc::new(EventLog::default());
        let options = ModelOptions { name: "a".into(), source: source.into(), ..ModelOptions::default() };
        let told = Told::new(events.clone(), &options);
        for done in 0..=10 {
            told.hear(done, 10);
        }
        told.end(&Err(anyhow::anyhow!("broken")));
        let mut found = Vec::new();
        let mut subscription = events.subscribe(0);
        while found.len() < events.last_id() as usize {
            let next = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(subscription.next());
            if let warmset_gateway::admin::Next::Event(event) = next {
                found.push(event.kind);
            }
        }
        found
    }

    #[test]
    fn a_fetch_is_told_and_a_copy_is_not() {
        assert_eq!(kinds("https://h.example/a.gguf"), ["fetch_started", "fetch_progress", "fetch_failed"]);
        assert!(kinds("/a.gguf").is_empty());
    }
}
