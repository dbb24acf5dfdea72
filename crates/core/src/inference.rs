//! What is asked of a model and what it answers, in the words that gateway, worker and engine share.
#![expect(missing_docs, reason = "the fields of events, actions and replies say by name what they are")]

use crate::{
    ids::{Digest, WorkerId},
    kv::TrustDomain,
    worker::{Rejection, StartKind},
};
use alloc::{boxed::Box, string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// Choices one request may ask for.
pub const CHOICES_MAX: u32 = 16;
/// Alternatives one request may ask to see for each token, as OpenAI's.
pub const TOP_LOGPROBS_MAX: u32 = 20;

/// The work of one request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Work {
    /// Generate text.
    Generate(Box<GenerateJob>),
    /// Compute embeddings, one vector for each input.
    Embed {
        /// What to embed.
        inputs: Vec<TokensOrText>,
    },
}

/// One generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateJob {
    /// What to continue.
    pub prompt: Prompt,
    /// Choices to generate, 1 to [`CHOICES_MAX`].
    pub choices: u32,
    /// Tokens per choice; none fills the context.
    pub max_tokens: Option<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end a choice and are not part of it.
    pub stop: Vec<String>,
    /// Go on past the model's end-of-text token (for measurements).
    #[serde(default)]
    pub ignore_end: bool,
    /// Whether deltas are wanted as they come; without, one delta holds each choice's whole text.
    pub stream: bool,
    /// What the answer may be and what is told of it beside its text.
    #[serde(default)]
    pub output: Output,
    /// Who may share its KV; none shares with nobody. Set by the server.
    #[serde(default)]
    pub kv_domain: Option<TrustDomain>,
}

/// What an answer may be and what is told of it beside its text. The default is free text.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Output {
    /// What the whole text must be; none is free. Never together with tools that may be called.
    pub format: Option<TextFormat>,
    /// Functions the model may call; only with a chat.
    pub tools: Option<Tools>,
    /// Tell the log probability of each token, and of so many alternatives, 0 to [`TOP_LOGPROBS_MAX`].
    pub logprobs: Option<u32>,
}

/// What a text must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TextFormat {
    /// A JSON object.
    JsonObject,
    /// JSON that this JSON schema, itself as JSON text, describes.
    JsonSchema { schema: String },
    /// What the rule `root` of this grammar in llama.cpp's notation (GBNF) derives.
    Gbnf { grammar: String },
}

/// Functions a model may call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tools {
    /// In the caller's order, with names that differ.
    pub functions: Vec<Function>,
    /// Whether and which of them.
    pub choice: ToolChoice,
    /// Whether one answer may hold several calls.
    pub parallel: bool,
}

/// One function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// ASCII letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// For the model to read.
    pub description: Option<String>,
    /// JSON schema of its arguments, itself as JSON text: always that of an object.
    pub parameters: String,
    /// Whether arguments must keep to the schema even where the model itself chooses to call.
    pub strict: bool,
}

/// Whether a model calls functions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToolChoice {
    /// It may know of them and calls none.
    None,
    /// As it sees fit.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Function { name: String },
}

impl GenerateJob {
    /// One choice, greedily, in one piece: the same model gives the same text.
    pub fn greedy(prompt: Prompt, max_tokens: u32) -> Self {
        Self {
            prompt,
            choices: 1,
            max_tokens: Some(max_tokens),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: Vec::new(),
            ignore_end: false,
            stream: false,
            output: Output::default(),
            kv_domain: None,
        }
    }
}

/// What a generation continues.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Prompt {
    /// OpenAI's messages as JSON text (an array), rendered by the model's own template: role, content (text or parts),
    /// name, `tool_calls` of an assistant and `tool_call_id` of a tool as given.
    Chat { messages: String },
    /// Text as it is.
    Text { text: String },
    /// Tokens as they are.
    Tokens { tokens: Vec<u32> },
}

/// One input of an embedding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TokensOrText {
    /// Text to tokenise.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<u32>),
}

/// How tokens are chosen. The defaults are OpenAI's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus; 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 0 is off.
    pub min_p: f32,
    /// OpenAI's frequency penalty, -2 to 2.
    pub frequency_penalty: f32,
    /// OpenAI's presence penalty, -2 to 2.
    pub presence_penalty: f32,
    /// llama.cpp's repetition penalty; 1 is off.
    pub repeat_penalty: f32,
    /// Added to a token's logit.
    pub logit_bias: Vec<(u32, f32)>,
    /// Choice `i` uses `seed + i`; none draws one.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repeat_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it or a stop text came.
    Stop,
    /// The token limit or the context is full.
    Length,
    /// The model called functions.
    ToolCalls,
    /// The caller ended it.
    Cancelled,
}

/// One token and how likely it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// What it stands for. A token may be a part of a character.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability, before any sampling setting.
    pub logprob: f32,
    /// The likeliest tokens at its place, the likeliest first; empty unless asked for.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// Tokens a request used.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated over all choices.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was not computed for this request.
    pub cached_tokens: u32,
}

/// Where a request's time went.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// From the engine's receipt to its first sampled token.
    pub first_token_seconds: f64,
    /// Computing the prompt.
    pub prefill_seconds: f64,
    /// From the first sampled token to the last.
    pub decode_seconds: f64,
}

/// Whose fault a failed request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The request's own values.
    InvalidRequest,
    /// The prompt does not fit the context.
    ContextExceeded,
    /// The model's chat template.
    Template,
    /// The engine.
    Internal,
}

/// What a worker sends back for one request, in order. The last one is `Done`, `Embedded`, `Failed` or `Rejected`;
/// a channel that closes without one means the worker is lost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Reply {
    /// Its place in the queue (1 is next).
    Queued { position: u32 },
    /// Its model is being loaded.
    Loading { fraction: f32 },
    /// An engine began to work on it.
    Started { start: StartKind, worker: WorkerId, digest: Digest },
    /// It gave way to another request, and goes on later where it stopped.
    Parked,
    /// It goes on.
    Resumed,
    /// Tokens of one choice, whose text is in the deltas to come.
    Logprobs { choice: u32, tokens: Vec<TokenLogprob> },
    /// Text of one choice.
    Delta { choice: u32, text: String },
    /// A choice begins its `call`-th call of a function, counted from 0.
    ToolCall { choice: u32, call: u32, name: String },
    /// More of the arguments (JSON text) of a call.
    ToolArguments { choice: u32, call: u32, text: String },
    /// A stop text ended a choice, which is complete next.
    StopText { choice: u32, text: String },
    /// One choice is complete.
    ChoiceDone { choice: u32, finish: FinishReason },
    /// A generation is complete.
    Done { usage: Usage, timings: Timings },
    /// An embedding is complete.
    Embedded { vectors: Vec<Vec<f32>>, prompt_tokens: u32 },
    /// The request itself failed in the engine.
    Failed { kind: FailureKind, message: String, param: Option<String> },
    /// The worker will not run it, or lost it.
    Rejected(Rejection),
}
