//! Pools in which something changes: what it costs by hand, that nobody is lost whatever happens, and what the shipped
//! scenario is there to show.

use std::{collections::BTreeMap, time::Duration};
use warmset_core::Instant;
use warmset_planner::pool::{
    Strategy,
    changes::{Changes, Row},
    course::{Course, Join, Rolling, Rollout, Stay},
    demand::{Demand, Request},
    record::{End, Recording},
    regions::{Failover, Region, RegionLost},
    scenario::{Burst, FailingLoads, Lost, Plan, Pool, SHIPPED_CHANGES},
    world::{Fleet, play},
};

fn shipped() -> Plan {
    Plan::parse(SHIPPED_CHANGES.1).expect("it is shipped")
}

fn at(seconds: f64) -> Instant {
    Instant::after(Duration::from_secs_f64(seconds))
}

/// One team whose models have 1,000 bytes, which the origin gives in 10 seconds and a disk in one. A prompt is read in half a
/// second, an answer written in one.
fn small_pool(models: usize) -> Pool {
    let mut pool = Pool {
        hours: 1.0,
        machines: 1,
        memory_bytes: 10_000,
        reserve_bytes: 0,
        shares_compute: false,
        burst: Vec::new(),
        join: Vec::new(),
        rollout: Vec::new(),
        region: Vec::new(),
        region_bytes_per_second: None,
        origin_bytes_per_second: Some(100.0),
        ..shipped().pool
    };
    pool.team.truncate(1);
    let team = &mut pool.team[0];
    team.regions.clear();
    (team.models, team.pinned, team.kept_tokens, team.kv_bytes_per_token) = (models, 0, 0, 0);
    (team.model_bytes, team.peak_bytes, team.load_seconds) = (1_000, 1_000, 1.0);
    (team.prefill_tokens_per_second, team.first_request_seconds) = (1_000.0, 0.25);
    (team.decode_step_seconds, team.decode_step_seconds_per_sequence) = (0.1, 0.0);
    pool
}

fn request(seconds: f64, model: usize, session: usize) -> Request {
    Request { at: at(seconds), team: 0, model, session, turn: 0, prompt_tokens: 500, said_tokens: 0, output_tokens: 11 }
}

fn stay(up_seconds: f64, leaves_seconds: Option<f64>, weights_there: bool) -> Stay {
    Stay { ordered_at: at(0.0), up_at: at(up_seconds), leaves_at: leaves_seconds.map(at), weights_there }
}

fn fleet(models: Vec<Vec<usize>>, stays: BTreeMap<usize, Stay>) -> Fleet {
    Fleet { teams: vec![0], lost: Vec::new(), models, course: Course { stays, ..Course::default() } }
}

/// Seconds from its arrival to a request's first token and to its end.
fn times(demand: &Demand, recording: &Recording, number: usize) -> (f64, f64) {
    let (asked, seen) = (demand.requests[number].at, recording.records[number]);
    let since = |at: Option<Instant>| at.map_or(f64::NAN, |at| at.since(asked).as_secs_f64());
    (since(seen.first_token), since(seen.ended))
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-4
}

#[test]
fn a_cold_machine_fetches_weights_first_and_shares_the_origin_with_others() {
    let pool = small_pool(2);
    let stays = BTreeMap::from([(0, stay(0.0, None, false)), (1, stay(5.0, None, false))]);
    let fleet = fleet(vec![vec![0], vec![1]], stays);
    let requests = vec![request(10.0, 0, 0), request(10.0, 1, 1), request(60.0, 0, 2)];
    let demand = Demand::of_requests(requests, vec![0, 0]);
    let recording = play(&pool, &demand, &fleet, 1, true).expect("it holds");
    // Two fetches at half the rate each, a load, the first request's own time, and the prompt; later the prompt alone.
    for (number, wanted) in [(0, 20.0 + 1.0 + 0.25 + 0.5), (1, 20.0 + 1.0 + 0.25 + 0.5), (2, 0.5)] {
        let (first, end) = times(&demand, &recording, number);
        assert!(near(first, wanted) && near(end, wanted + 1.0), "{number}: {first} {end} instead of {wanted}");
    }
    assert_eq!(recording.fetches.len(), 2);
    assert!(recording.fetches.iter().all(|fetch| near(fetch.seconds, 20.0) && fetch.bytes == 1_000));
}

