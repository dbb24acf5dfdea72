//! Hugging Face and what speaks its protocol: a revision becomes a commit, a commit says which bytes a file has, and
//! what Hugging Face's own tools have downloaded is read where it lies.

use crate::{
    download::{Address, Remote},
    environment::Environment,
    error::FetchError,
    http::Http,
    location::HubFile,
};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use url::Url;
use warmset_core::Digest;

/// Digits of a commit.
const COMMIT_DIGITS: usize = 40;
/// The longest name of a commit in a cache's file of references.
const REFERENCE_BYTES_MAX: u64 = 256;

/// What a hub says about a repository at one commit.
#[derive(Deserialize)]
struct Repository {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: String,
    size: u64,
}

/// A file of a repository at one commit.
pub(crate) struct HubPart {
    file: HubFile,
    sha256: Option<Digest>,
    size_bytes: Option<u64>,
}

/// Files of one repository at one commit.
pub(crate) struct Resolved {
    pub(crate) commit: String,
    pub(crate) parts: Vec<HubPart>,
}

impl Resolved {
    /// The first file's name, as it will always mean the same bytes.
    pub(crate) fn pinned(&self) -> Option<String> {
        let file = &self.parts.first()?.file;
        Some(format!("hf://{}/{}@{}", file.repository, file.path, self.commit))
    }
}

/// Asks the hub what a revision is and which bytes the files have there.
pub(crate) async fn resolve(
    http: &Http,
    environment: &Environment,
    hub: &Url,
    files: &[HubFile],
) -> Result<Resolved, FetchError> {
    let Some(first) = files.first() else { return Err(FetchError::Local("no file is asked for".to_owned())) };
    let mut url = below(hub, &["api", "models"]);
    extend(&mut url, first.repository.split('/').chain(["revision", first.revision.as_str()]));
    url.set_query(Some("blobs=true"));
    let document = http.document(&url, environment.hub_secret(hub).as_ref()).await?;
    let lies = |reason: String| FetchError::Lies { location: hub.to_string(), reason };
    let repository: Repository = serde_json::from_value(document)
        .map_err(|error| lies(format!("it describes a repository wrongly: {error}")))?;
    if !is_commit(&repository.sha) || (is_commit(&first.revision) && first.revision != repository.sha) {
        return Err(lies(format!("it takes {:?} for the commit {:?}", first.revision, repository.sha)));
    }
    let mut parts = Vec::with_capacity(files.len());
    for file in files {
        let found = repository.siblings.iter().find(|sibling| sibling.rfilename == file.path);
        let location = format!("hf://{}/{}", file.repository, file.path);
        let missing = || FetchError::Status { location, status: 404, hint: "the repository has no such file" };
        let sibling = found.ok_or_else(missing)?;
        let sha256 = match &sibling.lfs {
            Some(large) => {
                let parsed = Digest::parse(&format!("sha256:{}", large.sha256));
                Some(parsed.map_err(|error| lies(format!("its SHA-256 of {} is none: {error}", file.path)))?)
            }
            None => None,
        };
        let size_bytes = sibling.lfs.as_ref().map(|large| large.size).or(sibling.size);
        parts.push(HubPart { file: file.clone(), sha256, size_bytes });
    }
    Ok(Resolved { commit: repository.sha, parts })
}

impl HubPart {
    /// Where the file is to be had.
    pub(crate) fn remote(&self, environment: &Environment, hub: &Url, commit: &str) -> Remote {
        let mut url = below(hub, &[]);
        extend(&mut url, self.file.repository.split('/').chain(["resolve", commit]).chain(self.file.path.split('/')));
        let location = format!("hf://{}/{}@{commit}", self.file.repository, self.file.path);
        Remote {
            key: format!("{hub} {location}"),
            location,
            address: Address::Fixed { url, secret: environment.hub_secret(hub) },
            sha256: self.sha256,
            size_bytes: self.size_bytes,
        }
    }

    /// The file in a cache, with what its bytes must be.
    pub(crate) fn cached(&self, cache: &Path, commit: &str) -> Option<(PathBuf, Option<Digest>)> {
        let path = cached_file(cache, &self.file, commit)?;
        let size_bytes = path.metadata().ok()?.len();
        let complete = self.size_bytes.is_none_or(|expected| expected == size_bytes);
        complete.then_some((path, self.sha256))
    }
}

/// The commit that a revision was when Hugging Face's tools last asked, and every file there, if all of them are.
pub(crate) fn resolve_in_cache(cache: &Path, files: &[HubFile]) -> Option<Resolved> {
    let first = files.first()?;
    let commit = if is_commit(&first.revision) { first.revision.clone() } else { reference(cache, first)? };
    let mut parts = Vec::with_capacity(files.len());
    for file in files {
        let path = cached_file(cache, file, &commit)?;
        parts.push(HubPart { file: file.clone(), sha256: digest_of_blob(&path), size_bytes: None });
    }
    Some(Resolved { commit, parts })
}

fn repository_folder(cache: &Path, file: &HubFile) -> PathBuf {
    cache.join(format!("models--{}", file.repository.replace('/', "--")))
}

fn reference(cache: &Path, file: &HubFile) -> Option<String> {
    let path = repository_folder(cache, file).join("refs").join(&file.revision);
    if path.metadata().ok()?.len() > REFERENCE_BYTES_MAX {
        return None;
    }
    let commit = std::fs::read_to_string(path).ok()?.trim().to_owned();
    is_commit(&commit).then_some(commit)
}

fn cached_file(cache: &Path, file: &HubFile, commit: &str) -> Option<PathBuf> {
    let path = repository_folder(cache, file).join("snapshots").join(commit).join(&file.path);
    path.is_file().then_some(path)
}

/// A large file lies under the name of its SHA-256; a small one under another hash, which is shorter.
fn digest_of_blob(path: &Path) -> Option<Digest> {
    let blob = path.canonicalize().ok()?;
    Digest::parse(&format!("sha256:{}", blob.file_name()?.to_str()?)).ok()
}

fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn below(hub: &Url, pieces: &[&str]) -> Url {
    let mut url = hub.clone();
    extend(&mut url, pieces.iter().copied());
    url
}

fn extend<'a>(url: &mut Url, pieces: impl IntoIterator<Item = &'a str>) {
    // A hub's URL has a host, so that this cannot fail.
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.pop_if_empty().extend(pieces);
    }
}
