//! Figures of recorded requests: how many were answered, how fast, and how many as promised.

use super::{
    demand::{Demand, Request},
    record::{End, Record},
    scenario::Pool,
};
use serde::Serialize;
use std::collections::BTreeMap;
use warmset_core::Instant;

/// The shares of requests at which a distribution is told.
pub const SHARES: [f64; 17] =
    [0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0];

/// What came of some requests. Times are to the first token, from the request's arrival on; the time before an engine began
/// it is told apart. Shares are of all requests, answered or not.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Figures {
    /// All of them.
    pub requests: u64,
    /// With a complete answer.
    pub answered: u64,
    /// With a refusal.
    pub refused: u64,
    /// With an answer that broke off.
    pub broken: u64,
    /// Without an end when the run ended.
    pub unfinished: u64,
    /// Refusals by their name.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Of those that began: whose model was not ready.
    pub cold_share: Option<f64>,
    /// Of all: as promised. One without a first token is not, one without a promise is.
    pub within_target_share: Option<f64>,
    /// Half of those that found their model ready had their first token within this.
    pub warm_p50_seconds: Option<f64>,
    /// 99 of 100 of them.
    pub warm_p99_seconds: Option<f64>,
    /// The same of those that waited for a load.
    pub cold_p50_seconds: Option<f64>,
    /// 99 of 100 of them.
    pub cold_p99_seconds: Option<f64>,
    /// The same of all that had one.
    pub first_token_p50_seconds: Option<f64>,
    /// 99 of 100 of them.
    pub first_token_p99_seconds: Option<f64>,
    /// Half of those that began had an engine within this.
    pub queue_p50_seconds: Option<f64>,
    /// 99 of 100 of them.
    pub queue_p99_seconds: Option<f64>,
    /// Half of the complete answers had ended within this.
    pub answer_p50_seconds: Option<f64>,
    /// 99 of 100 of them.
    pub answer_p99_seconds: Option<f64>,
    /// Tokens of complete answers.
    pub output_tokens: u64,
    /// Seconds to the first token at each of [`SHARES`].
    pub first_token_seconds: Vec<f64>,
}

/// The value that so many of a hundred are not above (nearest rank); values in order.
pub fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).or(sorted.last()).copied()
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

/// What is counted while requests are gone through.
#[derive(Default)]
struct Tally {
    figures: Figures,
    within: u64,
    begun: u64,
    cold: u64,
    warm_seconds: Vec<f64>,
    cold_seconds: Vec<f64>,
    queue_seconds: Vec<f64>,
    answer_seconds: Vec<f64>,
}

impl Tally {
    fn add(&mut self, pool: &Pool, request: &Request, record: &Record) {
        let figures = &mut self.figures;
        figures.requests += 1;
        match record.end {
            End::Unfinished => figures.unfinished += 1,
            End::Answered => {
                figures.answered += 1;
                figures.output_tokens += u64::from(request.output_tokens);
                self.answer_seconds.extend(record.ended.map(|at| at.since(request.at).as_secs_f64()));
            }
            End::Refused(name) => {
                figures.refused += 1;
                *figures.refusals.entry(name).or_default() += 1;
            }
            End::Broken => figures.broken += 1,
        }
        let since = |at: Instant| at.since(request.at).as_secs_f64();
        self.queue_seconds.extend(record.started.map(since));
        // Callers of a real server see no start before there is a token.
        if record.started.or(record.first_token).is_some() {
            self.begun += 1;
            self.cold += u64::from(record.cold);
        }
        let Some(seconds) = record.first_token.map(since) else { return };
        let times = if record.cold { &mut self.cold_seconds } else { &mut self.warm_seconds };
        times.push(seconds);
        let target = pool.team[request.team].targets.first_token_seconds(record.cold);
        let kept = matches!(record.end, End::Answered | End::Unfinished);
        self.within += u64::from(kept && target.is_none_or(|target| seconds <= target));
    }

    fn finish(mut self) -> Figures {
        let lists = [&mut self.warm_seconds, &mut self.cold_seconds, &mut self.queue_seconds, &mut self.answer_seconds];
        lists.into_iter().for_each(|times| times.sort_by(f64::total_cmp));
        let mut all = [&self.warm_seconds[..], &self.cold_seconds[..]].concat();
        all.sort_by(f64::total_cmp);
        Figures {
            cold_share: share(self.cold, self.begun),
            within_target_share: share(self.within, self.figures.requests),
            warm_p50_seconds: percentile(&self.warm_seconds, 0.5),
            warm_p99_seconds: percentile(&self.warm_seconds, 0.99),
            cold_p50_seconds: percentile(&self.cold_seconds, 0.5),
            cold_p99_seconds: percentile(&self.cold_seconds, 0.99),
            first_token_p50_seconds: percentile(&all, 0.5),
            first_token_p99_seconds: percentile(&all, 0.99),
            queue_p50_seconds: percentile(&self.queue_seconds, 0.5),
            queue_p99_seconds: percentile(&self.queue_seconds, 0.99),
            answer_p50_seconds: percentile(&self.answer_seconds, 0.5),
            answer_p99_seconds: percentile(&self.answer_seconds, 0.99),
            first_token_seconds: SHARES.iter().filter_map(|share| percentile(&all, *share)).collect(),
            ..self.figures
        }
    }
}

/// Figures of those requests that `which` chooses.
pub fn figures(pool: &Pool, demand: &Demand, records: &[Record], which: impl Fn(&Request) -> bool) -> Figures {
    let mut tally = Tally::default();
    for (request, record) in demand.requests.iter().zip(records).filter(|(request, _)| which(request)) {
        tally.add(pool, request, record);
    }
    tally.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 0.5), Some(100.0));
        assert_eq!(percentile(&values, 0.99), Some(198.0));
        assert_eq!(percentile(&values, 1.0), Some(200.0));
        assert_eq!(percentile(&[7.0], 0.99), Some(7.0));
        assert_eq!(percentile(&[], 0.5), None);
    }
}
