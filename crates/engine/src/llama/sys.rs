//! The model side of llama.cpp's C interface: backend, log, devices, model, vocabulary. Safe to call from outside.

#![expect(unsafe_code, reason = "the C interface of llama.cpp")]

use llama_cpp_sys_2 as c;
use std::{
    ffi::{CStr, CString, c_char, c_void},
    io::Write,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::{Mutex, Once, PoisonError},
};

/// A token as llama.cpp numbers it.
pub(super) type Token = c::llama_token;

/// The longest remembered complaint of llama.cpp.
const COMPLAINT_BYTES_MAX: usize = 400;
/// The longest text of a single token that is read.
const PIECE_BYTES: usize = 256;

static START: Once = Once::new();
static LAST_COMPLAINT: Mutex<String> = Mutex::new(String::new());

/// Starts llama.cpp once per process; it stays until the process ends.
pub(super) fn start() {
    START.call_once(|| {
        // SAFETY: called once, before anything else of llama.cpp; the callback lives as long as the program and takes
        // no user data.
        unsafe {
            c::llama_log_set(Some(log), ptr::null_mut());
            c::llama_backend_init();
        }
    });
}

/// Warnings and errors go to standard error; the last error is kept for the message of a failed load.
unsafe extern "C" fn log(level: c::ggml_log_level, words: *const c_char, _: *mut c_void) {
    if level < c::GGML_LOG_LEVEL_WARN || level == c::GGML_LOG_LEVEL_CONT || words.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a terminated string that lives for this call.
    let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
    // Nothing can be done about a closed standard error.
    let _ = std::io::stderr().write_all(words.as_bytes());
    if level == c::GGML_LOG_LEVEL_ERROR {
        let mut last = LAST_COMPLAINT.lock().unwrap_or_else(PoisonError::into_inner);
        // The first complaint names the cause; the ones behind it only say that things failed.
        if last.is_empty() {
            *last = words.trim().chars().take(COMPLAINT_BYTES_MAX).collect();
        }
    }
}

