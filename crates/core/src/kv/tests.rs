//! Cases: what the tier decides in situations that have a right answer.

use super::{
    Action, BLOCK_TOKENS, BlockKey, DiskPlace, Event, FoundBlock, KvIdentity, SaveId, Tier, TierSettings, TrustDomain,
    Verdict, chain, protocol::ReadFailure,
};
use crate::{Digest, Instant, Machine, RequestId};
use alloc::{string::ToString, vec, vec::Vec};
use core::time::Duration;

mod disk;
mod room;

const PAYLOAD: u64 = 1 << 20;
const SLOT: u64 = PAYLOAD + 4096;

fn identity(model: u8) -> KvIdentity {
    KvIdentity::new(&Digest([model; 32]), "layout", "build")
}

fn keys(domain: &str, first: u32, blocks: u32) -> Vec<BlockKey> {
    let tokens: Vec<u32> = (0..blocks * BLOCK_TOKENS).map(|at| at + first).collect();
    chain(&identity(1), &TrustDomain::named(domain), &tokens)
}

/// A tier whose shell does everything at once, and a disk of a given speed.
struct Bench {
    tier: Tier,
    now: Instant,
    number: u64,
    read_seconds: f64,
    restore_seconds: f64,
    writes: u32,
    writes_fail: bool,
    others_bytes: u64,
    /// Reads that the shell holds back.
    held_reads: Option<Vec<u32>>,
}

/// What a request was given.
#[derive(Debug, PartialEq, Eq)]
struct Given {
    /// Blocks before them that are computed meanwhile.
    first: u32,
    blocks: usize,
    known: u32,
}

impl Bench {
    fn new(settings: TierSettings) -> Self {
        let mut bench = Self {
            tier: Tier::new(settings),
            now: Instant::ZERO,
            number: 0,
            read_seconds: 0.001,
            restore_seconds: 0.0001,
            writes: 0,
            writes_fail: false,
            others_bytes: 0,
            held_reads: None,
        };
        bench.open(1);
        bench
    }

    fn open(&mut self, model: u8) {
        let opened = Event::Opened {
            model: Digest([model; 32]),
            identity: identity(model),
            payload_bytes: PAYLOAD,
            slot_bytes: SLOT,
        };
        self.tell(opened);
    }

    fn tell(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.tier.handle(self.now, event, &mut actions);
        self.tier.check().unwrap();
        let (mut told, wanted_at) = (Vec::new(), self.now);
        for action in actions {
            told.extend(self.obey(action, wanted_at));
        }
        told
    }

    fn obey(&mut self, action: Action, wanted_at: Instant) -> Vec<Action> {
        match action {
            Action::Read { block, .. } => {
                if let Some(held) = &mut self.held_reads {
                    held.push(block);
                    return Vec::new();
                }
                // One after the other.
                self.now = self.now + Duration::from_secs_f64(self.read_seconds);
                let seconds = self.now.since(wanted_at).as_secs_f64();
                self.tell(Event::ReadDone { block, seconds, failure: None })
            }
            Action::SaveGo { save } => self.tell(Event::Staged { save, ok: true }),
            Action::Gather { save, blocks, .. } if !blocks.is_empty() => self.tell(Event::Gathered { save, ok: true }),
            Action::Write { block, .. } => {
                self.writes += 1;
                let place = DiskPlace { segment: 0, page: self.writes, pages: 257 };
                let outcome = if self.writes_fail { Err("disk".to_string()) } else { Ok(place) };
                self.tell(Event::Written { block, outcome, seconds: 0.001, others_bytes: self.others_bytes })
            }
            other => vec![other],
        }
    }

    fn save(&mut self, keys: &[BlockKey]) {
        self.number += 1;
        self.tell(Event::SaveOffered {
            save: SaveId(self.number),
            identity: identity(1),
            domain: TrustDomain::named("a"),
            parent: BlockKey([0; 32]),
            first_block: 0,
            keys: keys.to_vec(),
            state_bytes: 1000,
        });
    }

