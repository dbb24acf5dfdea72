//! A new version takes the place of an old one: beside it where both fit, after it where they do not.

mod world;

use std::time::Duration;
use warmset_core::{
    rollout::Takeover,
    worker::{Event, Fact, Rejection},
};
use world::{Behaviour, World, id, settings, spec};

const OLD: u8 = 1;
const NEW: u8 = 2;

/// The old version is in memory; there are 100 bytes.
fn world_with(old_bytes: u64, new_bytes: u64) -> World {
    let mut world = World::new(settings());
    world.add_plain(OLD, old_bytes);
    world.add_plain(NEW, new_bytes);
    world.ask(OLD);
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(OLD));
    world
}

fn takeover(world: &World) -> Takeover {
    world.worker.takeover(world.now, id(NEW), id(OLD))
}

#[test]
fn the_old_version_stays_until_the_new_one_is_ready() {
    let mut world = world_with(40, 40);
    // Asked for often and dear: worth more than the version that nobody asks for any more.
    world.add_plain(3, 20);
    for _ in 0..20 {
        world.ask(3);
        world.run_for(Duration::from_secs(1));
    }
    assert_eq!(takeover(&world), Takeover::SideBySide { evicts: vec![] });
    world.feed(Event::Succeed { digest: id(NEW), predecessor: id(OLD) });
    // Somebody else comes in the meantime, and the old version would be the cheapest to drop.
    world.add_plain(4, 20);
    let other = world.ask(4);
    world.run_for(Duration::from_millis(900));
    assert!(world.is_ready(OLD), "{:?}", world.facts);
    world.run_for(Duration::from_secs(10));
    assert!(world.is_ready(NEW) && world.finished_at(other).is_some(), "{:?}", world.facts);
}

#[test]
fn looking_names_who_leaves_and_changes_nothing() {
    let mut world = world_with(40, 40);
    world.add_plain(3, 50);
    world.ask(3);
    world.run_for(Duration::from_secs(60));
    let (before, facts) = (world.worker.ledger(world.now), world.facts.len());
    assert_eq!(takeover(&world), Takeover::SideBySide { evicts: vec![id(3)] });
    assert_eq!((world.worker.ledger(world.now), world.facts.len()), (before, facts));
}

#[test]
fn two_versions_that_do_not_fit_together_follow_each_other() {
    let mut world = world_with(60, 60);
    assert_eq!(takeover(&world), Takeover::DrainThenLoad { needed_bytes: 60, evicts: vec![] });
    // Even pinned the old one can be replaced.
    let mut pinned = spec(OLD, 60);
    pinned.pin = true;
    world.feed(Event::Configure(pinned));
    assert!(matches!(takeover(&world), Takeover::DrainThenLoad { .. }));
    world.feed(Event::UnloadWanted { digest: id(OLD) });
    world.run_for(Duration::from_secs(1));
    world.feed(Event::LoadWanted { digest: id(NEW) });
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(NEW) && !world.is_ready(OLD), "{:?}", world.facts);
}

#[test]
fn what_never_fits_is_said_before_anything_is_done() {
    let mut world = world_with(40, 40);
    let mut large = spec(NEW, 200);
    large.measured = true;
    world.feed(Event::Configure(large));
    let rejection = Rejection::TooLarge { needed_bytes: 200, available_bytes: 100 };
    assert_eq!(takeover(&world), Takeover::Impossible { rejection });

    let mut world = world_with(20, 40);
    let mut pinned = spec(3, 70);
    pinned.pin = true;
    world.add(pinned, Behaviour::plain(70));
    world.run_for(Duration::from_secs(10));
    assert!(matches!(takeover(&world), Takeover::Impossible { rejection: Rejection::NoMemory { .. } }));
}

#[test]
fn a_failed_version_lets_the_old_one_go_on_and_be_evicted_again() {
    let mut world = world_with(40, 40);
    world.behaviours.get_mut(&id(NEW)).expect("added").failing_loads = u32::MAX;
    world.feed(Event::Succeed { digest: id(NEW), predecessor: id(OLD) });
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(OLD) && !world.is_ready(NEW));
    world.feed(Event::Forget { digest: id(NEW) });
    world.add_plain(5, 90);
    let other = world.ask(5);
    world.run_for(Duration::from_secs(30));
    assert!(world.finished_at(other).is_some(), "the old version is a victim like any other: {:?}", world.facts);
}

#[test]
fn the_demand_of_the_name_goes_over_to_the_new_version() {
    let mut world = world_with(40, 40);
    for _ in 0..10 {
        world.ask(OLD);
        world.run_for(Duration::from_secs(1));
    }
    world.feed(Event::Succeed { digest: id(NEW), predecessor: id(OLD) });
    world.run_for(Duration::from_secs(3));
    let demand = |number| {
        let ledger = world.worker.ledger(world.now);
        ledger.iter().find(|line| line.digest == id(number)).map(|line| line.demand_per_second)
    };
    assert!(demand(NEW).is_some_and(|demand| demand > 0.0));
    assert_eq!(demand(NEW), demand(OLD));
}

#[test]
fn a_version_that_finds_no_room_beside_the_old_one_is_given_up() {
    let mut world = world_with(60, 60);
    world.feed(Event::Succeed { digest: id(NEW), predecessor: id(OLD) });
    world.run_for(settings().load_deadline + Duration::from_secs(1));
    let refused =
        world.facts.iter().any(|(_, fact)| matches!(fact, Fact::LoadRefused { digest, .. } if *digest == id(NEW)));
    assert!(refused && world.is_ready(OLD) && world.loads_of(NEW) == 0, "{:?}", world.facts);
}
