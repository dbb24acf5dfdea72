//! What the passing of time alone brings about.

use super::{
    Worker,
    model::{Model, Phase},
    protocol::{Action, EvictionReason, Fact, LoadError},
};
use crate::{ids::Digest, time::Instant};
use alloc::{format, vec::Vec};

/// Something that becomes true at a known time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expiry {
    NoRoomBeside,
    LoadTooSlow,
    StopIgnored,
    Hanging,
    KeepAliveOver,
    MeasureDue,
}

impl Worker {
    pub(super) fn expire(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for digest in self.models.awake(now) {
            while let Some((_, expiry)) = self
                .models
                .get(&digest)
                .and_then(|model| self.expiries(model).into_iter().flatten().find(|(at, _)| *at <= now))
            {
                self.apply(now, digest, expiry, actions);
            }
        }
        self.end_waiting_of_parked(now);
        let (window, threshold) = (self.settings.thrash_window, self.settings.thrash_threshold);
        for (name, pool) in &mut self.pools {
            let ratio = pool.thrash.ratio(now, window);
            if let Some(raised) = pool.thrash.judge(now, window, threshold) {
                actions.push(Action::Tell(Fact::ThrashAlarm { pool: name.clone(), ratio, raised }));
            }
        }
    }

    fn apply(&mut self, now: Instant, digest: Digest, expiry: Expiry, actions: &mut Vec<Action>) {
        match expiry {
            Expiry::LoadTooSlow => {
                let seconds = self.settings.load_deadline.as_secs_f64();
                let message = format!("the load took longer than the deadline of {seconds} seconds");
                self.abandon_load(now, digest, EvictionReason::Abandoned, actions);
                self.note_failed_load(now, digest, LoadError { message, permanent: false }, actions);
            }
            Expiry::NoRoomBeside => {
                let seconds = self.settings.load_deadline.as_secs_f64();
                let message = format!("in {seconds} seconds there was no room beside the version it is to replace");
                self.note_failed_load(now, digest, LoadError { message, permanent: false }, actions);
            }
            Expiry::StopIgnored => {
                let Some(mut model) = self.models.get_mut(&digest) else { return };
                if let Phase::Unloading { life, killed, .. } = &mut model.phase {
                    *killed = true;
                    actions.push(Action::Kill { digest, generation: life.generation });
                }
            }
            Expiry::Hanging => {
                let seconds = self.settings.hang_deadline.as_secs_f64();
                let message = format!("no step for {seconds} seconds with work to do");
                actions.push(Action::Tell(Fact::EngineCrashed { digest, message: message.clone() }));
                self.kill(now, digest, EvictionReason::Abandoned, actions);
                self.note_crash(now, digest, message, actions);
            }
            Expiry::KeepAliveOver => self.stop(now, digest, EvictionReason::KeepAlive, actions),
            Expiry::MeasureDue => {
                let Some(mut model) = self.models.get_mut(&digest) else { return };
                let Some(life) = model.phase.life_mut() else { return };
                life.measured_at = now;
                actions.push(Action::Measure { digest, generation: life.generation });
            }
        }
    }

    fn expiries(&self, model: &Model) -> [Option<(Instant, Expiry)>; 2] {
        let settings = &self.settings;
        match &model.phase {
            Phase::Absent => {
                let no_room =
                    model.predecessor.map(|(_, since)| (since + settings.load_deadline, Expiry::NoRoomBeside));
                [no_room, None]
            }
            Phase::Verifying(life) | Phase::Loading(life) => {
                [Some((life.since + settings.load_deadline, Expiry::LoadTooSlow)), None]
            }
            Phase::Unloading { killed: true, .. } => [None, None],
            Phase::Unloading { life, .. } => [Some((life.since + settings.stop_deadline, Expiry::StopIgnored)), None],
            Phase::Ready(life) | Phase::Draining(life, _) => {
                let measure = Some((life.measured_at + self.models.rules().measure_interval, Expiry::MeasureDue));
                if !model.is_idle() {
                    // An engine that shares the cores makes its steps in its turns only.
                    let deadline = settings.hang_deadline.saturating_mul(self.threads.rounds());
                    return [Some((life.last_progress + deadline, Expiry::Hanging)), measure];
                }
                let ends = model.keep_alive_ends(self.models.has_successor(&model.spec.digest));
                [ends.map(|at| (at, Expiry::KeepAliveOver)), measure]
            }
        }
    }

    pub(super) fn earliest_timer(&self) -> Option<Instant> {
        let at_work = self.models.busy().chain(self.models.absent().filter(|model| model.predecessor.is_some()));
        let own = at_work.flat_map(|model| self.expiries(model).into_iter().flatten().map(|(at, _)| at));
        let all = own
            .chain(self.next_look())
            .chain(self.threads.next_timer())
            .chain(self.parked_too_long())
            // What has already passed was acted on, or waits for something else than time.
            .filter(|at| *at > self.now);
        let listed = [
            self.models.next_wake(self.now),
            self.models.next_end_of_pause(self.now),
            // While somebody waits for memory, the ends of what protects others from making room.
            self.models.next_end_of_protection(self.now).filter(|_| self.memory_is_waited_for()),
        ];
        all.chain(listed.into_iter().flatten()).min()
    }

    fn memory_is_waited_for(&self) -> bool {
        self.models.absent().any(|model| !model.waiting.is_empty())
    }
}
