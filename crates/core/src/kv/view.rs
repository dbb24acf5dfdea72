//! What people and metrics see of the tier.

use super::{BLOCK_TOKENS, protocol::BlockNumber, tier::Tier};
use crate::{ids::Digest, memory::Bytes};
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// The most reasons for rejections that are told apart.
const REASONS_MAX: usize = 64;

/// Blocks that were refused, by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected(pub BTreeMap<String, u64>);

impl Rejected {
    pub(super) fn count(&mut self, reason: &str) {
        if self.0.len() < REASONS_MAX || self.0.contains_key(reason) {
            *self.0.entry(reason.into()).or_default() += 1;
        }
    }
}

/// Tokens that were not computed, by where their KV was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HitTokens {
    /// In a sequence of the engine.
    pub device: u64,
    /// In host memory.
    pub host: u64,
    /// On disk.
    pub disk: u64,
}

impl HitTokens {
    pub(super) fn add(&mut self, other: Self) {
        self.device += other.device;
        self.host += other.host;
        self.disk += other.disk;
    }
}

/// Tokens that were found, by what they are to those who share them.
///
/// Told by where known prompts part: what comes before the first parting is shared by all (a system prompt), what lies
/// between the first and the last is shared by some (a document), what comes after the last is one conversation's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Of the same conversation.
    pub session_tokens: u64,
    /// Of a system prompt.
    pub system_tokens: u64,
    /// Of a document that some share.
    pub document_tokens: u64,
}

impl Traffic {
    /// Counts so many blocks of a prompt whose partings are known.
    pub(super) fn add(&mut self, (first, last): (u32, u32), blocks: u32) {
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(BLOCK_TOKENS);
        let (first, last) = (first.min(blocks), last.min(blocks));
        self.system_tokens += tokens(first);
        self.document_tokens += tokens(last - first);
        self.session_tokens += tokens(blocks - last);
    }
}

/// What the tier did for one model.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Figures {
    pub(super) lookup_tokens: u64,
    pub(super) hit_tokens: HitTokens,
    pub(super) traffic: Traffic,
    pub(super) reloaded: u64,
    pub(super) split: u64,
    pub(super) recomputed: u64,
    pub(super) abandoned: u64,
    pub(super) saved_blocks: u64,
    pub(super) evicted_blocks: u64,
    pub(super) verified_blocks: u64,
    pub(super) saved_seconds: f64,
    pub(super) spent_seconds: f64,
}

/// Whether keeping a model's KV pays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Too little was asked to tell.
    Unknown,
    /// It saves more time than it takes.
    Pays,
    /// Nothing that was kept was asked for again.
    NoReuse,
    /// Bringing blocks back takes longer than computing them.
    TooSlow,
}

/// One model in the tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields say by name what they are")]
pub struct ModelView {
    pub model: Option<Digest>,
    pub block_bytes: Bytes,
    pub host_bytes: Bytes,
    pub host_blocks: u64,
    pub disk_blocks: u64,
    pub lookup_tokens: u64,
    pub hit_tokens: HitTokens,
    pub traffic: Traffic,
    pub reloaded: u64,
    /// Of those, where a part was computed while the rest was read.
    pub split: u64,
    pub recomputed: u64,
    pub abandoned: u64,
    pub saved_blocks: u64,
    pub evicted_blocks: u64,
    /// Restored blocks that were written out again and compared.
    pub verified_blocks: u64,
    /// Time that computing would have taken, and what bringing the blocks back took instead.
    pub saved_seconds: f64,
    pub spent_seconds: f64,
    pub prefill_tokens_per_second: f64,
    /// Bytes per second below which bringing a block back from somewhere loses.
    pub break_even_bytes_per_second: f64,
    pub verdict: Verdict,
}

/// The whole tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields say by name what they are")]
pub struct TierView {
    pub host_bytes: Bytes,
    pub host_bytes_max: Bytes,
    /// Of blocks. Whoever knows the files says instead what they take.
    pub disk_bytes: Bytes,
    pub disk_bytes_max: Bytes,
    pub blocks: u64,
    /// Speeds are there once they were measured.
    pub restore_bytes_per_second: Option<f64>,
    pub disk_read_bytes_per_second: Option<f64>,
    pub disk_write_bytes_per_second: Option<f64>,
    /// Since the server began.
    pub disk_written_bytes: u64,
    pub disk_writes_refused: u64,
    pub disk_writes_failed: u64,
    /// Why the disk takes nothing, for people. Whoever knows the files says.
    pub disk_fault: Option<String>,
    pub saves_skipped: u64,
    pub saves_lost: u64,
    pub rejected: Rejected,
    pub models: Vec<ModelView>,
}

