//! The report of many models and one loader as a page.

use super::plan::{POLICIES, Plan, Row, Saturation, Study};
use crate::html::{Axis, Page, PlotError, Series, lines, seconds_text};

const NAMES: [&str; 2] = ["five pins and LRU", "warmset"];

/// One page with tables and plots.
pub fn page(plan: &Plan, rows: &[Row], saturation: &[Saturation], seed: u64) -> Result<String, PlotError> {
    let mut page = Page::new("Many models, one loader", plan.description.trim());
    page.text(&format!(
        "{} requests in each run, seed {seed}. Times are from arrival to the end.",
        plan.loader.requests
    ));
    page.heading("From which rate on loads cannot keep up");
    saturated(&mut page, saturation);
    for zipf in &plan.loader.zipf {
        let same = |row: &&Row| row.study == Study::Rates && row.zipf.to_bits() == zipf.to_bits();
        let series = by_policy(rows.iter().filter(same), |row| (row.requests_per_second, row.p99_seconds));
        let svg = lines(Axis::logarithmic("requests per second"), Axis::logarithmic("p99, s"), &series);
        page.figure(&format!("p99 against the rate, Zipf {zipf}"), svg, &NAMES)?;
    }
    table(&mut page, rows, Study::Rates);
    page.heading("What faster loads do");
    let series = by_policy(of(rows, Study::Speeds), |row| (row.fetch_seconds, row.p99_seconds));
    let svg = lines(Axis::logarithmic("seconds that a load takes"), Axis::logarithmic("p99, s"), &series);
    page.figure("p99 against the time that a load takes", svg, &NAMES)?;
    table(&mut page, rows, Study::Speeds);
    page.heading("What more memory does");
    let series = by_policy(of(rows, Study::Sizes), |row| (row.slots as f64, 100.0 * row.hit_share));
    let svg =
        lines(Axis::linear("models that fit"), Axis::linear("% of requests that find their model ready"), &series);
    page.figure("Hit rate against capacity", svg, &NAMES)?;
    table(&mut page, rows, Study::Sizes);
    Ok(page.finish())
}

fn of(rows: &[Row], study: Study) -> impl Iterator<Item = &Row> {
    rows.iter().filter(move |row| row.study == study)
}

fn by_policy<'a>(rows: impl Iterator<Item = &'a Row>, point: impl Fn(&Row) -> (f64, f64)) -> Vec<Series> {
    let rows: Vec<&Row> = rows.collect();
    let series = POLICIES.iter().enumerate().map(|(number, policy)| {
        let mut points: Vec<(f64, f64)> =
            rows.iter().filter(|row| row.policy == *policy).map(|row| point(row)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { points, marked: true, colour: number }
    });
    series.collect()
}

fn saturated(page: &mut Page, saturation: &[Saturation]) {
    let heads = ["Zipf", "share of the pinned", "found ready", "loads keep up below, requests per second"];
    let rows = saturation.iter().map(|one| {
        let percent = |share: f64| format!("{:.2} %", 100.0 * share);
        let rate = format!("{:.3}", one.requests_per_second);
        (false, vec![one.zipf.to_string(), percent(one.pinned_share), percent(one.hit_share), rate])
    });
    page.table(&heads, &rows.collect::<Vec<_>>());
}

fn table(page: &mut Page, rows: &[Row], study: Study) {
    let heads = [
        "policy",
        "Zipf",
        "requests per second",
        "a load takes, s",
        "models that fit",
        "found ready",
        "p50, s",
        "p99, s",
        "loads",
        "loader busy",
    ];
    let rows = of(rows, study).map(|row| {
        let cells = vec![
            row.policy.to_owned(),
            row.zipf.to_string(),
            row.requests_per_second.to_string(),
            row.fetch_seconds.to_string(),
            row.slots.to_string(),
            format!("{:.2} %", 100.0 * row.hit_share),
            seconds_text(row.p50_seconds),
            seconds_text(row.p99_seconds),
            row.loads.to_string(),
            format!("{:.0} %", 100.0 * row.loader_share),
        ];
        (row.policy == POLICIES[0], cells)
    });
    page.table(&heads, &rows.collect::<Vec<_>>());
}
