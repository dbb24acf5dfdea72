//! Which job runs when: by class and age, so many at a time, each at most so often, none after its time.
#![expect(missing_docs, reason = "the fields of events and actions say by name what they are")]

use super::status::{JobStatus, Step};
use crate::{
    gateway::queue::{Queue, Waiting, aged_class, class_index},
    ids::{JobId, Priority},
    machine::Machine,
    time::Instant,
    violation::Violation,
};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    sync::Arc,
    vec::Vec,
};
use core::time::Duration;

/// The limits jobs live within.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Jobs handed over to the gateway at once.
    pub running_max: u32,
    /// Those of them for one model.
    pub running_max_per_model: u32,
    /// How often a job is begun at most.
    pub attempts_max: u32,
    /// A waiting job counts as one class more important after each such time.
    pub aging: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { running_max: 32, running_max_per_model: 4, attempts_max: 5, aging: Duration::from_secs(60) }
    }
}

/// How one try ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With an answer.
    Answered,
    /// With an error that trying again cannot cure.
    Failed,
    /// Refused for now; `counts` says whether this was a try.
    Returned { after: Duration, counts: bool },
}

/// What can happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A job is in the catalog, new or from before a restart.
    Accepted { job: JobId, model: Arc<str>, class: Priority, attempts: u32, time_left: Duration },
    /// News of the try with this number.
    Progressed { job: JobId, turn: u32, step: Step },
    /// The try with this number has ended.
    Ended { job: JobId, turn: u32, end: End },
    /// Its caller takes it back.
    Cancelled { job: JobId },
    /// The time asked for by `next_timer` has come.
    Timer,
    /// Begin nothing new.
    Drain,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Write down that it begins, then run it.
    Run { job: JobId, turn: u32, attempts: u32 },
    /// End the try that runs: nobody waits for it any more.
    Stop { job: JobId },
    /// Write down that it waits again.
    Return { job: JobId, attempts: u32 },
    /// Write down how it ended. Nothing more is heard of it.
    Settle { job: JobId, status: JobStatus },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In its model's line.
    Waiting,
    /// Not before this moment.
    Resting(Instant),
    /// Handed over.
    Out,
}

#[derive(Debug)]
struct Job {
    model: Arc<str>,
    class: Priority,
    accepted: Instant,
    expires: Instant,
    attempts: u32,
    /// Tries so far, counted or not: tells late news from news.
    turn: u32,
    status: JobStatus,
    place: Place,
}

#[derive(Debug, Default)]
struct Model {
    line: Queue<JobId>,
    out: u32,
}

/// Jobs that have not ended.
#[derive(Debug)]
pub struct JobQueue {
    settings: Settings,
    jobs: BTreeMap<JobId, Job>,
    models: BTreeMap<Arc<str>, Model>,
    resting: BTreeSet<(Instant, JobId)>,
    expiries: BTreeSet<(Instant, JobId)>,
    out: u32,
    draining: bool,
}

impl JobQueue {
    /// A queue without jobs.
    pub fn new(settings: Settings) -> Self {
        let (jobs, models) = (BTreeMap::new(), BTreeMap::new());
        let (resting, expiries) = (BTreeSet::new(), BTreeSet::new());
        Self { settings, jobs, models, resting, expiries, out: 0, draining: false }
    }

    /// Where a job is; none once it has ended.
    pub fn status(&self, job: JobId) -> Option<JobStatus> {
        self.jobs.get(&job).map(|job| job.status)
    }

    /// Its place among the jobs that wait for the same model (1 is next); none if it does not wait in line.
    pub fn position(&self, now: Instant, job: JobId) -> Option<u32> {
        let found = self.jobs.get(&job).filter(|found| found.place == Place::Waiting)?;
        let line = &self.models.get(&found.model)?.line;
        let place = line.in_order(now, self.settings.aging).position(|waiting| waiting == job)?;
        u32::try_from(place + 1).ok()
    }

