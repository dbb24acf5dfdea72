//! What engines take, found from what was measured of them: least squares for what each takes alone, and around it a search
//! for by how much they slow each other down.

use super::profiles::Profiles;
use crate::{
    least_squares,
    sharing::{Company, Slowdown},
};
use std::{collections::BTreeMap, time::Duration};
use warmset_core::{Bytes, Digest};

/// What took no time at all cannot be compared with anything.
pub(super) const SECONDS_MIN: f64 = 1e-6;
/// How far the search for a slowdown looks at first, and when it is near enough.
const STEP_FIRST: f64 = 0.5;
const STEP_LAST: f64 = 0.01;
/// The most that one neighbour slows something down: more says that the samples know nothing of it.
const SLOWDOWN_MAX: f64 = 4.0;

/// Parts of what a load takes: every one, for each byte, for each second of its profile.
pub(super) const LOAD_PARTS: usize = 3;
/// Parts of what a request takes: every one, for each token of prompt and answer, for each second of these in its profile.
pub(super) const REQUEST_PARTS: usize = 5;

/// Tokens of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tokens {
    pub(super) prompt: u32,
    pub(super) output: u32,
}

/// For how many nanoseconds something computed in which company.
#[derive(Debug, Clone, Default)]
pub(super) struct Exposure(BTreeMap<Company, f64>);

impl Exposure {
    pub(super) fn add(&mut self, company: Company, nanoseconds: f64) {
        *self.0.entry(company).or_default() += nanoseconds;
    }

    /// How long it would have taken alone.
    fn alone_seconds(&self, slowdown: Slowdown) -> f64 {
        self.0.iter().map(|(company, nanoseconds)| nanoseconds / slowdown.times(*company)).sum::<f64>() / 1e9
    }
}

/// A load that came to its end.
#[derive(Debug, Clone)]
pub(super) struct Load<'a> {
    pub(super) digest: Digest,
    /// Of the model in memory.
    pub(super) bytes: Bytes,
    pub(super) took: &'a Exposure,
}

/// A request that ran to its end.
#[derive(Debug, Clone)]
pub(super) struct Ran<'a> {
    pub(super) digest: Digest,
    pub(super) tokens: Tokens,
    pub(super) took: &'a Exposure,
}

/// What was measured.
#[derive(Debug, Clone)]
pub(super) struct Samples<'a> {
    pub(super) loads: Vec<Load<'a>>,
    pub(super) runs: Vec<Ran<'a>>,
    /// How long engines took to be gone.
    pub(super) stop: Option<Duration>,
}

/// What the parts of a load are multiplied with.
pub(super) fn load_shape(profiles: &Profiles, digest: Digest, bytes: Bytes) -> [f64; LOAD_PARTS] {
    match profiles.get(&digest) {
        Some(profile) => [1.0, 0.0, profile.load_seconds],
        None => [1.0, bytes as f64, 0.0],
    }
}

/// What the parts of a request are multiplied with.
pub(super) fn request_shape(profiles: &Profiles, digest: Digest, tokens: Tokens) -> [f64; REQUEST_PARTS] {
    let (prompt, output) = (f64::from(tokens.prompt), f64::from(tokens.output));
    match profiles.get(&digest).and_then(|profile| profile.token_seconds) {
        Some((of_prompt, of_output)) => [1.0, 0.0, 0.0, prompt * of_prompt, output * of_output],
        None => [1.0, prompt, output, 0.0, 0.0],
    }
}

/// What was found.
#[derive(Debug, Clone)]
pub(super) struct Fit<const PARTS: usize> {
    pub(super) parts: [f64; PARTS],
    pub(super) slowdown: Slowdown,
    /// Root of the mean of squared relative errors.
    pub(super) error: f64,
    /// What each sample would have taken alone, and what the parts say.
    pub(super) found: Vec<(f64, f64)>,
}

impl<const PARTS: usize> Fit<PARTS> {
    /// The parts and the slowdown that say best what the samples took; none if they say nothing.
    pub(super) fn of(samples: &[([f64; PARTS], &Exposure)]) -> Option<Self> {
        let mut best = Self::with(samples, Slowdown::default())?;
        let mut step = STEP_FIRST;
        while step > STEP_LAST {
            let neighbours = neighbours(best.slowdown, step).into_iter();
            let tried = neighbours.filter_map(|slowdown| Self::with(samples, slowdown));
            match tried.min_by(|one, other| one.error.total_cmp(&other.error)) {
                Some(better) if better.error < best.error => best = better,
                _ => step /= 2.0,
            }
        }
        Some(best)
    }

