//! The tier under random schedules: engines that ask, save, die and lie, a disk that is slow, full or broken.

use super::{
    Action, BlockKey, DiskPlace, Event, FoundBlock, KvIdentity, SaveId, Tier, TierSettings, TrustDomain, chain,
    protocol::ReadFailure,
};
use crate::{Digest, Instant, Machine, RequestId};
use alloc::{
    collections::{BTreeMap, BTreeSet},
    format,
    string::{String, ToString},
    vec,
    vec::Vec,
};
use core::time::Duration;
use proptest::{prelude::*, test_runner::TestCaseError};

const PAYLOAD: u64 = 4096 * 3;
const SLOT: u64 = 4096 * 4;

fn identity(model: u8) -> KvIdentity {
    KvIdentity::new(&Digest([model; 32]), "layout", "build")
}

fn domain(number: u8) -> TrustDomain {
    TrustDomain::named(if number == 0 { "a" } else { "b" })
}

/// What a slot holds, as the shell knows it.
type Slots = BTreeMap<(KvIdentity, u32), u128>;

#[derive(Debug, Clone)]
enum Step {
    /// A prompt: model, domain, tokens that tell prompts apart, blocks, tokens in the engine.
    Ask {
        model: u8,
        domain: u8,
        branch: u8,
        blocks: u8,
        device: u16,
    },
    Save {
        model: u8,
        domain: u8,
        branch: u8,
        blocks: u8,
        from: u8,
    },
    /// Carries out the oldest (or another) thing the tier wants done, well or not.
    Do {
        which: u8,
        well: bool,
    },
    Restore {
        which: u8,
        all: bool,
    },
    Reject {
        which: u8,
    },
    End {
        which: u8,
    },
    Purge {
        domain: u8,
    },
    Forget {
        model: u8,
    },
    Limit {
        slots: u8,
    },
    Wait {
        milliseconds: u16,
    },
    Release {
        which: u8,
    },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let (model, domain, branch) = (0u8..2, 0u8..2, 0u8..4);
    let removed = model.clone();
    prop_oneof![
        6 => (model.clone(), domain.clone(), branch.clone(), 0u8..9, 0u16..600)
            .prop_map(|(model, domain, branch, blocks, device)| Step::Ask { model, domain, branch, blocks, device }),
        6 => (model, domain.clone(), branch, 1u8..9, 0u8..4)
            .prop_map(|(model, domain, branch, blocks, from)| Step::Save { model, domain, branch, blocks, from }),
        20 => (any::<u8>(), prop::bool::weighted(0.85)).prop_map(|(which, well)| Step::Do { which, well }),
        4 => (any::<u8>(), any::<bool>()).prop_map(|(which, all)| Step::Restore { which, all }),
        1 => any::<u8>().prop_map(|which| Step::Reject { which }),
        2 => any::<u8>().prop_map(|which| Step::End { which }),
        1 => domain.prop_map(|domain| Step::Purge { domain }),
        1 => removed.prop_map(|model| Step::Forget { model }),
        1 => (0u8..12).prop_map(|slots| Step::Limit { slots }),
        4 => (1u16..3000).prop_map(|milliseconds| Step::Wait { milliseconds }),
        1 => any::<u8>().prop_map(|which| Step::Release { which }),
        1 => Just(Step::Restart),
    ]
}

/// The world around a tier: slots and disk with what really lies there.
struct World {
    tier: Tier,
    now: Instant,
    wanted: Vec<Action>,
    slots: Slots,
    /// Slots that a hanging read may write into.
    held: Vec<(KvIdentity, u32)>,
    disk: BTreeMap<DiskPlace, FoundBlock>,
    retired: BTreeSet<DiskPlace>,
    next_page: u32,
    offers: BTreeMap<SaveId, (KvIdentity, TrustDomain, BlockKey, u32, Vec<BlockKey>)>,
    asked: BTreeMap<RequestId, Vec<BlockKey>>,
    /// Slots whose block was purged since it came there, and the last request that had asked before.
    purged: BTreeMap<(KvIdentity, u32), u64>,
    /// Requests that have had a grant.
    begun: BTreeMap<RequestId, Vec<BlockKey>>,
    /// First block, and how many.
    granted: BTreeMap<RequestId, (u32, usize)>,
    number: u64,
}

