//! A llama-swap configuration as `[[runtime]]` and `[[model]]`.
//!
//! Each model becomes a command that is started on demand. Commands that are the same but for the model's file become one
//! runtime. What has no counterpart is said, not dropped.

use super::words::{expand, option, set_option, words};
use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;
use serde_json::{Map, Value};
use std::{collections::BTreeMap, path::Path};
use warmset_core::ModelName;

/// The longest file that is read.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// The longest name of a runtime.
const RUNTIME_NAME_BYTES_MAX: usize = 64;
/// Requests that may run at once.
const CONCURRENCY_MAX: u64 = 64;
/// Programs that start their server somewhere else, where it can neither be measured nor ended.
const CONTAINERS: [&str; 4] = ["docker", "podman", "nerdctl", "kubectl"];
/// What says which file a server opens.
const MODEL_OPTIONS: [&str; 2] = ["-m", "--model"];
const CONTEXT_OPTIONS: [&str; 2] = ["-c", "--ctx-size"];
const PARALLEL_OPTIONS: [&str; 2] = ["-np", "--parallel"];

/// What became of a file.
#[derive(Debug)]
pub(crate) struct Imported {
    /// Our configuration.
    pub(crate) toml: String,
    /// The names of its models.
    pub(crate) models: Vec<String>,
    /// What was not carried over, each with its place.
    pub(crate) notes: Vec<String>,
}

#[derive(Default, Serialize)]
struct Document {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    runtime: Vec<Runtime>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    model: Vec<Model>,
}

#[derive(Clone, PartialEq, Serialize)]
struct Runtime {
    name: String,
    command: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    cwd: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    visible_devices: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    health: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    health_timeout: Option<u64>,
}

#[derive(Serialize)]
struct Model {
    name: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    source: String,
    engine: &'static str,
    runtime: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parallel: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_concurrency: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_alive: Option<u64>,
}

/// Reads a file and turns it into ours.
pub(crate) fn import(path: &Path) -> Result<Imported> {
    let cannot = || format!("cannot read {}: give a llama-swap configuration", path.display());
    let metadata = std::fs::metadata(path).with_context(cannot)?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        bail!("{} is no regular file of at most {FILE_BYTES_MAX} bytes", path.display());
    }
    let text = std::fs::read_to_string(path).with_context(cannot)?;
    let directory = std::path::absolute(path)?.parent().map(Path::to_path_buf).unwrap_or_default();
    let directory = directory.to_str().ok_or_else(|| anyhow!("{} is not UTF-8", directory.display()))?;
    convert(&text, directory).with_context(|| format!("{} is no llama-swap configuration", path.display()))
}

fn convert(text: &str, directory: &str) -> Result<Imported> {
    let root: Value = serde_saphyr::from_str(text).map_err(|error| anyhow!(error.to_string()))?;
    let root = root.as_object().ok_or_else(|| anyhow!("it is no mapping"))?;
    let models = root.get("models").and_then(Value::as_object).ok_or_else(|| anyhow!("it has no models"))?;
    let mut importer = Importer { root, directory, document: Document::default(), notes: Vec::new() };
    importer.note_rest();
    for (id, model) in models {
        if let Err(reason) = importer.take(id, model) {
            importer.notes.push(format!("models.{id}: left out: {reason}"));
        }
    }
    let names = importer.document.model.iter().map(|model| model.name.clone()).collect();
    Ok(Imported { toml: toml::to_string_pretty(&importer.document)?, models: names, notes: importer.notes })
}

struct Importer<'a> {
    root: &'a Map<String, Value>,
    directory: &'a str,
    document: Document,
    notes: Vec<String>,
}

