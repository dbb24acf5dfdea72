//! Who is loaded next and who leaves for it, where one rule alone decides.

mod world;

use std::time::Duration;
use warmset_core::{
    Instant, MemoryVector, PoolName, Priority,
    worker::{CancelCause, Event, EvictionReason, Fact, ModelState},
};
use world::{Behaviour, World, at, id, settings, spec};

/// Loaded, with its caller served.
fn warm(world: &mut World, number: u8) {
    let request = world.ask(number);
    world.run_for(Duration::from_secs(5));
    assert!(world.finished_at(request).is_some() && world.is_ready(number));
}

fn runs_for(world: &mut World, number: u8, duration: Duration) {
    world.behaviours.get_mut(&id(number)).expect("added").run = duration;
}

fn state_of(world: &World, number: u8) -> Option<ModelState> {
    let ledger = world.worker.ledger(world.now);
    ledger.into_iter().find(|line| line.digest == id(number)).map(|line| line.state)
}

/// When each load of a model began.
fn load_starts(world: &World, number: u8) -> Vec<Instant> {
    let of_it = |fact: &Fact| matches!(fact, Fact::LoadStarted { digest, .. } if *digest == id(number));
    world.facts.iter().filter(|(_, fact)| of_it(fact)).map(|(at, _)| *at).collect()
}

#[test]
fn a_pinned_model_stays_though_it_is_worth_least() {
    let mut world = World::new(settings());
    let mut pinned = spec(1, 40);
    pinned.pin = true;
    world.add(pinned, Behaviour::plain(40));
    world.add_plain(2, 40);
    world.add_plain(3, 40);
    world.run_for(Duration::from_secs(3));
    for number in [2, 2, 3] {
        warm(&mut world, number);
    }
    assert_eq!(world.evictions(), [(id(2), EvictionReason::Memory)]);
}

#[test]
fn callers_who_waited_for_a_load_are_all_started_before_their_model_leaves() {
    let mut world = World::new(settings());
    let mut narrow = spec(1, 80);
    narrow.parallel = 1;
    world.add(narrow, Behaviour::plain(80));
    world.add_plain(2, 80);
    let waited = [world.ask(1), world.ask(1), world.ask(1)];
    world.run_for(Duration::from_millis(500));
    let other = world.ask(2);
    world.run_for(Duration::from_secs(10));
    assert_eq!((world.loads_of(1), world.loads_of(2)), (1, 1));
    let last = waited.map(|request| world.finished_at(request)).into_iter().max().flatten();
    assert!(last.is_some() && last < world.finished_at(other));
}

#[test]
fn a_reloaded_model_may_be_displaced_at_four_times_its_load_time_and_not_before() {
    let mut world = World::new(settings());
    for number in 1..=2 {
        let mut slow = spec(number, 80);
        slow.rewarm_seconds = 2.0;
        world.add(slow, Behaviour { load: Duration::from_secs(2), ..Behaviour::plain(80) });
    }
    for number in [1, 2, 1] {
        warm(&mut world, number);
    }
    let ready_at = load_starts(&world, 1)[1] + Duration::from_millis(2_001);
    world.ask(2);
    world.run_for(Duration::from_secs(20));
    let evicted: Vec<Instant> = world
        .facts
        .iter()
        .filter(|(_, fact)| matches!(fact, Fact::EvictionStarted { digest, .. } if *digest == id(1)))
        .map(|(at, _)| *at)
        .collect();
    assert_eq!(evicted[1].since(ready_at).as_millis(), 8_000);
}

#[test]
fn the_protection_of_a_class_ends_on_time_without_another_event() {
    let mut limits = settings();
    // No measurement happens to wake the machine at that moment.
    limits.measure_interval = Duration::from_secs(7);
    let mut world = World::new(limits);
    let mut critical = spec(1, 60);
    critical.priority = Priority::Critical;
    world.add(critical, Behaviour::plain(60));
    world.add_plain(2, 60);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    world.ask(2);
    world.run_for(Duration::from_secs(400));
    let (evicted_at, _) = world
        .facts
        .iter()
        .find(|(_, fact)| matches!(fact, Fact::EvictionStarted { .. }))
        .expect("it gives way in the end");
    let last_used = Duration::from_millis(1_101);
    assert_eq!(evicted_at.since(at(0)), last_used + Duration::from_secs(300));
}

#[test]
fn a_small_model_does_not_take_what_is_being_freed_for_a_large_one() {
    let mut limits = settings();
    limits.concurrent_loads_max = 2;
    let mut world = World::new(limits);
    for (number, bytes) in [(1, 60), (2, 80), (3, 30)] {
        world.add_plain(number, bytes);
    }
    warm(&mut world, 1);
    runs_for(&mut world, 1, Duration::from_secs(5));
    world.ask(1);
    let large = world.ask(2);
    let small = world.ask(3);
    world.run_for(Duration::from_secs(4));
    assert_eq!(world.loads_of(3), 0, "60 + 30 would fit now, 80 + 30 not later");
    world.run_for(Duration::from_secs(20));
    assert!(world.finished_at(large).is_some() && world.finished_at(large) < world.finished_at(small));
}