#[test]
fn a_machine_that_leaves_ends_what_it_has_begun_and_gets_nothing_new() {
    let pool = small_pool(1);
    // The second one is up when the first one has had its request.
    let stays = BTreeMap::from([(0, stay(0.0, Some(10.5), true)), (1, stay(10.2, None, true))]);
    let fleet = fleet(vec![vec![0], vec![0]], stays);
    let demand = Demand::of_requests(vec![request(10.0, 0, 0), request(11.0, 0, 1), request(40.0, 0, 2)], vec![0]);
    let recording = play(&pool, &demand, &fleet, 1, true).expect("it holds");
    let machines: Vec<_> = recording.records.iter().map(|record| record.machine).collect();
    assert_eq!(machines, [Some(0), Some(1), Some(1)]);
    assert!(recording.records.iter().all(|record| record.end == End::Answered), "{:?}", recording.records);
    let gone = recording.departures[&0];
    assert_eq!((Some(gone), recording.departures.len()), (recording.records[0].ended, 1));
}

/// One machine whose one model gets a new version at 30 seconds, with a canary of two.
fn rolled_out(pool: &Pool, requests: Vec<Request>) -> (Demand, Recording) {
    let mut fleet = fleet(vec![vec![0]], BTreeMap::new());
    fleet.course.rollouts = vec![Rolling { model: 0, at: at(30.0), canary: Duration::from_secs(2) }];
    let demand = Demand::of_requests(requests, vec![0]);
    let recording = play(pool, &demand, &fleet, 1, true).expect("it holds");
    (demand, recording)
}

#[test]
fn a_version_that_fits_beside_the_old_one_takes_over_without_a_gap() {
    // Its weights are fetched and loaded, and it answers its canary: the name stands for it after 13 seconds.
    let requests = vec![request(10.0, 0, 0), request(20.0, 0, 1), request(42.0, 0, 2), request(44.0, 0, 3)];
    let (demand, recording) = rolled_out(&small_pool(1), requests);
    let promotion = recording.promotions[0];
    assert!(promotion.promoted.switched && promotion.promoted.strategy == Strategy::SideBySide, "{promotion:?}");
    assert!(near(promotion.ended.since(at(30.0)).as_secs_f64(), 13.0), "{promotion:?}");
    assert_eq!((promotion.promoted.gap, promotion.promoted.waited), (Duration::ZERO, 0));
    // One second before that the old version answers, one after it the new one, whose first request this is.
    for (number, wanted) in [(1, 0.5), (2, 0.5), (3, 0.75)] {
        let (first, _) = times(&demand, &recording, number);
        assert!(near(first, wanted) && !recording.records[number].cold, "{number}: {first}");
    }
}

#[test]
fn a_version_that_does_not_fit_beside_the_old_one_comes_when_that_has_answered_and_left() {
    let pool = Pool { memory_bytes: 1_900, origin_bytes_per_second: None, ..small_pool(1) };
    let requests = vec![request(10.0, 0, 0), request(29.8, 0, 1), request(31.0, 0, 2)];
    let (demand, recording) = rolled_out(&pool, requests);
    let promotion = recording.promotions[0];
    assert!(promotion.promoted.switched && promotion.promoted.strategy == Strategy::DrainThenLoad, "{promotion:?}");
    // 1.3 seconds until the old version has answered, its end, a load, the canary.
    let gap = 1.3 + pool.stop_seconds + 1.0 + 2.0;
    assert!(near(promotion.promoted.gap.as_secs_f64(), gap) && promotion.promoted.waited == 1, "{promotion:?}");
    let ((_, ended), (first, _)) = (times(&demand, &recording, 1), times(&demand, &recording, 2));
    assert!(near(ended, 1.5) && near(first, gap - 1.0 + 0.75), "{ended} {first}");
}

#[test]
fn a_version_that_cannot_be_loaded_changes_nothing() {
    let failing_loads = vec![FailingLoads { at_hours: 29.0 / 3_600.0, seconds: 60.0, share: 1.0 }];
    let pool = Pool { failing_loads, ..small_pool(1) };
    let (demand, recording) = rolled_out(&pool, vec![request(10.0, 0, 0), request(50.0, 0, 1)]);
    let promotion = recording.promotions[0];
    // The fetch, the load, the end of what could not load.
    let seconds = 10.0 + 1.0 + pool.stop_seconds;
    assert!(
        !promotion.promoted.switched && near(promotion.ended.since(at(30.0)).as_secs_f64(), seconds),
        "{promotion:?}"
    );
    let (first, _) = times(&demand, &recording, 1);
    assert!(near(first, 0.5) && !recording.records[1].cold, "{first}");
}

