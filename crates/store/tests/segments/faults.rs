//! What a disk does wrong costs the block it happened to, and nothing else.

use crate::support::*;
use rustix::io::Errno;
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};
use warmset_store::segments::{
    AlignedBuffer, AppendError, Options, READS_WAITING_MAX, REASONS, ReadError, STUCK_READS_MAX,
};

const CAP: u64 = 1 << 30;

#[test]
fn k2_whichever_write_fails_only_its_block_is_missing() {
    for encrypt in [false, true] {
        for kth in 0..14 {
            let directory = tempfile::tempdir().unwrap();
            let (segments, faults, _) = open_faulty(directory.path(), Options { encrypt, ..options(CAP) });
            *faults.write_error.lock().unwrap() = Some(if kth % 2 == 0 { Errno::IO } else { Errno::NOSPC });
            faults.writes_until_failure.store(kth, Ordering::Relaxed);
            let blocks: Vec<_> = (0..12).map(|number| block(number, 1, 20_000 + 4096 * number as u32)).collect();
            // One batch of two, then one by one, so that a failure meets both.
            let mut results = Vec::new();
            for batch in [&blocks[..2], &blocks[2..7], &blocks[7..8], &blocks[8..]] {
                results
                    .extend(segments.append_and_wait(batch.iter().map(|(_, block)| bytes(block)).collect()).unwrap());
            }
            let failed = results.iter().filter(|result| result.is_err()).count();
            // The thirteenth write is the list of blocks, or there is none.
            assert_eq!(failed, usize::from(kth < 13), "write {kth}: {results:?}");
            for ((key, block), result) in blocks.iter().zip(&results) {
                if let Ok(location) = result {
                    assert_reads(&segments, *location, *key, block);
                }
            }
            let figures = segments.figures();
            assert_eq!((figures.blocks_written, figures.blocks_not_written), (12 - failed as u64, failed as u64));
            assert!(figures.used_bytes.abs_diff(disk_use(directory.path())) <= 4096, "{figures:?}");
            drop(segments);

            let (segments, found, _) = open(directory.path(), Options { encrypt, ..options(CAP) });
            assert_eq!(found.len(), 12 - failed, "write {kth}");
            for found in found {
                let (key, block) = &blocks[found.id.key.0[0] as usize];
                assert_eq!(found.id, *key);
                assert_reads(&segments, found.location, *key, block);
            }
        }
    }
}

#[test]
fn k2_what_did_not_become_durable_is_never_seen() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), options(CAP));
    let (first, second) = (block(1, 1, 50_000), block(2, 1, 50_000));
    let kept = put(&segments, &first.1);
    faults.fails_sync.store(true, Ordering::Relaxed);
    let result = segments.append_and_wait(vec![bytes(&second.1)]).unwrap();
    assert_eq!(result, [Err(AppendError::Disk(Errno::IO))]);
    assert_reads(&segments, kept, first.0, &first.1);
    put(&segments, &second.1);
    drop(segments);
    assert_eq!(open(directory.path(), options(CAP)).1.len(), 2);
}

#[test]
fn k3_every_fault_of_a_read_has_its_reason_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), options(CAP));
    let (key, block) = block(1, 1, 100_000);
    let location = put(&segments, &block);
    let last = 4096 + 100_000 - 1;
    let cases = [
        (ReadFault::Short, ReadError::Short),
        (ReadFault::Error, ReadError::Io(Errno::IO)),
        (ReadFault::Flip(0), ReadError::Checksum),
        (ReadFault::Flip(70), ReadError::Checksum),
        (ReadFault::Flip(4096), ReadError::Checksum),
        (ReadFault::Flip(last), ReadError::Checksum),
    ];
    for (fault, error) in cases {
        faults.set_read(fault);
        assert_eq!(read(&segments, location, key).unwrap_err(), error, "{fault:?}");
        faults.set_read(ReadFault::None);
        assert_reads(&segments, location, key, &block);
    }
    let figures = segments.figures();
    let count = |reason: &str| figures.reads_failed[REASONS.iter().position(|known| *known == reason).unwrap()];
    assert_eq!((count("short"), count("io"), count("checksum")), (1, 1, 4));
    assert_eq!(figures.blocks_read, cases.len() as u64);
}

#[test]
fn k3_another_block_in_its_place_is_not_taken_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, _, _) = open(directory.path(), options(CAP));
    let (mine, theirs) = (block(1, 1, 10_000), block(2, 2, 10_000));
    let location = put(&segments, &mine.1);
    put(&segments, &theirs.1);
    for field in 0..3 {
        let mut wanted = mine.0;
        [&mut wanted.identity.0, &mut wanted.key.0, &mut wanted.domain.0][field][5] ^= 1;
        assert_eq!(read(&segments, location, wanted).unwrap_err(), ReadError::WrongKey);
    }
    let shorter = AlignedBuffer::with_pages(location.pages as usize - 1);
    let failed = segments.read_and_wait(location, mine.0, shorter, Instant::now() + PATIENCE).unwrap_err();
    assert_eq!(failed.error, ReadError::Length);
}

