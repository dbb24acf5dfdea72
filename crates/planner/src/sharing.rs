//! Requests and loads that compute at the same time and slow each other down.
//!
//! Everything that computes goes on at a rate that follows from what computes beside it. From one begin or end to the next
//! the rates stay as they are, so that only these have to be looked at: to play a run, and to find from a recorded one by how
//! much whom what slows down.

use serde::Serialize;
use std::collections::BTreeMap;
use warmset_core::{Digest, Instant, RequestId, worker::Generation};

/// By how much longer something takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Slowdown {
    /// For each other request on the same engine.
    pub request_beside: f64,
    /// For each other engine that runs requests.
    pub engine: f64,
    /// For each load, or for each other one.
    pub load: f64,
}

impl Slowdown {
    /// How many times as long something takes in this company: engines and loads share the machine, and the requests of an
    /// engine share its part.
    pub(crate) fn times(&self, company: Company) -> f64 {
        let Company { requests_beside, engines, loads } = company;
        let machine = 1.0 + self.engine * f64::from(engines) + self.load * f64::from(loads);
        machine * (1.0 + self.request_beside * f64::from(requests_beside))
    }
}

/// What computes beside something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Company {
    pub(crate) requests_beside: u32,
    pub(crate) engines: u32,
    pub(crate) loads: u32,
}

/// What computes. One life of a model has one load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Job {
    Request(RequestId),
    Load(Digest, Generation),
}

/// What computes at the same time, each with something that is kept of it.
#[derive(Debug, Clone)]
pub(crate) struct Together<T> {
    jobs: BTreeMap<Job, (Digest, T)>,
    /// Engines that run requests, each with how many.
    engines: BTreeMap<Digest, u32>,
    loads: u32,
    since: Instant,
}

impl<T> Default for Together<T> {
    fn default() -> Self {
        Self { jobs: BTreeMap::new(), engines: BTreeMap::new(), loads: 0, since: Instant::ZERO }
    }
}

impl<T> Together<T> {
    /// Something begins to compute for a model. Time has passed until now before.
    pub(crate) fn enter(&mut self, job: Job, digest: Digest, kept: T) {
        if self.jobs.insert(job, (digest, kept)).is_none() {
            match job {
                Job::Request(_) => *self.engines.entry(digest).or_default() += 1,
                Job::Load(..) => self.loads += 1,
            }
        }
    }

    /// Something does not compute any more; what was kept of it. Time has passed until now before.
    pub(crate) fn leave(&mut self, job: Job) -> Option<T> {
        let (digest, kept) = self.jobs.remove(&job)?;
        match (job, self.engines.get_mut(&digest)) {
            (Job::Load(..), _) => self.loads -= 1,
            (Job::Request(_), Some(requests)) if *requests > 1 => *requests -= 1,
            (Job::Request(_), _) => drop(self.engines.remove(&digest)),
        }
        Some(kept)
    }

    /// Lets time pass: what computes, in which company, and for how many nanoseconds.
    pub(crate) fn pass(&mut self, now: Instant, mut passed: impl FnMut(Job, Company, f64, &mut T)) {
        let nanoseconds = now.since(self.since).as_nanos() as f64;
        self.since = now;
        if nanoseconds > 0.0 {
            for (job, (digest, kept)) in &mut self.jobs {
                passed(*job, company(&self.engines, self.loads, *job, *digest), nanoseconds, kept);
            }
        }
    }

    /// What computes, and in which company.
    fn all(&self) -> impl Iterator<Item = (Job, Company, &T)> {
        self.jobs.iter().map(|(job, (digest, kept))| (*job, company(&self.engines, self.loads, *job, *digest), kept))
    }
}

fn company(engines: &BTreeMap<Digest, u32>, loads: u32, job: Job, digest: Digest) -> Company {
    let own = engines.get(&digest).copied().unwrap_or_default();
    let others = (engines.len() - usize::from(own > 0)).try_into().unwrap_or(u32::MAX);
    match job {
        Job::Request(_) => Company { requests_beside: own.saturating_sub(1), engines: others, loads },
        Job::Load(..) => Company { requests_beside: 0, engines: others, loads: loads.saturating_sub(1) },
    }
}

/// What is computed at the same time on a virtual clock: each has so many nanoseconds before it that it would take alone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sharing {
    request: Slowdown,
    load: Slowdown,
    left: Together<f64>,
}

