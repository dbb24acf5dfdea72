//! Models as JSON, the same from the server and from a data directory.

use super::{Stored, slots};
use serde_json::{Value, json};
use std::time::Duration;
use warmset_catalog::Measurement;
use warmset_core::{ModelName, forecast::Expectation, targets::Targets, worker::ModelState};

/// A model as `model list --json` and the admin routes show it.
pub(crate) fn model_json(stored: &Stored, state: ModelState, measured: Option<&Measurement>) -> Value {
    let Stored { model, manifest, shape, .. } = stored;
    let settings = &model.settings;
    let (peak, steady) = match measured {
        Some(measurement) => (&measurement.peak, &measurement.steady),
        None => (&shape.peak, &shape.steady),
    };
    json!({
        "name": model.name,
        "digest": model.digest,
        "aliases": model.aliases.iter().map(ModelName::as_str).collect::<Vec<_>>(),
        "state": state,
        "source": model.source,
        "pinned_source": settings.pinned_source,
        "fetch_seconds": settings.fetch_seconds,
        "engine": settings.engine,
        "runtime": settings.runtime,
        "architecture": shape.architecture,
        "size_bytes": manifest.files.iter().map(|file| file.size_bytes).sum::<u64>(),
        "files": manifest.files,
        "pin": settings.pin,
        "priority": settings.priority,
        "pool": settings.pool,
        "parallel": settings.parallel,
        "max_concurrency": slots(settings),
        "critical_reserve": settings.critical_reserve,
        "context_tokens": settings.context_tokens,
        "memory_cap_bytes": settings.memory_cap_bytes,
        "cold": settings.cold, "fallback": settings.fallback,
        "keep_alive_seconds": settings.keep_alive_seconds,
        "accelerators": settings.accelerators,
        "schedule": settings.schedule,
        "slo": settings.slo,
        "cold_seconds": measured.map(|measured| measured.timings.total_seconds()),
        "steady_bytes": steady.total_bytes(),
        "peak_bytes": peak.total_bytes(),
        "measured": measured.is_some(),
        "first_request_penalty_seconds": measured.and_then(|measured| measured.first_request_penalty_seconds),
        "created_unix_milliseconds": model.created_unix_milliseconds,
        "updated_unix_milliseconds": model.updated_unix_milliseconds,
    })
}

/// How far beyond its target the measured cold start of a shown model ends, if it does.
pub(crate) fn cold_excess_seconds(model: &Value) -> Option<f64> {
    let targets: Targets = serde_json::from_value(model["slo"].clone()).ok()?;
    targets.cold_excess_seconds(model["cold_seconds"].as_f64()?)
}

/// What is expected of a model, as `model show --json` shows it.
pub(crate) fn expectation_json(expectation: &Expectation) -> Value {
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs_f64());
    json!({
        "source": expectation.source,
        "next_in_seconds": seconds(expectation.next_in),
        "due_in_seconds": seconds(expectation.due_in),
        "intervals": expectation.intervals,
        "preloads_used": expectation.score.used,
        "preloads_late": expectation.score.late,
        "preloads_wasted": expectation.score.wasted,
    })
}

/// A measurement as `model show --json` and `model profile --json` show it.
pub(crate) fn measurement_json(worker_type: &str, measurement: &Measurement, stored: &Stored) -> Value {
    let (timings, settings) = (measurement.timings, &stored.model.settings);
    json!({
        "worker_type": worker_type,
        // A load fetches only what was lost; what it takes to bring the files here is known from when they came.
        "download_seconds": settings.fetch_seconds.unwrap_or(timings.fetch_seconds),
        "verify_seconds": timings.verify_seconds,
        "load_seconds": timings.load_seconds,
        "warm_up_seconds": timings.warm_up_seconds,
        "total_seconds": timings.total_seconds(),
        "peak_bytes": measurement.peak.total_bytes(),
        "steady_bytes": measurement.steady.total_bytes(),
        "peak": measurement.peak,
        "steady": measurement.steady,
        "first_request_penalty_seconds": measurement.first_request_penalty_seconds,
        "prefill_tokens_per_second": measurement.prefill_tokens_per_second,
        "decode_tokens_per_second": measurement.decode_tokens_per_second,
        "kv_bytes_per_token": measurement.kv_bytes_per_token.or(stored.shape.kv_bytes_per_token),
        "measured_unix_milliseconds": measurement.measured_unix_milliseconds,
        "samples": measurement.samples,
    })
}
