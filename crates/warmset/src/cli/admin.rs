//! `warmset admin`: what concerns the server as a whole.

use super::{arguments::GlobalArguments, record};
use crate::{
    client::{Client, DEFAULT_ADMIN},
    data,
    output::{Output, count, text_of},
};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use hyper::Method;
use serde_json::Value;

/// `warmset admin ...`
#[derive(Debug, Subcommand)]
pub(crate) enum AdminCommand {
    /// Read the configuration file again and change what has changed
    Reload,
    /// Record what the machines of the server are told and do, until interrupted, for `warmset replay`
    Record(record::RecordArguments),
}

/// Runs a command and prints its result.
pub(crate) async fn run(command: AdminCommand, global: &GlobalArguments, output: Output) -> Result<()> {
    match command {
        AdminCommand::Reload => {
            let client = server(global)?;
            let _spinner = output.spinner("reading the configuration");
            let document = client.call(Method::POST, "/admin/v1/reload", None).await?;
            drop(_spinner);
            output.result(&document, reload_text);
            let failed = document["failed"].as_array().map_or(0, Vec::len);
            if failed > 0 {
                bail!("{} not changed: its new version failed", count(failed, "model"));
            }
        }
        AdminCommand::Record(arguments) => record::run(&arguments, &server(global)?, output).await?,
    }
    Ok(())
}

/// The server that is named, or the one that has the data directory that is.
fn server(global: &GlobalArguments) -> Result<Client> {
    let named = global.server.clone();
    let of_data = || {
        let data = global.data.as_ref()?;
        Some(data::server_of(data).with_context(|| format!("no server runs on {}: start it first", data.display())))
    };
    match named {
        Some(server) => Client::new(&server),
        None => Client::new(&of_data().transpose()?.unwrap_or_else(|| DEFAULT_ADMIN.to_owned())),
    }
}

fn reload_text(document: &Value) -> String {
    let names = |key: &str| {
        let names = document[key].as_array().into_iter().flatten().filter_map(Value::as_str);
        names.collect::<Vec<_>>().join(", ")
    };
    let mut text = String::new();
    for (key, label) in
        [("added", "added"), ("changed", "changed"), ("removed", "removed"), ("reloading", "loads again when idle")]
    {
        if !names(key).is_empty() {
            text += &format!("{label}: {}\n", names(key));
        }
    }
    for failed in document["failed"].as_array().into_iter().flatten() {
        text += &format!("not changed: {}: {}\n", text_of(failed, "name"), text_of(failed, "reason"));
    }
    if text.is_empty() {
        text += "no model has changed\n";
    }
    if !names("needs_restart").is_empty() {
        text += &format!("takes effect after a restart: {}\n", names("needs_restart"));
    }
    text
}
