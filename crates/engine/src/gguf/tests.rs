//! Every way to lie in a GGUF header that is known to have hurt somebody, and arbitrary damage.

use super::{
    writer::{Item, TensorItem, Writer},
    *,
};
use proptest::prelude::*;

fn read(writer: &Writer) -> Result<Header, GgufError> {
    let bytes = writer.write();
    read_header(bytes.as_slice(), bytes.len() as u64)
}

fn array_declared(element_type: u32, elements: u64) -> Item {
    let mut bytes = element_type.to_le_bytes().to_vec();
    bytes.extend(elements.to_le_bytes());
    Item::Raw(9, bytes)
}

fn problem_of(result: Result<Header, GgufError>) -> TensorProblem {
    match result {
        Err(GgufError::Tensor { problem, .. }) => problem,
        other => panic!("a tensor problem was expected: {other:?}"),
    }
}

fn too_large(result: Result<Header, GgufError>) -> &'static str {
    match result {
        Err(GgufError::TooLarge { what, .. }) => what,
        other => panic!("a limit was expected: {other:?}"),
    }
}

#[test]
fn a_sound_header_gives_everything_that_is_used() {
    let header = read(&Writer::llama()).unwrap();
    assert_eq!(header.architecture, "llama");
    assert_eq!(header.name.as_deref(), Some("Tiny"));
    assert_eq!((header.block_count, header.context_length, header.embedding_length), (2, 512, 64));
    assert_eq!((header.head_counts, header.head_counts_kv), (vec![4, 4], vec![2, 2]));
    assert_eq!((header.key_length, header.value_length), (16, 16));
    assert_eq!((header.vocabulary_tokens, header.file_type, header.split_count), (32, Some(2), 1));
    assert_eq!(header.chat_template.as_deref(), Some("{{ messages }}"));
    assert_eq!(header.tensor_bytes, 64 * 32 * 4 + 128 * 18 + 256 + 66 * 20);
    assert_eq!(header.repacked_bytes, 128 * 18, "only the Q4_0 matrix is copied");
    assert_eq!(header.pooling_type, None);
    assert_eq!(header.totals.elements, 64 * 32 + 64 * 64 + 64 + 64 * 33);
    assert!(header.totals.has_output && header.totals.expert_bytes == 0);
}

#[test]
fn experts_and_tables_are_counted_apart() {
    let tensor = |name: &str, columns: u64, rows: u64| TensorItem {
        name: name.into(),
        shape: vec![columns, rows],
        element_type: 1,
        bytes: columns * rows * 2,
        offset: None,
    };
    let writer = Writer {
        tensors: vec![
            tensor("token_embd.weight", 64, 32),
            tensor("output.weight", 64, 32),
            tensor("blk.0.ffn_up_exps.weight", 64, 512),
            tensor("blk.0.ffn_up_shexp.weight", 64, 64),
        ],
        ..Writer::llama().set("llama.expert_count", Item::U32(8)).set("llama.expert_used_count", Item::U32(2))
    };
    let mut header = read(&writer).unwrap();
    assert_eq!((header.expert_count, header.expert_used_count), (8, 2));
    let totals = Totals {
        elements: 64 * (32 + 32 + 512 + 64),
        expert_elements: 64 * 512,
        expert_bytes: 64 * 512 * 2,
        embedding_elements: 64 * 32,
        embedding_bytes: 64 * 32 * 2,
        has_output: true,
    };
    assert_eq!(header.totals, totals);
    let other = header.clone();
    header.add_split(&other);
    assert_eq!((header.totals.elements, header.totals.expert_bytes), (2 * totals.elements, 2 * totals.expert_bytes));
}

#[test]
fn bytes_per_token_follow_the_shape_of_the_cache() {
    // 2 layers x 2 heads x (16 + 16) x 2 bytes.
    assert_eq!(read(&Writer::llama()).unwrap().kv_bytes_per_token(), 256);
    let per_layer = Writer::llama().set("llama.attention.head_count_kv", Item::U32s(vec![0, 2]));
    assert_eq!(read(&per_layer).unwrap().kv_bytes_per_token(), 128);
    let wide = Writer::llama()
        .set("llama.attention.key_length", Item::U32(32))
        .set("llama.attention.value_length", Item::U32(8));
    assert_eq!(read(&wide).unwrap().kv_bytes_per_token(), 2 * 2 * (32 + 8) * 2);
    let compressed = Writer::llama()
        .set("llama.attention.kv_lora_rank", Item::U32(512))
        .set("llama.attention.key_length_mla", Item::U32(192))
        .set("llama.rope.dimension_count", Item::U32(64));
    assert_eq!(read(&compressed).unwrap().kv_bytes_per_token(), 2 * (512 + 64) * 2);
}

