//! Runs as a file describes them: replicas, what their steps take, requests at several rates or from a trace.

use super::{
    cost::{Machine, Parts, Picoseconds, StepCost, TIME_MAX, picoseconds},
    engine::EngineSettings,
    fit::{self, Fit, Sample},
    report::{self, Row},
    service::Discipline,
    simulate::{Fleet, Level, Routing, simulate},
    trace::{self, TraceError},
    workload::{Demand, Workload},
};
use crate::calculate::{
    hardware::Gpu,
    input::{Refused, at_least_one, part_of, product, share},
    model::{Attention, ElementType, Model, Weights},
};
use serde::{Deserialize, Serialize};

/// What is shipped: the name, and the file as it is in `scenarios/`.
pub const SHIPPED: (&str, &str) = ("batching", include_str!("../../../../scenarios/batching.toml"));

const RATES_MAX: usize = 32;
const REPLICAS_MAX: usize = 10_000;
const STEP_TOKENS_MAX: u32 = 1 << 20;
const BLOCK_TOKENS_MAX: u32 = 1 << 12;
const KV_TOKENS_MAX: u64 = 1 << 40;
const SECONDS_MAX: f64 = 30.0 * 86_400.0;
const DRAIN_SECONDS_MAX: f64 = 7.0 * 86_400.0;

