//! The node agent over real engine processes: loading, serving, making room, ending.

use crate::support::{LONG, MIB, World, engines_of, eventually, own_program, settings};
use warmset_core::{
    Digest, MemoryVector, Priority,
    inference::{Reply, TokensOrText, Work},
    recording::Twin,
    worker::{CancelCause, EvictionReason, Fact, ModelState, Rejection, StartKind},
};
use warmset_engine::{
    measure::Measurement,
    protocol::{FinishReason, SyntheticSpec},
};

fn holding(host_bytes: u64) -> SyntheticSpec {
    SyntheticSpec { host_bytes, ..SyntheticSpec::default() }
}

/// Answers slowly enough to be caught at it.
fn slow() -> SyntheticSpec {
    SyntheticSpec { decode_seconds_per_token: 0.02, ..SyntheticSpec::default() }
}

#[tokio::test]
async fn a_model_is_loaded_serves_and_is_unloaded() {
    let mut world = World::new(settings(100 * MIB));
    let digest = world.add(1, &SyntheticSpec { load_extra_bytes: 20 * MIB, ..holding(30 * MIB) });
    world.agent.load(digest).await.unwrap();
    world.agent.load(digest).await.unwrap();
    let line = world.line(digest).await.unwrap();
    assert_eq!((line.state, line.private.get(0), line.measured), (ModelState::Ready, 30 * MIB, true));
    let answer = world.ask(digest, 6).answer().await;
    assert!(answer.is_done(), "{answer:?}");
    assert_eq!((answer.start, answer.words()), (Some(StartKind::Warm), 6));

    let inputs = vec![TokensOrText::Text("one two".into())];
    let embedded = world.ask_work(digest, Priority::Standard, Work::Embed { inputs }).answer().await;
    assert!(matches!(embedded.last, Some(Reply::Embedded { prompt_tokens: 2, .. })), "{embedded:?}");

    assert_eq!(world.engines().len(), 1);
    world.agent.unload(digest).await.unwrap();
    assert_eq!(world.state(digest).await, ModelState::Absent);
    assert!(world.engines().is_empty(), "the memory is back with the operating system");
    world.agent.unload(digest).await.unwrap();
    world.end().await;
}

#[tokio::test]
async fn unloading_a_model_that_callers_wait_for_returns_and_happens_after_them() {
    let mut world = World::new(settings(100 * MIB));
    let digest = world.add(1, &SyntheticSpec { load_seconds: 0.3, ..holding(MIB) });
    let asked = world.ask(digest, 3);
    world.agent.unload(digest).await.unwrap();
    assert!(asked.answer().await.is_done());
    world.agent.unload(digest).await.unwrap();
    assert_eq!(world.state(digest).await, ModelState::Absent);
    world.end().await;
}

#[tokio::test]
async fn a_cold_caller_hears_of_the_load_and_gets_its_answer() {
    // Long enough that a caller who is not run for a moment still hears of it twice.
    const LOAD_SECONDS: u32 = 2;
    let load_seconds = f64::from(LOAD_SECONDS);
    let mut world = World::new(settings(100 * MIB));
    let digest = world.add(1, &SyntheticSpec { load_seconds, ..holding(MIB) });
    let mut facts = world.agent.facts().unwrap();
    let answer = world.ask(digest, 3).answer().await;
    assert!(answer.is_done());
    assert_eq!(answer.start, Some(StartKind::Cold));
    let shares: Vec<f32> = answer
        .waited
        .iter()
        .filter_map(|reply| match reply {
            Reply::Loading { fraction } => Some(*fraction),
            _ => None,
        })
        .collect();
    assert!(shares.len() >= 2 && shares.is_sorted(), "{shares:?}");
    // Beside them, that it begins and that it has ended.
    assert!(shares.len() <= 10 * LOAD_SECONDS as usize + 2, "at most ten a second: {shares:?}");
    loop {
        if let (_, Fact::LoadFinished { timings, peak, .. }) = facts.recv().await.unwrap() {
            assert!(timings.load_seconds >= load_seconds, "{timings:?}");
            assert_eq!(peak.private_host_bytes, MIB);
            break;
        }
    }
    world.end().await;
}

