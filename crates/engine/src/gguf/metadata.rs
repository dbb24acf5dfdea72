//! The metadata part of a header: everything is checked, only what Warmset uses is kept.

use super::{
    ALIGNMENT_MAX, ARRAY_ELEMENTS_MAX, ARRAY_ELEMENTS_TOTAL_MAX, COUNT_MAX, DEFAULT_ALIGNMENT, GgufError, Header,
    KEY_BYTES_MAX, LAYERS_MAX, NAME_BYTES_MAX, STRING_BYTES_MAX, TEMPLATE_BYTES_MAX, limit, source::Source,
};
use std::io::Read;

/// The most values that are kept; a real header has about 25 of them.
const KEPT_VALUES_MAX: u64 = 128;

const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

const KEY_ARCHITECTURE: &str = "general.architecture";
const KEY_NAME: &str = "general.name";
const KEY_FILE_TYPE: &str = "general.file_type";
const KEY_ALIGNMENT: &str = "general.alignment";
const KEY_SPLIT_COUNT: &str = "split.count";
const KEY_SPLIT_INDEX: &str = "split.no";
const KEY_TEMPLATE: &str = "tokenizer.chat_template";
const KEY_TOKENS: &str = "tokenizer.ggml.tokens";

const GENERAL_KEYS: [&str; 8] = [
    KEY_ARCHITECTURE,
    KEY_NAME,
    KEY_FILE_TYPE,
    KEY_ALIGNMENT,
    KEY_SPLIT_COUNT,
    KEY_SPLIT_INDEX,
    KEY_TEMPLATE,
    KEY_TOKENS,
];

/// Keys that follow the architecture's name and a dot.
const ARCHITECTURE_KEYS: [&str; 19] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_used_count",
    "expert_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_mla",
    "attention.kv_lora_rank",
    "attention.sliding_window",
    "rope.dimension_count",
    "pooling_type",
    "vocab_size",
    "ssm.state_size",
    "wkv.head_size",
];

enum Value {
    Integer(i128),
    Text(String),
    /// An array of integers, short enough to be one number per layer.
    Counts(Vec<i128>),
    /// Any other array: only its length.
    Length(u64),
    /// A number with a fraction, or a truth value.
    Other,
}

/// The values that were kept.
pub(super) struct Metadata {
    values: Vec<(String, Value)>,
}

pub(super) fn invalid(key: &str, problem: &'static str) -> GgufError {
    GgufError::Metadata { key: key.into(), problem }
}

fn is_kept(key: &str) -> bool {
    GENERAL_KEYS.contains(&key) || key.split_once('.').is_some_and(|(_, rest)| ARCHITECTURE_KEYS.contains(&rest))
}

impl Metadata {
    pub(super) fn read<R: Read>(source: &mut Source<R>, key_count: u64) -> Result<Self, GgufError> {
        let mut values: Vec<(String, Value)> = Vec::new();
        let mut elements_total = 0;
        for _ in 0..key_count {
            let key = read_text(source, KEY_BYTES_MAX, "metadata")?;
            if key.is_empty() {
                return Err(invalid("a key", "is empty"));
            }
            let value_type = source.u32("metadata")?;
            let kept = is_kept(&key);
            let value = match value_type {
                TYPE_ARRAY => read_array(source, kept, &mut elements_total)?,
                TYPE_STRING if kept => {
                    let longest = if key == KEY_TEMPLATE { TEMPLATE_BYTES_MAX } else { NAME_BYTES_MAX };
                    Value::Text(read_text(source, longest, "metadata")?)
                }
                TYPE_STRING => {
                    skip_string(source)?;
                    Value::Other
                }
                _ => read_scalar(source, value_type).map_err(|error| with_key(error, &key))?,
            };
            if kept {
                if values.iter().any(|(earlier, _)| *earlier == key) {
                    return Err(invalid(&key, "appears twice"));
                }
                limit("values of interest", values.len() as u64 + 1, KEPT_VALUES_MAX)?;
                values.push((key, value));
            }
        }
        Ok(Self { values })
    }

