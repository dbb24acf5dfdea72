//! The port that every engine implements inside its process. One thread drives it: messages first, then one step.

use crate::protocol::{FromEngine, LoadRequest, LoadedInfo, ToEngine};

/// Where an engine puts what it has to say.
pub type Report<'a> = &'a mut dyn FnMut(FromEngine);

/// Why a model cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFailure {
    /// What is wrong and what to do.
    pub message: String,
    /// No further try will succeed until the artifact or its settings change.
    pub permanent: bool,
}

/// An implementation of inference. `load` is called once, before anything else.
pub trait Engine {
    /// Loads, makes a first discarded computation, and reports progress on the way.
    fn load(&mut self, request: &LoadRequest, report: Report<'_>) -> Result<LoadedInfo, LoadFailure>;

    /// Takes `Generate`, `Embed`, `Grant`, `Cancel` or `SetThreads`; the others never arrive here.
    fn handle(&mut self, message: ToEngine, report: Report<'_>);

    /// Whether a step would do something now (with at least one thread).
    fn has_work(&self) -> bool;

    /// One bounded step over all sequences: at most one batch.
    fn step(&mut self, report: Report<'_>);
}
