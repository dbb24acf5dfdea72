//! The cases that routers of others got wrong, by their numbers, and what else one step shows.

use super::*;
use crate::time::Instant;
use core::time::Duration;
use std::{vec, vec::Vec};

pub(super) const MODEL: ModelKey = ModelKey(7);

pub(super) fn salt() -> Salt {
    Salt::new(b"secret", b"model")
}

/// A system prompt of a tenant's own, and a question.
pub(super) fn prompt(tenant: u64, question: u64, system_bytes: usize) -> PrefixChain {
    let mut builder = PrefixBuilder::new(salt());
    let line = tenant.to_le_bytes();
    let system: Vec<u8> = line.iter().copied().cycle().take(system_bytes).collect();
    builder.push(&system);
    builder.boundary();
    builder.push(&question.to_le_bytes().repeat(64));
    builder.boundary();
    builder.finish()
}

pub(super) fn replica(number: u32) -> ReplicaSettings {
    ReplicaSettings {
        identity: u64::from(number) + 1000,
        models: vec![MODEL],
        slots: 64,
        weight: 1.0,
        capacity_tokens: None,
        prefill_tokens_per_second: None,
    }
}

pub(super) fn router(replicas: u32) -> Router {
    let mut router = Router::new(Settings { mirror_bytes: 4 << 20, groups_max: 1024, ..Settings::default() });
    for number in 0..replicas {
        assert!(router.add(ReplicaId(number), replica(number)));
    }
    router
}

pub(super) fn ask(prefix: &PrefixChain) -> Ask<'_> {
    Ask { model: MODEL, prefix, tenant: 1, streamed: true, excluded: None }
}

fn at(seconds: f64) -> Instant {
    Instant::after(Duration::from_secs_f64(seconds))
}

pub(super) fn finished() -> Ended {
    Ended { outcome: Outcome::Finished, output_started: true, retried: false, usage: None }
}

pub(super) fn failed() -> Ended {
    Ended { outcome: Outcome::Failed, output_started: false, retried: false, usage: None }
}

pub(super) fn lost() -> Ended {
    Ended { outcome: Outcome::Lost, ..failed() }
}

/// Asks and is answered at once.
fn answer(router: &mut Router, now: Instant, prefix: &PrefixChain) -> Decision {
    let decision = router.decide(now, &ask(prefix)).unwrap();
    router.first_token(now, decision.ticket);
    router.ended(now, decision.ticket, finished());
    router.check().unwrap();
    decision
}

#[test]
fn a_prompt_comes_back_to_the_replica_that_has_it() {
    let mut router = router(8);
    let first = answer(&mut router, at(1.0), &prompt(1, 1, 16_000));
    assert_eq!((first.why, first.expected_cached_tokens), (Why::LeastCost, 0));
    for question in 2..20 {
        let next = answer(&mut router, at(2.0), &prompt(1, question, 16_000));
        assert_eq!((next.replica, next.why), (first.replica, Why::Affinity));
        assert_eq!(next.expected_cached_tokens, 4000);
        assert_eq!(next.candidates[0].unwrap().replica, first.replica);
    }
}

#[test]
fn shares_stay_even_through_a_thousand_additions_and_removals_r1() {
    let mut router = router(10);
    let mut next = 10;
    for step in 0..1000_u32 {
        router.remove(ReplicaId(next - 10));
        assert!(router.add(ReplicaId(next), replica(next)));
        next += 1;
        answer(&mut router, at(f64::from(step)), &prompt(u64::from(step), 0, 3000));
    }
    let mut counts = vec![0; 10];
    let mut open = Vec::new();
    for tenant in 0..5000_u64 {
        let decision = router.decide(at(2000.0), &ask(&prompt(100_000 + tenant, 0, 3000))).unwrap();
        router.first_token(at(2000.0), decision.ticket);
        counts[(decision.replica.0 - (next - 10)) as usize] += 1;
        open.push(decision.ticket);
    }
    router.check().unwrap();
    assert!(counts.iter().all(|count| *count <= 625), "{counts:?}");
}

