//! For this crate's tests: an engine process, or (`parent PROGRAM MODEL DIRECTORY`) a parent of three that waits to be
//! killed: one loaded, one idle, one whose load never ends.

use std::{io::Write, path::PathBuf, process::ExitCode, time::Duration};
use warmset_engine::{
    process::{Launcher, SpawnOptions},
    protocol::{EngineKind, FromEngine, LoadRequest, ToEngine},
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [command, program, model, directory] = arguments.as_slice() else {
        return warmset_engine::child::run(arguments.get(1).map(String::as_str));
    };
    if command != "parent" {
        return warmset_engine::child::run(Some(program));
    }
    match be_parent(program.into(), model.into(), directory.into()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where this cannot be written, the exit code says it.
            let _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn be_parent(program: PathBuf, model: PathBuf, directory: PathBuf) -> Result<(), Box<dyn std::error::Error>> {
    let hanging = directory.join("hanging.json");
    std::fs::write(&hanging, r#"{"failure": "load_hangs"}"#)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let launcher = Launcher::new(program)?;
        let options = SpawnOptions { log: directory.join("parent.log"), hello_deadline: Duration::from_secs(60) };
        let mut processes = Vec::new();
        for file in [Some(model), None, Some(hanging)] {
            let mut process = launcher.spawn(options.clone()).await?;
            if let Some(file) = file {
                let waits = !file.ends_with("hanging.json");
                process.send(ToEngine::Load(LoadRequest {
                    engine: EngineKind::Synthetic,
                    files: vec![file],
                    context_tokens: 0,
                    parallel: 1,
                    threads: 1,
                    accelerators: Vec::new(),
                    command: None,
                }));
                while waits && !matches!(process.receive().await?, Some(FromEngine::Loaded(_)) | None) {}
            }
            let mut out = std::io::stdout();
            writeln!(out, "{}", process.pid())?;
            out.flush()?;
            processes.push(process);
        }
        std::future::pending::<()>().await;
        drop(processes);
        Ok(())
    })
}
