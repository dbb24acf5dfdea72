//! The thread that writes a recording down.

use super::Message;
use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};
use tokio::sync::mpsc;
use warmset_planner::recording::{End, FORMAT_VERSION, Header, Line};

/// Lines are handed on in pieces of about this size, and whenever there is nothing more to write.
const CHUNK_BYTES: usize = 64 << 10;
/// Room that is kept for the last line.
const END_BYTES: u64 = 512;

/// Why a recording ends by itself.
const TOO_LONG: &str = "it has reached its largest size";
const TOO_SLOW: &str = "it was written more slowly than things happened";
const SERVER_ENDED: &str = "the server has ended";

pub(super) struct Writer<W> {
    out: W,
    bytes_max: u64,
    written_bytes: u64,
    lines: u64,
    text: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub(super) fn new(out: W, bytes_max: u64) -> Self {
        Self { out, bytes_max, written_bytes: 0, lines: 0, text: Vec::with_capacity(2 * CHUNK_BYTES) }
    }

    /// Writes until the end; says why it ended.
    pub(super) fn run(
        mut self,
        mut messages: mpsc::Receiver<Message>,
        overflowed: &AtomicBool,
    ) -> io::Result<&'static str> {
        let header = Header { version: FORMAT_VERSION, program: env!("CARGO_PKG_VERSION").to_owned() };
        let begun = self.add(&Line::Recording(header))?;
        let reason = if begun { self.follow(&mut messages, overflowed)? } else { TOO_LONG };
        self.lines += 1;
        Line::End(End { reason: reason.to_owned() }).write(self.lines, &mut self.text)?;
        self.hand_on()?;
        Ok(reason)
    }

    fn follow(&mut self, messages: &mut mpsc::Receiver<Message>, overflowed: &AtomicBool) -> io::Result<&'static str> {
        loop {
            // Read before the queue is: what was put into it before it overflowed is all there.
            let had_overflowed = overflowed.load(Ordering::Acquire);
            let message = match messages.try_recv() {
                Ok(message) => Some(message),
                Err(_) if had_overflowed => return Ok(TOO_SLOW),
                Err(_) => {
                    self.hand_on()?;
                    messages.blocking_recv()
                }
            };
            match message {
                None => return Ok(SERVER_ENDED),
                Some(Message::Stop(reason)) => return Ok(reason),
                Some(Message::Line(line)) if !self.add(&line)? => return Ok(TOO_LONG),
                Some(Message::Line(_)) => {}
            }
            if self.text.len() >= CHUNK_BYTES {
                self.hand_on()?;
            }
        }
    }

    /// Adds a line if there is room for it.
    fn add(&mut self, line: &Line) -> io::Result<bool> {
        let before = self.text.len();
        line.write(self.lines + 1, &mut self.text)?;
        let fits = self.written_bytes + self.text.len() as u64 + END_BYTES <= self.bytes_max;
        if fits {
            self.lines += 1;
        } else {
            self.text.truncate(before);
        }
        Ok(fits)
    }

    fn hand_on(&mut self) -> io::Result<()> {
        if !self.text.is_empty() {
            self.out.write_all(&self.text)?;
            self.written_bytes += self.text.len() as u64;
            self.text.clear();
        }
        self.out.flush()
    }
}