#[test]
fn estimates_grow_with_context_sequences_and_copies() {
    let header = read(&Writer::llama()).unwrap();
    let one = estimate(&header, 256, 1);
    assert_eq!(one.steady.shared_host_bytes, header.file_bytes);
    let cache = |estimate: &Estimate| estimate.steady.private_host_bytes;
    let longer = cache(&estimate(&header, 512, 1)) - cache(&one);
    assert_eq!(longer, 256 * 256 + 512 * 6 * 256, "the cache and the attention mask");
    assert_eq!(cache(&estimate(&header, 256, 3)) - cache(&one), 2 * 256 * 256 + 2 * 4 * 32);
    let mut plain = header.clone();
    plain.repacked_bytes = 0;
    assert_eq!(cache(&one) - cache(&estimate(&plain, 256, 1)), header.repacked_bytes);
    assert!(cache(&estimate(&header, u32::MAX, u32::MAX)) > 1 << 60, "nothing overflows");
}

#[test]
fn array_lengths_beyond_the_file_end_at_once() {
    for element_type in [0, 4, 8, 10, 12] {
        for elements in [1 << 63, u64::MAX, u64::MAX / 8, 1 << 40] {
            let lie = Writer::llama().set("general.tags", array_declared(element_type, elements));
            assert_eq!(read(&lie), Err(GgufError::Truncated { part: "metadata" }), "{element_type} {elements}");
        }
    }
    let nested = Writer::llama().set("general.tags", array_declared(9, 1));
    assert!(matches!(read(&nested), Err(GgufError::Metadata { .. })));
}

#[test]
fn counts_beyond_any_model_end_at_once() {
    let mut lie = Writer::llama();
    lie.tensor_count = Some(1 << 63);
    assert_eq!(too_large(read(&lie)), "tensors");
    lie.tensor_count = Some(TENSORS_MAX + 1);
    assert_eq!(too_large(read(&lie)), "tensors");
    lie.tensor_count = Some(TENSORS_MAX);
    assert!(!matches!(read(&lie), Err(GgufError::TooLarge { .. }) | Ok(_)), "the limit itself is allowed");
    let mut lie = Writer::llama();
    lie.key_count = Some(1 << 63);
    assert_eq!(too_large(read(&lie)), "metadata keys");
}

#[test]
fn every_limit_holds() {
    let long = |bytes: u64| Item::Text("x".repeat(bytes as usize));
    let template = Writer::llama().set("tokenizer.chat_template", long(TEMPLATE_BYTES_MAX + 1));
    assert_eq!(too_large(read(&template)), "bytes in one key or text");
    assert!(read(&Writer::llama().set("tokenizer.chat_template", long(TEMPLATE_BYTES_MAX))).is_ok());
    assert_eq!(
        too_large(read(&Writer::llama().set("general.name", long(NAME_BYTES_MAX + 1)))),
        "bytes in one key or text"
    );
    let licence = Writer::llama().set("general.license", long(STRING_BYTES_MAX + 1));
    assert_eq!(too_large(read(&licence)), "bytes in one string");
    let key = "k".repeat(KEY_BYTES_MAX as usize + 1);
    assert_eq!(too_large(read(&Writer::llama().set(&key, Item::U32(1)))), "bytes in one key or text");
    let array = Item::Raw(
        9,
        [
            0u32.to_le_bytes().to_vec(),
            (ARRAY_ELEMENTS_MAX + 1).to_le_bytes().to_vec(),
            vec![0; (ARRAY_ELEMENTS_MAX + 1) as usize],
        ]
        .concat(),
    );
    assert_eq!(too_large(read(&Writer::llama().set("general.tags", array))), "elements in one array");
    let full = Item::Raw(
        9,
        [0u32.to_le_bytes().to_vec(), ARRAY_ELEMENTS_MAX.to_le_bytes().to_vec(), vec![0; ARRAY_ELEMENTS_MAX as usize]]
            .concat(),
    );
    let several = Writer::llama().set("a", full.clone()).set("b", full).set("c", array_of_zeros(1));
    assert_eq!(too_large(read(&several)), "elements in all arrays");
    let layers = Writer::llama().set("llama.block_count", Item::U32(LAYERS_MAX + 1));
    assert!(matches!(read(&layers), Err(GgufError::Metadata { .. })));
    let name = "n".repeat(TENSOR_NAME_BYTES_MAX as usize + 1);
    let mut tensors = Writer::llama();
    tensors.tensors[0].name = name;
    assert_eq!(too_large(read(&tensors)), "bytes in one tensor name");
    let chunk = Item::Text("x".repeat(STRING_BYTES_MAX as usize));
    let header = (0..65).fold(Writer::llama(), |writer, index| writer.set(&format!("x{index}"), chunk.clone()));
    assert_eq!(too_large(read(&header)), "header bytes");
}

