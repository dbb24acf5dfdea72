//! The KV tier of a simulated machine, and engines that look for, take in, compute and offer KV as real ones do.
//!
//! The tier is [`warmset_core::kv::Tier`]; here is what it would move. An engine computes one prompt at a time, keeps as many
//! finished sequences as it has, and is held up by no other engine.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};
use warmset_core::{
    Bytes, Digest, Instant, Machine, RequestId,
    kv::{
        Action, BLOCK_TOKENS, BlockKey, BlockNumber, DiskPlace, EARLY_SAVE_TOKENS, Event, KvIdentity, PAGE_BYTES,
        SaveId, Tier, TierSettings, TrustDomain, key, slot_bytes,
    },
    worker,
};

/// What a machine does with KV.
#[derive(Debug, Clone, PartialEq)]
pub struct KvCosts {
    /// Limits of the tier.
    pub tier: TierSettings,
    /// Between engines and host memory.
    pub copy_bytes_per_second: f64,
    /// Between host memory and disk, either way.
    pub disk_bytes_per_second: f64,
}

impl KvCosts {
    /// Where nothing is kept outside of engines, requests share nothing in them, either.
    fn keeps_kv(&self) -> bool {
        self.tier.host_bytes_max > 0 || self.tier.disk_bytes_max > 0
    }
}

/// What the engines of one model do with prompts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PromptCost {
    /// Bytes of KV; 0 if none is kept.
    pub kv_bytes_per_token: Bytes,
    /// Finished sequences that an engine keeps.
    pub sequences: usize,
    /// Computing one token of a prompt.
    pub prefill_token_seconds: f64,
    /// Computing one token of an answer.
    pub decode_token_seconds: f64,
}

/// What a request is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Whole blocks of the prompt and its answer.
    pub keys: Vec<BlockKey>,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

/// What came of prompts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptOutcome {
    /// When each request had its first token.
    pub first_tokens: Vec<(RequestId, Instant)>,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of those: found in sequences of engines.
    pub device_tokens: u64,
    /// And brought back from the tier.
    pub restored_tokens: u64,
}

/// Something that takes time.
#[derive(Debug)]
pub(super) enum Step {
    /// The tier hears of it.
    Tier(Event),
    /// An engine has computed a prompt so far, unless it was told something else since.
    Computed { request: RequestId, to_token: u32, round: u32 },
    /// An engine has taken blocks in.
    TakenIn { request: RequestId, first: u32, blocks: u32, seconds: f64 },
}

/// What follows, and when.
#[derive(Debug)]
pub(super) enum Outcome {
    Step(Duration, Step),
    Worker(Duration, worker::Event),
}

/// A sequence whose KV an engine still has.
#[derive(Debug)]
struct Held {
    number: u64,
    keys: Vec<BlockKey>,
}

/// A state on its way out of an engine.
#[derive(Debug)]
struct Save {
    digest: Digest,
    held: u64,
    state_bytes: Bytes,
}

#[derive(Debug)]
struct Engine {
    cost: PromptCost,
    identity: KvIdentity,
    slot_bytes: Bytes,
    held: VecDeque<Held>,
    /// Requests whose prompts are not computed, in the order in which they came.
    line: Vec<RequestId>,
    computes: Option<RequestId>,
}

#[derive(Debug)]
struct Asking {
    digest: Digest,
    prompt: Prompt,
    granted: bool,
    /// Blocks that are there for it and not taken in: the first one's place, and how many.
    blocks: Option<(u32, u32)>,
    known_blocks: u32,
    /// What it need not compute, or has computed.
    at_token: u32,
    /// Of that: what was found, and what of it its engine had.
    found_tokens: u32,
    device_tokens: u32,
    /// Since when it computes what comes after `at_token`.
    since: Instant,
    round: u32,
    was_offered: bool,
}

/// A tier, and what engines hold.
#[derive(Debug)]
pub(super) struct Kv {
    tier: Tier,
    costs: KvCosts,
    engines: BTreeMap<Digest, Engine>,
    requests: BTreeMap<RequestId, Asking>,
    /// Bytes of a block's slot.
    slots: BTreeMap<KvIdentity, Bytes>,
    saves: BTreeMap<SaveId, Save>,
    /// Blocks and states that are being moved.
    moves: usize,
    last_number: u64,
    limit_bytes: Option<Bytes>,
    disk_free_at: Instant,
    disk_page: u32,
    pub(super) follows: Vec<Outcome>,
    pub(super) outcome: PromptOutcome,
}

