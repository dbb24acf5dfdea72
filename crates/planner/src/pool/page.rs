//! The report of the capacity project as a page.

use super::{
    compared::{Both, Compared},
    figures::{Figures, SHARES},
    live::LIVE,
    report::{Arrangement, MemoryReport, Report},
    scenario::Plan,
};
use crate::html::{Axis, Band, Page, PlotError, Series, lines, seconds_text, stacked};

/// One page with tables and plots.
pub fn page(plan: &Plan, report: &Report, seed: u64) -> Result<String, PlotError> {
    let mut page = Page::new("Shared or dedicated machines", plan.description.trim());
    let pool = &plan.pool;
    page.text(&format!(
        "Simulated with the machines that serve, seed {seed}. Promised is that {} of each team's requests have their first \
         token within the team's target, and {} of those that come while a machine is away.",
        percent(Some(pool.target_share)),
        percent(Some(pool.away_target_share)),
    ));
    page.heading(&format!("{} machines, shared and dedicated", pool.machines));
    teams(&mut page, report);
    if !report.compared.is_empty() {
        page.heading("Live beside simulated");
        compared(&mut page, report);
    }
    page.heading("While a machine was away");
    away(&mut page, report);
    page.heading("Time to the first token");
    latency(&mut page, report)?;
    page.heading("Who held the memory");
    for memory in &report.memory {
        memory_plot(&mut page, plan, memory)?;
    }
    page.heading("What it costs");
    costs(&mut page, report)?;
    Ok(page.finish())
}

pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", 100.0 * share))
}

pub(super) fn seconds(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), seconds_text)
}

pub(super) fn money(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

fn teams(page: &mut Page, report: &Report) {
    let heads = [
        "machines, team",
        "requests",
        "refused",
        "broken",
        "unfinished",
        "cold",
        "within target",
        "warm p50, s",
        "warm p99, s",
        "cold p50, s",
        "cold p99, s",
        "queue p99, s",
        "cost",
        "per M output tokens",
    ];
    let mut rows = Vec::new();
    for row in &report.rows {
        let all = (row.cost, row.cost_per_million_output_tokens);
        rows.push((true, cells(&format!("{}, all", row.arrangement), &row.figures, all)));
        for team in &row.teams {
            let cost = (team.cost, team.cost_per_million_output_tokens);
            rows.push((false, cells(&format!("{}, {}", row.arrangement, team.team), &team.figures, cost)));
        }
    }
    page.table(&heads, &rows);
    page.text("The cost of a team on shared machines is its part of the memory that models held, over time.");
}

fn cells(name: &str, figures: &Figures, (cost, per_million): (f64, Option<f64>)) -> Vec<String> {
    let times = [
        seconds(figures.warm_p50_seconds),
        seconds(figures.warm_p99_seconds),
        seconds(figures.cold_p50_seconds),
        seconds(figures.cold_p99_seconds),
        seconds(figures.queue_p99_seconds),
        money(Some(cost)),
        money(per_million),
    ];
    std::iter::once(name.to_owned()).chain(counts(figures)).chain(times).collect()
}

/// What became of requests.
pub(super) fn counts(figures: &Figures) -> [String; 6] {
    [
        figures.requests.to_string(),
        figures.refused.to_string(),
        figures.broken.to_string(),
        figures.unfinished.to_string(),
        percent(figures.cold_share),
        percent(figures.within_target_share),
    ]
}

/// What stands in a column of the comparison: its name, its figure, and how both sides of that are written.
type Column = (&'static str, &'static str, fn(&Both) -> String);

const COLUMNS: [Column; 7] = [
    ("loads", "loads", counts_text),
    ("evictions", "evictions", counts_text),
    ("within target, %", "within_target_share", shares_text),
    ("first token p50, s", "first_token_p50_seconds", times_text),
    ("first token p99, s", "first_token_p99_seconds", times_text),
    ("answer p50, s", "answer_p50_seconds", times_text),
    ("answer p99, s", "answer_p99_seconds", times_text),
];

fn compared(page: &mut Page, report: &Report) {
    page.text(
        "The same requests, at the same moments, to real servers; simulated / live, and the second by the first.",
    );
    let heads: Vec<&str> = std::iter::once("machines, team").chain(COLUMNS.map(|(head, ..)| head)).collect();
    let rows = report.compared.iter().map(|row: &Compared| {
        let cell = |(_, name, text): Column| row.figures.get(name).map_or_else(String::new, text);
        let name = format!("{}, {}", row.arrangement, row.team);
        (row.team == "all", std::iter::once(name).chain(COLUMNS.map(cell)).collect())
    });
    page.table(&heads, &rows.collect::<Vec<_>>());
}

fn both_text(both: &Both, text: impl Fn(f64) -> String) -> String {
    let side = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), &text);
    format!("{} / {}", side(both.simulated), side(both.live))
}

fn with_ratio(both: &Both, text: String) -> String {
    both.ratio.map(|ratio| format!("{text} ({ratio:.2})")).unwrap_or(text)
}

fn counts_text(both: &Both) -> String {
    with_ratio(both, both_text(both, |count| format!("{count:.0}")))
}

