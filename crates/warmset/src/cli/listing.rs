//! The list of models, as people read it.

use super::latency::percentiles_text;
use crate::{
    config::units::{format_bytes, format_seconds},
    output::{bytes_of, short_digest, table, text_of},
};
use serde_json::Value;
use std::collections::BTreeSet;

pub(super) fn list_text(document: &Value) -> String {
    let list = |key: &str| document[key].as_array().map_or(&[][..], Vec::as_slice);
    let models = list("models");
    let pools: BTreeSet<&str> = models.iter().filter_map(|model| model["pool"].as_str()).collect();
    let is_parked = |model: &Value| model["parked"].as_u64() > Some(0);
    // What says nothing is not shown.
    let hidden = [("POOL", pools.len() < 2), ("PARKED", !models.iter().any(is_parked))];
    let shown: Vec<usize> = (0..HEADS.len()).filter(|column| !hidden.contains(&(HEADS[*column], true))).collect();
    let rows = models.iter().map(model_row).chain(list("fetches").iter().map(fetch_row));
    let rows: Vec<Vec<String>> = rows.map(|row| shown.iter().map(|column| row[*column].clone()).collect()).collect();
    if rows.is_empty() {
        return "no models yet: add one with `warmset model add NAME FILE`".to_owned();
    }
    let heads: Vec<&str> = shown.iter().map(|column| HEADS[*column]).collect();
    table(&heads, rows)
}

const HEADS: [&str; 11] =
    ["NAME", "STATE", "PIN", "POOL", "ENGINE", "FILE", "MEMORY", "PARKED", "WARM p50/p99", "COLD p50/p99", "DIGEST"];

fn model_row(model: &Value) -> [String; HEADS.len()] {
    [
        text_of(model, "name"),
        text_of(model, "state"),
        if model["pin"] == true { "pinned".to_owned() } else { String::new() },
        text_of(model, "pool"),
        text_of(model, "engine"),
        bytes_of(model, "size_bytes"),
        format!("{}{}", if model["measured"] == true { "" } else { "~" }, bytes_of(model, "steady_bytes")),
        model["parked"].as_u64().unwrap_or(0).to_string(),
        percentiles_text(&model["latency"]["warm"]["first_token"]),
        percentiles_text(&model["latency"]["cold"]["first_token"]),
        short_digest(model),
    ]
}

/// A model that is not there yet: its files are on their way.
fn fetch_row(fetch: &Value) -> [String; HEADS.len()] {
    let share = |total: f64| format!("fetching {:.0} %", 100.0 * fetch["done_bytes"].as_f64().unwrap_or(0.0) / total);
    let state = fetch["total_bytes"].as_f64().map_or_else(|| "fetching".to_owned(), share);
    let rate = fetch["bytes_per_second"].as_f64().map(|rate| format!("{}/s", format_bytes(rate as u64)));
    let left = fetch["seconds_left"].as_f64().map(|seconds| format!(", {} left", format_seconds(seconds)));
    let speed = rate.unwrap_or_default() + &left.unwrap_or_default();
    let size = bytes_of(fetch, "total_bytes");
    let mut row: [String; HEADS.len()] = Default::default();
    (row[0], row[1], row[5], row[6]) = (text_of(fetch, "name"), state, size, speed);
    row
}