/// The domain of all requests.
fn domain() -> TrustDomain {
    TrustDomain::named("default")
}

/// The identity of a model's KV.
fn identity(digest: &Digest) -> KvIdentity {
    KvIdentity::new(digest, "simulated", "simulated")
}

/// The block with this content behind another one, or behind nothing.
pub fn block(digest: &Digest, parent: Option<&BlockKey>, content: &[u32]) -> BlockKey {
    let parent = parent.copied().unwrap_or_else(|| key::root(&identity(digest), &domain()));
    key::child(&parent, content)
}

fn blocks_of(tokens: u32) -> usize {
    (tokens / BLOCK_TOKENS) as usize
}

impl Engine {
    fn payload_bytes(&self) -> Bytes {
        self.cost.kv_bytes_per_token * u64::from(BLOCK_TOKENS)
    }

    /// Tokens of a prompt, in whole blocks and without its last one, that a sequence holds.
    fn look(&self, prompt: &Prompt) -> u32 {
        let keys = &prompt.keys[..blocks_of(prompt.tokens.saturating_sub(1))];
        let common = |held: &Held| held.keys.iter().zip(keys).take_while(|(one, other)| one == other).count();
        self.held.iter().map(common).max().unwrap_or(0) as u32 * BLOCK_TOKENS
    }
}

impl Kv {
    pub(super) fn new(costs: KvCosts, models: &BTreeMap<Digest, PromptCost>) -> Self {
        let engine = |(digest, cost): (&Digest, &PromptCost)| {
            let payload = cost.kv_bytes_per_token * u64::from(BLOCK_TOKENS);
            let engine = Engine {
                cost: *cost,
                identity: identity(digest),
                slot_bytes: slot_bytes(payload),
                held: VecDeque::new(),
                line: Vec::new(),
                computes: None,
            };
            (*digest, engine)
        };
        let engines: BTreeMap<Digest, Engine> = models.iter().map(engine).collect();
        Self {
            tier: Tier::new(costs.tier.clone()),
            costs,
            slots: engines.values().map(|engine| (engine.identity, engine.slot_bytes)).collect(),
            engines,
            moves: 0,
            requests: BTreeMap::new(),
            saves: BTreeMap::new(),
            last_number: 0,
            limit_bytes: None,
            disk_free_at: Instant::ZERO,
            disk_page: 0,
            follows: Vec::new(),
            outcome: PromptOutcome::default(),
        }
    }

    pub(super) fn tier(&self) -> &Tier {
        &self.tier
    }

