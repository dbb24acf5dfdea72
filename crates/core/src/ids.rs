//! Names of things. A digest is the identity of a model's bytes and behaviour; a name is only an alias for one.

use alloc::{string::String, sync::Arc, vec::Vec};
use core::fmt;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest model name accepted anywhere, in bytes.
pub const MODEL_NAME_BYTES_MAX: usize = 128;

/// SHA-256 over a model's manifest: files, engine, template and every parameter that changes its output.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

/// Why a text is not a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidDigest;

impl fmt::Display for InvalidDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a digest is \"sha256:\" and 64 lower-case hexadecimal digits")
    }
}

impl core::error::Error for InvalidDigest {}

impl Digest {
    /// Parses `sha256:<64 lower-case hex>` and nothing else.
    pub fn parse(text: &str) -> Result<Self, InvalidDigest> {
        let hex = text.strip_prefix("sha256:").ok_or(InvalidDigest)?.as_bytes();
        if hex.len() != 64 {
            return Err(InvalidDigest);
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
            *byte = (nibble(pair[0])? << 4) | nibble(pair[1])?;
        }
        Ok(Self(bytes))
    }

    /// The 64 hexadecimal digits without the algorithm.
    pub fn hex(&self) -> String {
        use fmt::Write;
        let mut text = String::with_capacity(64);
        for byte in self.0 {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// OpenAI's `system_fingerprint`: `fp_` and the first 12 hexadecimal digits.
    pub fn fingerprint(&self) -> String {
        let mut text = String::from("fp_");
        text.push_str(&self.hex()[..12]);
        text
    }
}

fn nibble(digit: u8) -> Result<u8, InvalidDigest> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(InvalidDigest),
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", &self.hex()[..12])
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A model name as callers write it: 1 to 128 characters of `A-Z a-z 0-9 . _ - / : @`, starting with a letter or
/// digit, without `..` and `//`. It is looked up in tables and never becomes a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ModelName(Arc<str>);

/// Why a text is not a model name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidModelName;

impl fmt::Display for InvalidModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "a model name has 1 to 128 characters of A-Z a-z 0-9 . _ - / : @, starts with a letter or digit, and holds neither \"..\" nor \"//\"",
        )
    }
}

impl core::error::Error for InvalidModelName {}

impl ModelName {
    /// Checks and takes a name.
    pub fn parse(text: &str) -> Result<Self, InvalidModelName> {
        let first_is_plain = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        let all_allowed = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte));
        let short = text.len() <= MODEL_NAME_BYTES_MAX;
        if first_is_plain && all_allowed && short && !text.contains("..") && !text.contains("//") {
            Ok(Self(text.into()))
        } else {
            Err(InvalidModelName)
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ModelName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub Arc<str>);

        impl $name {
            /// Takes a text as it is.
            pub fn new(text: &str) -> Self {
                Self(text.into())
            }

            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id! {
    /// Who asks. Every event names its tenant; callers are `anonymous` until a tenant exists.
    TenantId
}
text_id! {
    /// A part of a worker's memory with its own budget; models of one pool never evict those of another.
    PoolName
}

impl TenantId {
    /// The tenant of calls made before any tenant exists.
    pub fn anonymous() -> Self {
        Self::new("anonymous")
    }
}

impl PoolName {
    /// The pool of models that name none.
    pub fn default_pool() -> Self {
        Self::new("default")
    }
}

/// One request, unique within one run of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// One accepted job: its number in the catalog, in order of acceptance. Callers know it by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobId(pub u64);

/// One worker as the gateway knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId(pub u32);

/// Classes of work, most important first: `Critical < Standard < Batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// May use reserved slots; never evicted by a lower class while in use recently.
    Critical,
    /// The default.
    Standard,
    /// Gives way to everybody.
    Batch,
}

impl Priority {
    /// All classes, most important first.
    pub const ALL: [Self; 3] = [Self::Critical, Self::Standard, Self::Batch];

    /// The name used in configuration, metrics and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Standard => "standard",
            Self::Batch => "batch",
        }
    }
}

/// Names sorted and joined for messages.
pub fn join_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut sorted: Vec<&str> = names.collect();
    sorted.sort_unstable();
    sorted.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    #[test]
    fn digest_round_trips_and_refuses_everything_else() {
        let digest = Digest([0xab; 32]);
        assert_eq!(Digest::parse(&digest.to_string()), Ok(digest));
        assert_eq!(digest.fingerprint(), "fp_abababababab");
        let upper = digest.to_string().to_uppercase();
        for bad in ["", "sha256:", "sha256:../../x", "md5:abababab", upper.as_str(), &digest.to_string()[..70]] {
            assert_eq!(Digest::parse(bad), Err(InvalidDigest), "{bad}");
        }
    }

    #[test]
    fn model_names_never_look_like_paths() {
        for good in ["a", "smollm2", "org/model:7b", "x@sha", "A.b_c-d"] {
            assert!(ModelName::parse(good).is_ok(), "{good}");
        }
        let long = "a".repeat(MODEL_NAME_BYTES_MAX + 1);
        for bad in ["", "../../etc/passwd", "/abs", "a/../b", "a//b", "a b", "a\0", "ä", "a%2f", long.as_str()] {
            assert!(ModelName::parse(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn parsing_any_text_never_panics(text in ".{0,200}") {
            let _ = ModelName::parse(&text);
            let _ = Digest::parse(&text);
        }
    }
}
