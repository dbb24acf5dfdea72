//! `warmset model`: the same on a server and on a data directory.

use super::{
    arguments::{AliasCommand, GlobalArguments, ModelCommand, RollbackArguments},
    latency::latency_pairs,
    listing::list_text,
    place::Place,
    version,
};
use crate::{
    alone,
    client::{Client, model_path},
    config::{
        Config,
        units::{format_bytes, format_seconds, format_span},
    },
    output::{Output, bytes_of, fields, short_digest_of, table, text_of},
    repository::{
        ModelOptions, Repository, cold_excess_seconds, command_source, is_unknown, measurement_json, model_json,
        parse_name,
    },
    settings,
};
use anyhow::{Context, Result, anyhow, bail};
use hyper::Method;
use serde_json::{Map, Value, json};
use std::{path::Path, time::Duration};
use warmset_core::worker::ModelState;
use warmset_source::{Location, Trust};

/// How often a server is asked how far a fetch is.
const PROGRESS_PAUSE: Duration = Duration::from_millis(300);

/// Runs a command and prints its result.
pub(crate) async fn run(command: ModelCommand, global: &GlobalArguments, output: Output) -> Result<()> {
    check(&command)?;
    let place = Place::find(global).await?;
    let result = run_at(&place, command, output).await;
    place.leave().await;
    result
}

async fn run_at(place: &Place, command: ModelCommand, output: Output) -> Result<()> {
    match command {
        ModelCommand::Add(add) => {
            let document = add_model(place, add.into_options(), output).await?;
            output.result(&document, added_text);
        }
        ModelCommand::List => {
            let document = list(place).await?;
            output.result(&document, list_text);
        }
        ModelCommand::Show { name } => {
            let document = show(place, &name).await?;
            output.result(&document, show_text);
        }
        ModelCommand::Remove { name, digest: None } => {
            let document = remove(place, &name).await?;
            output.result(&document, |document| format!("removed {}", text_of(document, "name")));
        }
        ModelCommand::Remove { name, digest: Some(digest) } => {
            let document = remove_version(place, &name, &digest).await?;
            output.result(&document, |document| {
                format!("removed {} of {}", text_of(document, "digest"), text_of(document, "name"))
            });
        }
        ModelCommand::Promote(arguments) => version::promote(place, *arguments, output).await?,
        ModelCommand::Rollback(arguments) => version::roll_back(place, arguments, output).await?,
        ModelCommand::Versions { name } => version::versions(place, &name, output).await?,
        ModelCommand::Pin { name } => pin(place, &name, true, output).await?,
        ModelCommand::Unpin { name } => pin(place, &name, false, output).await?,
        ModelCommand::Load { name, no_wait } => {
            let _spinner = output.spinner(&format!("loading {name}"));
            let query = if no_wait { "/load?wait=false" } else { "/load" };
            let document = server(place, "load")?.call(Method::POST, &model_path(&name, query), None).await?;
            output.result(&document, |document| format!("{name} is {}", text_of(document, "state")));
        }
        ModelCommand::Unload { name } => {
            let document = server(place, "unload")?.call(Method::POST, &model_path(&name, "/unload"), None).await?;
            output.result(&document, unload_text);
        }
        ModelCommand::Logs { name, lines } => {
            let document = logs(place, &name, lines).await?;
            output.result(&document, logs_text);
        }
        ModelCommand::Profile { name, digest } => {
            let _spinner = output.spinner(&format!("measuring {name}"));
            let document = match place {
                Place::Server(client) => {
                    let body = json!({ "digest": digest });
                    client.call(Method::POST, &model_path(&name, "/profile"), Some(&body)).await?
                }
                Place::Directory { repository, lock } => {
                    alone::profile(repository, lock.root(), &name, digest.as_deref()).await?
                }
            };
            output.result(&document, profile_text);
        }
        ModelCommand::Alias(command) => alias(place, command, output).await?,
    }
    Ok(())
}

