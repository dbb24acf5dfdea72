//! `warmset doctor`: what this machine, the data directory and the server are like, and what to do about it.

use super::{arguments::GlobalArguments, place::Place};
use crate::{
    config::units::format_bytes,
    library::Library,
    machine,
    output::{self, Output},
};
use anyhow::Result;
use serde::Serialize;
use serde_json::json;
use std::{path::Path, time::Duration};
use warmset_engine::process::{Launcher, SpawnOptions};

/// Free space below which adding models will soon fail.
const FREE_BYTES_LOW: u64 = 1 << 30;
const HELLO_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warning,
    Failed,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    status: Status,
    detail: String,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, detail: detail.into() }
    }

    fn warning(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, status: Status::Warning, detail: detail.into() }
    }

    fn failed(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, status: Status::Failed, detail: detail.into() }
    }
}

/// Looks at everything and prints it. Whether nothing failed.
pub(crate) async fn run(global: &GlobalArguments, output: Output) -> Result<bool> {
    let mut checks = vec![memory(), cores(), engine().await];
    match Place::find(global).await {
        Ok(Place::Server(client)) => match client.get("/admin/v1/models").await {
            Ok(document) => {
                let count = document["models"].as_array().map_or(0, Vec::len);
                checks.push(Check::ok("server", format!("answers at {}, {count} models", client.authority())));
            }
            Err(error) => checks.push(Check::failed("server", error.to_string())),
        },
        Ok(Place::Directory { library, lock }) => {
            checks.push(Check::warning("server", "none runs here: start one with `warmset serve`"));
            checks.push(space(lock.root()));
            checks.extend(models(&library).await);
        }
        Err(error) => checks.push(Check::failed("data directory", format!("{error:#}"))),
    }
    let healthy = checks.iter().all(|check| check.status != Status::Failed);
    output.result(&json!({ "healthy": healthy, "checks": checks }), |_| text(&checks));
    Ok(healthy)
}

fn text(checks: &[Check]) -> String {
    let rows = checks.iter().map(|check| {
        let status = match check.status {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Failed => "FAILED",
        };
        vec![status.to_owned(), check.name.to_owned(), check.detail.clone()]
    });
    output::table(&["STATUS", "CHECK", "DETAIL"], rows)
}

fn memory() -> Check {
    let Some(bytes) = machine::memory_bytes() else {
        return Check::warning("memory", "cannot tell how much there is: give --memory to `warmset serve`");
    };
    let pool = machine::default_memory(bytes);
    let (memory, reserve) = (format_bytes(pool), format_bytes(machine::default_reserve(pool)));
    Check::ok(
        "memory",
        format!("{}; a pool takes {memory} unless told otherwise, {reserve} of it reserved", format_bytes(bytes)),
    )
}

fn cores() -> Check {
    Check::ok("processor", format!("{} cores", machine::cores()))
}

/// Starts an engine process as a worker does.
async fn engine() -> Check {
    const NAME: &str = "engine process";
    let started = async {
        let directory = std::env::temp_dir().join(format!("warmset-doctor-{}", std::process::id()));
        let launcher = Launcher::new(std::env::current_exe()?)?;
        let options = SpawnOptions { log: directory.join("engine.log"), hello_deadline: HELLO_DEADLINE };
        let process = launcher.spawn(options).await?;
        let accelerators = match process.accelerators() {
            [] => "no accelerators".to_owned(),
            names => names.join(", "),
        };
        let detail = format!("starts; {}; {accelerators}", process.build());
        process.kill();
        // What is left of it is a log in the temporary directory, if it wrote any.
        let _ = std::fs::remove_dir_all(&directory);
        anyhow::Ok(detail)
    };
    match started.await {
        Ok(detail) => Check::ok(NAME, detail),
        Err(error) => Check::failed(NAME, format!("{error:#}")),
    }
}

fn space(root: &Path) -> Check {
    const NAME: &str = "data directory";
    match rustix::fs::statvfs(root) {
        Ok(figures) => {
            let free = figures.f_bavail.saturating_mul(figures.f_frsize);
            let detail = format!("{}, {} free", root.display(), format_bytes(free));
            if free < FREE_BYTES_LOW { Check::warning(NAME, detail) } else { Check::ok(NAME, detail) }
        }
        Err(error) => Check::failed(NAME, format!("{}: {error}", root.display())),
    }
}

/// The catalog opens, and every model's files are what they should be.
async fn models(library: &Library) -> Vec<Check> {
    let stored = match library.all().await {
        Ok(stored) => stored,
        Err(error) => return vec![Check::failed("catalog", format!("{error:#}"))],
    };
    let mut checks = vec![Check::ok("catalog", format!("{} models", stored.len()))];
    for model in stored {
        let store = library.store.clone();
        let name = model.model.name.clone();
        let verify = move || model.manifest.files.iter().try_for_each(|file| store.verify(&file.sha256).map(drop));
        match tokio::task::spawn_blocking(verify).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => checks.push(Check::failed("artifact", format!("{name}: {}", error.message))),
            Err(error) => checks.push(Check::failed("artifact", format!("{name}: {error}"))),
        }
    }
    checks
}
