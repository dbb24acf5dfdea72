//! Requests that give way in the middle and go on later, over real processes whose states show when they are not what
//! they must be.

use super::support::{Answer, Caller, LONG, MIB, World, eventually, settings};
use std::time::Duration;
use warmset_core::{
    Digest, Priority,
    inference::{GenerateJob, Prompt, Reply, TokensOrText, Usage, Work},
    worker::{CancelCause, Fact, ParkingLimits, Settings},
};
use warmset_engine::protocol::SyntheticSpec;

const TOKENS: u32 = 250;

fn spec() -> SyntheticSpec {
    SyntheticSpec {
        host_bytes: 60 * MIB,
        kv_bytes_per_token: 256,
        decode_seconds_per_token: 0.003,
        ..SyntheticSpec::default()
    }
}

/// Says its tokens so slowly that it is in the middle of them for seconds, whatever else the machine does.
fn slow() -> SyntheticSpec {
    SyntheticSpec { decode_seconds_per_token: 0.02, ..spec() }
}

fn job() -> GenerateJob {
    let words: String = (0..150).map(|word| format!("w{word} ")).collect();
    GenerateJob { stream: true, ignore_end: true, ..GenerateJob::greedy(Prompt::Text { text: words }, TOKENS) }
}

fn ask(world: &mut World, digest: Digest, class: Priority, job: GenerateJob) -> Caller {
    world.ask_work(digest, class, Work::Generate(Box::new(job)))
}

/// What is told of a whole request that began to be read elsewhere.
async fn rest(begun: String, caller: Caller) -> Answer {
    let mut answer = caller.answer().await;
    answer.text.insert_str(0, &begun);
    answer
}

fn usage(answer: &Answer) -> Usage {
    match &answer.last {
        Some(Reply::Done { usage, .. }) => *usage,
        other => panic!("{other:?}"),
    }
}

/// What it says does not depend on how fast it says it.
async fn undisturbed() -> Answer {
    let mut world = World::new(settings(100 * MIB));
    let digest = world.add(1, &spec());
    let answer = ask(&mut world, digest, Priority::Batch, job()).answer().await;
    world.end().await;
    answer
}

async fn parked_bytes(world: &World) -> u64 {
    world.agent.memory().await.unwrap().pools.iter().map(|pool| pool.parked.total()).sum()
}

#[tokio::test]
async fn a_batch_that_is_parked_three_times_says_what_it_says_undisturbed() {
    let alone = undisturbed().await;
    let mut world = World::new(settings(100 * MIB));
    let (first, second) = (world.add(1, &slow()), world.add(2, &spec()));
    let mut facts = world.agent.facts().unwrap();
    let mut batch = ask(&mut world, first, Priority::Batch, job());
    let mut begun = String::new();
    for _ in 0..3 {
        for _ in 0..20 {
            begun.push_str(&text_of(&mut batch).await);
        }
        let critical = world.ask_with(second, Priority::Critical, 3).answer().await;
        assert!(critical.is_done(), "{critical:?}");
    }
    let answer = rest(begun, batch).await;
    assert_eq!(answer.text, alone.text);
    assert_eq!(usage(&answer), usage(&alone));
    assert_eq!(parked_bytes(&world).await, 0);
    let (mut parked, mut resumed) = (0, 0);
    while let Ok((_, fact)) = facts.try_recv() {
        parked += usize::from(matches!(fact, Fact::Parked { bytes: 1.., .. }));
        resumed += usize::from(matches!(fact, Fact::Resumed { .. }));
    }
    assert_eq!((parked, resumed), (3, 3));
    world.end().await;
}

/// The next piece of text, whatever else is told on the way.
async fn text_of(caller: &mut Caller) -> String {
    loop {
        match caller.next().await {
            Some(Reply::Delta { text, .. }) => return text,
            Some(
                Reply::Queued { .. } | Reply::Loading { .. } | Reply::Started { .. } | Reply::Parked | Reply::Resumed,
            ) => {}
            other => panic!("{other:?}"),
        }
    }
}

