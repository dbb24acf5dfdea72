//! A model as calculators see it: what its layers keep of a token, what they multiply, and what its weights take.
//!
//! Bytes of KV per token and layer: `2 * kv_heads * head_dim * element` for multi-head, grouped-query and multi-query attention;
//! `(kv_lora_rank + rope_dim) * element` for multi-head latent attention, which keeps one compressed row (DeepSeek-V2, arXiv
//! 2405.04434, section 2.1). A layer with a sliding window keeps the last tokens of its window only. Quantised caches keep ggml's
//! blocks, scale included (`ggml-common.h`). Recurrent layers keep no row per token: they are not described here.

use super::input::{Refused, at_least_one, product, refused, sum, whole};
use serde::Serialize;

/// The most layers that are believed.
const LAYERS_MAX: u64 = 4096;
/// The largest head, rank or window that is believed.
const WIDTH_MAX: u64 = 1 << 40;

/// How an element is kept, in a cache or in weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ElementType {
    /// What engines call it.
    pub name: &'static str,
    /// Elements that are kept together.
    pub block_elements: u64,
    /// Bytes they take, scales included.
    pub block_bytes: u64,
}

const fn element(name: &'static str, block_elements: u64, block_bytes: u64) -> ElementType {
    ElementType { name, block_elements, block_bytes }
}

/// Every type that is known. `fp8` and `int8` without the scales of whole tensors, which are a few bytes.
pub const ELEMENT_TYPES: [ElementType; 17] = [
    element("fp32", 1, 4),
    element("f32", 1, 4),
    element("fp16", 1, 2),
    element("f16", 1, 2),
    element("bf16", 1, 2),
    element("fp8", 1, 1),
    element("fp8_e4m3", 1, 1),
    element("fp8_e5m2", 1, 1),
    element("int8", 1, 1),
    element("q8_0", 32, 34),
    element("q5_1", 32, 24),
    element("q5_0", 32, 22),
    element("q4_1", 32, 20),
    element("q4_0", 32, 18),
    element("iq4_nl", 32, 18),
    element("mxfp4", 32, 17),
    element("nvfp4", 64, 36),
];

impl ElementType {
    /// The type of this name.
    pub fn named(name: &str) -> Result<Self, Refused> {
        let found = ELEMENT_TYPES.into_iter().find(|known| known.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let known: Vec<&str> = ELEMENT_TYPES.iter().map(|known| known.name).collect();
            refused("dtype", format!("{name:?} is unknown: there are {}", known.join(", ")))
        })
    }

    /// Bytes of a row that is kept in whole blocks.
    pub fn row_bytes(&self, elements: u64) -> Result<u64, Refused> {
        if !elements.is_multiple_of(self.block_elements) {
            let problem =
                format!("{} keeps {} elements together, and {elements} is no multiple", self.name, self.block_elements);
            return Err(refused("dtype", problem));
        }
        product("bytes of a row", &[elements / self.block_elements, self.block_bytes])
    }

    /// Bytes of so many elements of a matrix, rounded up to a block.
    pub fn bytes(&self, elements: u64) -> Result<u64, Refused> {
        product("weight bytes", &[elements.div_ceil(self.block_elements), self.block_bytes])
    }
}

/// What a layer keeps of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Keys and values of each head: multi-head, grouped-query and multi-query attention.
    Heads {
        /// Heads of keys and of values.
        kv_heads: u64,
        /// Length of a key.
        key_length: u64,
        /// Length of a value.
        value_length: u64,
    },
    /// One compressed row for all heads: multi-head latent attention.
    Latent {
        /// Length of the compressed part.
        kv_lora_rank: u64,
        /// Length of the part that carries the position.
        rope_length: u64,
    },
}

/// Layers that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// How many.
    pub count: u64,
    /// What each keeps.
    pub attention: Attention,
    /// Tokens each sees, if not all.
    pub window_tokens: Option<u64>,
    /// `query heads * (length of a key + length of a value)`: half the operations for a pair of tokens. None if unknown.
    pub query_width: Option<u64>,
}

/// Experts of all layers together; a token uses some of each layer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Experts {
    /// Bytes of all routed experts.
    pub bytes: u64,
    /// Routed experts of a layer.
    pub count: u64,
    /// How many of those a token uses.
    pub used: u64,
}

/// What the weights take and what is read and multiplied of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// Bytes of everything.
    pub bytes: u64,
    /// Bytes that every step reads: all but routed experts and a table of embeddings that is only looked up.
    pub step_bytes: u64,
    /// Routed experts.
    pub experts: Option<Experts>,
    /// Parameters that each token of a prompt is multiplied with.
    pub prompt_parameters: u64,
    /// The same for a token that is generated: with the output layer.
    pub token_parameters: u64,
}

impl Weights {
    /// Weights of which only the number is known: all are read and multiplied in every step.
    pub fn dense(parameters: u64, element: ElementType) -> Result<Self, Refused> {
        let bytes = element.bytes(at_least_one("parameters", parameters)?)?;
        Ok(Self { prompt_parameters: parameters, token_parameters: parameters, ..Self::of_bytes(bytes)? })
    }

