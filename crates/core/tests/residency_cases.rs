//! Faults that real multi-model servers had, replayed against the worker machine on a virtual clock.

mod world;

use std::time::Duration;
use warmset_core::{
    Footprint, MemoryVector, PoolName, Priority,
    worker::{CancelCause, Event, EvictionReason, Fact, ModelState, Rejection, Settings, StartKind},
};
use world::{Behaviour, World, at, id, settings, spec};

fn room_for_one() -> World {
    let mut world = World::new(settings());
    for number in 1..=4 {
        world.add_plain(number, 80);
    }
    world
}

#[test]
fn l1_a_model_is_not_evicted_before_its_own_request_has_run() {
    let mut world = room_for_one();
    let a = world.ask(1);
    world.run_for(Duration::from_millis(100));
    let b = world.ask(2);
    world.run_for(Duration::from_secs(10));
    let (a, b) = (world.finished_at(a), world.finished_at(b));
    assert!(a.is_some() && b.is_some() && a < b, "{a:?} {b:?}");
    assert_eq!((world.loads_of(1), world.loads_of(2)), (1, 1));
}

#[test]
fn l1_a_request_at_every_millisecond_of_a_stop_is_served_by_a_new_life() {
    for offset in 0..30 {
        let mut world = room_for_one();
        let first = world.ask(1);
        world.run_for(Duration::from_secs(3));
        let other = world.ask(2);
        world.run_for(Duration::from_millis(offset));
        let again = world.ask(1);
        world.run_for(Duration::from_secs(30));
        for request in [first, other, again] {
            assert!(world.finished_at(request).is_some(), "offset {offset}: {:?}", world.answers);
        }
    }
}

#[test]
fn l2_simultaneous_cold_models_finish_within_the_sum_of_their_loads() {
    let mut world = room_for_one();
    world.ask(1);
    world.run_for(Duration::from_secs(5));
    let began = world.now;
    let requests = [world.ask(2), world.ask(3), world.ask(4)];
    world.run_for(Duration::from_secs(60));
    let last = requests.iter().filter_map(|request| world.finished_at(*request)).max().expect("all finish");
    assert!(requests.iter().all(|request| world.finished_at(*request).is_some()));
    // Three loads of one second, three runs of 0.1 s, and the milliseconds of stopping and checking.
    assert!(last.since(began) < Duration::from_millis(3_500), "{:?}", last.since(began));
}

#[test]
fn l3_a_victim_asked_for_again_neither_blocks_the_load_nor_is_lost() {
    let mut world = room_for_one();
    world.ask(1);
    world.run_for(Duration::from_secs(5));
    let b = world.ask(2);
    let revived = world.ask(1);
    assert_eq!(world.worker.oldest_pending_load(world.now), Duration::ZERO);
    world.run_for(Duration::from_millis(500));
    assert_eq!(world.worker.oldest_pending_load(world.now), Duration::from_millis(500));
    world.run_for(Duration::from_secs(30));
    assert!(world.finished_at(b).is_some() && world.finished_at(revived).is_some());
    assert_eq!(world.worker.oldest_pending_load(world.now), Duration::ZERO);
}

#[test]
fn l4_a_warm_model_is_not_held_up_by_a_load() {
    let mut world = World::new(settings());
    world.add_plain(1, 30);
    world.add_plain(2, 30);
    world.ask(1);
    world.run_for(Duration::from_secs(5));
    world.ask(2);
    let began = world.now;
    let hot = world.ask(1);
    world.run_for(Duration::from_millis(101));
    assert_eq!(world.start_of(hot), Some(StartKind::Warm));
    assert_eq!(world.finished_at(hot).map(|at| at.since(began)), Some(Duration::from_millis(100)));
}