fn region(name: &str, other: &str, lost: Vec<RegionLost>) -> Region {
    let failover = vec![Failover { region: other.to_owned(), network_seconds: 0.25 }];
    Region { name: name.to_owned(), machines: 1, failover, lost }
}

/// Two regions with a machine each; all callers are in the first one, which is lost from 30 to 90 seconds.
fn two_regions() -> Pool {
    let lost = RegionLost { at_hours: 30.0 / 3_600.0, away_seconds: 60.0 };
    let mut pool = Pool { machines: 2, notice_seconds: 5.0, region_bytes_per_second: Some(50.0), ..small_pool(1) };
    pool.region = vec![region("north", "south", vec![lost]), region("south", "north", Vec::new())];
    pool.team[0].regions = BTreeMap::from([("north".to_owned(), 1.0)]);
    pool
}

#[test]
fn callers_of_a_lost_region_go_to_another_one_which_fetches_what_it_lacks() {
    let pool = two_regions();
    let seconds = [10.0, 29.0, 32.0, 40.0, 80.0, 92.0, 100.0];
    let requests = seconds.iter().enumerate().map(|(session, seconds)| request(*seconds, 0, session)).collect();
    let demand = Demand::of_requests(requests, vec![0]);
    let fleet = Fleet::changing(&pool, &demand);
    let recording = play(&pool, &demand, &fleet, 1, true).expect("it holds");
    let ends: Vec<End> = recording.records.iter().map(|record| record.end).collect();
    // One answer breaks off; one caller has not learnt of the loss.
    let (answered, refused) = (End::Answered, End::Refused("region_lost"));
    assert_eq!(ends, [answered, End::Broken, refused, answered, answered, answered, answered]);
    let machines: Vec<_> = recording.records.iter().map(|record| record.machine).collect();
    assert_eq!(machines, [Some(0), Some(0), None, Some(1), Some(1), Some(1), Some(0)]);
    // The way, the fetch from the other region, the load, the first request's own time, the prompt; then the way and the
    // prompt; at home again the model has come back, and reads its first prompt.
    for (number, wanted) in [(0, 1.75), (3, 0.25 + 20.0 + 1.0 + 0.75), (4, 0.75), (5, 0.75), (6, 0.75)] {
        let (first, _) = times(&demand, &recording, number);
        assert!(near(first, wanted), "{number}: {first} instead of {wanted}");
    }
    assert_eq!((recording.failovers, recording.fetches.len()), (3, 1));
    let everywhere = Pool { weights_everywhere: true, ..pool };
    let recording = play(&everywhere, &demand, &fleet, 1, true).expect("it holds");
    let (first, _) = times(&demand, &recording, 3);
    assert!(near(first, 0.25 + 1.0 + 0.75) && recording.fetches.is_empty(), "{first}");
}

#[test]
fn weights_come_from_ones_own_region_once_somebody_there_has_them() {
    let mut pool = Pool { machines: 2, region_bytes_per_second: Some(50.0), ..small_pool(1) };
    pool.region = vec![Region { machines: 2, ..region("north", "south", Vec::new()) }];
    pool.rollout =
        vec![Rollout { team: pool.team[0].name.clone(), model: 1, at_hours: 30.0 / 3_600.0, canary_seconds: 2.0 }];
    let demand = Demand::of_requests(Vec::new(), vec![0]);
    let recording = play(&pool, &demand, &Fleet::changing(&pool, &demand), 1, true).expect("it holds");
    let seconds = recording.promotions.iter().map(|one| one.ended.since(one.promoted.began).as_secs_f64());
    let seconds: Vec<f64> = seconds.collect();
    assert!(seconds.len() == 2 && near(seconds[0], 23.0) && near(seconds[1], 13.0), "{seconds:?}");
}

