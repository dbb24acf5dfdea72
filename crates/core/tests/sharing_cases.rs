//! Host memory that models and cached KV share: models come first, and what nobody uses goes to whom it is worth more.

mod world;

use std::time::Duration;
use warmset_core::{Priority, worker::Event};
use world::{World, at, settings, spec};

/// Three models that have been used, one of them often. 100 bytes of room.
fn pool() -> World {
    let mut world = World::new(settings());
    for number in 1..=3 {
        world.add_plain(number, 30);
    }
    for second in 0..40 {
        world.ask(1);
        if second < 2 {
            world.ask(2);
            world.ask(3);
        }
        world.run_for(Duration::from_secs(10));
    }
    world.run_for(Duration::from_secs(60));
    assert!((1..=3).all(|number| world.is_ready(number)));
    world
}

#[test]
fn kv_may_have_what_models_leave() {
    let mut world = pool();
    assert_eq!(world.worker.kv_limit_bytes(), 10);
    world.feed(Event::UnloadWanted { digest: world::id(2) });
    world.run_for(Duration::from_secs(10));
    assert_eq!(world.worker.kv_limit_bytes(), 40);
}

#[test]
fn an_idle_model_leaves_for_kv_that_is_worth_much_more_and_the_least_worthy_one_first() {
    let mut world = pool();
    let worth = |world: &World, number| {
        let line = world.worker.ledger(at(1_000_000)).into_iter().find(|line| line.digest == world::id(number));
        line.expect("a line").worth
    };
    let (often, seldom) = (worth(&world, 1), worth(&world, 2));
    assert!(often > seldom);
    // Worth as much as what is there: nothing is gained by a change.
    world.feed(Event::KvPressed { worth: seldom });
    world.run_for(Duration::from_secs(1));
    assert!(world.evictions().is_empty());
    world.feed(Event::KvPressed { worth: seldom * 10.0 });
    world.run_for(Duration::from_secs(10));
    assert_eq!(world.evictions().len(), 1, "one at a time");
    assert!(world.is_ready(1), "the one that is asked for often stays");
    assert_eq!(world.worker.kv_limit_bytes(), 40);
}

#[test]
fn nobody_leaves_who_is_pinned_in_use_or_was_used_a_moment_ago() {
    let mut world = World::new(settings());
    let mut pinned = spec(1, 30);
    pinned.pin = true;
    world.add(pinned, world::Behaviour::plain(30));
    world.add_plain(2, 30);
    world.add_plain(3, 30);
    world.run_for(Duration::from_secs(20));
    world.ask(2);
    world.ask_as(3, Priority::Standard);
    world.run_for(Duration::from_secs(2));
    world.feed(Event::KvPressed { worth: f64::MAX });
    world.run_for(Duration::from_secs(2));
    assert!(world.evictions().is_empty(), "{:?}", world.evictions());
    // Long after, the two that are not pinned may go.
    world.run_for(Duration::from_secs(400));
    for _ in 0..5 {
        world.feed(Event::KvPressed { worth: f64::MAX });
        world.run_for(Duration::from_secs(10));
    }
    assert!(world.is_ready(1) && !world.is_ready(2) && !world.is_ready(3));
}
