//! What is known of models: names, digests, settings, aliases, measurements, events. SQLite behind it.
//!
//! Every acknowledged change is on disk (write-ahead log, synchronous), one connection writes, and a schema newer than
//! this program is refused. Names of models come in as [`ModelName`](warmset_core::ModelName) and never as plain text.

mod aliases;
mod batches;
mod catalog;
mod error;
mod events;
mod jobs;
mod measurements;
mod migrations;
mod models;
mod reserve;
mod versions;
mod warmth;
mod write;

pub use aliases::ALIASES_MAX;
pub use batches::{BATCHES_MAX, FILES_BYTES_MAX, FILES_MAX};
pub use catalog::Catalog;
pub use error::CatalogError;
pub use events::{EVENTS_MAX, Event, NewEvent};
pub use jobs::JOBS_LISTED_MAX;
pub use measurements::{MEASUREMENTS_MAX, Measurement};
pub use migrations::SCHEMA_VERSION;
pub use models::{MODELS_MAX, Model, ModelSettings, NewModel};
pub use versions::{Approval, Switch, VERSIONS_MAX, Version};
