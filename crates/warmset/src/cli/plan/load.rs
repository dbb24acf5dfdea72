//! `warmset plan queueing`, `fleet`, `active-models`, `pd-pools`, `batch` and `engine-args`: how much of it.

use super::{
    model::{GpuArguments, ModelArguments, RateArguments, weights},
    values::{count, optional, size, whole},
};
use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};
use warmset_planner::calculate::{
    batch::{Job, Profile},
    engine_args::{Engine, Plan, Use},
    fleet::{Fleet, expected_active},
    input::{finite, positive},
    pools::Pools,
    queueing::Queue,
    sessions::Sessions,
};

/// `warmset plan queueing`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct QueueingArguments {
    /// Requests, at random moments
    #[arg(long, value_name = "N")]
    arrivals_per_second: f64,
    /// What each takes on average
    #[arg(long, value_name = "SECONDS")]
    service_seconds: f64,
    /// Requests at the same time
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    servers: i128,
    /// One in a hundred may wait longer: the fewest servers for it are told
    #[arg(long, value_name = "SECONDS")]
    wait_p99_seconds: Option<f64>,
}

impl QueueingArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let queue = Queue {
            arrivals_per_second: self.arrivals_per_second,
            service_seconds: self.service_seconds,
            servers: count("servers", self.servers)?,
        };
        let exponential = queue.exponential()?;
        let constant = if queue.servers == 1 { queue.constant()? } else { None };
        Ok(json!({
            "stable": exponential.is_some(),
            "offered_servers": queue.offered()?,
            "least_servers": queue.least_servers()?,
            "servers_for_target": self.wait_p99_seconds.map(|seconds| queue.servers_for(seconds)).transpose()?,
            "exponential_service": exponential,
            "constant_service": constant,
        }))
    }
}

/// `warmset plan fleet`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct FleetArguments {
    /// Requests of all callers
    #[arg(long, value_name = "N")]
    requests_per_second: f64,
    /// What one takes on a replica that is as busy as it will be
    #[arg(long, value_name = "SECONDS")]
    service_seconds: f64,
    /// Requests that a replica computes together
    #[arg(long, value_name = "N", value_parser = whole)]
    requests_per_replica: i128,
    /// One in a hundred may wait longer
    #[arg(long, value_name = "SECONDS")]
    wait_p99_seconds: f64,
    /// Replicas that may fail
    #[arg(long, value_name = "N", value_parser = whole, default_value = "1")]
    spare_replicas: i128,
    /// Price of a replica, in any currency
    #[arg(long, value_name = "PRICE")]
    price_per_replica_hour: Option<f64>,
}

impl FleetArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let fleet = Fleet {
            requests_per_second: self.requests_per_second,
            service_seconds: self.service_seconds,
            requests_per_replica: count("requests-per-replica", self.requests_per_replica)?,
            wait_p99_seconds: self.wait_p99_seconds,
            spare_replicas: count("spare-replicas", self.spare_replicas)?,
        };
        let answer = fleet.answer()?;
        let mut document = serde_json::to_value(answer)?;
        if let Some(price) = self.price_per_replica_hour {
            let cost = finite("cost", positive("price-per-replica-hour", price)? * answer.replicas as f64)?;
            let thousands = self.requests_per_second * 3.6;
            document["cost_per_hour"] = money(cost);
            document["cost_per_thousand_requests"] = money(finite("cost", cost / thousands)?);
        }
        Ok(document)
    }
}

/// `warmset plan active-models`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ActiveModelsArguments {
    /// Models
    #[arg(long, value_name = "N", value_parser = whole)]
    models: i128,
    /// Requests for each
    #[arg(long, value_name = "N")]
    requests_per_second_per_model: f64,
    /// What one takes
    #[arg(long, value_name = "SECONDS")]
    service_seconds: f64,
}

impl ActiveModelsArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let models = count("models", self.models)?;
        let active = expected_active(models, self.requests_per_second_per_model, self.service_seconds)?;
        Ok(json!({ "models": models, "expected_active": active, "active_share": active / models as f64 }))
    }
}

