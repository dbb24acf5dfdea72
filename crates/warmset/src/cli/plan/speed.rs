//! `warmset plan decode`, `prefill`, `break-even`, `transfer` and `distribute`: how long it takes.

use super::{
    model::{GpuArguments, ModelArguments, weights},
    values::{count, optional, size, speed, whole},
};
use anyhow::Result;
use clap::Args;
use serde_json::{Value, json};
use warmset_planner::calculate::{
    break_even::{BreakEven, Compute, KvSize, Prices, mooncake_least_bytes_per_second},
    decode::Decode,
    distribute::Distribute,
    hardware::{LINKS, Link},
    input::positive,
    model::{Attention, ElementType, Model},
    prefill,
    transfer::Transfer,
};

/// A link of the table, or one that was measured.
#[derive(Debug, Clone)]
pub(crate) struct LinkSpec {
    name: String,
    speed: Option<f64>,
}

/// Reads `NAME` or `NAME=SPEED`.
fn link_spec(text: &str) -> Result<LinkSpec, String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok(LinkSpec { name: name.to_owned(), speed: Some(speed(value)?) }),
        None if !text.is_empty() => Ok(LinkSpec { name: text.to_owned(), speed: None }),
        _ => Err(format!("{text:?} is not NAME or NAME=SPEED")),
    }
}

/// Name, ceiling, what is reached, and who says so.
type Row = (String, f64, f64, &'static str);

impl LinkSpec {
    fn row(&self) -> Result<Row> {
        match self.speed {
            Some(given) => Ok((self.name.clone(), given, given, "given")),
            None => Ok(row_of(Link::named(&self.name)?)),
        }
    }
}

fn row_of(link: Link) -> Row {
    (link.name.to_owned(), link.ceiling_bytes_per_second, link.calibrated_bytes_per_second, link.source)
}

/// The links that were asked for, or these of the table.
fn rows(given: &[LinkSpec], otherwise: &[&str]) -> Result<Vec<Row>> {
    if given.is_empty() {
        return Ok(LINKS.into_iter().filter(|link| otherwise.contains(&link.name)).map(row_of).collect());
    }
    given.iter().map(LinkSpec::row).collect()
}

/// `warmset plan decode`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct DecodeArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    /// Tokens that each sequence has so far
    #[arg(long, value_name = "N", value_parser = whole, default_value = "0")]
    context_tokens: i128,
    /// Sequences together
    #[arg(long, value_name = "N,M,...", value_parser = whole, value_delimiter = ',', default_value = "1,8,32,128")]
    batch: Vec<i128>,
    /// Time between two tokens that was measured with the first of these: what it reaches of the ceiling is told
    #[arg(long, value_name = "SECONDS")]
    measured_seconds_per_token: Option<f64>,
}

impl DecodeArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let context_tokens = count("context-tokens", self.context_tokens)?;
        let kv_bytes_per_sequence = match context_tokens {
            0 => 0,
            tokens => model.kv_bytes(self.model.kv_type(&model)?, tokens)?,
        };
        let (efficiency, source) = self.gpus.decode_efficiency()?;
        let mut rows = Vec::new();
        let mut measured = None;
        for batch in &self.batch {
            let decode = Decode {
                weights: weights(&model)?,
                kv_bytes_per_sequence,
                batch: count("batch", *batch)?,
                memory_bytes_per_second: self.gpus.memory_bytes_per_second()?,
                flops_per_second: self.gpus.known_flops_per_second()?,
            };
            let answer = decode.answer()?;
            if let (None, Some(seconds)) = (measured, self.measured_seconds_per_token) {
                measured = Some(answer.efficiency_of(seconds)?);
            }
            let mut row = serde_json::to_value(answer)?;
            row["calibrated"] = serde_json::to_value(answer.calibrated(efficiency)?)?;
            rows.push(row);
        }
        Ok(json!({
            "gpu": self.gpus.document()?,
            "weight_bytes": weights(&model)?.bytes,
            "context_tokens": context_tokens,
            "kv_bytes_per_sequence": kv_bytes_per_sequence,
            "rows": rows,
            "efficiency": efficiency,
            "efficiency_source": source,
            "measured_efficiency": measured,
        }))
    }
}

/// `warmset plan prefill`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PrefillArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    /// Tokens that are read
    #[arg(long, value_name = "N", value_parser = whole)]
    tokens: i128,
    /// Tokens before them that are known already
    #[arg(long, value_name = "N", value_parser = whole, default_value = "0")]
    cached_tokens: i128,
    /// Time that was measured for it: what it reaches of the ceiling is told
    #[arg(long, value_name = "SECONDS")]
    measured_seconds: Option<f64>,
}

