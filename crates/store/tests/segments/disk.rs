//! The real file system: its space is bounded, given back, and counted to the last page.

use crate::support::*;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};
use warmset_store::{
    StoreError,
    segments::{AppendError, Location, Options, ReadError, Segments},
};

const CAP: u64 = 1 << 30;

#[test]
fn what_is_written_is_read_now_and_after_a_restart() {
    for encrypt in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let options = Options { encrypt, segment_bytes: 4 << 20, ..options(CAP) };
        let (segments, found, _) = open(directory.path(), options.clone());
        assert!(found.is_empty());
        let sizes = [1, 4095, 4096, 4097, 300_000, 6 << 20];
        let blocks: Vec<_> = sizes.iter().zip(0..).map(|(size, number)| block(number, 1, *size)).collect();
        let results = segments.append_and_wait(blocks.iter().map(|(_, block)| bytes(block)).collect()).unwrap();
        for ((key, block), location) in blocks.iter().zip(&results) {
            assert_reads(&segments, *location.as_ref().unwrap(), *key, block);
        }
        assert!(segments.segments().len() > 1, "{:?}", segments.segments());
        drop(segments);

        let (segments, found, recovered) = open(directory.path(), options);
        assert_eq!((recovered.blocks, recovered.segments_not_closed), (blocks.len() as u64, 0));
        for found in found {
            let (key, block) = &blocks[found.id.key.0[0] as usize];
            assert_eq!((found.id, found.token_count, found.first_token), (*key, 64, 64));
            assert_eq!(found.written_at_seconds, 1_000_000 + u64::from(found.id.key.0[0]));
            assert_reads(&segments, found.location, *key, block);
        }
    }
}

#[test]
fn k1_many_tenants_under_pressure_get_their_own_bytes() {
    for encrypt in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let cap = 24 << 20;
        let (segments, _, _) = open(directory.path(), Options { encrypt, ..options(cap) });
        let segments = Arc::new(segments);
        std::thread::scope(|scope| {
            for tenant in 0..6u8 {
                let segments = Arc::clone(&segments);
                scope.spawn(move || one_tenant(&segments, tenant));
            }
        });
        let figures = segments.figures();
        assert!(figures.used_bytes <= cap, "{figures:?}");
        assert!(figures.blocks_written > 100, "{figures:?}");
    }
}

/// Writes, reads and gives up its oldest where there is no room.
fn one_tenant(segments: &Segments, tenant: u8) {
    let mut random = Random(u64::from(tenant));
    let mut kept: Vec<(u64, Location)> = Vec::new();
    for step in 0..60 {
        let number = u64::from(tenant) << 32 | step;
        let (key, made) = block(number, tenant, 1 + random.below(500_000) as u32);
        match segments.append_and_wait(vec![bytes(&made)]).unwrap().remove(0) {
            Ok(location) => {
                assert_reads(segments, location, key, &made);
                kept.push((number, location));
            }
            Err(AppendError::Cap { .. }) => {
                for (_, location) in kept.drain(..kept.len().div_ceil(2)) {
                    assert!(segments.retire(&location));
                    assert!(!segments.retire(&location));
                    assert_eq!(read(segments, location, key).unwrap_err(), ReadError::Gone);
                }
            }
            Err(error) => panic!("{error}"),
        }
        let mut sizes = Random(u64::from(tenant));
        let payloads: Vec<u32> = (0..=step).map(|_| 1 + sizes.below(500_000) as u32).collect();
        for (number, location) in &kept {
            let (key, made) = block(*number, tenant, payloads[(*number & 0xffff_ffff) as usize]);
            if random_half(*number ^ step) {
                assert_reads(segments, *location, key, &made);
            }
        }
    }
}

fn random_half(seed: u64) -> bool {
    Random(seed).below(8) == 0
}

