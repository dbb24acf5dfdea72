//! The port that every engine implements inside its process. One thread drives it: messages first, then one step.

use crate::{
    kv::{KvMemory, ParkedMemory},
    protocol::{FromEngine, KvOpen, LoadRequest, LoadedInfo, ToEngine},
};
use std::time::Instant;

/// Where an engine puts what it has to say.
pub type Report<'a> = &'a mut dyn FnMut(FromEngine);

/// Why a model cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadFailure {
    /// What is wrong and what to do.
    pub message: String,
    /// What is at fault.
    pub fault: LoadFault,
}

/// What is at fault when a model cannot be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadFault {
    /// The artifact or its settings: no further try will succeed until they change.
    Artifact,
    /// There is less memory than it needs.
    Memory,
    /// Something that may pass.
    Passing,
}

impl LoadFault {
    /// The artifact's fault, or one that may pass.
    pub fn from_permanent(permanent: bool) -> Self {
        if permanent { Self::Artifact } else { Self::Passing }
    }
}

/// An implementation of inference. `load` is called once, before anything else.
pub trait Engine {
    /// Loads, makes a first discarded computation, and reports progress on the way.
    fn load(&mut self, request: &LoadRequest, report: Report<'_>) -> Result<LoadedInfo, LoadFailure>;

    /// Takes the tier's memory. An engine whose KV cannot be cut ignores it.
    fn open_kv(&mut self, open: KvOpen, memory: KvMemory);

    /// Takes `Generate`, `Embed`, `Grant`, `Cancel`, `SetThreads`, `Park`, `ParkStop` or an answer about a save; the
    /// others never arrive here.
    fn handle(&mut self, message: ToEngine, report: Report<'_>);

    /// Puts a stopped request into this memory, and says whether it has.
    fn park(&mut self, request: u64, memory: ParkedMemory, report: Report<'_>);

    /// Goes on with what another engine of this model put into this memory.
    fn resume(&mut self, request: u64, memory: ParkedMemory, report: Report<'_>);

    /// Whether a step would do something now (with at least one thread).
    fn has_work(&self) -> bool;

    /// When a step, or `tidy`, may do something without a message, if it does nothing now.
    fn next_timer(&self) -> Option<Instant> {
        None
    }

    /// Gives back what was kept long enough. Called when `next_timer` has come and no step is to be made.
    fn tidy(&mut self) {}

    /// One bounded step over all sequences: at most one batch.
    fn step(&mut self, report: Report<'_>);
}
