//! One request at one replica: its place at the router, and its answer on its way to the caller.

use super::{
    Proxy,
    dialect::Dialect,
    replica::Endpoint,
    usage::{Counted, Events, Tail, pieces_in},
};
use crate::errors::ApiError;
use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use warmset_core::routing::{Decision, Ended, Outcome, Report, Ticket, Verdict};

/// Pieces of a stream are written together up to about so many bytes.
const GATHERED_BYTES_MAX: usize = 16 << 10;
/// A piece that comes later than this after the one before comes alone, and there is nothing to wait for.
const ALONE_AFTER: Duration = Duration::from_millis(1);
/// A connection to a caller asks for more before and after it writes: only then it lets others run.
const ASKED_PER_TURN: u32 = 2;

/// Holds a request's place at the router. Dropped without an end, the caller went away.
pub(super) struct Exchange {
    proxy: Arc<Proxy>,
    endpoint: Arc<Endpoint>,
    ticket: Option<Ticket>,
    entry: u64,
    model: String,
    /// Estimated.
    prompt_tokens: u64,
    began: Instant,
    retried: bool,
    output_started: bool,
    /// The head of its answer is on its way to the caller: nobody else can answer any more.
    head_sent: bool,
}

impl Exchange {
    pub(super) fn new(
        proxy: Arc<Proxy>,
        endpoint: Arc<Endpoint>,
        decision: &Decision,
        entry: u64,
        model: &str,
        retried: bool,
    ) -> Self {
        Self {
            proxy,
            endpoint,
            ticket: Some(decision.ticket),
            entry,
            model: model.to_owned(),
            prompt_tokens: decision.prompt_tokens,
            began: Instant::now(),
            retried,
            output_started: false,
            head_sent: false,
        }
    }

    /// The first of the answer is here.
    fn first_output(&mut self) {
        if std::mem::replace(&mut self.output_started, true) {
            return;
        }
        if let Some(ticket) = self.ticket {
            self.proxy.router().first_token(self.proxy.clock.now(), ticket);
        }
        let seconds = self.began.elapsed().as_secs_f64();
        self.proxy.log.first_output(self.entry, seconds);
        self.proxy.metrics.first_token(&self.model, seconds);
    }

    /// The request has ended here, and what the replica said is the answer unless it can be tried elsewhere.
    pub(super) fn end(&mut self, outcome: Outcome, counted: Option<Counted>) -> Verdict {
        if self.ticket.is_none() {
            return Verdict::Over;
        }
        let verdict = self.leave(outcome, counted);
        if verdict == Verdict::Over {
            self.proxy.metrics.ended(&self.model, outcome, self.began.elapsed().as_secs_f64(), counted);
        }
        verdict
    }

    /// The request has ended here without an answer: whoever answers it counts it.
    pub(super) fn leave(&mut self, outcome: Outcome, counted: Option<Counted>) -> Verdict {
        let Some(ticket) = self.ticket.take() else { return Verdict::Over };
        let usage = counted.map(Counted::for_router);
        let output_started = self.output_started || self.head_sent;
        let ended = Ended { outcome, output_started, retried: self.retried, usage };
        let now = self.proxy.clock.now();
        let mut router = self.proxy.router();
        let verdict = router.ended(now, ticket, ended);
        if outcome == Outcome::Lost {
            router.reported(now, self.endpoint.id, Report::MayHaveRestarted);
            self.endpoint.look_now.notify_one();
        }
        drop(router);
        self.proxy.log.ended(self.entry, outcome, counted);
        verdict
    }

    /// The replica failed, and there is no time to ask another one.
    pub(super) fn leave_late(&mut self) {
        self.retried = true;
        self.leave(Outcome::Lost, None);
    }