/// Prompts and answers of a load.
#[derive(Debug, Clone, Args)]
pub(crate) struct TokensArguments {
    /// Tokens of a prompt
    #[arg(long, value_name = "N", value_parser = whole)]
    prompt_tokens: i128,
    /// The part of prompts that need not be read again
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    cached_share: f64,
    /// Tokens of an answer
    #[arg(long, value_name = "N", value_parser = whole)]
    output_tokens: i128,
}

impl TokensArguments {
    fn prompt(&self) -> Result<u64> {
        count("prompt-tokens", self.prompt_tokens)
    }

    fn output(&self) -> Result<u64> {
        count("output-tokens", self.output_tokens)
    }

    /// What a sequence has when it is half answered.
    fn average(&self) -> Result<u64> {
        Ok(self.prompt()?.saturating_add(self.output()? / 2))
    }
}

/// `warmset plan pd-pools`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct PoolsArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    #[command(flatten)]
    pub(super) rates: RateArguments,
    #[command(flatten)]
    tokens: TokensArguments,
    /// Requests
    #[arg(long, value_name = "N")]
    requests_per_second: f64,
    /// Sequences that an instance generates together
    #[arg(long, value_name = "N", value_parser = whole, default_value = "32")]
    batch: i128,
    /// The part of their time that instances are to work
    #[arg(long, value_name = "SHARE", default_value_t = 0.7)]
    utilisation: f64,
}

impl PoolsArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let (prompt, batch) = (self.tokens.prompt()?, count("batch", self.batch)?);
        let model = self.model.model()?;
        let prompt_kv_bytes = model.kv_bytes(self.model.kv_type(&model)?, prompt)?;
        let pools = Pools {
            requests_per_second: self.requests_per_second,
            prompt_tokens: prompt,
            cached_share: self.tokens.cached_share,
            output_tokens: self.tokens.output()?,
            prefill_tokens_per_second: self.rates.prefill(&self.model, &self.gpus, prompt)?,
            decode_tokens_per_second: self.rates.decode(&self.model, &self.gpus, batch, self.tokens.average()?)?,
            decode_batch: batch,
            utilisation: self.utilisation,
            prompt_kv_bytes,
        };
        let mut document = serde_json::to_value(pools.answer()?)?;
        document["prefill_tokens_per_second"] = json!(pools.prefill_tokens_per_second);
        document["decode_tokens_per_second"] = json!(pools.decode_tokens_per_second);
        document["rates_source"] = json!(self.rates.source());
        Ok(document)
    }
}

/// `warmset plan batch`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BatchArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    #[command(flatten)]
    pub(super) rates: RateArguments,
    #[command(flatten)]
    tokens: TokensArguments,
    /// Requests
    #[arg(long, value_name = "N", value_parser = whole)]
    requests: i128,
    /// Hours until all must be done
    #[arg(long, value_name = "N", value_parser = whole, default_value = "8")]
    window_hours: i128,
    /// The part of an instance's time that other traffic leaves, for each hour; the last holds for those after it
    #[arg(long, value_name = "SHARE,...", value_delimiter = ',', default_value = "1")]
    free_share: Vec<f64>,
    /// Sequences together [default: powers of two up to what has room]
    #[arg(long, value_name = "N,M,...", value_parser = whole, value_delimiter = ',')]
    batch: Vec<i128>,
    /// Part of the memory that the engine uses
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    memory_utilisation: f64,
    /// Instances that are there [default: as many as the window asks for]
    #[arg(long, value_name = "N", value_parser = whole)]
    instances: Option<i128>,
    /// Price of an instance, in any currency
    #[arg(long, value_name = "PRICE")]
    price_per_instance_hour: Option<f64>,
}

impl BatchArguments {
    /// Sequences that have room; none if that cannot be told.
    fn room(&self) -> Result<Option<u64>> {
        if self.rates.measured_decode().is_some() {
            return Ok(None);
        }
        let model = self.model.model()?;
        let length = self.tokens.prompt()?.saturating_add(self.tokens.output()?);
        let sessions = Sessions {
            memory_bytes: self.gpus.memory_bytes()?,
            memory_utilisation: self.memory_utilisation,
            weight_bytes: weights(&model)?.bytes,
            other_bytes: 0,
            session_bytes: model.kv_bytes(self.model.kv_type(&model)?, length)?,
            sessions: 1,
        };
        match sessions.answer()?.sessions_that_fit {
            0 => bail!("weights and one sequence of {length} tokens have no room: give more --gpus, or fewer tokens"),
            fit => Ok(Some(fit)),
        }
    }

