//! What was simulated beside what was seen live, figure by figure.

use super::{
    figures::Figures,
    live::LIVE,
    machine::Counts,
    report::{Arrangement, TeamFigures},
};
use serde::Serialize;
use std::collections::BTreeMap;

/// One figure of both.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Both {
    /// As the simulator has it.
    pub simulated: Option<f64>,
    /// As it was live.
    pub live: Option<f64>,
    /// The second by the first, where both are there and the first is not nothing.
    pub ratio: Option<f64>,
}

impl Both {
    fn new(simulated: Option<f64>, live: Option<f64>) -> Self {
        let pair = simulated.zip(live).filter(|(simulated, _)| *simulated > 0.0);
        Self { simulated, live, ratio: pair.map(|(simulated, live)| live / simulated) }
    }
}

/// The requests of a team, or of all of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// `shared` or `dedicated`.
    pub arrangement: &'static str,
    /// The team, or `all`.
    pub team: String,
    /// Figures by their names: counts, shares, seconds, money.
    #[serde(flatten)]
    pub figures: BTreeMap<&'static str, Both>,
}

type Named = [(&'static str, Option<f64>); 15];

fn named(counts: &Counts, figures: &Figures, per_million: Option<f64>) -> Named {
    let count = |number: u64| Some(number as f64);
    [
        ("requests", count(figures.requests)),
        ("answered", count(figures.answered)),
        ("refused", count(figures.refused)),
        ("broken", count(figures.broken)),
        ("loads", count(counts.loads)),
        ("evictions", count(counts.evictions)),
        ("cold_share", figures.cold_share),
        ("within_target_share", figures.within_target_share),
        ("first_token_p50_seconds", figures.first_token_p50_seconds),
        ("first_token_p99_seconds", figures.first_token_p99_seconds),
        ("cold_p50_seconds", figures.cold_p50_seconds),
        ("cold_p99_seconds", figures.cold_p99_seconds),
        ("answer_p50_seconds", figures.answer_p50_seconds),
        ("answer_p99_seconds", figures.answer_p99_seconds),
        ("cost_per_million_output_tokens", per_million),
    ]
}

fn of_all(row: &Arrangement) -> Named {
    named(&row.counts, &row.figures, row.cost_per_million_output_tokens)
}

fn of_team(team: &TeamFigures) -> Named {
    named(&team.counts, &team.figures, team.cost_per_million_output_tokens)
}

/// Every arrangement of which there are both.
pub fn compare(rows: &[Arrangement]) -> Vec<Compared> {
    let find = |name: &str| rows.iter().find(|row| row.arrangement == name);
    let mut all = Vec::new();
    for (arrangement, live) in LIVE {
        let Some((simulated, live)) = find(arrangement).zip(find(live)) else { continue };
        let mut add = |team: &str, simulated: Named, live: Named| {
            let pairs = simulated.into_iter().zip(live);
            let figures = pairs.map(|((name, simulated), (_, live))| (name, Both::new(simulated, live))).collect();
            all.push(Compared { arrangement, team: team.to_owned(), figures });
        };
        add("all", of_all(simulated), of_all(live));
        for (simulated, live) in simulated.teams.iter().zip(&live.teams) {
            add(&simulated.team, of_team(simulated), of_team(live));
        }
    }
    all
}
