//! What holds for every rule, on requests made up at random.

use super::{
    LRU, OPTIMUM, POLICIES, Policy, Replay,
    plan::{self, Plan},
    replay,
    trace::{Builder, Trace},
};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::Instant;

/// Rules by which blocks leave that were not used for long.
const EXPIRING: [&str; 2] = ["keep-alive", "hybrid-histogram"];

fn built(name: &str, trace: &Trace, blocks: usize) -> Replay {
    let (_, build) = POLICIES.iter().find(|(known, _)| *known == name).expect("it is one of them");
    replay(trace, build(trace, blocks).as_mut())
}

/// Chains of a small tree, drawn from a seed; every block is full.
fn tree(seed: u64, requests: u32) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut builder = Builder::new(Some(1));
    for number in 0..requests {
        let at = Instant::after(Duration::from_secs(u64::from(number) * 7));
        let length = random.u32(1..6);
        builder.push(at, (length, 0), (0..length).map(|_| random.u64(0..3))).expect("it is small");
    }
    builder.finish().expect("it has blocks")
}

#[test]
fn nothing_beats_the_optimum_and_infinite_room_is_the_same_for_all() {
    for seed in 0..20 {
        let trace = tree(seed, 400);
        for blocks in [1, 4, 16, 64] {
            let optimum = built(OPTIMUM, &trace, blocks).all().hit_tokens;
            for (name, _) in POLICIES {
                let hits = built(name, &trace, blocks).all().hit_tokens;
                assert!(hits <= optimum, "{name} finds {hits} of {optimum} blocks, seed {seed}, {blocks} blocks");
            }
        }
        let hits = POLICIES.map(|(name, _)| built(name, &trace, 10_000).all().hit_tokens);
        // Two rules let blocks go although there is room.
        let most = hits.into_iter().max().unwrap_or(0);
        for ((name, _), hits) in POLICIES.iter().zip(hits).filter(|((name, _), _)| !EXPIRING.contains(name)) {
            assert_eq!(hits, most, "{name}, seed {seed}");
        }
    }
}

/// All ways to keep blocks, tried one after the other: what a small trace allows at most.
fn tried(trace: &Trace, blocks: usize) -> u64 {
    let mut best: BTreeMap<Vec<u32>, u64> = BTreeMap::from([(Vec::new(), 0)]);
    for request in trace.lookups() {
        let mut next: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
        for (kept, hits) in best {
            let found = request.blocks.iter().take_while(|block| kept.contains(block)).count();
            let mut there = kept;
            there.extend(request.blocks);
            there.sort_unstable();
            there.dedup();
            for chosen in 0..1_u32 << there.len() {
                let kept: Vec<u32> =
                    there.iter().zip(0..).filter(|(_, bit)| chosen >> bit & 1 == 1).map(|(block, _)| *block).collect();
                if kept.len() <= blocks {
                    let most = next.entry(kept).or_insert(0);
                    *most = (*most).max(hits + found as u64);
                }
            }
        }
        best = next;
    }
    best.into_values().max().unwrap_or(0)
}

#[test]
fn the_optimum_is_what_trying_everything_finds() {
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut builder = Builder::new(Some(1));
        for number in 0..9 {
            let length = random.u32(1..4);
            let contents: Vec<u64> = (0..length).map(|_| random.u64(0..2)).collect();
            builder.push(Instant(number), (length, 0), contents).expect("it is small");
        }
        let trace = builder.finish().expect("it has blocks");
        for blocks in 1..5 {
            let optimum = built(OPTIMUM, &trace, blocks).all().hit_tokens;
            assert_eq!(optimum, tried(&trace, blocks), "seed {seed}, {blocks} blocks");
        }
    }
}

#[test]
fn lru_is_what_a_list_does() {
    struct List(Vec<u32>, usize);
    impl Policy for List {
        fn serve(&mut self, request: &super::Lookup<'_>) -> usize {
            let found = request.blocks.iter().take_while(|block| self.0.contains(block)).count();
            for block in request.blocks.iter().rev() {
                self.0.retain(|other| other != block);
                self.0.push(*block);
                if self.0.len() > self.1 {
                    self.0.remove(0);
                }
            }
            found
        }
    }
    for seed in 0..10 {
        let trace = tree(seed, 300);
        for blocks in [8, 20, 60] {
            assert_eq!(built(LRU, &trace, blocks), replay(&trace, &mut List(Vec::new(), blocks)), "seed {seed}");
        }
    }
}

#[test]
fn made_up_conversations_depend_on_their_seed_alone_and_warmset_serves_them_best() {
    let plan = Plan::parse(plan::SHIPPED.1).expect("it is shipped");
    let trace = plan.requests(1, None).expect("it has requests");
    assert_ne!(trace.uses(), plan.requests(2, None).expect("it has requests").uses());
    let run = || {
        let rows = POLICIES.map(|(name, build)| (1_000_000, name, plan::run(&trace, 1_000_000, build)));
        plan::rows(&rows)
    };
    let rows = run();
    assert_eq!(rows, run());
    let share = |name: &str| rows.iter().find(|row| row.policy == name).map_or(0.0, |row| row.hit_share);
    for row in rows.iter().filter(|row| row.policy != OPTIMUM) {
        assert!(share("warmset") >= row.hit_share, "{} for {row:?}", share("warmset"));
    }
}
