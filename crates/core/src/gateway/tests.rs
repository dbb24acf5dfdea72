//! One test for each rule.

use super::*;
use crate::{
    ids::{Digest, ModelName, Priority, RequestId, TenantId, WorkerId},
    machine::Machine,
    targets::Targets,
    time::Instant,
    worker::{CancelCause, LoadError, ModelState, Rejection, StartKind},
};
use core::time::Duration;
use std::{string::String, vec, vec::Vec};

const MODEL: Digest = Digest([1; 32]);
const WORKER: WorkerId = WorkerId(1);
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn route(digest: Digest) -> Route {
    Route {
        digest,
        name: ModelName::parse("m").unwrap(),
        priority: Priority::Standard,
        max_concurrency: 2,
        critical_reserve: 0,
        parks: false,
        cold: ColdPolicy::Wait,
        rewarm_seconds: 30.0,
        targets: Targets::default(),
    }
}

/// A gateway and its clock; every event is followed by a check of all invariants.
struct Bench {
    gateway: Gateway,
    now: Instant,
}

impl Bench {
    fn with(settings: Settings, route: Route) -> Self {
        let mut bench = Self { gateway: Gateway::new(settings), now: Instant::ZERO };
        bench.event(Event::Configure(route));
        bench.event(Event::WorkerUp { worker: WORKER });
        bench
    }

    fn new() -> Self {
        Self::with(Settings::default(), route(MODEL))
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.gateway.handle(self.now, event, &mut actions);
        self.gateway.check().unwrap();
        actions
    }

    fn arrive_as(&mut self, request: u64, class: Priority) -> Vec<Action> {
        let (request, tenant) = (RequestId(request), TenantId::anonymous());
        self.event(Event::Arrived { request, tenant, digest: MODEL, class, patience: PATIENCE })
    }

    fn arrive(&mut self, request: u64) -> Vec<Action> {
        self.arrive_as(request, Priority::Standard)
    }

    fn start(&mut self, request: u64) {
        let actions = self.event(Event::Started { request: RequestId(request), start: StartKind::Warm });
        assert_eq!(actions, []);
    }

    fn finish(&mut self, request: u64) -> Vec<Action> {
        self.event(Event::Finished { request: RequestId(request), prompt_tokens: 1, completion_tokens: 1 })
    }

    fn lose(&mut self, request: u64, output_started: bool) -> Vec<Action> {
        let rejection = lost(output_started);
        self.event(Event::Rejected { request: RequestId(request), rejection })
    }

    fn pass(&mut self, seconds: u64) -> Vec<Action> {
        self.now = self.now + Duration::from_secs(seconds);
        self.event(Event::Timer)
    }

    fn state(&mut self, state: ModelState) {
        self.event(Event::WorkerState { worker: WORKER, digest: MODEL, state });
    }
}

fn lost(output_started: bool) -> Rejection {
    Rejection::EngineLost { message: String::from("signal 9"), output_started }
}

fn dispatched_to(worker: WorkerId, request: u64, class: Priority) -> Action {
    Action::Dispatch { request: RequestId(request), worker, digest: MODEL, tenant: TenantId::anonymous(), class }
}

fn dispatched(request: u64) -> Action {
    dispatched_to(WORKER, request, Priority::Standard)
}

fn refused(request: u64, refusal: Refusal) -> Action {
    Action::Refuse { request: RequestId(request), refusal }
}

fn cancel(request: u64, cause: CancelCause) -> Action {
    Action::Cancel { request: RequestId(request), worker: WORKER, cause }
}

