//! What an Ollama on this machine keeps: manifests that name files by SHA-256. Read, never written.

use crate::{error::FetchError, fetch::Part, location::OllamaName};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use warmset_core::Digest;

/// The longest manifest that is read.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// Models of one store that are listed.
const MODELS_MAX: usize = 10_000;
/// What holds weights.
const MODEL: &str = "application/vnd.ollama.image.model";
/// Layers that change what a model is and cannot be taken along.
const ADAPTER: &str = "application/vnd.ollama.image.adapter";

#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Layer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
    size: u64,
}

/// A model that an Ollama store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OllamaModel {
    /// Its name there.
    pub name: OllamaName,
    /// Bytes of its weights.
    pub size_bytes: u64,
    /// What of it stays behind, in words.
    pub left_behind: Vec<String>,
}

/// The files of a model.
pub(crate) fn files(stores: &[PathBuf], name: &OllamaName) -> Result<Vec<Part>, FetchError> {
    let wrong = |reason: String| FetchError::Local(format!("ollama://{name}: {reason}"));
    let mut places = stores.iter().map(|store| (store, manifest_path(store, name)));
    let Some((store, path)) = places.find(|(_, path)| path.is_file()) else {
        let looked: Vec<String> = stores.iter().map(|store| store.display().to_string()).collect();
        return Err(wrong(format!(
            "no such model in {}: see `ollama list`, or set OLLAMA_MODELS",
            looked.join(" or ")
        )));
    };
    let manifest = read_manifest(&path).map_err(wrong)?;
    if manifest.layers.iter().any(|layer| layer.media_type == ADAPTER) {
        return Err(wrong("it has an adapter, which cannot be taken along: merge it into the model first".to_owned()));
    }
    let mut parts = Vec::new();
    for layer in manifest.layers.iter().filter(|layer| layer.media_type == MODEL) {
        let sha256 = Digest::parse(&layer.digest).map_err(|error| wrong(format!("its manifest is broken: {error}")))?;
        let path = store.join("blobs").join(format!("sha256-{}", sha256.hex()));
        match path.metadata() {
            Ok(metadata) if metadata.len() == layer.size => {}
            Ok(metadata) => {
                let (here, whole) = (metadata.len(), layer.size);
                return Err(wrong(format!("{} has {here} bytes instead of {whole}: pull it again", path.display())));
            }
            Err(error) => return Err(wrong(format!("{} cannot be read: {error}: pull it again", path.display()))),
        }
        parts.push(Part::Local { path, sha256: Some(sha256) });
    }
    if parts.is_empty() {
        return Err(wrong("its manifest names no weights".to_owned()));
    }
    Ok(parts)
}

/// All models of the first store that is there, by name.
pub fn list_ollama(stores: &[PathBuf]) -> Result<Vec<OllamaModel>, FetchError> {
    let Some(store) = stores.iter().find(|store| store.join("manifests").is_dir()) else {
        let looked: Vec<String> = stores.iter().map(|store| store.display().to_string()).collect();
        return Err(FetchError::Local(format!(
            "there is no Ollama store in {}: set OLLAMA_MODELS",
            looked.join(" or ")
        )));
    };
    let mut found = Vec::new();
    for registry in children(&store.join("manifests")) {
        for namespace in children(&registry) {
            for model in children(&namespace) {
                for tag in children(&model) {
                    found.extend(describe([&registry, &namespace, &model, &tag]));
                    if found.len() >= MODELS_MAX {
                        return Ok(found);
                    }
                }
            }
        }
    }
    Ok(found)
}

fn describe(path: [&PathBuf; 4]) -> Option<OllamaModel> {
    let [registry, namespace, model, tag] = path.map(|part| Some(part.file_name()?.to_str()?.to_owned()));
    let name = OllamaName { registry: registry?, namespace: namespace?, model: model?, tag: tag? };
    let manifest = match read_manifest(path[3]) {
        Ok(manifest) => manifest,
        Err(reason) => {
            tracing::warn!("{}: {reason}", path[3].display());
            return None;
        }
    };
    let (weights, others): (Vec<&Layer>, Vec<&Layer>) =
        manifest.layers.iter().partition(|layer| layer.media_type == MODEL);
    // A licence changes nothing about what a model does.
    let kinds = others.iter().filter_map(|layer| layer.media_type.rsplit_once('.')).map(|(_, kind)| kind);
    let left_behind = kinds.filter(|kind| *kind != "license").map(str::to_owned).collect();
    Some(OllamaModel { name, size_bytes: weights.iter().map(|layer| layer.size).sum(), left_behind })
}

fn children(path: &Path) -> Vec<PathBuf> {
    let entries = path.read_dir().into_iter().flatten().flatten();
    let mut children: Vec<PathBuf> = entries.map(|entry| entry.path()).take(MODELS_MAX).collect();
    children.sort_unstable();
    children
}

fn manifest_path(store: &Path, name: &OllamaName) -> PathBuf {
    ["manifests", &name.registry, &name.namespace, &name.model, &name.tag]
        .iter()
        .fold(store.into(), |path: PathBuf, part| path.join(part))
}

fn read_manifest(path: &Path) -> Result<Manifest, String> {
    let size_bytes = path.metadata().map_err(|error| format!("its manifest cannot be read: {error}"))?.len();
    if size_bytes > MANIFEST_BYTES_MAX {
        return Err(format!("its manifest has {size_bytes} bytes, more than {MANIFEST_BYTES_MAX}"));
    }
    let text = std::fs::read(path).map_err(|error| format!("its manifest cannot be read: {error}"))?;
    serde_json::from_slice(&text).map_err(|error| format!("its manifest is broken: {error}"))
}
