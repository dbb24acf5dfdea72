//! Real engine processes with the synthetic engine: how they start, talk, fail and end.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kv;
mod support;

use std::time::{Duration, Instant};
use support::{LONG, World, job, load_request};
use warmset_core::worker::Exit;
use warmset_engine::{
    measure::{Measurement, overhead},
    process::{LOG_BYTES_MAX, Launcher, MemoryLimit, SpawnError, SpawnOptions},
    protocol::{FinishReason, FromEngine, KvGrant, SyntheticFailure, SyntheticSpec, ToEngine},
};

fn failing(failure: SyntheticFailure) -> SyntheticSpec {
    SyntheticSpec { failure, ..SyntheticSpec::default() }
}

#[tokio::test]
async fn a_process_loads_answers_and_stops() {
    let world = World::new();
    let mut process = world.loaded(&SyntheticSpec { load_seconds: 0.25, ..SyntheticSpec::default() }).await;
    let messages = world.generate(&mut process, 1, job("one two three", 5)).await;
    let text: String = messages
        .iter()
        .filter_map(|message| match message {
            FromEngine::Delta { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(text.split_whitespace().count(), 5);
    let finish = FinishReason::Length;
    assert!(messages.contains(&FromEngine::ChoiceDone { request: 1, choice: 0, finish }), "{messages:?}");
    process.send(ToEngine::Stop);
    assert_eq!(process.exited().await, Exit::Stopped);
    assert_eq!(process.receive().await.unwrap(), None);
}

#[tokio::test]
async fn threads_are_confirmed_and_none_pauses() {
    let world = World::new();
    let mut process = world.loaded(&SyntheticSpec::default()).await;
    process.send(ToEngine::SetThreads { threads: 0 });
    assert_eq!(process.receive().await.unwrap(), Some(FromEngine::ThreadsHeld { threads: 0 }));
    process.send(ToEngine::Generate { request: 1, job: Box::new(job("a b", 3)) });
    assert_eq!(
        process.receive().await.unwrap(),
        Some(FromEngine::Prepared { request: 1, prompt_tokens: 2, device_tokens: 0, keys: vec![] })
    );
    process.send(ToEngine::Grant { request: 1, source: KvGrant::Recompute { known: 0 } });
    // Nothing comes before threads do: the next message of the stream is their confirmation.
    process.send(ToEngine::SetThreads { threads: 1 });
    assert_eq!(process.receive().await.unwrap(), Some(FromEngine::ThreadsHeld { threads: 1 }));
    let next = process.receive().await.unwrap();
    assert!(matches!(next, Some(FromEngine::Beat | FromEngine::Delta { .. })), "{next:?}");
}

#[tokio::test]
async fn a_load_that_fails_says_so_and_ends() {
    let world = World::new();
    for (failure, permanent) in [(SyntheticFailure::LoadFails, true), (SyntheticFailure::LoadFailsForNow, false)] {
        let mut process = world.spawned().await;
        process.send(ToEngine::Load(load_request(world.model(&failing(failure)))));
        let message = process.receive().await.unwrap();
        assert!(matches!(&message, Some(FromEngine::LoadFailed { permanent: found, .. }) if *found == permanent));
        assert_eq!(process.exited().await, Exit::Crashed("exit code 3".into()));
    }
}

#[tokio::test]
async fn a_crash_while_loading_is_named() {
    let world = World::new();
    let mut process = world.spawned().await;
    process.send(ToEngine::Load(load_request(world.model(&failing(SyntheticFailure::LoadCrashes)))));
    assert_eq!(process.receive().await.unwrap(), None);
    assert_eq!(process.exited().await, Exit::Crashed("signal 6 (aborted)".into()));
}

#[tokio::test]
async fn a_load_that_hangs_still_stops_at_once_and_can_be_killed() {
    let world = World::new();
    for kill in [false, true] {
        let process = world.spawned().await;
        process.send(ToEngine::Load(load_request(world.model(&failing(SyntheticFailure::LoadHangs)))));
        if kill {
            process.kill();
            assert_eq!(process.exited().await, Exit::Crashed("signal 9 (killed) from the worker".into()));
        } else {
            process.send(ToEngine::Stop);
            assert_eq!(process.exited().await, Exit::Stopped);
        }
    }
}

#[tokio::test]
async fn a_crash_comes_after_what_was_said_before_it() {
    let world = World::new();
    let mut process = world.loaded(&failing(SyntheticFailure::GenerateCrashes)).await;
    let messages = world.generate(&mut process, 1, job("a", 10)).await;
    let deltas = messages.iter().filter(|message| matches!(message, FromEngine::Delta { .. })).count();
    assert_eq!(deltas, 3);
    assert!(!messages.iter().any(|message| matches!(message, FromEngine::Done { .. })), "{messages:?}");
    assert_eq!(process.exited().await, Exit::Crashed("signal 6 (aborted)".into()));
}

#[tokio::test]
async fn a_hang_is_silent_until_it_is_killed() {
    let world = World::new();
    let mut process = world.loaded(&failing(SyntheticFailure::GenerateHangs)).await;
    process.send(ToEngine::Generate { request: 1, job: Box::new(job("a", 10)) });
    process.send(ToEngine::Grant { request: 1, source: KvGrant::Recompute { known: 0 } });
    let mut deltas = 0;
    while deltas < 3 {
        deltas += u32::from(matches!(process.receive().await.unwrap(), Some(FromEngine::Delta { .. })));
    }
    assert!(tokio::time::timeout(Duration::from_millis(50), process.receive()).await.is_err());
    process.kill();
    assert_eq!(process.exited().await, Exit::Crashed("signal 9 (killed) from the worker".into()));
}

#[tokio::test]
async fn an_ignored_stop_needs_a_kill() {
    let world = World::new();
    let mut process = world.loaded(&failing(SyntheticFailure::IgnoresStop)).await;
    process.send(ToEngine::Stop);
    process.send(ToEngine::SetThreads { threads: 2 });
    // The answer to a later message proves that the stop was read and ignored.
    assert_eq!(process.receive().await.unwrap(), Some(FromEngine::ThreadsHeld { threads: 2 }));
    assert!(!process.is_gone());
    process.kill();
    assert_eq!(process.exited().await, Exit::Crashed("signal 9 (killed) from the worker".into()));
}

#[tokio::test]
async fn an_engine_over_its_cap_dies_alone() {
    let world = World::new();
    let mut neighbour = world.loaded(&SyntheticSpec::default()).await;
    let mut eater = world.spawned().await;
    let limit = eater.limit_memory(160 << 20).unwrap();
    eater.send(ToEngine::Load(load_request(world.model(&failing(SyntheticFailure::EatsMemory)))));
    world.until_loaded(&mut eater).await;
    world.generate(&mut eater, 1, job("a", 1)).await;
    let exit = eater.exited().await;
    if limit == MemoryLimit::DataSegment {
        assert_eq!(exit, Exit::Crashed("signal 6 (aborted)".into()));
    } else {
        assert_eq!(exit, Exit::OverCap(160 << 20), "{limit:?}");
    }
    assert!(world.generate(&mut neighbour, 2, job("a", 1)).await.len() > 1);
    assert_eq!(world.groups_left(), 0, "its cgroup is gone");
}

#[tokio::test]
async fn bytes_are_measured_by_kind() {
    let world = World::new();
    let bytes = 48 << 20;
    let spec =
        SyntheticSpec { host_bytes: bytes, load_extra_bytes: 64 << 20, allocate: true, ..SyntheticSpec::default() };
    let empty = world.spawned().await;
    let base = Measurement::of(empty.pid(), &[]).unwrap();
    let process = world.loaded(&spec).await;
    let measured = Measurement::of(process.pid(), &[]).unwrap();
    let grown = measured.anonymous_bytes - base.anonymous_bytes;
    assert!(grown.abs_diff(bytes) < bytes / 20, "grew by {grown}");
    let peak = measured.peak(&[]);
    assert!(peak.private_host_bytes.abs_diff(measured.anonymous_bytes + (64 << 20)) < 8 << 20, "{peak:?} {measured:?}");
    assert!(measured.other_file_bytes > 0);
    let all = overhead(std::process::id(), &[empty.pid()]).unwrap();
    assert!(all > base.anonymous_bytes);
}

#[tokio::test]
async fn an_engine_has_no_network_no_secrets_and_no_foreign_descriptors() {
    let world = World::new();
    let process = world.loaded(&SyntheticSpec::default()).await;
    let proc = |file: &str| format!("/proc/{}/{file}", process.pid());
    let environment = std::fs::read(proc("environ")).unwrap();
    let names: Vec<_> = environment
        .split(|byte| *byte == 0)
        .filter_map(|entry| Some(String::from_utf8_lossy(entry).split_once('=')?.0.to_owned()))
        .collect();
    assert!(names.contains(&"OMP_WAIT_POLICY".to_owned()), "{names:?}");
    assert!(
        names
            .iter()
            .all(|name| ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LD_LIBRARY_PATH", "RUST_LOG"].contains(&name.as_str()))
    );
    assert_eq!(std::fs::read_link(proc("cwd")).unwrap(), std::path::Path::new("/"));
    let limits = std::fs::read_to_string(proc("limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    let open: Vec<_> = std::fs::read_dir(proc("fd"))
        .unwrap()
        .map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap().display().to_string())
        .collect();
    assert!(open.contains(&"/dev/null".to_owned()), "{open:?}");
    let others = open.iter().filter(|to| !to.starts_with("pipe:") && !to.starts_with("socket:") && *to != "/dev/null");
    assert_eq!(others.count(), 0, "{open:?}");
    if world.may_leave_network() {
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        assert_ne!(std::fs::read_link(proc("ns/net")).unwrap(), own);
    }
}

#[tokio::test]
async fn dropping_a_process_kills_and_reaps_it() {
    let world = World::new();
    let process = world.loaded(&failing(SyntheticFailure::IgnoresStop)).await;
    let (pid, exited) = (process.pid(), process.exited());
    drop(process);
    assert_eq!(exited.await, Exit::Crashed("signal 9 (killed) from the worker".into()));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "neither running nor a zombie");
}

#[tokio::test]
async fn a_program_that_is_no_engine_is_an_error_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let spawn = |program: &str, hello_deadline: Duration| {
        let launcher = Launcher::new(program.into()).unwrap();
        let options = SpawnOptions { log: directory.path().join("log"), hello_deadline };
        async move { launcher.spawn(options).await.unwrap_err() }
    };
    assert!(matches!(spawn("/nonexistent/program", LONG).await, SpawnError::System(_)));
    assert!(matches!(spawn("/bin/false", LONG).await, SpawnError::Ended(_)));
    let silent = directory.path().join("silent");
    std::fs::write(&silent, "#!/bin/sh\nexec sleep 3600\n").unwrap();
    std::fs::set_permissions(&silent, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let began = Instant::now();
    let error = spawn(silent.to_str().unwrap(), Duration::from_millis(200)).await;
    assert!(matches!(error, SpawnError::Deadline(_)), "{error}");
    assert!(began.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn what_an_engine_writes_is_kept_in_bounds() {
    let world = World::new();
    let process = world.loaded(&failing(SyntheticFailure::None)).await;
    let log = world.directory.path().join("model.log");
    process.log_to(log.clone());
    drop(process);
    let talkative = world.directory.path().join("talkative");
    let script = "#!/bin/sh\nyes 'a line' | head -c 3000000\necho the end\nexit 9\n";
    std::fs::write(&talkative, script).unwrap();
    std::fs::set_permissions(&talkative, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let launcher = Launcher::new(talkative).unwrap();
    let error = launcher.spawn(SpawnOptions { log: log.clone(), hello_deadline: LONG }).await.unwrap_err();
    assert!(matches!(&error, SpawnError::Ended(reason) if reason == "exit code 9"), "{error}");
    // The pipe is read to its end by another task.
    let deadline = Instant::now() + LONG;
    while !std::fs::read(&log).unwrap().ends_with(b"the end\n") {
        assert!(Instant::now() < deadline, "the last line is missing");
        tokio::task::yield_now().await;
    }
    for path in warmset_engine::process::log_files(&log) {
        assert!(std::fs::metadata(path).unwrap().len() <= LOG_BYTES_MAX);
    }
}

#[test]
fn engines_die_with_a_parent_that_is_killed() {
    support::killed_parent_leaves_nothing();
}
