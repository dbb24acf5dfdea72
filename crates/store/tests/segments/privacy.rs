//! What lies on the disk is callers' content: encrypted where that is asked for, and gone when it must be.

use crate::support::*;
use std::{path::Path, sync::atomic::Ordering};
use warmset_store::segments::{AppendError, Options, ReadError, Segments};

const CAP: u64 = 1 << 30;

/// Whether any file of the directory holds these bytes.
fn holds(directory: &Path, needle: &[u8]) -> bool {
    let files = directory.read_dir().unwrap().flatten().filter(|entry| entry.file_name() != "keys");
    files
        .map(|entry| std::fs::read(entry.path()).unwrap())
        .any(|bytes| bytes.windows(needle.len()).any(|window| window == needle))
}

/// A part of the payload, of the tokens, the key and the domain of a block.
fn traces(number: u64, domain_number: u8, payload_bytes: u32) -> [Vec<u8>; 4] {
    let (key, block) = block(number, domain_number, payload_bytes);
    let bytes = (*block).as_ref();
    [bytes[4096..4128].to_vec(), bytes[184..216].to_vec(), key.key.0.to_vec(), key.domain.0.to_vec()]
}

#[test]
fn nothing_of_a_caller_lies_in_the_open() {
    for encrypt in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (segments, _, _) = open(directory.path(), Options { encrypt, ..options(CAP) });
        put(&segments, &block(11, 1, 20_000).1);
        drop(segments);
        for trace in traces(11, 1, 20_000) {
            assert_eq!(holds(directory.path(), &trace), !encrypt, "in the open or not to be found by this test");
        }
    }
}

#[test]
fn the_same_block_twice_is_not_the_same_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, _, _) = open(directory.path(), Options { encrypt: true, ..options(CAP) });
    let (_, made) = block(1, 1, 4096);
    let (first, second) = (put(&segments, &made), put(&segments, &made));
    drop(segments);
    let file = std::fs::read(directory.path().join("00000000.segment")).unwrap();
    let pages = |page: u32| &file[page as usize * 4096 + 64..(page as usize + 2) * 4096];
    assert_eq!((first.segment, second.segment), (0, 0));
    let equal = pages(first.page).iter().zip(pages(second.page)).filter(|(one, other)| one == other).count();
    assert!(equal < 200, "{equal} of 8128 bytes are equal; chance makes 32");
}

#[test]
fn a_purge_leaves_nothing_of_a_domain_and_everything_of_others() {
    for (encrypt, cannot_punch) in [(false, false), (false, true), (true, false)] {
        let directory = tempfile::tempdir().unwrap();
        let (segments, faults, _) = open_faulty(directory.path(), Options { encrypt, ..options(CAP) });
        faults.cannot_punch.store(cannot_punch, Ordering::Relaxed);
        let blocks: Vec<_> = (0..12).map(|number| block(number, (number % 3) as u8, 30_000)).collect();
        let locations: Vec<_> = blocks.iter().map(|(_, block)| put(&segments, block)).collect();
        let purged = segments.purge(&domain(1)).unwrap();
        assert_eq!((purged.dropped.blocks, purged.key_destroyed, purged.is_complete), (4, encrypt, true));
        for (location, (key, block)) in locations.iter().zip(&blocks) {
            if key.domain == domain(1) {
                assert_eq!(read(&segments, *location, *key).unwrap_err(), ReadError::Gone);
            } else {
                assert_reads(&segments, *location, *key, block);
            }
        }
        assert!(!holds(directory.path(), &traces(1, 1, 30_000)[0]));
        assert!(!holds(directory.path(), &traces(1, 1, 30_000)[1]));
        let again = segments.purge(&domain(1)).unwrap();
        assert_eq!((again.dropped.blocks, again.key_destroyed), (0, false));
        // The domain may come back; what it had does not.
        put(&segments, &block(100, 1, 30_000).1);
        drop(segments);
        let (_, found, _) = open(directory.path(), options(CAP));
        let mut numbers: Vec<u8> = found.iter().map(|found| found.id.key.0[0]).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 2, 3, 5, 6, 8, 9, 11, 100], "encrypted {encrypt}, no holes {cannot_punch}");
    }
}

#[test]
fn a_purge_reaches_what_waits_to_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), options(CAP));
    let gate = faults.write_gate.lock().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    for batch in 0..4u64 {
        let blocks = (0..3).map(|at| bytes(&block(batch * 3 + at, (at % 2) as u8, 30_000).1)).collect();
        let sender = sender.clone();
        segments.append(blocks, move |results| sender.send(results).unwrap()).unwrap();
    }
    wait_until("the first write", || segments.figures().writing_for.is_some());
    let purged = std::thread::scope(|scope| {
        let purging = scope.spawn(|| segments.purge(&domain(1)).unwrap());
        // Whatever it does first, it cannot end before the disk goes on.
        std::thread::yield_now();
        drop(gate);
        purging.join().unwrap()
    });
    assert!(purged.is_complete);
    drop(sender);
    for results in receiver.iter() {
        assert_eq!(results.len(), 3);
        assert!(results[0].is_ok() && results[2].is_ok(), "{results:?}");
        if let Ok(location) = results[1] {
            // It was durable before the purge began; then the purge took it.
            assert!(purged.dropped.blocks > 0, "{location:?}");
        } else {
            assert_eq!(results[1], Err(AppendError::Purged));
        }
    }
    let figures = segments.figures();
    assert_eq!((figures.live_blocks, figures.queued_bytes), (8, 0));
    assert_eq!(figures.blocks_written + figures.blocks_not_written, 12);
    drop(segments);
    assert!(!holds(directory.path(), &traces(1, 1, 30_000)[0]));
}

#[test]
fn a_purge_reaches_what_was_not_found_yet() {
    for encrypt in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (segments, _, _) = open(directory.path(), Options { encrypt, ..options(CAP) });
        for number in 0..6 {
            put(&segments, &block(number, (number % 2) as u8, 30_000).1);
        }
        drop(segments);
        let (segments, receiver) = Segments::open(directory.path(), options(CAP)).unwrap();
        let purged = segments.purge(&domain(1)).unwrap();
        assert!(purged.is_complete);
        let (found, _) = all(&receiver);
        for found in found.iter().filter(|found| found.id.domain == domain(1)) {
            assert_eq!(read(&segments, found.location, found.id).unwrap_err(), ReadError::Gone);
        }
        assert_eq!(segments.figures().live_blocks, 3);
        drop(segments);
        assert!(!holds(directory.path(), &traces(1, 1, 30_000)[0]));
    }
}

#[test]
fn what_was_not_encrypted_goes_when_the_switch_is_turned_on_and_not_the_other_way_round() {
    let directory = tempfile::tempdir().unwrap();
    let with = |encrypt| open(directory.path(), Options { encrypt, ..options(CAP) });
    let (segments, _, _) = with(false);
    put(&segments, &block(1, 1, 30_000).1);
    drop(segments);
    let (segments, found, recovered) = with(true);
    assert_eq!((found.len(), recovered.blocks_dropped), (0, 1));
    let (key, made) = block(2, 1, 30_000);
    put(&segments, &made);
    drop(segments);
    assert!(!holds(directory.path(), &traces(1, 1, 30_000)[0]));
    let (segments, found, _) = with(false);
    assert_eq!(found.len(), 1);
    assert_reads(&segments, found[0].location, key, &made);
}
