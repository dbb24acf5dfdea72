//! The histogram of the times between a model's requests: Shahrad et al., "Serverless in the Wild", USENIX ATC 2020.
//!
//! There the bins are minutes up to four hours. Here each bin is a twentieth longer than the one before it, from a
//! second to more than a day, so that a model asked every ten seconds and one asked once a day are known equally well.

use alloc::{vec, vec::Vec};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Bins in all; what is longer than the last one is out of bounds.
pub const INTERVAL_BINS: usize = 240;
/// How much longer each bin is than the one before it.
const BIN_GROWTH: f64 = 1.05;
/// Intervals counted before all counts are halved, so that what is old weighs less.
const COUNT_MAX: u32 = 512;
/// Fewer intervals than this say nothing.
const COUNT_MIN: u32 = 3;
/// Bins whose counts vary less than this (standard deviation over mean) have no peak worth planning by.
const VARIATION_MIN: f64 = 2.0;
/// Share of intervals in the front that the pre-warm window leaves out.
const HEAD_SHARE: f64 = 0.05;
/// Share of intervals that the keep-alive window covers.
const TAIL_SHARE: f64 = 0.99;
/// Both windows are wider than what was seen by this share.
const WINDOW_MARGIN: f64 = 0.1;

/// How long a model's requests were apart.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct Intervals {
    /// Counts by bin; empty before the first interval.
    counts: Vec<u16>,
    /// Intervals in the bins.
    inside: u32,
    /// Intervals beyond the last bin.
    beyond: u32,
}

/// When a model is due, counted from its last request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// It need not be in memory before this: the head of the histogram.
    pub from: Duration,
    /// It is not expected after this: the tail of the histogram.
    pub until: Duration,
}

impl Intervals {
    /// One more interval.
    pub fn note(&mut self, interval: Duration) {
        match bin_of(interval.as_secs_f64()) {
            Some(bin) => {
                self.counts.resize(INTERVAL_BINS, 0);
                if let Some(count) = self.counts.get_mut(bin) {
                    *count = count.saturating_add(1);
                    self.inside += 1;
                }
            }
            None => self.beyond += 1,
        }
        if self.inside + self.beyond >= COUNT_MAX {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.inside = self.counts.iter().map(|count| u32::from(*count)).sum();
            self.beyond /= 2;
        }
    }

    /// Intervals that are counted.
    pub fn count(&self) -> u32 {
        self.inside + self.beyond
    }

    /// Whether the histogram may be planned by: enough intervals, most of them within bounds, and bins that differ. Where
    /// it is not, the decayed demand has to do.
    pub fn is_representative(&self) -> bool {
        self.inside >= COUNT_MIN && self.beyond * 2 <= self.count() && self.variation() >= VARIATION_MIN
    }

    /// The coefficient of variation of the counts in the bins.
    fn variation(&self) -> f64 {
        let bins = INTERVAL_BINS as f64;
        let mean = f64::from(self.inside) / bins;
        let squares: f64 = self.counts.iter().map(|count| f64::from(*count) * f64::from(*count)).sum();
        let variance = (squares / bins - mean * mean).max(0.0);
        if mean > 0.0 { libm::sqrt(variance) / mean } else { 0.0 }
    }

    /// From the head to the tail of the histogram, with a margin on both sides.
    pub fn window(&self) -> Option<Window> {
        let (first, _) = edges(self.percentile(HEAD_SHARE)?);
        let (_, last) = edges(self.percentile(TAIL_SHARE)?);
        Some(Window {
            from: Duration::from_secs_f64(first * (1.0 - WINDOW_MARGIN)),
            until: Duration::from_secs_f64(last * (1.0 + WINDOW_MARGIN)),
        })
    }

    /// The bin below which this share of the intervals lies.
    fn percentile(&self, share: f64) -> Option<usize> {
        let wanted = share * f64::from(self.inside);
        let mut sum = 0.0;
        self.counts.iter().position(|count| {
            sum += f64::from(*count);
            sum > 0.0 && sum >= wanted
        })
    }

