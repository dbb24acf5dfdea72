//! From a request body to the work of a model: what is asked, checked and bounded, with the parameter at fault named.

use super::{
    fields::{Bounded, Fields, Text},
    output::{self, TOOLS_MAX},
};
use crate::errors::ApiError;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value, value::RawValue};
use std::collections::BTreeMap;
use warmset_core::{
    Priority,
    inference::{CHOICES_MAX, GenerateJob, Output, Prompt, Sampling, TokensOrText, Work},
};

/// Messages of one conversation.
pub(crate) const MESSAGES_MAX: usize = 10_000;
/// Parts of one message.
pub(crate) const PARTS_MAX: usize = 1_000;
/// Texts that may end a choice, and the bytes of each.
pub(crate) const STOPS_MAX: usize = 16;
pub(crate) const STOP_BYTES_MAX: usize = 256;
/// The largest `max_tokens`.
pub(crate) const MAX_TOKENS_MAX: u32 = 1 << 24;
/// Tokens whose logit may be changed.
const LOGIT_BIAS_MAX: usize = 1_024;
/// Tokens of a prompt given as tokens.
const PROMPT_TOKENS_MAX: usize = 1 << 21;
/// Inputs of one embedding request, as OpenAI's.
const EMBEDDING_INPUTS_MAX: usize = 2_048;
const TOP_K_MAX: u32 = 1 << 20;

/// Which of OpenAI's two generating routes was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
}

impl Route {
    /// Where it is.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Text => "/v1/completions",
        }
    }
}

/// A generation as asked for.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) model: String,
    /// One for each prompt.
    pub(crate) jobs: Vec<Work>,
    /// Choices of each job.
    pub(crate) choices: u32,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) tier: Option<Tier>,
    /// Whether the answer is asked for later, in a dialect that has a way to.
    pub(crate) background: bool,
    /// What a response repeats of its request, in a dialect that does.
    pub(crate) echo: Option<Box<Map<String, Value>>>,
}

/// What dialects have in common once they are read.
pub(crate) struct Shared {
    pub(crate) max_tokens: Option<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) sampling: Sampling,
    pub(crate) output: Output,
    pub(crate) stream: bool,
    pub(crate) tier: Option<Tier>,
}

/// A generation of one choice from a conversation.
pub(crate) fn single(fields: &Fields<'_>, messages: String, shared: Shared) -> Result<Generation, ApiError> {
    let Shared { max_tokens, stop, sampling, output, stream, tier } = shared;
    let (prompt, choices, ignore_end) = (Prompt::Chat { messages }, 1, false);
    let job = GenerateJob { prompt, choices, max_tokens, sampling, stop, ignore_end, stream, output, kv_domain: None };
    let jobs = vec![Work::Generate(Box::new(job))];
    Ok(Generation {
        model: model(fields)?,
        jobs,
        choices,
        stream,
        include_usage: false,
        tier,
        background: false,
        echo: None,
    })
}

/// How vectors are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Float,
    Base64,
}

/// An embedding as asked for.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub(crate) model: String,
    pub(crate) work: Work,
    pub(crate) encoding: Encoding,
    pub(crate) dimensions: Option<u32>,
    pub(crate) tier: Option<Tier>,
}

/// OpenAI's service tiers that choose a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    Priority,
    Default,
    Flex,
}

impl Tier {
    pub(crate) fn class(self) -> Priority {
        match self {
            Self::Priority => Priority::Critical,
            Self::Default => Priority::Standard,
            Self::Flex => Priority::Batch,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Priority => "priority",
            Self::Default => "default",
            Self::Flex => "flex",
        }
    }
}

/// Reads the body of a generating route.
pub(crate) fn generation(route: Route, body: &[u8]) -> Result<Generation, ApiError> {
    let fields = Fields::parse(body)?;
    let model = model(&fields)?;
    refuse_unsupported(route, &fields)?;
    let choices = fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1);
    let prompts = match route {
        Route::Chat => vec![Prompt::Chat { messages: messages(&fields)? }],
        Route::Text => prompts(&fields)?,
    };
    let total = prompts.len() as u64 * u64::from(choices);
    if total > u64::from(CHOICES_MAX) {
        return Err(ApiError::param("n", format!("prompts times n must be at most {CHOICES_MAX}, not {total}")));
    }
    let stream = fields.flag("stream")?;
    let (sampling, stop, max_tokens) = (sampling(&fields)?, stops(&fields, "stop")?, max_tokens(&fields)?);
    let ignore_end = fields.flag("ignore_eos")?;
    let output = output::output(route, &fields)?;
    let job = |prompt| GenerateJob {
        prompt,
        choices,
        max_tokens,
        sampling: sampling.clone(),
        stop: stop.clone(),
        ignore_end,
        stream,
        output: output.clone(),
        kv_domain: None,
    };
    let jobs = prompts.into_iter().map(|prompt| Work::Generate(Box::new(job(prompt)))).collect();
    let (include_usage, tier) = (include_usage(&fields)?, tier(&fields)?);
    Ok(Generation { model, jobs, choices, stream, include_usage, tier, background: false, echo: None })
}

