//! Targets weigh in eviction and in the order of loads, and bound nothing that is safe.

mod world;

use std::time::Duration;
use warmset_core::{
    targets::Targets,
    worker::{Event, EvictionReason},
};
use world::{Behaviour, World, id, settings, spec};

fn cold(milliseconds: u32) -> Targets {
    Targets { ttft_p99_cold_ms: Some(milliseconds), ..Targets::default() }
}

fn add(world: &mut World, number: u8, bytes: u64, targets: Targets) {
    let mut model = spec(number, bytes);
    model.targets = targets;
    world.add(model, Behaviour::plain(bytes));
}

/// Two models in memory, the first asked for a little less; a third one comes.
fn who_leaves(first: Targets) -> Vec<(warmset_core::Digest, EvictionReason)> {
    let mut world = World::new(settings());
    add(&mut world, 1, 50, first);
    add(&mut world, 2, 50, Targets::default());
    add(&mut world, 3, 50, Targets::default());
    for number in [1, 2, 2] {
        world.ask(number);
        world.run_for(Duration::from_secs(3));
    }
    world.ask(3);
    world.run_for(Duration::from_secs(3));
    assert!(world.is_ready(3));
    world.evictions()
}

#[test]
fn a_model_that_cannot_meet_its_cold_target_loses_more_when_dropped() {
    assert_eq!(who_leaves(Targets::default()), [(id(1), EvictionReason::Memory)]);
    assert_eq!(who_leaves(cold(60_000)), [(id(1), EvictionReason::Memory)], "a target that is met changes nothing");
    assert_eq!(who_leaves(cold(200)), [(id(2), EvictionReason::Memory)], "a load takes a second, 0.8 too many");
}

#[test]
fn of_those_who_wait_the_tightest_target_that_can_be_met_is_loaded_first() {
    let mut world = World::new(settings());
    for (number, targets) in [(1, Targets::default()), (2, Targets::default()), (3, cold(3_000)), (4, cold(10))] {
        add(&mut world, number, 20, targets);
    }
    let asked: Vec<_> = (1..=4).map(|number| world.ask(number)).collect();
    world.run_for(Duration::from_secs(20));
    let ended: Vec<_> = asked.iter().map(|request| world.finished_at(*request).expect("all are served")).collect();
    assert!(ended[0] < ended[2], "it had begun");
    assert!(ended[2] < ended[1], "three seconds are less than the patience of those who were promised nothing");
    assert!(ended[1] < ended[3], "what cannot be met pushes nobody aside");
}

#[test]
fn nobody_starves_behind_a_stream_of_tight_targets() {
    let mut world = World::new(settings());
    for number in 1..=30 {
        add(&mut world, number, 80, cold(2_000));
    }
    add(&mut world, 100, 80, Targets::default());
    world.ask(1);
    let patient = world.ask(100);
    for round in 0..60_u8 {
        world.ask(1 + round % 30);
        world.run_for(Duration::from_secs(1));
    }
    world.run_for(Duration::from_secs(30));
    assert!(world.finished_at(patient).is_some());
}

#[test]
fn pins_stay_whatever_others_were_promised() {
    let mut world = World::new(settings());
    let mut pinned = spec(1, 60);
    pinned.pin = true;
    world.add(pinned, Behaviour::plain(60));
    add(&mut world, 2, 40, cold(1));
    add(&mut world, 3, 40, cold(1));
    world.run_for(Duration::from_secs(3));
    for _ in 0..5 {
        for number in [2, 3] {
            world.ask(number);
            world.run_for(Duration::from_secs(40));
        }
    }
    assert!(world.is_ready(1));
    world.feed(Event::Drain);
}