    /// Asks, and restores what is granted.
    fn ask(&mut self, keys: &[BlockKey], device_tokens: u32) -> Given {
        let (request, told) = self.only_ask(keys, device_tokens);
        let given = given(&told).expect("a grant");
        if given.blocks > 0 {
            let seconds = self.restore_seconds * given.blocks as f64;
            self.tell(Event::Restored { request, first_block: given.first, blocks: given.blocks as u32, seconds });
        }
        given
    }

    fn only_ask(&mut self, keys: &[BlockKey], device_tokens: u32) -> (RequestId, Vec<Action>) {
        self.number += 1;
        let request = RequestId(self.number);
        let told = self.tell(Event::Asked {
            request,
            identity: identity(1),
            keys: keys.to_vec(),
            prompt_tokens: keys.len() as u32 * BLOCK_TOKENS + 1,
            device_tokens,
        });
        (request, told)
    }

    /// Prefill at so many tokens per second.
    fn computes_at(&mut self, tokens_per_second: f64) {
        let seconds = 6400.0 / tokens_per_second;
        self.tell(Event::Prefilled { identity: identity(1), from_token: 0, to_token: 6400, seconds });
    }

    /// Nothing stays in host memory.
    fn forget_host(&mut self) {
        self.tell(Event::HostLimit { bytes: 0 });
        self.tell(Event::HostLimit { bytes: u64::MAX });
    }
}

fn given(told: &[Action]) -> Option<Given> {
    // The last one: who computes meanwhile has two.
    told.iter().rev().find_map(|action| match action {
        Action::Grant { first, slots, known, .. } => Some(Given { first: *first, blocks: slots.len(), known: *known }),
        _ => None,
    })
}

fn settings(host_blocks: u64, disk_blocks: u64) -> TierSettings {
    TierSettings {
        host_bytes_max: host_blocks * SLOT,
        disk_bytes_max: disk_blocks * SLOT,
        disk_slack_bytes: 0,
        disk_write_bytes_per_day: 1_000_000 * SLOT,
        disk_queue_bytes_max: 1000 * SLOT,
        saves_max: 1,
        saves_waiting_max: 8,
    }
}

#[test]
fn the_longest_prefix_that_is_there_is_given_and_no_more() {
    let mut bench = Bench::new(settings(100, 0));
    bench.save(&keys("a", 0, 5));
    assert_eq!(bench.ask(&keys("a", 0, 8), 0), Given { first: 0, blocks: 5, known: 5 });
    assert_eq!(bench.ask(&keys("a", 0, 3), 0), Given { first: 0, blocks: 3, known: 3 });
    assert_eq!(bench.ask(&keys("a", 1, 5), 0), Given { first: 0, blocks: 0, known: 0 });
    // Another domain, another model: other keys.
    assert_eq!(bench.ask(&keys("b", 0, 5), 0), Given { first: 0, blocks: 0, known: 0 });
}

#[test]
fn what_the_engine_holds_itself_is_not_brought_back() {
    let mut bench = Bench::new(settings(100, 0));
    bench.save(&keys("a", 0, 5));
    assert_eq!(bench.ask(&keys("a", 0, 5), 5 * BLOCK_TOKENS), Given { first: 0, blocks: 0, known: 5 });
    assert_eq!(bench.ask(&keys("a", 0, 5), 2 * BLOCK_TOKENS), Given { first: 0, blocks: 5, known: 5 });
    let view = &bench.tier.view().models[0];
    assert_eq!((view.hit_tokens.device, view.recomputed, view.reloaded), (320, 0, 1));
}

