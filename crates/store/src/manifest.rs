//! What a model is: its files, its engine and every parameter that changes its output. Its digest names the model.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use warmset_core::Digest;

/// Files one model may consist of.
pub const MANIFEST_FILES_MAX: usize = 1024;
/// Longest name of a file within a manifest, in bytes.
const FILE_NAME_BYTES_MAX: usize = 255;
/// Separates this use of SHA-256 from every other; its number grows when the canonical form changes.
const DOMAIN: &[u8] = b"warmset manifest 1\0";

const DEFINITION_DOMAIN: &[u8] = b"warmset runtime 1\0";

/// One file of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// Its role, so that the same bytes under another path are the same model: `model.gguf`.
    pub name: String,
    /// SHA-256 of its bytes.
    pub sha256: Digest,
    /// Its size.
    pub size_bytes: u64,
}

/// What a model is. Whatever does not change its output (slots, pins, limits) is not part of it.
///
/// The fields stand in alphabetical order: serialised without spaces they are the canonical form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Tokens one sequence may hold; 0 is the model's own limit.
    pub context_tokens: u32,
    /// The implementation that serves it.
    pub engine: String,
    /// Its files, the one to open first. Only a model that a command serves may have none.
    pub files: Vec<ManifestFile>,
    /// What the server of a command knows the model by, where that is no file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The [`definition_digest`] of the runtime that serves it, for a model that a command serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_sha256: Option<Digest>,
    /// SHA-256 of a chat template that replaces the one in the file.
    pub template_sha256: Option<Digest>,
}

/// Why a manifest is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// No files, or too many.
    #[error("a manifest has 1 to {MANIFEST_FILES_MAX} files, not {0}")]
    FileCount(usize),
    /// A file name that could be a path, or is used twice.
    #[error("{0:?} is not a file name for a manifest: use plain, distinct names without slashes")]
    FileName(String),
    /// Not the JSON of a manifest.
    #[error("not a manifest: {0}")]
    Json(String),
}

/// The identity of a definition that a manifest refers to.
pub fn definition_digest(text: &str) -> Digest {
    Digest(Sha256::new().chain_update(DEFINITION_DOMAIN).chain_update(text.as_bytes()).finalize().into())
}

impl Manifest {
    /// Checks the bounds and the file names.
    pub fn check(&self) -> Result<(), ManifestError> {
        let least = usize::from(self.runtime_sha256.is_none());
        if self.files.len() < least || self.files.len() > MANIFEST_FILES_MAX {
            return Err(ManifestError::FileCount(self.files.len()));
        }
        let mut names = std::collections::BTreeSet::new();
        for file in &self.files {
            let name = file.name.as_str();
            let plain = !name.is_empty() && name.len() <= FILE_NAME_BYTES_MAX && !name.starts_with('.');
            if !plain || name.contains(['/', '\\', '\0']) || !names.insert(name) {
                return Err(ManifestError::FileName(name.to_owned()));
            }
        }
        Ok(())
    }

    /// The one text that this manifest has.
    pub fn canonical_json(&self) -> Result<String, ManifestError> {
        self.check()?;
        serde_json::to_string(self).map_err(|error| ManifestError::Json(error.to_string()))
    }

    /// The model's identity.
    pub fn digest(&self) -> Result<Digest, ManifestError> {
        let text = self.canonical_json()?;
        Ok(Digest(Sha256::new().chain_update(DOMAIN).chain_update(text.as_bytes()).finalize().into()))
    }

