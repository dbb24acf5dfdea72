//! Where a transfer's bytes go: written and hashed side by side, on threads that may block, made durable on the way.

use crate::{download::blocking, error::FetchError};
use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use std::{fs::File, sync::mpsc::SyncSender};
use tokio::{sync::mpsc, task::JoinHandle};
use warmset_core::Digest;
use warmset_store::{Origin, Staging, StoreError};

/// Pieces that wait to be written or hashed.
const PIECES_WAITING_MAX: usize = 64;
/// How much is written before it is made durable, while more is written.
const FLUSH_BYTES: u64 = 64 << 20;

/// An unfinished file and the hash of what is in it.
pub(crate) struct Sink {
    /// None only while a body flows or after one was lost.
    staging: Option<Staging>,
    /// None until what was there before has been read.
    hasher: Option<Sha256>,
}

/// A body on its way.
pub(crate) struct Flow {
    written: mpsc::Sender<Bytes>,
    hashed: mpsc::Sender<Bytes>,
    writer: JoinHandle<(Staging, Result<(), StoreError>)>,
    hasher: JoinHandle<Sha256>,
}

impl Flow {
    /// Takes a piece. False once nothing more can be written.
    pub(crate) async fn put(&mut self, bytes: Bytes) -> bool {
        self.hashed.send(bytes.clone()).await.is_ok() && self.written.send(bytes).await.is_ok()
    }
}

fn lost() -> FetchError {
    FetchError::Local("the task that writes a download has ended".to_owned())
}

impl Sink {
    pub(crate) fn new(staging: Staging) -> Self {
        Self { staging: Some(staging), hasher: None }
    }

    fn staging(&self) -> Result<&Staging, FetchError> {
        self.staging.as_ref().ok_or_else(lost)
    }

    fn staging_mut(&mut self) -> Result<&mut Staging, FetchError> {
        self.staging.as_mut().ok_or_else(lost)
    }

    /// The file, once it is complete.
    pub(crate) fn into_staging(self) -> Result<Staging, FetchError> {
        self.staging.ok_or_else(lost)
    }

    pub(crate) fn length(&self) -> Result<u64, FetchError> {
        Ok(self.staging()?.length()?)
    }

    pub(crate) fn origin(&self) -> Option<&Origin> {
        self.staging.as_ref()?.origin.as_ref()
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.staging.as_ref().is_some_and(Staging::is_whole)
    }

    /// Reads what an earlier process left, so that the hash can go on, and returns its length.
    pub(crate) async fn ready(&mut self) -> Result<u64, FetchError> {
        if self.hasher.is_none() {
            let mut staging = self.staging.take().ok_or_else(lost)?;
            let (staging, hasher) = blocking(move || {
                let hasher = staging.hash(&mut |_| {});
                (staging, hasher)
            })
            .await?;
            (self.staging, self.hasher) = (Some(staging), Some(hasher?));
        }
        self.length()
    }

    pub(crate) fn restart(&mut self) -> Result<(), FetchError> {
        self.hasher = Some(Sha256::new());
        Ok(self.staging_mut()?.restart()?)
    }

    pub(crate) fn remember(&mut self, origin: Origin) -> Result<(), FetchError> {
        Ok(self.staging_mut()?.remember(origin)?)
    }

    pub(crate) fn reserve(&self, size_bytes: u64) -> Result<(), FetchError> {
        Ok(self.staging()?.reserve(size_bytes)?)
    }

    /// The hash of what is there.
    pub(crate) fn digest(&self) -> Result<Digest, FetchError> {
        Ok(Digest(self.hasher.clone().ok_or_else(lost)?.finalize().into()))
    }

    /// Begins to take a body.
    pub(crate) fn open(&mut self) -> Result<Flow, FetchError> {
        let mut staging = self.staging.take().ok_or_else(lost)?;
        let mut hasher = self.hasher.take().ok_or_else(lost)?;
        let (written, mut to_write) = mpsc::channel::<Bytes>(PIECES_WAITING_MAX);
        let (hashed, mut to_hash) = mpsc::channel::<Bytes>(PIECES_WAITING_MAX);
        let writer = tokio::task::spawn_blocking(move || {
            let result = write(&mut staging, &mut to_write);
            (staging, result)
        });
        let hasher = tokio::task::spawn_blocking(move || {
            while let Some(bytes) = to_hash.blocking_recv() {
                hasher.update(&bytes);
            }
            hasher
        });
        Ok(Flow { written, hashed, writer, hasher })
    }

    /// Ends it: everything that was taken is written and hashed.
    pub(crate) async fn close(&mut self, flow: Flow) -> Result<(), FetchError> {
        let Flow { written, hashed, writer, hasher } = flow;
        drop((written, hashed));
        let (staging, result) = writer.await.map_err(|_| lost())?;
        let hasher = hasher.await.map_err(|_| lost())?;
        self.staging = Some(staging);
        // After a failed write the hash is ahead of the file.
        self.hasher = result.is_ok().then_some(hasher);
        Ok(result?)
    }
}

fn write(staging: &mut Staging, pieces: &mut mpsc::Receiver<Bytes>) -> Result<(), StoreError> {
    let flusher = Flusher::start(staging.second_handle()?);
    let mut unflushed = 0;
    while let Some(bytes) = pieces.blocking_recv() {
        staging.append(&bytes)?;
        unflushed += bytes.len() as u64;
        if unflushed >= FLUSH_BYTES && flusher.ask() {
            unflushed = 0;
        }
    }
    Ok(())
}

/// Makes durable what is written while more is written: what is left for the end is little.
struct Flusher(SyncSender<()>);

impl Flusher {
    fn start(file: File) -> Self {
        let (asked, asks) = std::sync::mpsc::sync_channel(0);
        std::thread::spawn(move || {
            while asks.recv().is_ok() {
                // The last word on this is the one before the file gets its name.
                let _ = file.sync_data();
            }
        });
        Self(asked)
    }

    /// Whether it has begun; not while it is busy with what was written before.
    fn ask(&self) -> bool {
        self.0.try_send(()).is_ok()
    }
}
