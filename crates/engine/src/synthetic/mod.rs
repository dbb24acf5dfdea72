//! An engine of declared bytes, times and failures: everything around inference, exactly, without a model.
//!
//! Tokens are words; text follows from prompt and seed. Times are really slept and bytes really taken, but only inside
//! an engine process.

mod generation;
mod kv;
mod park;
mod script;
mod text;

use crate::{
    kv::{KvMemory, ParkedMemory, tier::unused},
    port::{Engine, LoadFailure, LoadFault, Report},
    protocol::{
        DeclaredHostBytes, FailureKind, FromEngine, GenerateJob, KvGrant, KvOpen, LoadRequest, LoadedInfo, Prompt,
        SyntheticFailure, SyntheticSpec, ToEngine, TokensOrText, Usage,
    },
};
use generation::Generation;
use kv::{Kv, token};
use std::{
    io::Read,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};
use warmset_core::kv::TrustDomain;

/// A spec is a small file.
const SPEC_BYTES_MAX: u64 = 1 << 20;
/// The context when none is asked for.
const CONTEXT_TOKENS_DEFAULT: u32 = 4096;
/// Length of its embeddings.
const EMBEDDING_LENGTH: u32 = 16;
/// KV bytes it declares per token, unless its description does.
const KV_BYTES_PER_TOKEN: u64 = 1024;
/// A step computes at most this many prompt tokens.
const PREFILL_TOKENS_MAX: u32 = 512;
/// A step of prefill takes at most about this long.
const PREFILL_STEP_SECONDS: f64 = 0.05;
/// Progress and beats are reported at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
const BEAT_INTERVAL: Duration = Duration::from_millis(250);
/// Tokens before `GenerateCrashes` and `GenerateHangs` strike.
const TOKENS_BEFORE_FAILURE: u32 = 3;
/// What `EatsMemory` takes in each step.
const EATEN_BYTES_PER_STEP: usize = 16 << 20;
/// Small enough that every page is touched.
const PAGE_BYTES: usize = 4096;

/// Set by a spec that ignores `Stop`; messages are read on another thread than the engine's.
static IGNORES_STOP: AtomicBool = AtomicBool::new(false);

/// Whether the loaded spec ignores `Stop`.
pub(crate) fn ignores_stop() -> bool {
    IGNORES_STOP.load(Ordering::SeqCst)
}

/// The engine.
#[derive(Default)]
pub struct SyntheticEngine {
    spec: SyntheticSpec,
    context_tokens: u32,
    parallel: u32,
    /// In order of arrival.
    generations: Vec<Generation>,
    kv: Kv,
    embeddings: Vec<(u64, Vec<TokensOrText>)>,
    /// Memory that is really held.
    held: Vec<Vec<u8>>,
    has_run: bool,
    last_beat: Option<Instant>,
}

impl Engine for SyntheticEngine {
    fn load(&mut self, request: &LoadRequest, report: Report<'_>) -> Result<LoadedInfo, LoadFailure> {
        let began = Instant::now();
        let path = request.files.first().ok_or_else(|| permanent("no file to load; name one".into()))?;
        self.spec = read_spec(path)?;
        self.context_tokens = if request.context_tokens == 0 { CONTEXT_TOKENS_DEFAULT } else { request.context_tokens };
        self.parallel = request.parallel.max(1);
        self.fail_load(path)?;
        if self.spec.accelerator_bytes.len() != request.accelerators.len() {
            return Err(permanent(format!(
                "declares {} accelerators and was given {}; correct the model's footprint",
                self.spec.accelerator_bytes.len(),
                request.accelerators.len()
            )));
        }
        if self.spec.allocate {
            self.held.push(touched(self.spec.host_bytes)?);
        }
        let extra = if self.spec.allocate { touched(self.spec.load_extra_bytes)? } else { Vec::new() };
        sleep_reporting(self.spec.load_seconds, report);
        drop(extra);
        IGNORES_STOP.store(self.spec.failure == SyntheticFailure::IgnoresStop, Ordering::SeqCst);
        let (kv, layout) = Kv::new(self.spec.kv_bytes_per_token, self.parallel);
        self.kv = kv;
        let declared = DeclaredHostBytes {
            steady_bytes: self.spec.host_bytes,
            peak_bytes: self.spec.host_bytes.saturating_add(self.spec.load_extra_bytes),
        };
        Ok(LoadedInfo {
            architecture: "synthetic".into(),
            context_tokens: self.context_tokens,
            parallel: self.parallel,
            embedding_length: EMBEDDING_LENGTH,
            has_chat_template: true,
            generates: true,
            kv_bytes_per_token: if layout.is_some() { self.spec.kv_bytes_per_token } else { KV_BYTES_PER_TOKEN },
            kv: layout,
            accelerator_bytes: self.spec.accelerator_bytes.clone(),
            declared_host_bytes: (!self.spec.allocate).then_some(declared),
            load_seconds: began.elapsed().as_secs_f64(),
            warm_up_seconds: 0.0,
        })
    }

