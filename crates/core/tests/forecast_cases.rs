//! What is due is loaded before it is asked for: into memory that is free or worth less, never in a caller's way.

mod world;

use std::time::Duration;
use warmset_core::{
    Digest,
    forecast::{Forecast, Parts, Source, WallTime},
    worker::{Event, EvictionReason, Fact, PreloadOutcome, Recollection},
};
use world::{Behaviour, World, id, settings, spec};

const MINUTE: Duration = Duration::from_secs(60);

fn world_with(parts: Parts) -> World {
    let mut limits = settings();
    limits.forecast = parts;
    World::new(limits)
}

/// A model that leaves after a minute without a request.
fn add_short_lived(world: &mut World, number: u8, bytes: u64) {
    let mut model = spec(number, bytes);
    model.keep_alive = Some(MINUTE);
    world.add(model, Behaviour::plain(bytes));
}

/// Asks for a model every half hour and tells whether it was there.
fn ask_every_half_hour(world: &mut World, number: u8, times: usize) -> Vec<bool> {
    let mut warm = vec![];
    for _ in 0..times {
        warm.push(world.is_ready(number));
        world.ask(number);
        world.run_for(30 * MINUTE);
    }
    warm
}

fn outcomes(world: &World) -> Vec<(Digest, PreloadOutcome)> {
    let facts = world.facts.iter().filter_map(|(_, fact)| match fact {
        Fact::Preloaded { digest, outcome } => Some((*digest, *outcome)),
        _ => None,
    });
    facts.collect()
}

#[test]
fn a_habit_is_met_with_a_warm_model_once_it_is_known() {
    let mut world = world_with(Parts::ALL);
    add_short_lived(&mut world, 1, 40);
    let warm = ask_every_half_hour(&mut world, 1, 8);
    assert_eq!(warm[..4], [false; 4], "three intervals are needed");
    let expectation = world.worker.expectation(world.now, &id(1)).expect("known");
    assert_eq!((expectation.source, expectation.intervals), (Some(Source::Intervals), 7));
    let used = outcomes(&world).iter().filter(|(_, outcome)| *outcome == PreloadOutcome::Used).count();
    assert_eq!(u32::try_from(used).ok(), Some(expectation.score.used));
    assert!(world.loads_of(1) > 4, "{:?}", world.facts);
}

#[test]
fn switched_off_it_loads_nothing_by_itself() {
    for parts in [Parts::NONE, Parts { preload: false, ..Parts::ALL }, Parts { intervals: false, ..Parts::ALL }] {
        let mut world = world_with(parts);
        add_short_lived(&mut world, 1, 40);
        assert_eq!(ask_every_half_hour(&mut world, 1, 8), [false; 8]);
        assert_eq!((world.loads_of(1), outcomes(&world)), (8, vec![]));
        let learned = world.worker.recollections(world.now)[0].forecast.clone();
        assert!(!learned.is_empty(), "it learns all the same");
    }
}

#[test]
fn a_preload_that_nobody_wants_leaves_with_its_window_and_is_not_repeated() {
    let mut world = world_with(Parts::ALL);
    add_short_lived(&mut world, 1, 40);
    ask_every_half_hour(&mut world, 1, 6);
    let loads = world.loads_of(1);
    world.run_for(48 * 60 * MINUTE);
    assert_eq!(world.loads_of(1), loads, "the load for the request that never came was there already");
    assert!(!world.is_ready(1));
    assert!(outcomes(&world).contains(&(id(1), PreloadOutcome::Wasted)));
}

/// Model 1 has a habit of half an hour and is not in memory; it is due in five minutes.
fn nearly_due(bytes: u64) -> World {
    let mut world = world_with(Parts::ALL);
    add_short_lived(&mut world, 1, bytes);
    for number in 2..=4 {
        world.add_plain(number, 50);
    }
    for _ in 0..6 {
        world.ask(1);
        world.run_for(30 * MINUTE);
    }
    world.ask(1);
    world.run_for(2 * MINUTE);
    assert!(!world.is_ready(1));
    world
}

#[test]
fn what_is_due_takes_memory_from_what_is_worth_less() {
    let mut world = nearly_due(80);
    world.ask(2);
    world.run_for(Duration::from_secs(5));
    assert!(world.is_ready(2));
    world.run_for(26 * MINUTE);
    assert!(world.is_ready(1) && !world.is_ready(2), "{:?}", world.worker.ledger(world.now));
    assert_eq!(world.evictions().last(), Some(&(id(2), EvictionReason::Memory)));
}

#[test]
fn what_is_due_takes_nothing_from_cached_kv_that_is_worth_more() {
    for (kv_worth, is_loaded) in [(f64::MIN_POSITIVE, true), (1e9, false)] {
        let mut world = nearly_due(20);
        for _ in 0..26 {
            world.feed(Event::KvPressed { worth: kv_worth });
            world.run_for(MINUTE);
        }
        assert_eq!(world.is_ready(1), is_loaded, "{kv_worth}");
        // KV that has not been pressed for a while wants nothing more.
        world.run_for(3 * MINUTE);
        assert!(world.is_ready(1));
    }
}