impl Sharing {
    pub(crate) fn new(request: Slowdown, load: Slowdown) -> Self {
        Self { request, load, left: Together::default() }
    }

    pub(crate) fn begin(&mut self, now: Instant, job: Job, digest: Digest, alone_nanoseconds: f64) {
        self.pass(now);
        self.left.enter(job, digest, alone_nanoseconds);
    }

    /// It is through, or nobody wants it any more.
    pub(crate) fn end(&mut self, now: Instant, job: Job) {
        self.pass(now);
        self.left.leave(job);
    }

    /// What is through next and when, if nothing else begins or ends.
    pub(crate) fn next(&self) -> Option<(Instant, Job)> {
        let times = |job, company| self.slowdown(job).times(company);
        let due =
            self.left.all().map(|(job, company, left)| ((left.max(0.0) * times(job, company)).ceil() as u64, job));
        due.min().map(|(nanoseconds, job)| (Instant(self.left.since.0.saturating_add(nanoseconds)), job))
    }

    fn slowdown(&self, job: Job) -> Slowdown {
        match job {
            Job::Request(_) => self.request,
            Job::Load(..) => self.load,
        }
    }

    fn pass(&mut self, now: Instant) {
        let (request, load) = (self.request, self.load);
        self.left.pass(now, |job, company, nanoseconds, left| {
            let slowdown = if matches!(job, Job::Request(_)) { request } else { load };
            *left -= nanoseconds / slowdown.times(company);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: f64 = 1e9;

    fn digest(number: u8) -> Digest {
        Digest([number; 32])
    }

    /// Lets everything come to its end; what and when, in milliseconds.
    fn ends(sharing: &mut Sharing) -> Vec<(Job, u64)> {
        let mut ends = Vec::new();
        while let Some((at, job)) = sharing.next() {
            sharing.end(at, job);
            ends.push((job, at.0 / 1_000_000));
        }
        ends
    }

    #[test]
    fn what_computes_beside_others_goes_on_more_slowly_while_they_are_there() {
        let request = Slowdown { request_beside: 0.5, engine: 1.0, load: 2.0 };
        let load = Slowdown { request_beside: 0.0, engine: 1.0, load: 3.0 };
        let mut sharing = Sharing::new(request, load);
        let [one, two, other] = [1, 2, 3].map(|number| Job::Request(RequestId(number)));
        let loading = Job::Load(digest(3), Generation(1));
        let begin = Instant::ZERO;
        sharing.begin(begin, one, digest(1), 3.0 * SECOND);
        assert_eq!(sharing.clone().next(), Some((Instant(3_000_000_000), one)));
        // Half of the machine each: 1.5 seconds until the other one is through have 0.75 of the first.
        sharing.begin(begin, other, digest(2), 0.75 * SECOND);
        assert_eq!(ends(&mut sharing.clone()), [(other, 1_500), (one, 3_750)]);
        // Two on one engine lose half of what the first would have had for itself.
        let mut beside = Sharing::new(request, load);
        beside.begin(begin, one, digest(1), 3.0 * SECOND);
        beside.begin(begin, two, digest(1), 1.0 * SECOND);
        assert_eq!(ends(&mut beside), [(two, 1_500), (one, 3_500)]);
        // A load takes a third of the request's speed, and goes half as fast itself.
        let mut loads = Sharing::new(request, load);
        loads.begin(begin, one, digest(1), 3.0 * SECOND);
        loads.begin(begin, loading, digest(3), 1.0 * SECOND);
        assert_eq!(ends(&mut loads), [(loading, 2_000), (one, 4_333)]);
        // One that is given up does not slow anybody down any more.
        let mut given_up = Sharing::new(request, load);
        given_up.begin(begin, one, digest(1), 3.0 * SECOND);
        given_up.begin(begin, loading, digest(3), 1.0 * SECOND);
        given_up.end(Instant(1_500_000_000), loading);
        assert_eq!(ends(&mut given_up), [(one, 4_000)]);
    }

    #[test]
    fn who_slows_nobody_down_ends_to_the_nanosecond() {
        let mut sharing = Sharing::default();
        sharing.begin(Instant(7), Job::Request(RequestId(1)), digest(1), 1_000_000_007.0);
        sharing.begin(Instant(13), Job::Request(RequestId(2)), digest(2), 5.0);
        assert_eq!(sharing.next().map(|(at, _)| at), Some(Instant(18)));
        assert_eq!(ends(&mut sharing).last(), Some(&(Job::Request(RequestId(1)), 1_000)));
    }
}
