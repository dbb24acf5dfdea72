//! `warmset sim` of a pool in which something changes: what callers see with the change and without it.

use super::{
    sim::on_all_cores,
    sim_arguments::SimArguments,
    sim_pool::{number, outcomes},
};
use crate::output::{Output, table, text_of};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use warmset_planner::pool::{
    changes::{Changes, Row},
    scenario::Plan,
};

/// Runs a plan and prints what came of it.
pub(super) fn run(plan: &Plan, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(&["--demand", "--html", "--live"], "this one is about what changes in a pool")?;
    let changes = Changes::new(plan, arguments.seed);
    let rows = {
        let _spinner = output.spinner(&format!("playing {} requests", changes.requests()));
        play(&changes)?
    };
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "seed": arguments.seed,
        "requests": changes.requests(),
        "hours": plan.pool.hours,
        "price_per_machine_hour": plan.pool.price_per_machine_hour,
        "rows": rows,
    });
    output.result(&document, as_text);
    Ok(())
}

fn play(changes: &Changes<'_>) -> Result<Vec<Row>> {
    let rows = on_all_cores(&changes.variants(), |variant| changes.run(variant));
    match rows.into_iter().collect::<Result<Vec<Row>, String>>() {
        Ok(rows) => Ok(rows),
        Err(violation) => bail!("a machine broke the invariant {violation}: please report it"),
    }
}

fn items(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn as_text(document: &Value) -> String {
    let rows = items(&document["rows"]);
    let all = rows.iter().map(|row| {
        let mut cells = vec![text_of(row, "variant"), number(row, "cost", 2)];
        cells.extend(figures(row));
        cells.extend([
            text_of(&row["counts"], "loads"),
            text_of(&row["fetches"], "count"),
            number(&row["fetches"], "gigabytes", 0),
            number(&row["fetches"], "seconds_max", 1),
            text_of(row, "failovers"),
        ]);
        cells
    });
    let windows = items(&rows[0]["windows"]).into_iter().enumerate().flat_map(|(place, window)| {
        let line = move |row: &Value| {
            let mut cells = vec![text_of(&window, "what"), text_of(row, "variant")];
            cells.extend(figures(&row["windows"][place]));
            cells
        };
        rows.iter().map(line).collect::<Vec<_>>()
    });
    format!(
        "{}\n{} requests in {} hours, seed {}\n\n{}\nWhat came in the meantime\n{}{}",
        text_of(document, "description"),
        text_of(document, "requests"),
        text_of(document, "hours"),
        text_of(document, "seed"),
        table(&[&["POOL", "COST"], &FIGURES[..], &["LOADS", "FETCHES", "GB", "LONGEST, S", "ELSEWHERE"]].concat(), all),
        table(&[&["WHAT", "POOL"], &FIGURES[..]].concat(), windows),
        promotions(&rows[0]["promotions"]),
    )
}

/// New versions of the pool as it is described, if there were any.
fn promotions(rows: &Value) -> String {
    let lines: Vec<Vec<String>> = items(rows).iter().map(promotion).collect();
    let heads = ["MODEL", "MACHINE", "AT, S", "TOOK, S", "HOW", "GAP, S", "WAITED", "SWITCHED"];
    if lines.is_empty() { String::new() } else { format!("\nNew versions\n{}", table(&heads, lines)) }
}

fn promotion(row: &Value) -> Vec<String> {
    vec![
        text_of(row, "model"),
        text_of(row, "machine"),
        number(row, "at_seconds", 0),
        number(row, "seconds", 1),
        text_of(row, "strategy").replace('_', " "),
        number(row, "gap_seconds", 1),
        text_of(row, "waited"),
        if row["switched"] == true { "yes".to_owned() } else { "no".to_owned() },
    ]
}

const FIGURES: [&str; 8] = ["REQUESTS", "REFUSED", "BROKEN", "UNFINISHED", "COLD", "WITHIN TARGET", "P50, S", "P99, S"];

fn figures(row: &Value) -> Vec<String> {
    let seconds = ["first_token_p50_seconds", "first_token_p99_seconds"].map(|field| number(row, field, 2));
    outcomes(row).into_iter().chain(seconds).collect()
}
