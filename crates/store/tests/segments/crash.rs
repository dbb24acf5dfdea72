//! What was acknowledged outlasts everything; what was not is never served half.

use crate::support::*;
use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
};
use warmset_store::segments::{Options, Segments};

const CAP: u64 = 2 << 30;
const CHILD_DIRECTORY: &str = "WARMSET_TEST_SEGMENTS_CHILD";

/// Not a test but for its child: writes until it is killed and says what is durable.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Ok(directory) = std::env::var(CHILD_DIRECTORY) else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (seed, first, encrypt) = (number("SEED"), number("FIRST"), number("ENCRYPT") == 1);
    let mut random = Random(seed);
    let options = Options { encrypt, segment_bytes: 4 << 20, ..options(CAP) };
    let (segments, _, _) = open(Path::new(&directory), options);
    let mut next = first;
    loop {
        let batch: Vec<u64> = (0..1 + random.below(6)).map(|at| next + at).collect();
        next += batch.len() as u64;
        let blocks = batch.iter().map(|number| bytes(&block(*number, 1, size_of(*number)).1)).collect();
        for (number, result) in batch.iter().zip(segments.append_and_wait(blocks).unwrap()) {
            result.unwrap();
            // One line, one write: a parent that reads it whole knows that it is durable.
            std::io::stdout().write_all(format!("durable {number}\n").as_bytes()).unwrap();
        }
    }
}

fn size_of(number: u64) -> u32 {
    1 + (Random(number ^ 0xabcd).below(400_000) as u32)
}

#[test]
fn k9_a_killed_process_leaves_every_acknowledged_block_and_nothing_torn() {
    let mut seed: u64 = std::env::var("WARMSET_SEED").ok().map_or_else(
        || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64,
        |seed| seed.parse().unwrap(),
    );
    let rounds: u64 = std::env::var("WARMSET_SEEDS").ok().map_or(12, |rounds| rounds.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let mut durable: Vec<u64> = Vec::new();
    let mut first = 0;
    for round in 0..rounds {
        seed = Random(seed).next();
        println!("round {round}: WARMSET_SEED={seed}");
        let mut random = Random(seed);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::child_that_writes_until_it_is_killed", "--nocapture", "--test-threads", "1"])
            .env(CHILD_DIRECTORY, directory.path())
            .env("SEED", seed.to_string())
            .env("FIRST", first.to_string())
            .env("ENCRYPT", (round % 2).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines_before_kill = random.below(60);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        while seen < lines_before_kill {
            let line = lines.next().expect("the child writes").unwrap();
            if let Some(number) = line.strip_prefix("durable ") {
                durable.push(number.parse().unwrap());
                seen += 1;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it said while it was being killed is durable too.
        for line in lines.map_while(Result::ok) {
            durable.extend(line.strip_prefix("durable ").and_then(|number| number.parse::<u64>().ok()));
        }
        first = durable.iter().max().map_or(first, |last| last + 1000);
        // Opened without encryption, so that both kinds stay.
        let (segments, found, recovered) = open(directory.path(), options(CAP));
        assert!(recovered.segments_not_closed <= 1, "{recovered:?}");
        assert_eq!(recovered.segments_unreadable, 0);
        check(&segments, &found, &durable);
        if round % 2 == 0 {
            // The next child encrypts, which drops what is not.
            drop(segments);
            std::fs::read_dir(directory.path()).unwrap().flatten().for_each(|entry| {
                let _ = std::fs::remove_file(entry.path());
            });
            durable.clear();
        }
    }
}

fn check(segments: &Segments, found: &[warmset_store::segments::Found], durable: &[u64]) {
    let mut numbers: Vec<u64> = Vec::new();
    for found in found {
        let number = u64::from_le_bytes(found.id.key.0[..8].try_into().unwrap());
        let (key, block) = block(number, 1, size_of(number));
        assert_reads(segments, found.location, key, &block);
        numbers.push(number);
    }
    let missing: Vec<_> = durable.iter().filter(|number| !numbers.contains(number)).collect();
    assert!(missing.is_empty(), "durable and not found: {missing:?}");
}

/// Every way in which the end of a segment can be torn.
#[test]
fn k9_a_torn_end_costs_what_was_torn_and_nothing_else() {
    let source = tempfile::tempdir().unwrap();
    let blocks: Vec<_> = (0..5).map(|number| block(number, 1, 9000 + 5000 * number as u32)).collect();
    for encrypt in [false, true] {
        let (segments, _, _) = open(source.path(), Options { encrypt, ..options(CAP) });
        let locations: Vec<_> = blocks.iter().map(|(_, block)| put(&segments, block)).collect();
        let name = format!("{:08x}.segment", locations[0].segment);
        drop(segments);
        let whole = std::fs::read(source.path().join(&name)).unwrap();
        let keys = std::fs::read(source.path().join("keys")).unwrap_or_default();
        let end_bytes =
            |location: &warmset_store::segments::Location| u64::from(location.page + location.pages) as usize * 4096;
        let cuts = (0..whole.len()).step_by(1024).chain([1, whole.len() - 1]);
        for cut in cuts {
            for zeros in [0, 4096 * 3] {
                let directory = tempfile::tempdir().unwrap();
                // Torn: too short, or as long as it should be with nothing written in it.
                let torn = [&whole[..cut], &vec![0; zeros]].concat();
                std::fs::write(directory.path().join(&name), &torn).unwrap();
                if !keys.is_empty() {
                    std::fs::write(directory.path().join("keys"), &keys).unwrap();
                }
                // Padding is zeros, torn or not.
                let is_whole = |end: usize| torn.len() >= end && torn[..end] == whole[..end];
                let expected = locations.iter().filter(|location| is_whole(end_bytes(location))).count();
                for _ in 0..2 {
                    let (segments, found, _) = open(directory.path(), options(CAP));
                    assert_eq!(found.len(), expected, "cut at {cut} of {}, {zeros} zeros", whole.len());
                    for found in &found {
                        let (key, block) = &blocks[found.id.key.0[0] as usize];
                        assert_reads(&segments, found.location, *key, block);
                    }
                }
            }
        }
        std::fs::remove_file(source.path().join(&name)).unwrap();
    }
}

#[test]
fn any_changed_byte_of_a_segment_is_a_miss_or_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let blocks: Vec<_> = (0..4).map(|number| block(number, 1, 5000)).collect();
    let (segments, _, _) = open(directory.path(), options(CAP));
    let location = put(&segments, &blocks[0].1);
    for (_, block) in &blocks[1..] {
        put(&segments, block);
    }
    drop(segments);
    let path = directory.path().join(format!("{:08x}.segment", location.segment));
    let whole = std::fs::read(&path).unwrap();
    for at in (0..whole.len()).step_by(509) {
        let mut changed = whole.clone();
        changed[at] ^= 0x40;
        std::fs::write(&path, &changed).unwrap();
        let (segments, found, _) = open(directory.path(), options(CAP));
        for found in &found {
            let (key, block) = &blocks[found.id.key.0[0] as usize];
            if let Ok(read) = read(&segments, found.location, *key) {
                assert!(read.memory.as_ref() == (**block).as_ref(), "byte {at}");
            }
        }
        drop(segments);
        let _ = std::fs::remove_file(&path);
    }
}