impl World {
    fn new() -> Self {
        let settings = TierSettings {
            host_bytes_max: 10 * SLOT,
            disk_bytes_max: 24 * SLOT,
            disk_slack_bytes: 4 * SLOT,
            disk_write_bytes_per_day: 1000 * SLOT,
            disk_queue_bytes_max: 3 * SLOT,
            saves_max: 2,
            saves_waiting_max: 2,
        };
        let mut world = Self {
            tier: Tier::new(settings),
            now: Instant::ZERO,
            wanted: Vec::new(),
            slots: Slots::new(),
            held: Vec::new(),
            disk: BTreeMap::new(),
            retired: BTreeSet::new(),
            next_page: 0,
            offers: BTreeMap::new(),
            asked: BTreeMap::new(),
            purged: BTreeMap::new(),
            begun: BTreeMap::new(),
            granted: BTreeMap::new(),
            number: 0,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        for model in 0..2 {
            let opened = Event::Opened {
                model: Digest([model; 32]),
                identity: identity(model),
                payload_bytes: PAYLOAD,
                slot_bytes: SLOT,
            };
            self.tier.handle(self.now, opened, &mut Vec::new());
        }
    }

    fn tell(&mut self, event: Event) -> Result<(), TestCaseError> {
        let mut actions = Vec::new();
        let told = format!("{event:?}");
        self.tier.handle(self.now, event, &mut actions);
        for action in actions {
            self.obey(action)?;
        }
        self.tier.check().map_err(|broken| TestCaseError::fail(format!("after {told}: {broken}")))
    }

    /// What is done at once; what takes time waits.
    fn obey(&mut self, action: Action) -> Result<(), TestCaseError> {
        match action {
            Action::Grant { request, identity, first, slots, known } => {
                let keys = match self.asked.remove(&request) {
                    Some(keys) => keys,
                    None => {
                        prop_assert!(first > 0 && !slots.is_empty(), "who computes already is told what it can use");
                        self.begun.get(&request).cloned().unwrap_or_default()
                    }
                };
                self.begun.insert(request, keys.clone());
                prop_assert!(known as usize <= keys.len());
                for (place, slot) in (first as usize..).zip(&slots) {
                    let held = self.slots.get(&(identity, *slot)).copied();
                    prop_assert_eq!(
                        held,
                        Some(super::BlockKeyShort::from(&keys[place]).0),
                        "a granted slot is another's"
                    );
                    let purged = self.purged.get(&(identity, *slot)).is_some_and(|before| request.0 > *before);
                    prop_assert!(!purged, "what was purged is granted to {:?}, who asked later", request);
                }
                if !slots.is_empty() {
                    self.granted.insert(request, (first, slots.len()));
                }
            }
            Action::FreeSlot { identity, slot } => {
                self.slots.remove(&(identity, slot));
                self.purged.remove(&(identity, slot));
            }
            Action::Retire { place } => {
                prop_assert!(self.retired.insert(place), "given up twice");
                self.disk.remove(&place);
            }
            Action::Pressed { worth } => prop_assert!(worth > 0.0 && worth.is_finite()),
            Action::Coming { request, tokens } => {
                let keys = self.asked.get(&request).map_or(0, Vec::len);
                prop_assert!((64..=64 * keys as u32).contains(&tokens), "what is on its way is not this prompt's");
            }
            Action::SaveGo { .. } => {
                prop_assert!(self.tier.host.has_room(0, 0), "a state comes for which there is no room");
                self.wanted.push(action);
            }
            Action::PurgeDisk { domain } => self.disk.retain(|_, block| block.domain != domain),
            Action::SaveSkip { save } => {
                self.offers.remove(&save);
            }
            later => self.wanted.push(later),
        }
        Ok(())
    }

    fn disk_bytes(&self) -> u64 {
        self.disk.len() as u64 * SLOT
    }

    fn do_one(&mut self, which: u8, well: bool) -> Result<(), TestCaseError> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        let action = self.wanted.remove(usize::from(which) % self.wanted.len());
        match action {
            Action::Read { block, identity, key, place, slot, .. } => {
                let found = self.disk.get(&place).filter(|found| found.key == key);
                let slot_is_held = !well && which % 2 == 1;
                let failure = ReadFailure { reason: "io".to_string(), slot_is_held, is_lost: which.is_multiple_of(3) };
                let failure = (!well || found.is_none()).then_some(failure);
                prop_assert!(!self.held.contains(&(identity, slot)), "a read into a slot that is held");
                if failure.is_none() {
                    self.slots.insert((identity, slot), super::BlockKeyShort::from(&key).0);
                } else if slot_is_held {
                    self.held.push((identity, slot));
                }
                self.tell(Event::ReadDone { block, seconds: 0.001, failure })
            }
            Action::SaveGo { save } => self.tell(Event::Staged { save, ok: well }),
            Action::Gather { save, identity, blocks } => {
                let Some((_, _, _, _, keys)) = self.offers.remove(&save) else { return Ok(()) };
                if blocks.is_empty() {
                    return Ok(());
                }
                for (place, slot) in &blocks {
                    prop_assert!(!self.held.contains(&(identity, *slot)), "a save into a slot that is held");
                    let key = super::BlockKeyShort::from(&keys[*place as usize]).0;
                    self.slots.insert((identity, *slot), if well { key } else { 0 });
                }
                self.tell(Event::Gathered { save, ok: well })
            }
            Action::Write { block, identity, slot } => {
                let held = self.slots.get(&(identity, slot)).copied();
                let (key, root) = self.known_block(held);
                let outcome = if well {
                    let place = DiskPlace { segment: self.next_page / 4, page: self.next_page % 4, pages: 4 };
                    self.next_page += 1;
                    self.disk.insert(place, FoundBlock { place, ..key });
                    Ok(place)
                } else {
                    Err(root)
                };
                self.tell(Event::Written { block, outcome, seconds: 0.001, others_bytes: 0 })
            }
            other => Err(TestCaseError::fail(format!("{other:?} is not for later"))),
        }
    }

