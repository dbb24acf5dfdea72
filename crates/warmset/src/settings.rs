//! From command line and configuration to the limits that the machines live within.

use crate::{
    config::{Config, ResidencyOptions, units::format_bytes},
    machine,
    repository::{Runtimes, Stored},
};
use anyhow::{Result, bail};
use std::{collections::BTreeSet, time::Duration};
use warmset_catalog::Measurement;
use warmset_core::{
    Bytes, ClockSpeed, MemoryVector, PoolName,
    forecast::Parts,
    gateway,
    gateway::Route,
    jobs::JobLimits,
    worker::{self, ModelSpec, ParkingLimits},
};
use warmset_gateway::jobs::JobsConfig;
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

/// What one engine process takes before it has a model: with less nothing can be served.
const MEMORY_BYTES_MIN: Bytes = 16 << 20;

/// Memory as given on the command line or in the file, or as the machine has it.
pub(crate) fn memory_and_reserve(memory: Option<Bytes>, reserve: Option<Bytes>) -> Result<(Bytes, Bytes)> {
    let memory = match memory {
        Some(memory) => memory,
        None => match machine::memory_bytes() {
            Some(machine) => machine::default_memory(machine),
            None => bail!("cannot tell how much memory this machine has: give --memory"),
        },
    };
    if memory < MEMORY_BYTES_MIN {
        let (memory, least) = (format_bytes(memory), format_bytes(MEMORY_BYTES_MIN));
        bail!(
            "a memory of {memory} holds no model, an engine process alone takes {least}: is a unit missing, as in --memory 2GiB?"
        );
    }
    let reserve = reserve.unwrap_or_else(|| machine::default_reserve(memory));
    if reserve >= memory {
        let (reserve, memory) = (format_bytes(reserve), format_bytes(memory));
        bail!("the reserve of {reserve} leaves nothing of the memory of {memory}: lower --reserve or raise --memory");
    }
    Ok((memory, reserve))
}

/// What is wrong with a memory larger than the machine's. It is allowed: models that only declare their bytes fit in.
pub(crate) fn beyond_machine(memory: Bytes, machine: Option<Bytes>) -> Option<String> {
    let machine = machine.filter(|machine| memory > *machine)?;
    let (memory, machine) = (format_bytes(memory), format_bytes(machine));
    Some(format!(
        "the memory of {memory} is more than the {machine} this machine has: before it is full the operating system \
         will swap or kill: give a smaller --memory"
    ))
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
        forecast: residency.forecast.unwrap_or(Parts::ALL),
        parking: parking(residency),
    })
}

fn parking(options: &ResidencyOptions) -> ParkingLimits {
    if options.park == Some(false) {
        return ParkingLimits::OFF;
    }
    let default = ParkingLimits::default();
    ParkingLimits {
        requests_max: options.park_requests_max.unwrap_or(default.requests_max),
        bytes_max: options.park_bytes_max.unwrap_or(default.bytes_max),
        times_max: options.park_times_max.unwrap_or(default.times_max),
        time_max: options.park_seconds_max.unwrap_or(default.time_max),
    }
}

/// The same limits for a run whose time passes at this speed. Processes are as fast as ever, so that what bounds them and
/// how often they are looked at stays as it is outside.
pub(crate) fn at_speed(settings: worker::Settings, speed: ClockSpeed) -> worker::Settings {
    worker::Settings {
        load_deadline: speed.inside(settings.load_deadline),
        stop_deadline: speed.inside(settings.stop_deadline),
        hang_deadline: speed.inside(settings.hang_deadline),
        thread_quantum: speed.inside(settings.thread_quantum),
        measure_interval: speed.inside(settings.measure_interval),
        ..settings
    }
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
        let (total, usable) = (format_bytes(total), format_bytes(usable));
        bail!("the slices take {total}, more than the {usable} that memory less reserve has: make them smaller");
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
        parks: config.residency.park != Some(false),
        ..default
    }
}

/// How jobs are kept and run.
pub(crate) fn jobs_config(config: &Config) -> JobsConfig {
    let default = JobsConfig::default();
    let unfinished_max = config.gateway.jobs_max.map_or(default.limits.unfinished_max, u64::from);
    JobsConfig {
        limits: JobLimits { unfinished_max, ..default.limits },
        time_to_live: config.gateway.job_time_to_live.unwrap_or(default.time_to_live),
        ..default
    }
}