    fn open_kv(&mut self, open: KvOpen, memory: KvMemory) {
        self.kv.open(open, memory);
    }

    fn handle(&mut self, message: ToEngine, report: Report<'_>) {
        match message {
            ToEngine::Generate { request, job } => self.accept(request, &job, report),
            ToEngine::Embed { request, inputs } => self.embeddings.push((request, inputs)),
            ToEngine::Grant { request, source } => self.grant(request, source, report),
            ToEngine::Cancel { request } => self.cancel(request, report),
            ToEngine::SetThreads { threads } => report(FromEngine::ThreadsHeld { threads }),
            ToEngine::SaveGo { .. } | ToEngine::SaveSkip { .. } | ToEngine::SaveEnd { .. } => {
                self.kv.answer_save(&message, report);
            }
            ToEngine::KvForget { domain } => self.forget_domain(&domain),
            ToEngine::Park { request } => self.stop(request, report),
            ToEngine::ParkStop { request } => self.run_on(request),
            // It puts nothing together.
            ToEngine::KvComing { .. }
            | ToEngine::KvOpen(_)
            | ToEngine::Load(_)
            | ToEngine::ParkTake { .. }
            | ToEngine::Resume { .. }
            | ToEngine::Stop => {}
        }
    }

    fn park(&mut self, request: u64, memory: ParkedMemory, report: Report<'_>) {
        self.leave(request, memory, report);
    }

    fn resume(&mut self, request: u64, memory: ParkedMemory, report: Report<'_>) {
        self.come_back(request, &memory, report);
    }

    fn has_work(&self) -> bool {
        let eats = self.has_run && self.spec.failure == SyntheticFailure::EatsMemory;
        eats || !self.embeddings.is_empty() || self.generations.iter().any(Generation::is_computed)
    }

    fn step(&mut self, report: Report<'_>) {
        self.has_run = true;
        self.fail_step();
        if self.last_beat.is_none_or(|last| last.elapsed() >= BEAT_INTERVAL) {
            self.last_beat = Some(Instant::now());
            report(FromEngine::Beat);
        }
        self.prefill(report);
        self.decode(report);
        if !self.embeddings.is_empty() {
            let (request, inputs) = self.embeddings.remove(0);
            self.embed(request, &inputs, report);
        }
    }
}

impl SyntheticEngine {
    fn fail_load(&self, path: &Path) -> Result<(), LoadFailure> {
        match self.spec.failure {
            SyntheticFailure::LoadFails => {
                Err(permanent(format!("{} says that its load fails; declare another failure", path.display())))
            }
            SyntheticFailure::LoadFailsForNow => Err(LoadFailure {
                message: format!("{} says that its load fails for now; try again later", path.display()),
                fault: LoadFault::Passing,
            }),
            SyntheticFailure::LoadHangs => hang(),
            SyntheticFailure::LoadCrashes => std::process::abort(),
            _ => Ok(()),
        }
    }

    fn fail_step(&mut self) {
        let late = || self.generations.iter().any(|generation| generation.longest() >= TOKENS_BEFORE_FAILURE);
        match self.spec.failure {
            SyntheticFailure::GenerateCrashes if late() => std::process::abort(),
            SyntheticFailure::GenerateHangs if late() => hang(),
            SyntheticFailure::EatsMemory => self.held.push(vec![1; EATEN_BYTES_PER_STEP]),
            _ => {}
        }
    }

    fn forget_domain(&mut self, domain: &TrustDomain) {
        for generation in self.generations.iter_mut().filter(|one| one.prefix.domain.as_ref() == Some(domain)) {
            generation.prefix.domain = None;
        }
        self.kv.forget_domain(domain);
    }

    fn accept(&mut self, request: u64, job: &GenerateJob, report: Report<'_>) {
        match self.read(request, job) {
            Ok(mut generation) => {
                let (device_tokens, keys) = self.kv.look(&generation.prefix);
                generation.prefix.keys.clone_from(&keys);
                let prompt_tokens = generation.prompt_tokens();
                self.generations.push(generation);
                report(FromEngine::Prepared { request, prompt_tokens, device_tokens, keys });
            }
            Err(failed) => report(*failed),
        }
    }

