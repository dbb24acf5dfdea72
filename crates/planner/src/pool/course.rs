//! What of a pool changes while it runs: machines that come, first without any weights, and go in good order.

use super::{
    demand::Demand,
    scenario::{HOURS_MAX, MACHINES_MAX, PlanError, Pool, SECONDS_MAX, first_broken, within},
    world::Fleet,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::Instant;

/// Changes of one kind.
const CHANGES_MAX: usize = 100;
/// The fastest link.
pub(super) const BYTES_PER_SECOND_MAX: f64 = 1e15;

/// Machines that come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// When they are ordered, and paid for from then on.
    pub at_hours: f64,
    /// How many.
    pub machines: usize,
    /// How long it takes until they are up.
    pub up_after_seconds: f64,
    /// Whose models they serve; everybody's if nobody is named.
    #[serde(default)]
    pub teams: Vec<String>,
    /// In which region, if there are any.
    pub region: Option<String>,
    /// Whether they come with the weights of their models. If not, the first load of each fetches them from the origin.
    #[serde(default)]
    pub weights_there: bool,
    /// When they leave: nothing new is sent there, and they are gone when nobody is left to answer.
    pub leaves_at_hours: Option<f64>,
}

/// A model gets a new version, on one machine after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rollout {
    /// Whose model.
    pub team: String,
    /// Which of the team's, from 1 on, the most often asked for first.
    pub model: usize,
    /// When the first machine begins.
    pub at_hours: f64,
    /// How long the canary takes that a new version answers before callers get it.
    #[serde(default = "canary_seconds")]
    pub canary_seconds: f64,
}

fn canary_seconds() -> f64 {
    1.0
}

/// The same with the model's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rolling {
    /// Counted over all teams.
    pub model: usize,
    /// When the first machine begins.
    pub at: Instant,
    /// How long the canary takes.
    pub canary: Duration,
}

/// How long a machine is part of its fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stay {
    /// It is paid for from then on.
    pub ordered_at: Instant,
    /// It serves from then on.
    pub up_at: Instant,
    /// It gets nothing new from then on.
    pub leaves_at: Option<Instant>,
    /// Whether the weights of its models are there when it comes.
    pub weights_there: bool,
}

/// What of a fleet changes. Of one that says nothing, nothing does.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Course {
    /// Machines that are not there all the time, by their number.
    pub stays: BTreeMap<usize, Stay>,
    /// New versions, each of another model.
    pub rollouts: Vec<Rolling>,
    /// The region of each machine; the first one if it says nothing.
    pub regions: Vec<usize>,
}

/// So many hours after the beginning.
pub(super) fn at_hours(hours: f64) -> Instant {
    Instant::after(Duration::from_secs_f64(hours * 3_600.0))
}

impl Join {
    fn stay(&self) -> Stay {
        let ordered_at = at_hours(self.at_hours);
        Stay {
            ordered_at,
            up_at: ordered_at + Duration::from_secs_f64(self.up_after_seconds),
            leaves_at: self.leaves_at_hours.map(at_hours),
            weights_there: self.weights_there,
        }
    }

    /// The same machines, there all the time with all that they need.
    pub(super) fn joined_at_the_beginning(&self) -> Self {
        Self { at_hours: 0.0, up_after_seconds: 0.0, weights_there: true, leaves_at_hours: None, ..self.clone() }
    }

    fn makes_sense(&self) -> bool {
        let up_at_hours = self.at_hours + self.up_after_seconds / 3_600.0;
        within(self.at_hours, 0.0, HOURS_MAX)
            && within(self.up_after_seconds, 0.0, SECONDS_MAX)
            && self.leaves_at_hours.is_none_or(|hours| within(hours, up_at_hours, HOURS_MAX))
    }
}

impl Pool {
    /// Whether anything of it changes while it runs.
    pub fn changes(&self) -> bool {
        !self.join.is_empty() || !self.rollout.is_empty() || !self.region.is_empty()
    }

    /// The number of a team's model over all teams.
    pub(super) fn model_of(&self, team: &str, rank: usize) -> Option<usize> {
        let place = self.team.iter().position(|known| known.name == team)?;
        let before: usize = self.team[..place].iter().map(|team| team.models).sum();
        (1..=self.team[place].models).contains(&rank).then(|| before + rank - 1)
    }

    /// A model by its team and its rank there, from 1 on.
    pub(super) fn name_of(&self, mut model: usize) -> String {
        for team in &self.team {
            if model < team.models {
                return format!("{} {}", team.name, model + 1);
            }
            model -= team.models;
        }
        "nobody's".to_owned()
    }

