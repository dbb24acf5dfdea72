//! Where models come from: web servers, hubs, object storage, and what other tools keep on this machine.
//!
//! `location` reads what a user writes; `fetch` brings the files here. Nothing that comes is parsed before it is
//! complete and hashed, nobody is asked whose address is not public unless the operator says so (`address`, `http`),
//! and a transfer that was cut off goes on where it stopped (`download`, `sink`).

mod location;

mod address;
mod environment;
mod error;
mod settings;

mod download;
mod fetch;
mod http;
mod hub;
mod ollama;
mod s3;
mod sink;

pub use address::Trust;
pub use download::Progress;
pub use environment::Environment;
pub use error::FetchError;
pub use fetch::{Fetcher, Gathered, Part};
pub use location::{HubFile, Location, OllamaName, SOURCE_BYTES_MAX, SourceError};
pub use ollama::{OllamaModel, list_ollama};
pub use settings::Settings;
