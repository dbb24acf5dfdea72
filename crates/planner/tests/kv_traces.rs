//! The rules for KV on recorded requests. The traces are not part of this project: they are looked for in `$WARMSET_TRACES`, or
//! in `shared/traces` beside the project, and where there are none these tests say so and pass.
#![expect(clippy::disallowed_types, clippy::print_stdout, reason = "a test reads files, and says if there are none")]

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};
use warmset_planner::cache::{
    POLICIES,
    plan::{self, Row},
    trace::Trace,
};

const MILLION: u64 = 1_000_000;

fn directory() -> PathBuf {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces");
    std::env::var_os("WARMSET_TRACES").map_or(beside, PathBuf::from)
}

fn trace(name: &str) -> Option<Trace> {
    let path = directory().join(name);
    let Ok(file) = File::open(&path) else {
        println!("skipped: there is no trace {}", path.display());
        return None;
    };
    let mut text = String::new();
    flate2::read::MultiGzDecoder::new(file).read_to_string(&mut text).expect("it is packed text");
    Some(Trace::read(&text, 512).expect("it is a trace"))
}

fn mooncake(name: &str) -> Option<Trace> {
    trace(&format!("mooncake/{name}_trace.jsonl.gz"))
}

/// Rows of some rules on a trace.
fn rows(trace: &Trace, capacities: &[u64], names: &[&str]) -> Vec<Row> {
    let wanted: Vec<_> = POLICIES.into_iter().filter(|(name, _)| names.is_empty() || names.contains(name)).collect();
    let pairs =
        capacities.iter().flat_map(|capacity| wanted.iter().map(move |(name, build)| (*capacity, *name, *build)));
    let replays: Vec<_> =
        pairs.map(|(capacity, name, build)| (capacity, name, plan::run(trace, capacity, build))).collect();
    plan::rows(&replays)
}

fn row<'a>(rows: &'a [Row], capacity: u64, name: &str) -> &'a Row {
    rows.iter().find(|row| row.capacity_tokens == capacity && row.policy == name).expect("it was run")
}

#[test]
fn lru_gives_the_published_table_to_its_last_digit() {
    let capacities = [MILLION, 3 * MILLION, 10 * MILLION, 50 * MILLION, 1_000 * MILLION];
    for (name, wanted, blocks) in [
        ("conversation", ["0.0543", "0.1387", "0.2908", "0.3707", "0.3736"], 182_790),
        ("synthetic", ["0.1451", "0.3151", "0.5770", "0.6512", "0.6512"], 43_924),
    ] {
        let Some(trace) = mooncake(name) else { return };
        assert_eq!(trace.blocks(), blocks, "{name}");
        let found: Vec<String> =
            rows(&trace, &capacities, &["lru"]).iter().map(|row| format!("{:.4}", row.hit_share)).collect();
        assert_eq!(found, wanted, "{name}");
    }
}

/// What was reached when the rule was chosen, and must not be lost: how far it comes from LRU to the optimum in the half of
/// the requests that it was not fitted to.
#[test]
fn warmset_stays_as_far_from_lru_as_it_came() {
    let capacities = [MILLION, 3 * MILLION, 10 * MILLION];
    for (name, wanted) in [("conversation", [0.24, 0.26, 0.22]), ("synthetic", [0.05, 0.03, 0.38])] {
        let Some(trace) = mooncake(name) else { return };
        let rows = rows(&trace, &capacities, &["warmset", "lru", "optimum"]);
        for (capacity, wanted) in capacities.into_iter().zip(wanted) {
            let gap = row(&rows, capacity, "warmset").second_half_gap_closed.expect("both were run");
            assert!(gap >= wanted, "{name}, {capacity} tokens: {gap:.3} for {wanted}");
        }
    }
}

#[test]
fn over_a_whole_trace_no_other_rule_is_better_by_more_than_a_hundredth() {
    let capacities = [MILLION, 3 * MILLION, 10 * MILLION];
    for trace in [mooncake("conversation"), mooncake("synthetic"), trace("ragpulse/0_trace.jsonl.gz")] {
        let Some(trace) = trace else { return };
        let rows = rows(&trace, &capacities, &[]);
        for other in rows.iter().filter(|row| row.policy != "optimum") {
            let ours = row(&rows, other.capacity_tokens, "warmset").hit_share;
            assert!(ours >= 0.99 * other.hit_share, "{ours:.4} for {other:?}");
        }
    }
}
