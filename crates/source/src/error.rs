//! What can go wrong between here and a source, and what to do about it.

use crate::location::SourceError;
use warmset_core::Digest;
use warmset_store::StoreError;

/// Why a model's files could not be fetched. What is shown never holds a secret: locations are without their query.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The source cannot be used.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The store fails, or a file on this machine.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Somewhere it may not go.
    #[error("{location} is refused: {reason}")]
    Refused {
        /// What was asked for.
        location: String,
        /// Why, and what would allow it.
        reason: String,
    },
    /// The other side says no.
    #[error("{location} answers {status}: {hint}")]
    Status {
        /// Who.
        location: String,
        /// The HTTP status.
        status: u16,
        /// What to do.
        hint: &'static str,
    },
    /// The other side cannot be reached, breaks off or stalls, however often it is tried.
    #[error("{location} cannot be fetched: {reason}: try again, what is here already is kept")]
    Broken {
        /// Who.
        location: String,
        /// What happened last.
        reason: String,
    },
    /// The other side does not keep to the protocol or to what it said before.
    #[error("{location} is not to be trusted: {reason}")]
    Lies {
        /// Who.
        location: String,
        /// What is wrong.
        reason: String,
    },
    /// The bytes are not what they should be.
    #[error("{location} has SHA-256 {found} instead of {expected}: it was changed or damaged, nothing of it is used")]
    Mismatch {
        /// What.
        location: String,
        /// As promised.
        expected: Digest,
        /// As received.
        found: Digest,
    },
    /// Larger than allowed.
    #[error("{location} has {size_bytes} bytes, more than the limit of {limit_bytes}: see [sources] max_bytes")]
    TooLarge {
        /// What.
        location: String,
        /// Its size, or what came so far.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// It takes too long.
    #[error(
        "{location} took longer than {seconds} seconds: try again, what is here already is kept; see [sources] timeout"
    )]
    TooLong {
        /// What.
        location: String,
        /// The limit.
        seconds: u64,
    },
    /// Something on this machine is missing or wrong.
    #[error("{0}")]
    Local(String),
}

impl FetchError {
    /// Whether the source or its server is at fault, not this machine.
    pub fn is_source_fault(&self) -> bool {
        match self {
            Self::Store(error) => error.is_source_fault(),
            _ => true,
        }
    }
}
