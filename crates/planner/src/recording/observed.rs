//! What a recording says of the world around the worker: who asked for what and when, and what engines cost.

use super::{
    Entry, Line,
    costs::Costs,
    fit::{Exposure, Load, Ran, Samples, Tokens},
    replay::{ReplayError, check_pause},
};
use crate::{
    node::{Ask, EngineCost, Outcome, STOP_TIME},
    sharing::{Job, Together},
};
use serde::Serialize;
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Digest, Footprint, Instant, RequestId,
    gateway::{self, Gateway},
    recording::StepOf,
    worker::{Action, Event, Generation, ModelSpec, Recollection, Settings, StartKind, Worker},
};

/// How long a request runs if none of the recording ran to its end.
const RUN_ASSUMED: Duration = Duration::from_secs(1);

/// Counts and waits of one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// Requests that came to the worker.
    pub requests: u64,
    /// Requests that found their model ready.
    pub warm: u64,
    /// Requests that waited for a load.
    pub cold: u64,
    /// Requests that were refused.
    pub rejected: u64,
    /// Loads begun.
    pub loads: u64,
    /// Models told to leave for others.
    pub evictions: u64,
    /// Loads ahead of requests that saved a cold start.
    pub preloads_used: u64,
    /// Loads ahead of requests that nobody used.
    pub preloads_wasted: u64,
    /// How long requests waited at the worker until an engine had them: half of them not longer.
    pub wait_p50_seconds: f64,
    /// 99 of 100 not longer.
    pub wait_p99_seconds: f64,
    /// The same of those that waited for a load.
    pub cold_wait_p50_seconds: f64,
    /// 99 of 100 of these not longer.
    pub cold_wait_p99_seconds: f64,
    /// How long requests took at the worker from their arrival to the end of their answer: half of them not longer.
    pub answer_p50_seconds: f64,
    /// 99 of 100 not longer.
    pub answer_p99_seconds: f64,
}

impl Figures {
    pub(super) fn of(outcome: &Outcome, requests: u64) -> Self {
        let waits = |cold_only: bool| {
            let wanted = outcome.waits.iter().filter(|(start, _)| !cold_only || *start == StartKind::Cold);
            let mut waits: Vec<Duration> = wanted.map(|(_, waited)| *waited).collect();
            waits.sort_unstable();
            waits
        };
        let (all, cold) = (waits(false), waits(true));
        let mut answers = outcome.answers.clone();
        answers.sort_unstable();
        Self {
            requests,
            warm: outcome.starts.warm,
            cold: outcome.starts.cold,
            rejected: outcome.rejected,
            loads: outcome.loads,
            evictions: outcome.evictions,
            preloads_used: outcome.preloads_used,
            preloads_wasted: outcome.preloads_wasted,
            wait_p50_seconds: nearest_rank(&all, 50),
            wait_p99_seconds: nearest_rank(&all, 99),
            cold_wait_p50_seconds: nearest_rank(&cold, 50),
            cold_wait_p99_seconds: nearest_rank(&cold, 99),
            answer_p50_seconds: nearest_rank(&answers, 50),
            answer_p99_seconds: nearest_rank(&answers, 99),
        }
    }
}

/// The smallest of the sorted values that so many percent of them do not exceed; 0 of none.
fn nearest_rank(sorted: &[Duration], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).map_or(0.0, Duration::as_secs_f64)
}

/// Durations of one kind, of one model.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    sum: Duration,
    count: u32,
}

impl Mean {
    fn add(&mut self, duration: Duration) {
        (self.sum, self.count) = (self.sum.saturating_add(duration), self.count.saturating_add(1));
    }

    fn of(duration: Duration) -> Self {
        Self { sum: duration, count: 1 }
    }

    fn and(self, other: Self) -> Self {
        Self { sum: self.sum.saturating_add(other.sum), count: self.count.saturating_add(other.count) }
    }

    fn get(self) -> Option<Duration> {
        (self.count > 0).then(|| self.sum / self.count)
    }
}

/// What was seen of one model's engines.
#[derive(Debug, Clone, Default)]
struct Seen {
    peak: Option<Footprint>,
    steady: Option<Footprint>,
    /// One after the other.
    loads: Vec<Duration>,
    stop: Mean,
    run: Mean,
}

/// What happened by itself: neither a machine's doing nor an engine's.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outside {
    /// A request came.
    Ask(Ask),
    /// Anything else that a worker is told.
    Event(Box<Event>),
}

/// A request that runs.
#[derive(Debug, Clone, Copy)]
struct Running {
    /// Which one it is of `outside`.
    place: usize,
    since: Instant,
    /// How long it ran before it gave way.
    before: Duration,
    digest: Digest,
}