/// Refuses what cannot be a name before anything is opened or asked.
fn check(command: &ModelCommand) -> Result<()> {
    match command {
        ModelCommand::Show { name }
        | ModelCommand::Remove { name, .. }
        | ModelCommand::Rollback(RollbackArguments { name, .. })
        | ModelCommand::Versions { name }
        | ModelCommand::Pin { name }
        | ModelCommand::Unpin { name }
        | ModelCommand::Load { name, .. }
        | ModelCommand::Unload { name }
        | ModelCommand::Logs { name, .. }
        | ModelCommand::Profile { name, .. } => parse_name(name).map(drop),
        ModelCommand::Promote(arguments) => parse_name(&arguments.name).map(drop),
        _ => Ok(()),
    }
}

fn server<'a>(place: &'a Place, what: &str) -> Result<&'a Client> {
    match place {
        Place::Server(client) => Ok(client),
        Place::Directory { .. } => bail!("no server runs, so there is nothing to {what}: start `warmset serve` first"),
    }
}

pub(super) async fn add_model(place: &Place, mut options: ModelOptions, output: Output) -> Result<Value> {
    parse_name(&options.name)?;
    refuse_directory(&options.source)?;
    match place {
        Place::Directory { repository, .. } => {
            let (by, progress) = (version::by(None), output.bytes_progress(&options.name));
            let added = repository.add(&options, &by, Trust::Operator, progress).await?;
            let mut document = show_stored(repository, &options.name).await?;
            document["existed"] = json!(added.existed);
            document["candidate"] = json!(added.candidate);
            Ok(document)
        }
        Place::Server(client) => {
            // The server has a working directory of its own.
            options.source = absolute(&options.source)?;
            add_at_server(client, &options, output).await
        }
    }
}

/// Lets the server add a model, and shows how far it is with fetching its files.
async fn add_at_server(client: &Client, options: &ModelOptions, output: Output) -> Result<Value> {
    let mut body = serde_json::to_value(options)?;
    body["by"] = json!(version::by(None));
    let adding = client.call(Method::POST, "/admin/v1/models", Some(&body));
    tokio::pin!(adding);
    if !crate::output::shows_progress() || Location::parse(&options.source)?.path().is_some() {
        let _spinner = output.spinner(&format!("adding {}", options.name));
        return Ok(adding.await?);
    }
    let mut progress = output.bytes_progress(&options.name);
    loop {
        tokio::select! {
            added = &mut adding => return Ok(added?),
            () = tokio::time::sleep(PROGRESS_PAUSE) => {}
        }
        // A server that is too busy to say how far it is says so when it is done.
        let Ok(document) = client.get("/admin/v1/models").await else { continue };
        let mut fetches = document["fetches"].as_array().into_iter().flatten();
        if let Some(fetch) = fetches.find(|fetch| fetch["name"] == options.name.as_str()) {
            progress(fetch["done_bytes"].as_u64().unwrap_or(0), fetch["total_bytes"].as_u64().unwrap_or(0));
        }
    }
}

/// No engine would follow from a directory's name, which is not what is wrong with it.
fn refuse_directory(source: &str) -> Result<()> {
    if command_source(source).is_some() {
        return Ok(());
    }
    match Location::parse(source)?.path() {
        Some(path) if path.is_dir() => {
            bail!("{} is a directory: give a model file in it, such as one that ends in .gguf", path.display())
        }
        _ => Ok(()),
    }
}

/// A path as the server understands it; a URL as it is.
pub(super) fn absolute(source: &str) -> Result<String> {
    if command_source(source).is_some() {
        return Ok(source.to_owned());
    }
    let Location::File(path) = Location::parse(source)? else { return Ok(source.to_owned()) };
    let path = std::path::absolute(path)?.into_os_string();
    path.into_string().map_err(|path| anyhow!("the path {} is not UTF-8", path.display()))
}

async fn list(place: &Place) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get("/admin/v1/models").await?),
        Place::Directory { repository, .. } => {
            let stored = repository.all().await?;
            let mut models = Vec::with_capacity(stored.len());
            for model in &stored {
                let measured = repository.catalog.measurement(&model.model.digest, &worker_type()).await?;
                models.push(model_json(model, ModelState::Absent, measured.as_ref()));
            }
            Ok(json!({ "models": models }))
        }
    }
}

pub(super) async fn show(place: &Place, name: &str) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get(&model_path(name, "")).await?),
        Place::Directory { repository, .. } => show_stored(repository, name).await,
    }
}

