//! The KV tier of a server: its limits from the configuration, and what it shows of itself.

use crate::{admin_backend::Server, config::KvOptions, link::TRUST_DOMAIN};
use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use std::{fs::DirBuilder, os::unix::fs::DirBuilderExt, path::Path};
use warmset_core::{
    Bytes,
    kv::{DISK_QUEUE_SHARE, TierSettings, TrustDomain},
    memory::HOST,
    worker,
};
use warmset_store::segments::Options;
use warmset_worker::{Clock, DiskConfig, KvConfig, KvHandle};

/// The share of the memory, and of the file system, that KV may have unless told otherwise.
const DEFAULT_SHARE: u64 = 10;

/// Starts the tier as the configuration says; none if it may have no memory.
pub(crate) fn start(
    options: &KvOptions,
    settings: &worker::Settings,
    data: &Path,
    clock: Clock,
) -> Result<Option<KvHandle>> {
    let host_bytes_max = options.host.unwrap_or(settings.capacity.get(HOST) / DEFAULT_SHARE);
    if host_bytes_max == 0 {
        return Ok(None);
    }
    let disk = disk(options, data, host_bytes_max)?;
    let disk_bytes_max = disk.as_ref().map_or(0, |disk| disk.options.bytes_max);
    let disk_writes_per_day = options.disk_writes_per_day.unwrap_or(disk_bytes_max);
    let settings = TierSettings::new(host_bytes_max, disk_bytes_max, disk_writes_per_day);
    Ok(Some(KvHandle::start(KvConfig { settings, disk, verify: options.verify.unwrap_or(false) }, clock)?))
}

/// Where blocks lie on disk; none if they may take nothing there.
fn disk(options: &KvOptions, data: &Path, host_bytes_max: Bytes) -> Result<Option<DiskConfig>> {
    if options.disk == Some(0) {
        return Ok(None);
    }
    let directory = options.dir.clone().unwrap_or_else(|| data.join("kv"));
    // Only its owner may look into it.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .with_context(|| format!("cannot use {} for KV: give another [kv] dir", directory.display()))?;
    let bytes_max = match options.disk {
        Some(bytes) => bytes,
        None => {
            let system = rustix::fs::statvfs(&directory)
                .with_context(|| format!("cannot tell how large the disk of {} is", directory.display()))?;
            system.f_blocks.saturating_mul(system.f_frsize) / DEFAULT_SHARE
        }
    };
    if bytes_max == 0 {
        return Ok(None);
    }
    let default = Options::default();
    Ok(Some(DiskConfig {
        directory,
        options: Options {
            bytes_max,
            free_bytes_min: options.disk_free.unwrap_or(default.free_bytes_min),
            encrypt: options.encrypt.unwrap_or(false),
            queue_bytes_max: host_bytes_max / DISK_QUEUE_SHARE,
            ..default
        },
        retention: options.retention,
    }))
}

/// Forgets every prompt that was asked until now, wherever it is kept.
pub(crate) async fn clear(server: &Server) -> Result<Value> {
    if let Some(kv) = &server.kv {
        kv.purge(TrustDomain::named(TRUST_DOMAIN)).await?;
        tracing::info!("all KV was cleared, as the operator wants");
    }
    document(server).await
}

/// Forgets what is kept of models that are not known any more: what was asked of them goes with them.
pub(crate) async fn forget_removed(server: &Server) {
    let Some(kv) = &server.kv else { return };
    let forgotten = match server.repository.catalog.digests().await {
        Ok(digests) => kv.forget_all_but(digests).await.map_err(anyhow::Error::from),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = forgotten {
        tracing::warn!("KV of models that were removed is cleared by the next start: {error:#}");
    }
}

/// What `GET /admin/v1/kv` answers.
pub(crate) async fn document(server: &Server) -> Result<Value> {
    let Some(kv) = &server.kv else { return Ok(json!({ "enabled": false })) };
    let view = kv.view().await.ok_or_else(|| anyhow!("the KV tier has ended"))?;
    let mut document = serde_json::to_value(&view).context("the tier's view is JSON")?;
    document["enabled"] = json!(true);
    for model in document["models"].as_array_mut().into_iter().flatten() {
        let digest = serde_json::from_value(model["model"].take()).ok();
        model["name"] = json!(digest.as_ref().and_then(|digest| server.frontend.directory().name_of(digest)));
        model["digest"] = json!(digest);
        if let Some(fields) = model.as_object_mut() {
            fields.remove("model");
        }
    }
    Ok(document)
}