/// The worker of a recording.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    pub(super) settings: Option<Settings>,
    /// Every model at the beginning, as it was known then.
    pub(super) specs: Vec<ModelSpec>,
    /// What there was to remember at the beginning.
    pub(super) recollections: Vec<Recollection>,
    /// What came from outside, by the time since the beginning.
    pub(super) outside: Vec<(Duration, Outside)>,
    began: Instant,
    /// Of the last step.
    now: Instant,
    lines: u64,
    asks: u64,
    outcome: Outcome,
    seen: BTreeMap<Digest, Seen>,
    rewarm: BTreeMap<Digest, Duration>,
    /// Requests that wait: which one it is of `outside`, and since when.
    waiting: BTreeMap<RequestId, (usize, Instant)>,
    running: BTreeMap<RequestId, Running>,
    /// Which one of `outside` a request is, for what the gateway says of it.
    places: BTreeMap<RequestId, usize>,
    /// How many tokens those of `outside` had.
    tokens: BTreeMap<usize, Tokens>,
    /// What ran to its end: which one it is of `outside`, of which model, and in which company it ran for how long.
    ran: Vec<(usize, Digest, Exposure)>,
    /// The same of loads.
    loaded: Vec<(Digest, Exposure)>,
    computing: Together<Exposure>,
    loading: BTreeMap<(Digest, Generation), Instant>,
    stopping: BTreeMap<(Digest, Generation), Instant>,
}

impl Observed {
    /// Looks at the next line. After an error there is no next one.
    pub fn take(&mut self, line: Line) -> Result<(), ReplayError> {
        self.lines += 1;
        match line {
            Line::Gateway(Entry::Step(step)) => self.counted(&step),
            Line::Worker(entry) => match *entry {
                Entry::Begin { now, machine } => self.begin(now, &machine),
                Entry::Step(step) => {
                    check_pause(self.lines, self.now, step.now)?;
                    self.now = step.now;
                    self.step(step);
                }
            },
            _ => {}
        }
        Ok(())
    }

    /// What came of it, live.
    pub fn figures(&self) -> Figures {
        Figures::of(&self.outcome, self.asks)
    }

    /// How many tokens one of `outside` had, if the gateway said so.
    pub(super) fn tokens_of(&self, place: usize) -> Option<Tokens> {
        self.tokens.get(&place).copied()
    }

