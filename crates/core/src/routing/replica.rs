//! One replica as the router knows it: what it has to do, how fast it is, and whether it is asked.

use super::{
    breaker::Breaker,
    protocol::{ModelKey, Outcome, Pause, ReplicaId, ReplicaSettings},
    standing::Standing,
};
use crate::time::Instant;
use alloc::collections::BTreeMap;
use core::time::Duration;

/// Where nothing is known: a small accelerator.
pub(super) const PREFILL_TOKENS_PER_SECOND_DEFAULT: f64 = 8000.0;
const PREFILL_TOKENS_PER_SECOND_RANGE: (f64, f64) = (10.0, 10_000_000.0);
/// Weights beyond these are these: a replica that is to get nothing is drained instead.
const WEIGHT_RANGE: (f64, f64) = (0.01, 100.0);
/// Where nothing is known: a few dozen long prompts.
pub(super) const CAPACITY_TOKENS_DEFAULT: u64 = 262_144;
/// What is learnt of the capacity stays within this factor of what was said or supposed.
const CAPACITY_FACTOR_MAX: f64 = 8.0;
/// How far one observation moves the capacity.
const CAPACITY_STEP: f64 = 1.02;
/// A prefill below this says more about the network than about the replica.
const SAMPLE_TOKENS_MIN: f64 = 2048.0;
/// What one sample of the speed counts.
const SAMPLE_WEIGHT: f64 = 0.1;
/// What a replica says of its load is old after this.
const REPORT_AGE_MAX: Duration = Duration::from_secs(5);

/// Which breakers one request decides about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Trials {
    pub(super) of_replica: bool,
    pub(super) of_model: bool,
}

/// The state of one replica.
pub(super) struct Replica {
    pub(super) id: ReplicaId,
    pub(super) settings: ReplicaSettings,
    pub(super) breaker: Breaker,
    /// Models that failed there, or for which it asked to be left alone: one that is loaded or broken says nothing of
    /// the replica's others. Those without trouble are not here.
    models: BTreeMap<ModelKey, Standing>,
    /// It may be another life than the one that was sent what it is believed to hold.
    pub(super) in_doubt: bool,
    pub(super) draining: bool,
    pub(super) instance: Option<u64>,
    /// Requests of this router on their way.
    pub(super) in_flight: u32,
    /// Tokens of prompts whose first token has not come.
    pub(super) pending_tokens: u64,
    /// The same for requests that say nothing of their first token: it drains with time.
    silent_tokens: f64,
    silent_at: Instant,
    pub(super) prefill_tokens_per_second: f64,
    /// Requests of others, as it reported them, and when.
    foreign: u32,
    foreign_at: Instant,
    capacity_said: f64,
    capacity_tokens: f64,
}

impl Replica {
    pub(super) fn new(id: ReplicaId, mut settings: ReplicaSettings) -> Self {
        let (lightest, heaviest) = WEIGHT_RANGE;
        settings.weight = if settings.weight.is_nan() { 1.0 } else { settings.weight.clamp(lightest, heaviest) };
        let (slowest, fastest) = PREFILL_TOKENS_PER_SECOND_RANGE;
        let speed = settings.prefill_tokens_per_second.unwrap_or(PREFILL_TOKENS_PER_SECOND_DEFAULT);
        let capacity = settings.capacity_tokens.unwrap_or(CAPACITY_TOKENS_DEFAULT) as f64;
        Self {
            id,
            breaker: Breaker::new(),
            models: BTreeMap::new(),
            in_doubt: false,
            draining: false,
            instance: None,
            in_flight: 0,
            pending_tokens: 0,
            silent_tokens: 0.0,
            silent_at: Instant::ZERO,
            prefill_tokens_per_second: speed.clamp(slowest, fastest),
            foreign: 0,
            foreign_at: Instant::ZERO,
            capacity_said: capacity,
            capacity_tokens: capacity,
            settings,
        }
    }

    /// Other settings for the same replica: what was learnt of it stays.
    pub(super) fn configure(&mut self, settings: ReplicaSettings) {
        let fresh = Self::new(self.id, settings);
        if fresh.capacity_said != self.capacity_said {
            (self.capacity_said, self.capacity_tokens) = (fresh.capacity_said, fresh.capacity_tokens);
        }
        self.settings = fresh.settings;
        let served = &self.settings.models;
        self.models.retain(|model, standing| served.contains(model) || standing.breaker.trial);
    }

    /// Whether a new request for this model may be sent there.
    pub(super) fn may_be_asked(&self, now: Instant, model: ModelKey) -> bool {
        let standing = self.models.get(&model);
        !self.draining && self.breaker.lets_through(now) && standing.is_none_or(|standing| standing.may_be_asked(now))
    }

    /// A request for this model is sent.
    pub(super) fn sent(&mut self, now: Instant, model: ModelKey) -> Trials {
        let of_model = self.models.get_mut(&model).is_some_and(|standing| standing.breaker.sent(now));
        Trials { of_replica: self.breaker.sent(now), of_model }
    }

