//! The page before each block's bytes, in host memory and on disk: what the block is, so that nobody need believe
//! whoever gave its place.
//!
//! Layout, little endian, [`HEADER_BYTES`] in all: magic 8, version 4, tokens 4, first token 8, payload bytes 8,
//! written at (seconds since 1970) 8, payload checksum 16, identity 32, domain 32, key 32, parent 32, token ids 4 each
//! (at most [`TOKENS_MAX`]); zeros; in the last 8 bytes a checksum of all before them.

use super::key::{BlockKey, KvIdentity, TrustDomain};
use alloc::vec::Vec;
use core::hash::Hasher;
use twox_hash::{XxHash3_64, XxHash3_128};

/// Bytes of a header: a page, so that the payload behind it lies as disks and direct I/O want it.
pub const HEADER_BYTES: usize = 4096;
/// The most tokens of a block.
pub const TOKENS_MAX: usize = 512;

const MAGIC: [u8; 8] = *b"warmKV1\n";
const VERSION: u32 = 1;
const CHECKSUM_AT: usize = HEADER_BYTES - 8;

/// What a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockHeader {
    /// The model, its layout and its engine.
    pub identity: KvIdentity,
    /// Whose prompt it comes from.
    pub domain: TrustDomain,
    /// The block.
    pub key: BlockKey,
    /// The block before it, or the root.
    pub parent: BlockKey,
    /// Place of its first token in the prompt.
    pub first_token: u64,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Bytes behind the header.
    pub payload_bytes: u64,
    /// Checksum of those bytes.
    pub payload_checksum: u128,
    /// When it was written, in seconds since 1970.
    pub written_at_seconds: u64,
}

/// Why a page is not a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidHeader {
    /// Too few bytes.
    Short,
    /// Something else stands there.
    Magic,
    /// Written by another version.
    Version,
    /// Its bytes were changed.
    Checksum,
    /// A field has no possible value.
    Field,
}

impl InvalidHeader {
    /// The value of the metrics label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Magic => "magic",
            Self::Version => "version",
            Self::Checksum => "header_checksum",
            Self::Field => "field",
        }
    }
}

/// Checksum of a block's payload: against damage, not against malice.
pub fn payload_checksum(payload: &[u8]) -> u128 {
    XxHash3_128::oneshot(payload)
}

/// Checksum of the header page before its last eight bytes.
fn header_checksum(page: &[u8]) -> u64 {
    let mut hasher = XxHash3_64::with_seed(u64::from(VERSION));
    hasher.write(page);
    hasher.finish()
}

