//! The list of models, as people read it.

use super::latency::percentiles_text;
use crate::{
    config::units::{format_bytes, format_seconds},
    output::{bytes_of, short_digest, table, text_of},
};
use serde_json::Value;

pub(super) fn list_text(document: &Value) -> String {
    let models = document["models"].as_array().into_iter().flatten();
    let rows = models.map(|model| {
        vec![
            text_of(model, "name"),
            text_of(model, "state"),
            if model["pin"] == true { "pinned".to_owned() } else { String::new() },
            text_of(model, "engine"),
            bytes_of(model, "size_bytes"),
            format!("{}{}", if model["measured"] == true { "" } else { "~" }, bytes_of(model, "steady_bytes")),
            percentiles_text(&model["latency"]["warm"]["first_token"]),
            percentiles_text(&model["latency"]["cold"]["first_token"]),
            short_digest(model),
        ]
    });
    let fetches = document["fetches"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = rows.chain(fetches.map(fetch_row)).collect();
    if rows.is_empty() {
        return "no models yet: add one with `warmset model add NAME FILE`".to_owned();
    }
    table(&["NAME", "STATE", "PIN", "ENGINE", "FILE", "MEMORY", "WARM p50/p99", "COLD p50/p99", "DIGEST"], rows)
}

/// A model that is not there yet: its files are on their way.
fn fetch_row(fetch: &Value) -> Vec<String> {
    let share = |total: f64| format!("fetching {:.0} %", 100.0 * fetch["done_bytes"].as_f64().unwrap_or(0.0) / total);
    let state = fetch["total_bytes"].as_f64().map_or_else(|| "fetching".to_owned(), share);
    let rate = fetch["bytes_per_second"].as_f64().map(|rate| format!("{}/s", format_bytes(rate as u64)));
    let left = fetch["seconds_left"].as_f64().map(|seconds| format!(", {} left", format_seconds(seconds)));
    let speed = rate.unwrap_or_default() + &left.unwrap_or_default();
    let size = bytes_of(fetch, "total_bytes");
    vec![
        text_of(fetch, "name"),
        state,
        String::new(),
        String::new(),
        size,
        speed,
        String::new(),
        String::new(),
        String::new(),
    ]
}
