//! What an engine does with its time: prompts one after the other, answers side by side.
//!
//! A prompt is read at the model's rate; a step writes one token of every answer under way and takes longer the more
//! there are. Reading is bound by arithmetic and writing by memory, so that neither slows the other down. Only what changes
//! is computed: from one change to the next everything goes on at a constant rate.

use super::{prompts::Prompts, scenario::Team};
use std::collections::{BTreeMap, VecDeque};
use warmset_core::{Digest, RequestId};

/// Less than this is nothing: what rounding to nanoseconds leaves.
const NOTHING: f64 = 1e-9;

/// What a request has before it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sequence {
    /// Seconds of reading.
    pub(super) read_left_seconds: f64,
    /// Tokens to write.
    pub(super) tokens_left: f64,
    /// Stopped between two steps.
    pub(super) stopped: bool,
}

impl Sequence {
    fn writes(&self) -> bool {
        self.read_left_seconds <= 0.0 && !self.stopped
    }
}

/// What has happened in an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// The first token of an answer.
    FirstToken(RequestId),
    /// Its last one.
    Finished(RequestId),
}

/// An engine that is loaded, or being loaded.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    pub(super) digest: Digest,
    pub(super) threads: u32,
    pub(super) prompts: Prompts,
    /// What its first request takes longer.
    pub(super) first_request_seconds: f64,
    step_seconds: f64,
    step_seconds_per_sequence: f64,
    sequences: BTreeMap<RequestId, Sequence>,
    reading: VecDeque<RequestId>,
}

impl Engine {
    pub(super) fn new(digest: Digest, team: &Team, threads: u32) -> Self {
        Self {
            digest,
            threads,
            prompts: Prompts::new(team.kept_tokens),
            first_request_seconds: team.first_request_seconds,
            step_seconds: team.decode_step_seconds,
            step_seconds_per_sequence: team.decode_step_seconds_per_sequence,
            sequences: BTreeMap::new(),
            reading: VecDeque::new(),
        }
    }

    /// A request begins, or goes on.
    pub(super) fn push(&mut self, request: RequestId, sequence: Sequence) {
        if sequence.read_left_seconds > 0.0 {
            self.reading.push_back(request);
        }
        self.sequences.insert(request, sequence);
    }

    /// A request leaves, with what it still has before it.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Sequence> {
        self.reading.retain(|other| *other != request);
        self.sequences.remove(&request)
    }

    /// Stops a request, or lets it go on; whether it is there.
    pub(super) fn set_stopped(&mut self, request: RequestId, stopped: bool) -> bool {
        let Some(sequence) = self.sequences.get_mut(&request) else { return false };
        sequence.stopped = stopped;
        true
    }

    /// Whether it has anything to compute and threads to do so.
    pub(super) fn is_busy(&self) -> bool {
        self.threads > 0 && self.sequences.values().any(|sequence| !sequence.stopped)
    }

    fn reads(&self) -> Option<RequestId> {
        let stopped = |request: &RequestId| self.sequences.get(request).is_none_or(|sequence| sequence.stopped);
        self.reading.iter().find(|request| !stopped(request)).copied()
    }

    /// How long one token of each answer takes.
    fn seconds_per_token(&self) -> f64 {
        let writers = self.sequences.values().filter(|sequence| sequence.writes()).count();
        self.step_seconds + self.step_seconds_per_sequence * writers.saturating_sub(1) as f64
    }

    /// Seconds of its own computing pass.
    pub(super) fn advance(&mut self, seconds: f64) {
        let (reads, per_token) = (self.reads(), self.seconds_per_token());
        let written = if per_token > 0.0 { seconds / per_token } else { f64::INFINITY };
        for (request, sequence) in &mut self.sequences {
            if sequence.writes() {
                sequence.tokens_left -= written;
            } else if Some(*request) == reads {
                sequence.read_left_seconds -= seconds;
            }
        }
    }

    /// Seconds of its own computing until something happens.
    pub(super) fn due_seconds(&self) -> Option<f64> {
        let (reads, per_token) = (self.reads(), self.seconds_per_token());
        let due = self.sequences.iter().filter_map(|(request, sequence)| {
            if sequence.writes() {
                Some(sequence.tokens_left * per_token)
            } else {
                (Some(*request) == reads).then_some(sequence.read_left_seconds)
            }
        });
        due.min_by(f64::total_cmp).map(|seconds| seconds.max(0.0))
    }

    /// What has happened by now.
    pub(super) fn take_due(&mut self, happened: &mut Vec<Progress>) {
        let reads = self.reads();
        for (request, sequence) in &mut self.sequences {
            if Some(*request) == reads && sequence.read_left_seconds <= NOTHING {
                sequence.read_left_seconds = 0.0;
                // The step that ends the reading writes the first token.
                sequence.tokens_left -= 1.0;
                happened.push(Progress::FirstToken(*request));
            }
            if sequence.writes() && sequence.tokens_left <= NOTHING {
                happened.push(Progress::Finished(*request));
            }
        }
        for progress in &*happened {
            match progress {
                Progress::FirstToken(request) => self.reading.retain(|other| other != request),
                Progress::Finished(request) => {
                    self.sequences.remove(request);
                }
            }
        }
    }
}
