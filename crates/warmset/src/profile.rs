//! `warmset model profile`: one model, loaded and asked by itself, measured.

use crate::{
    config::Config,
    link::StoredArtifacts,
    repository::{Repository, Stored, measurement_json, parse_name},
    settings,
};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use warmset_catalog::Measurement;
use warmset_core::{
    Priority, RequestId, TenantId, WorkerId,
    inference::{FailureKind, GenerateJob, Output, Prompt, Reply, Sampling, Timings, Usage, Work},
    worker::Fact,
};
use warmset_worker::{Agent, AgentConfig, AgentHandle, Assignment, Clock};

/// Requests after the first one that show what the first one lost.
const FOLLOWING_REQUESTS: usize = 3;
/// Words of the prompt whose computation is timed; halved until they fit the context.
const PREFILL_WORDS: usize = 150;
/// Repetitions of each timing; the median counts.
const REPETITIONS: usize = 3;
/// No further repetition is begun after this long.
const REPETITION_TIME: Duration = Duration::from_secs(10);
/// Tokens generated to time one.
const DECODE_TOKENS: u32 = 64;
/// Requests of measurements have numbers of their own, which the gateway never reaches.
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(1 << 63);

/// Starts a worker for this one model, measures and stores the result.
pub(crate) async fn run_alone(repository: &Repository, root: &Path, name: &str) -> Result<Value> {
    let stored = repository.get(&parse_name(name)?).await?;
    let config = Config::default();
    let (memory, reserve) = settings::memory_and_reserve(None, None)?;
    let artifacts = Arc::new(StoredArtifacts::new(repository.store.clone()));
    artifacts.learn(stored.model.digest, stored.manifest.files.iter().map(|file| file.sha256).collect());
    let worker_type = settings::worker_type(&config);
    let agent = Agent::start(
        AgentConfig {
            worker: WorkerId(0),
            settings: settings::worker_settings(&config, memory, reserve)?,
            program: std::env::current_exe().context("cannot find this program's own file")?,
            data_dir: root.to_path_buf(),
            worker_type: worker_type.clone(),
            spare: false,
            record: None,
            artifacts,
            clock: Clock::start(),
        },
        vec![settings::model_config(&stored, &repository.runtimes, None)?],
    )?;
    let measured = measure(&agent, &stored).await;
    agent.drain().await;
    store(repository, &stored, &worker_type, &measured?).await
}

/// Stores what was measured and returns it as JSON.
pub(crate) async fn store(
    repository: &Repository,
    stored: &Stored,
    worker_type: &str,
    new: &Measurement,
) -> Result<Value> {
    let digest = stored.model.digest;
    let known = repository.catalog.record_measurement(&digest, worker_type, new).await?;
    // What was measured just now is shown; the catalog keeps it together with what was measured before.
    let shown = Measurement { samples: known.samples, ..new.clone() };
    let shown = Measurement { measured_unix_milliseconds: known.measured_unix_milliseconds, ..shown };
    let mut document = measurement_json(worker_type, &shown, stored);
    document["name"] = json!(stored.model.name);
    document["digest"] = json!(digest);
    Ok(document)
}

/// Loads the model afresh and measures it.
pub(crate) async fn measure(agent: &AgentHandle, stored: &Stored) -> Result<Measurement> {
    let digest = stored.model.digest;
    let mut facts = agent.facts().ok_or_else(|| anyhow!("the worker has shut down"))?;
    agent.unload(digest).await?;
    agent.load(digest).await.map_err(|error| anyhow!(error.message))?;
    let mut measurement = Measurement { kv_bytes_per_token: stored.shape.kv_bytes_per_token, ..Measurement::default() };
    loop {
        match facts.recv().await {
            Ok((_, Fact::LoadFinished { digest: loaded, peak, steady, timings, .. })) if loaded == digest => {
                (measurement.peak, measurement.steady, measurement.timings) = (peak, steady, timings);
                break;
            }
            Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
            Err(_) => bail!("the worker has shut down"),
        }
    }
    let asker = Asker { agent, stored };
    asker.time_first_request(&mut measurement).await?;
    if measurement.first_request_penalty_seconds.is_some() {
        measurement.prefill_tokens_per_second = asker.prefill_rate().await?;
        measurement.decode_tokens_per_second = asker.decode_rate().await?;
    }
    Ok(measurement)
}

/// Why a question has no answer.
enum NoAnswer {
    /// It is longer than the context.
    TooLong,
    /// The model does not generate text.
    NotGenerating,
    /// Anything else.
    Failed(String),
}