    /// The same weights, taking so many bytes in all: their parts are in proportion.
    pub fn scaled_to(self, bytes: u64) -> Result<Self, Refused> {
        let factor = at_least_one("weights", bytes)? as f64 / at_least_one("weights", self.bytes)? as f64;
        let scaled = |part: u64| whole("weights", (part as f64 * factor).round());
        let experts = match self.experts {
            Some(experts) => Some(Experts { bytes: scaled(experts.bytes)?, ..experts }),
            None => None,
        };
        Ok(Self { bytes, step_bytes: scaled(self.step_bytes)?, experts, ..self })
    }

    /// Weights of which only the bytes are known.
    pub fn of_bytes(bytes: u64) -> Result<Self, Refused> {
        let bytes = at_least_one("weights", bytes)?;
        Ok(Self { bytes, step_bytes: bytes, experts: None, prompt_parameters: 0, token_parameters: 0 })
    }
}

/// A model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Model {
    /// Its layers, those that are alike together.
    pub layers: Vec<Layers>,
    /// Its weights, if they are known.
    pub weights: Option<Weights>,
    /// Length of a hidden state, if known.
    pub hidden_size: Option<u64>,
    /// Query heads, if known.
    pub heads: Option<u64>,
    /// Tokens it was made for, if known.
    pub context_tokens: Option<u64>,
    /// How its weights are kept, if known: what a cache is kept as unless somebody says otherwise.
    pub element: Option<ElementType>,
}

/// What a model's cache takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kv {
    /// How elements are kept.
    pub dtype: &'static str,
    /// What a token takes while all layers keep it.
    pub bytes_per_token: u64,
    /// What a token takes once it has left all windows.
    pub bytes_per_token_beyond_windows: u64,
    /// Tokens of one sequence.
    pub tokens: u64,
    /// What one sequence takes.
    pub bytes_per_sequence: u64,
    /// Sequences.
    pub sequences: u64,
    /// What all of them take.
    pub bytes: u64,
    /// What each of the GPUs holds of it that the model is split over: heads are split as far as there are any, a latent row is
    /// kept by each of them.
    pub bytes_per_gpu: u64,
}

impl Attention {
    fn check(&self) -> Result<(), Refused> {
        let (first, second, third) = match *self {
            Self::Heads { kv_heads, key_length, value_length } => {
                (("kv-heads", kv_heads), ("head-dim", key_length), ("value-dim", value_length))
            }
            Self::Latent { kv_lora_rank, rope_length } => {
                (("kv-lora-rank", kv_lora_rank), ("rope-dim", rope_length.max(1)), ("rope-dim", rope_length.max(1)))
            }
        };
        for (name, value) in [first, second, third] {
            if at_least_one(name, value)? > WIDTH_MAX {
                return Err(refused(name, "is too large to be a model's: check it"));
            }
        }
        Ok(())
    }

    /// Bytes of a token in one layer.
    pub fn bytes_per_token(&self, element: ElementType) -> Result<u64, Refused> {
        self.check()?;
        match *self {
            Self::Heads { kv_heads, key_length, value_length } => {
                let row = sum("bytes per token", [element.row_bytes(key_length)?, element.row_bytes(value_length)?])?;
                product("bytes per token", &[kv_heads, row])
            }
            Self::Latent { kv_lora_rank, rope_length } => {
                element.row_bytes(sum("kv-lora-rank", [kv_lora_rank, rope_length])?)
            }
        }
    }

    /// Over how many of so many GPUs what it keeps can be split.
    fn split(&self, gpus: u64) -> u64 {
        match *self {
            Self::Heads { kv_heads, .. } => gpus.min(kv_heads),
            Self::Latent { .. } => 1,
        }
    }
}

impl Model {
    /// Layers that are all alike.
    pub fn uniform(count: u64, attention: Attention) -> Self {
        Self { layers: vec![Layers { count, attention, window_tokens: None, query_width: None }], ..Self::default() }
    }

    /// How many layers it has.
    pub fn layer_count(&self) -> Result<u64, Refused> {
        let count = at_least_one("layers", sum("layers", self.layers.iter().map(|layers| layers.count))?)?;
        if count > LAYERS_MAX {
            return Err(refused("layers", format!("is {count}: at most {LAYERS_MAX} are believed")));
        }
        Ok(count)
    }

    /// Bytes of a token that all layers keep.
    pub fn kv_bytes_per_token(&self, element: ElementType) -> Result<u64, Refused> {
        self.kv_bytes(element, 1)
    }

    /// Bytes of one sequence of so many tokens.
    pub fn kv_bytes(&self, element: ElementType, tokens: u64) -> Result<u64, Refused> {
        self.kv_bytes_on_one_of(element, tokens, 1)
    }