    /// The answer breaks off. What the replica did not come to count is metered by what came of it.
    fn cut(&mut self, outcome: Outcome, counted: Option<Counted>, tokens: u64) {
        if self.ticket.is_none() {
            return;
        }
        self.end(outcome, counted);
        if counted.is_none() && tokens > 0 {
            let estimate =
                Counted { prompt_tokens: self.prompt_tokens, completion_tokens: tokens, cached_tokens: None };
            self.proxy.metrics.metered(&self.model, estimate);
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.end(Outcome::Cancelled, None);
    }
}

/// Why an answer breaks off.
#[derive(Debug)]
pub(super) struct Broken(&'static str);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Broken {}

enum Phase {
    Passing,
    /// The error event was given to the connection.
    Breaking(&'static str),
    /// It had the time to write it out; the body breaks next.
    Broken(&'static str),
    Over,
}

/// What kind of answer it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) is_stream: bool,
    /// The caller did not ask for the usage that the gateway asked for.
    pub(super) hides_usage: bool,
    pub(super) dialect: Dialect,
}

/// The body of an answer.
pub(super) struct Relay {
    body: Incoming,
    exchange: Exchange,
    outcome: Outcome,
    /// There if the usage is hidden.
    events: Option<Events>,
    shape: Shape,
    /// Pieces of a stream so far.
    pieces: u64,
    /// The stream has said that it is over.
    done: bool,
    tail: Tail,
    /// When the last piece came.
    last_at: Instant,
    idle: Pin<Box<Sleep>>,
    idle_timeout: Duration,
    phase: Phase,
    gathered: Gathered,
}

/// Pieces of a stream that came with one another. A connection to a replica hands over one piece at a time, and each
/// that is passed on alone costs a write: so whatever else is ready gets a turn before what has come is written.
#[derive(Default)]
struct Gathered {
    bytes: BytesMut,
    /// How often more was asked for since the last piece.
    asked: u32,
}

impl Gathered {
    fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
        self.asked = 0;
    }

    fn take(&mut self) -> Option<Bytes> {
        self.asked = 0;
        (!self.bytes.is_empty()).then(|| self.bytes.split().freeze())
    }
}

impl Relay {
    pub(super) fn new(
        body: Incoming,
        mut exchange: Exchange,
        outcome: Outcome,
        shape: Shape,
        (first_by, idle_timeout): (Instant, Duration),
    ) -> Self {
        exchange.head_sent = true;
        let events = (shape.is_stream && shape.hides_usage).then(Events::default);
        // Servers that send the head at once read the prompt after it: the caller's patience counts until the first piece.
        let idle = Box::pin(tokio::time::sleep_until(first_by.max(Instant::now() + idle_timeout)));
        let mut relay = Self {
            last_at: exchange.began,
            body,
            exchange,
            outcome,
            events,
            shape,
            pieces: 0,
            done: false,
            tail: Tail::default(),
            idle,
            idle_timeout,
            phase: Phase::Passing,
            gathered: Gathered::default(),
        };
        if relay.body.is_end_stream() {
            // Nobody asks for any of an answer without a body.
            relay.finish();
        }
        relay
    }

    fn take(&mut self, data: Bytes, now: Instant) -> Bytes {
        self.exchange.first_output();
        self.last_at = now;
        self.idle.as_mut().reset(now + self.idle_timeout);
        self.tail.push(&data);
        if self.shape.is_stream {
            self.pieces += pieces_in(&data);
            if self.tail.is_done() {
                // Callers leave here, without waiting for the end of the body.
                self.done = true;
                self.exchange.end(self.outcome, self.tail.counted());
            }
        }
        match &mut self.events {
            Some(events) => events.pass(&data).into(),
            None => data,
        }
    }

    /// The replica has said everything.
    fn finish(&mut self) -> Option<Bytes> {
        self.phase = Phase::Over;
        let counted = self.tail.counted();
        self.exchange.end(self.outcome, counted);
        self.events.as_mut().map(Events::rest).filter(|rest| !rest.is_empty()).map(Bytes::from)
    }

    /// The replica cannot say the rest: a stream says so, and none ends as if it were whole.
    fn break_off(&mut self, reason: &'static str) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.done {
            return Poll::Ready(self.last().map(|rest| Ok(Frame::data(rest))));
        }
        self.cut(Outcome::Lost);
        // In the middle of an event there is no place for another one. What is held back is always whole.
        let has_place = self.events.is_some() || self.tail.is_between_events();
        if self.shape.is_stream && has_place {
            let event = self.shape.dialect.error_event(&ApiError::answer_lost(reason));
            self.gathered.push(event.as_bytes());
        }
        let Some(rest) = self.gathered.take() else {
            self.phase = Phase::Over;
            return Poll::Ready(Some(Err(Broken(reason))));
        };
        self.phase = Phase::Breaking(reason);
        Poll::Ready(Some(Ok(Frame::data(rest))))
    }

    /// Nothing more is here yet.
    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.gathered.bytes.is_empty() {
            ready!(self.idle.as_mut().poll(context));
            return self.break_off("the replica stopped in the middle of its answer");
        }
        self.gathered.asked += 1;
        if self.gathered.asked <= ASKED_PER_TURN {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.gathered.take().map(|data| Ok(Frame::data(data))))
    }

