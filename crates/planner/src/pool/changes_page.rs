//! The report of a pool in which something changes, as a page.

use super::{
    changes::{Moment, PromotionRow, Row},
    figures::Figures,
    page::{counts, first_tokens, money, seconds, yes_or_no},
    scenario::Plan,
};
use crate::html::{Axis, Page, PlotError, Series, lines, seconds_text};

/// One page with tables and plots.
pub fn page(plan: &Plan, rows: &[Row], seed: u64) -> Result<String, PlotError> {
    let mut page = Page::new("A pool in which something changes", plan.description.trim());
    page.text(&format!(
        "The same requests with the change and without it, simulated with the machines that serve, seed {seed}."
    ));
    page.heading("All requests");
    all(&mut page, rows);
    page.heading("Over time");
    let p99 = |moment: &Moment| moment.first_token_p99_seconds;
    let y = Axis::logarithmic("p99 of the time to the first token, s");
    over_time(&mut page, "p99 of the requests that came in each sixtieth of the time", rows, y, p99)?;
    let within = |moment: &Moment| moment.within_target_share.map(|share| 100.0 * share);
    let y = Axis::linear("% within their target");
    over_time(&mut page, "How many of them had their first token as promised", rows, y, within)?;
    windows(&mut page, rows)?;
    promotions(&mut page, rows);
    Ok(page.finish())
}

const FIGURES: [&str; 8] = ["requests", "refused", "broken", "unfinished", "cold", "within target", "p50, s", "p99, s"];

fn cells(figures: &Figures) -> impl Iterator<Item = String> {
    let times = [figures.first_token_p50_seconds, figures.first_token_p99_seconds].map(seconds);
    counts(figures).into_iter().chain(times)
}

fn all(page: &mut Page, rows: &[Row]) {
    let heads = [&["pool"], &FIGURES[..], &["cost"]].concat();
    let figures = rows.iter().map(|row| {
        let name = row.variant.to_owned();
        (false, std::iter::once(name).chain(cells(&row.figures)).chain([money(Some(row.cost))]).collect())
    });
    page.table(&heads, &figures.collect::<Vec<_>>());
    page.text("Machines are paid for from their order to their end; weights are fetched where they are not yet.");
    let heads = [
        "pool",
        "machine hours",
        "loads",
        "evictions",
        "weights fetched",
        "gigabytes",
        "longest fetch, s",
        "requests sent elsewhere",
    ];
    let done = rows.iter().map(|row| {
        let cells = vec![
            row.variant.to_owned(),
            format!("{:.1}", row.machine_hours),
            row.counts.loads.to_string(),
            row.counts.evictions.to_string(),
            row.fetches.count.to_string(),
            format!("{:.0}", row.fetches.gigabytes),
            seconds(row.fetches.seconds_max),
            row.failovers.to_string(),
        ];
        (false, cells)
    });
    page.table(&heads, &done.collect::<Vec<_>>());
}

fn over_time(
    page: &mut Page,
    caption: &str,
    rows: &[Row],
    y: Axis<'_>,
    value: impl Fn(&Moment) -> Option<f64>,
) -> Result<(), PlotError> {
    let series = rows.iter().enumerate().map(|(number, row)| {
        let points = row.moments.iter().filter_map(|moment| Some((moment.at_seconds / 3_600.0, value(moment)?)));
        Series { points: points.collect(), marked: false, colour: number }
    });
    // The first one is what the page is about, and is drawn over the others.
    let series: Vec<Series> = series.rev().collect();
    let names: Vec<&str> = rows.iter().map(|row| row.variant).collect();
    page.figure(caption, lines(Axis::linear("hours"), y, &series), &names)
}

/// Requests that came while something was different: the same times for all variants.
fn windows(page: &mut Page, rows: &[Row]) -> Result<(), PlotError> {
    let spans = rows.first().map_or(&[][..], |row| &row.windows);
    if spans.is_empty() {
        return Ok(());
    }
    page.heading("What came in the meantime");
    let heads = [&["what, pool"], &FIGURES[..]].concat();
    let mut table = Vec::new();
    for (place, span) in spans.iter().enumerate() {
        for (number, row) in rows.iter().enumerate() {
            let name = format!("{}, {}", span.what, row.variant);
            let figures = row.windows.get(place).map(|window| cells(&window.figures));
            table.push((number == 0, std::iter::once(name).chain(figures.into_iter().flatten()).collect()));
        }
    }
    page.table(&heads, &table);
    for (place, span) in spans.iter().enumerate() {
        let (at, hours) = (seconds_text(span.seconds), span.at_seconds / 3_600.0);
        let caption = format!("Time to the first token, {}: {at} s from {hours:.2} hours on", span.what);
        let of = rows.iter().filter_map(|row| Some((row.variant, &row.windows.get(place)?.figures)));
        first_tokens(page, &caption, of)?;
    }
    Ok(())
}

/// New versions of the pool as it is described.
fn promotions(page: &mut Page, rows: &[Row]) {
    let promotions = rows.first().map_or(&[][..], |row| &row.promotions);
    if promotions.is_empty() {
        return;
    }
    page.heading("New versions");
    let heads = ["model", "machine", "at, s", "took, s", "how", "callers not admitted, s", "waited", "switched"];
    let line = |row: &PromotionRow| {
        let cells = vec![
            row.model.clone(),
            row.machine.to_string(),
            format!("{:.0}", row.at_seconds),
            seconds(Some(row.seconds)),
            row.strategy.words().to_owned(),
            seconds(Some(row.gap_seconds)),
            row.waited.to_string(),
            yes_or_no(row.switched),
        ];
        (false, cells)
    };
    page.table(&heads, &promotions.iter().map(line).collect::<Vec<_>>());
}
