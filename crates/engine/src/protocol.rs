//! The messages between a worker and an engine process: versioned, length-prefixed JSON over a socket pair.
//!
//! One request may produce several choices; a choice is generated on a sequence of its own. The engine tokenises
//! (`Prepared`), waits for the worker's word on cached blocks (`Grant`), then computes.
#![expect(missing_docs, reason = "the fields of messages say by name what they are")]

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf};

pub use warmset_core::inference::{
    FailureKind, FinishReason, Function, GenerateJob, Output, Prompt, Sampling, TextFormat, Timings, TokenLogprob,
    TokensOrText, ToolChoice, Tools, Usage,
};
use warmset_core::kv::{BlockKey, KvIdentity, TrustDomain};

/// Grows with every change that an older peer would misread.
pub const PROTOCOL_VERSION: u32 = 5;
/// The largest message either side accepts.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// The most sequences that one engine computes together.
pub const PARALLEL_MAX: u32 = 64;

/// Which implementation serves a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// llama.cpp, for GGUF files.
    Llama,
    /// Declared bytes and times, for tests and demonstrations.
    Synthetic,
    /// A server with OpenAI's routes, started by a command.
    Command,
}

/// What the engine does with requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToEngine {
    /// Load a model. Sent once in the life of a process.
    Load(LoadRequest),
    /// Generate text.
    Generate { request: u64, job: Box<GenerateJob> },
    /// Compute embeddings.
    Embed { request: u64, inputs: Vec<TokensOrText> },
    /// The answer to `Prepared`.
    Grant { request: u64, source: KvGrant },
    /// End a request; answered by `Done` with finish reason `cancelled`, or `Failed`.
    Cancel { request: u64 },
    /// The tier's memory for this model: sent once after `Loaded`, to an engine whose KV can be cut into blocks. Two
    /// descriptors come with it: the arena, for reading, and the staging area, for writing.
    KvOpen(KvOpen),
    /// Blocks for a prompt's first so many tokens are being read: a `Grant` with them comes soon, or without.
    KvComing { tokens: u32 },
    /// The answer to `SaveWanted`: write the state into the staging area, then say `Saved`.
    SaveGo { save: u64 },
    /// The answer to `SaveWanted`: not this time.
    SaveSkip { save: u64 },
    /// The answer to `Saved`: the staging area is the engine's again. Until then the worker reads it, and empties it.
    SaveEnd { save: u64 },
    /// Keep nothing of a trust domain: idle sequences forget it, and requests that run leave nothing behind.
    KvForget { domain: TrustDomain },
    /// Stop computing a request, so that it can leave; answered by `ParkSized` or `ParkRefused`.
    Park { request: u64 },
    /// Put a stopped request into memory of so many bytes, whose descriptor comes with this message, and forget it;
    /// answered by `Parked` or `ParkRefused`.
    ParkTake { request: u64, bytes: u64 },
    /// Compute a stopped request on.
    ParkStop { request: u64 },
    /// Go on with a request that an engine of the same model has put into this memory, whose descriptor comes with this
    /// message.
    Resume { request: u64, bytes: u64 },
    /// Step with this many threads from the next step on; 0 pauses. Answered by `ThreadsHeld`.
    SetThreads { threads: u32 },
    /// Finish nothing more and exit.
    Stop,
}

/// Where the KV of a prompt comes from. `known` is how many blocks from the first on the tier has: they need no saving.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "snake_case")]
pub enum KvGrant {
    /// Compute it, but for what the engine itself holds.
    Recompute { known: u32 },
    /// Blocks lie in these slots of the arena, and stay there until the engine says `Restored`. If they are not the first
    /// ones (`first` above 0), the request computes already: they are taken in when it has come as far as they begin.
    Blocks { first: u32, slots: Vec<u32>, known: u32 },
}

/// The tier's memory for one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvOpen {
    /// What the keys of its blocks begin with.
    pub identity: KvIdentity,
    /// Distance of slots in the arena: a header page, the payload, and room up to the next page.
    pub slot_bytes: u64,
    /// Slots of the arena.
    pub slots: u32,
    /// Bytes of the staging area.
    pub staging_bytes: u64,
    /// Whether each restored sequence is written out again and compared with its blocks.
    #[serde(default)]
    pub verify: bool,
}

/// How a model's KV is cut into blocks.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Everything that shapes the bytes: format, types, sizes, rotation, tokens per block, version of the engine.
    pub description: String,
    /// What is needed to find a block's bytes in a state.
    pub state: StateLayout,
}

/// The parts of a sequence's whole state: a head whose size depends on the number of cells, then for each plane (the
/// keys of layer 0, of layer 1, ..., the values of layer 0, ...) a few bytes and one row for each cell.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateLayout {
    /// Bytes of the head that are always there.
    pub head_bytes: u32,
    /// Bytes of the head for each cell.
    pub head_cell_bytes: u32,
    /// Bytes before the rows of each plane.
    pub plane_head_bytes: u32,
    /// Bytes of one cell's row, for each plane in order.
    pub row_bytes: Vec<u32>,
}

