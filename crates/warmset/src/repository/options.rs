//! What can be said of a model when it is added: by command line, configuration file or admin call alike.

use super::runtimes::command_source;
use crate::config::{CONTEXT_TOKENS_MAX, PARALLEL_MAX, parse_pool};
use serde::{Deserialize, Serialize};
use warmset_catalog::ModelSettings;
use warmset_core::{
    Bytes, Digest, ModelName, PoolName, Priority, gateway::ColdPolicy, ids::join_names, targets::Targets,
};
use warmset_engine::protocol::EngineKind;
use warmset_source::Location;

/// Accelerators one model may need.
const ACCELERATORS_MAX: u32 = 64;

/// A model as a user describes it. What is not said is none and takes its default.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ModelOptions {
    pub(crate) name: String,
    pub(crate) source: String,
    pub(crate) aliases: Vec<String>,
    pub(crate) digest: Option<Digest>,
    pub(crate) engine: Option<EngineKind>,
    pub(crate) runtime: Option<String>,
    pub(crate) pin: Option<bool>,
    pub(crate) priority: Option<Priority>,
    pub(crate) max_concurrency: Option<u32>,
    pub(crate) critical_reserve: Option<u32>,
    pub(crate) parallel: Option<u32>,
    pub(crate) context_tokens: Option<u32>,
    pub(crate) memory_cap_bytes: Option<Bytes>,
    pub(crate) cold: Option<ColdPolicy>,
    pub(crate) fallback: Option<ModelName>,
    pub(crate) pool: Option<String>,
    pub(crate) keep_alive_seconds: Option<f64>,
    pub(crate) accelerators: Option<u32>,
    pub(crate) schedule: Option<Vec<String>>,
    pub(crate) slo: Option<Targets>,
}

impl ModelOptions {
    /// Whether its files are on another machine.
    pub(crate) fn is_far(&self) -> bool {
        let location = Location::parse(&self.source);
        command_source(&self.source).is_none() && location.is_ok_and(|location| location.is_far())
    }

    /// Refuses what a server with these pools and so many accelerators does not have.
    pub(crate) fn check_place(&self, pools: &[PoolName], accelerators: usize) -> Result<(), String> {
        self.check_pool(pools).and_then(|()| self.check_accelerators(accelerators))
    }

