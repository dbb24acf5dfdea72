//! What the tests of the agent share: a worker over real engine processes, and callers.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use warmset_core::{
    Bytes, Digest, Footprint, MemoryVector, ModelName, PoolName, Priority, RequestId, TenantId, WorkerId,
    inference::{GenerateJob, Output, Prompt, Reply, Sampling, Work},
    worker::{LedgerLine, LoadError, ModelSpec, ModelState, ParkingLimits, Settings, StartKind},
};
use warmset_engine::protocol::{EngineKind, SyntheticFailure, SyntheticSpec};
use warmset_worker::{Agent, AgentConfig, AgentHandle, Artifacts, Assignment, Clock, KvHandle, ModelConfig};

/// Longer than anything here takes on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const MIB: Bytes = 1 << 20;

/// Artifacts of which some are broken.
#[derive(Default)]
pub(crate) struct Shelf(Mutex<BTreeMap<Digest, LoadError>>);

impl Shelf {
    pub(crate) fn spoil(&self, digest: Digest, message: &str, permanent: bool) {
        self.0.lock().unwrap().insert(digest, LoadError { message: message.into(), permanent });
    }
}

impl Artifacts for Shelf {
    fn verify(&self, digest: &Digest) -> Result<(), LoadError> {
        self.0.lock().unwrap().get(digest).map_or(Ok(()), |error| Err(error.clone()))
    }
}

pub(crate) fn settings(host_bytes: Bytes) -> Settings {
    Settings {
        capacity: MemoryVector::host(host_bytes),
        reserve: MemoryVector::host(0),
        pools: Vec::new(),
        cores: 2,
        concurrent_loads_max: 2,
        waiting_requests_max: 1000,
        minimum_residency: Duration::ZERO,
        priority_protection: Duration::ZERO,
        demand_half_life: LONG,
        load_deadline: LONG,
        stop_deadline: LONG,
        hang_deadline: LONG,
        backoff_first: LONG,
        backoff_max: LONG,
        thread_quantum: Duration::from_millis(50),
        measure_interval: LONG,
        thrash_window: LONG,
        thrash_threshold: 2.0,
        parking: ParkingLimits::default(),
        forecast: warmset_core::forecast::Parts::ALL,
    }
}

pub(crate) struct World {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) program: PathBuf,
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) agent: AgentHandle,
    next_request: u64,
}

pub(crate) struct Caller {
    pub(crate) request: RequestId,
    pub(crate) replies: UnboundedReceiver<Reply>,
}

/// What a caller was told in all.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) start: Option<StartKind>,
    pub(crate) text: String,
    pub(crate) waited: Vec<Reply>,
    pub(crate) last: Option<Reply>,
    /// How often it was parked, and went on.
    pub(crate) parked: usize,
    pub(crate) resumed: usize,
}

impl Answer {
    pub(crate) fn words(&self) -> usize {
        self.text.split_whitespace().count()
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.last, Some(Reply::Done { .. }))
    }
}

/// A path by which the engines of one test are told from those of others.
pub(crate) fn own_program(directory: &Path) -> PathBuf {
    let program = directory.join("engine-program");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_warmset-worker-child"), &program).unwrap();
    program
}

/// Process numbers of living engines started by this path.
pub(crate) fn engines_of(program: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = command.split(|byte| *byte == 0);
        if words.next() == Some(program.as_os_str().as_encoded_bytes()) && words.next() == Some(b"engine") {
            found.push(pid);
        }
    }
    found
}

/// Waits, without holding the processor, until something is so.
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it never came to this: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

impl World {
    pub(crate) fn new(settings: Settings) -> Self {
        Self::with(settings, false)
    }

    pub(crate) fn with(settings: Settings, spare: bool) -> Self {
        Self::keeping(settings, spare, |_| None)
    }

    /// A worker that keeps KV as the function says, which is given the directory of the test.
    pub(crate) fn keeping(settings: Settings, spare: bool, keep: impl FnOnce(&Path) -> Option<KvHandle>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kv = keep(directory.path());
        let program = own_program(directory.path());
        let shelf = Arc::new(Shelf::default());
        let config = AgentConfig {
            worker: WorkerId(7),
            settings,
            program: program.clone(),
            data_dir: directory.path().join("data"),
            worker_type: "test".into(),
            spare,
            artifacts: Arc::clone(&shelf) as Arc<dyn Artifacts>,
            kv,
            clock: Clock::start(),
        };
        let agent = Agent::start(config, Vec::new()).unwrap();
        Self { directory, program, shelf, agent, next_request: 0 }
    }

    /// Adds a synthetic model that declares its memory.
    pub(crate) fn add(&self, number: u8, spec: &SyntheticSpec) -> Digest {
        self.add_with(number, spec, |_| {})
    }

    pub(crate) fn add_failing(&self, number: u8, failure: SyntheticFailure) -> Digest {
        self.add(number, &SyntheticSpec { failure, ..SyntheticSpec::default() })
    }

