//! `warmset sim` of memory that models and KV share: the boundary that worth moves, beside fixed ones.

use super::{sim::on_all_cores, sim_arguments::SimArguments};
use crate::output::{Output, table, text_of};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use warmset_planner::boundary::{
    Plan,
    demand::{Request, requests},
    page::page,
    run::{self, MOVING, Memory, Policy, Row, policies, ratio_to_best_fixed},
};

/// Runs a plan and prints what came of it.
pub(super) fn run(text: &str, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(
        &["--trace", "--slots", "--load-seconds", "--capacity-tokens", "--live"],
        "this one is about models and conversations",
    )?;
    let plan = Plan::parse(text).with_context(|| format!("in {}", arguments.scenario))?;
    let wanted = policies(&plan.boundary, &arguments.compare).context("--compare")?;
    let requests = requests(&plan.boundary, arguments.seed);
    arguments.write_demand(&demand_document(&requests))?;
    let played = {
        let _spinner = output.spinner(&format!("playing {} requests", requests.len()));
        play(&plan, &wanted, &requests)?
    };
    let moving = played.iter().find(|(row, _)| row.policy == MOVING).map(|(_, memory)| memory.clone());
    let rows: Vec<Row> = played.into_iter().map(|(row, _)| row).collect();
    arguments.write_page(|| page(&plan, &rows, moving.as_ref(), arguments.seed))?;
    let best = ratio_to_best_fixed(&rows);
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "seed": arguments.seed,
        "requests": requests.len(),
        "world": plan.boundary,
        "ratio_to_best_fixed": best.map(|(ratio, _)| ratio),
        "best_fixed": best.map(|(_, name)| name),
        "rows": rows,
        "memory": moving,
    });
    output.result(&document, as_text);
    Ok(())
}

/// The requests themselves, for a replay against a server.
fn demand_document(requests: &[Request]) -> Value {
    let line = |request: &Request| {
        json!({
            "second": request.at.since(warmset_core::Instant::ZERO).as_secs_f64(),
            "model": request.model,
            "phase": request.phase,
            "prompt_tokens": request.prompt.tokens,
            "said_tokens": request.said_tokens,
            "output_tokens": request.prompt.output_tokens,
        })
    };
    json!({ "requests": requests.iter().map(line).collect::<Vec<_>>() })
}

fn play(plan: &Plan, wanted: &[Policy], requests: &[Request]) -> Result<Vec<(Row, Memory)>> {
    let played = on_all_cores(wanted, |policy| run::run(&plan.boundary, policy, requests));
    match played.into_iter().collect::<Result<Vec<_>, _>>() {
        Ok(played) => Ok(played),
        Err(violation) => bail!("a machine broke the invariant {violation}: please report it"),
    }
}

fn as_text(document: &Value) -> String {
    let rows = document["rows"].as_array().cloned().unwrap_or_default();
    let number = |row: &Value, key: &str, digits: usize| format!("{:.digits$}", row[key].as_f64().unwrap_or(0.0));
    let share = |row: &Value, key: &str| {
        let tokens = row["prompt_tokens"].as_f64().unwrap_or(0.0).max(1.0);
        format!("{:.1} %", 100.0 * row[key].as_f64().unwrap_or(0.0) / tokens)
    };
    let cells = |row: &Value| {
        vec![
            text_of(row, "policy"),
            number(row, "waited_seconds", 0),
            number(row, "first_token_p50_seconds", 2),
            number(row, "first_token_p99_seconds", 2),
            text_of(row, "loads"),
            text_of(row, "evictions"),
            text_of(row, "preloads_used"),
            text_of(row, "preloads_wasted"),
            share(row, "device_tokens"),
            share(row, "restored_tokens"),
        ]
    };
    let phases = |row: &Value| -> Vec<String> {
        let phase = |phase: &Value| {
            let kv = 100.0 * phase["kv_share"].as_f64().unwrap_or(0.0);
            format!("{} ({kv:.0} %)", number(phase, "waited_seconds", 0))
        };
        std::iter::once(text_of(row, "policy"))
            .chain(row["phases"].as_array().into_iter().flatten().map(phase))
            .collect()
    };
    let names = rows.first().and_then(|row| row["phases"].as_array().cloned()).unwrap_or_default();
    let names: Vec<String> = names.iter().map(|phase| text_of(phase, "phase").to_uppercase()).collect();
    let phase_heads: Vec<&str> = std::iter::once("BOUNDARY").chain(names.iter().map(String::as_str)).collect();
    let heads = [
        "BOUNDARY",
        "WAITED, S",
        "P50, S",
        "P99, S",
        "LOADS",
        "EVICTIONS",
        "AHEAD",
        "WASTED",
        "IN ENGINES",
        "RESTORED",
    ];
    let ratio = document["ratio_to_best_fixed"].as_f64();
    let verdict = ratio.map(|ratio| {
        format!(
            "the moving boundary waits {ratio:.2} times as long as the best fixed one ({})\n",
            text_of(document, "best_fixed")
        )
    });
    format!(
        "{}\n{} requests, seed {}; seconds waited for first tokens beyond what they take where everything is warm\n\n{}\n\
         seconds waited in each phase, and the share of the memory that KV held\n{}\n{}",
        text_of(document, "description"),
        text_of(document, "requests"),
        text_of(document, "seed"),
        table(&heads, rows.iter().map(cells)),
        table(&phase_heads, rows.iter().map(phases)),
        verdict.unwrap_or_default(),
    )
}
