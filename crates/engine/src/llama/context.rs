//! Contexts and batches of llama.cpp, safe to use: nothing here can run into an assertion of the C++ code, which
//! would end the process.

#![expect(unsafe_code, reason = "the C interface of llama.cpp")]

use super::sys::{Model, Token, complaint};
use llama_cpp_sys_2 as c;
use std::{ptr::NonNull, rc::Rc, slice};

/// Tokens computed at once.
pub(super) const BATCH_TOKENS_MAX: u32 = 512;

/// How a context is made.
pub(super) struct ContextOptions {
    /// Tokens per sequence.
    pub(super) context_tokens: u32,
    /// Sequences.
    pub(super) sequences: u32,
    /// Threads to begin with.
    pub(super) threads: u32,
    /// Tokens computed at once.
    pub(super) batch_tokens: u32,
    /// Rows of output at once.
    pub(super) outputs: u32,
    /// Whether it gives embeddings from the beginning.
    pub(super) embeddings: bool,
}

/// Working memory for one model: the KV of some sequences and the buffers of one batch.
pub(super) struct Context {
    pointer: NonNull<c::llama_context>,
    model: Rc<Model>,
    batch_tokens: u32,
    outputs: u32,
    sequences: u32,
    embeddings: bool,
    /// Sequences that are copied, from and to, when the next batch is computed: llama.cpp does it only then.
    copies: Vec<(i32, i32)>,
}

impl Context {
    pub(super) fn new(model: &Rc<Model>, options: &ContextOptions) -> Result<Self, String> {
        let cells = u64::from(options.context_tokens) * u64::from(options.sequences);
        let cells = u32::try_from(cells).map_err(|_| "context_tokens times parallel is too large".to_owned())?;
        let threads = options.threads.max(1) as i32;
        // SAFETY: parameters are plain data; the model is valid and held alive by the context.
        let pointer = unsafe {
            let mut parameters = c::llama_context_default_params();
            parameters.n_ctx = cells;
            parameters.n_batch = options.batch_tokens;
            parameters.n_ubatch = options.batch_tokens;
            parameters.n_seq_max = options.sequences;
            parameters.n_outputs_max = options.outputs;
            parameters.n_threads = threads;
            parameters.n_threads_batch = threads;
            parameters.flash_attn_type = c::LLAMA_FLASH_ATTN_TYPE_ENABLED;
            parameters.kv_unified = false;
            parameters.embeddings = options.embeddings;
            parameters.no_perf = true;
            c::llama_init_from_model(model.pointer(), parameters)
        };
        let pointer = NonNull::new(pointer).ok_or_else(|| complaint("llama.cpp cannot create a context"))?;
        // SAFETY: the context is valid.
        let (batch_tokens, sequences) =
            unsafe { (c::llama_n_batch(pointer.as_ptr()), c::llama_n_seq_max(pointer.as_ptr())) };
        let (outputs, embeddings) = (options.outputs, options.embeddings);
        let model = Rc::clone(model);
        Ok(Self { pointer, model, batch_tokens, outputs, sequences, embeddings, copies: Vec::new() })
    }

    pub(super) fn raw(&self) -> *mut c::llama_context {
        self.pointer.as_ptr()
    }

    pub(super) fn sequences(&self) -> u32 {
        self.sequences
    }

    pub(super) fn has_sequence(&self, sequence: i32) -> bool {
        sequence >= 0 && sequence < self.sequences as i32
    }

    /// Whether a copy from or to a sequence is still to be made, so that its state is not there or must stay.
    pub(super) fn is_unsettled(&self, sequence: i32) -> bool {
        self.copies.iter().any(|(from, to)| *from == sequence || *to == sequence)
    }

    /// Uses this many threads (at least one) from the next batch on.
    pub(super) fn set_threads(&mut self, threads: u32) {
        let threads = threads.max(1) as i32;
        // SAFETY: the context is valid, and no batch is being computed since that needs `&mut self`.
        unsafe { c::llama_set_n_threads(self.raw(), threads, threads) };
    }

    /// Threads that batches are computed with.
    pub(super) fn threads(&self) -> usize {
        // SAFETY: the context is valid.
        unsafe { c::llama_n_threads(self.raw()) }.max(1) as usize
    }

    /// Whether the next batches give embeddings for all of their tokens.
    pub(super) fn set_embeddings(&mut self, embeddings: bool) {
        if self.embeddings != embeddings {
            self.embeddings = embeddings;
            // SAFETY: as above.
            unsafe { c::llama_set_embeddings(self.raw(), embeddings) };
        }
    }

