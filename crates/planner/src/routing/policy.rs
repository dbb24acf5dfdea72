//! The rules that are compared: the router that serves, and the ones whose figures it is measured against.

use warmset_core::routing::Settings;

/// How one gateway chooses a replica.
#[derive(Debug, Clone)]
pub enum Policy {
    /// [`warmset_core::routing::Router`].
    Router(Settings),
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests from here.
    LeastRequests,
    /// The one that a hash of the tenant says.
    Hash,
    /// The same within a bound of the mean, and never bounded below a floor; else the next one the hash says.
    BoundedHash {
        /// The bound, as a multiple of the mean.
        bound: f64,
        /// Requests that every replica may have.
        floor: u32,
    },
}

impl Policy {
    /// The router as it is set up if nobody says otherwise, with a small memory: a run has few prompts.
    pub fn router() -> Self {
        Self::Router(Settings { mirror_bytes: 8 << 20, groups_max: 1024, ..Settings::default() })
    }

    /// All, with the names that reports use.
    pub fn all() -> Vec<(&'static str, Self)> {
        vec![
            ("warmset", Self::router()),
            ("round-robin", Self::RoundRobin),
            ("least-requests", Self::LeastRequests),
            ("hash", Self::Hash),
            ("bounded-hash-1.25", Self::BoundedHash { bound: 1.25, floor: 0 }),
            ("bounded-hash-2.0", Self::BoundedHash { bound: 2.0, floor: 0 }),
        ]
    }
}

/// What a gateway with one of the simple rules remembers.
#[derive(Debug)]
pub(super) struct Simple {
    pub(super) in_flight: Vec<u32>,
    next: usize,
}

impl Simple {
    pub(super) fn new(replicas: usize, first: usize) -> Self {
        Self { in_flight: vec![0; replicas], next: first }
    }

    /// Chooses among those that are there; `order` is their order by the tenant's hash.
    pub(super) fn choose(&mut self, policy: &Policy, order: &[usize]) -> Option<usize> {
        match policy {
            Policy::RoundRobin => {
                let mut up = order.to_vec();
                up.sort_unstable();
                self.next += 1;
                up.get(self.next % up.len().max(1)).copied()
            }
            Policy::Hash => order.first().copied(),
            Policy::BoundedHash { bound, floor } => {
                let total: u32 = order.iter().map(|replica| self.in_flight[*replica]).sum();
                let mean = f64::from(total + 1) / order.len() as f64;
                let most = (bound * mean).ceil().max(f64::from(*floor));
                let within = |replica: &&usize| f64::from(self.in_flight[**replica] + 1) <= most;
                order.iter().find(within).or(order.first()).copied()
            }
            Policy::LeastRequests | Policy::Router(_) => {
                order.iter().copied().min_by_key(|replica| self.in_flight[*replica])
            }
        }
    }
}
