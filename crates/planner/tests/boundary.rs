//! Models and KV on one machine: both machines keep their promises after each event, the same seed gives the same figures, and
//! the boundary that worth moves loses less than fixed ones.

use proptest::prelude::*;
use std::time::Duration;
use warmset_core::Instant;
use warmset_planner::boundary::{
    Plan,
    demand::requests,
    page::page,
    plan::{Boundary, Disk, Phase, SHIPPED},
    run::{MOVING, NO_PRELOAD, Row, node, policies, ratio_to_best_fixed, run},
};

fn shipped() -> Boundary {
    Plan::parse(SHIPPED.1).expect("it is shipped").boundary
}

/// The shipped machine for so long.
fn short(seconds: f64) -> Boundary {
    let mut boundary = shipped();
    boundary.phase.iter_mut().for_each(|phase| phase.seconds = seconds);
    boundary
}

fn rows(boundary: &Boundary, seed: u64, wanted: &[&str]) -> Vec<Row> {
    let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
    let requests = requests(boundary, seed);
    let policies = policies(boundary, &wanted).expect("they are known");
    policies.iter().map(|policy| run(boundary, policy, &requests).expect("every invariant holds").0).collect()
}

/// Plays every boundary and looks at both machines after each event. How many there were.
fn checked(boundary: &Boundary, seed: u64) -> Result<u32, String> {
    let (requests, mut events) = (requests(boundary, seed), 0);
    let end = Instant::after(Duration::from_secs(100_000));
    for policy in policies(boundary, &[]).expect("all") {
        let mut node = node(boundary, &policy, &requests);
        while node.prompt_outcome().first_tokens.len() < requests.len() && node.step(end) {
            node.check().map_err(|broken| format!("{}, event {events}: {broken}", policy.name))?;
            events += 1;
        }
        let answered = node.prompt_outcome().first_tokens.len();
        if answered < requests.len() {
            return Err(format!("{}: {answered} of {} requests were answered", policy.name, requests.len()));
        }
    }
    Ok(events)
}

#[test]
fn both_machines_keep_their_promises_after_each_event() {
    let mut boundary = short(60.0);
    assert!(checked(&boundary, 1).expect("kept") > 1_000);
    boundary.disk = Some(Disk { bytes: 20_000_000_000, bytes_per_second: 2e9 });
    assert!(checked(&boundary, 2).expect("kept") > 1_000);
}

#[test]
fn a_boundary_that_moves_loses_less_than_any_fixed_one() {
    for seed in [1, 2] {
        let rows = rows(&shipped(), seed, &[]);
        let (ratio, best) = ratio_to_best_fixed(&rows).expect("both are there");
        assert!(ratio < 1.0, "seed {seed}: {ratio} of {best}");
        let moving = rows.iter().find(|row| row.policy == MOVING).expect("it is there");
        assert!(moving.phases[1].kv_share > 4.0 * moving.phases[0].kv_share, "{moving:?}");
        assert!(rows.iter().all(|row| row.unanswered == 0));
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_one_others() {
    let boundary = short(120.0);
    let text = |seed| serde_json::to_string(&rows(&boundary, seed, &[MOVING, NO_PRELOAD])).expect("figures");
    assert_eq!(text(3), text(3));
    assert_ne!(text(3), text(4));
}

#[test]
fn what_is_found_follows_from_what_is_kept() {
    let mut boundary = short(120.0);
    boundary.fixed_kv_shares = vec![0.0, 0.5];
    let rows = rows(&boundary, 1, &[]);
    let (none, half) = (&rows[2], &rows[3]);
    assert_eq!((none.device_tokens, none.restored_tokens), (0, 0), "where nothing is kept nothing is found");
    assert!(half.device_tokens > 0 && half.restored_tokens > 0);
    assert!(half.phases.iter().all(|phase| phase.kv_share <= 0.5));
    assert!(half.device_tokens + half.restored_tokens < half.prompt_tokens);
    // What needs no load and no reading is what is taken off: nobody waits for less.
    assert!(rows.iter().flat_map(|row| &row.phases).all(|phase| phase.waited_seconds > -1e-6));
}

#[test]
fn a_disk_gives_back_what_host_memory_had_no_room_for() {
    let mut boundary = short(300.0);
    boundary.fixed_kv_shares = vec![0.1];
    let without = rows(&boundary, 1, &["fixed-10"]);
    boundary.disk = Some(Disk { bytes: 40_000_000_000, bytes_per_second: 5e9 });
    let with = rows(&boundary, 1, &["fixed-10"]);
    assert!(with[0].restored_tokens > 2 * without[0].restored_tokens, "{with:?} {without:?}");
    assert!(with[0].waited_seconds < without[0].waited_seconds);
}

#[test]
fn the_page_stands_alone_and_names_every_boundary() {
    let plan = Plan { boundary: short(30.0), ..Plan::parse(SHIPPED.1).expect("it is shipped") };
    let requests = requests(&plan.boundary, 1);
    let played = policies(&plan.boundary, &[]).expect("all");
    let played: Vec<_> =
        played.iter().map(|policy| run(&plan.boundary, policy, &requests).expect("every invariant holds")).collect();
    let rows: Vec<Row> = played.iter().map(|(row, _)| row.clone()).collect();
    let text = page(&plan, &rows, Some(&played[0].1), 1).expect("it can be drawn");
    assert!(rows.iter().all(|row| text.contains(&row.policy)) && text.matches("<svg").count() == 2);
    assert!(!text.contains("<script") && !text.contains("src="));
    assert!(policies(&plan.boundary, &["fixed-11".to_owned()]).expect_err("none").to_string().contains("fixed-10"));
}

fn any_phase() -> impl Strategy<Value = Phase> {
    (5.0..40.0_f64, 0.1..2.0_f64, 0.0..1.0_f64, 1_usize..=14, 1_usize..=10).prop_map(
        |(seconds, requests_per_second, talk_share, models, conversations)| Phase {
            name: "any".to_owned(),
            seconds,
            requests_per_second,
            talk_share,
            models,
            conversations,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn whatever_the_phases_both_machines_keep_their_promises(
        phase in prop::collection::vec(any_phase(), 1..4),
        memory_models in 2_u64..14,
        has_disk in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut boundary = shipped();
        boundary.phase = phase;
        boundary.memory_bytes = memory_models * boundary.model_bytes;
        boundary.fixed_kv_shares = vec![0.3];
        boundary.disk = has_disk.then_some(Disk { bytes: 10_000_000_000, bytes_per_second: 1e9 });
        let checked = checked(&boundary, seed);
        prop_assert!(checked.is_ok(), "{}", checked.unwrap_err());
    }
}
