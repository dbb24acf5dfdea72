//! The KV tier of this machine: the run loop of `core::kv::Tier`, and the memory and files that it decides about.
//!
//! Engines put whole states out into a staging area of their own; blocks are cut out of it, checked and put into the
//! arena of the model's KV, which its engines can only read. Bytes never pass through the loop itself.

mod disk;
mod engines;
mod gather;
mod models;
mod run_loop;

pub use disk::DiskConfig;
pub(crate) use engines::{Client, KvOrder};

use run_loop::RunLoop;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::{mpsc, oneshot};
use warmset_core::{
    Bytes, Digest, RequestId,
    kv::{BlockKey, Event, KvIdentity, SaveId, TierSettings, TierView, TrustDomain},
};
use warmset_engine::protocol::{KvLayout, SaveWanted};

use crate::{config::Clock, handle::Command};
use warmset_store::StoreError;

/// How the tier is kept.
#[derive(Debug, Clone)]
pub struct KvConfig {
    /// Limits and first guesses.
    pub settings: TierSettings,
    /// Where blocks lie on disk, if anywhere.
    pub disk: Option<DiskConfig>,
    /// Whether each restored sequence is compared with the blocks that it was made of.
    pub verify: bool,
}

/// An engine process that may use the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Life(u64);

/// What the loop is told.
pub(crate) enum KvCommand {
    /// A model is loaded whose KV can be cut.
    Open {
        model: Digest,
        layout: KvLayout,
        build: String,
        context_tokens: u32,
        orders: mpsc::UnboundedSender<KvOrder>,
    },
    /// A request may begin.
    Ask {
        life: Life,
        request: RequestId,
        keys: Vec<BlockKey>,
        prompt_tokens: u32,
        device_tokens: u32,
    },
    Ended {
        request: RequestId,
    },
    Restored {
        request: RequestId,
        first_block: u32,
        blocks: u32,
        seconds: f64,
    },
    Rejected {
        request: RequestId,
        block: u32,
        reason: String,
    },
    Verified {
        request: RequestId,
        blocks: u32,
    },
    SaveWanted {
        life: Life,
        wanted: SaveWanted,
    },
    Saved {
        life: Life,
        save: u64,
        bytes: u64,
    },
    Prefilled {
        life: Life,
        from_token: u32,
        to_token: u32,
        seconds: f64,
    },
    /// The engine process is gone.
    Close {
        life: Life,
    },
    /// What the disk has done.
    Disk(Event),
    Gathered {
        save: SaveId,
        ok: bool,
    },
    /// Who is told when blocks leave for want of room.
    Listen(mpsc::UnboundedSender<Command>),
    LimitHost(Bytes),
    View(oneshot::Sender<TierView>),
    Purge(TrustDomain, Answer),
    /// Models that there are: what is kept of others goes.
    ForgetAllBut(BTreeSet<Digest>, Answer),
    /// All that is on disk of models that went was told of by now, or the disk has not answered.
    Forgotten {
        gone: Vec<KvIdentity>,
        found: bool,
        answer: Answer,
    },
}

/// Why something that was to be kept nowhere any more may still be on the disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotErased {
    /// The disk takes its time.
    #[error("nothing finds it any more, but the disk has not given its bytes back in time: try again later")]
    Late,
    /// The disk cannot.
    #[error("the KV directory cannot be cleared: {reason}")]
    Failed {
        /// In words.
        reason: String,
    },
    /// There is no tier.
    #[error("the KV tier has ended")]
    Ended,
}

/// Where it is told how that went.
pub(crate) type Answer = oneshot::Sender<Result<(), NotErased>>;

fn answer(answers: impl IntoIterator<Item = Answer>, erased: &Result<(), NotErased>) {
    for answer in answers {
        // Whoever asked may have gone.
        let _ = answer.send(erased.clone());
    }
}

/// The tier, from outside. Clones talk to the same one.
#[derive(Clone)]
pub struct KvHandle {
    commands: mpsc::UnboundedSender<KvCommand>,
    /// The limit that was told last.
    limit: Arc<AtomicU64>,
    /// Host bytes that blocks take now.
    held: Arc<AtomicU64>,
}

impl KvHandle {
    /// Starts the tier. Call it within a Tokio runtime.
    pub fn start(config: KvConfig, clock: Clock) -> Result<Self, StoreError> {
        let (commands, receiver) = mpsc::unbounded_channel();
        let held = Arc::new(AtomicU64::new(0));
        tokio::spawn(RunLoop::new(config, clock, commands.downgrade(), Arc::clone(&held))?.run(receiver));
        Ok(Self { commands, limit: Arc::new(AtomicU64::new(u64::MAX)), held })
    }

    /// What there is and what it was good for; none if the tier has ended.
    pub async fn view(&self) -> Option<TierView> {
        let (answer, receiver) = oneshot::channel();
        self.tell(KvCommand::View(answer));
        receiver.await.ok()
    }

    /// Resolves once the tier has ended, however that came.
    pub async fn ended(&self) {
        self.commands.closed().await;
    }

    /// Whether nobody is there any more who could answer.
    pub(crate) fn has_ended(&self) -> bool {
        self.commands.is_closed()
    }

    /// Host bytes that blocks take now.
    pub fn host_bytes(&self) -> Bytes {
        self.held.load(Ordering::Relaxed)
    }

    /// Tells an agent from now on when blocks leave that models take the room of.
    pub(crate) fn tell_pressure_to(&self, agent: mpsc::UnboundedSender<Command>) {
        self.tell(KvCommand::Listen(agent));
    }

    /// How much host memory blocks may take from now on.
    pub(crate) fn limit_host(&self, bytes: Bytes) {
        if self.limit.swap(bytes, Ordering::Relaxed) != bytes {
            self.tell(KvCommand::LimitHost(bytes));
        }
    }

    /// Keeps nothing of a trust domain any more. Resolves when nothing of it is on the disk.
    pub async fn purge(&self, domain: TrustDomain) -> Result<(), NotErased> {
        self.erase(|answer| KvCommand::Purge(domain, answer)).await
    }

    /// Keeps nothing any more of models but these: others were removed. Resolves when nothing of those is on the disk.
    pub async fn forget_all_but(&self, models: BTreeSet<Digest>) -> Result<(), NotErased> {
        self.erase(|answer| KvCommand::ForgetAllBut(models, answer)).await
    }

    async fn erase(&self, command: impl FnOnce(Answer) -> KvCommand) -> Result<(), NotErased> {
        let (answer, erased) = oneshot::channel();
        self.tell(command(answer));
        erased.await.unwrap_or(Err(NotErased::Ended))
    }

    fn tell(&self, command: KvCommand) {
        // A tier that has ended keeps nothing, and nobody waits for it.
        let _ = self.commands.send(command);
    }
}
