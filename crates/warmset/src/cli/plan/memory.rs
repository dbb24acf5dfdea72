//! `warmset plan warm-set`, `kv`, `sessions`, `paging` and `prefixes`: what fits.

use super::{
    model::{GpuArguments, ModelArguments, weights},
    values::{as_megabytes, count, megabytes, optional, size, whole},
};
use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};
use warmset_engine::gguf;
use warmset_planner::calculate::{
    input::product,
    model::Model,
    paging::Paging,
    prefixes::Prefixes,
    sessions::{self, Sessions},
    warm_set::{Answer, Room, WarmModel, WarmSet},
};

/// A model of a warm set, as the command line has it.
#[derive(Debug, Clone)]
pub(crate) struct WarmSpec {
    name: String,
    steady: i128,
    peak: Option<i128>,
    request: i128,
    concurrency: i128,
}

/// Reads `NAME=MB[,peak=MB][,request=MB][,concurrency=N]`.
fn warm_spec(text: &str) -> Result<WarmSpec, String> {
    let form = || format!("{text:?} is not NAME=MB[,peak=MB][,request=MB][,concurrency=N]");
    let (name, rest) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(form)?;
    let mut parts = rest.split(',');
    let steady = megabytes(parts.next().unwrap_or_default())?;
    let mut spec = WarmSpec { name: name.to_owned(), steady, peak: None, request: 0, concurrency: 1 };
    for part in parts {
        match part.split_once('=').ok_or_else(form)? {
            ("peak", value) => spec.peak = Some(megabytes(value)?),
            ("request", value) => spec.request = megabytes(value)?,
            ("concurrency", value) => spec.concurrency = whole(value)?,
            _ => return Err(form()),
        }
    }
    Ok(spec)
}

/// Reads `NAME=FILE`.
fn named_file(text: &str) -> Result<(String, std::path::PathBuf), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok((name.to_owned(), file.into())),
        _ => Err(format!("{text:?} is not NAME=FILE")),
    }
}

/// `warmset plan warm-set`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct WarmSetArguments {
    /// A model and what it keeps, in megabytes; its peak while loading, what a request takes and how many run at once, if known
    #[arg(long, value_name = "NAME=MB[,peak=MB][,request=MB][,concurrency=N]", value_parser = warm_spec)]
    model: Vec<WarmSpec>,
    /// A model whose memory is estimated from the header of its file
    #[arg(long, value_name = "NAME=FILE", value_parser = named_file)]
    gguf: Vec<(String, std::path::PathBuf)>,
    /// Tokens of a sequence, for those estimates
    #[arg(long, value_name = "N", value_parser = whole, default_value = "4096")]
    context_tokens: i128,
    /// Sequences together, for those estimates
    #[arg(long, value_name = "N", value_parser = whole, default_value = "4")]
    parallel: i128,
    /// Memory of a worker
    #[arg(long, value_name = "MB", value_parser = megabytes)]
    worker_memory_mb: i128,
    /// What of it is kept free
    #[arg(long, value_name = "MB", value_parser = megabytes, default_value = "0")]
    reserve_mb: i128,
    /// What is lost between allocations, as a share of what models keep
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    fragmentation: f64,
    /// Models that load at the same moment
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    loads_at_once: i128,
    /// Workers that are there
    #[arg(long, value_name = "N", value_parser = whole)]
    workers: Option<i128>,
}

impl WarmSetArguments {
    fn models(&self) -> Result<Vec<WarmModel>> {
        let mut models = Vec::new();
        for spec in &self.model {
            let of = |what: &str, value: i128| match u64::try_from(value) {
                Ok(bytes) => Ok(bytes),
                Err(_) => bail!("the {what} of {} is {}: give at least 0", spec.name, as_megabytes(value)),
            };
            let steady = of("size", spec.steady)?;
            models.push(WarmModel {
                name: spec.name.clone(),
                steady,
                peak: spec.peak.map_or(Ok(steady), |peak| of("peak", peak))?,
                per_request: of("request", spec.request)?,
                concurrency: count("concurrency", spec.concurrency)?,
            });
        }
        let tokens = u32::try_from(count("context-tokens", self.context_tokens)?)?;
        let parallel = u32::try_from(count("parallel", self.parallel)?)?;
        for (name, path) in &self.gguf {
            let estimate = gguf::estimate(&gguf::read_header_of_file(path)?, tokens, parallel);
            let host = |footprint: &warmset_core::memory::Footprint| {
                footprint.private_host_bytes.saturating_add(footprint.shared_host_bytes)
            };
            let (steady, peak) = (host(&estimate.steady), host(&estimate.peak));
            models.push(WarmModel { name: name.clone(), steady, peak, per_request: 0, concurrency: 0 });
        }
        Ok(models)
    }

