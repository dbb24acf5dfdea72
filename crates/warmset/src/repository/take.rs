//! Taking a model's files into the store: which files, which engine, and that they are what they claim.

use super::{
    ModelOptions, Progress, Runtimes, Shape, command_source,
    options::{engine_name, parse_engine},
    runtimes::runtime_digest,
    shape::Load,
};
use anyhow::{Result, anyhow, bail};
use std::{os::unix::fs::MetadataExt, path::PathBuf};
use warmset_catalog::{Model, ModelSettings, NewModel};
use warmset_core::{Digest, ModelName};
use warmset_engine::protocol::EngineKind;
use warmset_source::{Gathered, Location, Part};
use warmset_store::{Manifest, ManifestFile, Store};

/// A model whose files are in the store.
pub(super) struct Taken {
    pub(super) digest: Digest,
    pub(super) manifest: Manifest,
    pub(super) settings: ModelSettings,
}

impl Taken {
    /// The same for the catalog.
    pub(super) fn as_new(&self, name: &ModelName, options: &ModelOptions, settings: ModelSettings) -> Result<NewModel> {
        Ok(NewModel {
            name: name.clone(),
            digest: self.digest,
            manifest: self.manifest.canonical_json()?,
            source: options.source.clone(),
            settings,
        })
    }
}

/// What a source means.
enum Meaning {
    /// Files, to be had there.
    Files(Location),
    /// A model that its server finds by itself.
    Server(String),
}

/// What is wanted, read before anything is fetched or copied.
pub(super) struct Wanted {
    meaning: Meaning,
    engine: EngineKind,
    settings: ModelSettings,
    runtime_sha256: Option<Digest>,
}

impl Wanted {
    pub(super) fn of(options: &ModelOptions, runtimes: &Runtimes) -> Result<Self> {
        let runtime_sha256 = options.runtime.as_deref().map(|name| runtimes.get(name).map(runtime_digest));
        let runtime_sha256 = runtime_sha256.transpose().map_err(|reason| anyhow!(reason))?;
        let (meaning, engine, source_stamp) = match command_source(&options.source) {
            Some(model) => {
                if options.engine_said() != Some(EngineKind::Command) {
                    bail!(
                        "the source {} is for --engine command: leave the engine out, or give a file",
                        options.source
                    );
                }
                (Meaning::Server(model.to_owned()), EngineKind::Command, None)
            }
            None => {
                let location = Location::parse(&options.source)?;
                let engine = engine_of(options.engine_said(), &location)?;
                let stamp = stamp(&location);
                (Meaning::Files(location), engine, stamp)
            }
        };
        let settings = options.settings(engine).map_err(|reason| anyhow!(reason))?;
        Ok(Self { meaning, engine, settings: ModelSettings { source_stamp, ..settings }, runtime_sha256 })
    }

    /// Where its files are, if it has any.
    pub(super) fn location(&self) -> Option<&Location> {
        match &self.meaning {
            Meaning::Files(location) => Some(location),
            Meaning::Server(_) => None,
        }
    }

    /// Whether its name may mean several files.
    pub(super) fn may_be_split(&self) -> bool {
        self.engine == EngineKind::Llama
    }
}

/// Takes the files that were gathered. Blocks.
pub(super) fn take(store: &Store, wanted: Wanted, gathered: Gathered, progress: Progress) -> Result<Taken> {
    let Wanted { meaning, engine, mut settings, runtime_sha256 } = wanted;
    (settings.pinned_source, settings.fetch_seconds) = (gathered.pinned, gathered.fetch_seconds);
    let (files, model) = match meaning {
        Meaning::Files(location) => {
            let load = load_of(&settings).map_err(|reason| anyhow!(reason))?;
            (take_files(store, &location, load, gathered.parts, progress)?, None)
        }
        Meaning::Server(model) => (Vec::new(), Some(model)),
    };
    let manifest = Manifest {
        context_tokens: settings.context_tokens,
        engine: engine_name(engine).to_owned(),
        files,
        model,
        runtime_sha256,
        template_sha256: None,
    };
    let digest = manifest.digest()?;
    Ok(Taken { digest, manifest, settings })
}

fn take_files(
    store: &Store,
    location: &Location,
    load: Load,
    parts: Vec<Part>,
    mut progress: Progress,
) -> Result<Vec<ManifestFile>> {
    let readable = |paths: &[PathBuf]| Shape::read(paths, load).map_err(|reason| anyhow!("{location}: {reason}"));
    let sources: Vec<PathBuf> = parts.iter().filter_map(local_path).cloned().collect();
    // Before gigabytes are copied; only a regular file is opened.
    if sources.len() == parts.len() && sources.iter().all(|source| source.is_file()) {
        readable(&sources)?;
    }
    let total: u64 = sources.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
    let mut before = 0;
    let count = parts.len();
    let mut files = Vec::with_capacity(count);
    let mut paths = Vec::with_capacity(count);
    for (index, part) in parts.into_iter().enumerate() {
        let stored = match part {
            Part::Local { path, sha256 } => {
                let stored = store.import_file(&path, &mut |done, _| progress(before + done, total))?;
                before += stored.size_bytes;
                let expected = sha256.unwrap_or(stored.sha256);
                if expected != stored.sha256 {
                    let (path, found) = (path.display(), stored.sha256);
                    bail!("{path} has SHA-256 {found} instead of {expected}: it is damaged, nothing of it is used");
                }
                stored
            }
            Part::Fetched { staging, sha256 } => store.publish_staged(staging, sha256)?,
        };
        let name = role(load.engine, index, count);
        files.push(ManifestFile { name, sha256: stored.sha256, size_bytes: stored.size_bytes });
        paths.push(stored.path);
    }
    // What was copied is what counts, not what was looked at before.
    readable(&paths)?;
    Ok(files)
}

