//! A generation as server-sent events. Comments keep the connection alive until the first chunk, and later while a request
//! has given way to others; a stream that cannot be finished ends with an error
//! event and a broken body, never like a finished one.

use super::{
    call::{Answers, Call, add_usage, reply_of},
    dialect::{self, Encoder},
};
use crate::{errors::ApiError, frontend::Update};
use bytes::Bytes;
use futures_util::{Stream, stream};
use std::{fmt, time::Duration};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use warmset_core::inference::{FinishReason, Reply, Usage};

/// Bytes written at once when several chunks are already here.
const WRITE_BYTES: usize = 16 << 10;

/// Why a body ends without its end.
#[derive(Debug)]
pub(crate) struct BrokenStream;

impl fmt::Display for BrokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the stream could not be finished")
    }
}

impl std::error::Error for BrokenStream {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Only comments so far.
    Waiting,
    /// Chunks.
    Answering,
    /// The error event is out; the body breaks next.
    Breaking,
    Ended,
}

/// Everything one stream needs.
pub(crate) struct EventStream {
    answers: Answers,
    call: Call,
    encoder: Box<dyn Encoder>,
    /// Choices of each request.
    choices: u32,
    opened: Vec<bool>,
    stop_texts: Vec<Option<String>>,
    finished: Vec<bool>,
    usage: Usage,
    phase: Phase,
    /// Requests that gave way and have not gone on.
    parked: usize,
    heartbeat: Interval,
    comment: String,
    /// Written before anything else.
    pending: Vec<u8>,
}

impl EventStream {
    pub(crate) fn new(
        answers: Answers,
        call: Call,
        encoder: Box<dyn Encoder>,
        (requests, choices): (usize, u32),
        (interval, started): (Duration, bool),
    ) -> Self {
        let total = requests * choices as usize;
        // A stream that begins before its engine does says so at once.
        let first = if started { Instant::now() + interval } else { Instant::now() };
        let mut heartbeat = tokio::time::interval_at(first, interval);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let comment = ": waiting".to_owned();
        let (opened, finished, stop_texts) = (vec![false; total], vec![false; total], vec![None; total]);
        let (usage, phase) = (Usage::default(), Phase::Waiting);
        let pending = Vec::new();
        Self {
            answers,
            call,
            encoder,
            choices,
            opened,
            stop_texts,
            finished,
            usage,
            phase,
            parked: 0,
            heartbeat,
            comment,
            pending,
        }
    }

    /// Nothing but this error follows.
    pub(crate) fn begin_with(&mut self, error: &ApiError) {
        let mut out = Vec::new();
        self.fail(error, &mut out);
        self.pending = out;
    }

    /// The events as a body.
    pub(crate) fn into_stream(self) -> impl Stream<Item = Result<Bytes, BrokenStream>> + Send {
        stream::unfold(self, |mut events| async move {
            let next = events.next().await?;
            Some((next, events))
        })
    }

