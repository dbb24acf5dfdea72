//! The two HTTP listeners: inference for everybody, administration for this machine.

use crate::{admin_backend::Server, config::Config};
use std::{io, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use warmset_gateway::{
    admin::AdminAccess,
    openai::{ApiConfig, ReadyProbe},
    router, server,
    server::ServerConfig,
};

/// Starts both. What is returned completes when both have ended.
pub(crate) fn start(
    config: &Config,
    server: &Arc<Server>,
    (listener, admin_listener): (TcpListener, TcpListener),
    stopped: watch::Receiver<bool>,
    drain_timeout: Duration,
    ready: ReadyProbe,
) -> impl Future<Output = ()> + use<> {
    let mut api = ApiConfig::default();
    if let Some(bytes) = config.gateway.max_body_bytes {
        api.body_bytes_max = usize::try_from(bytes).unwrap_or(usize::MAX);
    }
    if let Some(timeout) = config.gateway.first_byte_timeout {
        api.patience = timeout;
    }
    let frontend = server.frontend.clone();
    let inference = router::inference_router(frontend.clone(), api, ready);
    let admin = router::admin_router(frontend, Arc::new(server.backend()), AdminAccess::default());
    let limits = ServerConfig { drain_timeout, ..ServerConfig::default() };
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
