//! Which replicas there are, as the configuration names them and as names resolve.

use super::{
    address::ReplicaUrl,
    prompt::{hash_of, key_of},
};
use axum::http::{HeaderValue, Uri, uri::Authority};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
};
use tokio::sync::Notify;
use warmset_core::routing::{ReplicaId, ReplicaSettings};

/// Requests that a replica is taken to compute at a time unless it is known.
const SLOTS_DEFAULT: u32 = 64;
const WEIGHT_MAX: f64 = 1_000.0;
/// Replicas of one gateway.
pub const REPLICAS_MAX: usize = 1024;

/// A replica as the operator describes it.
#[derive(Clone, PartialEq)]
pub struct ReplicaConfig {
    /// Where it is.
    pub url: ReplicaUrl,
    /// Its own credential.
    pub api_key: Option<String>,
    /// The models it answers for; without, those it lists.
    pub models: Vec<String>,
    /// Requests it computes at a time.
    pub slots: Option<u32>,
    /// Tokens of prompts that it keeps.
    pub capacity_tokens: Option<u64>,
    /// Its share of the traffic, compared with others.
    pub weight: f64,
}

impl fmt::Debug for ReplicaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaConfig").field("url", &self.url).finish_non_exhaustive()
    }
}

impl ReplicaConfig {
    /// The key that an environment variable of this process holds.
    pub fn key_from_environment(name: &str) -> Result<String, String> {
        match std::env::var(name) {
            Ok(key) if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(key),
            Ok(_) | Err(std::env::VarError::NotUnicode(_)) => {
                Err(format!("the environment variable {name} holds no key"))
            }
            Err(std::env::VarError::NotPresent) => {
                Err(format!("there is no environment variable {name}: set it to the replica's key"))
            }
        }
    }

    /// Whether this is a weight.
    pub fn check_weight(weight: f64) -> Result<f64, String> {
        let allowed = weight > 0.0 && weight <= WEIGHT_MAX;
        allowed.then_some(weight).ok_or_else(|| format!("a weight must be above 0 and at most {WEIGHT_MAX}"))
    }

    /// A replica of which only the address is known.
    pub fn new(url: ReplicaUrl) -> Self {
        Self { url, api_key: None, models: Vec::new(), slots: None, capacity_tokens: None, weight: 1.0 }
    }
}

/// A configured replica at one place: without one, wherever its URL leads.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) config: ReplicaConfig,
    pub(super) at: Option<SocketAddr>,
}

/// One server that can be asked.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) id: ReplicaId,
    /// Its URL, and the address that it resolved to if there is more to it.
    pub(super) name: Arc<str>,
    pub(super) config: ReplicaConfig,
    /// Where its name led to, if that was looked up.
    pub(super) at: Option<SocketAddr>,
    /// Where to connect to.
    authority: Authority,
    /// The `host` of requests.
    pub(super) host: HeaderValue,
    pub(super) authorization: Option<HeaderValue>,
    heard: Mutex<Heard>,
    /// What the router was told of it last.
    entered: Mutex<Option<ReplicaSettings>>,
    /// Nobody took a connection there, as a request found out: whoever does next is another life.
    pub(super) gone: AtomicBool,
    /// It said that it has not what it listed.
    pub(super) list_is_old: AtomicBool,
    /// Somebody wants to know now how it is.
    pub(super) look_now: Notify,
}

/// What a replica says of itself.
#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) models: BTreeSet<String>,
    pub(super) slots: Option<u32>,
    pub(super) capacity_tokens: Option<u64>,
    pub(super) healthy: bool,
    /// Why it cannot be asked.
    pub(super) trouble: Option<String>,
}

