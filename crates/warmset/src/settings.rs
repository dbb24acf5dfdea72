//! From command line and configuration to the limits that the machines live within.

use crate::{config::Config, library::Stored, machine};
use anyhow::{Result, bail};
use std::{collections::BTreeSet, time::Duration};
use warmset_catalog::Measurement;
use warmset_core::{
    Bytes, MemoryVector, PoolName, gateway,
    gateway::Route,
    worker::{self, ModelSpec},
};
use warmset_worker::ModelConfig;

const CONCURRENT_LOADS: u32 = 2;
const WAITING_REQUESTS_MAX: u32 = 4096;
const MINIMUM_RESIDENCY: Duration = Duration::from_secs(30);
const PRIORITY_PROTECTION: Duration = Duration::from_secs(30);
const DEMAND_HALF_LIFE: Duration = Duration::from_secs(300);
const LOAD_DEADLINE: Duration = Duration::from_secs(900);
const STOP_DEADLINE: Duration = Duration::from_secs(5);
const HANG_DEADLINE: Duration = Duration::from_secs(60);
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(300);
const THREAD_QUANTUM: Duration = Duration::from_millis(100);
const MEASURE_INTERVAL: Duration = Duration::from_secs(2);
const THRASH_WINDOW: Duration = Duration::from_secs(60);
const THRASH_THRESHOLD: f64 = 0.2;

/// Memory as given on the command line or in the file, or as the machine has it.
pub(crate) fn memory_and_reserve(memory: Option<Bytes>, reserve: Option<Bytes>) -> Result<(Bytes, Bytes)> {
    let memory = match memory {
        Some(memory) => memory,
        None => match machine::memory_bytes() {
            Some(machine) => machine::default_memory(machine),
            None => bail!("cannot tell how much memory this machine has: give --memory"),
        },
    };
    let reserve = reserve.unwrap_or_else(|| machine::default_reserve(memory));
    if reserve >= memory {
        bail!("the reserve of {reserve} bytes leaves nothing of {memory} bytes of memory: lower --reserve");
    }
    Ok((memory, reserve))
}

/// The kind of machine, under which measurements are kept.
pub(crate) fn worker_type(config: &Config) -> String {
    let cores = config.worker.cores.unwrap_or_else(machine::cores);
    config.worker.kind.clone().unwrap_or_else(|| match config.devices.len() {
        0 => format!("cpu-{cores}"),
        accelerators => format!("cpu-{cores}-gpu-{accelerators}"),
    })
}

/// The worker's limits.
pub(crate) fn worker_settings(config: &Config, memory: Bytes, reserve: Bytes) -> Result<worker::Settings> {
    let mut capacity = MemoryVector::host(memory);
    let mut reserved = MemoryVector::host(reserve);
    for (index, device) in config.devices.iter().enumerate() {
        capacity.add_at(index + 1, device.memory);
        reserved.add_at(index + 1, device.reserve);
    }
    let (options, residency) = (&config.worker, &config.residency);
    Ok(worker::Settings {
        pools: pools(config, memory - reserve)?,
        capacity,
        reserve: reserved,
        cores: options.cores.unwrap_or_else(machine::cores),
        concurrent_loads_max: options.concurrent_loads.unwrap_or(CONCURRENT_LOADS),
        waiting_requests_max: WAITING_REQUESTS_MAX,
        minimum_residency: residency.minimum_seconds.unwrap_or(MINIMUM_RESIDENCY),
        priority_protection: residency.priority_protection_seconds.unwrap_or(PRIORITY_PROTECTION),
        demand_half_life: residency.demand_half_life_seconds.unwrap_or(DEMAND_HALF_LIFE),
        load_deadline: options.load_deadline.unwrap_or(LOAD_DEADLINE),
        stop_deadline: options.stop_deadline.unwrap_or(STOP_DEADLINE),
        hang_deadline: options.hang_deadline.unwrap_or(HANG_DEADLINE),
        backoff_first: BACKOFF_FIRST,
        backoff_max: BACKOFF_MAX,
        thread_quantum: THREAD_QUANTUM,
        measure_interval: MEASURE_INTERVAL,
        thrash_window: residency.thrash_window_seconds.unwrap_or(THRASH_WINDOW),
        thrash_threshold: residency.thrash_threshold.unwrap_or(THRASH_THRESHOLD),
    })
}