    fn check_rollouts(&self) -> Result<(), PlanError> {
        let makes_sense = |rollout: &Rollout| {
            within(rollout.at_hours, 0.0, HOURS_MAX)
                && within(rollout.canary_seconds, 0.0, 3_600.0)
                && self.model_of(&rollout.team, rollout.model).is_some()
        };
        let is_alone = |(place, one): (usize, &Rollout)| {
            !self.rollout[..place].iter().any(|other| (&other.team, other.model) == (&one.team, one.model))
        };
        let rules = [
            (self.rollout.len() <= CHANGES_MAX, "rollout must be there at most 100 times"),
            (
                self.rollout.iter().all(makes_sense),
                "rollout must name a team and one of its models, from 1 on, at_hours, and canary_seconds up to 3600",
            ),
            (self.rollout.iter().enumerate().all(is_alone), "rollout must name each model once at most"),
        ];
        first_broken(&rules, "")
    }

    /// What is to happen, by when it begins.
    fn begins_at_hours(&self) -> impl Iterator<Item = f64> {
        let faults = self.lost.iter().map(|one| one.at_hours).chain(self.slow_disk.iter().map(|one| one.at_hours));
        let failing = self.failing_loads.iter().map(|one| one.at_hours);
        let bursts = self.burst.iter().map(|one| one.at_hours);
        let changes = self.join.iter().map(|one| one.at_hours).chain(self.rollout.iter().map(|one| one.at_hours));
        let losses = self.region.iter().flat_map(|region| region.lost.iter().map(|one| one.at_hours));
        faults.chain(failing).chain(bursts).chain(changes).chain(losses)
    }

    /// All that changes, checked.
    pub(super) fn check_changes(&self) -> Result<(), PlanError> {
        let joined = |join: &Join| join.machines.min(MACHINES_MAX + 1);
        let machines = self.machines + self.join.iter().map(joined).sum::<usize>();
        let known = |name: &String| self.team.iter().any(|team| team.name == *name);
        let is_rate = |rate: Option<f64>| rate.is_none_or(|rate| within(rate, 1.0, BYTES_PER_SECOND_MAX));
        let in_region = |join: &Join| match &join.region {
            Some(name) => self.region_named(name).is_some(),
            None => self.region.is_empty(),
        };
        let has_origin = self.origin_bytes_per_second.is_some();
        let rules = [
            (self.join.len() <= CHANGES_MAX, "join must be there at most 100 times"),
            (machines <= MACHINES_MAX, "join must make no more than 64 machines with those that are there"),
            (
                self.join.iter().all(|join| join.machines > 0 && join.makes_sense()),
                "join must have machines, at_hours and up_after_seconds, and leaves_at_hours after these if at all",
            ),
            (self.join.iter().all(|join| join.teams.iter().all(known)), "join must name teams that are there"),
            (self.join.iter().all(in_region), "join must name a region that is there, if there are any"),
            (is_rate(self.region_bytes_per_second), "region_bytes_per_second must be between 1 and 1000000000000000"),
            (is_rate(self.origin_bytes_per_second), "origin_bytes_per_second must be between 1 and 1000000000000000"),
            (
                self.join.iter().all(|join| join.weights_there || has_origin),
                "join must say weights_there = true, or the pool have an origin_bytes_per_second to fetch weights at",
            ),
            (
                self.begins_at_hours().all(|hours| hours < self.hours),
                "at_hours must be before its hours end, of everything that is to happen: it would change nothing",
            ),
        ];
        first_broken(&rules, "")?;
        self.check_rollouts()?;
        self.check_regions()
    }
}

impl Fleet {
    /// All teams on the machines of a pool, with all that changes there.
    pub fn changing(pool: &Pool, demand: &Demand) -> Self {
        let teams: Vec<usize> = (0..pool.team.len()).collect();
        let alone = |machines: usize| Self::new(pool, demand, (teams.clone(), machines), pool.lost.clone());
        let mut fleet = alone(pool.machines);
        if !pool.region.is_empty() {
            fleet.models.clear();
        }
        for (number, region) in pool.region.iter().enumerate() {
            fleet.models.extend(alone(region.machines).models);
            fleet.course.regions.resize(fleet.models.len(), number);
        }
        for join in &pool.join {
            let is_served = |team: usize| join.teams.is_empty() || join.teams.contains(&pool.team[team].name);
            let models = demand.models.iter().enumerate().filter(|(_, team)| is_served(**team));
            let models: Vec<usize> = models.map(|(model, _)| model).collect();
            for _ in 0..join.machines {
                fleet.course.stays.insert(fleet.models.len(), join.stay());
                fleet.models.push(models.clone());
                let region = join.region.as_ref().and_then(|name| pool.region_named(name));
                fleet.course.regions.extend(region);
            }
        }
        let rolling = |rollout: &Rollout| {
            let (model, canary) = (pool.model_of(&rollout.team, rollout.model)?, rollout.canary_seconds);
            Some(Rolling { model, at: at_hours(rollout.at_hours), canary: Duration::from_secs_f64(canary) })
        };
        fleet.course.rollouts = pool.rollout.iter().filter_map(rolling).collect();
        fleet
    }
}
