//! `warmset import`: what other tools have, as far as it can be taken over.

use super::{arguments::GlobalArguments, model::add_model, place::Place};
use crate::{
    config::units::format_bytes,
    import,
    output::{self, Output, bytes_of, table, text_of},
    repository::{ModelOptions, parse_name},
};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use serde_json::{Value, json};
use std::path::PathBuf;
use warmset_source::{Environment, OllamaModel, list_ollama};

/// `warmset import ...`
#[derive(Debug, Subcommand)]
pub(crate) enum ImportCommand {
    /// Turn a llama-swap configuration (YAML) into one of ours (TOML)
    LlamaSwap {
        /// The file
        file: PathBuf,
        /// Where to write it, a file that is not there yet [default: standard output]
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// List the models that Ollama has on this machine, or add them
    Ollama {
        /// Ollama's directory [default: OLLAMA_MODELS, or where Ollama keeps its models]
        directory: Option<PathBuf>,
        /// Add this one
        #[arg(long, value_name = "NAME")]
        add: Vec<String>,
        /// Add all of them
        #[arg(long, conflicts_with = "add")]
        all: bool,
    },
}

/// Runs a command and prints its result.
pub(crate) async fn run(command: ImportCommand, global: &GlobalArguments, output: Output) -> Result<()> {
    match command {
        ImportCommand::LlamaSwap { file, to } => llama_swap(&file, to, output),
        ImportCommand::Ollama { directory, add, all } => ollama(directory, &add, all, global, output).await,
    }
}

fn llama_swap(file: &std::path::Path, to: Option<PathBuf>, output: Output) -> Result<()> {
    let imported = import::import(file)?;
    if let Some(path) = &to {
        let written = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
        let written = written.and_then(|mut file| std::io::Write::write_all(&mut file, imported.toml.as_bytes()));
        written.with_context(|| format!("cannot write {}: give a file that is not there yet", path.display()))?;
    }
    if !output.json {
        imported.notes.iter().for_each(|note| output::note(&format!("warmset: not carried over: {note}")));
    }
    let document =
        json!({ "toml": imported.toml, "models": imported.models, "not_carried_over": imported.notes, "file": to });
    output.result(&document, |document| match &to {
        Some(path) => format!("wrote {}: start `warmset serve --config {}`", path.display(), path.display()),
        None => text_of(document, "toml"),
    });
    Ok(())
}

async fn ollama(
    directory: Option<PathBuf>,
    add: &[String],
    all: bool,
    global: &GlobalArguments,
    output: Output,
) -> Result<()> {
    let adds = all || !add.is_empty();
    if adds && directory.is_some() {
        bail!("models are added from the store that OLLAMA_MODELS names where the model is added: set it instead");
    }
    let stores = directory.map_or_else(|| Environment::read().ollama_models, |directory| vec![directory]);
    let models = tokio::task::spawn_blocking(move || list_ollama(&stores)).await??;
    if !adds {
        let models: Vec<Value> = models.iter().map(described).collect();
        output.result(&json!({ "models": models }), list_text);
        return Ok(());
    }
    let mut chosen = Vec::new();
    for name in add {
        let found = models.iter().find(|model| model.name.to_string() == *name || model.name.model == *name);
        chosen.push(found.with_context(|| format!("Ollama has no model {name}: see `warmset import ollama`"))?);
    }
    if all {
        chosen = models.iter().collect();
    }
    let place = Place::find(global).await?;
    let mut added = Vec::new();
    let result = add_all(&place, &chosen, output, &mut added).await;
    place.leave().await;
    output.result(&json!({ "added": added }), |_| {
        let lines =
            added.iter().map(|model| format!("added {} ({})\n", text_of(model, "name"), text_of(model, "digest")));
        lines.collect()
    });
    result
}

/// Adds each of them. One that cannot be added keeps none of the others out.
async fn add_all(place: &Place, chosen: &[&OllamaModel], output: Output, added: &mut Vec<Value>) -> Result<()> {
    let mut failed = Vec::new();
    for model in chosen {
        let name = model.name.to_string();
        if !model.left_behind.is_empty() {
            output::note(&format!("warmset: {name}: not carried over: {}", model.left_behind.join(", ")));
        }
        let options =
            ModelOptions { name: name.clone(), source: format!("ollama://{name}"), ..ModelOptions::default() };
        let outcome = match parse_name(&name) {
            Ok(_) => add_model(place, options, output).await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(document) => added.push(document),
            Err(error) => failed.push(format!("{name}: {error:#}")),
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("; ")) }
}

fn described(model: &OllamaModel) -> Value {
    let name = model.name.to_string();
    json!({
        "name": name, "source": format!("ollama://{name}"), "size_bytes": model.size_bytes, "left_behind": model.left_behind,
    })
}

fn list_text(document: &Value) -> String {
    let models = document["models"].as_array().into_iter().flatten();
    let rows = models.map(|model| {
        let left: Vec<&str> = model["left_behind"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        vec![text_of(model, "source"), bytes_of(model, "size_bytes"), left.join(", ")]
    });
    let rows: Vec<_> = rows.collect();
    let sum: u64 =
        document["models"].as_array().into_iter().flatten().filter_map(|model| model["size_bytes"].as_u64()).sum();
    let summary = format!("{}, {}\n", output::count(rows.len(), "model"), format_bytes(sum));
    table(&["SOURCE", "FILE", "STAYS BEHIND"], rows) + &summary
}