#[test]
fn a_read_that_hangs_frees_its_caller_and_too_many_switch_the_tier_off_until_the_disk_answers() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), Options { read_threads: 2, ..options(CAP) });
    let (key, block) = block(1, 1, 10_000);
    let location = put(&segments, &block);
    faults.set_read(ReadFault::Hang);
    for stuck in 1..=STUCK_READS_MAX {
        wait_until("a read that hangs", || {
            let memory = AlignedBuffer::with_pages(location.pages as usize);
            let soon = Instant::now() + Duration::from_millis(100);
            let failed = segments.read_and_wait(location, key, memory, soon).unwrap_err();
            assert_eq!(failed.error, ReadError::Stuck);
            // One that no thread had begun by its deadline comes back with its memory; else the disk may still write into it.
            failed.memory.is_none()
        });
        assert_eq!(segments.figures().stuck_reads, stuck);
    }
    assert!(segments.figures().is_off);
    assert_eq!(read(&segments, location, key).unwrap_err(), ReadError::Off);
    faults.set_read(ReadFault::None);
    wait_until("the tier being on again", || !segments.figures().is_off);
    assert_reads(&segments, location, key, &block);
}

#[test]
fn reads_beyond_the_queue_are_refused_and_their_memory_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), Options { read_threads: 1, ..options(CAP) });
    let (key, block) = block(1, 1, 4096);
    let location = put(&segments, &block);
    faults.set_read(ReadFault::Hang);
    let (sender, receiver) = std::sync::mpsc::channel();
    let submitted = READS_WAITING_MAX + 100;
    for _ in 0..submitted {
        let (memory, sender) = (AlignedBuffer::with_pages(2), sender.clone());
        segments.read(location, key, memory, Instant::now() + PATIENCE, move |result| {
            sender.send(result.map(|_| ()).map_err(|failed| (failed.error, failed.memory.is_some()))).unwrap();
        });
    }
    // The one that runs has left the queue, or not yet.
    let refused: Vec<_> = receiver.try_iter().collect();
    assert!((99..=100).contains(&refused.len()), "{} were refused", refused.len());
    assert!(refused.iter().all(|result| *result == Err((ReadError::Busy, true))));
    faults.set_read(ReadFault::None);
    for _ in refused.len()..submitted {
        assert_eq!(receiver.recv_timeout(PATIENCE).unwrap(), Ok(()));
    }
}

#[test]
fn k13_a_slow_disk_shows_in_the_figures() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), options(CAP));
    let (key, block) = block(1, 1, 1 << 20);
    let location = put(&segments, &block);
    faults.bandwidth.store(20_000_000, Ordering::Relaxed);
    for _ in 0..3 {
        assert_reads(&segments, location, key, &block);
    }
    let figures = segments.figures();
    let bytes_per_second = figures.bytes_read as f64 / (figures.read_microseconds as f64 / 1e6);
    assert!(bytes_per_second <= 20_000_000.0, "{bytes_per_second}");
}

#[test]
fn k17_a_burst_beyond_the_queue_is_told_and_nothing_is_half_accounted() {
    let directory = tempfile::tempdir().unwrap();
    let queue_bytes_max = 4 << 20;
    let (segments, faults, _) = open_faulty(directory.path(), Options { queue_bytes_max, ..options(CAP) });
    let blocks: Vec<_> = (0..64).map(|number| block(number, 1, 256 << 10)).collect();
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut refused = 0;
    let gate = faults.write_gate.lock().unwrap();
    for (key, block) in &blocks {
        let (sender, key) = (sender.clone(), *key);
        let outcome = segments.append(vec![bytes(block)], move |results| sender.send((key, results)).unwrap());
        if let Err(back) = outcome {
            assert!(Arc::ptr_eq(&back.blocks[0], &bytes(block)), "the block comes back");
            refused += 1;
        }
        assert!(segments.figures().queued_bytes <= queue_bytes_max);
    }
    // 4 MiB hold fifteen blocks of 64 pages and a header.
    assert_eq!(refused, 64 - 15);
    drop(gate);
    drop(sender);
    let written: Vec<_> = receiver.iter().collect();
    assert_eq!(written.len(), 15);
    for (key, results) in written {
        let (_, block) = &blocks[key.key.0[0] as usize];
        assert_reads(&segments, *results[0].as_ref().unwrap(), key, block);
    }
    let figures = segments.figures();
    assert_eq!((figures.queued_bytes, figures.blocks_written, figures.live_blocks), (0, 15, 15));
}

#[test]
fn a_full_disk_is_left_alone_for_a_while_and_heals_by_itself() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, faults, _) = open_faulty(directory.path(), options(CAP));
    let (key, first) = block(1, 1, 100_000);
    let kept = put(&segments, &first);
    let used = segments.figures().used_bytes;
    faults.is_full.store(true, Ordering::Relaxed);
    let burst: Vec<_> = (2..40).map(|number| bytes(&block(number, 1, 100_000).1)).collect();
    let results = segments.append_and_wait(burst).unwrap();
    assert_eq!(results[0], Err(AppendError::Disk(Errno::NOSPC)));
    assert!(results.contains(&Err(AppendError::BackingOff)), "{results:?}");
    assert!(results.iter().all(Result::is_err));
    assert_reads(&segments, kept, key, &first);
    assert!(segments.figures().used_bytes <= used + 3 * 4096, "{} after {used}", segments.figures().used_bytes);
    faults.is_full.store(false, Ordering::Relaxed);
    let (key, second) = block(50, 1, 100_000);
    wait_until("the disk taking blocks again", || {
        segments.append_and_wait(vec![bytes(&second)]).unwrap()[0]
            .as_ref()
            .is_ok_and(|location| read(&segments, *location, key).is_ok())
    });
}
