//! What plans are made of: a model, out of a file or of options, and the GPUs it runs on.

use super::values::{count, optional, size, speed, whole};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};
use warmset_engine::gguf::{self, Header};
use warmset_planner::calculate::{
    decode::Decode,
    hardware::{DECODE_EFFICIENCY_SOURCE, Gpu, PREFILL_EFFICIENCY, PREFILL_EFFICIENCY_SOURCE},
    hf_config,
    input::{positive, product, share},
    model::{Attention, ElementType, Experts, Layers, Model, Weights},
    prefill,
};

/// Architectures of GGUF files in which every so many layers see everything and the others a window (llama.cpp's `load_swa_pattern`).
const WINDOW_PATTERNS: [(&str, u64); 3] = [("gemma2", 2), ("gemma3", 6), ("gpt-oss", 2)];

/// Options that describe what a file does.
const SHAPE: [&str; 10] = [
    "layers",
    "kv_heads",
    "head_dim",
    "value_dim",
    "kv_lora_rank",
    "rope_dim",
    "heads",
    "hidden_size",
    "window_tokens",
    "parameters",
];

/// A model: a file that describes it, or its shape.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArguments {
    /// Take it from the header of this GGUF file
    #[arg(long, value_name = "FILE", conflicts_with_all = SHAPE, conflicts_with_all = ["hf_config", "weight_dtype"])]
    gguf: Option<PathBuf>,
    /// Take it from this config.json, as Hugging Face's transformers write it
    #[arg(long, value_name = "FILE", conflicts_with_all = SHAPE, conflicts_with = "window_layers")]
    hf_config: Option<PathBuf>,
    /// Layers
    #[arg(long, value_name = "N", value_parser = whole)]
    layers: Option<i128>,
    /// Heads of keys and values, in each layer
    #[arg(long, value_name = "N", value_parser = whole, requires = "head_dim", conflicts_with = "kv_lora_rank")]
    kv_heads: Option<i128>,
    /// Length of a head's key
    #[arg(long, value_name = "N", value_parser = whole)]
    head_dim: Option<i128>,
    /// Length of a head's value [default: as --head-dim]
    #[arg(long, value_name = "N", value_parser = whole)]
    value_dim: Option<i128>,
    /// Rank of compressed keys and values (multi-head latent attention)
    #[arg(long, value_name = "N", value_parser = whole, requires = "rope_dim")]
    kv_lora_rank: Option<i128>,
    /// Length of the part beside it that carries the position
    #[arg(long, value_name = "N", value_parser = whole)]
    rope_dim: Option<i128>,
    /// Query heads
    #[arg(long, value_name = "N", value_parser = whole)]
    heads: Option<i128>,
    /// Length of a hidden state
    #[arg(long, value_name = "N", value_parser = whole)]
    hidden_size: Option<i128>,
    /// Layers that see a window only
    #[arg(long, value_name = "N", value_parser = whole)]
    window_layers: Option<i128>,
    /// Tokens of that window
    #[arg(long, value_name = "N", value_parser = whole)]
    window_tokens: Option<i128>,
    /// Parameters, such as 70.55e9
    #[arg(long, value_name = "N", value_parser = whole)]
    parameters: Option<i128>,
    /// What its weights take, such as 141GB [default: as the file says, or its parameters]
    #[arg(long, value_name = "SIZE", value_parser = size, allow_hyphen_values = true)]
    weights: Option<i128>,
    /// How weights are kept [default: as the file says, or fp16]
    #[arg(long, value_name = "TYPE")]
    weight_dtype: Option<String>,
    /// How keys and values are kept: fp16, bf16, fp8, q8_0, ... [default: fp16, or as the file says]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
}

impl ModelArguments {
    /// Refuses what means nothing.
    pub(super) fn check(&self) -> Result<()> {
        for name in self.dtype.iter().chain(&self.weight_dtype) {
            ElementType::named(name)?;
        }
        let numbers = [
            ("layers", self.layers),
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("value-dim", self.value_dim),
            ("kv-lora-rank", self.kv_lora_rank),
            ("rope-dim", self.rope_dim),
            ("heads", self.heads),
            ("hidden-size", self.hidden_size),
            ("window-layers", self.window_layers),
            ("window-tokens", self.window_tokens),
            ("parameters", self.parameters),
            ("weights", self.weights),
        ];
        numbers.into_iter().try_for_each(|(name, number)| optional(name, number).map(drop))
    }