    /// Reads a manifest back; any spelling other than the canonical one is refused.
    pub fn from_canonical_json(text: &str) -> Result<Self, ManifestError> {
        let manifest: Self = serde_json::from_str(text).map_err(|error| ManifestError::Json(error.to_string()))?;
        if manifest.canonical_json()? == text {
            Ok(manifest)
        } else {
            Err(ManifestError::Json("it is not in canonical form".to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn no_files() -> Manifest {
        Manifest {
            context_tokens: 0,
            engine: "command".into(),
            files: Vec::new(),
            model: None,
            runtime_sha256: None,
            template_sha256: None,
        }
    }

    #[test]
    fn only_a_command_needs_no_file() {
        assert_eq!(no_files().digest(), Err(ManifestError::FileCount(0)));
        let runtime_sha256 = Some(definition_digest("x"));
        let one = Manifest { runtime_sha256, model: Some("a".into()), ..no_files() };
        let other = Manifest { model: Some("b".into()), ..one.clone() };
        let changed = Manifest { runtime_sha256: Some(definition_digest("y")), ..one.clone() };
        assert!(one.digest().unwrap() != other.digest().unwrap() && one.digest() != changed.digest());
        assert_eq!(Manifest::from_canonical_json(&one.canonical_json().unwrap()), Ok(one));
    }

    fn example() -> Manifest {
        let file = ManifestFile { name: "model.gguf".into(), sha256: Digest([0x11; 32]), size_bytes: 98_362_432 };
        Manifest { context_tokens: 4096, engine: "llama".into(), files: vec![file], ..no_files() }
    }

    #[test]
    fn canonical_form_and_digest_never_change() {
        let text = example().canonical_json().unwrap();
        let expected = format!(
            r#"{{"context_tokens":4096,"engine":"llama","files":[{{"name":"model.gguf","sha256":"sha256:{}","size_bytes":98362432}}],"template_sha256":null}}"#,
            "11".repeat(32)
        );
        assert_eq!(text, expected);
        // printf 'warmset manifest 1\0%s' "$TEXT" | sha256sum
        assert_eq!(
            example().digest().unwrap().hex(),
            "f49a0d58626f8e6e75e2fbe33e76bb862d2f150a940b631038cf86c482b8489b"
        );
        assert_eq!(Manifest::from_canonical_json(&text), Ok(example()));
        assert!(Manifest::from_canonical_json(&text.replace(":4096", ": 4096")).is_err());
    }

    #[test]
    fn every_field_changes_the_digest() {
        let base = example().digest().unwrap();
        let mut changed = vec![example(); 6];
        changed[0].context_tokens = 0;
        changed[1].engine = "synthetic".into();
        changed[2].files[0].sha256 = Digest([0x12; 32]);
        changed[3].files[0].size_bytes += 1;
        changed[4].files[0].name = "model.bin".into();
        changed[5].template_sha256 = Some(Digest([0; 32]));
        for manifest in changed {
            assert_ne!(manifest.digest().unwrap(), base, "{manifest:?}");
        }
    }

    #[test]
    fn paths_repeated_names_and_absurd_counts_are_refused() {
        for bad in ["", "../x", "/x", "a/b", "a\\b", ".hidden", "a\0", &"n".repeat(FILE_NAME_BYTES_MAX + 1)] {
            let mut manifest = example();
            manifest.files[0].name = bad.into();
            assert_eq!(manifest.digest(), Err(ManifestError::FileName(bad.into())), "{bad}");
        }
        let mut manifest = example();
        manifest.files.push(manifest.files[0].clone());
        assert!(matches!(manifest.digest(), Err(ManifestError::FileName(_))));
        manifest.files.clear();
        assert_eq!(manifest.digest(), Err(ManifestError::FileCount(0)));
        let many = |index| ManifestFile { name: format!("f{index}"), sha256: Digest([0; 32]), size_bytes: 0 };
        manifest.files = (0..=MANIFEST_FILES_MAX).map(many).collect();
        assert_eq!(manifest.digest(), Err(ManifestError::FileCount(MANIFEST_FILES_MAX + 1)));
        manifest.files.pop();
        assert!(manifest.digest().is_ok());
    }

    proptest! {
        #[test]
        fn canonical_json_round_trips(context_tokens in any::<u32>(), size_bytes in any::<u64>(), byte in any::<u8>()) {
            let mut manifest = example();
            manifest.context_tokens = context_tokens;
            manifest.files[0].size_bytes = size_bytes;
            manifest.files[0].sha256 = Digest([byte; 32]);
            let text = manifest.canonical_json().unwrap();
            prop_assert_eq!(Manifest::from_canonical_json(&text), Ok(manifest));
        }
    }
}