#[test]
fn k10_the_bound_holds_with_what_was_there_before() {
    let directory = tempfile::tempdir().unwrap();
    let block_bytes = 200_000;
    // Blocks of an earlier life, a stranger's file, a folder, and the remains of a crash.
    let (segments, _, _) = open(directory.path(), options(CAP));
    for number in 0..20 {
        put(&segments, &block(number, 1, block_bytes).1);
    }
    drop(segments);
    std::fs::write(directory.path().join("a stranger's"), vec![1; 1 << 20]).unwrap();
    std::fs::create_dir(directory.path().join("folder")).unwrap();
    std::fs::write(directory.path().join("folder/file"), vec![1; 1 << 20]).unwrap();
    std::fs::write(directory.path().join("00000077.segment"), vec![0; 100_000]).unwrap();
    std::fs::write(directory.path().join("00000078.segment"), b"").unwrap();
    std::fs::copy(directory.path().join("00000000.segment"), directory.path().join("00000079.segment")).unwrap();

    let cap = 12 << 20;
    let (segments, found, recovered) = open(directory.path(), options(cap));
    assert_eq!((found.len(), recovered.segments_removed), (20, 3), "{recovered:?}");
    assert!(segments.figures().foreign_bytes >= 2 << 20);
    assert_eq!(segments.figures().foreign_files, 2);
    let slack = u64::from(block_bytes);
    let (mut written, mut refused) = (0, 0);
    for number in 100..160 {
        match segments.append_and_wait(vec![bytes(&block(number, 1, block_bytes).1)]).unwrap().remove(0) {
            Ok(_) => written += 1,
            Err(AppendError::Cap { bytes_max }) => {
                assert_eq!(bytes_max, cap);
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
        let used = total_use(directory.path());
        assert!(used <= cap + slack, "{used} bytes used");
        assert!(segments.figures().used_bytes.abs_diff(used) <= 8192, "{:?} and {used}", segments.figures());
    }
    assert!(written > 15 && refused > 15, "{written} written, {refused} refused");
    assert!(directory.path().join("a stranger's").exists());
    // What another puts there later counts from the next segment on.
    let before = segments.segments().iter().map(|segment| segment.segment).max();
    std::fs::write(directory.path().join("another"), vec![1; 3 << 20]).unwrap();
    for segment in segments.segments() {
        segments.drop_segment(segment.segment);
    }
    for number in 200..240 {
        let _ = segments.append_and_wait(vec![bytes(&block(number, 1, block_bytes).1)]).unwrap();
    }
    assert!(segments.segments().iter().map(|segment| segment.segment).max() > before);
    assert!(total_use(directory.path()) <= cap + slack);
    drop(segments);
    assert!(total_use(directory.path()) <= cap + slack);
}

fn total_use(directory: &Path) -> u64 {
    disk_use(directory) + disk_use(&directory.join("folder")) - 4096
}

#[test]
fn a_block_given_up_gives_its_pages_back_and_stays_away() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, _, _) = open(directory.path(), options(CAP));
    let blocks: Vec<_> = (0..30).map(|number| block(number, 1, 100_000)).collect();
    let locations: Vec<_> = blocks.iter().map(|(_, block)| put(&segments, block)).collect();
    let before = segments.figures();
    for location in locations.iter().step_by(2) {
        assert!(segments.retire(location));
    }
    wait_until("pages going back", || segments.figures().used_bytes <= before.used_bytes - 15 * 100_000);
    assert_eq!(segments.figures().live_bytes, before.live_bytes / 2);
    assert!(segments.figures().used_bytes.abs_diff(disk_use(directory.path())) <= 4096);
    assert_eq!(segments.figures().bytes_written, before.bytes_written, "nothing is written again");
    drop(segments);
    let (segments, found, _) = open(directory.path(), options(CAP));
    assert_eq!(found.len(), 15);
    for found in &found {
        let (key, block) = &blocks[found.id.key.0[0] as usize];
        assert_eq!(found.id.key.0[0] % 2, 1);
        assert_reads(&segments, found.location, *key, block);
    }
    // A segment with nothing left goes as a whole.
    found.iter().for_each(|found| assert!(segments.retire(&found.location)));
    wait_until("the segment going", || segments.segments().is_empty());
    wait_until("its file going", || disk_use(directory.path()) < 50_000);
}

#[test]
fn what_is_too_old_goes() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, _, _) = open(directory.path(), options(CAP));
    let blocks: Vec<_> = (0..10).map(|number| block(number, 1, 10_000)).collect();
    let locations: Vec<_> = blocks.iter().map(|(_, block)| put(&segments, block)).collect();
    // Block `n` was made in second 1,000,000 + n.
    assert_eq!(segments.expire(1_000_004), locations[..4]);
    assert_eq!(segments.expire(1_000_004), []);
    assert_eq!(read(&segments, locations[3], blocks[3].0).unwrap_err(), ReadError::Gone);
    assert_reads(&segments, locations[4], blocks[4].0, &blocks[4].1);
    drop(segments);
    assert_eq!(open(directory.path(), options(CAP)).1.len(), 6);
}

