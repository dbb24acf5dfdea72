//! How much of the traffic each group of prompts has: a tenant's, or a conversation's, by its anchor.

use super::{
    chain::Boundary,
    index::{Index, mix},
    plan::Wish,
    protocol::ModelKey,
};
use crate::time::Instant;
use alloc::vec::Vec;
use core::time::Duration;

/// Traffic is remembered for about this long.
const MEMORY: Duration = Duration::from_secs(30);
/// Of so many requests at least, shares are told.
const REQUESTS_MIN: f32 = 50.0;
/// A group keeps the owners it has while it needs this share of them, less one.
const OWNERS_KEPT: f64 = 0.8;
/// A group that nobody asked for in this time needs no owner.
const ACTIVE: Duration = Duration::from_secs(300);
/// Groups compared when one has to make room.
const VICTIMS: usize = 8;

#[derive(Clone, Copy)]
struct Group {
    anchor: u64,
    model: ModelKey,
    /// Of its beginning.
    bytes: u64,
    /// How many owners it was last found to need.
    owners: usize,
    requests: f32,
    at: Instant,
}

impl Group {
    /// How many owners it needs now. Shares waver; owners that come and go would cost more than one too many.
    fn wish(&mut self, pool: f64, owners_per_share: f64, total: f32, now: Instant) -> Wish {
        let known = total >= REQUESTS_MIN;
        let share = if known { (faded(self.requests, self.at, now) / total).min(1.0) } else { 0.0 };
        let exact = f64::from(share) * pool * owners_per_share;
        let fits = exact <= self.owners as f64 && exact > self.owners as f64 * OWNERS_KEPT - 1.0;
        if !fits {
            self.owners = (libm::ceil(exact) as usize).max(1);
        }
        let owner_load = 1.0 / (pool * owners_per_share);
        Wish { anchor: self.anchor, share: f64::from(share), bytes: self.bytes, owners: self.owners, owner_load }
    }
}

/// The busiest groups, each with its decaying count.
pub(super) struct Groups {
    groups: Vec<Group>,
    index: Index,
    groups_max: usize,
    hand: usize,
}

/// What is seen of a group with one request.
pub(super) struct Seen {
    pub(super) anchor: Boundary,
    pub(super) model: ModelKey,
    /// Replicas of the model.
    pub(super) pool: f64,
    pub(super) owners_per_share: f64,
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

    /// Nothing new; the count now.
    pub(super) fn count(&self, now: Instant) -> f32 {
        faded(self.requests, self.at, now)
    }
}

impl Groups {
    pub(super) fn new(groups_max: usize) -> Self {
        let index = Index::new((groups_max * 2).max(16));
        Self { groups: Vec::new(), index, groups_max: groups_max.max(1), hand: 0 }
    }

    /// Whether anything is known of this group.
    pub(super) fn is_known(&self, anchor: u64) -> bool {
        self.number(anchor).is_some()
    }

    fn number(&self, anchor: u64) -> Option<u32> {
        self.index.get(anchor, |number| self.groups[number as usize].anchor == anchor)
    }

    /// One more request of this group, among `total` of its model; what it needs of owners in a pool of `pool`.
    pub(super) fn add(&mut self, seen: &Seen, total: f32, now: Instant) -> Wish {
        let number = self.number(seen.anchor.hash).unwrap_or_else(|| self.insert(seen, now));
        let group = &mut self.groups[number as usize];
        group.requests = faded(group.requests, group.at, now) + 1.0;
        group.at = now;
        group.wish(seen.pool, seen.owners_per_share, total, now)
    }

    /// What all groups of a model need that somebody asked for lately; the busiest `most` of them.
    pub(super) fn wishes(
        &mut self,
        model: ModelKey,
        most: usize,
        seen: (f64, f64),
        total: f32,
        now: Instant,
    ) -> Vec<Wish> {
        let active = self.groups.iter_mut().filter(|group| group.model == model && now.since(group.at) < ACTIVE);
        let mut wishes: Vec<Wish> = active.map(|group| group.wish(seen.0, seen.1, total, now)).collect();
        if wishes.len() > most {
            wishes.select_nth_unstable_by(most, |a, b| b.share.total_cmp(&a.share).then(a.anchor.cmp(&b.anchor)));
            wishes.truncate(most);
        }
        wishes
    }

    fn insert(&mut self, seen: &Seen, now: Instant) -> u32 {
        let (anchor, model, bytes) = (seen.anchor.hash, seen.model, seen.anchor.end_bytes);
        let group = Group { anchor, model, bytes, owners: 1, requests: 0.0, at: now };
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
        let seen = |hash| Seen {
            anchor: Boundary { hash, end_bytes: 1000 },
            model: ModelKey(1),
            pool: 16.0,
            owners_per_share: 1.5,
        };
        let mut share = 0.0;
        for step in 0..10_000_u64 {
            let now = Instant::after(Duration::from_millis(step * 10));
            let anchor = if step % 3 == 0 { 7 } else { 1000 + step };
            let total = traffic.add(now);
            let wish = groups.add(&seen(anchor), total, now);
            share = if anchor == 7 { wish.share } else { share };
            assert!(anchor == 7 || step < 100 || wish.owners == 1, "{wish:?}");
        }
        assert!((0.28..0.38).contains(&share), "{share}");
        assert_eq!(groups.groups.len(), 64);
        let later = Instant::after(Duration::from_secs(100_000));
        assert!(groups.add(&seen(7), 100.0, later).share < 0.02);
    }
}
