//! One boundary, or all of them, on the same requests.

use super::{
    demand::{Request, digest},
    plan::Boundary,
};
use crate::{
    node::{Ask, EngineCost, KvCosts, Node, PromptCost, STOP_TIME, settings},
    pool::{figures::percentile, scenario::PlanError},
};
use serde::Serialize;
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{
    Bytes, Digest, Footprint, Instant, MemoryVector, ModelName, PoolName, Priority, RequestId,
    forecast::{Parts, WallTime},
    kv::TierSettings,
    targets::Targets,
    worker::{Event, ModelSpec},
};

/// The name of the boundary that worth moves.
pub const MOVING: &str = "moving";
/// The pool of models behind a fixed boundary.
const POOL: &str = "models";
/// Looks at the memory in each phase.
const SAMPLES: u32 = 60;
/// Whoever still waits this long after the last request is not waited for.
const LAST_WAIT: Duration = Duration::from_secs(86_400);

/// The same, and no model is loaded before somebody asks.
pub const NO_PRELOAD: &str = "moving-no-preload";

/// A boundary.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// What KV has, if that is fixed.
    pub kv_share: Option<f64>,
    /// What of the forecast is used.
    pub forecast: Parts,
}

/// What came of one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The boundary.
    pub policy: String,
    /// What KV has, if that is fixed.
    pub kv_share: Option<f64>,
    /// Seconds that callers waited for their first token beyond what it takes where everything is warm, all together.
    pub waited_seconds: f64,
    /// Half of the requests had their first token within this.
    pub first_token_p50_seconds: f64,
    /// 99 of 100 of them.
    pub first_token_p99_seconds: f64,
    /// Requests without a first token.
    pub unanswered: u64,
    /// Loads.
    pub loads: u64,
    /// Models that left for others or for KV.
    pub evictions: u64,
    /// Loads ahead of requests that saved a cold start.
    pub preloads_used: u64,
    /// Loads ahead of requests that nobody used.
    pub preloads_wasted: u64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Those of them that an engine had.
    pub device_tokens: u64,
    /// Those that were brought back.
    pub restored_tokens: u64,
    /// By phase.
    pub phases: Vec<PhaseRow>,
}

/// One phase of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseRow {
    /// The phase.
    pub phase: String,
    /// Its requests.
    pub requests: u64,
    /// Seconds that these waited beyond.
    pub waited_seconds: f64,
    /// The share of the memory that KV held, on average over its time.
    pub kv_share: f64,
}

/// Who held the memory when.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Seconds since the beginning.
    pub seconds: Vec<f64>,
    /// Bytes of models.
    pub models_bytes: Vec<Bytes>,
    /// Bytes of KV.
    pub kv_bytes: Vec<Bytes>,
}

/// Boundaries that were asked for, all if none was: the moving one first.
pub fn policies(boundary: &Boundary, wanted: &[String]) -> Result<Vec<Policy>, PlanError> {
    let fixed = boundary.fixed_kv_shares.iter().map(|share| {
        let name = format!("fixed-{}", (share * 1_000.0).round() / 10.0);
        Policy { name, kv_share: Some(*share), forecast: Parts::ALL }
    });
    let no_preload = Parts { preload: false, ..Parts::ALL };
    let moving = [(MOVING, Parts::ALL), (NO_PRELOAD, no_preload)];
    let moving = moving.map(|(name, forecast)| Policy { name: name.to_owned(), kv_share: None, forecast });
    let all: Vec<Policy> = moving.into_iter().chain(fixed).collect();
    if let Some(unknown) = wanted.iter().find(|name| !all.iter().any(|policy| policy.name == **name)) {
        let known: Vec<&str> = all.iter().map(|policy| policy.name.as_str()).collect();
        return Err(PlanError::Value(format!("boundaries are {}: there is no {unknown}", known.join(", "))));
    }
    Ok(all.into_iter().filter(|policy| wanted.is_empty() || wanted.contains(&policy.name)).collect())
}

