//! Many models and one loader: the figures of the usual way follow from theory, and what is planned by them is what comes out.

use std::time::Duration;
use warmset_core::Instant;
use warmset_planner::loader::{
    Plan,
    pinned_lru::{Outcome, World, play},
    plan::{Case, Loader, POLICIES, Row, SHIPPED, Study},
};

fn shares(models: usize, zipf: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=models).map(|rank| libm::pow(rank as f64, -zipf)).collect();
    let all: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / all).collect()
}

/// The hit rate of LRU with room for three, exactly: a request finds who was among the last three asked for (King 1971).
fn lru_of_three(shares: &[f64]) -> f64 {
    let all: f64 = shares.iter().sum();
    let of: Vec<f64> = shares.iter().map(|share| share / all).collect();
    let mut hits = 0.0;
    for (first, p) in of.iter().enumerate() {
        for (second, q) in of.iter().enumerate().filter(|(second, _)| *second != first) {
            for (_, r) in of.iter().enumerate().filter(|(third, _)| *third != first && *third != second) {
                hits += p * q / (1.0 - p) * r / (1.0 - p - q) * (p + q + r);
            }
        }
    }
    hits
}

fn slow(slots: usize, zipf: f64, fetch: f64) -> (Outcome, usize) {
    let loader = Plan::parse(SHIPPED.1).expect("it is shipped").loader;
    let (popular, mut random, mut at) = (shares(loader.models, zipf), fastrand::Rng::with_seed(11), 0.0);
    let requests: Vec<(Instant, usize)> = (0..200_000)
        .map(|_| {
            at += 1.0;
            let mut left = random.f64();
            let found = popular.iter().position(|share| {
                left -= share;
                left <= 0.0
            });
            (Instant::after(Duration::from_secs_f64(at)), found.unwrap_or(loader.models - 1))
        })
        .collect();
    let world = World {
        slots,
        pinned: loader.pinned,
        fetch: Duration::from_secs_f64(fetch),
        service: Duration::from_secs_f64(0.001),
    };
    (play(&world, &requests), requests.len())
}

#[test]
fn pins_and_lru_find_what_kings_formula_says() {
    for (zipf, pinned_wanted, three_wanted, all_wanted) in
        [(0.8, 0.2596, 0.0288, 0.2809), (1.0, 0.3885, 0.0404, 0.4132), (1.2, 0.5278, 0.0575, 0.5550)]
    {
        let shares = shares(200, zipf);
        let pinned: f64 = shares.iter().take(5).sum();
        let three = lru_of_three(&shares[5..]);
        let all = pinned + (1.0 - pinned) * three;
        for (found, wanted) in [(pinned, pinned_wanted), (three, three_wanted), (all, all_wanted)] {
            assert!((found - wanted).abs() < 6e-5, "Zipf {zipf}: {found} instead of {wanted}");
        }
        let (outcome, requests) = slow(8, zipf, 0.0);
        let hit_share = outcome.hits as f64 / requests as f64;
        assert!((hit_share - all).abs() < 0.005, "Zipf {zipf}: {hit_share} instead of {all}");
    }
}

fn rows(loader: &Loader, wanted: impl Fn(&Case) -> bool) -> Vec<Row> {
    let cases = loader.cases().into_iter().filter(wanted);
    cases.map(|case| loader.run(&case, 1).expect("it holds")).collect()
}

fn small() -> Loader {
    let loader = Plan::parse(SHIPPED.1).expect("it is shipped").loader;
    Loader { requests: 10_000, slots: vec![8], zipf: vec![1.0], ..loader }
}

/// What another program found: p99 by rate at Zipf 1.0.
#[test]
fn the_usual_way_saturates_where_it_is_said_to() {
    let loader = Loader { requests_per_second: vec![0.01, 0.05, 0.1, 0.15], fetch_seconds: vec![10.0], ..small() };
    let found = rows(&loader, |case| case.study == Study::Rates && case.policy == POLICIES[0]);
    for (row, wanted) in found.iter().zip([17.7, 26.1, 46.9, 110.0]) {
        assert!((row.p99_seconds / wanted - 1.0).abs() < 0.25, "{row:?} instead of {wanted}");
        assert!((0.37..0.43).contains(&row.hit_share), "{row:?}");
    }
    let saturation = loader.saturation(&found);
    assert!((saturation[0].requests_per_second - 0.170).abs() < 0.005, "{saturation:?}");
}

#[test]
fn faster_loads_end_the_wait_whoever_decides() {
    let loader =
        Loader { requests: 1_000, compared_requests_per_second: 0.5, fetch_seconds: vec![10.0, 0.286], ..small() };
    let found = rows(&loader, |case| case.study == Study::Speeds);
    for row in &found {
        let wanted = if row.fetch_seconds > 1.0 { 300.0..2_000.0 } else { 0.2..4.0 };
        assert!(wanted.contains(&row.p99_seconds) && row.unanswered == 0, "{row:?}");
    }
}

#[test]
fn nonsense_is_refused_by_its_name() {
    let (_, text) = SHIPPED;
    for (from, to, words) in [
        ("slots = [8,", "slots = [3,", "slots"),
        ("zipf = [0.8", "zipf = [-0.8", "zipf"),
        ("models = 200", "model = 200", "model"),
        ("requests = 4_000", "requests = 0", "requests"),
        ("fetch_seconds = [10.0", "fetch_seconds = [nan", "fetch_seconds"),
    ] {
        assert!(text.contains(from), "{from}");
        let error = Plan::parse(&text.replace(from, to)).expect_err(to);
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error}: {cause}").contains(words), "{to}: {error}: {cause}");
    }
}
