//! How long a decision takes with many replicas and many known prefixes, and in how many bytes they are known.
//!
//! `cargo run --release -p warmset-gateway --example route_speed [replicas] [prefixes] [text-bytes]`

use std::{
    collections::VecDeque,
    io::Write,
    time::{Duration, Instant as Clock},
};
use warmset_core::{
    Instant,
    routing::{
        Ask, Ended, ModelKey, Outcome, PrefixBuilder, PrefixChain, ReplicaId, ReplicaSettings, Router, Salt, Settings,
    },
};

const MODEL: ModelKey = ModelKey(1);
const DECISIONS: usize = 200_000;
const OPEN_MAX: usize = 4000;

fn prompt(text: &mut [u8], tenant: u64, question: u64) -> PrefixChain {
    let mut builder = PrefixBuilder::new(Salt::new(b"secret", b"model"));
    text[..8].copy_from_slice(&tenant.to_le_bytes());
    builder.push(text);
    builder.boundary();
    builder.push(&question.to_le_bytes().repeat(16));
    builder.boundary();
    builder.finish()
}

fn percentiles(name: &str, mut nanoseconds: Vec<u64>) -> String {
    nanoseconds.sort_unstable();
    let at = |share: f64| nanoseconds[(nanoseconds.len() as f64 * share) as usize] as f64 / 1000.0;
    format!("{name}: p50 {:.1} p99 {:.1} p99.9 {:.1} microseconds", at(0.5), at(0.99), at(0.999))
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>().unwrap_or(0));
    let replicas = arguments.next().unwrap_or(1000) as u32;
    let prefixes = arguments.next().unwrap_or(1_000_000);
    let text_bytes = arguments.next().unwrap_or(4096).max(8);
    let settings = Settings { mirror_bytes: 160 << 20, ..Settings::default() };
    let mut router = Router::new(settings);
    for number in 0..replicas {
        let settings = ReplicaSettings {
            identity: u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            models: vec![MODEL],
            slots: 64,
            weight: 1.0,
            capacity_tokens: Some(1 << 40),
            prefill_tokens_per_second: None,
        };
        router.add(ReplicaId(number), settings);
    }
    let mut text = vec![b'x'; text_bytes];
    let ended = Ended { outcome: Outcome::Finished, output_started: true, retried: false, usage: None };
    let mut open = VecDeque::new();
    let (mut hashed, mut decided) = (Vec::new(), Vec::new());
    let mut tenants = 0_u64;
    let mut step = 0_u64;
    while router.totals().remembered < prefixes || decided.len() < DECISIONS {
        let filling = router.totals().remembered < prefixes;
        let tenant = if filling { tenants } else { (step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) & 0xff_ffff };
        tenants += u64::from(filling);
        step += 1;
        let now = Instant::after(Duration::from_micros(step * 100));
        if step.is_multiple_of(10_000) {
            router.tick(now);
        }
        let begun = Clock::now();
        let prefix = prompt(&mut text, tenant % tenants.max(1), step);
        let hashing = begun.elapsed();
        let begun = Clock::now();
        let ask = Ask { model: MODEL, prefix: &prefix, tenant, streamed: true, excluded: None };
        let decision = router.decide(now, &ask);
        let deciding = begun.elapsed();
        if let Ok(decision) = decision {
            open.push_back(decision.ticket);
        }
        if open.len() > OPEN_MAX
            && let Some(ticket) = open.pop_front()
        {
            router.first_token(now, ticket);
            router.ended(now, ticket, ended);
        }
        if !filling {
            hashed.push(hashing.as_nanos() as u64);
            decided.push(deciding.as_nanos() as u64);
        }
    }
    let totals = router.totals();
    let known = format!("{replicas} replicas, {} places known in {} bytes", totals.remembered, totals.remembered_bytes);
    let lines = [known, percentiles("hashing", hashed), percentiles("deciding", decided)];
    writeln!(std::io::stdout(), "{}", lines.join("\n")).expect("standard output is open");
}
