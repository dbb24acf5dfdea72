//! The configuration file: TOML, every key checked, every problem reported with its line.

mod kv;
mod reader;
mod replica;
mod runtime;
#[cfg(test)]
mod tests;
pub(crate) mod units;

pub(crate) use kv::KvOptions;
pub(crate) use reader::ConfigError;
pub(crate) use runtime::parse_name as parse_runtime;
pub(crate) use warmset_engine::protocol::PARALLEL_MAX;

use crate::repository::{ModelOptions, parse_accelerators, parse_cold, parse_engine, parse_model_name, parse_priority};
use reader::{Problem, Reader, Section};
use std::{net::SocketAddr, path::Path, time::Duration};
use warmset_core::{Bytes, Digest, ModelName, PoolName, forecast::Parts, targets::Targets};
use warmset_engine::protocol::{EngineKind, Runtime};
use warmset_gateway::proxy::{REPLICAS_MAX, ReplicaConfig};

/// The longest configuration file that is read.
pub(crate) const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Models one file may list.
const MODELS_MAX: usize = 10_000;
/// Devices one machine may have.
const DEVICES_MAX: usize = warmset_core::memory::ACCELERATORS_MAX;
/// Parts the memory may be cut into.
const SLICES_MAX: usize = 64;
/// Connections that may be open.
const CONNECTIONS_MAX: u32 = 1_000_000;
/// Requests that may be parked, and how often one may be.
const PARKED_REQUESTS_MAX: u32 = 4096;
const PARKED_TIMES_MAX: u32 = 1_000;
/// Jobs that may wait.
const JOBS_MAX: u32 = 20_000;
/// Tokens one sequence may hold.
pub(crate) const CONTEXT_TOKENS_MAX: u32 = 1 << 24;

/// Everything a configuration file may say. What it does not say is none.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Config {
    pub(crate) gateway: GatewayOptions,
    pub(crate) worker: WorkerOptions,
    pub(crate) residency: ResidencyOptions,
    pub(crate) kv: KvOptions,
    pub(crate) sources: warmset_source::Settings,
    pub(crate) devices: Vec<DeviceOptions>,
    pub(crate) runtimes: Vec<Runtime>,
    pub(crate) models: Vec<ModelOptions>,
    pub(crate) replicas: Vec<ReplicaConfig>,
}

/// `[gateway]`
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct GatewayOptions {
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) admin_listen: Option<SocketAddr>,
    pub(crate) max_body_bytes: Option<Bytes>,
    pub(crate) queue_limit: Option<u32>,
    pub(crate) queue_limit_per_model: Option<u32>,
    pub(crate) first_byte_timeout: Option<Duration>,
    pub(crate) connections_max: Option<u32>,
    pub(crate) jobs_max: Option<u32>,
    pub(crate) job_time_to_live: Option<Duration>,
    pub(crate) drain_timeout: Option<Duration>,
    pub(crate) stream_idle_timeout: Option<Duration>,
    pub(crate) load_bound: Option<f64>,
}

/// `[worker]`
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct WorkerOptions {
    pub(crate) memory: Option<Bytes>,
    pub(crate) reserve: Option<Bytes>,
    pub(crate) kind: Option<String>,
    pub(crate) cores: Option<u32>,
    pub(crate) concurrent_loads: Option<u32>,
    pub(crate) load_deadline: Option<Duration>,
    pub(crate) stop_deadline: Option<Duration>,
    pub(crate) hang_deadline: Option<Duration>,
    pub(crate) slices: Vec<SliceOptions>,
    /// The line of the slices, for what is only found wrong with the command line's memory.
    pub(crate) slices_line: Option<usize>,
}

/// One part of the memory with a budget of its own.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SliceOptions {
    pub(crate) name: String,
    pub(crate) memory: Bytes,
}

