//! Random sequences of events: every invariant after each, exactly one last word for each request, the same actions
//! for the same events, and nothing left once everybody has let go.

use super::{tests::route, *};
use crate::{
    ids::{Digest, Priority, RequestId, TenantId, WorkerId},
    machine::Machine,
    time::Instant,
    worker::{ModelState, Rejection, StartKind},
};
use core::time::Duration;
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    string::String,
    vec,
    vec::Vec,
};

const MODELS: u8 = 3;
const WORKERS: u32 = 2;
const REQUESTS: u64 = 24;

fn settings() -> Settings {
    Settings {
        queue_limit: 6,
        queue_limit_per_model: 4,
        attempts_max: 2,
        aging: Duration::from_secs(5),
        retry_after_max: Duration::from_secs(120),
        parks: false,
    }
}

fn digests() -> impl Strategy<Value = Digest> {
    (0..MODELS).prop_map(|byte| Digest([byte; 32]))
}

fn classes() -> impl Strategy<Value = Priority> {
    prop::sample::select(Priority::ALL.to_vec())
}

fn states() -> impl Strategy<Value = ModelState> {
    use ModelState::{Absent, Draining, Failed, Loading, Ready, Unloading, Verifying, Waiting};
    prop::sample::select(vec![Absent, Waiting, Verifying, Loading, Ready, Draining, Unloading, Failed])
}

fn rejections() -> impl Strategy<Value = Rejection> {
    let message = || String::from("lost");
    prop_oneof![
        3 => Just(Rejection::EngineLost { message: message(), output_started: false }),
        1 => Just(Rejection::EngineLost { message: message(), output_started: true }),
        1 => Just(Rejection::NoMemory { retry_after: Duration::from_secs(500) }),
        1 => Just(Rejection::UnknownModel),
    ]
}

fn routes() -> impl Strategy<Value = Route> {
    (digests(), 0..5_u32, 0..3_u32, any::<bool>(), 0.0..300.0).prop_map(
        |(digest, max_concurrency, critical_reserve, rejects, rewarm_seconds)| Route {
            max_concurrency,
            critical_reserve,
            cold: if rejects { ColdPolicy::Reject } else { ColdPolicy::Wait },
            rewarm_seconds,
            ..route(digest)
        },
    )
}

fn events() -> impl Strategy<Value = Event> {
    let requests = || (0..REQUESTS).prop_map(RequestId);
    let workers = || (0..WORKERS).prop_map(WorkerId);
    prop_oneof![
        12 => (requests(), digests(), classes(), 1..60_u64).prop_map(|(request, digest, class, seconds)| {
            let (tenant, patience) = (TenantId::anonymous(), Duration::from_secs(seconds));
            Event::Arrived { request, tenant, digest, class, patience }
        }),
        4 => requests().prop_map(|request| Event::Cancelled { request }),
        8 => requests().prop_map(|request| Event::Started { request, start: StartKind::Cold }),
        8 => requests()
            .prop_map(|request| Event::Finished { request, prompt_tokens: 1, completion_tokens: 1 }),
        2 => requests().prop_map(|request| Event::Failed { request }),
        5 => (requests(), rejections()).prop_map(|(request, rejection)| Event::Rejected { request, rejection }),
        2 => workers().prop_map(|worker| Event::WorkerUp { worker }),
        1 => workers().prop_map(|worker| Event::WorkerDown { worker }),
        4 => (workers(), digests(), states())
            .prop_map(|(worker, digest, state)| Event::WorkerState { worker, digest, state }),
        2 => routes().prop_map(Event::Configure),
        1 => digests().prop_map(|digest| Event::Forget { digest }),
        6 => Just(Event::Timer),
        1 => Just(Event::Drain),
    ]
}

/// What the outside world has seen of each request, to judge the machine's actions by.
#[derive(Default)]
struct World {
    now: Instant,
    /// Asked and not answered.
    open: BTreeSet<RequestId>,
    answered: BTreeSet<RequestId>,
    at_workers: BTreeMap<RequestId, WorkerId>,
    tries: BTreeMap<RequestId, u32>,
    /// What each asked for, when, and after how many others.
    asked: BTreeMap<RequestId, (Digest, Priority, Instant, usize)>,
    workers: BTreeSet<WorkerId>,
    /// The worker that the last event took away: a deadline that passed at that moment may still be told to it.
    just_lost: Option<WorkerId>,
}