    fn with(samples: &[([f64; PARTS], &Exposure)], slowdown: Slowdown) -> Option<Self> {
        let alone: Vec<f64> = samples.iter().map(|(_, took)| took.alone_seconds(slowdown).max(SECONDS_MIN)).collect();
        let rows: Vec<[f64; PARTS]> =
            samples.iter().zip(&alone).map(|((shape, _), seconds)| shape.map(|count| count / seconds)).collect();
        let (parts, squares) = least_squares::fit(&rows)?;
        let found = samples.iter().zip(alone).map(|((shape, _), seconds)| (seconds, sum(shape, &parts))).collect();
        Some(Self { parts, slowdown, error: (squares / rows.len() as f64).sqrt(), found })
    }
}

/// What the parts say of something of this shape.
pub(super) fn sum<const PARTS: usize>(shape: &[f64; PARTS], parts: &[f64; PARTS]) -> f64 {
    shape.iter().zip(parts).map(|(count, part)| count * part).sum()
}

fn neighbours(slowdown: Slowdown, step: f64) -> [Slowdown; 6] {
    let moved = |value: f64, by: f64| (value + by).clamp(0.0, SLOWDOWN_MAX);
    let Slowdown { request_beside, engine, load } = slowdown;
    [
        Slowdown { request_beside: moved(request_beside, step), ..slowdown },
        Slowdown { request_beside: moved(request_beside, -step), ..slowdown },
        Slowdown { engine: moved(engine, step), ..slowdown },
        Slowdown { engine: moved(engine, -step), ..slowdown },
        Slowdown { load: moved(load, step), ..slowdown },
        Slowdown { load: moved(load, -step), ..slowdown },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exposure(times: &[(u32, u32, u32, f64)]) -> Exposure {
        let mut exposure = Exposure::default();
        for (requests_beside, engines, loads, seconds) in times {
            let company = Company { requests_beside: *requests_beside, engines: *engines, loads: *loads };
            exposure.add(company, seconds * 1e9);
        }
        exposure
    }

    #[test]
    fn what_it_took_alone_is_what_it_took_less_what_others_took_of_the_machine() {
        let slowdown = Slowdown { request_beside: 0.5, engine: 1.0, load: 2.0 };
        let took = exposure(&[(0, 0, 0, 1.0), (1, 0, 0, 3.0), (0, 1, 1, 4.0), (1, 1, 0, 3.0), (1, 1, 0, 3.0)]);
        assert!((took.alone_seconds(slowdown) - (1.0 + 2.0 + 1.0 + 2.0)).abs() < 1e-12);
        assert!((took.alone_seconds(Slowdown::default()) - 14.0).abs() < 1e-12);
    }

    #[test]
    fn parts_and_slowdown_are_found_together_and_what_nothing_tells_stays_zero() {
        // Half a second and 10 milliseconds for each of 10, 20, ... tokens, twice as long beside another engine.
        let samples: Vec<([f64; 2], Exposure)> = (1..30)
            .map(|number| {
                let tokens = f64::from(number) * 10.0;
                let (alone, beside) = (0.5 + 0.01 * tokens, f64::from(number % 3) / 2.0);
                ([1.0, tokens], exposure(&[(0, 0, 0, alone * (1.0 - beside)), (0, 1, 0, 2.0 * alone * beside)]))
            })
            .collect();
        let samples: Vec<([f64; 2], &Exposure)> = samples.iter().map(|(shape, took)| (*shape, took)).collect();
        let fit = Fit::of(&samples).expect("they say enough");
        assert!((fit.parts[0] - 0.5).abs() < 1e-9 && (fit.parts[1] - 0.01).abs() < 1e-11, "{fit:?}");
        assert_eq!(fit.slowdown, Slowdown { request_beside: 0.0, engine: 1.0, load: 0.0 });
        assert!(fit.error < 1e-9 && fit.found.len() == 29);
        assert!(Fit::<2>::of(&[]).is_none());
    }
}
