//! `warmset kv`: what is kept of prompts, and whether it pays; and forgetting it.

use super::{
    arguments::{GlobalArguments, KvCommand},
    place::Place,
};
use crate::output::{Output, bytes_of, fields, table, text_of};
use anyhow::{Result, bail};
use hyper::Method;
use serde_json::Value;
use warmset_core::kv::BLOCK_TOKENS;

/// Shows the tier of the running server, after it has forgotten everything if that is wanted.
pub(crate) async fn run(command: Option<KvCommand>, global: &GlobalArguments, output: Output) -> Result<()> {
    let method = match command {
        None => Method::GET,
        Some(KvCommand::Clear) => Method::DELETE,
    };
    let place = Place::find(global).await?;
    let shown = match &place {
        Place::Server(client) => client.call(method, "/admin/v1/kv", None).await.map_err(Into::into),
        Place::Directory { .. } => Err(anyhow::anyhow!("no server runs here: KV is kept by a running one")),
    };
    place.leave().await;
    let document: Value = shown?;
    if document["enabled"] == false && !output.json {
        bail!("this server keeps no KV: [kv] host is 0");
    }
    output.result(&document, text);
    Ok(())
}

fn text(document: &Value) -> String {
    let of = |bytes: &str, max: &str| format!("{} of {}", bytes_of(document, bytes), bytes_of(document, max));
    let speed = |key: &str| match document[key].as_f64() {
        Some(bytes) => format!("{:.2} GB/s", bytes / 1e9),
        None => "not measured yet".to_owned(),
    };
    let mut pairs = vec![
        ("in host memory", of("host_bytes", "host_bytes_max")),
        ("restored at", speed("restore_bytes_per_second")),
        ("in blocks of", format!("{BLOCK_TOKENS} tokens: a shorter prompt is kept in its engine only")),
    ];
    if document["disk_bytes_max"].as_u64().is_some_and(|bytes| bytes > 0) {
        pairs.push(("on disk", of("disk_bytes", "disk_bytes_max")));
        pairs.push(("read at", speed("disk_read_bytes_per_second")));
        pairs.push(("written so far", bytes_of(document, "disk_written_bytes")));
        if let Some(fault) = document["disk_fault"].as_str() {
            pairs.push(("written no more", fault.to_owned()));
        }
    }
    if let Some(refused) = document["disk_writes_refused"].as_u64().filter(|count| *count > 0) {
        let blocks = crate::output::count(usize::try_from(refused).unwrap_or(usize::MAX), "block");
        pairs.push(("not written", format!("{blocks}, for want of room, of time or of worth")));
    }
    if let Some(rejected) = document["rejected"].as_object().filter(|rejected| !rejected.is_empty()) {
        let reasons = rejected.iter().map(|(reason, count)| format!("{count} {reason}"));
        pairs.push(("refused", reasons.collect::<Vec<_>>().join(", ")));
    }
    let rows = document["models"].as_array().into_iter().flatten().map(row);
    let headers = ["MODEL", "HOST", "DISK", "TOKENS", "OF DEVICE", "OF HOST", "OF DISK", "SAVED", "SPENT", "VERDICT"];
    format!("{}\n{}", fields(&pairs), table(&headers, rows))
}

fn row(model: &Value) -> Vec<String> {
    let seconds = |key: &str| format!("{:.1} s", model[key].as_f64().unwrap_or(0.0));
    let hit = |tier: &str| text_of(&model["hit_tokens"], tier);
    let blocks = |key: &str| {
        let bytes = model[key].as_u64().unwrap_or(0) * model["block_bytes"].as_u64().unwrap_or(0);
        crate::config::units::format_bytes(bytes)
    };
    vec![
        text_of(model, "name"),
        blocks("host_blocks"),
        blocks("disk_blocks"),
        text_of(model, "lookup_tokens"),
        hit("device"),
        hit("host"),
        hit("disk"),
        seconds("saved_seconds"),
        seconds("spent_seconds"),
        verdict(model["verdict"].as_str().unwrap_or("unknown")).to_owned(),
    ]
}

fn verdict(verdict: &str) -> &'static str {
    match verdict {
        "pays" => "pays: it saves more time than it takes",
        "no_reuse" => "no use: nothing was asked for again",
        "too_slow" => "no use: computing is faster than bringing it back",
        _ => "too early to tell",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn people_see_what_each_tier_holds_and_whether_it_pays() {
        let document = json!({
            "enabled": true, "host_bytes": 1 << 20, "host_bytes_max": 1 << 30, "disk_bytes": 0, "disk_bytes_max": 0,
            "restore_bytes_per_second": 4.2e9, "rejected": {"checksum": 2}, "disk_writes_refused": 3,
            "models": [{
                "name": "m", "block_bytes": 1 << 20, "host_blocks": 1, "disk_blocks": 0, "lookup_tokens": 100,
                "hit_tokens": {"device": 1, "host": 64, "disk": 0}, "saved_seconds": 3.25, "spent_seconds": 0.5,
                "verdict": "pays",
            }],
        });
        let text = text(&document);
        for part in
            ["1.0 MiB of 1.0 GiB", "3 blocks, for want of room", "4.20 GB/s", "2 checksum", "3.2 s", "pays: it saves"]
        {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        assert!(!text.contains("on disk"), "{text}");
    }

    #[test]
    fn a_guess_is_not_shown_as_if_it_were_measured() {
        let document = json!({ "disk_bytes_max": 1 << 30, "restore_bytes_per_second": null, "models": [] });
        let text = text(&document);
        assert_eq!(text.matches("not measured yet").count(), 2, "{text}");
    }

    #[test]
    fn a_disk_that_takes_nothing_says_why() {
        let mut document = json!({ "disk_bytes_max": 1 << 30, "disk_fault": null, "models": [] });
        assert!(!text(&document).contains("no more"));
        document["disk_fault"] = json!("the disk is full");
        assert!(text(&document).contains("written no more: the disk is full"), "{}", text(&document));
    }
}
