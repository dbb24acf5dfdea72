//! What stands around the blocks of a segment: a first page that says which segment it is, and, once nothing more is
//! appended, a footer that lists its blocks. A file without a sound footer was not closed, and its blocks are looked at one
//! by one.

use super::{
    block::{BlockId, PAGE_BYTES, PAYLOAD_BYTES_MAX, Page, field, page_checksum},
    keys::{KeyId, Keys, SegmentSalt, TAG_BYTES},
};
use std::collections::BTreeMap;
use twox_hash::XxHash3_128;
use warmset_core::kv::{BlockKey, KvIdentity, TrustDomain};

const SEGMENT_MAGIC: [u8; 8] = *b"WARMKVSG";
const TRAILER_MAGIC: [u8; 8] = *b"WARMKVFT";
const CHECKSUM_AT: usize = 8;
const VERSION: u32 = 1;
/// Blocks that a segment may hold; its footer stays small.
pub(crate) const BLOCKS_PER_SEGMENT_MAX: usize = 65_536;
const SECTION_HEAD_BYTES: usize = 40;
const SECTION_COMMON_BYTES: usize = 64;
const ENTRY_BYTES: usize = 96;
/// The most pages of a block.
const PAGES_MAX: u32 = 1 + (PAYLOAD_BYTES_MAX / PAGE_BYTES as u64) as u32;
/// A key that is no key: the section is in the open.
const NO_KEY: KeyId = [0; 16];
/// The longest footer: every block in a section of its own.
pub(crate) const FOOTER_BYTES_MAX: usize =
    BLOCKS_PER_SEGMENT_MAX * (SECTION_HEAD_BYTES + SECTION_COMMON_BYTES + ENTRY_BYTES) + 2 * PAGE_BYTES;

/// The first page of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub(crate) segment: u32,
    pub(crate) salt: SegmentSalt,
}

/// A block in a segment, as its footer lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) id: BlockId,
    pub(crate) parent: BlockKey,
    pub(crate) page: u32,
    pub(crate) pages: u32,
    pub(crate) first_token: u64,
    pub(crate) token_count: u32,
    pub(crate) written_at_seconds: u64,
    /// Whether it lies there encrypted.
    pub(crate) is_sealed: bool,
}

/// Where a footer stands and what it must be; the last page of a closed segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) segment: u32,
    pub(crate) first_page: u32,
    body_bytes: u32,
    body_checksum: u128,
    salt: SegmentSalt,
}

/// What a footer listed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing {
    pub(crate) blocks: Vec<Listed>,
    /// Blocks of which nothing can be known any more: their key was destroyed.
    pub(crate) unreadable_blocks: u64,
}

impl SegmentHeader {
    pub(crate) fn encode(&self, page: &mut Page) {
        page.fill(0);
        page[..8].copy_from_slice(&SEGMENT_MAGIC);
        page[16..20].copy_from_slice(&VERSION.to_le_bytes());
        page[20..24].copy_from_slice(&self.segment.to_le_bytes());
        page[32..64].copy_from_slice(&self.salt);
        finish(page);
    }

    /// Reads a page that can be anything.
    pub(crate) fn decode(page: &Page) -> Option<Self> {
        is_sound(page, &SEGMENT_MAGIC)
            .then(|| Self { segment: u32::from_le_bytes(field(page, 20)), salt: field(page, 32) })
    }
}

impl Trailer {
    fn encode(&self, page: &mut Page) {
        page.fill(0);
        page[..8].copy_from_slice(&TRAILER_MAGIC);
        page[16..20].copy_from_slice(&VERSION.to_le_bytes());
        page[20..24].copy_from_slice(&self.segment.to_le_bytes());
        page[24..28].copy_from_slice(&self.first_page.to_le_bytes());
        page[28..32].copy_from_slice(&self.body_bytes.to_le_bytes());
        page[32..48].copy_from_slice(&self.body_checksum.to_le_bytes());
        page[64..96].copy_from_slice(&self.salt);
        finish(page);
    }

    /// Reads the last page of a file, which can be anything. `pages` are all pages of the file.
    pub(crate) fn decode(page: &Page, pages: u64) -> Option<Self> {
        let trailer = is_sound(page, &TRAILER_MAGIC).then(|| Self {
            segment: u32::from_le_bytes(field(page, 20)),
            first_page: u32::from_le_bytes(field(page, 24)),
            body_bytes: u32::from_le_bytes(field(page, 28)),
            body_checksum: u128::from_le_bytes(field(page, 32)),
            salt: field(page, 64),
        })?;
        let expected_pages = u64::from(trailer.first_page) + trailer.body_pages() as u64 + 1;
        (trailer.first_page >= 1 && trailer.body_bytes as usize <= FOOTER_BYTES_MAX && expected_pages == pages)
            .then_some(trailer)
    }

    /// Pages of the list that stands before this page.
    pub(crate) fn body_pages(&self) -> usize {
        (self.body_bytes as usize).div_ceil(PAGE_BYTES)
    }

