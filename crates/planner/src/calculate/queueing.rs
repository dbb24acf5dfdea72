//! How long requests wait: two models of queues with answers in closed form, for plans and to check a simulator by.
//!
//! M/M/c: Erlang's C by the recursion for his B, which loses no digits; a request that waits, waits an exponential time with rate
//! `c * mu - lambda`, so that `p99 = ln(P(wait) / 0.01) / (c * mu - lambda)`. M/D/1: mean wait `rho * s / (2 * (1 - rho))`
//! (Pollaczek and Khinchine). Kleinrock, Queueing Systems I, sections 3.5 and 5.6.

use super::input::{Refused, at_least_one, finite, positive, refused};
use serde::Serialize;

/// The most servers.
pub const SERVERS_MAX: u64 = 1_000_000;
/// The percentile that is told.
const TAIL: f64 = 0.01;

/// Requests and who answers them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Queue {
    /// Requests, at random moments.
    pub arrivals_per_second: f64,
    /// What each takes on average.
    pub service_seconds: f64,
    /// Requests at the same time.
    pub servers: u64,
}

/// What callers see where service times are exponential.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Waiting {
    /// The part of the time that a server works.
    pub utilisation: f64,
    /// How many requests wait at all.
    pub wait_probability: f64,
    /// Mean over all requests.
    pub mean_wait_seconds: f64,
    /// One in a hundred waits longer.
    pub wait_p99_seconds: f64,
    /// Wait and service.
    pub mean_response_seconds: f64,
    /// Requests that wait, on average.
    pub mean_waiting: f64,
    /// One in a hundred takes longer altogether; with one server only.
    pub response_p99_seconds: Option<f64>,
}

/// What callers of one server see that always takes the same time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Constant {
    /// The part of the time that the server works.
    pub utilisation: f64,
    /// Mean over all requests.
    pub mean_wait_seconds: f64,
    /// Wait and service.
    pub mean_response_seconds: f64,
}

impl Queue {
    /// Work that comes, in servers.
    pub fn offered(&self) -> Result<f64, Refused> {
        let arrivals = positive("arrivals-per-second", self.arrivals_per_second)?;
        finite("load", arrivals * positive("service-seconds", self.service_seconds)?)
    }

    /// The fewest servers with which the queue does not grow without end.
    pub fn least_servers(&self) -> Result<u64, Refused> {
        let offered = self.offered()?;
        if offered >= SERVERS_MAX as f64 {
            return Err(refused(
                "arrivals-per-second",
                format!("keeps {offered:.0} servers busy: at most {SERVERS_MAX} are looked at"),
            ));
        }
        Ok(offered.floor() as u64 + 1)
    }

    /// M/M/c; none where the queue grows without end.
    pub fn exponential(&self) -> Result<Option<Waiting>, Refused> {
        let offered = self.offered()?;
        let servers = at_least_one("servers", self.servers)?;
        if servers > SERVERS_MAX {
            return Err(refused("servers", format!("is {servers}: at most {SERVERS_MAX} are looked at")));
        }
        Ok((offered < servers as f64).then(|| self.waiting(erlang_b(offered, servers), servers)))
    }

    /// What callers see, by the part that would be lost if nobody could wait.
    fn waiting(&self, lost: f64, servers: u64) -> Waiting {
        let utilisation = self.arrivals_per_second * self.service_seconds / servers as f64;
        let wait_probability = lost / (1.0 - utilisation * (1.0 - lost));
        let spare = servers as f64 / self.service_seconds - self.arrivals_per_second;
        let mean_wait_seconds = wait_probability / spare;
        Waiting {
            utilisation,
            wait_probability,
            mean_wait_seconds,
            wait_p99_seconds: (libm::log(wait_probability / TAIL) / spare).max(0.0),
            mean_response_seconds: mean_wait_seconds + self.service_seconds,
            mean_waiting: self.arrivals_per_second * mean_wait_seconds,
            response_p99_seconds: (servers == 1).then(|| libm::log(1.0 / TAIL) / spare),
        }
    }

    /// The fewest servers with which one request in a hundred waits longer than this.
    pub fn servers_for(&self, wait_p99_seconds: f64) -> Result<u64, Refused> {
        let target = super::input::not_negative("wait-p99-seconds", wait_p99_seconds)?;
        let (offered, least) = (self.offered()?, self.least_servers()?);
        let mut lost = erlang_b(offered, least);
        for servers in least..=SERVERS_MAX {
            if self.waiting(lost, servers).wait_p99_seconds <= target {
                return Ok(servers);
            }
            lost = next_erlang_b(lost, offered, servers + 1);
        }
        Err(refused("wait-p99-seconds", format!("needs more than {SERVERS_MAX} servers")))
    }

    /// M/D/1; none where the queue grows without end, and for one server only.
    pub fn constant(&self) -> Result<Option<Constant>, Refused> {
        let utilisation = self.offered()?;
        if self.servers != 1 {
            return Err(refused(
                "servers",
                format!("is {}: the closed form for constant times is for 1", self.servers),
            ));
        }
        let wait = utilisation * self.service_seconds / (2.0 * (1.0 - utilisation));
        Ok((utilisation < 1.0).then_some(Constant {
            utilisation,
            mean_wait_seconds: wait,
            mean_response_seconds: wait + self.service_seconds,
        }))
    }
}

/// Erlang's B: what is lost if nobody waits.
fn erlang_b(offered: f64, servers: u64) -> f64 {
    (1..=servers).fold(1.0, |lost, servers| next_erlang_b(lost, offered, servers))
}

fn next_erlang_b(lost: f64, offered: f64, servers: u64) -> f64 {
    offered * lost / (servers as f64 + offered * lost)
}