    pub(super) fn document(&self) -> Result<Value> {
        let megabyte_count = |name: &str, value: i128| match u64::try_from(value) {
            Ok(bytes) => Ok(bytes),
            Err(_) => bail!("{name} is {}: give at least 0, and not more than can be counted", as_megabytes(value)),
        };
        let set = WarmSet {
            models: self.models()?,
            budget: megabyte_count("worker-memory-mb", self.worker_memory_mb)?,
            reserve: megabyte_count("reserve-mb", self.reserve_mb)?,
            fragmentation: self.fragmentation,
            loads_at_once: count("loads-at-once", self.loads_at_once)?,
        };
        let answer = set.answer()?;
        let mut document = json!({
            "fits": answer.steady.fits(),
            "headroom_mb": as_megabytes(answer.steady.headroom),
            "used_mb": as_megabytes(answer.steady.used as i128),
            "usable_mb": as_megabytes(i128::from(answer.usable)),
            "worst": worst(&answer),
            "rolls": answer.rolls.iter().map(|roll| room(&roll.side_by_side, Some(&roll.model))).collect::<Vec<_>>(),
            "workers": answer.workers,
            "too_large": answer.too_large,
        });
        if let (Some(given), Some(workers)) = (optional("workers", self.workers)?, &answer.workers) {
            document["workers"]["given"] = json!(given);
            document["workers"]["given_hold_it"] = json!(given >= workers.packed);
            document["workers"]["given_survive_one_loss"] = json!(given > workers.packed);
        }
        Ok(document)
    }
}

fn worst(answer: &Answer) -> Value {
    let mut worst = room(&answer.worst, None);
    worst["requests_mb"] = as_megabytes(answer.requests as i128);
    worst["fragmentation_mb"] = as_megabytes(answer.fragmentation as i128);
    worst["loading_mb"] = as_megabytes(answer.loading as i128);
    worst
}

fn room(room: &Room, model: Option<&str>) -> Value {
    let mut document = json!({});
    if let Some(model) = model {
        document["model"] = json!(model);
    }
    document["fits"] = json!(room.fits());
    document["used_mb"] = as_megabytes(room.used as i128);
    document["headroom_mb"] = as_megabytes(room.headroom);
    document
}

/// `warmset plan kv`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct KvArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    tokens: i128,
    /// Sequences
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    sequences: i128,
    /// GPUs that the model is split over
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    gpus: i128,
}

impl KvArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let (tokens, sequences) = (count("tokens", self.tokens)?, count("sequences", self.sequences)?);
        let kv = model.kv(self.model.kv_type(&model)?, tokens, sequences, count("gpus", self.gpus)?)?;
        let mut document = serde_json::to_value(kv)?;
        document["layers"] = json!(model.layer_count()?);
        Ok(document)
    }
}

/// What one sequence takes, for the commands that ask how many fit.
#[derive(Debug, Args)]
pub(crate) struct SessionsArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    /// Tokens of a session
    #[arg(long, value_name = "N", value_parser = whole)]
    tokens: i128,
    /// Tokens they may grow to
    #[arg(long, value_name = "N", value_parser = whole)]
    grow_to_tokens: Option<i128>,
    /// Sessions
    #[arg(long, value_name = "N", value_parser = whole)]
    sessions: i128,
    /// Memory of a replica [default: that of its GPUs]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<i128>,
    /// Part of the memory that the engine uses
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    memory_utilisation: f64,
    /// Memory for activations and graphs
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "0")]
    activations: i128,
    /// Tokens of a block, which sessions fill to the last
    #[arg(long, value_name = "N", value_parser = whole, default_value = "16")]
    block_tokens: i128,
}

