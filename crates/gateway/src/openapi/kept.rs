//! The schemas of what is kept and what is administered: jobs, files, batches, models, workers, the ledger. The documents
//! are put together field by field where they are answered, so that their schemas stand here; a whole-system test
//! compares the two.

use super::{
    named,
    schemas::{list, nullable, object},
};
use serde_json::{Value, json};

fn text() -> Value {
    json!({ "type": "string" })
}

fn whole() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

fn number() -> Value {
    json!({ "type": "number" })
}

fn flag() -> Value {
    json!({ "type": "boolean" })
}

fn digest() -> Value {
    json!({ "type": "string", "pattern": "^sha256:[0-9a-f]{64}$" })
}

fn texts() -> Value {
    json!({ "type": "array", "items": text() })
}

fn objects(required: &[&str], properties: Value) -> Value {
    json!({ "type": "array", "items": object(required, properties) })
}

/// One list under its name.
fn under(name: &str, schema: &str) -> Value {
    object(&[name], json!({ name: { "type": "array", "items": named(schema) } }))
}

/// What is answered later.
fn later() -> Value {
    let counts =
        object(&["total", "completed", "failed"], json!({ "total": whole(), "completed": whole(), "failed": whole() }));
    let fault = object(
        &["code", "message", "param", "line"],
        json!({ "code": text(), "message": text(), "param": nullable(text()), "line": nullable(whole()) }),
    );
    let times =
        ["in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"];
    let mut batch = json!({
        "id": text(), "object": { "const": "batch" }, "endpoint": text(), "input_file_id": text(),
        "output_file_id": nullable(text()), "error_file_id": nullable(text()), "completion_window": text(),
        "status": { "enum": ["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"] },
        "errors": { "oneOf": [{ "type": "null" }, list(fault)] }, "request_counts": counts,
        "created_at": whole(), "expires_at": whole(), "metadata": { "type": "object" },
    });
    for time in times {
        batch[time] = nullable(whole());
    }
    let page = |schema| {
        let mut page = list(named(schema));
        for field in ["first_id", "last_id"] {
            page["properties"][field] = nullable(text());
        }
        page["properties"]["has_more"] = flag();
        page
    };
    let job = json!({
        "id": text(), "object": { "const": "job" },
        "status": { "enum": ["queued", "loading", "running", "succeeded", "failed", "cancelled", "expired"] },
        "position": nullable(whole()), "loaded": nullable(number()), "model": text(), "digest": digest(),
        "start": { "enum": ["warm", "cold", null] }, "route": text(),
        "class": { "enum": ["critical", "standard", "batch"] }, "attempts": whole(), "created_at": whole(),
        "finished_at": nullable(whole()), "expires_at": whole(), "result": { "type": ["object", "null"] },
        "error": { "type": ["object", "null"] }, "http_status": nullable(whole()),
    });
    let file = json!({
        "id": text(), "object": { "const": "file" }, "bytes": whole(), "created_at": whole(), "filename": text(),
        "purpose": { "enum": ["batch", "batch_output"] }, "status": { "const": "processed" },
    });
    json!({
        "Job": object(&keys(&job), job.clone()),
        "JobList": under("jobs", "Job"),
        "File": object(&keys(&file), file.clone()),
        "FilePage": page("File"),
        "FileDeleted": object(&["id", "object", "deleted"], json!({ "id": text(), "object": { "const": "file" }, "deleted": flag() })),
        "Batch": object(&keys(&batch), batch.clone()),
        "BatchPage": page("Batch"),
        "BatchList": under("batches", "Batch"),
    })
}

/// Every field is always there.
fn keys(properties: &Value) -> Vec<&str> {
    properties.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect()
}

/// What administrators see.
fn administered() -> Value {
    let model = json!({
        "name": text(), "digest": digest(), "aliases": texts(), "state": text(), "source": text(), "engine": text(),
        "runtime": nullable(text()), "architecture": text(), "size_bytes": whole(), "pin": flag(),
        "files": objects(&["name", "sha256", "size_bytes"], json!({ "name": text(), "sha256": text(), "size_bytes": whole() })),
        "priority": { "enum": ["critical", "standard", "batch"] }, "pool": text(), "parallel": whole(),
        "max_concurrency": whole(), "critical_reserve": whole(), "cold": { "enum": ["wait", "async", "reject"] },
        "fallback": nullable(text()), "schedule": texts(), "steady_bytes": whole(), "peak_bytes": whole(), "measured": flag(),
        "keep_alive_seconds": nullable(number()), "memory_cap_bytes": nullable(whole()), "queued": whole(),
        "created_unix_milliseconds": whole(), "updated_unix_milliseconds": whole(),
    });
    let required = keys(&model);
    let fetch = json!({ "name": text(), "done_bytes": whole(), "total_bytes": nullable(whole()) });
    let tier = json!({
        "tier": text(), "capacity_bytes": whole(), "reserve_bytes": whole(), "loading_bytes": whole(),
        "resident_bytes": whole(), "unloading_bytes": whole(), "kv_bytes": whole(), "free_bytes": whole(),
    });
    let memory = object(
        &["tiers", "pools", "overhead_bytes", "oldest_pending_load_seconds"],
        json!({
            "tiers": objects(&keys(&tier), tier.clone()), "pools": objects(&["pool"], json!({ "pool": text() })),
            "overhead_bytes": whole(), "oldest_pending_load_seconds": number(),
        }),
    );
    let engine = json!({ "digest": digest(), "pid": whole(), "name": nullable(text()), "state": nullable(text()) });
    let worker = json!({
        "id": whole(), "type": text(), "cores": whole(), "draining": flag(), "memory": memory,
        "engines": objects(&keys(&engine), engine.clone()),
    });
    let entry = json!({
        "digest": digest(), "name": text(), "pool": text(), "state": text(), "in_flight": whole(), "waiting": whole(), "parked": whole(),
        "shared_host_bytes": whole(), "worth": number(), "demand_per_second": number(), "measured": flag(), "pin": flag(),
    });
    let failed = json!({ "name": text(), "digest": digest(), "reason": text() });
    json!({
        "AdminModel": object(&required, model.clone()),
        "AdminModelList": object(&["models", "fetches"], json!({
            "models": { "type": "array", "items": named("AdminModel") }, "fetches": objects(&keys(&fetch), fetch.clone()),
        })),
        "ModelRemoved": object(&["name", "digest", "removed"], json!({ "name": text(), "digest": digest(), "removed": flag() })),
        "LogLines": object(&["name", "digest", "lines"], json!({ "name": text(), "digest": digest(), "lines": texts() })),
        "WorkerList": object(&["listen", "data", "workers"], json!({
            "listen": text(), "data": text(), "workers": objects(&keys(&worker), worker.clone()),
        })),
        "Ledger": object(&["memory", "entries"], json!({ "memory": worker["memory"], "entries": objects(&keys(&entry), entry.clone()) })),
        "Kv": object(&["enabled"], json!({ "enabled": flag() })),
        "Draining": object(&["draining"], json!({ "draining": flag() })),
        "Reloaded": object(&["added", "changed", "reloading", "removed", "failed", "needs_restart"], json!({
            "added": texts(), "changed": texts(), "reloading": texts(), "removed": texts(), "needs_restart": texts(),
            "failed": objects(&keys(&failed), failed.clone()),
        })),
    })
}

/// All of them.
pub(super) fn all() -> Value {
    let mut all = later();
    if let (Some(all), Value::Object(administered)) = (all.as_object_mut(), administered()) {
        all.extend(administered);
    }
    all
}
