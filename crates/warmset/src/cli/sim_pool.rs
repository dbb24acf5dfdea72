//! `warmset sim` of the capacity project: shared machines and each team's own, what they cost and what callers see.

use super::{
    sim::{on_all_cores, read_live},
    sim_arguments::SimArguments,
    sim_changes,
};
use crate::output::{Output, table, text_of};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use warmset_planner::pool::{
    page::page,
    report::{Project, Report, Runs},
    scenario::Plan,
};

/// Runs a plan and prints what came of it.
pub(super) fn run(text: &str, arguments: &SimArguments, output: Output) -> Result<()> {
    arguments.refuse(
        &["--trace", "--compare", "--slots", "--load-seconds", "--capacity-tokens"],
        "this one is about a pool of machines",
    )?;
    let plan = Plan::parse(text).with_context(|| format!("in {}", arguments.scenario))?;
    if plan.pool.changes() {
        return sim_changes::run(&plan, arguments, output);
    }
    let project = Project::new(&plan, arguments.seed);
    arguments.write_demand(&project.export())?;
    let live = match &arguments.live {
        Some(path) => project.read_live(&read_live(path)?).with_context(|| format!("cannot use {}", path.display()))?,
        None => Vec::new(),
    };
    let report = {
        let _spinner = output.spinner(&format!("playing {} requests to fleets of each size", project.requests()));
        play(&project, &live)?
    };
    let document = json!({
        "scenario": arguments.scenario,
        "description": plan.description.trim(),
        "seed": arguments.seed,
        "requests": project.requests(),
        "hours": plan.pool.hours,
        "target_share": plan.pool.target_share,
        "away_target_share": plan.pool.away_target_share,
        "price_per_machine_hour": plan.pool.price_per_machine_hour,
        "rows": report.rows,
        "fleets": report.fleets,
        "memory": report.memory,
        "compared": report.compared,
    });
    arguments.write_page(|| page(&plan, &report, arguments.seed))?;
    output.result(&document, as_text);
    Ok(())
}

fn play(project: &Project<'_>, live: &[(&'static str, Runs)]) -> Result<Report> {
    let tasks = project.tasks();
    let mut results = Vec::new();
    for (task, runs) in tasks.iter().zip(on_all_cores(&tasks, |task| project.run(task))) {
        match runs {
            Ok(runs) => results.push((task.clone(), runs)),
            Err(violation) => bail!("a machine broke the invariant {violation}: please report it"),
        }
    }
    Ok(project.report(results, live))
}

fn as_text(document: &Value) -> String {
    let arrangements = items(&document["rows"]);
    let by_team = |cells: &dyn Fn(&Value) -> Vec<String>| -> Vec<Vec<String>> {
        let lines = arrangements.iter().flat_map(|row| {
            let all = std::iter::once(("all".to_owned(), row.clone()));
            let teams = items(&row["teams"]).into_iter().map(|team| (text_of(&team, "team"), team));
            all.chain(teams)
                .map(|(name, found)| [text_of(row, "arrangement"), name].into_iter().chain(cells(&found)).collect())
        });
        lines.collect()
    };
    let away = arrangements.iter().flat_map(|row| {
        items(&row["away"]).iter().map(|away| away_line(&text_of(row, "arrangement"), away)).collect::<Vec<_>>()
    });
    let fleets = items(&document["fleets"]);
    format!(
        "{}\n{} requests in {} hours, seed {}\n\n{}\nSeconds to the first token, and cost\n{}\n{}While a machine was away\n{}\n\
         Fleets of other sizes\n{}",
        text_of(document, "description"),
        text_of(document, "requests"),
        text_of(document, "hours"),
        text_of(document, "seed"),
        table(&OUTCOMES, by_team(&|row| outcomes(row).into())),
        table(&TIMES, by_team(&|row| times_and_cost(row).into())),
        compared(&items(&document["compared"])),
        table(&AWAY, away),
        table(&SIZES, fleets.iter().map(size_line)),
    )
}

/// Heads of the tables, which fit into a hundred columns.
const OUTCOMES: [&str; 8] = ["MACHINES", "TEAM", "REQUESTS", "REFUSED", "BROKEN", "UNFINISHED", "COLD", "IN TARGET"];
const TIMES: [&str; 7] = ["MACHINES", "TEAM", "WARM P50/P99", "COLD P50/P99", "QUEUE P99", "COST", "PER M TOKENS"];
const AWAY: [&str; 9] =
    ["MACHINES", "LOST", "REQUESTS", "REFUSED", "BROKEN", "IN TARGET", "WORST TEAM", "P99, S", "KEPT"];