    async fn next(&mut self) -> Option<Result<Bytes, BrokenStream>> {
        if !self.pending.is_empty() {
            return Some(Ok(std::mem::take(&mut self.pending).into()));
        }
        match self.phase {
            Phase::Ended => return None,
            Phase::Breaking => {
                // The connection writes out the error event while this body has nothing more.
                tokio::task::yield_now().await;
                self.phase = Phase::Ended;
                return Some(Err(BrokenStream));
            }
            Phase::Waiting | Phase::Answering => {}
        }
        let mut out = Vec::new();
        while out.is_empty() && !self.is_over() {
            let next = tokio::select! {
                biased;
                next = self.answers.next() => next,
                _ = self.heartbeat.tick(), if self.phase == Phase::Waiting || self.parked > 0 => {
                    self.write_comment(&mut out);
                    break;
                }
            };
            self.take(next, &mut out);
            while out.len() < WRITE_BYTES
                && !self.is_over()
                && let Some(next) = self.answers.try_next()
            {
                self.take(next, &mut out);
            }
        }
        Some(Ok(out.into()))
    }

    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Breaking | Phase::Ended)
    }

    fn write_comment(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.comment.as_bytes());
        out.extend_from_slice(b"\n\n");
    }

    fn say(&mut self, comment: String, out: &mut Vec<u8>) {
        if self.phase == Phase::Waiting && self.comment != comment {
            self.comment = comment;
            self.write_comment(out);
            self.heartbeat.reset();
        }
    }

    fn take(&mut self, (request, update): (usize, Update), out: &mut Vec<u8>) {
        if let Update::Position(position) = update {
            return self.say(format!(": queued position={position}"), out);
        }
        match reply_of(update) {
            Ok(Some(reply)) => self.take_reply(request, reply, out),
            Ok(None) => {}
            Err(error) => self.fail(&error, out),
        }
    }

    fn take_reply(&mut self, request: usize, reply: Reply, out: &mut Vec<u8>) {
        match reply {
            Reply::Queued { position } => self.say(format!(": queued position={position}"), out),
            Reply::Loading { fraction } => self.say(format!(": loading {:.0}%", fraction * 100.0), out),
            Reply::Started { start, worker, .. } => {
                self.call.started(start, worker);
                self.comment = ": running".to_owned();
            }
            Reply::Parked => {
                self.parked += 1;
                self.comment = ": parked".to_owned();
                self.write_comment(out);
                self.heartbeat.reset();
            }
            Reply::Resumed => {
                self.parked = self.parked.saturating_sub(1);
                self.comment = ": running".to_owned();
            }
            Reply::Logprobs { choice, tokens } => {
                self.with_choice(request, choice, out, |events, index, _| events.encoder.logprobs(index, tokens));
            }
            Reply::Delta { choice, text } => self.with_choice(request, choice, out, |events, index, out| {
                if !text.is_empty() {
                    events.encoder.text(index, &text, out);
                }
            }),
            Reply::ToolCall { choice, call, name } => {
                self.with_choice(request, choice, out, |events, index, out| {
                    events.encoder.call(index, call, &name, out);
                });
            }
            Reply::ToolArguments { choice, call, text } => {
                self.with_choice(request, choice, out, |events, index, out| {
                    events.encoder.arguments(index, call, &text, out);
                });
            }
            Reply::StopText { choice, text } => {
                self.with_choice(request, choice, out, |events, index, _| {
                    events.stop_texts[index as usize] = Some(text);
                });
            }
            Reply::ChoiceDone { finish: FinishReason::Cancelled, .. } => {
                self.fail(&ApiError::internal("the engine broke the answer off"), out);
            }
            Reply::ChoiceDone { choice, finish } => self.with_choice(request, choice, out, |events, index, out| {
                events.finished[index as usize] = true;
                let stop_text = events.stop_texts[index as usize].take();
                events.encoder.finish(index, finish, stop_text.as_deref(), out);
            }),
            Reply::Done { usage, .. } => {
                add_usage(&mut self.usage, usage);
                if self.answers.all_ended() {
                    self.finish(out);
                }
            }
            Reply::Embedded { .. } | Reply::Failed { .. } | Reply::Rejected(_) => {
                self.fail(&dialect::something_else(), out);
            }
        }
    }

    /// Does something with a choice, which is opened first if it was not.
    fn with_choice(
        &mut self,
        request: usize,
        choice: u32,
        out: &mut Vec<u8>,
        act: impl FnOnce(&mut Self, u32, &mut Vec<u8>),
    ) {
        match dialect::place(request, choice, self.choices) {
            Ok(index) if !self.finished[index as usize] => {
                self.phase = Phase::Answering;
                self.call.first_token();
                if !std::mem::replace(&mut self.opened[index as usize], true) {
                    self.encoder.open(index, out);
                }
                act(self, index, out);
            }
            Ok(_) => self.fail(&dialect::something_else(), out),
            Err(error) => self.fail(&error, out),
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.finished.iter().all(|finished| *finished) {
            return self.fail(&dialect::not_ended(), out);
        }
        self.encoder.end(self.usage, out);
        self.call.answered();
        self.phase = Phase::Ended;
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.encoder.fail(error, out);
        self.call.failed(error);
        self.phase = Phase::Breaking;
    }
}