    /// What the list, whole pages of it, says. Nothing if it is not what was written.
    pub(crate) fn listing(&self, body: &[u8], keys: &Keys) -> Option<Listing> {
        let mut body = body.get(..self.body_bytes as usize)?;
        if XxHash3_128::oneshot(body) != self.body_checksum {
            return None;
        }
        let mut listing = Listing::default();
        for section in 0u32.. {
            if body.is_empty() {
                break;
            }
            let (head, rest) = body.split_first_chunk::<SECTION_HEAD_BYTES>()?;
            let count = u32::from_le_bytes(*head[32..].first_chunk()?) as usize;
            if count > BLOCKS_PER_SEGMENT_MAX {
                return None;
            }
            let (content, after) = rest.split_at_checked(SECTION_COMMON_BYTES + count * ENTRY_BYTES)?;
            body = after;
            let key_id: KeyId = *head.first_chunk()?;
            if key_id == NO_KEY {
                read_section(content, false, self.first_page, &mut listing.blocks)?;
                continue;
            }
            let mut content = content.to_vec();
            let key = keys.by_id(&key_id).and_then(|key| key.in_segment(&self.salt).ok());
            let tag: [u8; TAG_BYTES] = *head[16..].first_chunk()?;
            match key.and_then(|key| key.open(section, &head[32..], tag, &mut content).ok()) {
                Some(()) => read_section(&content, true, self.first_page, &mut listing.blocks)?,
                None => listing.unreadable_blocks += count as u64,
            }
        }
        listing.blocks.sort_unstable_by_key(|block| block.page);
        Some(listing)
    }
}

/// The footer of a segment whose blocks end before `first_page`: its list and the last page. `keys` are asked for the keys
/// of encrypted blocks; what has none any more is left out.
pub(crate) fn footer(segment: u32, first_page: u32, blocks: &[Listed], keys: &Keys) -> std::io::Result<Vec<u8>> {
    let salt = keys.random_bytes()?;
    let mut sections: BTreeMap<_, Vec<&Listed>> = BTreeMap::new();
    for block in blocks {
        sections.entry((block.id.domain, block.id.identity, block.is_sealed)).or_default().push(block);
    }
    let mut body = Vec::with_capacity(blocks.len() * ENTRY_BYTES + PAGE_BYTES);
    let mut number = 0;
    for ((domain, identity, is_sealed), blocks) in sections {
        let mut content = [identity.0, domain.0].concat();
        for block in &blocks {
            write_entry(block, &mut content);
        }
        let mut head = [0; SECTION_HEAD_BYTES];
        head[32..36].copy_from_slice(&(blocks.len() as u32).to_le_bytes());
        if is_sealed {
            let Some(key) = keys.existing(&domain.0) else { continue };
            let sealing = key.in_segment(&salt)?;
            let tag = sealing.seal(number, &head[32..], &mut content)?;
            head[..16].copy_from_slice(&key.id);
            head[16..32].copy_from_slice(&tag);
        }
        number += 1;
        body.extend_from_slice(&head);
        body.extend_from_slice(&content);
    }
    let trailer = Trailer {
        segment,
        first_page,
        body_bytes: body.len() as u32,
        body_checksum: XxHash3_128::oneshot(&body),
        salt,
    };
    body.resize(trailer.body_pages() * PAGE_BYTES, 0);
    let mut page = [0; PAGE_BYTES];
    trailer.encode(&mut page);
    body.extend_from_slice(&page);
    Ok(body)
}

/// The most bytes that the footer of so many blocks can take.
pub(crate) fn footer_bytes_max(blocks: usize) -> u64 {
    let body_bytes = blocks * (SECTION_HEAD_BYTES + SECTION_COMMON_BYTES + ENTRY_BYTES);
    ((body_bytes.div_ceil(PAGE_BYTES) + 1) * PAGE_BYTES) as u64
}

fn write_entry(block: &Listed, content: &mut Vec<u8>) {
    content.extend_from_slice(&block.page.to_le_bytes());
    content.extend_from_slice(&block.pages.to_le_bytes());
    content.extend_from_slice(&block.token_count.to_le_bytes());
    content.extend_from_slice(&[0; 4]);
    content.extend_from_slice(&block.first_token.to_le_bytes());
    content.extend_from_slice(&block.written_at_seconds.to_le_bytes());
    content.extend_from_slice(&block.id.key.0);
    content.extend_from_slice(&block.parent.0);
}

/// Reads the blocks of one section. Nothing if a field cannot be.
fn read_section(content: &[u8], is_sealed: bool, end_page: u32, blocks: &mut Vec<Listed>) -> Option<()> {
    let (common, entries) = content.split_at_checked(SECTION_COMMON_BYTES)?;
    let (identity, domain) = (KvIdentity(*common.first_chunk()?), TrustDomain(*common[32..].first_chunk()?));
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let number = |at: usize| entry[at..].first_chunk().copied().map(u32::from_le_bytes);
        let long = |at: usize| entry[at..].first_chunk().copied().map(u64::from_le_bytes);
        let block = Listed {
            id: BlockId { identity, domain, key: BlockKey(*entry[32..].first_chunk()?) },
            parent: BlockKey(*entry[64..].first_chunk()?),
            page: number(0)?,
            pages: number(4)?,
            token_count: number(8)?,
            first_token: long(16)?,
            written_at_seconds: long(24)?,
            is_sealed,
        };
        let end = block.page.checked_add(block.pages);
        if block.page == 0 || !(2..=PAGES_MAX).contains(&block.pages) || end.is_none_or(|end| end > end_page) {
            return None;
        }
        blocks.push(block);
    }
    Some(())
}

