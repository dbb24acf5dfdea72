//! Regions of a pool: machines of their own behind a gateway of their own, whose weights others have not got; callers enter in
//! one, and in another one while theirs is lost.

use super::{
    demand::Request,
    scenario::{HOURS_MAX, PlanError, Pool, SECONDS_MAX, first_broken, within},
};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use warmset_core::Instant;

/// Regions of one scenario.
const REGIONS_MAX: usize = 16;
/// Losses of one region.
const LOSSES_MAX: usize = 100;

/// Machines in one place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// For people, and for teams to name.
    pub name: String,
    /// How many.
    pub machines: usize,
    /// Where its callers go while it is lost: to the first one that is there.
    #[serde(default)]
    pub failover: Vec<Failover>,
    /// When all of it is lost.
    #[serde(default)]
    pub lost: Vec<RegionLost>,
}

/// A region that takes the callers of another one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failover {
    /// Which.
    pub region: String,
    /// What the way there and back adds to each request.
    pub network_seconds: f64,
}

/// A region is lost: its machines come back with nothing in memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionLost {
    /// When, from the beginning on.
    pub at_hours: f64,
    /// For how long.
    pub away_seconds: f64,
}

impl RegionLost {
    pub(super) fn from(&self) -> Instant {
        super::course::at_hours(self.at_hours)
    }

    pub(super) fn until(&self) -> Instant {
        self.from() + Duration::from_secs_f64(self.away_seconds)
    }
}

impl Pool {
    pub(super) fn region_named(&self, name: &str) -> Option<usize> {
        self.region.iter().position(|region| region.name == name)
    }

    /// How much of a team's traffic enters in a region, compared with others.
    fn traffic(&self, team: usize, region: usize) -> f64 {
        let shares = &self.team[team].regions;
        let name = self.region.get(region).map_or("", |region| region.name.as_str());
        if shares.is_empty() { 1.0 } else { shares.get(name).copied().unwrap_or(0.0) }
    }

    /// Whether the weights of a team's models lie in a region from the beginning on: where its callers are.
    pub(super) fn has_weights(&self, team: usize, region: usize) -> bool {
        self.weights_everywhere || self.traffic(team, region) > 0.0
    }

    /// The region of a request's caller: the same for all of a conversation.
    pub(super) fn home(&self, request: &Request) -> usize {
        let regions = self.region.len().max(1);
        let all: f64 = (0..regions).map(|region| self.traffic(request.team, region)).sum();
        let mut left = fastrand::Rng::with_seed(request.session as u64).f64() * all;
        for region in 0..regions {
            left -= self.traffic(request.team, region);
            if left < 0.0 {
                return region;
            }
        }
        0
    }

    /// Whether callers believe at a time that a region is lost: they learn late of its loss and of its return.
    fn seems_lost(&self, region: usize, now: Instant) -> bool {
        let notice = Duration::from_secs_f64(self.notice_seconds);
        let losses = self.region.get(region).map(|region| region.lost.as_slice()).unwrap_or_default();
        losses.iter().any(|lost| (lost.from() + notice..lost.until() + notice).contains(&now))
    }

    /// Where a caller's request enters, and what the way there adds; nowhere if all that it could try seem lost.
    pub(super) fn entry(&self, home: usize, now: Instant) -> Option<(usize, Duration)> {
        if !self.seems_lost(home, now) {
            return Some((home, Duration::ZERO));
        }
        let others = self.region[home].failover.iter().filter_map(|other| {
            Some((self.region_named(&other.region)?, Duration::from_secs_f64(other.network_seconds)))
        });
        others.into_iter().find(|(region, _)| !self.seems_lost(*region, now))
    }

    pub(super) fn check_regions(&self) -> Result<(), PlanError> {
        let known = |name: &String| self.region_named(name).is_some();
        let alone = |region: &Region| self.region.iter().filter(|other| other.name == region.name).count() == 1;
        let failover = |region: &Region| {
            region.failover.iter().all(|other| {
                known(&other.region) && other.region != region.name && within(other.network_seconds, 0.0, 60.0)
            })
        };
        let loss =
            |lost: &RegionLost| within(lost.at_hours, 0.0, HOURS_MAX) && within(lost.away_seconds, 0.0, SECONDS_MAX);
        let machines: usize = self.region.iter().map(|region| region.machines.min(1_000)).sum();
        let shares = |share: &f64| within(*share, 0.0, 1e6);
        let enter = self.team.iter().all(|team| {
            team.regions.keys().all(known)
                && team.regions.values().all(shares)
                && (team.regions.is_empty() || team.regions.values().sum::<f64>() > 0.0)
        });
        let rules = [
            (self.region.len() <= REGIONS_MAX, "region must be there at most 16 times"),
            (
                self.region.iter().all(|region| alone(region) && !region.name.is_empty() && region.machines > 0),
                "region must have a name of its own and machines",
            ),
            (
                self.region.is_empty() || machines == self.machines,
                "region must have as many machines over all regions as machines says",
            ),
            (
                self.region.iter().all(failover),
                "region must have failover to other regions that are there, with network_seconds up to 60",
            ),
            (
                self.region.iter().all(|region| region.lost.len() <= LOSSES_MAX && region.lost.iter().all(loss)),
                "region must have lost with at_hours and away_seconds, at most 100 times",
            ),
            (enter, "team must have regions that are there, each with a share of its traffic"),
            (within(self.notice_seconds, 0.0, SECONDS_MAX), "notice_seconds must be between 0 and 1000000"),
            (
                self.region.len() < 2 || self.weights_everywhere || self.region_bytes_per_second.is_some(),
                "region must have all weights (weights_everywhere = true), or the pool a region_bytes_per_second to fetch \
                 them at from others",
            ),
        ];
        first_broken(&rules, "")
    }
}
