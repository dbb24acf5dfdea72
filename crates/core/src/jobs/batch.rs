//! Batches: files of requests that are answered when nobody else wants the models. A table of states, and what is kept.

use crate::ids::TenantId;
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// Where a batch is, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchStatus {
    /// Its file is being read.
    Validating,
    /// Its file is not acceptable.
    Failed,
    /// Its lines are being answered.
    InProgress,
    /// Its answers are being put into files.
    Finalizing,
    /// Every line has its answer or its error.
    Completed,
    /// Its time was over before every line was answered.
    Expired,
    /// Its caller took it back; lines that run are let finish.
    Cancelling,
    /// It was taken back.
    Cancelled,
}

/// What happens to a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BatchStep {
    /// Its file is acceptable.
    Validated,
    /// Its file is not.
    Refused,
    /// No line is left.
    Answered,
    /// Its time is over.
    TimeOver,
    /// Its caller takes it back.
    TakenBack,
    /// Its files are there.
    Written,
}

/// Every step there is.
pub const BATCH_TRANSITIONS: [(BatchStatus, BatchStep, BatchStatus); 9] = [
    (BatchStatus::Validating, BatchStep::Validated, BatchStatus::InProgress),
    (BatchStatus::Validating, BatchStep::Refused, BatchStatus::Failed),
    (BatchStatus::Validating, BatchStep::TakenBack, BatchStatus::Cancelling),
    (BatchStatus::InProgress, BatchStep::Answered, BatchStatus::Finalizing),
    (BatchStatus::InProgress, BatchStep::TimeOver, BatchStatus::Expired),
    (BatchStatus::InProgress, BatchStep::TakenBack, BatchStatus::Cancelling),
    (BatchStatus::Finalizing, BatchStep::Written, BatchStatus::Completed),
    (BatchStatus::Cancelling, BatchStep::Written, BatchStatus::Cancelled),
    (BatchStatus::Cancelling, BatchStep::TakenBack, BatchStatus::Cancelling),
];

impl BatchStatus {
    /// Where a step leads; none if there is no such step from here.
    pub fn after(self, step: BatchStep) -> Option<Self> {
        BATCH_TRANSITIONS.iter().find(|(from, taken, _)| (*from, *taken) == (self, step)).map(|(_, _, to)| *to)
    }

    /// Whether nothing follows.
    pub fn is_final(self) -> bool {
        BATCH_TRANSITIONS.iter().all(|(from, _, _)| *from != self)
    }
}

/// What is wrong with a line of a batch's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchFault {
    /// In a word.
    pub code: String,
    /// In a sentence.
    pub message: String,
    /// The parameter at fault.
    pub param: Option<String>,
    /// Counted from 1.
    pub line: Option<u64>,
}

/// How many lines there are, and what became of them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchCounts {
    /// All of them.
    pub total: u64,
    /// Answered.
    pub completed: u64,
    /// Answered with an error.
    pub failed: u64,
}

/// A batch as it is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchRecord {
    /// What its caller knows it by.
    pub name: String,
    /// Whose it is.
    pub tenant: TenantId,
    /// The route that answers its lines.
    pub endpoint: String,
    /// The file of its lines.
    pub input_file: String,
    /// The file of its answers, once it is there.
    pub output_file: String,
    /// The file of its errors, once it is there.
    pub error_file: String,
    /// Whether the file of answers is there.
    pub has_output: bool,
    /// Whether the file of errors is there.
    pub has_errors: bool,
    /// Where it is.
    pub status: BatchStatus,
    /// What is wrong with its file.
    pub faults: Vec<BatchFault>,
    /// Its lines.
    pub counts: BatchCounts,
    /// What its caller wrote on it.
    pub metadata: BTreeMap<String, String>,
    /// In seconds since 1970, as everything here.
    pub created_unix_seconds: u64,
    /// When its time is over.
    pub expires_unix_seconds: u64,
    /// When it came into each state.
    pub reached_unix_seconds: BTreeMap<BatchStatus, u64>,
}

/// A file that a caller handed in or that a batch made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// What its caller knows it by; also the name of its content.
    pub name: String,
    /// Whose it is.
    pub tenant: TenantId,
    /// What its caller calls it.
    pub filename: String,
    /// What it is for.
    pub purpose: String,
    /// How large it is.
    pub size_bytes: u64,
    /// When it came.
    pub created_unix_seconds: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_can_end_and_what_has_ended_stays() {
        use BatchStatus::{Cancelled, Cancelling, Completed, Expired, Failed, Finalizing, InProgress, Validating};
        for last in [Failed, Completed, Expired, Cancelled] {
            assert!(last.is_final(), "{last:?}");
        }
        for going in [Validating, InProgress, Finalizing, Cancelling] {
            assert!(!going.is_final(), "{going:?}");
        }
        assert_eq!(InProgress.after(BatchStep::TakenBack), Some(Cancelling));
        assert_eq!(Finalizing.after(BatchStep::TakenBack), None, "its answers are all there");
    }
}
