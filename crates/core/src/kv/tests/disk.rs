//! Cases of a disk that hangs, fails, is shared with others, or is as fast as computing.

use super::*;

#[test]
fn one_part_is_computed_while_the_rest_is_read_where_both_take_alike() {
    let mut bench = Bench::new(settings(100, 100));
    // 0.128 s to compute a block, as guessed, and as long to read one.
    bench.read_seconds = 0.128;
    let keys = keys("a", 0, 40);
    bench.save(&keys);
    bench.forget_host();
    let (request, told) = bench.only_ask(&keys[..4], 0);
    assert_eq!(given(&told), Some(Given { first: 0, blocks: 4, known: 4 }), "nothing is known of the disk yet");
    bench.tell(Event::Restored { request, first_block: 0, blocks: 4, seconds: 0.004 });
    bench.forget_host();
    bench.held_reads = Some(Vec::new());
    let (request, told) = bench.only_ask(&keys, 0);
    assert_eq!(given(&told), Some(Given { first: 0, blocks: 0, known: 40 }), "it begins at once");
    let reads = bench.held_reads.take().unwrap();
    assert!((19..=21).contains(&reads.len()), "half of it is read: {}", reads.len());
    bench.now = bench.now + Duration::from_secs(2);
    let mut told = Vec::new();
    for block in &reads {
        told.extend(bench.tell(Event::ReadDone { block: *block, seconds: 0.128, failure: None }));
    }
    let first = 40 - reads.len() as u32;
    assert_eq!(given(&told), Some(Given { first, blocks: reads.len(), known: 40 }));
    // It has come two blocks further by then.
    let blocks = reads.len() as u32 - 2;
    bench.tell(Event::Restored { request, first_block: first + 2, blocks, seconds: 0.04 });
    let view = &bench.tier.view().models[0];
    assert_eq!((view.split, view.reloaded), (1, 2));
    assert_eq!(view.hit_tokens.disk, u64::from(4 + blocks) * 64);
}

#[test]
fn who_computes_meanwhile_is_told_nothing_when_the_rest_comes_too_late_or_is_wrong() {
    for wrong in [false, true] {
        let mut bench = Bench::new(settings(100, 100));
        bench.read_seconds = 0.128;
        let keys = keys("a", 0, 20);
        bench.save(&keys);
        bench.forget_host();
        bench.ask(&keys[..4], 0);
        bench.forget_host();
        bench.held_reads = Some(Vec::new());
        let (request, _) = bench.only_ask(&keys, 0);
        let reads = bench.held_reads.take().unwrap();
        let told = if wrong {
            let failure = Some(ReadFailure { reason: "io".to_string(), slot_is_held: false, is_lost: true });
            bench.tell(Event::ReadDone { block: reads[0], seconds: 0.1, failure })
        } else {
            bench.now = bench.now + Duration::from_secs(60);
            bench.tell(Event::Timer)
        };
        assert_eq!(given(&told), None, "{told:?}");
        bench.tell(Event::Ended { request });
        for block in &reads[usize::from(wrong)..] {
            bench.tell(Event::ReadDone { block: *block, seconds: 0.1, failure: None });
        }
        bench.forget_host();
        assert_eq!(bench.tier.host_bytes(), 0, "nothing is held for anybody");
    }
}

#[test]
fn a_slot_that_a_hanging_read_may_write_into_is_given_to_nobody() {
    let mut bench = Bench::new(settings(4, 100));
    bench.save(&keys("a", 0, 1));
    bench.forget_host();
    bench.held_reads = Some(Vec::new());
    bench.only_ask(&keys("a", 0, 1), 0);
    let block = bench.held_reads.take().unwrap()[0];
    let failure = Some(ReadFailure { reason: "stuck".to_string(), slot_is_held: true, is_lost: false });
    bench.tell(Event::ReadDone { block, seconds: 30.0, failure });
    assert_eq!(bench.tier.host_bytes(), SLOT, "it counts");
    bench.save(&keys("b", 0, 4));
    assert_eq!(bench.ask(&keys("b", 0, 4), 0).blocks, 3, "only three slots are left");
    bench.tell(Event::SlotReleased { identity: identity(1), slot: 0 });
    bench.save(&keys("c", 0, 1));
    assert_eq!(bench.ask(&keys("b", 0, 4), 0).blocks, 3);
    assert_eq!(bench.ask(&keys("c", 0, 1), 0).blocks, 1);
}

#[test]
fn k10_others_files_leave_less_of_the_bound_and_what_is_new_still_comes_in() {
    let mut bench = Bench::new(settings(100, 10));
    bench.others_bytes = 6 * SLOT;
    for conversation in ["a", "b", "c"] {
        bench.now = bench.now + Duration::from_secs(60);
        bench.save(&keys(conversation, 0, 4));
    }
    assert_eq!(bench.tier.view().models[0].disk_blocks, 4);
    bench.forget_host();
    assert_eq!(bench.ask(&keys("a", 0, 4), 0).blocks, 0);
    assert_eq!(bench.ask(&keys("c", 0, 4), 0).blocks, 4);
}

