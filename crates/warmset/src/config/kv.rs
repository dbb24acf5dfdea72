//! `[kv]`: where KV outlives the request it was computed for.

use super::reader::{self, Reader, Section};
use std::{path::PathBuf, time::Duration};
use toml::de::DeValue;
use warmset_core::{Bytes, kv::BLOCK_TOKENS};

/// What the file says of the tier. What it does not say is none.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct KvOptions {
    pub(crate) host: Option<Bytes>,
    pub(crate) disk: Option<Bytes>,
    pub(crate) dir: Option<PathBuf>,
    pub(crate) encrypt: Option<bool>,
    pub(crate) retention: Option<Duration>,
    pub(crate) disk_writes_per_day: Option<Bytes>,
    pub(crate) disk_free: Option<Bytes>,
    pub(crate) verify: Option<bool>,
}

fn directory(value: &DeValue<'_>) -> Result<PathBuf, String> {
    match reader::text(value)? {
        text if text.is_empty() => {
            Err("must name a directory: leave it out for the one in the data directory".to_owned())
        }
        text => Ok(text.into()),
    }
}

pub(super) fn read_kv(reader: &mut Reader<'_>, mut section: Section<'_>) -> KvOptions {
    section.take(reader, "block_tokens", |value| match reader::integer(1, u32::MAX)(value)? {
        BLOCK_TOKENS => Ok(()),
        other => Err(format!("blocks have {BLOCK_TOKENS} tokens, not {other}: leave it out")),
    });
    let options = KvOptions {
        host: section.take(reader, "host", reader::bytes),
        disk: section.take(reader, "disk", reader::bytes),
        dir: section.take(reader, "dir", directory),
        encrypt: section.take(reader, "encrypt", reader::boolean),
        retention: section.take(reader, "retention", reader::positive_duration),
        disk_writes_per_day: section.take(reader, "disk_writes_per_day", reader::positive_bytes),
        disk_free: section.take(reader, "disk_free", reader::bytes),
        verify: section.take(reader, "verify", reader::boolean),
    };
    section.finish(reader);
    options
}
