//! Every metric, with typed methods. Names are those of the contract; the tenant is a label on counters only.

use crate::attainment::Attainment;
use crate::kv_metrics::KvMetrics;
use crate::latency::Latencies;
use prometheus_client::{
    encoding::{EncodeLabelSet, prometheus_text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, PoisonError, atomic::AtomicU64},
};
use warmset_core::{
    Digest, Instant, ModelName, Priority,
    inference::Usage,
    jobs::JobStatus,
    kv::TierView,
    targets::Targets,
    worker::{Fact, LedgerLine, LoadTimings, ModelState},
};

/// Upper bounds in seconds of the histograms of request times. They reach ten minutes, since a cold start may.
pub const SECONDS_BUCKETS: [f64; 18] =
    [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 600.0, 1200.0];

/// Names the model label of requests that asked for no model known here: hostile names make no series.
pub const UNKNOWN_MODEL: &str = "unknown";

type FloatGauge = Gauge<f64, AtomicU64>;
type FloatCounter = Counter<f64, AtomicU64>;

macro_rules! labels {
    ($name:ident { $($field:ident),* }) => {
        #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
        struct $name { $($field: String),* }
    };
}
labels!(RequestLabels { model, outcome, start });
labels!(TimeLabels { model, start });
labels!(LoadLabels { model, outcome });
labels!(PhaseLabels { model, phase });
labels!(EvictionLabels { model, reason });
labels!(PreloadLabels { model, outcome });
labels!(ResidentLabels { model, digest, kind });
labels!(MemoryLabels { tier, state });
labels!(PoolLabels { pool });
labels!(DecisionLabels { decision });
labels!(PriorityLabels { priority });
labels!(ModelLabels { model });
labels!(TokenLabels { model, tenant, kind });
labels!(StatusLabels { status });
labels!(OutcomeLabels { outcome });

/// The bytes of one memory tier (`host`, `gpu0`, ...), as the ledger has them.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct TierBytes {
    /// The tier.
    pub tier: String,
    /// All there is to give.
    pub capacity: u64,
    /// Kept free.
    pub reserve: u64,
    /// Held by loads at their peak.
    pub loading: u64,
    /// Held by ready models.
    pub resident: u64,
    /// Held by models whose process is not gone yet.
    pub unloading: u64,
    /// Held by cached KV.
    pub kv: u64,
    /// Left.
    pub free: u64,
}

/// How one request ended, for the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestEnd<'a> {
    /// The model's name, or [`UNKNOWN_MODEL`].
    pub model: &'a str,
    /// `ok`, `cancelled`, or the error's code.
    pub outcome: &'a str,
    /// `warm`, `cold`, or `none` if it never started.
    pub start: &'a str,
}

/// What the gateway's run loop knows at the time of a scrape.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct GatewayFigures {
    /// Waiting requests, by class in the order of [`Priority::ALL`].
    pub queue_depth: [u32; 3],
    /// Requests at a worker, per digest; all known digests are listed.
    pub running: Vec<(Digest, u32)>,
    /// Requests that wait in the gateway, per digest that any wait for.
    pub waiting: Vec<(Digest, u32)>,
}

/// All metrics of one process. Shared behind an `Arc`.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: Family<TimeLabels, Histogram, fn() -> Histogram>,
    first_tokens: Family<TimeLabels, Histogram, fn() -> Histogram>,
    loads: Family<LoadLabels, Counter>,
    load_seconds: Family<PhaseLabels, Histogram, fn() -> Histogram>,
    evictions: Family<EvictionLabels, Counter>,
    preloads: Family<PreloadLabels, Counter>,
    parks: Family<ModelLabels, Counter>,
    parked: Family<ModelLabels, Gauge>,
    parked_seconds: Family<ModelLabels, FloatCounter>,
    slo_attained: Family<TimeLabels, FloatGauge>,
    attainment: Mutex<Attainment>,
    resident: Family<ResidentLabels, Gauge>,
    memory: Family<MemoryLabels, Gauge>,
    oldest_pending_load: FloatGauge,
    thrash: Family<PoolLabels, FloatGauge>,
    routed: Family<DecisionLabels, Counter>,
    queue_depth: Family<PriorityLabels, Gauge>,
    running: Family<ModelLabels, Gauge>,
    tokens: Family<TokenLabels, Counter>,
    jobs: Family<OutcomeLabels, Counter>,
    jobs_unfinished: Family<StatusLabels, Gauge>,
    /// Loads that have begun to wait or run and have not ended, and since when.
    pending_loads: Mutex<BTreeMap<Digest, Instant>>,
    latencies: Latencies,
    kv: KvMetrics,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

