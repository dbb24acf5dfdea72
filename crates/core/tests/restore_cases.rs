//! What comes back after a restart: what was worth most, into free memory only, and never in anybody's way.

mod world;

use std::time::Duration;
use warmset_core::forecast::Forecast;
use warmset_core::worker::{Event, ModelState, Recollection};
use world::{Behaviour, World, id, settings, spec};

fn recollection(number: u8, demand_per_second: f64, warm: bool) -> Recollection {
    Recollection { digest: id(number), demand_per_second, age: Duration::ZERO, warm, forecast: Forecast::default() }
}

/// Room for two of four models.
fn restarted(models: Vec<Recollection>) -> World {
    let mut world = World::new(settings());
    for number in 1..=4 {
        world.add_plain(number, 50);
    }
    world.feed(Event::Remembered { models });
    world
}

#[test]
fn what_was_warm_comes_back_in_the_order_of_its_worth() {
    let mut world = restarted(vec![
        recollection(1, 0.1, true),
        recollection(2, 0.5, true),
        recollection(3, 0.3, true),
        recollection(4, 0.9, false),
    ]);
    world.run_for(Duration::from_secs(10));
    assert!(world.is_ready(2) && world.is_ready(3), "{:?}", world.facts);
    assert_eq!((world.loads_of(1), world.loads_of(4), world.evictions()), (0, 0, vec![]));
    let again = world.worker.recollections(world.now);
    let warm: Vec<_> = again.iter().filter(|known| known.warm).map(|known| known.digest).collect();
    assert_eq!(warm, [id(2), id(3)]);
    let absent = again.iter().find(|known| known.digest == id(4)).expect("its demand is remembered on");
    assert!((absent.demand_per_second - 0.9).abs() < 1e-9 && absent.age == Duration::from_secs(10));
}

#[test]
fn demand_is_older_by_what_lies_between() {
    let half_life = settings().demand_half_life;
    let mut old = recollection(1, 0.8, true);
    old.age = half_life * 3;
    let mut world = restarted(vec![old, recollection(2, 0.2, true), recollection(3, 0.2, true)]);
    world.run_for(Duration::from_secs(10));
    assert!(world.is_ready(2) && world.is_ready(3), "0.8 has become 0.1");
}

#[test]
fn callers_come_first_and_nobody_is_evicted_for_a_memory() {
    let mut world = restarted(vec![]);
    let first = world.ask(1);
    world.run_for(Duration::from_secs(3));
    world.feed(Event::Remembered { models: vec![recollection(2, 5.0, true), recollection(3, 9.0, true)] });
    let caller = world.ask(4);
    world.run_for(Duration::from_secs(60));
    assert!(world.finished_at(first).is_some() && world.finished_at(caller).is_some());
    assert_eq!(world.loads_of(2), 0, "after 3, which was under way, there was no room left");
    let asked = [world.loads_of(1), world.loads_of(4)];
    assert_eq!(asked, [1, 1]);
}

#[test]
fn a_restored_load_that_somebody_wants_meanwhile_is_his() {
    let mut world = restarted(vec![recollection(1, 1.0, true)]);
    let request = world.ask(1);
    world.run_for(Duration::from_secs(5));
    assert!(world.finished_at(request).is_some());
    assert_eq!(world.loads_of(1), 1);
}

#[test]
fn what_fails_or_is_told_to_stay_out_is_not_tried_again() {
    let mut world = World::new(settings());
    world.add(spec(1, 40), Behaviour { failing_loads: 1, ..Behaviour::plain(40) });
    world.add_plain(2, 40);
    world.feed(Event::Remembered { models: vec![recollection(1, 1.0, true), recollection(2, 0.5, true)] });
    world.feed(Event::UnloadWanted { digest: id(2) });
    world.run_for(Duration::from_secs(600));
    assert_eq!((world.loads_of(1), world.loads_of(2)), (1, 0));
    let states: Vec<_> = world.worker.ledger(world.now).iter().map(|line| line.state).collect();
    assert!(!states.contains(&ModelState::Waiting), "{states:?}");
}

#[test]
fn an_unknown_model_is_no_trouble() {
    let mut world = restarted(vec![recollection(9, 1.0, true), recollection(1, 1.0, true)]);
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(1));
}
