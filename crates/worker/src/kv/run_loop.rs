//! The only owner of the tier: tells it what happens and does what it wants.

use super::{
    Answer, KvCommand, KvConfig, KvOrder, Life, NotErased, answer, disk::Disk, gather::Gathering, models::Models,
};
use crate::{config::Clock, handle::Command, timer::until};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender};
use warmset_core::{
    Digest, Machine, RequestId,
    kv::{Action, BlockNumber, Event, HEADER_BYTES, KvIdentity, SaveId, Tier, TierView, slot_bytes},
    worker,
};
use warmset_engine::protocol::{KvGrant, KvLayout, KvOpen, SaveWanted, StateLayout, ToEngine};
use warmset_store::{
    StoreError,
    arena::{Arena, SLOTS_MAX, Staging},
};

/// Shows in the system's lists of mappings, so that memory of the tier is told from an engine's own.
const ARENA_NAME: &str = "warmset-kv-arena";
const STAGING_NAME: &str = "warmset-kv-staging";

/// An engine that uses the tier.
struct Engine {
    identity: KvIdentity,
    layout: StateLayout,
    staging: Arc<Staging>,
    orders: UnboundedSender<KvOrder>,
}

/// A save on its way.
struct Save {
    life: Life,
    /// The engine's own number for it.
    number: u64,
    wanted: SaveWanted,
}

pub(super) struct RunLoop {
    tier: Tier,
    host_bytes_max: u64,
    verify: bool,
    clock: Clock,
    commands: WeakUnboundedSender<KvCommand>,
    arenas: HashMap<KvIdentity, Arc<Arena>>,
    disk: Option<Disk>,
    /// Who shares out the memory.
    agent: Option<UnboundedSender<Command>>,
    /// Where the host bytes of blocks are told.
    held: Arc<AtomicU64>,
    engines: BTreeMap<Life, Engine>,
    requests: HashMap<RequestId, Life>,
    saves: BTreeMap<SaveId, Save>,
    /// Where blocks that are being read go.
    reads: HashMap<BlockNumber, (KvIdentity, u32)>,
    /// Slots that a hanging read may still write into.
    held_slots: Vec<(KvIdentity, u32)>,
    models: Models,
    /// Who waits for a purge of the disk that is to begin.
    erasing: Vec<Answer>,
    last_life: u64,
    last_save: u64,
}

impl RunLoop {
    pub(super) fn new(
        config: KvConfig,
        clock: Clock,
        commands: WeakUnboundedSender<KvCommand>,
        held: Arc<AtomicU64>,
    ) -> Result<Self, StoreError> {
        let directory = config.disk.as_ref().map(|disk| disk.directory.clone());
        let disk = config.disk.map(|disk| Disk::open(disk, commands.clone())).transpose()?;
        let models = directory
            .map(|path| Models::read(&path).map_err(|error| StoreError::Directory { what: "read", path, error }));
        Ok(Self {
            disk,
            agent: None,
            held,
            host_bytes_max: config.settings.host_bytes_max,
            verify: config.verify,
            tier: Tier::new(config.settings),
            clock,
            commands,
            arenas: HashMap::new(),
            engines: BTreeMap::new(),
            requests: HashMap::new(),
            saves: BTreeMap::new(),
            reads: HashMap::new(),
            held_slots: Vec::new(),
            models: models.transpose()?.unwrap_or_default(),
            erasing: Vec::new(),
            last_life: 0,
            last_save: 0,
        })
    }

