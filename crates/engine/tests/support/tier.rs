//! A tier as a worker keeps one, in this process: an arena of slots, a staging area, an index of blocks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::support::{Answer, Harness};
use rustix::fs::MemfdFlags;
use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    os::unix::fs::FileExt,
};
use warmset_core::{
    Digest,
    kv::{BLOCK_TOKENS, BlockHeader, BlockKey, HEADER_BYTES, KvIdentity, header::payload_checksum},
};
use warmset_engine::{
    kv::{KvMemory, State},
    port::Engine,
    protocol::{FromEngine, GenerateJob, KvGrant, KvLayout, KvOpen, SaveWanted, ToEngine},
};

const SLOTS: u32 = 400;

/// The tier.
#[derive(Debug)]
pub(crate) struct Tier {
    arena: File,
    staging: File,
    layout: KvLayout,
    open: KvOpen,
    index: BTreeMap<BlockKey, u32>,
    keys: BTreeMap<u64, Vec<BlockKey>>,
    pins: BTreeMap<u64, i32>,
    pub(crate) asked: VecDeque<SaveWanted>,
    /// Saves wait until they are allowed.
    pub(crate) slow: bool,
    /// Engines are told that it knows no block.
    pub(crate) forgets: bool,
    /// Blocks that were saved again and compared.
    pub(crate) compared: usize,
    /// Blocks whose bytes were others when they were saved again.
    pub(crate) differs: usize,
    /// Saves that came to nothing.
    pub(crate) lost: usize,
    pub(crate) rejected: Vec<(u32, String)>,
    /// Restored blocks that an engine said it had compared.
    pub(crate) verified: u32,
    /// Blocks that each request said it had restored.
    restored: BTreeMap<u64, u32>,
}

impl Tier {
    fn new(layout: KvLayout) -> Self {
        let slot_bytes = HEADER_BYTES as u64 + layout.state.block_bytes();
        let staging_bytes = layout.state.state_bytes(2048) + 4096;
        let file = |bytes: u64| {
            let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(bytes).unwrap();
            file
        };
        let identity = KvIdentity::new(&Digest([9; 32]), &layout.description, "test");
        Self {
            arena: file(slot_bytes * u64::from(SLOTS)),
            staging: file(staging_bytes),
            layout,
            open: KvOpen { identity, slot_bytes, slots: SLOTS, staging_bytes, verify: true },
            index: BTreeMap::new(),
            keys: BTreeMap::new(),
            pins: BTreeMap::new(),
            asked: VecDeque::new(),
            slow: false,
            forgets: false,
            compared: 0,
            differs: 0,
            lost: 0,
            rejected: Vec::new(),
            verified: 0,
            restored: BTreeMap::new(),
        }
    }

    pub(crate) fn blocks(&self) -> usize {
        self.index.len()
    }

    /// Grants of a request that were not answered.
    pub(crate) fn pinned(&self, request: u64) -> i32 {
        self.pins.get(&request).copied().unwrap_or(0)
    }

    pub(crate) fn all_settled(&self) -> bool {
        self.pins.values().all(|pins| *pins == 0) && self.asked.is_empty()
    }

    /// Flips a bit of a slot.
    pub(crate) fn damage(&self, slot: u64, at: u64) {
        let (mut byte, at) = ([0], slot * self.open.slot_bytes + at);
        self.arena.read_exact_at(&mut byte, at).unwrap();
        self.arena.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }

    fn store(&mut self, wanted: &SaveWanted, bytes: u64) {
        let mut blob = vec![0; bytes as usize];
        self.staging.read_exact_at(&mut blob, 0).unwrap();
        let layout = self.layout.state.clone();
        let state = State::parse(&layout, &blob).unwrap();
        assert_eq!(state.cells(), wanted.cells, "also when the sequence has grown");
        let mut parent = wanted.parent;
        for (block, key) in (wanted.first_block..).zip(&wanted.keys) {
            let payload: Vec<u8> = state.block(block).unwrap().flatten().copied().collect();
            let first = ((block - wanted.first_block) * BLOCK_TOKENS) as usize;
            let header = BlockHeader {
                identity: self.open.identity,
                domain: wanted.domain,
                key: *key,
                parent,
                first_token: u64::from(block * BLOCK_TOKENS),
                tokens: wanted.tokens[first..first + BLOCK_TOKENS as usize].to_vec(),
                payload_bytes: payload.len() as u64,
                payload_checksum: payload_checksum(&payload),
                written_at_seconds: 0,
            };
            parent = *key;
            let same = self.publish(&header, &payload);
            let restored = self.restored.get(&wanted.request).copied().unwrap_or(0);
            assert!(same || block >= restored, "a restored block has other bytes");
        }
    }

    fn publish(&mut self, header: &BlockHeader, payload: &[u8]) -> bool {
        let next = self.index.len() as u32;
        let slot = *self.index.entry(header.key).or_insert(next);
        let at = u64::from(slot) * self.open.slot_bytes;
        if slot == next {
            assert!(slot < SLOTS);
            let mut page = [0; HEADER_BYTES];
            header.encode(&mut page);
            self.arena.write_all_at(&page, at).unwrap();
            self.arena.write_all_at(payload, at + HEADER_BYTES as u64).unwrap();
            return true;
        }
        let mut before = vec![0; payload.len()];
        self.arena.read_exact_at(&mut before, at + HEADER_BYTES as u64).unwrap();
        self.differs += usize::from(before != payload);
        self.compared += 1;
        before == payload
    }
}