#[test]
fn one_process_has_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, _, _) = open(directory.path(), options(CAP));
    let error = Segments::open(directory.path(), options(CAP)).err().unwrap();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    drop(segments);
    open(directory.path(), options(CAP));
}

#[test]
fn what_is_no_block_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (segments, _, _) = open(directory.path(), options(CAP));
    let (_, good) = block(1, 1, 10_000);
    let nothing: Arc<Vec<u8>> = Arc::default();
    let noise = Arc::new(vec![7u8; 8192]);
    let short = Arc::new((*good).as_ref()[..8192].to_vec());
    let unaligned = Arc::new([&[0][..], (*good).as_ref()].concat());
    struct Rest(Arc<Vec<u8>>);
    impl AsRef<[u8]> for Rest {
        fn as_ref(&self) -> &[u8] {
            &self.0[1..]
        }
    }
    let results =
        segments.append_and_wait(vec![nothing, noise, short, Arc::new(Rest(unaligned)), bytes(&good)]).unwrap();
    assert!(results[..3].iter().all(|result| matches!(result, Err(AppendError::Block(_)))), "{results:?}");
    assert!(results[3..].iter().all(Result::is_ok), "{results:?}");
    assert_eq!(segments.figures().live_blocks, 2);
}

/// A file system in memory; none where mounting is not allowed.
struct Disk {
    _parent: tempfile::TempDir,
    place: PathBuf,
}

impl Disk {
    fn small(mebibytes: u64) -> Option<Self> {
        Self::mount(&["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "tmpfs"])
    }

    fn mount(what: &[&str]) -> Option<Self> {
        let parent = tempfile::tempdir().unwrap();
        let place = parent.path().join("disk");
        std::fs::create_dir(&place).unwrap();
        let mounted = Command::new("mount").args(what).arg(&place).output().unwrap();
        if !mounted.status.success() {
            eprintln!("not tested: file systems cannot be mounted here");
            return None;
        }
        Some(Self { _parent: parent, place })
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.place).status();
    }
}

#[test]
fn a_file_system_that_others_fill_costs_blocks_until_there_is_room() {
    let Some(disk) = Disk::small(32) else { return };
    let (segments, _, _) = open(&disk.place.join("kv"), options(CAP));
    let (key, first) = block(1, 1, 1 << 20);
    let kept = put(&segments, &first);
    let filler = disk.place.join("filler");
    std::fs::write(&filler, vec![1; 30 << 20]).unwrap();
    let more: Vec<_> = (2..12).map(|number| block(number, 1, 1 << 20)).collect();
    let results = segments.append_and_wait(more.iter().map(|(_, block)| bytes(block)).collect()).unwrap();
    assert!(results.iter().any(Result::is_err), "{results:?}");
    for ((key, block), result) in more.iter().zip(&results) {
        match result {
            Ok(location) => assert_reads(&segments, *location, *key, block),
            Err(error) => assert!(
                matches!(error, AppendError::FreeSpace { .. } | AppendError::Disk(_) | AppendError::BackingOff),
                "{error}"
            ),
        }
    }
    assert_reads(&segments, kept, key, &first);
    std::fs::remove_file(&filler).unwrap();
    wait_until("the disk taking blocks again", || {
        segments.append_and_wait(vec![bytes(&block(20, 1, 1 << 20).1)]).unwrap()[0].is_ok()
    });
}

#[test]
fn the_watermark_is_left_to_others() {
    let Some(disk) = Disk::small(32) else { return };
    let free_bytes_min = 10 << 20;
    let (segments, _, _) = open(&disk.place.join("kv"), Options { free_bytes_min, ..options(CAP) });
    for number in 0..40 {
        match segments.append_and_wait(vec![bytes(&block(number, 1, 1 << 20).1)]).unwrap().remove(0) {
            Ok(_) => assert!(number < 22, "{number}"),
            Err(AppendError::FreeSpace { .. }) => assert!(number > 18, "{number}"),
            Err(error) => panic!("{error}"),
        }
    }
    let figures = rustix::fs::statvfs(&disk.place).unwrap();
    assert!(figures.f_bavail * figures.f_frsize >= free_bytes_min);
}

/// This file system has neither direct I/O nor holes, and does not know what its files take.
#[test]
fn a_simple_file_system_will_do() {
    let Some(disk) = Disk::mount(&["-t", "ramfs", "ramfs"]) else { return };
    let (segments, _, _) = open(&disk.place.join("kv"), options(CAP));
    let blocks: Vec<_> = (0..9).map(|number| block(number, (number % 3) as u8, 50_000)).collect();
    let locations: Vec<_> = blocks.iter().map(|(_, block)| put(&segments, block)).collect();
    drop(segments);
    let (segments, found, _) = open(&disk.place.join("kv"), options(CAP));
    assert_eq!(found.len(), 9);
    for (location, (id, block)) in locations.iter().zip(&blocks) {
        assert_reads(&segments, *location, *id, block);
    }
    assert!(segments.retire(&locations[0]));
    let purged = segments.purge(&domain(1)).unwrap();
    assert_eq!((purged.dropped.blocks, purged.is_complete), (3, true));
    drop(segments);
    let path = disk.place.join("kv").join(format!("{:08x}.segment", locations[0].segment));
    let file = std::fs::read(path).unwrap();
    for (location, (id, _)) in locations.iter().zip(&blocks) {
        let (start, end) = (location.page as usize * 4096, (location.page + location.pages) as usize * 4096);
        let is_gone = file[start..end].iter().all(|byte| *byte == 0);
        assert_eq!(is_gone, id.domain == domain(1), "{location:?}");
    }
    // What was retired or purged is still listed there, and what is found so cannot be read.
    let (segments, found, _) = open(&disk.place.join("kv"), options(CAP));
    for found in found {
        let outcome = read(&segments, found.location, found.id);
        assert_eq!(outcome.is_ok(), found.id.domain != domain(1), "{found:?}");
    }
}

fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = directory.read_dir().unwrap().flatten();
    entries.map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())).collect()
}