#[tokio::test]
async fn the_idle_one_leaves_for_the_one_asked_for() {
    let mut world = World::new(settings(50 * MIB));
    let digests = [1, 2, 3].map(|number| world.add(number, &holding(30 * MIB)));
    let mut facts = world.agent.facts().unwrap();
    for round in 0..2 {
        let callers = digests.map(|digest| world.ask(digest, 4));
        for caller in callers {
            let answer = caller.answer().await;
            assert!(answer.is_done(), "{round}: {answer:?}");
            let held: u64 = world.agent.ledger().await.unwrap().iter().map(|line| line.private.get(0)).sum();
            assert!(held <= 50 * MIB, "{held}");
        }
    }
    let mut evicted = 0;
    while let Ok((_, fact)) = facts.try_recv() {
        evicted += u32::from(matches!(fact, Fact::EvictionFinished { reason: EvictionReason::Memory, .. }));
    }
    assert_eq!(evicted, 5, "six loads, one of which found the memory empty");
    assert_eq!(world.engines().len(), 1);
    let memory = world.agent.memory().await.unwrap();
    assert_eq!(memory.pools[0].resident, MemoryVector::host(30 * MIB));
    assert!(memory.overhead_bytes > 0);
    world.end().await;
}

#[tokio::test]
async fn waiting_callers_know_their_place() {
    let mut world = World::new(settings(50 * MIB));
    let digest = world.add_with(1, &slow(), |spec| spec.parallel = 1);
    world.agent.load(digest).await.unwrap();
    // It runs until everybody has been told: places are told now and then, not at once.
    let mut first = world.ask(digest, 100_000);
    first.first_text().await;
    let mut batch = world.ask_with(digest, Priority::Batch, 1);
    assert_eq!(batch.next().await, Some(Reply::Queued { position: 1 }));
    let mut standard = world.ask(digest, 1);
    assert_eq!(standard.next().await, Some(Reply::Queued { position: 1 }));
    assert_eq!(batch.next().await, Some(Reply::Queued { position: 2 }));
    world.agent.cancel(first.request, CancelCause::Disconnected);
    for caller in [first, standard, batch] {
        assert!(caller.answer().await.is_done());
    }
    world.end().await;
}

#[tokio::test]
async fn a_caller_that_leaves_frees_its_place() {
    let mut world = World::new(settings(50 * MIB));
    let digest = world.add_with(1, &slow(), |spec| spec.parallel = 1);
    let mut running = world.ask(digest, 100_000);
    running.first_text().await;
    let waiting = world.ask(digest, 1);
    world.agent.cancel(waiting.request, CancelCause::Disconnected);
    let answer = waiting.answer().await;
    assert!(answer.last.is_none() && answer.start.is_none(), "its channel is just closed: {answer:?}");

    world.agent.cancel(running.request, CancelCause::Disconnected);
    let mut finishes = Vec::new();
    while let Some(reply) = running.next().await {
        if let Reply::ChoiceDone { finish, .. } = reply {
            finishes.push(finish);
        }
    }
    assert_eq!(finishes, [FinishReason::Cancelled]);

    // One that only stops listening is noticed as well.
    let mut deaf = world.ask(digest, 100_000);
    deaf.first_text().await;
    drop(deaf);
    assert!(world.ask(digest, 1).answer().await.is_done(), "the sequence is free again");
    eventually("nothing runs", async || world.line(digest).await.unwrap().in_flight == 0).await;
    world.end().await;
}

#[tokio::test]
async fn a_load_nobody_waits_for_any_more_is_given_up() {
    let mut world = World::new(settings(50 * MIB));
    let digest = world.add(1, &SyntheticSpec { load_seconds: 3600.0, ..holding(MIB) });
    let caller = world.ask(digest, 1);
    eventually("it loads", async || world.state(digest).await == ModelState::Loading).await;
    world.agent.cancel(caller.request, CancelCause::Disconnected);
    eventually("it is gone", async || world.state(digest).await == ModelState::Absent).await;
    eventually("no engine is left", async || world.engines().is_empty()).await;
    world.end().await;
}

