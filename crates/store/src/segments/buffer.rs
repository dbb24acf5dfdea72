//! Memory that direct I/O takes: it begins at a whole page.

use super::block::PAGE_BYTES;

/// Zeroed memory that begins at a page and has whole pages.
#[derive(Debug, Default)]
pub struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// Zeroed pages.
    pub fn with_pages(pages: usize) -> Self {
        let length = pages * PAGE_BYTES;
        let memory = vec![0; length + PAGE_BYTES];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        Self { memory, start, length }
    }

    /// The first so many pages; what they held is not kept when there were fewer.
    pub(crate) fn pages_mut(&mut self, pages: usize) -> &mut [u8] {
        if pages * PAGE_BYTES > self.length {
            *self = Self::with_pages(pages);
        }
        &mut self.as_mut()[..pages * PAGE_BYTES]
    }
}

impl AsRef<[u8]> for AlignedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }
}

impl AsMut<[u8]> for AlignedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

/// Whether direct I/O takes this memory as it is.
pub(crate) fn is_aligned(bytes: &[u8]) -> bool {
    (bytes.as_ptr() as usize).is_multiple_of(PAGE_BYTES) && bytes.len().is_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_begins_at_a_page() {
        for pages in [0, 1, 2, 513] {
            let mut buffer = AlignedBuffer::with_pages(pages);
            assert!(is_aligned(buffer.as_ref()));
            assert_eq!(buffer.as_mut().len(), pages * PAGE_BYTES);
        }
        assert!(!is_aligned(&AlignedBuffer::with_pages(1).as_ref()[1..]));
    }
}
