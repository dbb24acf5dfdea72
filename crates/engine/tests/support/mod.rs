//! Drives an engine through its port, as an engine process does, without the process.

use std::{collections::BTreeMap, fs::File, os::fd::OwnedFd, path::PathBuf};
use warmset_engine::{
    kv::ParkedMemory,
    llama::LlamaEngine,
    port::{Engine, LoadFailure},
    protocol::{
        EngineKind, FailureKind, FinishReason, FromEngine, GenerateJob, KvGrant, LoadRequest, LoadedInfo, Output,
        Prompt, Sampling, Timings, ToEngine, TokenLogprob, TokensOrText, Usage,
    },
};

/// More steps than any test needs.
const STEPS_MAX: usize = 20_000;

/// The real model that nearly all tests use.
pub(crate) fn model() -> PathBuf {
    file("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// A model with a sliding window, whose sequences cannot be cut back.
pub(crate) fn gemma() -> PathBuf {
    file("gemma-3-270m.Q4_K_M.gguf")
}

fn file(name: &str) -> PathBuf {
    let folder = std::env::var_os("WARMSET_TEST_MODELS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../build/models"), PathBuf::from);
    let path = folder.join(name);
    assert!(
        path.is_file(),
        "{} is missing: `make test` fetches it; or set WARMSET_TEST_MODELS to the folder it is in",
        path.display()
    );
    path
}

pub(crate) fn request(path: PathBuf, context_tokens: u32, parallel: u32) -> LoadRequest {
    let files = vec![path];
    LoadRequest {
        engine: EngineKind::Llama,
        files,
        context_tokens,
        parallel,
        threads: 1,
        accelerators: Vec::new(),
        command: None,
    }
}

/// What is known of one request.
#[derive(Debug, Default, Clone)]
pub(crate) struct Answer {
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) texts: BTreeMap<u32, String>,
    pub(crate) deltas: Vec<(u32, String)>,
    pub(crate) finishes: BTreeMap<u32, FinishReason>,
    pub(crate) logprobs: BTreeMap<u32, Vec<TokenLogprob>>,
    /// Names and arguments.
    pub(crate) calls: BTreeMap<u32, Vec<(String, String)>>,
    pub(crate) stop_texts: BTreeMap<u32, String>,
    pub(crate) done: Option<(Usage, Timings)>,
    pub(crate) vectors: Option<(Vec<Vec<f32>>, u32)>,
    pub(crate) failure: Option<(FailureKind, String, Option<String>)>,
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        self.texts.get(&0).map_or("", String::as_str)
    }

    pub(crate) fn finish(&self) -> FinishReason {
        self.finishes[&0]
    }

    pub(crate) fn usage(&self) -> Usage {
        self.done.expect("the request is done").0
    }

    pub(crate) fn is_over(&self) -> bool {
        self.done.is_some() || self.vectors.is_some() || self.failure.is_some()
    }
}

/// An engine and everything it said.
pub(crate) struct Harness {
    pub(crate) engine: LlamaEngine,
    pub(crate) info: LoadedInfo,
    pub(crate) answers: BTreeMap<u64, Answer>,
    pub(crate) beats: usize,
    pub(crate) threads_held: Vec<u32>,
    pub(crate) steps: usize,
    pub(crate) load_progress: Vec<f32>,
    /// What it said about KV, `Prepared` among it.
    pub(crate) kv: Vec<FromEngine>,
    next_request: u64,
}

impl Harness {
    pub(crate) fn new(context_tokens: u32, parallel: u32) -> Self {
        Self::with_file(model(), context_tokens, parallel)
    }

