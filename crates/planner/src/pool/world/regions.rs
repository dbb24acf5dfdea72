//! Requests on their way to a region, and regions that are lost as a whole.

use super::{Event, World};
use crate::{events::Rank, pool::record::End};
use std::time::Duration;
use warmset_core::{Digest, routing::Router};

impl World<'_> {
    /// Puts down when regions are lost.
    pub(super) fn plan_regions(&mut self) {
        for (region, described) in self.pool.region.iter().enumerate() {
            for lost in &described.lost {
                let event = Event::LoseRegion { region, away: Duration::from_secs_f64(lost.away_seconds) };
                self.queue.push(lost.from(), Rank::Completion, event);
            }
        }
    }

    /// The region of a machine.
    pub(super) fn region_of(&self, machine: usize) -> usize {
        self.fleet.course.regions.get(machine).copied().unwrap_or(0)
    }

    pub(super) fn router_of(&mut self, machine: usize) -> &mut Router {
        let region = self.region_of(machine);
        &mut self.routers[region]
    }

    fn is_down(&self, region: usize) -> bool {
        self.now < self.down_until[region]
    }

    /// Whether the region of a machine is lost: it waits for its end then.
    pub(super) fn waits_for_region(&mut self, machine: usize, event: fn(usize) -> Event) -> bool {
        let region = self.region_of(machine);
        let is_down = self.is_down(region);
        if is_down {
            self.queue.push(self.down_until[region], Rank::Completion, event(machine));
        }
        is_down
    }

    /// A caller asks: in its own region, or in another one if it knows that that is lost.
    pub(super) fn arrive(&mut self, number: usize) {
        let Some(request) = self.demand.requests.get(number) else { return };
        let home = self.pool.home(request);
        let Some((region, way)) = self.pool.entry(home, self.now) else {
            return self.recording.end(number, self.now, End::Refused(REGION_LOST));
        };
        self.recording.failovers += u64::from(region != home);
        if way.is_zero() {
            self.enter_region(number, region);
        } else {
            self.queue.push(self.now + way, Rank::Arrival, Event::Enter { number, region });
        }
    }

    pub(super) fn enter_region(&mut self, number: usize, region: usize) {
        if self.is_down(region) {
            self.recording.end(number, self.now, End::Refused(REGION_LOST));
        } else {
            self.send(number, region, None);
        }
    }

    pub(super) fn lose_region(&mut self, region: usize, away: Duration) {
        self.down_until[region] = self.down_until[region].max(self.now + away);
        for machine in 0..self.places.len() {
            if self.region_of(machine) == region {
                self.lose(machine, away);
            }
        }
    }

    /// Who can be asked is gone with its region: nobody there can answer in its place.
    pub(super) fn is_lost_with_region(&self, machine: usize) -> bool {
        self.is_down(self.region_of(machine))
    }

    /// The link over which a machine fetches: from its own region if somebody there has the weights, else from elsewhere.
    pub(super) fn link_for(&self, machine: usize, digest: Digest) -> usize {
        let region = self.region_of(machine);
        let has = |other: usize| {
            let place = &self.places[other];
            let model = crate::pool::machine::model_of(digest);
            self.region_of(other) == region
                && self.fleet.models[other].contains(&model)
                && !place.lacks.contains(&digest)
        };
        let is_near = self.pool.region_bytes_per_second.is_none() || (0..self.places.len()).any(has);
        2 * region + usize::from(!is_near)
    }
}

/// What callers are told whose region is gone, and every other one that they could try.
pub(super) const REGION_LOST: &str = "region_lost";
