//! Cases of too little host memory, of which models take a part.

use super::*;

#[test]
fn a_state_on_its_way_out_needs_room_that_models_leave() {
    let mut bench = Bench::new(settings(100, 0));
    bench.save(&keys("a", 0, 6));
    let offer = |save: u64, state_bytes: u64| Event::SaveOffered {
        save: SaveId(save),
        identity: identity(1),
        domain: TrustDomain::named("a"),
        parent: BlockKey([0; 32]),
        first_block: 0,
        keys: keys("a", save as u32 * 1000, 2),
        state_bytes,
    };
    let in_host = |bench: &Bench| bench.tier.view().models[0].host_blocks;
    let mut actions = Vec::new();
    // Models leave room for eight blocks, six are there: a state of four makes two of them leave, and keeps its room
    // until it is over.
    bench.tell(Event::HostLimit { bytes: 8 * SLOT });
    bench.tier.handle(bench.now, offer(10, 4 * SLOT), &mut actions);
    assert_eq!(actions.iter().filter(|action| matches!(action, Action::SaveGo { .. })).count(), 1, "{actions:?}");
    assert_eq!(in_host(&bench), 4);
    bench.tell(Event::HostLimit { bytes: 6 * SLOT });
    assert_eq!(in_host(&bench), 2, "what models take, blocks leave");
    bench.tell(Event::Staged { save: SaveId(10), ok: false });
    // A state for which there can be no room is not put out.
    assert_eq!(bench.tell(offer(11, 6 * SLOT + 1)), [Action::SaveSkip { save: SaveId(11) }]);
    assert_eq!((bench.tier.view().saves_skipped, bench.tier.view().saves_lost), (1, 1));
    bench.save(&keys("a", 5000, 4));
    assert_eq!(in_host(&bench), 5, "a state of a thousand bytes leaves room for five");
}

#[test]
fn a_state_for_which_models_leave_no_room_says_what_its_blocks_are_worth() {
    let mut bench = Bench::new(settings(100, 0));
    bench.computes_at(1000.0);
    bench.tell(Event::HostLimit { bytes: 0 });
    let mut worths = Vec::new();
    for save in 0..2 {
        bench.now = bench.now + Duration::from_secs(10);
        let told = bench.tell(Event::SaveOffered {
            save: SaveId(save),
            identity: identity(1),
            domain: TrustDomain::named("a"),
            parent: BlockKey([0; 32]),
            first_block: 0,
            keys: keys("a", 0, 4),
            state_bytes: 4 * SLOT,
        });
        assert!(told.contains(&Action::SaveSkip { save: SaveId(save) }), "{told:?}");
        worths.extend(told.iter().filter_map(pressed));
    }
    // Who came back is worth more than who comes for the first time.
    assert!(worths.len() == 2 && worths[0] > 0.0 && worths[1] > 2.0 * worths[0], "{worths:?}");
    // As soon as models leave room, it is kept.
    bench.tell(Event::HostLimit { bytes: 9 * SLOT });
    bench.save(&keys("a", 0, 4));
    assert_eq!(bench.tier.view().models[0].host_blocks, 4);
}
