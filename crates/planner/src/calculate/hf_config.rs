//! A model's shape out of the `config.json` that Hugging Face's transformers write beside its weights.
//!
//! Families are named: an architecture that is not understood is refused instead of being taken for another one. Parameters are
//! counted as transformers' `modeling_*.py` shape their matrices; norms and biases, below a thousandth, are left out.

use super::{
    input::{Refused, at_least_one, product, refused, sum},
    model::{Attention, ElementType, Experts, Layers, Model, Weights},
};
use serde_json::{Map, Value};

/// The longest file that is read.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Layers of ordinary heads.
const HEADS: [&str; 10] =
    ["llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite", "gemma", "gemma2", "gemma3_text"];
/// The same with experts.
const HEADS_WITH_EXPERTS: [&str; 4] = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"];
/// Latent attention, with experts.
const LATENT: [&str; 3] = ["deepseek_v2", "deepseek_v3", "kimi_k2"];

/// Reads a `config.json`. `weights` is what its weights take, where somebody knows better than the file.
pub fn parse(text: &str, weight_type: Option<ElementType>) -> Result<Model, Refused> {
    let document: Value = serde_json::from_str(text)
        .map_err(|error| refused("config", format!("is not JSON ({error}): give a model's config.json")))?;
    let Value::Object(fields) = document else {
        return Err(refused("config", "is not an object: give a model's config.json"));
    };
    let config = Config { family: family(&fields)?, fields };
    config.model(weight_type)
}

fn family(fields: &Map<String, Value>) -> Result<String, Refused> {
    if fields.get("text_config").is_some_and(Value::is_object) {
        return Err(refused(
            "config",
            "describes several models: write its text_config into a file of its own and give that",
        ));
    }
    let name = fields.get("model_type").and_then(Value::as_str);
    let name = name.ok_or_else(|| refused("config", "has no model_type: give a model's config.json"))?;
    let known = || HEADS.iter().chain(&HEADS_WITH_EXPERTS).chain(&LATENT);
    if known().any(|family| *family == name) {
        return Ok(name.to_owned());
    }
    let known: Vec<&str> = known().copied().collect();
    let problem = format!(
        "has model_type {name:?}, which is not understood: there are {}; give its layers as options",
        known.join(", ")
    );
    Err(refused("config", problem))
}

struct Config {
    family: String,
    fields: Map<String, Value>,
}

/// Matrices of all layers together, in parameters.
#[derive(Default)]
struct Matrices {
    /// Attention.
    attention: u64,
    /// Feed-forward layers that every token uses.
    always: u64,
    /// Routed experts.
    routed: u64,
    /// Of those, what a token uses.
    routed_used: u64,
}

impl Config {
    fn has(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(|value| !value.is_null())
    }

    fn optional(&self, key: &'static str) -> Result<Option<u64>, Refused> {
        if !self.has(key) {
            return Ok(None);
        }
        let number = self.fields.get(key).and_then(Value::as_u64);
        number.map(Some).ok_or_else(|| refused(key, "of the config is not a whole number"))
    }

    fn required(&self, key: &'static str) -> Result<u64, Refused> {
        let value = self.optional(key)?.ok_or_else(|| refused(key, "is missing in the config"))?;
        at_least_one(key, value)
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        self.fields.get(key).and_then(Value::as_bool).unwrap_or(default)
    }

    fn is(&self, families: &[&str]) -> bool {
        families.contains(&self.family.as_str())
    }

    fn model(&self, weight_type: Option<ElementType>) -> Result<Model, Refused> {
        let hidden = self.required("hidden_size")?;
        let heads = self.required("num_attention_heads")?;
        let latent = self.is(&LATENT);
        let (attention, query_width, parameters) =
            if latent { self.latent(hidden, heads)? } else { self.heads(hidden, heads)? };
        let layers = self.layers(attention, query_width)?;
        let element = self.element()?;
        let given = weight_type.map(|known| (known, known));
        let weights = match given.map_or_else(|| self.weight_types(element), |known| Ok(Some(known)))? {
            Some((dense, experts)) => Some(self.weights(parameters, dense, experts)?),
            None => None,
        };
        Ok(Model {
            layers,
            weights,
            hidden_size: Some(hidden),
            heads: Some(heads),
            context_tokens: self.optional("max_position_embeddings")?,
            element: Some(element),
        })
    }