    /// How many jobs are in a state.
    pub fn count(&self, status: JobStatus) -> usize {
        self.jobs.values().filter(|job| job.status == status).count()
    }

    /// Jobs that have not ended.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether every job has ended.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Jobs that are handed over now.
    pub fn running(&self) -> u32 {
        self.out
    }

    fn accept(&mut self, job: JobId, new: Job, actions: &mut Vec<Action>) {
        if self.jobs.contains_key(&job) {
            return;
        }
        self.expiries.insert((new.expires, job));
        let exhausted = new.attempts >= self.settings.attempts_max;
        self.jobs.insert(job, new);
        if exhausted {
            return self.settle(job, Step::Failed, actions);
        }
        self.enter_line(job);
    }

    fn enter_line(&mut self, id: JobId) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.place = Place::Waiting;
        let waiting = Waiting { id, arrived: job.accepted };
        self.models.entry(job.model.clone()).or_default().line.insert(job.class, id.0, waiting);
    }

    /// Takes a job out of wherever it is.
    fn take_out(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        match job.place {
            Place::Resting(until) => {
                self.resting.remove(&(until, id));
            }
            Place::Waiting => {
                if let Some(model) = self.models.get_mut(&job.model) {
                    model.line.remove(job.class, id.0);
                }
            }
            Place::Out => {
                self.out -= 1;
                if let Some(model) = self.models.get_mut(&job.model) {
                    model.out -= 1;
                }
            }
        }
        if self.models.get(&job.model).is_some_and(|model| model.out == 0 && model.line.len() == 0) {
            self.models.remove(&job.model);
        }
    }

    fn settle(&mut self, id: JobId, step: Step, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get(&id) else { return };
        let Some(status) = job.status.after(step) else { return };
        let abandoned = job.place == Place::Out && matches!(step, Step::Cancelled | Step::TimeOver);
        self.expiries.remove(&(job.expires, id));
        self.take_out(id);
        self.jobs.remove(&id);
        if abandoned {
            actions.push(Action::Stop { job: id });
        }
        actions.push(Action::Settle { job: id, status });
    }

    fn ended(&mut self, now: Instant, id: JobId, end: End, actions: &mut Vec<Action>) {
        let (after, counts) = match end {
            End::Answered => return self.settle(id, Step::Answered, actions),
            End::Failed => return self.settle(id, Step::Failed, actions),
            End::Returned { after, counts } => (after, counts),
        };
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if counts && job.attempts >= self.settings.attempts_max {
            return self.settle(id, Step::Failed, actions);
        }
        job.attempts -= u32::from(!counts);
        let attempts = job.attempts;
        let Some(status) = job.status.after(Step::Returned) else { return };
        job.status = status;
        self.take_out(id);
        let until = now + after;
        if let Some(job) = self.jobs.get_mut(&id) {
            job.place = Place::Resting(until);
        }
        self.resting.insert((until, id));
        actions.push(Action::Return { job: id, attempts });
    }

    fn expire(&mut self, now: Instant, actions: &mut Vec<Action>) {
        while let Some((expires, id)) = self.expiries.first().copied().filter(|(expires, _)| *expires <= now) {
            self.settle(id, Step::TimeOver, actions);
            self.expiries.remove(&(expires, id));
        }
    }

    fn wake(&mut self, now: Instant) {
        while let Some((until, id)) = self.resting.first().copied().filter(|(until, _)| *until <= now) {
            self.resting.remove(&(until, id));
            self.enter_line(id);
        }
    }

    /// Hands jobs over while there is room.
    fn begin(&mut self, now: Instant, actions: &mut Vec<Action>) {
        while !self.draining && self.out < self.settings.running_max {
            let with_room = self.models.values().filter(|model| model.out < self.settings.running_max_per_model);
            let heads = with_room.filter_map(|model| {
                let id = model.line.next(now, self.settings.aging, |_| true)?;
                let job = self.jobs.get(&id)?;
                Some((rank(now, job, self.settings.aging), id))
            });
            let Some((_, id)) = heads.min() else { return };
            let Some(job) = self.jobs.get_mut(&id) else { return };
            let Some(model) = self.models.get_mut(&job.model) else { return };
            model.line.remove(job.class, id.0);
            model.out += 1;
            self.out += 1;
            (job.place, job.attempts, job.turn) = (Place::Out, job.attempts + 1, job.turn + 1);
            actions.push(Action::Run { job: id, turn: job.turn, attempts: job.attempts });
        }
    }

    /// Whether everything holds that must.
    pub fn check(&self) -> Result<(), Violation> {
        let violated = |invariant, detail| Err(Violation { invariant, detail });
        let out = self.jobs.values().filter(|job| job.place == Place::Out).count();
        if out != self.out as usize || self.out > self.settings.running_max {
            return violated("running_is_counted_and_bounded", format!("{out} run, {} counted", self.out));
        }
        for (name, model) in &self.models {
            let of_model = |place| self.jobs.values().filter(|job| job.model == *name && job.place == place).count();
            if of_model(Place::Out) != model.out as usize || model.out > self.settings.running_max_per_model {
                return violated("a_model_is_not_crowded", format!("{name}: {} counted", model.out));
            }
            if of_model(Place::Waiting) != model.line.len() {
                return violated("who_waits_stands_in_line", format!("{name}: {} in line", model.line.len()));
            }
        }
        if self.expiries.len() != self.jobs.len() {
            return violated("every_job_has_an_end", format!("{} of {}", self.expiries.len(), self.jobs.len()));
        }
        let tired = self.jobs.iter().find(|(_, job)| job.attempts > self.settings.attempts_max);
        if let Some((id, job)) = tired {
            return violated("tries_are_bounded", format!("{id:?}: {}", job.attempts));
        }
        if let Some((id, _)) = self.jobs.iter().find(|(_, job)| job.status.is_final()) {
            return violated("what_has_ended_is_gone", format!("{id:?}"));
        }
        Ok(())
    }
}

