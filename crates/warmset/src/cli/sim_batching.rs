//! `warmset sim` of engines: what callers see of replicas that batch, step by step and as queues.

use super::{
    sim::{on_all_cores, read_trace},
    sim_arguments::SimArguments,
};
use crate::output::{Output, table, text_of};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use warmset_planner::batching::plan::Plan;

/// Runs a plan and prints what came of it.
pub(super) fn run(text: &str, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(
        &["--slots", "--load-seconds", "--demand", "--capacity-tokens", "--html", "--live"],
        "this one is about steps of engines",
    )?;
    let plan = Plan::parse(text).with_context(|| format!("in {}", arguments.scenario))?;
    let levels = Plan::levels(&arguments.compare)?;
    let settings = plan.settings()?;
    let recorded = arguments.trace.as_deref().map(read_trace).transpose()?;
    let loads = plan.loads(arguments.seed, recorded.as_deref())?;
    let pairs: Vec<_> = loads.iter().flat_map(|load| levels.iter().map(move |level| (load, *level))).collect();
    let rows = {
        let _spinner = output.spinner(&format!("playing {} runs", pairs.len()));
        on_all_cores(&pairs, |(load, level)| plan.run(&settings, load, *level))
    };
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "demand": arguments.trace.as_ref().map_or_else(|| json!("synthetic"), |path| json!(path)),
        "seed": arguments.seed,
        "settings": settings,
        "rows": rows.into_iter().collect::<Result<Vec<_>, _>>()?,
    });
    output.result(&document, as_text);
    Ok(())
}

fn as_text(document: &Value) -> String {
    let rows = document["rows"].as_array().into_iter().flatten().map(|row| {
        let number = |value: &Value, digits: usize| {
            value.as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let pair = |what: &str, factor: f64, digits: usize| {
            let times = &row["latency"][what];
            let one = |key: &str| times[key].as_f64().map(|value| format!("{:.digits$}", factor * value));
            match (one("p50"), one("p99")) {
                (Some(median), Some(tail)) => format!("{median} / {tail}"),
                _ => "-".to_owned(),
            }
        };
        let share =
            |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share));
        vec![
            number(&row["offered_requests_per_second"], 1),
            text_of(row, "level"),
            text_of(row, "verdict"),
            share("offered_share_of_capacity"),
            pair("time_to_first_token_seconds", 1e3, 0),
            pair("inter_token_seconds", 1e3, 1),
            pair("end_to_end_seconds", 1.0, 2),
            pair("queue_wait_seconds", 1e3, 0),
            text_of(row, "unfinished"),
            row["preemptions"].as_u64().map_or_else(|| "-".to_owned(), |count| count.to_string()),
            share("prefix_hit_share"),
            share("memory_max_share"),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let heads = [
        "PER SECOND",
        "LEVEL",
        "VERDICT",
        "OF WHAT IT CAN DO",
        "FIRST TOKEN P50 / P99, MS",
        "BETWEEN TOKENS, MS",
        "ALL OF IT, S",
        "QUEUE, MS",
        "UNFINISHED",
        "BEGAN AGAIN",
        "PREFIX FOUND",
        "KV, MOST",
    ];
    format!(
        "{}\n{} replicas, seed {}, demand {}; steps: {}\n{}",
        text_of(document, "description"),
        text_of(&document["settings"], "replicas"),
        text_of(document, "seed"),
        text_of(document, "demand"),
        text_of(&document["settings"], "cost_source"),
        table(&heads, rows),
    )
}
