//! Requests answered later: accepted with 202 and kept in the catalog, run as room allows, asked for by name.
//!
//! Who runs when is decided by [`warmset_core::jobs::JobQueue`]; what is kept lies behind [`JobStore`]; the answer is
//! that of the very route that would have answered at once. 202 is sent only to those who asked for it.

mod document;
mod errand;
mod http;
mod port;
mod prefer;
mod run_loop;

pub use document::job_document;
pub(crate) use errand::{Answer, Errand, Verdict, perform};
pub(crate) use http::{
    Deferral, Name, accept, admin_cancel, admin_list, admin_show, cancel, defer, find, job_response, show, take_back,
};
pub use port::{JobFuture, JobStore, JobStoreError};

use crate::{clock::Clock, metrics::Metrics};
use axum::Router;
pub(crate) use run_loop::Live;
use run_loop::{Message, RunLoop};
use std::{sync::Arc, time::Duration};
use tokio::sync::{mpsc, oneshot};
use warmset_core::{
    JobId,
    jobs::{Acceptance, JobLimits, JobRecord, JobStatus, NewJob, Settings},
};

/// What the names of jobs begin with.
pub(crate) const PREFIX: &str = "job_";

/// How jobs are kept and run.
#[derive(Debug, Clone)]
pub struct JobsConfig {
    /// Who runs when.
    pub settings: Settings,
    /// How many are kept.
    pub limits: JobLimits,
    /// Time to be answered in, and then time in which the answer is kept.
    pub time_to_live: Duration,
    /// The largest answer that is kept.
    pub answer_bytes_max: usize,
    /// The clock of this run.
    pub clock: Clock,
}

impl Default for JobsConfig {
    fn default() -> Self {
        Self {
            settings: Settings::default(),
            limits: JobLimits::default(),
            time_to_live: Duration::from_secs(24 * 3600),
            answer_bytes_max: 64 << 20,
            clock: Clock::start(),
        }
    }
}

struct Inner {
    store: Arc<dyn JobStore>,
    limits: JobLimits,
    time_to_live: Duration,
    messages: mpsc::UnboundedSender<Message>,
}

/// The handle. Cheap to clone; the run loop ends when the last one is gone.
#[derive(Clone)]
pub struct Jobs {
    inner: Arc<Inner>,
}

impl Jobs {
    /// Starts the run loop on the current tokio runtime. `router` answers what jobs ask; it must not accept jobs
    /// itself. Nothing runs before [`Jobs::resume`].
    pub fn start(store: Arc<dyn JobStore>, router: Router, config: JobsConfig, metrics: Arc<Metrics>) -> Self {
        let (messages, received) = mpsc::unbounded_channel();
        let (limits, time_to_live) = (config.limits, config.time_to_live);
        let run_loop = RunLoop::new(store.clone(), router, (config, metrics), messages.downgrade());
        tokio::spawn(run_loop.run(received));
        Self { inner: Arc::new(Inner { store, limits, time_to_live, messages }) }
    }

    /// Takes up the jobs that had not ended when the last server did. Their models must be known by now.
    pub async fn resume(&self) -> Result<usize, JobStoreError> {
        let unfinished = self.inner.store.unfinished().await?;
        let count = unfinished.len();
        for job in unfinished {
            self.send(Message::Accepted(job));
        }
        Ok(count)
    }

    /// Begins no more jobs, and returns when none runs and every end is written down. The others stay for the next
    /// start.
    pub async fn drain(&self) {
        let (done, drained) = oneshot::channel();
        self.send(Message::Drain { done });
        // A run loop that is gone runs nothing.
        let _ = drained.await;
    }

    /// Keeps a job: what is accepted is on disk. It runs even if whoever asked goes away meanwhile.
    pub(crate) async fn accept(&self, new: NewJob) -> Result<Acceptance, JobStoreError> {
        let jobs = self.clone();
        let accepting = tokio::spawn(async move {
            let accepted = jobs.inner.store.accept(new, jobs.inner.limits).await?;
            if let Acceptance::New(record) = &accepted {
                jobs.send(Message::Accepted(unfinished(record, jobs.inner.time_to_live)));
            }
            Ok(accepted)
        });
        accepting.await.unwrap_or_else(|error| Err(JobStoreError::failed(error.to_string())))
    }

    pub(crate) fn time_to_live(&self) -> Duration {
        self.inner.time_to_live
    }

    /// A job as it is now.
    pub(crate) async fn look(&self, name: &str) -> Result<Option<(JobRecord, Option<Live>)>, JobStoreError> {
        let Some(record) = self.inner.store.job(name.to_owned()).await? else { return Ok(None) };
        if record.status.is_final() {
            return Ok(Some((record, None)));
        }
        if let Some(live) = self.live(record.id).await {
            return Ok(Some((record, Some(live))));
        }
        // It ended between the two looks.
        Ok(self.inner.store.job(name.to_owned()).await?.map(|record| (record, None)))
    }

    /// What a job asks, until it has ended.
    pub(crate) async fn body(&self, job: JobId) -> Result<Option<Vec<u8>>, JobStoreError> {
        self.inner.store.body(job).await
    }

    /// The newest jobs, without answers.
    pub(crate) async fn list(&self, limit: u64) -> Result<Vec<(JobRecord, Option<Live>)>, JobStoreError> {
        let mut listed = Vec::new();
        for record in self.inner.store.jobs(limit).await? {
            let live = if record.status.is_final() { None } else { self.live(record.id).await };
            listed.push((record, live));
        }
        Ok(listed)
    }

    /// Returns when a job has ended and that is written down.
    pub(crate) async fn ended(&self, job: JobId) {
        let (done, ended) = oneshot::channel();
        self.send(Message::Watch { job, done });
        let _ = ended.await;
    }

    /// Takes a job back, if it has not ended; returns when it has.
    pub(crate) async fn cancel(&self, job: JobId) {
        let (done, ended) = oneshot::channel();
        self.send(Message::Cancel { job, done });
        let _ = ended.await;
    }

    /// How many jobs are in each state in which they have not ended; nothing if the run loop does not say in time.
    pub(crate) async fn counts(&self, timeout: Duration) -> Vec<(JobStatus, usize)> {
        let (answer, counts) = oneshot::channel();
        self.send(Message::Count { answer });
        tokio::time::timeout(timeout, counts).await.ok().and_then(Result::ok).unwrap_or_default()
    }

    async fn live(&self, job: JobId) -> Option<Live> {
        let (answer, live) = oneshot::channel();
        self.send(Message::Look { job, answer });
        live.await.ok().flatten()
    }

    fn send(&self, message: Message) {
        // Without a run loop whatever the message asked for is dropped, and its sender sees that.
        let _ = self.inner.messages.send(message);
    }
}

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Jobs")
    }
}

fn unfinished(record: &JobRecord, time_left: Duration) -> warmset_core::jobs::Unfinished {
    warmset_core::jobs::Unfinished {
        id: record.id,
        name: record.name.clone(),
        model: record.model.clone(),
        class: record.class,
        attempts: record.attempts,
        time_left,
    }
}