#[test]
fn what_is_worth_least_leaves_first_and_leaves_before_what_they_hang_on() {
    let mut bench = Bench::new(settings(6, 0));
    bench.save(&keys("a", 0, 3));
    bench.save(&keys("a", 1000, 3));
    for _ in 0..3 {
        bench.now = bench.now + Duration::from_secs(1);
        assert_eq!(bench.ask(&keys("a", 0, 3), 0).blocks, 3);
    }
    bench.save(&keys("a", 2000, 2));
    // Two blocks of the one that nobody asked for again are gone: its last ones.
    assert_eq!(bench.ask(&keys("a", 0, 3), 0).blocks, 3);
    assert_eq!(bench.ask(&keys("a", 1000, 3), 0).blocks, 1);
    assert_eq!(bench.ask(&keys("a", 2000, 2), 0).blocks, 2);
}

#[test]
fn k13_a_slow_disk_is_computed_around_and_counted() {
    let mut bench = Bench::new(settings(100, 100));
    bench.computes_at(1000.0);
    bench.read_seconds = 0.5;
    bench.save(&keys("a", 0, 4));
    bench.forget_host();
    // Nobody knows yet that it is slow: the first reload finds out.
    assert_eq!(bench.ask(&keys("a", 0, 4), 0).blocks, 4);
    bench.forget_host();
    assert_eq!(bench.ask(&keys("a", 0, 4), 0), Given { first: 0, blocks: 0, known: 4 });
    let view = &bench.tier.view().models[0];
    assert_eq!((view.reloaded, view.recomputed, view.verdict), (1, 1, Verdict::TooSlow));
}

#[test]
fn a_disk_that_has_become_fast_again_is_noticed() {
    let mut bench = Bench::new(settings(100, 100));
    bench.computes_at(1000.0);
    bench.read_seconds = 0.5;
    bench.save(&keys("a", 0, 4));
    bench.forget_host();
    bench.ask(&keys("a", 0, 4), 0);
    bench.read_seconds = 0.001;
    let asked = (0..2000).position(|_| {
        bench.forget_host();
        bench.ask(&keys("a", 0, 4), 0).blocks == 4
    });
    assert!(
        asked.is_some_and(|asked| (4..100).contains(&asked)),
        "{asked:?}: now and then some blocks are read to see"
    );
}

#[test]
fn the_gate_loses_little_against_always_choosing_right_at_any_bandwidth() {
    // Computing a block takes 64 ms; reading one from 1 ms to 1 s.
    for read_seconds in [0.001, 0.01, 0.03, 0.06, 0.063, 0.065, 0.07, 0.1, 0.3, 1.0] {
        let mut bench = Bench::new(settings(100, 1000));
        bench.computes_at(1000.0);
        (bench.read_seconds, bench.restore_seconds) = (read_seconds, 0.000_1);
        bench.save(&keys("a", 0, 8));
        let (mut spent, mut best) = (0.0, 0.0);
        for _ in 0..200 {
            bench.forget_host();
            let given = bench.ask(&keys("a", 0, 8), 0);
            let (first, blocks) = (f64::from(given.first), given.blocks as f64);
            let (compute, reload) = (0.064, read_seconds + 0.000_1);
            // A reload that falls behind is given up when computing would have ended, and then computed after all.
            spent += f64::max(first * compute, f64::min(blocks * reload, 2.0 * 8.0 * compute))
                + (8.0 - first - blocks) * compute;
            let splits = (0..=8).map(|first| f64::max(f64::from(first) * compute, f64::from(8 - first) * reload));
            best += splits.fold(f64::INFINITY, f64::min);
        }
        assert!(spent <= best * 1.05, "{spent} s against {best} s where a read takes {read_seconds} s");
    }
}

