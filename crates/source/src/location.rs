//! Where a model's file is: a path, or a URL of one of the kinds that are understood.

use std::{fmt, path::PathBuf};
use url::Url;
use warmset_store::MANIFEST_FILES_MAX;

/// The longest source that is read.
pub const SOURCE_BYTES_MAX: usize = 4096;
/// The longest key of an object, as S3 has it.
const KEY_BYTES_MAX: usize = 1024;
/// The longest part of a name on a hub or in an Ollama store.
const NAME_BYTES_MAX: usize = 255;
/// What a revision means if nobody names one.
const DEFAULT_REVISION: &str = "main";
/// Where Ollama takes models from unless told otherwise.
const OLLAMA_REGISTRY: &str = "registry.ollama.ai";
const OLLAMA_NAMESPACE: &str = "library";
const OLLAMA_TAG: &str = "latest";

/// What is understood, for messages.
const KINDS: &str = "give a path, or a file://, https://, hf://, s3:// or ollama:// URL";

/// Why a source cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Nothing is given.
    #[error("the source is empty: {KINDS}")]
    Empty,
    /// Longer than any source.
    #[error("the source is longer than {SOURCE_BYTES_MAX} bytes")]
    TooLong,
    /// A scheme that is not supported.
    #[error("sources of the kind {scheme}:// are not supported: {KINDS}")]
    Scheme {
        /// The scheme.
        scheme: String,
    },
    /// HTTP without encryption.
    #[error("http:// lets anybody on the way change the model: use https://")]
    Unencrypted,
    /// A `file://` URL that names another machine.
    #[error("{host} is another machine: a file:// URL has an empty host or localhost (file:///path)")]
    Host {
        /// The host.
        host: String,
    },
    /// Not what its scheme asks for.
    #[error("not a valid source ({reason}): write {form}")]
    Malformed {
        /// What is wrong.
        reason: &'static str,
        /// What would be right.
        form: &'static str,
    },
    /// A later part of a split model.
    #[error("{name} is not the first part of its model: give the part 00001")]
    NotFirstPart {
        /// The file's name.
        name: String,
    },
    /// More parts than a model may have.
    #[error("{name} is split into more than {MANIFEST_FILES_MAX} files")]
    TooManyParts {
        /// The file's name.
        name: String,
    },
}

const FILE_FORM: &str = "file:///absolute/path with other characters percent-encoded";
const HTTPS_FORM: &str = "https://host/path/model.gguf";
const HUB_FORM: &str = "hf://organisation/repository/file.gguf, with @revision behind it for another than main";
const S3_FORM: &str = "s3://bucket/key";
const OLLAMA_FORM: &str = "ollama://name:tag";

/// A file on a hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    /// `organisation/repository`.
    pub repository: String,
    /// Its path in the repository.
    pub path: String,
    /// A branch, tag or commit.
    pub revision: String,
}

/// A model in an Ollama store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OllamaName {
    /// The registry it came from.
    pub registry: String,
    /// Whose it is.
    pub namespace: String,
    /// The model.
    pub model: String,
    /// Which of its variants.
    pub tag: String,
}

/// Where a model's file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// On this machine.
    File(PathBuf),
    /// On a web server.
    Https(Url),
    /// On a hub such as huggingface.co.
    Hub(HubFile),
    /// In object storage.
    S3 {
        /// The bucket.
        bucket: String,
        /// The object's key.
        key: String,
    },
    /// In the store of an Ollama on this machine.
    Ollama(OllamaName),
}

