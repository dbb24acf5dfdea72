//! Loads that fail, engines that die, hang, or outgrow their cap, against the worker machine on a virtual clock.

mod world;

use std::time::Duration;
use warmset_core::worker::{Event, Fact, Rejection};
use world::{Behaviour, World, id, settings, spec};

#[test]
fn a_broken_model_is_tried_once_per_pause_and_hurts_nobody_else() {
    let mut world = World::new(settings());
    let behaviour = Behaviour { failing_loads: u32::MAX, ..Behaviour::plain(40) };
    world.add(spec(1, 40), behaviour);
    world.add_plain(2, 40);
    for _ in 0..600 {
        world.ask(1);
        world.ask(2);
        world.run_for(Duration::from_millis(100));
    }
    world.run_for(Duration::from_secs(10));
    assert!(world.unanswered().is_empty());
    // Pauses of 1, 2, 4, 8, 16, 32 s between loads of 1 s fill the minute.
    assert!(world.loads_of(1) <= 6, "{} loads", world.loads_of(1));
    assert_eq!(world.loads_of(2), 1);
    let cached = world
        .answers
        .values()
        .filter(|answer| matches!(answer, world::Answer::Rejected { rejection: Rejection::LoadFailed { .. }, .. }));
    assert_eq!(cached.count(), 600, "every caller hears the cached error at once");
}

#[test]
fn l10_a_model_that_died_of_its_pools_cap_is_known_to_be_too_large() {
    let mut world = World::new(settings());
    // Thought to fit by its estimate, larger than the pool in truth.
    let mut large = spec(1, 60);
    let pool = world.worker.memory(world.now)[0].capacity.clone();
    world.add(large.clone(), Behaviour::plain(pool.get(0) + 1));
    let too_large = Rejection::TooLarge { needed_bytes: pool.get(0) + 1, available_bytes: pool.get(0) };
    let first = world.ask(1);
    world.run_for(Duration::from_secs(2));
    assert_eq!(world.rejection_of(first), Some(&too_large), "its own caller hears it");
    let second = world.ask(1);
    world.run_for(Duration::from_secs(300));
    assert_eq!(world.rejection_of(second), Some(&too_large), "and whoever comes later, with no further try");
    assert_eq!(world.loads_of(1), 1);
    // Other settings, another try.
    large.parallel = 1;
    world.add(large, Behaviour::plain(40));
    let third = world.ask(1);
    world.run_for(Duration::from_secs(5));
    assert!(world.finished_at(third).is_some(), "{:?}", world.rejection_of(third));
}

#[test]
fn a_model_that_died_of_a_cap_of_its_own_may_be_tried_again() {
    let mut world = World::new(settings());
    let mut capped = spec(1, 60);
    capped.memory_cap = Some(50);
    world.add(capped, Behaviour::plain(60));
    let request = world.ask(1);
    world.run_for(Duration::from_secs(2));
    assert!(matches!(world.rejection_of(request), Some(Rejection::LoadFailed { .. })));
}

#[test]
fn a_hanging_engine_is_killed_and_replaced() {
    let mut world = World::new(settings());
    world.add(spec(1, 40), Behaviour { hang_at_request: Some(1), ..Behaviour::plain(40) });
    let hung = world.ask(1);
    world.run_for(Duration::from_secs(30));
    assert!(matches!(world.rejection_of(hung), Some(Rejection::EngineLost { .. })));
    let next = world.ask(1);
    world.run_for(Duration::from_secs(5));
    assert!(world.finished_at(next).is_some());
}

#[test]
fn a_load_that_never_ends_is_killed_at_its_deadline() {
    let mut world = World::new(settings());
    world.add(spec(1, 40), Behaviour { load_never_ends: true, ..Behaviour::plain(40) });
    let request = world.ask(1);
    world.run_for(Duration::from_secs(59));
    assert_eq!(world.rejection_of(request), None);
    world.run_for(Duration::from_secs(2));
    assert!(matches!(world.rejection_of(request), Some(Rejection::LoadFailed { .. })));
    assert_eq!(world.held_host_bytes(), 0);
}

#[test]
fn what_was_mended_is_tried_at_once() {
    let mut world = World::new(settings());
    let behaviour = Behaviour { failing_loads: 1, permanent: true, ..Behaviour::plain(40) };
    world.add(spec(1, 40), behaviour);
    let failed = world.ask(1);
    world.run_for(Duration::from_secs(2));
    assert!(matches!(world.rejection_of(failed), Some(Rejection::LoadFailed { .. })));
    let cached = world.ask(1);
    assert!(matches!(world.rejection_of(cached), Some(Rejection::LoadFailed { .. })), "the pause lasts");
    world.feed(Event::PauseLifted { digest: id(1) });
    let mended = world.ask(1);
    world.run_for(Duration::from_secs(3));
    assert!(world.finished_at(mended).is_some(), "{:?}", world.rejection_of(mended));
}

#[test]
fn other_settings_or_being_added_anew_forgive_failed_loads() {
    for anew in [false, true] {
        let mut world = World::new(settings());
        world.add(spec(1, 40), Behaviour { failing_loads: 1, permanent: true, ..Behaviour::plain(40) });
        world.ask(1);
        world.run_for(Duration::from_secs(2));
        let mut changed = spec(1, 40);
        if anew {
            world.feed(Event::Forget { digest: id(1) });
            assert!(world.worker.ledger(world.now).is_empty(), "nothing is left of a removed model that had failed");
        } else {
            changed.parallel = 1;
        }
        world.add(changed, Behaviour::plain(40));
        let mended = world.ask(1);
        world.run_for(Duration::from_secs(3));
        assert!(world.finished_at(mended).is_some(), "{:?}", world.rejection_of(mended));
    }
}

#[test]
fn a_load_that_pins_leave_no_room_for_is_no_failure_of_the_model() {
    let mut world = World::new(settings());
    let mut pinned = spec(1, 80);
    pinned.pin = true;
    world.add(pinned.clone(), Behaviour::plain(80));
    world.add_plain(2, 40);
    world.run_for(Duration::from_secs(3));
    world.feed(Event::LoadWanted { digest: id(2) });
    let told = |world: &World| world.facts.iter().filter(|(_, fact)| matches!(fact, Fact::LoadRefused { .. })).count();
    assert_eq!(told(&world), 1, "whoever asked hears why");
    let refused = world.ask(2);
    assert!(matches!(world.rejection_of(refused), Some(Rejection::NoMemory { .. })));
    pinned.pin = false;
    world.feed(Event::Configure(pinned));
    let served = world.ask(2);
    world.run_for(Duration::from_secs(5));
    assert!(world.finished_at(served).is_some(), "{:?}", world.rejection_of(served));
    assert_eq!(told(&world), 1);
}
