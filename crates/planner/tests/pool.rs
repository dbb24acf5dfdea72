//! Pools of machines on a virtual clock: nothing is lost whatever fails, equal seeds give equal runs, queues are as long as
//! theory says, and what the shipped scenario is there to show.

use std::time::Duration;
use warmset_core::{Instant, Priority, targets::Targets};
use warmset_planner::pool::{
    demand::{Demand, Request},
    figures::Figures,
    record::{End, Recording},
    report::{Project, Task},
    scenario::{Burst, FailingLoads, Lost, Plan, Pool, SHIPPED, SlowDisk, Team},
    world::{Fleet, play},
};

const SEEDS_DEFAULT: u64 = 300;

/// The seeds to play: one that was named, as many as were asked for, or the everyday number.
#[expect(clippy::disallowed_methods, reason = "the length of a test run is chosen by whoever runs it")]
fn seeds() -> Vec<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    match number("WARMSET_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("WARMSET_SEEDS").unwrap_or(SEEDS_DEFAULT)).collect(),
    }
}

fn shipped() -> Plan {
    Plan::parse(SHIPPED.1).expect("it is shipped")
}

fn any_team(number: usize, random: &mut fastrand::Rng) -> Team {
    let model_bytes = random.u64(1..=30);
    let targets =
        Targets { ttft_p99_warm_ms: random.bool().then_some(500), ttft_p99_cold_ms: random.bool().then_some(9_000) };
    Team {
        name: format!("team-{number}"),
        class: Priority::ALL[random.usize(..3)],
        models: random.usize(1..=6),
        pinned: usize::from(random.u32(..4) == 0),
        zipf: random.f64(),
        machines_per_model: random.bool().then(|| random.usize(1..=3)),
        targets,
        model_bytes,
        peak_bytes: model_bytes + random.u64(..5),
        load_seconds: 10.0 * random.f64(),
        first_request_seconds: random.f64(),
        parallel: random.u32(1..=4),
        prefill_tokens_per_second: 2_000.0,
        decode_step_seconds: 0.05 * random.f64(),
        kv_bytes_per_token: u64::from(random.u32(..50) == 0),
        kept_tokens: random.u64(..3_000),
        requests_per_second: 0.5 * random.f64() + 0.01,
        continued_share: 0.5 * random.f64(),
        ..shipped().pool.team[0].clone()
    }
}

/// A pool with a quarter of an hour of trouble.
fn any_pool(random: &mut fastrand::Rng) -> Pool {
    let machines = random.usize(1..=3);
    let time = |random: &mut fastrand::Rng| (random.f64() * 0.25, random.f64() * 300.0);
    let mut pool = Pool {
        hours: 0.25,
        machines,
        memory_bytes: random.u64(40..=120),
        reserve_bytes: 2,
        concurrent_loads: random.u32(1..=2),
        shares_compute: random.bool(),
        stop_seconds: random.f64(),
        patience_seconds: if random.bool() { 600.0 } else { 5.0 },
        queue_limit: if random.u32(..3) == 0 { 5 } else { 1_000 },
        team: (0..random.usize(1..=3)).map(|number| any_team(number, random)).collect(),
        lost: Vec::new(),
        slow_disk: Vec::new(),
        failing_loads: Vec::new(),
        burst: Vec::new(),
        ..shipped().pool
    };
    for _ in 0..random.usize(..4) {
        let ((at_hours, seconds), share) = (time(random), random.f64());
        let team = pool.team[random.usize(..pool.team.len())].name.clone();
        match random.u32(..4) {
            0 => pool.lost.push(Lost { machine: random.usize(..machines), at_hours, away_seconds: seconds }),
            1 => pool.slow_disk.push(SlowDisk { at_hours, seconds, times: 1.0 + 20.0 * share }),
            2 => pool.failing_loads.push(FailingLoads { at_hours, seconds, share }),
            _ => pool.burst.push(Burst { team, at_hours, seconds, times: 10.0 * share }),
        }
    }
    pool
}

fn whole(pool: &Pool, demand: &Demand) -> Fleet {
    let teams = (0..pool.team.len()).collect();
    Fleet::new(pool, demand, (teams, pool.machines), pool.lost.clone())
}

fn run(pool: &Pool, seed: u64) -> (Demand, Recording) {
    let demand = Demand::new(pool, seed);
    let recording =
        play(pool, &demand, &whole(pool, &demand), seed, true).unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
    (demand, recording)
}

#[test]
fn whatever_fails_every_invariant_holds_and_everybody_hears_something() {
    let (mut answered, mut asked) = (0, 0);
    for seed in seeds() {
        eprintln!("WARMSET_SEED={seed}");
        let pool = any_pool(&mut fastrand::Rng::with_seed(seed));
        let (demand, recording) = run(&pool, seed);
        for (request, record) in demand.requests.iter().zip(&recording.records) {
            let told = record.first_token.into_iter().chain(record.ended);
            assert!(told.into_iter().all(|at| at >= request.at), "seed {seed}: {request:?} {record:?}");
            answered += u64::from(record.end == End::Answered);
            let heard = matches!(record.end, End::Broken | End::Answered);
            assert!(!heard || record.first_token.is_some(), "seed {seed}: {request:?} {record:?}");
            assert!(record.machine.is_some() || record.end == End::Refused("no_machine"), "seed {seed}: {record:?}");
        }
        asked += demand.requests.len();
    }
    assert!(answered > asked as u64 / 2, "{answered} of {asked} were answered");
}

#[test]
fn equal_seeds_give_equal_runs_and_others_do_not() {
    let pool = any_pool(&mut fastrand::Rng::with_seed(7));
    let (demand, recording) = run(&pool, 1);
    assert_eq!((demand, recording.clone()), run(&pool, 1));
    assert_ne!(recording, run(&pool, 2).1);
}

