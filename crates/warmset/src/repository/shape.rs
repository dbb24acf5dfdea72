//! What is known of a model's size before it was ever loaded: read from its own files.

use std::path::{Path, PathBuf};
use warmset_core::{Bytes, Footprint};
use warmset_engine::{
    gguf,
    protocol::{EngineKind, SyntheticSpec},
};

/// Tokens per sequence when neither the user nor the model says less.
const CONTEXT_TOKENS_DEFAULT: u32 = 4096;
/// What an engine process holds beside a synthetic model.
const SYNTHETIC_PROCESS_BYTES: Bytes = 4 << 20;
/// What a server that a command starts holds beside its model, and how long it takes to start.
const COMMAND_PROCESS_BYTES: Bytes = 128 << 20;
const COMMAND_START_SECONDS: f64 = 2.0;
/// The longest description of a synthetic model.
const SYNTHETIC_BYTES_MAX: u64 = 1 << 20;
/// How fast a model that was never loaded is expected to be read, and what comes on top.
const LOAD_BYTES_PER_SECOND: f64 = 1e9;
const LOAD_SECONDS_LEAST: f64 = 0.2;

/// What a model's files say about it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shape {
    /// Bytes while loading, estimated.
    pub(crate) peak: Footprint,
    /// Bytes once loaded, estimated.
    pub(crate) steady: Footprint,
    /// Seconds from cold to ready, estimated.
    pub(crate) rewarm_seconds: f64,
    /// KV bytes of one token, from the model's shape.
    pub(crate) kv_bytes_per_token: Option<u64>,
    /// Architecture, for people.
    pub(crate) architecture: String,
}

/// What decides how much memory a model takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) engine: EngineKind,
    pub(crate) context_tokens: u32,
    pub(crate) parallel: u32,
    pub(crate) accelerators: u32,
}

impl Shape {
    /// Reads the files of a model, the first one being the one to open. An error says what is wrong with them.
    pub(crate) fn read(files: &[PathBuf], load: Load) -> Result<Self, String> {
        match load.engine {
            EngineKind::Llama => read_llama(files, load),
            EngineKind::Command => read_command(files, load),
            EngineKind::Synthetic => read_synthetic(files.first().map_or(Path::new(""), PathBuf::as_path)),
        }
    }

    /// A guess from the size alone, for a model whose files cannot be read now: its load will say why.
    pub(crate) fn guess(file_bytes: Bytes) -> Self {
        let footprint = Footprint { shared_host_bytes: file_bytes, ..Footprint::default() };
        Self {
            peak: footprint.clone(),
            steady: footprint,
            rewarm_seconds: seconds_to_read(file_bytes),
            kv_bytes_per_token: None,
            architecture: "unknown".to_owned(),
        }
    }
}

fn seconds_to_read(bytes: Bytes) -> f64 {
    LOAD_SECONDS_LEAST + bytes as f64 / LOAD_BYTES_PER_SECOND
}

fn read_llama(files: &[PathBuf], load: Load) -> Result<Shape, String> {
    let header = gguf::read_header_of_files(files).map_err(|error| error.to_string())?;
    let context_tokens = match load.context_tokens {
        0 => header.context_length.clamp(1, CONTEXT_TOKENS_DEFAULT),
        tokens => tokens,
    };
    let estimate = gguf::estimate(&header, context_tokens, load.parallel);
    let place = |footprint: Footprint| on_accelerators(footprint, load.accelerators);
    Ok(Shape {
        peak: place(estimate.peak),
        steady: place(estimate.steady),
        rewarm_seconds: seconds_to_read(header.file_bytes),
        kv_bytes_per_token: Some(header.kv_bytes_per_token()),
        architecture: header.architecture,
    })
}

/// Weights, cache and buffers move to the accelerators in equal shares; the host keeps as much again as buffers need.
fn on_accelerators(footprint: Footprint, accelerators: u32) -> Footprint {
    if accelerators == 0 {
        return footprint;
    }
    let share = footprint.total_bytes().div_ceil(u64::from(accelerators));
    let count = usize::try_from(accelerators).unwrap_or(usize::MAX);
    Footprint { accelerator_bytes: vec![share; count], ..Footprint::host(footprint.private_host_bytes) }
}

