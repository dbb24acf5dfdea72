//! Requests on their way in: checked, tokenised, waiting for their grant.

use super::{load::Loaded, sys::Token};
use crate::{
    calls::may_call,
    kv::tier::{GrantedBlocks, unused},
    port::Report,
    protocol::{FailureKind, GenerateJob, Output, Prompt, Sampling, TextFormat, TokensOrText, Tools},
    template::TemplateError,
};
use std::time::{Duration, Instant};
use warmset_core::{
    inference::{CHOICES_MAX, TOP_LOGPROBS_MAX},
    kv::BlockKey,
};
use warmset_grammar::Constraint;

/// The most stop texts of one request.
const STOPS_MAX: usize = 64;
/// The longest stop text.
const STOP_BYTES_MAX: usize = 4096;
/// The most tokens with a bias.
const BIASES_MAX: usize = 1024;
/// More bytes than any token stands for. Longer texts than the context can hold are not even tokenised, since that
/// would keep everybody else waiting.
const TOKEN_BYTES_MAX: usize = 256;
/// The most inputs of one embedding request.
const INPUTS_MAX: usize = 2048;

/// Why a request fails: kind, message, and the parameter at fault.
pub(super) struct Refusal {
    pub(super) kind: FailureKind,
    pub(super) message: String,
    pub(super) param: Option<&'static str>,
}

impl Refusal {
    pub(super) fn invalid(param: &'static str, message: impl Into<String>) -> Self {
        Self { kind: FailureKind::InvalidRequest, message: message.into(), param: Some(param) }
    }

    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self { kind: FailureKind::Internal, message: message.into(), param: None }
    }
}

/// A generation from its arrival to its last choice.
pub(super) struct Generation {
    pub(super) request: u64,
    pub(super) job: Box<GenerateJob>,
    pub(super) prompt: Vec<Token>,
    pub(super) seed: u64,
    /// Keys of its full blocks, if there is a tier for them.
    pub(super) keys: Vec<BlockKey>,
    pub(super) granted: bool,
    /// It is to leave: it does not begin here.
    pub(super) stopped: bool,
    /// Granted blocks, until the worker is told what became of them.
    pub(super) blocks: Option<GrantedBlocks>,
    /// Blocks from the first on that the tier has.
    pub(super) known_blocks: u32,
    /// Tokens of the prompt that were not computed for it.
    pub(super) cached_tokens: u32,
    /// Whether the prompt's blocks were offered to the tier.
    pub(super) offered: bool,
    /// Choices that have a sequence or had one.
    pub(super) choices_started: u32,
    /// Choices that are complete, in no order.
    pub(super) choices_done: Vec<bool>,
    pub(super) completion_tokens: u32,
    /// The prompt's last logits, while choices are left that begin with them.
    pub(super) first_logits: Option<Vec<f32>>,
    /// What each choice begins with, if it is held to a grammar.
    pub(super) constraint: Option<Constraint>,
    /// Why it cannot go on.
    pub(super) refusal: Option<Refusal>,
    pub(super) clock: Clock,
}

/// When things happened to a generation.
pub(super) struct Clock {
    pub(super) received: Instant,
    pub(super) prefill_begin: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
}

impl Clock {
    pub(super) fn token(&mut self, now: Instant) {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    pub(super) fn between(from: Option<Instant>, to: Option<Instant>) -> f64 {
        from.zip(to).map(|(from, to)| to.saturating_duration_since(from)).unwrap_or(Duration::ZERO).as_secs_f64()
    }
}

impl Generation {
    /// Checks and tokenises a job.
    pub(super) fn new(loaded: &Loaded, request: u64, job: Box<GenerateJob>) -> Result<Self, Refusal> {
        let received = Instant::now();
        if loaded.pools {
            return Err(Refusal::invalid("model", "this model computes embeddings and cannot generate text"));
        }
        check(&job, loaded)?;
        let constraint = constraint(loaded, &job.output)?;
        let prompt = tokenize(loaded, &job)?;
        check_length(prompt.len(), loaded.info.context_tokens)?;
        let seed = job.sampling.seed.unwrap_or_else(draw_seed);
        let clock = Clock { received, prefill_begin: None, first_token: None, last_token: None };
        Ok(Self::of(request, job, (prompt, seed), constraint, clock))
    }

