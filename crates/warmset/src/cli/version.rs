//! `warmset model promote`, `rollback` and `versions`: the same on a server and on a data directory.

use super::{
    arguments::{PromoteArguments, RollbackArguments},
    place::Place,
};
use crate::{
    alone,
    client::model_path,
    config::units::format_seconds,
    output::{Output, short_digest_of, table, text_of},
    promotion::PromoteOptions,
    repository::parse_name,
};
use anyhow::Result;
use hyper::Method;
use serde_json::{Value, json};

impl PromoteArguments {
    fn options(&self) -> PromoteOptions {
        PromoteOptions {
            digest: self.digest.clone(),
            source: self.source.clone(),
            by: Some(by(self.by.as_deref())),
            dry_run: self.dry_run,
            canary_prompt: self.canary_prompt.clone(),
            canary_expect: self.canary_expect.clone(),
            canary_score_min: self.canary_score,
            canary_latency_max_seconds: self.canary_latency.map(|latency| latency.as_secs_f64()),
        }
    }
}

/// Who acts: as said, or the user that runs this program.
pub(super) fn by(said: Option<&str>) -> String {
    let named = |variable| std::env::var(variable).ok().filter(|name| !name.is_empty());
    said.map(str::to_owned).or_else(|| named("USER")).or_else(|| named("LOGNAME")).unwrap_or_else(account)
}

/// The account that runs this program, by name if it has one.
fn account() -> String {
    let uid = rustix::process::getuid().as_raw();
    let user = uzers::get_user_by_uid(uid);
    user.map_or_else(|| format!("uid {uid}"), |user| user.name().to_string_lossy().into_owned())
}

pub(super) async fn promote(place: &Place, arguments: PromoteArguments, output: Output) -> Result<()> {
    let mut options = arguments.options();
    if let (Place::Server(_), Some(source)) = (place, &options.source) {
        // The server has a working directory of its own.
        options.source = Some(super::model::absolute(source)?);
    }
    let waiting = if options.dry_run { "looking at" } else { "promoting a version of" };
    let _spinner = output.spinner(&format!("{waiting} {}", arguments.name));
    let document = switch(place, &arguments.name, "promote", options).await?;
    output.result(&document, switch_text);
    Ok(())
}

pub(super) async fn roll_back(place: &Place, arguments: RollbackArguments, output: Output) -> Result<()> {
    let options = PromoteOptions {
        by: Some(by(arguments.by.as_deref())),
        dry_run: arguments.dry_run,
        ..PromoteOptions::default()
    };
    let _spinner = output.spinner(&format!("rolling {} back", arguments.name));
    let document = switch(place, &arguments.name, "rollback", options).await?;
    output.result(&document, switch_text);
    Ok(())
}

async fn switch(place: &Place, name: &str, action: &str, options: PromoteOptions) -> Result<Value> {
    match place {
        Place::Server(client) => {
            let body = serde_json::to_value(&options)?;
            Ok(client.call(Method::POST, &model_path(name, &format!("/{action}")), Some(&body)).await?)
        }
        Place::Directory { repository, lock } => {
            alone::switch(repository, lock.root(), &parse_name(name)?, options, action == "rollback").await
        }
    }
}

pub(super) async fn versions(place: &Place, name: &str, output: Output) -> Result<()> {
    let document = super::model::show(place, name).await?;
    let document = json!({ "name": document["name"], "versions": document["versions"] });
    output.result(&document, |document| {
        let versions = document["versions"].as_array().into_iter().flatten();
        table(&["", "DIGEST", "APPROVED BY", "CANARY", "SOURCE"], versions.map(version_row))
    });
    Ok(())
}

fn version_row(version: &Value) -> Vec<String> {
    let canary = match &version["canary"] {
        Value::Null => "-",
        canary if canary["given"] == true => "given",
        _ => "recorded",
    };
    vec![
        if version["current"] == true { "*".to_owned() } else { String::new() },
        short_digest_of(&version["digest"]),
        version["approved_by"].as_str().unwrap_or("nobody yet").to_owned(),
        canary.to_owned(),
        text_of(version, "source"),
    ]
}

fn switch_text(document: &Value) -> String {
    let (name, digest) = (text_of(document, "name"), text_of(document, "digest"));
    if document["from"] == document["digest"] {
        return format!("{name} stands for {digest} already");
    }
    if document["changed"] == true {
        let score = document["canary_score"]["score"].as_f64();
        let canary = score.map_or_else(String::new, |score| format!(", its canary scored {score:.2}"));
        let seconds = document["seconds"]
            .as_f64()
            .map_or_else(String::new, |seconds| format!(" after {}", format_seconds(seconds)));
        return format!("{name} now stands for {digest}{seconds}{canary}");
    }
    let evicts = document["evicts"].as_array().into_iter().flatten();
    let evicts: Vec<String> = evicts.map(|model| text_of(model, "name")).collect();
    let leaving = if evicts.is_empty() {
        "no other model leaves memory".to_owned()
    } else {
        format!("leaves memory for it: {}", evicts.join(", "))
    };
    format!(
        "{name} would stand for {digest}\n  {}\n  about {} to load; {leaving}\n  nothing was changed",
        text_of(document, "callers"),
        format_seconds(document["expected_seconds"].as_f64().unwrap_or(0.0)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_and_what_would_happen_read_well() {
        let same = json!({ "name": "a", "digest": "sha256:1", "from": "sha256:1", "changed": false });
        assert_eq!(switch_text(&same), "a stands for sha256:1 already");
        let done = json!({
            "name": "a", "digest": "sha256:2", "from": "sha256:1", "changed": true, "seconds": 1.5,
            "canary_score": { "score": 0.75, "seconds": 0.1 },
        });
        assert_eq!(switch_text(&done), "a now stands for sha256:2 after 1.50 s, its canary scored 0.75");
        let preview = json!({
            "name": "a", "digest": "sha256:2", "from": "sha256:1", "changed": false, "expected_seconds": 2.0,
            "callers": "no gap: x", "evicts": [{ "name": "b" }],
        });
        let text = switch_text(&preview);
        assert!(
            text.contains("no gap: x") && text.contains("for it: b") && text.contains("nothing was changed"),
            "{text}"
        );
    }

    #[test]
    fn a_version_shows_who_approved_it() {
        let row =
            version_row(&json!({ "digest": format!("sha256:{}", "ab".repeat(32)), "current": true, "source": "/m" }));
        assert_eq!(row, ["*", "abababababab", "nobody yet", "-", "/m"]);
        assert_eq!(by(Some("me")), "me");
    }
}
