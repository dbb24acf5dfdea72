//! The world in which routers are compared, as a test: what the router promises there, and that the world is as hard
//! as it is said to be.

use super::*;

fn outcome(scenario: Scenario, policy: &Policy) -> Outcome {
    simulate(&scenario, policy)
}

fn at(requests_per_second: f64) -> Scenario {
    Scenario { requests_per_second, ..Scenario::default() }
}

/// What 16 replicas can do is a little over 170 requests per second, if nearly every prompt is in memory.
const NINETY_PERCENT: f64 = 155.0;

#[test]
fn one_after_the_other_is_as_bad_as_it_is_said_to_be() {
    let outcome = outcome(Scenario { prompts_per_replica: 13, ..at(24.0) }, &Policy::RoundRobin);
    assert!((0.04..0.09).contains(&outcome.cold_hit_share), "{outcome:?}");
    assert!((0.31..0.37).contains(&outcome.hit_share), "{outcome:?}");
}

#[test]
fn hashing_alone_overloads_one_replica() {
    let outcome = outcome(at(60.0), &Policy::Hash);
    assert!(outcome.max_to_mean_in_flight > 5.0 && outcome.within_target_share < 0.9, "{outcome:?}");
}

#[test]
fn nearly_all_prompts_are_found_in_memory_and_nobody_waits_up_to_nine_tenths_of_the_load() {
    for requests_per_second in [24.0, 60.0, 100.0, 140.0, NINETY_PERCENT] {
        let outcome = outcome(at(requests_per_second), &Policy::router());
        assert!(outcome.hit_share >= 0.98, "{requests_per_second}: {outcome:?}");
        assert!(outcome.max_to_mean_in_flight <= 1.6, "{requests_per_second}: {outcome:?}");
        assert!(outcome.within_target_share >= 0.998, "{requests_per_second}: {outcome:?}");
        assert!(outcome.first_token_p99_seconds <= 0.6, "{requests_per_second}: {outcome:?}");
    }
}

#[test]
fn a_wrong_idea_of_the_memory_of_replicas_is_corrected_by_what_they_count() {
    for believed_memory in [0.5, 2.0] {
        let outcome = outcome(Scenario { believed_memory, ..at(140.0) }, &Policy::router());
        assert!(outcome.hit_share >= 0.98 && outcome.within_target_share >= 0.99, "{believed_memory}: {outcome:?}");
    }
}

#[test]
fn gateways_that_do_not_talk_lose_little_r24() {
    let one = outcome(at(100.0), &Policy::router());
    for gateways in [2, 4] {
        let several = outcome(Scenario { gateways, ..at(100.0) }, &Policy::router());
        assert!(several.hit_share >= one.hit_share - 0.04, "{gateways}: {several:?} instead of {one:?}");
        assert!(several.within_target_share >= 0.99, "{gateways}: {several:?}");
    }
}

#[test]
fn gateways_that_do_not_talk_and_know_nothing_at_first_agree_before_queues_grow() {
    for load_reports_seconds in [None, Some(1.0)] {
        for requests_per_second in [140.0, NINETY_PERCENT] {
            let scenario = Scenario { gateways: 4, load_reports_seconds, ..at(requests_per_second) };
            let outcome = outcome(scenario, &Policy::router());
            assert!(outcome.within_target_share >= 0.98, "{requests_per_second}: {outcome:?}");
        }
    }
}

#[test]
fn a_lost_replica_or_another_hot_tenant_is_no_catastrophe() {
    let lost = outcome(Scenario { lose_replica: true, ..at(100.0) }, &Policy::router());
    let switched = outcome(Scenario { hot_switch: true, ..at(100.0) }, &Policy::router());
    for outcome in [lost, switched] {
        assert!(outcome.hit_share >= 0.95 && outcome.within_target_share >= 0.98, "{outcome:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = || format!("{:?}", outcome(at(60.0), &Policy::router()));
    assert_eq!(run(), run());
}