#[test]
fn a_disk_that_others_have_left_is_found_to_have_room_again() {
    let mut bench = Bench::new(settings(100, 10));
    bench.others_bytes = 10 * SLOT;
    bench.writes_fail = true;
    bench.save(&keys("a", 0, 1));
    (bench.others_bytes, bench.writes_fail) = (0, false);
    bench.now = bench.now + Duration::from_secs(9);
    bench.save(&keys("b", 0, 1));
    assert_eq!(bench.tier.view().models[0].disk_blocks, 0, "that is believed for a moment");
    bench.now = bench.now + Duration::from_secs(2);
    bench.save(&keys("c", 0, 4));
    assert_eq!(bench.tier.view().models[0].disk_blocks, 1, "one block is tried");
    bench.save(&keys("d", 0, 4));
    assert_eq!(bench.tier.view().models[0].disk_blocks, 5);
}

#[test]
fn blocks_that_fail_together_keep_the_disk_alone_no_longer_than_one() {
    let mut bench = Bench::new(settings(100, 100));
    bench.writes_fail = true;
    bench.save(&keys("a", 0, 20));
    assert_eq!(bench.tier.view().disk_writes_failed, 20);
    bench.writes_fail = false;
    bench.save(&keys("b", 0, 1));
    assert_eq!(bench.tier.view().disk_writes_refused, 1, "it is left alone for a moment");
    bench.now = bench.now + Duration::from_secs(2);
    bench.save(&keys("c", 0, 1));
    assert_eq!(bench.tier.view().models[0].disk_blocks, 1);
}

#[test]
fn a_queue_that_is_smaller_than_a_block_takes_one_at_a_time() {
    let mut bench = Bench::new(TierSettings { disk_queue_bytes_max: SLOT / 2, ..settings(100, 100) });
    bench.save(&keys("a", 0, 1));
    bench.save(&keys("b", 0, 1));
    assert_eq!(bench.tier.view().models[0].disk_blocks, 2);
}

#[test]
fn a_block_is_read_another_time_if_only_the_disk_had_no_answer() {
    for is_lost in [false, true] {
        let mut bench = Bench::new(settings(100, 100));
        let keys = keys("a", 0, 3);
        bench.save(&keys);
        bench.forget_host();
        bench.held_reads = Some(Vec::new());
        bench.only_ask(&keys, 0);
        for block in bench.held_reads.take().unwrap() {
            let failure = Some(ReadFailure { reason: "busy".to_string(), slot_is_held: false, is_lost });
            bench.tell(Event::ReadDone { block, seconds: 0.001, failure });
        }
        assert_eq!(bench.ask(&keys, 0).blocks, if is_lost { 0 } else { 3 });
    }
}

#[test]
fn what_is_too_old_for_the_disk_leaves_host_memory_too_and_is_not_written_again() {
    let mut bench = Bench::new(settings(100, 100));
    let keys = keys("a", 0, 3);
    bench.save(&keys);
    let (request, told) = bench.only_ask(&keys, 0);
    assert_eq!(given(&told).map(|given| given.blocks), Some(3));
    let places = (1..=3).map(|page| DiskPlace { segment: 0, page, pages: 257 }).collect();
    bench.tell(Event::Expired { places });
    assert_eq!(bench.tier.host_bytes(), 3 * SLOT, "an engine reads them still");
    bench.tell(Event::Restored { request, first_block: 0, blocks: 3, seconds: 0.001 });
    assert_eq!((bench.tier.host_bytes(), bench.writes), (0, 3));
    assert_eq!(bench.ask(&keys, 0).blocks, 0);
}

#[test]
fn what_was_found_at_the_start_gives_way_once_it_is_known_how_fast_the_model_computes() {
    let mut bench = Bench::new(settings(100, 10));
    let old = keys("a", 0, 11);
    let found = old.windows(2).zip(1..).map(|(keys, depth)| FoundBlock {
        identity: identity(1),
        domain: TrustDomain::named("a"),
        key: keys[1],
        parent: keys[0],
        depth,
        payload_bytes: PAYLOAD,
        place: DiskPlace { segment: 9, page: depth, pages: 257 },
    });
    bench.tell(Event::Found { blocks: found.collect(), others_bytes: 0 });
    bench.computes_at(5_000.0);
    bench.now = bench.now + Duration::from_secs(300);
    let new = keys("b", 0, 4);
    bench.save(&new);
    bench.forget_host();
    assert_eq!(bench.ask(&new, 0).blocks, 4);
    assert_eq!(bench.tier.view().models[0].disk_blocks, 10);
}

#[test]
fn a_reload_for_which_there_is_no_room_counts_as_computed() {
    let mut bench = Bench::new(settings(4, 100));
    bench.save(&keys("a", 0, 4));
    bench.forget_host();
    bench.save(&keys("b", 0, 4));
    // Its engine takes in all four, so that none of them may leave.
    let (_, told) = bench.only_ask(&keys("b", 0, 4), 0);
    assert_eq!(given(&told).map(|given| given.blocks), Some(4));
    assert_eq!(bench.ask(&keys("a", 0, 4), 0).blocks, 0);
    let view = &bench.tier.view().models[0];
    assert_eq!((view.reloaded, view.recomputed), (1, 1));
}
