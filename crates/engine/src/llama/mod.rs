//! llama.cpp behind the engine port, over its C interface (docs/adr/0002-llama-cpp-sys.md says why not a wrapper).
//!
//! `sys`, `context` and `sampler` make the C interface safe; `load` brings a model up; `request`, `generate` and
//! `embed` are the work; `text` and `logprobs` turn tokens into what may be shown.

mod context;
mod embed;
mod generate;
mod load;
mod logprobs;
mod prefetch;
mod request;
mod sampler;
mod state;
mod sys;
mod text;

use crate::{
    kv::{KvMemory, ParkedMemory},
    port::{Engine, LoadFailure, Report},
    protocol::{FromEngine, KvOpen, LoadRequest, LoadedInfo, ToEngine},
};
use embed::Embeddings;
use generate::{Generations, failed};
use load::Loaded;
use request::Generation;
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Steps are reported at most this often.
const BEAT_INTERVAL: Duration = Duration::from_millis(250);

/// llama.cpp's numbers for the file types that people ask for, by name.
const FILE_TYPES: [(&str, u32); 13] = [
    ("F32", 0),
    ("F16", 1),
    ("Q4_0", 2),
    ("Q4_1", 3),
    ("Q8_0", 7),
    ("Q5_0", 8),
    ("Q5_1", 9),
    ("Q2_K", 10),
    ("Q4_K_S", 14),
    ("Q4_K_M", 15),
    ("Q5_K_M", 17),
    ("Q6_K", 18),
    ("BF16", 32),
];

/// Version of llama.cpp and the processor features it uses.
pub fn build() -> String {
    sys::build()
}

/// Names of the accelerators this engine can use, in the order of their numbers.
pub fn accelerators() -> Vec<String> {
    sys::accelerators().iter().map(sys::Accelerator::name).collect()
}

/// Writes a model in another quantisation (`Q4_0`, `Q8_0`, `F16`, ...), also one that is quantised already.
pub fn requantise(input: &Path, output: &Path, file_type: &str, threads: u32) -> Result<(), String> {
    let (_, number) = FILE_TYPES.iter().find(|(name, _)| *name == file_type).ok_or_else(|| {
        let names: Vec<&str> = FILE_TYPES.iter().map(|(name, _)| *name).collect();
        format!("{file_type:?} is none of {}", names.join(", "))
    })?;
    sys::quantise(input, output, *number, threads)
}

/// The engine for GGUF models.
#[derive(Default)]
pub struct LlamaEngine {
    loaded: Option<Loaded>,
    generations: Generations,
    embeddings: Embeddings,
    /// The sequence an embedding is being computed on.
    embedding_sequence: Option<usize>,
    threads: u32,
    last_beat: Option<Instant>,
    embedded_last: bool,
}

impl LlamaEngine {
    /// An engine without a model. Starts llama.cpp, so that a spare process has done that already.
    pub fn new() -> Self {
        sys::start();
        Self::default()
    }

    /// Whether the next step belongs to an embedding: in turn with generations, and only with a sequence to use.
    fn embeds_next(&mut self) -> Option<usize> {
        if !self.embeddings.has_work() {
            self.generations.hold = false;
            return None;
        }
        let sequence = self.embedding_sequence.or_else(|| self.generations.free_sequence());
        // Choices give way: the next sequence that becomes free is the embedding's.
        self.generations.hold = true;
        if self.embedded_last && self.generations.has_work() {
            return None;
        }
        sequence
    }
}

impl Engine for LlamaEngine {
    fn load(&mut self, request: &LoadRequest, report: Report<'_>) -> Result<LoadedInfo, LoadFailure> {
        let loaded = load::load(request, report)?;
        let info = loaded.info.clone();
        self.generations = Generations::new(info.parallel);
        self.threads = request.threads.max(1);
        self.loaded = Some(loaded);
        Ok(info)
    }

    fn open_kv(&mut self, open: KvOpen, memory: KvMemory) {
        if let Some(loaded) = &self.loaded {
            self.generations.open_kv(loaded, open, memory);
        }
    }