    /// `general.alignment`, a power of two.
    pub(super) fn alignment(&self) -> Result<u64, GgufError> {
        let alignment = self.count(KEY_ALIGNMENT)?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
            return Err(invalid(KEY_ALIGNMENT, "is not a power of two up to 65,536"));
        }
        Ok(u64::from(alignment))
    }

    pub(super) fn header(&self) -> Result<Header, GgufError> {
        let split_count = self.count(KEY_SPLIT_COUNT)?.unwrap_or(1).max(1);
        let split_index = self.count(KEY_SPLIT_INDEX)?.unwrap_or(0);
        let mut header = Header {
            name: self.text(KEY_NAME)?.map(str::to_owned),
            file_type: self.count(KEY_FILE_TYPE)?,
            chat_template: self.text(KEY_TEMPLATE)?.map(str::to_owned),
            split_count,
            split_index,
            ..Header::default()
        };
        let Some(architecture) = self.text(KEY_ARCHITECTURE)? else {
            if split_index > 0 {
                return Ok(header);
            }
            return Err(invalid(KEY_ARCHITECTURE, "is missing"));
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if architecture.is_empty() || architecture.len() > 64 || !architecture.bytes().all(plain) {
            return Err(invalid(KEY_ARCHITECTURE, "is not a plain name"));
        }
        header.architecture = architecture.to_owned();
        self.fill_shape(&mut header)?;
        Ok(header)
    }

    fn fill_shape(&self, header: &mut Header) -> Result<(), GgufError> {
        let architecture = header.architecture.clone();
        let key = |rest: &str| format!("{architecture}.{rest}");
        let optional = |rest: &str| self.count(&key(rest));
        let required = |rest: &str| optional(rest)?.ok_or_else(|| invalid(&key(rest), "is missing"));

        header.block_count = required("block_count")?;
        if header.block_count == 0 || header.block_count > LAYERS_MAX {
            return Err(invalid(&key("block_count"), "is not between 1 and 512"));
        }
        header.context_length = required("context_length")?;
        header.embedding_length = required("embedding_length")?;
        if header.context_length == 0 || header.embedding_length == 0 {
            return Err(invalid(&key("context_length or embedding_length"), "is zero"));
        }
        let layers = header.block_count as usize;
        header.head_counts = self.per_layer(&key("attention.head_count"), layers)?.unwrap_or_else(|| vec![0; layers]);
        header.head_counts_kv =
            self.per_layer(&key("attention.head_count_kv"), layers)?.unwrap_or_else(|| header.head_counts.clone());
        let widest = self.per_layer(&key("feed_forward_length"), layers)?.into_iter().flatten().max().unwrap_or(0);
        header.expert_count = optional("expert_count")?.unwrap_or(0);
        let experts = optional("expert_used_count")?.unwrap_or(0);
        header.expert_used_count = experts;
        let expert_width = optional("expert_feed_forward_length")?.unwrap_or(widest);
        header.feed_forward_length = widest.max(experts.saturating_mul(expert_width)).min(COUNT_MAX);

        let heads = header.head_counts.iter().copied().max().unwrap_or(0);
        let head_length = header.embedding_length.checked_div(heads).unwrap_or(0);
        header.key_length = optional("attention.key_length")?.unwrap_or(head_length);
        header.value_length = optional("attention.value_length")?.unwrap_or(head_length);
        header.kv_lora_rank = optional("attention.kv_lora_rank")?;
        header.compressed_kv = optional("attention.key_length_mla")?.is_some();
        header.rope_dimension_count = optional("rope.dimension_count")?;
        header.sliding_window = optional("attention.sliding_window")?.filter(|tokens| *tokens > 0);
        header.recurrent = optional("ssm.state_size")?.is_some() || optional("wkv.head_size")?.is_some();
        header.pooling_type = optional("pooling_type")?;
        let declared = u64::from(optional("vocab_size")?.unwrap_or(0));
        header.vocabulary_tokens = match self.get(KEY_TOKENS) {
            Some(Value::Length(tokens)) => *tokens,
            Some(Value::Counts(_) | Value::Integer(_) | Value::Text(_) | Value::Other) => {
                return Err(invalid(KEY_TOKENS, "is not an array of strings"));
            }
            None => declared,
        };
        Ok(())
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.values.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(invalid(key, "is not a string")),
        }
    }

    fn count(&self, key: &str) -> Result<Option<u32>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Integer(value)) => to_count(*value, key).map(Some),
            // Some models give one number per layer even where all are the same.
            Some(Value::Counts(values)) if !values.is_empty() => {
                to_count(values.iter().copied().max().unwrap_or(0), key).map(Some)
            }
            Some(_) => Err(invalid(key, "is not a whole number")),
        }
    }

    fn per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<u32>>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Integer(value)) => Ok(Some(vec![to_count(*value, key)?; layers])),
            Some(Value::Counts(values)) if values.len() == layers => {
                values.iter().map(|value| to_count(*value, key)).collect::<Result<_, _>>().map(Some)
            }
            Some(Value::Counts(_)) => Err(invalid(key, "has another length than the model has layers")),
            Some(_) => Err(invalid(key, "is neither a whole number nor a list of them")),
        }
    }
}