impl PrefillArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let (tokens, cached_tokens) = (count("tokens", self.tokens)?, count("cached-tokens", self.cached_tokens)?);
        let work = prefill::work(&model, tokens, cached_tokens)?;
        let rate = self.gpus.flops_per_second()?;
        let (ceiling, mfu) = (work.speed(tokens, rate, 1.0)?, self.gpus.mfu()?);
        let measured = self.measured_seconds.map(|seconds| positive("measured-seconds", seconds)).transpose()?;
        Ok(json!({
            "gpu": self.gpus.document()?,
            "tokens": tokens,
            "cached_tokens": cached_tokens,
            "linear_flops": work.linear_flops,
            "attention_flops": work.attention_flops,
            "flops": work.flops,
            "time": { "ceiling": ceiling, "calibrated": work.speed(tokens, rate, mfu)? },
            "mfu": mfu,
            "mfu_source": self.gpus.mfu_source(),
            "measured_efficiency": measured.map(|seconds| ceiling.seconds / seconds),
        }))
    }
}

/// `warmset plan break-even`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BreakEvenArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    /// Tokens of the prefix
    #[arg(long, value_name = "N", value_parser = whole)]
    prefix_tokens: i128,
    /// A tier, or one with what was measured, such as disk=1.2GB/s [default: those between a GPU and a network]
    #[arg(long, value_name = "NAME[=SPEED]", value_parser = link_spec)]
    tier: Vec<LinkSpec>,
    /// Prompt tokens that are read per second, measured [default: out of the model and its GPUs]
    #[arg(long, value_name = "N")]
    prefill_tokens_per_second: Option<f64>,
    /// Bytes of a token, measured [default: out of the model]
    #[arg(long, value_name = "N", value_parser = whole)]
    kv_bytes_per_token: Option<i128>,
    /// What every reload takes, however small
    #[arg(long, value_name = "SECONDS", default_value_t = 0.005)]
    fixed_seconds: f64,
    /// Reloads that share a tier
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    loaders: i128,
    /// Price of all GPUs, to tell how long keeping pays
    #[arg(long, value_name = "PRICE", requires = "tier_price_per_gigabyte_month")]
    gpu_price_per_hour: Option<f64>,
    /// Price of the tier, in the same currency
    #[arg(long, value_name = "PRICE", requires = "gpu_price_per_hour")]
    tier_price_per_gigabyte_month: Option<f64>,
    /// How likely what is kept is asked for again
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    hit_probability: f64,
}

/// Tiers that KV comes back from.
const TIERS: [&str; 9] = ["pcie5_x16", "pcie4_x16", "nvme6", "nvme5", "nvme4", "eth400", "eth100", "eth25", "eth10"];

impl BreakEvenArguments {
    fn compute(&self) -> Result<Compute> {
        match self.prefill_tokens_per_second {
            Some(tokens_per_second) => Ok(Compute::Measured { tokens_per_second }),
            None => Ok(Compute::Work { flops_per_second: self.gpus.flops_per_second()?, efficiency: self.gpus.mfu()? }),
        }
    }

    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let tokens = count("prefix-tokens", self.prefix_tokens)?;
        let element = self.model.kv_type(&model)?;
        let even = BreakEven {
            model: &model,
            kv: optional("kv-bytes-per-token", self.kv_bytes_per_token)?
                .map_or(KvSize::Kept(element), KvSize::PerToken),
            compute: self.compute()?,
            fixed_seconds: self.fixed_seconds,
            loaders: count("loaders", self.loaders)?,
        };
        let mut tiers = Vec::new();
        for (name, ceiling, calibrated, source) in rows(&self.tier, &TIERS)? {
            let reached = even.answer(tokens, calibrated)?;
            let mut row = json!({ "tier": name, "ceiling": even.answer(tokens, ceiling)?, "calibrated": reached, "source": source });
            if let Some(keep) =
                self.keep_seconds(even.compute_seconds(tokens)? - reached.reload_seconds, even.bytes(tokens)?)?
            {
                row["keep_seconds"] = json!(keep);
            }
            tiers.push(row);
        }
        let source = match self.prefill_tokens_per_second {
            Some(rate) => format!("{rate} tokens per second, given"),
            None => format!("operations of the model at {} of the GPUs'; {}", self.gpus.mfu()?, self.gpus.mfu_source()),
        };
        Ok(json!({
            "prefix_tokens": tokens,
            "bytes": even.bytes(tokens)?,
            "compute_seconds": even.compute_seconds(tokens)?,
            "compute_source": source,
            "least_bytes_per_second": even.least_bytes_per_second(tokens)?,
            "mooncake_least_bytes_per_second": self.mooncake(&model, element, tokens)?,
            "tiers": tiers,
        }))
    }

    /// What Mooncake's equation says, for models with grouped heads whose width is known.
    fn mooncake(&self, model: &Model, element: ElementType, tokens: u64) -> Result<Option<f64>> {
        let kv_heads = model.layers.first().and_then(|layers| match layers.attention {
            Attention::Heads { kv_heads, .. } => Some(kv_heads),
            Attention::Latent { .. } => None,
        });
        let (Some(hidden), Some(heads), Some(kv_heads), Some(flops)) =
            (model.hidden_size, model.heads, kv_heads, self.gpus.known_flops_per_second()?)
        else {
            return Ok(None);
        };
        let grouped = heads as f64 / kv_heads as f64;
        let element_bytes = element.block_bytes as f64 / element.block_elements as f64;
        Ok(Some(mooncake_least_bytes_per_second(flops, tokens, hidden, grouped, element_bytes)?))
    }

    fn keep_seconds(&self, saved_seconds: f64, bytes: u64) -> Result<Option<f64>> {
        let (Some(gpus_per_hour), Some(tier_per_gigabyte_month)) =
            (self.gpu_price_per_hour, self.tier_price_per_gigabyte_month)
        else {
            return Ok(None);
        };
        let prices = Prices { gpus_per_hour, tier_per_gigabyte_month, hit_probability: self.hit_probability };
        Ok(Some(prices.keep_seconds(saved_seconds, bytes)?))
    }
}