    /// What a model is worth whose last request is `age` old, as a demand: the best ratio, over all spans of time from
    /// now, of the chance that the next request comes within the span to the time it has to be kept for that.
    ///
    /// For requests that come at random this is their rate, whatever the age. A model that is due in a minute for
    /// certain has a demand of one a minute; one that has just been asked and comes back in an hour has one an hour.
    ///
    /// One interval that was never seen stands for all that may still be: for it the demand of late has to do. The longer
    /// the silence, the less of what was seen is still possible, and the more that one weighs.
    pub fn demand_per_second(&self, age: Duration, of_late: f64) -> f64 {
        let age = age.as_secs_f64();
        let unknown = 1.0 + f64::from(self.beyond);
        let survivors = unknown + self.from(age).map(|(_, _, mass)| mass).sum::<f64>();
        let (mut chance, mut kept, mut best) = (0.0, 0.0, of_late * unknown / survivors);
        for (begin, end, mass) in self.from(age) {
            let share = mass / survivors;
            chance += share;
            kept += share * ((begin + end) / 2.0 - age);
            best = best.max(chance / (kept + (1.0 - chance) * (end - age)));
        }
        best
    }

    /// How long until the next request if the last one is `age` old: the median of what is still possible.
    pub fn next_in(&self, age: Duration) -> Option<Duration> {
        let age = age.as_secs_f64();
        let half = self.from(age).map(|(_, _, mass)| mass).sum::<f64>() / 2.0;
        let mut sum = 0.0;
        let (begin, end, _) = self.from(age).find(|(_, _, mass)| {
            sum += mass;
            sum >= half
        })?;
        Some(Duration::from_secs_f64(((begin + end) / 2.0 - age).max(0.0)))
    }

    /// Begin, end and count of every bin that lies ahead of this age; of the bin it is in, the part that is left.
    fn from(&self, age: f64) -> impl Iterator<Item = (f64, f64, f64)> + '_ {
        let first = bin_of(age).unwrap_or(INTERVAL_BINS);
        let (_, mut next) = edges(first);
        let counted = self.counts.iter().enumerate().skip(first);
        counted.filter_map(move |(bin, count)| {
            let end = next;
            next *= BIN_GROWTH;
            if *count == 0 {
                return None;
            }
            let begin = if bin == 0 { 0.0 } else { end / BIN_GROWTH };
            let left = (end - age.max(begin)) / (end - begin);
            (left > 0.0).then(|| (begin.max(age), end, left * f64::from(*count)))
        })
    }
}

fn bin_of(seconds: f64) -> Option<usize> {
    if seconds < 1.0 {
        return Some(0);
    }
    // A u64 of nanoseconds is less than 600 years: some 500 bins.
    let bin = 1 + libm::floor(libm::log(seconds) / libm::log(BIN_GROWTH)) as usize;
    (bin < INTERVAL_BINS).then_some(bin)
}

fn edges(bin: usize) -> (f64, f64) {
    let end = libm::pow(BIN_GROWTH, bin as f64);
    (if bin == 0 { 0.0 } else { end / BIN_GROWTH }, end)
}

/// What is written down: the bins that hold something.
#[derive(Serialize, Deserialize)]
struct Stored {
    bins: Vec<(u16, u16)>,
    beyond: u32,
}

impl From<Intervals> for Stored {
    fn from(intervals: Intervals) -> Self {
        let bins = intervals.counts.iter().zip(0_u16..).filter(|(count, _)| **count > 0);
        Self { bins: bins.map(|(count, bin)| (bin, *count)).collect(), beyond: intervals.beyond }
    }
}

impl TryFrom<Stored> for Intervals {
    type Error = &'static str;