async fn until_parked(caller: &mut Caller) -> String {
    let mut begun = String::new();
    loop {
        match caller.next().await {
            Some(Reply::Delta { text, .. }) => begun.push_str(&text),
            Some(Reply::Parked) => return begun,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn an_only_sequence_goes_to_a_higher_class_and_an_engine_that_dies_meanwhile_loses_nobody_parked() {
    let alone = undisturbed().await;
    for kills in [false, true] {
        let mut world = World::new(settings(100 * MIB));
        let digest = world.add_with(1, &slow(), |spec| spec.parallel = 1);
        let mut batch = ask(&mut world, digest, Priority::Batch, job());
        let mut begun = text_of(&mut batch).await;
        // One that is to be killed in the middle has no end before that.
        let mut critical = world.ask_with(digest, Priority::Critical, if kills { 4000 } else { 40 });
        begun.push_str(&until_parked(&mut batch).await);
        text_of(&mut critical).await;
        if kills {
            let (_, pid) = world.agent.engines().await.unwrap()[0];
            rustix::process::kill_process(pid_of(pid), rustix::process::Signal::KILL).unwrap();
        }
        assert_eq!(critical.answer().await.is_done(), !kills);
        let answer = rest(begun, batch).await;
        assert_eq!((answer.text.as_str(), usage(&answer)), (alone.text.as_str(), usage(&alone)), "killed: {kills}");
        assert_eq!(answer.resumed, 1);
        world.end().await;
    }
}

fn pid_of(pid: u32) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

#[tokio::test]
async fn a_caller_that_leaves_while_parked_takes_its_state_along() {
    let mut world = World::new(settings(100 * MIB));
    let (first, second) = (world.add(1, &slow()), world.add(2, &slow()));
    let mut batch = ask(&mut world, first, Priority::Batch, job());
    text_of(&mut batch).await;
    // As long as this one runs, nobody who is parked comes back.
    let keeping = world.ask_with(second, Priority::Critical, 4000);
    until_parked(&mut batch).await;
    assert!(parked_bytes(&world).await > 0);
    world.agent.cancel(batch.request, CancelCause::Disconnected);
    eventually("its state is gone", async || parked_bytes(&world).await == 0).await;
    let answer = batch.answer().await;
    assert!(answer.last.is_none(), "{answer:?}");
    assert!(world.ask_with(second, Priority::Critical, 3).answer().await.is_done());
    world.agent.cancel(keeping.request, CancelCause::Disconnected);
    assert!(keeping.answer().await.is_done());
    world.end().await;
}

#[tokio::test]
async fn what_cannot_be_parked_runs_on_and_ends() {
    let several = GenerateJob { choices: 2, ..job() };
    // Whatever runs does so for a second: the critical one comes in the middle of it.
    let embedding = Work::Embed { inputs: vec![TokensOrText::Text("a b c ".repeat(150))] };
    let one = Work::Generate(Box::new(job()));
    let off = Settings { parking: ParkingLimits::OFF, ..settings(100 * MIB) };
    let tight = Settings { parking: ParkingLimits { bytes_max: 1, ..ParkingLimits::default() }, ..settings(100 * MIB) };
    let cases = [
        (settings(100 * MIB), Work::Generate(Box::new(several))),
        (settings(100 * MIB), embedding),
        (off, one.clone()),
        (tight, one),
    ];
    for (settings, work) in cases {
        let mut world = World::new(settings);
        let slow = SyntheticSpec { prefill_seconds_per_token: 0.002, ..spec() };
        let (first, second) = (world.add(1, &slow), world.add(2, &spec()));
        let mut batch = world.ask_work(first, Priority::Batch, work);
        // Its own word that it runs cannot be missed, as a short time in the ledger can.
        while !matches!(batch.next().await.expect("it runs"), Reply::Started { .. }) {}
        let critical = world.ask_with(second, Priority::Critical, 3);
        let batch = batch.answer().await;
        assert!(matches!(batch.last, Some(Reply::Done { .. } | Reply::Embedded { .. })), "{batch:?}");
        assert_eq!(batch.parked, 0);
        assert!(critical.answer().await.is_done());
        world.end().await;
    }
}

#[tokio::test]
async fn many_that_give_way_again_and_again_all_end() {
    let bounds = ParkingLimits { times_max: 3, time_max: Duration::from_secs(2), ..ParkingLimits::default() };
    let mut world = World::new(Settings { parking: bounds, ..settings(100 * MIB) });
    let models: Vec<Digest> = (1..=3).map(|number| world.add(number, &spec())).collect();
    let classes = [Priority::Batch, Priority::Standard, Priority::Critical, Priority::Batch];
    let callers: Vec<Caller> = (0..24)
        .map(|number: usize| {
            let short = GenerateJob { max_tokens: Some(20 + 7 * (number as u32 % 5)), ..job() };
            ask(&mut world, models[number * 7 % 3], classes[number % 4], short)
        })
        .collect();
    for caller in callers {
        let answer = tokio::time::timeout(LONG, caller.answer()).await.unwrap();
        assert!(answer.is_done(), "{answer:?}");
        assert_eq!(answer.parked, answer.resumed);
    }
    world.end().await;
}