    /// Bytes of one sequence on each of the GPUs that the model is split over.
    fn kv_bytes_on_one_of(&self, element: ElementType, tokens: u64, gpus: u64) -> Result<u64, Refused> {
        self.layer_count()?;
        let bytes = self.layers.iter().map(|layers| {
            let kept = layers.window_tokens.map_or(tokens, |window| tokens.min(window));
            let whole = product("KV bytes", &[layers.count, layers.attention.bytes_per_token(element)?, kept])?;
            Ok(whole.div_ceil(layers.attention.split(gpus)))
        });
        sum("KV bytes", bytes.collect::<Result<Vec<u64>, Refused>>()?)
    }

    /// What so many sequences of so many tokens take, on one of so many GPUs too.
    pub fn kv(&self, element: ElementType, tokens: u64, sequences: u64, gpus: u64) -> Result<Kv, Refused> {
        at_least_one("tokens", tokens)?;
        at_least_one("sequences", sequences)?;
        at_least_one("gpus", gpus)?;
        let endless = self.layers.iter().filter(|layers| layers.window_tokens.is_none());
        let beyond = Self { layers: endless.copied().collect(), ..Self::default() };
        let beyond = if beyond.layers.is_empty() { 0 } else { beyond.kv_bytes_per_token(element)? };
        let bytes_per_sequence = self.kv_bytes(element, tokens)?;
        let on_one = self.kv_bytes_on_one_of(element, tokens, gpus)?;
        Ok(Kv {
            dtype: element.name,
            bytes_per_token: self.kv_bytes_per_token(element)?,
            bytes_per_token_beyond_windows: beyond,
            tokens,
            bytes_per_sequence,
            sequences,
            bytes: product("KV bytes", &[bytes_per_sequence, sequences])?,
            bytes_per_gpu: product("KV bytes", &[on_one, sequences])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fp16() -> ElementType {
        ElementType::named("fp16").unwrap()
    }

    fn grouped(kv_heads: u64, head_dim: u64) -> Attention {
        Attention::Heads { kv_heads, key_length: head_dim, value_length: head_dim }
    }

    #[test]
    fn every_kind_of_attention_has_its_row() {
        let seventy = Model::uniform(80, grouped(8, 128));
        assert_eq!(seventy.kv_bytes_per_token(fp16()), Ok(327_680));
        let q8 = ElementType::named("Q8_0").unwrap();
        assert_eq!(Model::uniform(30, grouped(3, 64)).kv_bytes_per_token(q8), Ok(12_240));
        let deepseek = Model::uniform(61, Attention::Latent { kv_lora_rank: 512, rope_length: 64 });
        assert_eq!(deepseek.kv_bytes_per_token(fp16()), Ok(70_272));
        // A latent row is on each GPU; eight heads are on eight of sixteen.
        let kv = |model: &Model, gpus| model.kv(fp16(), 1000, 2, gpus).unwrap();
        assert_eq!(kv(&deepseek, 8).bytes_per_gpu, kv(&deepseek, 8).bytes);
        assert_eq!(kv(&seventy, 16).bytes_per_gpu, kv(&seventy, 16).bytes / 8);
    }

    #[test]
    fn a_window_keeps_its_tokens_only() {
        let attention = grouped(2, 64);
        let layers = |count, window_tokens| Layers { count, attention, window_tokens, query_width: None };
        let model = Model { layers: vec![layers(5, Some(1024)), layers(1, None)], ..Model::default() };
        let kv = model.kv(fp16(), 4096, 1, 1).unwrap();
        assert_eq!((kv.bytes_per_token, kv.bytes_per_token_beyond_windows), (6 * 512, 512));
        assert_eq!(kv.bytes, 512 * (5 * 1024 + 4096));
        assert_eq!(model.kv(fp16(), 100, 1, 1).unwrap().bytes, 600 * 512);
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let model =
            |count, attention| Model::uniform(count, attention).kv(fp16(), 1, 1, 1).map_err(|error| error.to_string());
        for (count, attention, word) in [
            (0, grouped(8, 128), "layers"),
            (5000, grouped(8, 128), "layers"),
            (1, grouped(0, 128), "kv-heads"),
            (1, grouped(8, 0), "head-dim"),
            (1, grouped(u64::MAX, 128), "kv-heads"),
            (1, Attention::Latent { kv_lora_rank: 0, rope_length: 64 }, "kv-lora-rank"),
        ] {
            assert!(model(count, attention).unwrap_err().starts_with(word), "{word}");
        }
        assert!(Model::default().kv(fp16(), 1, 1, 1).is_err());
        let seventy = Model::uniform(80, grouped(8, 128));
        assert!(seventy.kv(fp16(), u64::MAX, 1, 1).unwrap_err().to_string().contains("too large"));
        assert!(seventy.kv(fp16(), 0, 1, 1).is_err() && seventy.kv(fp16(), 1, 0, 1).is_err());
        let odd = Model::uniform(1, grouped(1, 80)).kv_bytes_per_token(ElementType::named("q4_0").unwrap());
        assert!(odd.unwrap_err().to_string().contains("no multiple"));
        assert!(ElementType::named("fp17").unwrap_err().to_string().contains("there are fp32"));
    }
}
