//! Taking a model's files into the store: which files, which engine, and that they are what they claim.

use super::{
    ModelOptions, Progress, Runtimes, Shape, command_source,
    options::{engine_name, parse_engine},
    runtimes::runtime_digest,
    shape::Load,
};
use anyhow::{Context, Result, anyhow, bail};
use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};
use warmset_catalog::{Model, ModelSettings};
use warmset_core::Digest;
use warmset_engine::protocol::EngineKind;
use warmset_store::{MANIFEST_FILES_MAX, Manifest, ManifestFile, Store, parse_source};

/// A model whose files are in the store.
pub(super) struct Taken {
    pub(super) digest: Digest,
    pub(super) manifest: Manifest,
    pub(super) settings: ModelSettings,
}

/// Takes the files that a source names. Blocks.
pub(super) fn take(
    store: &Store,
    runtimes: &Runtimes,
    options: &ModelOptions,
    mut progress: Progress,
) -> Result<Taken> {
    let runtime_sha256 = options.runtime.as_deref().map(|name| runtimes.get(name).map(runtime_digest));
    let runtime_sha256 = runtime_sha256.transpose().map_err(|reason| anyhow!(reason))?;
    if let Some(model) = command_source(&options.source) {
        return without_files(options, model, runtime_sha256);
    }
    let path = parse_source(&options.source)?;
    let engine = engine_of(options.engine_said(), &path)?;
    let mut settings = options.settings(engine).map_err(|reason| anyhow!(reason))?;
    settings.source_stamp = stamp(&path);
    let sources = files_of(&path, engine)?;
    let load = load_of(&settings).map_err(|reason| anyhow!(reason))?;
    // Before gigabytes are copied; only a regular file is opened.
    if sources.iter().all(|source| source.is_file()) {
        Shape::read(&sources, load).map_err(|reason| anyhow!("{}: {reason}", path.display()))?;
    }
    let total: u64 = sources.iter().filter_map(|source| source.metadata().ok()).map(|metadata| metadata.len()).sum();
    let mut before = 0;
    let mut files = Vec::with_capacity(sources.len());
    let mut paths = Vec::with_capacity(sources.len());
    for (index, source) in sources.iter().enumerate() {
        let stored = store.import_file(source, &mut |done, _| progress(before + done, total))?;
        before += stored.size_bytes;
        let name = role(engine, index, sources.len());
        files.push(ManifestFile { name, sha256: stored.sha256, size_bytes: stored.size_bytes });
        paths.push(stored.path);
    }
    // What was copied is what counts, not what was looked at before.
    Shape::read(&paths, load).map_err(|reason| anyhow!("{}: {reason}", path.display()))?;
    let manifest = Manifest {
        context_tokens: settings.context_tokens,
        engine: engine_name(engine).to_owned(),
        files,
        model: None,
        runtime_sha256,
        template_sha256: None,
    };
    let digest = manifest.digest()?;
    Ok(Taken { digest, manifest, settings })
}

/// A model that its server finds by itself.
fn without_files(options: &ModelOptions, model: &str, runtime_sha256: Option<Digest>) -> Result<Taken> {
    if options.engine_said() != Some(EngineKind::Command) {
        bail!("the source {} is for --engine command: leave the engine out, or give a file", options.source);
    }
    let settings = options.settings(EngineKind::Command).map_err(|reason| anyhow!(reason))?;
    let manifest = Manifest {
        context_tokens: settings.context_tokens,
        engine: settings.engine.clone(),
        files: Vec::new(),
        model: Some(model.to_owned()),
        runtime_sha256,
        template_sha256: None,
    };
    Ok(Taken { digest: manifest.digest()?, manifest, settings })
}

