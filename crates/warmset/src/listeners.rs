//! The two HTTP listeners: inference for everybody, administration for this machine.

use crate::{admin_backend::Server, config::Config, machine};
use axum::Router;
use std::{io, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use warmset_gateway::{
    admin::AdminAccess,
    frontend::Frontend,
    openai::{ApiConfig, ReadyProbe},
    router::{self, Later},
    server,
    server::ServerConfig,
};

/// Open files that are no callers' connections.
const FILES_BESIDE_CONNECTIONS: u64 = 1024;

/// The largest body of a request.
pub(crate) fn body_bytes_max(config: &Config) -> usize {
    let configured = config.gateway.max_body_bytes.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    configured.unwrap_or_else(|| ApiConfig::default().body_bytes_max)
}

/// The inference routes; those that answer jobs accept none.
pub(crate) fn inference(config: &Config, frontend: Frontend, ready: ReadyProbe, later: Later) -> Router {
    let mut api = ApiConfig { body_bytes_max: body_bytes_max(config), ..ApiConfig::default() };
    if let Some(timeout) = config.gateway.first_byte_timeout {
        api.patience = timeout;
    }
    router::inference_router(frontend, api, ready, later)
}

/// Starts both. What is returned completes when both have ended.
pub(crate) fn start(
    config: &Config,
    server: &Arc<Server>,
    (listener, admin_listener): (TcpListener, TcpListener),
    stopped: watch::Receiver<bool>,
    drain_timeout: Duration,
    ready: ReadyProbe,
) -> impl Future<Output = ()> + use<> {
    let frontend = server.frontend.clone();
    let inference = inference(config, frontend.clone(), ready, server.later());
    let admin = router::admin_router(frontend, Arc::new(server.backend()), AdminAccess::default());
    let default = ServerConfig::default();
    let connections_max = config.gateway.connections_max.map_or(default.connections_max, |count| count as usize);
    machine::raise_open_files(connections_max as u64 + FILES_BESIDE_CONNECTIONS);
    let limits = ServerConfig { drain_timeout, connections_max, ..default };
    let serve = |listener, router, limits, mut stopped: watch::Receiver<bool>| -> JoinHandle<io::Result<()>> {
        tokio::spawn(server::serve(listener, router, limits, async move {
            // A sender that is gone means the same.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }))
    };
    // Listeners of events never leave by themselves.
    let admin_limits = ServerConfig { drain_timeout: Duration::ZERO, ..limits.clone() };
    let both =
        [serve(listener, inference, limits, stopped.clone()), serve(admin_listener, admin, admin_limits, stopped)];
    async {
        for listener in both {
            match listener.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!("a listener failed: {error}"),
                Err(error) => tracing::error!("a listener broke: {error}"),
            }
        }
    }
}