    pub(super) async fn run(mut self, mut commands: UnboundedReceiver<KvCommand>) {
        loop {
            let timer = self.tier.next_timer().map(|at| tokio::time::Instant::now() + self.clock.until(at));
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => return,
                },
                () = until(timer) => self.happen(Event::Timer),
            }
        }
    }

    fn obey(&mut self, command: KvCommand) {
        self.release_slots();
        match command {
            KvCommand::Open { model, layout, build, context_tokens, orders } => {
                self.open(model, &layout, &build, context_tokens, orders);
            }
            KvCommand::Ask { life, request, keys, prompt_tokens, device_tokens } => {
                let Some(engine) = self.engines.get(&life) else { return };
                let identity = engine.identity;
                self.requests.insert(request, life);
                self.happen(Event::Asked { request, identity, keys, prompt_tokens, device_tokens });
            }
            KvCommand::Ended { request } => {
                self.requests.remove(&request);
                self.happen(Event::Ended { request });
            }
            KvCommand::Restored { request, first_block, blocks, seconds } => {
                self.happen(Event::Restored { request, first_block, blocks, seconds });
            }
            KvCommand::Rejected { request, block, reason } => {
                tracing::warn!(request = request.0, block, reason, "an engine refused a block of KV");
                self.happen(Event::Rejected { request, block, reason });
            }
            KvCommand::Verified { request, blocks } => self.happen(Event::Verified { request, blocks }),
            KvCommand::SaveWanted { life, wanted } => self.save_wanted(life, wanted),
            KvCommand::Saved { life, save, bytes } => self.saved(life, save, bytes),
            KvCommand::Prefilled { life, from_token, to_token, seconds } => {
                if let Some(engine) = self.engines.get(&life) {
                    let identity = engine.identity;
                    self.happen(Event::Prefilled { identity, from_token, to_token, seconds });
                }
            }
            KvCommand::Close { life } => self.close(life),
            KvCommand::Gathered { save, ok } => {
                self.end_save(save);
                self.happen(Event::Gathered { save, ok });
            }
            KvCommand::Disk(mut event) => {
                if let Event::Written { others_bytes, .. } | Event::Found { others_bytes, .. } = &mut event {
                    *others_bytes = self.disk.as_ref().map_or(0, Disk::others_bytes);
                }
                if let Event::ReadDone { block, failure, .. } = &event {
                    let place = self.reads.remove(block);
                    self.held_slots.extend(place.filter(|_| failure.as_ref().is_some_and(|one| one.slot_is_held)));
                }
                self.happen(event);
            }
            KvCommand::Listen(agent) => self.agent = Some(agent),
            KvCommand::LimitHost(bytes) => self.happen(Event::HostLimit { bytes }),
            KvCommand::View(answer) => {
                let disk_bytes = self.disk.as_ref().map_or(0, Disk::used_bytes);
                let disk_fault = self.disk.as_ref().and_then(Disk::fault);
                // Whoever asked may have gone.
                let _ = answer.send(TierView { disk_bytes, disk_fault, ..self.tier.view() });
            }
            KvCommand::Purge(domain, asker) => {
                self.engines.values().for_each(|engine| say(engine, ToEngine::KvForget { domain }));
                self.erasing.push(asker);
                self.happen(Event::Purge { domain });
                // Without a disk nobody else has anything.
                answer(self.erasing.drain(..), &Ok(()));
            }
            KvCommand::ForgetAllBut(models, asker) => self.forget_all_but(&models, asker),
            KvCommand::Forgotten { gone, found, answer: asker } => self.end_forgetting(gone, found, asker),
        }
    }

    fn forget_all_but(&mut self, models: &BTreeSet<Digest>, asker: Answer) {
        let gone = self.models.forget_all_but(models);
        gone.iter().for_each(|identity| self.happen(Event::Forget { identity: *identity }));
        match &self.disk {
            Some(disk) if !gone.is_empty() => {
                disk.when_found(move |found| KvCommand::Forgotten { gone, found, answer: asker });
            }
            _ => answer([asker], &Ok(())),
        }
    }

    /// What is left of models that went is given up by now. Whose it was is noted until it has left the disk: whoever is
    /// killed before that goes on with it at the next start.
    fn end_forgetting(&mut self, gone: Vec<KvIdentity>, found: bool, asker: Answer) {
        let notes = self.models.notes_of(&gone);
        match &self.disk {
            Some(disk) => disk.when_cleared(move |cleared| {
                let erased = cleared.and(if found { Ok(()) } else { Err(NotErased::Late) });
                if erased.is_ok() {
                    notes.remove();
                }
                answer([asker], &erased);
            }),
            None => answer([asker], &Ok(())),
        }
    }

    /// Hanging reads end at some time: then their slots are free again.
    fn release_slots(&mut self) {
        let arenas = &self.arenas;
        let is_free = |(identity, slot): &mut (KvIdentity, u32)| {
            arenas.get(identity).is_none_or(|arena| arena.writer(*slot).is_some())
        };
        let released: Vec<(KvIdentity, u32)> = self.held_slots.extract_if(.., is_free).collect();
        for (identity, slot) in released {
            self.happen(Event::SlotReleased { identity, slot });
        }
    }

    /// Gives an engine its memory, or says that it gets none: it waits for that.
    fn open(
        &mut self,
        model: Digest,
        layout: &KvLayout,
        build: &str,
        context_tokens: u32,
        orders: UnboundedSender<KvOrder>,
    ) {
        let identity = KvIdentity::new(&model, &layout.description, build);
        let payload_bytes = u64::from(warmset_core::kv::BLOCK_TOKENS) * layout.state.cell_bytes();
        let slot_bytes = slot_bytes(payload_bytes);
        let staging_bytes = layout.state.state_bytes(u64::from(context_tokens));
        let Some((arena, staging)) = self.memory(&model, identity, slot_bytes, staging_bytes) else {
            // An engine that is gone waits for nothing.
            let _ = orders.send(KvOrder::Nothing);
            return;
        };
        self.last_life += 1;
        let life = Life(self.last_life);
        let open =
            KvOpen { identity, slot_bytes, slots: arena.slots(), staging_bytes: staging.bytes(), verify: self.verify };
        let order = KvOrder::Open { life, open, arena, staging: Arc::clone(&staging) };
        if orders.send(order).is_err() {
            // It has ended meanwhile.
            return;
        }
        self.engines.insert(life, Engine { identity, layout: layout.state.clone(), staging, orders });
        self.models.note(identity, model);
        self.happen(Event::Opened { model, identity, payload_bytes, slot_bytes });
    }

    /// The arena of a model's KV, and a staging area for one of its engines.
    fn memory(
        &mut self,
        model: &Digest,
        identity: KvIdentity,
        slot_bytes: u64,
        staging_bytes: u64,
    ) -> Option<(Arc<Arena>, Arc<Staging>)> {
        let slots = u32::try_from(self.host_bytes_max / slot_bytes).unwrap_or(SLOTS_MAX).min(SLOTS_MAX);
        if slots == 0 || slot_bytes == HEADER_BYTES as u64 {
            tracing::info!(%model, slot_bytes, "a block of this model's KV is larger than all of [kv] host; none is kept");
            return None;
        }
        let arena = match self.arenas.get(&identity) {
            Some(arena) => Ok(Arc::clone(arena)),
            None => Arena::create(ARENA_NAME, slot_bytes, slots),
        };
        let memory = arena.and_then(|arena| Ok((arena, Arc::new(Staging::create(STAGING_NAME, staging_bytes)?))));
        match memory {
            Ok((arena, staging)) => {
                self.arenas.insert(identity, Arc::clone(&arena));
                Some((arena, staging))
            }
            Err(error) => {
                tracing::error!(%model, %error, "no memory for KV; none is kept");
                None
            }
        }
    }

    /// An engine is gone: what it was asked, and what it was about to put out, is over.
    fn close(&mut self, life: Life) {
        let engine = self.engines.remove(&life);
        let over: Vec<RequestId> =
            self.requests.iter().filter(|(_, other)| **other == life).map(|(request, _)| *request).collect();
        for request in over {
            self.requests.remove(&request);
            self.happen(Event::Ended { request });
        }
        let saves: Vec<SaveId> =
            self.saves.iter().filter(|(_, save)| save.life == life).map(|(save, _)| *save).collect();
        for save in &saves {
            self.saves.remove(save);
        }
        self.happen(Event::SavesLost { saves });
        if let Some(engine) = engine {
            self.drop_arena_if_unused(engine.identity);
        }
    }

    /// An arena in which nothing lies, and which no engine has, goes: else each version of each model would leave one.
    fn drop_arena_if_unused(&mut self, identity: KvIdentity) {
        if self.tier.host_slots(&identity) == 0 && self.engines.values().all(|engine| engine.identity != identity) {
            self.arenas.remove(&identity);
        }
    }

    fn save_wanted(&mut self, life: Life, wanted: SaveWanted) {
        let Some(engine) = self.engines.get(&life) else { return };
        self.last_save += 1;
        let save = SaveId(self.last_save);
        let event = Event::SaveOffered {
            save,
            identity: engine.identity,
            domain: wanted.domain,
            parent: wanted.parent,
            first_block: wanted.first_block,
            keys: wanted.keys.clone(),
            state_bytes: engine.layout.state_bytes(u64::from(wanted.cells)),
        };
        self.saves.insert(save, Save { life, number: wanted.save, wanted });
        self.happen(event);
    }

    fn saved(&mut self, life: Life, number: u64, bytes: u64) {
        let found = self.saves.iter().find(|(_, save)| save.life == life && save.number == number);
        let Some((save, wanted)) = found.map(|(save, one)| (*save, &one.wanted)) else { return };
        let needed = self.engines.get(&life).map(|engine| engine.layout.state_bytes(u64::from(wanted.cells)));
        let ok = bytes > 0 && Some(bytes) == needed;
        if !ok {
            // First: what happens next may be a save that gives the same area its memory.
            self.end_save(save);
        }
        self.happen(Event::Staged { save, ok });
    }

    /// The staging area is free again.
    fn end_save(&mut self, save: SaveId) {
        if let Some(save) = self.saves.remove(&save)
            && let Some(engine) = self.engines.get(&save.life)
        {
            if let Err(error) = engine.staging.clear() {
                tracing::warn!(%error, "a staging area keeps its memory");
            }
            say(engine, ToEngine::SaveEnd { save: save.number });
        }
    }

    fn happen(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.tier.handle(self.clock.now(), event, &mut actions);
        self.held.store(self.tier.host_bytes(), Ordering::Relaxed);
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Grant { request, identity: _, first, slots, known } => {
                let engine = self.requests.get(&request).and_then(|life| self.engines.get(life));
                let Some(engine) = engine else { return };
                let source = match slots.is_empty() {
                    true => KvGrant::Recompute { known },
                    false => KvGrant::Blocks { first, slots, known },
                };
                say(engine, ToEngine::Grant { request: request.0, source });
            }
            Action::Coming { request, tokens } => {
                if let Some(engine) = self.requests.get(&request).and_then(|life| self.engines.get(life)) {
                    say(engine, ToEngine::KvComing { tokens });
                }
            }
            Action::SaveGo { save } => self.make_room(save),
            Action::SaveSkip { save } => {
                self.say_of_save(save, |save| ToEngine::SaveSkip { save });
                self.saves.remove(&save);
            }
            Action::Gather { save, identity, blocks } => self.gather(save, identity, blocks),
            Action::FreeSlot { identity, slot } => {
                if let Some(arena) = self.arenas.get(&identity)
                    && let Err(error) = arena.free(slot)
                {
                    tracing::warn!(%error, "a slot keeps its memory");
                }
                self.drop_arena_if_unused(identity);
            }
            Action::Read { block, identity, domain, key, place, slot } => {
                if let (Some(disk), Some(arena)) = (&self.disk, self.arenas.get(&identity)) {
                    self.reads.insert(block, (identity, slot));
                    disk.read(block, (identity, domain, key), place, (arena, slot));
                }
            }
            Action::Write { block, identity, slot } => {
                if let (Some(disk), Some(arena)) = (&self.disk, self.arenas.get(&identity)) {
                    disk.write(block, arena, slot);
                }
            }
            Action::Pressed { worth } => {
                if let Some(agent) = &self.agent {
                    // An agent that has ended holds no model.
                    let _ = agent.send(Command::Event(worker::Event::KvPressed { worth }));
                }
            }
            Action::Retire { place } => {
                if let Some(disk) = &self.disk {
                    disk.retire(place);
                }
            }
            Action::PurgeDisk { domain } => {
                if let Some(disk) = &self.disk {
                    disk.purge(domain, std::mem::take(&mut self.erasing));
                }
            }
        }
    }

    /// Gives the staging area its memory, so that it is the server's and not the engine's, then lets the engine write.
    fn make_room(&self, save: SaveId) {
        let engine = self.saves.get(&save).and_then(|one| Some((one, self.engines.get(&one.life)?)));
        let Some((one, engine)) = engine else { return };
        let bytes = engine.layout.state_bytes(u64::from(one.wanted.cells));
        let (staging, orders, number) = (Arc::clone(&engine.staging), engine.orders.clone(), one.number);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = staging.allocate(bytes) {
                tracing::warn!(%error, "no memory to save KV with");
            }
            // An engine that is gone needs no words. Without memory it says that it could not.
            let _ = orders.send(KvOrder::Say(ToEngine::SaveGo { save: number }));
        });
    }

    fn say_of_save(&self, save: SaveId, message: impl FnOnce(u64) -> ToEngine) {
        if let Some(save) = self.saves.get(&save)
            && let Some(engine) = self.engines.get(&save.life)
        {
            say(engine, message(save.number));
        }
    }

    fn gather(&mut self, save: SaveId, identity: KvIdentity, blocks: Vec<(u32, u32)>) {
        if blocks.is_empty() {
            self.end_save(save);
            return;
        }
        let gathering = self.saves.get(&save).and_then(|one| {
            let engine = self.engines.get(&one.life)?;
            Some(Gathering {
                identity,
                layout: engine.layout.clone(),
                wanted: one.wanted.clone(),
                staging: Arc::clone(&engine.staging),
                arena: Arc::clone(self.arenas.get(&identity)?),
                blocks,
            })
        });
        let (Some(gathering), Some(commands)) = (gathering, self.commands.upgrade()) else {
            self.happen(Event::Gathered { save, ok: false });
            return;
        };
        tokio::task::spawn_blocking(move || {
            let gathered = gathering.run();
            if let Err(error) = &gathered {
                tracing::error!(%error, "blocks of KV could not be taken out of an engine's state");
            }
            let _ = commands.send(KvCommand::Gathered { save, ok: gathered.is_ok() });
        });
    }
}

fn say(engine: &Engine, message: ToEngine) {
    // An engine that is gone needs no words.
    let _ = engine.orders.send(KvOrder::Say(message));
}
