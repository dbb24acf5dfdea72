//! `warmset model profile`: one model, loaded and asked by itself, measured.

use crate::{
    promotion::{LATENCY_MAX_SECONDS, SCORE_MIN},
    repository::{Repository, Stored, measurement_json},
};
use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tokio::sync::mpsc;
use warmset_catalog::Measurement;
use warmset_core::{
    Priority, RequestId, TenantId,
    inference::{FailureKind, GenerateJob, Prompt, Reply, Timings, Usage, Work},
    rollout::{Canary, CanaryScore, Expected},
    worker::Fact,
};
use warmset_worker::{AgentHandle, Assignment, embedding_question, text_question};

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
/// What a model is asked when it is measured, and must answer again later.
const CANARY_PROMPT: &str = "List the days of the week.";
/// Tokens of that answer.
const CANARY_TOKENS: u32 = 24;
/// How many times longer than now it may take later, when the machine is busy.
const LATENCY_FACTOR: f64 = 20.0;
/// Requests of measurements have numbers of their own, which the gateway never reaches.
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(1 << 63);

/// Loads a version and has it answer its canary, or records one; says what it must answer and how it did. Kept once it
/// was passed: a wrong expectation is not asked again.
pub(crate) async fn load_and_ask(
    repository: &Repository,
    agent: &AgentHandle,
    next: &Stored,
) -> Result<(Option<Canary>, Option<CanaryScore>)> {
    let digest = next.model.digest;
    agent.load(digest).await.map_err(|error| anyhow!(error.message))?;
    let canary = match &next.canary {
        Some(canary) => Some(canary.clone()),
        None => record_canary(agent, next).await?,
    };
    repository.catalog.set_canary(&digest, canary.as_ref()).await?;
    Ok((canary, agent.canary_score(digest).await?))
}

/// What a version must answer from now on: what a person gave stays, else its answer of just now.
pub(crate) async fn canary_of(repository: &Repository, agent: &AgentHandle, stored: &Stored) -> Result<Option<Canary>> {
    if stored.canary.as_ref().is_some_and(|canary| canary.given) {
        return Ok(stored.canary.clone());
    }
    let canary = record_canary(agent, stored).await?;
    repository.catalog.set_canary(&stored.model.digest, canary.as_ref()).await?;
    Ok(canary)
}

/// Asks a loaded model the canary's question and takes its answer for what it must answer. None for a model that says
/// nothing.
pub(crate) async fn record_canary(agent: &AgentHandle, stored: &Stored) -> Result<Option<Canary>> {
    let asker = Asker { agent, stored };
    let began = Instant::now();
    let text = asker.answer(text_question(CANARY_PROMPT, CANARY_TOKENS)).await;
    let expected = match text {
        Ok(Answer { text, .. }) if text.trim().is_empty() => return Ok(None),
        Ok(Answer { text, .. }) => Expected::Text(text),
        Err(NoAnswer::NotGenerating) => match asker.answer(embedding_question(CANARY_PROMPT)).await {
            Ok(Answer { vector, .. }) if !vector.is_empty() => Expected::Embedding(vector),
            _ => return Ok(None),
        },
        Err(NoAnswer::TooLong) => return Ok(None),
        Err(NoAnswer::Failed(reason)) => bail!("{} does not answer: {reason}", stored.model.name),
    };
    let canary = Canary {
        prompt: CANARY_PROMPT.to_owned(),
        max_tokens: CANARY_TOKENS,
        expected,
        score_min: SCORE_MIN,
        latency_max_seconds: LATENCY_MAX_SECONDS.max(LATENCY_FACTOR * began.elapsed().as_secs_f64()),
        given: false,
    };
    Ok(canary.check().is_ok().then_some(canary))
}

/// Stores what was measured and returns it as JSON.
pub(crate) async fn store(
    repository: &Repository,
    stored: &Stored,
    worker_type: &str,
    new: &Measurement,
    canary: Option<&Canary>,
) -> Result<Value> {
    let digest = stored.model.digest;
    let known = repository.catalog.record_measurement(&digest, worker_type, new).await?;
    // What was measured just now is shown; the catalog keeps it together with what was measured before.
    let shown = Measurement { samples: known.samples, ..new.clone() };
    let shown = Measurement { measured_unix_milliseconds: known.measured_unix_milliseconds, ..shown };
    let mut document = measurement_json(worker_type, &shown, stored);
    document["name"] = json!(stored.model.name);
    document["digest"] = json!(digest);
    document["canary"] = json!(canary);
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

/// What came of a question.
#[derive(Default)]
struct Answer {
    text: String,
    vector: Vec<f32>,
    usage: Usage,
    timings: Timings,
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
        let prompt = Prompt::Text { text: prompt.to_owned() };
        let job = GenerateJob { ignore_end: true, stream: true, ..GenerateJob::greedy(prompt, tokens) };
        let answer = self.answer(Work::Generate(Box::new(job))).await?;
        Ok((answer.usage, answer.timings))
    }

    async fn answer(&self, work: Work) -> Result<Answer, NoAnswer> {
        let (replies, mut answers) = mpsc::unbounded_channel();
        let mut answer = Answer::default();
        self.agent.assign(Assignment {
            request: RequestId(NEXT_REQUEST.fetch_add(1, Ordering::Relaxed)),
            digest: self.stored.model.digest,
            tenant: TenantId::anonymous(),
            class: Priority::Critical,
            work,
            replies,
        });
        while let Some(reply) = answers.recv().await {
            match reply {
                Reply::Delta { text, .. } => answer.text.push_str(&text),
                Reply::Done { usage, timings } => {
                    (answer.usage, answer.timings) = (usage, timings);
                    return Ok(answer);
                }
                Reply::Embedded { vectors, .. } => {
                    answer.vector = vectors.into_iter().next().unwrap_or_default();
                    return Ok(answer);
                }
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
