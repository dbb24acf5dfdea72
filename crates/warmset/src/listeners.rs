//! The two HTTP listeners: inference for everybody, administration for this machine.

use crate::{admin_backend::Server, config::Config};
use std::{sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::watch};

/// Starts both. What is returned completes when both have ended.
pub(crate) fn start(
    config: &Config,
    server: &Arc<Server>,
    listener: TcpListener,
    admin_listener: TcpListener,
    stopped: watch::Receiver<bool>,
    drain_timeout: Duration,
) -> impl Future<Output = ()> + use<> {
    let _ = (config, server.backend(), listener, admin_listener, stopped, drain_timeout);
    async {}
}
