//! What changes in a pool beside the same demand without the change: the figures of all requests, and of those that came
//! while it mattered.

use super::{
    course::{Join, Rollout, at_hours},
    demand::{Demand, Request},
    figures::{Figures, figures},
    machine::{Counts, Strategy},
    record::{Promotion, Recording},
    regions::Region,
    scenario::{Plan, Pool},
    world::{Fleet, play},
};
use serde::Serialize;
use std::time::Duration;
use warmset_core::Instant;

/// For so long a rollout's requests are looked at.
const ROLLOUT_WATCHED: Duration = Duration::from_secs(900);
/// Parts that the whole time is looked at in.
const MOMENTS: u32 = 60;
/// The pool as it is described.
const AS_DESCRIBED: &str = "as described";

/// The pool, or the same with something left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Variant {
    /// What is different.
    pub name: &'static str,
    /// What is played.
    pub pool: Pool,
}

/// What came of one variant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Which.
    pub variant: &'static str,
    /// Each machine from its order to its end.
    pub machine_hours: f64,
    /// That at the scenario's price.
    pub cost: f64,
    /// What happened how often.
    pub counts: Counts,
    /// Weights that were fetched.
    pub fetches: Fetches,
    /// Requests that entered in another region than their caller's.
    pub failovers: u64,
    /// All requests.
    #[serde(flatten)]
    pub figures: Figures,
    /// Each team's.
    pub teams: Vec<TeamRow>,
    /// New versions, machine by machine.
    pub promotions: Vec<PromotionRow>,
    /// Requests that came while something was different.
    pub windows: Vec<Window>,
    /// The whole time, in equal parts.
    pub moments: Vec<Moment>,
}

/// Weights that were fetched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Fetches {
    /// How often.
    pub count: u64,
    /// How many together.
    pub gigabytes: f64,
    /// How long one took on average.
    pub seconds_mean: Option<f64>,
    /// The longest.
    pub seconds_max: Option<f64>,
}

/// A new version on one machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromotionRow {
    /// The model's team and its rank there, from 1 on.
    pub model: String,
    /// Which machine.
    pub machine: usize,
    /// When it began there.
    pub at_seconds: f64,
    /// How long it took, with its weights' way.
    pub seconds: f64,
    /// How it took the place of the old one.
    pub strategy: Strategy,
    /// For how long callers were not admitted.
    pub gap_seconds: f64,
    /// How many waited for that to end.
    pub waited: u64,
    /// Whether the name stands for it.
    pub switched: bool,
}

/// One team.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TeamRow {
    /// Its name.
    pub team: String,
    /// Its requests.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Requests that came in a certain time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Window {
    /// What was different.
    pub what: String,
    /// From when on.
    pub at_seconds: f64,
    /// For how long.
    pub seconds: f64,
    /// The requests.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Requests that came in one part of the time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Moment {
    /// When the part begins.
    pub at_seconds: f64,
    /// All that came.
    pub requests: u64,
    /// Of these: as promised.
    pub within_target_share: Option<f64>,
    /// 99 of 100 of those that had a first token had it within this.
    pub first_token_p99_seconds: Option<f64>,
}

/// A time, and whose requests are looked at.
struct Span {
    what: String,
    from: Instant,
    until: Instant,
    whose: Whose,
}

enum Whose {
    Team(usize),
    Model(usize),
    /// Of all whose callers are there.
    Region(usize),
}

impl Span {
    fn has(&self, pool: &Pool, request: &Request) -> bool {
        let is_its = match self.whose {
            Whose::Team(team) => request.team == team,
            Whose::Model(model) => request.model == model,
            Whose::Region(region) => pool.home(request) == region,
        };
        is_its && (self.from..self.until).contains(&request.at)
    }
}

/// A demand, and the variants that it is played to.
pub struct Changes<'a> {
    plan: &'a Plan,
    demand: Demand,
    seed: u64,
}

impl<'a> Changes<'a> {
    /// Makes up the demand.
    pub fn new(plan: &'a Plan, seed: u64) -> Self {
        Self { plan, demand: Demand::new(&plan.pool, seed), seed }
    }

    /// Requests of the demand.
    pub fn requests(&self) -> usize {
        self.demand.requests.len()
    }

    /// The pool as it is described, and without what changes.
    pub fn variants(&self) -> Vec<Variant> {
        let pool = &self.plan.pool;
        let mut variants = vec![Variant { name: AS_DESCRIBED, pool: pool.clone() }];
        if !pool.join.is_empty() {
            variants.push(Variant { name: "none joins", pool: Pool { join: Vec::new(), ..pool.clone() } });
            let join = pool.join.iter().map(Join::joined_at_the_beginning).collect();
            variants.push(Variant { name: "there from the beginning", pool: Pool { join, ..pool.clone() } });
        }
        if !pool.rollout.is_empty() {
            variants.push(Variant { name: "no new version", pool: Pool { rollout: Vec::new(), ..pool.clone() } });
        }
        if pool.region.iter().any(|region| !region.lost.is_empty()) {
            let region = pool.region.iter().map(|region| Region { lost: Vec::new(), ..region.clone() }).collect();
            variants.push(Variant { name: "no region lost", pool: Pool { region, ..pool.clone() } });
        }
        if pool.region.len() > 1 && !pool.weights_everywhere {
            let pool = Pool { weights_everywhere: true, ..pool.clone() };
            variants.push(Variant { name: "weights everywhere", pool });
        }
        variants
    }