#[test]
fn a_model_of_seventy_billion_parameters_is_reloaded_where_arithmetic_says_so() {
    // 30,000 tokens of 320 KiB; operations of the weights and of attention, at 40 % of what the machine can do.
    let (token_bytes, blocks) = (327_680.0, 468_u32);
    let operations = |token: f64| 2.0 * 68.5e9 * token + 4.0 * 80.0 * 8192.0 * token * token / 2.0;
    for (computer, rate) in [("4 H100", 1.58e15), ("8 H100 in 8 bits", 6.33e15), ("L40S", 1.45e14)] {
        for (way, bytes_per_second) in
            [("PCIe 5", 54e9), ("NVMe 5", 14e9), ("NVMe 4", 6.8e9), ("100 Gbit/s", 11.5e9), ("10 Gbit/s", 1.15e9)]
        {
            let tokens = f64::from(blocks * BLOCK_TOKENS);
            let (compute, reload) = (operations(tokens) / rate, tokens * token_bytes / bytes_per_second);
            if libm::log(compute / reload).abs() < 0.3 {
                continue;
            }
            let mut bench = Bench::new(settings(1000, 1000));
            for piece in (0..blocks * BLOCK_TOKENS).step_by(2048) {
                let seconds = (operations(f64::from(piece + 2048)) - operations(f64::from(piece))) / rate;
                bench.tell(Event::Prefilled {
                    identity: identity(1),
                    from_token: piece,
                    to_token: piece + 2048,
                    seconds,
                });
            }
            bench.read_seconds = f64::from(BLOCK_TOKENS) * token_bytes / bytes_per_second;
            bench.restore_seconds = 1e-6;
            bench.save(&keys("a", 0, blocks));
            bench.forget_host();
            // Once to see how fast the disk is.
            bench.ask(&keys("a", 0, blocks), 0);
            bench.forget_host();
            let given = bench.ask(&keys("a", 0, blocks), 0).blocks;
            // One part may be computed while the other is read: the greater one is that of the faster way.
            let reloads = 2 * given > blocks as usize;
            assert_eq!(reloads, reload < compute, "{given}: {compute} s on {computer}, {reload} s from {way}");
        }
    }
}

#[test]
fn blocks_on_disk_find_room_among_others_that_are_used_as_much() {
    let mut bench = Bench::new(settings(4, 100));
    bench.computes_at(1000.0);
    for name in ["a", "b", "c"] {
        bench.save(&keys(name, 0, 4));
    }
    for turn in 0..9 {
        let name = ["a", "b", "c"][turn % 3];
        assert_eq!(bench.ask(&keys(name, 0, 4), 0).blocks, 4, "turn {turn}");
    }
    let view = bench.tier.view();
    assert_eq!((view.models[0].reloaded, view.models[0].recomputed), (9, 0));
}

#[test]
fn what_left_for_want_of_room_and_comes_back_says_what_more_room_is_worth() {
    let mut bench = Bench::new(TierSettings { disk_bytes_max: 0, ..settings(8, 0) });
    bench.computes_at(1000.0);
    // Models take half of it.
    bench.tell(Event::HostLimit { bytes: 4 * SLOT });
    let mut worths = Vec::new();
    for turn in 0..20_u64 {
        bench.now = bench.now + Duration::from_secs(2);
        let name = ["a", "b"][turn as usize % 2];
        let (_, told) = bench.only_ask(&keys(name, 0, 4), 0);
        worths.extend(told.iter().filter_map(pressed));
        bench.number += 1;
        let told = bench.tell(Event::SaveOffered {
            save: SaveId(bench.number),
            identity: identity(1),
            domain: TrustDomain::named("a"),
            parent: BlockKey([0; 32]),
            first_block: 0,
            keys: keys(name, 0, 4),
            state_bytes: 1000,
        });
        worths.extend(told.iter().filter_map(pressed));
    }
    // Each block takes 64 ms to compute and comes back two seconds after it left.
    let (wanted, told) = (0.064 / PAYLOAD as f64 / 2.0, worths.last().copied().unwrap());
    assert!((0.5..2.0).contains(&(told / wanted)), "{told} for {wanted}: {worths:?}");
}

fn pressed(action: &Action) -> Option<f64> {
    match action {
        Action::Pressed { worth } => Some(*worth),
        _ => None,
    }
}