/// Why a plan cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It cannot be read.
    #[error("the scenario cannot be read")]
    Toml(#[from] toml::de::Error),
    /// A value makes no sense.
    #[error("the scenario's {0}")]
    Value(&'static str),
    /// A figure of the model, its GPUs or its costs makes no sense.
    #[error("a figure of the scenario cannot be used")]
    Refused(#[from] Refused),
    /// There is no such level.
    #[error("there is no level {0}: there are step, request")]
    Level(String),
    /// The trace cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// What a file describes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For people.
    pub description: String,
    /// Rates to compare, where there is no trace.
    pub requests_per_second: Vec<f64>,
    /// Everything else.
    pub batching: Batching,
}

/// Replicas and what they are asked for.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batching {
    replicas: usize,
    #[serde(default)]
    routing: Routing,
    #[serde(default)]
    discipline: Discipline,
    /// Requests that come before this are not looked at.
    #[serde(default)]
    warm_up_seconds: f64,
    /// How long after the last request a run goes on.
    #[serde(default = "an_hour")]
    drain_seconds: f64,
    demand: Demand,
    engine: EngineOptions,
    model: Option<ModelOptions>,
    gpu: Option<GpuOptions>,
    cost: Option<Parts>,
    #[serde(default)]
    sample: Vec<Sample>,
}

fn an_hour() -> f64 {
    3600.0
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineOptions {
    step_tokens: u32,
    max_sequences: u32,
    /// Tokens of prompts in a step in which some generate, if fewer than all others.
    prefill_tokens_beside: Option<u32>,
    #[serde(default = "sixteen")]
    block_tokens: u32,
    /// Tokens that there is memory for, if not what the GPUs have left.
    kv_tokens: Option<u64>,
    #[serde(default = "yes")]
    prefix_cache: bool,
}

fn sixteen() -> u32 {
    16
}

fn yes() -> bool {
    true
}

/// The shape of a model whose layers are alike.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelOptions {
    layers: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    parameters: u64,
    /// Of these, parameters that are looked up and not multiplied.
    #[serde(default)]
    embedding_parameters: u64,
    #[serde(default = "bf16")]
    weights_dtype: String,
    #[serde(default = "bf16")]
    kv_dtype: String,
}

fn bf16() -> String {
    "bf16".to_owned()
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuOptions {
    name: String,
    #[serde(default = "one")]
    count: u64,
    /// The part of their memory that weights and KV may have.
    #[serde(default = "nine_tenths")]
    memory_share: f64,
}

fn one() -> u64 {
    1
}

fn nine_tenths() -> f64 {
    0.9
}

/// What a plan comes to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Settings {
    /// Replicas.
    pub replicas: usize,
    /// Which of them a request goes to.
    pub routing: Routing,
    /// How requests get in each other's way where steps are not looked at.
    pub discipline: Discipline,
    /// What each is told.
    pub engine: EngineSettings,
    /// What steps take.
    pub cost: Parts,
    /// Where that comes from.
    pub cost_source: &'static str,
    /// How well it fits, if it comes from measured steps.
    pub fit: Option<Fit>,
}

/// Requests, and the rate they were made up for.
#[derive(Debug, Clone)]
pub struct Load {
    /// None where they come from a trace.
    pub requests_per_second: Option<f64>,
    /// The requests.
    pub workload: Workload,
}

impl Plan {
    /// Whether a text describes one: it has a table `[batching]`.
    pub fn is_described_by(text: &str) -> bool {
        crate::scenario::has_table(text, "batching")
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), PlanError> {
        let Batching { replicas, warm_up_seconds, drain_seconds, demand, engine, .. } = &self.batching;
        let duration = |seconds: f64| (0.0..=SECONDS_MAX).contains(&seconds);
        let rates = &self.requests_per_second;
        let lasts = |rate: &f64| *rate > 0.0 && rate.is_finite() && demand.requests as f64 / rate <= SECONDS_MAX;
        let rules = [
            ((1..=RATES_MAX).contains(&rates.len()), "requests_per_second must be 1 to 32 numbers"),
            (rates.iter().all(lasts), "requests_per_second must be above 0, and a run last at most 30 days"),
            ((1..=REPLICAS_MAX).contains(replicas), "replicas must be between 1 and 10000"),
            (duration(*warm_up_seconds), "warm_up_seconds must be between 0 and 2592000"),
            ((0.0..=DRAIN_SECONDS_MAX).contains(drain_seconds), "drain_seconds must be between 0 and 604800"),
            ((1..=STEP_TOKENS_MAX).contains(&engine.step_tokens), "step_tokens must be between 1 and 1048576"),
            (
                (1..=engine.step_tokens).contains(&engine.max_sequences),
                "max_sequences must be between 1 and step_tokens: each that generates takes a token of a step",
            ),
            (engine.prefill_tokens_beside != Some(0), "prefill_tokens_beside must be at least 1"),
            ((1..=BLOCK_TOKENS_MAX).contains(&engine.block_tokens), "block_tokens must be between 1 and 4096"),
            (
                engine
                    .kv_tokens
                    .is_none_or(|tokens| (u64::from(engine.block_tokens)..=KV_TOKENS_MAX).contains(&tokens)),
                "kv_tokens must be at least block_tokens, and at most 1099511627776",
            ),
        ];
        let broken = rules.iter().find(|(holds, _)| !holds).map(|(_, problem)| *problem).or_else(|| demand.problem());
        match broken {
            Some(problem) => Err(PlanError::Value(problem)),
            None => self.settings().map(|_| ()),
        }
    }

    /// What it comes to.
    pub fn settings(&self) -> Result<Settings, PlanError> {
        let Batching { replicas, routing, discipline, engine, model, gpu, cost, sample, .. } = &self.batching;
        let machine = match (model, gpu) {
            (Some(model), Some(gpu)) => Some((model, gpu)),
            (None, None) => None,
            _ => return Err(PlanError::Value("model and gpu must both be there or both be missing")),
        };
        let sources = usize::from(cost.is_some()) + usize::from(!sample.is_empty());
        let (parts, cost_source, fit) = match (machine, cost, sources) {
            (_, _, 2) => return Err(PlanError::Value("cost and sample are two ways to say the same: give one")),
            (_, Some(parts), _) => (*parts, "given", None),
            (_, None, 1) => {
                let fit = fit::fit(sample)?;
                (fit.parts, "fitted from measured steps", Some(fit))
            }
            (Some((model, gpu)), None, _) => (gpu.parts(model)?, "roofline of the GPU", None),
            (None, None, _) => return Err(PlanError::Value("cost is missing: give cost, sample, or model and gpu")),
        };
        StepCost::new(&parts)?;
        let kv_tokens = match (engine.kv_tokens, machine) {
            (Some(tokens), _) => tokens,
            (None, Some((model, gpu))) => gpu.kv_tokens(model)?,
            (None, None) => return Err(PlanError::Value("kv_tokens is missing: give it, or model and gpu")),
        };
        let blocks = kv_tokens / u64::from(engine.block_tokens);
        let engine = EngineSettings {
            step_tokens: engine.step_tokens,
            max_sequences: engine.max_sequences,
            prefill_tokens_beside: engine.prefill_tokens_beside.unwrap_or(engine.step_tokens),
            block_tokens: engine.block_tokens,
            blocks: at_least_one("kv_tokens", blocks)?,
            prefix_cache: engine.prefix_cache,
        };
        let (replicas, routing, discipline) = (*replicas, *routing, *discipline);
        Ok(Settings { replicas, routing, discipline, engine, cost: parts, cost_source, fit })
    }

    /// Its requests: those of a trace if one is given, else made up from the seed, once for each rate.
    pub fn loads(&self, seed: u64, trace: Option<&str>) -> Result<Vec<Load>, PlanError> {
        let loads = match trace {
            Some(text) => vec![Load { requests_per_second: None, workload: trace::read(text)? }],
            None => {
                let load = |rate: &f64| Load {
                    requests_per_second: Some(*rate),
                    workload: self.batching.demand.workload(*rate, seed),
                };
                self.requests_per_second.iter().map(load).collect()
            }
        };
        let block_tokens = self.batching.engine.block_tokens;
        if loads.iter().any(|load| !load.workload.chunk_tokens().is_multiple_of(block_tokens)) {
            return Err(PlanError::Value(
                "block_tokens must go into the blocks of the trace (512), or into shared_tokens, without a rest",
            ));
        }
        if loads.iter().any(|load| load.workload.ends() > picoseconds(SECONDS_MAX)) {
            return Err(PlanError::Value("trace must not be longer than 30 days"));
        }
        Ok(loads)
    }

    /// The levels that were asked for; both if none was.
    pub fn levels(wanted: &[String]) -> Result<Vec<Level>, PlanError> {
        let known = [("step", Level::Step), ("request", Level::Request)];
        if let Some(unknown) = wanted.iter().find(|name| !known.iter().any(|(level, _)| level == name)) {
            return Err(PlanError::Level(unknown.clone()));
        }
        let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|other| other == name);
        Ok(known.into_iter().filter(|(name, _)| is_wanted(name)).map(|(_, level)| level).collect())
    }

    /// One run, and another one of the same requests all at once, for what the replicas can do.
    pub fn run(&self, settings: &Settings, load: &Load, level: Level) -> Result<Row, PlanError> {
        let fleet = settings.fleet()?;
        let at_once = simulate(&load.workload.at_once(), &fleet, level, TIME_MAX);
        let until: Picoseconds = load.workload.ends() + picoseconds(self.batching.drain_seconds);
        let outcomes = simulate(&load.workload, &fleet, level, until);
        let warm_up = picoseconds(self.batching.warm_up_seconds);
        Ok(Row::new(level, &load.workload, &outcomes, report::capacity(&at_once), warm_up))
    }
}

