//! Where a model goes and who leaves for it: `place(problem) -> placement`, the cheapest one that fits.

use super::charge::{Charge, HeldSum};
use crate::{
    ids::Digest,
    memory::{Footprint, MemoryVector},
};
use alloc::{collections::BinaryHeap, vec, vec::Vec};
use core::cmp::Reverse;

/// What may be done with bytes that somebody holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Standing {
    /// They stay.
    Fixed,
    /// They are on their way out and count until they are gone.
    Leaving,
    /// Nobody holds them yet, but somebody earlier in line will.
    Claimed,
    /// They may be freed, at this loss in seconds of rewarming per second.
    Evictable {
        /// `demand * rewarm`.
        loss: f64,
    },
}

/// One holder of bytes in a pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Held {
    /// The model.
    pub digest: Digest,
    /// Its bytes.
    pub charge: Charge,
    /// What may be done with them.
    pub standing: Standing,
}

/// A model that wants to be loaded into a pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem<'a> {
    /// The pool's bytes per device, the reserve already taken off.
    pub capacity: &'a MemoryVector,
    /// Who holds bytes there.
    pub held: &'a [Held],
    /// What the newcomer needs while it loads.
    pub footprint: &'a Footprint,
    /// The file the newcomer maps.
    pub artifact: Digest,
}

/// How a newcomer fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Accelerators it gets, as device indices, in the order of the footprint's shards.
    pub accelerators: Vec<usize>,
    /// Who must leave, cheapest first.
    pub victims: Vec<Digest>,
    /// Nobody has to leave and nobody's leaving has to be awaited.
    pub fits_now: bool,
    /// What the victims lose, in seconds of rewarming per second.
    pub loss: f64,
}

/// The placement that loses least; none if the newcomer does not fit even without every evictable holder.
///
/// Ties go to the placement that can start now, then to the lowest device numbers, so that equal problems have equal
/// answers.
pub fn place(problem: &Problem<'_>) -> Option<Placement> {
    let mut best: Option<Placement> = None;
    for accelerators in assignments(problem) {
        let Some(found) = place_on(problem, accelerators) else { continue };
        let better = match &best {
            None => true,
            Some(best) => found.loss < best.loss || (found.loss == best.loss && found.fits_now && !best.fits_now),
        };
        if better {
            best = Some(found);
        }
    }
    best
}

/// Every choice of distinct accelerators for the footprint's shards, in lexicographic order.
fn assignments(problem: &Problem<'_>) -> Vec<Vec<usize>> {
    let shards = problem.footprint.accelerator_bytes.len();
    let accelerators = problem.capacity.0.len().saturating_sub(1);
    let mut complete = vec![vec![]];
    for _ in 0..shards {
        complete = complete
            .iter()
            .flat_map(|chosen: &Vec<usize>| {
                (1..=accelerators).filter(|device| !chosen.contains(device)).map(|device| {
                    let mut longer = chosen.clone();
                    longer.push(device);
                    longer
                })
            })
            .collect();
    }
    complete
}

fn place_on(problem: &Problem<'_>, accelerators: Vec<usize>) -> Option<Placement> {
    let newcomer = Charge::new(problem.footprint, problem.artifact, &accelerators);
    let with = |wanted: fn(&Held) -> bool| -> HeldSum {
        let held = problem.held.iter().filter(|held| wanted(held)).map(|held| &held.charge);
        held.chain([&newcomer]).collect()
    };
    // Most problems of a pool that is full end here.
    if !with(|held| matches!(held.standing, Standing::Fixed | Standing::Claimed)).fits_in(problem.capacity) {
        return None;
    }
    let mut staying = with(|held| held.standing != Standing::Leaving);
    let now = with(|held| held.standing != Standing::Claimed);
    if now.fits_in(problem.capacity) && staying.fits_in(problem.capacity) {
        return Some(Placement { accelerators, victims: vec![], fits_now: true, loss: 0.0 });
    }
    let mut victims: Vec<&Held> = vec![];
    // Few of them leave: a heap finds those without putting all in order.
    let evictable_ones = (0..).zip(problem.held).filter_map(|(place, held)| Some((place, evictable(held)?)));
    // The bits of numbers that are not negative are in their order.
    let mut cheapest_first: BinaryHeap<Reverse<(u64, Digest, usize)>> = evictable_ones
        .map(|(place, (held, loss))| Reverse((per_byte(held, loss).to_bits(), held.digest, place)))
        .collect();
    while !staying.fits_in(problem.capacity) {
        let Reverse((_, _, place)) = cheapest_first.pop()?;
        let next = &problem.held[place];
        staying.remove(&next.charge);
        victims.push(next);
    }
    drop_needless(problem.capacity, &mut staying, &mut victims);
    let loss = victims.iter().filter_map(|held| evictable(held)).map(|(_, loss)| loss).sum();
    let victims = victims.iter().map(|held| held.digest).collect();
    Some(Placement { accelerators, victims, fits_now: false, loss })
}

