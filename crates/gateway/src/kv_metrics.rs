//! Metrics of the KV tier, as it tells them: sums since the server began.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use std::sync::atomic::Ordering;
use warmset_core::{
    Digest, ModelName,
    kv::{ModelView, TierView},
};

macro_rules! labels {
    ($name:ident { $($field:ident),* }) => {
        #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
        struct $name { $($field: String),* }
    };
}
labels!(ModelLabels { model });
labels!(HitLabels { model, tier });
labels!(TrafficLabels { model, kind });
labels!(DecisionLabels { model, decision });
labels!(TierLabels { tier });
labels!(ReasonLabels { reason });
labels!(SecondsLabels { model, kind });

/// All of them.
#[derive(Default)]
pub(crate) struct KvMetrics {
    lookups: Family<ModelLabels, Counter>,
    hits: Family<HitLabels, Counter>,
    traffic: Family<TrafficLabels, Counter>,
    decisions: Family<DecisionLabels, Counter>,
    seconds: Family<SecondsLabels, Counter<f64, std::sync::atomic::AtomicU64>>,
    bytes: Family<TierLabels, Gauge>,
    bytes_max: Family<TierLabels, Gauge>,
    bytes_written: Counter,
    writes_failed: Counter,
    writes_refused: Counter,
    saves_skipped: Counter,
    rejected: Family<ReasonLabels, Counter>,
    verified: Family<ModelLabels, Counter>,
}

/// A counter that somebody else counts.
fn set(counter: &Counter, value: u64) {
    counter.inner().store(value, Ordering::Relaxed);
}

impl KvMetrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("kv_lookup_tokens", "Prompt tokens that were looked up", self.lookups.clone());
        registry.register("kv_hit_tokens", "Prompt tokens whose KV was there", self.hits.clone());
        registry.register(
            "kv_shared_tokens",
            "The same by what they are to those who share them",
            self.traffic.clone(),
        );
        let help = "What was done with prefixes whose KV lay in host memory or on disk";
        registry.register("kv_decisions", help, self.decisions.clone());
        let help = "Seconds of computing that were saved, and seconds that bringing KV back took";
        registry.register("kv_seconds", help, self.seconds.clone());
        registry.register("kv_bytes", "KV that is kept", self.bytes.clone());
        registry.register("kv_limit_bytes", "The most KV that may be kept now", self.bytes_max.clone());
        registry.register("kv_disk_written_bytes", "KV written to disk: its wear", self.bytes_written.clone());
        registry.register("kv_disk_writes_failed", "Blocks that could not be written", self.writes_failed.clone());
        let help = "Blocks not written for want of room, of allowance or of a free place in the queue";
        registry.register("kv_disk_writes_refused", help, self.writes_refused.clone());
        registry.register("kv_saves_skipped", "States not saved, as too many waited", self.saves_skipped.clone());
        registry.register("kv_rejected_blocks", "Blocks that were not what they must be", self.rejected.clone());
        let help = "Restored blocks that were written out again and were what was saved";
        registry.register("kv_verified_blocks", help, self.verified.clone());
    }

    pub(crate) fn set(&self, view: &TierView, name_of: &dyn Fn(&Digest) -> Option<ModelName>) {
        for model in &view.models {
            if let Some(name) = model.model.as_ref().and_then(name_of) {
                self.set_model(name.as_str(), model);
            }
        }
        let gauge = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let tiers = [("host", view.host_bytes, view.host_bytes_max), ("disk", view.disk_bytes, view.disk_bytes_max)];
        for (tier, bytes, max) in tiers {
            let labels = TierLabels { tier: tier.to_owned() };
            self.bytes.get_or_create(&labels).set(gauge(bytes));
            self.bytes_max.get_or_create(&labels).set(gauge(max));
        }
        set(&self.bytes_written, view.disk_written_bytes);
        set(&self.writes_failed, view.disk_writes_failed);
        set(&self.writes_refused, view.disk_writes_refused);
        set(&self.saves_skipped, view.saves_skipped);
        for (reason, count) in &view.rejected.0 {
            set(&self.rejected.get_or_create(&ReasonLabels { reason: reason.clone() }), *count);
        }
    }

    fn set_model(&self, name: &str, view: &ModelView) {
        let model = || name.to_owned();
        set(&self.lookups.get_or_create(&ModelLabels { model: model() }), view.lookup_tokens);
        set(&self.verified.get_or_create(&ModelLabels { model: model() }), view.verified_blocks);
        let hits = view.hit_tokens;
        for (tier, tokens) in [("device", hits.device), ("host", hits.host), ("disk", hits.disk)] {
            set(&self.hits.get_or_create(&HitLabels { model: model(), tier: tier.to_owned() }), tokens);
        }
        let traffic = view.traffic;
        let kinds = [
            ("session", traffic.session_tokens),
            ("system", traffic.system_tokens),
            ("document", traffic.document_tokens),
        ];
        for (kind, tokens) in kinds {
            set(&self.traffic.get_or_create(&TrafficLabels { model: model(), kind: kind.to_owned() }), tokens);
        }
        for (decision, count) in
            [("reload", view.reloaded - view.split), ("split", view.split), ("recompute", view.recomputed)]
        {
            set(
                &self.decisions.get_or_create(&DecisionLabels { model: model(), decision: decision.to_owned() }),
                count,
            );
        }
        for (kind, seconds) in [("saved", view.saved_seconds), ("spent", view.spent_seconds)] {
            let labels = SecondsLabels { model: model(), kind: kind.to_owned() };
            self.seconds.get_or_create(&labels).inner().store(seconds.to_bits(), Ordering::Relaxed);
        }
    }
}
