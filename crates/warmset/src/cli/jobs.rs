//! `warmset jobs`: requests that are answered later, through a running server or in the catalog.

use super::{
    arguments::{GlobalArguments, JobsCommand},
    place::Place,
};
use crate::output::{Output, fields, short_digest, table, text_of};
use anyhow::{Context, Result, bail};
use hyper::Method;
use serde_json::{Value, json};
use warmset_core::jobs::JobStatus;
use warmset_gateway::jobs::job_document;

/// Runs one of the commands.
pub(crate) async fn run(command: JobsCommand, global: &GlobalArguments, output: Output) -> Result<()> {
    if let JobsCommand::Show { job } | JobsCommand::Cancel { job } = &command {
        check_name(job, "job")?;
    }
    let place = Place::find(global).await?;
    let done = run_at(&place, command, output).await;
    place.leave().await;
    done
}

async fn run_at(place: &Place, command: JobsCommand, output: Output) -> Result<()> {
    match command {
        JobsCommand::List { limit } => output.result(&list(place, limit).await?, list_text),
        JobsCommand::Show { job } => output.result(&show(place, &job).await?, show_text),
        JobsCommand::Cancel { job } => {
            let document = cancel(place, &job).await?;
            output.result(&document, |document| {
                format!("{} is {}", text_of(document, "id"), text_of(document, "status"))
            });
        }
    }
    Ok(())
}

/// What cannot be a job's or batch's name never becomes part of a path.
pub(super) fn check_name(name: &str, what: &str) -> Result<()> {
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if !plain || name.is_empty() {
        let command = if what == "job" { "jobs" } else { "batches" };
        bail!("{name:?} is no {what}: see `warmset {command} list`");
    }
    Ok(())
}

async fn list(place: &Place, limit: u64) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get(&format!("/admin/v1/jobs?limit={limit}")).await?),
        Place::Directory { repository, .. } => {
            let jobs = repository.catalog.jobs(limit).await?;
            Ok(json!({ "jobs": jobs.iter().map(job_document).collect::<Vec<_>>() }))
        }
    }
}

async fn show(place: &Place, name: &str) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.get(&format!("/admin/v1/jobs/{name}")).await?),
        Place::Directory { repository, .. } => {
            let job = repository.catalog.job(name).await?.with_context(|| format!("there is no job {name}"))?;
            Ok(job_document(&job))
        }
    }
}

async fn cancel(place: &Place, name: &str) -> Result<Value> {
    match place {
        Place::Server(client) => Ok(client.call(Method::DELETE, &format!("/admin/v1/jobs/{name}"), None).await?),
        Place::Directory { repository, .. } => {
            let job = repository.catalog.job(name).await?.with_context(|| format!("there is no job {name}"))?;
            let cancelled = repository.catalog.finish_job(job.id, JobStatus::Cancelled, None).await?;
            if !cancelled && job.status != JobStatus::Cancelled {
                bail!("{name} has {} already", job.status.as_str());
            }
            show(place, name).await
        }
    }
}

fn list_text(document: &Value) -> String {
    let jobs = document["jobs"].as_array().into_iter().flatten();
    let columns = ["id", "status", "position", "model", "class", "attempts"];
    let rows: Vec<Vec<String>> = jobs
        .map(|job| columns.iter().map(|column| text_of(job, column)).chain([short_digest(job)]).collect())
        .collect();
    if rows.is_empty() {
        return "no jobs: send a request with `prefer: respond-async`".to_owned();
    }
    table(&["JOB", "STATUS", "PLACE", "MODEL", "CLASS", "TRIES", "DIGEST"], rows)
}

fn show_text(document: &Value) -> String {
    let keys = ["id", "status", "position", "model", "digest", "start", "route", "class", "attempts", "http_status"];
    let mut pairs: Vec<(&str, String)> = keys.iter().map(|key| (*key, text_of(document, key))).collect();
    for key in ["result", "error"] {
        if !document[key].is_null() {
            pairs.push((key, document[key].to_string()));
        }
    }
    fields(&pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_jobs_read_well() {
        let job = json!({
            "id": "job_0a", "status": "succeeded", "position": null, "model": "m", "class": "batch", "attempts": 1,
            "digest": format!("sha256:{}", "ab".repeat(32)), "result": {"x": 1}, "error": null,
        });
        let text = list_text(&json!({ "jobs": [job] }));
        for word in ["JOB", "job_0a", "succeeded", "batch", "abababababab"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert!(list_text(&json!({ "jobs": [] })).contains("no jobs"));
        let text = show_text(&job);
        assert!(text.contains("{\"x\":1}") && !text.contains("error"), "{text}");
    }

    #[test]
    fn names_never_lead_elsewhere() {
        assert!(check_name("job_0123abc", "job").is_ok());
        for bad in ["", "../models", "a/b", "a?b", "job 1"] {
            assert!(check_name(bad, "job").is_err(), "{bad}");
        }
    }
}
