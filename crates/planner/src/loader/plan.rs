//! Runs as a file describes them: kinds of demand, rates, speeds of loading and sizes of memory, under both ways.

use super::pinned_lru::{self, World};
use crate::pool::{
    course::Course,
    demand::{Demand, Popularity, Request, exponential},
    figures::percentile,
    record::End,
    scenario::{PlanError, Pool, Team},
    world::{Fleet, play},
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{Bytes, Instant, Priority, targets::Targets};

/// What is shipped: the name, and the file as it is in `scenarios/`.
pub const SHIPPED: (&str, &str) = ("two-hundred-models", include_str!("../../../../scenarios/two-hundred-models.toml"));

const MODELS_MAX: usize = 2_000;
/// Values of one kind to compare.
const VALUES_MAX: usize = 32;
const REQUESTS_MAX: usize = 1_000_000;
/// Seconds of anything.
const SECONDS_MAX: f64 = 1e6;
/// Requests per second: rarer ones would take longer than a clock counts.
const RATE_MIN: f64 = 1e-4;
const RATE_MAX: f64 = 1e4;

/// A scenario.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// For people.
    pub description: String,
    /// All of it.
    pub loader: Loader,
}

/// Models, one machine, one loader.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loader {
    /// How many models there are.
    pub models: usize,
    /// Bytes of each.
    pub model_bytes: Bytes,
    /// Sizes of memory to compare, in models; the first one is the scenario's.
    pub slots: Vec<usize>,
    /// How many of the most often asked for are pinned.
    pub pinned: usize,
    /// How long a request runs.
    pub service_seconds: f64,
    /// How uneven models are asked for; the rates are compared for each.
    pub zipf: Vec<f64>,
    /// Rates to compare.
    pub requests_per_second: Vec<f64>,
    /// How long a load takes, from slow to fast; the first one is the scenario's.
    pub fetch_seconds: Vec<f64>,
    /// The exponent at which speeds and sizes are compared.
    pub compared_zipf: f64,
    /// The rate at which speeds are compared.
    pub compared_requests_per_second: f64,
    /// The rate at which sizes are compared.
    pub sparse_requests_per_second: f64,
    /// Requests of each run.
    pub requests: usize,
}

/// What a run is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Study {
    /// From which rate on the loader does not keep up.
    Rates,
    /// What faster loads do.
    Speeds,
    /// What more memory does.
    Sizes,
}

/// One run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    /// What it is about.
    pub study: Study,
    /// How uneven models are asked for.
    pub zipf: f64,
    /// The rate.
    pub requests_per_second: f64,
    /// How long a load takes.
    pub fetch_seconds: f64,
    /// Models that fit.
    pub slots: usize,
    /// The way.
    pub policy: &'static str,
}

/// The ways to decide what stays.
pub const POLICIES: [&str; 2] = ["pinned-lru", "warmset"];

/// What came of one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What it is about.
    pub study: Study,
    /// How uneven models are asked for.
    pub zipf: f64,
    /// The rate.
    pub requests_per_second: f64,
    /// How long a load takes.
    pub fetch_seconds: f64,
    /// Models that fit.
    pub slots: usize,
    /// The way.
    pub policy: &'static str,
    /// The share of requests that found their model ready.
    pub hit_share: f64,
    /// From arrival to the end: half of the requests were not slower.
    pub p50_seconds: f64,
    /// 99 of 100 were not.
    pub p99_seconds: f64,
    /// Loads.
    pub loads: u64,
    /// The share of the time in which the loader was busy.
    pub loader_share: f64,
    /// Requests that were not answered before the run ended.
    pub unanswered: u64,
}

/// The rate from which on loads cannot keep up: requests that find nothing, each a load, fill the loader.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Saturation {
    /// How uneven models are asked for.
    pub zipf: f64,
    /// The share of requests that the pinned models have.
    pub pinned_share: f64,
    /// The share that finds its model ready, as it is at the lowest rate of the first policy.
    pub hit_share: f64,
    /// `1 / (fetch_seconds * (1 - hit_share))`.
    pub requests_per_second: f64,
}

impl Plan {
    /// Whether a text describes one: it has a table `[loader]`.
    pub fn is_described_by(text: &str) -> bool {
        crate::scenario::has_table(text, "loader")
    }

    /// Reads a text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let plan: Self = toml::from_str(text)?;
        plan.loader.check()?;
        Ok(plan)
    }
}

