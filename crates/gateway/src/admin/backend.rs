//! What the admin routes ask of the rest of the program. The binary implements it over catalog, store and worker.

use super::events::EventLog;
use crate::{batches::Batches, jobs::Jobs};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::mpsc;
use warmset_core::ModelName;

/// Why an admin call was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct AdminError {
    /// The HTTP status.
    pub status: u16,
    /// Whose fault and what to do, in lower case.
    pub message: String,
}

impl AdminError {
    /// 400: the call itself is wrong.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into() }
    }

    /// 404: no such model.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { status: 404, message: message.into() }
    }

    /// 422: understood, but cannot be done as things are.
    pub fn refused(message: impl Into<String>) -> Self {
        Self { status: 422, message: message.into() }
    }

    /// 503: this server is on its way out.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { status: 503, message: message.into() }
    }

    /// 500: our fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { status: 500, message: message.into() }
    }
}

/// How far a recording goes; whichever end comes first is its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecordingLimits {
    /// So many seconds; without, as long as somebody takes it.
    pub seconds: Option<u64>,
    /// So many bytes; without, as many as the server says.
    pub bytes_max: Option<u64>,
}

/// A recording, as it is made: whole lines. Dropped, it ends.
pub type RecordingChunks = mpsc::Receiver<Bytes>;

/// The answer to an admin call: a JSON document, sent as it is.
pub type AdminFuture<'a> = BoxFuture<'a, Result<Value, AdminError>>;

/// Everything the admin routes can do. Reading never counts as use and never loads anything.
pub trait AdminBackend: Send + Sync + 'static {
    /// `GET /admin/v1/models`.
    fn list_models(&self) -> AdminFuture<'_>;
    /// `GET /admin/v1/models/NAME`.
    fn show_model(&self, name: ModelName) -> AdminFuture<'_>;
    /// `POST /admin/v1/models` with a JSON object.
    fn add_model(&self, body: Value) -> AdminFuture<'_>;
    /// `DELETE /admin/v1/models/NAME`.
    fn remove_model(&self, name: ModelName) -> AdminFuture<'_>;
    /// `POST /admin/v1/models/NAME/pin` and `/unpin`.
    fn pin_model(&self, name: ModelName, pin: bool) -> AdminFuture<'_>;
    /// `POST /admin/v1/models/NAME/load`: answers once the model is ready or the load has failed, or at once with
    /// the state it is in if `wait` is false.
    fn load_model(&self, name: ModelName, wait: bool) -> AdminFuture<'_>;
    /// `POST /admin/v1/models/NAME/unload`.
    fn unload_model(&self, name: ModelName) -> AdminFuture<'_>;
    /// `POST /admin/v1/models/NAME/ACTION` for every other action (`alias`, `profile`), with a JSON body or null.
    fn act_on_model(&self, name: ModelName, action: String, body: Value) -> AdminFuture<'_> {
        let _ = body;
        Box::pin(async move { Err(AdminError::not_found(format!("there is no action {action} for {name}"))) })
    }
    /// `GET /admin/v1/models/NAME/logs?lines=N`: the last lines its engines wrote.
    fn model_logs(&self, name: ModelName, lines: usize) -> AdminFuture<'_>;
    /// `GET /admin/v1/workers`.
    fn workers(&self) -> AdminFuture<'_>;
    /// `GET /admin/v1/ledger`: every byte, per tier and entry.
    fn ledger(&self) -> AdminFuture<'_>;
    /// `GET /admin/v1/kv`: what is kept of prompts, and whether it pays.
    fn kv(&self) -> AdminFuture<'_>;
    /// `DELETE /admin/v1/kv`: keep nothing of any prompt that was asked until now. Answers as `kv` does after it.
    fn clear_kv(&self) -> AdminFuture<'_> {
        Box::pin(async { Err(AdminError::not_found("no KV is kept here")) })
    }
    /// `POST /admin/v1/drain`: accept nothing new, finish what runs, unload everything.
    fn drain(&self) -> AdminFuture<'_>;
    /// `POST /admin/v1/reload`: read the configuration again and change what has changed.
    fn reload(&self) -> AdminFuture<'_> {
        Box::pin(async { Err(AdminError::not_found("there is no configuration to read again")) })
    }
    /// `GET /admin/v1/recording`: what the machines are told and do from now on.
    fn record(&self, limits: RecordingLimits) -> Result<RecordingChunks, AdminError> {
        let _ = limits;
        Err(AdminError::not_found("there is nothing here to record"))
    }
    /// Brings the gauges that follow from the ledger up to date before a scrape.
    fn refresh_metrics(&self) -> BoxFuture<'_, ()>;
    /// Requests that are answered later, if there are any.
    fn jobs(&self) -> Option<Jobs> {
        None
    }
    /// Files of such requests, if they are kept.
    fn batches(&self) -> Option<Batches> {
        None
    }
    /// What happened, for `GET /admin/v1/events`.
    fn events(&self) -> Arc<EventLog>;
}
