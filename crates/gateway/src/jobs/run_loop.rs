//! The one task that owns the queue of jobs: messages become events, actions become tasks and writes.

use super::{
    JobStore, JobsConfig,
    errand::{Answer, Errand, Progress, Verdict, perform},
};
use crate::{errors::ApiError, metrics::Metrics};
use axum::Router;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::AbortHandle,
};
use warmset_core::{
    Instant, JobId, Machine,
    jobs::{Action, End, Event, JobAnswer, JobQueue, JobStatus, Step, Unfinished},
};

/// How long until something is written down again that could not be.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// How often what ended long ago is forgotten.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);

/// What is known of a job that has not ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Live {
    pub(crate) status: JobStatus,
    /// Its place among those that wait for the same model (1 is next).
    pub(crate) position: Option<u32>,
    /// The share of its model that is loaded.
    pub(crate) loaded: Option<f32>,
}

/// What reaches the run loop.
pub(crate) enum Message {
    Accepted(Unfinished),
    Progressed { job: JobId, turn: u32, step: Step },
    Ended { job: JobId, turn: u32, end: End, answer: Option<Box<Answer>> },
    Settled { job: JobId },
    Cancel { job: JobId, done: oneshot::Sender<()> },
    Watch { job: JobId, done: oneshot::Sender<()> },
    Look { job: JobId, answer: oneshot::Sender<Option<Live>> },
    Count { answer: oneshot::Sender<Vec<(JobStatus, usize)>> },
    Drain { done: oneshot::Sender<()> },
}

/// What the loop keeps of a job that has not ended.
struct Kept {
    expires: Instant,
    /// The try that runs, and how far it is.
    running: Option<(AbortHandle, watch::Receiver<Progress>)>,
    /// What the last try came to.
    answer: Option<Box<Answer>>,
    watchers: Vec<oneshot::Sender<()>>,
}

pub(crate) struct RunLoop {
    queue: JobQueue,
    kept: BTreeMap<JobId, Kept>,
    store: Arc<dyn JobStore>,
    router: Router,
    config: JobsConfig,
    metrics: Arc<Metrics>,
    /// Weak, so that the loop ends with the last handle.
    messages: mpsc::WeakUnboundedSender<Message>,
    /// Ends that are being written down.
    settling: usize,
    drains: Vec<oneshot::Sender<()>>,
}

impl RunLoop {
    pub(crate) fn new(
        store: Arc<dyn JobStore>,
        router: Router,
        (config, metrics): (JobsConfig, Arc<Metrics>),
        messages: mpsc::WeakUnboundedSender<Message>,
    ) -> Self {
        let queue = JobQueue::new(config.settings.clone());
        let (kept, drains) = (BTreeMap::new(), Vec::new());
        Self { queue, kept, store, router, config, metrics, messages, settling: 0, drains }
    }

    pub(crate) async fn run(mut self, mut received: mpsc::UnboundedReceiver<Message>) {
        let mut forget = tokio::time::interval(FORGET_INTERVAL);
        forget.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let wait = self.config.clock.reach(self.queue.next_timer());
            tokio::select! {
                biased;
                message = received.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                () = wait => self.step(Event::Timer),
                _ = forget.tick() => self.forget(),
            }
            if !self.drains.is_empty() && self.queue.running() == 0 && self.settling == 0 {
                for done in self.drains.drain(..) {
                    // Whoever drained may have stopped waiting.
                    let _ = done.send(());
                }
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Accepted(job) => self.accepted(job),
            Message::Progressed { job, turn, step } => self.step(Event::Progressed { job, turn, step }),
            Message::Ended { job, turn, end, answer } => {
                if let Some(kept) = self.kept.get_mut(&job) {
                    kept.answer = answer;
                }
                self.step(Event::Ended { job, turn, end });
            }
            Message::Settled { job } => {
                self.settling -= 1;
                for watcher in self.kept.remove(&job).into_iter().flat_map(|kept| kept.watchers) {
                    // Whoever watched may have gone.
                    let _ = watcher.send(());
                }
            }
            Message::Cancel { job, done } => {
                self.watch(job, done);
                self.step(Event::Cancelled { job });
            }
            Message::Watch { job, done } => self.watch(job, done),
            Message::Look { job, answer } => {
                let _ = answer.send(self.look(job));
            }
            Message::Count { answer } => {
                let _ = answer.send(JobStatus::unfinished().map(|status| (status, self.queue.count(status))).collect());
            }
            Message::Drain { done } => {
                self.drains.push(done);
                self.step(Event::Drain);
            }
        }
    }

    fn accepted(&mut self, job: Unfinished) {
        let Unfinished { id, model, class, attempts, time_left, .. } = job;
        let expires = self.config.clock.now() + time_left;
        self.kept.insert(id, Kept { expires, running: None, answer: None, watchers: Vec::new() });
        self.step(Event::Accepted { job: id, model: model.into(), class, attempts, time_left });
    }

    /// A job that is not kept has ended: its watcher, dropped here, hears that at once.
    fn watch(&mut self, job: JobId, done: oneshot::Sender<()>) {
        if let Some(kept) = self.kept.get_mut(&job) {
            kept.watchers.retain(|watcher| !watcher.is_closed());
            kept.watchers.push(done);
        }
    }

