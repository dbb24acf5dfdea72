//! One request at one replica: its place at the router, and its answer on its way to the caller.

use super::{
    Proxy,
    usage::{Counted, Events, Tail},
};
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use warmset_core::routing::{Ended, Outcome, Ticket, Verdict};

/// Holds a request's place at the router. Dropped without an end, the caller went away.
pub(super) struct Exchange {
    proxy: Arc<Proxy>,
    ticket: Option<Ticket>,
    entry: u64,
    model: String,
    began: Instant,
    retried: bool,
    output_started: bool,
}

impl Exchange {
    pub(super) fn new(proxy: Arc<Proxy>, ticket: Ticket, entry: u64, model: &str, retried: bool) -> Self {
        let model = model.to_owned();
        Self { proxy, ticket: Some(ticket), entry, model, began: Instant::now(), retried, output_started: false }
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

    /// The request has ended here.
    pub(super) fn end(&mut self, outcome: Outcome, counted: Option<Counted>) -> Verdict {
        let Some(ticket) = self.ticket.take() else { return Verdict::Over };
        let usage = counted.map(Counted::for_router);
        let ended = Ended { outcome, output_started: self.output_started, retried: self.retried, usage };
        let verdict = self.proxy.router().ended(self.proxy.clock.now(), ticket, ended);
        self.proxy.log.ended(self.entry, outcome, counted);
        if verdict == Verdict::Over {
            self.proxy.metrics.ended(&self.model, outcome, self.began.elapsed().as_secs_f64(), counted);
        }
        verdict
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
    /// The error event is out; the body breaks next.
    Breaking(&'static str),
    Over,
}

/// The body of an answer.
pub(super) struct Relay {
    body: Incoming,
    exchange: Exchange,
    outcome: Outcome,
    /// There if the caller did not ask for the usage that the gateway asked for.
    events: Option<Events>,
    is_stream: bool,
    tail: Tail,
    idle: Pin<Box<Sleep>>,
    idle_timeout: Duration,
    phase: Phase,
}

impl Relay {
    pub(super) fn new(
        body: Incoming,
        exchange: Exchange,
        outcome: Outcome,
        (is_stream, hide_usage): (bool, bool),
        idle_timeout: Duration,
    ) -> Self {
        let events = (is_stream && hide_usage).then(Events::default);
        let idle = Box::pin(tokio::time::sleep(idle_timeout));
        Self {
            body,
            exchange,
            outcome,
            events,
            is_stream,
            tail: Tail::default(),
            idle,
            idle_timeout,
            phase: Phase::Passing,
        }
    }

    fn take(&mut self, data: Bytes) -> Bytes {
        self.exchange.first_output();
        self.idle.as_mut().reset(Instant::now() + self.idle_timeout);
        self.tail.push(&data);
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
        self.exchange.end(Outcome::Failed, None);
        if !self.is_stream {
            self.phase = Phase::Over;
            return Poll::Ready(Some(Err(Broken(reason))));
        }
        self.phase = Phase::Breaking(reason);
        let error = serde_json::json!({"error": {
            "message": reason, "type": "server_error", "param": null, "code": "engine_lost",
        }});
        Poll::Ready(Some(Ok(Frame::data(format!("\n\ndata: {error}\n\n").into()))))
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
                // The connection writes the event out before the body breaks: it is asked again once that was taken.
                this.phase = Phase::Over;
                return Poll::Ready(Some(Err(Broken(reason))));
            }
            Phase::Passing => {}
        }
        loop {
            let polled = Pin::new(&mut this.body).poll_frame(context);
            let Poll::Ready(next) = polled else {
                ready!(this.idle.as_mut().poll(context));
                return this.break_off("the replica stopped in the middle of its answer");
            };
            match next {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        let mut out = this.take(data);
                        // Nobody asks for more of an answer whose length is known.
                        if this.body.is_end_stream()
                            && let Some(rest) = this.finish()
                        {
                            out = [out, rest].concat().into();
                        }
                        if !out.is_empty() {
                            return Poll::Ready(Some(Ok(Frame::data(out))));
                        }
                    }
                    // Trailers are for the connection to the replica only.
                    Err(_) => continue,
                },
                Some(Err(_)) => return this.break_off("the replica was lost in the middle of its answer"),
                None => return Poll::Ready(this.finish().map(|rest| Ok(Frame::data(rest)))),
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