#[test]
fn l5_an_engine_that_ignores_the_stop_is_killed_and_its_bytes_count_until_it_is_gone() {
    let mut world = room_for_one();
    world.behaviours.get_mut(&id(1)).expect("added").ignores_stop = true;
    world.ask(1);
    world.run_for(Duration::from_secs(5));
    let b = world.ask(2);
    world.run_for(Duration::from_secs(4));
    assert_eq!(world.worker.memory(world.now)[0].unloading.get(0), 80);
    assert_eq!(world.loads_of(2), 0, "no load before the bytes are free");
    world.run_for(Duration::from_secs(10));
    assert!(world.finished_at(b).is_some());
}

#[test]
fn l6_a_model_in_use_is_drained_not_stopped() {
    let mut world = room_for_one();
    world.behaviours.get_mut(&id(1)).expect("added").run = Duration::from_secs(20);
    let long = world.ask(1);
    world.run_for(Duration::from_secs(5));
    let b = world.ask(2);
    let late = world.ask(1);
    world.run_for(Duration::from_secs(60));
    let (long, b, late) = (world.finished_at(long), world.finished_at(b), world.finished_at(late));
    assert!(long.is_some() && long < b && b < late, "{long:?} {b:?} {late:?}");
}

#[test]
fn l7_a_small_load_into_a_full_pool_evicts_only_the_deficit_cheapest_first() {
    let mut world = World::new(settings());
    for number in 1..=4 {
        world.add_plain(number, 24);
    }
    world.add_plain(5, 10);
    for number in [1, 1, 1, 2, 3, 3, 4, 4] {
        world.ask(number);
        world.run_for(Duration::from_secs(3));
    }
    assert!((1..=4).all(|number| world.is_ready(number)));
    world.ask(5);
    world.run_for(Duration::from_secs(3));
    assert_eq!(world.evictions(), [(id(2), EvictionReason::Memory)], "the least asked for goes, nobody else");
    assert!(world.is_ready(5));
}

#[test]
fn l8_two_hot_models_and_room_for_one_swap_no_faster_than_their_minimum_residency() {
    let mut world = room_for_one();
    for number in [1, 2] {
        world.behaviours.get_mut(&id(number)).expect("added").run = Duration::from_millis(20);
    }
    let mut requests = vec![];
    for step in 0..1_200_u64 {
        requests.push(world.ask(1 + u8::try_from(step % 2).expect("0 or 1")));
        world.run_for(Duration::from_millis(50));
    }
    world.run_for(Duration::from_secs(60));
    assert!(world.unanswered().is_empty());
    assert!(requests.iter().all(|request| world.finished_at(*request).is_some()), "grouped service loses nobody");
    let swaps = world.loads_of(1) + world.loads_of(2);
    // A load takes 1 s and a reload stays for 4 s: about 12 swaps a minute, where alternating would make hundreds.
    assert!((4..=18).contains(&swaps), "{swaps} loads in a minute");
    let raised = |fact: &Fact| matches!(fact, Fact::ThrashAlarm { raised: true, .. });
    assert!(world.facts.iter().any(|(_, fact)| raised(fact)), "the alarm is raised");
}

#[test]
fn l8_a_patient_ping_pong_raises_the_thrash_alarm() {
    let mut world = room_for_one();
    for step in 0..20_u8 {
        world.ask(1 + step % 2);
        world.run_for(Duration::from_secs(6));
    }
    let alarms: Vec<bool> = world
        .facts
        .iter()
        .filter_map(|(_, fact)| match fact {
            Fact::ThrashAlarm { raised, ratio, .. } => {
                assert!(!raised || *ratio >= 0.1);
                Some(*raised)
            }
            _ => None,
        })
        .collect();
    assert_eq!(alarms.first(), Some(&true));
    world.run_for(Duration::from_secs(600));
    world.ask(1);
    assert!(!world.worker.memory(world.now)[0].thrash_alarm, "quiet clears it");
}

#[test]
fn l9_the_ledger_returns_to_zero_after_many_cycles() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    for _ in 0..200 {
        world.ask(1);
        world.run_for(Duration::from_secs(2));
        world.feed(Event::UnloadWanted { digest: id(1) });
        world.run_for(Duration::from_secs(1));
        assert_eq!(world.held_host_bytes(), 0);
    }
    assert_eq!(world.loads_of(1), 200);
}

