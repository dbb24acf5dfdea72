//! Engines that fail, crash, hang and eat: each hurts its own model only, and every caller hears exactly one last word.

use crate::support::{LONG, MIB, World, eventually, settings};
use std::time::Duration;
use tokio::sync::mpsc::error::TryRecvError;
use warmset_core::{
    inference::Reply,
    worker::{CancelCause, Fact, ModelState, Rejection, Settings},
};
use warmset_engine::protocol::{SyntheticFailure, SyntheticSpec};

fn failing(failure: SyntheticFailure) -> SyntheticSpec {
    SyntheticSpec { failure, ..SyntheticSpec::default() }
}

/// Whether the output had started when the engine was lost, and the reason.
fn lost(reply: Option<Reply>) -> (bool, String) {
    match reply {
        Some(Reply::Rejected(Rejection::EngineLost { message, output_started })) => (output_started, message),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_crash_ends_what_ran_and_the_queue_gets_a_new_engine() {
    let mut world = World::new(settings(100 * MIB));
    let digest = world.add_with(1, &failing(SyntheticFailure::GenerateCrashes), |spec| spec.parallel = 1);
    let neighbour = world.add(2, &SyntheticSpec { decode_seconds_per_token: 0.01, ..SyntheticSpec::default() });
    let mut bystander = world.ask(neighbour, 60);
    bystander.first_text().await;
    let victim = world.ask(digest, 10);
    let queued = world.ask(digest, 2);
    let victim = victim.answer().await;
    assert_eq!(victim.words(), 3, "what was said before the crash arrived");
    let (output_started, message) = lost(victim.last);
    assert!(output_started);
    assert!(message.contains("signal 6"), "{message}");
    let queued = queued.answer().await;
    assert!(queued.is_done(), "{queued:?}");
    assert!(bystander.answer().await.is_done(), "the neighbour noticed nothing");
    world.end().await;
}

#[tokio::test]
async fn a_caller_without_output_is_told_so_when_its_engine_dies() {
    let mut world = World::new(Settings { hang_deadline: Duration::from_millis(300), ..settings(100 * MIB) });
    let slow_prompt = SyntheticSpec { prefill_seconds_per_token: 3600.0, ..SyntheticSpec::default() };
    let digest = world.add(1, &slow_prompt);
    let answer = world.ask(digest, 1).answer().await;
    let (output_started, message) = lost(answer.last);
    assert!(!output_started);
    assert!(message.contains("signal 9"), "{message}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_lost_its_engine_may_come_again_at_once() {
    let mut world = World::new(Settings { backoff_first: Duration::ZERO, ..settings(100 * MIB) });
    // Long enough to be killed in. Whoever is taken back after the prompt was begun waits for its end.
    let slow_prompt = SyntheticSpec { prefill_seconds_per_token: 2.0, ..SyntheticSpec::default() };
    let digest = world.add(1, &slow_prompt);
    for round in 0..30 {
        let mut first = world.ask(digest, 1);
        while !matches!(first.next().await, Some(Reply::Started { .. })) {}
        for pid in world.engines() {
            assert!(std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
        }
        // As soon as can be: the answer is looked for without a pause.
        loop {
            match first.replies.try_recv() {
                Ok(Reply::Rejected(Rejection::EngineLost { output_started: false, .. })) => break,
                Ok(other) => panic!("{other:?}"),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
                Err(TryRecvError::Disconnected) => panic!("no last answer"),
            }
        }
        let mut again = world.ask_again(first.request, digest, 1);
        assert!(again.next().await.is_some(), "round {round}: it was dropped without a word");
        world.agent.cancel(again.request, CancelCause::Disconnected);
        while again.next().await.is_some() {}
    }
    world.end().await;
}

#[tokio::test]
async fn a_hanging_engine_is_killed_and_its_model_comes_back() {
    // Only the hang takes so long: an engine that is merely not run for a moment on a busy machine must not be killed for it.
    let mut world = World::new(Settings { hang_deadline: Duration::from_secs(4), ..settings(100 * MIB) });
    let digest = world.add(1, &failing(SyntheticFailure::GenerateHangs));
    let first = world.ask(digest, 10).answer().await;
    assert_eq!(first.words(), 3);
    assert!(lost(first.last).0);
    let second = world.ask(digest, 2).answer().await;
    assert!(second.is_done(), "{second:?}");
    assert_eq!(world.engines().len(), 1);
    world.end().await;
}

#[tokio::test]
async fn a_stop_that_is_ignored_ends_in_a_kill() {
    let mut world = World::new(Settings { stop_deadline: Duration::from_millis(200), ..settings(100 * MIB) });
    let digest = world.add(1, &failing(SyntheticFailure::IgnoresStop));
    assert!(world.ask(digest, 2).answer().await.is_done());
    let began = std::time::Instant::now();
    world.agent.unload(digest).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(200));
    assert!(world.engines().is_empty(), "its bytes are free only once it is gone");
    assert!(world.ask(digest, 2).answer().await.is_done(), "a new one serves");
    world.end().await;
}

#[tokio::test]
async fn an_engine_that_eats_memory_dies_alone() {
    let mut world = World::new(settings(400 * MIB));
    let digest = world.add_with(1, &failing(SyntheticFailure::EatsMemory), |spec| spec.memory_cap = Some(120 * MIB));
    let neighbour = world.add(2, &SyntheticSpec { decode_seconds_per_token: 0.01, ..SyntheticSpec::default() });
    let mut bystander = world.ask(neighbour, 60);
    bystander.first_text().await;
    let answer = world.ask(digest, 100_000).answer().await;
    let (_, message) = lost(answer.last);
    assert!(message.contains("memory cap") || message.contains("signal"), "{message}");
    assert!(bystander.answer().await.is_done());
    world.end().await;
}

#[tokio::test]
async fn a_failed_load_is_cached_and_a_broken_artifact_never_reaches_an_engine() {
    let mut world = World::new(settings(100 * MIB));
    let permanent = world.add_failing(1, SyntheticFailure::LoadFails);
    let passing = world.add_failing(2, SyntheticFailure::LoadFailsForNow);
    let spoilt = world.add_failing(3, SyntheticFailure::None);
    world.shelf.spoil(spoilt, "its bytes are not what its digest says", true);
    let mut facts = world.agent.facts().unwrap();
    for (digest, expected) in [(permanent, true), (passing, false), (spoilt, true)] {
        for _ in 0..2 {
            let answer = world.ask(digest, 1).answer().await;
            let Some(Reply::Rejected(Rejection::LoadFailed { error, .. })) = answer.last else { panic!("{answer:?}") };
            assert_eq!(error.permanent, expected, "{error:?}");
        }
        let error = world.agent.load(digest).await.unwrap_err();
        assert_eq!(error.permanent, expected, "{error:?}");
        assert_eq!(world.state(digest).await, ModelState::Failed);
    }
    let mut loads = 0;
    while let Ok((_, fact)) = facts.try_recv() {
        loads += u32::from(matches!(fact, Fact::LoadStarted { .. }));
    }
    assert_eq!(
        loads, 6,
        "one for the two callers of each, the second by the cached error, one for who wanted it loaded"
    );
    eventually("no engine is left", async || world.engines().is_empty()).await;
    world.end().await;
}

#[tokio::test]
async fn a_load_that_crashes_or_hangs_is_refused_and_leaves_nothing() {
    // Only the load that hangs takes so long: the two others start a process each, beside whatever else the machine does.
    let mut world = World::new(Settings { load_deadline: Duration::from_secs(6), ..settings(100 * MIB) });
    let crashing = world.add_failing(1, SyntheticFailure::LoadCrashes);
    let hanging = world.add_failing(2, SyntheticFailure::LoadHangs);
    let healthy = world.add_failing(3, SyntheticFailure::None);
    let callers = [(crashing, "signal 6"), (hanging, "deadline")].map(|(digest, why)| (world.ask(digest, 1), why));
    let fine = world.ask(healthy, 1);
    for (caller, why) in callers {
        let answer = caller.answer().await;
        let Some(Reply::Rejected(Rejection::LoadFailed { error, .. })) = answer.last else { panic!("{answer:?}") };
        assert!(error.message.contains(why), "{error:?}");
        assert!(!error.permanent);
    }
    assert!(fine.answer().await.is_done());
    eventually("only the healthy one is left", async || world.engines().len() == 1).await;
    world.end().await;
}

#[tokio::test]
async fn an_engine_killed_from_outside_costs_its_callers_one_word_each() {
    let mut world = World::new(settings(100 * MIB));
    let slow = SyntheticSpec { decode_seconds_per_token: 0.02, ..SyntheticSpec::default() };
    let digest = world.add_with(1, &slow, |spec| (spec.pin, spec.parallel) = (true, 3));
    let mut callers = Vec::new();
    for _ in 0..3 {
        let mut caller = world.ask(digest, 100_000);
        caller.first_text().await;
        callers.push(caller);
    }
    let pids = world.engines();
    assert_eq!(pids.len(), 1);
    let status = std::process::Command::new("kill").args(["-9", &pids[0].to_string()]).status().unwrap();
    assert!(status.success());
    for caller in callers {
        assert!(lost(caller.answer().await.last).0);
    }
    eventually("it is started again, as it is pinned", async || world.state(digest).await == ModelState::Ready).await;
    assert_ne!(world.engines(), pids);
    world.end().await;
}

#[tokio::test]
async fn a_program_that_cannot_start_fails_the_load_and_nothing_else() {
    let world = World::new(settings(100 * MIB));
    std::fs::remove_file(&world.program).unwrap();
    let digest = world.add_failing(1, SyntheticFailure::None);
    let error = tokio::time::timeout(LONG, world.agent.load(digest)).await.unwrap().unwrap_err();
    assert!(error.message.contains("cannot start an engine process"), "{error:?}");
    assert!(!error.permanent);
    eventually("its bytes are free", async || {
        world.agent.ledger().await.unwrap().iter().all(|line| line.private.is_zero())
    })
    .await;
    world.end().await;
}
