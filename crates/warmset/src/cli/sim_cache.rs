//! `warmset sim` of the KV tier: which blocks stay, by one rule or another.

use super::{
    sim::{on_all_cores, read_trace},
    sim_arguments::SimArguments,
};
use crate::output::{Output, table, text_of};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use warmset_planner::cache::{
    page::page,
    plan::{self, Plan},
};

/// Runs a plan and prints what came of it.
pub(super) fn run(text: &str, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(&["--slots", "--load-seconds", "--demand", "--live"], "this one is about blocks of KV")?;
    let plan = Plan::parse(text)
        .and_then(|plan| plan.with(&arguments.capacity_tokens))
        .with_context(|| format!("in {}", arguments.scenario))?;
    let policies = Plan::policies(&arguments.compare)?;
    let recorded = arguments.trace.as_deref().map(read_trace).transpose()?;
    let trace = plan.requests(arguments.seed, recorded.as_deref())?;
    let sizes = plan.cache.capacity_tokens.iter();
    let pairs: Vec<_> = sizes.flat_map(|size| policies.iter().map(move |policy| (*size, *policy))).collect();
    let replays = {
        let _spinner = output.spinner(&format!("replaying {} requests", trace.len()));
        on_all_cores(&pairs, |(size, (name, build))| (*size, *name, plan::run(&trace, *size, *build)))
    };
    let rows = plan::rows(&replays);
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "demand": arguments.trace.as_ref().map_or_else(|| json!("synthetic"), |path| json!(path)),
        "seed": arguments.seed,
        "requests": trace.len(),
        "blocks": trace.blocks(),
        "block_uses": trace.uses(),
        "rows": rows,
    });
    arguments.write_page(|| page(&plan, &rows))?;
    output.result(&document, as_text);
    Ok(())
}

fn as_text(document: &Value) -> String {
    let rows = document["rows"].as_array().into_iter().flatten().map(|row| {
        let share =
            |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", 100.0 * share));
        let gap =
            |key: &str| row[key].as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
        vec![
            text_of(row, "capacity_tokens"),
            text_of(row, "policy"),
            share("hit_share"),
            share("first_half_hit_share"),
            share("second_half_hit_share"),
            gap("gap_closed"),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let heads = ["ROOM, TOKENS", "POLICY", "FOUND", "FIRST HALF", "SECOND HALF", "FROM LRU TO OPTIMUM"];
    format!(
        "{}\n{} requests ({}), {} blocks used {} times, seed {}\n{}",
        text_of(document, "description"),
        text_of(document, "requests"),
        text_of(document, "demand"),
        text_of(document, "blocks"),
        text_of(document, "block_uses"),
        text_of(document, "seed"),
        table(&heads, rows),
    )
}