    /// A job whose prompt is tokenised already: it goes on from where another engine stopped.
    pub(super) fn resumed(
        loaded: &Loaded,
        request: u64,
        job: Box<GenerateJob>,
        (prompt, seed): (Vec<Token>, u64),
        clock: Clock,
    ) -> Result<Self, Refusal> {
        check(&job, loaded)?;
        check_length(prompt.len(), loaded.info.context_tokens)?;
        let constraint = constraint(loaded, &job.output)?;
        Ok(Self::of(request, job, (prompt, seed), constraint, clock))
    }

    fn of(
        request: u64,
        job: Box<GenerateJob>,
        (prompt, seed): (Vec<Token>, u64),
        constraint: Option<Constraint>,
        clock: Clock,
    ) -> Self {
        let choices = job.choices as usize;
        Self {
            request,
            seed,
            job,
            prompt,
            keys: Vec::new(),
            granted: false,
            stopped: false,
            blocks: None,
            known_blocks: 0,
            cached_tokens: 0,
            offered: false,
            choices_started: 0,
            choices_done: vec![false; choices],
            completion_tokens: 0,
            first_logits: None,
            constraint,
            refusal: None,
            clock,
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.granted && !self.stopped && self.choices_started < self.job.choices
    }

    /// The prompt as blocks are named after it.
    pub(super) fn prompt_numbers(&self) -> Vec<u32> {
        numbers(&self.prompt)
    }

    /// Says that granted blocks are not used, unless it was said already what became of them.
    pub(super) fn settle_grant(&mut self, report: Report<'_>) {
        if self.blocks.take().is_some() {
            report(unused(self.request));
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.choices_done.iter().all(|done| *done)
    }
}

/// Tokens as they are called outside of llama.cpp.
pub(super) fn numbers(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|token| *token as u32).collect()
}

fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

fn check_length(tokens: usize, context_tokens: u32) -> Result<(), Refusal> {
    if tokens >= context_tokens as usize {
        return Err(Refusal {
            kind: FailureKind::ContextExceeded,
            message: format!(
                "the prompt has {tokens} tokens, but this model's context holds {context_tokens} and the answer needs at \
                 least one; shorten the prompt"
            ),
            param: Some("messages"),
        });
    }
    Ok(())
}

fn check(job: &GenerateJob, loaded: &Loaded) -> Result<(), Refusal> {
    if job.choices == 0 || job.choices > CHOICES_MAX {
        return Err(Refusal::invalid("n", format!("n must be between 1 and {CHOICES_MAX}")));
    }
    if job.stop.len() > STOPS_MAX || job.stop.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
        return Err(Refusal::invalid("stop", format!("at most {STOPS_MAX} stop texts of {STOP_BYTES_MAX} bytes each")));
    }
    if job.output.logprobs.is_some_and(|top| top > TOP_LOGPROBS_MAX) {
        let message = format!("at most {TOP_LOGPROBS_MAX} alternatives are told for each token");
        return Err(Refusal::invalid("top_logprobs", message));
    }
    check_sampling(&job.sampling, loaded)
}

fn check_sampling(sampling: &Sampling, loaded: &Loaded) -> Result<(), Refusal> {
    let within = |param: &'static str, value: f32, low: f32, high: f32| {
        if value.is_finite() && (low..=high).contains(&value) {
            Ok(())
        } else {
            Err(Refusal::invalid(param, format!("{param} must be between {low} and {high}")))
        }
    };
    within("temperature", sampling.temperature, 0.0, 100.0)?;
    within("top_p", sampling.top_p, 0.0, 1.0)?;
    within("min_p", sampling.min_p, 0.0, 1.0)?;
    within("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)?;
    within("presence_penalty", sampling.presence_penalty, -2.0, 2.0)?;
    within("repeat_penalty", sampling.repeat_penalty, 0.01, 100.0)?;
    let vocabulary = loaded.model.vocabulary_tokens();
    if sampling.logit_bias.len() > BIASES_MAX {
        return Err(Refusal::invalid("logit_bias", format!("logit_bias has more than {BIASES_MAX} entries")));
    }
    for (token, bias) in &sampling.logit_bias {
        if *token as usize >= vocabulary {
            return Err(Refusal::invalid("logit_bias", format!("token {token} is not among the model's {vocabulary}")));
        }
        within("logit_bias", *bias, -100.0, 100.0)?;
    }
    Ok(())
}

/// The parameter that a grammar comes from.
pub(super) fn grammar_param(output: &Output) -> &'static str {
    match &output.format {
        None => "tools",
        Some(TextFormat::Gbnf { .. }) => "grammar",
        Some(TextFormat::JsonObject | TextFormat::JsonSchema { .. }) => "response_format",
    }
}

