//! How much memory a model will take, before it was ever loaded. Measurements replace this after the first load.

use super::Header;
use warmset_core::memory::Footprint;

/// Tokens computed at once, as the llama engine sets it.
const BATCH_TOKENS: u64 = 512;
/// An engine process before it has loaded anything, its code included.
const PROCESS_BYTES: u64 = 10 << 20;
/// Tokenizer tables per token of vocabulary (text, hash tables, merges): measured 17 MiB for 49,152 tokens.
const VOCABULARY_BYTES_PER_TOKEN: u64 = 380;
/// Buffers of fixed size: graph, scheduler, threads.
const FIXED_BYTES: u64 = 8 << 20;
/// llama.cpp rounds contexts up to this many cells.
const CONTEXT_CELLS_MULTIPLE: u64 = 256;

/// Memory a model is expected to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Estimate {
    /// Once loaded and used.
    pub steady: Footprint,
    /// At most while loading.
    pub peak: Footprint,
}

/// Estimates host memory for `parallel` sequences of `context_tokens` each, everything on the processor. File pages
/// are shared between processes that map the same file; the rest is the process's own.
pub fn estimate(header: &Header, context_tokens: u32, parallel: u32) -> Estimate {
    let parallel = u64::from(parallel.max(1));
    let context = u64::from(context_tokens.max(1)).next_multiple_of(CONTEXT_CELLS_MULTIPLE);
    let cache = header.kv_bytes_per_token().saturating_mul(context).saturating_mul(parallel);
    let vocabulary = header.vocabulary_tokens.saturating_mul(VOCABULARY_BYTES_PER_TOKEN);
    let logits = header.vocabulary_tokens.saturating_mul(4 * parallel);
    // Activations of one batch: a few rows of each width live at once, and the attention mask.
    let row = 8 * u64::from(header.embedding_length) + 3 * u64::from(header.feed_forward_length);
    let compute = BATCH_TOKENS * (4 * row + 6 * context);
    let private = [PROCESS_BYTES, FIXED_BYTES, cache, vocabulary, logits, compute, header.repacked_bytes]
        .into_iter()
        .fold(0u64, u64::saturating_add);
    let steady =
        Footprint { private_host_bytes: private, shared_host_bytes: header.file_bytes, accelerator_bytes: Vec::new() };
    // Weights are mapped, not copied, so that loading takes nothing that does not stay.
    Estimate { peak: steady.clone(), steady }
}