/// The order between the first of several lines; among equals the older job goes first.
fn rank(now: Instant, job: &Job, aging: Duration) -> usize {
    aged_class(class_index(job.class), now.since(job.accepted), aging)
}

impl Machine for JobQueue {
    type Event = Event;
    type Action = Action;

    fn handle(&mut self, now: Instant, event: Event, actions: &mut Vec<Action>) {
        let current = |jobs: &BTreeMap<JobId, Job>, job: &JobId, turn: u32| {
            jobs.get(job).is_some_and(|job| job.place == Place::Out && job.turn == turn)
        };
        // News of an answer goes before the end of its time.
        match event {
            Event::Accepted { job, model, class, attempts, time_left } => {
                let (expires, status, place) = (now + time_left, JobStatus::Queued, Place::Waiting);
                let new = Job { model, class, accepted: now, expires, attempts, turn: 0, status, place };
                self.accept(job, new, actions);
            }
            Event::Progressed { job, turn, step } => {
                if current(&self.jobs, &job, turn)
                    && let Some(job) = self.jobs.get_mut(&job)
                    && let Some(status) = job.status.after(step).filter(|status| !status.is_final())
                {
                    job.status = status;
                }
            }
            Event::Ended { job, turn, end } => {
                if current(&self.jobs, &job, turn) {
                    self.ended(now, job, end, actions);
                }
            }
            Event::Cancelled { job } => self.settle(job, Step::Cancelled, actions),
            Event::Timer => {}
            Event::Drain => self.draining = true,
        }
        self.expire(now, actions);
        self.wake(now);
        self.begin(now, actions);
    }

    fn next_timer(&self) -> Option<Instant> {
        let first = |set: &BTreeSet<(Instant, JobId)>| set.first().map(|(instant, _)| *instant);
        first(&self.expiries).into_iter().chain(first(&self.resting)).min()
    }
}