    /// The model.
    pub(crate) fn model(&self) -> Result<Model> {
        let weight_type = self.weight_dtype.as_deref().map(ElementType::named).transpose()?;
        let mut model = match (&self.gguf, &self.hf_config) {
            (Some(path), _) => self.read_gguf(path).with_context(|| path.display().to_string())?,
            (_, Some(path)) => self.read_config(path, weight_type).with_context(|| path.display().to_string())?,
            _ => self.described(weight_type)?,
        };
        if let Some(bytes) = optional("weights", self.weights)? {
            model.weights = Some(match model.weights {
                Some(weights) => weights.scaled_to(bytes)?,
                None => Weights::of_bytes(bytes)?,
            });
        }
        Ok(model)
    }

    /// How its keys and values are kept.
    pub(crate) fn kv_type(&self, model: &Model) -> Result<ElementType> {
        match &self.dtype {
            Some(name) => Ok(ElementType::named(name)?),
            // Engines keep 16 bits where weights have more.
            None => {
                Ok(model.element.filter(|known| known.name == "bf16").map_or_else(|| ElementType::named("fp16"), Ok)?)
            }
        }
    }

    fn read_config(&self, path: &Path, weight_type: Option<ElementType>) -> Result<Model> {
        let text = read(path, hf_config::CONFIG_BYTES_MAX)?;
        let model = hf_config::parse(&text, weight_type)?;
        if model.weights.is_some() || self.weights.is_none() {
            return Ok(model);
        }
        // Their size is given, and what the file cannot say of it is in proportion to what they would be unquantised.
        Ok(hf_config::parse(&text, Some(ElementType::named("bf16")?))?)
    }

    fn described(&self, weight_type: Option<ElementType>) -> Result<Model> {
        let given = |name: &'static str, value: Option<i128>| optional(name, value);
        let (heads, hidden_size) = (given("heads", self.heads)?, given("hidden-size", self.hidden_size)?);
        let head_dim = given("head-dim", self.head_dim)?;
        let query_width = match (heads, head_dim, hidden_size) {
            (Some(heads), Some(length), _) => Some(product("heads", &[heads, length, 2])?),
            (_, _, Some(width)) => Some(product("hidden-size", &[width, 2])?),
            _ => None,
        };
        let layers = match given("layers", self.layers)? {
            Some(count) => self.groups(count, self.attention(head_dim)?, query_width)?,
            None => Vec::new(),
        };
        let element = weight_type.map_or_else(|| ElementType::named("fp16"), Ok)?;
        let parameters = given("parameters", self.parameters)?;
        let weights = parameters.map(|parameters| Weights::dense(parameters, element)).transpose()?;
        Ok(Model { layers, weights, hidden_size, heads, context_tokens: None, element: None })
    }

    fn attention(&self, head_dim: Option<u64>) -> Result<Attention> {
        let rope_length = optional("rope-dim", self.rope_dim)?.unwrap_or(0);
        match (optional("kv-lora-rank", self.kv_lora_rank)?, optional("kv-heads", self.kv_heads)?, head_dim) {
            (Some(kv_lora_rank), _, _) => Ok(Attention::Latent { kv_lora_rank, rope_length }),
            (None, Some(kv_heads), Some(key_length)) => {
                let value_length = optional("value-dim", self.value_dim)?.unwrap_or(key_length);
                Ok(Attention::Heads { kv_heads, key_length, value_length })
            }
            _ => bail!(
                "what a layer keeps is not known: give --kv-heads and --head-dim, or --kv-lora-rank and --rope-dim"
            ),
        }
    }

    /// Layers with a window and layers without.
    fn groups(&self, count_all: u64, attention: Attention, query_width: Option<u64>) -> Result<Vec<Layers>> {
        let window_tokens = optional("window-tokens", self.window_tokens)?;
        let windowed = match (optional("window-layers", self.window_layers)?, window_tokens) {
            (None, None) => 0,
            (Some(windowed), Some(1..)) if windowed <= count_all => windowed,
            (Some(windowed), Some(1..)) => bail!("window-layers is {windowed}: there are {count_all} layers"),
            _ => bail!("a window needs both: give --window-layers and --window-tokens, of at least 1"),
        };
        Ok(groups(count_all, windowed, window_tokens, attention, query_width))
    }