fn place(request: u64, position: u32) -> Action {
    Action::Position { request: RequestId(request), position }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn requests_run_up_to_the_permits_and_then_wait_in_order() {
    let mut bench = Bench::new();
    assert_eq!(bench.arrive(1), [dispatched(1)]);
    assert_eq!(bench.arrive(2), [dispatched(2)]);
    assert_eq!(bench.arrive(3), [place(3, 1)]);
    assert_eq!(bench.arrive(4), [place(4, 2)]);
    bench.start(2);
    assert_eq!(bench.finish(2), [dispatched(3)]);
    assert_eq!(bench.pass(1), [place(4, 1)]);
    assert_eq!(bench.pass(1), []);
    assert_eq!(bench.gateway.queue_depth(), [0, 1, 0]);
    assert_eq!(bench.gateway.running().collect::<Vec<_>>(), [(MODEL, 2)]);
    assert_eq!(bench.gateway.waiting_for(MODEL), 1);
}

#[test]
fn an_unknown_or_forgotten_model_is_refused_and_its_waiters_too() {
    let mut bench = Bench::new();
    for request in 1..=2 {
        bench.arrive(request);
    }
    bench.arrive(3);
    assert_eq!(bench.event(Event::Forget { digest: MODEL }), [refused(3, Refusal::UnknownModel)]);
    assert_eq!(bench.arrive(4), [refused(4, Refusal::UnknownModel)]);
    assert_eq!(bench.finish(1), []);
    assert_eq!(bench.lose(2, false), [refused(2, Refusal::Worker(lost(false)))], "not tried again");
    assert_eq!(bench.gateway.running().count(), 0);
}

#[test]
fn both_queue_limits_refuse_with_an_honest_hint() {
    let settings = Settings { queue_limit: 3, queue_limit_per_model: 2, ..Settings::default() };
    let mut bench = Bench::with(settings, route(MODEL));
    bench.state(ModelState::Ready);
    let other = Digest([2; 32]);
    bench.event(Event::Configure(route(other)));
    for request in 1..=4 {
        bench.arrive(request);
    }
    let full = |seconds| Refusal::QueueFull { retry_after: Duration::from_secs_f64(seconds) };
    assert_eq!(bench.arrive(5), [refused(5, full(1.5))]);
    // After one request of 50 s, three of them over two permits are expected to take 75 s.
    bench.start(1);
    bench.now = bench.now + seconds(50);
    bench.finish(1);
    bench.arrive(6);
    assert_eq!(bench.arrive(7), [refused(7, full(75.0))]);
    // The other model has room of its own, but all queues together have room for one more only.
    let mut elsewhere = |request| {
        let (request, tenant) = (RequestId(request), TenantId::anonymous());
        let class = Priority::Standard;
        bench.event(Event::Arrived { request, tenant, digest: other, class, patience: PATIENCE })
    };
    elsewhere(11);
    elsewhere(12);
    assert_eq!(elsewhere(13), [place(13, 1)]);
    assert!(matches!(elsewhere(14)[..], [Action::Refuse { refusal: Refusal::QueueFull { .. }, .. }]));
}

#[test]
fn where_places_are_scarce_those_that_would_be_late_are_refused() {
    let settings = Settings { queue_limit: 8, ..Settings::default() };
    let targets = Targets { ttft_p99_warm_ms: Some(4_000), ttft_p99_cold_ms: None };
    let mut bench = Bench::with(settings, Route { max_concurrency: 1, targets, ..route(MODEL) });
    bench.state(ModelState::Ready);
    bench.arrive(1);
    bench.start(1);
    bench.now = bench.now + seconds(2);
    bench.finish(1);
    // One runs and four wait: the last of them is late, but half of all places are free.
    for request in 2..=6 {
        bench.arrive(request);
    }
    assert_eq!(bench.gateway.waiting_for(MODEL), 4);
    // Five requests of 2 s each are before this one's first token, which was promised within 4 s.
    let late = Refusal::QueueFull { retry_after: seconds(6) };
    assert_eq!(bench.arrive(7), [refused(7, late)]);
    assert_eq!(bench.arrive_as(8, Priority::Critical), [place(8, 1)], "what is critical waits where there is room");
    // Without a target everybody waits for as long as there is room.
    bench.event(Event::Configure(Route { max_concurrency: 1, ..route(MODEL) }));
    assert_eq!(bench.arrive(9), [place(9, 6)]);
}

#[test]
fn one_permit_stays_for_critical_requests() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 4, critical_reserve: 1, ..route(MODEL) });
    for request in 1..=3 {
        assert_eq!(bench.arrive(request), [dispatched(request)]);
    }
    assert_eq!(bench.arrive(4), [place(4, 1)]);
    let critical = |request| dispatched_to(WORKER, request, Priority::Critical);
    assert_eq!(bench.arrive_as(5, Priority::Critical), [critical(5)]);
    assert_eq!(bench.arrive_as(6, Priority::Critical), [place(6, 1)]);
    assert_eq!(bench.finish(5), [critical(6)]);
    assert_eq!(bench.finish(6), [], "the reserve is not for request 4");
    assert_eq!(bench.finish(1), [dispatched(4)]);
}