impl StateLayout {
    /// Bytes of the state of a sequence with so many cells.
    pub fn state_bytes(&self, cells: u64) -> u64 {
        let planes = self.row_bytes.len() as u64;
        u64::from(self.head_bytes)
            + cells * u64::from(self.head_cell_bytes)
            + planes * u64::from(self.plane_head_bytes)
            + cells * self.cell_bytes()
    }

    /// Bytes of the rows of one cell.
    pub fn cell_bytes(&self) -> u64 {
        self.row_bytes.iter().map(|bytes| u64::from(*bytes)).sum()
    }
}

/// What to load and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// The implementation.
    pub engine: EngineKind,
    /// The artifact's files, the first one being the one to open. Immutable.
    pub files: Vec<PathBuf>,
    /// Tokens one sequence may hold; 0 takes the model's own limit, at most 4,096.
    pub context_tokens: u32,
    /// Sequences at once.
    pub parallel: u32,
    /// Threads to load and step with at first.
    pub threads: u32,
    /// Accelerators to use, 0 being the first; empty for the processor.
    pub accelerators: Vec<u32>,
    /// The command to start; only for [`EngineKind::Command`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Box<CommandRequest>>,
}

/// What an engine that is a command must know beside its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRequest {
    /// How the server is started.
    pub runtime: Runtime,
    /// The model's name in the catalog: `${NAME}`.
    pub name: String,
    /// What the server knows the model by: `${MODEL}` where there are no files.
    pub model: String,
}

/// How to start a server with OpenAI's routes. Command and environment may hold variables: see `command::variables`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Runtime {
    /// Its name in the configuration.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// All of its environment, but for a minimal `PATH`.
    pub env: BTreeMap<String, String>,
    /// The directory it starts in.
    pub cwd: Option<PathBuf>,
    /// The user it runs as; none keeps the server's own.
    pub user: Option<String>,
    /// What `CUDA_VISIBLE_DEVICES` is; none shows the accelerators that the worker chose.
    pub visible_devices: Option<String>,
    /// The path that answers 200 once it can serve.
    pub health: String,
    /// How long it may take until then.
    pub health_timeout_seconds: u64,
}

/// What the engine reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromEngine {
    /// The process is initialised and can load.
    Hello { protocol_version: u32, build: String, accelerators: Vec<String> },
    /// Share of the weights read, 0 to 1; at most ten a second.
    LoadProgress { fraction: f32 },
    /// The model is loaded and has made its first, discarded computation.
    Loaded(LoadedInfo),
    /// The model cannot be loaded. The process exits.
    LoadFailed { message: String, permanent: bool },
    /// A request is tokenised. `device_tokens` of it the engine holds itself; `keys` are those of its full blocks, but
    /// never of its last token, which is always computed.
    Prepared { request: u64, prompt_tokens: u32, device_tokens: u32, keys: Vec<BlockKey> },
    /// What became of granted blocks: so many were taken in, from one of the prompt's on. Said once for each grant of
    /// blocks, however the request goes on.
    Restored { request: u64, first_block: u32, blocks: u32, seconds: f64 },
    /// A granted block was not what it must be.
    KvRejected { request: u64, block: u32, reason: String },
    /// A restored sequence says the same bytes as so many blocks that it was made of: see [`KvOpen::verify`].
    KvVerified { request: u64, blocks: u32 },
    /// A sequence holds blocks that the tier does not know.
    SaveWanted(SaveWanted),
    /// The state is in the staging area; 0 bytes if the sequence was needed for something else meanwhile. The area is the
    /// worker's from now on, until `SaveEnd`.
    Saved { save: u64, bytes: u64 },
    /// A request is stopped and takes so many bytes.
    ParkSized { request: u64, bytes: u64 },
    /// A request cannot leave. It is computed on, or is over.
    ParkRefused { request: u64 },
    /// A request is in the memory that it was given, and nothing of it is left here.
    Parked { request: u64 },
    /// Tokens of one choice, whose text is in the deltas to come.
    Logprobs { request: u64, choice: u32, tokens: Vec<TokenLogprob> },
    /// Text of one choice.
    Delta { request: u64, choice: u32, text: String },
    /// A choice begins its `call`-th call of a function.
    ToolCall { request: u64, choice: u32, call: u32, name: String },
    /// More of the arguments of a call.
    ToolArguments { request: u64, choice: u32, call: u32, text: String },
    /// A stop text ended a choice.
    StopText { request: u64, choice: u32, text: String },
    /// One choice is complete.
    ChoiceDone { request: u64, choice: u32, finish: FinishReason },
    /// A generation is complete.
    Done { request: u64, usage: Usage, timings: Timings },
    /// An embedding is complete.
    Embedded { request: u64, vectors: Vec<Vec<f32>>, prompt_tokens: u32 },
    /// A request failed; others go on.
    Failed { request: u64, kind: FailureKind, message: String, param: Option<String> },
    /// Steps were made since the last beat; at most four a second.
    Beat,
    /// The engine now steps with this many threads.
    ThreadsHeld { threads: u32 },
}

