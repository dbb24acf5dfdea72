//! What names mean right now: a table in memory, replaced as a whole, so that one look-up sees one catalog state.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};
use warmset_core::{Digest, ModelName, gateway::Route};

/// One model as callers see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What the gateway machine must know of it. `route.name` is the name it is listed under.
    pub route: Route,
    /// Other names that mean the same digest.
    pub aliases: Vec<ModelName>,
    /// When it was added, in seconds since 1970.
    pub created_unix_seconds: u64,
}

/// One state of the catalog.
#[derive(Debug, Default)]
pub struct Snapshot {
    entries: Vec<Arc<Entry>>,
    by_name: BTreeMap<ModelName, Arc<Entry>>,
    names: BTreeMap<Digest, ModelName>,
}

impl Snapshot {
    fn new(entries: Vec<Entry>) -> Self {
        let mut snapshot = Self::default();
        for entry in entries {
            let entry = Arc::new(entry);
            snapshot.names.entry(entry.route.digest).or_insert_with(|| entry.route.name.clone());
            for name in std::iter::once(&entry.route.name).chain(&entry.aliases) {
                // A name listed first keeps its meaning; the catalog refuses duplicates before they come here.
                snapshot.by_name.entry(name.clone()).or_insert_with(|| entry.clone());
            }
            snapshot.entries.push(entry);
        }
        snapshot
    }

    /// All models, in the order of the catalog.
    pub fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// Every digest and the name it was added under.
    pub fn names(&self) -> &BTreeMap<Digest, ModelName> {
        &self.names
    }
}

/// The current state of the catalog, shared by all handlers.
#[derive(Debug, Default)]
pub struct Directory {
    current: RwLock<Arc<Snapshot>>,
}

impl Directory {
    /// Looks a name up as the caller wrote it. Texts that are no model names are simply unknown: nothing but this
    /// table is ever asked.
    pub fn resolve(&self, name: &str) -> Option<Arc<Entry>> {
        let name = ModelName::parse(name).ok()?;
        self.snapshot().by_name.get(&name).cloned()
    }

    /// The name a digest was added under, for messages and metrics.
    pub fn name_of(&self, digest: &Digest) -> Option<ModelName> {
        self.snapshot().names.get(digest).cloned()
    }

    /// The state as it is now; it does not change under the holder.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces everything in one step.
    pub(crate) fn replace(&self, entries: Vec<Entry>) -> Arc<Snapshot> {
        let next = Arc::new(Snapshot::new(entries));
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut current, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::{Priority, gateway::ColdPolicy};

    fn entry(name: &str, byte: u8, aliases: &[&str]) -> Entry {
        Entry {
            route: Route {
                digest: Digest([byte; 32]),
                name: ModelName::parse(name).unwrap(),
                priority: Priority::Standard,
                max_concurrency: 4,
                critical_reserve: 0,
                cold: ColdPolicy::Wait,
                rewarm_seconds: 1.0,
            },
            aliases: aliases.iter().map(|alias| ModelName::parse(alias).unwrap()).collect(),
            created_unix_seconds: 7,
        }
    }

    #[test]
    fn names_and_aliases_resolve_and_hostile_texts_are_unknown() {
        let directory = Directory::default();
        directory.replace(vec![entry("org/a", 1, &["a", "best"]), entry("b", 2, &[])]);
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
        directory.replace(vec![entry("a", 1, &[])]);
        let before = directory.snapshot();
        directory.replace(vec![]);
        assert_eq!(before.entries().len(), 1);
        assert!(directory.resolve("a").is_none());
    }
}
