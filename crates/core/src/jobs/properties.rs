//! Random lives of jobs: every invariant after each event, one end for each job, the same actions for the same events,
//! and nobody waits while there is room.

use super::*;
use crate::{
    ids::{JobId, Priority},
    machine::Machine,
    time::Instant,
};
use core::time::Duration;
use proptest::prelude::*;
use std::{collections::BTreeMap, format, vec, vec::Vec};

const JOBS: u64 = 16;

fn settings() -> Settings {
    Settings { running_max: 3, running_max_per_model: 2, attempts_max: 3, aging: Duration::from_secs(20) }
}

fn ends() -> impl Strategy<Value = End> {
    prop_oneof![
        3 => Just(End::Answered),
        1 => Just(End::Failed),
        3 => (0..20_u64, any::<bool>())
            .prop_map(|(seconds, counts)| End::Returned { after: Duration::from_secs(seconds), counts }),
    ]
}

fn events() -> impl Strategy<Value = Event> {
    let jobs = || (0..JOBS).prop_map(JobId);
    prop_oneof![
        8 => (jobs(), 0..3_u8, prop::sample::select(Priority::ALL.to_vec()), 0..4_u32, 1..200_u64).prop_map(
            |(job, model, class, attempts, seconds)| {
                let time_left = Duration::from_secs(seconds);
                Event::Accepted { job, model: format!("m{model}").into(), class, attempts, time_left }
            }
        ),
        6 => (jobs(), 0..4_u32, prop::sample::select(vec![Step::LoadBegan, Step::EngineBegan, Step::Answered]))
            .prop_map(|(job, turn, step)| Event::Progressed { job, turn, step }),
        8 => (jobs(), 0..4_u32, ends()).prop_map(|(job, turn, end)| Event::Ended { job, turn, end }),
        2 => jobs().prop_map(|job| Event::Cancelled { job }),
        4 => Just(Event::Timer),
    ]
}

/// What the actions say of every job: begun and not yet let go, and its last word.
#[derive(Default)]
struct Witness {
    out: BTreeMap<JobId, u32>,
    begun: BTreeMap<JobId, u32>,
    ended: BTreeMap<JobId, JobStatus>,
}

impl Witness {
    fn see(&mut self, action: &Action) {
        match action {
            Action::Run { job, turn, attempts } => {
                assert!(!self.ended.contains_key(job), "{job:?} runs after its end");
                assert!(*attempts <= settings().attempts_max);
                assert!(self.out.insert(*job, *turn).is_none(), "{job:?} runs twice");
                *self.begun.entry(*job).or_default() += 1;
            }
            Action::Return { job, .. } => assert!(self.out.remove(job).is_some(), "{job:?} did not run"),
            Action::Stop { job } => assert!(self.out.contains_key(job), "{job:?} did not run"),
            Action::Settle { job, status } => {
                self.out.remove(job);
                assert!(status.is_final());
                assert_eq!(self.ended.insert(*job, *status), None, "{job:?} ends twice");
            }
        }
    }
}

