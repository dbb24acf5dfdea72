//! What callers would see, and whether the replicas keep up at all.
//!
//! Replicas keep up if they can do more requests per second than come: what they can do is how fast they get through
//! the same requests if all are there from the beginning. Where they do not, the queue grows for as long as requests
//! come, so that a percentile of waiting says how long the run was and nothing else; then there is none. Since a short
//! run's beginning and end make the rate look lower than it is, it takes both to say so: more come than can be done,
//! and the last requests waited longer than the first.

use super::{
    cost::{Picoseconds, seconds},
    outcome::{NOT_YET, Outcome, Outcomes},
    simulate::Level,
    workload::{Request, Workload},
};
use hdrhistogram::Histogram;
use serde::Serialize;

/// The last requests waited longer than the first ones if by more than this.
const WAIT_GROWTH: f64 = 2.0;

/// A time, over requests or tokens: values at ranks, none in between.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    /// Half are at most this.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// 99 of a hundred.
    pub p99: f64,
    /// All together by their number.
    pub mean: f64,
}

/// What callers see where replicas keep up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    /// From coming to the first token.
    pub time_to_first_token_seconds: Option<Times>,
    /// Between two tokens of a request, over all tokens.
    pub inter_token_seconds: Option<Times>,
    /// From coming to the last token.
    pub end_to_end_seconds: Option<Times>,
    /// From coming to being taken up, which is part of both.
    pub queue_wait_seconds: Option<Times>,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// How closely engines were looked at.
    pub level: Level,
    /// Requests per second that come; none if all come at once.
    pub offered_requests_per_second: Option<f64>,
    /// Requests per second that the replicas get through.
    pub capacity_requests_per_second: f64,
    /// The one by the other.
    pub offered_share_of_capacity: Option<f64>,
    /// Whether the queue stays as long as it is.
    pub keeps_up: bool,
    /// In words.
    pub verdict: &'static str,
    /// Requests that came.
    pub requests: usize,
    /// Of these, requests that were done at the end.
    pub finished: usize,
    /// Requests that were not.
    pub unfinished: usize,
    /// Requests that are larger than a replica's memory.
    pub refused: usize,
    /// Requests that were there when the last one had come.
    pub present_at_last_arrival: usize,
    /// When the last thing happened.
    pub ended_seconds: f64,
    /// Requests done, by the time it took.
    pub finished_requests_per_second: f64,
    /// Tokens written, by the time it took.
    pub output_tokens_per_second: f64,
    /// None where they do not keep up.
    pub latency: Option<Latency>,
    /// Steps of all replicas; none where they are not looked at.
    pub steps: Option<u64>,
    /// How often a request had to begin again for want of memory.
    pub preemptions: Option<u64>,
    /// Share of the prompts' tokens that was there.
    pub prefix_hit_share: Option<f64>,
    /// Share of the memory in use, over the time of steps.
    pub memory_mean_share: Option<f64>,
    /// The most of it that a replica used.
    pub memory_max_share: f64,
}

/// How fast requests are got through that are all there at the beginning.
pub fn capacity(outcomes: &Outcomes) -> f64 {
    let done = outcomes.requests.iter().filter(|outcome| outcome.finished != NOT_YET).count();
    if done == 0 { 0.0 } else { done as f64 / seconds(outcomes.ended) }
}

