//! Seeded schedules of requests, failures and evictions through the worker machine, every invariant checked after
//! every event. `WARMSET_SEEDS=10000 cargo test --release -p warmset-core --test schedules` runs the long form;
//! `WARMSET_SEED=n` runs one and says what happened.

mod world;

use std::time::Duration;
use warmset_core::{
    Footprint, MemoryVector, PoolName, Priority, RequestId,
    forecast::{Forecast, Parts, WallTime},
    worker::{CancelCause, Event, Recollection, Worker},
};
use world::{Answer, Behaviour, Random, World, id, settings, spec};

/// Seeds in the everyday run.
const SEEDS_DEFAULT: u64 = 300;
/// Seeds that are replayed in the everyday run.
const REPLAYED_SEEDS: u64 = 20;
const MODELS: u8 = 7;

fn any_world(random: &mut Random) -> World {
    let mut limits = settings();
    limits.cores = 1 + u32::try_from(random.below(3)).expect("small");
    limits.concurrent_loads_max = 1 + u32::try_from(random.below(3)).expect("small");
    limits.waiting_requests_max = if random.chance(20) { 5 } else { 1_000 };
    limits.minimum_residency = Duration::from_secs(random.below(20));
    limits.priority_protection = Duration::from_secs(random.below(60));
    limits.forecast =
        Parts { preload: random.chance(80), intervals: random.chance(80), time_of_day: random.chance(80) };
    limits.parking.time_max = Duration::from_secs(random.below(30));
    limits.parking.times_max = u32::try_from(random.below(5)).expect("small");
    limits.parking.requests_max = if random.chance(20) { 1 } else { 8 };
    if random.chance(30) {
        limits.pools = vec![(PoolName::new("own"), MemoryVector(vec![30]))];
    }
    let mut world = World::new(limits);
    for number in 1..=MODELS {
        add_any_model(&mut world, random, number);
    }
    world
}

fn add_any_model(world: &mut World, random: &mut Random, number: u8) {
    let steady = any_footprint(random);
    let mut peak = steady.clone();
    peak.private_host_bytes += random.below(15);
    let mut model = spec(number, 0);
    let factor = [1, 2, 4][usize::try_from(random.below(3)).expect("small")];
    // Estimates are right, or wrong by two either way.
    model.steady = scaled(&steady, factor);
    model.peak = scaled(&peak, factor);
    model.artifact = id(20 + u8::try_from(random.below(4)).expect("small"));
    model.pin = random.chance(8);
    model.parallel = 1 + u32::try_from(random.below(3)).expect("small");
    model.priority = any_class(random);
    model.targets.ttft_p99_cold_ms = random.chance(40).then(|| u32::try_from(random.below(8_000)).expect("small"));
    model.keep_alive = random.chance(25).then(|| Duration::from_secs(1 + random.below(30)));
    model.pool = if random.chance(20) { PoolName::new("own") } else { PoolName::default_pool() };
    let behaviour = Behaviour {
        peak,
        steady,
        working_bytes: 0,
        load: Duration::from_millis(random.below(3_000)),
        run: Duration::from_millis(1 + random.below(4_000)),
        failing_loads: if random.chance(15) { u32::try_from(random.below(4)).expect("small") } else { 0 },
        permanent: random.chance(30),
        crash_at_request: random.chance(20).then(|| 1 + u32::try_from(random.below(6)).expect("small")),
        hang_at_request: random.chance(10).then(|| 1 + u32::try_from(random.below(6)).expect("small")),
        load_never_ends: random.chance(3),
        ignores_stop: random.chance(10),
        parked_bytes: (!random.chance(15)).then(|| random.below(20)),
    };
    world.add(model, behaviour);
}

/// Half of the real bytes, the real bytes, or twice as many.
fn scaled(footprint: &Footprint, half_times: u64) -> Footprint {
    Footprint {
        private_host_bytes: footprint.private_host_bytes * half_times / 2,
        shared_host_bytes: footprint.shared_host_bytes * half_times / 2,
        accelerator_bytes: footprint.accelerator_bytes.iter().map(|bytes| bytes * half_times / 2).collect(),
    }
}

fn any_footprint(random: &mut Random) -> Footprint {
    let shards = if random.chance(25) { 1 + random.below(2) } else { 0 };
    Footprint {
        private_host_bytes: 1 + random.below(60),
        shared_host_bytes: random.below(30),
        accelerator_bytes: (0..shards).map(|_| random.below(45)).collect(),
    }
}

fn any_class(random: &mut Random) -> Priority {
    Priority::ALL[usize::try_from(random.below(3)).expect("small")]
}

