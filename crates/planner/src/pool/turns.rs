//! An engine that does one thing after the other, as the synthetic one and llama.cpp's on a processor do: a piece of one
//! prompt, then one token of each answer, and so on.

use super::engine::NOTHING;
use warmset_core::RequestId;

/// One thing that it does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Stage {
    /// So many seconds of the prompt of this request.
    Reading(RequestId, f64),
    /// A token of each answer.
    Writing,
}

/// What it is at, and for how long still.
#[derive(Debug, Clone)]
pub(super) struct Turns {
    read_seconds: f64,
    stage: Option<Stage>,
    left_seconds: f64,
}

impl Turns {
    /// It has nothing to do, and reads at most so long in a step.
    pub(super) fn new(read_seconds: f64) -> Self {
        Self { read_seconds, stage: None, left_seconds: 0.0 }
    }

    /// Whether it has nothing to do.
    pub(super) fn is_idle(&self) -> bool {
        self.stage.is_none()
    }

    /// Begins with a piece of a prompt that has so many seconds left.
    pub(super) fn read(&mut self, request: RequestId, left_seconds: f64) {
        let seconds = left_seconds.min(self.read_seconds);
        self.begin(Some(Stage::Reading(request, seconds)), seconds);
    }

    /// Begins with a token of each answer.
    pub(super) fn write(&mut self, seconds: f64) {
        self.begin(Some(Stage::Writing), seconds);
    }

    /// Has nothing to do.
    pub(super) fn rest(&mut self) {
        (self.stage, self.left_seconds) = (None, 0.0);
    }

    fn begin(&mut self, stage: Option<Stage>, seconds: f64) {
        // What the stage before took too long is taken off.
        (self.stage, self.left_seconds) = (stage, seconds + self.left_seconds.min(0.0));
    }

    /// Seconds of computing pass.
    pub(super) fn advance(&mut self, seconds: f64) {
        if self.stage.is_some() {
            self.left_seconds -= seconds;
        }
    }

    /// Seconds of computing until it is through with what it does.
    pub(super) fn due_seconds(&self) -> Option<f64> {
        self.stage.map(|_| self.left_seconds.max(0.0))
    }

    /// What it is through with.
    pub(super) fn ended(&self) -> Option<Stage> {
        self.stage.filter(|_| self.left_seconds <= NOTHING)
    }
}