#[test]
fn a_hot_prefix_overflows_to_many_and_never_beyond_the_floor_r2() {
    let mut router = router(300);
    let hot = prompt(1, 1, 16_000);
    for tenant in 0..15 {
        router.decide(at(1.0), &ask(&prompt(100 + tenant, 0, 16_000))).unwrap();
    }
    let floor = Settings::default().load_floor;
    let mut counts = vec![0; 300];
    for _ in 0..64 {
        let decision = router.decide(at(1.0), &ask(&hot)).unwrap();
        counts[decision.replica.0 as usize] += 1;
    }
    router.check().unwrap();
    assert!((0..300).all(|number| router.view(at(1.0), ReplicaId(number)).unwrap().in_flight <= floor));
    let used = counts.iter().filter(|count| **count > 0).count();
    assert!(used >= 8, "{used} replicas");
}

#[test]
fn an_empty_replica_with_much_to_do_gets_nothing_new_r3() {
    let mut router = router(16);
    router.reported(at(1.0), ReplicaId(3), Report::Load { requests: 100 });
    for tenant in 0..100 {
        let decision = answer(&mut router, at(1.0), &prompt(tenant, 0, 16_000));
        assert_ne!(decision.replica, ReplicaId(3));
    }
    // The same where the requests are this router's own.
    let mut router = super::tests::router(16);
    for number in (0..16).filter(|number| *number != 3) {
        router.reported(at(1.0), ReplicaId(number), Report::Draining(true));
    }
    for tenant in 0..100 {
        router.decide(at(1.0), &ask(&prompt(1000 + tenant, 0, 16_000))).unwrap();
    }
    router.reported(at(1.0), ReplicaId(3), Report::CacheCleared);
    for number in (0..16).filter(|number| *number != 3) {
        router.reported(at(1.0), ReplicaId(number), Report::Draining(false));
    }
    for tenant in 0..100 {
        let decision = answer(&mut router, at(1.0), &prompt(tenant, 0, 16_000));
        assert_ne!(decision.replica, ReplicaId(3));
    }
}

#[test]
fn one_wedged_replica_leaves_the_others_their_tenants_r4() {
    let mut router = router(16);
    for tenant in 0..160 {
        answer(&mut router, at(1.0), &prompt(tenant, 0, 16_000));
    }
    let wedged = answer(&mut router, at(2.0), &prompt(0, 1, 16_000)).replica;
    let (mut hits, mut others) = (0, 0);
    for round in 0..20_u64 {
        for tenant in 0..160 {
            let now = at(3.0 + round as f64);
            let decision = router.decide(now, &ask(&prompt(tenant, 2 + round, 16_000))).unwrap();
            if decision.replica == wedged {
                continue; // it never answers
            }
            others += 1;
            hits += u32::from(decision.expected_cached_tokens > 3000);
            router.first_token(now, decision.ticket);
            router.ended(now, decision.ticket, finished());
        }
    }
    router.check().unwrap();
    assert!(hits * 100 >= others * 95, "{hits} of {others}");
    let stuck = router.view(at(23.0), wedged).unwrap().in_flight;
    assert!(stuck <= Settings::default().load_floor * 8, "{stuck} wait for the wedged one");
}

