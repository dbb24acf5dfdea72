//! The report of boundaries as a page.

use super::{
    plan::Plan,
    run::{MOVING, Memory, Row},
};
use crate::html::{Axis, Band, Page, PlotError, Series, lines, seconds_text, stacked};

const GIGABYTE: f64 = 1e9;

/// One page with tables and plots.
pub fn page(plan: &Plan, rows: &[Row], memory: Option<&Memory>, seed: u64) -> Result<String, PlotError> {
    let mut page = Page::new("Memory that models and KV share", plan.description.trim());
    let boundary = &plan.boundary;
    page.text(&format!(
        "{:.1} GB of memory, models of {:.1} GB, seed {seed}. Waited is what callers waited for their first token beyond what it takes \
         where everything is warm, all together.",
        boundary.memory_bytes as f64 / GIGABYTE,
        boundary.model_bytes as f64 / GIGABYTE
    ));
    page.heading("What each boundary costs");
    waits(&mut page, rows)?;
    table(&mut page, rows);
    if let Some(memory) = memory {
        page.heading("Where worth puts the boundary");
        let gigabytes = |bytes: &[u64]| bytes.iter().map(|bytes| *bytes as f64 / GIGABYTE).collect();
        let band = |bytes: &[u64], colour| Band { heights: gigabytes(bytes), colour, lightness: 0.0 };
        let bands = [band(&memory.models_bytes, 0), band(&memory.kv_bytes, 1)];
        let (x, y) = (Axis::linear("seconds"), Axis::linear("gigabytes"));
        let svg = stacked(x, y, &memory.seconds, &bands, boundary.memory_bytes as f64 / GIGABYTE);
        page.figure("Who held the memory, moved by worth", svg, &["models", "KV"])?;
    }
    page.heading("By phase");
    phases(&mut page, rows);
    Ok(page.finish())
}

/// What was waited against the share of KV: a point for each fixed boundary, a line for the one that moves.
fn waits(page: &mut Page, rows: &[Row]) -> Result<(), PlotError> {
    let mut fixed: Vec<(f64, f64)> =
        rows.iter().filter_map(|row| Some((100.0 * row.kv_share?, row.waited_seconds))).collect();
    fixed.sort_by(|one, other| one.0.total_cmp(&other.0));
    let moving = rows.iter().find(|row| row.policy == MOVING).map(|row| row.waited_seconds);
    let ends = [fixed.first(), fixed.last()].into_iter().flatten().map(|(share, _)| *share);
    let level = ends.filter_map(|share| Some((share, moving?))).collect();
    let series =
        [Series { points: level, marked: false, colour: 0 }, Series { points: fixed, marked: true, colour: 1 }];
    let svg = lines(Axis::linear("% of the memory for KV"), Axis::logarithmic("seconds waited"), &series);
    page.figure("Seconds waited, by what KV has", svg, &["moved by worth", "fixed"])
}

fn table(page: &mut Page, rows: &[Row]) {
    let heads = [
        "boundary",
        "waited, s",
        "first token p50, s",
        "p99, s",
        "loads",
        "evictions",
        "ahead: used",
        "wasted",
        "found, % of prompts' tokens",
        "in engines",
        "brought back",
    ];
    let rows = rows.iter().map(|row| {
        let percent = |tokens: u64| format!("{:.1}", 100.0 * tokens as f64 / row.prompt_tokens.max(1) as f64);
        let cells = vec![
            row.policy.clone(),
            seconds_text(row.waited_seconds),
            seconds_text(row.first_token_p50_seconds),
            seconds_text(row.first_token_p99_seconds),
            row.loads.to_string(),
            row.evictions.to_string(),
            row.preloads_used.to_string(),
            row.preloads_wasted.to_string(),
            percent(row.device_tokens + row.restored_tokens),
            percent(row.device_tokens),
            percent(row.restored_tokens),
        ];
        (row.kv_share.is_none(), cells)
    });
    page.table(&heads, &rows.collect::<Vec<_>>());
}

fn phases(page: &mut Page, rows: &[Row]) {
    let Some(first) = rows.first() else { return };
    let names = first.phases.iter().map(|phase| format!("{}: waited, s (KV held)", phase.phase));
    let heads: Vec<String> = std::iter::once("boundary".to_owned()).chain(names).collect();
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    let rows = rows.iter().map(|row| {
        let cells = row
            .phases
            .iter()
            .map(|phase| format!("{} ({:.0} %)", seconds_text(phase.waited_seconds), 100.0 * phase.kv_share));
        (row.kv_share.is_none(), std::iter::once(row.policy.clone()).chain(cells).collect())
    });
    page.table(&heads, &rows.collect::<Vec<_>>());
}
