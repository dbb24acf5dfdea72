//! What can go wrong with the catalog, whose fault it is, and what to do.

use std::path::PathBuf;
use warmset_core::{Digest, ModelName};

/// Why the catalog could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// No model or alias has this name.
    #[error("no model is named {0}: see `warmset model list`")]
    UnknownModel(ModelName),
    /// The name is taken by another model or alias.
    #[error("the name {0} is taken: choose another, or remove that model or alias first")]
    NameTaken(ModelName),
    /// The same digest is served under another name.
    #[error(
        "{digest} is already served as {name}: add the new name as an alias of it, or with other settings (another context_tokens makes it another model)"
    )]
    DigestTaken {
        /// The digest.
        digest: Digest,
        /// Its name.
        name: ModelName,
    },
    /// The model has as many versions as it may have.
    #[error("{name} has {limit} versions: remove one with `warmset model remove {name} --digest DIGEST`")]
    TooManyVersions {
        /// The model.
        name: ModelName,
        /// How many it may have.
        limit: u64,
    },
    /// No version of the model has this digest.
    #[error("no version has the digest {0}: see `warmset model show NAME`")]
    UnknownVersion(Digest),
    /// The name has come to stand for something else in the meantime.
    #[error("{name} stands for {to} by now: look at `warmset model show {name}` and decide again")]
    Moved {
        /// The name.
        name: ModelName,
        /// What it stands for.
        to: Digest,
    },
    /// Callers get this version.
    #[error("{digest} is what {name} stands for: promote another version first, or remove the model")]
    VersionInUse {
        /// The name.
        name: ModelName,
        /// The digest.
        digest: Digest,
    },
    /// A limit of the catalog is reached.
    #[error("the catalog already holds {limit} {what}: remove some first")]
    Full {
        /// Of what.
        what: &'static str,
        /// How many may be held.
        limit: u64,
    },
    /// The database was written by a newer program.
    #[error(
        "the catalog {path} has schema version {found}, this program knows up to {known}: use the newer warmset, or another data directory",
        path = path.display()
    )]
    NewerSchema {
        /// The database.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The newest version known here.
        known: u64,
    },
    /// The file is not a sound SQLite database.
    #[error(
        "the catalog {path} is damaged ({reason}): stop warmset, then restore the file from a backup, or repair it with `sqlite3 {path} .recover | sqlite3 repaired.db`, or move it away and add the models again before any is removed (a removal deletes files that no model refers to)",
        path = path.display()
    )]
    Damaged {
        /// The database.
        path: PathBuf,
        /// What SQLite found.
        reason: String,
    },
    /// A row that no version of this program writes.
    #[error("the catalog holds an invalid {what}: {reason}: restore the catalog from a backup")]
    InvalidRow {
        /// What is invalid.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// A kind of database that is not supported.
    #[error("catalogs of the kind {scheme}:// are not supported: give a path or sqlite://PATH")]
    Scheme {
        /// The scheme.
        scheme: String,
    },
    /// The disk is full.
    #[error("no room to write the catalog: free space in its directory")]
    DiskFull,
    /// Anything else the database says.
    #[error("the catalog cannot be used: {0}")]
    Database(sqlx::Error),
}

/// SQLite's primary result codes that mean the file itself is bad.
const SQLITE_CORRUPT: u32 = 11;
const SQLITE_NOT_A_DATABASE: u32 = 26;
const SQLITE_FULL: u32 = 13;

/// SQLite's primary result code of an error.
fn primary_code(error: &sqlx::Error) -> Option<u32> {
    let code: u32 = error.as_database_error()?.code()?.parse().ok()?;
    Some(code & 0xff)
}

/// Whether an error says that the file itself is bad.
pub(crate) fn means_damaged(error: &sqlx::Error) -> bool {
    matches!(primary_code(error), Some(SQLITE_CORRUPT | SQLITE_NOT_A_DATABASE))
}

impl From<sqlx::Error> for CatalogError {
    fn from(error: sqlx::Error) -> Self {
        match primary_code(&error) {
            Some(SQLITE_FULL) => Self::DiskFull,
            _ => Self::Database(error),
        }
    }
}

impl CatalogError {
    pub(crate) fn invalid(what: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::InvalidRow { what, reason: reason.to_string() }
    }

    /// Whether the caller asked for something that cannot be, as opposed to the catalog failing.
    pub fn is_callers_fault(&self) -> bool {
        matches!(
            self,
            Self::UnknownModel(_)
                | Self::NameTaken(_)
                | Self::DigestTaken { .. }
                | Self::Full { .. }
                | Self::TooManyVersions { .. }
                | Self::UnknownVersion(_)
                | Self::Moved { .. }
                | Self::VersionInUse { .. }
        )
    }
}