impl World {
    /// Whether a real gateway could hear this event now; notes what it means.
    fn allows(&mut self, event: &Event) -> bool {
        self.just_lost = None;
        match event {
            Event::Arrived { request, digest, class, .. } => {
                let new = !self.open.contains(request) && !self.answered.contains(request);
                if new {
                    self.open.insert(*request);
                    self.asked.insert(*request, (*digest, *class, self.now, self.asked.len()));
                }
                new
            }
            Event::Started { request, .. } => self.at_workers.contains_key(request),
            Event::Finished { request, .. } | Event::Failed { request } => {
                let held = self.at_workers.remove(request).is_some();
                if held && self.open.remove(request) {
                    self.answered.insert(*request);
                }
                held
            }
            Event::Rejected { request, .. } => self.at_workers.remove(request).is_some(),
            Event::Cancelled { request } => {
                if self.open.remove(request) {
                    self.answered.insert(*request);
                }
                true
            }
            Event::WorkerUp { worker } => self.workers.insert(*worker),
            Event::WorkerDown { worker } => {
                self.at_workers.retain(|_, at| at != worker);
                self.just_lost = Some(*worker);
                self.workers.remove(worker)
            }
            _ => true,
        }
    }

    fn judge(&mut self, actions: &[Action], gateway: &Gateway) {
        for action in actions {
            match action {
                Action::Dispatch { request, worker, .. } => {
                    assert!(self.open.contains(request), "{request:?} is answered or gone, and dispatched");
                    assert!(self.workers.contains(worker), "{worker:?} cannot be used");
                    assert_eq!(self.at_workers.insert(*request, *worker), None, "{request:?} is at two workers");
                    self.judge_order(*request);
                    let tries = self.tries.entry(*request).or_default();
                    *tries += 1;
                    assert!(*tries <= settings().attempts_max, "{request:?} is tried {tries} times");
                }
                Action::Refuse { request, refusal } => {
                    assert!(self.open.remove(request), "a second last word for {request:?}: {refusal:?}");
                    self.answered.insert(*request);
                    check_hint(refusal);
                }
                Action::Cancel { request, worker, .. } => {
                    let there = self.at_workers.get(request) == Some(worker) || self.just_lost == Some(*worker);
                    assert!(there, "{request:?} is not there");
                }
                Action::Prewarm { worker, .. } => assert!(self.workers.contains(worker)),
                Action::Position { request, position } => {
                    assert!(self.open.contains(request) && *position >= 1);
                }
            }
        }
        let waiting = self.open.iter().filter(|request| !self.at_workers.contains_key(request)).count();
        assert_eq!(gateway.queue_depth().iter().sum::<u32>() as usize, waiting);
        assert_eq!(gateway.running().map(|(_, count)| count as usize).sum::<usize>(), self.at_workers.len());
        let fresh = self.open.iter().filter(|request| !self.tries.contains_key(request)).count();
        assert!(fresh <= settings().queue_limit as usize, "{fresh} wait that never ran");
    }
}

impl World {
    /// Who goes is of the best class, as it counts after waiting, and of those the first. A lower class may wait for a permit
    /// that is reserved, however old it is; and those that a lost worker had are sent elsewhere one after the other.
    fn judge_order(&self, sent: RequestId) {
        if self.just_lost.is_some() {
            return;
        }
        let standing = |request: &RequestId| {
            let (_, class, since, place) = self.asked[request];
            let better = self.now.since(since).as_nanos() / settings().aging.as_nanos();
            (super::queue::class_index(class).saturating_sub(better as usize), place)
        };
        let mut waiting = self.open.iter().filter(|other| !self.at_workers.contains_key(other));
        let overtaken = waiting.find(|other| {
            let ((of, class, ..), (digest, sent_class, ..)) = (self.asked[other], self.asked[&sent]);
            of == digest && class <= sent_class && standing(other) < standing(&sent)
        });
        assert_eq!(overtaken, None, "{sent:?} goes before");
    }
}

fn check_hint(refusal: &Refusal) {
    let (Refusal::QueueFull { retry_after }
    | Refusal::ModelLoading { retry_after }
    | Refusal::NoWorker { retry_after }
    | Refusal::Worker(Rejection::NoMemory { retry_after })) = refusal
    else {
        return;
    };
    assert!((Duration::from_secs(1)..=Duration::from_secs(120)).contains(retry_after), "{retry_after:?}");
}

fn step(gateway: &mut Gateway, world: &mut World, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    gateway.handle(world.now, event, &mut actions);
    gateway.check().unwrap();
    world.judge(&actions, gateway);
    actions
}

