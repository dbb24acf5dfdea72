//! A forecast with everything in it, for a copy of the machine that has it. What is kept over a restart is less: whole
//! percents, and nothing of the present moment.

use super::{DayProfile, Forecast, Intervals, Score};
use crate::time::Instant;
use alloc::vec::Vec;
use core::time::Duration;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
struct Whole {
    intervals: Intervals,
    day_shares: Vec<f32>,
    asked: bool,
    score: Score,
    last: Option<Instant>,
    age: Duration,
    scheduled: bool,
}

pub(crate) fn serialize<S: Serializer>(forecast: &Forecast, serializer: S) -> Result<S::Ok, S::Error> {
    let (shares, asked) = forecast.day.exactly();
    let whole = Whole {
        intervals: forecast.intervals.clone(),
        day_shares: shares.to_vec(),
        asked,
        score: forecast.score,
        last: forecast.last,
        age: forecast.age,
        scheduled: forecast.scheduled,
    };
    whole.serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Forecast, D::Error> {
    let Whole { intervals, day_shares, asked, score, last, age, scheduled } = Whole::deserialize(deserializer)?;
    Ok(Forecast { intervals, day: DayProfile::from_exactly(day_shares, asked), score, last, age, scheduled })
}