    /// A job as a generation; how it fails otherwise.
    fn read(&self, request: u64, job: &GenerateJob) -> Result<Generation, Box<FromEngine>> {
        let failed = |kind: FailureKind, message: String, param: Option<&str>| {
            let param = param.map(str::to_owned);
            Box::new(FromEngine::Failed { request, kind, message, param })
        };
        let invalid = FailureKind::InvalidRequest;
        let (text, tokens) = prompt(&job.prompt).map_err(|message| failed(invalid, message, Some("messages")))?;
        let prompt_tokens = count(tokens.len());
        if prompt_tokens >= self.context_tokens {
            let message = format!(
                "the prompt has {prompt_tokens} tokens and the context holds {}; shorten it",
                self.context_tokens
            );
            return Err(failed(FailureKind::ContextExceeded, message, None));
        }
        let script =
            script::pieces(&job.output).map_err(|error| failed(invalid, error.to_string(), Some("response_format")))?;
        Ok(Generation::new(request, job.clone(), (text.as_slice(), tokens), self.context_tokens, script))
    }

    fn grant(&mut self, request: u64, source: KvGrant, report: Report<'_>) {
        let (slots, known_blocks) = match source {
            KvGrant::Recompute { known } => (None, known),
            // It computes a prompt in one piece: there is nothing to take in on the way.
            KvGrant::Blocks { first: 1.., .. } => return report(unused(request)),
            KvGrant::Blocks { first: 0, slots, known } => (Some(slots), known),
        };
        match self.generations.iter_mut().find(|other| other.request == request) {
            Some(generation) => {
                generation.prefix.settle(request, report);
                (generation.prefix.slots, generation.prefix.known_blocks) = (slots, known_blocks);
                generation.granted = true;
            }
            // It ended meanwhile.
            None if slots.is_some() => report(unused(request)),
            None => {}
        }
    }

    fn cancel(&mut self, request: u64, report: Report<'_>) {
        if let Some(index) = self.generations.iter().position(|generation| generation.request == request) {
            self.generations.remove(index).cancel(report);
        }
        if let Some(index) = self.embeddings.iter().position(|(other, _)| *other == request) {
            self.embeddings.remove(index);
            report(FromEngine::Failed {
                request,
                kind: FailureKind::Internal,
                message: "cancelled by the caller".into(),
                param: None,
            });
        }
    }

    /// One chunk of the oldest prompt that is not computed yet.
    fn prefill(&mut self, report: Report<'_>) {
        let seconds = self.spec.prefill_seconds_per_token;
        let next = self.generations.iter().position(|other| other.is_computed() && other.prefill_left > 0);
        let Some(index) = next else { return };
        let generation = &mut self.generations[index];
        let request = generation.request;
        if generation.prefix.cached.is_none() {
            match self.kv.begin(request, &mut generation.prefix, report) {
                Ok(cached) => generation.prefilled(cached, Duration::ZERO),
                Err(message) => {
                    self.generations.remove(index);
                    return report(FromEngine::Failed { request, kind: FailureKind::Internal, message, param: None });
                }
            }
        }
        let within_time = if seconds > 0.0 { (PREFILL_STEP_SECONDS / seconds).max(1.0) } else { f64::MAX };
        let chunk = (1..=PREFILL_TOKENS_MAX.min(generation.prefill_left))
            .rev()
            .find(|tokens| f64::from(*tokens) <= within_time)
            .unwrap_or(1);
        let began = Instant::now();
        sleep(seconds * f64::from(chunk));
        generation.prefilled(chunk, began.elapsed());
        if generation.prefill_left == 0 {
            self.kv.prefilled(request, &mut generation.prefix, report);
        }
    }

    /// One token for each of the first `parallel` sequences.
    fn decode(&mut self, report: Report<'_>) {
        let mut free = self.parallel;
        let ready = |generation: &Generation| generation.is_computed() && generation.prefill_left == 0;
        if !self.generations.iter().any(ready) {
            return;
        }
        sleep(self.spec.decode_seconds_per_token);
        for generation in self.generations.iter_mut().filter(|generation| ready(generation)) {
            free -= generation.decode(free, report);
            if free == 0 {
                break;
            }
        }
        let Self { generations, kv, .. } = self;
        generations.retain_mut(|generation| {
            let done = generation.is_done();
            if done {
                let generated = generation.computed();
                kv.keep(generation.request, &mut generation.prefix, &generated, report);
                generation.close(report);
            }
            !done
        });
    }

