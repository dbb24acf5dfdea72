//! The gate between a socket and the HTTP parser: it lets a request's head through only whole, in time and
//! unambiguous, counts the body, and closes connections that do not read or do not speak.

use super::{
    ServerConfig,
    head::{self, Framing, HeadError},
};
use futures_util::task::AtomicWaker;
use hyper::rt::{Read, ReadBufCursor, Write};
use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::Notify,
    time::{Instant, Sleep},
};

/// Bytes read from the socket at once while waiting for a head.
const READ_BYTES: usize = 4096;

/// What the rest of the server knows of one connection.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// A request is being answered: from the end of its head to the end of its response.
    answering: AtomicBool,
    /// All of that request is here, its body too.
    whole: AtomicBool,
    /// The reader, which has its timers set only between responses.
    reader: AtomicWaker,
    /// Ends the connection: it has no whole request, and another one needs its place.
    pub(super) evict: Notify,
}

impl Status {
    pub(super) fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Acquire)
    }

    /// A request that is all here waits for its answer, or gets it.
    pub(super) fn is_owed(&self) -> bool {
        self.is_answering() && self.whole.load(Ordering::Acquire)
    }

    /// The request's body is all here.
    pub(super) fn received(&self) {
        self.whole.store(true, Ordering::Release);
    }

    /// The response is gone.
    pub(super) fn answered(&self) {
        self.whole.store(false, Ordering::Release);
        self.answering.store(false, Ordering::Release);
        self.reader.wake();
    }
}

/// Why a connection is closed before the parser saw anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// 400.
    Malformed(&'static str),
    /// 431.
    TooLarge,
    /// 408.
    TooSlow,
}

/// What may pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Passage {
    /// Nothing before a whole head is here.
    Closed,
    /// So many bytes of head and body.
    Bytes(u64),
    /// Everything: a chunked body is delimited by the parser, and its connection ends with the response.
    Open,
}

/// One timer, set or not.
struct Timer {
    sleep: Pin<Box<Sleep>>,
    set: bool,
}

impl Timer {
    fn new(duration: Duration) -> Self {
        Self { sleep: Box::pin(tokio::time::sleep(duration)), set: true }
    }

    fn set(&mut self, duration: Duration) {
        self.sleep.as_mut().reset(Instant::now() + duration);
        self.set = true;
    }

    fn has_passed(&mut self, context: &mut Context<'_>) -> bool {
        self.set && self.sleep.as_mut().poll(context).is_ready()
    }
}

/// A socket with its gate.
pub(super) struct Gate {
    stream: TcpStream,
    config: Arc<ServerConfig>,
    status: Arc<Status>,
    buffer: Vec<u8>,
    /// Bytes of `buffer` in which no end of a head was found.
    scanned: usize,
    passage: Passage,
    read_timer: Timer,
    write_timer: Timer,
    /// The first request has its head's time from the connection's beginning on.
    first: bool,
    verdict: Option<Verdict>,
}

impl Gate {
    pub(super) fn new(stream: TcpStream, config: Arc<ServerConfig>, status: Arc<Status>) -> Self {
        let read_timer = Timer::new(config.header_timeout);
        let mut write_timer = Timer::new(config.write_timeout);
        write_timer.set = false;
        let (buffer, scanned, passage, first, verdict) = (Vec::new(), 0, Passage::Closed, true, None);
        Self { stream, config, status, buffer, scanned, passage, read_timer, write_timer, first, verdict }
    }

    /// The socket, what to say before it is closed, and whether the peer may still be sending. Nothing is said into a
    /// response.
    pub(super) fn into_parts(self) -> (TcpStream, Option<Verdict>, bool) {
        let unread = self.passage != Passage::Closed || !self.buffer.is_empty();
        let verdict = self.verdict.filter(|_| !self.status.is_answering());
        (self.stream, verdict, unread)
    }

    fn refuse(&mut self, verdict: Verdict) -> io::Error {
        self.verdict = Some(verdict);
        io::Error::new(io::ErrorKind::InvalidData, "the request's head is refused")
    }

