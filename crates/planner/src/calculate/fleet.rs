//! How many replicas a load needs, and how many of rarely used models are in use at once.
//!
//! Replicas: places for requests as servers of an M/M/c queue (see `queueing`), the fewest with which the 99th percentile of the wait keeps its
//! target, and some to spare for those that fail. Models: each is in use with probability `1 - exp(-rate * seconds)`, so
//! `models * (1 - exp(-rate * seconds))` are on average (Aegaeon, SOSP'25).

use super::{
    input::{Refused, at_least_one, finite, positive},
    queueing::{Queue, Waiting},
};
use serde::Serialize;

/// A load and what it may wait.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fleet {
    /// Requests of all callers.
    pub requests_per_second: f64,
    /// What one takes on a replica that is as busy as it will be.
    pub service_seconds: f64,
    /// Requests that a replica computes together.
    pub requests_per_replica: u64,
    /// One in a hundred may wait longer.
    pub wait_p99_seconds: f64,
    /// Replicas that may fail.
    pub spare_replicas: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// Replicas that do nothing but keep up.
    pub replicas_to_keep_up: u64,
    /// Replicas that keep the target.
    pub replicas_for_target: u64,
    /// The same with those to spare.
    pub replicas: u64,
    /// What callers see with as many as keep the target.
    pub waiting: Waiting,
    /// What they see while none has failed.
    pub waiting_with_spares: Waiting,
}

impl Fleet {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let places = at_least_one("requests-per-replica", self.requests_per_replica)?;
        let queue = |servers| Queue {
            arrivals_per_second: self.requests_per_second,
            service_seconds: self.service_seconds,
            servers,
        };
        let to_keep_up = queue(1).least_servers()?.div_ceil(places);
        let for_target = queue(1).servers_for(self.wait_p99_seconds)?.div_ceil(places);
        let replicas = super::input::sum("replicas", [for_target, self.spare_replicas])?;
        let waiting = |replicas: u64| {
            let servers = super::input::product("replicas", &[replicas, places])?;
            let waiting = queue(servers).exponential()?;
            waiting
                .ok_or_else(|| super::input::refused("requests-per-second", "is more than these replicas keep up with"))
        };
        Ok(Answer {
            replicas_to_keep_up: to_keep_up,
            replicas_for_target: for_target,
            replicas,
            waiting: waiting(for_target)?,
            waiting_with_spares: waiting(replicas)?,
        })
    }
}

/// How many of so many models are in use on average.
pub fn expected_active(models: u64, requests_per_second_per_model: f64, service_seconds: f64) -> Result<f64, Refused> {
    let rate = positive("requests-per-second-per-model", requests_per_second_per_model)?;
    let busy = finite("load", rate * positive("service-seconds", service_seconds)?)?;
    Ok(at_least_one("models", models)? as f64 * -libm::expm1(-busy))
}
