//! `warmset gateway`: a process of its own in front of plain replicas, without models, catalog and worker.

use crate::{
    cli::GatewayArguments,
    config::{self, Config},
    machine,
    output::{self, Output},
    serve::{DRAIN_TIMEOUT, Signals, bind, read_place},
};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::sync::watch;
use warmset_engine::start_pages;
use warmset_gateway::{
    lanes::{Lane, Lanes},
    openai::ApiConfig,
    proxy::{OwnAddresses, Proxy, ProxyConfig, ReadReplicas, ReplicaConfig},
    server::{self, ServerConfig},
};

/// How often a gateway that drains looks whether it has finished.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// Open files for each caller's connection: its own and one to a replica.
const FILES_PER_CONNECTION: u64 = 2;
const FILES_BESIDE_CONNECTIONS: u64 = 1024;

/// Forwards until a signal comes. The first one lets requests finish, the second one does not.
pub(crate) async fn run(arguments: GatewayArguments, output: Output) -> Result<()> {
    let (config, listen, admin_listen) = read_place(&arguments.place)?;
    let replicas = replicas(&config, &arguments)?;
    if replicas.is_empty() {
        bail!("there is no replica: give --replica URL, or [[replica]] in the configuration");
    }
    let mut signals = Signals::new()?;
    let (listener, admin_listener) = (bind(listen).await?, bind(admin_listen).await?);
    let (listen, admin_listen) = (listener.local_addr()?, admin_listener.local_addr()?);
    let connections_max =
        config.gateway.connections_max.map_or(ServerConfig::default().connections_max, |count| count as usize);
    machine::raise_open_files(connections_max as u64 * FILES_PER_CONNECTION + FILES_BESIDE_CONNECTIONS);
    let own = OwnAddresses(vec![listen, admin_listen]);
    let proxy_config = ProxyConfig { own, ..proxy_config(&config, replicas) };
    let proxy = Proxy::start(proxy_config, reread(&arguments)).await.context("cannot start")?;

    let drain_timeout = config.gateway.drain_timeout.unwrap_or(DRAIN_TIMEOUT);
    let (stop, stopped) = watch::channel(false);
    let limits = ServerConfig { drain_timeout, connections_max, ..ServerConfig::default() };
    let serve = |listener, lanes, limits| {
        let mut stopped = stopped.clone();
        tokio::spawn(server::serve_on(listener, lanes, limits, async move {
            // A sender that is gone means the same.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }))
    };
    let lanes = Lanes::start().context("cannot start threads")?;
    let callers = serve(listener, lanes.serve(|| proxy.inference_routes()), limits.clone());
    let admin_lanes = vec![Lane::here(proxy.admin_routes())];
    let admin = serve(admin_listener, admin_lanes, ServerConfig { drain_timeout: Duration::ZERO, ..limits });
    let document = json!({
        "listen": listen.to_string(), "admin_listen": admin_listen.to_string(), "version": env!("CARGO_PKG_VERSION"),
    });
    output
        .result(&document, |_| format!("warmset forwards on http://{listen}, administration on http://{admin_listen}"));
    if let Err(error) = start_pages::release() {
        tracing::debug!("memory of the start is kept: {error}");
    }

    signals.wait().await;
    output::note("warmset: finishing what runs; another signal stops at once");
    proxy.drain();
    tokio::select! {
        () = finished(&proxy) => {}
        () = signals.wait() => bail!("stopped before running requests were finished"),
        () = tokio::time::sleep(drain_timeout) => tracing::warn!("requests were cut: they took longer than the drain timeout"),
    }
    let _ = stop.send(true);
    tokio::select! {
        _ = async { (callers.await, admin.await) } => {}
        () = signals.wait() => {}
    }
    Ok(())
}

async fn finished(proxy: &Proxy) {
    while proxy.running() > 0 {
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Those of the command line beside those of the file.
fn replicas(config: &Config, arguments: &GatewayArguments) -> Result<Vec<ReplicaConfig>> {
    let mut replicas = config.replicas.clone();
    for url in &arguments.replica {
        let replica = ReplicaConfig::new(url.clone());
        if !replicas.iter().any(|known| known.url == replica.url) {
            replicas.push(replica);
        }
    }
    Ok(replicas)
}

fn proxy_config(config: &Config, replicas: Vec<ReplicaConfig>) -> ProxyConfig {
    let default = ProxyConfig::default();
    let mut routing = default.routing.clone();
    if let Some(bound) = config.gateway.load_bound {
        routing.load_bound = bound;
    }
    let mut api = ApiConfig { body_bytes_max: crate::listeners::body_bytes_max(config), ..default.api.clone() };
    if let Some(timeout) = config.gateway.first_byte_timeout {
        api.patience = timeout;
    }
    let idle_timeout = config.gateway.stream_idle_timeout.unwrap_or(default.idle_timeout);
    ProxyConfig { api, routing, replicas, idle_timeout, ..default }
}

/// Reads the file again, when an administrator says so.
fn reread(arguments: &GatewayArguments) -> Option<ReadReplicas> {
    let path: PathBuf = arguments.place.config.clone()?;
    let arguments = arguments.clone();
    Some(Arc::new(move || {
        let config = config::read_file(&path).map_err(|error| error.to_string())?;
        replicas(&config, &arguments).map_err(|error| error.to_string())
    }))
}
