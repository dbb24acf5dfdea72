//! Who asks for what and when: from a recorded trace or made up from a seed.

use std::time::Duration;
use warmset_core::Instant;

/// The most minutes a trace may have: a year.
const TRACE_MINUTES_MAX: usize = 366 * 24 * 60;
/// The most requests one run may have.
const ARRIVALS_MAX: usize = 10_000_000;

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    /// When it comes.
    pub at: Instant,
    /// The model it is for, as an index.
    pub model: usize,
}

/// Requests in the order of their arrival.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Demand {
    /// How many models there are.
    pub models: usize,
    /// Every request.
    pub arrivals: Vec<Arrival>,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It is not a table.
    #[error("the trace is not CSV")]
    Csv(#[from] csv::Error),
    /// It is another table.
    #[error(
        "the trace has no column {0:?}: the Azure Functions trace of 2019 has HashFunction and one for each minute"
    )]
    Column(String),
    /// A value that is no count.
    #[error("line {line} of the trace: {text:?} is not a number of calls")]
    Count {
        /// Where, from 1.
        line: usize,
        /// What stands there.
        text: String,
    },
    /// More than a run can hold.
    #[error("the trace has more than {ARRIVALS_MAX} calls or {TRACE_MINUTES_MAX} minutes: take fewer functions")]
    TooLong,
}

/// Calls of one function, minute by minute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calls {
    /// Its name in the trace.
    pub function: String,
    /// Minutes with calls, and how many.
    pub minutes: Vec<(u32, u32)>,
}

impl Calls {
    /// Calls in all.
    pub fn total(&self) -> u64 {
        self.minutes.iter().map(|(_, calls)| u64::from(*calls)).sum()
    }
}

/// Reads a table of the Azure Functions trace of 2019: one line for each function, one column for each minute.
pub fn read_azure_functions(text: &str) -> Result<Vec<Calls>, TraceError> {
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(text.as_bytes());
    let headers = reader.headers()?.clone();
    let column = |name: &str| headers.iter().position(|header| header == name);
    let function = column("HashFunction").ok_or_else(|| TraceError::Column("HashFunction".to_owned()))?;
    let first = column("1").ok_or_else(|| TraceError::Column("1".to_owned()))?;
    let minutes =
        headers.iter().skip(first).zip(1_usize..).take_while(|(name, minute)| **name == minute.to_string()).count();
    if minutes > TRACE_MINUTES_MAX {
        return Err(TraceError::TooLong);
    }
    let mut functions = Vec::new();
    for (record, line) in reader.records().zip(2_usize..) {
        let record = record?;
        let mut calls = Vec::new();
        for (text, minute) in record.iter().skip(first).take(minutes).zip(0_u32..) {
            let count: u32 = match text {
                "" | "0" => continue,
                text => text.parse().map_err(|_| TraceError::Count { line, text: text.to_owned() })?,
            };
            calls.push((minute, count));
        }
        functions.push(Calls { function: record.get(function).unwrap_or_default().to_owned(), minutes: calls });
    }
    Ok(functions)
}

/// The middle `count` (in the order of the file) of the functions with so many calls.
pub fn rarely_called(functions: Vec<Calls>, calls: std::ops::RangeInclusive<u64>, count: usize) -> Vec<Calls> {
    let fitting: Vec<Calls> = functions.into_iter().filter(|function| calls.contains(&function.total())).collect();
    let skipped = fitting.len().saturating_sub(count) / 2;
    fitting.into_iter().skip(skipped).take(count).collect()
}

/// When within its minute a call comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// At its beginning, functions in the order of the trace: as a replay by minutes does.
    AtOnce,
    /// Anywhere in it, drawn from a seed.
    Random(u64),
}

impl Demand {
    /// Every call of these functions as a request for a model of its own.
    pub fn of_calls(functions: &[Calls], spread: Spread) -> Result<Self, TraceError> {
        let mut random = match spread {
            Spread::AtOnce => None,
            Spread::Random(seed) => Some(fastrand::Rng::with_seed(seed)),
        };
        if functions.iter().map(Calls::total).sum::<u64>() > ARRIVALS_MAX as u64 {
            return Err(TraceError::TooLong);
        }
        let mut arrivals = Vec::new();
        for (model, function) in functions.iter().enumerate() {
            for (minute, calls) in &function.minutes {
                for _ in 0..*calls {
                    let within = random.as_mut().map_or(0.0, fastrand::Rng::f64) * 60.0;
                    let at = Instant::after(Duration::from_secs_f64(f64::from(*minute) * 60.0 + within));
                    arrivals.push(Arrival { at, model });
                }
            }
        }
        arrivals.sort();
        Ok(Self { models: functions.len(), arrivals })
    }
}