/// Something a worker before this one knew.
fn recollection(number: u8) -> Recollection {
    let demand_per_second = f64::from(number) / 10.0;
    Recollection {
        digest: id(number),
        demand_per_second,
        age: Duration::from_secs(30),
        warm: !number.is_multiple_of(3),
        forecast: Forecast::default(),
    }
}

/// Plays one schedule; every `feed` inside checks every invariant.
fn play(seed: u64) -> World {
    let mut random = Random(seed);
    let mut world = any_world(&mut random);
    let mut asked: Vec<RequestId> = vec![];
    for _ in 0..120 {
        let number = 1 + u8::try_from(random.below(u64::from(MODELS))).expect("small");
        match random.below(100) {
            0..60 => {
                let class = any_class(&mut random);
                asked.push(world.ask_as(number, class));
            }
            60..75 if !asked.is_empty() => {
                let place = usize::try_from(random.below(asked.len() as u64)).expect("small");
                let cause = if random.chance(50) { CancelCause::Disconnected } else { CancelCause::DeadlinePassed };
                world.cancel(asked[place], cause);
            }
            75..79 => world.feed(Event::LoadWanted { digest: id(number) }),
            79..83 => world.feed(Event::UnloadWanted { digest: id(number) }),
            83..84 => world.feed(Event::Forget { digest: id(number) }),
            84..86 => world.feed(Event::Configure(spec(number, 1 + random.below(90)))),
            86..88 => world.run_for(Duration::from_secs(random.below(40))),
            88..90 => {
                let predecessor = id(1 + u8::try_from(random.below(u64::from(MODELS))).expect("small"));
                world.feed(Event::Succeed { digest: id(number), predecessor });
            }
            90..92 => world.feed(Event::PauseLifted { digest: id(number) }),
            92..94 => world.feed(Event::Remembered { models: (number..=MODELS).map(recollection).collect() }),
            94..96 => {
                let second = u32::try_from(random.below(86_400)).expect("small");
                let wall = WallTime { weekday: u8::try_from(random.below(7)).expect("small"), second };
                let asleep = Duration::from_secs(if random.chance(20) { random.below(10_000) } else { 0 });
                world.feed(Event::WallTime { wall, asleep });
            }
            96..98 => world.feed(Event::Scheduled { digest: id(number), warm: random.chance(60) }),
            // Now and then a habit: intervals that are worth planning by.
            98.. => {
                for _ in 0..4 {
                    asked.push(world.ask_as(number, any_class(&mut random)));
                    world.run_for(Duration::from_secs(20));
                }
            }
            _ => {}
        }
        if random.chance(60) {
            world.run_for(Duration::from_millis(random.below(2_500)));
        }
    }
    // Long enough for every load, pause, deadline and run to end.
    world.run_for(Duration::from_secs(3_600));
    world
}

#[test]
fn every_schedule_keeps_the_invariants_and_answers_everybody() {
    let seeds = world::seeds(SEEDS_DEFAULT);
    let verbose = seeds.len() == 1;
    for seed in seeds {
        // Printed only when the test fails, and then it names the schedule.
        eprintln!("WARMSET_SEED={seed}");
        let world = play(seed);
        if verbose {
            world.log.iter().for_each(|(time, event, actions)| eprintln!("{time:?} {event:?} -> {actions:?}"));
        }
        let unanswered = world.unanswered();
        assert!(unanswered.is_empty(), "seed {seed}: {unanswered:?}\n{:#?}", world.worker.ledger(world.now));
        let running = world.worker.ledger(world.now).iter().map(|line| line.in_flight + line.waiting).sum::<u32>();
        assert_eq!(running, 0, "seed {seed}: nobody is left running or waiting");
        let late =
            world.answers.values().filter(|answer| matches!(answer, Answer::Finished { at, .. } if *at > world.now));
        assert_eq!(late.count(), 0, "seed {seed}");
    }
}

/// Schedules that once broke something: 54 and 6688 left a hung engine alive for ever.
#[test]
fn schedules_that_once_failed_stay_mended() {
    for seed in [54, 6688] {
        assert_eq!(play(seed).unanswered(), [], "seed {seed}");
    }
}

#[test]
fn the_same_seed_twice_is_the_same_run() {
    for seed in 0..20 {
        assert!(play(seed).log == play(seed).log, "seed {seed}");
    }
}

#[test]
fn a_recorded_run_replays_to_the_same_actions() {
    for seed in world::seeds(REPLAYED_SEEDS) {
        let world = play(seed);
        world::replay(seed, Worker::new(world.worker.settings().clone(), warmset_core::Instant::ZERO), &world.log);
    }
}