/// A machine that is about to be asked all of this.
pub fn node(boundary: &Boundary, policy: &Policy, requests: &[Request]) -> Node {
    let kv_bytes = policy.kv_share.map(|share| boundary.kv_bytes(share));
    let (models, parallel) = (boundary.models.count, boundary.parallel as usize);
    let digests: Vec<Digest> = (0..models + boundary.conversations.models).map(digest).collect();
    let held = Footprint::host(boundary.model_bytes);
    let engine = |digest: &Digest| {
        let loads = vec![Duration::from_secs_f64(boundary.load_seconds)];
        let cost = EngineCost { peak: held.clone(), steady: held.clone(), loads, stop: STOP_TIME, run: Duration::ZERO };
        (*digest, cost)
    };
    let mut limits = settings(boundary.memory_bytes, policy.forecast);
    limits.demand_half_life = Duration::from_secs_f64(boundary.demand_half_life_seconds);
    limits.priority_protection = Duration::from_secs_f64(boundary.protection_seconds);
    let pool = kv_bytes.map_or_else(PoolName::default_pool, |_| PoolName::new(POOL));
    if let Some(kv_bytes) = kv_bytes {
        limits.pools = vec![(pool.clone(), MemoryVector::host(boundary.memory_bytes - kv_bytes))];
    }
    let mut node = Node::with_engines(limits, digests.iter().map(engine).collect());
    let prompt_cost = |(model, digest): (usize, &Digest)| {
        let talks = model >= models;
        let kv = if talks { boundary.conversations.kv_bytes_per_token } else { boundary.models.kv_bytes_per_token };
        let cost = PromptCost {
            kv_bytes_per_token: kv,
            sequences: parallel,
            prefill_token_seconds: boundary.prefill_token_seconds,
            decode_token_seconds: boundary.decode_token_seconds,
        };
        (*digest, cost)
    };
    let costs = digests.iter().enumerate().map(prompt_cost).collect();
    node.keep_kv(kv_costs(boundary, kv_bytes.unwrap_or(boundary.memory_bytes)), &costs);
    let wall = Event::WallTime { wall: WallTime { weekday: 0, second: 0 }, asleep: Duration::ZERO };
    let specs = digests.iter().enumerate().filter_map(|(model, digest)| spec(boundary, (model, *digest), &pool));
    node.warm_up(std::iter::once(wall).chain(specs.map(Event::Configure)));
    for (request, number) in requests.iter().zip(1..) {
        let ask =
            Ask { request: RequestId(number), digest: digest(request.model), class: Priority::Standard, run: None };
        node.ask_with_prompt(request.at, ask, request.prompt.clone());
    }
    node
}

fn spec(boundary: &Boundary, (model, digest): (usize, Digest), pool: &PoolName) -> Option<ModelSpec> {
    let held = Footprint::host(boundary.model_bytes);
    Some(ModelSpec {
        digest,
        name: ModelName::parse(&format!("model-{model}")).ok()?,
        pool: pool.clone(),
        priority: Priority::Standard,
        pin: false,
        parallel: boundary.parallel,
        keep_alive: None,
        artifact: digest,
        peak: held.clone(),
        steady: held,
        measured: true,
        rewarm_seconds: boundary.load_seconds,
        memory_cap: None,
        targets: Targets::default(),
    })
}

fn kv_costs(boundary: &Boundary, host_bytes: Bytes) -> KvCosts {
    let disk_bytes = boundary.disk.as_ref().map_or(0, |disk| disk.bytes);
    KvCosts {
        // A run is shorter than what wears out.
        tier: TierSettings::new(host_bytes, disk_bytes, disk_bytes.saturating_mul(1_000)),
        copy_bytes_per_second: boundary.copy_bytes_per_second,
        disk_bytes_per_second: boundary.disk.as_ref().map_or(1.0, |disk| disk.bytes_per_second),
    }
}

