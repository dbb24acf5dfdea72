//! A whole block as bytes: the page of [`BlockHeader`], then the payload, padded to whole pages. The same bytes stand in host
//! memory and on disk, so that a read goes straight to its place.

use twox_hash::XxHash3_64;
use warmset_core::kv::{BlockHeader, BlockKey, HEADER_BYTES, InvalidHeader, KvIdentity, TrustDomain};

/// What headers, payloads and places on disk are multiples of.
pub const PAGE_BYTES: usize = HEADER_BYTES;
/// The largest payload: 64 tokens of the largest caches known (4 MiB for each).
pub const PAYLOAD_BYTES_MAX: u64 = 256 << 20;

/// One page.
pub(crate) type Page = [u8; PAGE_BYTES];

/// What a block is asked for by: all of it must agree, or it is another block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    /// The model, its layout and its engine.
    pub identity: KvIdentity,
    /// Whose prompt it comes from.
    pub domain: TrustDomain,
    /// The block.
    pub key: BlockKey,
}

/// Why bytes are no block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// Its first page is no header.
    #[error("its header is invalid: {}", .0.as_str())]
    Header(InvalidHeader),
    /// It is longer or shorter than its header says, or no block can be so long.
    #[error("its header speaks of {payload_bytes} bytes of payload, it has {block_bytes} bytes in all")]
    Length {
        /// What the header says.
        payload_bytes: u64,
        /// What is there.
        block_bytes: usize,
    },
    /// Behind the payload stand bytes of something else.
    #[error("the padding behind its payload is not zeros")]
    Padding,
    /// The payload is not what the header was written for.
    #[error("its payload does not match its checksum")]
    Payload,
}

impl From<&BlockHeader> for BlockId {
    fn from(header: &BlockHeader) -> Self {
        Self { identity: header.identity, domain: header.domain, key: header.key }
    }
}

/// Pages of a block with so much payload, its header's page included; nothing if no block can have it.
pub const fn pages_of(payload_bytes: u64) -> Option<u32> {
    match payload_bytes {
        1..=PAYLOAD_BYTES_MAX => Some(1 + payload_bytes.div_ceil(PAGE_BYTES as u64) as u32),
        _ => None,
    }
}

/// Reads the header of a whole block, and where its payload is. The padding must be zeros: anything else would be somebody
/// else's bytes, left there.
pub(crate) fn read(block: &[u8]) -> Result<(BlockHeader, u32, &[u8]), BlockError> {
    let header = BlockHeader::decode(block).map_err(BlockError::Header)?;
    let wrong_length = BlockError::Length { payload_bytes: header.payload_bytes, block_bytes: block.len() };
    let pages = pages_of(header.payload_bytes).ok_or(wrong_length)?;
    if block.len() != pages as usize * PAGE_BYTES {
        return Err(wrong_length);
    }
    let (payload, padding) = block[PAGE_BYTES..].split_at(header.payload_bytes as usize);
    if padding.iter().any(|byte| *byte != 0) {
        return Err(BlockError::Padding);
    }
    Ok((header, pages, payload))
}

/// Reads a whole block and compares its payload with its header.
pub(crate) fn verified(block: &[u8]) -> Result<BlockHeader, BlockError> {
    let (header, _, payload) = read(block)?;
    if header.matches(payload) { Ok(header) } else { Err(BlockError::Payload) }
}

/// XXH3-64 of a page without the checksum itself.
pub(crate) fn page_checksum(page: &Page, checksum_at: usize) -> u64 {
    let mut copy = *page;
    copy[checksum_at..checksum_at + 8].fill(0);
    XxHash3_64::oneshot(&copy)
}

/// So many bytes of a page from there on. The places are constants that lie within it.
pub(crate) fn field<const N: usize>(page: &Page, at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&page[at..at + N]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use warmset_core::kv::header::payload_checksum;

    fn block(payload: &[u8]) -> Vec<u8> {
        let header = BlockHeader {
            identity: KvIdentity([1; 32]),
            domain: TrustDomain([2; 32]),
            key: BlockKey([3; 32]),
            parent: BlockKey([4; 32]),
            first_token: 64,
            tokens: (0..64).collect(),
            payload_bytes: payload.len() as u64,
            payload_checksum: payload_checksum(payload),
            written_at_seconds: 1_800_000_000,
        };
        let mut page = [0; PAGE_BYTES];
        header.encode(&mut page);
        let mut block = [&page[..], payload].concat();
        block.resize(block.len().next_multiple_of(PAGE_BYTES), 0);
        block
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_changed_bit_of_a_block_shows(payload in vec(any::<u8>(), 1..20_000), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut block = block(&payload);
            let header = verified(&block).unwrap();
            prop_assert_eq!(Some(block.len()), pages_of(header.payload_bytes).map(|pages| pages as usize * PAGE_BYTES));
            let at = at.index(block.len());
            block[at] ^= 1u8 << bit;
            prop_assert!(verified(&block).is_err());
        }

        #[test]
        fn a_block_of_any_length_is_read_or_refused(payload in vec(any::<u8>(), 0..9000), length in 0usize..13_000) {
            let mut block = block(&payload);
            let whole = block.len();
            block.resize(length, 0);
            prop_assert_eq!(verified(&block).is_ok(), length == whole && !payload.is_empty());
            prop_assert!(verified(&payload).is_err());
        }
    }

    #[test]
    fn no_block_is_absurdly_long() {
        assert_eq!([pages_of(0), pages_of(PAYLOAD_BYTES_MAX + 1), pages_of(u64::MAX)], [None; 3]);
        assert_eq!([pages_of(1), pages_of(4096), pages_of(4097)], [Some(2), Some(2), Some(3)]);
    }
}