fn forget_complaint() {
    LAST_COMPLAINT.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// What llama.cpp complained about since the last attempt began, or a sentence of our own.
pub(super) fn complaint(otherwise: &str) -> String {
    let last = LAST_COMPLAINT.lock().unwrap_or_else(PoisonError::into_inner);
    if last.is_empty() { otherwise.to_owned() } else { last.clone() }
}

/// Version of llama.cpp.
pub(super) fn version() -> String {
    // SAFETY: it returns a static string.
    let version = unsafe { CStr::from_ptr(c::llama_version()) };
    format!("llama.cpp {}", version.to_string_lossy())
}

/// Version of llama.cpp and the processor features it uses.
pub(super) fn build() -> String {
    start();
    // SAFETY: it returns an internal string that stays valid until the next call, and is copied at once.
    let system = unsafe { CStr::from_ptr(c::llama_print_system_info()) };
    format!("{}, {}", version(), system.to_string_lossy().trim())
}

/// The accelerators of this machine that llama.cpp was built for.
pub(super) fn accelerators() -> Vec<Accelerator> {
    start();
    // SAFETY: indices below the count are valid, and devices live until the program ends.
    unsafe {
        (0..c::ggml_backend_dev_count())
            .map(|index| c::ggml_backend_dev_get(index))
            .filter(|device| {
                matches!(
                    c::ggml_backend_dev_type(*device),
                    c::GGML_BACKEND_DEVICE_TYPE_GPU | c::GGML_BACKEND_DEVICE_TYPE_IGPU
                )
            })
            .map(|device| Accelerator { device })
            .collect()
    }
}

/// One accelerator.
pub(super) struct Accelerator {
    device: c::ggml_backend_dev_t,
}

impl Accelerator {
    pub(super) fn name(&self) -> String {
        // SAFETY: devices live until the program ends, and so do their descriptions.
        unsafe { CStr::from_ptr(c::ggml_backend_dev_description(self.device)) }.to_string_lossy().into_owned()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is valid and both places are written before the call returns.
        unsafe { c::ggml_backend_dev_memory(self.device, &raw mut free, &raw mut total) };
        free as u64
    }
}

/// What llama.cpp is asked to report while it loads: a fraction in, whether to go on out.
type Progress<'a> = &'a mut dyn FnMut(f32) -> bool;

unsafe extern "C" fn progress(fraction: f32, user: *mut c_void) -> bool {
    // SAFETY: `user` is the `&mut Progress` that `Model::load` passed, which outlives the load it belongs to, and
    // llama.cpp calls from the loading thread only.
    let report = unsafe { &mut *user.cast::<Progress<'_>>() };
    report(fraction)
}

/// A loaded model. It may be used from any thread, by one at a time here.
pub(super) struct Model {
    pointer: NonNull<c::llama_model>,
    vocabulary: NonNull<c::llama_vocab>,
}

impl Model {
    /// Maps and loads a model. On failure the text says why.
    pub(super) fn load(
        paths: &[PathBuf],
        accelerators: &[Accelerator],
        mut report: Progress<'_>,
    ) -> Result<Self, String> {
        start();
        forget_complaint();
        let paths = paths.iter().map(|path| c_path(path)).collect::<Result<Vec<_>, _>>()?;
        let mut pointers: Vec<*const c_char> = paths.iter().map(|path| path.as_ptr()).collect();
        let mut devices: Vec<c::ggml_backend_dev_t> = accelerators.iter().map(|one| one.device).collect();
        devices.push(ptr::null_mut());
        // SAFETY: parameters are plain data; all pointers in them outlive the call that uses them.
        let pointer = unsafe {
            let mut parameters = c::llama_model_default_params();
            parameters.devices = devices.as_mut_ptr();
            parameters.n_gpu_layers = if accelerators.is_empty() { 0 } else { -1 };
            parameters.load_mode = c::LLAMA_LOAD_MODE_MMAP;
            parameters.progress_callback = Some(progress);
            parameters.progress_callback_user_data = (&raw mut report).cast();
            match pointers.as_mut_slice() {
                [single] => c::llama_model_load_from_file(*single, parameters),
                several => c::llama_model_load_from_splits(several.as_mut_ptr(), several.len(), parameters),
            }
        };
        let pointer = NonNull::new(pointer).ok_or_else(|| complaint("llama.cpp cannot load this model"))?;
        // SAFETY: the model is valid; its vocabulary lives as long as it does.
        let vocabulary = unsafe { c::llama_model_get_vocab(pointer.as_ptr()) };
        let vocabulary = NonNull::new(vocabulary.cast_mut()).ok_or("the model has no vocabulary")?;
        Ok(Self { pointer, vocabulary })
    }

    pub(super) fn pointer(&self) -> *mut c::llama_model {
        self.pointer.as_ptr()
    }

    fn vocabulary(&self) -> *const c::llama_vocab {
        self.vocabulary.as_ptr()
    }

    /// Tokens in the vocabulary.
    pub(super) fn vocabulary_tokens(&self) -> usize {
        // SAFETY: the vocabulary is valid.
        unsafe { c::llama_vocab_n_tokens(self.vocabulary()) }.max(0) as usize
    }

    /// Length of an embedding as it leaves the model.
    pub(super) fn embedding_length(&self) -> usize {
        // SAFETY: the model is valid.
        unsafe { c::llama_model_n_embd_out(self.pointer()) }.max(0) as usize
    }

    /// Tokens of context the model was made for.
    pub(super) fn context_tokens(&self) -> u32 {
        // SAFETY: the model is valid.
        unsafe { c::llama_model_n_ctx_train(self.pointer()) }.max(0) as u32
    }

    /// Whether it has an encoder that its decoder needs (T5 and its kind).
    pub(super) fn is_encoder_decoder(&self) -> bool {
        // SAFETY: the model is valid.
        unsafe { c::llama_model_has_encoder(self.pointer()) && c::llama_model_has_decoder(self.pointer()) }
    }

    /// Whether a sequence can be cut back to any earlier length: not with recurrent state or a sliding window.
    pub(super) fn can_rewind(&self) -> bool {
        // SAFETY: the model is valid.
        unsafe {
            !c::llama_model_is_recurrent(self.pointer())
                && !c::llama_model_is_hybrid(self.pointer())
                && c::llama_model_n_swa(self.pointer()) == 0
        }
    }

    /// Whether a token has more than one position, as in models that see pictures.
    pub(super) fn has_several_positions(&self) -> bool {
        // SAFETY: the model is valid.
        let kind = unsafe { c::llama_model_rope_type(self.pointer()) };
        !matches!(kind, c::LLAMA_ROPE_TYPE_NONE | c::LLAMA_ROPE_TYPE_NORM | c::LLAMA_ROPE_TYPE_NEOX)
    }

    /// How positions shape keys, as text.
    pub(super) fn describe_positions(&self) -> String {
        // SAFETY: the model is valid.
        let (kind, scale) =
            unsafe { (c::llama_model_rope_type(self.pointer()), c::llama_model_rope_freq_scale_train(self.pointer())) };
        format!("positions of kind {kind} scaled by {scale}")
    }

    /// Whether a token ends a text.
    pub(super) fn is_end(&self, token: Token) -> bool {
        // SAFETY: the vocabulary is valid; the call checks the token's range by itself.
        unsafe { c::llama_vocab_is_eog(self.vocabulary(), token) }
    }

    /// The token that begins a text, if there is one.
    pub(super) fn begin_token(&self) -> Option<Token> {
        // SAFETY: the vocabulary is valid.
        Some(unsafe { c::llama_vocab_bos(self.vocabulary()) }).filter(|token| *token >= 0)
    }

    /// The token that ends a text, if there is one.
    pub(super) fn end_token(&self) -> Option<Token> {
        // SAFETY: the vocabulary is valid.
        Some(unsafe { c::llama_vocab_eos(self.vocabulary()) }).filter(|token| *token >= 0)
    }

    /// Whether a text is begun with the begin token.
    pub(super) fn adds_begin_token(&self) -> bool {
        // SAFETY: the vocabulary is valid.
        unsafe { c::llama_vocab_get_add_bos(self.vocabulary()) }
    }

    /// Splits a text into tokens, with the tokens that the model wants around a text, and special tokens recognised.
    pub(super) fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<Token>, String> {
        let length = i32::try_from(text.len()).map_err(|_| "the text is too long".to_owned())?;
        // A token is at least one byte, and at most two are added.
        let mut tokens: Vec<Token> = vec![0; text.len() + 2];
        let room = i32::try_from(tokens.len()).map_err(|_| "the text is too long".to_owned())?;
        // SAFETY: text and token buffer are valid for the lengths given.
        let count = unsafe {
            c::llama_tokenize(
                self.vocabulary(),
                text.as_ptr().cast(),
                length,
                tokens.as_mut_ptr(),
                room,
                add_special,
                true,
            )
        };
        let count = usize::try_from(count).map_err(|_| "the text cannot be tokenised".to_owned())?;
        tokens.truncate(count);
        Ok(tokens)
    }

    /// Appends a token's text; special tokens have none unless `special`.
    pub(super) fn append_piece(&self, token: Token, special: bool, out: &mut Vec<u8>) {
        let mut buffer = [0u8; PIECE_BYTES];
        let piece = |room: &mut [u8]| {
            // SAFETY: the buffer is valid for its length; the vocabulary checks the token's range by itself.
            unsafe {
                c::llama_token_to_piece(
                    self.vocabulary(),
                    token,
                    room.as_mut_ptr().cast(),
                    room.len() as i32,
                    0,
                    special,
                )
            }
        };
        match piece(&mut buffer) {
            written @ 0.. => out.extend_from_slice(&buffer[..written as usize]),
            missing => {
                let mut larger = vec![0u8; missing.unsigned_abs() as usize];
                let written = piece(&mut larger).max(0) as usize;
                out.extend_from_slice(&larger[..written]);
            }
        }
    }

    /// A token's text, special tokens included.
    pub(super) fn text_of(&self, token: Option<Token>) -> String {
        let mut bytes = Vec::new();
        if let Some(token) = token {
            self.append_piece(token, true, &mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: contexts hold the model alive, so that none is left; the pointer is not used again.
        unsafe { c::llama_model_free(self.pointer()) };
    }
}

fn c_path(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| "the path contains a zero byte".to_owned())
}

/// Writes a model in another quantisation, for tests and for people; `threads` 0 takes all cores.
pub(super) fn quantise(input: &Path, output: &Path, file_type: u32, threads: u32) -> Result<(), String> {
    start();
    forget_complaint();
    let (input, output) = (c_path(input)?, c_path(output)?);
    // SAFETY: parameters are plain data, and both paths outlive the call.
    let code = unsafe {
        let mut parameters = c::llama_model_quantize_default_params();
        parameters.nthread = threads as i32;
        parameters.ftype = file_type;
        parameters.allow_requantize = true;
        c::llama_model_quantize(input.as_ptr(), output.as_ptr(), &raw const parameters)
    };
    if code == 0 { Ok(()) } else { Err(complaint("llama.cpp cannot quantise this model")) }
}
