//! What names mean right now: a table in memory, replaced as a whole, so that one look-up sees one catalog state.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::watch;
use warmset_core::{
    Digest, ModelName,
    gateway::{ColdPolicy, Route},
};

/// Callers that wait for held names together.
const HELD_CALLERS_MAX: usize = 1024;

/// One model as callers see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What the gateway machine must know of it. `route.name` is the name it is listed under.
    pub route: Route,
    /// Other names that mean the same digest.
    pub aliases: Vec<ModelName>,
    /// When it was added, in seconds since 1970.
    pub created_unix_seconds: u64,
    /// Its name is about to stand for another digest, and nobody answers until then: who asks for it waits.
    pub held: bool,
    /// Which model answers if this one cannot.
    pub fallback: Option<ModelName>,
}

/// One state of the catalog.
#[derive(Debug, Default)]
pub struct Snapshot {
    entries: Vec<Arc<Entry>>,
    /// Digests that no name means any more and that still answer whoever was admitted before.
    retained: Vec<Route>,
    by_name: BTreeMap<ModelName, Arc<Entry>>,
    names: BTreeMap<Digest, ModelName>,
    has_fallbacks: bool,
}

impl Snapshot {
    fn new(entries: Vec<Entry>, retained: Vec<Route>) -> Self {
        let mut snapshot = Self::default();
        for entry in entries {
            let entry = Arc::new(entry);
            snapshot.names.entry(entry.route.digest).or_insert_with(|| entry.route.name.clone());
            for name in std::iter::once(&entry.route.name).chain(&entry.aliases) {
                // A name listed first keeps its meaning; the catalog refuses duplicates before they come here.
                snapshot.by_name.entry(name.clone()).or_insert_with(|| entry.clone());
            }
            snapshot.has_fallbacks |= entry.fallback.is_some();
            snapshot.entries.push(entry);
        }
        for route in &retained {
            snapshot.names.entry(route.digest).or_insert_with(|| route.name.clone());
        }
        snapshot.retained = retained;
        snapshot
    }

    /// What the gateway serves: of what names mean, and of what they meant.
    pub(crate) fn routes(&self) -> impl Iterator<Item = &Route> {
        self.entries.iter().map(|entry| &entry.route).chain(&self.retained)
    }

    fn resolve(&self, name: &str) -> Option<&Arc<Entry>> {
        self.by_name.get(&ModelName::parse(name).ok()?)
    }

    /// All models, in the order of the catalog.
    pub fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// Whether any model names one that answers in its place.
    pub(crate) fn has_fallbacks(&self) -> bool {
        self.has_fallbacks
    }

    /// Every digest and the name it was added under.
    pub fn names(&self) -> &BTreeMap<Digest, ModelName> {
        &self.names
    }
}

/// The current state of the catalog, shared by all handlers.
#[derive(Debug, Default)]
pub struct Directory {
    current: watch::Sender<Arc<Snapshot>>,
    /// Callers that wait for a held name.
    waiting: AtomicUsize,
    /// Names that lead nowhere yet, and why.
    expected: RwLock<BTreeMap<ModelName, String>>,
}

/// Why a name leads to nothing now.
#[derive(Debug, Clone, PartialEq)]
pub enum Unresolved {
    /// No model has it.
    Unknown,
    /// The model that will have it is not here yet.
    Expected {
        /// What is being done about it.
        reason: String,
    },
    /// It is held, and its callers do not wait, or too many do, or this one has waited long enough.
    Held {
        /// What a load of the model takes.
        rewarm_seconds: f64,
        /// Whether it would have been answered, had it waited longer.
        waits: bool,
    },
}

impl Directory {
    /// Looks a name up as the caller wrote it. Texts that are no model names are simply unknown: nothing but this
    /// table is ever asked.
    pub fn resolve(&self, name: &str) -> Option<Arc<Entry>> {
        self.snapshot().resolve(name).cloned()
    }

    /// Looks a name up, waiting while it is held. Whoever has waited gets what the name means afterwards.
    pub async fn resolve_waiting(&self, name: &str, patience: Duration) -> Result<Arc<Entry>, Unresolved> {
        let entry = self.resolve(name).ok_or_else(|| self.unresolved(name))?;
        if !entry.held {
            return Ok(entry);
        }
        let held = |waits| Unresolved::Held { rewarm_seconds: entry.route.rewarm_seconds, waits };
        let place = Place::take(&self.waiting).filter(|_| entry.route.cold != ColdPolicy::Reject);
        let place = place.ok_or(held(false))?;
        let mut changes = self.current.subscribe();
        let settled = changes.wait_for(|snapshot| snapshot.resolve(name).is_none_or(|entry| !entry.held));
        let waited = tokio::time::timeout(patience, settled).await;
        drop(place);
        match waited {
            Ok(_) => self.resolve(name).ok_or_else(|| self.unresolved(name)),
            Err(_) => Err(held(true)),
        }
    }

    /// Names that no model has and some will have.
    pub fn expect(&self, names: BTreeMap<ModelName, String>) {
        *self.expected.write().unwrap_or_else(PoisonError::into_inner) = names;
    }

    fn unresolved(&self, name: &str) -> Unresolved {
        let expected = self.expected.read().unwrap_or_else(PoisonError::into_inner);
        let reason = ModelName::parse(name).ok().and_then(|name| expected.get(&name).cloned());
        reason.map_or(Unresolved::Unknown, |reason| Unresolved::Expected { reason })
    }