impl Loader {
    fn check(&self) -> Result<(), PlanError> {
        let list = |values: &[f64], most: f64| {
            (1..=VALUES_MAX).contains(&values.len()) && values.iter().all(|value| *value > 0.0 && *value <= most)
        };
        let one = |value: f64, most: f64| value > 0.0 && value <= most;
        let rate = |value: &f64| (RATE_MIN..=RATE_MAX).contains(value);
        let slots = |slots: &usize| *slots > self.pinned && *slots <= self.models;
        let rules = [
            ((1..=MODELS_MAX).contains(&self.models), "models must be between 1 and 2000"),
            (self.model_bytes >= 1 && self.model_bytes <= 1 << 40, "model_bytes must be between 1 and 2^40"),
            (
                (1..=VALUES_MAX).contains(&self.slots.len()) && self.slots.iter().all(slots),
                "slots must be 1 to 32 numbers above pinned and up to models",
            ),
            (one(self.service_seconds, SECONDS_MAX), "service_seconds must be above 0"),
            (list(&self.zipf, 10.0), "zipf must be 1 to 32 numbers above 0 and up to 10"),
            (
                (1..=VALUES_MAX).contains(&self.requests_per_second.len()) && self.requests_per_second.iter().all(rate),
                "requests_per_second must be 1 to 32 numbers between 0.0001 and 10000",
            ),
            (list(&self.fetch_seconds, SECONDS_MAX), "fetch_seconds must be 1 to 32 numbers above 0"),
            (one(self.compared_zipf, 10.0), "compared_zipf must be above 0 and up to 10"),
            (rate(&self.compared_requests_per_second), "compared_requests_per_second must be between 0.0001 and 10000"),
            (rate(&self.sparse_requests_per_second), "sparse_requests_per_second must be between 0.0001 and 10000"),
            ((1..=REQUESTS_MAX).contains(&self.requests), "requests must be between 1 and 1000000"),
        ];
        match rules.iter().find(|(holds, _)| !holds) {
            Some((_, broken)) => Err(PlanError::Value((*broken).to_owned())),
            None => Ok(()),
        }
    }

    /// Every run, both ways beside each other.
    pub fn cases(&self) -> Vec<Case> {
        let (slots, fetch) = (self.slots[0], self.fetch_seconds[0]);
        let mut cases = Vec::new();
        let mut add = |study, zipf, requests_per_second, fetch_seconds, slots| {
            for policy in POLICIES {
                cases.push(Case { study, zipf, requests_per_second, fetch_seconds, slots, policy });
            }
        };
        for zipf in &self.zipf {
            for rate in &self.requests_per_second {
                add(Study::Rates, *zipf, *rate, fetch, slots);
            }
        }
        for fetch in &self.fetch_seconds {
            add(Study::Speeds, self.compared_zipf, self.compared_requests_per_second, *fetch, slots);
        }
        for slots in &self.slots {
            add(Study::Sizes, self.compared_zipf, self.sparse_requests_per_second, fetch, *slots);
        }
        cases
    }

    /// One run. The demand depends on the seed, the rate and the exponent alone.
    pub fn run(&self, case: &Case, seed: u64) -> Result<Row, String> {
        let popularity = Popularity::zipf(self.models, case.zipf);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut at = 0.0;
        let requests = (0..self.requests).map(|_| {
            at += exponential(1.0 / case.requests_per_second, &mut random);
            (Instant::after(Duration::from_secs_f64(at)), popularity.draw(&mut random))
        });
        let requests: Vec<(Instant, usize)> = requests.collect();
        match case.policy {
            "warmset" => self.warmset(case, &requests, seed),
            _ => Ok(self.pinned_lru(case, &requests)),
        }
    }

    fn pinned_lru(&self, case: &Case, requests: &[(Instant, usize)]) -> Row {
        let world = World {
            slots: case.slots,
            pinned: self.pinned,
            fetch: Duration::from_secs_f64(case.fetch_seconds),
            service: Duration::from_secs_f64(self.service_seconds),
        };
        let outcome = pinned_lru::play(&world, requests);
        row(case, outcome.hits, outcome.seconds, outcome.loads, (requests.len(), outcome.end))
    }

    fn warmset(&self, case: &Case, requests: &[(Instant, usize)], seed: u64) -> Result<Row, String> {
        let last = requests.last().map_or(Instant::ZERO, |(at, _)| *at);
        // Long enough for everybody who waits to get what is wanted.
        let patience_seconds = 2.0 * case.fetch_seconds * self.models as f64 + 3_600.0;
        let pool = self.pool(case, (last.since(Instant::ZERO).as_secs_f64() + patience_seconds, patience_seconds));
        let asked = requests.iter().enumerate().map(|(number, (at, model))| Request {
            at: *at,
            team: 0,
            model: *model,
            session: number,
            turn: 0,
            prompt_tokens: 1,
            said_tokens: 0,
            output_tokens: 2,
        });
        let demand = Demand::of_requests(asked.collect(), vec![0; self.models]);
        let models = vec![(0..self.models).collect()];
        let fleet = Fleet { teams: vec![0], lost: Vec::new(), models, course: Course::default() };
        let recording = play(&pool, &demand, &fleet, seed, false)?;
        let (mut hits, mut seconds, mut end) = (0, Vec::new(), Instant::ZERO);
        for (record, (at, _)) in recording.records.iter().zip(requests) {
            hits += u64::from(record.started.is_some() && !record.cold);
            if let (End::Answered, Some(ended)) = (record.end, record.ended) {
                seconds.push(ended.since(*at).as_secs_f64());
                end = end.max(ended);
            }
        }
        Ok(row(case, hits, seconds, recording.counts.iter().map(|team| team.loads).sum(), (requests.len(), end)))
    }