impl BlockHeader {
    /// Writes it over a page. Tokens beyond [`TOKENS_MAX`] are an error of the caller's, and not written.
    pub fn encode(&self, page: &mut [u8; HEADER_BYTES]) {
        page.fill(0);
        let tokens = &self.tokens[..self.tokens.len().min(TOKENS_MAX)];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            page[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&(tokens.len() as u32).to_le_bytes());
        put(&self.first_token.to_le_bytes());
        put(&self.payload_bytes.to_le_bytes());
        put(&self.written_at_seconds.to_le_bytes());
        put(&self.payload_checksum.to_le_bytes());
        put(&self.identity.0);
        put(&self.domain.0);
        put(&self.key.0);
        put(&self.parent.0);
        for token in tokens {
            put(&token.to_le_bytes());
        }
        let checksum = header_checksum(&page[..CHECKSUM_AT]);
        page[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
    }

    /// Reads a page that may hold anything.
    pub fn decode(page: &[u8]) -> Result<Self, InvalidHeader> {
        let page = page.get(..HEADER_BYTES).ok_or(InvalidHeader::Short)?;
        let mut reader = Reader { page, at: 0 };
        if reader.take::<8>()? != MAGIC {
            return Err(InvalidHeader::Magic);
        }
        if u32::from_le_bytes(reader.take()?) != VERSION {
            return Err(InvalidHeader::Version);
        }
        if header_checksum(&page[..CHECKSUM_AT]).to_le_bytes() != page[CHECKSUM_AT..] {
            return Err(InvalidHeader::Checksum);
        }
        let tokens = u32::from_le_bytes(reader.take()?) as usize;
        if tokens == 0 || tokens > TOKENS_MAX {
            return Err(InvalidHeader::Field);
        }
        let header = Self {
            first_token: u64::from_le_bytes(reader.take()?),
            payload_bytes: u64::from_le_bytes(reader.take()?),
            written_at_seconds: u64::from_le_bytes(reader.take()?),
            payload_checksum: u128::from_le_bytes(reader.take()?),
            identity: KvIdentity(reader.take()?),
            domain: TrustDomain(reader.take()?),
            key: BlockKey(reader.take()?),
            parent: BlockKey(reader.take()?),
            tokens: (0..tokens).map(|_| reader.take().map(u32::from_le_bytes)).collect::<Result<_, _>>()?,
        };
        Ok(header)
    }

    /// Whether the bytes behind the header are those it was written for.
    pub fn matches(&self, payload: &[u8]) -> bool {
        payload.len() as u64 == self.payload_bytes && payload_checksum(payload) == self.payload_checksum
    }
}

struct Reader<'a> {
    page: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], InvalidHeader> {
        let bytes = self.page.get(self.at..self.at + N).ok_or(InvalidHeader::Short)?;
        self.at += N;
        bytes.try_into().map_err(|_| InvalidHeader::Short)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn header(tokens: usize, payload: &[u8]) -> BlockHeader {
        BlockHeader {
            identity: KvIdentity([1; 32]),
            domain: TrustDomain([2; 32]),
            key: BlockKey([3; 32]),
            parent: BlockKey([4; 32]),
            first_token: 640,
            tokens: (0..tokens as u32).collect(),
            payload_bytes: payload.len() as u64,
            payload_checksum: payload_checksum(payload),
            written_at_seconds: 1_700_000_000,
        }
    }

    /// Where the token ids begin.
    const TOKENS_AT: usize = 184;

    #[test]
    fn the_largest_header_fits_its_page() {
        const { assert!(TOKENS_AT + 4 * TOKENS_MAX <= CHECKSUM_AT) };
        let (header, mut page) = (header(TOKENS_MAX, b"x"), [0; HEADER_BYTES]);
        header.encode(&mut page);
        assert_eq!(page[TOKENS_AT + 4..TOKENS_AT + 8], 1u32.to_le_bytes());
        assert_eq!(BlockHeader::decode(&page), Ok(header));
    }

    #[test]
    fn a_block_without_tokens_is_none() {
        let mut page = [0; HEADER_BYTES];
        header(0, b"").encode(&mut page);
        assert_eq!(BlockHeader::decode(&page), Err(InvalidHeader::Field));
        assert_eq!(BlockHeader::decode(&page[1..]), Err(InvalidHeader::Short));
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(tokens in 1usize..TOKENS_MAX, payload in prop::collection::vec(any::<u8>(), 0..99)) {
            let (header, mut page) = (header(tokens, &payload), [7; HEADER_BYTES]);
            header.encode(&mut page);
            prop_assert!(header.matches(&payload));
            prop_assert_eq!(BlockHeader::decode(&page), Ok(header));
        }

        #[test]
        fn one_changed_bit_shows(at in 0usize..HEADER_BYTES, bit in 0u8..8) {
            let mut page = [0; HEADER_BYTES];
            header(64, b"payload").encode(&mut page);
            page[at] ^= 1 << bit;
            prop_assert!(BlockHeader::decode(&page).is_err());
        }

        #[test]
        fn any_bytes_are_safe_to_read(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            let _ = BlockHeader::decode(&bytes);
            let mut page = vec![0; HEADER_BYTES];
            page[..8].copy_from_slice(&MAGIC);
            page.iter_mut().skip(8).zip(&bytes).for_each(|(place, byte)| *place = *byte);
            prop_assert!(BlockHeader::decode(&page).is_err());
        }
    }
}