    fn look(&self, job: JobId) -> Option<Live> {
        let status = self.queue.status(job)?;
        let progress = self.kept.get(&job).and_then(|kept| Some(*kept.running.as_ref()?.1.borrow()));
        let now = self.config.clock.now();
        let (position, loaded) = match progress {
            Some(Progress::Waiting(position)) => (Some(position), None),
            Some(Progress::Loading(fraction)) => (None, Some(fraction)),
            Some(Progress::Unknown | Progress::Running) => (None, None),
            None => (self.queue.position(now, job), None),
        };
        Some(Live { status, position, loaded })
    }

    fn step(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.queue.handle(self.config.clock.now(), event, &mut actions);
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Run { job, turn, attempts } => self.begin(job, turn, attempts),
            Action::Stop { job } => {
                if let Some((task, _)) = self.kept.get_mut(&job).and_then(|kept| kept.running.take()) {
                    // With the task its request goes, and the slot that it had.
                    task.abort();
                }
            }
            Action::Return { job, attempts } => {
                if let Some(kept) = self.kept.get_mut(&job) {
                    kept.running = None;
                }
                let store = self.store.clone();
                tokio::spawn(async move {
                    if let Err(error) = store.put_back(job, attempts).await {
                        tracing::warn!(job = job.0, "a job counts one try too many after a restart: {error}");
                    }
                });
            }
            Action::Settle { job, status } => self.settle(job, status),
        }
    }

    fn begin(&mut self, job: JobId, turn: u32, attempts: u32) {
        let (Some(kept), Some(messages)) = (self.kept.get_mut(&job), self.messages.upgrade()) else { return };
        // A little longer than the job has, so that it ends as expired.
        let patience = self.config.clock.until(kept.expires) + RETRY_PAUSE;
        let errand = Errand::new(None, patience);
        let progress = errand.progress.subscribe();
        let run = Run {
            job,
            turn,
            attempts,
            store: self.store.clone(),
            router: self.router.clone(),
            bytes_max: self.config.answer_bytes_max,
            messages,
        };
        kept.running = Some((tokio::spawn(run.run(errand)).abort_handle(), progress));
    }

    fn settle(&mut self, job: JobId, status: JobStatus) {
        let Some(messages) = self.messages.upgrade() else { return };
        let last = self.kept.get_mut(&job).and_then(|kept| {
            kept.running = None;
            kept.answer.take()
        });
        let answer = match status {
            JobStatus::Cancelled => None,
            JobStatus::Expired => Some(Answer::from(ApiError::job_expired()).into_kept()),
            _ => Some(last.map_or_else(|| Answer::from(ApiError::job_given_up()).into_kept(), |last| last.into_kept())),
        };
        self.settling += 1;
        self.metrics.record_job(status);
        let store = self.store.clone();
        tokio::spawn(async move {
            write_end(&*store, job, status, answer).await;
            let _ = messages.send(Message::Settled { job });
        });
    }

    fn forget(&self) {
        let store = self.store.clone();
        tokio::spawn(async move {
            if let Err(error) = store.forget_ended().await {
                tracing::warn!("jobs that ended long ago are still kept: {error}");
            }
        });
    }
}

/// Writes an end down, however long that takes: a full disk must not lose an answer.
async fn write_end(store: &dyn JobStore, job: JobId, status: JobStatus, answer: Option<JobAnswer>) {
    while let Err(error) = store.finish(job, status, answer.clone()).await {
        tracing::warn!(job = job.0, "the end of a job cannot be written down yet: {error}");
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// One try of one job.
struct Run {
    job: JobId,
    turn: u32,
    attempts: u32,
    store: Arc<dyn JobStore>,
    router: Router,
    bytes_max: usize,
    messages: mpsc::UnboundedSender<Message>,
}

impl Run {
    async fn run(self, errand: Errand) {
        let (job, turn) = (self.job, self.turn);
        let (end, answer) = match self.store.begin(job, self.attempts).await {
            Ok(Some((route, body))) => {
                let answer = self.perform(&route, body, errand).await;
                let end = match answer.verdict() {
                    Verdict::Answered => End::Answered,
                    Verdict::Failed => End::Failed,
                    Verdict::Later { after, counts } => End::Returned { after, counts },
                };
                (end, Some(Box::new(answer)))
            }
            // It ended in another way; whatever is said of it now is not written down.
            Ok(None) => (End::Failed, None),
            Err(error) => {
                tracing::warn!(job = job.0, "a job cannot begin: {error}");
                (End::Returned { after: RETRY_PAUSE, counts: false }, None)
            }
        };
        let _ = self.messages.send(Message::Ended { job, turn, end, answer });
    }

    async fn perform(&self, route: &str, body: Vec<u8>, errand: Errand) -> Answer {
        let mut progress = errand.progress.subscribe();
        let answer = perform(self.router.clone(), route, body.into(), errand, self.bytes_max);
        tokio::pin!(answer);
        loop {
            tokio::select! {
                biased;
                Ok(()) = progress.changed() => {
                    let step = match *progress.borrow_and_update() {
                        Progress::Loading(_) => Step::LoadBegan,
                        Progress::Running => Step::EngineBegan,
                        Progress::Unknown | Progress::Waiting(_) => continue,
                    };
                    let _ = self.messages.send(Message::Progressed { job: self.job, turn: self.turn, step });
                }
                answer = &mut answer => return answer,
            }
        }
    }
}
