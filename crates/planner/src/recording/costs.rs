//! What engines cost, from one recording and for all models: a load by its bytes, a request by its tokens, and both by what
//! computes at the same time. So a recording tells what models would cost that are not in it. What bytes and tokens do not
//! tell, since it is a matter of how the weights are written, a profile of the model does.
//!
//! What a line leaves of what was measured is not noise to be left out: callers who wait longest wait for the slowest
//! loads. The shares by which loads took longer or shorter than the line says come again, in turn, and so do the seconds
//! by which requests did: a busy machine holds up a short answer as long as a long one.

use super::{
    Observed,
    fit::{Fit, LOAD_PARTS, REQUEST_PARTS, SECONDS_MIN, Samples, Tokens, load_shape, request_shape, sum},
    profiles::Profiles,
};
use crate::{node::STOP_TIME, sharing::Slowdown};
use serde::Serialize;
use std::time::Duration;
use warmset_core::{Bytes, Digest};

/// The most of each kind that come again: more tell no more.
const SHARES_MAX: usize = 1_000;

/// What engines cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Costs {
    /// Of every load.
    pub load_seconds: f64,
    /// More for each byte of a model without a profile.
    pub load_seconds_per_byte: f64,
    /// More for each second that the profile says of a load.
    pub load_share_of_profile: f64,
    /// By how much longer a load takes for what computes beside it.
    pub load_slowdown: Slowdown,
    /// Root of the mean of squared relative errors of loads.
    pub load_error: f64,
    /// Loads that it was found from.
    pub loads: usize,
    /// How long an engine that is told to stop takes to be gone.
    pub stop_seconds: f64,
    /// Of every request.
    pub request_seconds: f64,
    /// More for each token of its prompt, of a model without a profile.
    pub prompt_token_seconds: f64,
    /// More for each token of its answer, of a model without a profile.
    pub output_token_seconds: f64,
    /// More for each second that the profile says of its prompt.
    pub prompt_share_of_profile: f64,
    /// More for each second that the profile says of its answer.
    pub output_share_of_profile: f64,
    /// By how much longer a request takes for what computes beside it.
    pub request_slowdown: Slowdown,
    /// Root of the mean of squared relative errors of requests.
    pub request_error: f64,
    /// Requests that it was found from.
    pub requests: usize,
    #[serde(skip)]
    profiles: Profiles,
    #[serde(skip)]
    load_shares: Vec<f64>,
    #[serde(skip)]
    request_more_seconds: Vec<f64>,
}

impl Costs {
    /// What a recording says, and profiles of its models and of others; none if it has no load or no answer.
    pub fn of(observed: &Observed, profiles: Profiles) -> Option<Self> {
        let Samples { loads, runs, stop } = observed.samples();
        let loads: Vec<_> =
            loads.iter().map(|load| (load_shape(&profiles, load.digest, load.bytes), load.took)).collect();
        let runs: Vec<_> =
            runs.iter().map(|ran| (request_shape(&profiles, ran.digest, ran.tokens), ran.took)).collect();
        let (load, request) = (Fit::of(&loads)?, Fit::of(&runs)?);
        let [load_seconds, load_seconds_per_byte, load_share_of_profile] = load.parts;
        let [request_seconds, prompt_token_seconds, output_token_seconds, prompt_share, output_share] = request.parts;
        let shares = load.found.iter().map(|(took, said)| took / said.max(SECONDS_MIN));
        let more_seconds = request.found.iter().map(|(took, said)| took - said);
        Some(Self {
            load_seconds,
            load_seconds_per_byte,
            load_share_of_profile,
            load_slowdown: load.slowdown,
            load_error: load.error,
            loads: loads.len(),
            stop_seconds: stop.unwrap_or(STOP_TIME).as_secs_f64(),
            request_seconds,
            prompt_token_seconds,
            output_token_seconds,
            prompt_share_of_profile: prompt_share,
            output_share_of_profile: output_share,
            request_slowdown: request.slowdown,
            request_error: request.error,
            requests: runs.len(),
            profiles,
            load_shares: shares.take(SHARES_MAX).collect(),
            request_more_seconds: more_seconds.take(SHARES_MAX).collect(),
        })
    }

    /// How long loads of a model of so many bytes take alone, in turn.
    pub(super) fn loads(&self, digest: Digest, bytes: Bytes) -> Vec<Duration> {
        let parts: [f64; LOAD_PARTS] = [self.load_seconds, self.load_seconds_per_byte, self.load_share_of_profile];
        let seconds = sum(&load_shape(&self.profiles, digest, bytes), &parts);
        // Models do not have their slow loads at the same time.
        let begin = usize::try_from(bytes).unwrap_or_default() % self.load_shares.len();
        let shares = self.load_shares[begin..].iter().chain(&self.load_shares[..begin]);
        shares.map(|share| Duration::from_secs_f64(seconds * share)).collect()
    }

    pub(super) fn stop(&self) -> Duration {
        Duration::from_secs_f64(self.stop_seconds)
    }

    /// How long the request runs alone that comes as this one.
    pub(super) fn run(&self, digest: Digest, tokens: Tokens, number: usize) -> Duration {
        let more_seconds = self.request_more_seconds[number % self.request_more_seconds.len()];
        let parts: [f64; REQUEST_PARTS] = [
            self.request_seconds,
            self.prompt_token_seconds,
            self.output_token_seconds,
            self.prompt_share_of_profile,
            self.output_share_of_profile,
        ];
        let seconds = sum(&request_shape(&self.profiles, digest, tokens), &parts) + more_seconds;
        Duration::from_secs_f64(seconds.max(0.0))
    }
}
