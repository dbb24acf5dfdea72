//! One batch from its file to its answers.

use super::{
    Batches,
    answers::{Answers, Outcome},
    lines::{self, Line, Lines},
    now,
};
use crate::jobs::{Errand, Verdict, perform};
use std::{
    io,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::Instant,
};
use warmset_core::{
    Priority,
    jobs::{BatchCounts, BatchFault, BatchRecord, BatchStatus, BatchStep, FileRecord},
};

/// How long until something is written again that could not be.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// How often a line is tried whose model cannot be loaded for now, or that was lost.
const TRIES_MAX: u32 = 5;
/// How often answers are put on disk.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);

const EXPIRED: Outcome =
    Outcome::Unanswered { code: "batch_expired", message: "the batch's time was over before this line was answered" };

/// A batch that has not ended.
#[derive(Debug)]
pub(crate) struct Going {
    counts: Mutex<BatchCounts>,
    taken_back: watch::Sender<bool>,
    /// The last state that was written down.
    status: watch::Sender<BatchStatus>,
    over: Semaphore,
}

impl Going {
    pub(crate) fn new(batch: &BatchRecord) -> Self {
        Self {
            counts: Mutex::new(batch.counts),
            taken_back: watch::Sender::new(false),
            status: watch::Sender::new(batch.status),
            over: Semaphore::new(0),
        }
    }

    pub(crate) fn counts(&self) -> BatchCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, counts: BatchCounts) {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = counts;
    }

    /// Begins no more lines; returns when that is written down, or the batch has ended anyway.
    pub(crate) async fn take_back(&self) {
        self.taken_back.send_replace(true);
        let mut status = self.status.subscribe();
        let heard = status.wait_for(|status| !matches!(status, BatchStatus::Validating | BatchStatus::InProgress));
        tokio::select! {
            _ = heard => {}
            () = self.ended() => {}
        }
    }

    /// Returns when it has ended, or rests for the next start.
    pub(crate) async fn ended(&self) {
        // Closing is the end.
        let _ = self.over.acquire().await;
    }

    pub(crate) fn end(&self) {
        self.over.close();
    }
}

/// Why no more lines are begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Halt {
    /// There are none.
    Answered,
    TimeOver,
    TakenBack,
    /// The server stops: the rest is for the next start.
    Draining,
}