#[test]
fn l10_a_pair_too_large_together_is_served_in_turn() {
    let mut world = World::new(settings());
    world.add_plain(1, 70);
    world.add_plain(2, 70);
    let requests = [world.ask(1), world.ask(2)];
    for _ in 0..100 {
        world.run_for(Duration::from_millis(50));
        assert!(world.held_host_bytes() <= 100);
    }
    assert!(requests.iter().all(|request| world.finished_at(*request).is_some()));
}

#[test]
fn l12_looking_is_not_using() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    world.ask(1);
    world.run_for(Duration::from_secs(2));
    let before = world.worker.ledger(world.now);
    for _ in 0..100 {
        let _ = (world.worker.ledger(world.now), world.worker.memory(world.now));
    }
    assert_eq!(before, world.worker.ledger(world.now));
    assert_eq!(world.loads_of(1), 1);
}

#[test]
fn l13_a_load_outlives_the_deadline_of_its_caller() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    let impatient = world.ask(1);
    world.run_for(Duration::from_millis(500));
    world.cancel(impatient, CancelCause::DeadlinePassed);
    world.run_for(Duration::from_secs(2));
    let next = world.ask(1);
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.start_of(next), Some(StartKind::Warm));
    assert_eq!(world.loads_of(1), 1);
}

#[test]
fn l14_a_load_nobody_wants_is_given_up_and_its_memory_freed() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    let gone = world.ask(1);
    world.run_for(Duration::from_millis(500));
    world.cancel(gone, CancelCause::Disconnected);
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.held_host_bytes(), 0);
    assert_eq!(world.evictions(), [(id(1), EvictionReason::Abandoned)]);
}

#[test]
fn l14_a_load_others_wait_for_goes_on() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    let gone = world.ask(1);
    let stays = world.ask(1);
    world.run_for(Duration::from_millis(500));
    world.cancel(gone, CancelCause::Disconnected);
    world.run_for(Duration::from_secs(1));
    assert!(world.finished_at(stays).is_some());
    assert_eq!(world.loads_of(1), 1);
}

#[test]
fn l14_callers_with_less_patience_than_a_load_takes_are_served_in_the_end() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    for _ in 0..2 {
        let gone = world.ask(1);
        world.run_for(Duration::from_millis(700));
        world.cancel(gone, CancelCause::Disconnected);
        world.run_for(Duration::from_millis(400));
    }
    let served = world.ask(1);
    world.run_for(Duration::from_millis(200));
    assert_eq!(world.start_of(served), Some(StartKind::Warm));
}

#[test]
fn l15_an_estimate_twice_too_large_is_corrected_by_one_load() {
    let mut world = World::new(settings());
    world.add(spec(1, 100), Behaviour::plain(50));
    world.add_plain(2, 50);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    world.ask(2);
    world.run_for(Duration::from_secs(3));
    assert!(world.is_ready(1) && world.is_ready(2));
    assert_eq!(world.evictions(), []);
}

#[test]
fn l15_an_estimate_twice_too_small_evicts_the_deficit_but_never_the_newcomer() {
    let mut world = World::new(settings());
    for number in 1..=3 {
        world.add_plain(number, 20);
        world.ask(number);
        world.run_for(Duration::from_secs(3));
    }
    world.ask(1);
    world.add(spec(4, 40), Behaviour::plain(80));
    let late = world.ask(4);
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(4) && world.finished_at(late).is_some());
    assert_eq!(world.held_host_bytes(), 100);
    assert!(world.is_ready(1), "the one most asked for stays: {:?}", world.evictions());
    let corrected = Fact::SizeCorrected { digest: id(4), from_bytes: 40, to_bytes: 80 };
    assert!(world.facts.iter().any(|(_, fact)| *fact == corrected));
}