    pub(crate) fn with_file(path: PathBuf, context_tokens: u32, parallel: u32) -> Self {
        let mut engine = LlamaEngine::new();
        let mut load_progress = Vec::new();
        let info = engine
            .load(&request(path, context_tokens, parallel), &mut |message| match message {
                FromEngine::LoadProgress { fraction } => load_progress.push(fraction),
                other => panic!("not while loading: {other:?}"),
            })
            .unwrap_or_else(|failure| panic!("{}", failure.message));
        Self {
            engine,
            info,
            answers: BTreeMap::new(),
            beats: 0,
            threads_held: Vec::new(),
            steps: 0,
            load_progress,
            kv: Vec::new(),
            next_request: 0,
        }
    }

    pub(crate) fn send(&mut self, message: ToEngine) {
        let mut said = Vec::new();
        self.engine.handle(message, &mut |message| said.push(message));
        self.take(said);
    }

    fn take(&mut self, said: Vec<FromEngine>) {
        for message in said {
            match message {
                FromEngine::Prepared { request, prompt_tokens, .. } => {
                    self.answer(request).prompt_tokens = Some(prompt_tokens);
                    self.kv.push(message);
                }
                FromEngine::Restored { .. }
                | FromEngine::KvRejected { .. }
                | FromEngine::KvVerified { .. }
                | FromEngine::SaveWanted(_)
                | FromEngine::ParkSized { .. }
                | FromEngine::ParkRefused { .. }
                | FromEngine::Parked { .. }
                | FromEngine::Saved { .. } => self.kv.push(message),
                FromEngine::Delta { request, choice, text } => {
                    assert!(!text.is_empty(), "an empty delta says nothing");
                    let answer = self.answer(request);
                    assert!(!answer.is_over() && !answer.finishes.contains_key(&choice), "text after the end");
                    answer.texts.entry(choice).or_default().push_str(&text);
                    answer.deltas.push((choice, text));
                }
                FromEngine::Logprobs { request, choice, tokens } => {
                    self.answer(request).logprobs.entry(choice).or_default().extend(tokens);
                }
                FromEngine::ToolCall { request, choice, call, name } => {
                    let calls = self.answer(request).calls.entry(choice).or_default();
                    assert_eq!(calls.len(), call as usize, "calls begin in order");
                    calls.push((name, String::new()));
                }
                FromEngine::ToolArguments { request, choice, call, text } => {
                    let calls = self.answer(request).calls.entry(choice).or_default();
                    calls[call as usize].1.push_str(&text);
                }
                FromEngine::StopText { request, choice, text } => {
                    self.answer(request).stop_texts.insert(choice, text);
                }
                FromEngine::ChoiceDone { request, choice, finish } => {
                    let before = self.answer(request).finishes.insert(choice, finish);
                    assert_eq!(before, None, "a choice ends once");
                }
                FromEngine::Done { request, usage, timings } => self.answer(request).done = Some((usage, timings)),
                FromEngine::Embedded { request, vectors, prompt_tokens } => {
                    self.answer(request).vectors = Some((vectors, prompt_tokens));
                }
                FromEngine::Failed { request, kind, message, param } => {
                    self.answer(request).failure = Some((kind, message, param));
                }
                FromEngine::Beat => self.beats += 1,
                FromEngine::ThreadsHeld { threads } => self.threads_held.push(threads),
                other => panic!("not from a loaded engine: {other:?}"),
            }
        }
    }

    pub(crate) fn answer(&mut self, request: u64) -> &mut Answer {
        self.answers.entry(request).or_default()
    }

    /// Sends a job without granting it.
    pub(crate) fn prepare(&mut self, job: GenerateJob) -> u64 {
        self.next_request += 1;
        self.send(ToEngine::Generate { request: self.next_request, job: Box::new(job) });
        self.next_request
    }

    pub(crate) fn grant(&mut self, request: u64) {
        self.send(ToEngine::Grant { request, source: KvGrant::Recompute { known: 0 } });
    }

    pub(crate) fn start(&mut self, job: GenerateJob) -> u64 {
        let request = self.prepare(job);
        self.grant(request);
        request
    }

