//! What a machine says that finds itself broken.

use alloc::string::String;
use core::fmt;

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which one.
    pub invariant: &'static str,
    /// What was found.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.detail)
    }
}

impl core::error::Error for Violation {}

/// Holds an invariant.
pub(crate) fn hold(condition: bool, invariant: &'static str, detail: impl FnOnce() -> String) -> Result<(), Violation> {
    if condition { Ok(()) } else { Err(Violation { invariant, detail: detail() }) }
}
