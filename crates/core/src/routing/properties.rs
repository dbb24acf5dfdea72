//! Random sequences of everything that can happen: every invariant after each step, the same decisions for the same
//! sequence, and nothing left once everybody has let go.

use super::{tests::*, *};
use crate::time::Instant;
use core::time::Duration;
use proptest::prelude::*;
use std::{collections::BTreeSet, vec, vec::Vec};

const REPLICAS: u32 = 6;
const TENANTS: u64 = 12;
const MODELS: [ModelKey; 2] = [MODEL, ModelKey(8)];

#[derive(Debug, Clone)]
enum Step {
    Ask { tenant: u64, question: u64, streamed: bool },
    FirstToken(usize),
    End { which: usize, ended: Ended },
    Add(u32),
    Remove(u32),
    Report { replica: u32, report: Report },
    Wait(u64),
}

fn outcomes() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        6 => Just(Outcome::Finished),
        2 => Just(Outcome::Cancelled),
        2 => Just(Outcome::Failed),
        2 => Just(Outcome::Lost),
        1 => prop::option::of(0..200_u64)
            .prop_map(|wait| Outcome::Busy { retry_after: wait.map(Duration::from_secs) }),
    ]
}

fn endings() -> impl Strategy<Value = Ended> {
    let usage = prop::option::of((0..20_000_u64, prop::option::of(0..20_000_u64)));
    (outcomes(), any::<bool>(), any::<bool>(), usage).prop_map(|(outcome, output_started, retried, usage)| Ended {
        outcome,
        output_started,
        retried,
        usage: usage.map(|(prompt_tokens, cached_tokens)| Usage { prompt_tokens, cached_tokens }),
    })
}

fn reports() -> impl Strategy<Value = Report> {
    prop_oneof![
        any::<u32>().prop_map(|requests| Report::Load { requests }),
        (0..100_000_u64).prop_map(|tokens| Report::Capacity { tokens }),
        (0..3_u64).prop_map(Report::Instance),
        Just(Report::CacheCleared),
        Just(Report::Restarted),
        Just(Report::MayHaveRestarted),
        any::<bool>().prop_map(|healthy| Report::Probe { healthy }),
        any::<bool>().prop_map(Report::Draining),
        (0..TENANTS, 0..8_usize, any::<bool>()).prop_map(|(tenant, place, held)| {
            let boundary = prompt(tenant, 0, 6000).boundaries().nth(place).unwrap();
            Report::Holds { boundary, held }
        }),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0..TENANTS, 0..4_u64, any::<bool>())
            .prop_map(|(tenant, question, streamed)| Step::Ask { tenant, question, streamed }),
        6 => any::<usize>().prop_map(Step::FirstToken),
        8 => (any::<usize>(), endings()).prop_map(|(which, ended)| Step::End { which, ended }),
        1 => (0..REPLICAS).prop_map(Step::Add),
        1 => (0..REPLICAS).prop_map(Step::Remove),
        3 => (0..REPLICAS, reports()).prop_map(|(replica, report)| Step::Report { replica, report }),
        3 => (0..3000_u64).prop_map(Step::Wait),
    ]
}

struct World {
    router: Router,
    now: Instant,
    open: Vec<Ticket>,
    /// The numbers that replicas have now: a number is not given twice.
    numbers: Vec<u32>,
    /// Replicas that have said that they take nothing new.
    draining: BTreeSet<u32>,
    decisions: Vec<Option<ReplicaId>>,
}

impl World {
    fn new() -> Self {
        let settings = Settings { mirror_bytes: 20_000, groups_max: 8, tickets_max: 64, ..Settings::default() };
        let mut router = Router::new(settings);
        let numbers: Vec<u32> = (0..REPLICAS).collect();
        for number in &numbers {
            router.add(ReplicaId(*number), capped(*number));
        }
        Self { router, now: Instant::ZERO, open: vec![], numbers, draining: BTreeSet::new(), decisions: vec![] }
    }