fn finish(page: &mut Page) {
    let checksum = page_checksum(page, CHECKSUM_AT);
    page[CHECKSUM_AT..CHECKSUM_AT + 8].copy_from_slice(&checksum.to_le_bytes());
}

fn is_sound(page: &Page, magic: &[u8; 8]) -> bool {
    page[..8] == *magic
        && u64::from_le_bytes(field(page, CHECKSUM_AT)) == page_checksum(page, CHECKSUM_AT)
        && u32::from_le_bytes(field(page, 16)) == VERSION
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    /// Blocks that follow each other, some of them encrypted.
    fn blocks() -> impl Strategy<Value = Vec<Listed>> {
        let one = (0..3u8, 0..3u8, any::<bool>(), 2..30u32, any::<([u8; 32], [u8; 32], u32, u64, u64)>());
        vec(one, 0..60).prop_map(|blocks| {
            let mut page = 1;
            let place = |(identity, domain, is_sealed, pages, rest)| {
                let (key, parent, token_count, first_token, written_at_seconds) = rest;
                let id = BlockId {
                    identity: KvIdentity([identity; 32]),
                    domain: TrustDomain([domain; 32]),
                    key: BlockKey(key),
                };
                let parent = BlockKey(parent);
                let block = Listed { id, parent, page, pages, first_token, token_count, written_at_seconds, is_sealed };
                page += pages;
                block
            };
            blocks.into_iter().map(place).collect()
        })
    }

    fn written(blocks: &[Listed], keys: &Keys) -> (u32, Vec<u8>) {
        for domain in 0..3 {
            keys.of_domain(&[domain; 32]).unwrap();
        }
        let first_page = blocks.last().map_or(1, |last| last.page + last.pages);
        let bytes = footer(9, first_page, blocks, keys).unwrap();
        assert!(bytes.len() as u64 <= footer_bytes_max(blocks.len()));
        (first_page, bytes)
    }

    fn read(bytes: &[u8], first_page: u32, keys: &Keys) -> Option<Listing> {
        let (body, page) = bytes.split_last_chunk()?;
        let trailer = Trailer::decode(page, u64::from(first_page) + (bytes.len() / PAGE_BYTES) as u64)?;
        assert_eq!(trailer.segment, 9);
        trailer.listing(body, keys)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_footer_lists_what_was_there(blocks in blocks()) {
            let directory = tempfile::tempdir().unwrap();
            let keys = Keys::open(directory.path()).unwrap();
            let (first_page, bytes) = written(&blocks, &keys);
            let listing = read(&bytes, first_page, &keys).unwrap();
            prop_assert_eq!(&listing.blocks, &blocks);
            prop_assert_eq!(listing.unreadable_blocks, 0);

            keys.destroy(&[1; 32]).unwrap();
            let listing = read(&bytes, first_page, &keys).unwrap();
            let is_lost = |block: &&Listed| block.is_sealed && block.id.domain == TrustDomain([1; 32]);
            let left: Vec<Listed> = blocks.iter().filter(|block| !is_lost(block)).copied().collect();
            prop_assert_eq!(listing.unreadable_blocks as usize, blocks.len() - left.len());
            prop_assert_eq!(listing.blocks, left);
        }

        #[test]
        fn a_changed_footer_is_none(blocks in blocks(), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let directory = tempfile::tempdir().unwrap();
            let keys = Keys::open(directory.path()).unwrap();
            let (first_page, mut bytes) = written(&blocks, &keys);
            let before = read(&bytes, first_page, &keys);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            let after = read(&bytes, first_page, &keys);
            // Padding after the list says nothing.
            prop_assert!(after.is_none() || after == before);
        }

        #[test]
        fn any_bytes_are_read_or_refused(body in vec(any::<u8>(), 0..2000), mut page in vec(any::<u8>(), PAGE_BYTES), first_page in 1..9u32) {
            let directory = tempfile::tempdir().unwrap();
            let keys = Keys::open(directory.path()).unwrap();
            let trailer = Trailer {
                segment: 1,
                first_page,
                body_bytes: body.len() as u32,
                body_checksum: XxHash3_128::oneshot(&body),
                salt: [0; 32],
            };
            let _ = trailer.listing(&body, &keys);
            for magic in [SEGMENT_MAGIC, TRAILER_MAGIC] {
                page[..8].copy_from_slice(&magic);
                page[16..20].copy_from_slice(&VERSION.to_le_bytes());
                let mut page: Page = page.clone().try_into().unwrap();
                finish(&mut page);
                let _ = Trailer::decode(&page, u64::from(first_page));
                let _ = SegmentHeader::decode(&page);
            }
        }
    }
}
