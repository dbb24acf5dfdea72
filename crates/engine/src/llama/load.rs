//! Loading: check the header, read ahead, map, make a context, compute once.

use super::{
    context::{BATCH_TOKENS_MAX, Batch, Context, ContextOptions},
    embed::CHUNK_TOKENS,
    prefetch::ReadAhead,
    state,
    sys::{self, Accelerator, Model, Token},
};
use crate::{
    gguf::{self, Header},
    kv::Template,
    port::{LoadFailure, LoadFault, Report},
    protocol::{FromEngine, KvLayout, LoadRequest, LoadedInfo, PARALLEL_MAX},
    template::{CHATML, ChatTemplate, TemplateError},
};
use std::{
    cell::OnceCell,
    rc::Rc,
    time::{Duration, Instant},
};
use warmset_grammar::{CALL_BEGIN, CALL_END, GrammarError, Vocabulary};

/// Tokens per sequence where nobody says how many.
const CONTEXT_TOKENS_DEFAULT: u32 = 4096;
/// Progress is reported at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// The share of progress that reading a file ahead stands for, if it is not in memory yet.
const READ_AHEAD_SHARE: f32 = 0.9;
/// Tokens of the first, discarded computation.
const WARM_UP_TOKENS: usize = state::TEST_TOKENS;
/// Token embeddings that llama.cpp pools by a score instead of a vector.
const POOLING_RANK: u32 = 4;

/// A model that is ready to answer.
pub(super) struct Loaded {
    pub(super) model: Rc<Model>,
    pub(super) context: Context,
    pub(super) template: Result<ChatTemplate, TemplateError>,
    pub(super) info: LoadedInfo,
    /// Whether one batch must hold whole inputs: the model pools them by itself.
    pub(super) pools: bool,
    /// What states are made with; none if they cannot be cut into blocks.
    pub(super) states: Option<Template>,
    /// Prepared by the first request that is held to a grammar.
    words: OnceCell<Result<Words, GrammarError>>,
}

/// The vocabulary as grammars see it.
pub(super) struct Words {
    pub(super) vocabulary: Vocabulary,
    /// Tokens that are hidden elsewhere, and mark calls of functions in models that were made for them.
    marks: Vec<Token>,
}

impl Loaded {
    pub(super) fn words(&self) -> Result<&Words, GrammarError> {
        self.words.get_or_init(|| Words::of(&self.model)).as_ref().map_err(Clone::clone)
    }
}

impl Words {
    fn of(model: &Model) -> Result<Self, GrammarError> {
        let count = model.vocabulary_tokens();
        let (mut tokens, mut ends, mut marks) = (Vec::with_capacity(count), Vec::new(), Vec::new());
        for token in 0..count as Token {
            let mut bytes = Vec::new();
            if model.is_end(token) {
                ends.push(token as u32);
            } else {
                model.append_piece(token, false, &mut bytes);
                if bytes.is_empty() {
                    let text = model.text_of(Some(token));
                    if text == CALL_BEGIN || CALL_END.ends_with(&text) && text.starts_with('<') {
                        marks.push(token);
                        bytes = text.into_bytes();
                    }
                }
            }
            tokens.push(bytes);
        }
        Ok(Self { vocabulary: Vocabulary::new(&tokens, &ends)?, marks })
    }

    /// Whether a token marks a call though it is hidden elsewhere.
    pub(super) fn is_mark(&self, token: Token) -> bool {
        self.marks.contains(&token)
    }
}

fn permanent(message: String) -> LoadFailure {
    LoadFailure { message, fault: LoadFault::Artifact }
}

