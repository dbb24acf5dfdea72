//! The routes of the inference listener.

use super::Operation;
use crate::router::Scope::{Health, Inference};
use serde_json::json;

pub(super) fn operations() -> Vec<Operation> {
    let get = |path, summary| Operation::new("GET", path, Inference, summary);
    let post = |path, summary| Operation::new("POST", path, Inference, summary);
    let delete = |path, summary| Operation::new("DELETE", path, Inference, summary);
    let text = json!({ "type": "string" });
    let probe = |path, summary| {
        let probe = Operation::new("GET", path, Health, summary).answers_with(200, "text/plain", &text);
        probe.answers_with(503, "text/plain", &text)
    };
    vec![
        probe("/health/live", "Whether the server is alive"),
        probe("/health/ready", "Whether the server accepts work"),
        post("/v1/chat/completions", "Answers a conversation (OpenAI)")
            .body("ChatRequest")
            .answers(200, "ChatCompletion")
            .streams(),
        post("/v1/completions", "Continues a text (OpenAI)")
            .body("CompletionRequest")
            .answers(200, "Completion")
            .streams(),
        post("/v1/embeddings", "One vector for each input (OpenAI)")
            .body("EmbeddingRequest")
            .answers(200, "EmbeddingList"),
        post("/v1/responses", "Answers a conversation of items (OpenAI)")
            .body("ResponseRequest")
            .answers(200, "Response")
            .streams(),
        get("/v1/responses/{name}", "A response made in the background").answers(200, "Response"),
        post("/v1/responses/{name}/cancel", "Cancels a response made in the background").answers(200, "Response"),
        post("/v1/messages", "Answers a conversation of blocks (Anthropic)")
            .body("MessageRequest")
            .answers(200, "Message")
            .streams()
            .errors("AnthropicError"),
        post("/v1/messages/count_tokens", "How many tokens a conversation has (Anthropic)")
            .body("CountRequest")
            .answers(200, "TokenCount")
            .errors("AnthropicError"),
        get("/v1/models", "The models there are; looking loads nothing").answers(200, "ModelList"),
        get("/v1/models/{*name}", "One model").answers(200, "Model"),
        get("/v1/jobs/{name}", "What became of a request that is answered later").answers(200, "Job"),
        delete("/v1/jobs/{name}", "Cancels a job").answers(200, "Job"),
        post("/v1/files", "Takes a file of requests in, as a form (OpenAI)").form("Upload").answers(200, "File"),
        get("/v1/files", "The files there are").answers(200, "FilePage"),
        get("/v1/files/{name}", "One file").answers(200, "File"),
        delete("/v1/files/{name}", "Removes a file").answers(200, "FileDeleted"),
        get("/v1/files/{name}/content", "What is in a file").answers_with(200, "application/octet-stream", &text),
        post("/v1/batches", "Answers the requests of a file, after those who wait (OpenAI)")
            .body("BatchRequest")
            .answers(200, "Batch"),
        get("/v1/batches", "The batches there are").answers(200, "BatchPage"),
        get("/v1/batches/{name}", "One batch").answers(200, "Batch"),
        post("/v1/batches/{name}/cancel", "Cancels a batch").answers(200, "Batch"),
    ]
}