/// `[residency]`
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct ResidencyOptions {
    pub(crate) restore: Option<bool>,
    pub(crate) forecast: Option<Parts>,
    pub(crate) minimum_seconds: Option<Duration>,
    pub(crate) priority_protection_seconds: Option<Duration>,
    pub(crate) demand_half_life_seconds: Option<Duration>,
    pub(crate) thrash_window_seconds: Option<Duration>,
    pub(crate) thrash_threshold: Option<f64>,
    pub(crate) park: Option<bool>,
    pub(crate) park_requests_max: Option<u32>,
    pub(crate) park_bytes_max: Option<Bytes>,
    pub(crate) park_times_max: Option<u32>,
    pub(crate) park_seconds_max: Option<Duration>,
}

/// `[[device]]`
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DeviceOptions {
    pub(crate) id: String,
    pub(crate) memory: Bytes,
    pub(crate) reserve: Bytes,
}

/// Reads a file. Every problem in it is reported at once.
pub(crate) fn read_file(path: &Path) -> Result<Config, ConfigError> {
    let unreadable =
        |reason: String| ConfigError { path: path.to_path_buf(), problems: vec![Problem { line: 1, message: reason }] };
    let metadata = std::fs::metadata(path).map_err(|error| unreadable(format!("cannot be read: {error}")))?;
    if !metadata.is_file() || metadata.len() > CONFIG_BYTES_MAX {
        return Err(unreadable(format!("must be a regular file of at most {}", units::format_bytes(CONFIG_BYTES_MAX))));
    }
    let text = std::fs::read_to_string(path).map_err(|error| unreadable(format!("cannot be read: {error}")))?;
    parse(&text).map_err(|problems| ConfigError { path: path.to_path_buf(), problems })
}

/// Reads a text.
fn parse(text: &str) -> Result<Config, Vec<Problem>> {
    let (mut reader, table) = Reader::new(text);
    let mut root = Section::root(table);
    let gateway = root.take_table(&mut reader, "gateway");
    let worker = root.take_table(&mut reader, "worker");
    let residency = root.take_table(&mut reader, "residency");
    let kv = root.take_table(&mut reader, "kv");
    let sources = root.take_table(&mut reader, "sources");
    let devices = root.take_tables(&mut reader, "device", DEVICES_MAX);
    let runtimes = root.take_tables(&mut reader, "runtime", runtime::RUNTIMES_MAX);
    let models = root.take_tables(&mut reader, "model", MODELS_MAX);
    let replicas = root.take_tables(&mut reader, "replica", REPLICAS_MAX);
    root.finish(&mut reader);
    let gateway = read_gateway(&mut reader, gateway);
    let before = reader.problems.len();
    let worker = read_worker(&mut reader, worker);
    // A slice that could not be read is named by models all the same.
    let pools: Option<Vec<PoolName>> = (!reader.broken && reader.problems.len() == before)
        .then(|| worker.slices.iter().map(|slice| PoolName::new(&slice.name)).collect());
    let runtimes = runtime::read_runtimes(&mut reader, runtimes);
    let known: Vec<&str> = runtimes.iter().map(|runtime| runtime.name.as_str()).collect();
    let config = Config {
        gateway,
        worker,
        residency: read_residency(&mut reader, residency),
        kv: kv::read_kv(&mut reader, kv),
        sources: read_sources(&mut reader, sources),
        devices: devices.into_iter().filter_map(|section| read_device(&mut reader, section)).collect(),
        models: read_models(&mut reader, models, pools.as_deref(), &known),
        replicas: replica::read_replicas(&mut reader, replicas),
        runtimes,
    };
    if reader.problems.is_empty() {
        return Ok(config);
    }
    reader.problems.sort();
    Err(reader.problems)
}

fn read_gateway(reader: &mut Reader<'_>, mut section: Section<'_>) -> GatewayOptions {
    let options = GatewayOptions {
        listen: section.take(reader, "listen", reader::address),
        admin_listen: section.take(reader, "admin_listen", reader::address),
        max_body_bytes: section.take(reader, "max_body_bytes", reader::positive_bytes),
        queue_limit: section.take(reader, "queue_limit", reader::integer(1, u32::MAX)),
        queue_limit_per_model: section.take(reader, "queue_limit_per_model", reader::integer(1, u32::MAX)),
        first_byte_timeout: section.take(reader, "first_byte_timeout", reader::positive_duration),
        connections_max: section.take(reader, "connections_max", reader::integer(1, CONNECTIONS_MAX)),
        jobs_max: section.take(reader, "jobs_max", reader::integer(0, JOBS_MAX)),
        job_time_to_live: section.take(reader, "job_time_to_live", reader::positive_duration),
        drain_timeout: section.take(reader, "drain_timeout", reader::duration),
        stream_idle_timeout: section.take(reader, "stream_idle_timeout", reader::positive_duration),
        load_bound: section.take(reader, "load_bound", load_bound),
    };
    section.finish(reader);
    options
}