    pub(crate) fn embed(&mut self, inputs: Vec<TokensOrText>) -> u64 {
        self.next_request += 1;
        self.send(ToEngine::Embed { request: self.next_request, inputs });
        self.next_request
    }

    pub(crate) fn step(&mut self) {
        let mut said = Vec::new();
        self.engine.step(&mut |message| said.push(message));
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "it does not come to an end");
        self.take(said);
    }

    /// Steps until all of these are over.
    pub(crate) fn finish(&mut self, requests: &[u64]) {
        while requests.iter().any(|request| !self.answer(*request).is_over()) {
            self.wait();
            self.step();
        }
    }

    /// As a process does: until there is work, which may be when a save was waited for in vain.
    pub(crate) fn wait(&self) {
        if !self.engine.has_work() {
            let at = self.engine.next_timer().expect("the engine has nothing to do but did not finish");
            std::thread::sleep(at.saturating_duration_since(std::time::Instant::now()));
        }
    }

    pub(crate) fn run(&mut self, job: GenerateJob) -> Answer {
        let request = self.start(job);
        self.finish(&[request]);
        self.answers[&request].clone()
    }

    /// Takes a request out into a file; none if it cannot leave.
    pub(crate) fn park(&mut self, request: u64) -> Option<Parked> {
        self.send(ToEngine::Park { request });
        let bytes = match self.kv.pop() {
            Some(FromEngine::ParkSized { request: sized, bytes }) if sized == request => bytes,
            Some(FromEngine::ParkRefused { .. }) => return None,
            other => panic!("{other:?}"),
        };
        let parked = Parked::new(bytes);
        let memory = ParkedMemory::for_writing(parked.descriptor(), bytes).expect("memory");
        let mut said = Vec::new();
        self.engine.park(request, memory, &mut |message| said.push(message));
        self.take(said);
        assert_eq!(self.kv.pop(), Some(FromEngine::Parked { request }));
        Some(parked)
    }

    /// Goes on with what was taken out of this engine or another one.
    pub(crate) fn resume(&mut self, request: u64, parked: &Parked) {
        let memory = ParkedMemory::for_reading(parked.descriptor(), parked.bytes).expect("memory");
        let mut said = Vec::new();
        self.engine.resume(request, memory, &mut |message| said.push(message));
        self.take(said);
    }

    pub(crate) fn vectors(&mut self, texts: &[&str]) -> (Vec<Vec<f32>>, u32) {
        let request = self.embed(texts.iter().map(|text| TokensOrText::Text((*text).into())).collect());
        self.finish(&[request]);
        self.answers[&request].vectors.clone().expect("vectors")
    }
}

/// Memory of one parked request.
pub(crate) struct Parked {
    pub(crate) file: File,
    pub(crate) bytes: u64,
}

impl Parked {
    fn new(bytes: u64) -> Self {
        let file = File::from(rustix::fs::memfd_create("parked", rustix::fs::MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len(bytes).expect("memory");
        Self { file, bytes }
    }

    fn descriptor(&self) -> Vec<OwnedFd> {
        vec![self.file.try_clone().expect("memory").into()]
    }
}

/// A greedy, streaming job.
pub(crate) fn greedy(prompt: Prompt, max_tokens: u32) -> GenerateJob {
    GenerateJob {
        prompt,
        choices: 1,
        max_tokens: Some(max_tokens),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        stop: Vec::new(),
        ignore_end: false,
        stream: true,
        output: Output::default(),
        kv_domain: None,
    }
}

pub(crate) fn text(text: &str) -> Prompt {
    Prompt::Text { text: text.into() }
}

pub(crate) fn chat(words: &str) -> Prompt {
    Prompt::Chat { messages: serde_json::json!([{ "role": "user", "content": words }]).to_string() }
}

pub(crate) fn load_failure(path: PathBuf) -> LoadFailure {
    LlamaEngine::new().load(&request(path, 256, 1), &mut |_| {}).expect_err("it must not load")
}