#[test]
fn a_model_drained_for_a_caller_who_left_serves_on() {
    let mut world = World::new(settings());
    world.add_plain(1, 80);
    world.add_plain(2, 80);
    warm(&mut world, 1);
    runs_for(&mut world, 1, Duration::from_secs(20));
    world.ask(1);
    let other = world.ask(2);
    assert_eq!(state_of(&world, 1), Some(ModelState::Draining));
    world.cancel(other, CancelCause::Disconnected);
    assert!(world.is_ready(1));
    world.run_for(Duration::from_secs(60));
    assert_eq!((world.evictions(), world.loads_of(1)), (vec![], 1));
}

#[test]
fn a_drain_goes_on_while_something_else_loads() {
    let mut world = World::new(settings());
    for (number, bytes) in [(1, 50), (2, 60), (3, 20)] {
        world.add_plain(number, bytes);
    }
    warm(&mut world, 1);
    runs_for(&mut world, 1, Duration::from_secs(20));
    world.behaviours.get_mut(&id(3)).expect("added").load = Duration::from_secs(10);
    world.ask(1);
    world.ask(2);
    // Small enough for the gap beside what is claimed, and the only load there may be for a while.
    world.ask(3);
    assert_eq!((world.loads_of(2), world.loads_of(3)), (0, 1));
    world.run_for(Duration::from_secs(1));
    assert_eq!(state_of(&world, 1), Some(ModelState::Draining), "it takes nothing new while somebody waits");
}

#[test]
fn what_is_drained_for_memory_does_not_come_back_in_a_shutdown_nor_once_forgotten() {
    for last_word in [Event::Drain, Event::Forget { digest: id(1) }] {
        let mut world = World::new(settings());
        world.add_plain(1, 80);
        world.add_plain(2, 80);
        warm(&mut world, 1);
        runs_for(&mut world, 1, Duration::from_secs(10));
        world.ask(1);
        let other = world.ask(2);
        world.feed(last_word.clone());
        world.cancel(other, CancelCause::Disconnected);
        assert_eq!(state_of(&world, 1), Some(ModelState::Draining), "{last_word:?}");
    }
}

#[test]
fn a_load_is_given_up_in_a_shutdown_and_once_its_model_is_forgotten() {
    for last_word in [Event::Drain, Event::Forget { digest: id(1) }] {
        let mut world = World::new(settings());
        world.add(spec(1, 40), Behaviour { load: Duration::from_secs(30), ..Behaviour::plain(40) });
        world.ask(1);
        world.run_for(Duration::from_secs(1));
        world.feed(last_word.clone());
        world.run_for(Duration::from_secs(1));
        assert_eq!(world.held_host_bytes(), 0, "{last_word:?}");
        assert_eq!(world.evictions(), [(id(1), EvictionReason::Abandoned)]);
    }
}

#[test]
fn a_shutdown_lets_models_go_for_that_reason_and_not_before_they_are_idle() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    world.add_plain(2, 40);
    warm(&mut world, 1);
    warm(&mut world, 2);
    world.ask(1);
    world.feed(Event::Drain);
    assert_eq!(world.evictions(), [(id(2), EvictionReason::Drain)]);
    assert_eq!(state_of(&world, 1), Some(ModelState::Draining));
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.evictions()[1..], [(id(1), EvictionReason::Drain)]);
}

#[test]
fn a_model_larger_than_thought_stays_and_the_deficit_of_its_own_pool_leaves() {
    let mut limits = settings();
    limits.pools = vec![(PoolName::new("own"), MemoryVector(vec![10]))];
    limits.concurrent_loads_max = 2;
    let mut world = World::new(limits);
    world.add_plain(1, 40);
    warm(&mut world, 1);
    world.add(spec(2, 20), Behaviour { load: Duration::from_secs(3), ..Behaviour::plain(70) });
    let mut elsewhere = spec(3, 10);
    elsewhere.pool = PoolName::new("own");
    world.add(elsewhere, Behaviour::plain(10));
    // Nobody calls it, so it is worth nothing; the other pool's load begins later and ends sooner.
    world.feed(Event::LoadWanted { digest: id(2) });
    world.feed(Event::LoadWanted { digest: id(3) });
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(2) && world.is_ready(3));
    assert_eq!(world.evictions(), [(id(1), EvictionReason::Memory)]);
}

#[test]
fn a_model_too_large_to_load_says_so_with_the_numbers_whether_wanted_or_pinned() {
    for pin in [false, true] {
        let mut world = World::new(settings());
        let mut huge = spec(1, 101);
        (huge.measured, huge.pin) = (true, pin);
        world.add(huge, Behaviour::plain(101));
        if !pin {
            world.feed(Event::LoadWanted { digest: id(1) });
        }
        let told = world.facts.iter().find_map(|(_, fact)| match fact {
            Fact::LoadRefused { error, .. } => Some(error.clone()),
            _ => None,
        });
        let error = told.expect("whoever asked without a request hears of it");
        assert!(error.permanent && error.message.contains("101") && error.message.contains("100"), "{error:?}");
    }
}