#[test]
fn a_higher_class_is_not_held_up_by_lower_ones_that_can_be_parked() {
    for parks in [false, true] {
        let settings = Settings { parks, ..Settings::default() };
        let mut bench = Bench::with(settings, Route { max_concurrency: 2, parks: true, ..route(MODEL) });
        let (critical, batch) = (
            |request| dispatched_to(WORKER, request, Priority::Critical),
            |request| dispatched_to(WORKER, request, Priority::Batch),
        );
        assert_eq!(bench.arrive_as(1, Priority::Batch), [batch(1)]);
        assert_eq!(bench.arrive_as(2, Priority::Batch), [batch(2)]);
        assert_eq!(bench.arrive_as(3, Priority::Batch), [place(3, 1)]);
        let first = if parks { critical(4) } else { place(4, 1) };
        assert_eq!(bench.arrive_as(4, Priority::Critical), [first]);
        if parks {
            assert_eq!(bench.arrive_as(5, Priority::Critical), [critical(5)]);
            assert_eq!(bench.arrive_as(6, Priority::Critical), [place(6, 1)], "its own class holds it up");
            assert_eq!(bench.finish(1), [], "four are there and the next one is critical");
            assert_eq!(bench.finish(4), [critical(6)]);
        }
    }
}

#[test]
fn a_reserve_of_everything_still_lets_others_run() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 0, critical_reserve: 9, ..route(MODEL) });
    assert_eq!(bench.arrive_as(1, Priority::Batch), [dispatched_to(WORKER, 1, Priority::Batch)]);
}

#[test]
fn classes_go_first_and_waiting_makes_up_for_class() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 1, ..route(MODEL) });
    bench.arrive(1);
    bench.arrive_as(2, Priority::Batch);
    bench.arrive(3);
    assert_eq!(bench.arrive_as(4, Priority::Critical), [place(4, 1)]);
    assert_eq!(bench.finish(1), [dispatched_to(WORKER, 4, Priority::Critical)]);
    // After 20 s the batch request counts as critical and came before the others.
    bench.now = bench.now + seconds(20);
    bench.arrive_as(5, Priority::Critical);
    assert_eq!(bench.finish(4), [dispatched_to(WORKER, 2, Priority::Batch)]);
    assert_eq!(bench.finish(2), [dispatched(3)]);
    assert_eq!(bench.finish(3), [dispatched_to(WORKER, 5, Priority::Critical)]);
}

#[test]
fn patience_ends_for_those_who_wait_and_those_nobody_began() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 2, ..route(MODEL) });
    for request in 1..=3 {
        bench.arrive(request);
    }
    bench.start(1);
    bench.pass(59);
    let expected = [
        refused(2, Refusal::DeadlinePassed),
        cancel(2, CancelCause::DeadlinePassed),
        refused(3, Refusal::DeadlinePassed),
    ];
    assert_eq!(bench.pass(1), expected);
    assert_eq!(bench.gateway.running().collect::<Vec<_>>(), [(MODEL, 2)], "the worker still holds request 2");
    bench.event(Event::Failed { request: RequestId(2) });
    assert_eq!(bench.gateway.running().collect::<Vec<_>>(), [(MODEL, 1)]);
    assert_eq!(bench.finish(1), []);
    assert_eq!(bench.gateway.requests(), 0);
}

