//! One engine's side of the tier: what its life tells the loop, and what the loop wants of it.

use super::{KvCommand, KvHandle, Life};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use tokio::sync::mpsc;
use warmset_core::{
    Digest, RequestId,
    inference::{Timings, Usage},
    kv::{BlockKey, TrustDomain},
};
use warmset_engine::{
    process::EngineProcess,
    protocol::{FromEngine, KvGrant, KvLayout, KvOpen, ToEngine},
};
use warmset_store::arena::{Arena, Staging};

/// What the loop wants of an engine.
pub(crate) enum KvOrder {
    /// Its memory, and what it is known by from now on.
    Open { life: Life, open: KvOpen, arena: Arc<Arena>, staging: Arc<Staging> },
    /// It gets none: nothing of its KV is kept.
    Nothing,
    /// Something to say to it.
    Say(ToEngine),
}

/// A request that is tokenised and has not begun.
struct Prepared {
    keys: Vec<BlockKey>,
    prompt_tokens: u32,
    device_tokens: u32,
}

/// What one life knows of the tier.
pub(crate) struct Client {
    handle: KvHandle,
    orders: mpsc::UnboundedReceiver<KvOrder>,
    sender: mpsc::UnboundedSender<KvOrder>,
    life: Option<Life>,
    /// Requests of a trust domain: those that may use what is kept.
    sharing: HashSet<RequestId>,
    prepared: HashMap<RequestId, Prepared>,
    /// Requests that took blocks in while they computed: how long what they computed took cannot be told.
    split: HashSet<RequestId>,
    /// Saves that are not over.
    saves: HashSet<u64>,
}

impl Client {
    pub(crate) fn new(handle: KvHandle) -> Self {
        let (sender, orders) = mpsc::unbounded_channel();
        Self {
            handle,
            orders,
            sender,
            life: None,
            sharing: HashSet::new(),
            prepared: HashMap::new(),
            split: HashSet::new(),
            saves: HashSet::new(),
        }
    }

    /// The model is loaded. Whether its memory, or that it gets none, is to be waited for: then its first request finds
    /// what is kept like every other.
    pub(crate) fn open(&mut self, model: Digest, layout: KvLayout, build: &str, context_tokens: u32) -> bool {
        if self.handle.has_ended() {
            return false;
        }
        let orders = self.sender.clone();
        self.handle.tell(KvCommand::Open { model, layout, build: build.to_owned(), context_tokens, orders });
        true
    }

    /// What is to be said to the engine next.
    pub(crate) async fn next(&mut self) -> KvOrder {
        match self.orders.recv().await {
            Some(order) => order,
            // It holds a sender itself.
            None => std::future::pending().await,
        }
    }

    /// Carries an order out.
    pub(crate) fn obey(&mut self, order: KvOrder, process: &EngineProcess) {
        match order {
            KvOrder::Open { life, open, arena, staging } => {
                self.life = Some(life);
                if let Err(error) = process.send_descriptors(&[arena.descriptor(), staging.descriptor()]) {
                    tracing::error!(%error, "an engine gets no memory for its KV");
                    return;
                }
                process.send(ToEngine::KvOpen(open));
            }
            KvOrder::Nothing => {}
            KvOrder::Say(message) => {
                match &message {
                    ToEngine::SaveSkip { save } | ToEngine::SaveEnd { save } => drop(self.saves.remove(save)),
                    ToEngine::Grant { request, source: KvGrant::Blocks { first: 1.., .. } } => {
                        self.split.insert(RequestId(*request));
                    }
                    _ => {}
                }
                process.send(message);
            }
        }
    }

    /// A request begins; only those of a domain leave anything behind.
    pub(crate) fn begin(&mut self, request: RequestId, domain: Option<TrustDomain>) {
        if domain.is_some() {
            self.sharing.insert(request);
        }
    }

    /// A request may compute: its grant comes from the tier if that could have something of it.
    pub(crate) fn grant(&mut self, request: RequestId, process: &EngineProcess) {
        let prepared = self.prepared.remove(&request).filter(|prepared| !prepared.keys.is_empty());
        let may_share = self.sharing.contains(&request) && !self.handle.has_ended();
        match (self.life, prepared) {
            (Some(life), Some(prepared)) if may_share => self.handle.tell(KvCommand::Ask {
                life,
                request,
                keys: prepared.keys,
                prompt_tokens: prepared.prompt_tokens,
                device_tokens: prepared.device_tokens,
            }),
            _ => process.send(ToEngine::Grant { request: request.0, source: KvGrant::Recompute { known: 0 } }),
        }
    }

    /// Whether the engine is in the middle of saving something.
    pub(crate) fn is_saving(&self) -> bool {
        !self.saves.is_empty()
    }

    /// What an engine says of its KV. Gives back what it does not concern.
    pub(crate) fn hear(&mut self, message: FromEngine) -> Option<FromEngine> {
        match message {
            FromEngine::Prepared { request, prompt_tokens, device_tokens, keys } => {
                self.prepared.insert(RequestId(request), Prepared { keys, prompt_tokens, device_tokens });
                return Some(FromEngine::Prepared { request, prompt_tokens, device_tokens, keys: Vec::new() });
            }
            FromEngine::Restored { request, first_block, blocks, seconds } => {
                self.handle.tell(KvCommand::Restored { request: RequestId(request), first_block, blocks, seconds });
            }
            FromEngine::KvRejected { request, block, reason } => {
                self.handle.tell(KvCommand::Rejected { request: RequestId(request), block, reason });
            }
            FromEngine::KvVerified { request, blocks } => {
                self.handle.tell(KvCommand::Verified { request: RequestId(request), blocks });
            }
            FromEngine::SaveWanted(wanted) => {
                if let Some(life) = self.life {
                    self.saves.insert(wanted.save);
                    self.handle.tell(KvCommand::SaveWanted { life, wanted });
                }
            }
            FromEngine::Saved { save, bytes } => {
                if let Some(life) = self.life {
                    self.handle.tell(KvCommand::Saved { life, save, bytes });
                }
            }
            other => return Some(other),
        }
        None
    }

    /// A request has had its last answer.
    pub(crate) fn end(&mut self, request: RequestId, done: Option<(&Usage, &Timings)>) {
        self.prepared.remove(&request);
        let split = self.split.remove(&request);
        if !self.sharing.remove(&request) {
            return;
        }
        self.handle.tell(KvCommand::Ended { request });
        if let (Some(life), Some((usage, timings))) = (self.life, done.filter(|_| !split)) {
            let (from_token, to_token) = (usage.cached_tokens, usage.prompt_tokens);
            self.handle.tell(KvCommand::Prefilled { life, from_token, to_token, seconds: timings.prefill_seconds });
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Its memory may be on the way still.
        let coming = std::iter::from_fn(|| self.orders.try_recv().ok()).find_map(|order| match order {
            KvOrder::Open { life, .. } => Some(life),
            KvOrder::Nothing | KvOrder::Say(_) => None,
        });
        let life = self.life.or(coming);
        for request in self.sharing.drain() {
            self.handle.tell(KvCommand::Ended { request });
        }
        if let Some(life) = life {
            self.handle.tell(KvCommand::Close { life });
        }
    }
}