impl Settings {
    /// As a run takes it.
    pub fn fleet(&self) -> Result<Fleet, PlanError> {
        let Self { replicas, routing, discipline, engine, .. } = *self;
        Ok(Fleet { replicas, routing, engine, cost: StepCost::new(&self.cost)?, discipline })
    }
}

impl ModelOptions {
    fn model(&self) -> Result<Model, Refused> {
        let Self { layers, heads, kv_heads, head_dim, parameters, embedding_parameters, .. } = *self;
        let attention = Attention::Heads { kv_heads, key_length: head_dim, value_length: head_dim };
        let mut model = Model::uniform(layers, attention);
        let dense = Weights::dense(parameters, ElementType::named(&self.weights_dtype)?)?;
        let multiplied = at_least_one("embedding_parameters", parameters.saturating_sub(embedding_parameters))?;
        let read = ElementType::named(&self.weights_dtype)?.bytes(multiplied)?;
        let weights =
            Weights { step_bytes: read, prompt_parameters: multiplied, token_parameters: multiplied, ..dense };
        model.weights = Some(weights);
        model.layers[0].query_width = Some(product("heads", &[at_least_one("heads", heads)?, head_dim, 2])?);
        Ok(model)
    }
}

impl GpuOptions {
    fn parts(&self, model: &ModelOptions) -> Result<Parts, Refused> {
        let machine = Machine { gpu: Gpu::named(&self.name)?, gpus: self.count };
        machine.parts(&model.model()?, ElementType::named(&model.kv_dtype)?)
    }

    /// Tokens of KV that there is room for beside the weights.
    fn kv_tokens(&self, options: &ModelOptions) -> Result<u64, Refused> {
        let model = options.model()?;
        let memory = product("gpu", &[Gpu::named(&self.name)?.memory_bytes, self.count])?;
        let usable = part_of(memory, share("memory_share", self.memory_share)?);
        let weights = model.weights.map_or(0, |weights| weights.bytes);
        let per_token = model.kv_bytes_per_token(ElementType::named(&options.kv_dtype)?)?;
        let tokens = usable.saturating_sub(weights) / per_token;
        at_least_one("model", tokens).map_err(|refused| Refused {
            problem: format!("has {weights} bytes of weights, and the GPUs have {usable}: nothing is left for KV")
                .into(),
            ..refused
        })
    }
}
