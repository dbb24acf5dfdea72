//! `warmset sim` of the router: which replica requests go to, and what their callers see of it.

use super::{sim::on_all_cores, sim_arguments::SimArguments};
use crate::output::{Output, table, text_of};
use anyhow::Result;
use serde_json::{Value, json};
use warmset_planner::routing::plan::Plan;

/// Runs a plan and prints what came of it.
pub(super) fn run(text: &str, arguments: &SimArguments, output: Output) -> Result<()> {
    let plan = Plan::parse(text)?;
    arguments.refuse(
        &["--trace", "--slots", "--load-seconds", "--demand", "--capacity-tokens", "--html", "--live"],
        "this one is about replicas",
    )?;
    let policies = Plan::policies(&arguments.compare)?;
    let loads = plan.requests_per_second.iter();
    let pairs: Vec<_> = loads.flat_map(|load| policies.iter().map(move |policy| (*load, policy))).collect();
    let rows = {
        let _spinner = output.spinner(&format!("playing {} runs", pairs.len()));
        on_all_cores(&pairs, |(load, policy)| plan.run(*load, arguments.seed, policy))
    };
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "seed": arguments.seed,
        "world": plan.routing,
        "rows": rows,
    });
    output.result(&document, as_text);
    Ok(())
}

fn as_text(document: &Value) -> String {
    let rows = document["rows"].as_array().into_iter().flatten().map(|row| {
        let share = |key: &str| format!("{:.1} %", 100.0 * row[key].as_f64().unwrap_or(0.0));
        let number = |key: &str| format!("{:.2}", row[key].as_f64().unwrap_or(0.0));
        vec![
            text_of(row, "requests_per_second"),
            text_of(row, "policy"),
            share("hit_share"),
            share("cold_hit_share"),
            number("max_to_mean_in_flight"),
            share("within_target_share"),
            number("first_token_p50_seconds"),
            number("first_token_p99_seconds"),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let heads = ["PER SECOND", "POLICY", "PROMPT WARM", "COLD TENANTS'", "MAX/MEAN", "WITHIN 1 S", "P50, S", "P99, S"];
    format!("{}\nseed {}\n{}", text_of(document, "description"), text_of(document, "seed"), table(&heads, rows))
}