/// An engine with a tier.
pub(crate) struct World {
    pub(crate) harness: Harness,
    pub(crate) tier: Tier,
}

impl World {
    pub(crate) fn new(parallel: u32) -> Self {
        let harness = Harness::new(2048, parallel);
        let layout = harness.info.kv.clone().expect("this model's states can be cut");
        Self { harness, tier: Tier::new(layout) }.opened()
    }

    /// The same tier with a new engine.
    pub(crate) fn restart(&self, parallel: u32) -> Self {
        let harness = Harness::new(2048, parallel);
        let layout = harness.info.kv.clone().expect("this model's states can be cut");
        assert_eq!(layout.description, self.tier.layout.description, "it does not depend on the number of sequences");
        let mut tier = Tier::new(layout);
        tier.arena = self.tier.arena.try_clone().unwrap();
        tier.index.clone_from(&self.tier.index);
        Self { harness, tier }.opened()
    }

    fn opened(mut self) -> Self {
        let given = vec![self.tier.arena.try_clone().unwrap().into(), self.tier.staging.try_clone().unwrap().into()];
        let memory = KvMemory::map(&self.tier.open, given).unwrap();
        self.harness.engine.open_kv(self.tier.open, memory);
        self
    }

    /// Sends a job and grants it what the tier has.
    pub(crate) fn start(&mut self, job: GenerateJob) -> u64 {
        let request = self.harness.prepare(job);
        self.listen();
        self.grant_blocks(request);
        request
    }

    /// Grants all leading blocks that the tier has.
    pub(crate) fn grant_blocks(&mut self, request: u64) {
        self.listen();
        let keys = self.tier.keys.get(&request).cloned().unwrap_or_default();
        let slots: Vec<u32> = keys.iter().map_while(|key| self.tier.index.get(key).copied()).collect();
        // As after reads from a disk; of more tokens than there are, no more is made ready than a sequence has.
        let tokens = if request.is_multiple_of(2) { slots.len() as u32 * BLOCK_TOKENS } else { u32::MAX };
        self.harness.send(ToEngine::KvComing { tokens });
        let known = if self.tier.forgets { 0 } else { slots.len() as u32 };
        let source =
            if slots.is_empty() { KvGrant::Recompute { known } } else { KvGrant::Blocks { first: 0, slots, known } };
        self.grant(request, source);
    }

    pub(crate) fn grant(&mut self, request: u64, source: KvGrant) {
        *self.tier.pins.entry(request).or_default() += i32::from(matches!(source, KvGrant::Blocks { .. }));
        self.harness.send(ToEngine::Grant { request, source });
        self.listen();
    }

    pub(crate) fn step(&mut self) {
        self.harness.step();
        self.listen();
    }

    pub(crate) fn cancel(&mut self, request: u64) {
        self.harness.send(ToEngine::Cancel { request });
        self.listen();
    }

    pub(crate) fn finish(&mut self, requests: &[u64]) {
        while requests.iter().any(|request| !self.harness.answer(*request).is_over()) {
            self.harness.wait();
            self.step();
        }
    }

    pub(crate) fn run(&mut self, job: GenerateJob) -> Answer {
        let request = self.start(job);
        self.finish(&[request]);
        self.harness.answers[&request].clone()
    }

    /// Allows the saves that wait.
    pub(crate) fn allow(&mut self) {
        if let Some(wanted) = self.tier.asked.front().filter(|_| !self.tier.slow) {
            let save = wanted.save;
            self.harness.send(ToEngine::SaveGo { save });
            self.listen();
        }
    }

    fn listen(&mut self) {
        for message in std::mem::take(&mut self.harness.kv) {
            match message {
                FromEngine::Prepared { request, keys, .. } => {
                    self.tier.keys.insert(request, keys);
                }
                FromEngine::Restored { request, blocks, .. } => {
                    *self.tier.pins.entry(request).or_default() -= 1;
                    self.tier.restored.insert(request, blocks);
                }
                FromEngine::KvVerified { blocks, .. } => self.tier.verified += blocks,
                FromEngine::KvRejected { block, reason, .. } => self.tier.rejected.push((block, reason)),
                FromEngine::SaveWanted(wanted) => {
                    self.tier.asked.push_back(wanted);
                    if self.tier.asked.len() == 1 {
                        self.allow();
                    }
                }
                FromEngine::Saved { save, bytes } => {
                    let wanted = self.tier.asked.pop_front().expect("a save that was asked for");
                    assert_eq!(wanted.save, save);
                    if bytes > 0 {
                        self.tier.store(&wanted, bytes);
                    } else {
                        self.tier.lost += 1;
                    }
                    // Whatever became of it, the area is the engine's again only now.
                    self.harness.send(ToEngine::SaveEnd { save });
                    self.allow();
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