fn local_path(part: &Part) -> Option<&PathBuf> {
    match part {
        Part::Local { path, .. } => Some(path),
        Part::Fetched { .. } => None,
    }
}

/// The settings a known model would get from these options, if taking its source again would give the same model.
pub(super) fn unchanged(runtimes: &Runtimes, options: &ModelOptions, known: &Model) -> Option<ModelSettings> {
    let wanted = Wanted::of(options, runtimes).ok()?;
    // A file on this machine is looked at. What was fetched once is what it was: nobody is asked again.
    let path = wanted.location().and_then(Location::path);
    let is_file = path.is_some();
    // A file that is gone says nothing new: what was taken of it is here.
    let gone = path.is_some_and(|path| path.try_exists().is_ok_and(|exists| !exists));
    let settings = ModelSettings {
        source_stamp: if gone { known.settings.source_stamp.clone() } else { wanted.settings.source_stamp },
        pinned_source: known.settings.pinned_source.clone(),
        fetch_seconds: known.settings.fetch_seconds,
        ..wanted.settings
    };
    let runtime = wanted.runtime_sha256;
    let same = settings.source_stamp.is_some() == is_file
        && Manifest::from_canonical_json(&known.manifest).is_ok_and(|manifest| manifest.runtime_sha256 == runtime)
        && settings.source_stamp == known.settings.source_stamp
        && options.source == known.source
        && settings.engine == known.settings.engine
        && settings.context_tokens == known.settings.context_tokens
        && options.digest.is_none_or(|digest| digest == known.digest);
    same.then_some(settings)
}

/// Whether these options name what was fetched for a model already. What came from another machine is what it was.
pub(super) fn means_the_same(options: &ModelOptions, known: &Model) -> bool {
    let location = Location::parse(&options.source);
    let far = command_source(&options.source).is_none() && location.is_ok_and(|location| location.path().is_none());
    far && options.source == known.source
        && options.engine_said().is_none_or(|engine| engine_name(engine) == known.settings.engine)
        && options.runtime.as_ref().is_none_or(|runtime| Some(runtime) == known.settings.runtime.as_ref())
        && options.context_tokens.is_none_or(|tokens| tokens == known.settings.context_tokens)
        && options.digest.is_none_or(|digest| digest == known.digest)
}

/// What decides how much memory a model takes.
pub(super) fn load_of(settings: &ModelSettings) -> Result<Load, String> {
    Ok(Load {
        engine: parse_engine(&settings.engine)?,
        context_tokens: settings.context_tokens,
        parallel: settings.parallel,
        accelerators: settings.accelerators,
    })
}

fn engine_of(given: Option<EngineKind>, location: &Location) -> Result<EngineKind> {
    if let Some(engine) = given {
        return Ok(engine);
    }
    let name = location.file_name();
    match name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()).as_deref() {
        Some("gguf") => Ok(EngineKind::Llama),
        Some("json") => bail!("{location} may be a synthetic model: say so with --engine synthetic"),
        _ => bail!("no engine follows from the name {location}: give --engine llama for a GGUF file"),
    }
}

/// The file's name within the manifest: its role, so that a renamed file stays the same model.
fn role(engine: EngineKind, index: usize, count: usize) -> String {
    let kind = match engine {
        EngineKind::Llama => "gguf",
        EngineKind::Synthetic => "json",
        EngineKind::Command => "file",
    };
    if count == 1 { format!("model.{kind}") } else { format!("model-{:05}-of-{count:05}.{kind}", index + 1) }
}

/// Size and time of a source on this machine.
fn stamp(location: &Location) -> Option<String> {
    let metadata = location.path()?.metadata().ok()?;
    Some(format!("{} {}.{:09}", metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_follows_from_the_name_unless_given() {
        let of = |given, source: &str| engine_of(given, &Location::parse(source).unwrap());
        for gguf in ["/a/B.GGUF", "https://h.example/b.gguf?a=b.json", "ollama://llama3.2:1b", "hf://a/b/c.gguf@v1.0"] {
            assert_eq!(of(None, gguf).unwrap(), EngineKind::Llama, "{gguf}");
        }
        assert_eq!(of(Some(EngineKind::Synthetic), "/a").unwrap(), EngineKind::Synthetic);
        assert!(of(None, "/a.json").unwrap_err().to_string().contains("--engine synthetic"));
        assert!(of(None, "/a.bin").is_err() && of(None, "/a.gguf/b").is_err());
    }

    #[test]
    fn the_role_of_a_part_says_its_place() {
        assert_eq!(role(EngineKind::Llama, 0, 1), "model.gguf");
        assert_eq!(role(EngineKind::Llama, 1, 2), "model-00002-of-00002.gguf");
    }
}
