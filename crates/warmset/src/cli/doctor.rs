//! `warmset doctor`: what this machine, the data directory and the server are like, and what to do about it.

use super::{
    arguments::GlobalArguments,
    place::{Place, Sought},
};
use crate::{
    client::{CallError, Client},
    config::units::{format_bytes, format_seconds},
    data, machine,
    output::{self, Output, count, text_of},
    repository::{Repository, cold_excess_seconds},
    settings,
};
use anyhow::Result;
use serde::Serialize;
use serde_json::{Value, json};
use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};
use warmset_core::Bytes;
use warmset_engine::process::{Launcher, SpawnOptions};
use warmset_store::{ManifestFile, path_in};

/// Free space below which adding models will soon fail.
const FREE_BYTES_LOW: u64 = 1 << 30;
/// The name of what is said about the files of models.
const ARTIFACTS: &str = "artifacts";
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
    let mut checks = vec![cores(), engine().await];
    match look(global).await {
        Ok(found) => checks.extend(found),
        Err(error) => checks.push(Check::failed("data directory", format!("{error:#}"))),
    }
    let healthy = checks.iter().all(|check| check.status != Status::Failed);
    output.result(&json!({ "healthy": healthy, "checks": checks }), |_| text(&checks));
    Ok(healthy)
}

/// Looks at the server or the data directory. What is not there is not made.
async fn look(global: &GlobalArguments) -> Result<Vec<Check>> {
    let sought = Sought::find(global).await?;
    if let Sought::Directory(root) = &sought
        && !data::is_used(root)
    {
        let detail = format!("{} holds nothing yet: `warmset serve` or `warmset model add` makes it", root.display());
        return Ok(vec![memory(None), Check::warning("data directory", detail)]);
    }
    let place = Place::open(sought).await?;
    let checks = match &place {
        Place::Server(client) => server(client, global).await,
        Place::Directory { repository, lock } => {
            let none = Check::warning("server", "none runs here: start one with `warmset serve`");
            let mut checks = vec![memory(None), none, space(lock.root())];
            checks.extend(models(repository, lock.root()).await);
            checks
        }
    };
    place.leave().await;
    Ok(checks)
}

/// A running server: its memory, and every model's files if they lie on this machine.
async fn server(client: &Client, global: &GlobalArguments) -> Vec<Check> {
    let documents = async { Ok((client.get("/admin/v1/models").await?, client.get("/admin/v1/workers").await?)) };
    let (models, workers) = match documents.await {
        Ok(documents) => documents,
        Err(error) => return vec![Check::failed("server", CallError::to_string(&error))],
    };
    let promises = promises(&models);
    let models = listed(&models);
    let detail = format!("answers at {}, {}", client.authority(), count(models.len(), "model"));
    let mut checks = vec![memory(pool_of(&workers)), Check::ok("server", detail)];
    checks.extend(promises);
    // Not by its name alone: the server may be on another machine, which has a directory of that name too.
    let said = workers["data"].as_str().map(PathBuf::from);
    let root = global.data.clone().or(said).unwrap_or_else(data::default_directory);
    if data::server_of(&root).is_some_and(|address| is_same(&address, client.authority())) {
        checks.push(space(&root));
        checks.extend(artifacts(&root, &models));
    } else {
        let detail =
            format!("{} is not this server's: run doctor where the server runs, or give --data", root.display());
        checks.push(Check::warning(ARTIFACTS, detail));
    }
    checks
}

/// Whether the address in a lock is the one that a server was reached by.
fn is_same(address: &str, authority: &str) -> bool {
    let port = |text: &str| text.rsplit_once(':').map(|(_, port)| port.to_owned());
    let host = authority.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']);
    let loopback = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    address == authority || (loopback && port(address) == port(authority))
}

/// Names and files of the models in a server's list, those of all versions.
fn listed(document: &Value) -> Vec<(String, Vec<ManifestFile>)> {
    let models = document["models"].as_array().into_iter().flatten();
    let files = |model: &Value| serde_json::from_value(model["version_files"].clone()).unwrap_or_default();
    models.map(|model| (text_of(model, "name"), files(model))).collect()
}

