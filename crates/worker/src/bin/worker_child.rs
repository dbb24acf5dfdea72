//! For this crate's tests: an engine process, or (`parent PROGRAM DIRECTORY`) a worker with engines in every state
//! that waits to be killed.

use std::{io::Write, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};
use warmset_core::{
    Digest, Footprint, MemoryVector, ModelName, PoolName, Priority, WorkerId,
    worker::{LoadError, ModelSpec, ParkingLimits, Settings},
};
use warmset_engine::protocol::EngineKind;
use warmset_worker::{Agent, AgentConfig, Artifacts, Clock, ModelConfig};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [command, program, directory] if command == "parent" => match be_parent(program.into(), directory.into()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                // Where this cannot be written, the exit code says it.
                let _ = writeln!(std::io::stderr(), "{error}");
                ExitCode::FAILURE
            }
        },
        rest => warmset_engine::child::run(rest.get(1).map(String::as_str)),
    }
}

struct Trusting;

impl Artifacts for Trusting {
    fn verify(&self, _: &Digest) -> Result<(), LoadError> {
        Ok(())
    }
}

/// Two loaded models, one that loads for ever, and a spare.
fn be_parent(program: PathBuf, directory: PathBuf) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut models = Vec::new();
        for (number, text) in [(1, "{}"), (2, "{}"), (3, r#"{"failure": "load_hangs"}"#)] {
            let file = directory.join(format!("{number}.json"));
            std::fs::write(&file, text)?;
            models.push(model(number, file)?);
        }
        let config = AgentConfig {
            worker: WorkerId(0),
            settings: settings(),
            program,
            data_dir: directory,
            worker_type: "test".into(),
            spare: true,
            artifacts: Arc::new(Trusting),
            kv: None,
            clock: Clock::start(),
        };
        let agent = Agent::start(config, models)?;
        for number in [1, 2] {
            agent.load(Digest([number; 32])).await.map_err(|error| error.message)?;
        }
        agent.prewarm(Digest([3; 32]));
        let mut out = std::io::stdout();
        writeln!(out, "ready")?;
        out.flush()?;
        std::future::pending::<()>().await;
        Ok(())
    })
}

fn model(number: u8, file: PathBuf) -> Result<ModelConfig, Box<dyn std::error::Error>> {
    let digest = Digest([number; 32]);
    let spec = ModelSpec {
        digest,
        name: ModelName::parse(&format!("model-{number}"))?,
        pool: PoolName::default_pool(),
        priority: Priority::Standard,
        pin: false,
        parallel: 1,
        keep_alive: None,
        artifact: digest,
        peak: Footprint::host(1 << 20),
        steady: Footprint::host(1 << 20),
        measured: false,
        rewarm_seconds: 1.0,
        memory_cap: None,
        targets: warmset_core::targets::Targets::default(),
    };
    Ok(ModelConfig {
        spec,
        engine: EngineKind::Synthetic,
        files: vec![file],
        context_tokens: 0,
        command: None,
        canary: None,
    })
}

fn settings() -> Settings {
    let long = Duration::from_secs(600);
    Settings {
        capacity: MemoryVector::host(1 << 30),
        reserve: MemoryVector::host(1 << 20),
        pools: Vec::new(),
        cores: 2,
        concurrent_loads_max: 2,
        waiting_requests_max: 10,
        minimum_residency: Duration::ZERO,
        priority_protection: Duration::ZERO,
        demand_half_life: long,
        load_deadline: long,
        stop_deadline: long,
        hang_deadline: long,
        backoff_first: long,
        backoff_max: long,
        thread_quantum: Duration::from_millis(100),
        measure_interval: long,
        thrash_window: long,
        thrash_threshold: 0.5,
        parking: ParkingLimits::default(),
        forecast: warmset_core::forecast::Parts::ALL,
    }
}