/// Loads as asked. Everything that is the file's fault is permanent; a lack of memory is not.
pub(super) fn load(request: &LoadRequest, report: Report<'_>) -> Result<Loaded, LoadFailure> {
    let begin = Instant::now();
    let header = gguf::read_header_of_files(&request.files).map_err(|error| LoadFailure {
        fault: LoadFault::from_permanent(error.is_permanent()),
        message: error.to_string(),
    })?;
    let accelerators = chosen_accelerators(&request.accelerators)?;
    let free_before: Vec<u64> = accelerators.iter().map(Accelerator::free_bytes).collect();

    let mut progress = Progress { report, last: None };
    let read_ahead = ReadAhead::begin(&request.files);
    read_ahead.wait(&mut |share| progress.tell(share * READ_AHEAD_SHARE));
    let model = Model::load(&request.files, &accelerators, &mut |fraction| {
        progress.tell(fraction);
        true
    });
    drop(read_ahead);
    let model = Rc::new(model.map_err(|message| load_failure(&message))?);
    let options = context_options(&model, &header, request)?;
    let mut context = Context::new(&model, &options).map_err(|message| load_failure(&message))?;
    let load_seconds = begin.elapsed().as_secs_f64();

    let pools = header.is_embedding_model();
    let warm_up_begin = Instant::now();
    warm_up(&model, &mut context, pools)?;
    let (states, kv) = probe_states(&model, &mut context, &header, &accelerators).unzip();
    context.clear();
    let accelerator_bytes = accelerators
        .iter()
        .zip(free_before)
        .map(|(accelerator, before)| before.saturating_sub(accelerator.free_bytes()))
        .collect();
    let info = LoadedInfo {
        architecture: header.architecture.clone(),
        context_tokens: options.context_tokens,
        parallel: options.sequences,
        embedding_length: model.embedding_length() as u32,
        has_chat_template: header.chat_template.is_some(),
        generates: !pools,
        kv_bytes_per_token: header.kv_bytes_per_token(),
        kv,
        accelerator_bytes,
        declared_host_bytes: None,
        load_seconds,
        warm_up_seconds: warm_up_begin.elapsed().as_secs_f64(),
    };
    let template = chat_template(&model, &header);
    Ok(Loaded { model, context, template, info, pools, states, words: OnceCell::new() })
}

fn chosen_accelerators(indices: &[u32]) -> Result<Vec<Accelerator>, LoadFailure> {
    let mut all: Vec<Option<Accelerator>> = sys::accelerators().into_iter().map(Some).collect();
    let found = all.len();
    indices
        .iter()
        .map(|index| {
            all.get_mut(*index as usize).and_then(Option::take).ok_or_else(|| {
                permanent(format!(
                    "accelerator {index} was asked for, but this engine sees {found}; check the worker's devices"
                ))
            })
        })
        .collect()
}

fn context_options(model: &Model, header: &Header, request: &LoadRequest) -> Result<ContextOptions, LoadFailure> {
    if model.is_encoder_decoder() {
        return Err(permanent(format!(
            "models of the architecture {:?} (encoder and decoder) are not supported",
            header.architecture
        )));
    }
    if header.pooling_type == Some(POOLING_RANK) {
        return Err(permanent("this model scores pairs of texts (a reranker), which is not supported".into()));
    }
    if request.parallel > PARALLEL_MAX {
        return Err(permanent(format!(
            "parallel is {}, but at most {PARALLEL_MAX} sequences are possible",
            request.parallel
        )));
    }
    let own_limit = model.context_tokens().max(1);
    let wanted = if request.context_tokens == 0 { CONTEXT_TOKENS_DEFAULT } else { request.context_tokens };
    let context_tokens = wanted.min(own_limit);
    let sequences = request.parallel.max(1);
    let embeddings = header.is_embedding_model();
    // A model that pools by itself must see an input whole.
    let batch_tokens = if embeddings { context_tokens } else { BATCH_TOKENS_MAX };
    Ok(ContextOptions {
        context_tokens,
        sequences,
        threads: request.threads,
        batch_tokens,
        outputs: if embeddings { batch_tokens } else { sequences.max(CHUNK_TOKENS) },
        embeddings,
    })
}

