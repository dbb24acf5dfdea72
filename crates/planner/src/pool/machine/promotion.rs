//! A name of a machine comes to stand for another version, as a server promotes: the version is there and loaded, beside the
//! old one where both fit, and has answered its canary before the name changes its meaning in one step; then the old one ends.

use super::{Inner, Machine, Notice, digest_of, model_of, successor_of};
use crate::pool::demand::Request;
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Digest, Instant, RequestId,
    gateway::{self, Refusal},
    rollout::Takeover,
    worker::{self, ModelState},
};

/// How long a version that must make way may go on answering: as in a server.
const DRAIN_PATIENCE: Duration = Duration::from_secs(120);
/// How long an old version stays known after it was unloaded: as in a server.
const LINGER: Duration = Duration::from_secs(5);

/// How a version took, or was to take, the place of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Loaded beside the old one.
    SideBySide,
    /// Loaded when the old one was gone.
    DrainThenLoad,
    /// It fits nowhere, or was not there in time to be tried.
    None,
}

impl Strategy {
    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Self::SideBySide => "side by side",
            Self::DrainThenLoad => "drain then load",
            Self::None => "none",
        }
    }
}

/// What came of a promotion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Promoted {
    /// The model, counted over all teams.
    pub model: usize,
    /// When it began.
    pub began: Instant,
    /// How.
    pub strategy: Strategy,
    /// For how long callers waited before they were admitted, if they did.
    pub gap: Duration,
    /// How many did.
    pub waited: u64,
    /// Whether the name stands for the new version.
    pub switched: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its weights are on their way.
    Fetching,
    /// The old version answers whom it was asked by, until then at the latest.
    Draining(Instant),
    /// The old version leaves memory.
    Unloading,
    Loading,
    /// The canary is asked.
    Asking(Instant),
}

#[derive(Debug, Clone, Copy)]
struct Promotion {
    next: Digest,
    old: Digest,
    canary: Duration,
    stage: Stage,
    /// Since when callers wait.
    held_since: Option<Instant>,
    told: Promoted,
}

/// What is known of names and versions.
#[derive(Default)]
pub(super) struct Versions {
    running: BTreeMap<usize, Promotion>,
    /// Callers of held names, with the end of their patience.
    held: Vec<(RequestId, Instant)>,
    /// Old versions, and when they are forgotten, once they were told to leave.
    retiring: Vec<(Digest, Option<Instant>)>,
    states: BTreeMap<Digest, ModelState>,
    /// Names that have changed their meaning, with the number of the first admission after that.
    switched: BTreeMap<usize, u64>,
    /// The number of each admission.
    admitted: BTreeMap<RequestId, u64>,
    admissions: u64,
    /// A request that was answered by a version that its name did not mean.
    mistaken: Option<RequestId>,
}

impl Versions {
    /// Names that changed their meaning in an earlier life.
    pub(super) fn of(switched: impl Iterator<Item = usize>) -> Self {
        Self { switched: switched.map(|model| (model, 0)).collect(), ..Self::default() }
    }

    /// What a name means now.
    pub(super) fn meaning(&self, model: usize) -> Digest {
        if self.switched.contains_key(&model) { successor_of(model) } else { digest_of(model) }
    }

    pub(super) fn told_state(&mut self, digest: Digest, state: ModelState) {
        self.states.insert(digest, state);
    }

