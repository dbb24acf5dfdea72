//! Requests that give way to others of a higher class, and go on later.

mod world;

use std::time::Duration;
use warmset_core::{
    Instant, Priority, RequestId,
    worker::{CancelCause, Event, Fact, ParkingLimits, Rejection},
};
use world::{Behaviour, World, id, settings, spec};

const SECOND: Duration = Duration::from_secs(1);

/// Two models that do not fit together; requests to the first one run for ten seconds.
fn two_models(change: impl FnOnce(&mut Behaviour)) -> World {
    two_models_within(settings().parking, change)
}

fn two_models_within(parking: ParkingLimits, change: impl FnOnce(&mut Behaviour)) -> World {
    let mut world = World::new(warmset_core::worker::Settings { parking, ..settings() });
    let mut long = Behaviour { run: 10 * SECOND, ..Behaviour::plain(60) };
    change(&mut long);
    world.add(spec(1, 60), long);
    world.add_plain(2, 60);
    world
}

fn parks(world: &World) -> usize {
    world.facts.iter().filter(|(_, fact)| matches!(fact, Fact::Parked { .. })).count()
}

fn seconds(world: &World, request: RequestId) -> f64 {
    world.finished_at(request).expect("it ended").since(Instant::ZERO).as_secs_f64()
}

#[test]
fn a_batch_gives_its_memory_to_a_critical_request_and_goes_on_where_it_stopped() {
    let mut world = two_models(|_| {});
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(4 * SECOND);
    let critical = world.ask_as(2, Priority::Critical);
    world.run_for(60 * SECOND);
    assert_eq!(parks(&world), 1);
    let critical = seconds(&world, critical);
    assert!(critical < 5.2, "after one load, not after the batch: {critical}");
    // Ten seconds of its own, three loads, the critical request, and nothing again.
    let batch = seconds(&world, batch);
    assert!((13.0..13.6).contains(&batch), "{batch}");
    assert!(world.facts.iter().any(|(_, fact)| matches!(fact, Fact::Resumed { .. })));
}

#[test]
fn equal_classes_wait_for_each_other() {
    for (first, second) in [(Priority::Batch, Priority::Batch), (Priority::Critical, Priority::Batch)] {
        let mut world = two_models(|_| {});
        world.ask_as(1, first);
        world.run_for(4 * SECOND);
        let second = world.ask_as(2, second);
        world.run_for(60 * SECOND);
        assert_eq!(parks(&world), 0);
        assert!(seconds(&world, second) > 11.0);
    }
}

#[test]
fn a_request_is_parked_so_many_times_and_then_runs_on() {
    let mut world = two_models_within(ParkingLimits { times_max: 2, ..settings().parking }, |_| {});
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(2 * SECOND);
    for _ in 0..4 {
        world.ask_as(2, Priority::Critical);
        world.run_for(3 * SECOND);
    }
    world.run_for(60 * SECOND);
    assert_eq!(parks(&world), 2);
    assert!(world.finished_at(batch).is_some() && world.unanswered().is_empty());
}

#[test]
fn what_cannot_be_parked_runs_on() {
    let bounds = settings().parking;
    let refused = |behaviour: &mut Behaviour| behaviour.parked_bytes = None;
    let larger_than_the_bound = |behaviour: &mut Behaviour| behaviour.parked_bytes = Some(31);
    let larger_than_the_room = |behaviour: &mut Behaviour| behaviour.parked_bytes = Some(41);
    let more = ParkingLimits { bytes_max: 1_000, ..bounds };
    let worlds = [
        two_models(refused),
        two_models(larger_than_the_bound),
        two_models_within(more, larger_than_the_room),
        two_models_within(ParkingLimits::OFF, |_| {}),
    ];
    for mut world in worlds {
        let batch = world.ask_as(1, Priority::Batch);
        world.run_for(4 * SECOND);
        let critical = world.ask_as(2, Priority::Critical);
        world.run_for(60 * SECOND);
        assert_eq!(parks(&world), 0);
        assert!(seconds(&world, batch) < 11.1, "nothing held it up");
        assert!(seconds(&world, critical) > 11.0);
    }
}

#[test]
fn nobody_waits_for_what_parked_requests_leave_no_room_for() {
    // Both fit alone; the second one not beside what is left of a request on the first.
    let mut world = two_models(|behaviour| behaviour.parked_bytes = Some(15));
    world.add_plain(3, 90);
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(4 * SECOND);
    let large = world.ask_as(3, Priority::Critical);
    world.run_for(SECOND);
    let small = world.ask_as(2, Priority::Critical);
    world.run_for(60 * SECOND);
    assert_eq!(world.unanswered(), []);
    for request in [batch, large, small] {
        assert!(world.finished_at(request).is_some());
    }
}