async fn show_stored(repository: &Repository, name: &str) -> Result<Value> {
    let stored = repository.get(&parse_name(name)?).await?;
    let measurements = repository.measurements(&stored.model.digest).await?;
    let own = measurements.iter().find(|(kind, _)| *kind == worker_type()).map(|(_, measured)| measured);
    let mut document = model_json(&stored, ModelState::Absent, own);
    let shown = measurements.iter().map(|(kind, measured)| measurement_json(kind, measured, &stored));
    document["measurements"] = shown.collect();
    document["versions"] = repository.versions_json(&stored.model).await?;
    Ok(document)
}

/// The kind of this machine, as a server without a configuration file would call it.
fn worker_type() -> String {
    settings::worker_type(&Config::default())
}

async fn remove(place: &Place, name: &str) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.call(Method::DELETE, &model_path(name, ""), None).await?),
        Place::Directory { repository, .. } => {
            let removed = repository.remove(&parse_name(name)?).await?;
            Ok(json!({ "name": removed.name, "digest": removed.digest, "removed": true }))
        }
    }
}

async fn remove_version(place: &Place, name: &str, digest: &str) -> Result<Value> {
    match place {
        Place::Server(client) => {
            let body = json!({ "digest": digest });
            Ok(client.call(Method::POST, &model_path(name, "/remove_version"), Some(&body)).await?)
        }
        Place::Directory { repository, .. } => {
            let removed = repository.remove_version(&parse_name(name)?, digest).await?;
            Ok(json!({ "name": removed.model, "digest": removed.digest, "removed": true }))
        }
    }
}

async fn pin(place: &Place, name: &str, pin: bool, output: Output) -> Result<()> {
    let document = match place {
        Place::Server(client) => {
            let action = if pin { "/pin" } else { "/unpin" };
            client.call(Method::POST, &model_path(name, action), None).await?
        }
        Place::Directory { repository, .. } => {
            let model = repository.pin(&parse_name(name)?, pin).await?;
            show_stored(repository, model.name.as_str()).await?
        }
    };
    let verb = if pin { "pinned" } else { "unpinned" };
    output.result(&document, |document| format!("{verb} {}", text_of(document, "name")));
    Ok(())
}

async fn logs(place: &Place, name: &str, lines: usize) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get(&model_path(name, &format!("/logs?lines={lines}"))).await?),
        Place::Directory { repository, lock } => {
            let model = repository.catalog.resolve(&parse_name(name)?).await?;
            let path = lock.root().join("logs").join(format!("{}.log", model.digest.hex()));
            let tail = log_tail(&path, lines).with_context(|| format!("cannot read {}", path.display()))?;
            Ok(json!({ "name": name, "digest": model.digest, "lines": tail }))
        }
    }
}

