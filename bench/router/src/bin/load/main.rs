//! Asks a router: in a closed loop over so many connections, or in an open loop of Poisson arrivals whose times are
//! counted from when they were due. One JSON document at the end.

mod figures;
mod play;

use clap::Parser;
use figures::{Figures, process_cpu_microseconds, process_resident_bytes};
use play::{Bodies, Target};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::Instant;

#[derive(Parser)]
struct Arguments {
    /// One or more routers: connections of a closed loop are shared out among them, requests of an open one drawn.
    #[arg(long = "address", value_delimiter = ',', required = true)]
    addresses: Vec<String>,
    /// Closed loop: requests at a time.
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Open loop: requests a second.
    #[arg(long)]
    per_second: Option<f64>,
    /// What is measured, after what is not.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    #[arg(long, default_value_t = 1.0)]
    warm_up_seconds: f64,
    /// The closed loop ends after so many requests.
    #[arg(long)]
    requests: Option<u64>,
    /// Open loop: answers that take longer than this after the end count as unfinished.
    #[arg(long, default_value_t = 20.0)]
    patience_seconds: f64,
    /// System prompts; the first one's share of the requests.
    #[arg(long, default_value_t = 1)]
    tenants: usize,
    #[arg(long, default_value_t = 0.0)]
    hot_share: f64,
    #[arg(long, default_value_t = 400)]
    prompt_bytes: usize,
    #[arg(long, default_value_t = 32)]
    question_bytes: usize,
    /// Every prompt differs from its first byte on.
    #[arg(long)]
    distinct: bool,
    #[arg(long)]
    stream: bool,
    /// Output tokens: so many, or drawn from an exponential distribution with this mean.
    #[arg(long, default_value_t = 50)]
    output_tokens: u32,
    #[arg(long)]
    exponential_output: bool,
    /// Events that a whole stream has, where that is the same for all.
    #[arg(long)]
    events: Option<u32>,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Streams whose first event came within this are counted.
    #[arg(long)]
    target_microseconds: Option<u32>,
    /// Its processor time and memory are measured.
    #[arg(long)]
    process: Option<u32>,
}

struct Times {
    start: Instant,
    end: Instant,
}

#[tokio::main(worker_threads = 1)]
async fn main() {
    let arguments = Arc::new(Arguments::parse());
    let target = Arc::new(Target {
        addresses: arguments.addresses.clone(),
        stream: arguments.stream,
        events: arguments.events,
        bodies: Bodies::new(&arguments),
    });
    let total = Arc::new(Mutex::new(Figures::default()));
    let start = Instant::now() + Duration::from_secs_f64(arguments.warm_up_seconds);
    let times = Times { start, end: start + Duration::from_secs_f64(arguments.seconds) };
    let process = arguments.process;
    let (watch_start, watch_end) = (times.start, times.end);
    let watched = tokio::spawn(async move {
        tokio::time::sleep_until(watch_start).await;
        let before = process_cpu_microseconds(process);
        tokio::time::sleep_until(watch_end).await;
        process_cpu_microseconds(process) - before
    });
    match arguments.per_second {
        Some(per_second) => open_loop(&arguments, &target, &times, per_second, &total).await,
        None => closed_loop(&arguments, &target, &times, &total).await,
    }
    let cpu = if arguments.requests.is_some() { None } else { watched.await.ok() };
    let figures = std::mem::take(&mut *total.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    println!(
        "{}",
        figures.document(arguments.seconds, cpu, process_resident_bytes(process), arguments.target_microseconds)
    );
}

async fn closed_loop(arguments: &Arc<Arguments>, target: &Arc<Target>, times: &Times, total: &Arc<Mutex<Figures>>) {
    let mut tasks = Vec::new();
    let left = Arc::new(std::sync::atomic::AtomicU64::new(arguments.requests.unwrap_or(u64::MAX)));
    let take = |left: &std::sync::atomic::AtomicU64| {
        left.fetch_update(std::sync::atomic::Ordering::Relaxed, std::sync::atomic::Ordering::Relaxed, |left| {
            left.checked_sub(1)
        })
        .is_ok()
    };
    for number in 0..arguments.connections as u64 {
        let (target, total, left) = (target.clone(), total.clone(), left.clone());
        let (start, end) = (times.start, if arguments.requests.is_some() { None } else { Some(times.end) });
        let mut random = fastrand::Rng::with_seed(arguments.seed.wrapping_mul(7919) ^ number);
        tasks.push(tokio::spawn(async move {
            let (mut connection, mut figures) = (None, Figures::default());
            let router = number as usize % target.addresses.len();
            while end.is_none_or(|end| Instant::now() < end) && take(&left) {
                let due = Instant::now();
                let asked = play::ask(&target, router, &mut connection, &mut random, due).await;
                // Those that are under way when the time is over are part of the load, as those at its start.
                if end.is_none() || due >= start {
                    figures.add(asked);
                }
            }
            total.lock().unwrap_or_else(std::sync::PoisonError::into_inner).merge(figures);
        }));
    }
    for task in tasks {
        let _ = task.await;
    }
}

async fn open_loop(
    arguments: &Arc<Arguments>,
    target: &Arc<Target>,
    times: &Times,
    per_second: f64,
    total: &Arc<Mutex<Figures>>,
) {
    let mut random = fastrand::Rng::with_seed(arguments.seed);
    let idle: Vec<_> = target.addresses.iter().map(|_| Mutex::new(Vec::new())).collect();
    let idle = Arc::new(idle);
    let (mut due, mut tasks) = (Instant::now(), tokio::task::JoinSet::new());
    while due < times.end {
        due += Duration::from_secs_f64(-(1.0 - random.f64()).ln() / per_second);
        tokio::time::sleep_until(due).await;
        let (target, total, idle, mut random) = (target.clone(), total.clone(), idle.clone(), random.fork());
        let is_counted = due >= times.start && due < times.end;
        if is_counted {
            total.lock().unwrap_or_else(std::sync::PoisonError::into_inner).sent += 1;
        }
        tasks.spawn(async move {
            // One draw more would be another load for whoever has one router.
            let router = if idle.len() == 1 { 0 } else { random.usize(..idle.len()) };
            let pool = || idle[router].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let mut connection = pool().pop().flatten();
            let asked = play::ask(&target, router, &mut connection, &mut random, due).await;
            pool().push(connection);
            if is_counted {
                total.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(asked);
            }
        });
        while tasks.try_join_next().is_some() {}
    }
    let patience = Instant::now() + Duration::from_secs_f64(arguments.patience_seconds);
    let all = async { while tasks.join_next().await.is_some() {} };
    // What does not end in time is the difference between sent and answered.
    let _ = tokio::time::timeout_at(patience, all).await;
}
