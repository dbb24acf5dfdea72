//! `warmset sim` of engines: what callers see of replicas that batch, step by step and as queues.

use super::{
    sim::{on_all_cores, read_trace},
    sim_arguments::SimArguments,
    sim_pool::number,
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
    let rows = document["rows"].as_array().map_or(&[][..], Vec::as_slice);
    format!(
        "{}\n{} replicas, seed {}, demand {}; steps: {}\n{}\nMilliseconds, p50 / p99\n{}",
        text_of(document, "description"),
        text_of(&document["settings"], "replicas"),
        text_of(document, "seed"),
        text_of(document, "demand"),
        text_of(&document["settings"], "cost_source"),
        table(&OUTCOMES, rows.iter().map(|row| named(row, outcomes(row)))),
        table(&TIMES, rows.iter().map(|row| named(row, times(row)))),
    )
}

/// Heads of the tables, which fit into a hundred columns.
const OUTCOMES: [&str; 8] =
    ["PER SECOND", "LEVEL", "VERDICT", "LOAD", "UNFINISHED", "BEGAN AGAIN", "PREFIX FOUND", "KV, MOST"];
const TIMES: [&str; 6] = ["PER SECOND", "LEVEL", "FIRST TOKEN", "BETWEEN TOKENS", "ALL OF IT", "QUEUE"];

fn named<const N: usize>(row: &Value, cells: [String; N]) -> Vec<String> {
    [number(row, "offered_requests_per_second", 1), text_of(row, "level")].into_iter().chain(cells).collect()
}

fn outcomes(row: &Value) -> [String; 6] {
    [
        text_of(row, "verdict"),
        share(row, "offered_share_of_capacity"),
        text_of(row, "unfinished"),
        text_of(row, "preemptions"),
        share(row, "prefix_hit_share"),
        share(row, "memory_max_share"),
    ]
}

fn times(row: &Value) -> [String; 4] {
    let pair = |what: &str, digits: usize| {
        let times = &row["latency"][what];
        let one = |key: &str| times[key].as_f64().map(|seconds| format!("{:.digits$}", 1e3 * seconds));
        one("p50").zip(one("p99")).map_or_else(|| "-".to_owned(), |(median, tail)| format!("{median} / {tail}"))
    };
    [
        pair("time_to_first_token_seconds", 0),
        pair("inter_token_seconds", 1),
        pair("end_to_end_seconds", 0),
        pair("queue_wait_seconds", 0),
    ]
}

fn share(row: &Value, key: &str) -> String {
    row[key].as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}
