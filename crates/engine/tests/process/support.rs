//! What the tests of engine processes share.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};
use warmset_engine::{
    process::{EngineProcess, Launcher, SpawnOptions},
    protocol::{
        EngineKind, FromEngine, GenerateJob, KvGrant, LoadRequest, LoadedInfo, Output, Prompt, Sampling, SyntheticSpec,
        ToEngine,
    },
};

/// Longer than anything here takes on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);
const PROGRAM: &str = env!("CARGO_BIN_EXE_warmset-engine-child");

/// A launcher and a directory.
pub(crate) struct World {
    pub(crate) directory: tempfile::TempDir,
    launcher: Launcher,
    models: AtomicU32,
}

pub(crate) fn load_request(file: PathBuf) -> LoadRequest {
    LoadRequest {
        engine: EngineKind::Synthetic,
        files: vec![file],
        context_tokens: 0,
        parallel: 2,
        threads: 1,
        accelerators: Vec::new(),
        command: None,
    }
}

pub(crate) fn job(text: &str, tokens: u32) -> GenerateJob {
    GenerateJob {
        prompt: Prompt::Text { text: text.into() },
        choices: 1,
        max_tokens: Some(tokens),
        sampling: Sampling::default(),
        stop: Vec::new(),
        ignore_end: true,
        stream: true,
        output: Output::default(),
        kv_domain: None,
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, launcher: Launcher::new(PROGRAM.into()).unwrap(), models: AtomicU32::new(0) }
    }

    pub(crate) fn model(&self, spec: &SyntheticSpec) -> PathBuf {
        let number = self.models.fetch_add(1, Ordering::SeqCst);
        let path = self.directory.path().join(format!("{number}.json"));
        std::fs::write(&path, serde_json::to_vec(spec).unwrap()).unwrap();
        path
    }

    pub(crate) async fn spawned(&self) -> EngineProcess {
        let options = SpawnOptions { log: self.directory.path().join("engine.log"), hello_deadline: LONG };
        self.launcher.spawn(options).await.unwrap()
    }

    pub(crate) async fn until_loaded(&self, process: &mut EngineProcess) -> LoadedInfo {
        loop {
            match process.receive().await.unwrap() {
                Some(FromEngine::Loaded(info)) => return info,
                Some(FromEngine::LoadProgress { fraction }) => assert!((0.0..=1.0).contains(&fraction)),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(crate) async fn loaded(&self, spec: &SyntheticSpec) -> EngineProcess {
        let mut process = self.spawned().await;
        process.send(ToEngine::Load(load_request(self.model(spec))));
        self.until_loaded(&mut process).await;
        process
    }

    /// All messages of one request, to its end or the end of the process.
    pub(crate) async fn generate(
        &self,
        process: &mut EngineProcess,
        request: u64,
        job: GenerateJob,
    ) -> Vec<FromEngine> {
        process.send(ToEngine::Generate { request, job: Box::new(job) });
        process.send(ToEngine::Grant { request, source: KvGrant::Recompute { known: 0 } });
        let mut all = Vec::new();
        while let Some(message) = process.receive().await.unwrap() {
            let last = matches!(message, FromEngine::Done { .. } | FromEngine::Failed { .. });
            all.push(message);
            if last {
                break;
            }
        }
        all
    }

    /// Cgroups of this test process that still exist.
    pub(crate) fn groups_left(&self) -> usize {
        let name = format!("warmset-engine-{}-", std::process::id());
        let mut left = 0;
        let mut pending = vec![PathBuf::from("/sys/fs/cgroup")];
        while let Some(directory) = pending.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    left += usize::from(entry.file_name().to_string_lossy().starts_with(&name));
                    pending.push(entry.path());
                }
            }
        }
        left
    }

    /// Whether this system lets a process leave the network.
    pub(crate) fn may_leave_network(&self) -> bool {
        let tried = Command::new("unshare").args(["--user", "--net", "true"]).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    }
}

/// Starts a second process that has engines of its own, kills it, and waits until its engines are gone.
pub(crate) fn killed_parent_leaves_nothing() {
    let world = World::new();
    let model = world.model(&SyntheticSpec::default());
    let mut parent = Command::new(env!("CARGO_BIN_EXE_warmset-engine-child"))
        .args(["parent", PROGRAM])
        .arg(&model)
        .arg(world.directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let pids: Vec<u32> = (0..3).map(|_| lines.next().unwrap().unwrap().parse().unwrap()).collect();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    parent.kill().unwrap();
    parent.wait().unwrap();
    let deadline = Instant::now() + LONG;
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "engines {pids:?} outlived their parent");
        std::thread::yield_now();
    }
}

/// A zombie that its new parent has not reaped yet is dead.
fn is_alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")) else {
        return false;
    };
    !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
}