fn run(events: &[(u64, Event)]) -> (Gateway, World, Vec<Action>) {
    let (mut gateway, mut world, mut all) = (Gateway::new(settings()), World::default(), Vec::new());
    for worker in (0..WORKERS).map(WorkerId) {
        world.workers.insert(worker);
        all.extend(step(&mut gateway, &mut world, Event::WorkerUp { worker }));
    }
    for byte in 0..MODELS {
        all.extend(step(&mut gateway, &mut world, Event::Configure(route(Digest([byte; 32])))));
    }
    for (milliseconds, event) in events {
        world.now = world.now + Duration::from_millis(*milliseconds);
        if world.allows(event) {
            all.extend(step(&mut gateway, &mut world, event.clone()));
        }
    }
    (gateway, world, all)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_has_one_last_word_and_nothing_is_left(
        events in prop::collection::vec((0..8_000_u64, events()), 0..120),
    ) {
        let (mut gateway, mut world, _) = run(&events);
        // Every worker lets go of what it holds; what is tried again is let go of again.
        while let Some(request) = world.at_workers.keys().next().copied() {
            let event = Event::Finished { request, prompt_tokens: 0, completion_tokens: 0 };
            assert!(world.allows(&event));
            step(&mut gateway, &mut world, event);
        }
        // What still waits, for want of a worker, runs out of patience by the machine's own timer.
        while let Some(timer) = gateway.next_timer() {
            world.now = timer.max(world.now);
            step(&mut gateway, &mut world, Event::Timer);
            while let Some(request) = world.at_workers.keys().next().copied() {
                let event = Event::Finished { request, prompt_tokens: 0, completion_tokens: 0 };
                world.allows(&event);
                step(&mut gateway, &mut world, event);
            }
            prop_assert!(gateway.next_timer().is_none_or(|next| next > timer), "the timer does not advance");
        }
        prop_assert_eq!(gateway.requests(), 0);
        prop_assert_eq!(gateway.queue_depth(), [0; 3]);
        prop_assert!(world.open.is_empty(), "never answered: {:?}", world.open);
    }

    #[test]
    fn the_same_events_give_the_same_actions(
        events in prop::collection::vec((0..8_000_u64, events()), 0..120),
    ) {
        prop_assert_eq!(run(&events).2, run(&events).2);
    }

    #[test]
    fn permits_and_the_reserve_hold_when_nothing_is_reconfigured(
        requests in prop::collection::vec((0..2_000_u64, classes(), any::<bool>()), 1..200),
        max_concurrency in 1..6_u32,
        critical_reserve in 0..6_u32,
        parks in any::<bool>(),
    ) {
        let digest = Digest([0; 32]);
        let mut gateway = Gateway::new(Settings { parks, ..settings() });
        let (mut now, mut running) = (Instant::ZERO, Vec::new());
        let mut actions = Vec::new();
        gateway.handle(now, Event::Configure(Route { max_concurrency, critical_reserve, parks, ..route(digest) }), &mut actions);
        gateway.handle(now, Event::WorkerUp { worker: WorkerId(0) }, &mut actions);
        for (number, (milliseconds, class, finish)) in requests.into_iter().enumerate() {
            now = now + Duration::from_millis(milliseconds);
            let (request, tenant) = (RequestId(number as u64), TenantId::anonymous());
            let patience = Duration::from_secs(100_000);
            gateway.handle(now, Event::Arrived { request, tenant, digest, class, patience }, &mut actions);
            if finish && !running.is_empty() {
                let (request, _) = running.remove(0);
                gateway.handle(now, Event::Finished { request, prompt_tokens: 0, completion_tokens: 0 }, &mut actions);
            }
            for action in actions.drain(..) {
                if let Action::Dispatch { request, class, .. } = action {
                    running.push((request, class));
                }
            }
            let of = |class: Priority| running.iter().filter(|(_, other)| *other == class).count();
            let ordinary_max = max_concurrency.saturating_sub(critical_reserve).max(1) as usize;
            if parks {
                prop_assert!(of(Priority::Critical) <= max_concurrency as usize);
                prop_assert!(of(Priority::Standard) <= ordinary_max && of(Priority::Batch) <= ordinary_max);
            } else {
                prop_assert!(running.len() <= max_concurrency as usize);
                prop_assert!(of(Priority::Standard) + of(Priority::Batch) <= ordinary_max);
            }
            gateway.check().unwrap();
        }
    }
}