/// Models that cannot keep on a cold start what their callers were promised. One that is pinned has none.
fn promises(document: &Value) -> Vec<Check> {
    let models = document["models"].as_array().into_iter().flatten().filter(|model| model["pin"] != true);
    let broken = models.filter_map(|model| {
        let excess = format_seconds(cold_excess_seconds(model)?);
        let (name, target) = (text_of(model, "name"), text_of(&model["slo"], "ttft_p99_cold_ms"));
        let cold = format_seconds(model["cold_seconds"].as_f64()?);
        let detail = format!(
            "{name}: a cold start takes {cold} here, {excess} more than its target of {target} ms: pin it (`warmset model \
             pin {name}`), give it a pool of its own (a [worker] slice) or a schedule, or keep the data directory on a faster disk"
        );
        Some(Check::warning("targets", detail))
    });
    broken.collect()
}

/// Memory and reserve of a server's pool.
fn pool_of(workers: &Value) -> Option<(Bytes, Bytes)> {
    let tiers = workers["workers"][0]["memory"]["tiers"].as_array()?;
    let host = tiers.iter().find(|tier| tier["tier"] == "host")?;
    Some((host["capacity_bytes"].as_u64()?, host["reserve_bytes"].as_u64()?))
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

/// The machine's memory, and the pool of the server that runs or the one that would be.
fn memory(pool: Option<(Bytes, Bytes)>) -> Check {
    const NAME: &str = "memory";
    let Some(bytes) = machine::memory_bytes() else {
        return Check::warning(NAME, "cannot tell how much there is: give --memory to `warmset serve`");
    };
    let machine = format_bytes(bytes);
    let Some((memory, reserve)) = pool else {
        let memory = machine::default_memory(bytes);
        let (pool, reserve) = (format_bytes(memory), format_bytes(machine::default_reserve(memory)));
        return Check::ok(
            NAME,
            format!("{machine}; a pool takes {pool} unless told otherwise, {reserve} of it reserved"),
        );
    };
    if let Some(warning) = settings::beyond_machine(memory, Some(bytes)) {
        return Check::warning(NAME, warning);
    }
    let (pool, reserve) = (format_bytes(memory), format_bytes(reserve));
    Check::ok(NAME, format!("{machine}; the server's pool takes {pool}, {reserve} of it reserved"))
}

fn cores() -> Check {
    Check::ok("processor", count(machine::cores() as usize, "core"))
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

/// Every file of every model is there and as long as it should be.
fn artifacts(root: &Path, models: &[(String, Vec<ManifestFile>)]) -> Vec<Check> {
    let store = root.join("store");
    let mut checks = Vec::new();
    for (name, files) in models {
        let wrong = files.iter().find_map(|file| wrong_with(&path_in(&store, &file.sha256), file.size_bytes));
        if let Some(reason) = wrong {
            let detail = format!("{name}: {reason}: add it again, or remove the version");
            checks.push(Check::failed(ARTIFACTS, detail));
        }
    }
    if checks.is_empty() {
        let files: usize = models.iter().map(|(_, files)| files.len()).sum();
        let detail = format!("{} of {} there, of the right size", count(files, "file"), count(models.len(), "model"));
        checks.push(Check::ok(ARTIFACTS, detail));
    }
    checks
}

fn wrong_with(path: &Path, size_bytes: Bytes) -> Option<String> {
    match path.metadata() {
        Ok(metadata) if metadata.len() == size_bytes => None,
        Ok(metadata) => {
            let (found, wanted) = (metadata.len(), format_bytes(size_bytes));
            Some(format!("{} has {found} bytes instead of {size_bytes} ({wanted})", path.display()))
        }
        Err(error) => Some(format!("{}: {error}", path.display())),
    }
}

/// The catalog opens, and every model's files are what they should be.
async fn models(repository: &Repository, root: &Path) -> Vec<Check> {
    let files = match repository.version_files().await {
        Ok(files) => files,
        Err(error) => return vec![Check::failed("catalog", format!("{error:#}"))],
    };
    let mut checks = vec![Check::ok("catalog", count(files.len(), "model"))];
    let models: Vec<_> = files.into_iter().map(|(name, files)| (name.to_string(), files)).collect();
    let found = artifacts(root, &models);
    let complete = found.iter().all(|check| check.status == Status::Ok);
    checks.extend(found);
    // A file that is missing or cut short was named already.
    for (name, files) in models.into_iter().filter(|_| complete) {
        let store = repository.store.clone();
        let verify = move || files.iter().try_for_each(|file| store.verify(&file.sha256).map(drop));
        match tokio::task::spawn_blocking(verify).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => checks.push(Check::failed(ARTIFACTS, format!("{name}: {}", error.message))),
            Err(error) => checks.push(Check::failed(ARTIFACTS, format!("{name}: {error}"))),
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_missing_or_cut_short_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let sha256 = warmset_core::Digest([7; 32]);
        let file = ManifestFile { name: "model.gguf".into(), sha256, size_bytes: 3 };
        let models = [("a".to_owned(), vec![file])];
        let check = |expected: Status, words: &str| {
            let checks = artifacts(directory.path(), &models);
            assert_eq!((checks.len(), checks[0].status), (1, expected), "{checks:?}");
            assert!(checks[0].detail.contains(words), "{checks:?}");
        };
        check(Status::Failed, "a: ");
        let path = path_in(&directory.path().join("store"), &sha256);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "ab").unwrap();
        check(Status::Failed, "has 2 bytes instead of 3");
        std::fs::write(&path, "abc").unwrap();
        check(Status::Ok, "1 file of 1 model there");
    }

    #[test]
    fn a_promise_that_no_cold_start_keeps_is_named_with_what_to_do() {
        let model = |pin: bool, target: u32, seconds: Option<f64>| json!({ "models": [{ "name": "a", "pin": pin, "slo": { "ttft_p99_cold_ms": target }, "cold_seconds": seconds }] });
        let found = promises(&model(false, 2_000, Some(4.5)));
        assert_eq!(found.len(), 1);
        for words in
            ["a: a cold start takes 4.50 s here, 2.50 s more than its target of 2000 ms", "pin it", "pool", "disk"]
        {
            assert!(found[0].detail.contains(words), "{found:?}");
        }
        for kept in [model(true, 2_000, Some(4.5)), model(false, 5_000, Some(4.5)), model(false, 2_000, None)] {
            assert!(promises(&kept).is_empty());
        }
    }

    #[test]
    fn what_a_server_says_is_understood() {
        let workers = json!({ "workers": [{ "memory": { "tiers": [
            { "tier": "gpu0", "capacity_bytes": 1, "reserve_bytes": 0 },
            { "tier": "host", "capacity_bytes": 300u64 << 20, "reserve_bytes": 64u64 << 20 },
        ] } }] });
        let pool = pool_of(&workers);
        assert_eq!(pool, Some((300 << 20, 64 << 20)));
        let check = memory(pool);
        assert!(check.detail.contains("the server's pool takes 300.0 MiB, 64.0 MiB of it reserved"), "{check:?}");
        assert_eq!(memory(Some((1 << 60, 1))).status, Status::Warning);
        let digest = format!("sha256:{}", "ab".repeat(32));
        let models = json!({ "models": [{ "name": "a", "version_files": [
            { "name": "model.gguf", "sha256": digest, "size_bytes": 5 },
        ] }] });
        assert_eq!(listed(&models)[0].1[0].size_bytes, 5);
        for (authority, same) in
            [("127.0.0.1:1", true), ("localhost:1", true), ("[::1]:1", true), ("127.0.0.1:2", false)]
        {
            assert_eq!(is_same("127.0.0.1:1", authority), same, "{authority}");
        }
        assert!(!is_same("127.0.0.1:1", "elsewhere:1"));
    }
}
