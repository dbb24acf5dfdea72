//! The capacity project: one demand, one shared pool, and machines of each team's own; what each costs and what callers see.

use super::{
    compared::{Compared, compare},
    demand::Demand,
    figures::{Figures, figures},
    machine::Counts,
    record::{Absence, Record, Recording},
    scenario::{Lost, MACHINES_MAX, Plan, Pool},
    world::{Fleet, play},
};
use serde::Serialize;
use std::time::Duration;
use warmset_core::Instant;

/// Every model on every machine.
pub const EVERYWHERE: &str = "shared, unplaced";
/// Machines that a search adds beyond those of the scenario, before it says that so many are not enough.
const SEARCHED_BEYOND: usize = 8;

/// One thing to run; they do not depend on each other.
#[derive(Debug, Clone, PartialEq)]
pub enum Task {
    /// All teams on so many machines.
    Shared(usize),
    /// All teams on the scenario's machines, every model on each.
    Everywhere,
    /// Each team on its own, as many in all as the scenario has.
    Dedicated,
    /// One team on its own: from one machine on, until it has what it was promised.
    Least(usize),
}

/// What came of one.
pub type Runs = Vec<(Fleet, Recording)>;

/// One way to use machines.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Arrangement {
    /// `shared`, the same with every model on every machine, or `dedicated`; how these went live.
    pub arrangement: &'static str,
    /// Machines in all.
    pub machines: usize,
    /// Machines of each team, where they have their own.
    pub machines_by_team: Option<Vec<usize>>,
    /// They are paid for whether they are there or not.
    pub machine_hours: f64,
    /// Machine hours at the scenario's price.
    pub cost: f64,
    /// That by a million tokens of complete answers.
    pub cost_per_million_output_tokens: Option<f64>,
    /// Whether every team has what it was promised, over all and while a machine was away.
    pub met: bool,
    /// What happened how often.
    pub counts: Counts,
    /// All requests.
    #[serde(flatten)]
    pub figures: Figures,
    /// Each team's.
    pub teams: Vec<TeamFigures>,
    /// Those that came while a machine was away: the verdict on N+1.
    pub away: Vec<Away>,
}

/// One team.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TeamFigures {
    /// Its name.
    pub team: String,
    /// Whether it had what it was promised, over all.
    pub kept: bool,
    /// What its models held of the machines, summed up over time.
    pub memory_gigabyte_hours: f64,
    /// The cost of its own machines; of shared ones by the memory that its models held.
    pub cost: f64,
    /// That by a million tokens of its complete answers.
    pub cost_per_million_output_tokens: Option<f64>,
    /// What happened how often to its models.
    pub counts: Counts,
    /// Its requests.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Requests that came while a machine was away.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Away {
    /// Which machine.
    pub machine: usize,
    /// When it went, from the beginning on.
    pub at_seconds: f64,
    /// For how long.
    pub away_seconds: f64,
    /// Whether every team had what it was promised meanwhile.
    pub kept: bool,
    /// The team that had least of it.
    pub worst_team: String,
    /// Its share of requests within the target.
    pub worst_team_within_target_share: f64,
    /// All requests.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Memory over time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryReport {
    /// The arrangement.
    pub arrangement: &'static str,
    /// What all machines together have for models.
    pub room_gigabytes: f64,
    /// When it was looked at.
    pub seconds: Vec<f64>,
    /// What each model held at these times, over all machines.
    pub entries: Vec<Entry>,
}

/// One model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Entry {
    /// Its team and its rank there, from 1 on.
    pub model: String,
    /// Its team's number.
    pub team: usize,
    /// At each time.
    pub gigabytes: Vec<f64>,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The scenario's machines, used in each way.
    pub rows: Vec<Arrangement>,
    /// Fleets of other sizes: from too small ones to the least that has what was promised, if one was found.
    pub fleets: Vec<Arrangement>,
    /// Who held which memory in the two.
    pub memory: Vec<MemoryReport>,
    /// What was played live beside what was simulated.
    pub compared: Vec<Compared>,
}

/// A demand and what is to be run of it.
pub struct Project<'a> {
    plan: &'a Plan,
    demand: Demand,
    seed: u64,
}