/// How many times the mean a replica may have.
fn load_bound(value: &toml::de::DeValue<'_>) -> Result<f64, String> {
    let bound = reader::number(value)?;
    (1.0..=100.0).contains(&bound).then_some(bound).ok_or_else(|| "must be between 1 and 100".to_owned())
}

fn read_worker(reader: &mut Reader<'_>, mut section: Section<'_>) -> WorkerOptions {
    let slices_line = section.line_of(reader, "slices");
    let slices = section.take_tables(reader, "slices", SLICES_MAX);
    let options = WorkerOptions {
        memory: section.take(reader, "memory", reader::positive_bytes),
        reserve: section.take(reader, "reserve", reader::bytes),
        kind: section.take(reader, "type", reader::text),
        cores: section.take(reader, "cores", reader::integer(1, 4096)),
        concurrent_loads: section.take(reader, "concurrent_loads", reader::integer(1, 64)),
        load_deadline: section.take(reader, "load_deadline", reader::positive_duration),
        stop_deadline: section.take(reader, "stop_deadline", reader::positive_duration),
        hang_deadline: section.take(reader, "hang_deadline", reader::positive_duration),
        slices: read_slices(reader, slices),
        slices_line,
    };
    section.finish(reader);
    options
}

fn read_slices(reader: &mut Reader<'_>, sections: Vec<Section<'_>>) -> Vec<SliceOptions> {
    let mut slices: Vec<SliceOptions> = Vec::new();
    for section in sections {
        let offset = section.offset_of("name");
        let Some(slice) = read_slice(reader, section) else { continue };
        if slice.name == PoolName::default_pool().as_str() {
            reader.report(offset, "worker.slices.name: \"default\" is what the slices leave: use another name");
        } else if slices.iter().any(|known| known.name == slice.name) {
            reader.report(offset, format!("worker.slices.name: there are two slices {}: rename one", slice.name));
        }
        slices.push(slice);
    }
    slices
}

fn read_slice(reader: &mut Reader<'_>, mut section: Section<'_>) -> Option<SliceOptions> {
    let name = required(reader, &mut section, "name", reader::parsed(parse_pool));
    let memory = required(reader, &mut section, "memory", reader::positive_bytes);
    section.finish(reader);
    Some(SliceOptions { name: name?, memory: memory? })
}

fn read_residency(reader: &mut Reader<'_>, mut section: Section<'_>) -> ResidencyOptions {
    let options = ResidencyOptions {
        restore: section.take(reader, "restore", reader::boolean),
        forecast: section.take(reader, "forecast", forecast_parts),
        minimum_seconds: section.take(reader, "minimum_seconds", reader::duration),
        priority_protection_seconds: section.take(reader, "priority_protection_seconds", reader::duration),
        demand_half_life_seconds: section.take(reader, "demand_half_life_seconds", reader::positive_duration),
        thrash_window_seconds: section.take(reader, "thrash_window_seconds", reader::positive_duration),
        thrash_threshold: section.take(reader, "thrash_threshold", reader::number),
        park: section.take(reader, "park", reader::boolean),
        park_requests_max: section.take(reader, "park_requests_max", reader::integer(1, PARKED_REQUESTS_MAX)),
        park_bytes_max: section.take(reader, "park_bytes_max", reader::positive_bytes),
        park_times_max: section.take(reader, "park_times_max", reader::integer(1, PARKED_TIMES_MAX)),
        park_seconds_max: section.take(reader, "park_seconds_max", reader::positive_duration),
    };
    section.finish(reader);
    options
}

