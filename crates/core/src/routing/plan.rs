//! Who owns which group: rendezvous hashing with room for so much memory and load at each replica.
//!
//! Hashing alone gives some replicas half as much again as others: more prompts than they can keep, more load than
//! they can bear, and then every gateway moves some of them, each its own. Here a group whose first choice is full
//! goes to the next one in its own order. Groups are placed in an order that follows from themselves, by what is the
//! same for all gateways as nearly as can be: which groups there are, and roughly how busy the busiest are. So
//! gateways that do not talk to each other come to the same owners, but for few.

use super::groups::score;
use alloc::{collections::BTreeMap, vec::Vec};

/// How much more than its share of the load a replica may own.
const LOAD_SLACK: f64 = 1.1;
/// A replica owns at most this much more memory than the mean, however much it is said to have.
const MEMORY_SLACK: f64 = 1.25;
/// Where even the mean is more than there is, each owns a little more than the mean.
const MEMORY_OVER: f64 = 1.02;
/// What of a replica's memory its own groups may take: the rest is for what follows their beginnings.
const MEMORY_OWNED: f64 = 0.97;
/// A replica that may own groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub(super) place: usize,
    pub(super) identity: u64,
    pub(super) weight: f64,
    pub(super) capacity_bytes: u64,
}

/// A group that wants owners.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub(super) anchor: u64,
    pub(super) share: f64,
    pub(super) bytes: u64,
    /// How many.
    pub(super) owners: usize,
    /// The share of the traffic that one of many owners is meant for.
    pub(super) owner_load: f64,
}

#[derive(Debug, Clone, Copy)]
struct Room {
    owner: Owner,
    load_max: f64,
    load: f64,
    bytes_max: f64,
    bytes: f64,
}

impl Room {
    /// How full it were with this much more; above one is too much.
    fn fill(&self, load: f64, bytes: f64) -> f64 {
        ((self.load + load) / self.load_max).max((self.bytes + bytes) / self.bytes_max)
    }
}

/// The owners of the groups of one model.
#[derive(Debug, Default)]
pub(super) struct Plan {
    rooms: Vec<Room>,
    /// The places of each group's owners, in the order in which they were chosen.
    owners: BTreeMap<u64, Vec<usize>>,
    groups_max: usize,
    /// What a group with one owner weighs.
    single_load: f64,
}

impl Plan {
    /// A new plan for these groups, with room for so many in all.
    ///
    /// Groups of which nobody has asked yet have a share of the traffic as well: as large as the share of those who
    /// were lately the first of theirs. What is known is placed as if the others were there, so that it stays where it
    /// is when they come, and gateways that know different parts place what they know alike.
    pub(super) fn new(owners: &[Owner], mut wishes: Vec<Wish>, unknown_share: f64, groups_max: usize) -> Self {
        let known_share = if wishes.is_empty() { 0.0 } else { (1.0 - unknown_share).clamp(0.0, 1.0) };
        let count = owners.len().max(1) as f64;
        let (mut single, mut taken, mut bytes) = (0.0_f64, 0.0, 0.0);
        for wish in &wishes {
            bytes += wish.bytes as f64 * wish.owners as f64;
            if wish.owners == 1 {
                single += 1.0;
            } else {
                taken += wish.owners as f64 * wish.owner_load;
            }
        }
        let weights: f64 = owners.iter().map(|owner| owner.weight).sum();
        let mean_bytes = bytes / count;
        let most_bytes = if known_share > 0.0 { mean_bytes / known_share * MEMORY_SLACK } else { f64::INFINITY };
        let room = |owner: &Owner| {
            let own = owner.capacity_bytes as f64 * MEMORY_OWNED;
            let bytes_max = own.clamp(mean_bytes * MEMORY_OVER, most_bytes).max(1.0);
            Room { owner: *owner, load_max: LOAD_SLACK * owner.weight / weights, load: 0.0, bytes_max, bytes: 0.0 }
        };
        let mut plan = Self {
            rooms: owners.iter().map(room).collect(),
            owners: BTreeMap::new(),
            groups_max,
            single_load: (1.0 - taken).max(0.0) * known_share / single.max(1.0),
        };
        wishes.sort_unstable_by(|a, b| b.owners.cmp(&a.owners).then(a.anchor.cmp(&b.anchor)));
        for wish in wishes {
            plan.place(&wish);
        }
        plan
    }

    /// The owners of a group, if it has any.
    pub(super) fn owners(&self, anchor: u64) -> &[usize] {
        self.owners.get(&anchor).map_or(&[], Vec::as_slice)
    }

    /// Gives a group as many owners as it wishes; those it has it keeps. One too many waits for the next plan.
    pub(super) fn place(&mut self, wish: &Wish) {
        if self.owners.len() >= self.groups_max && !self.owners.contains_key(&wish.anchor) {
            return;
        }
        let load = if wish.owners == 1 { self.single_load } else { wish.owner_load };
        let mut chosen = self.owners.remove(&wish.anchor).unwrap_or_default();
        while chosen.len() < wish.owners.min(self.rooms.len()) {
            let Some(room) = self.best(wish, load, &chosen) else { break };
            let room = &mut self.rooms[room];
            room.load += load;
            room.bytes += wish.bytes as f64;
            chosen.push(room.owner.place);
        }
        self.owners.insert(wish.anchor, chosen);
    }