/// Reads the body of `/v1/embeddings`.
pub(crate) fn embedding(body: &[u8]) -> Result<Embedding, ApiError> {
    let fields = Fields::parse(body)?;
    let model = model(&fields)?;
    let raw = fields.raw("input").ok_or_else(|| ApiError::param("input", "input is missing"))?;
    let inputs: Vec<TokensOrText> = match texts_or_tokens::<EMBEDDING_INPUTS_MAX>("input", raw)? {
        TextsOrTokens::Texts(texts) => texts.into_iter().map(TokensOrText::Text).collect(),
        TextsOrTokens::Tokens(tokens) => tokens.into_iter().map(TokensOrText::Tokens).collect(),
    };
    if inputs.iter().any(|input| matches!(input, TokensOrText::Text(text) if text.is_empty())) {
        return Err(ApiError::param("input", "input must not be empty"));
    }
    let encoding = match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => Encoding::Float,
        Some("base64") => Encoding::Base64,
        Some(_) => return Err(ApiError::param("encoding_format", "encoding_format must be float or base64")),
    };
    let dimensions = fields.integer("dimensions", 1..=u32::MAX)?;
    let tier = tier(&fields)?;
    Ok(Embedding { model, work: Work::Embed { inputs }, encoding, dimensions, tier })
}

fn model(fields: &Fields<'_>) -> Result<String, ApiError> {
    fields.text("model")?.ok_or_else(|| ApiError::param("model", "model is missing"))
}

/// What would change the answer and is not built is refused, never passed over.
fn refuse_unsupported(route: Route, fields: &Fields<'_>) -> Result<(), ApiError> {
    let common: [(&str, &[&str], &str); 1] =
        [("prompt_logprobs", &["0"], "log probabilities of the prompt are not supported")];
    let chat: [(&str, &[&str], &str); 3] = [
        ("functions", &["[]"], "functions are not supported; use tools"),
        ("function_call", &["\"none\"", "\"auto\""], "function_call is not supported; use tool_choice"),
        ("audio", &[], "only text is supported"),
    ];
    let text: [(&str, &[&str], &str); 4] = [
        ("tools", &["[]"], "tools need a chat"),
        ("echo", &["false"], "echo is not supported"),
        ("suffix", &["\"\""], "suffix is not supported"),
        ("best_of", &["1"], "best_of is not supported; use n"),
    ];
    let own = if route == Route::Chat { &chat[..] } else { &text[..] };
    for (name, harmless, message) in common.iter().chain(own) {
        fields.refuse(name, harmless, message)?;
    }
    if let Some(Bounded(modalities)) = fields.read::<Bounded<Text<'_>, 16>>("modalities", "a short list of texts")?
        && modalities.iter().any(|Text(modality)| modality != "text")
    {
        return Err(ApiError::unsupported("modalities", "only text is supported"));
    }
    Ok(())
}

pub(crate) fn sampling(fields: &Fields<'_>) -> Result<Sampling, ApiError> {
    let default = Sampling::default();
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(default.temperature),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(default.top_p),
        top_k: fields.integer("top_k", 0..=TOP_K_MAX)?.unwrap_or(default.top_k),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(default.min_p),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(default.frequency_penalty),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(default.presence_penalty),
        repeat_penalty: fields.number("repeat_penalty", 0.01..=10.0)?.unwrap_or(default.repeat_penalty),
        logit_bias: logit_bias(fields)?,
        // OpenAI's seeds are signed; the bits are what matters.
        seed: fields.read::<i64>("seed", "a whole number of 64 bits")?.map(|seed| seed as u64),
    })
}

fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let expected = "an object from token ids to numbers from -100 to 100";
    let Some(biases) = fields.read::<BTreeMap<u32, f32>>("logit_bias", expected)? else { return Ok(Vec::new()) };
    if biases.len() > LOGIT_BIAS_MAX {
        return Err(ApiError::param("logit_bias", format!("logit_bias must name at most {LOGIT_BIAS_MAX} tokens")));
    }
    if biases.values().any(|bias| !(-100.0..=100.0).contains(bias)) {
        return Err(ApiError::param("logit_bias", format!("logit_bias must be {expected}")));
    }
    Ok(biases.into_iter().collect())
}

fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let newer = fields.integer("max_completion_tokens", 1..=MAX_TOKENS_MAX)?;
    Ok(newer.or(fields.integer("max_tokens", 1..=MAX_TOKENS_MAX)?))
}

/// Texts that end a choice, under the name that they have in a dialect.
pub(crate) fn stops(fields: &Fields<'_>, name: &'static str) -> Result<Vec<String>, ApiError> {
    let expected = format!("a string or at most {STOPS_MAX} strings of 1 to {STOP_BYTES_MAX} bytes");
    let wrong = || ApiError::param(name, format!("{name} must be {expected}"));
    let stops = match fields.raw(name) {
        None => return Ok(Vec::new()),
        Some(raw) if raw.get().starts_with('"') => vec![fields.read::<String>(name, &expected)?.ok_or_else(wrong)?],
        Some(_) => fields.read::<Bounded<String, STOPS_MAX>>(name, &expected)?.ok_or_else(wrong)?.0,
    };
    if stops.iter().any(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX) {
        return Err(wrong());
    }
    Ok(stops)
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
}

fn include_usage(fields: &Fields<'_>) -> Result<bool, ApiError> {
    let options = fields.read::<StreamOptions>("stream_options", "an object with include_usage")?;
    Ok(options.and_then(|options| options.include_usage).unwrap_or(false))
}

pub(crate) fn tier(fields: &Fields<'_>) -> Result<Option<Tier>, ApiError> {
    match fields.text("service_tier")?.as_deref() {
        None | Some("auto") => Ok(None),
        Some("priority") => Ok(Some(Tier::Priority)),
        Some("default") => Ok(Some(Tier::Default)),
        Some("flex") => Ok(Some(Tier::Flex)),
        Some(_) => Err(ApiError::param("service_tier", "service_tier must be auto, default, priority or flex")),
    }
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Text<'a>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_call_id: Option<Text<'a>>,
}

/// A call of a function that an assistant made.
#[derive(Deserialize)]
struct MadeCall<'a> {
    #[serde(borrow)]
    function: MadeFunction<'a>,
}

#[derive(Deserialize)]
struct MadeFunction<'a> {
    #[serde(rename = "name", borrow)]
    _name: Text<'a>,
    #[serde(borrow)]
    arguments: Text<'a>,
}

/// One piece of a message's content.
#[derive(Deserialize)]
pub(super) struct Part<'a> {
    #[serde(rename = "type", borrow)]
    pub(super) kind: Text<'a>,
    #[serde(borrow, default)]
    pub(super) text: Option<Text<'a>>,
}

/// Checks the shape of a conversation and passes it on as it was sent: the model's template renders it.
fn messages(fields: &Fields<'_>) -> Result<String, ApiError> {
    let raw = fields.raw("messages").ok_or_else(|| ApiError::param("messages", "messages is missing"))?;
    let expected = format!("a list of 1 to {MESSAGES_MAX} messages");
    let wrong = || ApiError::param("messages", format!("messages must be {expected}"));
    let Bounded(list) = fields.read::<Bounded<&RawValue, MESSAGES_MAX>>("messages", &expected)?.ok_or_else(wrong)?;
    if list.is_empty() {
        return Err(wrong());
    }
    for (index, raw) in list.into_iter().enumerate() {
        let at = |what: &str| format!("messages[{index}]{what}");
        let message: Message<'_> = serde_json::from_str(raw.get())
            .map_err(|_| ApiError::param(at(""), format!("{} must be an object with a role", at(""))))?;
        let Text(role) = &message.role;
        if !["system", "developer", "user", "assistant", "tool", "function"].contains(&&**role) {
            let message = "a role is system, developer, user, assistant, tool or function";
            return Err(ApiError::param(at(".role"), message));
        }
        if let Some(calls) = message.tool_calls.filter(|calls| calls.get() != "null") {
            check_calls(calls, &at(".tool_calls"))?;
        }
        if role == "tool" && message.tool_call_id.is_none() {
            return Err(ApiError::param(at(".tool_call_id"), "a tool's message needs tool_call_id"));
        }
        let content = message.content.filter(|content| content.get() != "null");
        match content {
            // An assistant may have called tools instead of saying something.
            None if role == "assistant" => {}
            None => return Err(ApiError::param(at(".content"), format!("{} is missing", at(".content")))),
            Some(content) => check_content(content, &at(".content"))?,
        }
    }
    Ok(raw.get().to_owned())
}