    /// When something is to be looked at, if nothing else happens.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        let stages = self.running.values().filter_map(|promotion| match promotion.stage {
            Stage::Draining(until) | Stage::Asking(until) => Some(until),
            Stage::Fetching | Stage::Unloading | Stage::Loading => None,
        });
        let held = self.held.iter().map(|(_, deadline)| *deadline);
        stages.chain(held).chain(self.retiring.iter().filter_map(|(_, at)| *at)).min()
    }

    /// An engine begins a request: is it the version that its name meant when it was admitted?
    pub(super) fn judge(&mut self, request: RequestId, digest: Digest) {
        let model = model_of(digest);
        let admission = self.admitted.get(&request).copied().unwrap_or(0);
        let is_new = self.switched.get(&model).is_some_and(|first| admission >= *first);
        if digest != if is_new { successor_of(model) } else { digest_of(model) } {
            self.mistaken.get_or_insert(request);
        }
    }

    /// A request has ended: nothing is to be judged of it any more.
    pub(super) fn ended(&mut self, request: RequestId) {
        self.admitted.remove(&request);
    }

    pub(super) fn check(&self) -> Result<(), String> {
        match self.mistaken {
            Some(request) => Err(format!("{request:?} was answered by a version that its name did not mean")),
            None => Ok(()),
        }
    }
}

