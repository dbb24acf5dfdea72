//! Artifacts on disk: content-addressed, verified once, immutable.
//!
//! A model's files are copied (or reflinked) into a directory under the name of their SHA-256 and never change again, so
//! an engine maps a file that nobody else can write. What a model *is*, its [`Manifest`], has a digest of its own.
//!
//! Beside them lies what the KV tier keeps: blocks in host memory ([`arena`]) and on disk ([`segments`]).

pub mod arena;
mod checked;
mod error;
mod import;
mod manifest;
pub mod segments;
mod staging;
mod store;

pub use error::StoreError;
pub use import::ARTIFACT_BYTES_MAX;
pub use manifest::{MANIFEST_FILES_MAX, Manifest, ManifestError, ManifestFile, definition_digest};
pub use staging::{Origin, Staging, UNFINISHED_AGE_MAX, UNFINISHED_FILES_MAX};
pub use store::{QUARANTINED_FILES_MAX, Removed, Store, StoredFile, Verified, path_in};
