//! Where files and batches are kept, all but the contents. The binary puts the catalog behind it.

use futures_util::future::BoxFuture;
use warmset_core::jobs::{BatchRecord, FileRecord};

/// Why something could not be written down or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchStoreError {
    /// A limit is reached: the caller can remove something.
    #[error("{0}")]
    Full(String),
    /// The store itself failed.
    #[error("{0}")]
    Failed(String),
}

/// What a store answers, later.
pub type BatchFuture<'a, T> = BoxFuture<'a, Result<T, BatchStoreError>>;

/// Keeps files and batches. What it acknowledged outlives the process.
pub trait BatchStore: Send + Sync + 'static {
    /// Keeps a file's record; one that is there stays as it is. `made_here` says that a batch made it.
    fn add_file(&self, file: FileRecord, made_here: bool) -> BatchFuture<'_, ()>;
    /// The file with this name.
    fn file(&self, name: String) -> BatchFuture<'_, Option<FileRecord>>;
    /// All files, the newest first.
    fn files(&self) -> BatchFuture<'_, Vec<FileRecord>>;
    /// Forgets a file; false if there is none.
    fn remove_file(&self, name: String) -> BatchFuture<'_, bool>;
    /// Keeps a batch.
    fn add_batch(&self, batch: BatchRecord) -> BatchFuture<'_, ()>;
    /// Replaces what is kept of a batch.
    fn set_batch(&self, batch: BatchRecord) -> BatchFuture<'_, ()>;
    /// The batch with this name.
    fn batch(&self, name: String) -> BatchFuture<'_, Option<BatchRecord>>;
    /// All batches, the newest first.
    fn batches(&self) -> BatchFuture<'_, Vec<BatchRecord>>;
    /// Batches that have not ended, the oldest first.
    fn unfinished_batches(&self) -> BatchFuture<'_, Vec<BatchRecord>>;
}