    fn batches(&self, room: Option<u64>) -> Result<Vec<u64>> {
        if !self.batch.is_empty() {
            return self.batch.iter().map(|batch| count("batch", *batch)).collect();
        }
        let Some(room) = room else { return Ok(vec![1]) };
        let mut batches: Vec<u64> = (0..10).map(|power| 1 << power).filter(|batch| *batch < room).collect();
        batches.push(room.min(1024));
        batches.dedup();
        Ok(batches)
    }

    pub(super) fn document(&self) -> Result<Value> {
        let job = Job {
            requests: count("requests", self.requests)?,
            prompt_tokens: self.tokens.prompt()?,
            cached_share: self.tokens.cached_share,
            output_tokens: self.tokens.output()?,
            window_hours: count("window-hours", self.window_hours)?,
            free_shares: &self.free_share,
            instances: optional("instances", self.instances)?,
            price_per_instance_hour: self.price_per_instance_hour,
        };
        let room = self.room()?;
        let prefill = self.rates.prefill(&self.model, &self.gpus, job.prompt_tokens)?;
        let mut rows = Vec::new();
        for batch in self.batches(room)? {
            let decode = self.rates.decode(&self.model, &self.gpus, batch, self.tokens.average()?)?;
            let answer =
                job.answer(Profile { batch, prefill_tokens_per_second: prefill, decode_tokens_per_second: decode })?;
            let mut row = serde_json::to_value(answer)?;
            row["has_room"] = json!(room.is_none_or(|room| batch <= room));
            for name in ["cost", "cost_per_million_output_tokens"] {
                row[name] = row[name].as_f64().map_or(Value::Null, money);
            }
            rows.push(row);
        }
        Ok(json!({ "sequences_that_fit": room, "rates_source": self.rates.source(), "rows": rows }))
    }
}

/// Money as a decimal number, to a millionth.
fn money(amount: f64) -> Value {
    let text = format!("{amount:.6}");
    json!(text.trim_end_matches('0').trim_end_matches('.'))
}

/// `warmset plan engine-args`
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct EngineArguments {
    #[command(flatten)]
    pub(super) model: ModelArguments,
    #[command(flatten)]
    pub(super) gpus: GpuArguments,
    /// Tokens of the longest prompt
    #[arg(long, value_name = "N", value_parser = whole)]
    prompt_tokens: i128,
    /// Tokens of the longest answer
    #[arg(long, value_name = "N", value_parser = whole)]
    output_tokens: i128,
    /// Tokens of a sequence on average [default: the longest]
    #[arg(long, value_name = "N", value_parser = whole)]
    average_tokens: Option<i128>,
    /// Longest time between two tokens that callers accept
    #[arg(long, value_name = "SECONDS")]
    seconds_per_token: Option<f64>,
    /// Memory for activations on each GPU
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "6GB")]
    activations: i128,
}

impl EngineArguments {
    pub(super) fn document(&self) -> Result<Value> {
        let model = self.model.model()?;
        let (prompt, output) =
            (count("prompt-tokens", self.prompt_tokens)?, count("output-tokens", self.output_tokens)?);
        self.gpus.memory_bytes()?;
        let plan = Plan {
            model: &model,
            kv: self.model.kv_type(&model)?,
            gpu: self.gpus.gpu()?,
            gpus: self.gpus.count()?,
            prompt_tokens: prompt,
            output_tokens: output,
            average_tokens: optional("average-tokens", self.average_tokens)?
                .unwrap_or_else(|| prompt.saturating_add(output)),
            seconds_per_token: self.seconds_per_token,
            activation_bytes: count("activations", self.activations)?,
        };
        let mut document = json!({ "gpu": self.gpus.document()? });
        for (name, used_for) in [("interactive", Use::Interactive), ("batch", Use::Batch)] {
            document[name] = json!({
                "vllm": plan.answer(Engine::Vllm, used_for)?,
                "sglang": plan.answer(Engine::Sglang, used_for)?,
            });
        }
        Ok(document)
    }
}