fn array_of_zeros(elements: u64) -> Item {
    Item::Raw(9, [0u32.to_le_bytes().to_vec(), elements.to_le_bytes().to_vec(), vec![0; elements as usize]].concat())
}

#[test]
fn tensors_must_lie_in_the_file_in_order_and_apart() {
    let with = |change: fn(&mut TensorItem)| {
        let mut writer = Writer::llama();
        change(&mut writer.tensors[1]);
        problem_of(read(&writer))
    };
    assert_eq!(with(|tensor| tensor.offset = Some(0)), TensorProblem::Overlap);
    assert_eq!(with(|tensor| tensor.offset = Some(64 * 32 * 4 + 32)), TensorProblem::Hole);
    assert_eq!(with(|tensor| tensor.offset = Some(64 * 32 * 4 + 1)), TensorProblem::Misaligned);
    assert_eq!(with(|tensor| tensor.offset = Some(1 << 62)), TensorProblem::OutsideFile);
    assert_eq!(with(|tensor| tensor.offset = Some(u64::MAX - 31)), TensorProblem::OutsideFile);
    assert_eq!(with(|tensor| tensor.shape = vec![1 << 62, 1 << 62]), TensorProblem::Overflow);
    assert_eq!(with(|tensor| tensor.shape = vec![1 << 31, 1 << 31, 1 << 31]), TensorProblem::Overflow);
    assert_eq!(with(|tensor| tensor.shape = vec![u64::MAX]), TensorProblem::Shape);
    assert_eq!(with(|tensor| tensor.shape = vec![]), TensorProblem::Shape);
    assert_eq!(with(|tensor| tensor.shape = vec![64, 0]), TensorProblem::Shape);
    assert_eq!(with(|tensor| tensor.shape = vec![1; 5]), TensorProblem::Shape);
    assert_eq!(with(|tensor| tensor.shape = vec![33]), TensorProblem::Blocks);
    assert_eq!(with(|tensor| tensor.element_type = 4), TensorProblem::UnknownType(4));
    assert_eq!(with(|tensor| tensor.element_type = u32::MAX), TensorProblem::UnknownType(u32::MAX));
    assert_eq!(with(|tensor| tensor.name = "token_embd.weight".into()), TensorProblem::Duplicate);
    let mut last = Writer::llama();
    last.tensors[3].shape = vec![64, 1 << 40];
    assert_eq!(problem_of(read(&last)), TensorProblem::OutsideFile);
}

#[test]
fn a_cut_off_file_is_noticed_wherever_it_is_cut() {
    let whole = Writer::llama().write();
    // The last tensor's padding may be missing; one byte of the tensor itself may not.
    let padding = (66 * 20usize).next_multiple_of(32) - 66 * 20;
    for cut in [padding + 1, 100, 5000, whole.len() / 2, whole.len() - 30] {
        let mut writer = Writer::llama();
        writer.cut_bytes = cut;
        assert!(read(&writer).is_err(), "{cut}");
    }
    let mut writer = Writer::llama();
    writer.cut_bytes = padding;
    assert!(read(&writer).is_ok());
    // The file is shorter than the operating system said.
    let error = read_header(&whole[..200], whole.len() as u64).unwrap_err();
    assert!(matches!(error, GgufError::Truncated { .. }), "{error}");
}

#[test]
fn alignment_is_a_small_power_of_two() {
    for bad in [0, 3, 48, 1 << 31, ALIGNMENT_MAX * 2] {
        let writer = Writer::llama().set("general.alignment", Item::U32(bad));
        assert!(matches!(read(&writer), Err(GgufError::Metadata { key, .. }) if key == "general.alignment"), "{bad}");
    }
    let mut wide = Writer::llama().set("general.alignment", Item::U32(128));
    wide.alignment = 128;
    assert_eq!(read(&wide).unwrap().data_offset_bytes % 128, 0);
}

