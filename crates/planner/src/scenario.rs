//! A run described in a file: which demand, on which machines, compared with what.

use crate::demand::{Arrival, Demand, Spread, TraceError, rarely_called, read_azure_functions};
use serde::Deserialize;
use std::time::Duration;
use warmset_core::Instant;

/// What is shipped: names, and the files as they are in `scenarios/`.
pub const SHIPPED: [(&str, &str); 2] = [
    ("rare-models", include_str!("../../../scenarios/rare-models.toml")),
    ("office-hours", include_str!("../../../scenarios/office-hours.toml")),
];

/// Models of one scenario.
const MODELS_MAX: usize = 10_000;
/// Days of one scenario.
const DAYS_MAX: u32 = 366;
/// Requests of one burst.
const BURST_MAX: u32 = 1_000;
/// Sizes of memory that one scenario compares.
const SIZES_MAX: usize = 32;
/// Requests of a burst follow each other within this.
const BURST_SECONDS: f64 = 120.0;
const DAY_SECONDS: f64 = 86_400.0;

/// Whether the text of a scenario has a table of this name, which tells what kind it is of.
pub(crate) fn has_table(text: &str, name: &str) -> bool {
    let is_its_head = |line: &str| line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) == Some(name);
    text.lines().any(|line| is_its_head(line.trim_end()))
}

/// Why a scenario cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// There is none of this name.
    #[error("there is no scenario {0}: there are {names}", names = SHIPPED.map(|(name, _)| name).join(", "))]
    Unknown(String),
    /// It cannot be read.
    #[error("the scenario cannot be read")]
    Toml(#[from] toml::de::Error),
    /// A value makes no sense.
    #[error("the scenario's {0}")]
    Value(&'static str),
    /// A trace was given and this scenario takes none.
    #[error("this scenario takes no trace: it has no [trace]")]
    NoTrace,
    /// The trace cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// A run, as its file describes it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// For people.
    pub description: String,
    /// Sizes of memory to compare, in models.
    pub slots: Vec<usize>,
    /// How long a load takes.
    pub load_seconds: f64,
    /// How long a request runs.
    pub run_seconds: f64,
    /// Days of synthetic demand.
    pub days: u32,
    /// What is taken of a trace.
    pub trace: Option<TraceOptions>,
    /// Who makes up the synthetic demand.
    pub group: Vec<Group>,
}

/// What is taken of a trace.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceOptions {
    /// Least and most calls of a function in the trace.
    pub calls_a_day: (u64, u64),
    /// How many functions: the middle ones in the order of the file.
    pub functions: usize,
}

/// Models that are asked for in one way.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    models: usize,
    pattern: Pattern,
    /// Least and most minutes between two bursts on average, drawn for each model. A day for `daily`.
    #[serde(default = "whole_day")]
    every_minutes: (f64, f64),
    /// How far from its time a periodic burst may be, as a share of the period.
    #[serde(default)]
    jitter: f64,
    /// The most requests of one burst.
    #[serde(default = "one")]
    burst: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pattern {
    Periodic,
    Random,
    Daily,
}

fn whole_day() -> (f64, f64) {
    (1_440.0, 1_440.0)
}

fn one() -> u32 {
    1
}

impl Scenario {
    /// One that is shipped.
    pub fn shipped(name: &str) -> Result<Self, ScenarioError> {
        let found = SHIPPED.iter().find(|(known, _)| *known == name);
        Self::parse(found.ok_or_else(|| ScenarioError::Unknown(name.to_owned()))?.1)
    }