impl Tier {
    /// Where known prompts part along a chain of blocks: blocks before the first parting and before the last.
    pub(super) fn traffic(&self, blocks: &[BlockNumber]) -> (u32, u32) {
        let parts = |number: &BlockNumber| self.index.get(*number).children > 1;
        let first = blocks.iter().position(parts).map_or(0, |place| place as u32 + 1);
        let last = blocks.iter().rposition(parts).map_or(0, |place| place as u32 + 1);
        (first, last)
    }

    /// Host bytes that blocks take.
    pub fn host_bytes(&self) -> Bytes {
        self.host.bytes_used
    }

    /// What there is and what it was good for.
    pub fn view(&self) -> TierView {
        let mut counts = alloc::vec![(0, 0); self.known.len()];
        let mut blocks = 0;
        for (root, counted) in self.roots.iter().zip(self.index.counts()) {
            let (host, disk) = &mut counts[usize::from(root.model)];
            *host += counted.host;
            *disk += counted.disk;
            blocks += counted.anywhere;
        }
        TierView {
            host_bytes: self.host.bytes_used,
            host_bytes_max: self.host.bytes_max,
            disk_bytes: self.disk.kept_bytes,
            disk_bytes_max: self.settings.disk_bytes_max,
            blocks,
            restore_bytes_per_second: self.restore.measured_bytes_per_second(),
            disk_read_bytes_per_second: self.disk.read.measured_bytes_per_second(),
            disk_write_bytes_per_second: self.disk.write.measured_bytes_per_second(),
            disk_written_bytes: self.disk.written_bytes,
            disk_writes_refused: self.disk.writes_refused,
            disk_writes_failed: self.disk.writes_failed,
            disk_fault: None,
            saves_skipped: self.saves.skipped,
            saves_lost: self.saves.lost,
            rejected: self.rejected.clone(),
            models: counts
                .iter()
                .enumerate()
                .filter(|(number, _)| !self.known[*number].is_removed)
                .map(|(number, counts)| self.model_view(number as u16, *counts))
                .collect(),
        }
    }

    fn model_view(&self, number: u16, (host_blocks, disk_blocks): (u64, u64)) -> ModelView {
        let known = &self.known[usize::from(number)];
        let figures = known.figures;
        let arena = self.host.arenas.get(&number);
        let block_seconds = known.block_seconds(0);
        ModelView {
            model: known.model,
            block_bytes: known.payload_bytes,
            host_bytes: arena.map_or(0, |arena| u64::from(arena.used()) * arena.slot_bytes),
            host_blocks,
            disk_blocks,
            lookup_tokens: figures.lookup_tokens,
            hit_tokens: figures.hit_tokens,
            traffic: figures.traffic,
            reloaded: figures.reloaded,
            split: figures.split,
            recomputed: figures.recomputed,
            abandoned: figures.abandoned,
            saved_blocks: figures.saved_blocks,
            evicted_blocks: figures.evicted_blocks,
            verified_blocks: figures.verified_blocks,
            saved_seconds: figures.saved_seconds,
            spent_seconds: figures.spent_seconds,
            prefill_tokens_per_second: known.speed.tokens_per_second(0),
            break_even_bytes_per_second: known.payload_bytes as f64 / block_seconds,
            verdict: verdict(&figures),
        }
    }
}

fn verdict(figures: &Figures) -> Verdict {
    let hits = figures.hit_tokens.host + figures.hit_tokens.disk;
    if hits > 0 && figures.saved_seconds > figures.spent_seconds {
        Verdict::Pays
    } else if hits > 0 || figures.recomputed > 0 {
        Verdict::TooSlow
    } else if figures.evicted_blocks > 0 {
        Verdict::NoReuse
    } else {
        Verdict::Unknown
    }
}