    /// A block as it would stand in a header, found by its short key among all prompts there are.
    fn known_block(&self, short: Option<u128>) -> (FoundBlock, String) {
        for (model, domain_number, branch) in
            (0..2).flat_map(|m| (0..2).flat_map(move |d| (0..4).map(move |b| (m, d, b))))
        {
            let keys = keys(model, domain_number, branch, 12);
            if let Some(depth) = keys.iter().position(|key| Some(super::BlockKeyShort::from(key).0) == short) {
                let parent = if depth == 0 { BlockKey([0; 32]) } else { keys[depth - 1] };
                let found = FoundBlock {
                    identity: identity(model),
                    domain: domain(domain_number),
                    key: keys[depth],
                    parent,
                    depth: depth as u32,
                    payload_bytes: PAYLOAD,
                    place: DiskPlace { segment: 0, page: 0, pages: 4 },
                };
                return (found, "io".into());
            }
        }
        panic!("a slot that is written holds no block");
    }

    fn run(&mut self, step: Step) -> Result<(), TestCaseError> {
        self.number += 1;
        match step {
            Step::Ask { model, domain: whose, branch, blocks, device } => {
                let keys = keys(model, whose, branch, blocks);
                let request = RequestId(self.number);
                self.asked.insert(request, keys.clone());
                self.tell(Event::Asked {
                    request,
                    identity: identity(model),
                    prompt_tokens: keys.len() as u32 * 64 + 1,
                    device_tokens: u32::from(device).min(keys.len() as u32 * 64),
                    keys,
                })
            }
            Step::Save { model, domain: whose, branch, blocks, from } => {
                let mut keys = keys(model, whose, branch, blocks);
                let first_block = u32::from(from.min(blocks - 1));
                let parent = if first_block == 0 { BlockKey([0; 32]) } else { keys[first_block as usize - 1] };
                let keys = keys.split_off(first_block as usize);
                let save = SaveId(self.number);
                let offer = (identity(model), domain(whose), parent, first_block, keys.clone());
                self.offers.insert(save, offer);
                self.tell(Event::SaveOffered {
                    save,
                    identity: identity(model),
                    domain: domain(whose),
                    parent,
                    first_block,
                    keys,
                    state_bytes: u64::from(blocks) * PAYLOAD,
                })
            }
            Step::Do { which, well } => self.do_one(which, well),
            Step::Restore { which, all } => {
                let Some((request, (first, blocks))) = pick(&self.granted, which) else { return Ok(()) };
                self.granted.remove(&request);
                // Who computes meanwhile may have come further by then.
                let skipped = if first == 0 { 0 } else { u32::from(which) % blocks as u32 };
                let blocks = if all { blocks as u32 - skipped } else { 0 };
                self.tell(Event::Restored { request, first_block: first + skipped, blocks, seconds: 0.001 })
            }
            Step::Reject { which } => {
                let Some((request, _)) = pick(&self.granted, which) else { return Ok(()) };
                self.tell(Event::Rejected { request, block: u32::from(which % 4), reason: "tokens".into() })
            }
            Step::End { which } => {
                let Some((request, _)) = pick(&self.granted, which) else { return Ok(()) };
                self.granted.remove(&request);
                self.tell(Event::Ended { request })
            }
            Step::Purge { domain: whose } => {
                self.note_purged(|block| block.domain == domain(whose));
                self.tell(Event::Purge { domain: domain(whose) })
            }
            Step::Forget { model } => {
                self.note_purged(|block| block.identity == identity(model));
                self.tell(Event::Forget { identity: identity(model) })?;
                self.open();
                Ok(())
            }
            Step::Limit { slots } => self.tell(Event::HostLimit { bytes: u64::from(slots) * SLOT }),
            Step::Wait { milliseconds } => {
                self.now = self.now + Duration::from_millis(u64::from(milliseconds));
                self.tell(Event::Timer)
            }
            Step::Release { which } => self.release(which),
            Step::Restart => self.restart(),
        }
    }