    fn read_gguf(&self, path: &Path) -> Result<Model> {
        let header = gguf::read_header_of_file(path)?;
        if header.recurrent {
            bail!("its recurrent layers keep no row for each token: nothing here is calculated for such models");
        }
        if header.split_count > 1 && self.weights.is_none() {
            bail!("it is one of {} files: give the bytes of all with --weights", header.split_count);
        }
        let windowed = self.windowed_layers(&header)?;
        let count = u64::from(header.block_count);
        let (key, value) = (u64::from(header.key_length), u64::from(header.value_length));
        let kv_heads = uniform(&header.head_counts_kv).context("heads of keys and values")?;
        let heads = uniform(&header.head_counts).context("heads")?;
        let attention = match header.kv_lora_rank.filter(|_| header.compressed_kv) {
            Some(rank) => {
                let rope_length = u64::from(header.rope_dimension_count.unwrap_or(0));
                Attention::Latent { kv_lora_rank: u64::from(rank), rope_length }
            }
            None => Attention::Heads { kv_heads, key_length: key, value_length: value },
        };
        let width = product("heads", &[heads, key + value])?;
        let window = header.sliding_window.map(u64::from);
        Ok(Model {
            layers: groups(count, windowed, window, attention, Some(width)),
            weights: Some(weights_of(&header)),
            hidden_size: Some(u64::from(header.embedding_length)),
            heads: Some(heads),
            context_tokens: Some(u64::from(header.context_length)),
            element: Some(ElementType::named("fp16")?),
        })
    }

    fn windowed_layers(&self, header: &Header) -> Result<u64> {
        let count_all = u64::from(header.block_count);
        match (header.sliding_window, optional("window-layers", self.window_layers)?) {
            (None, _) => Ok(0),
            (Some(_), Some(windowed)) => Ok(windowed.min(count_all)),
            (Some(_), None) => match WINDOW_PATTERNS.iter().find(|(name, _)| *name == header.architecture) {
                Some((_, pattern)) => Ok(count_all - count_all / pattern),
                None => {
                    bail!("some of its layers see a window, and its header does not say which: give --window-layers N")
                }
            },
        }
    }
}

fn groups(
    all: u64,
    windowed: u64,
    window_tokens: Option<u64>,
    attention: Attention,
    query_width: Option<u64>,
) -> Vec<Layers> {
    let group = |count, window_tokens| Layers { count, attention, window_tokens, query_width };
    let groups = [group(windowed, window_tokens), group(all - windowed, None)];
    // No layers at all are told of where they are counted.
    groups.into_iter().filter(|group| group.count > 0 || all == 0).take(if all == 0 { 1 } else { 2 }).collect()
}

/// The number that all layers have.
fn uniform(counts: &[u32]) -> Result<u64> {
    match counts {
        [first, rest @ ..] if rest.iter().all(|count| count == first) => Ok(u64::from(*first)),
        _ => bail!("its layers differ: give its shape as options"),
    }
}

/// What a GGUF file's tensors take and what is multiplied of them.
fn weights_of(header: &Header) -> Weights {
    let totals = header.totals;
    let looked_up = if totals.has_output { totals.embedding_bytes } else { 0 };
    let experts = (header.expert_count > 0).then_some(Experts {
        bytes: totals.expert_bytes,
        count: u64::from(header.expert_count),
        used: u64::from(header.expert_used_count),
    });
    // What is neither an expert nor the table; an output layer beside it is as large as the table.
    let tables = if totals.has_output { 2 } else { 1 } * totals.embedding_elements;
    let always = totals.elements.saturating_sub(totals.expert_elements).saturating_sub(tables);
    let used = experts.map_or(0, |experts| totals.expert_elements / experts.count * experts.used);
    Weights {
        bytes: header.tensor_bytes,
        step_bytes: header.tensor_bytes.saturating_sub(looked_up).saturating_sub(totals.expert_bytes),
        experts,
        prompt_parameters: always.saturating_add(used),
        token_parameters: always.saturating_add(used).saturating_add(totals.embedding_elements),
    }
}