#[test]
fn a_value_of_the_wrong_kind_is_named() {
    for (key, item) in [
        ("general.architecture", Item::U32(1)),
        ("general.architecture", Item::Text("../llama".into())),
        ("llama.block_count", Item::Text("2".into())),
        ("llama.block_count", Item::F32(2.0)),
        ("llama.block_count", Item::Bool(true)),
        ("llama.block_count", Item::U32(0)),
        ("llama.context_length", Item::I64(-1)),
        ("llama.context_length", Item::I64(i64::MAX)),
        ("llama.embedding_length", Item::Texts(vec![])),
        ("llama.attention.head_count", Item::U32s(vec![1, 2, 3])),
        ("tokenizer.chat_template", Item::U32(7)),
        ("tokenizer.ggml.tokens", Item::U32(7)),
        ("general.alignment", Item::Text("32".into())),
    ] {
        match read(&Writer::llama().set(key, item)) {
            Err(GgufError::Metadata { key: named, .. }) => assert_eq!(named, key),
            other => panic!("{key}: {other:?}"),
        }
    }
    for missing in ["general.architecture", "llama.block_count", "llama.context_length", "llama.embedding_length"] {
        assert!(read(&Writer::llama().without(missing)).is_err(), "{missing}");
    }
    let mut twice = Writer::llama();
    twice.items.push(("llama.block_count".into(), Item::U32(3)));
    assert!(matches!(read(&twice), Err(GgufError::Metadata { problem: "appears twice", .. })));
    let unknown = Writer::llama().set("general.tags", Item::Raw(13, vec![]));
    assert!(matches!(read(&unknown), Err(GgufError::Metadata { key, .. }) if key == "general.tags"));
}

#[test]
fn other_kinds_of_file_are_refused_by_name() {
    let safetensors = [&100u64.to_le_bytes()[..], b"{\"__metadata__\":{}}"].concat();
    for (bytes, words) in [
        (&b"PK\x03\x04rest of a checkpoint"[..], "zip"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"\x80\x04\x95\x00\x00", "pickle"),
        (&safetensors, "safetensors"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"tjgg\x01\x00\x00\x00", "before GGUF"),
        (b"\x08\x09\x12\x07pytorch", "ONNX"),
        (b"", "empty"),
        (b"GG", "unknown"),
    ] {
        let error = read_header(bytes, bytes.len() as u64).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(error.is_permanent());
    }
    let mut big_endian = Writer::llama();
    big_endian.version = 3u32.swap_bytes();
    assert!(read(&big_endian).unwrap_err().to_string().contains("big-endian"));
    for version in [0, 1, 4, 77] {
        let mut writer = Writer::llama();
        writer.version = version;
        assert_eq!(read(&writer), Err(GgufError::Version { version }));
    }
}

#[test]
fn later_files_of_a_split_model_need_no_architecture() {
    let mut shard = Writer::llama();
    shard.items.clear();
    let shard = shard.set("split.no", Item::U32(1)).set("split.count", Item::U32(2));
    let mut first = read(&Writer::llama().set("split.count", Item::U32(2))).unwrap();
    let bytes = first.tensor_bytes;
    first.add_split(&read(&shard).unwrap());
    assert_eq!(first.tensor_bytes, 2 * bytes);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, Writer::llama().set("split.count", Item::U32(2)).write()).unwrap();
    assert!(read_header_of_files(&[&path]).unwrap_err().to_string().contains("split.count"));
    assert!(matches!(read_header_of_file(folder.path()), Err(GgufError::Read { .. })));
}

/// A reader that fails, to tell the machine's faults from the file's.
struct Broken;

impl std::io::Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::Error::other("broken disk"))
    }
}

#[test]
fn a_disk_error_is_not_the_files_fault() {
    let error = read_header(Broken, 1000).unwrap_err();
    assert!(!error.is_permanent() && error.to_string().contains("broken disk"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_headers_never_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        cut in 0usize..2000,
        claimed in prop::option::of(any::<u64>()),
    ) {
        let mut bytes = Writer::llama().write();
        let header = bytes.len().min(1400);
        for (place, value) in damage {
            bytes[place.index(header)] = value;
        }
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        let length = claimed.unwrap_or(bytes.len() as u64);
        if let Ok(header) = read_header(bytes.as_slice(), length) {
            prop_assert!(header.data_offset_bytes <= length || header.tensor_count == 0);
            let _ = (header.kv_bytes_per_token(), estimate(&header, u32::MAX, 64));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..600)) {
        let bytes = [&b"GGUF\x03\x00\x00\x00"[..], &tail].concat();
        let _ = read_header(bytes.as_slice(), bytes.len() as u64);
        let _ = read_header(tail.as_slice(), tail.len() as u64);
    }
}