/// What one team asks changes nothing of what others ask.
#[test]
fn teams_ask_by_chances_of_their_own() {
    let pool = shipped().pool;
    let calm = Pool { burst: Vec::new(), ..pool.clone() };
    let of = |pool: &Pool, team: usize| -> Vec<Request> {
        let requests = Demand::new(pool, 3).requests.into_iter().filter(|request| request.team == team);
        requests.map(|request| Request { session: 0, ..request }).collect()
    };
    assert_eq!(of(&pool, 1), of(&calm, 1));
    assert!(of(&pool, 0).len() > of(&calm, 0).len());
}

/// One model, one sequence, equal requests: the mean wait of M/D/1 is rho * service / (2 * (1 - rho)).
#[test]
fn one_at_a_time_waits_as_long_as_theory_says() {
    let (service_seconds, rate) = (0.5, 1.4);
    let mut pool = Pool { hours: 24.0, machines: 1, lost: Vec::new(), burst: Vec::new(), ..shipped().pool };
    pool.team.truncate(1);
    let team = &mut pool.team[0];
    (team.models, team.pinned, team.parallel, team.requests_per_second, team.swing) = (1, 1, 1, rate, 0.0);
    (team.prefill_tokens_per_second, team.first_request_seconds, team.continued_share) = (1e9, 0.0, 0.0);
    (team.output_tokens, team.decode_step_seconds, team.system_tokens) = ((2, 2), service_seconds, 0);
    let demand = Demand::new(&pool, 5);
    let recording = play(&pool, &demand, &whole(&pool, &demand), 5, false).expect("it holds");
    let pairs = demand.requests.iter().zip(&recording.records);
    let waits: Vec<f64> = pairs.filter_map(|(asked, seen)| Some(seen.started?.since(asked.at).as_secs_f64())).collect();
    let mean = waits.iter().sum::<f64>() / waits.len() as f64;
    let utilisation = rate * service_seconds;
    let theory = utilisation * service_seconds / (2.0 * (1.0 - utilisation));
    assert!((mean / theory - 1.0).abs() < 0.05, "{mean} s instead of {theory} s over {} requests", waits.len());
}

/// A request goes on token for token: who shares an engine with others is slower, by just what the cost model says.
#[test]
fn an_answer_takes_what_its_prompt_and_its_tokens_take() {
    let mut pool = Pool { hours: 1.0, machines: 1, shares_compute: false, lost: Vec::new(), ..shipped().pool };
    pool.team.truncate(1);
    let team = &mut pool.team[0];
    (team.models, team.pinned, team.kept_tokens, team.load_seconds) = (1, 1, 0, 1.0);
    (team.prefill_tokens_per_second, team.first_request_seconds) = (1_000.0, 0.25);
    (team.decode_step_seconds, team.decode_step_seconds_per_sequence) = (0.1, 0.05);
    let at = |seconds| Instant::after(Duration::from_secs(seconds));
    let request = |seconds, session, output_tokens| Request {
        at: at(seconds),
        team: 0,
        model: 0,
        session,
        turn: 0,
        prompt_tokens: 500,
        said_tokens: 0,
        output_tokens,
    };
    let demand = Demand::of_requests(vec![request(10, 0, 11), request(20, 1, 11), request(20, 2, 11)], vec![0]);
    let recording = play(&pool, &demand, &whole(&pool, &demand), 1, true).expect("it holds");
    let times = |number: usize| {
        let (asked, seen) = (demand.requests[number].at, recording.records[number]);
        let since = |at: Option<Instant>| at.map_or(f64::NAN, |at| at.since(asked).as_secs_f64());
        (since(seen.first_token), since(seen.ended))
    };
    // The first after a load; then two at once: the second one's prompt is read after the first one's, both are written at
    // 0.15 s for each token while there are two, and what is left of the second one at 0.1 s.
    for (number, wanted) in [(0, (0.75, 1.75)), (1, (0.5, 1.75)), (2, (1.0, 2.25))] {
        let (first, end) = times(number);
        assert!((first - wanted.0).abs() < 1e-4 && (end - wanted.1).abs() < 1e-4, "{number}: {first} {end}");
    }
}

/// Four shared machines do what five dedicated ones do not, a lost machine included.
#[test]
fn the_shipped_scenario_shows_what_sharing_saves() {
    let plan = shipped();
    let project = Project::new(&plan, 1);
    let wanted = project.tasks().into_iter().filter(|task| matches!(task, Task::Shared(4) | Task::Dedicated));
    let results = wanted.map(|task| {
        let runs = project.run(&task).expect("it holds");
        (task, runs)
    });
    let report = project.report(results.collect(), &[]);
    let (shared, dedicated) = (&report.fleets[0], &report.rows[0]);
    assert!(shared.met && !dedicated.met, "{shared:?} {dedicated:?}");
    assert!(shared.machines < dedicated.machines && shared.cost < dedicated.cost);
    let away = &shared.away[0];
    assert!(away.kept && away.figures.requests > 100 && away.figures.refused == 0, "{away:?}");
    for row in [shared, dedicated] {
        let of_teams = |count: fn(&Figures) -> u64| row.teams.iter().map(|team| count(&team.figures)).sum::<u64>();
        assert_eq!(of_teams(|figures| figures.requests), row.figures.requests);
        assert_eq!(of_teams(|figures| figures.answered), row.figures.answered);
        let cost: f64 = row.teams.iter().map(|team| team.cost).sum();
        assert!((cost - row.cost).abs() < 1e-6, "{cost} instead of {}", row.cost);
        let ends = |figures: &Figures| figures.answered + figures.refused + figures.broken + figures.unfinished;
        assert_eq!(ends(&row.figures), row.figures.requests);
    }
}