    /// The name a digest was added under, for messages and metrics.
    pub fn name_of(&self, digest: &Digest) -> Option<ModelName> {
        self.snapshot().names.get(digest).cloned()
    }

    /// The state as it is now; it does not change under the holder.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.borrow().clone()
    }

    /// Replaces everything in one step.
    pub(crate) fn replace(&self, entries: Vec<Entry>, retained: Vec<Route>) -> Arc<Snapshot> {
        self.current.send_replace(Arc::new(Snapshot::new(entries, retained)))
    }
}

/// One of the places of callers that wait for held names.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(places: &'a AtomicUsize) -> Option<Self> {
        let place = Self(places);
        (places.fetch_add(1, Ordering::Relaxed) < HELD_CALLERS_MAX).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use warmset_core::{Priority, gateway::ColdPolicy, targets::Targets};

    fn entry(name: &str, byte: u8, aliases: &[&str]) -> Entry {
        Entry {
            route: Route {
                digest: Digest([byte; 32]),
                name: ModelName::parse(name).unwrap(),
                priority: Priority::Standard,
                max_concurrency: 4,
                critical_reserve: 0,
                parks: false,
                cold: ColdPolicy::Wait,
                rewarm_seconds: 1.0,
                targets: Targets::default(),
            },
            aliases: aliases.iter().map(|alias| ModelName::parse(alias).unwrap()).collect(),
            created_unix_seconds: 7,
            held: false,
            fallback: None,
        }
    }

    #[test]
    fn names_and_aliases_resolve_and_hostile_texts_are_unknown() {
        let directory = Directory::default();
        directory.replace(vec![entry("org/a", 1, &["a", "best"]), entry("b", 2, &[])], vec![]);
        for name in ["org/a", "a", "best"] {
            assert_eq!(directory.resolve(name).unwrap().route.digest, Digest([1; 32]), "{name}");
        }
        let long = "a".repeat(4096);
        for bad in ["../../etc/passwd", "a/..%2f", "CON", "a\0", "A", "\u{0430}", "", long.as_str()] {
            assert!(directory.resolve(bad).is_none(), "{bad}");
        }
        assert_eq!(directory.name_of(&Digest([2; 32])).unwrap().as_str(), "b");
    }

    #[test]
    fn a_snapshot_does_not_change_under_its_holder() {
        let directory = Directory::default();
        directory.replace(vec![entry("a", 1, &[])], vec![]);
        let before = directory.snapshot();
        directory.replace(vec![], vec![]);
        assert_eq!(before.entries().len(), 1);
        assert!(directory.resolve("a").is_none());
    }

    #[tokio::test]
    async fn who_asks_for_a_held_name_gets_what_it_means_afterwards() {
        let directory = Directory::default();
        let held = || Entry { held: true, ..entry("a", 1, &["b"]) };
        directory.replace(vec![held()], vec![]);
        let asking = directory.resolve_waiting("b", Duration::from_secs(60));
        tokio::pin!(asking);
        assert!((&mut asking).now_or_never().is_none());
        // Another change does not let anybody through.
        directory.replace(vec![held(), entry("c", 3, &[])], vec![]);
        assert!((&mut asking).now_or_never().is_none());
        directory.replace(vec![entry("a", 2, &["b"])], vec![entry("a", 1, &[]).route]);
        assert_eq!(asking.await.unwrap().route.digest, Digest([2; 32]));
        assert_eq!(directory.name_of(&Digest([1; 32])).unwrap().as_str(), "a", "it still answers some");
        assert_eq!(directory.snapshot().routes().count(), 2);
    }

    #[tokio::test]
    async fn a_name_that_is_expected_is_not_unknown() {
        let directory = Directory::default();
        let reason = "it is being fetched".to_owned();
        directory.expect(BTreeMap::from([(ModelName::parse("far").unwrap(), reason.clone())]));
        let asked = async |name| directory.resolve_waiting(name, Duration::ZERO).await;
        assert_eq!(asked("far").await, Err(Unresolved::Expected { reason }));
        assert_eq!(asked("x").await, Err(Unresolved::Unknown));
        directory.replace(vec![entry("far", 1, &[])], vec![]);
        assert!(asked("far").await.is_ok(), "what is here is here");
    }

    #[tokio::test]
    async fn waiting_for_a_held_name_has_its_limits() {
        let directory = Directory::default();
        directory.replace(vec![Entry { held: true, ..entry("a", 1, &[]) }], vec![]);
        let held = |waits| Unresolved::Held { rewarm_seconds: 1.0, waits };
        assert_eq!(directory.resolve_waiting("a", Duration::ZERO).await, Err(held(true)));
        assert_eq!(directory.resolve_waiting("x", Duration::from_secs(1)).await, Err(Unresolved::Unknown));
        let places: Vec<Place<'_>> = (0..HELD_CALLERS_MAX).filter_map(|_| Place::take(&directory.waiting)).collect();
        assert_eq!(places.len(), HELD_CALLERS_MAX);
        assert_eq!(directory.resolve_waiting("a", Duration::from_secs(60)).await, Err(held(false)));
        drop(places);
        assert_eq!(directory.waiting.load(Ordering::Relaxed), 0);
        let mut refusing = entry("a", 1, &[]);
        (refusing.held, refusing.route.cold) = (true, ColdPolicy::Reject);
        directory.replace(vec![refusing], vec![]);
        assert_eq!(directory.resolve_waiting("a", Duration::from_secs(60)).await, Err(held(false)));
    }
}