/// A file as text.
fn read(path: &Path, limit: u64) -> Result<String> {
    let mut text = String::new();
    let length = File::open(path)?.take(limit + 1).read_to_string(&mut text)?;
    if length as u64 > limit {
        bail!("it has more than {limit} bytes: that is no config.json");
    }
    Ok(text)
}

/// GPUs, out of the table or described.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "GPUs")]
pub(crate) struct GpuArguments {
    /// A GPU of the table: h100-sxm, a100-80gb-sxm, l40s, ...
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// How many the model is split over
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    gpus: i128,
    /// Memory of one [default: as the table says]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    gpu_memory: Option<i128>,
    /// How fast that is read, such as 3.35TB/s [default: as the table says]
    #[arg(long, value_name = "SPEED", value_parser = speed)]
    gpu_bandwidth: Option<f64>,
    /// Operations per second with 16-bit numbers, dense, such as 989e12 [default: as the table says]
    #[arg(long, value_name = "FLOPS")]
    gpu_flops: Option<f64>,
    /// Part of the bandwidth that generating reaches [default: 0.65 with HBM, 0.9 with graphics memory]
    #[arg(long, value_name = "SHARE")]
    efficiency: Option<f64>,
    /// Part of the operations that reading prompts reaches [default: 0.5]
    #[arg(long, value_name = "SHARE")]
    mfu: Option<f64>,
}

impl GpuArguments {
    /// Refuses what means nothing.
    pub(super) fn check(&self) -> Result<()> {
        self.gpu()?;
        self.count()?;
        self.mfu()?;
        for (name, rate) in [("gpu-bandwidth", self.gpu_bandwidth), ("gpu-flops", self.gpu_flops)] {
            rate.map(|rate| positive(name, rate)).transpose()?;
        }
        Ok(())
    }

    /// One of them.
    pub(crate) fn gpu(&self) -> Result<Gpu> {
        let mut gpu = match &self.gpu {
            Some(name) => Gpu::named(name)?,
            None => Gpu {
                name: "given",
                memory_bytes: 0,
                memory_bytes_per_second: 0.0,
                bf16_flops_per_second: 0.0,
                decode_efficiency: 0.65,
                source: "options",
            },
        };
        if let Some(bytes) = optional("gpu-memory", self.gpu_memory)? {
            gpu.memory_bytes = bytes;
        }
        gpu.memory_bytes_per_second = self.gpu_bandwidth.unwrap_or(gpu.memory_bytes_per_second);
        gpu.bf16_flops_per_second = self.gpu_flops.unwrap_or(gpu.bf16_flops_per_second);
        gpu.decode_efficiency = share("efficiency", self.efficiency.unwrap_or(gpu.decode_efficiency))?;
        Ok(gpu)
    }

    /// How many.
    pub(crate) fn count(&self) -> Result<u64> {
        match count("gpus", self.gpus)? {
            0 => bail!("gpus is 0: give at least 1"),
            gpus => Ok(gpus),
        }
    }

    /// Memory of all.
    pub(crate) fn memory_bytes(&self) -> Result<u64> {
        match self.gpu()?.memory_bytes {
            0 => bail!("the memory is not known: give --gpu NAME or --gpu-memory SIZE"),
            bytes => Ok(product("memory", &[bytes, self.count()?])?),
        }
    }

    /// Bandwidth of all.
    pub(crate) fn memory_bytes_per_second(&self) -> Result<f64> {
        let one = self.gpu()?.memory_bytes_per_second;
        if one == 0.0 && self.gpu_bandwidth.is_none() {
            bail!("the bandwidth is not known: give --gpu NAME or --gpu-bandwidth SPEED");
        }
        Ok(one * self.count()? as f64)
    }

    /// Operations of all.
    pub(crate) fn flops_per_second(&self) -> Result<f64> {
        let one = self.gpu()?.bf16_flops_per_second;
        if one == 0.0 && self.gpu_flops.is_none() {
            bail!("the operations per second are not known: give --gpu NAME or --gpu-flops FLOPS");
        }
        Ok(one * self.count()? as f64)
    }

    /// Whether multiplying can be looked at.
    pub(crate) fn known_flops_per_second(&self) -> Result<Option<f64>> {
        let known = self.gpu.is_some() || self.gpu_flops.is_some();
        known.then(|| self.flops_per_second()).transpose()
    }