    /// Whether nobody uses a block and none is being moved.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.moves == 0
    }

    /// What models leave of the memory.
    pub(super) fn limit(&mut self, now: Instant, bytes: Bytes) {
        if self.limit_bytes.replace(bytes) != Some(bytes) {
            self.tell(now, Event::HostLimit { bytes });
        }
    }

    /// What the worker is told concerns engines, too.
    pub(super) fn hear(&mut self, now: Instant, event: &worker::Event) {
        match event {
            worker::Event::Loaded { digest, .. } => self.open(now, *digest),
            worker::Event::Finished { request } => self.finish(now, *request),
            worker::Event::Exited { digest, .. } => self.close(now, digest),
            _ => {}
        }
    }

    pub(super) fn timer(&mut self, now: Instant) {
        self.tell(now, Event::Timer);
    }

    pub(super) fn step(&mut self, now: Instant, step: Step) {
        match step {
            Step::Tier(event) => {
                self.moves -= 1;
                self.tell(now, event);
            }
            Step::Computed { request, to_token, round } => {
                if self.requests.get(&request).is_some_and(|asking| asking.round == round) {
                    self.computed(now, request, to_token);
                    self.advance(now, request);
                }
            }
            Step::TakenIn { request, first, blocks, seconds } => self.taken_in(now, request, (first, blocks), seconds),
        }
    }

    /// An engine begins a request.
    pub(super) fn begin(&mut self, now: Instant, request: RequestId, digest: Digest, prompt: Prompt) {
        let Some(engine) = self.engines.get_mut(&digest) else { return };
        engine.line.push(request);
        let (identity, device_tokens, prompt_tokens) = (engine.identity, engine.look(&prompt), prompt.tokens);
        let has_tier = engine.cost.kv_bytes_per_token > 0 && engine.slot_bytes <= self.costs.tier.host_bytes_max;
        let keys = prompt.keys[..blocks_of(prompt_tokens.saturating_sub(1))].to_vec();
        let asking = Asking {
            digest,
            prompt,
            granted: !has_tier,
            blocks: None,
            known_blocks: 0,
            at_token: 0,
            found_tokens: 0,
            device_tokens: 0,
            since: now,
            round: 0,
            was_offered: false,
        };
        self.requests.insert(request, asking);
        if has_tier {
            self.tell(now, Event::Asked { request, identity, keys, prompt_tokens, device_tokens });
        }
        self.next_prompt(now, digest);
    }

    /// The prompt that came first of those that may be computed.
    fn next_prompt(&mut self, now: Instant, digest: Digest) {
        let Some(engine) = self.engines.get_mut(&digest).filter(|engine| engine.computes.is_none()) else { return };
        let is_granted = |request: &&RequestId| self.requests.get(request).is_some_and(|asking| asking.granted);
        let Some(request) = engine.line.iter().find(is_granted).copied() else { return };
        engine.computes = Some(request);
        if let Some(asking) = self.requests.get_mut(&request) {
            // What its engine had when it came may be gone, or more.
            asking.at_token = engine.look(&asking.prompt);
            (asking.found_tokens, asking.device_tokens) = (asking.at_token, asking.at_token);
            asking.since = now;
        }
        self.advance(now, request);
    }

    /// What an engine does next for the prompt that it computes.
    fn advance(&mut self, now: Instant, request: RequestId) {
        let Some(asking) = self.requests.get_mut(&request) else { return };
        let Some(engine) = self.engines.get(&asking.digest) else { return };
        asking.since = now;
        let mut to_token = asking.prompt.tokens;
        if let Some((first, blocks)) = asking.blocks {
            let (begin, end) = (first * BLOCK_TOKENS, (first + blocks) * BLOCK_TOKENS);
            if end <= asking.at_token {
                asking.blocks = None;
                self.tell(now, Event::Restored { request, first_block: 0, blocks: 0, seconds: 0.0 });
                return self.advance(now, request);
            }
            if asking.at_token >= begin {
                // What lay before them is moved, too.
                let moved = u64::from(2 * first + blocks) * engine.payload_bytes();
                let seconds = moved as f64 / self.costs.copy_bytes_per_second;
                let taken_in = Step::TakenIn { request, first, blocks, seconds };
                self.follows.push(Outcome::Step(Duration::from_secs_f64(seconds), taken_in));
                return;
            }
            to_token = begin;
        }
        if asking.at_token >= asking.prompt.tokens {
            return self.prefilled(now, request);
        }
        let seconds = f64::from(to_token - asking.at_token) * engine.cost.prefill_token_seconds;
        let computed = Step::Computed { request, to_token, round: asking.round };
        self.follows.push(Outcome::Step(Duration::from_secs_f64(seconds), computed));
    }

    /// A part of a prompt is computed.
    fn computed(&mut self, now: Instant, request: RequestId, to_token: u32) {
        let Some(asking) = self.requests.get_mut(&request) else { return };
        let Some(engine) = self.engines.get(&asking.digest) else { return };
        let from_token = std::mem::replace(&mut asking.at_token, to_token);
        let (identity, seconds) = (engine.identity, now.since(asking.since).as_secs_f64());
        asking.since = now;
        self.tell(now, Event::Prefilled { identity, from_token, to_token, seconds });
    }

    fn taken_in(&mut self, now: Instant, request: RequestId, (first_block, blocks): (u32, u32), seconds: f64) {
        let Some(asking) = self.requests.get_mut(&request) else { return };
        let end_token = (first_block + blocks) * BLOCK_TOKENS;
        if first_block == 0 {
            // What the engine had of it is replaced.
            (asking.found_tokens, asking.device_tokens, asking.at_token) = (0, 0, 0);
        }
        asking.found_tokens += end_token - asking.at_token;
        (asking.blocks, asking.at_token) = (None, end_token);
        self.tell(now, Event::Restored { request, first_block, blocks, seconds });
        self.advance(now, request);
    }

    /// A prompt is computed: its first token follows, and the next prompt begins.
    fn prefilled(&mut self, now: Instant, request: RequestId) {
        let Some(asking) = self.requests.get(&request) else { return };
        let Some(engine) = self.engines.get_mut(&asking.digest) else { return };
        let (digest, computed) = (asking.digest, asking.prompt.tokens - asking.found_tokens);
        engine.line.retain(|other| *other != request);
        engine.computes = None;
        let token = Duration::from_secs_f64(engine.cost.decode_token_seconds);
        self.outcome.first_tokens.push((request, now + token));
        self.outcome.prompt_tokens += u64::from(asking.prompt.tokens);
        self.outcome.device_tokens += u64::from(asking.device_tokens);
        self.outcome.restored_tokens += u64::from(asking.found_tokens - asking.device_tokens);
        let finished = worker::Event::Finished { request };
        self.follows.push(Outcome::Worker(token * asking.prompt.output_tokens.max(1), finished));
        if computed >= EARLY_SAVE_TOKENS {
            self.keep(now, request, 0);
        }
        self.next_prompt(now, digest);
    }

    fn finish(&mut self, now: Instant, request: RequestId) {
        let Some(asking) = self.requests.get(&request) else { return };
        // The last token's KV is never computed.
        self.keep(now, request, asking.prompt.output_tokens.saturating_sub(1));
        self.requests.remove(&request);
        self.tell(now, Event::Ended { request });
    }

    /// What was computed stays for whoever begins alike, and what the tier does not know is offered.
    fn keep(&mut self, now: Instant, request: RequestId, generated_tokens: u32) {
        let Some(asking) = self.requests.get_mut(&request) else { return };
        let Some(engine) = self.engines.get_mut(&asking.digest) else { return };
        if engine.cost.kv_bytes_per_token == 0 || !self.costs.keeps_kv() {
            return;
        }
        let tokens = asking.prompt.tokens + generated_tokens;
        let keys = &asking.prompt.keys[..blocks_of(tokens).min(asking.prompt.keys.len())];
        let said_blocks = if asking.was_offered { blocks_of(asking.prompt.tokens) as u32 } else { 0 };
        let first_block = asking.known_blocks.max(said_blocks);
        asking.was_offered = true;
        self.last_number += 1;
        let number = self.last_number;
        engine.held.push_back(Held { number, keys: keys.to_vec() });
        if engine.held.len() > engine.cost.sequences {
            engine.held.pop_front();
        }
        let Some(new) = keys.get(first_block as usize..).filter(|new| !new.is_empty()) else { return };
        if engine.slot_bytes > self.costs.tier.host_bytes_max {
            return;
        }
        let (save, identity) = (SaveId(number), engine.identity);
        let parent = (first_block as usize).checked_sub(1).map(|before| keys[before]);
        let parent = parent.unwrap_or_else(|| key::root(&identity, &domain()));
        let state_bytes = u64::from(tokens) * engine.cost.kv_bytes_per_token;
        let offered = Event::SaveOffered {
            save,
            identity,
            domain: domain(),
            parent,
            first_block,
            keys: new.to_vec(),
            state_bytes,
        };
        self.saves.insert(save, Save { digest: asking.digest, held: number, state_bytes });
        self.tell(now, offered);
    }

    fn open(&mut self, now: Instant, digest: Digest) {
        let Some(engine) = self.engines.get(&digest) else { return };
        if engine.cost.kv_bytes_per_token > 0 && engine.slot_bytes <= self.costs.tier.host_bytes_max {
            let (identity, slot_bytes, payload_bytes) = (engine.identity, engine.slot_bytes, engine.payload_bytes());
            self.tell(now, Event::Opened { model: digest, identity, payload_bytes, slot_bytes });
        }
    }

    /// An engine is gone, and what it held.
    fn close(&mut self, now: Instant, digest: &Digest) {
        let Some(engine) = self.engines.get_mut(digest) else { return };
        (engine.computes, engine.line) = (None, Vec::new());
        engine.held.clear();
        let over: Vec<RequestId> =
            self.requests.iter().filter(|(_, asking)| asking.digest == *digest).map(|(request, _)| *request).collect();
        for request in over {
            self.requests.remove(&request);
            self.tell(now, Event::Ended { request });
        }
        let saves = self.saves.extract_if(.., |_, save| save.digest == *digest).map(|(save, _)| save).collect();
        self.tell(now, Event::SavesLost { saves });
    }

    fn tell(&mut self, now: Instant, event: Event) {
        let mut actions = Vec::new();
        self.tier.handle(now, event, &mut actions);
        for action in actions {
            self.perform(now, action);
        }
    }

    fn perform(&mut self, now: Instant, action: Action) {
        match action {
            Action::Grant { request, first, slots, known, .. } => {
                self.grant(now, request, (first, slots.len() as u32), known);
            }
            Action::Read { block, identity, .. } => {
                let (wait, seconds) = self.disk(now, &identity);
                self.later(wait, Event::ReadDone { block, seconds, failure: None });
            }
            Action::Write { block, identity, .. } => self.write(now, block, &identity),
            Action::SaveGo { save } => self.stage(save),
            Action::SaveSkip { save } => {
                self.saves.remove(&save);
            }
            Action::Gather { save, identity, blocks } => {
                if !blocks.is_empty() {
                    let bytes = blocks.len() as u64 * self.slot_bytes(&identity);
                    self.later(self.copying(bytes), Event::Gathered { save, ok: true });
                }
            }
            Action::Pressed { worth } => {
                self.follows.push(Outcome::Worker(Duration::ZERO, worker::Event::KvPressed { worth }));
            }
            // Nothing of this takes time.
            Action::Coming { .. } | Action::FreeSlot { .. } | Action::Retire { .. } | Action::PurgeDisk { .. } => {}
        }
    }

    fn later(&mut self, delay: Duration, event: Event) {
        self.moves += 1;
        self.follows.push(Outcome::Step(delay, Step::Tier(event)));
    }

    fn copying(&self, bytes: Bytes) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.costs.copy_bytes_per_second)
    }

    fn slot_bytes(&self, identity: &KvIdentity) -> Bytes {
        self.slots.get(identity).copied().unwrap_or(0)
    }

    /// A request hears what is there for it; one that computes already hears it a second time.
    fn grant(&mut self, now: Instant, request: RequestId, (first, blocks): (u32, u32), known: u32) {
        let Some(asking) = self.requests.get_mut(&request) else { return };
        let digest = asking.digest;
        asking.granted = true;
        asking.known_blocks = known;
        asking.blocks = (blocks > 0).then_some((first, blocks));
        let Some(engine) = self.engines.get(&digest) else { return };
        if engine.computes == Some(request) {
            asking.round += 1;
            let tokens = now.since(asking.since).as_secs_f64() / engine.cost.prefill_token_seconds;
            let to_token = asking.prompt.tokens.min(asking.at_token + tokens as u32);
            self.computed(now, request, to_token);
            self.advance(now, request);
        } else if engine.line.contains(&request) {
            self.next_prompt(now, digest);
        } else {
            // It came too late.
            asking.blocks = None;
            self.tell(now, Event::Restored { request, first_block: 0, blocks: 0, seconds: 0.0 });
        }
    }

    /// Lets an engine put a sequence's state out, if it has it still.
    fn stage(&mut self, save: SaveId) {
        let Some(wanted) = self.saves.remove(&save) else { return };
        let engine = self.engines.get(&wanted.digest);
        let ok = engine.is_some_and(|engine| engine.held.iter().any(|held| held.number == wanted.held));
        let delay = if ok { self.copying(wanted.state_bytes) } else { Duration::ZERO };
        self.later(delay, Event::Staged { save, ok });
    }

    fn write(&mut self, now: Instant, block: BlockNumber, identity: &KvIdentity) {
        let (wait, seconds) = self.disk(now, identity);
        let pages = u32::try_from(self.slot_bytes(identity) / PAGE_BYTES).unwrap_or(u32::MAX);
        let place = DiskPlace { segment: 0, page: self.disk_page, pages };
        self.disk_page = self.disk_page.wrapping_add(pages);
        self.later(wait, Event::Written { block, outcome: Ok(place), seconds, others_bytes: 0 });
    }

    /// The disk does one thing after the other. How long it takes for a block until then.
    fn disk(&mut self, now: Instant, identity: &KvIdentity) -> (Duration, f64) {
        let seconds = self.slot_bytes(identity) as f64 / self.costs.disk_bytes_per_second;
        self.disk_free_at = self.disk_free_at.max(now) + Duration::from_secs_f64(seconds);
        let wait = self.disk_free_at.since(now);
        (wait, wait.as_secs_f64())
    }
}
