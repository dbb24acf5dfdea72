//! The last decisions, for whoever asks why a request went where it went.

use super::usage::Counted;
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use warmset_core::routing::{Decision, Outcome, ReplicaId};

/// Decisions that are kept.
pub(super) const DECISIONS_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct DecisionLog(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    last: u64,
    kept: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    request: String,
    model: String,
    names: Vec<(ReplicaId, Arc<str>)>,
    decision: Decision,
    retried: bool,
    first_output_seconds: Option<f64>,
    outcome: Option<Outcome>,
    counted: Option<Counted>,
}

impl DecisionLog {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a decision; the number finds it again.
    pub(super) fn note(
        &self,
        (request, model): (&str, &str),
        decision: Decision,
        names: Vec<(ReplicaId, Arc<str>)>,
        retried: bool,
    ) -> u64 {
        let mut entries = self.entries();
        entries.last += 1;
        let number = entries.last;
        if entries.kept.len() == DECISIONS_MAX {
            entries.kept.pop_front();
        }
        entries.kept.push_back(Entry {
            number,
            request: request.to_owned(),
            model: model.to_owned(),
            names,
            decision,
            retried,
            first_output_seconds: None,
            outcome: None,
            counted: None,
        });
        number
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut Entry)) {
        let mut entries = self.entries();
        let found = entries.kept.binary_search_by_key(&number, |entry| entry.number);
        if let Ok(place) = found {
            change(&mut entries.kept[place]);
        }
    }

    pub(super) fn first_output(&self, number: u64, seconds: f64) {
        self.change(number, |entry| entry.first_output_seconds = Some(seconds));
    }

    pub(super) fn ended(&self, number: u64, outcome: Outcome, counted: Option<Counted>) {
        self.change(number, |entry| (entry.outcome, entry.counted) = (Some(outcome), counted));
    }

    /// The newest first.
    pub(super) fn documents(&self, limit: usize) -> Vec<Value> {
        self.entries().kept.iter().rev().take(limit).map(document).collect()
    }
}

fn document(entry: &Entry) -> Value {
    let name = |id: ReplicaId| entry.names.iter().find(|(known, _)| *known == id).map(|(_, name)| name.to_string());
    let candidates = entry.decision.candidates.iter().flatten().map(|candidate| {
        json!({
            "replica": name(candidate.replica), "cost_seconds": candidate.cost_seconds,
            "cached_tokens": candidate.cached_tokens, "in_flight": candidate.in_flight, "owner": candidate.owner,
        })
    });
    json!({
        "request": entry.request,
        "model": entry.model,
        "replica": name(entry.decision.replica),
        "decision": entry.decision.why.as_str(),
        "retried": entry.retried,
        "prompt_tokens": entry.decision.prompt_tokens,
        "expected_cached_tokens": entry.decision.expected_cached_tokens,
        "expected_seconds": entry.decision.expected_seconds,
        "candidates": candidates.collect::<Vec<_>>(),
        "first_output_seconds": entry.first_output_seconds,
        "outcome": entry.outcome.map(outcome_name),
        "counted_prompt_tokens": entry.counted.map(|counted| counted.prompt_tokens),
        "counted_cached_tokens": entry.counted.and_then(|counted| counted.cached_tokens),
    })
}

/// The name of an outcome in metrics and in the log.
pub(super) fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Finished => "ok",
        Outcome::Cancelled => "cancelled",
        Outcome::Busy { .. } => "busy",
        Outcome::Failed | Outcome::Lost => "failed",
    }
}
