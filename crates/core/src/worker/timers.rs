//! What the passing of time alone brings about.

use super::{
    Worker,
    model::{Model, Phase},
    protocol::{Action, EvictionReason, Fact, LoadError},
};
use crate::{ids::Digest, time::Instant};
use alloc::{format, vec::Vec};
use core::time::Duration;

/// Engines are not measured more often than this, whatever the settings say.
const MEASURE_INTERVAL_MIN: Duration = Duration::from_millis(100);

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
        for digest in self.active.clone() {
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
                let Some(model) = self.models.get_mut(&digest) else { return };
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
                let Some(life) = self.models.get_mut(&digest).and_then(|model| model.phase.life_mut()) else { return };
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
                let interval = settings.measure_interval.max(MEASURE_INTERVAL_MIN);
                let measure = Some((life.measured_at + interval, Expiry::MeasureDue));
                if !model.is_idle() {
                    // An engine that shares the cores makes its steps in its turns only.
                    let deadline = settings.hang_deadline.saturating_mul(self.threads.rounds());
                    return [Some((life.last_progress + deadline, Expiry::Hanging)), measure];
                }
                let kept = model.spec.pin
                    || model.is_awaited(self.now)
                    || !matches!(model.phase, Phase::Ready(_))
                    || !model.waiting.is_empty()
                    || self.has_successor_on_its_way(model.spec.digest);
                let keep_alive = model.spec.keep_alive.filter(|_| !kept);
                let idle_since = model.last_used.unwrap_or(life.since).max(life.since);
                [keep_alive.map(|keep_alive| (idle_since + keep_alive, Expiry::KeepAliveOver)), measure]
            }
        }
    }

    pub(super) fn earliest_timer(&self) -> Option<Instant> {
        let active = self.active.iter().filter_map(|digest| self.models.get(digest));
        let own = active.clone().flat_map(|model| self.expiries(model).into_iter().flatten().map(|(at, _)| at));
        let pauses = active.clone().filter_map(|model| model.backoff.until().filter(|_| model.phase == Phase::Absent));
        let all = own
            .chain(pauses)
            .chain(self.next_look())
            .chain(self.protections())
            .chain(self.threads.next_timer())
            .chain(self.parked_too_long());
        // What has already passed was acted on, or waits for something else than time.
        all.filter(|at| *at > self.now).min()
    }

    /// While somebody waits for memory, the ends of what protects others from making room.
    fn protections(&self) -> impl Iterator<Item = Instant> {
        let waiting = self
            .active
            .iter()
            .filter_map(|digest| self.models.get(digest))
            .any(|model| model.phase == Phase::Absent && !model.waiting.is_empty());
        let residents = self.active.iter().filter_map(|digest| self.models.get(digest)).filter(move |_| waiting);
        residents.filter_map(|model| Some((model, model.phase.life()?))).flat_map(|(model, life)| {
            let by_class = model.last_used.unwrap_or(life.since) + self.settings.priority_protection;
            [life.protected_until, by_class]
        })
    }
}
