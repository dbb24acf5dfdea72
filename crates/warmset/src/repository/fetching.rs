//! What is being fetched now, for whoever wants to see how far it is.

use super::Progress;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// Stands for a figure that is not known yet.
const UNKNOWN: u64 = u64::MAX;

/// All fetches of one repository.
#[derive(Clone, Default)]
pub(crate) struct Fetches(Arc<Mutex<BTreeMap<u64, Arc<Fetch>>>>);

/// One of them.
struct Fetch {
    name: String,
    /// As it may be shown.
    source: String,
    began: Instant,
    /// What was there before: it says nothing of the rate.
    first_bytes: AtomicU64,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl Fetch {
    fn tell(&self, done: u64, total: u64) {
        let _ = self.first_bytes.compare_exchange(UNKNOWN, done, Ordering::Relaxed, Ordering::Relaxed);
        self.done_bytes.store(done, Ordering::Relaxed);
        self.total_bytes.store(total, Ordering::Relaxed);
    }

    fn document(&self) -> Value {
        let (done, total) = (self.done_bytes.load(Ordering::Relaxed), self.total_bytes.load(Ordering::Relaxed));
        let new = done.saturating_sub(self.first_bytes.load(Ordering::Relaxed).min(done));
        let rate = new as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        let left = (total > done && rate > 0.0).then(|| (total - done) as f64 / rate);
        json!({
            "name": self.name, "source": self.source, "done_bytes": done,
            "total_bytes": (total > 0).then_some(total), "bytes_per_second": rate, "seconds_left": left,
        })
    }
}

/// Ends with the fetch.
pub(super) struct Guard {
    fetches: Fetches,
    number: u64,
    fetch: Arc<Fetch>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.fetches.locked().remove(&self.number);
    }
}

impl Fetches {
    fn locked(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Arc<Fetch>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Each of them, in the order in which they began.
    pub(crate) fn documents(&self) -> Vec<Value> {
        self.locked().values().map(|fetch| fetch.document()).collect()
    }

    pub(super) fn begin(&self, name: &str, source: String) -> Guard {
        let fetch = Arc::new(Fetch {
            name: name.to_owned(),
            source,
            began: Instant::now(),
            first_bytes: AtomicU64::new(UNKNOWN),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
        });
        let mut all = self.locked();
        let number = all.last_key_value().map_or(0, |(last, _)| last + 1);
        all.insert(number, fetch.clone());
        Guard { fetches: self.clone(), number, fetch }
    }
}

impl Guard {
    /// Keeps the figures and passes them on.
    pub(super) fn follow<'a>(&self, progress: &'a mut Progress) -> impl FnMut(u64, u64) + Send + use<'a> {
        let fetch = self.fetch.clone();
        move |done, total| {
            fetch.tell(done, total);
            progress(done, total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetch_is_seen_while_it_lasts() {
        let fetches = Fetches::default();
        let guard = fetches.begin("a", "hf://a/b/c".into());
        let mut quiet: Progress = Box::new(|_, _| {});
        assert_eq!(fetches.documents()[0]["total_bytes"], Value::Null);
        let mut told = guard.follow(&mut quiet);
        // Half of it was there before.
        told(50, 100);
        let document = &fetches.documents()[0];
        assert_eq!((document["bytes_per_second"].as_f64(), document["seconds_left"].as_f64()), (Some(0.0), None));
        told(75, 100);
        let document = &fetches.documents()[0];
        assert_eq!((document["name"].as_str(), document["done_bytes"].as_u64()), (Some("a"), Some(75)));
        assert!(document["seconds_left"].as_f64().unwrap() > 0.0);
        drop(told);
        drop(guard);
        assert!(fetches.documents().is_empty());
    }
}