    /// One from a text.
    pub fn parse(text: &str) -> Result<Self, ScenarioError> {
        let scenario: Self = toml::from_str(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    /// The same with other sizes of memory, if any are given, and another time for a load.
    pub fn with(mut self, slots: &[usize], load_seconds: Option<f64>) -> Result<Self, ScenarioError> {
        if !slots.is_empty() {
            self.slots = slots.to_vec();
        }
        self.load_seconds = load_seconds.unwrap_or(self.load_seconds);
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), ScenarioError> {
        let positive = |value: f64| value.is_finite() && value > 0.0 && value <= 1e6;
        let models: usize = self.group.iter().map(|group| group.models.min(MODELS_MAX + 1)).sum();
        let problem = if self.slots.is_empty() || self.slots.len() > SIZES_MAX || self.slots.contains(&0) {
            "slots must be 1 to 32 numbers above 0"
        } else if !positive(self.load_seconds) || !positive(self.run_seconds) {
            "load_seconds and run_seconds must be above 0"
        } else if !(1..=DAYS_MAX).contains(&self.days) {
            "days must be between 1 and 366"
        } else if !(1..=MODELS_MAX).contains(&models) {
            "groups must have between 1 and 10,000 models together"
        } else if self.group.iter().any(|group| !(1..=BURST_MAX).contains(&group.burst)) {
            "burst must be between 1 and 1,000"
        } else if self.group.iter().any(|group| !(0.0..=0.5).contains(&group.jitter)) {
            "jitter must be between 0 and 0.5"
        } else if self.group.iter().any(|group| !positive(group.every_minutes.0) || group.every_minutes.0 < 1.0) {
            "every_minutes must be between 1 and 1,000,000"
        } else if self.group.iter().any(|group| !positive(group.every_minutes.1 - group.every_minutes.0 + 1.0)) {
            "every_minutes must be [least, most]"
        } else {
            return Ok(());
        };
        Err(ScenarioError::Value(problem))
    }

    /// How long a load takes.
    pub fn load(&self) -> Duration {
        Duration::from_secs_f64(self.load_seconds)
    }

    /// How long a request runs.
    pub fn run(&self) -> Duration {
        Duration::from_secs_f64(self.run_seconds)
    }

    /// Its demand: that of a trace if one is given, else made up from the seed.
    pub fn demand(&self, seed: u64, trace: Option<&str>) -> Result<Demand, ScenarioError> {
        let Some(text) = trace else { return Ok(self.synthetic(seed)) };
        let options = self.trace.as_ref().ok_or(ScenarioError::NoTrace)?;
        let (least, most) = options.calls_a_day;
        let functions = rarely_called(read_azure_functions(text)?, least..=most, options.functions);
        Ok(Demand::of_calls(&functions, Spread::Random(seed))?)
    }

    fn synthetic(&self, seed: u64) -> Demand {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut demand = Demand::default();
        for group in &self.group {
            for _ in 0..group.models {
                group.arrivals(demand.models, f64::from(self.days) * DAY_SECONDS, &mut random, &mut demand.arrivals);
                demand.models += 1;
            }
        }
        demand.arrivals.sort();
        demand
    }
}

impl Group {
    fn arrivals(&self, model: usize, end: f64, random: &mut fastrand::Rng, arrivals: &mut Vec<Arrival>) {
        let (least, most) = self.every_minutes;
        // Drawn evenly on a logarithmic scale: as many between one and ten as between ten and a hundred.
        let period = 60.0 * least * (most / least).powf(random.f64());
        let mut time = period * random.f64();
        while time < end {
            let at = match self.pattern {
                Pattern::Periodic => time + period * self.jitter * (2.0 * random.f64() - 1.0),
                Pattern::Random => time,
                // Within the quarter of an hour that its first burst was in.
                Pattern::Daily => (time / 900.0).floor() * 900.0 + 900.0 * random.f64(),
            };
            let weekend = self.pattern == Pattern::Daily && (at / DAY_SECONDS) as u64 % 7 >= 5;
            let size = if weekend { 0 } else { random.u32(1..=self.burst) };
            for number in 0..size {
                let within = if number == 0 { 0.0 } else { BURST_SECONDS * random.f64() };
                let at = Instant::after(Duration::from_secs_f64((at + within).max(0.0)));
                arrivals.push(Arrival { at, model });
            }
            time += match self.pattern {
                Pattern::Random => -period * (1.0 - random.f64()).ln(),
                Pattern::Periodic | Pattern::Daily => period,
            };
        }
    }
}

/// A text in which something was replaced is no scenario any more, and it is said why.
#[cfg(test)]
pub(crate) fn assert_refused<T, E: std::error::Error>(
    text: &str,
    (from, to): (&str, &str),
    words: &str,
    parse: impl Fn(&str) -> Result<T, E>,
) {
    assert!(text.contains(from), "{from}");
    let Err(error) = parse(&text.replace(from, to)) else { panic!("{to} was taken") };
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error}: {cause}").contains(words), "{to}: {error}: {cause}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_can_be_read_and_depends_on_its_seed_alone() {
        for (name, _) in SHIPPED {
            let scenario = Scenario::shipped(name).expect("it is shipped");
            let demand = scenario.demand(1, None).expect("synthetic");
            assert!(!demand.arrivals.is_empty() && demand.arrivals.is_sorted(), "{name}");
            assert_eq!(demand, scenario.demand(1, None).expect("synthetic"), "{name}");
            assert_ne!(demand, scenario.demand(2, None).expect("synthetic"), "{name}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = SHIPPED[1].1;
        for (from, to) in [
            ("slots = [8]", "slots = [0]"),
            ("days = 14", "days = 0"),
            ("load_seconds = 20.0", "load_seconds = nan"),
            ("burst = 4", "burst = 0"),
            ("models = 30", "models = 20000"),
            ("every_minutes = [60, 960]", "every_minutes = [960, 60]"),
            ("days = 14", "dayz = 14"),
        ] {
            assert!(good.contains(from), "{from}");
            assert!(Scenario::parse(&good.replace(from, to)).is_err(), "{to}");
        }
        assert!(matches!(Scenario::shipped("x"), Err(ScenarioError::Unknown(_))));
        let office = Scenario::shipped("office-hours").expect("it is shipped");
        assert!(matches!(office.demand(1, Some("")), Err(ScenarioError::NoTrace)));
    }
}