fn seconds_histogram() -> Histogram {
    Histogram::new(SECONDS_BUCKETS)
}

fn seconds_family<Labels: Clone + std::hash::Hash + Eq>() -> Family<Labels, Histogram, fn() -> Histogram> {
    Family::new_with_constructor(seconds_histogram)
}

fn gauge_value(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("warmset"),
            requests: Family::default(),
            durations: seconds_family(),
            first_tokens: seconds_family(),
            loads: Family::default(),
            load_seconds: seconds_family(),
            evictions: Family::default(),
            preloads: Family::default(),
            parks: Family::default(),
            parked: Family::default(),
            parked_seconds: Family::default(),
            slo_attained: Family::default(),
            attainment: Mutex::default(),
            resident: Family::default(),
            memory: Family::default(),
            oldest_pending_load: FloatGauge::default(),
            thrash: Family::default(),
            routed: Family::default(),
            queue_depth: Family::default(),
            running: Family::default(),
            tokens: Family::default(),
            jobs: Family::default(),
            jobs_unfinished: Family::default(),
            pending_loads: Mutex::default(),
            latencies: Latencies::default(),
            kv: KvMetrics::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("requests", "Requests that have ended", self.requests.clone());
        registry.register("request_duration_seconds", "From arrival to the last byte", self.durations.clone());
        let help = "From arrival to the first token";
        registry.register("time_to_first_token_seconds", help, self.first_tokens.clone());
        registry.register("model_loads", "Loads that have ended", self.loads.clone());
        registry.register("model_load_seconds", "Steps of loads", self.load_seconds.clone());
        registry.register("model_evictions", "Models told to leave memory", self.evictions.clone());
        registry.register("model_preloads", "Loads ahead of requests, by what became of them", self.preloads.clone());
        let help = "Times that a running request gave way to one of a higher class";
        registry.register("requests_parked", help, self.parks.clone());
        registry.register("parked_requests", "Requests that gave way and have not gone on", self.parked.clone());
        let help = "How long requests were parked that have gone on";
        registry.register("requests_parked_seconds", help, self.parked_seconds.clone());
        let help = "Share of first tokens that came within the target";
        registry.register("slo_attained_ratio", help, self.slo_attained.clone());
        registry.register("model_resident_bytes", "Bytes of loaded models", self.resident.clone());
        registry.register("memory_bytes", "Where the bytes of each tier are", self.memory.clone());
        let help = "Age of the oldest load that has not ended; 0 if none";
        registry.register("oldest_pending_load_seconds", help, self.oldest_pending_load.clone());
        let help = "Share of requests that reload what was just evicted";
        registry.register("thrash_ratio", help, self.thrash.clone());
        registry.register("routed", "Requests sent to a worker", self.routed.clone());
        registry.register("queue_depth", "Requests that wait", self.queue_depth.clone());
        registry.register("running_requests", "Requests at a worker", self.running.clone());
        registry.register("tokens", "Tokens of requests that an engine has ended", self.tokens.clone());
        registry.register("jobs", "Jobs that have ended", self.jobs.clone());
        registry.register("jobs_unfinished", "Jobs that have not ended", self.jobs_unfinished.clone());
        self.kv.register(registry);
    }

    /// A request has ended, `seconds` after it came.
    pub fn record_request(&self, end: RequestEnd<'_>, seconds: f64) {
        let (model, start) = (end.model.to_owned(), end.start.to_owned());
        let labels = RequestLabels { model: model.clone(), outcome: end.outcome.to_owned(), start: start.clone() };
        self.requests.get_or_create(&labels).inc();
        if end.outcome == "ok" {
            self.latencies.record_duration(end.model, end.start, seconds);
            self.durations.get_or_create(&TimeLabels { model, start }).observe(seconds);
        }
    }

    /// The first token of a request came `seconds` after the request.
    pub fn record_first_token(&self, model: &str, start: &str, seconds: f64) {
        self.latencies.record_first_token(model, start, seconds);
        let labels = TimeLabels { model: model.to_owned(), start: start.to_owned() };
        self.first_tokens.get_or_create(&labels).observe(seconds);
        let mut attainment = self.attainment.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ratio) = attainment.note(model, start, seconds) {
            self.slo_attained.get_or_create(&labels).set(ratio);
        }
    }

    /// What was promised, by model. A model that is not named was promised nothing.
    pub fn set_targets(&self, targets: BTreeMap<String, Targets>) {
        let mut attainment = self.attainment.lock().unwrap_or_else(PoisonError::into_inner);
        for (model, start) in attainment.replace(targets) {
            self.slo_attained.remove(&TimeLabels { model, start: start.to_owned() });
        }
    }

    /// Percentiles per model.
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    /// What was computed for a request that has ended.
    pub fn record_tokens(&self, model: &str, tenant: &str, usage: Usage) {
        let kinds =
            [("prompt", usage.prompt_tokens), ("completion", usage.completion_tokens), ("cached", usage.cached_tokens)];
        for (kind, count) in kinds {
            let labels = TokenLabels { model: model.to_owned(), tenant: tenant.to_owned(), kind: kind.to_owned() };
            self.tokens.get_or_create(&labels).inc_by(u64::from(count));
        }
    }

    /// A job has ended.
    pub fn record_job(&self, status: JobStatus) {
        self.jobs.get_or_create(&OutcomeLabels { outcome: status.as_str().to_owned() }).inc();
    }

    /// How many jobs are in each state in which they have not ended.
    pub fn set_jobs(&self, counts: &[(JobStatus, usize)]) {
        for (status, count) in counts {
            let labels = StatusLabels { status: status.as_str().to_owned() };
            self.jobs_unfinished.get_or_create(&labels).set(gauge_value(*count as u64));
        }
    }

    /// A request was sent to a worker: `affinity`, `spill`, `least_cost` or `only`.
    pub fn record_routed(&self, decision: &str) {
        self.routed.get_or_create(&DecisionLabels { decision: decision.to_owned() }).inc();
    }

    /// What a worker told. `name_of` finds the name a digest was added under.
    pub fn record_fact(&self, now: Instant, fact: &Fact, name_of: &dyn Fn(&Digest) -> Option<ModelName>) {
        let name = |digest: &Digest| name_of(digest).map_or_else(|| digest.to_string(), |name| name.to_string());
        match fact {
            Fact::LoadFinished { digest, peak, steady, timings, .. } => {
                let model = name(digest);
                self.count_load(&model, "ok");
                self.observe_phases(&model, timings);
                self.set_resident(&model, digest, "peak", peak.total_bytes());
                self.set_resident(&model, digest, "steady", steady.total_bytes());
            }
            Fact::LoadRefused { digest, .. } => self.count_load(&name(digest), "failed"),
            Fact::EvictionStarted { digest, reason } => {
                let labels = EvictionLabels { model: name(digest), reason: reason.as_str().to_owned() };
                self.evictions.get_or_create(&labels).inc();
            }
            Fact::Preloaded { digest, outcome } => {
                let labels = PreloadLabels { model: name(digest), outcome: outcome.as_str().to_owned() };
                self.preloads.get_or_create(&labels).inc();
            }
            Fact::EvictionFinished { digest, .. } => self.forget_resident(&name(digest), digest),
            Fact::EngineCrashed { digest, .. } => {
                let labels = EvictionLabels { model: name(digest), reason: "crashed".to_owned() };
                self.evictions.get_or_create(&labels).inc();
                self.forget_resident(&name(digest), digest);
            }
            Fact::ThrashAlarm { pool, ratio, .. } => {
                self.thrash.get_or_create(&PoolLabels { pool: pool.to_string() }).set(*ratio);
            }
            Fact::SizeCorrected { digest, to_bytes, .. } => {
                self.set_resident(&name(digest), digest, "steady", *to_bytes);
            }
            Fact::Grown { digest, peak, steady } => {
                self.set_resident(&name(digest), digest, "peak", peak.total_bytes());
                self.set_resident(&name(digest), digest, "steady", steady.total_bytes());
            }
            Fact::StateChanged { digest, state } => self.follow_load(now, *digest, *state),
            Fact::Parked { digest, .. } => {
                self.parks.get_or_create(&ModelLabels { model: name(digest) }).inc();
            }
            Fact::Resumed { digest, parked } => {
                let labels = ModelLabels { model: name(digest) };
                self.parked_seconds.get_or_create(&labels).inc_by(parked.as_secs_f64());
            }
            Fact::LoadStarted { .. } => {}
        }
    }

    fn count_load(&self, model: &str, outcome: &str) {
        self.loads.get_or_create(&LoadLabels { model: model.to_owned(), outcome: outcome.to_owned() }).inc();
    }

    fn observe_phases(&self, model: &str, timings: &LoadTimings) {
        let phases = [
            ("fetch", timings.fetch_seconds),
            ("verify", timings.verify_seconds),
            ("load", timings.load_seconds + timings.warm_up_seconds),
            ("canary", timings.canary_seconds),
        ];
        // A load fetches only what is not here any more.
        for (phase, seconds) in phases.into_iter().filter(|(phase, seconds)| *phase != "fetch" || *seconds > 0.0) {
            self.observe_phase(model, phase, seconds);
        }
    }

    /// How long the files of a model took to come from another machine.
    pub fn observe_fetch(&self, model: &str, seconds: f64) {
        self.observe_phase(model, "fetch", seconds);
    }

    fn observe_phase(&self, model: &str, phase: &str, seconds: f64) {
        let labels = PhaseLabels { model: model.to_owned(), phase: phase.to_owned() };
        self.load_seconds.get_or_create(&labels).observe(seconds);
    }

    fn set_resident(&self, model: &str, digest: &Digest, kind: &str, bytes: u64) {
        self.resident.get_or_create(&resident_labels(model, digest, kind)).set(gauge_value(bytes));
    }

    fn forget_resident(&self, model: &str, digest: &Digest) {
        for kind in ["steady", "peak", "estimate"] {
            self.resident.remove(&resident_labels(model, digest, kind));
        }
    }

    fn follow_load(&self, now: Instant, digest: Digest, state: ModelState) {
        let mut pending = self.pending_loads.lock().unwrap_or_else(PoisonError::into_inner);
        match state {
            ModelState::Waiting | ModelState::Verifying | ModelState::Loading => {
                pending.entry(digest).or_insert(now);
            }
            _ => {
                pending.remove(&digest);
            }
        }
    }

    /// The ledger as it is: bytes per tier, and bytes per model in memory.
    pub fn set_ledger(&self, tiers: &[TierBytes], lines: &[LedgerLine]) {
        for tier in tiers {
            let states = [
                ("capacity", tier.capacity),
                ("reserve", tier.reserve),
                ("loading", tier.loading),
                ("resident", tier.resident),
                ("unloading", tier.unloading),
                ("kv", tier.kv),
                ("free", tier.free),
            ];
            for (state, bytes) in states {
                let labels = MemoryLabels { tier: tier.tier.clone(), state: state.to_owned() };
                self.memory.get_or_create(&labels).set(gauge_value(bytes));
            }
        }
        self.parked.clear();
        for line in lines.iter().filter(|line| line.parked > 0) {
            let labels = ModelLabels { model: line.name.to_string() };
            self.parked.get_or_create(&labels).set(i64::from(line.parked));
        }
        for line in lines.iter().filter(|line| line.state == ModelState::Ready) {
            let (kind, other) = if line.measured { ("steady", "estimate") } else { ("estimate", "steady") };
            let bytes = line.private.total().saturating_add(line.shared_host_bytes);
            self.set_resident(line.name.as_str(), &line.digest, kind, bytes);
            self.resident.remove(&resident_labels(line.name.as_str(), &line.digest, other));
        }
    }

    /// What the gateway's run loop knows.
    pub fn set_gateway(&self, figures: &GatewayFigures, name_of: &dyn Fn(&Digest) -> Option<ModelName>) {
        for (class, depth) in Priority::ALL.iter().zip(figures.queue_depth) {
            let labels = PriorityLabels { priority: class.as_str().to_owned() };
            self.queue_depth.get_or_create(&labels).set(i64::from(depth));
        }
        self.running.clear();
        for (digest, count) in &figures.running {
            if let Some(name) = name_of(digest) {
                self.running.get_or_create(&ModelLabels { model: name.to_string() }).inc_by(i64::from(*count));
            }
        }
    }

    /// What the KV tier says of itself.
    pub fn set_kv(&self, view: &TierView, name_of: &dyn Fn(&Digest) -> Option<ModelName>) {
        self.kv.set(view, name_of);
    }

    /// Everything in Prometheus's text format. Reading changes no counter.
    pub fn render(&self, now: Instant) -> String {
        let oldest = {
            let pending = self.pending_loads.lock().unwrap_or_else(PoisonError::into_inner);
            pending.values().min().map_or(0.0, |since| now.since(*since).as_secs_f64())
        };
        self.oldest_pending_load.set(oldest);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }
}