impl SessionsArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let tokens = count("tokens", self.tokens)?;
        let mut document = json!({
            "model": { "weight_bytes": weights(&model)?.bytes, "kv_bytes_per_token": model.kv_bytes_per_token(self.model.kv_type(&model)?)? },
        });
        let now = self.sides(&model, tokens)?;
        document["tokens"] = json!(tokens);
        document["sessions"] = json!(now.0);
        if let Some(grown) = optional("grow-to-tokens", self.grow_to_tokens)? {
            let (sides, bytes) = self.sides(&model, grown)?;
            document["grown"] =
                json!({ "tokens": grown, "growth_factor": bytes as f64 / now.1 as f64, "sessions": sides });
        }
        Ok(document)
    }

    /// With all memory, and with what the engine uses.
    fn sides(&self, model: &Model, tokens: u64) -> Result<(Value, u64)> {
        let memory_bytes = optional("memory", self.memory)?.map_or_else(|| self.gpus.memory_bytes(), Ok)?;
        let block = count("block-tokens", self.block_tokens)?.max(1);
        let whole_blocks = product("tokens", &[tokens.div_ceil(block), block])?;
        let answer = |memory_utilisation: f64| -> Result<sessions::Answer> {
            let sessions = Sessions {
                memory_bytes,
                memory_utilisation,
                weight_bytes: weights(model)?.bytes,
                other_bytes: count("activations", self.activations)?,
                session_bytes: model.kv_bytes(self.model.kv_type(model)?, whole_blocks)?,
                sessions: count("sessions", self.sessions)?,
            };
            Ok(sessions.answer()?)
        };
        let planned = answer(self.memory_utilisation)?;
        Ok((json!({ "ceiling": answer(1.0)?, "calibrated": planned }), planned.total_bytes))
    }
}

/// `warmset plan paging`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PagingArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Tokens that are reserved for each sequence without paging
    #[arg(long, value_name = "N", value_parser = whole)]
    reserved_tokens: i128,
    /// Tokens that a sequence has
    #[arg(long, value_name = "N", value_parser = whole)]
    average_tokens: i128,
    /// Tokens of a block
    #[arg(long, value_name = "N", value_parser = whole, default_value = "16")]
    block_tokens: i128,
    /// Memory for KV, to count sequences
    #[arg(long, value_name = "SIZE", value_parser = size)]
    kv_memory: Option<i128>,
}

impl PagingArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let budget = match optional("kv-memory", self.kv_memory)? {
            Some(bytes) => {
                let model = self.model.model()?;
                Some((model.kv_bytes_per_token(self.model.kv_type(&model)?)?, bytes))
            }
            None => None,
        };
        let paging = Paging {
            reserved_tokens: count("reserved-tokens", self.reserved_tokens)?,
            average_tokens: count("average-tokens", self.average_tokens)?,
            block_tokens: count("block-tokens", self.block_tokens)?,
            budget,
        };
        Ok(serde_json::to_value(paging.answer()?)?)
    }
}

/// `warmset plan prefixes`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PrefixesArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    /// Tenants, each with a prompt of its own
    #[arg(long, value_name = "N", value_parser = whole)]
    tenants: i128,
    /// Tokens of that prompt
    #[arg(long, value_name = "N", value_parser = whole)]
    tokens: i128,
    /// Replicas
    #[arg(long, value_name = "N", value_parser = whole)]
    replicas: i128,
    /// Part of the requests that one tenant has
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    hot_share: f64,
    /// The most load of a replica, by the mean of all
    #[arg(long, value_name = "TIMES", default_value_t = 1.25)]
    load_bound: f64,
    /// KV for prompts on one replica
    #[arg(long, value_name = "SIZE", value_parser = size)]
    kv_memory: Option<i128>,
}

impl PrefixesArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let prefixes = Prefixes {
            tenants: count("tenants", self.tenants)?,
            prefix_bytes: model.kv_bytes(self.model.kv_type(&model)?, count("tokens", self.tokens)?)?,
            replicas: count("replicas", self.replicas)?,
            hot_share: self.hot_share,
            load_bound: self.load_bound,
            room_bytes: optional("kv-memory", self.kv_memory)?,
        };
        Ok(serde_json::to_value(prefixes.answer()?)?)
    }
}