impl Location {
    /// Takes a source apart. A text with `scheme://` is a URL; everything else is a path as it stands.
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        if text.is_empty() {
            return Err(SourceError::Empty);
        }
        if text.len() > SOURCE_BYTES_MAX {
            return Err(SourceError::TooLong);
        }
        if text.contains('\0') {
            return Err(SourceError::Malformed { reason: "it holds a NUL character", form: FILE_FORM });
        }
        let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
            return Ok(Self::File(PathBuf::from(text)));
        };
        match scheme.to_ascii_lowercase().as_str() {
            "file" => parse_file_url(rest).map(Self::File),
            "https" => parse_https(text).map(Self::Https),
            "http" => Err(SourceError::Unencrypted),
            "hf" => parse_hub(rest).map(Self::Hub),
            "s3" => parse_s3(rest),
            "ollama" => parse_ollama(rest).map(Self::Ollama),
            other => Err(SourceError::Scheme { scheme: other.to_owned() }),
        }
    }

    /// The path, if it is one on this machine.
    pub fn path(&self) -> Option<&PathBuf> {
        match self {
            Self::File(path) => Some(path),
            _ => None,
        }
    }

    /// Whether its bytes come over a network.
    pub fn is_far(&self) -> bool {
        matches!(self, Self::Https(_) | Self::Hub(_) | Self::S3 { .. })
    }

    /// The last part of its name, from which the kind of file follows.
    pub fn file_name(&self) -> String {
        match self {
            Self::File(path) => path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned(),
            Self::Https(url) => last_segment(&percent_decoded(url.path())).to_owned(),
            Self::Hub(file) => last_segment(&file.path).to_owned(),
            Self::S3 { key, .. } => last_segment(key).to_owned(),
            // Whatever a model is called there, it is a GGUF file.
            Self::Ollama(name) => format!("{}.gguf", name.model),
        }
    }

    /// All files of a model: a GGUF file may be the first of several, `NAME-00001-of-00003.gguf`.
    pub fn parts(&self) -> Result<Vec<Self>, SourceError> {
        let name = self.file_name();
        let Some((stem, first, count)) = split_name(&name) else { return Ok(vec![self.clone()]) };
        if first != 1 {
            return Err(SourceError::NotFirstPart { name });
        }
        if count > MANIFEST_FILES_MAX {
            return Err(SourceError::TooManyParts { name });
        }
        Ok((1..=count).map(|index| self.sibling(&format!("{stem}-{index:05}-of-{count:05}.gguf"))).collect())
    }

    /// Another file beside it.
    fn sibling(&self, name: &str) -> Self {
        match self {
            Self::File(path) => Self::File(path.with_file_name(name)),
            Self::Https(url) => {
                let mut url = url.clone();
                // A URL with a host has a path, so that this cannot fail.
                if let Ok(mut segments) = url.path_segments_mut() {
                    segments.pop().push(name);
                }
                Self::Https(url)
            }
            Self::Hub(file) => Self::Hub(HubFile { path: beside(&file.path, name), ..file.clone() }),
            Self::S3 { bucket, key } => Self::S3 { bucket: bucket.clone(), key: beside(key, name) },
            Self::Ollama(_) => self.clone(),
        }
    }
}

/// As it may be shown: without what stands behind a `?`, which often gives access.
impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(formatter, "{}", path.display()),
            Self::Https(url) => formatter.write_str(&shown(url)),
            Self::Hub(HubFile { repository, path, revision }) => {
                write!(formatter, "hf://{repository}/{path}@{revision}")
            }
            Self::S3 { bucket, key } => write!(formatter, "s3://{bucket}/{key}"),
            Self::Ollama(name) => write!(formatter, "ollama://{name}"),
        }
    }
}

impl fmt::Display for OllamaName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.registry != OLLAMA_REGISTRY {
            write!(formatter, "{}/", self.registry)?;
        }
        if self.registry != OLLAMA_REGISTRY || self.namespace != OLLAMA_NAMESPACE {
            write!(formatter, "{}/", self.namespace)?;
        }
        write!(formatter, "{}:{}", self.model, self.tag)
    }
}

/// A URL without its query, in which there may be secrets.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.to_string()
}

/// Takes `STEM-00001-of-00003.gguf` apart.
fn split_name(name: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
    Some((stem, number(index)?, number(count)?)).filter(|(_, _, count)| *count >= 1)
}