fn check_calls(calls: &RawValue, at: &str) -> Result<(), ApiError> {
    let expected = format!("a list of at most {TOOLS_MAX} calls of functions");
    let Bounded(calls) = output::part::<Bounded<MadeCall<'_>, TOOLS_MAX>>(calls, at, &expected)?;
    for (index, call) in calls.iter().enumerate() {
        if serde_json::from_str::<IgnoredAny>(&call.function.arguments.0).is_err() {
            let at = format!("{at}[{index}].function.arguments");
            return Err(ApiError::param(at.clone(), format!("{at} must be JSON as text")));
        }
    }
    Ok(())
}

fn check_content(content: &RawValue, at: &str) -> Result<(), ApiError> {
    // The whole body was scanned: what begins as a string is one.
    if content.get().starts_with('"') {
        return Ok(());
    }
    let wrong = || ApiError::param(at.to_owned(), format!("{at} must be a string or a list of text parts"));
    let Bounded(parts): Bounded<Part<'_>, PARTS_MAX> = serde_json::from_str(content.get()).map_err(|_| wrong())?;
    for part in parts {
        match &*part.kind.0 {
            "text" if part.text.is_some() => {}
            "text" => return Err(wrong()),
            other => {
                let kind: String = other.chars().take(32).collect();
                let message = format!("{at} has a part of type \"{kind}\"; only text is supported");
                return Err(ApiError::param(at.to_owned(), message));
            }
        }
    }
    Ok(())
}

enum TextsOrTokens {
    Texts(Vec<String>),
    Tokens(Vec<Vec<u32>>),
}

fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    let raw = fields.raw("prompt").ok_or_else(|| ApiError::param("prompt", "prompt is missing"))?;
    Ok(match texts_or_tokens::<{ CHOICES_MAX as usize }>("prompt", raw)? {
        TextsOrTokens::Texts(texts) => texts.into_iter().map(|text| Prompt::Text { text }).collect(),
        TextsOrTokens::Tokens(lists) => lists.into_iter().map(|tokens| Prompt::Tokens { tokens }).collect(),
    })
}

/// A string, a list of strings, a list of tokens, or a list of lists of tokens.
fn texts_or_tokens<const MAX: usize>(name: &'static str, raw: &RawValue) -> Result<TextsOrTokens, ApiError> {
    let text = raw.get();
    let wrong = || {
        let message = format!("{name} must be a string, 1 to {MAX} strings, tokens, or 1 to {MAX} lists of tokens");
        ApiError::param(name, message)
    };
    let first = text.strip_prefix('[').and_then(|rest| rest.trim_start().chars().next());
    let read = match first {
        None => TextsOrTokens::Texts(vec![serde_json::from_str(text).map_err(|_| wrong())?]),
        Some('"') => TextsOrTokens::Texts(serde_json::from_str::<Bounded<String, MAX>>(text).map_err(|_| wrong())?.0),
        Some('[') => {
            let lists = serde_json::from_str::<Bounded<Bounded<u32, PROMPT_TOKENS_MAX>, MAX>>(text);
            TextsOrTokens::Tokens(lists.map_err(|_| wrong())?.0.into_iter().map(|list| list.0).collect())
        }
        Some(_) => {
            let tokens = serde_json::from_str::<Bounded<u32, PROMPT_TOKENS_MAX>>(text);
            TextsOrTokens::Tokens(vec![tokens.map_err(|_| wrong())?.0])
        }
    };
    let empty = match &read {
        TextsOrTokens::Texts(texts) => texts.is_empty(),
        TextsOrTokens::Tokens(lists) => lists.iter().any(Vec::is_empty),
    };
    if empty { Err(wrong()) } else { Ok(read) }
}

#[cfg(test)]
#[path = "ask_tests.rs"]
mod tests;