impl Row {
    /// From a run and from what replicas can do.
    pub fn new(
        level: Level,
        workload: &Workload,
        outcomes: &Outcomes,
        capacity_requests_per_second: f64,
        warm_up: Picoseconds,
    ) -> Self {
        let requests = workload.requests();
        let all = || requests.iter().zip(&outcomes.requests);
        let finished = all().filter(|(_, outcome)| outcome.finished != NOT_YET).count();
        let refused = all().filter(|(_, outcome)| outcome.refused).count();
        let last = workload.ends();
        let present = all().filter(|(_, outcome)| !outcome.refused && outcome.finished > last).count();
        let output: u64 = all()
            .filter(|(_, outcome)| outcome.finished != NOT_YET)
            .map(|(request, _)| u64::from(request.output_tokens))
            .sum();
        let ended_seconds = seconds(outcomes.ended);
        let rate = |count: f64| if ended_seconds > 0.0 { count / ended_seconds } else { 0.0 };
        let offered = (last > 0).then(|| (requests.len() - refused) as f64 / seconds(last));
        let steps = level == Level::Step;
        let within = offered.is_none_or(|offered| offered < capacity_requests_per_second);
        let keeps_up = within || !waits_grow(requests, &outcomes.requests);
        Self {
            level,
            offered_requests_per_second: offered,
            capacity_requests_per_second,
            offered_share_of_capacity: offered
                .map(|offered| offered / capacity_requests_per_second.max(f64::MIN_POSITIVE)),
            keeps_up,
            verdict: if keeps_up { "keeps up" } else { "does not keep up" },
            requests: requests.len(),
            finished,
            unfinished: requests.len() - refused - finished,
            refused,
            present_at_last_arrival: present,
            ended_seconds,
            finished_requests_per_second: rate(finished as f64),
            output_tokens_per_second: rate(output as f64),
            latency: keeps_up.then(|| Latency::new(requests, outcomes, warm_up)),
            steps: steps.then_some(outcomes.steps),
            preemptions: steps.then_some(outcomes.preemptions),
            prefix_hit_share: (steps && workload.chunk_tokens() > 0)
                .then(|| outcomes.found_tokens as f64 / outcomes.looked_up_tokens.max(1) as f64),
            memory_mean_share: steps.then(|| outcomes.memory_mean_share()),
            memory_max_share: outcomes.memory_max_share,
        }
    }
}

/// Whether the last tenth of the requests waited longer than the first half; who still waits has done so until the last
/// one came.
fn waits_grow(requests: &[Request], outcomes: &[Outcome]) -> bool {
    let last = requests.last().map_or(0, |request| request.arrives);
    let wait = |(request, outcome): (&Request, &Outcome)| {
        let until = if outcome.admitted == NOT_YET { last } else { outcome.admitted };
        (!outcome.refused).then(|| seconds(until - request.arrives))
    };
    let mean = |from: usize, to: usize| {
        let waits: Vec<f64> = requests[from..to].iter().zip(&outcomes[from..to]).filter_map(wait).collect();
        waits.iter().sum::<f64>() / waits.len().max(1) as f64
    };
    let count = requests.len();
    mean(count - count.div_ceil(10), count) > WAIT_GROWTH * mean(0, count.div_ceil(2))
}

impl Latency {
    fn new(requests: &[Request], outcomes: &Outcomes, warm_up: Picoseconds) -> Self {
        let of = |what: fn(&Outcome) -> Picoseconds| {
            let counted = requests.iter().zip(&outcomes.requests);
            let counted = counted.filter(|(request, outcome)| request.arrives >= warm_up && what(outcome) != NOT_YET);
            Times::of(counted.map(|(request, outcome)| what(outcome) - request.arrives).collect())
        };
        Self {
            time_to_first_token_seconds: of(|outcome| outcome.first_token),
            inter_token_seconds: Times::of_histogram(outcomes.gaps()),
            end_to_end_seconds: of(|outcome| outcome.finished),
            queue_wait_seconds: of(|outcome| outcome.admitted),
        }
    }
}

impl Times {
    /// Of single values; none of none.
    pub fn of(mut times: Vec<Picoseconds>) -> Option<Self> {
        let sum: f64 = times.iter().map(|time| seconds(*time)).sum();
        let count = times.len();
        let mut at = |percent: usize| {
            // The value that so many of a hundred do not exceed.
            let rank = (count * percent).div_ceil(100).clamp(1, count) - 1;
            seconds(*times.select_nth_unstable(rank).1)
        };
        (count > 0).then(|| Self { p50: at(50), p90: at(90), p99: at(99), mean: sum / count as f64 })
    }

    fn of_histogram(times: &Histogram<u64>) -> Option<Self> {
        let at = |percent: f64| seconds(times.value_at_percentile(percent));
        let mean = times.mean() / super::cost::PICOSECONDS_PER_SECOND;
        (!times.is_empty()).then(|| Self { p50: at(50.0), p90: at(90.0), p99: at(99.0), mean })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_at_ranks() {
        let times = Times::of((1..=200).rev().map(|number| number * 1_000_000_000_000).collect()).unwrap();
        assert_eq!((times.p50, times.p90, times.p99, times.mean), (100.0, 180.0, 198.0, 100.5));
        let one = Times::of(vec![3_000_000_000_000]).unwrap();
        assert_eq!((one.p50, one.p99), (3.0, 3.0));
        assert_eq!(Times::of(Vec::new()), None);
    }
}