proptest! {
    #[test]
    fn every_life_keeps_the_promises(schedule in prop::collection::vec((0..15_u64, events()), 0..160)) {
        let (mut queue, mut again) = (JobQueue::new(settings()), JobQueue::new(settings()));
        let (mut now, mut witness) = (Instant::ZERO, Witness::default());
        for (seconds, event) in schedule {
            // A number is given to one job only.
            if let Event::Accepted { job, .. } = &event && witness.ended.contains_key(job) {
                continue;
            }
            now = now + Duration::from_secs(seconds);
            let (mut actions, mut repeated) = (Vec::new(), Vec::new());
            queue.handle(now, event.clone(), &mut actions);
            again.handle(now, event, &mut repeated);
            prop_assert_eq!(&actions, &repeated);
            actions.iter().for_each(|action| witness.see(action));
            prop_assert_eq!(queue.check(), Ok(()));
            prop_assert_eq!(queue.running() as usize, witness.out.len());
            let waits = (0..JOBS).map(JobId).filter(|job| queue.position(now, *job).is_some()).count();
            let crowded = queue.running() == settings().running_max;
            // Every line with room was offered it.
            prop_assert!(waits == 0 || crowded || queue.running() >= settings().running_max_per_model);
            prop_assert!(queue.next_timer().is_none_or(|due| due > now));
        }
    }

    #[test]
    fn every_job_ends_in_its_time(count in 1..12_u64, seconds in 1..100_u64) {
        let mut queue = JobQueue::new(settings());
        let mut witness = Witness::default();
        let mut actions = Vec::new();
        for number in 0..count {
            let (class, time_left) = (Priority::Batch, Duration::from_secs(seconds + number));
            let event = Event::Accepted { job: JobId(number), model: "m".into(), class, attempts: 0, time_left };
            queue.handle(Instant::ZERO, event, &mut actions);
        }
        while let Some(due) = queue.next_timer() {
            queue.handle(due, Event::Timer, &mut actions);
        }
        actions.iter().for_each(|action| witness.see(action));
        prop_assert!(queue.is_empty());
        prop_assert_eq!(witness.ended.len() as u64, count);
        prop_assert!(witness.ended.values().all(|status| *status == JobStatus::Expired));
    }
}

fn accept(queue: &mut JobQueue, now: Instant, number: u64, class: Priority) -> Vec<Action> {
    let mut actions = Vec::new();
    let time_left = Duration::from_secs(1000);
    let event = Event::Accepted { job: JobId(number), model: "m".into(), class, attempts: 0, time_left };
    queue.handle(now, event, &mut actions);
    actions
}

#[test]
fn the_better_class_goes_first_and_age_makes_classes_better() {
    let now = Instant::after(Duration::from_secs(5));
    let mut queue = JobQueue::new(Settings { running_max: 1, ..settings() });
    accept(&mut queue, now, 1, Priority::Standard);
    for (number, class) in [(2, Priority::Batch), (3, Priority::Standard), (4, Priority::Critical)] {
        assert_eq!(accept(&mut queue, now, number, class), []);
    }
    let places = [2, 3, 4].map(|number| queue.position(now, JobId(number)));
    assert_eq!(places, [Some(3), Some(2), Some(1)]);
    let later = now + Duration::from_secs(60);
    assert_eq!(queue.position(later, JobId(2)), Some(1), "old enough, it is the oldest of the best");
}

#[test]
fn a_try_that_counts_is_counted_and_the_last_one_fails() {
    let mut queue = JobQueue::new(settings());
    let mut now = Instant::ZERO;
    let mut actions = accept(&mut queue, now, 1, Priority::Standard);
    for attempt in 1..=settings().attempts_max {
        assert_eq!(actions, [Action::Run { job: JobId(1), turn: attempt, attempts: attempt }]);
        actions.clear();
        let end = End::Returned { after: Duration::from_secs(1), counts: true };
        queue.handle(now, Event::Ended { job: JobId(1), turn: attempt, end }, &mut actions);
        if attempt < settings().attempts_max {
            assert_eq!(actions, [Action::Return { job: JobId(1), attempts: attempt }]);
            actions.clear();
            now = now + Duration::from_secs(1);
            queue.handle(now, Event::Timer, &mut actions);
        }
    }
    assert_eq!(actions, [Action::Settle { job: JobId(1), status: JobStatus::Failed }]);
}

#[test]
fn a_drain_begins_nothing_and_keeps_everything() {
    let mut queue = JobQueue::new(settings());
    let mut actions = Vec::new();
    queue.handle(Instant::ZERO, Event::Drain, &mut actions);
    assert_eq!(accept(&mut queue, Instant::ZERO, 1, Priority::Critical), []);
    assert_eq!((queue.len(), queue.running()), (1, 0));
}
