//! The report of rules for KV as a page.

use super::plan::{Plan, Row};
use crate::html::{Axis, Page, PlotError, Series, lines};

/// One page with a table and a plot.
pub fn page(plan: &Plan, rows: &[Row]) -> Result<String, PlotError> {
    let mut page = Page::new("Which blocks of KV stay", plan.description.trim());
    let mut policies: Vec<&str> = Vec::new();
    for row in rows {
        if !policies.contains(&row.policy) {
            policies.push(row.policy);
        }
    }
    let series = policies.iter().enumerate().map(|(number, policy)| {
        let mut points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.policy == *policy)
            .map(|row| (row.capacity_tokens as f64 / 1e6, 100.0 * row.hit_share))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { points, marked: true, colour: number }
    });
    let series: Vec<Series> = series.collect();
    page.heading("Hit rate against capacity");
    let (x, y) = (Axis::logarithmic("room, million tokens"), Axis::linear("% of the prompts' tokens found"));
    page.figure("What was found of all prompts' tokens", lines(x, y, &series), &policies)?;
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let cells = |row: &Row| {
        vec![
            row.policy.to_owned(),
            row.capacity_tokens.to_string(),
            percent(row.hit_share),
            percent(row.first_half_hit_share),
            percent(row.second_half_hit_share),
            row.gap_closed.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
        ]
    };
    let heads = ["policy", "room, tokens", "found", "first half", "second half", "from LRU to optimum"];
    let rows: Vec<_> = rows.iter().map(|row| (row.policy == policies[0], cells(row))).collect();
    page.table(&heads, &rows);
    Ok(page.finish())
}