    fn step(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Ask { tenant, question, streamed } => {
                let prefix = prompt(tenant, question, 6000);
                let model = MODELS[tenant as usize % MODELS.len()];
                let decision = self.router.decide(now, &Ask { model, streamed, tenant, ..ask(&prefix) });
                let replica = decision.ok().map(|decision| decision.replica);
                let may = replica.is_none_or(|replica| !self.draining.contains(&replica.0));
                assert!(may, "{replica:?} takes nothing new and is asked");
                self.decisions.push(replica);
                self.open.extend(decision.ok().map(|decision| decision.ticket));
            }
            Step::FirstToken(which) if !self.open.is_empty() => {
                self.router.first_token(now, self.open[which % self.open.len()]);
            }
            Step::End { which, ended } if !self.open.is_empty() => {
                let ticket = self.open.swap_remove(which % self.open.len());
                self.router.ended(now, ticket, ended);
            }
            Step::FirstToken(_) | Step::End { .. } => {}
            Step::Add(slot) => {
                self.router.add(ReplicaId(self.numbers[slot as usize]), capped(slot));
            }
            Step::Remove(slot) => {
                self.router.remove(ReplicaId(self.numbers[slot as usize]));
                self.numbers[slot as usize] += REPLICAS;
            }
            Step::Report { replica, report } => {
                let number = self.numbers[replica as usize];
                match report {
                    Report::Draining(true) if self.router.view(now, ReplicaId(number)).is_some() => {
                        self.draining.insert(number);
                    }
                    Report::Draining(false) => {
                        self.draining.remove(&number);
                    }
                    _ => {}
                }
                self.router.reported(now, ReplicaId(number), report);
            }
            Step::Wait(milliseconds) => {
                self.now = now + Duration::from_millis(milliseconds);
                self.router.tick(self.now);
            }
        }
    }
}

fn capped(number: u32) -> ReplicaSettings {
    ReplicaSettings { models: MODELS.to_vec(), capacity_tokens: Some(6000), ..replica(number) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_every_promise_holds(steps in prop::collection::vec(steps(), 1..200)) {
        let mut world = World::new();
        for step in steps {
            let shown = std::format!("{step:?}");
            world.step(step);
            prop_assert_eq!(world.router.check(), Ok(()), "after {}", shown);
        }
        for ticket in std::mem::take(&mut world.open) {
            world.router.ended(world.now, ticket, finished());
        }
        prop_assert_eq!(world.router.check(), Ok(()));
        prop_assert_eq!(world.router.totals().open, 0);
        for number in world.numbers {
            if let Some(view) = world.router.view(world.now, ReplicaId(number)) {
                prop_assert_eq!((view.in_flight, view.pending_tokens.min(1)), (0, view.pending_tokens.min(1)));
            }
            world.router.remove(ReplicaId(number));
        }
        prop_assert_eq!(world.router.totals().remembered, 0);
    }

    /// However hot a prompt is, nobody has more than so many times what it would have if all had the same.
    #[test]
    fn nobody_has_more_than_the_bound(asked in prop::collection::vec((0..3_u64, any::<bool>(), any::<usize>()), 1..300)) {
        let bound = Settings { load_bound: 1.25, load_floor: 2, ..Settings::default() };
        let mut router = Router::new(Settings { mirror_bytes: 4 << 20, groups_max: 1024, ..bound.clone() });
        for number in 0..REPLICAS {
            router.add(ReplicaId(number), replica(number));
        }
        let (mut open, mut counts) = (Vec::new(), [0_u32; REPLICAS as usize]);
        for (number, (tenant, ends, which)) in asked.into_iter().enumerate() {
            let now = Instant::after(Duration::from_millis(100 * number as u64));
            let decision = router.decide(now, &ask(&prompt(tenant, number as u64, 6000))).expect("all may be asked");
            let replica = decision.replica.0 as usize;
            counts[replica] += 1;
            open.push((replica, decision.ticket));
            router.first_token(now, decision.ticket);
            let mean = open.len() as f64 / f64::from(REPLICAS);
            let most = libm::ceil(bound.load_bound * mean).max(f64::from(bound.load_floor));
            prop_assert!(f64::from(counts[replica]) <= most, "{counts:?} and at most {most}");
            if ends {
                let (replica, ticket) = open.swap_remove(which % open.len());
                counts[replica] -= 1;
                router.ended(now, ticket, finished());
            }
        }
    }

    #[test]
    fn the_same_events_give_the_same_decisions(steps in prop::collection::vec(steps(), 1..120)) {
        let (mut one, mut other) = (World::new(), World::new());
        for step in steps {
            one.step(step.clone());
            other.step(step);
        }
        prop_assert_eq!(one.decisions, other.decisions);
    }

    #[test]
    fn replicas_come_and_go_every_second_and_every_request_ends_r20(seed in any::<u64>()) {
        let mut world = World::new();
        for second in 0..120_u64 {
            let slot = ((seed ^ second.wrapping_mul(0x9e37_79b9)) % u64::from(REPLICAS)) as u32;
            if second % 2 == 0 {
                world.step(Step::Remove(slot));
            }
            world.step(Step::Add(slot));
            for tenant in 0..TENANTS {
                world.step(Step::Ask { tenant, question: second, streamed: true });
            }
            while !world.open.is_empty() {
                world.step(Step::FirstToken(0));
                world.step(Step::End { which: 0, ended: finished() });
            }
            world.step(Step::Wait(1000));
            prop_assert_eq!(world.router.check(), Ok(()));
        }
        prop_assert!(world.decisions.iter().all(Option::is_some));
    }
}
