//! How long callers of each model waited: percentiles of the time to the first token and of whole requests, warm and cold
//! apart, since this process began. Histograms of fixed size keep them, about 1.4 KB each: a figure is at most one
//! sixteenth above what was measured.

use crate::metrics::UNKNOWN_MODEL;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};
use warmset_core::worker::StartKind;

/// The longest time that is told apart from longer ones: an hour.
const SECONDS_MAX: u64 = 3600;
/// What is counted: tenths of a millisecond.
const UNITS_PER_SECOND: f64 = 10_000.0;
/// Decimal digits that a histogram keeps; of one, four binary ones come.
const DIGITS: u8 = 1;
/// How far above the truth a percentile may be, as a share of it.
pub const LATENCY_ERROR_SHARE: f64 = 1.0 / 16.0;

/// Percentiles of one kind of time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// Requests counted.
    pub count: u64,
    /// Half of them took no longer.
    pub p50_seconds: f64,
    /// Of a hundred, one took longer.
    pub p99_seconds: f64,
}

/// One model's times under one kind of start.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
pub struct StartFigures {
    /// From arrival to the first token.
    pub first_token: Option<Percentiles>,
    /// From arrival to the last byte, of requests answered in full.
    pub duration: Option<Percentiles>,
}

/// One model's times.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
pub struct LatencyFigures {
    /// Of requests that found it loaded.
    pub warm: StartFigures,
    /// Of requests that waited for a load.
    pub cold: StartFigures,
}

/// A histogram that is made with its first value.
#[derive(Debug, Default)]
struct Times(Option<Histogram<u32>>);

impl Times {
    fn record(&mut self, seconds: f64) {
        if self.0.is_none() {
            let bounds = Histogram::new_with_bounds(1, SECONDS_MAX * UNITS_PER_SECOND as u64, DIGITS);
            // The bounds are right: they do not depend on anything.
            self.0 = bounds.ok();
        }
        if let Some(histogram) = &mut self.0 {
            // No time is negative, and what is longer than the longest counts as that.
            histogram.saturating_record((seconds.max(0.0) * UNITS_PER_SECOND) as u64);
        }
    }

    fn percentiles(&self) -> Option<Percentiles> {
        let histogram = self.0.as_ref()?;
        let seconds = |quantile| histogram.value_at_quantile(quantile) as f64 / UNITS_PER_SECOND;
        Some(Percentiles { count: histogram.len(), p50_seconds: seconds(0.5), p99_seconds: seconds(0.99) })
    }
}

/// By kind of start: warm, cold.
#[derive(Debug, Default)]
struct ModelTimes {
    first_token: [Times; 2],
    duration: [Times; 2],
}

/// The times of all models.
#[derive(Debug, Default)]
pub struct Latencies(Mutex<BTreeMap<String, ModelTimes>>);

impl Latencies {
    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, ModelTimes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with(&self, model: &str, start: &str, record: impl FnOnce(&mut ModelTimes, usize)) {
        let place = [StartKind::Warm, StartKind::Cold].iter().position(|kind| kind.as_str() == start);
        let Some(place) = place.filter(|_| model != UNKNOWN_MODEL) else { return };
        let mut all = self.locked();
        if !all.contains_key(model) {
            all.insert(model.to_owned(), ModelTimes::default());
        }
        if let Some(times) = all.get_mut(model) {
            record(times, place);
        }
    }

    /// The first token of a request came `seconds` after the request.
    pub(crate) fn record_first_token(&self, model: &str, start: &str, seconds: f64) {
        self.with(model, start, |times, place| times.first_token[place].record(seconds));
    }

    /// A request was answered in full, `seconds` after it came.
    pub(crate) fn record_duration(&self, model: &str, start: &str, seconds: f64) {
        self.with(model, start, |times, place| times.duration[place].record(seconds));
    }

    /// The figures of a model; none before its first answer.
    pub fn of(&self, model: &str) -> Option<LatencyFigures> {
        let all = self.locked();
        let times = all.get(model)?;
        let figures = |place: usize| StartFigures {
            first_token: times.first_token[place].percentiles(),
            duration: times.duration[place].percentiles(),
        };
        Some(LatencyFigures { warm: figures(0), cold: figures(1) })
    }

    /// Forgets models that are no longer there.
    pub fn retain(&self, is_known: impl Fn(&str) -> bool) {
        self.locked().retain(|model, _| is_known(model));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn warm_and_cold_are_apart_and_what_is_gone_is_forgotten() {
        let latencies = Latencies::default();
        assert_eq!(latencies.of("m"), None);
        for _ in 0..99 {
            latencies.record_first_token("m", "warm", 0.01);
        }
        latencies.record_first_token("m", "warm", 5.0);
        latencies.record_first_token("m", "cold", 2.0);
        latencies.record_duration("m", "cold", 1e9);
        latencies.record_first_token("m", "none", 1.0);
        latencies.record_first_token(UNKNOWN_MODEL, "warm", 1.0);
        assert_eq!(latencies.of(UNKNOWN_MODEL), None);
        let figures = latencies.of("m").unwrap();
        let warm = figures.warm.first_token.unwrap();
        assert!(warm.count == 100 && (0.01..0.011).contains(&warm.p50_seconds) && warm.p99_seconds < 0.011, "{warm:?}");
        assert!((2.0..2.13).contains(&figures.cold.first_token.unwrap().p50_seconds));
        assert!((3400.0..4500.0).contains(&figures.cold.duration.unwrap().p99_seconds), "{figures:?}");
        assert_eq!(figures.warm.duration, None);
        latencies.retain(|model| model != "m");
        assert_eq!(latencies.of("m"), None);
    }

    #[test]
    fn a_thousand_models_take_little() {
        let mut times = Times::default();
        times.record(1.0);
        assert!(times.0.unwrap().distinct_values() * 4 < 2048);
    }

    proptest! {
        #[test]
        fn a_percentile_is_never_below_the_truth_and_hardly_above(mut seconds in prop::collection::vec(0.001f64..3000.0, 1..200)) {
            let latencies = Latencies::default();
            for value in &seconds {
                latencies.record_duration("m", "warm", *value);
            }
            seconds.sort_by(f64::total_cmp);
            let found = latencies.of("m").unwrap().warm.duration.unwrap();
            for (quantile, found) in [(0.5, found.p50_seconds), (0.99, found.p99_seconds)] {
                let rank = ((quantile * seconds.len() as f64).ceil() as usize).max(1);
                let truth = seconds[rank - 1];
                // One unit is lost to rounding down.
                let bounds = truth - 1.0 / UNITS_PER_SECOND..=truth * (1.0 + LATENCY_ERROR_SHARE) + 1.0 / UNITS_PER_SECOND;
                prop_assert!(bounds.contains(&found), "{quantile}: {found} for {truth}");
            }
        }
    }
}
