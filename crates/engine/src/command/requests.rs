//! One request, sent to the server and followed to its end.

use super::{
    answer::{self, Piece, PieceChoice, WireFunction, WireTimings, WireUsage},
    translate,
    upstream::{Answer, Broken, Upstream},
};
use crate::protocol::{FailureKind, FinishReason, FromEngine, GenerateJob, Timings, TokensOrText, Usage};
use hyper::Method;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tokio::sync::{mpsc::UnboundedSender, oneshot};

/// Beats are reported at most this often.
const BEAT_INTERVAL: Duration = Duration::from_millis(250);
/// A broken connection is most often the end of the server, which is reported better than as a failed request.
const END_GRACE: Duration = Duration::from_secs(2);

/// What all requests share.
pub(super) struct Desk {
    pub(super) upstream: Upstream,
    /// The model's name at the server.
    pub(super) model: String,
    pub(super) outbox: UnboundedSender<FromEngine>,
    pub(super) began: Instant,
    /// Milliseconds from then to the last beat.
    pub(super) beat_at: AtomicU64,
}

/// Why a request has no whole answer.
enum Fault {
    /// The server refused it or gave it up.
    Refused(FailureKind, String),
    /// The connection broke, or what came over it cannot be read.
    Broken(String),
}

impl From<Broken> for Fault {
    fn from(Broken(reason): Broken) -> Self {
        Self::Broken(reason)
    }
}

impl Desk {
    pub(super) fn tell(&self, message: FromEngine) {
        // Without a worker the process ends.
        let _ = self.outbox.send(message);
    }

    /// The server shows that it is alive.
    pub(super) fn beat(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last = self.beat_at.load(Ordering::Relaxed);
        if Duration::from_millis(now.saturating_sub(last)) >= BEAT_INTERVAL || last == 0 {
            self.beat_at.store(now.max(1), Ordering::Relaxed);
            self.tell(FromEngine::Beat);
        }
    }

    async fn report(&self, request: u64, fault: Fault) {
        let (kind, message) = match fault {
            Fault::Refused(kind, message) => (kind, message),
            Fault::Broken(reason) => {
                tokio::time::sleep(END_GRACE).await;
                (FailureKind::Internal, format!("the model's own server broke the answer off: {reason}"))
            }
        };
        self.tell(FromEngine::Failed { request, kind, message, param: None });
    }

    /// Generates until the end, or until `cancelled` is sent or dropped.
    pub(super) async fn generate(&self, request: u64, job: &GenerateJob, cancelled: oneshot::Receiver<()>) {
        let mut progress = Progress::new(self, request, job);
        let outcome = tokio::select! {
            outcome = progress.run(job) => Some(outcome),
            _ = cancelled => None,
        };
        match outcome {
            Some(Ok(())) => progress.close(),
            Some(Err(fault)) => self.report(request, fault).await,
            None => progress.cancel(),
        }
    }

    /// Embeds, unless cancelled.
    pub(super) async fn embed(&self, request: u64, inputs: &[TokensOrText], cancelled: oneshot::Receiver<()>) {
        let outcome = tokio::select! {
            outcome = self.vectors(inputs) => outcome,
            _ = cancelled => Err(Fault::Refused(FailureKind::Internal, "cancelled by the caller".into())),
        };
        match outcome {
            Ok((vectors, prompt_tokens)) => self.tell(FromEngine::Embedded { request, vectors, prompt_tokens }),
            Err(fault) => self.report(request, fault).await,
        }
    }

    async fn vectors(&self, inputs: &[TokensOrText]) -> Result<(Vec<Vec<f32>>, u32), Fault> {
        let body = translate::embedding_body(inputs, &self.model);
        let body =
            accepted(self.upstream.send(Method::POST, "/v1/embeddings", Some(body)).await?).await?.whole().await?;
        self.beat();
        translate::embeddings(&body, inputs.len())
            .map_err(|reason| Fault::Refused(FailureKind::Internal, format!("the model's own server failed: {reason}")))
    }
}

/// An answer that is not a refusal.
async fn accepted(answer: Answer) -> Result<Answer, Fault> {
    if answer.status.is_success() {
        return Ok(answer);
    }
    let status = answer.status.as_u16();
    let (kind, message) = translate::failure(status, &answer.whole().await?);
    Err(Fault::Refused(kind, message))
}