/// Runs a batch until it has ended or the server stops.
pub(crate) async fn run(batches: &Batches, mut batch: BatchRecord, going: &Going) {
    loop {
        if *batches.inner.draining.borrow() {
            return;
        }
        match step(batches, &mut batch, going).await {
            Ok(true) if batch.status.is_final() => return,
            Ok(true) => {}
            // The server stops.
            Ok(false) => return,
            Err(error) => {
                tracing::warn!(batch = batch.name, "a batch cannot go on yet: {error}");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// One state's work; false if the server stops first.
async fn step(batches: &Batches, batch: &mut BatchRecord, going: &Going) -> io::Result<bool> {
    match batch.status {
        BatchStatus::Validating => validate(batches, batch, going).await?,
        BatchStatus::InProgress => match answer(batches, batch, going).await? {
            Halt::Draining => return Ok(false),
            Halt::Answered => enter(batches, batch, going, BatchStep::Answered).await?,
            // That was written down when it was heard.
            Halt::TakenBack => {}
            Halt::TimeOver => {
                publish(batches, batch).await?;
                enter(batches, batch, going, BatchStep::TimeOver).await?;
            }
        },
        BatchStatus::Finalizing | BatchStatus::Cancelling => {
            publish(batches, batch).await?;
            enter(batches, batch, going, BatchStep::Written).await?;
        }
        BatchStatus::Failed | BatchStatus::Completed | BatchStatus::Expired | BatchStatus::Cancelled => {}
    }
    Ok(true)
}

/// Writes down that a batch comes into another state.
async fn enter(batches: &Batches, batch: &mut BatchRecord, going: &Going, step: BatchStep) -> io::Result<()> {
    let Some(status) = batch.status.after(step) else { return Ok(()) };
    let mut next = batch.clone();
    next.status = status;
    next.reached_unix_seconds.insert(status, now());
    batches.inner.store.set_batch(next.clone()).await.map_err(io::Error::other)?;
    *batch = next;
    going.status.send_replace(status);
    Ok(())
}

async fn validate(batches: &Batches, batch: &mut BatchRecord, going: &Going) -> io::Result<()> {
    let path = batches.inner.contents.path(&batch.input_file);
    let (endpoint, bytes_max) = (batch.endpoint.clone(), batches.inner.config.line_bytes_max);
    let checked = tokio::task::spawn_blocking(move || lines::validate(&path, &endpoint, bytes_max)).await?;
    let checked = match checked {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(vec![BatchFault {
            code: "file_missing".to_owned(),
            message: "the input file is gone".to_owned(),
            param: Some("input_file_id".to_owned()),
            line: None,
        }]),
        other => other?,
    };
    let step = match checked {
        Ok(total) => {
            batch.counts = BatchCounts { total, ..BatchCounts::default() };
            going.count(batch.counts);
            BatchStep::Validated
        }
        Err(faults) => {
            batch.faults = faults;
            BatchStep::Refused
        }
    };
    enter(batches, batch, going, step).await
}

/// Answers the lines that have not ended, until there is none or something halts it.
async fn answer(batches: &Batches, batch: &mut BatchRecord, going: &Going) -> io::Result<Halt> {
    let (contents, record) = (batches.inner.contents.clone(), batch.clone());
    let answers = tokio::task::spawn_blocking(move || Answers::open(&contents, &record)).await??;
    let path = batches.inner.contents.path(&batch.input_file);
    let lines = Lines::open(&path, batches.inner.config.line_bytes_max)?;
    let left = Duration::from_secs(batch.expires_unix_seconds.saturating_sub(now()));
    let deadline = Instant::now() + left;
    let mut work = Work { batches, batch, going, path, deadline, answers, lines, running: JoinSet::new(), halt: None };
    work.tell();
    let halt = work.run().await?;
    let counts = work.answers.counts(work.batch.counts.total);
    batch.counts = counts;
    Ok(halt)
}

struct Work<'a> {
    batches: &'a Batches,
    batch: &'a mut BatchRecord,
    going: &'a Going,
    path: PathBuf,
    deadline: Instant,
    answers: Answers,
    lines: Lines,
    /// Lines that run, and what they came to: nothing if the server stops first.
    running: JoinSet<(String, Option<Outcome>)>,
    halt: Option<Halt>,
}

impl Work<'_> {
    async fn run(&mut self) -> io::Result<Halt> {
        let (mut taken_back, mut draining) =
            (self.going.taken_back.subscribe(), self.batches.inner.draining.subscribe());
        let mut sync = tokio::time::interval(SYNC_INTERVAL);
        loop {
            if let Some(halt) = self.halt
                && self.running.is_empty()
            {
                if halt == Halt::TimeOver {
                    self.expire_rest()?;
                }
                self.answers.sync()?;
                self.tell();
                return Ok(halt);
            }
            tokio::select! {
                biased;
                Some(ended) = self.running.join_next() => {
                    let (custom_id, outcome) = ended.map_err(io::Error::other)?;
                    if let Some(outcome) = outcome {
                        self.answers.write(&self.batch.name, &custom_id, &outcome)?;
                        self.tell();
                    }
                }
                () = tokio::time::sleep_until(self.deadline), if self.halt != Some(Halt::TimeOver) => {
                    // What runs is let go; it counts as not answered.
                    self.running.shutdown().await;
                    self.halt = Some(Halt::TimeOver);
                }
                () = heard(&mut taken_back), if self.halt.is_none() => {
                    // Written down now: lines that run may take their time.
                    enter(self.batches, self.batch, self.going, BatchStep::TakenBack).await?;
                    self.halt = Some(Halt::TakenBack);
                }
                () = heard(&mut draining), if self.halt.is_none() => {
                    self.halt = Some(Halt::Draining);
                }
                _ = sync.tick() => self.answers.sync()?,
                Ok(permit) = self.batches.inner.lines.clone().acquire_owned(), if self.halt.is_none() => {
                    match self.next_line()? {
                        Some(line) => self.begin(line, permit),
                        None => self.halt = Some(Halt::Answered),
                    }
                }
            }
        }
    }

    fn tell(&self) {
        self.going.count(self.answers.counts(self.batch.counts.total));
    }

    fn next_line(&mut self) -> io::Result<Option<Line>> {
        while let Some((_, text)) = self.lines.next()? {
            // The whole file was checked; one that was changed since is not ours to run.
            let changed = || io::Error::other("the input file has changed");
            let line = text.and_then(|text| lines::parse(&text, &self.batch.endpoint)).map_err(|_| changed())?;
            if !self.answers.ended.contains(&line.custom_id) {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }

    fn begin(&mut self, line: Line, permit: tokio::sync::OwnedSemaphorePermit) {
        let (batches, endpoint, deadline) = (self.batches.clone(), self.batch.endpoint.clone(), self.deadline);
        self.running.spawn(async move {
            let outcome = run_line(&batches, &endpoint, &line, deadline).await;
            drop(permit);
            (line.custom_id, outcome)
        });
    }

    /// Says of every line that was not answered that it was not.
    fn expire_rest(&mut self) -> io::Result<()> {
        self.lines = Lines::open(&self.path, self.batches.inner.config.line_bytes_max)?;
        while let Some(line) = self.next_line()? {
            self.answers.write(&self.batch.name, &line.custom_id, &EXPIRED)?;
        }
        Ok(())
    }
}

/// Returns once a flag is set.
async fn heard(flag: &mut watch::Receiver<bool>) {
    if flag.wait_for(|set| *set).await.is_err() {
        // Nobody is left to set it.
        std::future::pending().await
    }
}

/// Asks for one line's answer until it has one that stays; none if the server stops first.
async fn run_line(batches: &Batches, endpoint: &str, line: &Line, deadline: Instant) -> Option<Outcome> {
    let slots = batches.model_slots(&line.model);
    let _slot = match &slots {
        // It is never closed.
        Some(slots) => slots.acquire().await.ok(),
        None => None,
    };
    let (mut tries, mut draining) = (0, batches.inner.draining.subscribe());
    loop {
        // A little longer than the batch has, so that the line ends as expired.
        let patience = deadline.saturating_duration_since(Instant::now()) + RETRY_PAUSE;
        let errand = Errand::new(Some(Priority::Batch), patience);
        let body = line.body.clone().into_bytes().into();
        let router = batches.inner.router.clone();
        let answer = perform(router, endpoint, body, errand, batches.inner.config.answer_bytes_max).await;
        match answer.verdict() {
            Verdict::Answered | Verdict::Failed => return Some(Outcome::Answered(answer)),
            Verdict::Later { after, counts } => {
                tries += u32::from(counts);
                if tries >= TRIES_MAX {
                    return Some(Outcome::Answered(answer));
                }
                tokio::select! {
                    biased;
                    () = heard(&mut draining) => return None,
                    () = tokio::time::sleep(after) => {}
                }
            }
        }
    }
}

/// Gives both files their names and records; a file without lines is not kept.
async fn publish(batches: &Batches, batch: &mut BatchRecord) -> io::Result<()> {
    let (contents, record) = (batches.inner.contents.clone(), batch.clone());
    let answers = tokio::task::spawn_blocking(move || Answers::open(&contents, &record)).await??;
    batch.counts = answers.counts(batch.counts.total);
    (batch.has_output, batch.has_errors) = (answers.completed > 0, answers.failed > 0);
    drop(answers);
    for (name, is_there, what) in
        [(batch.output_file.clone(), batch.has_output, "output"), (batch.error_file.clone(), batch.has_errors, "error")]
    {
        let contents = batches.inner.contents.clone();
        if !is_there {
            std::fs::remove_file(contents.partial_path(&name))?;
            continue;
        }
        let path = contents.path(&name);
        let publishing = name.clone();
        tokio::task::spawn_blocking(move || contents.publish(&publishing)).await??;
        let file = FileRecord {
            tenant: batch.tenant.clone(),
            filename: format!("{}_{what}.jsonl", batch.name),
            purpose: "batch_output".to_owned(),
            size_bytes: std::fs::metadata(path)?.len(),
            created_unix_seconds: now(),
            name,
        };
        batches.inner.store.add_file(file, true).await.map_err(io::Error::other)?;
    }
    Ok(())
}
