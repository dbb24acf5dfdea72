//! How often what callers were promised was kept: the share of first tokens within the target.

use std::collections::BTreeMap;
use warmset_core::targets::Targets;

/// First tokens counted before both counts are halved, so that what is old weighs less.
const COUNT_MAX: u32 = 10_000;

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    within: u32,
    all: u32,
}

/// Targets and what became of them, by model.
#[derive(Debug, Default)]
pub(crate) struct Attainment {
    targets: BTreeMap<String, Targets>,
    counts: BTreeMap<(String, &'static str), Counts>,
}

impl Attainment {
    /// Other promises. Counts of a promise that is gone or has changed are dropped and named.
    pub(crate) fn replace(&mut self, targets: BTreeMap<String, Targets>) -> Vec<(String, &'static str)> {
        let before = std::mem::replace(&mut self.targets, targets);
        let kept = |(model, _): &(String, &'static str)| self.targets.get(model) == before.get(model);
        let gone: Vec<_> = self.counts.keys().filter(|key| !kept(key)).cloned().collect();
        for key in &gone {
            self.counts.remove(key);
        }
        gone
    }

    /// A first token came; the share within the target since, if there is one for this kind of start.
    pub(crate) fn note(&mut self, model: &str, start: &str, seconds: f64) -> Option<f64> {
        let targets = self.targets.get(model)?;
        let (start, target) = match start {
            "warm" => ("warm", targets.ttft_p99_warm_ms?),
            "cold" => ("cold", targets.ttft_p99_cold_ms?),
            _ => return None,
        };
        let counts = self.counts.entry((model.to_owned(), start)).or_default();
        counts.all += 1;
        counts.within += u32::from(seconds * 1e3 <= f64::from(target));
        if counts.all >= COUNT_MAX {
            (counts.within, counts.all) = (counts.within / 2, counts.all / 2);
        }
        Some(f64::from(counts.within) / f64::from(counts.all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn promise(cold: u32) -> BTreeMap<String, Targets> {
        let targets = Targets { ttft_p99_warm_ms: None, ttft_p99_cold_ms: Some(cold) };
        BTreeMap::from([("a".to_owned(), targets)])
    }

    #[test]
    fn shares_are_of_what_was_promised_and_begin_anew_with_a_new_promise() {
        let mut attainment = Attainment::default();
        assert_eq!(attainment.note("a", "cold", 1.0), None);
        assert!(attainment.replace(promise(2_000)).is_empty());
        assert_eq!(attainment.note("a", "cold", 1.0), Some(1.0));
        assert_eq!(attainment.note("a", "cold", 2.5), Some(0.5));
        assert_eq!(attainment.note("a", "warm", 0.1), None);
        assert!(attainment.replace(promise(2_000)).is_empty());
        assert_eq!(attainment.replace(promise(3_000)), [("a".to_owned(), "cold")]);
        assert_eq!(attainment.note("a", "cold", 2.5), Some(1.0));
    }

    #[test]
    fn old_answers_weigh_less() {
        let mut attainment = Attainment::default();
        attainment.replace(promise(10));
        let late = (0..COUNT_MAX).filter_map(|_| attainment.note("a", "cold", 1.0)).last();
        assert_eq!(late, Some(0.0));
        let ratio = (0..COUNT_MAX).filter_map(|_| attainment.note("a", "cold", 0.001)).last();
        assert!(ratio.is_some_and(|ratio| ratio > 0.6), "{ratio:?}");
    }
}