#[test]
fn a_request_past_its_deadline_is_never_dispatched_even_if_the_timer_is_late() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 1, ..route(MODEL) });
    bench.arrive(1);
    bench.start(1);
    bench.arrive(2);
    bench.now = bench.now + PATIENCE;
    assert_eq!(bench.finish(1), [refused(2, Refusal::DeadlinePassed)]);
}

#[test]
fn a_cold_model_may_refuse_and_load_meanwhile() {
    let mut bench = Bench::with(Settings::default(), Route { cold: ColdPolicy::Reject, ..route(MODEL) });
    let loading = |hint| Refusal::ModelLoading { retry_after: seconds(hint) };
    let prewarm = Action::Prewarm { worker: WORKER, digest: MODEL };
    assert_eq!(bench.arrive(1), [prewarm, refused(1, loading(30))]);
    bench.state(ModelState::Waiting);
    bench.now = bench.now + seconds(10);
    bench.state(ModelState::Loading);
    assert_eq!(bench.arrive(2), [refused(2, loading(20))], "the load is under way");
    bench.now = bench.now + seconds(90);
    assert_eq!(bench.arrive(3), [refused(3, loading(1))]);
    bench.state(ModelState::Failed);
    assert_eq!(bench.arrive(4), [dispatched(4)], "the worker knows why it failed");
    bench.state(ModelState::Ready);
    assert_eq!(bench.arrive(5), [dispatched(5)]);
}

#[test]
fn hints_never_exceed_what_clients_accept() {
    for rewarm_seconds in [1e9, f64::INFINITY, f64::NAN, -1.0] {
        let cold = ColdPolicy::Reject;
        let mut bench = Bench::with(Settings::default(), Route { cold, rewarm_seconds, ..route(MODEL) });
        let actions = bench.arrive(1);
        let [_, Action::Refuse { refusal: Refusal::ModelLoading { retry_after }, .. }] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert!((seconds(1)..=seconds(120)).contains(retry_after), "{retry_after:?} for {rewarm_seconds}");
    }
    let mut bench = Bench::new();
    bench.arrive(1);
    let error = LoadError { message: String::from("no"), permanent: false };
    let rejection = Rejection::LoadFailed { error: error.clone(), retry_after: seconds(900) };
    let capped = Rejection::LoadFailed { error, retry_after: seconds(120) };
    let actions = bench.event(Event::Rejected { request: RequestId(1), rejection });
    assert_eq!(actions, [refused(1, Refusal::Worker(capped))]);
}

#[test]
fn a_request_lost_before_its_output_is_tried_once_more() {
    let mut bench = Bench::new();
    bench.arrive(1);
    bench.start(1);
    assert_eq!(bench.lose(1, false), [dispatched(1)]);
    assert_eq!(bench.lose(1, false), [refused(1, Refusal::Worker(lost(false)))]);
    bench.arrive(2);
    bench.start(2);
    assert_eq!(bench.lose(2, true), [refused(2, Refusal::Worker(lost(true)))]);
    bench.arrive(3);
    bench.start(3);
    bench.now = bench.now + PATIENCE;
    assert_eq!(bench.lose(3, false), [refused(3, Refusal::Worker(lost(false)))], "too late to try again");
}

#[test]
fn a_retried_request_keeps_its_place_and_goes_elsewhere() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 1, ..route(MODEL) });
    bench.event(Event::WorkerUp { worker: WorkerId(2) });
    bench.arrive(1);
    bench.arrive(2);
    assert_eq!(bench.lose(1, false), [dispatched_to(WorkerId(2), 1, Priority::Standard)]);
}