    fn try_from(stored: Stored) -> Result<Self, Self::Error> {
        let mut counts = vec![0; if stored.bins.is_empty() { 0 } else { INTERVAL_BINS }];
        for (bin, count) in &stored.bins {
            *counts.get_mut(usize::from(*bin)).ok_or("an interval beyond the last bin")? = *count;
        }
        let inside = counts.iter().map(|count| u32::from(*count)).sum::<u32>();
        if inside > COUNT_MAX || stored.beyond > COUNT_MAX {
            return Err("more intervals than are kept");
        }
        Ok(Self { counts, inside, beyond: stored.beyond })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(seconds: &[f64]) -> Intervals {
        let mut intervals = Intervals::default();
        seconds.iter().for_each(|interval| intervals.note(Duration::from_secs_f64(*interval)));
        intervals
    }

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_period_is_due_around_its_end_and_worth_most_just_before() {
        let intervals = of(&[3_600.0; 20]);
        let window = intervals.window().expect("it has seen something");
        assert!((3_000..3_600).contains(&window.from.as_secs()), "{window:?}");
        assert!((3_600..4_300).contains(&window.until.as_secs()), "{window:?}");
        let worth = |age| intervals.demand_per_second(secs(age), 0.0);
        assert!(worth(0) < worth(1_800) && worth(1_800) < worth(3_400));
        assert!((worth(0) * 3_600.0 - 1.0).abs() < 0.15, "one an hour: {}", worth(0));
        assert!(worth(5_000) < 1e-9, "it is over");
        let next = intervals.next_in(secs(600)).expect("it is still to come");
        assert!((2_800..3_200).contains(&next.as_secs()), "{next:?}");
    }

    #[test]
    fn random_arrivals_are_worth_their_rate_whatever_their_age() {
        // Quantiles of an exponential distribution with a mean of 100 seconds.
        let quantiles: Vec<f64> = (0..400).map(|n| -100.0 * libm::log(1.0 - (f64::from(n) + 0.5) / 400.0)).collect();
        let intervals = of(&quantiles);
        for age in [0, 50, 150] {
            let rate = intervals.demand_per_second(secs(age), 0.0);
            assert!((0.008..0.02).contains(&rate), "{rate} after {age} s");
        }
    }

    #[test]
    fn what_has_no_peak_or_lies_beyond_is_not_planned_by() {
        assert!(!of(&[60.0, 60.0]).is_representative(), "too few");
        assert!(of(&[60.0, 60.0, 61.0]).is_representative());
        assert!(!of(&[60.0, 60.0, 60.0, 1e7, 1e7, 1e7, 1e7]).is_representative(), "mostly out of bounds");
        let flat: Vec<f64> = (0..240).map(|bin| libm::pow(BIN_GROWTH, f64::from(bin) - 0.5)).collect();
        assert!(!of(&flat).is_representative(), "as likely in every bin");
    }

    #[test]
    fn after_the_longest_silence_seen_the_demand_of_late_counts() {
        let intervals = of(&[3.0, 3.0, 3.0]);
        assert!((intervals.demand_per_second(secs(60), 0.01) - 0.01).abs() < 1e-12);
    }

    #[test]
    fn an_old_habit_fades_and_memory_stays_bounded() {
        let mut intervals = of(&[60.0; 600]);
        (0..600).for_each(|_| intervals.note(secs(1_000)));
        assert!(intervals.count() < COUNT_MAX);
        let window = intervals.window().expect("it has seen something");
        let share = intervals.percentile(0.5).expect("it has seen something");
        assert!(edges(share).0 > 500.0, "most of what is kept is new: {window:?}");
    }

    #[test]
    fn what_is_stored_comes_back_and_nonsense_does_not() {
        let intervals = of(&[1.0, 60.0, 60.0, 1e9]);
        let text = serde_json::to_string(&intervals).expect("plain data");
        assert_eq!(serde_json::from_str::<Intervals>(&text).ok(), Some(intervals));
        assert!(serde_json::from_str::<Intervals>("{\"bins\":[[240,1]],\"beyond\":0}").is_err());
        assert!(serde_json::from_str::<Intervals>("{\"bins\":[[0,60000]],\"beyond\":0}").is_err());
    }

    proptest! {
        #[test]
        fn a_demand_is_a_finite_rate_and_a_window_is_in_order(
            intervals in prop::collection::vec(0.0_f64..200_000.0, 0..40),
            age in 0_u64..300_000, of_late in 0.0_f64..10.0,
        ) {
            let intervals = of(&intervals);
            let demand = intervals.demand_per_second(secs(age), of_late);
            prop_assert!(demand.is_finite() && demand >= 0.0);
            if let Some(window) = intervals.window() {
                prop_assert!(window.from <= window.until);
            }
        }
    }
}