fn evictable(held: &Held) -> Option<(&Held, f64)> {
    match held.standing {
        Standing::Evictable { loss } => Some((held, loss)),
        Standing::Fixed | Standing::Leaving | Standing::Claimed => None,
    }
}

fn per_byte(held: &Held, loss: f64) -> f64 {
    let bytes = held.charge.private.total().saturating_add(held.charge.shared_host_bytes);
    super::worth(loss, 1.0, bytes)
}

/// Going by worth per byte can pick small victims that a later, larger one makes needless: spare the dearest first.
fn drop_needless(capacity: &MemoryVector, staying: &mut HeldSum, victims: &mut Vec<&Held>) {
    for index in (0..victims.len()).rev() {
        staying.add(&victims[index].charge);
        if staying.fits_in(capacity) {
            victims.remove(index);
        } else {
            staying.remove(&victims[index].charge);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residency::held_bytes;
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    /// Whether the newcomer fits once the leaving and these victims are gone.
    fn fits_without(problem: &Problem<'_>, newcomer: &Charge, victims: &[&Held]) -> bool {
        let staying = problem
            .held
            .iter()
            .filter(|held| held.standing != Standing::Leaving)
            .filter(|held| !victims.iter().any(|victim| victim.digest == held.digest));
        held_bytes(staying.map(|held| &held.charge).chain([newcomer])).fits_in(problem.capacity)
    }

    fn held(id: u8, bytes: u64, standing: Standing) -> Held {
        let charge = Charge::new(&Footprint::host(bytes), Digest([id; 32]), &[]);
        Held { digest: Digest([id; 32]), charge, standing }
    }

    fn solve(capacity: &[u64], held: &[Held], footprint: &Footprint) -> Option<Placement> {
        let capacity = MemoryVector(capacity.to_vec());
        place(&Problem { capacity: &capacity, held, footprint, artifact: Digest([0xff; 32]) })
    }

    fn evictable_at(loss: f64) -> Standing {
        Standing::Evictable { loss }
    }

    #[test]
    fn evicts_the_least_worth_per_byte_and_only_the_deficit() {
        let holders = [held(1, 40, evictable_at(40.0)), held(2, 40, evictable_at(4.0)), held(3, 10, evictable_at(2.0))];
        let placement = solve(&[100], &holders, &Footprint::host(45)).expect("fits");
        assert_eq!(placement.victims, vec![Digest([2; 32])]);
        assert!(!placement.fits_now);
    }

    #[test]
    fn of_equal_losses_the_larger_holder_goes() {
        let holders = [held(1, 30, evictable_at(3.0)), held(2, 60, evictable_at(3.5))];
        let placement = solve(&[100], &holders, &Footprint::host(30)).expect("fits");
        assert_eq!(placement.victims, vec![Digest([2; 32])], "3.5 over 60 bytes is worth less than 3.0 over 30");
    }

    #[test]
    fn small_victims_made_needless_by_a_large_one_are_spared() {
        let holders = [held(1, 10, evictable_at(1.0)), held(2, 80, evictable_at(80.0))];
        let placement = solve(&[100], &holders, &Footprint::host(85)).expect("fits");
        assert_eq!(placement.victims, vec![Digest([2; 32])]);
    }

    #[test]
    fn leaving_bytes_are_awaited_not_counted_as_free() {
        let holders = [held(1, 60, Standing::Leaving), held(2, 30, evictable_at(1.0))];
        let placement = solve(&[100], &holders, &Footprint::host(70)).expect("fits");
        assert!(placement.victims.is_empty() && !placement.fits_now);
    }

    #[test]
    fn a_claim_keeps_its_bytes_but_does_not_hold_up_who_fits_beside_it() {
        let holders = [held(1, 60, Standing::Leaving), held(2, 50, Standing::Claimed)];
        let beside = solve(&[100], &holders, &Footprint::host(40)).expect("fits");
        assert!(beside.fits_now, "60 + 40 fits now, 50 + 40 fits later");
        assert_eq!(solve(&[100], &holders, &Footprint::host(51)), None, "50 + 51 would break the claim");
    }

    #[test]
    fn fixed_bytes_are_never_taken() {
        let holders = [held(1, 60, Standing::Fixed), held(2, 30, evictable_at(1.0))];
        assert_eq!(solve(&[100], &holders, &Footprint::host(50)), None);
    }

    #[test]
    fn pages_shared_with_the_newcomer_do_not_count_twice_nor_free_anything() {
        let shared = Footprint { private_host_bytes: 10, shared_host_bytes: 50, accelerator_bytes: vec![] };
        let twin = Held {
            digest: Digest([1; 32]),
            charge: Charge::new(&shared, Digest([0xff; 32]), &[]),
            standing: evictable_at(1.0),
        };
        let placement = solve(&[70], &[twin], &shared).expect("fits");
        assert!(placement.fits_now, "10 + 10 + 50 fits 70");
    }

    #[test]
    fn shards_go_to_the_accelerators_where_least_is_lost() {
        let mut on_first = held(1, 0, evictable_at(5.0));
        on_first.charge.private = MemoryVector(vec![0, 80, 0]);
        let mut on_second = held(2, 0, evictable_at(1.0));
        on_second.charge.private = MemoryVector(vec![0, 0, 80]);
        let footprint = Footprint { accelerator_bytes: vec![50], ..Footprint::default() };
        let placement = solve(&[100, 100, 100], &[on_first, on_second], &footprint).expect("fits");
        assert_eq!((placement.accelerators, placement.victims), (vec![2], vec![Digest([2; 32])]));
        let two = Footprint { accelerator_bytes: vec![50, 50], ..Footprint::default() };
        assert_eq!(solve(&[100, 100, 100], &[], &two).map(|found| found.accelerators), Some(vec![1, 2]));
        assert_eq!(solve(&[100, 100], &[], &two), None, "two shards need two accelerators");
    }

    #[test]
    fn of_equal_losses_the_accelerator_that_is_free_now_is_taken() {
        let footprint = Footprint { accelerator_bytes: vec![50], ..Footprint::default() };
        for standing in [Standing::Leaving, evictable_at(0.0)] {
            let mut on_first = held(1, 0, standing);
            on_first.charge.private = MemoryVector(vec![0, 80, 0]);
            let placement = solve(&[100, 100, 100], &[on_first], &footprint).expect("fits");
            assert_eq!((placement.accelerators, placement.fits_now), (vec![2], true), "beside {standing:?}");
            assert!(placement.victims.is_empty());
        }
    }

    fn any_holder(id: u8) -> impl Strategy<Value = Held> {
        let standing = prop_oneof![
            Just(Standing::Fixed),
            Just(Standing::Leaving),
            Just(Standing::Claimed),
            (0.0_f64..100.0).prop_map(|loss| Standing::Evictable { loss })
        ];
        (0_u64..60, 0_u64..30, 0_u8..4, 0_u64..40, 1_usize..3, standing).prop_map(
            move |(private, shared, artifact, on_device, device, standing)| {
                let footprint = Footprint {
                    private_host_bytes: private,
                    shared_host_bytes: shared,
                    accelerator_bytes: vec![on_device],
                };
                let charge = Charge::new(&footprint, Digest([artifact; 32]), &[device]);
                Held { digest: Digest([id; 32]), charge, standing }
            },
        )
    }

    fn any_holders() -> impl Strategy<Value = Vec<Held>> {
        (0_u8..7).prop_flat_map(|count| (0..count).map(any_holder).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn a_placement_fits_evicts_only_the_evictable_and_nothing_needless(
            holders in any_holders(), private in 0_u64..100, on_device in 0_u64..60, artifact in 0_u8..5,
        ) {
            let capacity = MemoryVector(vec![150, 60, 60]);
            let footprint = Footprint {
                private_host_bytes: private, shared_host_bytes: 20, accelerator_bytes: vec![on_device],
            };
            let problem = Problem {
                capacity: &capacity, held: &holders, footprint: &footprint, artifact: Digest([artifact; 32]),
            };
            let all: Vec<&Held> = holders.iter().filter(|held| evictable(held).is_some()).collect();
            let possible = (1..=2).any(|device| {
                fits_without(&problem, &Charge::new(&footprint, problem.artifact, &[device]), &all)
            });
            let Some(found) = place(&problem) else { prop_assert!(!possible); return Ok(()); };
            prop_assert!(possible);
            let newcomer = Charge::new(&footprint, problem.artifact, &found.accelerators);
            let victims: Vec<&Held> = holders.iter().filter(|held| found.victims.contains(&held.digest)).collect();
            prop_assert_eq!(victims.len(), found.victims.len());
            prop_assert!(victims.iter().all(|held| evictable(held).is_some()));
            prop_assert!(fits_without(&problem, &newcomer, &victims));
            for spared in 0..victims.len() {
                let mut fewer = victims.clone();
                fewer.remove(spared);
                prop_assert!(!fits_without(&problem, &newcomer, &fewer), "a needless victim");
            }
            if found.fits_now {
                let real = holders.iter().filter(|held| held.standing != Standing::Claimed);
                let all_held = held_bytes(real.map(|held| &held.charge).chain([&newcomer]));
                prop_assert!(all_held.fits_in(&capacity) && found.victims.is_empty());
            }
        }
    }
}
