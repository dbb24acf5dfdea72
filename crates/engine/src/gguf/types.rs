//! The element types that a tensor can have, and the kinds of file that are mistaken for GGUF.

/// Elements per block and bytes per block of each ggml type that may appear in a file.
const TYPES: [(u32, u32, u32); 35] = [
    (0, 1, 4),      // F32
    (1, 1, 2),      // F16
    (2, 32, 18),    // Q4_0
    (3, 32, 20),    // Q4_1
    (6, 32, 22),    // Q5_0
    (7, 32, 24),    // Q5_1
    (8, 32, 34),    // Q8_0
    (9, 32, 36),    // Q8_1
    (10, 256, 84),  // Q2_K
    (11, 256, 110), // Q3_K
    (12, 256, 144), // Q4_K
    (13, 256, 176), // Q5_K
    (14, 256, 210), // Q6_K
    (15, 256, 292), // Q8_K
    (16, 256, 66),  // IQ2_XXS
    (17, 256, 74),  // IQ2_XS
    (18, 256, 98),  // IQ3_XXS
    (19, 256, 50),  // IQ1_S
    (20, 32, 18),   // IQ4_NL
    (21, 256, 110), // IQ3_S
    (22, 256, 82),  // IQ2_S
    (23, 256, 136), // IQ4_XS
    (24, 1, 1),     // I8
    (25, 1, 2),     // I16
    (26, 1, 4),     // I32
    (27, 1, 8),     // I64
    (28, 1, 8),     // F64
    (29, 256, 56),  // IQ1_M
    (30, 1, 2),     // BF16
    (34, 256, 54),  // TQ1_0
    (35, 256, 66),  // TQ2_0
    (39, 32, 17),   // MXFP4
    (40, 64, 36),   // NVFP4
    (41, 128, 18),  // Q1_0
    (42, 64, 18),   // Q2_0
];

/// Elements per block and bytes per block, or none for a type that does not exist (any more).
pub(super) fn block_of(element_type: u32) -> Option<(u64, u64)> {
    TYPES
        .iter()
        .find(|(number, ..)| *number == element_type)
        .map(|(_, elements, bytes)| (u64::from(*elements), u64::from(*bytes)))
}

/// Types whose matrices llama.cpp copies into a faster layout on x86-64 processors (its CPU_REPACK buffer), so that
/// they are resident twice: in the mapped file and in the copy. Q2_K is copied only with AVX-512.
pub(super) fn is_repacked(element_type: u32) -> bool {
    matches!(element_type, 2 | 12 | 20 | 39) || (element_type == 10 && has_avx512())
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

/// What a file that does not begin with `GGUF` looks like, from its first bytes and never from its name.
pub(super) fn sniff(first: &[u8]) -> &'static str {
    match first {
        [] => "an empty file",
        [b'P', b'K', 3 | 5 | 7, 4 | 6 | 8, ..] => "a zip archive, as PyTorch checkpoints are (it can hold code)",
        [0x80, 2..=5, ..] => "a Python pickle (it can hold code)",
        [0x1f, 0x8b, ..] => "a gzip archive",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "a zstd archive",
        [0x89, b'H', b'D', b'F', ..] => "an HDF5 file",
        [b'T', b'F', b'L', b'3', ..] | [_, _, _, _, b'T', b'F', b'L', b'3', ..] => "a TensorFlow Lite model",
        [b'F', b'U', b'G', b'G', ..] => "a big-endian GGUF file",
        [b't' | b'l' | b'a', b'j' | b'm', b'g', b'g', ..] => "a model in the GGML format that came before GGUF",
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', b' ', ..] => "a Git LFS pointer instead of the file it stands for",
        [b'<', ..] => "an HTML or XML page",
        [_, _, _, _, _, _, _, 0, b'{', ..] => "a safetensors file",
        [b'{', ..] => "a JSON document",
        [8, 1..=20, ..] => "an ONNX model",
        _ => "of an unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_type_is_listed_twice_and_removed_ones_are_absent() {
        for (index, entry) in TYPES.iter().enumerate() {
            assert!(TYPES[..index].iter().all(|earlier| earlier.0 != entry.0), "{entry:?}");
        }
        for removed in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(block_of(removed), None);
        }
        assert_eq!(block_of(3), Some((32, 20)));
    }
}