#[test]
fn l15_what_a_model_grows_by_while_it_runs_is_planned_for_at_its_next_load() {
    let mut world = World::new(settings());
    world.add_plain(1, 60);
    world.add_plain(2, 30);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    world.grow(1, 75);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    world.grow(1, 70);
    world.run_for(Duration::from_secs(30));
    world.feed(Event::UnloadWanted { digest: id(1) });
    world.ask(2);
    world.run_for(Duration::from_secs(3));
    assert!(world.is_ready(2));
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    assert!(world.is_ready(1) && !world.is_ready(2), "room for its 75 bytes was made before its load");
}

#[test]
fn what_a_model_grows_by_is_told_once_for_each_mebibyte_and_charged_to_the_byte() {
    const MIB: u64 = 1 << 20;
    let pool =
        Settings { capacity: MemoryVector(vec![110 * MIB]), reserve: MemoryVector(vec![10 * MIB]), ..settings() };
    let mut world = World::new(pool);
    world.add_plain(1, 60 * MIB);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    let mut grows = |bytes: u64| {
        world.grow(1, bytes);
        world.ask(1);
        world.run_for(Duration::from_secs(30));
        let told = world.facts.iter().filter(|(_, fact)| matches!(fact, Fact::Grown { .. })).count();
        (told, world.held_host_bytes())
    };
    assert_eq!(grows(60 * MIB), (0, 60 * MIB), "measured as it was at its load");
    for pages in 1..6 {
        let bytes = 60 * MIB + pages * 4096;
        assert_eq!(grows(bytes), (0, bytes), "by pages");
    }
    assert_eq!(grows(61 * MIB - 1), (0, 61 * MIB - 1));
    assert_eq!(grows(61 * MIB), (1, 61 * MIB));
    assert_eq!(grows(61 * MIB + 4096), (1, 61 * MIB + 4096));
    assert_eq!(grows(70 * MIB), (2, 70 * MIB), "at once, it is told once");
    assert_eq!(grows(60 * MIB), (2, 60 * MIB), "less than the most is no news");
    assert_eq!(grows(70 * MIB), (2, 70 * MIB), "nor the most again");
}

#[test]
fn an_estimate_larger_than_the_pool_does_not_refuse_a_file_that_fits() {
    let mut world = World::new(settings());
    let mut large = spec(1, 0);
    large.peak = Footprint { private_host_bytes: 500, shared_host_bytes: 30, accelerator_bytes: vec![] };
    world.add(large, Behaviour::plain(60));
    let request = world.ask(1);
    world.run_for(Duration::from_secs(3));
    assert!(world.finished_at(request).is_some());
}

#[test]
fn l16_a_pinned_model_comes_back_after_a_crash_with_its_bytes_still_its_own() {
    let mut world = World::new(settings());
    let mut pinned = spec(1, 60);
    pinned.pin = true;
    let behaviour = Behaviour { crash_at_request: Some(1), ..Behaviour::plain(60) };
    world.add(pinned, behaviour);
    world.add_plain(2, 60);
    world.run_for(Duration::from_secs(2));
    assert!(world.is_ready(1), "loaded without being asked for");
    let lost = world.ask(1);
    world.run_for(Duration::from_secs(3));
    assert!(matches!(world.rejection_of(lost), Some(Rejection::EngineLost { .. })));
    assert!(world.is_ready(1), "restarted without being asked for");
    let refused = world.ask(2);
    assert!(matches!(world.rejection_of(refused), Some(Rejection::NoMemory { .. })), "{:?}", world.answers);
    assert!(world.is_ready(1));
}

#[test]
fn pins_and_recently_used_higher_classes_are_no_victims() {
    let mut world = World::new(settings());
    let mut critical = spec(1, 60);
    critical.priority = Priority::Critical;
    world.add(critical, Behaviour::plain(60));
    world.add_plain(2, 60);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    let standard = world.ask(2);
    world.run_for(Duration::from_secs(200));
    assert!(world.is_ready(1) && world.finished_at(standard).is_none(), "protected while recently used");
    world.run_for(Duration::from_secs(200));
    assert!(world.finished_at(standard).is_some(), "not for ever");
}