    /// The part of the operations that reading prompts reaches.
    pub(crate) fn mfu(&self) -> Result<f64> {
        Ok(share("mfu", self.mfu.unwrap_or(PREFILL_EFFICIENCY))?)
    }

    /// The table's row, for the answer.
    pub(crate) fn document(&self) -> Result<Value> {
        let gpu = self.gpu()?;
        let known = |figure: f64| (figure != 0.0).then_some(figure);
        Ok(json!({
            "name": gpu.name,
            "count": self.count()?,
            "memory_bytes": (gpu.memory_bytes > 0).then_some(gpu.memory_bytes),
            "memory_bytes_per_second": known(gpu.memory_bytes_per_second),
            "bf16_flops_per_second": known(gpu.bf16_flops_per_second),
            "source": gpu.source,
        }))
    }

    /// What engines are expected to reach of the bandwidth, and who says so.
    pub(crate) fn decode_efficiency(&self) -> Result<(f64, &'static str)> {
        let source = if self.efficiency.is_some() { "given" } else { DECODE_EFFICIENCY_SOURCE };
        Ok((self.gpu()?.decode_efficiency, source))
    }

    /// Who says what is reached of the operations.
    pub(crate) fn mfu_source(&self) -> &'static str {
        if self.mfu.is_some() { "given" } else { PREFILL_EFFICIENCY_SOURCE }
    }
}

/// The weights, or what to give.
pub(crate) fn weights(model: &Model) -> Result<Weights> {
    model.weights.context("the weights are not known: give --weights SIZE or --parameters N, or a file that says them")
}

/// What one instance does: measured, or out of the model and its GPUs, as far as engines reach that.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Measured rates")]
pub(crate) struct RateArguments {
    /// Prompt tokens that an instance reads per second [default: out of the model and its GPUs]
    #[arg(long, value_name = "N")]
    prefill_tokens_per_second: Option<f64>,
    /// Tokens that it generates per second, all sequences together [default: out of the model and its GPUs]
    #[arg(long, value_name = "N")]
    decode_tokens_per_second: Option<f64>,
}

impl RateArguments {
    /// Refuses what means nothing.
    pub(super) fn check(&self) -> Result<()> {
        let rates = [
            ("prefill-tokens-per-second", self.prefill_tokens_per_second),
            ("decode-tokens-per-second", self.decode_tokens_per_second),
        ];
        for (name, rate) in rates {
            rate.map(|rate| positive(name, rate)).transpose()?;
        }
        Ok(())
    }

    /// Prompt tokens per second.
    pub(crate) fn prefill(&self, model: &ModelArguments, gpus: &GpuArguments, prompt_tokens: u64) -> Result<f64> {
        match self.prefill_tokens_per_second {
            Some(rate) => Ok(rate),
            None => {
                let work = prefill::work(&model.model()?, prompt_tokens, 0)?;
                Ok(work.speed(prompt_tokens, gpus.flops_per_second()?, gpus.mfu()?)?.tokens_per_second)
            }
        }
    }

    /// Whether what is generated was measured.
    pub(crate) fn measured_decode(&self) -> Option<f64> {
        self.decode_tokens_per_second
    }

    /// Tokens per second of so many sequences of so many tokens.
    pub(crate) fn decode(
        &self,
        model: &ModelArguments,
        gpus: &GpuArguments,
        batch: u64,
        context_tokens: u64,
    ) -> Result<f64> {
        if let Some(rate) = self.decode_tokens_per_second {
            return Ok(rate);
        }
        let shape = model.model()?;
        let decode = Decode {
            weights: weights(&shape)?,
            kv_bytes_per_sequence: shape.kv_bytes(model.kv_type(&shape)?, context_tokens)?,
            batch,
            memory_bytes_per_second: gpus.memory_bytes_per_second()?,
            flops_per_second: gpus.known_flops_per_second()?,
        };
        Ok(decode.answer()?.calibrated(gpus.decode_efficiency()?.0)?.tokens_per_second)
    }

    /// Where the rates come from.
    pub(crate) fn source(&self) -> &'static str {
        match (self.prefill_tokens_per_second, self.decode_tokens_per_second) {
            (Some(_), Some(_)) => "given",
            (None, None) => "model and GPUs, as far as engines reach them",
            _ => "one given, one out of model and GPUs, as far as engines reach them",
        }
    }
}