/// One schedule or several.
fn schedules(value: &toml::de::DeValue<'_>) -> Result<Vec<String>, String> {
    let texts = if value.is_str() { vec![reader::text(value)?] } else { reader::texts(value)? };
    crate::schedule::parse_all(&texts)?;
    Ok(texts)
}

/// `{ ttft_p99_warm_ms = 500, ttft_p99_cold_ms = 5000 }`, or one of both.
fn targets(value: &toml::de::DeValue<'_>) -> Result<Targets, String> {
    let known = "a table such as { ttft_p99_warm_ms = 500, ttft_p99_cold_ms = 5000 }";
    let table = value.as_table().ok_or_else(|| format!("must be {known}"))?;
    let mut targets = Targets::default();
    for (key, value) in table {
        let milliseconds =
            reader::integer(1, u32::MAX)(value.get_ref()).map_err(|why| format!("{}: {why}", key.get_ref()));
        match key.get_ref().as_ref() {
            "ttft_p99_warm_ms" => targets.ttft_p99_warm_ms = Some(milliseconds?),
            "ttft_p99_cold_ms" => targets.ttft_p99_cold_ms = Some(milliseconds?),
            other => return Err(format!("there is no target {other}: must be {known}")),
        }
    }
    Ok(targets)
}

/// All of the forecast, none of it, or the parts that are named.
fn forecast_parts(value: &toml::de::DeValue<'_>) -> Result<Parts, String> {
    if let Some(all) = value.as_bool() {
        return Ok(if all { Parts::ALL } else { Parts::NONE });
    }
    let known = "true, false, or an array of \"preload\", \"intervals\" and \"time_of_day\"";
    let mut parts = Parts::NONE;
    for name in reader::texts(value).map_err(|_| format!("must be {known}"))? {
        match name.as_str() {
            "preload" => parts.preload = true,
            "intervals" => parts.intervals = true,
            "time_of_day" => parts.time_of_day = true,
            _ => return Err(format!("{name:?} is no part of the forecast: write {known}")),
        }
    }
    Ok(parts)
}

fn read_sources(reader: &mut Reader<'_>, mut section: Section<'_>) -> warmset_source::Settings {
    let default = warmset_source::Settings::default();
    let settings = warmset_source::Settings {
        allow_private: section.take(reader, "allow_private", reader::boolean).unwrap_or(default.allow_private),
        allow_hosts: section.take(reader, "allow_hosts", reader::texts).unwrap_or(default.allow_hosts),
        ca_file: section.take(reader, "ca_file", reader::text).map(Into::into),
        max_bytes: section.take(reader, "max_bytes", reader::positive_bytes).unwrap_or(default.max_bytes),
        stall_timeout: section
            .take(reader, "stall_timeout", reader::positive_duration)
            .unwrap_or(default.stall_timeout),
        timeout: section.take(reader, "timeout", reader::positive_duration).unwrap_or(default.timeout),
        retry_pause: section.take(reader, "retry_pause", reader::duration).unwrap_or(default.retry_pause),
    };
    section.finish(reader);
    settings
}

fn read_device(reader: &mut Reader<'_>, mut section: Section<'_>) -> Option<DeviceOptions> {
    let id = required(reader, &mut section, "id", reader::text);
    let memory = required(reader, &mut section, "memory", reader::bytes);
    let reserve = section.take(reader, "reserve", reader::bytes).unwrap_or(0);
    section.finish(reader);
    Some(DeviceOptions { id: id?, memory: memory?, reserve })
}

fn read_models(
    reader: &mut Reader<'_>,
    sections: Vec<Section<'_>>,
    pools: Option<&[PoolName]>,
    runtimes: &[&str],
) -> Vec<ModelOptions> {
    let mut names = std::collections::BTreeSet::new();
    let mut models = Vec::new();
    for section in sections {
        let offset = section.offset();
        let runtime_offset = section.offset_of("runtime");
        let Some(model) = read_model(reader, section, pools) else { continue };
        if let Some(name) = &model.runtime
            && !runtimes.contains(&name.as_str())
        {
            let known = if runtimes.is_empty() { "none".to_owned() } else { runtimes.join(", ") };
            reader.report(runtime_offset, format!("model.runtime: there is no [[runtime]] {name}: there are {known}"));
        }
        for name in std::iter::once(&model.name).chain(&model.aliases) {
            if !names.insert(name.clone()) {
                reader.report(offset, format!("the name {name} is used twice"));
            }
        }
        models.push(model);
    }
    models
}