/// What a server makes of its model is its own affair: a guess until it was measured, for a GGUF file a good one.
fn read_command(files: &[PathBuf], load: Load) -> Result<Shape, String> {
    let sizes = files.iter().map(|file| std::fs::metadata(file).map(|metadata| metadata.len()));
    let file_bytes =
        sizes.sum::<std::io::Result<Bytes>>().map_err(|error| format!("a file cannot be read: {error}"))?;
    let known = if files.is_empty() { None } else { read_llama(files, load).ok() };
    let mut shape = known.unwrap_or_else(|| {
        let guess = Footprint { private_host_bytes: file_bytes, ..Footprint::default() };
        Shape { peak: guess.clone(), steady: guess, ..Shape::guess(file_bytes) }
    });
    for footprint in [&mut shape.peak, &mut shape.steady] {
        footprint.private_host_bytes = footprint.private_host_bytes.saturating_add(COMMAND_PROCESS_BYTES);
        footprint.accelerator_bytes.resize(usize::try_from(load.accelerators).unwrap_or(usize::MAX), 0);
    }
    shape.rewarm_seconds += COMMAND_START_SECONDS;
    Ok(shape)
}

fn read_synthetic(path: &Path) -> Result<Shape, String> {
    let read = |error: std::io::Error| format!("the model file cannot be read: {error}");
    if std::fs::metadata(path).map_err(read)?.len() > SYNTHETIC_BYTES_MAX {
        return Err(format!("a synthetic model is described in at most {SYNTHETIC_BYTES_MAX} bytes of JSON"));
    }
    let text = std::fs::read_to_string(path).map_err(read)?;
    let spec =
        SyntheticSpec::parse(&text).map_err(|error| format!("not the description of a synthetic model: {error}"))?;
    let host = |bytes: Bytes| Footprint {
        accelerator_bytes: spec.accelerator_bytes.clone(),
        ..Footprint::host(bytes.saturating_add(SYNTHETIC_PROCESS_BYTES))
    };
    Ok(Shape {
        peak: host(spec.host_bytes.saturating_add(spec.load_extra_bytes)),
        steady: host(spec.host_bytes),
        rewarm_seconds: LOAD_SECONDS_LEAST + spec.load_seconds.clamp(0.0, 86_400.0),
        kv_bytes_per_token: None,
        architecture: "synthetic".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Load = Load { engine: EngineKind::Synthetic, context_tokens: 0, parallel: 1, accelerators: 0 };

    #[test]
    fn a_synthetic_model_is_what_it_declares() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        std::fs::write(&path, r#"{"host_bytes":100,"load_extra_bytes":50,"accelerator_bytes":[7]}"#).unwrap();
        let shape = Shape::read(std::slice::from_ref(&path), CPU).unwrap();
        assert_eq!(shape.steady.private_host_bytes, 100 + SYNTHETIC_PROCESS_BYTES);
        assert_eq!(shape.peak.private_host_bytes, 150 + SYNTHETIC_PROCESS_BYTES);
        assert_eq!(shape.steady.accelerator_bytes, [7]);
        std::fs::write(&path, r#"{"host_bites":100}"#).unwrap();
        assert!(Shape::read(std::slice::from_ref(&path), CPU).unwrap_err().contains("host_bites"));
        for endless in [r#"{"host_bytes":18446744073709551615}"#, r#"{"accelerator_bytes":[0,18446744073709551615]}"#] {
            std::fs::write(&path, endless).unwrap();
            assert!(Shape::read(std::slice::from_ref(&path), CPU).unwrap_err().contains("declares more than"));
        }
    }

    #[test]
    fn what_is_no_model_is_refused_with_its_kind() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.gguf");
        std::fs::write(&path, b"PK\x03\x04 a zip archive, as pickled models are").unwrap();
        let error = Shape::read(&[path], Load { engine: EngineKind::Llama, ..CPU }).unwrap_err();
        assert!(error.contains("unsupported format"), "{error}");
    }

    #[test]
    fn accelerators_take_equal_shares() {
        let footprint = Footprint { private_host_bytes: 10, shared_host_bytes: 91, accelerator_bytes: vec![] };
        assert_eq!(on_accelerators(footprint.clone(), 0), footprint);
        assert_eq!(on_accelerators(footprint, 2).accelerator_bytes, [51, 51]);
    }
}