    /// A machine for so many models that do nothing but run for a while.
    fn pool(&self, case: &Case, (run_seconds, patience_seconds): (f64, f64)) -> Pool {
        let team = Team {
            name: "all".to_owned(),
            class: Priority::Standard,
            dedicated_machines: 1,
            regions: BTreeMap::new(),
            machines_per_model: None,
            models: self.models,
            pinned: self.pinned,
            zipf: case.zipf,
            model_bytes: self.model_bytes,
            peak_bytes: self.model_bytes,
            load_seconds: case.fetch_seconds,
            first_request_seconds: 0.0,
            parallel: 1_024,
            prefill_tokens_per_second: 1e9,
            decode_step_seconds: self.service_seconds,
            decode_step_seconds_per_sequence: 0.0,
            read_step_seconds: None,
            kv_bytes_per_token: 0,
            kept_tokens: 0,
            requests_per_second: case.requests_per_second,
            swing: 0.0,
            peak_hour: 0.0,
            continued_share: 0.0,
            pause_seconds: (1.0, 1.0),
            system_tokens: 0,
            question_tokens: (1, 1),
            output_tokens: (2, 2),
            targets: Targets::default(),
        };
        Pool {
            hours: run_seconds / 3_600.0,
            start_hour: 0.0,
            machines: 1,
            memory_bytes: self.model_bytes * case.slots as u64,
            reserve_bytes: 0,
            concurrent_loads: 1,
            shares_compute: false,
            stop_seconds: 0.0,
            patience_seconds,
            queue_limit: 1_000_000,
            price_per_machine_hour: 0.0,
            target_share: 0.0,
            away_target_share: 0.0,
            sample_seconds: run_seconds * 2.0,
            team: vec![team],
            lost: Vec::new(),
            slow_disk: Vec::new(),
            failing_loads: Vec::new(),
            burst: Vec::new(),
            join: Vec::new(),
            rollout: Vec::new(),
            region: Vec::new(),
            region_bytes_per_second: None,
            weights_everywhere: true,
            notice_seconds: 0.0,
            origin_bytes_per_second: None,
        }
    }

    /// The rate at which the loader is full, for each exponent, by what was found at the lowest rate.
    pub fn saturation(&self, rows: &[Row]) -> Vec<Saturation> {
        let of = |zipf: &f64| {
            let same = rows.iter().filter(|row| {
                row.study == Study::Rates && row.policy == POLICIES[0] && row.zipf.to_bits() == zipf.to_bits()
            });
            let row = same.min_by(|a, b| a.requests_per_second.total_cmp(&b.requests_per_second))?;
            let pinned_share = Popularity::zipf(self.models, *zipf).shares().iter().take(self.pinned).sum();
            let requests_per_second = 1.0 / (self.fetch_seconds[0] * (1.0 - row.hit_share));
            Some(Saturation { zipf: *zipf, pinned_share, hit_share: row.hit_share, requests_per_second })
        };
        self.zipf.iter().filter_map(of).collect()
    }
}

fn row(case: &Case, hits: u64, mut seconds: Vec<f64>, loads: u64, (requests, end): (usize, Instant)) -> Row {
    seconds.sort_by(f64::total_cmp);
    let lasted = end.since(Instant::ZERO).as_secs_f64().max(f64::MIN_POSITIVE);
    Row {
        study: case.study,
        zipf: case.zipf,
        requests_per_second: case.requests_per_second,
        fetch_seconds: case.fetch_seconds,
        slots: case.slots,
        policy: case.policy,
        hit_share: hits as f64 / requests.max(1) as f64,
        p50_seconds: percentile(&seconds, 0.5).unwrap_or(0.0),
        p99_seconds: percentile(&seconds, 0.99).unwrap_or(0.0),
        loads,
        loader_share: (loads as f64 * case.fetch_seconds / lasted).min(1.0),
        unanswered: requests as u64 - seconds.len() as u64,
    }
}