    /// A request has ended. Whatever was answered, the replica was there to answer it; what is told of the model is
    /// told of that one alone.
    pub(super) fn ended(&mut self, now: Instant, model: ModelKey, trials: Trials, outcome: Outcome) {
        match outcome {
            Outcome::Finished | Outcome::Failed | Outcome::Busy { .. } => self.breaker.succeeded(trials.of_replica),
            Outcome::Cancelled => self.breaker.undecided(trials.of_replica),
            Outcome::Lost => self.breaker.failed(now, trials.of_replica),
        }
        let troubled =
            matches!(outcome, Outcome::Failed | Outcome::Busy { .. }) && self.settings.models.contains(&model);
        if troubled {
            self.models.entry(model).or_insert_with(Standing::new);
        }
        if let Some(standing) = self.models.get_mut(&model) {
            standing.ended(now, trials.of_model, outcome);
            if standing.is_settled(now) || !self.settings.models.contains(&model) {
                self.models.remove(&model);
            }
        }
    }

    /// Another life: what the one before failed at, or asked for, says nothing of it.
    pub(super) fn restarted(&mut self) {
        self.in_doubt = false;
        self.models.values_mut().for_each(Standing::reset);
    }

    /// The earliest moment at which it may be asked for this model, if that is not now.
    pub(super) fn next_chance(&self, now: Instant, model: ModelKey) -> Option<Instant> {
        let pause = self.models.get(&model).and_then(|standing| standing.pause(now));
        self.breaker.open_until(now).max(pause.map(|(until, _)| until))
    }

    /// The models that it is not asked for now.
    pub(super) fn pauses(&self, now: Instant) -> impl Iterator<Item = Pause> {
        self.models.iter().filter_map(move |(model, standing)| {
            let (until, asked) = standing.pause(now)?;
            Some(Pause { model: *model, until, asked })
        })
    }

    /// Models whose breaker has the one request on its way that decides.
    pub(super) fn trials(&self) -> impl Iterator<Item = ModelKey> {
        self.models.iter().filter(|(_, standing)| standing.breaker.trial).map(|(model, _)| *model)
    }

    /// Prompt tokens that lie before a new request.
    pub(super) fn pending(&self, now: Instant) -> f64 {
        self.pending_tokens as f64 + self.silent_pending(now)
    }

    fn silent_pending(&self, now: Instant) -> f64 {
        let done = now.since(self.silent_at).as_secs_f64() * self.prefill_tokens_per_second;
        (self.silent_tokens - done).max(0.0)
    }

    /// Adds prompt tokens whose end nobody will tell.
    pub(super) fn add_silent(&mut self, now: Instant, tokens: u64) {
        self.silent_tokens = self.silent_pending(now) + tokens as f64;
        self.silent_at = now;
    }

    /// Requests that others have there, as it says itself.
    pub(super) fn foreign(&self, now: Instant) -> f64 {
        if self.foreign > 0 && now.since(self.foreign_at) < REPORT_AGE_MAX { f64::from(self.foreign) } else { 0.0 }
    }

    /// It says how many requests it has. What was sent from here always counts, whatever it says.
    pub(super) fn load_reported(&mut self, now: Instant, requests: u32) {
        self.foreign = requests.saturating_sub(self.in_flight);
        self.foreign_at = now;
    }

    /// The first token of a request came `waited` after it was sent, with so many tokens to compute before it.
    pub(super) fn prefill_seen(&mut self, tokens: f64, waited: Duration) {
        let (slowest, fastest) = PREFILL_TOKENS_PER_SECOND_RANGE;
        let seconds = waited.as_secs_f64();
        if tokens < SAMPLE_TOKENS_MIN || seconds <= 0.0 {
            return;
        }
        let sample = (tokens / seconds).clamp(slowest, fastest);
        // Samples are times, so that one stall does not outweigh many good ones: a mean of logarithms.
        let (old, new) = (libm::log(self.prefill_tokens_per_second), libm::log(sample));
        self.prefill_tokens_per_second = libm::exp(old + SAMPLE_WEIGHT * (new - old)).clamp(slowest, fastest);
    }

    pub(super) fn capacity_reported(&mut self, tokens: u64) {
        self.capacity_said = (tokens as f64).max(1.0);
        self.capacity_tokens = self.capacity_said;
    }

    /// It held less, or more, than was believed.
    pub(super) fn capacity_seen(&mut self, more: bool) {
        let step = if more { CAPACITY_STEP } else { 1.0 / CAPACITY_STEP };
        let (least, most) = (self.capacity_said / CAPACITY_FACTOR_MAX, self.capacity_said * CAPACITY_FACTOR_MAX);
        self.capacity_tokens = (self.capacity_tokens * step).clamp(least, most);
    }

    pub(super) fn capacity_bytes(&self, bytes_per_token: f64) -> u64 {
        (self.capacity_tokens * bytes_per_token) as u64
    }
}
