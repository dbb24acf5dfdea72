//! What engines cost, from one recording and for all models: a load by its bytes, a request by its tokens and by how many
//! others run. So a recording tells what models would cost that are not in it.
//!
//! What a line leaves of what was measured is not noise to be left out: callers who wait longest wait for the slowest
//! loads. The shares by which loads took longer or shorter than the line says come again, in turn, and so do the seconds
//! by which requests did: a busy machine holds up a short answer as long as a long one.

use super::Observed;
use crate::{
    least_squares,
    node::{Run, STOP_TIME},
};
use serde::Serialize;
use std::time::Duration;
use warmset_core::Bytes;

/// The most of each kind that come again: more tell no more.
const SHARES_MAX: usize = 1_000;
/// What took no time at all cannot be compared with anything.
const SECONDS_MIN: f64 = 1e-6;

/// Tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tokens {
    pub(super) prompt: u32,
    pub(super) output: u32,
}

/// Requests that ran when another one started.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Others {
    /// On the same engine.
    pub(super) beside: f64,
    /// On other engines of the machine.
    pub(super) elsewhere: f64,
}

/// What was measured.
#[derive(Debug, Clone, Default)]
pub(super) struct Samples {
    /// Bytes of the model, and how long a load took.
    pub(super) loads: Vec<(Bytes, f64)>,
    /// Tokens, others that ran when it started, and how long it ran.
    pub(super) runs: Vec<(Tokens, Others, f64)>,
    /// How long engines took to be gone.
    pub(super) stop: Option<Duration>,
}

/// What engines cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Costs {
    /// Of every load.
    pub load_seconds: f64,
    /// More for each byte of the model in memory.
    pub load_seconds_per_byte: f64,
    /// Root of the mean of squared relative errors of loads.
    pub load_error: f64,
    /// Loads that it was found from.
    pub loads: usize,
    /// How long an engine that is told to stop takes to be gone.
    pub stop_seconds: f64,
    /// Of every request.
    pub request_seconds: f64,
    /// More for each token of its prompt.
    pub prompt_token_seconds: f64,
    /// More for each token of its answer.
    pub output_token_seconds: f64,
    /// More for each token of its answer and each other request that runs on its engine when it starts.
    pub output_token_seconds_beside: f64,
    /// The same for each request that runs on another engine then.
    pub output_token_seconds_elsewhere: f64,
    /// Root of the mean of squared relative errors of requests.
    pub request_error: f64,
    /// Requests that it was found from.
    pub requests: usize,
    #[serde(skip)]
    load_shares: Vec<f64>,
    #[serde(skip)]
    request_more_seconds: Vec<f64>,
}

impl Costs {
    /// What a recording says; none if it has no load or no answer.
    pub fn of(observed: &Observed) -> Option<Self> {
        let Samples { loads, runs, stop } = observed.samples();
        let load_rows: Vec<([f64; 2], f64)> =
            loads.iter().map(|(bytes, seconds)| ([1.0, *bytes as f64], seconds.max(SECONDS_MIN))).collect();
        let run_rows: Vec<([f64; 5], f64)> =
            runs.iter().map(|(tokens, others, seconds)| (shape(*tokens, *others), seconds.max(SECONDS_MIN))).collect();
        let (load, load_error, load_shares) = fit(&load_rows)?;
        let (request, request_error, request_shares) = fit(&run_rows)?;
        let more_seconds = request_shares.iter().zip(&run_rows).map(|(share, (_, seconds))| seconds - seconds / share);
        Some(Self {
            load_seconds: load[0],
            load_seconds_per_byte: load[1],
            load_error,
            loads: loads.len(),
            stop_seconds: stop.unwrap_or(STOP_TIME).as_secs_f64(),
            request_seconds: request[0],
            prompt_token_seconds: request[1],
            output_token_seconds: request[2],
            output_token_seconds_beside: request[3],
            output_token_seconds_elsewhere: request[4],
            request_error,
            requests: runs.len(),
            load_shares,
            request_more_seconds: more_seconds.collect(),
        })
    }

    /// How long loads of a model of so many bytes take, in turn.
    pub(super) fn loads(&self, bytes: Bytes) -> Vec<Duration> {
        let seconds = self.load_seconds + self.load_seconds_per_byte * bytes as f64;
        // Models do not have their slow loads at the same time.
        let begin = usize::try_from(bytes).unwrap_or_default() % self.load_shares.len();
        let shares = self.load_shares[begin..].iter().chain(&self.load_shares[..begin]);
        shares.map(|share| Duration::from_secs_f64(seconds * share)).collect()
    }

    pub(super) fn stop(&self) -> Duration {
        Duration::from_secs_f64(self.stop_seconds)
    }

    /// How long the request runs that comes as this one.
    pub(super) fn run(&self, tokens: Tokens, number: usize) -> Run {
        let more_seconds = self.request_more_seconds[number % self.request_more_seconds.len()];
        let [fixed, prompt, output, ..] = shape(tokens, Others::default());
        let parts =
            [(fixed, self.request_seconds), (prompt, self.prompt_token_seconds), (output, self.output_token_seconds)];
        let alone = parts.iter().map(|(count, seconds)| count * seconds).sum::<f64>();
        let duration = |seconds: f64| Duration::from_secs_f64(seconds.max(0.0));
        Run {
            alone: duration(alone + more_seconds),
            for_each_beside: duration(output * self.output_token_seconds_beside),
            for_each_elsewhere: duration(output * self.output_token_seconds_elsewhere),
        }
    }
}

/// What the parts of a request's time are multiplied with.
fn shape(tokens: Tokens, others: Others) -> [f64; 5] {
    let (prompt, output) = (f64::from(tokens.prompt), f64::from(tokens.output));
    [1.0, prompt, output, output * others.beside, output * others.elsewhere]
}

/// The parts, the relative error, and by which shares of the line it took longer or shorter.
fn fit<const PARTS: usize>(samples: &[([f64; PARTS], f64)]) -> Option<([f64; PARTS], f64, Vec<f64>)> {
    let rows: Vec<[f64; PARTS]> = samples.iter().map(|(counts, seconds)| counts.map(|count| count / seconds)).collect();
    let (parts, squares) = least_squares::fit(&rows)?;
    let shares = samples.iter().take(SHARES_MAX).map(|(counts, seconds)| {
        let line: f64 = counts.iter().zip(&parts).map(|(count, part)| count * part).sum();
        seconds / line.max(SECONDS_MIN)
    });
    Some((parts, (squares / samples.len() as f64).sqrt(), shares.collect()))
}
