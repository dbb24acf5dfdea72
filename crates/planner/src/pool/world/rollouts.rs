//! New versions on their way through a fleet: one machine after the other, in their order, until one fails.

use super::{Event, TICK, World};
use crate::{
    events::Rank,
    pool::{course::Rolling, machine::Promoted, record::Promotion},
};
use std::collections::BTreeSet;

/// Where a rollout is.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    /// Whether a machine has the new version, so that those that come later begin with it.
    begun: bool,
    /// The machine whose turn it is.
    running: Option<usize>,
}

impl World<'_> {
    pub(super) fn plan_rollouts(&mut self) {
        for (number, rollout) in self.fleet.course.rollouts.iter().enumerate() {
            self.rollouts.push(Progress::default());
            self.queue.push(rollout.at, Rank::Completion, Event::Promote { rollout: number, machine: 0 });
        }
    }

    /// Names whose new version a machine begins with that comes now.
    pub(super) fn rolled_out(&self) -> BTreeSet<usize> {
        let begun = self.rollouts.iter().zip(&self.fleet.course.rollouts).filter(|(progress, _)| progress.begun);
        begun.map(|(_, rollout)| rollout.model).collect()
    }

    /// The turn of a machine in a rollout, or of the next one that serves the model.
    pub(super) fn promote(&mut self, number: usize, first: usize) {
        let rollout = &self.fleet.course.rollouts[number];
        let is_next = |machine: &usize| {
            let place = &self.places[*machine];
            // One that comes later begins with the new version.
            let has_come = place.life > 0;
            let serves = self.fleet.models[*machine].contains(&rollout.model);
            serves && has_come && !place.leaving && !place.switched.contains(&rollout.model)
        };
        let next = (first..self.places.len()).find(is_next);
        self.rollouts[number].running = next;
        let Some(machine) = next else { return };
        match &mut self.places[machine].machine {
            Some(there) => {
                there.promote(self.now, rollout.model, rollout.canary);
                self.after(machine);
            }
            // It is away: looked after until it is back.
            None => self.queue.push(self.now + TICK, Rank::Completion, Event::Promote { rollout: number, machine }),
        }
    }

    /// A machine has come to an end with a promotion: the next one's turn, if all is well.
    pub(super) fn promoted(&mut self, machine: usize, promoted: &Promoted) {
        let ended = self.now;
        self.recording.promotions.push(Promotion { machine, ended, promoted: *promoted });
        let is_it = |rollout: &Rolling| rollout.model == promoted.model;
        let Some(number) = self.fleet.course.rollouts.iter().position(is_it) else { return };
        self.rollouts[number].running = None;
        if promoted.switched {
            self.rollouts[number].begun = true;
            self.places[machine].switched.insert(promoted.model);
            let next = Event::Promote { rollout: number, machine: machine + 1 };
            self.queue.push(self.now, Rank::Completion, next);
        }
    }

    /// A machine is gone: a promotion that it was in the middle of has changed nothing, and is tried again when it is back.
    pub(super) fn promote_again(&mut self, machine: usize) {
        for number in 0..self.rollouts.len() {
            if self.rollouts[number].running == Some(machine) {
                let again = Event::Promote { rollout: number, machine };
                self.queue.push(self.now + TICK, Rank::Completion, again);
            }
        }
    }
}