#[test]
fn k12_one_read_for_all_who_want_a_block_and_nobody_waits_longer_than_computing_takes() {
    let mut bench = Bench::new(settings(100, 100));
    bench.computes_at(1000.0);
    bench.save(&keys("a", 0, 4));
    bench.forget_host();
    bench.held_reads = Some(Vec::new());
    let mut waiting: Vec<_> = (0..50).map(|_| bench.only_ask(&keys("a", 0, 4), 0)).collect();
    assert!(waiting.iter().all(|(_, told)| given(told).is_none()));
    let reads = bench.held_reads.clone().unwrap();
    assert_eq!(reads.len(), 4, "each block is read once");
    // The first two come, the others do not.
    for block in &reads[..2] {
        bench.tell(Event::ReadDone { block: *block, seconds: 0.001, failure: None });
    }
    let at = bench.tier.next_timer().unwrap();
    assert!(at.since(bench.now) <= Duration::from_millis(270), "256 tokens take 256 ms to compute");
    bench.now = at;
    let told = bench.tell(Event::Timer);
    let granted: Vec<_> =
        told.iter().filter(|action| matches!(action, Action::Grant { slots, .. } if slots.len() == 2)).collect();
    assert_eq!(granted.len(), waiting.len());
    for (request, _) in waiting.drain(..) {
        bench.tell(Event::Restored { request, first_block: 0, blocks: 2, seconds: 0.001 });
    }
    // What comes late is there for the next.
    for block in &reads[2..] {
        bench.tell(Event::ReadDone { block: *block, seconds: 0.3, failure: None });
    }
    bench.held_reads = None;
    assert_eq!(bench.ask(&keys("a", 0, 4), 0).blocks, 4);
}

#[test]
fn k3_a_read_that_fails_is_a_miss_from_there_on_and_its_reason_is_counted() {
    let mut bench = Bench::new(settings(100, 100));
    bench.save(&keys("a", 0, 4));
    bench.forget_host();
    bench.held_reads = Some(Vec::new());
    let (request, told) = bench.only_ask(&keys("a", 0, 4), 0);
    assert!(given(&told).is_none());
    let reads = bench.held_reads.take().unwrap();
    let mut told = Vec::new();
    for (place, block) in reads.into_iter().enumerate() {
        let failure =
            (place == 2).then(|| ReadFailure { reason: "checksum".to_string(), slot_is_held: false, is_lost: true });
        told.extend(bench.tell(Event::ReadDone { block, seconds: 0.001, failure }));
    }
    assert_eq!(given(&told), Some(Given { first: 0, blocks: 2, known: 2 }));
    assert!(told.iter().any(|action| matches!(action, Action::Retire { .. })), "{told:?}");
    bench.tell(Event::Restored { request, first_block: 0, blocks: 2, seconds: 0.001 });
    assert_eq!(bench.tier.view().rejected.0.get("checksum"), Some(&1));
    assert_eq!(bench.ask(&keys("a", 0, 4), 0).blocks, 2, "what follows the lost block is of no use");
    // Computed again and offered again, it is there again.
    bench.save(&keys("a", 0, 4));
    assert_eq!(bench.ask(&keys("a", 0, 4), 0).blocks, 4);
}

#[test]
fn k8_a_block_that_an_engine_refuses_is_not_given_again() {
    let mut bench = Bench::new(settings(100, 100));
    bench.save(&keys("a", 0, 3));
    let (request, told) = bench.only_ask(&keys("a", 0, 3), 0);
    assert_eq!(given(&told), Some(Given { first: 0, blocks: 3, known: 3 }));
    bench.tell(Event::Rejected { request, block: 1, reason: "tokens".to_string() });
    bench.tell(Event::Restored { request, first_block: 0, blocks: 1, seconds: 0.001 });
    assert_eq!(bench.ask(&keys("a", 0, 3), 0).blocks, 1);
    assert_eq!(bench.tier.view().rejected.0.get("tokens"), Some(&1));
}