    /// Grouped-query attention: what is kept, `query heads * (key + value)`, and parameters of a layer.
    fn heads(&self, hidden: u64, heads: u64) -> Result<(Attention, u64, u64), Refused> {
        let kv_heads = self.optional("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = match self.optional("head_dim")? {
            Some(length) => at_least_one("head_dim", length)?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(refused(
                    "head_dim",
                    "is missing in the config, and hidden_size is no multiple of the heads",
                ));
            }
        };
        let attention = Attention::Heads { kv_heads, key_length: head_dim, value_length: head_dim };
        let width = product("heads", &[heads, head_dim, 2])?;
        let rows = sum("heads", [width, product("heads", &[kv_heads, head_dim, 2])?])?;
        Ok((attention, width, product("parameters", &[hidden, rows])?))
    }

    /// The same of latent attention.
    fn latent(&self, hidden: u64, heads: u64) -> Result<(Attention, u64, u64), Refused> {
        let rank = self.required("kv_lora_rank")?;
        let rope_length = self.required("qk_rope_head_dim")?;
        let key = sum("heads", [self.required("qk_nope_head_dim")?, rope_length])?;
        let value = self.required("v_head_dim")?;
        let queries = product("heads", &[heads, key])?;
        let query_parameters = match self.optional("q_lora_rank")? {
            Some(rank) => product("parameters", &[rank, sum("heads", [hidden, queries])?])?,
            None => product("parameters", &[hidden, queries])?,
        };
        let down = product("parameters", &[hidden, sum("kv_lora_rank", [rank, rope_length])?])?;
        let up = product("parameters", &[rank, heads, sum("heads", [key - rope_length, value])?])?;
        let output = product("parameters", &[heads, value, hidden])?;
        let width = product("heads", &[heads, sum("heads", [key, value])?])?;
        let parameters = sum("parameters", [query_parameters, down, up, output])?;
        Ok((Attention::Latent { kv_lora_rank: rank, rope_length }, width, parameters))
    }

    /// All layers, those with a window apart.
    fn layers(&self, attention: Attention, query_width: u64) -> Result<Vec<Layers>, Refused> {
        let count = self.required("num_hidden_layers")?;
        let windowed = self.windowed_layers(count)?;
        let window = if windowed == 0 { None } else { Some(self.required("sliding_window")?) };
        let group = |count, window_tokens| Layers { count, attention, window_tokens, query_width: Some(query_width) };
        let groups = [group(windowed, window), group(count - windowed, None)];
        Ok(groups.into_iter().filter(|group| group.count > 0).collect())
    }

    /// How many layers see a window only.
    fn windowed_layers(&self, count: u64) -> Result<u64, Refused> {
        if let Some(types) = self.fields.get("layer_types").and_then(Value::as_array) {
            return layers_of_types(types, count);
        }
        if !self.has("sliding_window") {
            return Ok(0);
        }
        let every = |pattern: u64| Ok(count - count / at_least_one("sliding_window_pattern", pattern)?);
        match self.family.as_str() {
            "mistral" | "mixtral" | "phi3" => Ok(count),
            "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" if !self.flag("use_sliding_window", false) => Ok(0),
            "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" => Ok(count - self.required("max_window_layers")?.min(count)),
            "gemma2" | "gpt_oss" => Ok(count.div_ceil(2)),
            "gemma3_text" => every(self.optional("sliding_window_pattern")?.unwrap_or(6)),
            _ => Err(refused("sliding_window", "is given, and which layers have it is not known: give layer_types")),
        }
    }

    /// How the file says values are kept where nothing is quantised.
    fn element(&self) -> Result<ElementType, Refused> {
        let name = self.fields.get("dtype").or_else(|| self.fields.get("torch_dtype")).and_then(Value::as_str);
        match name {
            None | Some("auto" | "bfloat16") => ElementType::named("bf16"),
            Some("float16") => ElementType::named("fp16"),
            Some("float32") => ElementType::named("fp32"),
            Some(other) => Err(refused("dtype", format!("{other:?} of the config is unknown: give --weight-dtype"))),
        }
    }

    /// How weights are kept, routed experts apart, if the file says so well enough to count bytes.
    fn weight_types(&self, plain: ElementType) -> Result<Option<(ElementType, ElementType)>, Refused> {
        let Some(quantised) = self.fields.get("quantization_config").filter(|value| !value.is_null()) else {
            return Ok(Some((plain, plain)));
        };
        match quantised.get("quant_method").and_then(Value::as_str) {
            Some("fp8") => ElementType::named("fp8").map(|fp8| Some((fp8, fp8))),
            // gpt-oss keeps everything but its experts as it is.
            Some("mxfp4") => ElementType::named("mxfp4").map(|mxfp4| Some((plain, mxfp4))),
            // Others keep some matrices as they are: what they take is on the disk, not in this file.
            _ => Ok(None),
        }
    }

    fn weights(&self, attention_parameters: u64, dense: ElementType, routed: ElementType) -> Result<Weights, Refused> {
        let (hidden, layers) = (self.required("hidden_size")?, self.required("num_hidden_layers")?);
        let mut matrices = self.feed_forward(hidden, layers)?;
        matrices.attention = product("parameters", &[layers, attention_parameters])?;
        let table = product("parameters", &[self.required("vocab_size")?, hidden])?;
        let tied = self.flag("tie_word_embeddings", self.family.starts_with("gemma"));
        let always = sum("parameters", [matrices.attention, matrices.always])?;
        let step = sum("parameters", [always, table])?;
        let kept = sum("parameters", [step, if tied { 0 } else { table }])?;
        let routed_bytes = routed.bytes(matrices.routed)?;
        let prompt_parameters = sum("parameters", [always, matrices.routed_used])?;
        let experts = self.experts()?.map(|(count, used)| Experts { bytes: routed_bytes, count, used });
        Ok(Weights {
            bytes: sum("weight bytes", [dense.bytes(kept)?, routed_bytes])?,
            step_bytes: dense.bytes(step)?,
            experts,
            prompt_parameters,
            token_parameters: sum("parameters", [prompt_parameters, table])?,
        })
    }

    /// Routed experts of a layer, and how many a token uses.
    fn experts(&self) -> Result<Option<(u64, u64)>, Refused> {
        let routed = self.is(&HEADS_WITH_EXPERTS) || self.is(&LATENT) && self.has("n_routed_experts");
        if !routed {
            return Ok(None);
        }
        let counts = ["num_local_experts", "num_experts", "n_routed_experts"];
        let count = counts.into_iter().find(|key| self.has(key)).unwrap_or("num_local_experts");
        let used = if self.has("num_experts_per_tok") { "num_experts_per_tok" } else { "experts_per_token" };
        let (count, used) = (self.required(count)?, self.required(used)?);
        if used > count {
            return Err(refused(
                "num_experts_per_tok",
                format!("is {used} of {count} in the config: it must be some of them"),
            ));
        }
        Ok(Some((count, used)))
    }

    /// Feed-forward layers: three matrices each, gate, up and down.
    fn feed_forward(&self, hidden: u64, layers: u64) -> Result<Matrices, Refused> {
        let gated = |count: u64, width: u64| product("parameters", &[count, 3, hidden, width]);
        let Some((experts, used)) = self.experts()? else {
            return Ok(Matrices { always: gated(layers, self.required("intermediate_size")?)?, ..Matrices::default() });
        };
        let width = self.required(if self.has("moe_intermediate_size") {
            "moe_intermediate_size"
        } else {
            "intermediate_size"
        })?;
        let dense = self.dense_layers(layers)?;
        let sparse = layers - dense;
        let shared_width = match self.optional("shared_expert_intermediate_size")? {
            Some(width) => width,
            None => product("parameters", &[self.optional("n_shared_experts")?.unwrap_or(0), width])?,
        };
        let dense_parameters = if dense == 0 { 0 } else { gated(dense, self.required("intermediate_size")?)? };
        let router = product("parameters", &[sparse, hidden, experts])?;
        Ok(Matrices {
            attention: 0,
            always: sum("parameters", [dense_parameters, gated(sparse, shared_width)?, router])?,
            routed: product("parameters", &[gated(sparse, width)?, experts])?,
            routed_used: product("parameters", &[gated(sparse, width)?, used])?,
        })
    }

    /// Layers without experts.
    fn dense_layers(&self, layers: u64) -> Result<u64, Refused> {
        let named = self.fields.get("mlp_only_layers").and_then(Value::as_array).map_or(0, Vec::len) as u64;
        let step = self.optional("decoder_sparse_step")?.or(self.optional("moe_layer_freq")?).unwrap_or(1);
        if step != 1 {
            return Err(refused("decoder_sparse_step", format!("is {step} in the config: only 1 is understood")));
        }
        Ok(named.max(self.optional("first_k_dense_replace")?.unwrap_or(0)).min(layers))
    }
}

/// How many of the layers that are named one by one have a window.
fn layers_of_types(types: &[Value], count: u64) -> Result<u64, Refused> {
    if types.len() as u64 != count {
        return Err(refused("layer_types", format!("of the config has {} layers and not {count}", types.len())));
    }
    let mut windowed = 0;
    for kind in types {
        match kind.as_str() {
            Some("sliding_attention") => windowed += 1,
            Some("full_attention") => {}
            _ => {
                return Err(refused(
                    "layer_types",
                    format!("of the config has {kind}, which keeps no row for each token that is understood"),
                ));
            }
        }
    }
    Ok(windowed)
}

#[cfg(test)]
mod tests;