#[test]
fn what_is_due_takes_nothing_from_what_is_worth_more_or_in_use_or_pinned() {
    let mut hot = nearly_due(80);
    for _ in 0..300 {
        hot.ask(2);
        hot.run_for(Duration::from_secs(6));
    }
    assert!(hot.is_ready(2) && hot.evictions().iter().all(|(digest, _)| *digest != id(2)));
    let mut pinned = nearly_due(80);
    let mut model = spec(2, 50);
    model.pin = true;
    pinned.feed(Event::Configure(model));
    pinned.run_for(40 * MINUTE);
    assert!(pinned.is_ready(2) && !pinned.is_ready(1));
}

#[test]
fn a_caller_gets_load_slot_and_memory_back_at_once() {
    let mut world = nearly_due(80);
    world.behaviours.get_mut(&id(1)).expect("added").load = Duration::from_secs(50);
    let loads = world.loads_of(1);
    for _ in 0..40 * 60 {
        world.run_for(Duration::from_secs(1));
        if world.loads_of(1) > loads {
            break;
        }
    }
    assert_eq!(world.loads_of(1), loads + 1, "the preload is under way");
    let began = world.now;
    let caller = world.ask(2);
    world.run_for(Duration::from_secs(3));
    let finished = world.finished_at(caller).expect("it did not wait for the preload");
    assert!(finished.since(began) < Duration::from_millis(1_300), "{:?}", finished.since(began));
    assert!(outcomes(&world).contains(&(id(1), PreloadOutcome::Wasted)));
}

/// Two weeks of one model asked for at nine on working days, by the clock told each minute (plus `lag` at the end).
fn office_hours(days: u64, until_hour: u64) -> World {
    let mut world = world_with(Parts { intervals: false, ..Parts::ALL });
    add_short_lived(&mut world, 1, 40);
    for minute in 0..days * 1_440 + until_hour * 60 {
        let (day, second) = (minute / 1_440, u32::try_from(minute % 1_440 * 60).expect("small"));
        let weekday = u8::try_from(day % 7).expect("small");
        world.feed(Event::WallTime { wall: WallTime { weekday, second }, asleep: Duration::ZERO });
        if weekday < 5 && second == 9 * 3_600 {
            world.ask(1);
        }
        world.run_for(MINUTE);
    }
    world
}

#[test]
fn a_daily_habit_is_known_after_two_days_and_keeps_its_weekend() {
    let mut world = office_hours(4, 8);
    let loads = world.loads_of(1);
    let expectation = world.worker.expectation(world.now, &id(1)).expect("known");
    assert_eq!(expectation.source, Some(Source::TimeOfDay));
    assert_eq!(expectation.next_in, Some(60 * MINUTE));
    world.run_for(61 * MINUTE);
    assert_eq!(world.loads_of(1), loads + 1, "it is there at nine");
    let mut saturday = office_hours(5, 8);
    let loads = saturday.loads_of(1);
    saturday.run_for(120 * MINUTE);
    assert_eq!(saturday.loads_of(1), loads);
}

#[test]
fn a_clock_set_back_an_hour_or_a_sleep_breaks_nothing() {
    let mut world = office_hours(4, 8);
    let wall = WallTime { weekday: 4, second: 7 * 3_600 };
    world.feed(Event::WallTime { wall, asleep: Duration::ZERO });
    let expectation = world.worker.expectation(world.now, &id(1)).expect("known");
    assert_eq!(expectation.next_in, None, "at seven, nine is beyond the hour that is looked ahead");
    world.run_for(60 * MINUTE);
    let asleep = Duration::from_secs(30 * 60);
    world.feed(Event::WallTime { wall: WallTime { weekday: 4, second: 8 * 3_600 + 1_800 }, asleep });
    world.run_for(31 * MINUTE);
    assert!(world.is_ready(1));
}

#[test]
fn a_schedule_keeps_a_model_warm_where_nothing_warmer_is() {
    let mut world = world_with(Parts::ALL);
    world.add_plain(1, 60);
    world.add_plain(2, 60);
    world.feed(Event::Scheduled { digest: id(1), warm: true });
    world.run_for(MINUTE);
    assert!(world.is_ready(1));
    world.ask(2);
    world.run_for(20 * MINUTE);
    assert!(world.is_ready(1) && !world.is_ready(2), "it comes back when the other has cooled");
    world.feed(Event::Scheduled { digest: id(1), warm: false });
    world.ask(2);
    world.run_for(20 * MINUTE);
    assert!(world.is_ready(2) && !world.is_ready(1));
}

#[test]
fn a_habit_survives_a_restart_with_the_time_that_lies_between() {
    let mut before = world_with(Parts::ALL);
    add_short_lived(&mut before, 1, 40);
    ask_every_half_hour(&mut before, 1, 6);
    let text = serde_json::to_string(&before.worker.recollections(before.now)).expect("plain data");
    let mut known: Vec<Recollection> = serde_json::from_str(&text).expect("plain data");
    known[0].warm = false;
    // Asked for at the last full half hour, and ten minutes have passed.
    known[0].age = 10 * MINUTE;
    let mut after = world_with(Parts::ALL);
    add_short_lived(&mut after, 1, 40);
    after.feed(Event::Remembered { models: known });
    after.run_for(15 * MINUTE);
    assert_eq!(after.loads_of(1), 0, "not yet");
    after.run_for(6 * MINUTE);
    assert_eq!(after.loads_of(1), 1);
    assert_ne!(after.worker.recollections(after.now)[0].forecast, Forecast::default());
}