    /// What lies in slots now and is purged is not for who asks from now on.
    fn note_purged(&mut self, purged: impl Fn(&FoundBlock) -> bool) {
        for (place, key) in &self.slots {
            if purged(&self.known_block(Some(*key)).0) {
                self.purged.insert(*place, self.number);
            }
        }
    }

    /// A read that hung has ended.
    fn release(&mut self, which: u8) -> Result<(), TestCaseError> {
        let Some(place) = usize::from(which).checked_rem(self.held.len()) else { return Ok(()) };
        let (identity, slot) = self.held.swap_remove(place);
        self.tell(Event::SlotReleased { identity, slot })
    }

    /// Host memory is gone, the disk stays.
    fn restart(&mut self) -> Result<(), TestCaseError> {
        let (disk, next_page, settings) = (core::mem::take(&mut self.disk), self.next_page, self.tier.settings.clone());
        *self =
            Self { disk, next_page: next_page.next_multiple_of(4), number: self.number, now: self.now, ..Self::new() };
        self.tier = Tier::new(settings);
        self.open();
        let blocks: Vec<FoundBlock> = self.disk.values().cloned().collect();
        self.tell(Event::Found { blocks, others_bytes: 0 })
    }

    /// In the end, when all that was wanted is done and nobody uses anything, nothing is stuck.
    fn finish(&mut self) -> Result<(), TestCaseError> {
        for (request, _) in core::mem::take(&mut self.granted) {
            self.tell(Event::Ended { request })?;
        }
        while !self.wanted.is_empty() {
            self.do_one(0, true)?;
        }
        self.now = self.now + Duration::from_secs(3600);
        self.tell(Event::Timer)?;
        prop_assert!(self.asked.is_empty(), "a request was never granted: {:?}", self.asked);
        for (request, _) in core::mem::take(&mut self.granted) {
            self.tell(Event::Ended { request })?;
        }
        while !self.wanted.is_empty() {
            self.do_one(0, true)?;
        }
        self.tell(Event::HostLimit { bytes: 0 })?;
        prop_assert_eq!(self.tier.host.bytes_used, self.held.len() as u64 * SLOT, "what hangs counts");
        while !self.held.is_empty() {
            self.release(0)?;
        }
        prop_assert_eq!(self.tier.host.bytes_used, 0, "something nobody uses cannot leave");
        prop_assert_eq!(self.tier.disk.queued_bytes, 0);
        prop_assert_eq!(self.tier.disk.kept_bytes, self.disk_bytes());
        prop_assert!(self.slots.is_empty());
        Ok(())
    }
}

fn keys(model: u8, whose: u8, branch: u8, blocks: u8) -> Vec<BlockKey> {
    // Branches share their first two blocks.
    let tokens: Vec<u32> =
        (0..u32::from(blocks) * 64).map(|at| if at < 128 { at } else { at + 1000 * u32::from(branch) }).collect();
    chain(&identity(model), &domain(whose), &tokens)
}

fn pick<T: Copy>(map: &BTreeMap<RequestId, T>, which: u8) -> Option<(RequestId, T)> {
    let place = usize::from(which).checked_rem(map.len())?;
    map.iter().nth(place).map(|(request, value)| (*request, *value))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nobody_is_given_anothers_block_and_nothing_is_lost_or_stuck(steps in prop::collection::vec(step(), 1..300)) {
        let mut world = World::new();
        for step in steps {
            world.run(step)?;
        }
        world.finish()?;
    }
}

#[test]
fn the_same_events_give_the_same_actions() {
    let run = || {
        let mut world = World::new();
        for number in 0..200u8 {
            let step = match number % 5 {
                0 => Step::Save { model: number % 2, domain: 0, branch: number % 4, blocks: 1 + number % 8, from: 0 },
                1 => Step::Ask { model: number % 2, domain: 0, branch: number % 4, blocks: number % 9, device: 0 },
                2 => Step::Restore { which: number, all: true },
                _ => Step::Do { which: number, well: true },
            };
            world.run(step).unwrap();
        }
        (format!("{:?}", world.wanted), world.slots, world.disk.into_keys().collect::<Vec<_>>())
    };
    assert_eq!(run(), run());
    assert_ne!(vec![0u8; 0], format!("{:?}", run()).into_bytes());
}
