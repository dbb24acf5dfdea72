//! The spare: an engine process that has started and initialised itself before anybody needs it.
//!
//! Its memory lies in the reserve. A load takes it, even while it is still starting; the next one is started only when
//! no load is under way.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};
use tokio::sync::oneshot;
use warmset_engine::{
    child::Role,
    process::{EngineProcess, Launcher, SpawnError, SpawnOptions},
};

/// How long an engine process may take to start.
pub(crate) const HELLO_DEADLINE: Duration = Duration::from_secs(30);

/// A spare that waits or is being started.
pub(crate) struct Spare {
    process: oneshot::Receiver<EngineProcess>,
    /// Its process number once it waits; 0 before.
    pid: Arc<AtomicU32>,
}

impl Spare {
    /// Starts one.
    pub(crate) fn start(launcher: &Launcher, log: PathBuf) -> Self {
        let (sender, process) = oneshot::channel();
        let pid = Arc::new(AtomicU32::new(0));
        let (launcher, known_pid) = (launcher.clone(), Arc::clone(&pid));
        tokio::spawn(async move {
            match spawn(&launcher, Role::Sealed, log).await {
                Ok(process) => {
                    known_pid.store(process.pid(), Ordering::SeqCst);
                    // If nobody wants it any more, dropping it ends it.
                    let _ = sender.send(process);
                }
                Err(error) => tracing::warn!(%error, "no spare engine; the next load starts one itself"),
            }
        });
        Self { process, pid }
    }

    /// The process, once it has started; none if it did not or has ended since.
    pub(crate) async fn take(self) -> Option<EngineProcess> {
        self.process.await.ok().filter(|process| !process.is_gone())
    }

    /// Its process number, if it waits.
    pub(crate) fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::SeqCst)).filter(|pid| *pid != 0)
    }
}

/// Starts an engine process.
pub(crate) async fn spawn(launcher: &Launcher, role: Role, log: PathBuf) -> Result<EngineProcess, SpawnError> {
    launcher.spawn_as(role, SpawnOptions { log, hello_deadline: HELLO_DEADLINE }).await
}
