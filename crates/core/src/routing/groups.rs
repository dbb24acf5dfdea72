//! How much of the traffic each group of prompts has: a tenant's, or a conversation's, by its anchor.

use super::index::{Index, mix};
use crate::time::Instant;
use alloc::vec::Vec;
use core::time::Duration;

/// Traffic is remembered for about this long.
const MEMORY: Duration = Duration::from_secs(30);
/// Of so many requests at least, shares are told.
const REQUESTS_MIN: f32 = 50.0;
/// Groups compared when one has to make room.
const VICTIMS: usize = 8;

#[derive(Clone, Copy)]
struct Group {
    anchor: u64,
    requests: f32,
    at: Instant,
}

/// The busiest groups, each with its decaying count.
pub(super) struct Groups {
    groups: Vec<Group>,
    index: Index,
    groups_max: usize,
    hand: usize,
}

/// A count that forgets.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Traffic {
    requests: f32,
    at: Instant,
}

fn faded(requests: f32, at: Instant, now: Instant) -> f32 {
    let age = now.since(at).as_secs_f32() / MEMORY.as_secs_f32();
    requests * libm::expf(-age)
}

impl Traffic {
    /// One more; returns the count.
    pub(super) fn add(&mut self, now: Instant) -> f32 {
        self.requests = faded(self.requests, self.at, now) + 1.0;
        self.at = now;
        self.requests
    }
}

impl Groups {
    pub(super) fn new(groups_max: usize) -> Self {
        let index = Index::new((groups_max * 2).max(16));
        Self { groups: Vec::new(), index, groups_max: groups_max.max(1), hand: 0 }
    }

    /// One more request of this group; returns its share of `total`, as far as that is known.
    pub(super) fn add(&mut self, anchor: u64, total: f32, now: Instant) -> f32 {
        let number = match self.index.get(anchor, |number| self.groups[number as usize].anchor == anchor) {
            Some(number) => number,
            None => self.insert(anchor, now),
        };
        let group = &mut self.groups[number as usize];
        group.requests = faded(group.requests, group.at, now) + 1.0;
        group.at = now;
        if total < REQUESTS_MIN { 0.0 } else { (group.requests / total).min(1.0) }
    }

    fn insert(&mut self, anchor: u64, now: Instant) -> u32 {
        let group = Group { anchor, requests: 0.0, at: now };
        let number = if self.groups.len() < self.groups_max {
            self.groups.push(group);
            self.groups.len() - 1
        } else {
            let compared = (0..VICTIMS).map(|step| (self.hand + step) % self.groups_max);
            let count = |number: &usize| faded(self.groups[*number].requests, self.groups[*number].at, now);
            let victim = compared.min_by(|a, b| count(a).total_cmp(&count(b))).unwrap_or(0);
            self.hand = (self.hand + VICTIMS) % self.groups_max;
            self.index.remove(self.groups[victim].anchor, victim as u32);
            self.groups[victim] = group;
            victim
        };
        self.index.insert(anchor, number as u32);
        number as u32
    }
}

/// How much `owner` wants `anchor`: the highest scores own it, and everybody finds the same ones.
pub(super) fn score(anchor: u64, owner: u64) -> u64 {
    mix(anchor, owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_measured_forgotten_and_bounded() {
        let mut groups = Groups::new(64);
        let mut traffic = Traffic::default();
        let mut share = 0.0;
        for step in 0..10_000_u64 {
            let now = Instant::after(Duration::from_millis(step * 10));
            let anchor = if step % 3 == 0 { 7 } else { 1000 + step };
            let total = traffic.add(now);
            let told = groups.add(anchor, total, now);
            share = if anchor == 7 { told } else { share };
        }
        assert!((0.28..0.38).contains(&share), "{share}");
        assert_eq!(groups.groups.len(), 64);
        let later = Instant::after(Duration::from_secs(100_000));
        assert!(groups.add(7, 100.0, later) < 0.02);
    }
}