    /// Reads what has come into the buffer; false at the end of the stream.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        let mut bytes = [0; READ_BYTES];
        let room = self.config.head_bytes_max.saturating_sub(self.buffer.len()).min(READ_BYTES);
        if room == 0 {
            // Only while a response is under way: a head of that size is refused.
            return Poll::Pending;
        }
        let mut read = ReadBuf::new(&mut bytes[..room]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut read))?;
        self.buffer.extend_from_slice(read.filled());
        Poll::Ready(Ok(!read.filled().is_empty()))
    }

    /// Waits for the next whole head and opens the passage for it and its body; false at the end of the stream.
    fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        self.status.reader.register(context.waker());
        if self.status.is_answering() {
            self.read_timer.set = false;
            // The end of the stream is the caller going away; what comes early waits its turn.
            while ready!(self.poll_fill(context))? {}
            return Poll::Ready(Ok(false));
        }
        if !self.read_timer.set {
            let idle = self.buffer.is_empty();
            self.read_timer.set(if idle { self.config.idle_timeout } else { self.config.header_timeout });
        }
        loop {
            // An empty line before a request is a habit of old clients.
            while self.buffer.starts_with(b"\r\n") {
                self.buffer.drain(..2);
                self.scanned = 0;
            }
            match head::find_end(&self.buffer, self.scanned) {
                Ok(Some(end)) => return Poll::Ready(self.admit(end).map(|()| true)),
                Ok(None) => self.scanned = self.buffer.len(),
                Err(error) => return Poll::Ready(Err(self.refuse(verdict_of(error)))),
            }
            if self.buffer.len() >= self.config.head_bytes_max {
                return Poll::Ready(Err(self.refuse(Verdict::TooLarge)));
            }
            let was_empty = self.buffer.is_empty();
            match self.poll_fill(context)? {
                Poll::Ready(true) if was_empty && !self.first => self.read_timer.set(self.config.header_timeout),
                Poll::Ready(true) => {}
                Poll::Ready(false) => return Poll::Ready(Ok(false)),
                Poll::Pending if !self.read_timer.has_passed(context) => return Poll::Pending,
                Poll::Pending if self.buffer.is_empty() => return Poll::Ready(Ok(false)),
                Poll::Pending => return Poll::Ready(Err(self.refuse(Verdict::TooSlow))),
            }
        }
    }

    fn admit(&mut self, end: usize) -> io::Result<()> {
        let framing = head::inspect(&self.buffer[..end], self.config.headers_max)
            .map_err(|error| self.refuse(verdict_of(error)))?;
        self.passage = match framing {
            Framing::Length(length) => Passage::Bytes((end as u64).saturating_add(length)),
            Framing::Chunked => Passage::Open,
        };
        (self.first, self.scanned, self.read_timer.set) = (false, 0, false);
        self.status.answering.store(true, Ordering::Release);
        Ok(())
    }

    /// Hands bytes to the parser, from the buffer first, at most as many as may pass.
    fn poll_pass(&mut self, context: &mut Context<'_>, mut into: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let limit = match self.passage {
            Passage::Bytes(left) => usize::try_from(left).unwrap_or(usize::MAX),
            Passage::Open | Passage::Closed => usize::MAX,
        };
        let passed = if self.buffer.is_empty() {
            let mut bytes = [0; 2 * READ_BYTES];
            let room = limit.min(into.remaining()).min(bytes.len());
            let mut read = ReadBuf::new(&mut bytes[..room]);
            ready!(Pin::new(&mut self.stream).poll_read(context, &mut read))?;
            into.put_slice(read.filled());
            read.filled().len()
        } else {
            let count = limit.min(into.remaining()).min(self.buffer.len());
            into.put_slice(&self.buffer[..count]);
            self.buffer.drain(..count);
            count
        };
        if let Passage::Bytes(left) = self.passage {
            let left = left - passed as u64;
            self.passage = if left == 0 { Passage::Closed } else { Passage::Bytes(left) };
        }
        Poll::Ready(Ok(()))
    }

    /// Judges a write: one that cannot go on is given some time.
    fn watch_write<T>(&mut self, context: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.write_timer.set = false;
            return write;
        }
        if !self.write_timer.set {
            self.write_timer.set(self.config.write_timeout);
        }
        if self.write_timer.has_passed(context) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")));
        }
        Poll::Pending
    }
}

fn verdict_of(error: HeadError) -> Verdict {
    match error {
        HeadError::Malformed(reason) => Verdict::Malformed(reason),
        HeadError::TooLarge => Verdict::TooLarge,
    }
}

impl Read for Gate {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        let gate = self.get_mut();
        if gate.passage == Passage::Closed && !ready!(gate.poll_head(context))? {
            return Poll::Ready(Ok(()));
        }
        gate.poll_pass(context, into)
    }
}

impl Write for Gate {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let gate = self.get_mut();
        let write = Pin::new(&mut gate.stream).poll_write(context, bytes);
        gate.watch_write(context, write)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let gate = self.get_mut();
        let flush = Pin::new(&mut gate.stream).poll_flush(context);
        gate.watch_write(context, flush)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let gate = self.get_mut();
        let write = Pin::new(&mut gate.stream).poll_write_vectored(context, slices);
        gate.watch_write(context, write)
    }
}