#[test]
fn ten_thousand_requests_that_are_given_up_leave_nothing_behind_r5() {
    let mut router = router(4);
    let mut open = std::collections::VecDeque::new();
    for number in 0..10_000_u64 {
        let now = at(number as f64 / 100.0);
        let prefix = prompt(number % 50, number, 3000);
        open.push_back(router.decide(now, &Ask { streamed: number % 3 > 0, ..ask(&prefix) }).unwrap().ticket);
        if number % 2 == 0 {
            router.first_token(now, open[(number % open.len() as u64) as usize]);
        }
        if open.len() > 40 {
            let ticket = open.remove((number * 7 % 40) as usize).unwrap();
            let given_up = Ended { outcome: Outcome::Cancelled, output_started: number % 2 == 0, ..failed() };
            assert_eq!(router.ended(now, ticket, given_up), Verdict::Over);
            router.first_token(now, ticket);
        }
    }
    router.check().unwrap();
    for ticket in open {
        router.ended(at(100.0), ticket, Ended { outcome: Outcome::Cancelled, ..failed() });
    }
    router.check().unwrap();
    assert_eq!(router.totals().open, 0);
    for number in 0..4 {
        let view = router.view(at(200.0), ReplicaId(number)).unwrap();
        assert_eq!((view.in_flight, view.pending_tokens, view.breaker), (0, 0, BreakerState::Closed));
    }
}

#[test]
fn weights_share_the_load_and_nonsense_among_them_does_no_harm() {
    let mut router = router(4);
    for (number, weight) in [(0, 3.0), (1, f64::NAN), (2, 0.0), (3, f64::INFINITY)] {
        router.add(ReplicaId(number), ReplicaSettings { weight, ..replica(number) });
    }
    for number in 0..200 {
        assert!(router.decide(at(1.0), &ask(&prompt(number, 0, 200))).is_ok());
        router.check().unwrap();
    }
}

#[test]
fn requests_with_little_to_share_spread_by_load_r6() {
    let mut router = router(8);
    let mut counts = vec![0; 8];
    for question in 0..32 {
        let decision = router.decide(at(1.0), &ask(&prompt(1, question, 200))).unwrap();
        counts[decision.replica.0 as usize] += 1;
    }
    assert!(counts.iter().all(|count| (3..=5).contains(count)), "{counts:?}");
}

#[test]
fn an_open_breaker_gets_nothing_and_the_next_holder_serves_r13() {
    let mut router = router(8);
    let owner = answer(&mut router, at(1.0), &prompt(1, 0, 16_000)).replica;
    for _ in 0..CONSECUTIVE_FAILURES_MAX {
        let decision = router.decide(at(1.0), &ask(&prompt(1, 0, 16_000))).unwrap();
        assert_eq!(decision.replica, owner);
        assert_eq!(router.ended(at(1.0), decision.ticket, lost()), Verdict::RetryElsewhere);
    }
    let next = answer(&mut router, at(1.1), &prompt(1, 1, 16_000));
    assert_ne!(next.replica, owner);
    assert_eq!(next.why, Why::Spill);
    let again = answer(&mut router, at(1.2), &prompt(1, 2, 16_000));
    assert_eq!(again.replica, next.replica);
    router.reported(at(1.3), owner, Report::Probe { healthy: true });
    assert_eq!(router.view(at(1.3), owner).unwrap().breaker, BreakerState::HalfOpen);
}

#[test]
fn another_life_of_a_replica_holds_nothing_r14() {
    let mut router = router(4);
    let holder = answer(&mut router, at(1.0), &prompt(1, 0, 16_000)).replica;
    router.reported(at(1.0), holder, Report::Instance(1));
    assert!(answer(&mut router, at(1.0), &prompt(1, 1, 16_000)).expected_cached_tokens > 0);
    router.reported(at(1.1), holder, Report::Instance(2));
    assert_eq!(router.view(at(1.1), holder).unwrap().held_tokens, 0);
    assert_eq!(answer(&mut router, at(1.2), &prompt(1, 2, 16_000)).expected_cached_tokens, 0);
}

#[test]
fn a_saturated_owner_sheds_and_gets_them_back_r19() {
    let mut router = router(8);
    let owner = answer(&mut router, at(1.0), &prompt(1, 0, 16_000)).replica;
    let mut open = Vec::new();
    let mut elsewhere = 0;
    for question in 0..40 {
        let decision = router.decide(at(1.1), &ask(&prompt(1, question, 16_000))).unwrap();
        elsewhere += u32::from(decision.replica != owner);
        open.push(decision.ticket);
    }
    assert!(elsewhere > 0);
    for ticket in open {
        router.first_token(at(2.0), ticket);
        router.ended(at(2.0), ticket, finished());
    }
    assert_eq!(answer(&mut router, at(2.1), &prompt(1, 99, 16_000)).replica, owner);
}

