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
    let items = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let arrangements = items(&document["rows"]);
    let teams = arrangements.iter().flat_map(|row| {
        let of_team = |team: &Value| line(&text_of(row, "arrangement"), &text_of(team, "team"), team);
        let all = line(&text_of(row, "arrangement"), "all", row);
        std::iter::once(all).chain(items(&row["teams"]).iter().map(of_team)).collect::<Vec<_>>()
    });
    let heads = [
        "MACHINES",
        "TEAM",
        "REQUESTS",
        "REFUSED",
        "BROKEN",
        "UNFINISHED",
        "COLD",
        "WITHIN TARGET",
        "WARM P50/P99, S",
        "COLD P50/P99, S",
        "QUEUE P99, S",
        "COST",
        "PER M TOKENS",
    ];
    let away = arrangements.iter().flat_map(|row| {
        items(&row["away"]).iter().map(|away| away_line(&text_of(row, "arrangement"), away)).collect::<Vec<_>>()
    });
    let fleets = items(&document["fleets"]);
    let sizes = fleets.iter().map(|fleet| {
        let by_team = items(&fleet["machines_by_team"]).iter().map(ToString::to_string).collect::<Vec<_>>().join("+");
        vec![
            text_of(fleet, "arrangement"),
            text_of(fleet, "machines"),
            by_team,
            number(fleet, "cost", 2),
            percent(fleet, "within_target_share"),
            number(fleet, "first_token_p99_seconds", 2),
            if fleet["met"] == true { "yes".to_owned() } else { "no".to_owned() },
        ]
    });
    format!(
        "{}\n{} requests in {} hours, seed {}\n\n{}\n{}While a machine was away\n{}\nFleets of other sizes\n{}",
        text_of(document, "description"),
        text_of(document, "requests"),
        text_of(document, "hours"),
        text_of(document, "seed"),
        table(&heads, teams),
        compared(&items(&document["compared"])),
        table(
            &[
                "MACHINES",
                "LOST",
                "REQUESTS",
                "REFUSED",
                "BROKEN",
                "WITHIN TARGET",
                "WORST TEAM",
                "ITS SHARE",
                "P99, S",
                "KEPT"
            ],
            away
        ),
        table(&["MACHINES", "HOW MANY", "BY TEAM", "COST", "WITHIN TARGET", "P99, S", "AS PROMISED"], sizes),
    )
}

/// What was played live beside what was simulated, if anything was.
fn compared(rows: &[Value]) -> String {
    let both = |row: &Value, key: &str, digits: usize| {
        let figure = |which: &str| number(&row[key], which, digits);
        format!("{} / {} ({})", figure("simulated"), figure("live"), number(&row[key], "ratio", 2))
    };
    let lines = rows.iter().map(|row| {
        vec![
            text_of(row, "arrangement"),
            text_of(row, "team"),
            both(row, "loads", 0),
            both(row, "evictions", 0),
            both(row, "within_target_share", 3),
            both(row, "first_token_p50_seconds", 3),
            both(row, "first_token_p99_seconds", 2),
            both(row, "answer_p50_seconds", 2),
            both(row, "answer_p99_seconds", 2),
        ]
    });
    let heads = [
        "MACHINES",
        "TEAM",
        "LOADS",
        "EVICTIONS",
        "WITHIN TARGET",
        "FIRST TOKEN P50, S",
        "P99",
        "ANSWER P50, S",
        "P99",
    ];
    if rows.is_empty() { String::new() } else { format!("Simulated / live (ratio)\n{}\n", table(&heads, lines)) }
}

fn line(arrangement: &str, team: &str, row: &Value) -> Vec<String> {
    let whose = [arrangement.to_owned(), team.to_owned()];
    let seconds_and_cost = [
        format!("{} / {}", number(row, "warm_p50_seconds", 2), number(row, "warm_p99_seconds", 2)),
        format!("{} / {}", number(row, "cold_p50_seconds", 1), number(row, "cold_p99_seconds", 1)),
        number(row, "queue_p99_seconds", 2),
        number(row, "cost", 2),
        number(row, "cost_per_million_output_tokens", 2),
    ];
    whose.into_iter().chain(outcomes(row)).chain(seconds_and_cost).collect()
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
        text_of(away, "worst_team"),
        percent(away, "worst_team_within_target_share"),
        number(away, "first_token_p99_seconds", 2),
        if away["kept"] == true { "yes".to_owned() } else { "no".to_owned() },
    ]
}

pub(super) fn number(row: &Value, key: &str, digits: usize) -> String {
    row[key].as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn percent(row: &Value, key: &str) -> String {
    row[key].as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", 100.0 * share))
}
