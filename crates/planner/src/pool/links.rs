//! Weights on their way to machines that lack them: who fetches over a link at the same time shares it evenly.

use std::time::Duration;
use warmset_core::{Bytes, Digest, Instant, worker::Generation};

/// Less than this is nothing: what rounding to nanoseconds leaves.
const NOTHING_BYTES: f64 = 1e-3;

/// Weights that are fetched.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fetch {
    pub(super) machine: usize,
    pub(super) digest: Digest,
    pub(super) bytes: Bytes,
    pub(super) began: Instant,
    left_bytes: f64,
    /// Loads of that machine that wait for them.
    pub(super) waiting: Vec<Generation>,
}

/// What gives weights to those who lack them.
#[derive(Debug, Clone)]
pub(super) struct Link {
    bytes_per_second: f64,
    /// Up to when it was computed.
    at: Instant,
    fetches: Vec<Fetch>,
}

impl Link {
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, at: Instant::ZERO, fetches: Vec::new() }
    }

    /// A machine needs weights, for a load or before one: they are fetched once, however many loads want them.
    pub(super) fn want(
        &mut self,
        now: Instant,
        (machine, digest): (usize, Digest),
        bytes: Bytes,
        load: Option<Generation>,
    ) {
        self.reach(now);
        let same = |fetch: &&mut Fetch| fetch.machine == machine && fetch.digest == digest;
        match self.fetches.iter_mut().find(same) {
            Some(fetch) => fetch.waiting.extend(load),
            None => {
                let (began, left_bytes, waiting) = (now, bytes as f64, load.into_iter().collect());
                self.fetches.push(Fetch { machine, digest, bytes, began, left_bytes, waiting });
            }
        }
    }

    /// A machine is gone: what it fetched is lost with it.
    pub(super) fn drop_machine(&mut self, now: Instant, machine: usize) {
        self.reach(now);
        self.fetches.retain(|fetch| fetch.machine != machine);
    }

    /// What has arrived by now.
    pub(super) fn take_arrived(&mut self, now: Instant) -> Vec<Fetch> {
        self.reach(now);
        self.fetches.extract_if(.., |fetch| fetch.left_bytes <= NOTHING_BYTES).collect()
    }

    /// When something arrives next, if nothing else begins.
    pub(super) fn next(&self) -> Option<Instant> {
        let least = self.fetches.iter().map(|fetch| fetch.left_bytes).min_by(f64::total_cmp)?;
        let seconds = (least * self.fetches.len() as f64 / self.bytes_per_second).clamp(0.0, 1e9);
        Some(self.at + Duration::from_secs_f64(seconds) + Duration::from_nanos(1))
    }

    fn reach(&mut self, now: Instant) {
        let each = now.since(self.at).as_secs_f64() * self.bytes_per_second / self.fetches.len().max(1) as f64;
        self.fetches.iter_mut().for_each(|fetch| fetch.left_bytes -= each);
        self.at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calculate::distribute::Distribute;

    const DIGEST: Digest = Digest([1; 32]);

    fn at(seconds: f64) -> Instant {
        Instant::after(Duration::from_secs_f64(seconds))
    }

    /// Everything that arrives, with when.
    fn arrivals(link: &mut Link) -> Vec<(usize, f64)> {
        let mut seen = Vec::new();
        while let Some(next) = link.next() {
            seen.extend(link.take_arrived(next).iter().map(|fetch| (fetch.machine, next.since(Instant::ZERO))));
        }
        seen.into_iter().map(|(machine, after)| (machine, after.as_secs_f64())).collect()
    }

    #[test]
    fn who_fetches_at_the_same_time_shares_the_link() {
        let mut link = Link::new(100.0);
        link.want(at(0.0), (0, DIGEST), 1_000, Some(Generation(1)));
        // Half of it has come when another one begins: 10 seconds for the rest, in which that one gets as much.
        link.want(at(5.0), (1, DIGEST), 1_000, Some(Generation(1)));
        let seen = arrivals(&mut link);
        let wanted = [(0, 15.0), (1, 20.0)];
        assert_eq!(seen.len(), wanted.len());
        for ((machine, seconds), (who, when)) in seen.into_iter().zip(wanted) {
            assert!(machine == who && (seconds - when).abs() < 1e-6, "{machine}: {seconds} instead of {when}");
        }
    }

    /// The closed form of the same thing: everybody takes it from the origin.
    #[test]
    fn all_at_once_take_as_long_as_the_calculator_says() {
        let (bytes, nodes, rate) = (3_000, 7, 250.0);
        let plan = Distribute {
            bytes,
            nodes,
            origin_bytes_per_second: rate,
            node_bytes_per_second: 1e9,
            chunk_bytes: 1,
            fanout: 2,
        };
        let wanted = plan.answer().expect("it makes sense").origin_only_seconds;
        let mut link = Link::new(rate);
        for machine in 0..7 {
            link.want(at(0.0), (machine, DIGEST), bytes, Some(Generation(1)));
        }
        let seen = arrivals(&mut link);
        assert!(seen.len() == 7 && seen.iter().all(|(_, seconds)| (seconds - wanted).abs() < 1e-6), "{seen:?}");
    }

    #[test]
    fn one_machine_fetches_weights_once_and_a_lost_one_leaves_the_link_to_others() {
        let mut link = Link::new(100.0);
        link.want(at(0.0), (0, DIGEST), 1_000, Some(Generation(1)));
        link.want(at(1.0), (1, DIGEST), 1_000, Some(Generation(1)));
        link.want(at(1.0), (0, DIGEST), 1_000, Some(Generation(2)));
        link.drop_machine(at(4.0), 1);
        let next = link.next().expect("it is under way");
        let arrived = link.take_arrived(next);
        assert!(arrived.len() == 1 && arrived[0].waiting == [Generation(1), Generation(2)], "{arrived:?}");
        // A second alone, three seconds shared, the rest alone.
        let seconds = next.since(Instant::ZERO).as_secs_f64();
        assert!((seconds - (4.0 + 7.5)).abs() < 1e-6, "{seconds}");
    }
}