    /// Computes a batch. On failure nothing of it is left in the context.
    pub(super) fn decode(&mut self, batch: &mut Batch) -> Result<(), String> {
        let tokens = batch.tokens.len();
        if tokens == 0 || tokens > self.batch_tokens as usize {
            return Err(format!("a batch of {tokens} tokens was made, 1 to {} are possible", self.batch_tokens));
        }
        let outputs = batch.outputs.iter().filter(|wanted| **wanted != 0).count();
        if outputs > self.outputs as usize || (self.embeddings && outputs != tokens) {
            return Err(format!("a batch with {outputs} outputs was made, {} are possible", self.outputs));
        }
        if !batch.sequences.iter().all(|sequence| self.has_sequence(*sequence)) {
            return Err("a batch for a sequence that does not exist was made".into());
        }
        batch.sequence_pointers.clear();
        let base = batch.sequences.as_mut_ptr();
        // SAFETY: each pointer is to an element of `sequences`, which is not changed before the call ends.
        batch.sequence_pointers.extend((0..tokens).map(|index| unsafe { base.add(index) }));
        batch.sequence_counts.resize(tokens, 1);
        let raw = c::llama_batch {
            n_tokens: tokens as i32,
            token: batch.tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: batch.positions.as_mut_ptr(),
            n_seq_id: batch.sequence_counts.as_mut_ptr(),
            seq_id: batch.sequence_pointers.as_mut_ptr(),
            logits: batch.outputs.as_mut_ptr(),
        };
        // SAFETY: all arrays have `tokens` elements and outlive the call; sizes are within the context's limits;
        // llama.cpp checks token numbers and positions and answers with an error.
        match unsafe { c::llama_decode(self.raw(), raw) } {
            0 => {
                self.copies.clear();
                Ok(())
            }
            1 => Err("the context is full".into()),
            code => Err(complaint(&format!("llama.cpp failed with code {code}"))),
        }
    }

    /// The logits of the batch's token at `index`, one for each token of the vocabulary.
    pub(super) fn logits(&self, index: usize) -> Option<&[f32]> {
        // SAFETY: the context is valid; llama.cpp answers null for a row that was not asked for, else a row of as many
        // numbers as the vocabulary has tokens, valid until the next batch (which needs `&mut self`).
        unsafe {
            let row = c::llama_get_logits_ith(self.raw(), index as i32);
            NonNull::new(row).map(|row| slice::from_raw_parts(row.as_ptr(), self.model.vocabulary_tokens()))
        }
    }

    /// The embedding of the batch's token at `index`.
    pub(super) fn token_embedding(&self, index: usize) -> Option<&[f32]> {
        // SAFETY: as for logits, with rows of the embedding's length.
        unsafe {
            let row = c::llama_get_embeddings_ith(self.raw(), index as i32);
            NonNull::new(row).map(|row| slice::from_raw_parts(row.as_ptr(), self.model.embedding_length()))
        }
    }

    /// The embedding that the model itself made of a whole sequence of the last batch.
    pub(super) fn sequence_embedding(&self, sequence: i32) -> Option<&[f32]> {
        // Rank models give another number of values, and are refused before.
        // SAFETY: as for logits, with rows of the embedding's length.
        unsafe {
            let row = c::llama_get_embeddings_seq(self.raw(), sequence);
            NonNull::new(row).map(|row| slice::from_raw_parts(row.as_ptr(), self.model.embedding_length()))
        }
    }

    /// Forgets a sequence from a position on. False if the model's state cannot be cut there.
    pub(super) fn forget(&mut self, sequence: i32, from: usize) -> bool {
        if !self.has_sequence(sequence) {
            return false;
        }
        // SAFETY: the context is valid (models without memory give null, which is checked), the sequence exists.
        unsafe {
            let memory = c::llama_get_memory(self.raw());
            memory.is_null() || c::llama_memory_seq_rm(memory, sequence, from as i32, -1)
        }
    }

    /// Makes `to` a copy of the whole of `from`.
    pub(super) fn copy(&mut self, from: i32, to: i32) {
        if from == to || !self.has_sequence(from) || !self.has_sequence(to) {
            return;
        }
        // SAFETY: the context is valid, both sequences exist, and whole sequences may be copied in every kind of memory.
        unsafe {
            let memory = c::llama_get_memory(self.raw());
            if !memory.is_null() {
                c::llama_memory_seq_cp(memory, from, to, -1, -1);
                self.copies.push((from, to));
            }
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        // SAFETY: as above.
        unsafe {
            let memory = c::llama_get_memory(self.raw());
            if !memory.is_null() {
                c::llama_memory_clear(memory, false);
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the pointer is valid and not used again; the model is still alive.
        unsafe { c::llama_free(self.raw()) };
    }
}

/// Tokens to compute together.
#[derive(Default)]
pub(super) struct Batch {
    tokens: Vec<Token>,
    positions: Vec<i32>,
    sequences: Vec<i32>,
    outputs: Vec<i8>,
    sequence_counts: Vec<i32>,
    sequence_pointers: Vec<*mut i32>,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.sequences.clear();
        self.outputs.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Adds a token and gives its index for [`Context::logits`].
    pub(super) fn add(&mut self, token: Token, position: usize, sequence: usize, output: bool) -> usize {
        self.tokens.push(token);
        self.positions.push(position as i32);
        self.sequences.push(sequence as i32);
        self.outputs.push(i8::from(output));
        self.tokens.len() - 1
    }
}