#[test]
fn a_directory_that_another_one_took_the_place_of_is_left_to_it() {
    for encrypt in [false, true] {
        let parent = tempfile::tempdir().unwrap();
        let (place, aside) = (parent.path().join("kv"), parent.path().join("aside"));
        let with = || Options { encrypt, ..options(CAP) };
        let (segments, _, _) = open(&place, with());
        let (id, first) = block(1, 1, 50_000);
        let kept = put(&segments, &first);
        std::fs::rename(&place, &aside).unwrap();
        // Another process takes the path, with segments of the same numbers.
        let (others, _, _) = open(&place, with());
        put(&others, &block(2, 1, 50_000).1);
        let before = files(&place);

        let refused = segments.append_and_wait(vec![bytes(&block(3, 1, 50_000).1)]).unwrap().remove(0).unwrap_err();
        assert!(matches!(refused, AppendError::Replaced { .. }), "{refused}");
        assert!(refused.to_string().contains("restart the server"), "{refused}");
        assert_eq!(segments.figures().fault, Some(refused));
        segments.retire(&kept);
        assert!(!segments.wait_until_cleared(), "what was given up lies elsewhere");
        assert!(segments.purge(&id.domain).is_err());
        drop(segments);
        assert_eq!(files(&place), before, "nothing of the other one's was touched");
        drop(others);
    }
}

#[test]
fn a_directory_that_is_put_back_goes_on() {
    let parent = tempfile::tempdir().unwrap();
    let (place, aside) = (parent.path().join("kv"), parent.path().join("aside"));
    let (segments, _, _) = open(&place, options(CAP));
    let (id, first) = block(1, 1, 50_000);
    let kept = put(&segments, &first);
    std::fs::rename(&place, &aside).unwrap();
    assert!(segments.append_and_wait(vec![bytes(&block(2, 1, 50_000).1)]).unwrap()[0].is_err());
    std::fs::rename(&aside, &place).unwrap();
    let (next_id, next) = block(3, 1, 50_000);
    let also_kept = put(&segments, &next);
    assert_eq!(segments.figures().fault, None);
    assert_reads(&segments, kept, id, &first);
    assert_reads(&segments, also_kept, next_id, &next);
    drop(segments);
    let (_, found, _) = open(&place, options(CAP));
    assert_eq!(found.len(), 2);
}