#[test]
fn a_second_try_only_elsewhere_only_once_and_only_before_any_output() {
    let mut router = router(2);
    let prefix = prompt(1, 0, 4000);
    let first = router.decide(at(1.0), &ask(&prefix)).unwrap();
    assert_eq!(router.ended(at(1.0), first.ticket, failed()), Verdict::RetryElsewhere);
    assert_eq!(router.ended(at(1.0), first.ticket, failed()), Verdict::Over, "a second end of the same request");
    let second = router.decide(at(1.0), &Ask { excluded: Some(first.replica), ..ask(&prefix) }).unwrap();
    assert_ne!(second.replica, first.replica);
    let verdict = router.ended(at(1.0), second.ticket, Ended { retried: true, ..failed() });
    assert_eq!(verdict, Verdict::Over);
    let third = router.decide(at(1.0), &ask(&prefix)).unwrap();
    let verdict = router.ended(at(1.0), third.ticket, Ended { output_started: true, ..failed() });
    assert_eq!(verdict, Verdict::Over);
    router.remove(first.replica);
    let last = router.decide(at(1.0), &ask(&prefix)).unwrap();
    assert_eq!(router.ended(at(1.0), last.ticket, failed()), Verdict::Over, "there is no other");
    router.check().unwrap();
}

#[test]
fn a_busy_replica_is_left_alone_for_as_long_as_it_asks() {
    let mut router = router(1);
    let prefix = prompt(1, 0, 4000);
    let decision = router.decide(at(1.0), &ask(&prefix)).unwrap();
    assert_eq!(decision.why, Why::Only);
    let busy = Ended { outcome: Outcome::Busy { retry_after: Some(Duration::from_secs(7)) }, ..failed() };
    router.ended(at(1.0), decision.ticket, busy);
    let refused = router.decide(at(7.9), &ask(&prefix)).unwrap_err();
    assert_eq!(refused, Refusal::Unavailable { retry_at: Some(at(8.0)) });
    assert!(router.decide(at(8.0), &ask(&prefix)).is_ok());
    router.reported(at(8.0), ReplicaId(0), Report::Probe { healthy: true });
    let decision = router.decide(at(8.0), &ask(&prefix)).unwrap();
    let endless = Ended { outcome: Outcome::Busy { retry_after: Some(Duration::MAX) }, ..failed() };
    router.ended(at(8.0), decision.ticket, endless);
    router.reported(at(9.0), ReplicaId(0), Report::Probe { healthy: true });
    assert!(router.decide(at(127.9), &ask(&prefix)).is_err(), "no probe cuts it short");
    assert!(router.decide(at(128.0), &ask(&prefix)).is_ok(), "nobody is left alone for ever");
}

#[test]
fn a_replica_that_cannot_serve_one_model_now_is_asked_for_its_others() {
    let mut router = Router::new(Settings::default());
    let other = ModelKey(8);
    let both = ReplicaSettings { models: vec![MODEL, other], ..replica(0) };
    router.add(ReplicaId(0), both.clone());
    let prefix = prompt(1, 0, 4000);
    let decision = router.decide(at(1.0), &ask(&prefix)).unwrap();
    let busy = Ended { outcome: Outcome::Busy { retry_after: Some(Duration::from_secs(60)) }, ..failed() };
    router.ended(at(1.0), decision.ticket, busy);
    assert!(router.decide(at(2.0), &ask(&prefix)).is_err());
    let for_other = Ask { model: other, ..ask(&prefix) };
    let second = router.decide(at(2.0), &for_other).unwrap();
    router.ended(at(2.0), second.ticket, busy);
    assert!(router.decide(at(3.0), &for_other).is_err());
    router.add(ReplicaId(0), ReplicaSettings { models: vec![other], ..both.clone() });
    assert!(router.decide(at(3.0), &for_other).is_err(), "what stays is left alone as before");
    router.add(ReplicaId(0), both);
    assert!(router.decide(at(3.0), &ask(&prefix)).is_ok(), "a model that was taken out begins anew");
    router.check().unwrap();
}