fn pools(config: &Config, usable: Bytes) -> Result<Vec<(PoolName, MemoryVector)>> {
    let mut names = BTreeSet::new();
    let mut total: Bytes = 0;
    for slice in &config.worker.slices {
        if !names.insert(&slice.name) || slice.name == PoolName::default_pool().as_str() {
            bail!("the slice {} is named twice or \"default\": what the slices leave is the default pool", slice.name);
        }
        total = total.saturating_add(slice.memory);
    }
    if total > usable {
        bail!("the slices take {total} bytes, more than the {usable} that memory less reserve has: make them smaller");
    }
    let slices = config.worker.slices.iter();
    Ok(slices.map(|slice| (PoolName::new(&slice.name), MemoryVector::host(slice.memory))).collect())
}

/// The gateway's limits.
pub(crate) fn gateway_settings(config: &Config) -> gateway::Settings {
    let default = gateway::Settings::default();
    gateway::Settings {
        queue_limit: config.gateway.queue_limit.unwrap_or(default.queue_limit),
        queue_limit_per_model: config.gateway.queue_limit_per_model.unwrap_or(default.queue_limit_per_model),
        ..default
    }
}

/// What the worker must know of a model. What was measured on this kind of machine replaces what was estimated.
pub(crate) fn model_config(stored: &Stored, measured: Option<&Measurement>) -> Result<ModelConfig> {
    let settings = &stored.model.settings;
    let shape = &stored.shape;
    let Some(artifact) = stored.manifest.files.first() else { bail!("{} has no files", stored.model.name) };
    let spec = ModelSpec {
        digest: stored.model.digest,
        name: stored.model.name.clone(),
        pool: settings.pool.clone(),
        priority: settings.priority,
        pin: settings.pin,
        parallel: settings.parallel,
        keep_alive: settings.keep_alive_seconds.and_then(crate::config::units::duration_of_seconds),
        artifact: artifact.sha256,
        peak: measured.map_or_else(|| shape.peak.clone(), |measured| measured.peak.clone()),
        steady: measured.map_or_else(|| shape.steady.clone(), |measured| measured.steady.clone()),
        measured: measured.is_some(),
        rewarm_seconds: rewarm_seconds(stored, measured),
        memory_cap: settings.memory_cap_bytes,
    };
    let engine = crate::library::parse_engine(&settings.engine).map_err(|reason| anyhow::anyhow!(reason))?;
    Ok(ModelConfig { spec, engine, files: stored.files.clone(), context_tokens: settings.context_tokens })
}

fn rewarm_seconds(stored: &Stored, measured: Option<&Measurement>) -> f64 {
    measured.map_or(stored.shape.rewarm_seconds, |measured| measured.timings.total_seconds())
}

/// What the gateway must know of a model.
pub(crate) fn route(stored: &Stored, measured: Option<&Measurement>) -> Route {
    let settings = &stored.model.settings;
    Route {
        digest: stored.model.digest,
        name: stored.model.name.clone(),
        priority: settings.priority,
        max_concurrency: crate::library::slots(settings),
        critical_reserve: settings.critical_reserve,
        cold: settings.cold,
        rewarm_seconds: rewarm_seconds(stored, measured),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceOptions, SliceOptions};

    #[test]
    fn the_reserve_must_leave_something() {
        assert_eq!(memory_and_reserve(Some(100), Some(10)).unwrap(), (100, 10));
        assert_eq!(memory_and_reserve(Some(2 << 30), None).unwrap(), (2 << 30, 384 << 20));
        assert!(memory_and_reserve(Some(100), Some(100)).is_err());
        let (memory, reserve) = memory_and_reserve(None, None).unwrap();
        assert!(reserve < memory);
    }

    #[test]
    fn devices_and_slices_become_vectors_and_pools() {
        let mut config = Config::default();
        config.devices.push(DeviceOptions { id: "gpu0".into(), memory: 80, reserve: 8 });
        config.worker.slices.push(SliceOptions { name: "small".into(), memory: 30 });
        let settings = worker_settings(&config, 100, 10).unwrap();
        assert_eq!(settings.capacity, MemoryVector(vec![100, 80]));
        assert_eq!(settings.reserve, MemoryVector(vec![10, 8]));
        assert_eq!(settings.pools, [(PoolName::new("small"), MemoryVector::host(30))]);
        assert!(worker_type(&config).ends_with("-gpu-1"));
        config.worker.slices.push(SliceOptions { name: "small".into(), memory: 1 });
        assert!(worker_settings(&config, 100, 10).is_err());
        config.worker.slices[1] = SliceOptions { name: "big".into(), memory: 61 };
        assert!(worker_settings(&config, 100, 10).unwrap_err().to_string().contains("91"));
    }
}
