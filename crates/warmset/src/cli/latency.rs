//! Times that callers saw, as people read them.

use crate::{config::units::format_seconds, output::text_of};
use serde_json::Value;

/// How long callers waited, since the server began.
pub(super) fn latency_pairs(latency: &Value) -> Vec<(&'static str, String)> {
    let kinds = [
        ("warm first token", "warm", "first_token"),
        ("warm whole answer", "warm", "duration"),
        ("cold first token", "cold", "first_token"),
        ("cold whole answer", "cold", "duration"),
    ];
    let known = kinds.into_iter().filter(|(_, start, time)| latency[*start][*time].is_object());
    known
        .map(|(label, start, time)| {
            let found = &latency[start][time];
            (label, format!("{} (p50/p99 of {})", percentiles_text(found), text_of(found, "count")))
        })
        .collect()
}

/// `p50/p99`, as people read times.
pub(super) fn percentiles_text(found: &Value) -> String {
    match (found["p50_seconds"].as_f64(), found["p99_seconds"].as_f64()) {
        (Some(half), Some(most)) => format!("{}/{}", format_seconds(half), format_seconds(most)),
        _ => "-".to_owned(),
    }
}
