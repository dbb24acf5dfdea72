//! Any bytes as a GGUF file: an error or a header, never a panic, never much memory.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warmset_engine::gguf::{estimate, read_header};

fuzz_target!(|bytes: &[u8]| {
    // What the file system says about the length is taken from the input too, so that lengths beyond the end are tried.
    let claimed = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    for (content, length) in [(bytes, bytes.len() as u64), (bytes.get(8..).unwrap_or_default(), claimed)] {
        if let Ok(header) = read_header(content, length) {
            let _ = (header.kv_bytes_per_token(), estimate(&header, u32::MAX, 64));
        }
    }
});