#[test]
fn k14_lookups_alone_hold_nothing() {
    let mut bench = Bench::new(settings(4, 0));
    bench.save(&keys("a", 0, 4));
    for _ in 0..100 {
        bench.ask(&keys("a", 0, 4), 0);
    }
    // A day later nobody remembers, and new blocks are taken in.
    bench.now = bench.now + Duration::from_secs(24 * 3600);
    bench.save(&keys("a", 5000, 4));
    assert_eq!(bench.ask(&keys("a", 5000, 4), 0).blocks, 4);
}

#[test]
fn k17_more_saves_than_may_wait_are_skipped_and_counted() {
    let mut bench = Bench::new(settings(1000, 0));
    let offer = |number: u64| Event::SaveOffered {
        save: SaveId(number),
        identity: identity(1),
        domain: TrustDomain::named("a"),
        parent: BlockKey([0; 32]),
        first_block: 0,
        keys: keys("a", number as u32 * 1000, 2),
        state_bytes: 1000,
    };
    let mut actions = Vec::new();
    for number in 0..20 {
        bench.tier.handle(bench.now, offer(number), &mut actions);
    }
    let gone = actions.iter().filter(|action| matches!(action, Action::SaveGo { .. })).count();
    let skipped = actions.iter().filter(|action| matches!(action, Action::SaveSkip { .. })).count();
    assert_eq!((gone, skipped, bench.tier.view().saves_skipped), (1, 20 - 1 - 8, 11));
}

#[test]
fn beyond_the_wear_that_is_allowed_only_what_was_asked_for_twice_is_written() {
    let mut bench = Bench::new(TierSettings { disk_write_bytes_per_day: 3 * SLOT, ..settings(100, 100) });
    bench.save(&keys("a", 0, 3));
    bench.save(&keys("a", 1000, 3));
    assert_eq!(bench.writes, 3);
    bench.ask(&keys("a", 1000, 3), 0);
    assert_eq!(bench.writes, 6, "now it was asked for twice");
    bench.now = bench.now + Duration::from_secs(24 * 3600);
    bench.save(&keys("a", 2000, 3));
    assert_eq!(bench.writes, 9, "another day, another allowance");
}

#[test]
fn k4_k5_k6_whatever_shapes_the_bytes_is_part_of_the_identity() {
    let model = Digest([1; 32]);
    let base = KvIdentity::new(&model, "f16 fa rope=10000", "llama.cpp 1");
    for other in [
        KvIdentity::new(&Digest([2; 32]), "f16 fa rope=10000", "llama.cpp 1"),
        KvIdentity::new(&model, "bf16 fa rope=10000", "llama.cpp 1"),
        KvIdentity::new(&model, "f16 fa rope=20000", "llama.cpp 1"),
        KvIdentity::new(&model, "f16 fa rope=10000", "llama.cpp 2"),
    ] {
        assert_ne!(base, other);
        let tokens: Vec<u32> = (0..64).collect();
        let domain = TrustDomain::named("a");
        assert_ne!(chain(&base, &domain, &tokens), chain(&other, &domain, &tokens));
    }
}

#[test]
fn a_purge_takes_what_is_offered_but_not_there_yet() {
    let mut bench = Bench::new(settings(100, 100));
    let offer = |save: u64, keys: Vec<BlockKey>| Event::SaveOffered {
        save: SaveId(save),
        identity: identity(1),
        domain: TrustDomain::named("a"),
        parent: BlockKey([0; 32]),
        first_block: 0,
        keys,
        state_bytes: 1000,
    };
    let mut actions = Vec::new();
    let (now, domain) = (bench.now, TrustDomain::named("a"));
    bench.tier.handle(now, offer(1, keys("a", 0, 3)), &mut actions);
    bench.tier.handle(now, offer(2, keys("a", 500, 3)), &mut actions);
    bench.tier.handle(now, Event::Purge { domain }, &mut actions);
    let wanted =
        [Action::SaveGo { save: SaveId(1) }, Action::SaveSkip { save: SaveId(2) }, Action::PurgeDisk { domain }];
    assert_eq!(actions, wanted);
    // The staging area is given back, with nothing taken out of it.
    actions.clear();
    bench.tier.handle(now, Event::Staged { save: SaveId(1), ok: true }, &mut actions);
    assert_eq!(actions, [Action::Gather { save: SaveId(1), identity: identity(1), blocks: Vec::new() }]);
    // What is being gathered goes as soon as it is there; the next offer is taken.
    bench.tier.handle(now, offer(3, keys("a", 0, 3)), &mut actions);
    bench.tier.handle(now, Event::Staged { save: SaveId(3), ok: true }, &mut actions);
    bench.tier.handle(now, Event::Purge { domain }, &mut actions);
    bench.tier.handle(now, Event::Gathered { save: SaveId(3), ok: true }, &mut actions);
    bench.tier.check().unwrap();
    assert_eq!(bench.tier.host_bytes(), 0);
    bench.save(&keys("a", 0, 3));
    assert_eq!(bench.ask(&keys("a", 0, 3), 0).blocks, 3);
}