struct Asker<'a> {
    agent: &'a AgentHandle,
    stored: &'a Stored,
}

impl Asker<'_> {
    /// How much longer the first request takes than those after it. None for a model that does not generate.
    async fn time_first_request(&self, measurement: &mut Measurement) -> Result<()> {
        let mut seconds = Vec::new();
        for index in 0..=FOLLOWING_REQUESTS {
            let began = Instant::now();
            match self.ask(&format!("Question {index}:"), 1).await {
                Ok(_) => seconds.push(began.elapsed().as_secs_f64()),
                Err(NoAnswer::NotGenerating) => return Ok(()),
                Err(NoAnswer::TooLong) => bail!("the context of {} holds no question", self.stored.model.name),
                Err(NoAnswer::Failed(reason)) => bail!("{}: {reason}", self.stored.model.name),
            }
        }
        let following = median(seconds.split_off(1));
        measurement.first_request_penalty_seconds = Some((seconds[0] - following).max(0.0));
        Ok(())
    }

    async fn prefill_rate(&self) -> Result<Option<f64>> {
        let mut words = PREFILL_WORDS;
        let mut rates = Vec::new();
        let began = Instant::now();
        while rates.len() < REPETITIONS && words > 0 && (rates.is_empty() || began.elapsed() < REPETITION_TIME) {
            // No two prompts begin alike, so that nothing is reused.
            let turn = rates.len();
            let prompt = (turn..turn + words).map(|word| format!("{word} stones, ")).collect::<String>();
            match self.ask(&prompt, 1).await {
                Ok((usage, timings)) => {
                    let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
                    rates.push(f64::from(computed) / timings.prefill_seconds.max(1e-9));
                }
                Err(NoAnswer::TooLong) => words /= 2,
                Err(NoAnswer::NotGenerating) => return Ok(None),
                Err(NoAnswer::Failed(reason)) => bail!("{}: {reason}", self.stored.model.name),
            }
        }
        Ok((!rates.is_empty()).then(|| median(rates)))
    }

    async fn decode_rate(&self) -> Result<Option<f64>> {
        let mut rates = Vec::new();
        let began = Instant::now();
        while rates.len() < REPETITIONS && (rates.is_empty() || began.elapsed() < REPETITION_TIME) {
            match self.ask("Count:", DECODE_TOKENS).await {
                Ok((usage, timings)) if usage.completion_tokens > 1 => {
                    rates.push(f64::from(usage.completion_tokens - 1) / timings.decode_seconds.max(1e-9));
                }
                Ok(_) | Err(NoAnswer::TooLong | NoAnswer::NotGenerating) => return Ok(None),
                Err(NoAnswer::Failed(reason)) => bail!("{}: {reason}", self.stored.model.name),
            }
        }
        Ok(Some(median(rates)))
    }

    /// One generation, straight from the worker.
    async fn ask(&self, prompt: &str, tokens: u32) -> Result<(Usage, Timings), NoAnswer> {
        let (replies, mut answers) = mpsc::unbounded_channel();
        let job = GenerateJob {
            prompt: Prompt::Text { text: prompt.to_owned() },
            choices: 1,
            max_tokens: Some(tokens),
            sampling: Sampling { temperature: 0.0, ..Sampling::default() },
            stop: Vec::new(),
            ignore_end: true,
            stream: true,
            output: Output::default(),
        };
        self.agent.assign(Assignment {
            request: RequestId(NEXT_REQUEST.fetch_add(1, Ordering::Relaxed)),
            digest: self.stored.model.digest,
            tenant: TenantId::anonymous(),
            class: Priority::Critical,
            work: Work::Generate(Box::new(job)),
            replies,
        });
        while let Some(reply) = answers.recv().await {
            match reply {
                Reply::Done { usage, timings } => return Ok((usage, timings)),
                Reply::Failed { kind: FailureKind::ContextExceeded, .. } => return Err(NoAnswer::TooLong),
                Reply::Failed { kind: FailureKind::InvalidRequest, .. } => return Err(NoAnswer::NotGenerating),
                Reply::Failed { message, .. } => return Err(NoAnswer::Failed(message)),
                Reply::Rejected(rejection) => return Err(NoAnswer::Failed(format!("{rejection:?}"))),
                _ => {}
            }
        }
        Err(NoAnswer::Failed("the worker was lost".to_owned()))
    }
}

/// The middle value.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![]), 0.0);
    }
}