/// A pool with a quarter of an hour of trouble.
fn any_pool(random: &mut fastrand::Rng) -> Pool {
    let mut pool = small_pool(random.usize(1..=4));
    (pool.hours, pool.machines, pool.memory_bytes) = (0.25, random.usize(1..=2), random.u64(1_500..4_500));
    pool.patience_seconds = if random.bool() { 120.0 } else { 10.0 };
    pool.team[0].requests_per_second = 0.2 + 0.3 * random.f64();
    pool.team[0].machines_per_model = random.bool().then_some(1);
    let hours = |random: &mut fastrand::Rng| random.f64() * 0.25;
    for _ in 0..random.usize(1..=3) {
        let (at_hours, up_after_seconds) = (hours(random), random.f64() * 60.0);
        let leaves = at_hours + up_after_seconds / 3_600.0 + hours(random);
        pool.join.push(Join {
            at_hours,
            machines: random.usize(1..=2),
            up_after_seconds,
            teams: Vec::new(),
            region: None,
            weights_there: random.bool(),
            leaves_at_hours: random.bool().then_some(leaves),
        });
    }
    let team = pool.team[0].name.clone();
    for model in 1..=random.usize(..=pool.team[0].models) {
        pool.rollout.push(Rollout { team: team.clone(), model, at_hours: hours(random), canary_seconds: 2.0 });
    }
    pool.burst.push(Burst { team, at_hours: hours(random), seconds: 120.0, times: 5.0 });
    pool.failing_loads.push(FailingLoads { at_hours: hours(random), seconds: 60.0, share: random.f64() });
    // One that came is lost, too, perhaps while it leaves.
    for machine in [0, pool.machines] {
        pool.lost.push(Lost { machine, at_hours: hours(random), away_seconds: 100.0 * random.f64() });
    }
    if random.bool() {
        let Pool { region, region_bytes_per_second, notice_seconds, machines, .. } = two_regions();
        pool = Pool { region, region_bytes_per_second, notice_seconds, machines, ..pool };
        pool.region[0].lost[0].at_hours = hours(random);
        for join in &mut pool.join {
            join.region = Some(pool.region[random.usize(..2)].name.clone());
        }
        pool.team[0].regions = BTreeMap::from([("north".to_owned(), 1.0), ("south".to_owned(), random.f64())]);
    }
    pool
}

#[test]
fn whatever_comes_and_goes_each_request_ends_once_and_equal_seeds_give_equal_runs() {
    let (mut answered, mut asked, mut departed, mut fetched, mut promoted) = (0, 0, 0, 0, Vec::new());
    let (mut failovers, mut region_lost) = (0, 0);
    for seed in 0..40 {
        let pool = any_pool(&mut fastrand::Rng::with_seed(seed));
        let demand = Demand::new(&pool, seed);
        let fleet = Fleet::changing(&pool, &demand);
        let run = || play(&pool, &demand, &fleet, seed, true).unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
        let recording = run();
        if seed % 8 == 0 {
            assert_eq!(recording, run(), "seed {seed}");
        }
        for (request, record) in demand.requests.iter().zip(&recording.records) {
            assert!(record.end != End::Unfinished, "seed {seed}: {request:?} {record:?}");
            let gone = record.machine.and_then(|machine| recording.departures.get(&machine));
            assert!(gone.is_none_or(|gone| *gone >= request.at), "seed {seed}: {request:?} {record:?}");
            answered += u64::from(record.end == End::Answered);
            region_lost += u64::from(record.end == End::Refused("region_lost"));
        }
        failovers += recording.failovers;
        // Later ones would leave after the end.
        let leaves = |stay: &&Stay| stay.leaves_at.is_some_and(|leaves_at| leaves_at < at(1_490.0));
        let leave = fleet.course.stays.values().filter(leaves).count();
        assert_eq!(recording.departures.len(), leave, "seed {seed}");
        (departed, fetched) = (departed + leave, fetched + recording.fetches.len());
        asked += demand.requests.len();
        promoted.extend(recording.promotions.iter().map(|promotion| promotion.promoted));
    }
    for (strategy, switched) in
        [(Strategy::SideBySide, true), (Strategy::SideBySide, false), (Strategy::DrainThenLoad, true)]
    {
        let count = promoted.iter().filter(|one| (one.strategy, one.switched) == (strategy, switched)).count();
        assert!(count > 3, "{count} with {strategy:?}, {switched}");
    }
    assert!(promoted.iter().any(|one| one.waited > 0), "nobody waited for a held name");
    assert!(failovers > 30 && region_lost > 10, "{failovers} went elsewhere, {region_lost} did not know yet");
    assert!(answered > asked as u64 / 2, "{answered} of {asked} were answered");
    assert!(departed > 30 && fetched > 30, "{departed} machines left, {fetched} models were fetched");
}

