//! What long prompts that tenants share take on replicas, and what sending a tenant to where its prompt is does to the load.
//!
//! Any replica for any request: all prompts on every replica, or a hit with probability `1 / replicas` where each has room for its share
//! only. Each tenant at one replica: a replica keeps its share of them. A tenant with a share `h` of the requests gives its replica
//! `h + (1 - h) / replicas` of the load; bounded to `c` times the mean (consistent hashing with bounded loads, Mirrokni et al., arXiv
//! 1608.01350), it needs `ceil(h * replicas / c)` of them.

use super::input::{Refused, at_least_one, positive, product, refused, share_or_none, whole};
use serde::Serialize;

/// Tenants and replicas.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prefixes {
    /// Tenants, each with a prompt of its own.
    pub tenants: u64,
    /// KV of one prompt.
    pub prefix_bytes: u64,
    /// Replicas.
    pub replicas: u64,
    /// Part of the requests that one of the tenants has.
    pub hot_share: f64,
    /// The most load of a replica, by the mean of all.
    pub load_bound: f64,
    /// KV for prompts on one replica, if known.
    pub room_bytes: Option<u64>,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// KV of one prompt.
    pub prefix_bytes: u64,
    /// All prompts on one replica.
    pub all_prefixes_bytes: u64,
    /// All prompts on all replicas.
    pub fleet_bytes: u64,
    /// A replica's share of them.
    pub affinity_bytes_per_replica: u64,
    /// Prompts that a replica has room for.
    pub prefixes_per_replica: Option<u64>,
    /// Whether a replica has room for its share.
    pub affinity_fits: Option<bool>,
    /// How likely the replica that has a prompt is the one that is asked, if all take turns.
    pub round_robin_same_replica: f64,
    /// Part of all requests at the replica of the hot tenant.
    pub hot_replica_share: f64,
    /// The same by the mean of all replicas.
    pub hot_replica_times_mean: f64,
    /// The most that the bound lets one have.
    pub bound_share: f64,
    /// Replicas that the hot tenant needs within the bound.
    pub replicas_for_hot_tenant: u64,
}

impl Prefixes {
    /// Does it.
    pub fn answer(&self) -> Result<Answer, Refused> {
        let tenants = at_least_one("tenants", self.tenants)?;
        let replicas = at_least_one("replicas", self.replicas)?;
        let prefix = at_least_one("prefix bytes", self.prefix_bytes)?;
        let hot = share_or_none("hot-share", self.hot_share)?;
        if positive("load-bound", self.load_bound)? < 1.0 {
            return Err(refused("load-bound", format!("is {}: below 1 not all load has a place", self.load_bound)));
        }
        let all = product("bytes of all prefixes", &[tenants, prefix])?;
        let count = replicas as f64;
        let share = hot + (1.0 - hot) / count;
        let bound = (self.load_bound / count).min(1.0);
        let room = self.room_bytes.map(|bytes| bytes / prefix);
        Ok(Answer {
            prefix_bytes: prefix,
            all_prefixes_bytes: all,
            fleet_bytes: product("bytes of the fleet", &[all, replicas])?,
            affinity_bytes_per_replica: all.div_ceil(replicas),
            prefixes_per_replica: room,
            affinity_fits: room.map(|prefixes| prefixes >= tenants.div_ceil(replicas)),
            round_robin_same_replica: 1.0 / count,
            hot_replica_share: share,
            hot_replica_times_mean: share * count,
            bound_share: bound,
            replicas_for_hot_tenant: replicas_within(hot, self.load_bound, replicas)?,
        })
    }
}

/// `ceil(share * replicas / bound)`, in whole millionths so that no digit of floating point adds a replica.
fn replicas_within(share: f64, bound: f64, replicas: u64) -> Result<u64, Refused> {
    let (share, bound) = (whole("hot-share", (share * 1e6).round())?, whole("load-bound", (bound * 1e6).round())?);
    Ok(product("replicas", &[share, replicas])?.div_ceil(bound).clamp(1, replicas))
}
