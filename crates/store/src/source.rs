//! Where a model comes from: a path, or a `file://` URL.

use std::path::PathBuf;

/// Why a source cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Nothing is given.
    #[error("the source is empty: give a path or a file:// URL")]
    Empty,
    /// A scheme that is not supported.
    #[error("sources of the kind {scheme}:// are not supported: give a path or a file:// URL")]
    Scheme {
        /// The scheme.
        scheme: String,
    },
    /// A `file://` URL that names another machine.
    #[error("{host} is another machine: a file:// URL has an empty host or localhost (file:///path)")]
    Host {
        /// The host.
        host: String,
    },
    /// A `file://` URL that is not well formed.
    #[error("not a valid file:// URL ({reason}): write file:///absolute/path with other characters percent-encoded")]
    Malformed {
        /// What is wrong.
        reason: &'static str,
    },
}

/// Takes a source apart. A text with `scheme://` is a URL; everything else is a path as it stands.
pub fn parse_source(text: &str) -> Result<PathBuf, SourceError> {
    if text.is_empty() {
        return Err(SourceError::Empty);
    }
    if text.contains('\0') {
        return Err(SourceError::Malformed { reason: "it holds a NUL character" });
    }
    match text.split_once("://") {
        Some((scheme, rest)) if is_scheme(scheme) => {
            if scheme.eq_ignore_ascii_case("file") {
                parse_file_url(rest)
            } else {
                Err(SourceError::Scheme { scheme: scheme.to_ascii_lowercase() })
            }
        }
        _ => Ok(PathBuf::from(text)),
    }
}

fn is_scheme(text: &str) -> bool {
    text.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Parses what follows `file://`.
fn parse_file_url(rest: &str) -> Result<PathBuf, SourceError> {
    let slash = rest.find('/').ok_or(SourceError::Malformed { reason: "it has no absolute path" })?;
    let (host, path) = rest.split_at(slash);
    if !host.is_empty() && !host.eq_ignore_ascii_case("localhost") {
        return Err(SourceError::Host { host: host.to_owned() });
    }
    if path.contains(['?', '#']) {
        return Err(SourceError::Malformed { reason: "it has a query or a fragment" });
    }
    let bytes = percent_decode(path)?;
    if bytes.contains(&0) {
        return Err(SourceError::Malformed { reason: "it holds a NUL character" });
    }
    Ok(path_from_bytes(bytes))
}

fn percent_decode(text: &str) -> Result<Vec<u8>, SourceError> {
    let malformed = SourceError::Malformed { reason: "a % is not followed by two hexadecimal digits" };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte != b'%' {
            bytes.push(byte);
            rest = after;
            continue;
        }
        let digits = after.get(..2).and_then(|pair| {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            u8::try_from(high * 16 + low).ok()
        });
        bytes.push(digits.ok_or_else(|| malformed.clone())?);
        rest = &after[2..];
    }
    Ok(bytes)
}

fn path_from_bytes(bytes: Vec<u8>) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn paths_and_file_urls_are_understood() {
        for (text, path) in [
            ("model.gguf", "model.gguf"),
            ("/a b/%41.gguf", "/a b/%41.gguf"),
            ("c:/x", "c:/x"),
            ("file:///a/b.gguf", "/a/b.gguf"),
            ("FILE://localhost/a%20b/%41.gguf", "/a b/A.gguf"),
            ("file:///%C3%A4", "/ä"),
        ] {
            assert_eq!(parse_source(text), Ok(PathBuf::from(path)), "{text}");
        }
    }

    #[test]
    fn everything_else_is_refused_with_its_reason() {
        assert_eq!(parse_source(""), Err(SourceError::Empty));
        assert_eq!(parse_source("s3://bucket/key"), Err(SourceError::Scheme { scheme: "s3".into() }));
        assert_eq!(parse_source("HTTPS://x/y"), Err(SourceError::Scheme { scheme: "https".into() }));
        assert_eq!(parse_source("file://other/a"), Err(SourceError::Host { host: "other".into() }));
        for bad in ["file://", "file://a", "file:///a%2", "file:///a%zz", "file:///a?b", "file:///a#b", "file:///a%00"]
        {
            assert!(parse_source(bad).is_err(), "{bad}");
        }
        assert!(parse_source("a\0b").is_err());
    }

    proptest! {
        #[test]
        fn an_encoded_path_comes_back(path in "/[^\0]{0,60}") {
            let encoded: String = path.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let url = format!("file:///{}", encoded.trim_start_matches("%2F"));
            let expected = format!("/{}", path.trim_start_matches('/'));
            prop_assert_eq!(parse_source(&url), Ok(PathBuf::from(expected)));
        }

        #[test]
        fn any_text_is_taken_or_refused_without_a_panic(text in ".{0,80}") {
            let _ = parse_source(&text);
        }
    }
}