    /// All that was measured, of every model.
    pub(super) fn samples(&self) -> Samples<'_> {
        let bytes_of =
            |digest| self.seen.get(digest).and_then(|seen| seen.steady.as_ref()).map_or(0, Footprint::total_bytes);
        let loads = self.loaded.iter().map(|(digest, took)| Load { digest: *digest, bytes: bytes_of(digest), took });
        let runs = self.ran.iter().filter_map(|(place, digest, took)| {
            let tokens = self.tokens_of(*place)?;
            Some(Ran { digest: *digest, tokens, took })
        });
        let stops = self.seen.values().fold(Mean::default(), |all, seen| all.and(seen.stop));
        Samples { loads: loads.collect(), runs: runs.collect(), stop: stops.get() }
    }

    /// What the engines of each model are like: as they were, or by these costs.
    pub(super) fn engines(&self, costs: Option<&Costs>) -> BTreeMap<Digest, EngineCost> {
        let any_run = self.seen.values().fold(Mean::default(), |all, seen| all.and(seen.run));
        let run = any_run.get().unwrap_or(RUN_ASSUMED);
        let configured = self.outside.iter().filter_map(|(_, outside)| match outside {
            Outside::Event(event) => match &**event {
                Event::Configure(spec) => Some(spec),
                _ => None,
            },
            Outside::Ask(_) => None,
        });
        let engine = |spec: &ModelSpec| {
            let mut seen = self.seen.get(&spec.digest).cloned().unwrap_or_default();
            if seen.loads.is_empty() {
                seen.loads.push(self.rewarm.get(&spec.digest).copied().unwrap_or_default());
            }
            let steady = seen.steady.unwrap_or_else(|| spec.steady.clone());
            if let Some(costs) = costs {
                (seen.loads, seen.stop) = (costs.loads(spec.digest, steady.total_bytes()), Mean::of(costs.stop()));
            }
            EngineCost {
                peak: seen.peak.unwrap_or_else(|| spec.peak.clone()),
                steady,
                loads: seen.loads,
                stop: seen.stop.get().unwrap_or(STOP_TIME),
                run: seen.run.get().unwrap_or(run),
            }
        };
        self.specs.iter().chain(configured).map(|spec| (spec.digest, engine(spec))).collect()
    }

    fn begin(&mut self, now: Instant, machine: &Worker) {
        (self.began, self.now) = (now, now);
        self.settings = Some(machine.settings().clone());
        self.specs = machine.specs().cloned().collect();
        self.recollections = machine.recollections(now);
        for spec in &self.specs {
            self.rewarm.insert(spec.digest, seconds(spec.rewarm_seconds));
        }
    }

    fn step(&mut self, step: StepOf<Worker>) {
        let StepOf::<Worker> { now, event, actions } = step;
        self.computing.pass(now, |_, company, nanoseconds, took| took.add(company, nanoseconds));
        self.hear(now, &event);
        if comes_from_outside(&event) {
            if let Event::Configure(spec) = &event {
                self.rewarm.entry(spec.digest).or_insert(seconds(spec.rewarm_seconds));
            }
            self.outside.push((now.since(self.began), Outside::Event(Box::new(event))));
        }
        for action in &actions {
            self.see(now, action);
        }
    }

    fn hear(&mut self, now: Instant, event: &Event) {
        match event {
            Event::Assigned { request, digest, class, .. } => {
                self.asks += 1;
                // One that is tried again comes as another one.
                let ask = Ask { request: RequestId(self.asks), digest: *digest, class: *class, run: None };
                self.waiting.insert(*request, (self.outside.len(), now));
                self.places.insert(*request, self.outside.len());
                self.outside.push((now.since(self.began), Outside::Ask(ask)));
            }
            Event::Cancelled { request, cause } => {
                let waiting = self.waiting.remove(request).map(|(place, _)| place);
                let place = waiting.or(self.running.get(request).map(|running| running.place));
                if let Some((_, Outside::Ask(ask))) = place.and_then(|place| self.outside.get(place)) {
                    let gone = Event::Cancelled { request: ask.request, cause: *cause };
                    self.outside.push((now.since(self.began), Outside::Event(Box::new(gone))));
                }
            }
            Event::Parked { request } => {
                if let Some(running) = self.running.get_mut(request) {
                    running.before += now.since(running.since);
                    self.computing.leave(Job::Request(*request));
                }
            }
            Event::Finished { request } => self.finished(now, *request),
            Event::Loaded { digest, generation, peak, steady, .. } => {
                let seen = self.seen.entry(*digest).or_default();
                (seen.peak, seen.steady) = (Some(peak.clone()), Some(steady.clone()));
                if let Some(began) = self.loading.remove(&(*digest, *generation)) {
                    seen.loads.push(now.since(began));
                    let took = self.computing.leave(Job::Load(*digest, *generation)).unwrap_or_default();
                    self.loaded.push((*digest, took));
                }
            }
            Event::LoadFailed { digest, generation, .. } => drop(self.computing.leave(Job::Load(*digest, *generation))),
            Event::Exited { digest, generation, .. } => {
                self.loading.remove(&(*digest, *generation));
                self.computing.leave(Job::Load(*digest, *generation));
                if let Some(began) = self.stopping.remove(&(*digest, *generation)) {
                    self.seen.entry(*digest).or_default().stop.add(now.since(began));
                }
            }
            _ => {}
        }
    }

    fn finished(&mut self, now: Instant, request: RequestId) {
        let Some(Running { place, since, before, digest }) = self.running.remove(&request) else { return };
        let ran = before + now.since(since);
        let took = self.computing.leave(Job::Request(request)).unwrap_or_default();
        if let Some((came, Outside::Ask(ask))) = self.outside.get_mut(place) {
            ask.run = Some(ran);
            self.seen.entry(ask.digest).or_default().run.add(ran);
            self.outcome.answers.push(now.since(self.began).saturating_sub(*came));
            if before.is_zero() {
                self.ran.push((place, digest, took));
            }
        }
    }

    /// What the gateway says of tokens.
    fn counted(&mut self, step: &StepOf<Gateway>) {
        if let gateway::Event::Finished { request, prompt_tokens, completion_tokens } = step.event
            && let Some(place) = self.places.get(&request)
        {
            self.tokens.insert(*place, Tokens { prompt: prompt_tokens, output: completion_tokens });
        }
    }

    fn see(&mut self, now: Instant, action: &Action) {
        match action {
            Action::Verify { digest, generation } => {
                self.loading.insert((*digest, *generation), now);
                self.computing.enter(Job::Load(*digest, *generation), *digest, Exposure::default());
            }
            Action::Stop { digest, generation } | Action::Kill { digest, generation } => {
                self.stopping.entry((*digest, *generation)).or_insert(now);
            }
            Action::Start { request, digest, start, .. } => {
                if let Some((place, came)) = self.waiting.remove(request) {
                    let waited = now.since(came);
                    self.outcome.started(*start, waited);
                    self.outcome.waits.push((*start, waited));
                    self.running
                        .insert(*request, Running { place, since: now, before: Duration::ZERO, digest: *digest });
                } else if let Some(running) = self.running.get_mut(request) {
                    running.since = now;
                }
                self.computing.enter(Job::Request(*request), *digest, Exposure::default());
            }
            Action::Reject { request, .. } => {
                self.waiting.remove(request);
                self.running.remove(request);
                self.computing.leave(Job::Request(*request));
                self.outcome.rejected += 1;
            }
            Action::Tell(fact) => self.outcome.told(fact),
            _ => {}
        }
    }
}

/// Whether an event is neither an engine's answer nor the clock's, nor a request or its end.
fn comes_from_outside(event: &Event) -> bool {
    matches!(
        event,
        Event::Configure(_)
            | Event::Forget { .. }
            | Event::LoadWanted { .. }
            | Event::Remembered { .. }
            | Event::Succeed { .. }
            | Event::PauseLifted { .. }
            | Event::UnloadWanted { .. }
            | Event::KvPressed { .. }
            | Event::WallTime { .. }
            | Event::Scheduled { .. }
            | Event::Drain
    )
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