    fn embed(&self, request: u64, inputs: &[TokensOrText], report: Report<'_>) {
        let mut vectors = Vec::with_capacity(inputs.len());
        let mut usage = Usage::default();
        for input in inputs {
            let (bytes, tokens) = match input {
                TokensOrText::Text(text) => (text.as_bytes().to_vec(), count_words(text)),
                TokensOrText::Tokens(tokens) => (token_bytes(tokens), count(tokens.len())),
            };
            if tokens > self.context_tokens {
                let message =
                    format!("an input has {tokens} tokens and the context holds {}; shorten it", self.context_tokens);
                let kind = FailureKind::ContextExceeded;
                return report(FromEngine::Failed { request, kind, message, param: Some("input".into()) });
            }
            sleep(self.spec.prefill_seconds_per_token * f64::from(tokens));
            vectors.push(text::vector(&bytes, EMBEDDING_LENGTH));
            usage.prompt_tokens = usage.prompt_tokens.saturating_add(tokens);
        }
        report(FromEngine::Embedded { request, vectors, prompt_tokens: usage.prompt_tokens });
    }
}

fn permanent(message: String) -> LoadFailure {
    LoadFailure { message, fault: LoadFault::Artifact }
}

fn read_spec(path: &Path) -> Result<SyntheticSpec, LoadFailure> {
    let unreadable = |error: std::io::Error| LoadFailure {
        message: format!("cannot read {}: {error}; add the model again", path.display()),
        fault: LoadFault::from_permanent(error.kind() == std::io::ErrorKind::NotFound),
    };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut text = String::new();
    file.take(SPEC_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
    SyntheticSpec::parse(&text).map_err(|error| {
        permanent(format!("{} is not the description of a synthetic model: {error}; correct it", path.display()))
    })
}

/// Memory of which every page is really there.
fn touched(bytes: u64) -> Result<Vec<u8>, LoadFailure> {
    let refused = || LoadFailure {
        message: format!("cannot take {bytes} bytes of memory; give the model less or the machine more"),
        fault: LoadFault::Memory,
    };
    let length = usize::try_from(bytes).map_err(|_| refused())?;
    let mut memory: Vec<u8> = Vec::new();
    memory.try_reserve_exact(length).map_err(|_| refused())?;
    memory.resize(length, 0);
    for page in memory.chunks_mut(PAGE_BYTES) {
        page[0] = 1;
    }
    Ok(memory)
}

fn sleep(seconds: f64) {
    if let Ok(duration) = Duration::try_from_secs_f64(seconds)
        && !duration.is_zero()
    {
        std::thread::sleep(duration);
    }
}

fn sleep_reporting(seconds: f64, report: Report<'_>) {
    let Ok(whole) = Duration::try_from_secs_f64(seconds) else { return };
    let began = Instant::now();
    loop {
        let passed = began.elapsed();
        if passed >= whole {
            return report(FromEngine::LoadProgress { fraction: 1.0 });
        }
        let fraction = passed.as_secs_f32() / whole.as_secs_f32();
        report(FromEngine::LoadProgress { fraction });
        std::thread::sleep((whole - passed).min(PROGRESS_INTERVAL));
    }
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

/// The prompt as text, and its tokens.
fn prompt(prompt: &Prompt) -> Result<(Vec<u8>, Vec<u32>), String> {
    let words = |text: &str| text.split_whitespace().map(token).collect();
    match prompt {
        Prompt::Text { text } => Ok((text.clone().into_bytes(), words(text))),
        Prompt::Tokens { tokens } => Ok((token_bytes(tokens), tokens.clone())),
        Prompt::Chat { messages } => {
            let messages: Vec<serde_json::Map<String, serde_json::Value>> = serde_json::from_str(messages)
                .map_err(|error| format!("the messages are not a list of objects: {error}"))?;
            let mut text = String::new();
            for message in &messages {
                for key in ["role", "content"] {
                    match message.get(key) {
                        Some(serde_json::Value::String(part)) => text.push_str(part),
                        Some(other) => text.push_str(&other.to_string()),
                        None => {}
                    }
                    text.push('\n');
                }
            }
            let tokens = words(&text);
            Ok((text.into_bytes(), tokens))
        }
    }
}

fn token_bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

fn count_words(text: &str) -> u32 {
    count(text.split_whitespace().count())
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