impl Machine<'_> {
    /// A name is to stand for its new version.
    pub(in crate::pool) fn promote(&mut self, now: Instant, model: usize, canary: Duration) {
        self.reach(now);
        let (next, old) = (successor_of(model), self.versions.meaning(model));
        let told =
            Promoted { model, began: now, strategy: Strategy::None, gap: Duration::ZERO, waited: 0, switched: false };
        self.configure(next, false);
        if self.lacks.contains(&next) {
            self.notices.push(Notice::Fetch(next, None));
        }
        let promotion = Promotion { next, old, canary, stage: Stage::Fetching, held_since: None, told };
        self.versions.running.insert(model, promotion);
        self.go_on();
    }

    /// A request is admitted for what its name means, or waits while that is being changed.
    pub(super) fn admit_or_hold(&mut self, request: RequestId, asked: &Request, deadline: Instant) {
        if let Some(promotion) = self.versions.running.get_mut(&asked.model).filter(|one| one.held_since.is_some()) {
            promotion.told.waited += 1;
            self.versions.held.push((request, deadline));
        } else {
            self.versions.admitted.insert(request, self.versions.admissions);
            self.versions.admissions += 1;
            self.admit(request, asked, self.versions.meaning(asked.model), deadline.since(self.now));
        }
    }

    /// Everything that can go on now does, until nothing can.
    pub(super) fn go_on(&mut self) {
        loop {
            self.refuse_impatient();
            self.retire();
            let models: Vec<usize> = self.versions.running.keys().copied().collect();
            let moved = models.into_iter().filter(|model| self.step(*model)).count();
            if moved == 0 && self.inner.is_empty() {
                return;
            }
            self.settle_machines();
        }
    }

    /// One step of one promotion, if it can make one.
    fn step(&mut self, model: usize) -> bool {
        let Some(promotion) = self.versions.running.get(&model).copied() else { return false };
        let (next, old) = (promotion.next, promotion.old);
        let state = |digest: Digest| self.versions.states.get(&digest).copied().unwrap_or(ModelState::Absent);
        match promotion.stage {
            Stage::Fetching if !self.lacks.contains(&next) => self.begin_takeover(model, promotion),
            Stage::Draining(_) if self.gateway.requests_of(old) == 0 => {
                self.next_worker(worker::Event::UnloadWanted { digest: old });
                self.enter(model, Stage::Unloading);
            }
            Stage::Draining(until) if until <= self.now => self.end(model, false),
            Stage::Unloading if state(old) == ModelState::Absent => {
                self.next_worker(worker::Event::LoadWanted { digest: next });
                self.enter(model, Stage::Loading);
            }
            Stage::Loading if state(next) == ModelState::Ready => {
                self.enter(model, Stage::Asking(self.now + promotion.canary));
            }
            Stage::Loading if state(next) == ModelState::Failed => self.end(model, false),
            Stage::Asking(until) if until <= self.now => self.end(model, true),
            _ => return false,
        }
        true
    }

    fn enter(&mut self, model: usize, stage: Stage) {
        if let Some(promotion) = self.versions.running.get_mut(&model) {
            promotion.stage = stage;
        }
    }

    fn begin_takeover(&mut self, model: usize, mut promotion: Promotion) {
        let (digest, predecessor) = (promotion.next, promotion.old);
        match self.worker.takeover(self.now, digest, predecessor) {
            Takeover::SideBySide { .. } => {
                promotion.told.strategy = Strategy::SideBySide;
                promotion.stage = Stage::Loading;
                self.next_worker(worker::Event::PauseLifted { digest });
                self.next_worker(worker::Event::Succeed { digest, predecessor });
            }
            Takeover::DrainThenLoad { .. } => {
                promotion.told.strategy = Strategy::DrainThenLoad;
                promotion.held_since = Some(self.now);
                promotion.stage = Stage::Draining(self.now + DRAIN_PATIENCE);
            }
            Takeover::Impossible { .. } => return self.end(model, false),
        }
        self.versions.running.insert(model, promotion);
    }

    /// The name changes its meaning, or keeps it; callers that waited are admitted for what it means then.
    fn end(&mut self, model: usize, switched: bool) {
        let Some(promotion) = self.versions.running.remove(&model) else { return };
        let (next, old) = (promotion.next, promotion.old);
        if switched {
            self.versions.switched.insert(model, self.versions.admissions);
            self.configure(next, self.pinned.contains(&model));
            self.configure(old, false);
            self.versions.retiring.push((old, None));
        } else {
            if promotion.told.strategy == Strategy::DrainThenLoad {
                self.next_worker(worker::Event::LoadWanted { digest: old });
            }
            self.forget(next);
        }
        let gap = promotion.held_since.map_or(Duration::ZERO, |since| self.now.since(since));
        self.notices.push(Notice::Promoted(Promoted { gap, switched, ..promotion.told }));
        for (request, deadline) in core::mem::take(&mut self.versions.held) {
            match self.asked(request) {
                Some(asked) if asked.model == model => self.admit_or_hold(request, &asked, deadline),
                _ => self.versions.held.push((request, deadline)),
            }
        }
    }

    fn forget(&mut self, digest: Digest) {
        self.inner.push_back(Inner::Worker(worker::Event::Forget { digest }));
        self.inner.push_back(Inner::Gateway(gateway::Event::Forget { digest }));
    }

    /// Callers of a held name whose patience is at its end.
    fn refuse_impatient(&mut self) {
        let now = self.now;
        for (request, _) in self.versions.held.extract_if(.., |(_, deadline)| *deadline <= now) {
            self.notices.push(Notice::Refused(request, Refusal::DeadlinePassed));
        }
    }

    /// Old versions that have answered everybody leave; those that left are forgotten a while later.
    fn retire(&mut self) {
        for (digest, forgotten_at) in core::mem::take(&mut self.versions.retiring) {
            match forgotten_at {
                Some(at) if at <= self.now => self.forget(digest),
                None if self.gateway.requests_of(digest) == 0 => {
                    self.next_worker(worker::Event::UnloadWanted { digest });
                    self.versions.retiring.push((digest, Some(self.now + LINGER)));
                }
                waits => self.versions.retiring.push((digest, waits)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_a_name_does_not_mean_is_noticed() {
        let admitted = BTreeMap::from([(RequestId(1), 0), (RequestId(2), 1)]);
        let versions = || Versions { admitted: admitted.clone(), switched: [(7, 1)].into(), ..Versions::default() };
        // The name changed its meaning between the two.
        for (request, digest, is_right) in [
            (1, digest_of(7), true),
            (1, successor_of(7), false),
            (2, successor_of(7), true),
            (2, digest_of(7), false),
            (2, digest_of(8), true),
            (2, successor_of(8), false),
        ] {
            let mut versions = versions();
            versions.judge(RequestId(request), digest);
            assert_eq!(versions.check().is_ok(), is_right, "{request} {digest:?}");
        }
    }
}