/// What the worker must know of a model. What was measured on this kind of machine replaces what was estimated.
pub(crate) fn model_config(
    stored: &Stored,
    runtimes: &Runtimes,
    measured: Option<&Measurement>,
) -> Result<ModelConfig> {
    let settings = &stored.model.settings;
    let shape = &stored.shape;
    let spec = ModelSpec {
        digest: stored.model.digest,
        name: stored.model.name.clone(),
        pool: settings.pool.clone(),
        priority: settings.priority,
        pin: settings.pin,
        parallel: settings.parallel,
        keep_alive: settings.keep_alive_seconds.and_then(crate::config::units::duration_of_seconds),
        // Nothing that a command serves by itself is shared with anybody.
        artifact: stored.manifest.files.first().map_or(stored.model.digest, |file| file.sha256),
        peak: measured.map_or_else(|| shape.peak.clone(), |measured| measured.peak.clone()),
        steady: measured.map_or_else(|| shape.steady.clone(), |measured| measured.steady.clone()),
        measured: measured.is_some(),
        rewarm_seconds: rewarm_seconds(stored, measured),
        memory_cap: settings.memory_cap_bytes,
        targets: settings.slo,
    };
    let engine = crate::repository::parse_engine(&settings.engine).map_err(|reason| anyhow::anyhow!(reason))?;
    let (files, context_tokens, command) = (stored.files.clone(), settings.context_tokens, stored.command(runtimes));
    Ok(ModelConfig { spec, engine, files, context_tokens, command, canary: stored.canary.clone() })
}

/// What a cold model costs: its load, and its way here if its files are not here any more.
pub(crate) fn rewarm_seconds(stored: &Stored, measured: Option<&Measurement>) -> f64 {
    let here = stored.files.iter().all(|file| file.is_file());
    let fetch_seconds = stored.model.settings.fetch_seconds.filter(|_| !here).unwrap_or(0.0);
    let load_seconds = measured.map_or(stored.shape.rewarm_seconds, |measured| {
        measured.timings.rewarm_seconds() - measured.timings.fetch_seconds
    });
    fetch_seconds + load_seconds
}

/// What the gateway must know of a model.
pub(crate) fn route(stored: &Stored, measured: Option<&Measurement>) -> Route {
    let settings = &stored.model.settings;
    Route {
        digest: stored.model.digest,
        name: stored.model.name.clone(),
        priority: settings.priority,
        max_concurrency: crate::repository::slots(settings),
        critical_reserve: settings.critical_reserve,
        // With fewer permits than sequences, permits are what an operator allows at once.
        parks: crate::repository::slots(settings) >= settings.parallel && settings.runtime.is_none(),
        cold: settings.cold,
        rewarm_seconds: rewarm_seconds(stored, measured),
        targets: settings.slo,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceOptions, SliceOptions};

    #[test]
    fn the_reserve_must_leave_something() {
        assert_eq!(memory_and_reserve(Some(100 << 20), Some(10)).unwrap(), (100 << 20, 10));
        assert_eq!(memory_and_reserve(Some(2 << 30), None).unwrap(), (2 << 30, 384 << 20));
        let refused = |memory, reserve| memory_and_reserve(memory, reserve).unwrap_err().to_string();
        assert!(refused(Some(1 << 30), Some(1 << 30)).contains("the reserve of 1.0 GiB leaves nothing"));
        assert!(refused(Some(0), None).contains("is a unit missing, as in --memory 2GiB?"));
        assert!(
            refused(Some(2), None).contains("a memory of 2 B holds no model, an engine process alone takes 16.0 MiB")
        );
        assert!(memory_and_reserve(Some(MEMORY_BYTES_MIN), Some(0)).is_ok());
        let (memory, reserve) = memory_and_reserve(None, None).unwrap();
        assert!(reserve < memory);
    }

    #[test]
    fn more_memory_than_the_machine_has_is_warned_about() {
        assert_eq!(beyond_machine(2 << 30, Some(2 << 30)), None);
        assert_eq!(beyond_machine(2 << 30, None), None);
        let warning = beyond_machine(3 << 30, Some(2 << 30)).unwrap();
        assert!(warning.contains("3.0 GiB is more than the 2.0 GiB this machine has"), "{warning}");
    }

    #[test]
    fn what_bounds_processes_lasts_as_long_outside_at_any_speed() {
        let (config, speed) = (Config::default(), ClockSpeed::new(240).unwrap());
        let settings = worker_settings(&config, 100, 10).unwrap();
        let fast = at_speed(settings.clone(), speed);
        assert_eq!(at_speed(settings.clone(), ClockSpeed::default()), settings);
        for (fast, normal) in [
            (fast.load_deadline, LOAD_DEADLINE),
            (fast.stop_deadline, STOP_DEADLINE),
            (fast.hang_deadline, HANG_DEADLINE),
            (fast.thread_quantum, THREAD_QUANTUM),
            (fast.measure_interval, MEASURE_INTERVAL),
        ] {
            assert_eq!(speed.outside(fast), normal);
        }
        assert_eq!((fast.minimum_residency, fast.demand_half_life), (MINIMUM_RESIDENCY, DEMAND_HALF_LIFE));
    }

    #[test]
    fn parking_has_bounds_of_its_own_and_a_switch() {
        let mut config = Config::default();
        config.residency.park_times_max = Some(2);
        let parking = worker_settings(&config, 100, 10).unwrap().parking;
        assert_eq!(parking, ParkingLimits { times_max: 2, ..ParkingLimits::default() });
        assert!(gateway_settings(&config).parks);
        config.residency.park = Some(false);
        assert_eq!(worker_settings(&config, 100, 10).unwrap().parking, ParkingLimits::OFF);
        assert!(!gateway_settings(&config).parks);
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
        assert!(worker_settings(&config, 100, 10).unwrap_err().to_string().contains("take 91 B, more than the 90 B"));
    }
}