const SIZES: [&str; 7] = ["MACHINES", "HOW MANY", "BY TEAM", "COST", "IN TARGET", "P99, S", "AS PROMISED"];

pub(super) fn items(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn size_line(fleet: &Value) -> Vec<String> {
    let by_team = items(&fleet["machines_by_team"]).iter().map(ToString::to_string).collect::<Vec<_>>().join("+");
    vec![
        text_of(fleet, "arrangement"),
        text_of(fleet, "machines"),
        by_team,
        number(fleet, "cost", 2),
        percent(fleet, "within_target_share"),
        number(fleet, "first_token_p99_seconds", 2),
        promise(fleet),
    ]
}

/// Whether every team has what it was promised; if not, the first that has not, and whether that is while a machine is away.
fn promise(fleet: &Value) -> String {
    let first_broken = |key: &str| items(&fleet[key]).into_iter().find(|one| one["kept"] != true);
    match (first_broken("teams"), first_broken("away")) {
        (Some(team), _) => format!("no: {} {}", text_of(&team, "team"), percent(&team, "within_target_share")),
        (None, Some(away)) => {
            let share = percent(&away, "worst_team_within_target_share");
            format!("no: {} {share} while one is away", text_of(&away, "worst_team"))
        }
        (None, None) => "yes".to_owned(),
    }
}

/// What was played live beside what was simulated, if anything was.
fn compared(rows: &[Value]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let both = |row: &Value, key: &str, digits: usize| {
        let figure = |which: &str| number(&row[key], which, digits);
        format!("{} / {} ({})", figure("simulated"), figure("live"), number(&row[key], "ratio", 2))
    };
    let part = |columns: &[(&str, &str, usize)]| {
        let heads: Vec<&str> = ["MACHINES", "TEAM"].into_iter().chain(columns.iter().map(|column| column.0)).collect();
        let lines = rows.iter().map(|row| {
            let figures = columns.iter().map(|(_, key, digits)| both(row, key, *digits));
            ["arrangement", "team"].map(|key| text_of(row, key)).into_iter().chain(figures).collect()
        });
        table(&heads, lines)
    };
    let counts = [("LOADS", "loads", 0), ("EVICTIONS", "evictions", 0), ("IN TARGET", "within_target_share", 3)];
    let first =
        [("FIRST TOKEN P50, S", "first_token_p50_seconds", 3), ("FIRST TOKEN P99, S", "first_token_p99_seconds", 2)];
    let answer = [("ANSWER P50, S", "answer_p50_seconds", 2), ("ANSWER P99, S", "answer_p99_seconds", 2)];
    format!("Simulated / live (ratio)\n{}\n{}\n{}\n", part(&counts), part(&first), part(&answer))
}

fn times_and_cost(row: &Value) -> [String; 5] {
    [
        format!("{} / {}", number(row, "warm_p50_seconds", 2), number(row, "warm_p99_seconds", 2)),
        format!("{} / {}", number(row, "cold_p50_seconds", 1), number(row, "cold_p99_seconds", 1)),
        number(row, "queue_p99_seconds", 2),
        number(row, "cost", 2),
        number(row, "cost_per_million_output_tokens", 2),
    ]
}

/// What became of requests: how many came and were refused, broke off or did not end, were cold, were within their target.
pub(super) fn outcomes(row: &Value) -> [String; 6] {
    [
        text_of(row, "requests"),
        text_of(row, "refused"),
        text_of(row, "broken"),
        text_of(row, "unfinished"),
        percent(row, "cold_share"),
        percent(row, "within_target_share"),
    ]
}

fn away_line(arrangement: &str, away: &Value) -> Vec<String> {
    vec![
        arrangement.to_owned(),
        text_of(away, "machine"),
        text_of(away, "requests"),
        text_of(away, "refused"),
        text_of(away, "broken"),
        percent(away, "within_target_share"),
        format!("{} {}", text_of(away, "worst_team"), percent(away, "worst_team_within_target_share")),
        number(away, "first_token_p99_seconds", 2),
        yes_or_no(&away["kept"]),
    ]
}

pub(super) fn yes_or_no(value: &Value) -> String {
    if *value == true { "yes" } else { "no" }.to_owned()
}

pub(super) fn number(row: &Value, key: &str, digits: usize) -> String {
    row[key].as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn percent(row: &Value, key: &str) -> String {
    row[key].as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", 100.0 * share))
}
