//! The metrics of a gateway in front of replicas.

use super::{Proxy, log::outcome_name, usage::Counted};
use crate::metrics::SECONDS_BUCKETS;
use prometheus_client::{
    encoding::{EncodeLabelSet, prometheus_text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use std::{
    fmt,
    sync::{Mutex, PoisonError},
};
use warmset_core::routing::{BreakerState, Outcome, Why};

macro_rules! labels {
    ($name:ident { $($field:ident),* }) => {
        #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
        struct $name { $($field: String),* }
    };
}
labels!(RequestLabels { model, outcome });
labels!(ModelLabels { model });
labels!(TokenLabels { model, kind });
labels!(DecisionLabels { decision });
labels!(ReplicaLabels { replica });
labels!(RetryLabels { allowed });

type Times = Family<ModelLabels, Histogram, fn() -> Histogram>;

/// Counted as it happens; what the router knows is read when somebody looks.
pub(super) struct ProxyMetrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: Times,
    first_tokens: Times,
    tokens: Family<TokenLabels, Counter>,
    routed: Family<DecisionLabels, Counter>,
    retries: Family<RetryLabels, Counter>,
    /// What the two above have counted of the router's totals.
    told: Mutex<[u64; 6]>,
    up: Family<ReplicaLabels, Gauge>,
    in_flight: Family<ReplicaLabels, Gauge>,
    held_tokens: Family<ReplicaLabels, Gauge>,
    paused_models: Family<ReplicaLabels, Gauge>,
    mirror_bytes: Gauge,
}

impl fmt::Debug for ProxyMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProxyMetrics")
    }
}

fn seconds() -> Histogram {
    Histogram::new(SECONDS_BUCKETS)
}

impl Default for ProxyMetrics {
    fn default() -> Self {
        let family = || Times::new_with_constructor(seconds);
        let mut metrics = Self {
            registry: Registry::with_prefix("warmset"),
            requests: Family::default(),
            durations: family(),
            first_tokens: family(),
            tokens: Family::default(),
            routed: Family::default(),
            retries: Family::default(),
            told: Mutex::default(),
            up: Family::default(),
            in_flight: Family::default(),
            held_tokens: Family::default(),
            paused_models: Family::default(),
            mirror_bytes: Gauge::default(),
        };
        metrics.register();
        metrics
    }
}

impl ProxyMetrics {
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("requests", "Requests that have ended", self.requests.clone());
        registry.register("request_duration_seconds", "From the decision to the last byte", self.durations.clone());
        let help = "From the decision to the first of the answer";
        registry.register("time_to_first_token_seconds", help, self.first_tokens.clone());
        registry.register("tokens", "Tokens as replicas counted them", self.tokens.clone());
        registry.register("routed", "Requests sent to a replica, by why it was that one", self.routed.clone());
        registry.register("retries", "Failed requests that could be tried elsewhere", self.retries.clone());
        registry.register("replica_up", "Whether a replica can be asked", self.up.clone());
        registry.register("replica_running_requests", "Requests at a replica", self.in_flight.clone());
        let help = "Tokens of prompts that a replica is believed to hold";
        registry.register("replica_held_tokens", help, self.held_tokens.clone());
        let help = "Models that a replica is not asked for now, because they failed or it wants to be left alone";
        registry.register("replica_paused_models", help, self.paused_models.clone());
        let help = "Bytes in which it is remembered what replicas hold";
        registry.register("router_memory_bytes", help, self.mirror_bytes.clone());
    }

    /// The first of an answer came so long after its decision.
    pub(super) fn first_token(&self, model: &str, seconds: f64) {
        self.first_tokens.get_or_create(&ModelLabels { model: model.to_owned() }).observe(seconds);
    }

    /// A request has ended.
    pub(super) fn ended(&self, model: &str, outcome: Outcome, seconds: f64, counted: Option<Counted>) {
        self.refused(model, outcome_name(outcome));
        if outcome == Outcome::Finished {
            self.durations.get_or_create(&ModelLabels { model: model.to_owned() }).observe(seconds);
        }
        if let Some(counted) = counted {
            self.metered(model, counted);
        }
    }

    /// So many tokens were read and written.
    pub(super) fn metered(&self, model: &str, counted: Counted) {
        let kinds = [
            ("prompt", counted.prompt_tokens),
            ("completion", counted.completion_tokens),
            ("cached", counted.cached_tokens.unwrap_or(0)),
        ];
        for (kind, tokens) in kinds {
            self.tokens.get_or_create(&TokenLabels { model: model.to_owned(), kind: kind.to_owned() }).inc_by(tokens);
        }
    }

    /// A request ended without an answer of a replica.
    pub(super) fn refused(&self, model: &str, outcome: &str) {
        let labels = RequestLabels { model: model.to_owned(), outcome: outcome.to_owned() };
        self.requests.get_or_create(&labels).inc();
    }

    /// Everything as text.
    pub(super) fn text(&self, proxy: &Proxy) -> String {
        self.read(proxy);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }

    fn read(&self, proxy: &Proxy) {
        let endpoints: Vec<_> = proxy.endpoints().all().cloned().collect();
        let now = proxy.clock.now();
        let router = proxy.router();
        let totals = router.totals();
        self.tell(totals.decisions, [totals.retries, totals.retries_refused]);
        self.mirror_bytes.set(i64::try_from(totals.remembered_bytes).unwrap_or(i64::MAX));
        for family in [&self.up, &self.in_flight, &self.held_tokens, &self.paused_models] {
            family.clear();
        }
        for endpoint in endpoints {
            let Some(view) = router.view(now, endpoint.id) else { continue };
            let labels = ReplicaLabels { replica: endpoint.name.to_string() };
            let pauses = router.pauses(now, endpoint.id).len();
            self.paused_models.get_or_create(&labels).set(i64::try_from(pauses).unwrap_or(i64::MAX));
            let up = view.breaker == BreakerState::Closed && endpoint.heard().healthy;
            self.up.get_or_create(&labels).set(i64::from(up));
            self.in_flight.get_or_create(&labels).set(i64::from(view.in_flight));
            self.held_tokens.get_or_create(&labels).set(i64::try_from(view.held_tokens).unwrap_or(i64::MAX));
        }
    }

    /// Counters follow what the router has counted.
    fn tell(&self, decisions: [u64; 4], retries: [u64; 2]) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for why in [Why::Affinity, Why::Spill, Why::LeastCost, Why::Only] {
            let labels = DecisionLabels { decision: why.as_str().to_owned() };
            let place = why as usize;
            self.routed.get_or_create(&labels).inc_by(decisions[place] - told[place]);
            told[place] = decisions[place];
        }
        for (place, allowed) in ["true", "false"].into_iter().enumerate() {
            let counter = self.retries.get_or_create(&RetryLabels { allowed: allowed.to_owned() });
            counter.inc_by(retries[place] - told[4 + place]);
            told[4 + place] = retries[place];
        }
    }
}
