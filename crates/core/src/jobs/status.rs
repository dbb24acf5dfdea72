//! A job's life as a table: from which state which step leads where. What is not in the table does not happen.

use serde::{Deserialize, Serialize};

/// Where a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobStatus {
    /// It waits for its turn.
    Queued,
    /// Its model is being loaded for it.
    Loading,
    /// An engine works on it.
    Running,
    /// It has its answer.
    Succeeded,
    /// Its answer is an error.
    Failed,
    /// Its caller took it back.
    Cancelled,
    /// It was not answered in the time it had.
    Expired,
}

/// What happens to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Its model began to load.
    LoadBegan,
    /// An engine began.
    EngineBegan,
    /// It goes back to wait: nobody could run it now, or the server that ran it is gone.
    Returned,
    /// It was answered.
    Answered,
    /// It failed for good.
    Failed,
    /// Its caller took it back.
    Cancelled,
    /// Its time is over.
    TimeOver,
}

/// Every step there is.
pub const TRANSITIONS: [(JobStatus, Step, JobStatus); 18] = [
    (JobStatus::Queued, Step::LoadBegan, JobStatus::Loading),
    (JobStatus::Queued, Step::EngineBegan, JobStatus::Running),
    (JobStatus::Queued, Step::Returned, JobStatus::Queued),
    // An answer may come so soon that nobody heard of its beginning.
    (JobStatus::Queued, Step::Answered, JobStatus::Succeeded),
    (JobStatus::Queued, Step::Failed, JobStatus::Failed),
    (JobStatus::Queued, Step::Cancelled, JobStatus::Cancelled),
    (JobStatus::Queued, Step::TimeOver, JobStatus::Expired),
    (JobStatus::Loading, Step::EngineBegan, JobStatus::Running),
    (JobStatus::Loading, Step::Returned, JobStatus::Queued),
    (JobStatus::Loading, Step::Answered, JobStatus::Succeeded),
    (JobStatus::Loading, Step::Failed, JobStatus::Failed),
    (JobStatus::Loading, Step::Cancelled, JobStatus::Cancelled),
    (JobStatus::Loading, Step::TimeOver, JobStatus::Expired),
    (JobStatus::Running, Step::Returned, JobStatus::Queued),
    (JobStatus::Running, Step::Answered, JobStatus::Succeeded),
    (JobStatus::Running, Step::Failed, JobStatus::Failed),
    (JobStatus::Running, Step::Cancelled, JobStatus::Cancelled),
    (JobStatus::Running, Step::TimeOver, JobStatus::Expired),
];

impl JobStatus {
    /// All of them, in the order of a life.
    pub const ALL: [Self; 7] =
        [Self::Queued, Self::Loading, Self::Running, Self::Succeeded, Self::Failed, Self::Cancelled, Self::Expired];

    /// Where a step leads; none if there is no such step from here.
    pub fn after(self, step: Step) -> Option<Self> {
        TRANSITIONS.iter().find(|(from, taken, _)| (*from, *taken) == (self, step)).map(|(_, _, to)| *to)
    }

    /// Whether nothing follows.
    pub fn is_final(self) -> bool {
        TRANSITIONS.iter().all(|(from, _, _)| *from != self)
    }

    /// Those that something follows.
    pub fn unfinished() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|status| !status.is_final())
    }

    /// The name used in the API and the catalog.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Loading => "loading",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
        }
    }

    /// Reads that name.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_states_are_last_and_the_others_are_not() {
        let last = JobStatus::ALL.map(JobStatus::is_final);
        assert_eq!(last, [false, false, false, true, true, true, true]);
    }

    #[test]
    fn every_state_that_is_not_last_can_end_in_every_way_and_be_returned() {
        for status in JobStatus::ALL.into_iter().filter(|status| !status.is_final()) {
            assert_eq!(status.after(Step::Answered), Some(JobStatus::Succeeded));
            assert_eq!(status.after(Step::Failed), Some(JobStatus::Failed));
            assert_eq!(status.after(Step::Cancelled), Some(JobStatus::Cancelled));
            assert_eq!(status.after(Step::TimeOver), Some(JobStatus::Expired));
            assert_eq!(status.after(Step::Returned), Some(JobStatus::Queued));
        }
    }

    #[test]
    fn no_step_stands_twice_and_names_read_back() {
        for (index, (from, step, _)) in TRANSITIONS.iter().enumerate() {
            assert!(TRANSITIONS[..index].iter().all(|(other, taken, _)| (other, taken) != (from, step)));
        }
        for status in JobStatus::ALL {
            assert_eq!(JobStatus::parse(status.as_str()), Some(status));
        }
        assert_eq!(JobStatus::parse("done"), None);
    }
}
