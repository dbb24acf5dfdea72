//! The routes of the admin listener.

use super::Operation;
use crate::router::Scope::Admin;
use serde_json::json;

pub(super) fn operations() -> Vec<Operation> {
    let get = |path, summary| Operation::new("GET", path, Admin, summary);
    let post = |path, summary| Operation::new("POST", path, Admin, summary);
    let text = json!({ "type": "string" });
    let whole = json!({ "type": "integer", "minimum": 0 });
    vec![
        get("/openapi.json", "This description").answers(200, "Anything"),
        get("/metrics", "Metrics for Prometheus").answers_with(200, "text/plain", &text),
        get("/admin/v1/models", "Every model").answers(200, "AdminModelList"),
        post("/admin/v1/models", "Adds a model").body("NewModel").answers(200, "AdminModel"),
        get("/admin/v1/models/{name}", "One model with its measurements").answers(200, "AdminModel"),
        Operation::new("DELETE", "/admin/v1/models/{name}", Admin, "Removes a model").answers(200, "ModelRemoved"),
        post("/admin/v1/models/{name}/pin", "Keeps a model loaded").answers(200, "AdminModel"),
        post("/admin/v1/models/{name}/unpin", "Lets a model go").answers(200, "AdminModel"),
        post("/admin/v1/models/{name}/load", "Loads a model")
            .query("wait", &json!({ "type": "boolean" }), "false answers at once")
            .answers(200, "AdminModel"),
        post("/admin/v1/models/{name}/unload", "Unloads a model").answers(200, "AdminModel"),
        get("/admin/v1/models/{name}/logs", "The last lines of a model's engines")
            .query("lines", &whole, "how many")
            .answers(200, "LogLines"),
        post("/admin/v1/models/{name}/{action}", "Whatever else can be done with a model: alias, profile")
            .optional_body("Anything")
            .answers(200, "Anything"),
        get("/admin/v1/workers", "Workers with their memory and processes").answers(200, "WorkerList"),
        get("/admin/v1/ledger", "Every byte: sums, and who holds what").answers(200, "Ledger"),
        get("/admin/v1/kv", "What is kept of prompts, and whether it pays").answers(200, "Kv"),
        Operation::new("DELETE", "/admin/v1/kv", Admin, "Forgets all prompts, and tells what is kept then")
            .answers(200, "Kv"),
        get("/admin/v1/events", "What happens, as server-sent events")
            .query("after", &whole, "goes on after this event")
            .streams(),
        get("/admin/v1/recording", "What the machines are told and do from now on, a JSON document a line")
            .query("seconds", &whole, "ends after so many")
            .query("max_bytes", &whole, "ends before it is longer than this")
            .answers_with(200, "application/x-ndjson", &text),
        post("/admin/v1/drain", "Accepts nothing new, finishes what runs, unloads everything").answers(200, "Draining"),
        get("/admin/v1/jobs", "Every job, the newest first").query("limit", &whole, "how many").answers(200, "JobList"),
        get("/admin/v1/jobs/{name}", "One job").answers(200, "Job"),
        Operation::new("DELETE", "/admin/v1/jobs/{name}", Admin, "Cancels a job").answers(200, "Job"),
        get("/admin/v1/batches", "Every batch, the newest first")
            .query("limit", &whole, "how many")
            .answers(200, "BatchList"),
        get("/admin/v1/batches/{name}", "One batch").answers(200, "Batch"),
        Operation::new("DELETE", "/admin/v1/batches/{name}", Admin, "Cancels a batch").answers(200, "Batch"),
        post("/admin/v1/reload", "Reads the configuration again and touches only what changed")
            .answers(200, "Reloaded"),
    ]
}