#[test]
fn a_critical_request_is_loaded_before_standard_ones_that_waited_longer() {
    let mut world = room_for_one();
    world.ask(1);
    world.run_for(Duration::from_millis(10));
    let standard = world.ask(2);
    let critical = world.ask_as(3, Priority::Critical);
    world.run_for(Duration::from_secs(20));
    assert!(world.finished_at(critical) < world.finished_at(standard));
}

#[test]
fn pools_do_not_evict_each_other() {
    let mut with_pool = settings();
    with_pool.pools = vec![(PoolName::new("own"), MemoryVector(vec![50]))];
    let mut world = World::new(with_pool);
    let mut own = spec(1, 50);
    own.pool = PoolName::new("own");
    world.add(own, Behaviour::plain(50));
    world.add_plain(2, 50);
    world.add_plain(3, 50);
    for number in [1, 2, 3, 2, 3] {
        let request = world.ask(number);
        world.run_for(Duration::from_secs(20));
        assert!(world.finished_at(request).is_some());
    }
    assert!(world.is_ready(1));
    assert!(world.evictions().iter().all(|(digest, _)| *digest != id(1)));
    let memory = world.worker.memory(world.now);
    assert_eq!(memory.iter().map(|pool| pool.capacity.get(0)).collect::<Vec<_>>(), [50, 50]);
}

#[test]
fn a_model_told_to_leave_while_callers_wait_for_it_answers_them_first() {
    let mut world = room_for_one();
    let request = world.ask(1);
    world.run_for(Duration::from_millis(100));
    world.feed(Event::UnloadWanted { digest: id(1) });
    world.run_for(Duration::from_secs(10));
    assert!(world.finished_at(request).is_some(), "{:?}", world.answers);
    assert!(!world.is_ready(1));
    assert_eq!(world.evictions(), [(id(1), EvictionReason::Requested)]);
    let later = world.ask(1);
    world.run_for(Duration::from_secs(10));
    assert!(world.finished_at(later).is_some() && world.is_ready(1));
}

#[test]
fn keep_alive_unloads_an_idle_model() {
    let mut world = World::new(settings());
    let mut short = spec(1, 40);
    short.keep_alive = Some(Duration::from_secs(30));
    world.add(short, Behaviour::plain(40));
    world.ask(1);
    world.run_for(Duration::from_secs(20));
    world.ask(1);
    world.run_for(Duration::from_secs(29));
    assert!(world.is_ready(1));
    world.run_for(Duration::from_secs(2));
    assert!(!world.is_ready(1));
    assert_eq!(world.evictions(), [(id(1), EvictionReason::KeepAlive)]);
}

#[test]
fn two_models_share_the_pages_of_one_artifact() {
    let mut world = World::new(settings());
    let shared = Footprint { private_host_bytes: 10, shared_host_bytes: 70, accelerator_bytes: vec![] };
    for number in 1..=2 {
        let mut twin = spec(number, 0);
        (twin.artifact, twin.peak, twin.steady) = (id(9), shared.clone(), shared.clone());
        let behaviour = Behaviour { peak: shared.clone(), steady: shared.clone(), ..Behaviour::plain(0) };
        world.add(twin, behaviour);
        world.ask(number);
        world.run_for(Duration::from_secs(3));
    }
    assert!(world.is_ready(1) && world.is_ready(2));
    assert_eq!(world.held_host_bytes(), 90);
}

#[test]
fn models_are_placed_over_several_devices_and_served_in_turn_when_they_exceed_one() {
    let mut world = World::new(settings());
    let on_device = Footprint { private_host_bytes: 1, shared_host_bytes: 0, accelerator_bytes: vec![40] };
    for number in 1..=3 {
        let mut model = spec(number, 0);
        (model.peak, model.steady) = (on_device.clone(), on_device.clone());
        let behaviour = Behaviour { peak: on_device.clone(), steady: on_device.clone(), ..Behaviour::plain(0) };
        world.add(model, behaviour);
    }
    let mut requests = vec![world.ask(1), world.ask(2)];
    world.run_for(Duration::from_millis(2_900));
    assert!(world.is_ready(1) && world.is_ready(2), "one on each accelerator");
    assert_eq!(world.worker.memory(world.now)[0].resident, MemoryVector(vec![2, 40, 40]));
    requests.push(world.ask(3));
    world.run_for(Duration::from_secs(10));
    assert!(requests.iter().all(|request| world.finished_at(*request).is_some()));
    assert_eq!(world.evictions().len(), 1);
}