fn constraint(loaded: &Loaded, output: &Output) -> Result<Option<Constraint>, Refusal> {
    let grammar = match (&output.format, &output.tools) {
        (Some(format), _) => warmset_grammar::format(format),
        (None, Some(tools)) if may_call(Some(tools)) => warmset_grammar::calls(tools),
        _ => return Ok(None),
    };
    let constrained = grammar.and_then(|grammar| loaded.words()?.vocabulary.constrain(&grammar));
    constrained.map(Some).map_err(|error| Refusal::invalid(grammar_param(output), error.to_string()))
}

fn tokenize(loaded: &Loaded, job: &GenerateJob) -> Result<Vec<Token>, Refusal> {
    let mut tokens = match &job.prompt {
        Prompt::Chat { messages } => chat_tokens(loaded, messages, job.output.tools.as_ref())?,
        Prompt::Text { text } => text_tokens(loaded, text, true, "prompt")?,
        Prompt::Tokens { tokens } => given_tokens(loaded, tokens, "prompt")?,
    };
    if tokens.is_empty() {
        // Something must be computed to get a first token from.
        let begin = loaded.model.begin_token().or(loaded.model.end_token());
        tokens.push(begin.ok_or_else(|| Refusal::invalid("prompt", "the prompt is empty"))?);
    }
    Ok(tokens)
}

fn chat_tokens(loaded: &Loaded, messages: &str, tools: Option<&Tools>) -> Result<Vec<Token>, Refusal> {
    let failed = |error: &TemplateError| match error {
        TemplateError::Messages(words) => Refusal::invalid("messages", words.clone()),
        other => Refusal { kind: FailureKind::Template, message: other.to_string(), param: None },
    };
    let template = loaded.template.as_ref().map_err(failed)?;
    let text = template.render_with_tools(messages, tools).map_err(|error| failed(&error))?;
    let mut tokens = text_tokens(loaded, &text, false, "messages")?;
    // Most templates write the begin token, some leave it to the tokenizer.
    if let Some(begin) = loaded.model.begin_token()
        && loaded.model.adds_begin_token()
        && tokens.first() != Some(&begin)
    {
        tokens.insert(0, begin);
    }
    Ok(tokens)
}

fn text_tokens(loaded: &Loaded, text: &str, add_special: bool, param: &'static str) -> Result<Vec<Token>, Refusal> {
    let context_tokens = loaded.info.context_tokens;
    if text.len() / TOKEN_BYTES_MAX > context_tokens as usize {
        return Err(Refusal {
            kind: FailureKind::ContextExceeded,
            message: format!(
                "the prompt has {} bytes, more than this model's context of {context_tokens} tokens can hold; shorten it",
                text.len()
            ),
            param: Some(param),
        });
    }
    loaded.model.tokenize(text, add_special).map_err(Refusal::internal)
}

fn given_tokens(loaded: &Loaded, tokens: &[u32], param: &'static str) -> Result<Vec<Token>, Refusal> {
    let vocabulary = loaded.model.vocabulary_tokens();
    if let Some(unknown) = tokens.iter().find(|token| **token as usize >= vocabulary) {
        return Err(Refusal::invalid(param, format!("token {unknown} is not among the model's {vocabulary}")));
    }
    Ok(tokens.iter().map(|token| *token as Token).collect())
}

/// Tokens of the inputs of an embedding request, each within the model's context.
pub(super) fn embedding_tokens(loaded: &Loaded, inputs: &[TokensOrText]) -> Result<Vec<Vec<Token>>, Refusal> {
    if inputs.is_empty() || inputs.len() > INPUTS_MAX {
        return Err(Refusal::invalid("input", format!("input must hold 1 to {INPUTS_MAX} texts")));
    }
    let context_tokens = loaded.info.context_tokens;
    inputs
        .iter()
        .map(|input| {
            let tokens = match input {
                TokensOrText::Text(text) => text_tokens(loaded, text, true, "input")?,
                TokensOrText::Tokens(tokens) => given_tokens(loaded, tokens, "input")?,
            };
            if tokens.is_empty() {
                return Err(Refusal::invalid("input", "an input is empty"));
            }
            if tokens.len() > context_tokens as usize {
                let message = format!(
                    "an input has {} tokens, but this model's context holds {context_tokens}; shorten it",
                    tokens.len()
                );
                return Err(Refusal { kind: FailureKind::ContextExceeded, message, param: Some("input") });
            }
            Ok(tokens)
        })
        .collect()
}
