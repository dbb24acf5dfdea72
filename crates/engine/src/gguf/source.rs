//! A reader that never holds more than one small buffer and never believes a length beyond the end of the file.

use super::{GgufError, HEADER_BYTES_MAX};
use std::io::{ErrorKind, Read};

const BUFFER_BYTES: usize = 64 << 10;

/// Bytes of the file from its beginning, with the file's length known.
pub(super) struct Source<R> {
    reader: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    position_bytes: u64,
    file_bytes: u64,
}

impl<R: Read> Source<R> {
    pub(super) fn new(reader: R, file_bytes: u64) -> Self {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Self { reader, buffer, start: 0, end: 0, position_bytes: 0, file_bytes }
    }

    /// Bytes consumed so far.
    pub(super) fn position_bytes(&self) -> u64 {
        self.position_bytes
    }

    /// Bytes of the file that are still ahead.
    pub(super) fn remaining_bytes(&self) -> u64 {
        self.file_bytes.saturating_sub(self.position_bytes)
    }

    /// Makes sure that `bytes` more can exist, before anything of that size is read or counted.
    pub(super) fn require(&self, bytes: u64, part: &'static str) -> Result<(), GgufError> {
        if bytes > self.remaining_bytes() {
            return Err(GgufError::Truncated { part });
        }
        let header_bytes = self.position_bytes.saturating_add(bytes);
        if header_bytes > HEADER_BYTES_MAX {
            return Err(GgufError::TooLarge { what: "header bytes", value: header_bytes, limit: HEADER_BYTES_MAX });
        }
        Ok(())
    }

    /// The first bytes without consuming them, fewer if the file is shorter.
    pub(super) fn peek(&mut self, bytes: usize) -> Result<&[u8], GgufError> {
        while self.end - self.start < bytes {
            if self.fill()? == 0 {
                break;
            }
        }
        let available = (self.end - self.start).min(bytes);
        Ok(&self.buffer[self.start..self.start + available])
    }

    pub(super) fn array<const N: usize>(&mut self, part: &'static str) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.read(&mut bytes, part)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self, part: &'static str) -> Result<u32, GgufError> {
        self.array(part).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, part: &'static str) -> Result<u64, GgufError> {
        self.array(part).map(u64::from_le_bytes)
    }

    pub(super) fn read(&mut self, into: &mut [u8], part: &'static str) -> Result<(), GgufError> {
        self.require(into.len() as u64, part)?;
        let mut done = 0;
        while done < into.len() {
            if self.start == self.end && self.fill()? == 0 {
                return Err(GgufError::Truncated { part });
            }
            let count = (self.end - self.start).min(into.len() - done);
            into[done..done + count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.consume(count);
            done += count;
        }
        Ok(())
    }

    pub(super) fn skip(&mut self, bytes: u64, part: &'static str) -> Result<(), GgufError> {
        self.require(bytes, part)?;
        let mut left = bytes;
        while left > 0 {
            if self.start == self.end && self.fill()? == 0 {
                return Err(GgufError::Truncated { part });
            }
            let count = ((self.end - self.start) as u64).min(left);
            self.consume(count as usize);
            left -= count;
        }
        Ok(())
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        self.position_bytes += count as u64;
    }

    fn fill(&mut self) -> Result<usize, GgufError> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        loop {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(count) => {
                    self.end += count;
                    return Ok(count);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(GgufError::Read { message: error.to_string() }),
            }
        }
    }
}