/// `warmset plan transfer`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct TransferArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Tokens of a prompt
    #[arg(long, value_name = "N", value_parser = whole)]
    tokens: i128,
    /// A link, or one with what was measured, such as lab=11GB/s [default: networks, PCIe and NVLink]
    #[arg(long, value_name = "NAME[=SPEED]", value_parser = link_spec)]
    link: Vec<LinkSpec>,
    /// How long the prompt takes to read, if layers are sent as they are ready
    #[arg(long, value_name = "SECONDS")]
    prefill_seconds: Option<f64>,
    /// Prompts per second, to tell the bandwidth they need
    #[arg(long, value_name = "N")]
    requests_per_second: Option<f64>,
}

/// Links between GPUs and machines.
const BETWEEN: [&str; 10] = [
    "eth10",
    "eth25",
    "rdma100",
    "rdma200",
    "rdma400",
    "rdma800",
    "pcie4_x16",
    "pcie5_x16",
    "nvlink_a100",
    "nvlink_h100",
];

impl TransferArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let bytes = model.kv_bytes(self.model.kv_type(&model)?, count("tokens", self.tokens)?)?;
        let layers = model.layer_count()?;
        let transfer = Transfer { bytes, layers, prefill_seconds: self.prefill_seconds };
        let mut links = Vec::new();
        for (name, ceiling, calibrated, source) in rows(&self.link, &BETWEEN)? {
            let (ceiling, calibrated) = (transfer.answer(ceiling)?, transfer.answer(calibrated)?);
            links.push(json!({ "link": name, "ceiling": ceiling, "calibrated": calibrated, "source": source }));
        }
        Ok(json!({
            "bytes": bytes,
            "layers": layers,
            "bytes_per_layer": bytes.div_ceil(layers),
            "needed_bits_per_second": self.requests_per_second.map(|rate| transfer.bits_per_second(rate)).transpose()?,
            "links": links,
        }))
    }
}

/// `warmset plan distribute`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct DistributeArguments {
    /// What every node is to have, such as 141GB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    bytes: i128,
    /// Nodes
    #[arg(long, value_name = "N", value_parser = whole)]
    nodes: i128,
    /// What the origin sends to all together, such as 100Gbit/s
    #[arg(long, value_name = "SPEED", value_parser = speed)]
    origin_bandwidth: f64,
    /// What a node receives and sends, such as 25Gbit/s
    #[arg(long, value_name = "SPEED", value_parser = speed)]
    node_bandwidth: f64,
    /// What is passed on at a time
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "64MiB")]
    chunk: i128,
    /// Nodes that a node of the tree feeds
    #[arg(long, value_name = "N", value_parser = whole, default_value = "2")]
    fanout: i128,
    /// How fast a node writes it
    #[arg(long, value_name = "SPEED", value_parser = speed, default_value = "3GB/s")]
    write_bandwidth: f64,
    /// How fast a node checks its SHA-256
    #[arg(long, value_name = "SPEED", value_parser = speed, default_value = "2GB/s")]
    hash_bandwidth: f64,
    /// How fast a node loads it from its disk
    #[arg(long, value_name = "SPEED", value_parser = speed, default_value = "7GB/s")]
    load_bandwidth: f64,
}

impl DistributeArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let bytes = count("bytes", self.bytes)?;
        let distribute = Distribute {
            bytes,
            nodes: count("nodes", self.nodes)?,
            origin_bytes_per_second: self.origin_bandwidth,
            node_bytes_per_second: self.node_bandwidth,
            chunk_bytes: count("chunk", self.chunk)?,
            fanout: count("fanout", self.fanout)?,
        };
        let answer = distribute.answer()?;
        let stages = [("write", self.write_bandwidth), ("sha256", self.hash_bandwidth), ("load", self.load_bandwidth)];
        let mut rows = Vec::new();
        for (name, bytes_per_second) in stages {
            let seconds = bytes as f64 / positive("bandwidth", bytes_per_second)?;
            rows.push(json!({ "stage": name, "bytes_per_second": bytes_per_second, "seconds": seconds }));
        }
        let mut document = serde_json::to_value(answer)?;
        document["on_each_node"] = json!(rows);
        Ok(document)
    }
}
