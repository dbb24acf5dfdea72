//! Which replicas there are, as the configuration names them and as names resolve.

use super::prompt::{hash_of, key_of};
use axum::http::{HeaderValue, Uri, uri::Authority};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use warmset_core::routing::{ReplicaId, ReplicaSettings};

/// Requests that a replica is taken to compute at a time unless it is known.
const SLOTS_DEFAULT: u32 = 64;
const WEIGHT_MAX: f64 = 1_000.0;
/// Replicas of one gateway.
pub const REPLICAS_MAX: usize = 1024;

/// A replica as the operator describes it.
#[derive(Clone, PartialEq)]
pub struct ReplicaConfig {
    /// Where it listens, without the path of a route: `http://host:port`, or `https://host/prefix`.
    pub url: String,
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
    pub fn new(url: &str) -> Self {
        Self { url: url.to_owned(), api_key: None, models: Vec::new(), slots: None, capacity_tokens: None, weight: 1.0 }
    }

    /// Where it is; an error says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        Target::of(self).map(drop)
    }
}

/// A configured address, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) https: bool,
    pub(super) authority: Authority,
    /// What goes before the path of a route.
    pub(super) prefix: String,
}

impl Target {
    pub(super) fn of(config: &ReplicaConfig) -> Result<Self, String> {
        let url = &config.url;
        let uri: Uri = url.parse().map_err(|_| format!("{url:?} is no URL: write http://HOST:PORT"))?;
        let https = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(format!("{url:?} must begin with http:// or https://")),
        };
        let authority = uri.authority().cloned().ok_or_else(|| format!("{url:?} names no host"))?;
        if authority.as_str().contains('@') {
            return Err(format!("{url:?} must not contain a credential: give it with api_key_env"));
        }
        if uri.query().is_some() {
            return Err(format!("{url:?} must not have a query"));
        }
        let prefix = uri.path().trim_end_matches('/');
        // Routes bring their own version.
        let prefix = prefix.strip_suffix("/v1").unwrap_or(prefix).to_owned();
        Ok(Self { https, authority, prefix })
    }

    /// The name that has to be looked up, with its port: none if it is an address, or checked by a certificate.
    pub(super) fn name(&self) -> Option<(String, u16)> {
        let host = self.authority.host();
        let literal = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok();
        (!self.https && !literal).then(|| (host.to_owned(), self.authority.port_u16().unwrap_or(80)))
    }
}

/// One server that can be asked.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) id: ReplicaId,
    /// Its URL, and the address that it resolved to if there is more to it.
    pub(super) name: Arc<str>,
    pub(super) config: ReplicaConfig,
    pub(super) target: Target,
    /// Where to connect to.
    pub(super) authority: Authority,
    pub(super) authorization: Option<HeaderValue>,
    heard: Mutex<Heard>,
}

/// What a replica says of itself.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Heard {
    pub(super) models: BTreeSet<String>,
    pub(super) slots: Option<u32>,
    pub(super) capacity_tokens: Option<u64>,
    pub(super) healthy: bool,
    /// Why it cannot be asked.
    pub(super) trouble: Option<String>,
}

impl Endpoint {
    pub(super) fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
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
        let scheme = if self.target.https { "https" } else { "http" };
        let path = if self.target.prefix.is_empty() {
            path_and_query.to_owned()
        } else {
            format!("{}{path_and_query}", self.target.prefix)
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
    pub(super) fn become_list(&mut self, wanted: &[(ReplicaConfig, Target, Option<Authority>)]) -> Changes {
        let mut changes = Changes::default();
        let same = |endpoint: &Endpoint, (config, _, at): &(ReplicaConfig, Target, Option<Authority>)| {
            endpoint.config == *config && at.as_ref().is_none_or(|at| *at == endpoint.authority)
        };
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
            let (config, target, at) = wanted;
            let id = ReplicaId(self.next);
            self.next += 1;
            let name = match at {
                Some(at) => format!("{}@{at}", config.url),
                None => config.url.clone(),
            };
            let authorization = config.api_key.as_ref().and_then(|key| {
                let mut value = HeaderValue::from_str(&format!("Bearer {key}")).ok()?;
                value.set_sensitive(true);
                Some(value)
            });
            let endpoint = Arc::new(Endpoint {
                id,
                name: name.into(),
                config: config.clone(),
                target: target.clone(),
                authority: at.clone().unwrap_or_else(|| target.authority.clone()),
                authorization,
                heard: Mutex::default(),
            });
            self.by_id.insert(id, endpoint.clone());
            changes.added.push(endpoint);
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(url: &str, at: Option<&str>) -> (ReplicaConfig, Target, Option<Authority>) {
        let config = ReplicaConfig::new(url);
        let target = Target::of(&config).unwrap();
        (config, target, at.map(|at| at.parse().unwrap()))
    }

    #[test]
    fn addresses_are_checked() {
        for bad in ["localhost:8000", "ftp://a", "http://", "http://a:b@c", "http://a?b=c", "/a"] {
            assert!(ReplicaConfig::new(bad).check().is_err(), "{bad}");
        }
        let (_, target, _) = wanted("https://api.example/base/v1/", None);
        assert_eq!((target.https, target.prefix.as_str(), target.name()), (true, "/base", None));
        assert_eq!(wanted("http://a:81", None).1.name(), Some(("a".into(), 81)));
        assert_eq!(wanted("http://127.0.0.1:81", None).1.name(), None);
        assert_eq!(wanted("http://[::1]:81", None).1.name(), None);
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
        let other = ReplicaConfig { weight: 2.0, ..ReplicaConfig::new("http://a:1") };
        let target = Target::of(&other).unwrap();
        let third = endpoints.become_list(&[(other, target, Some("2.2.2.2:1".parse().unwrap()))]);
        assert_eq!((third.added.len(), third.removed.len()), (1, 2), "configured otherwise it is another one");
    }
}