fn last_segment(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn beside(path: &str, name: &str) -> String {
    match path.rsplit_once('/') {
        Some((directory, _)) => format!("{directory}/{name}"),
        None => name.to_owned(),
    }
}

fn is_scheme(text: &str) -> bool {
    text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

fn parse_https(text: &str) -> Result<Url, SourceError> {
    let malformed = |reason| SourceError::Malformed { reason, form: HTTPS_FORM };
    let url = Url::parse(text).map_err(|_| malformed("it is not a URL"))?;
    if url.host_str().is_none_or(str::is_empty) {
        return Err(malformed("it names no host"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(malformed("it holds a user name or a password, which would be kept and shown"));
    }
    if url.fragment().is_some() {
        return Err(malformed("it has a fragment"));
    }
    if last_segment(url.path()).is_empty() {
        return Err(malformed("it names no file"));
    }
    Ok(url)
}

/// Parses `organisation/repository[@revision]/path[@revision]`.
fn parse_hub(rest: &str) -> Result<HubFile, SourceError> {
    let malformed = |reason| SourceError::Malformed { reason, form: HUB_FORM };
    let mut pieces = rest.splitn(3, '/');
    let (Some(organisation), Some(repository), Some(path)) = (pieces.next(), pieces.next(), pieces.next()) else {
        return Err(malformed("it needs an organisation, a repository and a file"));
    };
    let (repository, early) = split_revision(repository);
    let (path, late) = split_revision(path);
    let revision = match (early, late) {
        (Some(_), Some(_)) => return Err(malformed("it names two revisions")),
        (one, other) => one.or(other).unwrap_or(DEFAULT_REVISION),
    };
    let plain = |name: &str| is_plain(name, b"._-");
    if !plain(organisation) || !plain(repository) {
        return Err(malformed("an organisation or a repository has characters other than A-Z a-z 0-9 . _ -"));
    }
    if !path.split('/').all(is_segment) {
        return Err(malformed("the file's path has an empty part or one that leads elsewhere"));
    }
    if !revision.split('/').all(|part| is_plain(part, b"._-+")) {
        return Err(malformed("the revision is not the name of a branch, a tag or a commit"));
    }
    Ok(HubFile {
        repository: format!("{organisation}/{repository}"),
        path: path.to_owned(),
        revision: revision.to_owned(),
    })
}

fn split_revision(text: &str) -> (&str, Option<&str>) {
    match text.split_once('@') {
        Some((before, revision)) => (before, Some(revision)),
        None => (text, None),
    }
}

fn parse_s3(rest: &str) -> Result<Location, SourceError> {
    let malformed = |reason| SourceError::Malformed { reason, form: S3_FORM };
    let (bucket, key) = rest.split_once('/').ok_or_else(|| malformed("it names no key"))?;
    if !is_plain(bucket, b"._-") {
        return Err(malformed("the bucket has characters other than A-Z a-z 0-9 . _ -"));
    }
    if key.len() > KEY_BYTES_MAX || !key.split('/').all(is_segment) {
        return Err(malformed("the key is too long, or has an empty part or one that leads elsewhere"));
    }
    Ok(Location::S3 { bucket: bucket.to_owned(), key: key.to_owned() })
}

/// Parses `[[registry/]namespace/]model[:tag]`, as Ollama does.
fn parse_ollama(rest: &str) -> Result<OllamaName, SourceError> {
    let malformed = |reason| SourceError::Malformed { reason, form: OLLAMA_FORM };
    let pieces: Vec<&str> = rest.split('/').collect();
    let (registry, namespace, last) = match pieces.as_slice() {
        [last] => (OLLAMA_REGISTRY, OLLAMA_NAMESPACE, *last),
        [namespace, last] => (OLLAMA_REGISTRY, *namespace, *last),
        [registry, namespace, last] => (*registry, *namespace, *last),
        _ => return Err(malformed("it has more than three parts")),
    };
    let (model, tag) = last.split_once(':').unwrap_or((last, OLLAMA_TAG));
    let plain = |name: &&str| is_plain(name, b"._-");
    if !is_plain(registry, b"._-:") || ![namespace, model, tag].iter().all(plain) {
        return Err(malformed("a part is empty or has characters other than A-Z a-z 0-9 . _ -"));
    }
    let [registry, namespace, model, tag] = [registry, namespace, model, tag].map(str::to_owned);
    Ok(OllamaName { registry, namespace, model, tag })
}

/// A part of a name that can be no path: letters, digits and a few others, not beginning with a dot.
fn is_plain(name: &str, others: &[u8]) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with('.') && name.bytes().all(known)
}

/// A part of a path that stays where it is.
fn is_segment(part: &str) -> bool {
    !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']) && !part.contains(char::is_control)
}

/// Parses what follows `file://`.
fn parse_file_url(rest: &str) -> Result<PathBuf, SourceError> {
    let malformed = |reason| SourceError::Malformed { reason, form: FILE_FORM };
    let slash = rest.find('/').ok_or_else(|| malformed("it has no absolute path"))?;
    let (host, path) = rest.split_at(slash);
    if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
        return Err(SourceError::Host { host: host.to_owned() });
    }
    if path.contains(['?', '#']) {
        return Err(malformed("it has a query or a fragment"));
    }
    let bytes = percent_decode(path).ok_or_else(|| malformed("a % is not followed by two hexadecimal digits"))?;
    if bytes.contains(&0) {
        return Err(malformed("it holds a NUL character"));
    }
    Ok(path_from_bytes(bytes))
}

fn percent_decoded(text: &str) -> String {
    let bytes = percent_decode(text).unwrap_or_else(|| text.as_bytes().to_vec());
    String::from_utf8_lossy(&bytes).into_owned()
}

fn percent_decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte != b'%' {
            bytes.push(byte);
            rest = after;
            continue;
        }
        let pair = after.get(..2)?;
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        bytes.push(u8::try_from(high * 16 + low).ok()?);
        rest = &after[2..];
    }
    Some(bytes)
}

fn path_from_bytes(bytes: Vec<u8>) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests;
