//! `warmset batches`: files of requests that are answered later, through a running server or in the catalog.

use super::{
    arguments::{BatchesCommand, GlobalArguments},
    jobs::check_name,
    place::Place,
};
use crate::{
    output::{Output, fields, table, text_of},
    repository::Repository,
};
use anyhow::{Context, Result, bail};
use hyper::Method;
use serde_json::{Value, json};
use warmset_core::jobs::{BatchRecord, BatchStep};
use warmset_gateway::{batches::batch_document, clock::unix_seconds};

/// Runs one of the commands.
pub(crate) async fn run(command: BatchesCommand, global: &GlobalArguments, output: Output) -> Result<()> {
    if let BatchesCommand::Show { batch } | BatchesCommand::Cancel { batch } = &command {
        check_name(batch, "batch")?;
    }
    let place = Place::find(global).await?;
    let done = run_at(&place, command, output).await;
    place.leave().await;
    done
}

async fn run_at(place: &Place, command: BatchesCommand, output: Output) -> Result<()> {
    match command {
        BatchesCommand::List { limit } => output.result(&list(place, limit).await?, list_text),
        BatchesCommand::Show { batch } => output.result(&show(place, &batch).await?, show_text),
        BatchesCommand::Cancel { batch } => {
            let document = cancel(place, &batch).await?;
            output.result(&document, |document| {
                format!("{} is {}", text_of(document, "id"), text_of(document, "status"))
            });
        }
    }
    Ok(())
}

async fn list(place: &Place, limit: u64) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get(&format!("/admin/v1/batches?limit={limit}")).await?),
        Place::Directory { repository, .. } => {
            let batches = repository.catalog.batches().await?;
            let shown = batches.iter().take(usize::try_from(limit).unwrap_or(usize::MAX));
            Ok(json!({ "batches": shown.map(batch_document).collect::<Vec<_>>() }))
        }
    }
}

async fn find(repository: &Repository, name: &str) -> Result<BatchRecord> {
    repository
        .catalog
        .batch(name)
        .await?
        .with_context(|| format!("there is no batch {name}: see `warmset batches list`"))
}

async fn show(place: &Place, name: &str) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get(&format!("/admin/v1/batches/{name}")).await?),
        Place::Directory { repository, .. } => Ok(batch_document(&find(repository, name).await?)),
    }
}

/// Without a server the batch is marked: the next one puts what was answered into files and runs nothing more of it.
async fn cancel(place: &Place, name: &str) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.call(Method::DELETE, &format!("/admin/v1/batches/{name}"), None).await?),
        Place::Directory { repository, .. } => {
            let mut batch = find(repository, name).await?;
            let Some(status) = batch.status.after(BatchStep::TakenBack) else { bail!("{name} has ended already") };
            batch.status = status;
            batch.reached_unix_seconds.entry(status).or_insert_with(unix_seconds);
            repository.catalog.set_batch(&batch).await?;
            Ok(batch_document(&batch))
        }
    }
}

fn list_text(document: &Value) -> String {
    let batches = document["batches"].as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> = batches
        .map(|batch| {
            let counts = &batch["request_counts"];
            let mut row: Vec<String> = ["id", "status", "endpoint"].iter().map(|key| text_of(batch, key)).collect();
            row.extend(["total", "completed", "failed"].iter().map(|key| text_of(counts, key)));
            row
        })
        .collect();
    if rows.is_empty() {
        return "no batches: hand a file in at /v1/files, then ask for it at /v1/batches".to_owned();
    }
    table(&["BATCH", "STATUS", "ENDPOINT", "LINES", "ANSWERED", "FAILED"], rows)
}

fn show_text(document: &Value) -> String {
    let keys =
        ["id", "status", "endpoint", "input_file_id", "output_file_id", "error_file_id", "created_at", "expires_at"];
    let mut pairs: Vec<(&str, String)> = keys.iter().map(|key| (*key, text_of(document, key))).collect();
    pairs.extend(["total", "completed", "failed"].map(|key| (key, text_of(&document["request_counts"], key))));
    for fault in document["errors"]["data"].as_array().into_iter().flatten() {
        pairs.push(("fault", format!("line {}: {}", text_of(fault, "line"), text_of(fault, "message"))));
    }
    fields(&pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_batches_read_well() {
        let batch = json!({
            "id": "batch_0a", "status": "failed", "endpoint": "/v1/completions", "input_file_id": "file-a",
            "request_counts": {"total": 3, "completed": 2, "failed": 1},
            "errors": {"data": [{"line": 2, "message": "not a JSON object"}]},
        });
        let text = list_text(&json!({ "batches": [batch] }));
        for word in ["BATCH", "batch_0a", "failed", "/v1/completions", "3", "2", "1"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert!(list_text(&json!({ "batches": [] })).contains("no batches"));
        assert!(show_text(&batch).contains("line 2: not a JSON object"));
    }
}