fn read_model(reader: &mut Reader<'_>, mut section: Section<'_>, pools: Option<&[PoolName]>) -> Option<ModelOptions> {
    let before = reader.problems.len();
    let (pool_offset, reserve_offset) = (section.offset_of("pool"), section.offset_of("critical_reserve"));
    let name = required(reader, &mut section, "name", reader::parsed(ModelName::parse));
    let source = required(reader, &mut section, "source", reader::text);
    let aliases = section.take(reader, "aliases", |value| {
        let names = reader::texts(value)?;
        names.iter().try_for_each(|alias| ModelName::parse(alias).map(drop)).map_err(|error| error.to_string())?;
        Ok(names)
    });
    let keep_alive = section.take(reader, "keep_alive", reader::duration);
    let options = ModelOptions {
        name: name.as_ref().map(ToString::to_string).unwrap_or_default(),
        source: source.clone().unwrap_or_default(),
        aliases: aliases.unwrap_or_default(),
        digest: section.take(reader, "digest", reader::parsed(Digest::parse)),
        engine: section.take(reader, "engine", reader::parsed(parse_engine)),
        runtime: section.take(reader, "runtime", reader::parsed(parse_runtime)),
        pin: section.take(reader, "pin", reader::boolean),
        priority: section.take(reader, "priority", reader::parsed(parse_priority)),
        max_concurrency: section.take(reader, "max_concurrency", reader::integer(1, PARALLEL_MAX)),
        critical_reserve: section.take(reader, "critical_reserve", reader::integer(0, PARALLEL_MAX)),
        parallel: section.take(reader, "parallel", reader::integer(1, PARALLEL_MAX)),
        context_tokens: section.take(reader, "context_tokens", reader::integer(0, CONTEXT_TOKENS_MAX)),
        memory_cap_bytes: section.take(reader, "memory_cap", reader::positive_bytes),
        cold: section.take(reader, "cold", reader::parsed(parse_cold)),
        fallback: section.take(reader, "fallback", reader::parsed(parse_model_name)),
        pool: section.take(reader, "pool", reader::parsed(parse_pool)),
        keep_alive_seconds: keep_alive.map(|duration| duration.as_secs_f64()),
        accelerators: section.take(reader, "device", reader::parsed(parse_accelerators)),
        schedule: section.take(reader, "schedule", schedules),
        slo: section.take(reader, "slo", targets),
    };
    section.finish(reader);
    if let Some(Err(reason)) = pools.map(|pools| options.check_pool(pools)) {
        reader.report(pool_offset, format!("model.pool: {reason}"));
    }
    // What a single key cannot say: a key that was refused already would be judged by its default here.
    if reader.problems.len() == before
        && let Err(reason) = options.settings(options.engine_said().unwrap_or(EngineKind::Llama))
    {
        reader.report(reserve_offset, format!("model: {reason}"));
    }
    (name.is_some() && source.is_some()).then_some(options)
}

/// A name for a part of the memory.
pub(crate) fn parse_pool(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if !text.is_empty() && text.len() <= 64 && text.bytes().all(plain) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not a pool name: use 1 to 64 characters of A-Z a-z 0-9 . _ -"))
    }
}

fn required<'i, T>(
    reader: &mut Reader<'_>,
    section: &mut Section<'i>,
    key: &'static str,
    read: impl FnOnce(&toml::de::DeValue<'i>) -> Result<T, String>,
) -> Option<T> {
    let before = reader.problems.len();
    let value = section.take(reader, key, read);
    if value.is_none() && reader.problems.len() == before {
        reader.report(section.offset(), format!("{key} is missing"));
    }
    value
}