#[tokio::test]
async fn accelerators_are_given_out_and_counted() {
    let capacity = MemoryVector(vec![100 * MIB, 10 * MIB, 10 * MIB]);
    let mut world = World::new(warmset_core::worker::Settings { capacity, ..settings(0) });
    let single = |bytes| SyntheticSpec { accelerator_bytes: vec![bytes], ..holding(MIB) };
    let one = world.add(1, &single(8 * MIB));
    let two = world.add(2, &single(7 * MIB));
    for digest in [one, two] {
        assert!(world.ask(digest, 1).answer().await.is_done());
    }
    let ledger = world.agent.ledger().await.unwrap();
    let on = |device| ledger.iter().map(|line| line.private.get(device)).collect::<Vec<_>>();
    assert_eq!(on(0), [MIB, MIB]);
    let mut held = [on(1).iter().sum::<u64>(), on(2).iter().sum()];
    held.sort_unstable();
    assert_eq!(held, [7 * MIB, 8 * MIB], "each on a device of its own");
    let sharded = world.add(3, &SyntheticSpec { accelerator_bytes: vec![6 * MIB, 6 * MIB], ..holding(MIB) });
    assert!(world.ask(sharded, 1).answer().await.is_done());
    let line = world.line(sharded).await.unwrap();
    assert_eq!(line.private, MemoryVector(vec![MIB, 6 * MIB, 6 * MIB]));
    assert_eq!(world.engines().len(), 1, "both others had to leave");
    world.end().await;
}

#[tokio::test]
async fn a_spare_engine_serves_the_next_load_and_is_replaced() {
    let mut world = World::with(settings(50 * MIB), true);
    let digest = world.add(1, &holding(MIB));
    eventually("a spare waits", async || world.engines().len() == 1).await;
    let spare = world.engines();
    assert!(world.ask(digest, 1).answer().await.is_done());
    assert!(world.engines().contains(&spare[0]), "the load took the spare");
    eventually("the next spare waits", async || world.engines().len() == 2).await;
    world.agent.unload(digest).await.unwrap();
    assert!(!world.engines().contains(&spare[0]), "unloading is exiting");
    assert_eq!(world.engines().len(), 1);
    world.end().await;
}

#[tokio::test]
async fn a_recorded_run_replays_to_the_same_actions() {
    let mut world = World::with(settings(50 * MIB), true);
    let (same_in, same) = std::sync::mpsc::channel();
    // Nobody listens any more once the test has failed.
    world.agent.record(Box::new(Twin::new(move |same| same_in.send(same).unwrap_or(()))));
    let digests = [1, 2, 3].map(|number| world.add(number, &holding(20 * MIB)));
    for round in 0..20 {
        let callers = [world.ask(digests[round % 3], 3), world.ask(digests[(round * 2 + 1) % 3], 2)];
        if round % 4 == 3 {
            world.agent.cancel(callers[1].request, CancelCause::DeadlinePassed);
        }
        for caller in callers {
            caller.answer().await;
        }
    }
    world.agent.forget(digests[0]);
    world.end().await;
    let same: Vec<bool> = same.try_iter().collect();
    assert!(same.len() > 100, "{}", same.len());
    assert_eq!(same.iter().position(|same| !same), None);
}