#[test]
fn a_model_that_fails_leaves_its_replicas_others_alone() {
    let mut router = Router::new(Settings::default());
    let other = ModelKey(8);
    router.add(ReplicaId(0), ReplicaSettings { models: vec![MODEL, other], ..replica(0) });
    let prefix = prompt(1, 0, 4000);
    for _ in 0..CONSECUTIVE_FAILURES_MAX {
        let decision = router.decide(at(1.0), &ask(&prefix)).unwrap();
        router.ended(at(1.0), decision.ticket, failed());
    }
    let until = at(1.5);
    assert_eq!(router.decide(at(1.1), &ask(&prefix)).unwrap_err(), Refusal::Unavailable { retry_at: Some(until) });
    assert_eq!(router.pauses(at(1.1), ReplicaId(0)), [Pause { model: MODEL, until, asked: false }]);
    assert_eq!(router.view(at(1.1), ReplicaId(0)).unwrap().breaker, BreakerState::Closed);
    router.reported(at(1.1), ReplicaId(0), Report::Probe { healthy: true });
    assert!(router.decide(at(1.1), &ask(&prefix)).is_err(), "its health says nothing of this model");
    let for_other = Ask { model: other, ..ask(&prefix) };
    for _ in 0..20 {
        let decision = router.decide(at(1.1), &for_other).unwrap();
        router.ended(at(1.1), decision.ticket, finished());
        router.check().unwrap();
    }
    // One request decides, and a second one waits for what it brings.
    let trial = router.decide(at(1.6), &ask(&prefix)).unwrap();
    assert!(router.decide(at(1.6), &ask(&prefix)).is_err());
    router.check().unwrap();
    router.ended(at(1.6), trial.ticket, finished());
    assert!(router.decide(at(1.6), &ask(&prefix)).is_ok());
    // A replica that is not there is there for none of its models.
    for _ in 0..CONSECUTIVE_FAILURES_MAX {
        let decision = router.decide(at(2.0), &ask(&prefix)).unwrap();
        router.ended(at(2.0), decision.ticket, lost());
    }
    assert!(router.decide(at(2.1), &for_other).is_err());
    router.check().unwrap();
}

#[test]
fn another_life_is_not_blamed_for_the_one_before_r14() {
    let mut router = router(1);
    let prefix = prompt(1, 0, 16_000);
    for _ in 0..CONSECUTIVE_FAILURES_MAX {
        let decision = router.decide(at(1.0), &ask(&prefix)).unwrap();
        router.ended(at(1.0), decision.ticket, failed());
    }
    assert!(router.decide(at(1.1), &ask(&prefix)).is_err());
    router.reported(at(1.1), ReplicaId(0), Report::Restarted);
    let decision = router.decide(at(1.1), &ask(&prefix)).unwrap();
    assert_eq!(decision.expected_cached_tokens, 0);
    router.check().unwrap();
}

#[test]
fn what_a_replica_counts_says_whether_it_is_another_life_r14() {
    let counted = |cached_tokens| {
        let usage = Usage { prompt_tokens: 4010, cached_tokens: Some(cached_tokens) };
        Ended { usage: Some(usage), ..finished() }
    };
    let held_after = |cached_tokens, doubt: bool| {
        let mut router = router(1);
        for tenant in 0..8 {
            answer(&mut router, at(1.0), &prompt(tenant, 0, 16_000));
        }
        if doubt {
            router.reported(at(1.0), ReplicaId(0), Report::MayHaveRestarted);
        }
        let decision = router.decide(at(2.0), &ask(&prompt(3, 1, 16_000))).unwrap();
        router.first_token(at(2.0), decision.ticket);
        router.ended(at(2.0), decision.ticket, counted(cached_tokens));
        router.check().unwrap();
        router.view(at(2.0), ReplicaId(0)).unwrap().held_tokens
    };
    assert_eq!(held_after(0, true), 0);
    assert!(held_after(3900, true) > 30_000);
    assert!(held_after(0, false) > 20_000, "one prompt that is gone is not all of them");
}

