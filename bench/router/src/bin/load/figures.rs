//! What was measured, as one document.

use crate::play::Asked;
use serde_json::{Value, json};
use std::time::Duration;

#[derive(Default)]
pub struct Figures {
    /// Open loop: requests that were due.
    pub sent: u64,
    answered: u64,
    failed: u64,
    broken: u64,
    first: Vec<u32>,
    last: Vec<u32>,
}

fn microseconds(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

impl Figures {
    pub fn add(&mut self, asked: Asked) {
        if asked.status != 200 {
            self.failed += 1;
            return;
        }
        self.answered += 1;
        self.broken += u64::from(!asked.whole);
        self.last.push(microseconds(asked.last));
        self.first.push(asked.first.map_or(u32::MAX, microseconds));
    }

    pub fn merge(&mut self, other: Self) {
        self.sent += other.sent;
        self.answered += other.answered;
        self.failed += other.failed;
        self.broken += other.broken;
        self.first.extend(other.first);
        self.last.extend(other.last);
    }

    pub fn document(
        mut self,
        seconds: f64,
        cpu_microseconds: Option<f64>,
        resident_bytes: Option<u64>,
        target: Option<u32>,
    ) -> Value {
        let first = quantiles(&mut self.first);
        json!({
            "answered": self.answered, "failed": self.failed, "broken": self.broken,
            "unfinished": self.sent.saturating_sub(self.answered + self.failed),
            "per_second": self.answered as f64 / seconds,
            "first_microseconds": first, "last_microseconds": quantiles(&mut self.last),
            "cpu_microseconds_per_request": cpu_microseconds.map(|cpu| cpu / self.answered as f64),
            "resident_bytes": resident_bytes,
            "within_target": target.map(|target| self.first.partition_point(|time| *time <= target)),
        })
    }
}

fn quantiles(times: &mut [u32]) -> Value {
    times.sort_unstable();
    let at = |quantile: f64| times.get(((times.len() as f64 * quantile) as usize).min(times.len().saturating_sub(1)));
    json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "most": times.last()})
}

/// Processor time that a process has used.
pub fn process_cpu_microseconds(process: Option<u32>) -> f64 {
    const MICROSECONDS_PER_TICK: f64 = 10_000.0;
    let stat = process.and_then(|process| std::fs::read_to_string(format!("/proc/{process}/stat")).ok());
    let fields = stat.as_deref().and_then(|stat| stat.rsplit(')').next()).unwrap_or_default();
    // User and system time, counted behind the name.
    let ticks = fields.split_ascii_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok());
    ticks.sum::<f64>() * MICROSECONDS_PER_TICK
}

pub fn process_resident_bytes(process: Option<u32>) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process?)).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}