fn resident_labels(model: &str, digest: &Digest, kind: &str) -> ResidentLabels {
    ResidentLabels { model: model.to_owned(), digest: digest.to_string(), kind: kind.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use warmset_core::{
        Footprint, PoolName,
        worker::{EvictionReason, Generation, PreloadOutcome},
    };

    fn name(_: &Digest) -> Option<ModelName> {
        ModelName::parse("m").ok()
    }

    #[test]
    fn request_metrics_have_the_names_of_the_contract() {
        let metrics = Metrics::default();
        metrics.record_request(RequestEnd { model: "m", outcome: "ok", start: "cold" }, 450.0);
        metrics.record_first_token("m", "cold", 300.0);
        metrics.record_tokens("m", "t", Usage { prompt_tokens: 5, completion_tokens: 7, cached_tokens: 3 });
        metrics.record_routed("only");
        metrics.record_job(JobStatus::Expired);
        metrics.set_jobs(&[(JobStatus::Queued, 3), (JobStatus::Running, 0)]);
        metrics.set_gateway(
            &GatewayFigures {
                queue_depth: [1, 2, 3],
                running: vec![(Digest([1; 32]), 4)],
                ..GatewayFigures::default()
            },
            &name,
        );
        let text = metrics.render(Instant::ZERO);
        for line in [
            "warmset_requests_total{model=\"m\",outcome=\"ok\",start=\"cold\"} 1\n",
            "warmset_request_duration_seconds_bucket{model=\"m\",start=\"cold\",le=\"300\"} 0\n",
            "warmset_request_duration_seconds_bucket{model=\"m\",start=\"cold\",le=\"600\"} 1\n",
            "warmset_time_to_first_token_seconds_sum{model=\"m\",start=\"cold\"} 300.0\n",
            "warmset_tokens_total{model=\"m\",tenant=\"t\",kind=\"cached\"} 3\n",
            "warmset_routed_total{decision=\"only\"} 1\n",
            "warmset_jobs_total{outcome=\"expired\"} 1\n",
            "warmset_jobs_unfinished{status=\"queued\"} 3\n",
            "warmset_jobs_unfinished{status=\"running\"} 0\n",
            "warmset_queue_depth{priority=\"standard\"} 2\n",
            "warmset_running_requests{model=\"m\"} 4\n",
            "warmset_oldest_pending_load_seconds 0.0\n",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }

    #[test]
    fn facts_and_ledger_become_metrics() {
        let metrics = Metrics::default();
        let digest = Digest([7; 32]);
        let start = Instant::after(Duration::from_secs(10));
        let changed = |state| Fact::StateChanged { digest, state };
        metrics.record_fact(start, &changed(ModelState::Waiting), &name);
        metrics.record_fact(start + Duration::from_secs(5), &changed(ModelState::Loading), &name);
        let text = metrics.render(start + Duration::from_secs(9));
        assert!(text.contains("warmset_oldest_pending_load_seconds 9.0\n"), "{text}");
        let timings = LoadTimings { load_seconds: 3.0, ..LoadTimings::default() };
        let (peak, steady) = (Footprint::host(30), Footprint::host(20));
        let generation = Generation(1);
        metrics.record_fact(start, &Fact::LoadFinished { digest, generation, peak, steady, timings }, &name);
        metrics.record_fact(start, &changed(ModelState::Ready), &name);
        let pool = PoolName::default_pool();
        metrics.record_fact(start, &Fact::ThrashAlarm { pool, ratio: 0.5, raised: true }, &name);
        metrics.set_ledger(&[TierBytes { tier: "host".into(), capacity: 100, free: 80, ..TierBytes::default() }], &[]);
        let text = metrics.render(start);
        let resident = format!("warmset_model_resident_bytes{{model=\"m\",digest=\"{digest}\",kind=\"steady\"}} 20\n");
        for line in [
            "warmset_oldest_pending_load_seconds 0.0\n",
            "warmset_model_loads_total{model=\"m\",outcome=\"ok\"} 1\n",
            "warmset_model_load_seconds_sum{model=\"m\",phase=\"load\"} 3.0\n",
            "warmset_thrash_ratio{pool=\"default\"} 0.5\n",
            "warmset_memory_bytes{tier=\"host\",state=\"capacity\"} 100\n",
            resident.as_str(),
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        metrics.record_fact(start, &Fact::Preloaded { digest, outcome: PreloadOutcome::Used }, &name);
        let preloads = "warmset_model_preloads_total{model=\"m\",outcome=\"used\"} 1\n";
        assert!(metrics.render(start).contains(preloads), "{preloads}");
        let reason = EvictionReason::Memory;
        metrics.record_fact(start, &Fact::EvictionStarted { digest, reason }, &name);
        metrics.record_fact(start, &Fact::EvictionFinished { digest, reason }, &name);
        let text = metrics.render(start);
        assert!(text.contains("warmset_model_evictions_total{model=\"m\",reason=\"memory\"} 1\n"), "{text}");
        assert!(!text.contains("warmset_model_resident_bytes{"), "{text}");
    }
}