#[test]
fn of_a_model_that_is_removed_nothing_is_kept_until_it_is_there_again() {
    let mut bench = Bench::new(settings(100, 100));
    let prompt = keys("a", 0, 3);
    bench.save(&prompt);
    let told = bench.tell(Event::Forget { identity: identity(1) });
    let retired = told.iter().filter(|action| matches!(action, Action::Retire { .. })).count();
    assert_eq!((retired, bench.tier.host_bytes(), bench.tier.view().blocks), (3, 0, 0));
    // Its engine is still there, and a part of the disk was not looked at yet.
    bench.save(&prompt);
    let place = DiskPlace { segment: 9, page: 1, pages: 257 };
    let found = |model| FoundBlock {
        identity: identity(model),
        domain: TrustDomain::named("a"),
        key: prompt[0],
        parent: prompt[0],
        depth: 0,
        payload_bytes: PAYLOAD,
        place,
    };
    let late = Event::Found { blocks: vec![found(1)], others_bytes: 0 };
    assert_eq!(bench.tell(late), [Action::Retire { place }]);
    assert_eq!(bench.tier.view().blocks, 0);
    bench.open(1);
    bench.save(&prompt);
    assert_eq!((bench.ask(&prompt, 0).blocks, bench.tier.view().models[0].disk_blocks), (3, 3));
    // One that was never there in this life.
    bench.tell(Event::Forget { identity: identity(2) });
    assert_eq!(bench.tell(Event::Found { blocks: vec![found(2)], others_bytes: 0 }), [Action::Retire { place }]);
    assert_eq!(bench.tier.view().models.len(), 1);
}

#[test]
fn a_million_blocks_are_found_and_take_little_memory() {
    use super::INDEX_BYTES_PER_BLOCK;
    const { assert!(INDEX_BYTES_PER_BLOCK <= 128) };
    let mut bench = Bench::new(settings(100, 1 << 21));
    let key = |number: u64| {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        BlockKey(bytes)
    };
    let found = |number: u64| FoundBlock {
        identity: identity(1),
        domain: TrustDomain::named("a"),
        key: key(number),
        parent: key(number / 64 * 64 + (number % 64).saturating_sub(1)),
        depth: (number % 64) as u32,
        payload_bytes: PAYLOAD,
        place: DiskPlace { segment: (number / 1024) as u32, page: (number % 1024) as u32, pages: 257 },
    };
    let mut actions = Vec::new();
    for batch in 0..1000u64 {
        let blocks = (batch * 1000..(batch + 1) * 1000).map(found).collect();
        bench.tier.handle(bench.now, Event::Found { blocks, others_bytes: 0 }, &mut actions);
    }
    assert!(actions.is_empty());
    assert_eq!(bench.tier.view().models[0].disk_blocks, 1_000_000);
    let prompt: Vec<BlockKey> = (640_000..640_064).map(key).collect();
    assert_eq!(bench.ask(&prompt, 0).blocks, 64);
}