#[test]
fn a_full_model_gives_the_sequence_of_who_has_least_to_a_higher_class() {
    let mut world = World::new(settings());
    let mut one = spec(1, 60);
    one.parallel = 2;
    world.add(one, Behaviour { run: 10 * SECOND, ..Behaviour::plain(60) });
    let standard = world.ask_as(1, Priority::Standard);
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(3 * SECOND);
    let critical = world.ask_as(1, Priority::Critical);
    let line = |world: &World| world.worker.ledger(world.now)[0].clone();
    world.run_for(SECOND);
    assert_eq!((line(&world).in_flight, line(&world).parked, line(&world).waiting), (2, 1, 1));
    world.run_for(60 * SECOND);
    assert!(seconds(&world, standard) < 11.1, "it was left alone");
    assert!(seconds(&world, critical) < 13.1, "it took a sequence at once");
    assert!((19.0..19.2).contains(&seconds(&world, batch)), "8 s were left when the first sequence became free");
}

#[test]
fn whoever_leaves_takes_its_state_along() {
    // Before it is stopped, while it is, while it is taken out, and when it is out.
    for milliseconds in [0, 1, 4, 500] {
        let mut world = two_models(|behaviour| behaviour.parked_bytes = Some(7));
        let batch = world.ask_as(1, Priority::Batch);
        world.run_for(4 * SECOND);
        let critical = world.ask_as(2, Priority::Critical);
        world.run_for(Duration::from_millis(milliseconds));
        world.cancel(batch, CancelCause::Disconnected);
        world.run_for(60 * SECOND);
        assert!(world.finished_at(critical).is_some());
        assert_eq!(world.worker.memory(world.now)[0].parked.total(), 0);
        let lines = world.worker.ledger(world.now);
        assert!(lines.iter().all(|line| line.waiting + line.in_flight + line.parked == 0), "{lines:?}");
    }
}

#[test]
fn whoever_was_waited_for_may_leave_meanwhile() {
    for milliseconds in [0, 1, 4, 500, 1_500] {
        let mut world = two_models(|_| {});
        let batch = world.ask_as(1, Priority::Batch);
        world.run_for(4 * SECOND);
        let critical = world.ask_as(2, Priority::Critical);
        world.run_for(Duration::from_millis(milliseconds));
        world.cancel(critical, CancelCause::DeadlinePassed);
        world.run_for(60 * SECOND);
        assert!(world.finished_at(batch).is_some());
    }
}

#[test]
fn parked_bytes_are_not_for_cached_kv_and_show_in_the_ledger() {
    let mut world = two_models(|behaviour| behaviour.parked_bytes = Some(7));
    world.ask_as(1, Priority::Batch);
    world.run_for(4 * SECOND);
    assert_eq!(world.worker.kv_limit_bytes(), 40);
    world.ask_as(2, Priority::Critical);
    world.run_for(Duration::from_millis(500));
    let memory = world.worker.memory(world.now);
    assert_eq!((memory[0].parked.total(), memory[0].loading.total(), memory[0].free.get(0)), (7, 60, 33));
    assert_eq!(world.worker.kv_limit_bytes(), 33);
}

#[test]
fn whoever_was_parked_for_long_goes_first_and_is_left_alone() {
    let mut world = two_models_within(ParkingLimits { time_max: 5 * SECOND, ..settings().parking }, |_| {});
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(2 * SECOND);
    // The second model is never idle.
    world.behaviours.get_mut(&id(2)).expect("there").run = 4 * SECOND;
    for _ in 0..8 {
        world.ask_as(2, Priority::Critical);
        world.run_for(3 * SECOND);
    }
    world.run_for(60 * SECOND);
    let batch = seconds(&world, batch);
    assert!(batch < 30.0, "{batch}");
    assert_eq!((parks(&world), world.unanswered()), (1, vec![]));
}

#[test]
fn an_engine_that_dies_loses_nobody_who_is_parked() {
    let mut world = two_models(|_| {});
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(4 * SECOND);
    world.behaviours.get_mut(&id(2)).expect("there").crash_at_request = Some(1);
    let critical = world.ask_as(2, Priority::Critical);
    world.run_for(60 * SECOND);
    assert!(matches!(world.rejection_of(critical), Some(Rejection::EngineLost { .. })));
    assert!(world.finished_at(batch).is_some());
}

#[test]
fn a_worker_that_ends_keeps_nothing_parked() {
    let mut world = two_models(|_| {});
    let batch = world.ask_as(1, Priority::Batch);
    world.run_for(4 * SECOND);
    world.ask_as(2, Priority::Critical);
    world.run_for(Duration::from_millis(500));
    world.feed(Event::Drain);
    world.run_for(60 * SECOND);
    assert_eq!(world.rejection_of(batch), Some(&Rejection::Draining));
    assert_eq!((world.held_host_bytes(), world.worker.memory(world.now)[0].parked.total()), (0, 0));
}
