//! What the dialects have in common: an answer as it comes, in the terms that every encoder writes in its own way.
//! The routes differ in how a request is read and an answer written; what happens between is the same for all.

use super::call::add_usage;
use crate::errors::ApiError;
use warmset_core::inference::{FinishReason, Reply, TokenLogprob, Usage};

/// One call of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FunctionCall {
    pub(crate) name: String,
    /// JSON text.
    pub(crate) arguments: String,
}

/// One complete choice.
#[derive(Debug, Clone, Default)]
pub(crate) struct Choice {
    pub(crate) text: String,
    pub(crate) calls: Vec<FunctionCall>,
    pub(crate) logprobs: Vec<TokenLogprob>,
    /// The stop text that ended it.
    pub(crate) stop_text: Option<String>,
    pub(crate) finish: Option<FinishReason>,
}

/// Writes one answer in one dialect, either as a stream of events or as one object. Choices are numbered over the
/// whole answer.
pub(crate) trait Encoder: Send {
    /// The first token of a choice is here.
    fn open(&mut self, index: u32, out: &mut Vec<u8>);

    /// Tokens, before their text.
    fn logprobs(&mut self, index: u32, tokens: Vec<TokenLogprob>);

    /// More text of a choice.
    fn text(&mut self, index: u32, text: &str, out: &mut Vec<u8>);

    /// A call begins.
    fn call(&mut self, index: u32, call: u32, name: &str, out: &mut Vec<u8>);

    /// More arguments of a call.
    fn arguments(&mut self, index: u32, call: u32, text: &str, out: &mut Vec<u8>);

    /// A choice is complete.
    fn finish(&mut self, index: u32, finish: FinishReason, stop_text: Option<&str>, out: &mut Vec<u8>);

    /// The answer is complete.
    fn end(&mut self, usage: Usage, out: &mut Vec<u8>);

    /// The answer cannot be completed.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>);

    /// The whole answer.
    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Vec<u8>;
}

/// Whole choices, put together from replies.
pub(crate) struct Collected {
    choices: Vec<Choice>,
    /// Choices of each request.
    each: u32,
    pub(crate) usage: Usage,
    /// Seconds from the engine's beginning to its first token.
    pub(crate) first_token_seconds: Option<f64>,
}

impl Collected {
    pub(crate) fn new(requests: usize, each: u32) -> Self {
        let choices = vec![Choice::default(); requests * each as usize];
        Self { choices, each, usage: Usage::default(), first_token_seconds: None }
    }

    fn choice(&mut self, request: usize, choice: u32) -> Result<&mut Choice, ApiError> {
        let place = place(request, choice, self.each)?;
        self.choices.get_mut(place as usize).ok_or_else(nobody_asked)
    }

    /// Takes a reply of one of the requests.
    pub(crate) fn take(&mut self, request: usize, reply: Reply) -> Result<(), ApiError> {
        match reply {
            Reply::Queued { .. } | Reply::Loading { .. } | Reply::Started { .. } | Reply::Parked | Reply::Resumed => {}
            Reply::Logprobs { choice, tokens } => self.choice(request, choice)?.logprobs.extend(tokens),
            Reply::Delta { choice, text } => self.choice(request, choice)?.text.push_str(&text),
            Reply::ToolCall { choice, call, name } => {
                let calls = &mut self.choice(request, choice)?.calls;
                if call as usize != calls.len() {
                    return Err(nobody_asked());
                }
                calls.push(FunctionCall { name, arguments: String::new() });
            }
            Reply::ToolArguments { choice, call, text } => {
                let calls = &mut self.choice(request, choice)?.calls;
                calls.get_mut(call as usize).ok_or_else(nobody_asked)?.arguments.push_str(&text);
            }
            Reply::StopText { choice, text } => self.choice(request, choice)?.stop_text = Some(text),
            Reply::ChoiceDone { choice, finish } => self.choice(request, choice)?.finish = Some(finish),
            Reply::Done { usage, timings } => {
                self.first_token_seconds = Some(timings.first_token_seconds);
                add_usage(&mut self.usage, usage);
            }
            Reply::Embedded { .. } | Reply::Failed { .. } | Reply::Rejected(_) => return Err(something_else()),
        }
        Ok(())
    }

    /// All choices, if every one has come to its end.
    pub(crate) fn choices(&self) -> Result<&[Choice], ApiError> {
        let ended = |choice: &Choice| choice.finish.is_some_and(|finish| finish != FinishReason::Cancelled);
        if self.choices.iter().all(ended) { Ok(&self.choices) } else { Err(not_ended()) }
    }
}

/// The place of a choice in the whole answer.
pub(crate) fn place(request: usize, choice: u32, each: u32) -> Result<u32, ApiError> {
    let place = || u32::try_from(request).ok()?.checked_mul(each)?.checked_add(choice);
    if choice < each { place().ok_or_else(nobody_asked) } else { Err(nobody_asked()) }
}

fn nobody_asked() -> ApiError {
    ApiError::internal("the engine answered for a choice nobody asked for")
}

pub(crate) fn something_else() -> ApiError {
    ApiError::internal("the engine answered something else than was asked")
}

pub(crate) fn not_ended() -> ApiError {
    ApiError::internal("the engine ended without ending every choice")
}

/// One server-sent event.
pub(crate) fn write_event(name: Option<&str>, data: &[u8], out: &mut Vec<u8>) {
    if let Some(name) = name {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.push(b'\n');
    }
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(data);
    out.extend_from_slice(b"\n\n");
}
