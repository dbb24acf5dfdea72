//! Which names are changing their meaning on this server, and who of the old is still answered.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use warmset_core::{Digest, ModelName, gateway::Route};

/// Shared by everything that publishes names.
#[derive(Debug, Default)]
pub(crate) struct Promotions {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: BTreeSet<ModelName>,
    held: BTreeSet<ModelName>,
    /// Versions that no name means: not yet, or not any more. The number tells one stay from a later one.
    unnamed: BTreeMap<Digest, (Route, u64)>,
    last_stay: u64,
}

/// A promotion that runs. Dropping it lets the next one begin.
pub(crate) struct Running {
    promotions: Arc<Promotions>,
    name: ModelName,
}

impl Promotions {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins one; none while another one of the same name runs.
    pub(crate) fn begin(self: &Arc<Self>, name: &ModelName) -> Option<Running> {
        let begun = self.state().running.insert(name.clone());
        begun.then(|| Running { promotions: self.clone(), name: name.clone() })
    }

    /// Whether a name is changing its meaning right now.
    pub(crate) fn is_running(&self, name: &ModelName) -> bool {
        self.state().running.contains(name)
    }

    /// Lets callers of a name wait, or not any more.
    pub(crate) fn hold(&self, name: &ModelName, hold: bool) {
        let mut state = self.state();
        if hold {
            state.held.insert(name.clone());
        } else {
            state.held.remove(name);
        }
    }

    /// Whether callers of a name wait.
    pub(crate) fn is_held(&self, name: &ModelName) -> bool {
        self.state().held.contains(name)
    }

    /// Keeps a version that no name means; what is returned ends this stay and no later one.
    pub(crate) fn keep(&self, route: Route) -> u64 {
        let mut state = self.state();
        state.last_stay += 1;
        let stay = state.last_stay;
        state.unnamed.insert(route.digest, (route, stay));
        stay
    }

    /// Whether a version is kept.
    pub(crate) fn is_kept(&self, digest: &Digest) -> bool {
        self.state().unnamed.contains_key(digest)
    }

    /// Whether this stay has not ended.
    pub(crate) fn stays(&self, digest: &Digest, stay: u64) -> bool {
        self.state().unnamed.get(digest).is_some_and(|(_, current)| *current == stay)
    }

    /// Ends whatever stay a version has.
    pub(crate) fn let_go(&self, digest: &Digest) {
        self.state().unnamed.remove(digest);
    }

    /// Versions that no name means and that are kept.
    pub(crate) fn unnamed(&self) -> Vec<Route> {
        self.state().unnamed.values().map(|(route, _)| route.clone()).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = self.promotions.state();
        state.running.remove(&self.name);
        state.held.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::{Priority, gateway::ColdPolicy, targets::Targets};

    fn route(byte: u8) -> Route {
        Route {
            digest: Digest([byte; 32]),
            name: ModelName::parse("a").unwrap(),
            priority: Priority::Standard,
            max_concurrency: 1,
            critical_reserve: 0,
            parks: false,
            cold: ColdPolicy::Wait,
            rewarm_seconds: 1.0,
            targets: Targets::default(),
        }
    }

    #[test]
    fn one_promotion_of_a_name_runs_at_a_time() {
        let promotions = Arc::new(Promotions::default());
        let (a, b) = (ModelName::parse("a").unwrap(), ModelName::parse("b").unwrap());
        let first = promotions.begin(&a).unwrap();
        assert!(promotions.begin(&a).is_none() && promotions.begin(&b).is_some());
        promotions.hold(&a, true);
        assert!(promotions.is_held(&a) && promotions.is_running(&a) && !promotions.is_held(&b));
        drop(first);
        assert!(!promotions.is_held(&a) && promotions.begin(&a).is_some());
    }

    #[test]
    fn the_end_of_an_earlier_stay_does_not_end_a_later_one() {
        let promotions = Promotions::default();
        let first = promotions.keep(route(1));
        promotions.let_go(&Digest([1; 32]));
        let second = promotions.keep(route(1));
        assert!(!promotions.stays(&Digest([1; 32]), first) && promotions.stays(&Digest([1; 32]), second));
        assert_eq!(promotions.unnamed(), [route(1)]);
    }
}