/// Blocks that an engine offers to the tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveWanted {
    /// The engine's number for it.
    pub save: u64,
    /// The request that computed them.
    pub request: u64,
    /// Whose prompt it is.
    pub domain: TrustDomain,
    /// Place of the first of them in the sequence, in blocks.
    pub first_block: u32,
    /// The key of the block before it, or the root.
    pub parent: BlockKey,
    /// Their keys.
    pub keys: Vec<BlockKey>,
    /// Their tokens.
    pub tokens: Vec<u32>,
    /// Cells of the state that is written, also if the sequence has grown by then.
    pub cells: u32,
}

/// Facts about a loaded model.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadedInfo {
    /// `general.architecture`.
    pub architecture: String,
    /// Tokens one sequence may hold.
    pub context_tokens: u32,
    /// Sequences at once.
    pub parallel: u32,
    /// Length of an embedding.
    pub embedding_length: u32,
    /// Whether it has a chat template.
    pub has_chat_template: bool,
    /// Whether it can generate (embedding-only models cannot).
    pub generates: bool,
    /// KV bytes per token, from the model's shape.
    pub kv_bytes_per_token: u64,
    /// How its KV is cut into blocks; none if it cannot be.
    #[serde(default)]
    pub kv: Option<KvLayout>,
    /// Bytes it holds on each accelerator, in the order of `LoadRequest::accelerators`.
    pub accelerator_bytes: Vec<u64>,
    /// Host bytes to count instead of measured ones, once loaded and at the peak of the load: only from engines that
    /// declare memory without taking it.
    #[serde(default)]
    pub declared_host_bytes: Option<DeclaredHostBytes>,
    /// Seconds to read the weights and set up the context.
    pub load_seconds: f64,
    /// Seconds of the first, discarded computation.
    pub warm_up_seconds: f64,
}

/// Host bytes an engine declares without taking them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclaredHostBytes {
    /// Once loaded.
    pub steady_bytes: u64,
    /// While loading.
    pub peak_bytes: u64,
}

/// The file that a synthetic model is: JSON with declared bytes, times and failures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SyntheticSpec {
    /// Host bytes held once loaded. Really allocated and touched up to `allocate_bytes_max`.
    pub host_bytes: u64,
    /// Extra host bytes held only while loading.
    pub load_extra_bytes: u64,
    /// Bytes declared on accelerators, one number for each.
    pub accelerator_bytes: Vec<u64>,
    /// Whether host bytes are really allocated and touched, or only declared.
    pub allocate: bool,
    /// Seconds a load takes.
    pub load_seconds: f64,
    /// Seconds per prompt token.
    pub prefill_seconds_per_token: f64,
    /// Seconds per generated token (one step for all sequences).
    pub decode_seconds_per_token: f64,
    /// Bytes of KV per token, which are really written and read where blocks are kept; 0 for a model without.
    pub kv_bytes_per_token: u64,
    /// What goes wrong.
    pub failure: SyntheticFailure,
}

/// The most bytes that a synthetic model declares of one kind: beyond any machine, and far from where sums overflow.
pub const SYNTHETIC_DECLARED_BYTES_MAX: u64 = 1 << 50;

/// The most bytes of KV per token that it declares: more than any model has in one layer.
pub const SYNTHETIC_TOKEN_BYTES_MAX: u64 = 1 << 24;

impl SyntheticSpec {
    /// Reads a description; the error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let spec: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let declared = spec.accelerator_bytes.iter().chain([&spec.host_bytes, &spec.load_extra_bytes]);
        if declared.max().is_some_and(|bytes| *bytes > SYNTHETIC_DECLARED_BYTES_MAX) {
            return Err(format!("it declares more than {SYNTHETIC_DECLARED_BYTES_MAX} bytes"));
        }
        if spec.kv_bytes_per_token > SYNTHETIC_TOKEN_BYTES_MAX {
            return Err(format!("it declares more than {SYNTHETIC_TOKEN_BYTES_MAX} bytes of KV per token"));
        }
        Ok(spec)
    }
}

impl Default for SyntheticSpec {
    fn default() -> Self {
        Self {
            host_bytes: 1 << 20,
            load_extra_bytes: 0,
            accelerator_bytes: Vec::new(),
            allocate: false,
            load_seconds: 0.0,
            prefill_seconds_per_token: 0.0,
            decode_seconds_per_token: 0.0,
            kv_bytes_per_token: 0,
            failure: SyntheticFailure::None,
        }
    }
}

/// What goes wrong in a synthetic engine.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyntheticFailure {
    /// Nothing.
    #[default]
    None,
    /// `LoadFailed`, permanent.
    LoadFails,
    /// `LoadFailed`, not permanent.
    LoadFailsForNow,
    /// The load never ends.
    LoadHangs,
    /// The process aborts while loading.
    LoadCrashes,
    /// The process aborts after the third token of a request.
    GenerateCrashes,
    /// No step after the third token of a request.
    GenerateHangs,
    /// `Stop` is ignored.
    IgnoresStop,
    /// Memory grows without bound once a request runs.
    EatsMemory,
}
