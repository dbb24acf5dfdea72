//! What can be wrong with a GGUF file, in words that say what to do.

/// Why a file is not taken as a model. Everything but [`GgufError::Read`] is the file's fault and lasts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be read.
    #[error("the model file cannot be read: {message}")]
    Read {
        /// What the operating system said.
        message: String,
    },
    /// The content is something else.
    #[error("unsupported format: this is {found}, not a GGUF model; convert it to GGUF first")]
    NotGguf {
        /// What it looks like.
        found: &'static str,
    },
    /// A version this reader does not know.
    #[error("GGUF version {version} is not supported (2 and 3 are); convert the model again")]
    Version {
        /// The version in the file.
        version: u32,
    },
    /// The file ends too early for what it declares.
    #[error("the model file is cut off: it ends before its {part}; download it again")]
    Truncated {
        /// What is missing.
        part: &'static str,
    },
    /// A declared size is beyond any real model.
    #[error("the model file declares {value} {what}, more than the {limit} allowed")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// A metadata value is missing or makes no sense.
    #[error("the model file's metadata is invalid: {key} {problem}")]
    Metadata {
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A tensor makes no sense.
    #[error("the model file's tensor {name:?} {problem}")]
    Tensor {
        /// The tensor, with unprintable bytes replaced.
        name: String,
        /// What is wrong with it.
        problem: TensorProblem,
    },
}

impl GgufError {
    /// Whether trying again with the same file cannot help.
    pub fn is_permanent(&self) -> bool {
        !matches!(self, Self::Read { .. })
    }
}

/// What is wrong with a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TensorProblem {
    /// No dimensions, too many of them, or one of zero elements.
    #[error("has an impossible shape")]
    Shape,
    /// The number of elements or bytes does not fit 63 bits.
    #[error("has dimensions whose product overflows")]
    Overflow,
    /// The element type is unknown or was removed.
    #[error("has the unknown element type {0}")]
    UnknownType(u32),
    /// A row is not a whole number of blocks.
    #[error("has rows that are not a whole number of blocks")]
    Blocks,
    /// It does not begin at a multiple of the file's alignment.
    #[error("is not aligned")]
    Misaligned,
    /// It begins before the end of the tensor in front of it.
    #[error("overlaps another tensor")]
    Overlap,
    /// Bytes between it and the tensor in front of it belong to nobody.
    #[error("leaves a hole after the tensor before it")]
    Hole,
    /// It ends after the end of the file.
    #[error("lies outside of the file")]
    OutsideFile,
    /// Another tensor has its name.
    #[error("appears twice")]
    Duplicate,
}