#[test]
fn lies_about_load_move_little() {
    let mut router = router(4);
    router.reported(at(1.0), ReplicaId(0), Report::Load { requests: u32::MAX });
    router.reported(at(1.0), ReplicaId(1), Report::Load { requests: 0 });
    let mut counts = vec![0; 4];
    for question in 0..200 {
        let decision = router.decide(at(1.0), &ask(&prompt(question, 0, 200))).unwrap();
        counts[decision.replica.0 as usize] += 1;
    }
    assert!(counts[1] <= 80, "one that says it is idle does not get everything: {counts:?}");
    let later = router.decide(at(7.0), &ask(&prompt(1000, 0, 200))).unwrap();
    assert_eq!(later.replica, ReplicaId(0), "one that says it is drowned has to say so again: {counts:?}");
}

#[test]
fn a_tenants_spread_is_capped() {
    let mut router = Router::new(Settings { tenant_spread: 0.25, ..Settings::default() });
    for number in 0..16 {
        router.add(ReplicaId(number), replica(number));
    }
    let mut used = std::collections::BTreeSet::new();
    for question in 0..500 {
        let decision = router.decide(at(1.0), &ask(&prompt(question, 0, 2000))).unwrap();
        used.insert(decision.replica);
    }
    assert_eq!(used.len(), 4);
}

#[test]
fn memory_is_bounded_and_falls_when_nobody_asks_r7() {
    let budget = 1 << 20;
    let mut router = Router::new(Settings { mirror_bytes: budget, groups_max: 256, ..Settings::default() });
    for number in 0..4 {
        router.add(ReplicaId(number), ReplicaSettings { capacity_tokens: Some(1 << 40), ..replica(number) });
    }
    for tenant in 0..20_000 {
        answer_unchecked(&mut router, at(1.0), &prompt(tenant, 0, 4000));
        if tenant % 1000 == 0 {
            router.check().unwrap();
        }
    }
    let full = router.totals().remembered_bytes;
    assert!(full > budget / 2 && full <= budget, "{full}");
    router.tick(at(2.0));
    assert_eq!(router.totals().remembered_bytes, full);
    router.tick(at(1000.0));
    assert_eq!(router.totals().remembered_bytes, 0);
    router.check().unwrap();
}

fn answer_unchecked(router: &mut Router, now: Instant, prefix: &PrefixChain) {
    let decision = router.decide(now, &ask(prefix)).unwrap();
    router.first_token(now, decision.ticket);
    router.ended(now, decision.ticket, finished());
}

#[test]
fn what_replicas_count_corrects_tokens_and_capacity() {
    let mut router = router(1);
    let prefix = prompt(1, 0, 16_000);
    for _ in 0..400 {
        let decision = router.decide(at(1.0), &ask(&prefix)).unwrap();
        router.first_token(at(1.0), decision.ticket);
        let usage = Usage { prompt_tokens: prefix.text_bytes() / 3, cached_tokens: Some(0) };
        router.ended(at(1.0), decision.ticket, Ended { usage: Some(usage), ..finished() });
    }
    let decision = router.decide(at(1.0), &ask(&prefix)).unwrap();
    let tokens = prefix.text_bytes() / 3;
    assert!(decision.prompt_tokens.abs_diff(tokens) < tokens / 50, "{}", decision.prompt_tokens);
    router.check().unwrap();
}
