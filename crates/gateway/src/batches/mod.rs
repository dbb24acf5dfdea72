//! OpenAI's files and batches: many requests in one file, answered when nobody else wants the models.
//!
//! Lines run in the batch class, few at a time, and leave one slot of every model that has more than one to callers who
//! wait. What a line came to is appended to a file at once: a server that is killed goes on where that file ends.

mod answers;
mod content;
mod files;
mod http;
mod lines;
mod port;
mod run;

pub(crate) use files::{delete as delete_file, download, list as list_files, show as show_file, upload};
pub use http::batch_document;
pub(crate) use http::{ENDPOINTS, WINDOW, admin_cancel, admin_list, admin_show, cancel, create, list, show};
pub use port::{BatchFuture, BatchStore, BatchStoreError};

use crate::{clock::unix_seconds, errors::ApiError, frontend::Frontend};
use axum::Router;
use content::Contents;
use run::Going;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::{Semaphore, watch};
use warmset_core::jobs::{BatchCounts, BatchRecord, FileRecord};

/// Lines of one batch, as OpenAI's.
pub const BATCH_LINES_MAX: u64 = 50_000;
/// Batches that have not ended.
pub const BATCHES_UNFINISHED_MAX: usize = 100;
/// Lines that run at once, over all batches.
const LINES_RUNNING_MAX: usize = 16;

/// How files and batches are kept and answered.
#[derive(Debug, Clone)]
pub struct BatchesConfig {
    /// Where contents lie.
    pub directory: PathBuf,
    /// The largest file, as OpenAI's.
    pub file_bytes_max: u64,
    /// The largest line.
    pub line_bytes_max: usize,
    /// The largest answer of a line.
    pub answer_bytes_max: usize,
    /// Time that a file may take to come, and between two pieces of it.
    pub upload_timeout: Duration,
    /// The same for each piece.
    pub upload_idle_timeout: Duration,
}

impl BatchesConfig {
    /// Defaults, with contents below a directory.
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            file_bytes_max: 200 << 20,
            line_bytes_max: 8 << 20,
            answer_bytes_max: 64 << 20,
            upload_timeout: Duration::from_secs(1800),
            upload_idle_timeout: Duration::from_secs(60),
        }
    }
}

struct Inner {
    store: Arc<dyn BatchStore>,
    contents: Contents,
    config: BatchesConfig,
    frontend: Frontend,
    /// Answers lines; accepts no jobs.
    router: Router,
    going: Mutex<BTreeMap<String, Arc<Going>>>,
    /// One for every line that may run.
    lines: Arc<Semaphore>,
    /// The same for each model.
    of_model: Mutex<BTreeMap<String, Arc<Semaphore>>>,
    draining: watch::Sender<bool>,
}

/// The handle. Cheap to clone.
#[derive(Clone)]
pub struct Batches {
    inner: Arc<Inner>,
}

impl Batches {
    /// Takes the directory of contents. Nothing runs before [`Batches::resume`].
    pub fn new(
        store: Arc<dyn BatchStore>,
        frontend: Frontend,
        router: Router,
        config: BatchesConfig,
    ) -> std::io::Result<Self> {
        let contents = Contents::open(config.directory.clone())?;
        let (going, of_model) = (Mutex::default(), Mutex::default());
        let lines = Arc::new(Semaphore::new(LINES_RUNNING_MAX));
        let draining = watch::Sender::new(false);
        let inner = Inner { store, contents, config, frontend, router, going, lines, of_model, draining };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Takes up the batches that had not ended when the last server did. Their models must be known by now.
    pub async fn resume(&self) -> Result<usize, BatchStoreError> {
        let files = self.inner.store.files().await?;
        self.inner.contents.remove_others(files.iter().map(|file| file.name.as_str()));
        let unfinished = self.inner.store.unfinished_batches().await?;
        let count = unfinished.len();
        for batch in unfinished {
            self.begin(batch);
        }
        Ok(count)
    }

    /// Begins no more lines, and returns when none runs. The rest stays for the next start.
    pub async fn drain(&self) {
        self.inner.draining.send_replace(true);
        let going: Vec<Arc<Going>> = self.going().values().cloned().collect();
        for batch in going {
            batch.ended().await;
        }
    }

    fn begin(&self, batch: BatchRecord) {
        let going = Arc::new(Going::new(&batch));
        self.going().insert(batch.name.clone(), going.clone());
        let batches = self.clone();
        tokio::spawn(async move {
            let name = batch.name.clone();
            run::run(&batches, batch, &going).await;
            batches.going().remove(&name);
            going.end();
        });
    }

    fn going(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Going>>> {
        self.inner.going.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many lines have been answered, as far as is known at this moment.
    fn counts(&self, batch: &BatchRecord) -> BatchCounts {
        self.going().get(&batch.name).map_or(batch.counts, |going| going.counts())
    }

    /// What lines of a model need before they run: all slots that its callers do not need, at least one.
    fn model_slots(&self, model: &str) -> Option<Arc<Semaphore>> {
        let entry = self.inner.frontend.directory().resolve(model)?;
        let mut of_model = self.inner.of_model.lock().unwrap_or_else(PoisonError::into_inner);
        let name = entry.route.name.as_str().to_owned();
        let slots = entry.route.max_concurrency.saturating_sub(entry.route.critical_reserve).saturating_sub(1).max(1);
        Some(of_model.entry(name).or_insert_with(|| Arc::new(Semaphore::new(slots as usize))).clone())
    }

    async fn file(&self, name: &str) -> Result<FileRecord, ApiError> {
        self.inner.store.file(name.to_owned()).await?.ok_or_else(|| ApiError::file_not_found(name))
    }
}

impl std::fmt::Debug for Batches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Batches")
    }
}

/// A name that nobody can guess.
pub(crate) fn new_name(prefix: &str) -> Result<String, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| ApiError::internal(format!("no random numbers: {error}")))?;
    Ok(bytes.iter().fold(prefix.to_owned(), |name, byte| name + &format!("{byte:02x}")))
}

/// Now, for what callers see.
fn now() -> u64 {
    unix_seconds()
}
