//! Many requests at once, and what is left after them: nothing.

use crate::support::*;
use serde_json::json;
use std::sync::Arc;
use tokio::{io::AsyncWriteExt, sync::mpsc};
use warmset_core::{
    Priority, TenantId,
    gateway::Settings,
    inference::{FinishReason, GenerateJob, Output, Prompt, Reply, Sampling, Work},
    recording::Twin,
    worker::{Rejection, StartKind},
};
use warmset_gateway::{
    frontend::{Frontend, FrontendConfig, Submission, Ticket, Update},
    metrics::Metrics,
};

fn submission(number: u64) -> Submission {
    let job = GenerateJob {
        prompt: Prompt::Text { text: "x".into() },
        choices: 1,
        max_tokens: None,
        sampling: Sampling::default(),
        stop: Vec::new(),
        ignore_end: false,
        stream: true,
        output: Output::default(),
        kv_domain: None,
    };
    Submission {
        tenant: TenantId::anonymous(),
        digest: MODEL,
        class: Priority::ALL[number as usize % 3],
        patience: LONG,
        counted_as: None,
        work: Work::Generate(Box::new(job)),
    }
}

/// A worker that treats every request differently, by its number, and always lets go in the end.
fn spawn_moody_worker(mut worker: FakeWorker) {
    tokio::spawn(async move {
        while let Some(assignment) = worker.assignments.recv().await {
            let replies = assignment.replies;
            let lost = |output_started| Reply::Rejected(Rejection::EngineLost { message: "x".into(), output_started });
            // Callers that have gone do not read; the worker does not care.
            let send = |reply| {
                let _ = replies.send(reply);
            };
            match assignment.request.0 % 7 {
                0 => {}
                1 => send(lost(false)),
                2 => {
                    send(started(StartKind::Cold));
                    send(delta(0, "x"));
                    send(lost(true));
                }
                3 => send(Reply::Rejected(Rejection::UnknownModel)),
                4 => {
                    send(started(StartKind::Warm));
                    tokio::task::yield_now().await;
                    send(Reply::ChoiceDone { choice: 0, finish: FinishReason::Cancelled });
                    send(done(1, 0, 0));
                }
                _ => {
                    send(started(StartKind::Warm));
                    send(delta(0, "x"));
                    send(choice_done(0));
                    send(done(1, 1, 0));
                }
            }
        }
    });
}

async fn settled(frontend: &Frontend) {
    within(async {
        while frontend.requests().await != 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    frontend.check().await.unwrap();
    let figures = frontend.figures(LONG).await.unwrap();
    assert_eq!(figures.queue_depth, [0; 3]);
    assert!(figures.running.iter().all(|(_, count)| *count == 0), "{figures:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_aborted_requests_leave_nothing_behind_and_replay() {
    let frontend = Frontend::start(FrontendConfig::default(), Arc::new(Metrics::default()));
    let (same_in, same) = std::sync::mpsc::channel();
    // Nobody listens any more once the test has failed.
    frontend.record(Box::new(Twin::new(move |same| same_in.send(same).unwrap_or(()))));
    let (link, worker) = FakeWorker::new();
    spawn_moody_worker(worker);
    frontend.worker_up(WORKER, link);
    frontend.publish(vec![entry(route())], vec![]);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..10_000_u64 {
        let ticket: Ticket = frontend.submit(submission(number));
        tasks.spawn(async move {
            let mut ticket = ticket;
            // Gone at once, after a while, or after some news.
            for _ in 0..number % 4 {
                tokio::task::yield_now().await;
            }
            for _ in 0..number % 3 {
                if ticket.next().await.is_last() {
                    break;
                }
            }
        });
        if number % 100 == 0 {
            frontend.check().await.unwrap();
        }
    }
    while tasks.join_next().await.is_some() {}
    settled(&frontend).await;
    let same: Vec<bool> = same.try_iter().collect();
    // Whoever is gone before its turn is one event; how many are is the scheduler's.
    assert!(same.len() >= 10_000, "{}", same.len());
    assert_eq!(same.iter().position(|same| !same), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_gets_exactly_one_last_word() {
    let settings = Settings { queue_limit: 64, ..Settings::default() };
    let config = FrontendConfig { settings, ..FrontendConfig::default() };
    let frontend = Frontend::start(config, Arc::new(Metrics::default()));
    let (link, worker) = FakeWorker::new();
    spawn_moody_worker(worker);
    frontend.worker_up(WORKER, link);
    frontend.publish(vec![entry(route())], vec![]);
    let (sender, mut words) = mpsc::unbounded_channel();
    for number in 0..2_000 {
        let mut ticket = frontend.submit(submission(number));
        let sender = sender.clone();
        tokio::spawn(async move {
            let mut last = ticket.next().await;
            while !last.is_last() {
                last = ticket.next().await;
            }
            sender.send(last).unwrap();
            assert_eq!(ticket.next().await, Update::Lost, "nothing follows the last word");
        });
    }
    drop(sender);
    let mut count = 0;
    while let Some(word) = within(words.recv()).await {
        assert!(word != Update::Lost, "a request without a word");
        count += 1;
    }
    assert_eq!(count, 2_000);
    settled(&frontend).await;
}

/// Prints what the gateway adds to a warm request; asserts only that all are answered, since time depends on the
/// machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warm_requests_one_after_another() {
    let harness = Harness::new().await;
    let Harness { mut worker, address, frontend, .. } = harness;
    tokio::spawn(async move {
        while let Some(assignment) = worker.assignments.recv().await {
            answer(&assignment, "hello");
        }
    });
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = post("/v1/chat/completions", &chat(json!({})).to_string());
    let mut microseconds = Vec::new();
    for _ in 0..500 {
        let begun = std::time::Instant::now();
        stream.write_all(&request).await.unwrap();
        assert_eq!(read_response(&mut stream).await.status, 200);
        microseconds.push(begun.elapsed().as_micros());
    }
    microseconds.sort_unstable();
    println!("through the gateway: p50 {} us, p99 {} us", microseconds[250], microseconds[495]);
    settled(&frontend).await;
}