impl<'a> Project<'a> {
    /// Makes up the demand.
    pub fn new(plan: &'a Plan, seed: u64) -> Self {
        Self { plan, demand: Demand::new(&plan.pool, seed), seed }
    }

    pub(super) fn demand(&self) -> &Demand {
        &self.demand
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.plan.pool
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// The scenario's machines, shared.
    pub(super) fn shared(&self) -> Fleet {
        self.fleet(self.plan.pool.machines, (0..self.plan.pool.team.len()).collect())
    }

    /// Requests of the demand.
    pub fn requests(&self) -> usize {
        self.demand.requests.len()
    }

    /// What is to be run: the longest first.
    pub fn tasks(&self) -> Vec<Task> {
        let pool = &self.plan.pool;
        let shared = (1..=pool.machines).rev().map(Task::Shared);
        shared.chain([Task::Everywhere, Task::Dedicated]).chain((0..pool.team.len()).map(Task::Least)).collect()
    }

    /// Runs one.
    pub fn run(&self, task: &Task) -> Result<Runs, String> {
        let pool = &self.plan.pool;
        match task {
            Task::Shared(machines) => {
                let mut runs = vec![self.play(self.fleet(*machines, (0..pool.team.len()).collect()))?];
                // Whether more would do is asked where all that there are do not.
                while *machines == pool.machines
                    && runs.len() <= SEARCHED_BEYOND
                    && runs.last().is_some_and(|run| !self.meets(run))
                {
                    let fleet = self.fleet(machines + runs.len(), (0..pool.team.len()).collect());
                    runs.push(self.play(fleet)?);
                }
                Ok(runs)
            }
            Task::Everywhere => {
                let all: Vec<usize> = (0..self.demand.models.len()).collect();
                Ok(vec![self.play(Fleet { models: vec![all; pool.machines], ..self.shared() })?])
            }
            Task::Dedicated => self.dedicated().into_iter().map(|fleet| self.play(fleet)).collect(),
            Task::Least(team) => {
                let mut runs = Runs::new();
                while runs.last().is_none_or(|run| !self.meets(run)) && runs.len() < pool.machines + SEARCHED_BEYOND {
                    runs.push(self.play(self.fleet(runs.len() + 1, vec![*team]))?);
                }
                Ok(runs)
            }
        }
    }

    fn play(&self, fleet: Fleet) -> Result<(Fleet, Recording), String> {
        let recording = play(&self.plan.pool, &self.demand, &fleet, self.seed, false)?;
        Ok((fleet, recording))
    }

    /// So many machines, of which those are lost that the scenario names, counted round.
    fn fleet(&self, machines: usize, teams: Vec<usize>) -> Fleet {
        let machines = machines.clamp(1, MACHINES_MAX);
        let lost = self.plan.pool.lost.iter().map(|lost| Lost { machine: lost.machine % machines, ..*lost });
        Fleet::new(&self.plan.pool, &self.demand, (teams, machines), lost.collect())
    }

    /// The scenario's machines, given to teams in their order.
    pub(super) fn dedicated(&self) -> Vec<Fleet> {
        let mut first = 0;
        let fleet = |(number, team): (usize, &super::scenario::Team)| {
            let (from, machines) = (first, team.dedicated_machines);
            first += machines;
            let here = self.plan.pool.lost.iter().filter(|lost| (from..from + machines).contains(&lost.machine));
            let lost = here.map(|lost| Lost { machine: lost.machine - from, ..*lost }).collect();
            Fleet::new(&self.plan.pool, &self.demand, (vec![number], machines), lost)
        };
        self.plan.pool.team.iter().enumerate().map(fleet).collect()
    }

    fn meets(&self, run: &(Fleet, Recording)) -> bool {
        self.arrangement("", std::slice::from_ref(run)).met
    }

    /// What came of everything that was run, and of what was played live.
    pub fn report(&self, results: Vec<(Task, Runs)>, live: &[(&'static str, Runs)]) -> Report {
        let mut report = Report { rows: Vec::new(), fleets: Vec::new(), memory: Vec::new(), compared: Vec::new() };
        let mut least: Vec<Runs> = Vec::new();
        for (task, runs) in results {
            match task {
                Task::Shared(_) => {
                    for run in runs {
                        let row = self.arrangement("shared", std::slice::from_ref(&run));
                        if run.0.machines() == self.plan.pool.machines {
                            report.memory.push(self.memory("shared", &[run]));
                            report.rows.insert(0, row.clone());
                        }
                        report.fleets.push(row);
                    }
                }
                Task::Everywhere => report.rows.push(self.arrangement(EVERYWHERE, &runs)),
                Task::Dedicated => {
                    report.rows.push(self.arrangement("dedicated", &runs));
                    report.memory.push(self.memory("dedicated", &runs));
                }
                Task::Least(_) => least.push(runs),
            }
        }
        report.fleets.sort_by_key(|row| row.machines);
        report.fleets.extend(self.dedicated_fleets(&least));
        for (name, runs) in live {
            report.rows.push(self.arrangement(name, runs));
            report.memory.push(self.memory(name, runs));
        }
        report.compared = compare(&report.rows);
        report
    }

    /// From one machine for each team on, the next one for the team that has least of what it was promised.
    fn dedicated_fleets(&self, least: &[Runs]) -> Vec<Arrangement> {
        let mut counts = vec![1; least.len()];
        let mut rows = Vec::new();
        if least.is_empty() {
            return rows;
        }
        loop {
            let chosen: Runs =
                least.iter().zip(&counts).filter_map(|(runs, count)| runs.get(count - 1).cloned()).collect();
            let row = self.arrangement("dedicated", &chosen);
            let share = |team: &usize| row.teams.get(*team).and_then(|team| team.figures.within_target_share);
            let mut more: Vec<usize> = (0..counts.len()).filter(|team| counts[*team] < least[*team].len()).collect();
            more.sort_by(|a, b| share(a).unwrap_or(1.0).total_cmp(&share(b).unwrap_or(1.0)).then(a.cmp(b)));
            rows.push(row);
            let Some(next) = more.first() else { return rows };
            counts[*next] += 1;
        }
    }

    fn arrangement(&self, name: &'static str, runs: &[(Fleet, Recording)]) -> Arrangement {
        let pool = &self.plan.pool;
        let records = merged(&self.demand, runs);
        let machines: usize = runs.iter().map(|(fleet, _)| fleet.machines()).sum();
        let machine_hours = machines as f64 * pool.hours;
        let cost = machine_hours * pool.price_per_machine_hour;
        let taken = |team: usize| runs.iter().any(|(fleet, _)| fleet.teams.contains(&team));
        let figures = figures(pool, &self.demand, &records, |request| taken(request.team));
        let teams = self.teams(runs, &records);
        // Where each team has its own, all of them may lose one at the same time: that is one time.
        let mut absences: Vec<&Absence> = runs.iter().flat_map(|(_, recording)| &recording.absences).collect();
        absences.sort_by_key(|absence| (absence.from, absence.until, absence.machine));
        absences.dedup_by_key(|absence| (absence.from, absence.until));
        let away: Vec<Away> = absences.into_iter().map(|absence| self.away(absence, &records, taken)).collect();
        let mut counts = Counts::default();
        runs.iter().flat_map(|(_, recording)| &recording.counts).for_each(|team| counts.add(team));
        Arrangement {
            arrangement: name,
            machines,
            machines_by_team: name
                .starts_with("dedicated")
                .then(|| runs.iter().map(|(fleet, _)| fleet.machines()).collect()),
            machine_hours,
            cost,
            cost_per_million_output_tokens: per_million(cost, figures.output_tokens),
            met: teams.iter().all(|team| team.kept) && away.iter().all(|away| away.kept),
            counts,
            figures,
            teams,
            away,
        }
    }

    fn teams(&self, runs: &[(Fleet, Recording)], records: &[Record]) -> Vec<TeamFigures> {
        let pool = &self.plan.pool;
        let mut rows = Vec::new();
        for (fleet, recording) in runs {
            let cost = fleet.machines() as f64 * pool.hours * pool.price_per_machine_hour;
            let held = held_gigabyte_hours(pool, &self.demand, recording);
            let all: f64 = held.iter().sum();
            for team in &fleet.teams {
                let figures = figures(pool, &self.demand, records, |request| request.team == *team);
                let cost = if all > 0.0 { cost * held[*team] / all } else { cost / fleet.teams.len() as f64 };
                rows.push(TeamFigures {
                    team: pool.team[*team].name.clone(),
                    kept: figures.within_target_share.is_none_or(|share| share >= pool.target_share),
                    memory_gigabyte_hours: held[*team],
                    cost,
                    cost_per_million_output_tokens: per_million(cost, figures.output_tokens),
                    counts: recording.counts[*team],
                    figures,
                });
            }
        }
        rows
    }

    fn away(&self, absence: &Absence, records: &[Record], taken: impl Fn(usize) -> bool) -> Away {
        let pool = &self.plan.pool;
        let during = |at: Instant| (absence.from..absence.until).contains(&at);
        let teams = (0..pool.team.len()).filter(|team| taken(*team)).filter_map(|team| {
            let figures = figures(pool, &self.demand, records, |request| request.team == team && during(request.at));
            figures.within_target_share.map(|kept| (kept, team))
        });
        let (share, worst) = teams.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((1.0, 0));
        Away {
            machine: absence.machine,
            at_seconds: absence.from.since(Instant::ZERO).as_secs_f64(),
            away_seconds: absence.until.since(absence.from).as_secs_f64(),
            kept: share >= pool.away_target_share,
            worst_team: pool.team[worst].name.clone(),
            worst_team_within_target_share: share,
            figures: figures(pool, &self.demand, records, |request| taken(request.team) && during(request.at)),
        }
    }

    fn memory(&self, name: &'static str, runs: &[(Fleet, Recording)]) -> MemoryReport {
        let pool = &self.plan.pool;
        let machines: usize = runs.iter().map(|(fleet, _)| fleet.machines()).sum();
        let samples = (pool.hours * 3_600.0 / pool.sample_seconds) as usize + 1;
        let mut entries: Vec<Entry> = Vec::new();
        for (model, team) in self.demand.models.iter().enumerate() {
            entries.push(Entry { model: pool.name_of(model), team: *team, gigabytes: vec![0.0; samples] });
        }
        let step = Duration::from_secs_f64(pool.sample_seconds).as_secs_f64();
        for memory in runs.iter().flat_map(|(_, recording)| &recording.memory) {
            let at = (memory.at.since(Instant::ZERO).as_secs_f64() / step).round() as usize;
            if let Some(held) = entries.get_mut(memory.model).and_then(|entry| entry.gigabytes.get_mut(at)) {
                *held += memory.bytes as f64 / 1e9;
            }
        }
        entries.retain(|entry| entry.gigabytes.iter().any(|held| *held > 0.0));
        MemoryReport {
            arrangement: name,
            room_gigabytes: machines as f64 * (pool.memory_bytes - pool.reserve_bytes) as f64 / 1e9,
            seconds: (0..samples).map(|at| at as f64 * pool.sample_seconds).collect(),
            entries,
        }
    }
}

/// Each request as it went where its team was.
fn merged(demand: &Demand, runs: &[(Fleet, Recording)]) -> Vec<Record> {
    let mut records: Vec<Record> = runs.first().map(|(_, run)| run.records.clone()).unwrap_or_default();
    for (fleet, recording) in runs.iter().skip(1) {
        for (number, request) in demand.requests.iter().enumerate() {
            if fleet.teams.contains(&request.team) {
                records[number] = recording.records[number];
            }
        }
    }
    records
}

fn per_million(cost: f64, tokens: u64) -> Option<f64> {
    (tokens > 0).then(|| cost / tokens as f64 * 1e6)
}

/// What the models of each team held, by what was seen at each sample.
fn held_gigabyte_hours(pool: &Pool, demand: &Demand, recording: &Recording) -> Vec<f64> {
    let mut held = vec![0.0; pool.team.len()];
    for memory in &recording.memory {
        held[demand.models[memory.model]] += memory.bytes as f64 / 1e9 * pool.sample_seconds / 3_600.0;
    }
    held
}