#[test]
fn other_rejections_are_passed_on() {
    let mut bench = Bench::new();
    for (request, rejection) in
        [Rejection::UnknownModel, Rejection::TooLarge { needed_bytes: 2, available_bytes: 1 }, Rejection::Draining]
            .into_iter()
            .enumerate()
    {
        let request = request as u64;
        bench.arrive(request);
        let actions = bench.event(Event::Rejected { request: RequestId(request), rejection: rejection.clone() });
        assert_eq!(actions, [refused(request, Refusal::Worker(rejection))]);
    }
}

#[test]
fn cancelled_requests_end_in_every_state_and_are_never_dispatched() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 2, ..route(MODEL) });
    for request in 1..=4 {
        bench.arrive(request);
    }
    bench.start(1);
    let cancelled = |request| Event::Cancelled { request: RequestId(request) };
    assert_eq!(bench.event(cancelled(3)), [], "it waited");
    assert_eq!(bench.event(cancelled(2)), [cancel(2, CancelCause::Disconnected)], "it was dispatched");
    assert_eq!(bench.event(cancelled(1)), [cancel(1, CancelCause::Disconnected)], "it ran");
    assert_eq!(bench.event(cancelled(1)), []);
    bench.start(2);
    assert_eq!(bench.lose(2, false), [dispatched(4)], "a lost request nobody wants is not tried again");
    assert_eq!(bench.finish(1), []);
    assert_eq!(bench.finish(4), []);
    assert_eq!(bench.gateway.requests(), 0);
}

#[test]
fn a_lost_worker_loses_what_ran_and_keeps_what_waited() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 3, ..route(MODEL) });
    for request in 1..=4 {
        bench.arrive(request);
    }
    bench.start(1);
    bench.event(Event::Cancelled { request: RequestId(3) });
    let actions = bench.event(Event::WorkerDown { worker: WORKER });
    assert!(
        matches!(
            &actions[..],
            [Action::Refuse {
                request: RequestId(1),
                refusal: Refusal::Worker(Rejection::EngineLost { output_started: true, .. })
            }]
        ),
        "{actions:?}"
    );
    let actions = bench.arrive(5);
    assert_eq!(actions, [refused(5, Refusal::NoWorker { retry_after: seconds(1) })]);
    assert_eq!(bench.lose(2, false), [], "late news of the worker that is gone");
    assert_eq!(bench.event(Event::WorkerUp { worker: WORKER }), [dispatched(2), dispatched(4)]);
}

#[test]
fn draining_accepts_nothing_new_and_finishes_the_rest() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 1, ..route(MODEL) });
    bench.arrive(1);
    bench.arrive(2);
    assert_eq!(bench.event(Event::Drain), []);
    assert_eq!(bench.arrive(3), [refused(3, Refusal::Draining)]);
    assert_eq!(bench.finish(1), [dispatched(2)]);
    assert_eq!(bench.finish(2), []);
    assert!(bench.gateway.is_draining());
    assert_eq!(bench.gateway.requests(), 0);
    assert_eq!(bench.gateway.next_timer(), None);
}

#[test]
fn more_permits_let_waiting_requests_go() {
    let mut bench = Bench::with(Settings::default(), Route { max_concurrency: 1, ..route(MODEL) });
    bench.arrive(1);
    bench.arrive(2);
    let wider = Route { max_concurrency: 2, ..route(MODEL) };
    assert_eq!(bench.event(Event::Configure(wider)), vec![dispatched(2)]);
}

#[test]
fn warm_workers_are_preferred() {
    let mut bench = Bench::new();
    bench.event(Event::WorkerUp { worker: WorkerId(2) });
    bench.event(Event::WorkerState { worker: WorkerId(2), digest: MODEL, state: ModelState::Ready });
    assert!(bench.gateway.is_ready(MODEL));
    assert_eq!(bench.arrive(1), [dispatched_to(WorkerId(2), 1, Priority::Standard)]);
    assert_eq!(bench.arrive(2), [dispatched_to(WorkerId(2), 2, Priority::Standard)]);
}