    /// What of a piece is to be passed on now.
    fn pass(&mut self, data: Bytes) -> Option<Bytes> {
        let now = Instant::now();
        // The first of a stream is what its caller waits for.
        let is_first = !self.exchange.output_started || now.duration_since(self.last_at) > ALONE_AFTER;
        let mut out = self.take(data, now);
        // Nobody asks for more of an answer whose length is known.
        if self.body.is_end_stream()
            && let Some(rest) = self.finish()
        {
            out = [out, rest].concat().into();
        }
        if !self.shape.is_stream {
            return Some(out).filter(|out| !out.is_empty());
        }
        self.gathered.push(&out);
        let is_over = self.done || matches!(self.phase, Phase::Over);
        let is_enough = is_first || is_over || self.gathered.bytes.len() >= GATHERED_BYTES_MAX;
        if is_enough { self.gathered.take() } else { None }
    }

    /// What is left when the replica has said everything.
    fn last(&mut self) -> Option<Bytes> {
        if let Some(rest) = self.finish() {
            self.gathered.push(&rest);
        }
        self.gathered.take()
    }

    fn cut(&mut self, outcome: Outcome) {
        self.exchange.cut(outcome, self.tail.counted(), self.shape.dialect.tokens_in(self.pieces));
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The caller went away, unless the answer has ended.
        self.cut(Outcome::Cancelled);
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = self.get_mut();
        match this.phase {
            Phase::Over => return Poll::Ready(None),
            Phase::Breaking(reason) => {
                // A connection whose body breaks drops what it has not written, and it writes while the body has nothing.
                this.phase = Phase::Broken(reason);
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            Phase::Broken(reason) => {
                this.phase = Phase::Over;
                return Poll::Ready(Some(Err(Broken(reason))));
            }
            Phase::Passing => {}
        }
        loop {
            let Poll::Ready(next) = Pin::new(&mut this.body).poll_frame(context) else {
                return this.poll_silence(context);
            };
            match next {
                // Trailers are for the connection to the replica only.
                Some(Ok(frame)) => {
                    if let Some(out) = frame.into_data().ok().and_then(|data| this.pass(data)) {
                        return Poll::Ready(Some(Ok(Frame::data(out))));
                    }
                }
                Some(Err(_)) => return this.break_off("the replica was lost in the middle of its answer"),
                None => return Poll::Ready(this.last().map(|rest| Ok(Frame::data(rest)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        // What was counted is only told once the end was seen.
        matches!(self.phase, Phase::Over)
    }

    fn size_hint(&self) -> SizeHint {
        if self.events.is_some() { SizeHint::default() } else { self.body.size_hint() }
    }
}