impl Importer<'_> {
    fn note(&mut self, place: &str, what: impl std::fmt::Display) {
        self.notes.push(format!("{place}: {what}"));
    }

    /// What is said for all models and has no counterpart.
    fn note_rest(&mut self) {
        let taken = ["macros", "models", "globalTTL", "healthCheckTimeout", "startPort", "$schema"];
        let root = self.root;
        for key in root.keys().filter(|key| !taken.contains(&key.as_str())) {
            let what = match key.as_str() {
                "groups" | "matrix" | "profiles" => {
                    "which models fit together follows from the memory they take, see [worker] memory"
                }
                "hooks" => "a model that must be in memory from the start is pinned: pin = true",
                "apiKeys" => "keys are not carried over",
                "logLevel" | "logTimeFormat" | "logToStdout" => "what is logged is said by RUST_LOG",
                _ => "has no counterpart",
            };
            self.note(key, what);
        }
        self.note(
            "env",
            "commands get no variables of the server's own environment: give each [[runtime]] an env of what it needs",
        );
    }

    fn take(&mut self, id: &str, model: &Value) -> Result<(), String> {
        let fields = model.as_object().ok_or("it is no mapping")?;
        let place = format!("models.{id}");
        let name = ModelName::parse(id).map_err(|error| format!("its name cannot be one here: {error}"))?.to_string();
        let macros = self.macros(id, fields)?;
        let text = |key: &str| fields.get(key).and_then(Value::as_str).map(|text| expand(text, &macros)).transpose();
        let mut command = words(&text("cmd")?.ok_or("it has no cmd")?)?;
        let program = Path::new(&command[0]).file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if CONTAINERS.contains(&program.as_str()) {
            return Err(format!(
                "{program} starts it in a container, where it is neither measured nor ended: give the server's own command"
            ));
        }
        use_given_port(&mut command, text("proxy")?.as_deref())?;
        let (source, found) = source_of(id, &mut command);
        if let Some(what) = found {
            self.note(&place, what);
        }
        let parallel =
            option(&command, &PARALLEL_OPTIONS).and_then(|value| value.parse().ok()).filter(|number| *number > 0);
        let context =
            option(&command, &CONTEXT_OPTIONS).and_then(|value| value.parse::<u64>().ok()).filter(|number| *number > 0);
        let (env, visible_devices) = environment(fields, &macros)?;
        let health = text("checkEndpoint")?.filter(|path| path != "none");
        let health_timeout = self.root.get("healthCheckTimeout").and_then(Value::as_u64);
        let cwd = self.directory.to_owned();
        let runtime = Runtime { name: String::new(), command, env, cwd, visible_devices, health, health_timeout };
        let runtime = self.runtime(id, runtime);
        let aliases = self.aliases(&place, fields);
        let limit = fields.get("concurrencyLimit").and_then(Value::as_u64).filter(|limit| *limit > 0);
        self.note_model(&place, fields);
        self.document.model.push(Model {
            name,
            aliases,
            source,
            engine: "command",
            runtime,
            context_tokens: context.map(|tokens| tokens / parallel.unwrap_or(1)),
            parallel,
            max_concurrency: limit.map(|limit| limit.min(CONCURRENCY_MAX)),
            keep_alive: self.keep_alive(fields),
        });
        Ok(())
    }

    /// The macros that hold for a model: its own go before those of all.
    fn macros(&self, id: &str, fields: &Map<String, Value>) -> Result<BTreeMap<String, String>, String> {
        let mut macros = BTreeMap::from([("MODEL_ID".to_owned(), id.to_owned())]);
        for table in [self.root.get("macros"), fields.get("macros")].into_iter().flatten() {
            for (name, value) in table.as_object().ok_or("its macros are no mapping")? {
                let text = match value {
                    Value::String(text) => text.trim_end().to_owned(),
                    Value::Number(_) | Value::Bool(_) => value.to_string(),
                    _ => return Err(format!("the macro {name} is neither a text nor a number")),
                };
                macros.insert(name.clone(), text);
            }
        }
        Ok(macros)
    }

    /// The name of the runtime that does the same, or of a new one.
    fn runtime(&mut self, id: &str, runtime: Runtime) -> String {
        let alike = |known: &&Runtime| Runtime { name: String::new(), ..(*known).clone() } == runtime;
        if let Some(known) = self.document.runtime.iter().find(alike) {
            return known.name.clone();
        }
        let plain = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
        let base: String = id
            .chars()
            .map(|character| if plain(character) { character } else { '-' })
            .take(RUNTIME_NAME_BYTES_MAX - 4)
            .collect();
        let taken = |name: &str| self.document.runtime.iter().any(|known| known.name == name);
        let numbered = (2..).map(|number| format!("{base}-{number}"));
        let name = std::iter::once(base.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(base);
        self.document.runtime.push(Runtime { name: name.clone(), ..runtime });
        name
    }

    fn aliases(&mut self, place: &str, fields: &Map<String, Value>) -> Vec<String> {
        let mut aliases = Vec::new();
        for alias in fields.get("aliases").and_then(Value::as_array).into_iter().flatten() {
            match alias.as_str().or_else(|| alias["id"].as_str()).map(ModelName::parse) {
                Some(Ok(alias)) => aliases.push(alias.to_string()),
                _ => self.note(place, format!("the alias {alias} cannot be a name here")),
            }
        }
        aliases
    }

    fn keep_alive(&self, fields: &Map<String, Value>) -> Option<u64> {
        let own = fields.get("ttl").and_then(Value::as_i64).filter(|seconds| *seconds >= 0);
        let all = || self.root.get("globalTTL").and_then(Value::as_i64);
        own.or_else(all).and_then(|seconds| u64::try_from(seconds).ok()).filter(|seconds| *seconds > 0)
    }

    /// What is said of one model and has no counterpart.
    fn note_model(&mut self, place: &str, fields: &Map<String, Value>) {
        const TAKEN: [&str; 9] =
            ["cmd", "proxy", "env", "ttl", "aliases", "macros", "checkEndpoint", "concurrencyLimit", "name"];
        for key in fields.keys().filter(|key| !TAKEN.contains(&key.as_str())) {
            let what = match key.as_str() {
                "useModelName" => "the server is asked for the model's own name: let its command say that name",
                "cmdStop" => "a command is ended with SIGTERM, then SIGKILL",
                "filters" => "parameters of requests are passed on as they are",
                "unlisted" => "every model is listed",
                _ => "has no counterpart",
            };
            self.note(&format!("{place}.{key}"), what);
        }
        if fields.get("checkEndpoint").is_some_and(|path| path == "none") {
            self.note(&format!("{place}.checkEndpoint"), "a server is always asked whether it can serve");
        }
    }
}

