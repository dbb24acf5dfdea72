//! What a worker is told at start.

use crate::kv::KvHandle;
use std::{path::PathBuf, sync::Arc, time::Duration};
use warmset_core::{
    ClockSpeed, Digest, Instant, WorkerId,
    rollout::Canary,
    worker::{LoadError, ModelSpec, Settings},
};
use warmset_engine::protocol::{CommandRequest, EngineKind};

/// Monotonic time since the server began. Copies share their origin, so that instants of different parts compare.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: std::time::Instant,
    speed: ClockSpeed,
}

impl Clock {
    /// A clock whose origin is `origin`.
    pub fn since(origin: std::time::Instant, speed: ClockSpeed) -> Self {
        Self { origin, speed }
    }

    /// A clock whose origin is now, as fast as time is.
    pub fn start() -> Self {
        Self::since(std::time::Instant::now(), ClockSpeed::default())
    }

    /// Time since the origin.
    pub fn now(&self) -> Instant {
        Instant::after(self.speed.inside(self.origin.elapsed()))
    }

    /// How long to wait until `instant`; zero if it has passed.
    pub fn until(&self, instant: Instant) -> Duration {
        self.speed.outside(instant.since(self.now()))
    }

    /// How much further it has gone since the origin than the clock on the wall.
    pub fn ahead(&self) -> Duration {
        let passed = self.origin.elapsed();
        self.speed.inside(passed).saturating_sub(passed)
    }

    /// How fast it goes.
    pub fn speed(&self) -> ClockSpeed {
        self.speed
    }
}

/// The port to the artifacts on this machine.
pub trait Artifacts: Send + Sync {
    /// Whether the files of this digest are what the digest says. Called on a thread that may block, before each load.
    fn verify(&self, digest: &Digest) -> Result<(), LoadError>;
}

/// What a worker needs to load one model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// What the machine decides on.
    pub spec: ModelSpec,
    /// The implementation.
    pub engine: EngineKind,
    /// The artifact's files, the first one being the one to open. Immutable.
    pub files: Vec<PathBuf>,
    /// Tokens one sequence may hold; 0 takes the model's own limit.
    pub context_tokens: u32,
    /// The command that serves it; only for [`EngineKind::Command`].
    pub command: Option<CommandRequest>,
    /// What it must answer after its first load here before it serves.
    pub canary: Option<Canary>,
}

/// What a worker is.
pub struct AgentConfig {
    /// Its identity in replies.
    pub worker: WorkerId,
    /// The limits it lives within.
    pub settings: Settings,
    /// The program that is started again, with the argument `engine`, as engine process.
    pub program: PathBuf,
    /// Directory for the logs of engines (`logs/<digest>.log`). Created if missing.
    pub data_dir: PathBuf,
    /// The kind of machine, under which measurements are kept.
    pub worker_type: String,
    /// Whether an initialised engine process waits for the next load.
    pub spare: bool,
    /// The artifacts of this machine.
    pub artifacts: Arc<dyn Artifacts>,
    /// Where KV outlives its request; none keeps none.
    pub kv: Option<KvHandle>,
    /// The clock of the server.
    pub clock: Clock,
}

/// Why an agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A directory or file that it needs.
    #[error("cannot use {path}: {source}; check that the directory exists and can be written")]
    File {
        /// What could not be used.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The thread that starts engines.
    #[error("cannot start the thread that starts engines: {0}")]
    Thread(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_clock_is_ahead_and_waits_less() {
        let minute = Duration::from_secs(60);
        let origin =
            std::time::Instant::now().checked_sub(Duration::from_secs(1)).expect("a machine is up for a second");
        let speed = ClockSpeed::new(240).expect("not zero");
        let clock = Clock::since(origin, speed);
        assert!(clock.now() >= Instant::after(4 * minute));
        assert!(clock.until(clock.now() + minute) <= Duration::from_millis(250));
        assert!(clock.ahead() >= Duration::from_secs(239));
        assert_eq!(Clock::since(origin, ClockSpeed::default()).ahead(), Duration::ZERO);
    }
}