#[test]
fn a_runaway_engine_is_killed_alone() {
    let mut world = World::new(settings());
    world.add_plain(1, 20);
    world.add_plain(2, 20);
    for number in [1, 2] {
        world.ask(number);
        world.run_for(Duration::from_secs(3));
    }
    let generation = warmset_core::worker::Generation(1);
    let steady = Footprint::host(20 + 10 + (64 << 20) + 1);
    world.feed(Event::Measured { digest: id(1), generation, steady });
    world.run_for(Duration::from_secs(1));
    assert!(!world.is_ready(1) && world.is_ready(2));
}

#[test]
fn an_engine_that_puts_a_state_together_has_not_run_away() {
    let mut world = World::new(settings());
    world.add(spec(1, 20), Behaviour { working_bytes: 500, ..Behaviour::plain(20) });
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    let generation = warmset_core::worker::Generation(1);
    let limit = 20 + 10 + (64 << 20) + 500;
    world.feed(Event::Measured { digest: id(1), generation, steady: Footprint::host(limit) });
    world.run_for(Duration::from_secs(1));
    assert!(world.is_ready(1));
    world.feed(Event::Measured { digest: id(1), generation, steady: Footprint::host(limit + 1) });
    world.run_for(Duration::from_secs(1));
    assert!(!world.is_ready(1));
}

#[test]
fn a_drain_lets_running_requests_finish_and_refuses_new_ones() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    world.add_plain(2, 40);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    let running = world.ask(1);
    let cold = world.ask(2);
    world.feed(Event::Drain);
    let refused = world.ask(1);
    world.run_for(Duration::from_secs(10));
    assert!(world.finished_at(running).is_some());
    assert_eq!(world.rejection_of(refused), Some(&Rejection::Draining));
    assert_eq!(world.rejection_of(cold), Some(&Rejection::Draining));
    assert_eq!(world.held_host_bytes(), 0);
}

#[test]
fn forgetting_a_model_finishes_what_runs_and_frees_it() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    let running = world.ask(1);
    world.feed(Event::Forget { digest: id(1) });
    world.run_for(Duration::from_secs(3));
    assert!(world.finished_at(running).is_some());
    let after = world.ask(1);
    assert_eq!(world.rejection_of(after), Some(&Rejection::UnknownModel));
    assert_eq!(world.held_host_bytes(), 0);
    assert!(world.worker.ledger(world.now).is_empty());
}

#[test]
fn states_are_told_as_they_change() {
    let mut world = World::new(settings());
    world.add_plain(1, 40);
    world.ask(1);
    world.run_for(Duration::from_secs(3));
    world.feed(Event::UnloadWanted { digest: id(1) });
    world.run_for(Duration::from_secs(3));
    let states: Vec<ModelState> = world
        .facts
        .iter()
        .filter_map(|(_, fact)| match fact {
            Fact::StateChanged { state, .. } => Some(*state),
            _ => None,
        })
        .collect();
    use ModelState::{Absent, Loading, Ready, Unloading, Verifying};
    assert_eq!(states, [Verifying, Loading, Ready, Unloading, Absent]);
}

#[test]
fn an_impossible_model_is_refused_with_the_numbers() {
    let mut world = World::new(settings());
    let mut huge = spec(1, 101);
    huge.measured = true;
    world.add(huge, Behaviour::plain(101));
    let request = world.ask(1);
    let expected = Rejection::TooLarge { needed_bytes: 101, available_bytes: 100 };
    assert_eq!(world.rejection_of(request), Some(&expected));
    assert_eq!(world.now, at(0));
}