    /// Refuses a part of the memory that the server does not have.
    pub(crate) fn check_pool(&self, pools: &[PoolName]) -> Result<(), String> {
        match &self.pool {
            Some(pool) if *pool != *PoolName::default_pool().as_str() && !pools.contains(&PoolName::new(pool)) => {
                let known = join_names(pools.iter().map(PoolName::as_str).chain(["default"]));
                Err(format!(
                    "there is no pool {pool}: there are {known}; pools are the [worker] slices of the configuration"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Refuses accelerators that the server does not have.
    fn check_accelerators(&self, found: usize) -> Result<(), String> {
        match self.accelerators {
            Some(wanted) if wanted as usize > found => Err(format!(
                "the model asks for {wanted} accelerators and this server has {found}: use device cpu, or give the \
                 server a [[device]]"
            )),
            _ => Ok(()),
        }
    }

    /// The engine, as far as it was said: only one of them takes a runtime, and its own kind of source.
    pub(crate) fn engine_said(&self) -> Option<EngineKind> {
        let command = self.runtime.is_some() || command_source(&self.source).is_some();
        self.engine.or(command.then_some(EngineKind::Command))
    }

    /// The settings that follow, with defaults for the rest.
    pub(crate) fn settings(&self, engine: EngineKind) -> Result<ModelSettings, String> {
        self.settings_over(engine, ModelSettings::default())
    }

    /// What is said here, and the rest as it was.
    pub(crate) fn settings_over(&self, engine: EngineKind, before: ModelSettings) -> Result<ModelSettings, String> {
        let settings = ModelSettings {
            engine: engine_name(engine).to_owned(),
            runtime: self.runtime.clone().or(before.runtime),
            pin: self.pin.unwrap_or(before.pin),
            priority: self.priority.unwrap_or(before.priority),
            max_concurrency: self.max_concurrency.or(before.max_concurrency),
            critical_reserve: self.critical_reserve.unwrap_or(before.critical_reserve),
            parallel: self.parallel.unwrap_or(before.parallel),
            context_tokens: self.context_tokens.unwrap_or(before.context_tokens),
            memory_cap_bytes: self.memory_cap_bytes.or(before.memory_cap_bytes),
            cold: self.cold.unwrap_or(before.cold),
            fallback: self.fallback.clone().or(before.fallback),
            pool: self.pool.as_deref().map_or(before.pool, PoolName::new),
            keep_alive_seconds: self.keep_alive_seconds.or(before.keep_alive_seconds),
            accelerators: self.accelerators.unwrap_or(before.accelerators),
            schedule: self.schedule.clone().unwrap_or(before.schedule),
            slo: self.slo.unwrap_or(before.slo),
            source_stamp: before.source_stamp,
            pinned_source: before.pinned_source,
            fetch_seconds: before.fetch_seconds,
        };
        check(&settings)?;
        Ok(settings)
    }
}

/// Whether settings make sense together.
fn check(settings: &ModelSettings) -> Result<(), String> {
    match (&settings.runtime, settings.engine == engine_name(EngineKind::Command)) {
        (None, true) => {
            return Err("engine command needs a runtime: name a [[runtime]] of the configuration".to_owned());
        }
        (Some(_), false) => return Err(format!("engine {} has no runtime: leave it out", settings.engine)),
        _ => {}
    }
    let slots = slots(settings);
    if !(1..=PARALLEL_MAX).contains(&settings.parallel) || !(1..=PARALLEL_MAX).contains(&slots) {
        return Err(format!("parallel and max_concurrency must be between 1 and {PARALLEL_MAX}"));
    }
    if settings.critical_reserve >= slots && settings.critical_reserve > 0 {
        return Err(format!("critical_reserve must be less than the {slots} requests that run at once"));
    }
    if settings.context_tokens > CONTEXT_TOKENS_MAX {
        return Err(format!("context_tokens must be at most {CONTEXT_TOKENS_MAX}"));
    }
    crate::schedule::parse_all(&settings.schedule)?;
    if [settings.slo.ttft_p99_warm_ms, settings.slo.ttft_p99_cold_ms].contains(&Some(0)) {
        return Err("a time to the first token of 0 ms cannot be met: give a target above 0".to_owned());
    }
    if settings.memory_cap_bytes == Some(0) {
        return Err("memory_cap must be more than 0: leave it out for the whole pool".to_owned());
    }
    if settings.accelerators > ACCELERATORS_MAX {
        return Err(format!("a model can use at most {ACCELERATORS_MAX} accelerators"));
    }
    if settings.keep_alive_seconds.is_some_and(|seconds| crate::config::units::duration_of_seconds(seconds).is_none()) {
        return Err("keep_alive must be a duration of at most 100 years".to_owned());
    }
    parse_pool(settings.pool.as_str()).map(drop)
}

/// Requests of a model that run at once.
pub(crate) fn slots(settings: &ModelSettings) -> u32 {
    settings.max_concurrency.unwrap_or(settings.parallel)
}

/// The name of an implementation.
pub(crate) fn engine_name(engine: EngineKind) -> &'static str {
    match engine {
        EngineKind::Llama => "llama",
        EngineKind::Synthetic => "synthetic",
        EngineKind::Command => "command",
    }
}

/// Parses the name of an implementation.
pub(crate) fn parse_engine(text: &str) -> Result<EngineKind, String> {
    match text {
        "llama" => Ok(EngineKind::Llama),
        "synthetic" => Ok(EngineKind::Synthetic),
        "command" => Ok(EngineKind::Command),
        _ => Err(format!("{text:?} is not an engine: use llama, command or synthetic")),
    }
}

/// Parses a class of work.
pub(crate) fn parse_priority(text: &str) -> Result<Priority, String> {
    let found = Priority::ALL.into_iter().find(|priority| priority.as_str() == text);
    found.ok_or_else(|| format!("{text:?} is not a priority: use critical, standard or batch"))
}

/// Parses the name of a model.
pub(crate) fn parse_model_name(text: &str) -> Result<ModelName, String> {
    ModelName::parse(text).map_err(|error| error.to_string())
}

/// Parses what callers of a cold model get.
pub(crate) fn parse_cold(text: &str) -> Result<ColdPolicy, String> {
    match text {
        "wait" => Ok(ColdPolicy::Wait),
        "reject" => Ok(ColdPolicy::Reject),
        "async" => Ok(ColdPolicy::Async),
        _ => Err(format!("{text:?} is not a policy for cold models: use wait, reject or async")),
    }
}

/// Parses `cpu`, `gpu` or `gpu:N` into the number of accelerators.
pub(crate) fn parse_accelerators(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is not a device: use cpu, gpu, or gpu:N for N accelerators");
    match text.split_once(':') {
        None if text == "cpu" => Ok(0),
        None if text == "gpu" => Ok(1),
        Some(("gpu", count)) => {
            count.parse().ok().filter(|count| (1..=ACCELERATORS_MAX).contains(count)).ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_takes_its_default() {
        let settings = ModelOptions::default().settings(EngineKind::Llama).unwrap();
        assert_eq!(settings, ModelSettings::default());
        assert_eq!(slots(&settings), settings.parallel);
        let options = ModelOptions { pin: Some(true), parallel: Some(2), ..ModelOptions::default() };
        let settings = options.settings(EngineKind::Synthetic).unwrap();
        assert_eq!((settings.pin, settings.parallel, settings.engine.as_str()), (true, 2, "synthetic"));
    }

    #[test]
    fn what_is_not_said_stays_as_it_was() {
        let before =
            ModelSettings { pin: true, parallel: 2, keep_alive_seconds: Some(5.0), ..ModelSettings::default() };
        let options = ModelOptions { parallel: Some(3), ..ModelOptions::default() };
        let after = options.settings_over(EngineKind::Llama, before.clone()).unwrap();
        assert_eq!(after, ModelSettings { parallel: 3, ..before });
    }

    #[test]
    fn accelerators_must_be_there() {
        let options = ModelOptions { accelerators: Some(2), ..ModelOptions::default() };
        assert_eq!(options.check_accelerators(2), Ok(()));
        assert!(options.check_accelerators(1).unwrap_err().contains("asks for 2 accelerators and this server has 1"));
        assert_eq!(ModelOptions::default().check_accelerators(0), Ok(()));
    }

    #[test]
    fn settings_that_make_no_sense_are_refused() {
        let refused = |options: ModelOptions| options.settings(EngineKind::Llama).unwrap_err();
        let base = ModelOptions::default;
        assert!(refused(ModelOptions { parallel: Some(0), ..base() }).contains("parallel"));
        assert!(refused(ModelOptions { critical_reserve: Some(4), ..base() }).contains("critical_reserve"));
        assert!(refused(ModelOptions { pool: Some("a/b".into()), ..base() }).contains("pool"));
        assert!(refused(ModelOptions { keep_alive_seconds: Some(-1.0), ..base() }).contains("keep_alive"));
        assert!(refused(ModelOptions { memory_cap_bytes: Some(0), ..base() }).contains("memory_cap"));
        assert!(refused(ModelOptions { accelerators: Some(1000), ..base() }).contains("accelerators"));
        assert!(refused(ModelOptions { context_tokens: Some(u32::MAX), ..base() }).contains("context_tokens"));
    }

    #[test]
    fn a_pool_must_be_there() {
        let options = ModelOptions { pool: Some("small".into()), ..ModelOptions::default() };
        assert_eq!(options.check_pool(&[PoolName::new("small")]), Ok(()));
        assert!(options.check_pool(&[PoolName::new("big")]).unwrap_err().contains("there are big, default"));
        assert_eq!(ModelOptions { pool: Some("default".into()), ..options }.check_pool(&[]), Ok(()));
    }

    #[test]
    fn devices_are_read() {
        let read: Vec<_> = ["cpu", "gpu", "gpu:4"].map(parse_accelerators).into();
        assert_eq!(read, [Ok(0), Ok(1), Ok(4)]);
        for bad in ["", "gpu:", "gpu:0", "gpu:65", "tpu", "cpu:1"] {
            assert!(parse_accelerators(bad).is_err(), "{bad}");
        }
    }
}
