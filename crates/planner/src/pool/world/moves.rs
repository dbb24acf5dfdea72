//! Machines that come and go, and what they fetch first.

use super::{Event, World};
use crate::{
    events::Rank,
    pool::{
        course::BYTES_PER_SECOND_MAX,
        links::{Fetch, Link},
        machine::{digest_of, model_of, successor_of},
        record::Fetched,
    },
};
use std::collections::BTreeSet;
use warmset_core::{
    Digest, Instant,
    routing::{ReplicaId, Report},
    worker::Generation,
};

impl World<'_> {
    /// Puts down when machines come and go; which are there from the beginning.
    pub(super) fn plan_stays(&mut self) {
        for (machine, stay) in &self.fleet.course.stays {
            self.queue.push(stay.up_at, Rank::Completion, Event::Join { machine: *machine });
            if let Some(leaves_at) = stay.leaves_at {
                self.queue.push(leaves_at, Rank::Completion, Event::Leave { machine: *machine });
            }
        }
        let origin = self.pool.origin_bytes_per_second.unwrap_or(BYTES_PER_SECOND_MAX);
        let others = self.pool.region_bytes_per_second.unwrap_or(origin);
        self.links = self.routers.iter().flat_map(|_| [Link::new(origin), Link::new(others)]).collect();
    }

    /// Weights that a machine has not got when it is started first. What is new nobody has, if there is a way that it takes.
    pub(super) fn lacked_at_first(&self, machine: usize) -> BTreeSet<Digest> {
        let course = &self.fleet.course;
        let has_none = course.stays.get(&machine).is_some_and(|stay| !stay.weights_there);
        let region = self.region_of(machine);
        let is_lacked = |model: &&usize| has_none || !self.pool.has_weights(self.demand.models[**model], region);
        let models = self.fleet.models[machine].iter().filter(is_lacked).map(|model| digest_of(*model));
        let is_fetched = self.pool.origin_bytes_per_second.or(self.pool.region_bytes_per_second).is_some();
        let rollouts = course.rollouts.iter().filter(|_| is_fetched);
        models.chain(rollouts.map(|rollout| successor_of(rollout.model))).collect()
    }

    pub(super) fn join(&mut self, machine: usize) {
        if self.waits_for_region(machine, |machine| Event::Join { machine }) {
            return;
        }
        self.places[machine].switched = self.rolled_out();
        self.start(machine);
        self.enter(machine);
    }

    /// A machine gets nothing new, and is gone when it has answered everybody.
    pub(super) fn begin_leaving(&mut self, machine: usize) {
        self.places[machine].leaving = true;
        self.report(machine, Report::Draining(true));
        self.depart_if_idle(machine);
    }

    pub(super) fn depart_if_idle(&mut self, machine: usize) {
        let place = &self.places[machine];
        if place.leaving && place.open.is_empty() && !self.recording.departures.contains_key(&machine) {
            self.put_away(machine);
            self.router_of(machine).remove(ReplicaId(machine as u32));
            self.recording.departures.insert(machine, self.now);
        }
    }

    /// A load needs weights that its machine has not got.
    pub(super) fn fetch(&mut self, machine: usize, digest: Digest, load: Option<Generation>) {
        let bytes = self.pool.team[self.demand.models[model_of(digest)]].model_bytes;
        let link = self.link_for(machine, digest);
        self.links[link].want(self.now, (machine, digest), bytes, load);
        self.look_at_links();
    }

    /// What was fetched has arrived, if it has.
    pub(super) fn link_due(&mut self) {
        if self.link_due_at != Some(self.now) {
            // Another moment was named since.
            return;
        }
        self.link_due_at = None;
        let now = self.now;
        let arrived: Vec<Fetch> = self.links.iter_mut().flat_map(|link| link.take_arrived(now)).collect();
        for fetch in arrived {
            let seconds = self.now.since(fetch.began).as_secs_f64();
            let place = &mut self.places[fetch.machine];
            place.lacks.remove(&fetch.digest);
            self.recording.fetches.push(Fetched { machine: fetch.machine, bytes: fetch.bytes, at: self.now, seconds });
            if let Some(there) = &mut place.machine {
                there.fetched(self.now, fetch.digest, seconds, &fetch.waiting);
                self.after(fetch.machine);
            }
        }
        self.look_at_links();
    }

    /// Sees to it that the next arrival is not missed.
    pub(super) fn look_at_links(&mut self) {
        let next: Option<Instant> = self.links.iter().filter_map(Link::next).min();
        if let Some(next) = next.filter(|next| self.link_due_at.is_none_or(|due| *next < due)) {
            self.link_due_at = Some(next);
            self.queue.push(next, Rank::Completion, Event::LinkDue);
        }
    }
}