fn times_text(both: &Both) -> String {
    with_ratio(both, both_text(both, seconds_text))
}

fn shares_text(both: &Both) -> String {
    both_text(both, |share| format!("{:.1}", 100.0 * share))
}

fn away(page: &mut Page, report: &Report) {
    let heads = [
        "machines",
        "away, s",
        "requests",
        "refused",
        "broken",
        "within target",
        "p99, s",
        "worst team",
        "its share",
        "as promised",
    ];
    let mut rows = Vec::new();
    for row in &report.rows {
        for away in &row.away {
            let figures = &away.figures;
            let cells = vec![
                row.arrangement.to_owned(),
                format!("{:.0}", away.away_seconds),
                figures.requests.to_string(),
                figures.refused.to_string(),
                figures.broken.to_string(),
                percent(figures.within_target_share),
                seconds(figures.first_token_p99_seconds),
                away.worst_team.clone(),
                percent(Some(away.worst_team_within_target_share)),
                yes_or_no(away.kept),
            ];
            rows.push((false, cells));
        }
    }
    page.table(&heads, &rows);
}

pub(super) fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

fn latency(page: &mut Page, report: &Report) -> Result<(), PlotError> {
    let caption = "How many requests had their first token within how long, of those that had one";
    first_tokens(page, caption, report.rows.iter().map(|row| (row.arrangement, &row.figures)))
}

/// The distribution of the time to the first token, a line for each of these.
pub(super) fn first_tokens<'a>(
    page: &mut Page,
    caption: &str,
    named: impl Iterator<Item = (&'a str, &'a Figures)>,
) -> Result<(), PlotError> {
    let (names, figures): (Vec<&str>, Vec<&Figures>) = named.unzip();
    let series = figures.iter().enumerate().map(|(number, figures)| {
        let times = figures.first_token_seconds.iter();
        let points = times.zip(SHARES).map(|(seconds, share)| (*seconds, 100.0 * share)).collect();
        Series { points, marked: true, colour: number }
    });
    let (x, y) = (Axis::logarithmic("seconds to the first token"), Axis::linear("% of requests within"));
    page.figure(caption, lines(x, y, &series.rev().collect::<Vec<_>>()), &names)
}

fn memory_plot(page: &mut Page, plan: &Plan, memory: &MemoryReport) -> Result<(), PlotError> {
    let teams: Vec<&str> = plan.pool.team.iter().map(|team| team.name.as_str()).collect();
    let bands = memory.entries.iter().enumerate().map(|(number, entry)| {
        let rank = memory.entries.iter().take(number).filter(|other| other.team == entry.team).count();
        // Models of one team follow each other: light and dark tell neighbours apart.
        Band { heights: entry.gigabytes.clone(), colour: entry.team, lightness: [0.0, 0.45, 0.22, 0.65][rank % 4] }
    });
    let bands: Vec<Band> = bands.collect();
    let hours: Vec<f64> = memory.seconds.iter().map(|seconds| seconds / 3_600.0).collect();
    let svg = stacked(Axis::linear("hours"), Axis::linear("gigabytes"), &hours, &bands, memory.room_gigabytes);
    let caption = format!(
        "{}: what each model held over all machines, by the colour of its team; the line is what there is",
        memory.arrangement
    );
    page.figure(&caption, svg, &teams)
}

fn costs(page: &mut Page, report: &Report) -> Result<(), PlotError> {
    let heads =
        ["machines", "how many", "by team", "cost", "per M output tokens", "within target", "p99, s", "as promised"];
    let rows = report.fleets.iter().map(|row| {
        let by_team = row.machines_by_team.iter().flatten().map(ToString::to_string).collect::<Vec<_>>().join(" + ");
        let cells = vec![
            row.arrangement.to_owned(),
            row.machines.to_string(),
            by_team,
            money(Some(row.cost)),
            money(row.cost_per_million_output_tokens),
            percent(row.figures.within_target_share),
            seconds(row.figures.first_token_p99_seconds),
            yes_or_no(row.met),
        ];
        (false, cells)
    });
    let rows: Vec<_> = rows.collect();
    let live =
        LIVE.map(|(_, live)| live).into_iter().filter(|live| report.rows.iter().any(|row| row.arrangement == *live));
    let names: Vec<&str> = ["shared", "dedicated"].into_iter().chain(live).collect();
    let series = names.iter().enumerate().map(|(number, name)| {
        let played = report.rows.iter().filter(|row| LIVE.iter().any(|(_, live)| *live == row.arrangement));
        let fleets = report.fleets.iter().chain(played).filter(|row| row.arrangement == *name);
        let points = fleets.filter_map(|row: &Arrangement| Some((row.cost, row.figures.first_token_p99_seconds?)));
        Series { points: points.collect(), marked: true, colour: number }
    });
    let series: Vec<Series> = series.collect();
    let (x, y) = (Axis::linear("cost of all machines"), Axis::logarithmic("p99 of the time to the first token, s"));
    page.figure("Cost against p99: one point for each size of the fleet", lines(x, y, &series), &names)?;
    page.table(&heads, &rows);
    Ok(())
}