fn rows() -> BTreeMap<&'static str, Row> {
    let plan = shipped();
    let changes = Changes::new(&plan, 1);
    let row = |variant| changes.run(variant).expect("it holds");
    changes.variants().iter().map(|variant| (variant.name, row(variant))).collect()
}

#[test]
fn the_shipped_scenario_shows_what_each_change_does() {
    let rows = rows();
    let window = |variant: &str, place: usize| rows[variant].windows[place].figures.clone();
    let within = |variant: &str, place: usize| window(variant, place).within_target_share.expect("some came");
    let p99 = |variant: &str, place: usize| window(variant, place).first_token_p99_seconds.expect("some were answered");
    let (described, never, always) = ("as described", "none joins", "there from the beginning");
    assert!(within(never, 0) < within(described, 0) && within(described, 0) < within(always, 0), "{rows:?}");
    assert!(p99(never, 0) > 5.0 * p99(described, 0), "{rows:?}");
    assert!(rows[never].cost < rows[described].cost && rows[described].cost < rows[always].cost);
    let (rollout, calm) = (window(described, 1), window("no new version", 1));
    assert!(rollout.refused + rollout.broken == 0 && rollout.requests == calm.requests, "{rollout:?}");
    let promotions = &rows[described].promotions;
    assert!(promotions.len() == 4 && promotions.iter().all(|one| one.switched), "{promotions:?}");
    // A lost region costs what its callers did not know of, and the weights' way what those wait who come first.
    let (everywhere, intact) = ("weights everywhere", "no region lost");
    assert!(rows[described].failovers > 0 && rows[intact].failovers == 0);
    assert!(within(everywhere, 2) < within(intact, 2), "{rows:?}");
    assert!(p99(described, 2) > p99(everywhere, 2) && p99(everywhere, 2) > p99(intact, 2), "{rows:?}");
    assert!(rows[described].fetches.gigabytes > rows[everywhere].fetches.gigabytes);
    for row in rows.values() {
        let figures = &row.figures;
        let ends = figures.answered + figures.refused + figures.broken + figures.unfinished;
        assert_eq!((ends, figures.requests), (figures.requests, rows[never].figures.requests));
    }
}

#[test]
fn nonsense_is_refused_by_its_name() {
    let text = SHIPPED_CHANGES.1;
    for (from, to, words) in [
        ("up_after_seconds = ", "up_after_hours = 1\nup_after_seconds = ", "up_after_hours"),
        ("machines = 2\nup", "machines = 0\nup", "join"),
        ("machines = 2\nup", "machines = 62\nup", "64 machines"),
        ("leaves_at_hours = 1.0", "leaves_at_hours = 0.5", "leaves_at_hours"),
        ("teams = [\"chat\"]", "teams = [\"chats\"]", "teams"),
        ("origin_bytes_per_second = ", "origin_bytes_per_second = 0 # ", "origin_bytes_per_second"),
        ("origin_bytes_per_second = ", "# ", "weights_there"),
        ("canary_seconds = ", "canary_seconds = -1 # ", "canary_seconds"),
        ("region = \"north\"\nteams", "region = \"nord\"\nteams", "join must name a region"),
        ("{ region = \"south\"", "{ region = \"north\"", "failover"),
        ("network_seconds = 0.06", "network_seconds = -1", "network_seconds"),
        ("away_seconds = 600", "away_seconds = -1", "lost"),
        ("name = \"south\"", "name = \"north\"", "name of its own"),
        ("regions = { north = 0.8, south = 0.2 }", "regions = { north = 0, south = 0 }", "share of its traffic"),
        ("machines = 5", "machines = 6", "over all regions"),
        ("region_bytes_per_second = ", "# ", "weights_everywhere"),
        ("notice_seconds = ", "notice_seconds = nan # ", "notice_seconds"),
        ("model = 1", "model = 3", "rollout must name a team"),
        ("[[pool.rollout]]", "[[pool.rollout]]\nteam = \"chat\"\nmodel = 1\nat_hours = 0\n[[pool.rollout]]", "once"),
    ] {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        let error = Plan::parse(&changed).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error}: {cause}").contains(words), "{to}: {error}: {cause}");
    }
}