    fn handle(&mut self, message: ToEngine, report: Report<'_>) {
        let Some(loaded) = self.loaded.as_mut() else { return };
        match message {
            ToEngine::Generate { request, job } => match Generation::new(loaded, request, job) {
                Ok(generation) => report(self.generations.prepare(loaded, generation)),
                Err(refusal) => report(failed(request, refusal)),
            },
            ToEngine::Embed { request, inputs } => match request::embedding_tokens(loaded, &inputs) {
                Ok(inputs) => self.embeddings.add(request, inputs),
                Err(refusal) => report(failed(request, refusal)),
            },
            ToEngine::Grant { request, source } => self.generations.grant(request, source, report),
            ToEngine::KvComing { tokens } => self.generations.make_ready(loaded, tokens),
            ToEngine::Cancel { request } => {
                let sequence = self.embedding_sequence.unwrap_or(0);
                if !self.embeddings.cancel(loaded, request, sequence, report) {
                    self.generations.cancel(loaded, request, report);
                }
                if !self.embeddings.holds_sequence() {
                    self.embedding_sequence = None;
                }
                self.generations.hold = self.embeddings.has_work();
            }
            ToEngine::SetThreads { threads } => {
                // No batch is being computed between steps: from here on, these threads are held.
                self.threads = threads;
                if threads > 0 {
                    loaded.context.set_threads(threads);
                }
                report(FromEngine::ThreadsHeld { threads });
            }
            ToEngine::SaveGo { .. } | ToEngine::SaveSkip { .. } | ToEngine::SaveEnd { .. } => {
                self.generations.answer_save(loaded, &message, report);
            }
            ToEngine::KvForget { domain } => self.generations.forget_domain(loaded, &domain),
            ToEngine::Park { request } => self.generations.stop(loaded, request, report),
            ToEngine::ParkStop { request } => self.generations.run_on(request),
            ToEngine::KvOpen(_)
            | ToEngine::Load(_)
            | ToEngine::ParkTake { .. }
            | ToEngine::Resume { .. }
            | ToEngine::Stop => {}
        }
    }

    fn park(&mut self, request: u64, memory: ParkedMemory, report: Report<'_>) {
        if let Some(loaded) = &mut self.loaded {
            self.generations.leave(loaded, request, memory, report);
        }
    }

    fn resume(&mut self, request: u64, memory: ParkedMemory, report: Report<'_>) {
        let Some(loaded) = &self.loaded else { return };
        if let Some(job) = self.generations.resume(loaded, request, memory, report) {
            self.handle(ToEngine::Generate { request, job }, report);
        }
    }

    fn has_work(&self) -> bool {
        self.threads > 0 && (self.generations.has_work() || self.embeddings.has_work())
    }

    fn next_timer(&self) -> Option<Instant> {
        // Without threads no step is made, whatever waits for one.
        let step = self.generations.next_timer().filter(|_| self.threads > 0);
        step.into_iter().chain(self.generations.scratch.next_timer()).min()
    }

    fn tidy(&mut self) {
        self.generations.scratch.tidy(Instant::now());
    }

    fn step(&mut self, report: Report<'_>) {
        if !self.has_work() {
            return;
        }
        let embeds = self.embeds_next();
        let Some(loaded) = self.loaded.as_mut() else { return };
        match embeds {
            Some(sequence) => {
                if self.embedding_sequence.is_none() && !loaded.pools {
                    self.generations.clear_sequence(loaded, sequence);
                }
                self.embeddings.step(loaded, sequence, report);
                self.embedding_sequence = self.embeddings.holds_sequence().then_some(sequence);
                self.generations.hold = self.embeddings.has_work();
            }
            None => self.generations.step(loaded, report),
        }
        self.embedded_last = embeds.is_some();
        let now = Instant::now();
        self.generations.scratch.tidy(now);
        if self.last_beat.is_none_or(|last| now - last >= BEAT_INTERVAL) {
            self.last_beat = Some(now);
            report(FromEngine::Beat);
        }
    }
}