impl Endpoint {
    /// Whatever passed for a URL has an authority and is a name; a key was checked when it was read.
    fn new(id: ReplicaId, wanted: &Wanted) -> Option<Self> {
        let Wanted { config, at } = wanted;
        let own = config.url.authority()?;
        let (name, authority) = match at {
            Some(at) => (format!("{}@{at}", config.url), at.to_string().parse().ok()?),
            None => (config.url.to_string(), own.clone()),
        };
        let authorization = config.api_key.as_ref().and_then(|key| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Some(Self {
            id,
            name: name.into(),
            config: config.clone(),
            at: *at,
            authority,
            host: HeaderValue::from_str(own.as_str()).ok()?,
            authorization,
            heard: Mutex::default(),
            entered: Mutex::default(),
            gone: AtomicBool::new(false),
            list_is_old: AtomicBool::new(false),
            look_now: Notify::new(),
        })
    }

    pub(super) fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn entered(&self) -> MutexGuard<'_, Option<ReplicaSettings>> {
        self.entered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The models that it answers for.
    pub(super) fn models(&self) -> BTreeSet<String> {
        if self.config.models.is_empty() {
            self.heard().models.clone()
        } else {
            self.config.models.iter().cloned().collect()
        }
    }

    /// What the router must know of it.
    pub(super) fn settings(&self) -> ReplicaSettings {
        // A request may leave its model open: then any replica can say what it makes of it.
        let models = self.models().iter().map(|model| key_of(model)).chain([key_of("")]).collect();
        let heard = self.heard();
        ReplicaSettings {
            identity: hash_of(self.name.as_bytes()),
            models,
            slots: self.config.slots.or(heard.slots).unwrap_or(SLOTS_DEFAULT),
            weight: self.config.weight,
            capacity_tokens: self.config.capacity_tokens.or(heard.capacity_tokens),
            prefill_tokens_per_second: None,
        }
    }

    /// The address of a route at this replica.
    pub(super) fn uri(&self, path_and_query: &str) -> Result<Uri, axum::http::Error> {
        let url = &self.config.url;
        let scheme = if url.is_https() { "https" } else { "http" };
        let path = match url.prefix() {
            "" => path_and_query.to_owned(),
            prefix => format!("{prefix}{path_and_query}"),
        };
        Uri::builder().scheme(scheme).authority(self.authority.clone()).path_and_query(path).build()
    }
}

/// All replicas. Numbers are not given twice.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    by_id: BTreeMap<ReplicaId, Arc<Endpoint>>,
    next: u32,
}

/// What a change of the list came to.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) added: Vec<Arc<Endpoint>>,
    pub(super) removed: Vec<ReplicaId>,
}

impl Endpoints {
    pub(super) fn get(&self, id: ReplicaId) -> Option<Arc<Endpoint>> {
        self.by_id.get(&id).cloned()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.by_id.values()
    }

    /// Makes this the list: for each configured replica where it is now. What was there stays what it was.
    pub(super) fn become_list(&mut self, wanted: &[Wanted]) -> Changes {
        let mut changes = Changes::default();
        let same = |endpoint: &Endpoint, wanted: &Wanted| endpoint.config == wanted.config && endpoint.at == wanted.at;
        self.by_id.retain(|id, endpoint| {
            let stays = wanted.iter().any(|wanted| same(endpoint, wanted));
            if !stays {
                changes.removed.push(*id);
            }
            stays
        });
        for wanted in wanted {
            let known = self.by_id.values().any(|endpoint| same(endpoint, wanted));
            if known || self.by_id.len() >= REPLICAS_MAX {
                continue;
            }
            let id = ReplicaId(self.next);
            let Some(endpoint) = Endpoint::new(id, wanted) else { continue };
            self.next += 1;
            let endpoint = Arc::new(endpoint);
            self.by_id.insert(id, endpoint.clone());
            changes.added.push(endpoint);
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(url: &str, at: Option<&str>) -> Wanted {
        Wanted { config: ReplicaConfig::new(url.parse().unwrap()), at: at.map(|at| at.parse().unwrap()) }
    }

    #[test]
    fn a_list_that_changes_keeps_what_is_in_both() {
        let mut endpoints = Endpoints::default();
        let first = endpoints.become_list(&[wanted("http://1.1.1.1:1", None), wanted("http://a:1", Some("2.2.2.2:1"))]);
        assert_eq!((first.added.len(), first.removed.len()), (2, 0));
        let second = endpoints.become_list(&[
            wanted("http://a:1", Some("2.2.2.2:1")),
            wanted("http://a:1", Some("3.3.3.3:1")),
            wanted("http://a:1", Some("3.3.3.3:1")),
        ]);
        assert_eq!(second.removed, [ReplicaId(0)]);
        let added: Vec<&str> = second.added.iter().map(|endpoint| &*endpoint.name).collect();
        assert_eq!(added, ["http://a:1@3.3.3.3:1"], "a place that is named twice is one replica");
        assert_eq!(second.added[0].id, ReplicaId(2), "numbers are not given twice");
        let other = ReplicaConfig { weight: 2.0, ..second.added[0].config.clone() };
        let third = endpoints.become_list(&[Wanted { config: other, at: second.added[0].at }]);
        assert_eq!((third.added.len(), third.removed.len()), (1, 2), "configured otherwise it is another one");
    }
}