/// Lets a server listen on the port that it is given, also where the file has a fixed one.
fn use_given_port(command: &mut [String], proxy: Option<&str>) -> Result<(), String> {
    if command.iter().any(|word| word.contains("${PORT}")) {
        return Ok(());
    }
    let fixed = option(command, &["--port", "-p"]).map(str::to_owned);
    let (_, port) = proxy.unwrap_or_default().trim_end_matches('/').rsplit_once(':').unwrap_or_default();
    match fixed {
        Some(fixed) if port.is_empty() || fixed == port => {
            set_option(command, &["--port", "-p"], "${PORT}");
            Ok(())
        }
        _ => Err("its cmd does not say ${PORT}, and which of its words is the port is not clear".to_owned()),
    }
}

/// Where the model's file is, if the command says so; it is then copied into the store, and the command opens that one.
fn source_of(id: &str, command: &mut [String]) -> (String, Option<String>) {
    let own = format!("command:{id}");
    let Some(path) = option(command, &MODEL_OPTIONS).map(str::to_owned) else { return (own, None) };
    let is_file = path.to_ascii_lowercase().ends_with(".gguf");
    if !is_file || !path.starts_with('/') {
        let what = is_file.then(|| format!("{path} is a relative path: the command opens it by itself, unverified; give an absolute one to have it in the store"));
        return (own, what);
    }
    set_option(command, &MODEL_OPTIONS, "${MODEL}");
    (path, None)
}

/// Variables, and the devices that one of them makes visible.
fn environment(
    fields: &Map<String, Value>,
    macros: &BTreeMap<String, String>,
) -> Result<(BTreeMap<String, String>, Option<String>), String> {
    let mut variables = BTreeMap::new();
    for entry in fields.get("env").and_then(Value::as_array).into_iter().flatten() {
        let entry = expand(entry.as_str().unwrap_or_default(), macros)?;
        let (name, value) = entry.split_once('=').ok_or_else(|| format!("{entry:?} in its env is no NAME=value"))?;
        variables.insert(name.to_owned(), value.to_owned());
    }
    let devices = variables.remove("CUDA_VISIBLE_DEVICES");
    Ok((variables, devices))
}

#[cfg(test)]
mod tests;