/// The settings a known model would get from these options, if taking its source again would give the same model.
pub(super) fn unchanged(runtimes: &Runtimes, options: &ModelOptions, known: &Model) -> Option<ModelSettings> {
    let (settings, is_file) = match command_source(&options.source) {
        Some(_) => (options.settings(options.engine_said()?).ok()?, false),
        None => {
            let path = parse_source(&options.source).ok()?;
            let engine = engine_of(options.engine_said(), &path).ok()?;
            (ModelSettings { source_stamp: stamp(&path), ..options.settings(engine).ok()? }, true)
        }
    };
    let runtime = settings.runtime.as_deref().map(|name| runtimes.get(name).map(runtime_digest)).transpose().ok()?;
    let same = settings.source_stamp.is_some() == is_file
        && Manifest::from_canonical_json(&known.manifest).is_ok_and(|manifest| manifest.runtime_sha256 == runtime)
        && settings.source_stamp == known.settings.source_stamp
        && options.source == known.source
        && settings.engine == known.settings.engine
        && settings.context_tokens == known.settings.context_tokens
        && options.digest.is_none_or(|digest| digest == known.digest);
    same.then_some(settings)
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

fn engine_of(given: Option<EngineKind>, path: &Path) -> Result<EngineKind> {
    if let Some(engine) = given {
        return Ok(engine);
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some(extension) if extension.eq_ignore_ascii_case("gguf") => Ok(EngineKind::Llama),
        Some("json") => bail!("{} may be a synthetic model: say so with --engine synthetic", path.display()),
        _ => bail!("no engine follows from the name {}: give --engine llama for a GGUF file", path.display()),
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

/// All files of a model: a GGUF file may be the first of several, `NAME-00001-of-00003.gguf`.
fn files_of(path: &Path, engine: EngineKind) -> Result<Vec<PathBuf>> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((stem, first, count)) = split_name(name).filter(|_| engine == EngineKind::Llama) else {
        return Ok(vec![path.to_path_buf()]);
    };
    if first != 1 {
        bail!("{} is not the first part of its model: give the part 00001", path.display());
    }
    if count > MANIFEST_FILES_MAX {
        bail!("{} is split into more than {MANIFEST_FILES_MAX} files", path.display());
    }
    let directory = path.parent().context("a file has a parent directory")?;
    Ok((1..=count).map(|index| directory.join(format!("{stem}-{index:05}-of-{count:05}.gguf"))).collect())
}

/// Takes `STEM-00001-of-00003.gguf` apart.
fn split_name(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
    Some((stem, number(index)?, number(count)?)).filter(|(_, _, count)| *count >= 1)
}

/// Size and time of a source.
fn stamp(path: &Path) -> Option<String> {
    let metadata = path.metadata().ok()?;
    Some(format!("{} {}.{:09}", metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_follows_from_the_name_unless_given() {
        assert_eq!(engine_of(None, Path::new("/a/B.GGUF")).unwrap(), EngineKind::Llama);
        assert_eq!(engine_of(Some(EngineKind::Synthetic), Path::new("/a")).unwrap(), EngineKind::Synthetic);
        assert!(engine_of(None, Path::new("/a.json")).unwrap_err().to_string().contains("--engine synthetic"));
        assert!(engine_of(None, Path::new("/a.bin")).is_err());
    }

    #[test]
    fn parts_of_a_split_model_are_found_by_their_names() {
        let files = files_of(Path::new("/m/x-00001-of-00002.gguf"), EngineKind::Llama).unwrap();
        assert_eq!(files, [PathBuf::from("/m/x-00001-of-00002.gguf"), PathBuf::from("/m/x-00002-of-00002.gguf")]);
        assert!(files_of(Path::new("/m/x-00002-of-00002.gguf"), EngineKind::Llama).is_err());
        assert!(files_of(Path::new("/m/x-00001-of-99999.gguf"), EngineKind::Llama).is_err());
        for plain in ["x.gguf", "x-1-of-2.gguf", "x-00001-of-00000.gguf", "-of-.gguf"] {
            assert_eq!(files_of(Path::new(plain), EngineKind::Llama).unwrap(), [PathBuf::from(plain)]);
        }
        assert_eq!(role(EngineKind::Llama, 0, 1), "model.gguf");
        assert_eq!(role(EngineKind::Llama, 1, 2), "model-00002-of-00002.gguf");
    }
}