    /// The first in the group's own order with room for it; if none has, the one with the most.
    fn best(&self, wish: &Wish, load: f64, chosen: &[usize]) -> Option<usize> {
        let mut best = None;
        let (mut best_fill, mut best_score) = (f64::INFINITY, 0);
        for (number, room) in self.rooms.iter().enumerate() {
            let wanted = score(wish.anchor, room.owner.identity);
            // Most are less wanted than one with room, and need no closer look.
            if (best_fill == 0.0 && wanted <= best_score) || chosen.contains(&room.owner.place) {
                continue;
            }
            let fill = room.fill(load, wish.bytes as f64);
            let fill = if fill <= 1.0 { 0.0 } else { fill };
            if best.is_none() || fill < best_fill || (fill == best_fill && wanted > best_score) {
                (best, best_fill, best_score) = (Some(number), fill, wanted);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    fn owners(count: usize, prompts: u64) -> Vec<Owner> {
        let owner = |place| Owner { place, identity: 77 + place as u64, weight: 1.0, capacity_bytes: prompts * 1000 };
        (0..count).map(owner).collect()
    }

    fn wish(anchor: u64, share: f64, owners: usize) -> Wish {
        Wish { anchor, share, bytes: 950, owners, owner_load: 1.0 / 24.0 }
    }

    #[test]
    fn a_plan_has_a_limit() {
        let mut plan = Plan::new(&owners(4, 16), vec![wish(1, 0.5, 1)], 0.0, 3);
        for anchor in 2..9 {
            plan.place(&wish(anchor, 0.1, 1));
        }
        assert_eq!((1..9).filter(|anchor| !plan.owners(*anchor).is_empty()).count(), 3);
        plan.place(&wish(1, 0.5, 2));
        assert_eq!(plan.owners(1).len(), 2);
    }

    proptest! {
        #[test]
        fn nobody_owns_more_than_fits_and_the_order_of_arrival_is_no_matter(
            anchors in prop::collection::btree_set(any::<u64>(), 150..200),
            swap in any::<prop::sample::Index>(),
        ) {
            let mut wishes: Vec<Wish> = anchors.iter().map(|anchor| wish(*anchor, 0.7 / 200.0, 1)).collect();
            wishes[0] = Wish { share: 0.3, owners: 8, ..wishes[0] };
            let plan = Plan::new(&owners(16, 16), wishes.clone(), 0.0, 1000);
            let mut counts = vec![0; 16];
            for wish in &wishes {
                prop_assert_eq!(plan.owners(wish.anchor).len(), wish.owners);
                plan.owners(wish.anchor).iter().for_each(|place| counts[*place] += 1);
            }
            prop_assert!(counts.iter().all(|count| *count <= 16), "{:?}", counts);
            let at = swap.index(wishes.len());
            wishes.rotate_left(at);
            let again = Plan::new(&owners(16, 16), wishes.clone(), 0.0, 1000);
            prop_assert!(wishes.iter().all(|wish| plan.owners(wish.anchor) == again.owners(wish.anchor)));
        }
    }

    /// Groups of one of many pools, always the same.
    fn anchors(pool: u64, count: u64) -> Vec<u64> {
        (0..count).map(|group| score(pool, group)).collect()
    }

    /// Shares of groups that moved, of all pools together and in the worst of them.
    fn shares(moved: impl Fn(u64) -> (usize, usize)) -> (f64, f64) {
        let all: Vec<(usize, usize)> = (0..200).map(moved).collect();
        let (sum, of) = all.iter().fold((0, 0), |(sum, of), (moved, groups)| (sum + moved, of + groups));
        let worst = all.iter().map(|(moved, groups)| *moved as f64 / *groups as f64).fold(0.0, f64::max);
        (sum as f64 / of as f64, worst)
    }

    #[test]
    fn whoever_knows_half_of_the_groups_places_them_nearly_as_whoever_knows_all() {
        let moved = |pool, unknown_share: f64, known: usize| {
            let wishes: Vec<Wish> = anchors(pool, 195).into_iter().map(|anchor| wish(anchor, 0.005, 1)).collect();
            let some: Vec<Wish> = wishes.iter().copied().step_by(2).take(known).collect();
            let whole = Plan::new(&owners(16, 16), wishes, 0.0, 1000);
            let mut plan = match known {
                // The very first ones, as they come.
                8 => Plan::new(&owners(16, 16), Vec::new(), 0.0, 1000),
                _ => Plan::new(&owners(16, 16), some.clone(), unknown_share, 1000),
            };
            some.iter().filter(|_| known == 8).for_each(|wish| plan.place(wish));
            (some.iter().filter(|wish| whole.owners(wish.anchor) != plan.owners(wish.anchor)).count(), some.len())
        };
        let (mean, worst) = shares(|pool| moved(pool, 0.5, 98));
        assert!(mean <= 0.15 && worst <= 0.3, "{mean} moved, {worst} in the worst pool");
        let (mean, _) = shares(|pool| moved(pool, 0.0, 8));
        assert!(mean <= 0.3, "{mean} of the very first ones moved");
    }

    #[test]
    fn one_group_more_or_less_moves_few_others() {
        let moved = |pool| {
            let wishes: Vec<Wish> = anchors(pool, 150).into_iter().map(|anchor| wish(anchor, 0.005, 1)).collect();
            let whole = Plan::new(&owners(16, 16), wishes.clone(), 0.0, 1000);
            let less = Plan::new(&owners(16, 16), wishes[1..].to_vec(), 0.0, 1000);
            let others = wishes[1..].iter();
            (others.filter(|wish| whole.owners(wish.anchor) != less.owners(wish.anchor)).count(), wishes.len() - 1)
        };
        let (mean, worst) = shares(moved);
        assert!(mean <= 0.03 && worst <= 0.15, "{mean} moved, {worst} in the worst pool");
    }
}
