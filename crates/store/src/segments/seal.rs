//! An encrypted block on disk: as many pages as in memory, and nothing of a caller in the open but lengths and times.
//!
//! The first 64 bytes are open: which key, how long, the authentication tag. Everything else, the header with its tokens and
//! the payload, is one ciphertext that is decrypted where it was read.

use super::{
    block::{PAGE_BYTES, Page, field, page_checksum, pages_of},
    keys::{KeyId, Keys, SegmentKey, SegmentSalt, TAG_BYTES},
};
use ring::error::Unspecified;
use std::io::{self, ErrorKind};
use warmset_core::kv::BlockHeader;

const MAGIC: [u8; 8] = *b"WARMKVSE";
const CHECKSUM_AT: usize = 8;
const TAG_AT: usize = 48;
/// Where the ciphertext begins.
const SECRET_AT: usize = 64;
/// The header moves back by the open part, but for the checksum at its very end; what stands before that is unused.
const MOVED: std::ops::Range<usize> = 0..PAGE_BYTES - 8 - SECRET_AT;
const UNUSED: std::ops::Range<usize> = PAGE_BYTES - 8 - SECRET_AT..PAGE_BYTES - 8;

/// The open part of an encrypted block's page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SealedHeader {
    pub(crate) key_id: KeyId,
    pages: u32,
    payload_bytes: u64,
    written_at_seconds: u64,
    tag: [u8; TAG_BYTES],
}

impl SealedHeader {
    /// Whether a page begins like one.
    pub(crate) fn is(page: &Page) -> bool {
        page[..8] == MAGIC
    }

    /// Reads a page that can be anything.
    pub(crate) fn decode(page: &Page) -> Option<Self> {
        let is_sound =
            Self::is(page) && u64::from_le_bytes(field(page, CHECKSUM_AT)) == page_checksum(page, CHECKSUM_AT);
        let payload_bytes = u64::from_le_bytes(field(page, 32));
        let pages = pages_of(payload_bytes).filter(|_| is_sound)?;
        let written_at_seconds = u64::from_le_bytes(field(page, 40));
        Some(Self { key_id: field(page, 16), pages, payload_bytes, written_at_seconds, tag: field(page, TAG_AT) })
    }

    /// Pages of the whole block.
    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    /// Writes the open part, whose end is not covered by the tag but by the checksum.
    fn encode(&self, page: &mut Page) {
        page[..SECRET_AT].fill(0);
        page[..8].copy_from_slice(&MAGIC);
        page[16..32].copy_from_slice(&self.key_id);
        page[32..40].copy_from_slice(&self.payload_bytes.to_le_bytes());
        page[40..48].copy_from_slice(&self.written_at_seconds.to_le_bytes());
        page[TAG_AT..TAG_AT + TAG_BYTES].copy_from_slice(&self.tag);
        let checksum = page_checksum(page, CHECKSUM_AT);
        page[CHECKSUM_AT..CHECKSUM_AT + 8].copy_from_slice(&checksum.to_le_bytes());
    }

    /// What is authenticated beside the ciphertext.
    fn authenticated(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.key_id);
        bytes[16..24].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[24..].copy_from_slice(&self.written_at_seconds.to_le_bytes());
        bytes
    }
}

/// Turns a block into its encrypted form for this place of a segment, in place.
pub(crate) fn seal(
    block: &mut [u8],
    header: &BlockHeader,
    key_id: KeyId,
    key: &SegmentKey,
    place: u32,
) -> io::Result<()> {
    let pages = pages_of(header.payload_bytes).ok_or(ErrorKind::InvalidInput)?;
    if block.len() < PAGE_BYTES || block[UNUSED].iter().any(|byte| *byte != 0) {
        return Err(ErrorKind::InvalidInput.into());
    }
    block.copy_within(MOVED, SECRET_AT);
    let mut sealed = SealedHeader {
        key_id,
        pages,
        payload_bytes: header.payload_bytes,
        written_at_seconds: header.written_at_seconds,
        tag: [0; TAG_BYTES],
    };
    sealed.tag = key.seal(place, &sealed.authenticated(), &mut block[SECRET_AT..])?;
    sealed.encode(block.first_chunk_mut().ok_or(ErrorKind::InvalidInput)?);
    Ok(())
}

/// Turns what was read at this place of a segment into the block, in place. The caller clears what failed.
pub(crate) fn open(block: &mut [u8], sealed: &SealedHeader, key: &SegmentKey, place: u32) -> Result<(), Unspecified> {
    let secret = block.get_mut(SECRET_AT..).filter(|secret| secret.len() >= PAGE_BYTES).ok_or(Unspecified)?;
    key.open(place, &sealed.authenticated(), sealed.tag, secret)?;
    block.copy_within(SECRET_AT..UNUSED.end, 0);
    block[UNUSED].fill(0);
    Ok(())
}

/// The key of an encrypted block in this segment; none once it was destroyed.
pub(crate) fn key_of(sealed: &SealedHeader, keys: &Keys, salt: &SegmentSalt) -> Option<SegmentKey> {
    keys.by_id(&sealed.key_id)?.in_segment(salt).ok()
}