/// The last lines of a log, which is bounded.
fn log_tail(path: &Path, lines: usize) -> std::io::Result<Vec<String>> {
    let mut tail = Vec::new();
    for path in warmset_engine::process::log_files(path) {
        match std::fs::read(path) {
            Ok(text) => tail.extend(String::from_utf8_lossy(&text).lines().map(str::to_owned)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(tail.split_off(tail.len().saturating_sub(lines)))
}

async fn alias(place: &Place, command: AliasCommand, output: Output) -> Result<()> {
    match command {
        AliasCommand::List => {
            let document = aliases(place).await?;
            output.result(&document, |document| {
                let rows = document["aliases"].as_array().into_iter().flatten();
                table(&["ALIAS", "MODEL"], rows.map(|row| vec![text_of(row, "alias"), text_of(row, "model")]))
            });
        }
        AliasCommand::Add { alias, model, replace } => {
            change_alias(place, &alias, Some(&model), replace).await?;
            let document = json!({ "alias": alias, "model": model });
            output.result(&document, |_| format!("{alias} now means {model}"));
        }
        AliasCommand::Remove { alias } => {
            change_alias(place, &alias, None, false).await?;
            output.result(&json!({ "alias": alias, "removed": true }), |_| format!("removed the alias {alias}"));
        }
    }
    Ok(())
}

async fn aliases(place: &Place) -> Result<Value> {
    let models = list(place).await?;
    let models = models["models"].as_array().into_iter().flatten();
    let aliases: Vec<Value> = models
        .flat_map(|model| {
            let names = model["aliases"].as_array().into_iter().flatten();
            names.map(|alias| json!({ "alias": alias, "model": model["name"] }))
        })
        .collect();
    Ok(json!({ "aliases": aliases }))
}

/// Adds the alias to a model, or takes it away.
async fn change_alias(place: &Place, alias: &str, model: Option<&str>, replace: bool) -> Result<()> {
    let (name, wanted) = (parse_name(alias)?, model.map(parse_name).transpose()?);
    match (place, wanted) {
        (Place::Server(client), Some(model)) => {
            let body = json!({ "alias": alias, "replace": replace });
            client.call(Method::POST, &model_path(model.as_str(), "/alias"), Some(&body)).await?;
        }
        (Place::Server(client), None) => {
            let body = json!({ "alias": alias, "remove": true });
            client.call(Method::POST, &model_path(alias, "/alias"), Some(&body)).await?;
        }
        (Place::Directory { repository, .. }, Some(model)) => {
            repository.catalog.add_alias(&name, &model, replace).await?
        }
        (Place::Directory { repository, .. }, None) => {
            let removed = repository.catalog.remove_alias(&name).await.map_err(anyhow::Error::from);
            if removed.as_ref().is_err_and(is_unknown) {
                bail!("{alias} is no alias: see `warmset model alias list`");
            }
            removed?;
        }
    }
    Ok(())
}

fn added_text(document: &Value) -> String {
    let name = text_of(document, "name");
    if let Some(candidate) = document["candidate"].as_str() {
        let verb = if document["existed"] == true { "already a version" } else { "added a version" };
        return format!(
            "{verb} of {name}: {candidate}\ncallers get it after `warmset model promote {name} {}`",
            short_digest_of(&document["candidate"])
        );
    }
    let verb = if document["existed"] == true { "already there:" } else { "added" };
    format!("{verb} {name} ({})", text_of(document, "digest"))
}

fn show_text(document: &Value) -> String {
    let aliases = document["aliases"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let by = if document["runtime"].is_null() { "architecture" } else { "runtime" };
    let mut pairs = vec![
        ("name", text_of(document, "name")),
        ("digest", text_of(document, "digest")),
        ("state", text_of(document, "state")),
        ("aliases", aliases.collect::<Vec<_>>().join(", ")),
        ("source", source_text(document)),
        ("engine", format!("{} ({})", text_of(document, "engine"), text_of(document, by))),
        ("file", bytes_of(document, "size_bytes")),
        ("memory", memory_text(document)),
    ];
    let settings = ["pin", "priority", "pool", "parallel", "max_concurrency", "critical_reserve", "cold", "fallback"];
    pairs.extend(settings.map(|key| (key, text_of(document, key))));
    let keep_alive = document["keep_alive_seconds"].as_f64();
    pairs.extend([
        ("context_tokens", context_text(document)),
        ("keep_alive", keep_alive.map_or_else(|| "as long as it is worth its memory".to_owned(), format_seconds)),
        ("memory_cap", document["memory_cap_bytes"].as_u64().map_or_else(|| "none".to_owned(), format_bytes)),
        ("device", device_text(document)),
        ("schedule", schedule_text(document)),
        ("targets", targets_text(document)),
    ]);
    if let Some(forecast) = document["forecast"].as_object() {
        pairs.extend([("expected", expected_text(forecast)), ("preloads", preloads_text(forecast))]);
    }
    pairs.extend(latency_pairs(&document["latency"]));
    let mut text = fields(&pairs);
    for measured in document["measurements"].as_array().into_iter().flatten() {
        text += &format!("\nmeasured on {}:\n{}", text_of(measured, "worker_type"), measurement_text(measured));
    }
    text
}

fn schedule_text(document: &Value) -> String {
    let windows = document["schedule"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let windows = windows.collect::<Vec<_>>().join("; ");
    if windows.is_empty() { "none".to_owned() } else { windows }
}

/// What was promised, and whether a cold start can keep it.
fn targets_text(document: &Value) -> String {
    let target = |key: &str, what: &str| Some(format!("{} ms {what}", document["slo"][key].as_u64()?));
    let both = [target("ttft_p99_warm_ms", "warm"), target("ttft_p99_cold_ms", "cold")];
    let text = both.into_iter().flatten().collect::<Vec<_>>().join(", ");
    match cold_excess_seconds(document) {
        Some(excess) => format!("{text} (a cold start takes {} longer)", format_seconds(excess)),
        None if text.is_empty() => "none".to_owned(),
        None => text,
    }
}

/// When it is expected again, and why.
fn expected_text(forecast: &Map<String, Value>) -> String {
    let source = match forecast["source"].as_str() {
        Some("schedule") => return "its schedule keeps it warm now".to_owned(),
        Some("intervals") => format!("from {} times between its requests", forecast["intervals"]),
        Some(_) => "from the time of day of its requests".to_owned(),
        None => return format!("nothing beyond its demand of late ({} intervals seen)", forecast["intervals"]),
    };
    let after = |key: &str| {
        let seconds = forecast[key].as_f64().unwrap_or(0.0);
        if seconds < 1.0 { "now".to_owned() } else { format!("in {}", format_span(seconds)) }
    };
    format!("{}, due for a load {}, {source}", after("next_in_seconds"), after("due_in_seconds"))
}

/// How often it was right.
fn preloads_text(forecast: &Map<String, Value>) -> String {
    let count = |key: &str| forecast[key].as_u64().unwrap_or(0);
    let (used, late, wasted) = (count("preloads_used"), count("preloads_late"), count("preloads_wasted"));
    format!("{used} saved a cold start, {late} came late, {wasted} were not used")
}

/// Where it came from, and as what that will always be found again.
fn source_text(document: &Value) -> String {
    let source = text_of(document, "source");
    match document["pinned_source"].as_str().filter(|pinned| *pinned != source) {
        Some(pinned) => format!("{source} (pinned: {pinned})"),
        None => source,
    }
}

/// `~` stands before what is estimated, as in lists.
fn memory_text(document: &Value) -> String {
    let measured = document["measured"] == true;
    let (mark, note) = if measured { ("", "") } else { ("~", " (estimates: not measured here yet)") };
    let (steady, peak) = (bytes_of(document, "steady_bytes"), bytes_of(document, "peak_bytes"));
    format!("{mark}{steady}, {mark}{peak} while loading{note}")
}

fn context_text(document: &Value) -> String {
    match document["context_tokens"].as_u64() {
        Some(0) => "0 (the model's own limit, at most 4096)".to_owned(),
        _ => text_of(document, "context_tokens"),
    }
}

fn device_text(document: &Value) -> String {
    match document["accelerators"].as_u64() {
        None | Some(0) => "cpu".to_owned(),
        Some(1) => "gpu".to_owned(),
        Some(count) => format!("gpu:{count}"),
    }
}

fn unload_text(document: &Value) -> String {
    let (name, state) = (text_of(document, "name"), text_of(document, "state"));
    let pinned = "; it is pinned, and stays out until somebody asks for it or loads it";
    format!("{name} is {state}{}", if document["pin"] == true { pinned } else { "" })
}

fn measurement_text(document: &Value) -> String {
    let seconds = |key: &str| document[key].as_f64().map_or_else(|| "-".to_owned(), format_seconds);
    let rate = |key: &str| document[key].as_f64().map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1} tokens/s"));
    let penalty = document["first_request_penalty_seconds"].as_f64();
    fields(&[
        ("download", seconds("download_seconds")),
        ("verify", seconds("verify_seconds")),
        ("load", seconds("load_seconds")),
        ("warm-up", seconds("warm_up_seconds")),
        (
            "first request",
            penalty.map_or_else(|| "-".to_owned(), |penalty| format!("{} slower", format_seconds(penalty))),
        ),
        ("peak memory", bytes_of(document, "peak_bytes")),
        ("steady memory", bytes_of(document, "steady_bytes")),
        ("prefill", rate("prefill_tokens_per_second")),
        ("decode", rate("decode_tokens_per_second")),
        ("KV per token", document["kv_bytes_per_token"].as_u64().map_or_else(|| "-".to_owned(), format_bytes)),
    ])
}

fn profile_text(document: &Value) -> String {
    format!("{} on {}\n{}", text_of(document, "name"), text_of(document, "worker_type"), measurement_text(document))
}

fn logs_text(document: &Value) -> String {
    let lines = document["lines"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let lines: Vec<&str> = lines.collect();
    if lines.is_empty() {
        return format!("{} has logged nothing yet", text_of(document, "name"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_models_read_well() {
        let model = json!({
            "name": "a", "digest": format!("sha256:{}", "ab".repeat(32)), "state": "ready", "pin": true,
            "engine": "llama", "architecture": "llama", "size_bytes": 98_362_432u64, "steady_bytes": 2048u64,
            "peak_bytes": 4096u64, "measured": false, "aliases": ["b"],
            "measurements": [{"worker_type": "cpu-2", "load_seconds": 0.25}],
        });
        let text = list_text(&json!({ "models": [model] }));
        for word in ["NAME", "ready", "pinned", "93.8 MiB", "~2.0 KiB", "abababababab"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert!(!text.contains("POOL") && !text.contains("PARKED"), "{text}");
        assert!(list_text(&json!({ "models": [] })).contains("no models yet"));
        let other = json!({ "name": "b", "pool": "chat", "parked": 3 });
        let fetch = json!({ "name": "c", "done_bytes": 1, "total_bytes": 2 });
        let text = list_text(&json!({ "models": [{ "name": "a", "pool": "default" }, other], "fetches": [fetch] }));
        let line = |name: &str| text.lines().find(|line| line.trim().starts_with(name)).unwrap_or_default().to_owned();
        assert!(line("NAME").contains("POOL") && line("NAME").contains("PARKED"), "{text}");
        assert!(line("b").contains("chat") && line("b").contains('3') && line("c").contains("fetching 50 %"), "{text}");
        let text = show_text(&model);
        assert!(text.contains("measured on cpu-2") && text.contains("250 ms"), "{text}");
        assert!(text.contains("~2.0 KiB, ~4.0 KiB while loading (estimates"), "{text}");
    }

    #[test]
    fn a_model_shows_every_setting_in_words() {
        let plain =
            show_text(&json!({ "context_tokens": 0, "accelerators": 0, "measured": true, "steady_bytes": 1024 }));
        for words in ["0 (the model's own limit", "as long as it is worth", "none", "cpu", " 1.0 KiB, "] {
            assert!(plain.contains(words), "{words} in {plain}");
        }
        let set = json!({
            "context_tokens": 512, "accelerators": 2, "keep_alive_seconds": 90.0, "memory_cap_bytes": 1u64 << 30,
        });
        let set = show_text(&set);
        for words in ["512", "gpu:2", "90.00 s", "1.0 GiB"] {
            assert!(set.contains(words), "{words} in {set}");
        }
    }

    #[test]
    fn a_pinned_model_that_is_unloaded_stays_out() {
        let text = unload_text(&json!({ "name": "a", "state": "draining", "pin": true }));
        assert!(text.starts_with("a is draining; it is pinned, and stays out until"), "{text}");
        assert_eq!(unload_text(&json!({ "name": "a", "state": "absent", "pin": false })), "a is absent");
    }

    #[test]
    fn logs_are_read_from_both_files_and_their_absence_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.log");
        assert_eq!(log_tail(&path, 10).unwrap(), Vec::<String>::new());
        std::fs::write(directory.path().join("x.log.1"), "one\ntwo\n").unwrap();
        std::fs::write(&path, "three\n").unwrap();
        assert_eq!(log_tail(&path, 2).unwrap(), ["two", "three"]);
        assert_eq!(log_tail(&path, 10).unwrap().len(), 3);
        assert_eq!(logs_text(&json!({ "name": "a", "lines": ["x", "y"] })), "x\ny");
        assert_eq!(logs_text(&json!({ "name": "a", "lines": [] })), "a has logged nothing yet");
    }

    #[test]
    fn what_is_no_name_is_refused_before_anything_is_asked() {
        assert!(check(&ModelCommand::Show { name: "../x".into() }).is_err());
        assert!(check(&ModelCommand::List).is_ok());
        assert!(absolute("file://other/x").is_err());
        assert!(refuse_directory("/").unwrap_err().to_string().contains("/ is a directory: give a model file"));
        assert!(refuse_directory("/nonexistent/a.gguf").is_ok());
        assert!(absolute("x.gguf").unwrap().starts_with('/'));
    }
}