    /// Plays one.
    pub fn run(&self, variant: &Variant) -> Result<Row, String> {
        let fleet = Fleet::changing(&variant.pool, &self.demand);
        let recording = play(&variant.pool, &self.demand, &fleet, self.seed, false)?;
        Ok(self.row(variant, &fleet, &recording))
    }

    fn row(&self, variant: &Variant, fleet: &Fleet, recording: &Recording) -> Row {
        let pool = &self.plan.pool;
        let of = |which: &dyn Fn(&Request) -> bool| figures(pool, &self.demand, &recording.records, which);
        let team = |(number, team): (usize, &super::scenario::Team)| TeamRow {
            team: team.name.clone(),
            figures: of(&|request| request.team == number),
        };
        let window = |span: Span| Window {
            figures: of(&|request| span.has(pool, request)),
            at_seconds: span.from.since(Instant::ZERO).as_secs_f64(),
            seconds: span.until.since(span.from).as_secs_f64(),
            what: span.what,
        };
        let machine_hours = machine_hours(pool, fleet, recording);
        Row {
            variant: variant.name,
            machine_hours,
            cost: machine_hours * pool.price_per_machine_hour,
            counts: recording.all_counts(),
            fetches: Fetches::of(recording),
            failovers: recording.failovers,
            figures: of(&|_| true),
            teams: pool.team.iter().enumerate().map(team).collect(),
            promotions: recording.promotions.iter().map(|promotion| self.promotion(promotion)).collect(),
            windows: self.spans().into_iter().map(window).collect(),
            moments: (0..MOMENTS).map(|number| self.moment(recording, number)).collect(),
        }
    }

    fn moment(&self, recording: &Recording, number: u32) -> Moment {
        let pool = &self.plan.pool;
        let begin = |number: u32| at_hours(pool.hours * f64::from(number) / f64::from(MOMENTS));
        let (from, until) = (begin(number), begin(number + 1));
        let found = figures(pool, &self.demand, &recording.records, |request| (from..until).contains(&request.at));
        Moment {
            at_seconds: from.since(Instant::ZERO).as_secs_f64(),
            requests: found.requests,
            within_target_share: found.within_target_share,
            first_token_p99_seconds: found.first_token_p99_seconds,
        }
    }

    /// When something is different, and for whom: the same times for all variants.
    fn spans(&self) -> Vec<Span> {
        let pool = &self.plan.pool;
        let number = |name: &str| pool.team.iter().position(|team| team.name == name);
        let bursts = pool.burst.iter().filter_map(|burst| {
            let from = at_hours(burst.at_hours);
            let until = from + Duration::from_secs_f64(burst.seconds);
            let what = format!("burst of {}", burst.team);
            Some(Span { what, from, until, whose: Whose::Team(number(&burst.team)?) })
        });
        let rollouts = pool.rollout.iter().filter_map(|rollout: &Rollout| {
            let from = at_hours(rollout.at_hours);
            Some(Span {
                what: format!("rollout of {} {}", rollout.team, rollout.model),
                from,
                until: from + ROLLOUT_WATCHED,
                whose: Whose::Model(pool.model_of(&rollout.team, rollout.model)?),
            })
        });
        let losses = pool.region.iter().enumerate().flat_map(|(number, region)| {
            let notice = Duration::from_secs_f64(pool.notice_seconds);
            region.lost.iter().map(move |lost| Span {
                what: format!("loss of {}", region.name),
                from: lost.from(),
                until: lost.until() + notice,
                whose: Whose::Region(number),
            })
        });
        bursts.chain(rollouts).chain(losses).collect()
    }

    fn promotion(&self, promotion: &Promotion) -> PromotionRow {
        let told = promotion.promoted;
        PromotionRow {
            model: self.plan.pool.name_of(told.model),
            machine: promotion.machine,
            at_seconds: told.began.since(Instant::ZERO).as_secs_f64(),
            seconds: promotion.ended.since(told.began).as_secs_f64(),
            strategy: told.strategy,
            gap_seconds: told.gap.as_secs_f64(),
            waited: told.waited,
            switched: told.switched,
        }
    }
}

/// Each machine is paid for from its order to its end.
fn machine_hours(pool: &Pool, fleet: &Fleet, recording: &Recording) -> f64 {
    let end = at_hours(pool.hours);
    let hours = |machine: usize| {
        let from = fleet.course.stays.get(&machine).map_or(Instant::ZERO, |stay| stay.ordered_at);
        let until = recording.departures.get(&machine).map_or(end, |gone| (*gone).min(end));
        until.since(from).as_secs_f64() / 3_600.0
    };
    (0..fleet.machines()).map(hours).sum()
}

impl Fetches {
    fn of(recording: &Recording) -> Self {
        let fetches = &recording.fetches;
        let seconds: f64 = fetches.iter().map(|fetch| fetch.seconds).sum();
        Self {
            count: fetches.len() as u64,
            gigabytes: fetches.iter().map(|fetch| fetch.bytes).sum::<u64>() as f64 / 1e9,
            seconds_mean: (!fetches.is_empty()).then(|| seconds / fetches.len() as f64),
            seconds_max: fetches.iter().map(|fetch| fetch.seconds).max_by(f64::total_cmp),
        }
    }
}