    pub(crate) fn add_with(&self, number: u8, spec: &SyntheticSpec, change: impl FnOnce(&mut ModelSpec)) -> Digest {
        let file = self.directory.path().join(format!("{number}.json"));
        std::fs::write(&file, serde_json::to_vec(spec).unwrap()).unwrap();
        let digest = Digest([number; 32]);
        let footprint = |host| Footprint {
            private_host_bytes: host,
            shared_host_bytes: 0,
            accelerator_bytes: spec.accelerator_bytes.clone(),
        };
        let mut model = ModelSpec {
            digest,
            name: ModelName::parse(&format!("model-{number}")).unwrap(),
            pool: PoolName::default_pool(),
            priority: Priority::Standard,
            pin: false,
            parallel: 2,
            keep_alive: None,
            artifact: digest,
            peak: footprint(spec.host_bytes + spec.load_extra_bytes),
            steady: footprint(spec.host_bytes),
            measured: false,
            rewarm_seconds: 1.0,
            memory_cap: None,
            targets: warmset_core::targets::Targets::default(),
        };
        change(&mut model);
        let engine = EngineKind::Synthetic;
        self.agent.configure(ModelConfig {
            spec: model,
            engine,
            files: vec![file],
            context_tokens: 0,
            command: None,
            canary: None,
        });
        digest
    }

    pub(crate) fn ask(&mut self, digest: Digest, tokens: u32) -> Caller {
        self.ask_with(digest, Priority::Standard, tokens)
    }

    pub(crate) fn ask_with(&mut self, digest: Digest, class: Priority, tokens: u32) -> Caller {
        self.ask_work(digest, class, Self::work(tokens))
    }

    /// The same request, as whoever lost its engine sends it again.
    pub(crate) fn ask_again(&self, request: RequestId, digest: Digest, tokens: u32) -> Caller {
        self.assign(request, digest, Priority::Standard, Self::work(tokens))
    }

    fn work(tokens: u32) -> Work {
        let job = GenerateJob {
            prompt: Prompt::Text { text: "tell me".into() },
            choices: 1,
            max_tokens: Some(tokens),
            sampling: Sampling::default(),
            stop: Vec::new(),
            ignore_end: true,
            stream: true,
            output: Output::default(),
            kv_domain: None,
        };
        Work::Generate(Box::new(job))
    }

    pub(crate) fn ask_work(&mut self, digest: Digest, class: Priority, work: Work) -> Caller {
        self.next_request += 1;
        self.assign(RequestId(self.next_request), digest, class, work)
    }

    fn assign(&self, request: RequestId, digest: Digest, class: Priority, work: Work) -> Caller {
        let (sender, replies) = unbounded_channel();
        let tenant = TenantId::anonymous();
        self.agent.assign(Assignment { request, digest, tenant, class, work, replies: sender });
        Caller { request, replies }
    }

    pub(crate) async fn line(&self, digest: Digest) -> Option<LedgerLine> {
        self.agent.ledger().await.unwrap().into_iter().find(|line| line.digest == digest)
    }

    pub(crate) async fn state(&self, digest: Digest) -> ModelState {
        self.line(digest).await.map_or(ModelState::Absent, |line| line.state)
    }

    pub(crate) fn engines(&self) -> Vec<u32> {
        engines_of(&self.program)
    }

    /// Ends everything and checks that nothing is left.
    pub(crate) async fn end(self) {
        tokio::time::timeout(LONG, self.agent.drain()).await.unwrap();
        assert!(self.agent.ledger().await.is_err(), "the run loop has ended");
        let program = self.program.clone();
        eventually("no engine is left", async || engines_of(&program).is_empty()).await;
    }
}

impl Caller {
    pub(crate) async fn next(&mut self) -> Option<Reply> {
        tokio::time::timeout(LONG, self.replies.recv()).await.expect("an answer in time")
    }

    /// Reads to the first piece of text.
    pub(crate) async fn first_text(&mut self) -> String {
        loop {
            match self.next().await {
                Some(Reply::Delta { text, .. }) => return text,
                Some(Reply::Queued { .. } | Reply::Loading { .. } | Reply::Started { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Reads to the end: exactly one last answer, then nothing.
    pub(crate) async fn answer(mut self) -> Answer {
        let mut answer = Answer::default();
        while let Some(reply) = self.next().await {
            assert!(answer.last.is_none(), "{reply:?} after {:?}", answer.last);
            match reply {
                Reply::Queued { .. } | Reply::Loading { .. } => {
                    assert!(answer.start.is_none(), "a running request waits for nothing");
                    answer.waited.push(reply);
                }
                Reply::Started { start, worker, .. } => {
                    assert_eq!(worker, WorkerId(7));
                    assert_eq!(answer.start.replace(start), None, "started once");
                }
                Reply::Delta { text, .. } => answer.text.push_str(&text),
                Reply::ChoiceDone { .. } => {}
                Reply::Parked => answer.parked += 1,
                Reply::Resumed => answer.resumed += 1,
                last => answer.last = Some(last),
            }
        }
        answer
    }
}
