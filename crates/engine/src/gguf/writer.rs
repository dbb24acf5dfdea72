//! A tiny GGUF writer for tests: right by default, wrong exactly where a test wants it.

/// A metadata value.
#[derive(Clone)]
pub(crate) enum Item {
    U32(u32),
    I64(i64),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    U32s(Vec<u32>),
    /// Type number and bytes as they are.
    Raw(u32, Vec<u8>),
}

/// A tensor description; `offset` none continues behind the one before.
#[derive(Clone)]
pub(crate) struct TensorItem {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) element_type: u32,
    pub(crate) bytes: u64,
    pub(crate) offset: Option<u64>,
}

/// A file to write.
#[derive(Clone)]
pub(crate) struct Writer {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) items: Vec<(String, Item)>,
    pub(crate) tensors: Vec<TensorItem>,
    pub(crate) key_count: Option<u64>,
    pub(crate) tensor_count: Option<u64>,
    /// Bytes cut from the end.
    pub(crate) cut_bytes: usize,
}

impl Writer {
    /// A small, valid llama-shaped model.
    pub(crate) fn llama() -> Self {
        let text = |text: &str| Item::Text(text.into());
        let items = [
            ("general.architecture", text("llama")),
            ("general.name", text("Tiny")),
            ("general.file_type", Item::U32(2)),
            ("general.quantization_version", Item::I64(2)),
            ("llama.block_count", Item::U32(2)),
            ("llama.context_length", Item::U32(512)),
            ("llama.embedding_length", Item::U32(64)),
            ("llama.feed_forward_length", Item::U32(128)),
            ("llama.attention.head_count", Item::U32(4)),
            ("llama.attention.head_count_kv", Item::U32(2)),
            ("llama.attention.layer_norm_rms_epsilon", Item::F32(1e-5)),
            ("llama.rope.dimension_count", Item::U32(16)),
            ("tokenizer.ggml.add_bos_token", Item::Bool(false)),
            ("tokenizer.ggml.tokens", Item::Texts((0..32).map(|index| format!("token{index}")).collect())),
            ("tokenizer.chat_template", text("{{ messages }}")),
        ];
        let tensor = |name: &str, shape: &[u64], element_type, bytes| TensorItem {
            name: name.into(),
            shape: shape.into(),
            element_type,
            bytes,
            offset: None,
        };
        Self {
            magic: *b"GGUF",
            version: 3,
            alignment: 32,
            items: items.into_iter().map(|(key, item)| (key.to_owned(), item)).collect(),
            tensors: vec![
                tensor("token_embd.weight", &[64, 32], 0, 64 * 32 * 4),
                tensor("blk.0.attn_q.weight", &[64, 64], 2, 64 * 64 / 32 * 18),
                tensor("blk.0.attn_norm.weight", &[64], 0, 64 * 4),
                tensor("output.weight", &[64, 33], 3, 64 * 33 / 32 * 20),
            ],
            key_count: None,
            tensor_count: None,
            cut_bytes: 0,
        }
    }

    pub(crate) fn set(mut self, key: &str, item: Item) -> Self {
        match self.items.iter_mut().find(|(name, _)| name == key) {
            Some(entry) => entry.1 = item,
            None => self.items.push((key.into(), item)),
        }
        self
    }

    pub(crate) fn without(mut self, key: &str) -> Self {
        self.items.retain(|(name, _)| name != key);
        self
    }

    pub(crate) fn write(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.magic);
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.items.len() as u64).to_le_bytes());
        for (key, item) in &self.items {
            put_text(&mut out, key);
            put_item(&mut out, item);
        }
        let mut next_offset = 0;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().for_each(|length| out.extend(length.to_le_bytes()));
            out.extend(tensor.element_type.to_le_bytes());
            let offset = tensor.offset.unwrap_or(next_offset);
            out.extend(offset.to_le_bytes());
            next_offset = (offset.wrapping_add(tensor.bytes)).div_ceil(self.alignment) * self.alignment;
        }
        let data_bytes: u64 =
            self.tensors.iter().map(|tensor| tensor.bytes.div_ceil(self.alignment) * self.alignment).sum();
        let data_start = (out.len() as u64).div_ceil(self.alignment) * self.alignment;
        out.resize((data_start + data_bytes.min(1 << 20)) as usize, 0);
        out.truncate(out.len().saturating_sub(self.cut_bytes));
        out
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_item(out: &mut Vec<u8>, item: &Item) {
    let mut typed = |number: u32, bytes: &[u8]| {
        out.extend(number.to_le_bytes());
        out.extend(bytes);
    };
    match item {
        Item::U32(value) => typed(4, &value.to_le_bytes()),
        Item::I64(value) => typed(11, &value.to_le_bytes()),
        Item::F32(value) => typed(6, &value.to_le_bytes()),
        Item::Bool(value) => typed(7, &[u8::from(*value)]),
        Item::Raw(number, bytes) => typed(*number, bytes),
        Item::Text(text) => {
            typed(8, &[]);
            put_text(out, text);
        }
        Item::Texts(texts) => {
            typed(9, &8u32.to_le_bytes());
            out.extend((texts.len() as u64).to_le_bytes());
            texts.iter().for_each(|text| put_text(out, text));
        }
        Item::U32s(values) => {
            typed(9, &4u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}