/// A generation on its way.
struct Progress<'a> {
    desk: &'a Desk,
    request: u64,
    finished: Vec<bool>,
    /// Calls of functions that each choice has begun.
    calls: Vec<u32>,
    /// Pieces of text, in case the server does not count tokens.
    pieces: u32,
    usage: Option<WireUsage>,
    timings: Option<WireTimings>,
    received: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl<'a> Progress<'a> {
    fn new(desk: &'a Desk, request: u64, job: &GenerateJob) -> Self {
        let finished = vec![false; job.choices.max(1) as usize];
        let calls = vec![0; finished.len()];
        let (usage, timings, first, last) = (None, None, None, None);
        Self { desk, request, finished, calls, pieces: 0, usage, timings, received: Instant::now(), first, last }
    }

    async fn run(&mut self, job: &GenerateJob) -> Result<(), Fault> {
        let body = translate::body(job, &self.desk.model)
            .map_err(|message| Fault::Refused(FailureKind::InvalidRequest, message))?;
        let path = translate::path(&job.prompt);
        let mut answer = accepted(self.desk.upstream.send(Method::POST, path, Some(body)).await?).await?;
        if !job.stream {
            self.take(&answer.whole().await?)?;
            return self.check();
        }
        while let Some(line) = answer.line().await? {
            self.desk.beat();
            // Other fields, comments and the empty lines between events say nothing.
            match line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) {
                Some(b"[DONE]") => break,
                Some(data) => self.take(data)?,
                None => {}
            }
        }
        self.check()
    }

    fn check(&self) -> Result<(), Fault> {
        if self.finished.iter().all(|finished| *finished) {
            return Ok(());
        }
        Err(Fault::Broken("it ended without ending every choice".into()))
    }

    /// A piece of the answer, or the whole of it.
    fn take(&mut self, data: &[u8]) -> Result<(), Fault> {
        let piece: Piece = serde_json::from_slice(data).map_err(|error| Fault::Broken(error.to_string()))?;
        if let Some(error) = piece.error.filter(|error| !error.is_null()) {
            let said = translate::error_message(&error).unwrap_or_else(|| error.to_string());
            let context = translate::is_about_context(&said);
            let kind = if context { FailureKind::ContextExceeded } else { FailureKind::Internal };
            return Err(Fault::Refused(kind, said));
        }
        self.usage = piece.usage.or(self.usage.take());
        self.timings = piece.timings.or(self.timings.take());
        piece.choices.into_iter().try_for_each(|choice| self.take_choice(choice))
    }

    fn take_choice(&mut self, mut piece: PieceChoice) -> Result<(), Fault> {
        let (request, choice) = (self.request, piece.index);
        let index = choice as usize;
        match self.finished.get(index) {
            Some(false) => {}
            Some(true) => return Ok(()),
            None => return Err(Fault::Broken("it answers for a choice that nobody asked for".into())),
        }
        let tokens = piece.logprobs();
        if !tokens.is_empty() {
            self.desk.tell(FromEngine::Logprobs { request, choice, tokens });
        }
        let text = piece.text();
        if !text.is_empty() {
            self.saw_output();
            self.desk.tell(FromEngine::Delta { request, choice, text });
        }
        for (place, call) in (0..).zip(piece.calls()) {
            self.saw_output();
            self.take_call(choice, call.index.unwrap_or(place), call.function)?;
        }
        if let Some(finish) = piece.finish().map_err(Fault::Broken)? {
            self.finished[index] = true;
            if let Some(text) = piece.stop_text() {
                self.desk.tell(FromEngine::StopText { request, choice, text });
            }
            self.desk.tell(FromEngine::ChoiceDone { request, choice, finish });
        }
        Ok(())
    }

    /// A call begins with its name; calls come one after the other.
    fn take_call(&mut self, choice: u32, call: u32, function: WireFunction) -> Result<(), Fault> {
        let (request, begun) = (self.request, &mut self.calls[choice as usize]);
        match function.name.filter(|name| !name.is_empty()) {
            Some(name) if call == *begun => {
                *begun += 1;
                self.desk.tell(FromEngine::ToolCall { request, choice, call, name });
            }
            // Some servers say the name again with every piece.
            _ if call < *begun => {}
            _ => return Err(Fault::Broken("it calls a function without a name, or out of turn".into())),
        }
        if let Some(text) = function.arguments.filter(|text| !text.is_empty()) {
            self.desk.tell(FromEngine::ToolArguments { request, choice, call, text });
        }
        Ok(())
    }

    fn saw_output(&mut self) {
        self.pieces = self.pieces.saturating_add(1);
        self.last = Some(Instant::now());
        self.first = self.first.or(self.last);
    }

    /// Ends what has not ended.
    fn cancel(mut self) {
        for (choice, finished) in (0..).zip(&mut self.finished) {
            if !std::mem::replace(finished, true) {
                let finish = FinishReason::Cancelled;
                self.desk.tell(FromEngine::ChoiceDone { request: self.request, choice, finish });
            }
        }
        self.close();
    }

    fn close(self) {
        let usage = match &self.usage {
            Some(usage) => answer::usage(usage, self.timings.as_ref()),
            None => Usage { completion_tokens: self.pieces, ..Usage::default() },
        };
        let timings = self.times();
        self.desk.tell(FromEngine::Done { request: self.request, usage, timings });
    }

    /// The server's own account where it gives one, else what was seen from here.
    fn times(&self) -> Timings {
        let whole = self.received.elapsed().as_secs_f64();
        let seen = self.first.map_or(whole, |first| (first - self.received).as_secs_f64());
        let decode = self.first.zip(self.last).map_or(0.0, |(first, last)| (last - first).as_secs_f64());
        match &self.timings {
            Some(told) => {
                let decode_seconds = told.predicted_ms / 1e3;
                let first_token_seconds = seen.min((whole - decode_seconds).max(0.0));
                Timings { first_token_seconds, prefill_seconds: told.prompt_ms / 1e3, decode_seconds }
            }
            None => Timings { first_token_seconds: seen, prefill_seconds: seen, decode_seconds: decode },
        }
    }
}