#[tokio::test]
async fn two_hundred_lives_leave_nothing_behind_and_the_ledger_true() {
    let mut world = World::with(settings(500 * MIB), true);
    let spec = SyntheticSpec { allocate: true, load_extra_bytes: 4 * MIB, ..holding(12 * MIB) };
    let digest = world.add(1, &spec);
    let own = || Measurement::of(std::process::id(), &[]).unwrap().anonymous_bytes;
    let mut own_early = 0;
    for cycle in 0..200 {
        let answer = world.ask(digest, 2).answer().await;
        assert!(answer.is_done(), "{cycle}: {answer:?}");
        if cycle % 20 == 0 {
            // The engine is at rest: what the ledger says is what the operating system says.
            eventually("the ledger is within 1 % of the truth", async || {
                let booked = world.line(digest).await.unwrap().private.get(0);
                let figures = world.engines().into_iter().filter_map(|pid| Measurement::of(pid, &[]).ok());
                // The largest is the model, the other one the spare.
                let real = figures.map(|figures| figures.anonymous_bytes).max().unwrap();
                booked.abs_diff(real) * 100 < real
            })
            .await;
        }
        world.agent.unload(digest).await.unwrap();
        let ledger = world.agent.ledger().await.unwrap();
        assert!(ledger.iter().all(|line| line.private.is_zero()), "{cycle}: {ledger:?}");
        assert!(world.engines().len() <= 1, "{cycle}: only the spare");
        if cycle == 50 {
            own_early = own();
        }
    }
    let grown = own().saturating_sub(own_early);
    assert!(grown < 2 * MIB, "the worker itself grew by {grown} bytes over 150 cycles");
    world.end().await;
}

#[tokio::test]
async fn draining_finishes_what_runs_and_takes_nothing_new() {
    let mut world = World::with(settings(50 * MIB), true);
    let digest = world.add(1, &slow());
    let mut running = world.ask(digest, 10);
    running.first_text().await;
    let agent = world.agent.clone();
    let drained = tokio::spawn(async move { agent.drain().await });
    eventually("it drains", async || {
        let late = world.ask(digest, 1).answer().await;
        matches!(late.last, None | Some(Reply::Rejected(Rejection::Draining)))
    })
    .await;
    let answer = running.answer().await;
    assert!(answer.is_done());
    tokio::time::timeout(LONG, drained).await.unwrap().unwrap();
    tokio::time::timeout(LONG, world.agent.ended()).await.expect("who waits for its end hears of it");
    assert!(world.agent.facts().is_none());
    world.end().await;
}

#[tokio::test]
async fn an_unknown_or_forgotten_model_is_refused() {
    let mut world = World::new(settings(50 * MIB));
    let unknown = world.ask(Digest([9; 32]), 1).answer().await;
    assert_eq!(unknown.last, Some(Reply::Rejected(Rejection::UnknownModel)));
    assert!(world.agent.load(Digest([9; 32])).await.unwrap_err().permanent);
    let digest = world.add(1, &holding(MIB));
    world.agent.load(digest).await.unwrap();
    world.agent.forget(digest);
    let forgotten = world.ask(digest, 1).answer().await;
    assert_eq!(forgotten.last, Some(Reply::Rejected(Rejection::UnknownModel)));
    eventually("its engine is gone", async || world.engines().is_empty()).await;
    world.end().await;
}

#[tokio::test]
async fn engines_die_with_a_worker_that_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let program = own_program(directory.path());
    let mut parent = std::process::Command::new(env!("CARGO_BIN_EXE_warmset-worker-child"))
        .arg("parent")
        .args([program.as_path(), directory.path()])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = std::io::BufReader::new(parent.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    eventually("two models, a load and a spare", async || engines_of(&program).len() >= 3).await;
    parent.kill().unwrap();
    parent.wait().unwrap();
    eventually("nothing is left", async || engines_of(&program).is_empty()).await;
}

#[tokio::test]
async fn what_engines_write_can_be_read() {
    let world = World::new(settings(50 * MIB));
    let digest = world.add_failing(1, warmset_engine::protocol::SyntheticFailure::LoadFails);
    world.agent.load(digest).await.unwrap_err();
    eventually("its log names the reason", async || {
        let lines = world.agent.log_tail(&digest, 5).unwrap();
        lines.iter().any(|line| line.contains("says that its load fails"))
    })
    .await;
    assert_eq!(world.agent.log_tail(&Digest([9; 32]), 5).unwrap(), Vec::<String>::new());
    assert_eq!(world.agent.log_tail(&digest, 0).unwrap(), Vec::<String>::new());
    world.end().await;
}
