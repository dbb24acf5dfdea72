//! `warmset sim` of many models and one loader: who finds a model ready, and from which rate on loads cannot keep up.

use super::{sim::on_all_cores, sim_arguments::SimArguments};
use crate::output::{Output, table, text_of};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use warmset_planner::loader::{
    Plan,
    page::page,
    plan::{Case, Loader, Row},
};

/// Runs a plan and prints what came of it.
pub(super) fn run(text: &str, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(
        &["--trace", "--compare", "--slots", "--load-seconds", "--demand", "--capacity-tokens", "--live"],
        "this one is about one loader",
    )?;
    let plan = Plan::parse(text).with_context(|| format!("in {}", arguments.scenario))?;
    let cases = plan.loader.cases();
    let rows = {
        let _spinner = output.spinner(&format!("playing {} runs", cases.len()));
        play(&plan.loader, &cases, arguments.seed)?
    };
    let saturation = plan.loader.saturation(&rows);
    arguments.write_page(|| page(&plan, &rows, &saturation, arguments.seed))?;
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "seed": arguments.seed,
        "world": plan.loader,
        "saturation": saturation,
        "rows": rows,
    });
    output.result(&document, as_text);
    Ok(())
}

fn play(loader: &Loader, cases: &[Case], seed: u64) -> Result<Vec<Row>> {
    let rows: Result<Vec<Row>, String> = on_all_cores(cases, |case| loader.run(case, seed)).into_iter().collect();
    match rows {
        Ok(rows) => Ok(rows),
        Err(violation) => bail!("a machine broke the invariant {violation}: please report it"),
    }
}

fn as_text(document: &Value) -> String {
    let rows = |key: &str| document[key].as_array().cloned().unwrap_or_default();
    let number = |row: &Value, key: &str, digits: usize| format!("{:.digits$}", row[key].as_f64().unwrap_or(0.0));
    let percent = |row: &Value, key: &str| format!("{:.2} %", 100.0 * row[key].as_f64().unwrap_or(0.0));
    let runs = rows("rows").into_iter().map(|row| {
        vec![
            text_of(&row, "study"),
            text_of(&row, "policy"),
            text_of(&row, "zipf"),
            text_of(&row, "requests_per_second"),
            text_of(&row, "fetch_seconds"),
            text_of(&row, "slots"),
            percent(&row, "hit_share"),
            number(&row, "p50_seconds", 2),
            number(&row, "p99_seconds", 2),
            text_of(&row, "loads"),
            percent(&row, "loader_share"),
        ]
    });
    let saturation = rows("saturation").into_iter().map(|row| {
        let rate = number(&row, "requests_per_second", 3);
        vec![text_of(&row, "zipf"), percent(&row, "pinned_share"), percent(&row, "hit_share"), rate]
    });
    let heads =
        ["STUDY", "POLICY", "ZIPF", "PER SECOND", "LOAD, S", "FIT", "READY", "P50, S", "P99, S", "LOADS", "LOADER"];
    format!(
        "{}\nseed {}\n\n{}\n{}",
        text_of(document, "description"),
        text_of(document, "seed"),
        table(&["ZIPF", "PINNED", "READY", "LOADS KEEP UP BELOW, PER SECOND"], saturation),
        table(&heads, runs),
    )
}
