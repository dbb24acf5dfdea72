//! `warmset sim` of a pool in which something changes: what callers see with the change and without it.

use super::{
    sim::on_all_cores,
    sim_arguments::SimArguments,
    sim_pool::{items, number, outcomes, yes_or_no},
};
use crate::output::{Output, table, text_of};
use anyhow::{Result, bail};
use serde_json::{Value, json};
use warmset_planner::pool::{
    changes::{Changes, Row},
    changes_page::page,
    scenario::Plan,
};

/// Runs a plan and prints what came of it.
pub(super) fn run(plan: &Plan, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(&["--demand", "--live"], "this one is about what changes in a pool")?;
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
    arguments.write_page(|| page(plan, &rows, arguments.seed))?;
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

fn as_text(document: &Value) -> String {
    let rows = items(&document["rows"]);
    let all = rows.iter().map(|row| named(row, figures(row)));
    let done = rows.iter().map(|row| {
        let fetches = &row["fetches"];
        let cells = [
            number(row, "cost", 2),
            text_of(&row["counts"], "loads"),
            text_of(fetches, "count"),
            number(fetches, "gigabytes", 0),
            number(fetches, "seconds_max", 1),
            text_of(row, "failovers"),
        ];
        named(row, cells)
    });
    let windows = items(&rows[0]["windows"]).into_iter().enumerate().map(|(place, window)| {
        let lines = rows.iter().map(|row| named(row, figures(&row["windows"][place])));
        format!("\nIn the meantime: {}\n{}", text_of(&window, "what"), table(&FIGURES, lines))
    });
    let heads = ["POOL", "COST", "LOADS", "FETCHES", "GB", "LONGEST, S", "SENT ELSEWHERE"];
    format!(
        "{}\n{} requests in {} hours, seed {}; P50 and P99 are seconds to the first token\n\n{}\n{}{}{}",
        text_of(document, "description"),
        text_of(document, "requests"),
        text_of(document, "hours"),
        text_of(document, "seed"),
        table(&FIGURES, all),
        table(&heads, done),
        windows.collect::<String>(),
        promotions(&rows[0]["promotions"]),
    )
}

fn named(row: &Value, cells: impl IntoIterator<Item = String>) -> Vec<String> {
    std::iter::once(text_of(row, "variant")).chain(cells).collect()
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
        yes_or_no(&row["switched"]),
    ]
}

const FIGURES: [&str; 9] = ["POOL", "REQUESTS", "REFUSED", "BROKEN", "UNFINISHED", "COLD", "IN TARGET", "P50", "P99"];

fn figures(row: &Value) -> impl Iterator<Item = String> {
    let seconds = ["first_token_p50_seconds", "first_token_p99_seconds"].map(|field| number(row, field, 2));
    outcomes(row).into_iter().chain(seconds)
}