/// Plays one boundary. What breaks is an invariant.
pub fn run(boundary: &Boundary, policy: &Policy, requests: &[Request]) -> Result<(Row, Memory), String> {
    let mut node = node(boundary, policy, requests);
    let mut memory = Memory::default();
    let (mut begins, mut shares) = (0.0, Vec::new());
    for phase in &boundary.phase {
        let mut share = 0.0;
        for sample in 1..=SAMPLES {
            let seconds = begins + phase.seconds * f64::from(sample) / f64::from(SAMPLES);
            let at = Instant::after(Duration::from_secs_f64(seconds));
            while node.next_at().is_some_and(|next| next <= at) && node.step(at) {}
            let held = node.held();
            share += held.kv_bytes as f64 / boundary.memory_bytes as f64 / f64::from(SAMPLES);
            memory.seconds.push(seconds);
            memory.models_bytes.push(held.models_bytes);
            memory.kv_bytes.push(held.kv_bytes);
        }
        shares.push(share);
        begins += phase.seconds;
    }
    let end = Instant::after(Duration::from_secs_f64(begins)) + LAST_WAIT;
    node.finish(end).map_err(|violation| format!("{violation:?}"))?;
    node.check()?;
    Ok((row(boundary, policy, requests, &node, &shares), memory))
}

fn row(boundary: &Boundary, policy: &Policy, requests: &[Request], node: &Node, shares: &[f64]) -> Row {
    let prompts = node.prompt_outcome();
    let found: BTreeMap<RequestId, Instant> = prompts.first_tokens.iter().copied().collect();
    let phase = |(phase, kv_share): (&super::plan::Phase, &f64)| PhaseRow {
        phase: phase.name.clone(),
        requests: 0,
        waited_seconds: 0.0,
        kv_share: *kv_share,
    };
    let mut phases: Vec<PhaseRow> = boundary.phase.iter().zip(shares).map(phase).collect();
    let mut seconds = Vec::new();
    for (request, number) in requests.iter().zip(1..) {
        let row = &mut phases[request.phase];
        row.requests += 1;
        let Some(first) = found.get(&RequestId(number)) else { continue };
        let took = first.since(request.at).as_secs_f64();
        let new_tokens = f64::from(request.prompt.tokens - request.said_tokens);
        row.waited_seconds += took - new_tokens * boundary.prefill_token_seconds - boundary.decode_token_seconds;
        seconds.push(took);
    }
    seconds.sort_by(f64::total_cmp);
    Row {
        policy: policy.name.clone(),
        kv_share: policy.kv_share,
        waited_seconds: phases.iter().map(|phase| phase.waited_seconds).sum(),
        first_token_p50_seconds: percentile(&seconds, 0.5).unwrap_or(0.0),
        first_token_p99_seconds: percentile(&seconds, 0.99).unwrap_or(0.0),
        unanswered: requests.len() as u64 - seconds.len() as u64,
        loads: node.outcome.loads,
        evictions: node.outcome.evictions,
        preloads_used: node.outcome.preloads_used,
        preloads_wasted: node.outcome.preloads_wasted,
        prompt_tokens: prompts.prompt_tokens,
        device_tokens: prompts.device_tokens,
        restored_tokens: prompts.restored_tokens,
        phases,
    }
}

/// What the moving boundary lost, by what the best of the fixed ones did; none without both.
pub fn ratio_to_best_fixed(rows: &[Row]) -> Option<(f64, &str)> {
    let moving = rows.iter().find(|row| row.policy == MOVING)?;
    let fixed = rows.iter().filter(|row| row.kv_share.is_some());
    let best = fixed.min_by(|one, other| one.waited_seconds.total_cmp(&other.waited_seconds))?;
    Some((moving.waited_seconds / best.waited_seconds, &best.policy))
}