/// Computes a few tokens, which are to be forgotten: the first real request finds threads, buffers and code in place. Weights
/// that give no finite logits show here, before anybody asks.
fn warm_up(model: &Model, context: &mut Context, pools: bool) -> Result<(), LoadFailure> {
    let token = model.begin_token().or(model.end_token()).unwrap_or(0);
    let mut batch = Batch::default();
    for position in 0..WARM_UP_TOKENS {
        batch.add(token, position, 0, pools || position + 1 == WARM_UP_TOKENS);
    }
    context.decode(&mut batch).map_err(|message| load_failure(&message))?;
    let last = WARM_UP_TOKENS - 1;
    let finite = |numbers: &[f32]| numbers.iter().all(|number| number.is_finite());
    if !pools && !context.logits(last).is_some_and(finite) {
        return Err(permanent(
            "the model computes no finite numbers: its weights are damaged; get the file again".into(),
        ));
    }
    Ok(())
}

/// How states are cut, for models that generate. Without, KV is not kept outside of the engine, and its log says why.
fn probe_states(
    model: &Model,
    context: &mut Context,
    header: &Header,
    accelerators: &[Accelerator],
) -> Option<(Template, KvLayout)> {
    if header.is_embedding_model() {
        return None;
    }
    let names: Vec<String> = accelerators.iter().map(Accelerator::name).collect();
    match state::probe(model, context, &header.architecture, &names) {
        Ok(found) => Some(found),
        Err(reason) => {
            crate::child::log(&format!("KV stays in the engine, since its state cannot be cut: {reason}"));
            None
        }
    }
}

/// The model's own template, or ChatML. A broken template does not keep the model from completing plain text.
fn chat_template(model: &Model, header: &Header) -> Result<ChatTemplate, TemplateError> {
    let source = header.chat_template.as_deref().unwrap_or(CHATML);
    ChatTemplate::new(source, &model.text_of(model.begin_token()), &model.text_of(model.end_token()))
}

/// Tells a lack of memory from a file that will never load.
fn load_failure(message: &str) -> LoadFailure {
    const MEMORY_WORDS: [&str; 5] = ["alloc", "memory", "mmap", "mlock", "no space"];
    let lower = message.to_lowercase();
    let message = format!("llama.cpp: {message}");
    let fault =
        if MEMORY_WORDS.iter().any(|word| lower.contains(word)) { LoadFault::Memory } else { LoadFault::Artifact };
    LoadFailure { fault, message }
}

struct Progress<'a> {
    report: Report<'a>,
    last: Option<(Instant, f32)>,
}

impl Progress<'_> {
    fn tell(&mut self, fraction: f32) {
        let now = Instant::now();
        let due = self.last.is_none_or(|(when, before)| now - when >= PROGRESS_INTERVAL && fraction > before);
        if due {
            self.last = Some((now, fraction));
            (self.report)(FromEngine::LoadProgress { fraction: fraction.clamp(0.0, 1.0) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_never_goes_back_and_is_not_told_more_than_ten_times_a_second() {
        let mut told = Vec::new();
        let mut report = |message| told.push(message);
        let mut progress = Progress { report: &mut report, last: None };
        progress.tell(0.0);
        // As if no time passed, however long a busy machine takes for what follows.
        progress.last = progress.last.map(|(when, fraction)| (when + Duration::from_secs(3600), fraction));
        for step in 1..1000u16 {
            progress.tell(f32::from(step) / 1000.0);
        }
        progress.last = Some((Instant::now() - PROGRESS_INTERVAL, 0.9));
        progress.tell(0.5);
        progress.tell(1.5);
        assert_eq!(told, [FromEngine::LoadProgress { fraction: 0.0 }, FromEngine::LoadProgress { fraction: 1.0 }]);
    }

    #[test]
    fn a_lack_of_memory_is_not_the_files_fault() {
        assert_eq!(load_failure("failed to allocate buffer").fault, LoadFault::Memory);
        assert_eq!(load_failure("unknown model architecture: 'x'").fault, LoadFault::Artifact);
    }
}
