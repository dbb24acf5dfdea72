//! Which replicas there are: the configured ones, each at every address that its name stands for.
//!
//! Names are looked up beside each other, and nothing but what needs their addresses waits for them: the system's
//! resolver takes as long as it likes, and cannot be told to stop.

use super::{
    Proxy,
    replica::{ReplicaConfig, Wanted},
    watch,
};
use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, join_all},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{sync::Semaphore, task::JoinSet};

/// Names that are looked up at a time: each takes a thread until the resolver lets go of it.
const LOOKUPS_MAX: usize = 64;
/// Addresses of one name.
const ADDRESSES_MAX: usize = 256;

type Resolve = dyn Fn(String, u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync;

/// What names stand for.
#[derive(Clone)]
pub struct Resolver(Arc<Resolve>);

impl Resolver {
    /// One that asks this for a host and its port.
    pub fn new(
        resolve: impl Fn(String, u16) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(resolve))
    }

    /// The one of this machine.
    pub fn system() -> Self {
        Self::new(|host, port| async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) }.boxed())
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

type Addresses = BTreeSet<SocketAddr>;
type Lookup = Shared<BoxFuture<'static, Option<Addresses>>>;
type UnderWay = Arc<Mutex<BTreeMap<(String, u16), Lookup>>>;

/// Why nothing, or not all, is sent to where a name leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Trouble {
    Unknown,
    Own,
}

/// Looks names up, each once at a time: one that hangs is not asked for again until it has come back.
#[derive(Debug)]
pub(super) struct Names {
    resolver: Resolver,
    under_way: UnderWay,
    room: Arc<Semaphore>,
    /// What was said of configured hosts: once, not at every look.
    troubles: Mutex<BTreeSet<(String, Trouble)>>,
}

impl Names {
    pub(super) fn new(resolver: Resolver) -> Self {
        let room = Arc::new(Semaphore::new(LOOKUPS_MAX));
        Self { resolver, under_way: Arc::default(), room, troubles: Mutex::default() }
    }

    /// Whether that is other than it was.
    fn is_news(&self, host: &str, trouble: Trouble, is_so: bool) -> bool {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let this = (host.to_owned(), trouble);
        if is_so { troubles.insert(this) } else { troubles.remove(&this) }
    }

    /// Forgets what was said of hosts that are not configured any more.
    fn keep(&self, configured: &[ReplicaConfig]) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.retain(|(host, _)| {
            configured.iter().any(|config| config.url.name().is_some_and(|(name, _)| name == host))
        });
    }

    /// The addresses of a name; none if they are not to be had in this time.
    async fn look_up(&self, (host, port): (&str, u16), patience: Duration) -> Option<Addresses> {
        let lookup = {
            let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
            let name = (host.to_owned(), port);
            under_way.entry(name.clone()).or_insert_with(|| self.begin(name)).clone()
        };
        tokio::time::timeout(patience, lookup).await.ok().flatten()
    }

    /// It goes on however long anybody waits for it.
    fn begin(&self, name: (String, u16)) -> Lookup {
        let (resolver, under_way, room) = (self.resolver.clone(), self.under_way.clone(), self.room.clone());
        let task = tokio::spawn(async move {
            let _room = room.acquire_owned().await.ok()?;
            let found = (resolver.0)(name.0.clone(), name.1).await;
            under_way.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            let addresses =
                found.inspect_err(|error| tracing::debug!(host = name.0, %error, "a name is not found")).ok()?;
            Some(addresses.into_iter().take(ADDRESSES_MAX).collect())
        });
        async move { task.await.ok().flatten() }.boxed().shared()
    }
}

/// Looks names up and lets the router know who came and who went. What is returned are the first looks at the new ones.
pub(super) async fn follow_list(proxy: &Arc<Proxy>) -> JoinSet<()> {
    let configured = proxy.configured().clone();
    proxy.names.keep(&configured);
    let wanted = join_all(configured.iter().map(|config| places(proxy, config))).await.concat();
    // Somebody may have changed the list meanwhile: then it is followed again at once by whoever did.
    let mut endpoints = proxy.endpoints.write().unwrap_or_else(PoisonError::into_inner);
    if *proxy.configured() != configured {
        return JoinSet::new();
    }
    let changes = endpoints.become_list(&wanted);
    drop(endpoints);
    for id in changes.removed {
        proxy.router().remove(id);
    }
    let mut looks = JoinSet::new();
    for endpoint in changes.added {
        let first = watch::begin(proxy, endpoint);
        looks.spawn(async move { drop(first.await) });
    }
    looks
}

/// Where a configured replica is. A name that cannot be looked up stands for what it stood for. One behind a
/// certificate is one replica: the certificate is the name's.
async fn places(proxy: &Proxy, config: &ReplicaConfig) -> Vec<Wanted> {
    let here = |at| Wanted { config: config.clone(), at };
    let Some(name) = config.url.name().filter(|_| !config.url.is_https()) else { return vec![here(None)] };
    let found = proxy.names.look_up(name, proxy.config.probe_timeout).await;
    let is_news = proxy.names.is_news(name.0, Trouble::Unknown, found.is_none());
    let addresses = match found {
        Some(addresses) => {
            if is_news {
                tracing::info!(host = name.0, "the name of a replica can be looked up again");
            }
            addresses
        }
        None => known(proxy, config, name.0, is_news),
    };
    let (own, others): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| proxy.config.own.contains(*address));
    if proxy.names.is_news(name.0, Trouble::Own, !own.is_empty()) && !own.is_empty() {
        tracing::warn!(host = name.0, addresses = ?own, "the name of a replica leads to this gateway itself: left out");
    }
    others.into_iter().map(|address| here(Some(address))).collect()
}

fn known(proxy: &Proxy, config: &ReplicaConfig, host: &str, is_news: bool) -> Addresses {
    let endpoints = proxy.endpoints();
    let known: Addresses =
        endpoints.all().filter(|endpoint| endpoint.config == *config).filter_map(|endpoint| endpoint.at).collect();
    match (known.is_empty(), is_news) {
        (true, true) => tracing::warn!(host, "the name of a replica cannot be looked up: nothing is sent there"),
        (true, false) => {}
        (false, _) => tracing::debug!(host, "the name of a replica cannot be looked up: it keeps its addresses"),
    }
    known
}

/// Refuses a list that has this gateway itself in it, as far as addresses tell.
pub(super) async fn refuse_own(proxy: &Proxy, replicas: &[ReplicaConfig]) -> Result<(), String> {
    let led_back = join_all(replicas.iter().map(async |replica| {
        let addresses = match (replica.url.address(), replica.url.name()) {
            (Some(address), _) => Addresses::from([address]),
            (None, Some(name)) => proxy.names.look_up(name, proxy.config.probe_timeout).await.unwrap_or_default(),
            (None, None) => Addresses::new(),
        };
        addresses.into_iter().find(|address| proxy.config.own.contains(*address)).map(|address| (replica, address))
    }));
    match led_back.await.into_iter().flatten().next() {
        Some((replica, address)) => Err(format!(
            "the replica {} is this gateway itself, which listens on {address}: give the address of a server behind it",
            replica.url
        )),
        None => Ok(()),
    }
}