fn to_count(value: i128, key: &str) -> Result<u32, GgufError> {
    if value < 0 {
        return Err(invalid(key, "is negative"));
    }
    u32::try_from(value).ok().filter(|count| *count <= COUNT_MAX).ok_or_else(|| invalid(key, "is impossibly large"))
}

fn with_key(error: GgufError, key: &str) -> GgufError {
    match error {
        GgufError::Metadata { problem, .. } => invalid(key, problem),
        other => other,
    }
}

fn read_text<R: Read>(source: &mut Source<R>, longest: u64, part: &'static str) -> Result<String, GgufError> {
    let bytes = source.u64(part)?;
    source.require(bytes, part)?;
    limit("bytes in one key or text", bytes, longest)?;
    let mut text = vec![0; bytes as usize];
    source.read(&mut text, part)?;
    String::from_utf8(text).map_err(|_| invalid("a key or text", "is not UTF-8"))
}

fn skip_string<R: Read>(source: &mut Source<R>) -> Result<(), GgufError> {
    let bytes = source.u64("metadata")?;
    source.require(bytes, "metadata")?;
    limit("bytes in one string", bytes, STRING_BYTES_MAX)?;
    source.skip(bytes, "metadata")
}

fn scalar_bytes(value_type: u32) -> Option<u64> {
    match value_type {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn read_scalar<R: Read>(source: &mut Source<R>, value_type: u32) -> Result<Value, GgufError> {
    const PART: &str = "metadata";
    Ok(match value_type {
        0 => Value::Integer(source.array::<1>(PART)?[0].into()),
        1 => Value::Integer(i8::from_le_bytes(source.array(PART)?).into()),
        2 => Value::Integer(u16::from_le_bytes(source.array(PART)?).into()),
        3 => Value::Integer(i16::from_le_bytes(source.array(PART)?).into()),
        4 => Value::Integer(source.u32(PART)?.into()),
        5 => Value::Integer(i32::from_le_bytes(source.array(PART)?).into()),
        10 => Value::Integer(source.u64(PART)?.into()),
        11 => Value::Integer(i64::from_le_bytes(source.array(PART)?).into()),
        other => {
            let bytes = scalar_bytes(other).ok_or_else(|| invalid("a value", "has an unknown type"))?;
            source.skip(bytes, PART)?;
            Value::Other
        }
    })
}

fn read_array<R: Read>(source: &mut Source<R>, kept: bool, elements_total: &mut u64) -> Result<Value, GgufError> {
    let element_type = source.u32("metadata")?;
    let elements = source.u64("metadata")?;
    // A string takes at least its eight bytes of length.
    let least_bytes = match element_type {
        TYPE_STRING => 8,
        other => scalar_bytes(other).ok_or_else(|| invalid("an array", "has elements of an unknown or nested type"))?,
    };
    let bytes = elements.checked_mul(least_bytes).ok_or(GgufError::Truncated { part: "metadata" })?;
    source.require(bytes, "metadata")?;
    limit("elements in one array", elements, ARRAY_ELEMENTS_MAX)?;
    *elements_total += elements;
    limit("elements in all arrays", *elements_total, ARRAY_ELEMENTS_TOTAL_MAX)?;
    if element_type == TYPE_STRING {
        for _ in 0..elements {
            skip_string(source)?;
        }
        return Ok(Value::Length(elements));
    }
    let integers = matches!(element_type, 0..=5 | 10 | 11);
    if !(kept && integers && elements <= u64::from(LAYERS_MAX)) {
        source.skip(bytes, "metadata")?;
        return Ok(Value::Length(elements));
    }
    let mut values = Vec::with_capacity(elements as usize);
    for _ in 0..elements {
        if let Value::Integer(value) = read_scalar(source, element_type)? {
            values.push(value);
        }
    }
    Ok(Value::Counts(values))
}
