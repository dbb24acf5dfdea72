//! Demand by time of day: on which share of days a model was asked for in each quarter of an hour.
//!
//! Working days and weekends are kept apart. A share learns a quarter from each day, so that it forgets within days too.

use alloc::{vec, vec::Vec};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Seconds of one bin.
pub const BIN_SECONDS: u32 = 900;
/// Bins of one day.
const DAY_BINS: usize = 96;
/// Kinds of day: working days, weekends.
const KINDS: usize = 2;
/// How much one day teaches.
const LEARNING_SHARE: f32 = 0.25;
/// Bins looked ahead.
const BINS_AHEAD: usize = 4;
/// A share below this is chance: after one day it is a quarter.
const SHARE_MIN: f64 = 0.4;

/// The time of the week where the server is, as its clock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WallTime {
    /// 0 is Monday, 6 Sunday; what is larger wraps.
    pub weekday: u8,
    /// Seconds since midnight; what is larger wraps.
    pub second: u32,
}

impl WallTime {
    fn bin(self) -> usize {
        (self.second / BIN_SECONDS) as usize % DAY_BINS
    }

    fn slot(self) -> Slot {
        Slot { weekend: self.weekday % 7 >= 5, bin: self.bin() }
    }

    /// The time so much later.
    pub fn after(self, passed: Duration) -> Self {
        let seconds = u64::from(self.second).saturating_add(passed.as_secs());
        let days = seconds / 86_400 % 7;
        Self {
            weekday: ((u64::from(self.weekday) + days) % 7) as u8,
            second: u32::try_from(seconds % 86_400).unwrap_or(0),
        }
    }

    /// How long until the bin after this one.
    pub fn until_next_bin(self) -> Duration {
        Duration::from_secs(u64::from(BIN_SECONDS - self.second % BIN_SECONDS))
    }
}

/// One quarter of an hour of one kind of day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    weekend: bool,
    bin: usize,
}

impl Slot {
    /// The slot of a time.
    pub fn of(time: WallTime) -> Self {
        time.slot()
    }

    /// Whether `next` is the quarter of an hour that follows. After a clock was set, it is not.
    pub fn leads_to(self, next: Self) -> bool {
        next.bin == self.bin.saturating_add(1) % DAY_BINS
    }

    fn index(self) -> usize {
        usize::from(self.weekend) * DAY_BINS + self.bin % DAY_BINS
    }
}

/// On which share of days a model was asked for, by quarter of an hour.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
pub struct DayProfile {
    /// Empty before the first request.
    shares: Vec<f32>,
    /// It was asked for in the present slot.
    asked: bool,
}

impl DayProfile {
    /// A request came in the present slot.
    pub fn note(&mut self) {
        self.asked = true;
    }

    /// A slot has been watched to its end.
    pub fn close(&mut self, slot: Slot) {
        let asked = core::mem::take(&mut self.asked);
        if asked {
            self.shares.resize(KINDS * DAY_BINS, 0.0);
        }
        if let Some(share) = self.shares.get_mut(slot.index()) {
            *share += LEARNING_SHARE * (f32::from(u8::from(asked)) - *share);
        }
    }

    /// The clock was set: nobody knows whether this slot was watched to its end.
    pub fn skip(&mut self) {
        self.asked = false;
    }

    /// Everything, exactly: the shares, and whether it was asked for in the present slot.
    pub(super) fn exactly(&self) -> (&[f32], bool) {
        (&self.shares, self.asked)
    }

    /// What [`DayProfile::exactly`] gave.
    pub(super) fn from_exactly(shares: Vec<f32>, asked: bool) -> Self {
        Self { shares, asked }
    }

    /// Whether it has ever seen a request.
    pub fn is_empty(&self) -> bool {
        self.shares.is_empty() && !self.asked
    }

    /// What a model is worth at this time, as a demand: as for intervals, the best ratio of chance to time.
    pub fn demand_per_second(&self, time: WallTime) -> f64 {
        let (mut none, mut kept, mut best) = (1.0, 0.0, 0.0_f64);
        for (begin, end, share) in self.ahead(time) {
            let came = none * share;
            kept += came * (begin + end) / 2.0;
            none -= came;
            best = best.max((1.0 - none) / (kept + none * end).max(1.0));
        }
        best
    }

    /// How long until the next slot in which it is likely asked for, and until the end of that slot.
    pub fn next_in(&self, time: WallTime) -> Option<(Duration, Duration)> {
        let (begin, end, _) = self.ahead(time).find(|(_, _, share)| *share >= SHARE_MIN)?;
        Some((Duration::from_secs_f64(begin), Duration::from_secs_f64(end)))
    }

    /// Seconds until begin and end of each slot ahead, and its share; of the present one what is left, and nothing if the
    /// model was asked for in it already.
    fn ahead(&self, time: WallTime) -> impl Iterator<Item = (f64, f64, f64)> + '_ {
        let first = time.until_next_bin();
        (0..=BINS_AHEAD).map(move |number| {
            let begin = match number.checked_sub(1) {
                None => Duration::ZERO,
                Some(whole) => first + Duration::from_secs(whole as u64 * u64::from(BIN_SECONDS)),
            };
            let end = first + Duration::from_secs(number as u64 * u64::from(BIN_SECONDS));
            let share = self.shares.get(time.after(begin).slot().index()).copied().unwrap_or(0.0);
            let share = if number == 0 && self.asked { 0.0 } else { share };
            let left = (end - begin).as_secs_f64() / f64::from(BIN_SECONDS);
            (begin.as_secs_f64(), end.as_secs_f64(), f64::from(share) * left)
        })
    }
}

/// What is written down: whole percents of the slots that have any.
#[derive(Serialize, Deserialize)]
struct Stored(Vec<(u16, u8)>);

impl From<DayProfile> for Stored {
    fn from(profile: DayProfile) -> Self {
        let percents =
            profile.shares.iter().zip(0_u16..).map(|(share, slot)| (slot, libm::roundf(share * 100.0) as u8));
        Self(percents.filter(|(_, percent)| *percent > 0).collect())
    }
}

impl TryFrom<Stored> for DayProfile {
    type Error = &'static str;

    fn try_from(stored: Stored) -> Result<Self, Self::Error> {
        let mut shares = vec![0.0; if stored.0.is_empty() { 0 } else { KINDS * DAY_BINS }];
        for (slot, percent) in &stored.0 {
            let share = shares.get_mut(usize::from(*slot)).ok_or("a quarter of an hour beyond the day")?;
            *share = f32::from((*percent).min(100)) / 100.0;
        }
        Ok(Self { shares, asked: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(weekday: u8, hour: u32, minute: u32) -> WallTime {
        WallTime { weekday, second: hour * 3_600 + minute * 60 }
    }

    /// Working days from Monday on, asked for at half past eight only.
    fn learned(days: u8) -> DayProfile {
        let mut profile = DayProfile::default();
        for day in 0..days {
            for bin in 0..DAY_BINS {
                if bin == 34 {
                    profile.note();
                }
                profile.close(Slot { weekend: day % 7 >= 5, bin });
            }
        }
        profile
    }

    #[test]
    fn a_habit_is_expected_after_two_days_and_only_on_its_kind_of_day() {
        assert_eq!(learned(1).next_in(at(1, 8, 0)), None);
        let profile = learned(4);
        assert_eq!(profile.next_in(at(4, 8, 0)), Some((Duration::from_secs(1_800), Duration::from_secs(2_700))));
        assert_eq!(profile.next_in(at(5, 8, 0)), None, "Saturday is no working day");
        assert_eq!(profile.next_in(at(4, 12, 0)), None);
        let (soon, later) = (profile.demand_per_second(at(4, 8, 29)), profile.demand_per_second(at(4, 7, 45)));
        assert!(soon > 2.0 * later && later > 0.0, "{soon} {later}");
    }

    #[test]
    fn a_habit_that_ended_is_forgotten_within_days() {
        let mut profile = learned(4);
        for _ in 0..3 {
            profile.close(Slot { weekend: false, bin: 34 });
        }
        assert_eq!(profile.next_in(at(4, 8, 0)), None);
    }

    #[test]
    fn times_wrap_around_midnight_and_the_week() {
        assert_eq!(at(6, 23, 50).after(Duration::from_secs(1_200)), at(0, 0, 10));
        assert!(Slot::of(at(6, 23, 50)).leads_to(Slot::of(at(0, 0, 10))));
        assert!(!Slot::of(at(0, 2, 50)).leads_to(Slot::of(at(0, 1, 50))), "the clock was set back");
        assert_eq!(at(0, 0, 1).until_next_bin(), Duration::from_secs(840));
    }

    #[test]
    fn what_is_stored_comes_back() {
        let profile = learned(3);
        let text = serde_json::to_string(&profile).expect("plain data");
        let back: DayProfile = serde_json::from_str(&text).expect("plain data");
        assert_eq!(back.next_in(at(4, 8, 0)), profile.next_in(at(4, 8, 0)));
        // Whole percents are kept as they are, however often they are stored: a recording tells what was remembered.
        for percent in 0..=100 {
            let stored = std::format!("[[7,{percent}]]");
            let back: DayProfile = serde_json::from_str(&stored).expect("plain data");
            let again = serde_json::to_string(&back).expect("plain data");
            assert_eq!(again, if percent == 0 { "[]" } else { stored.as_str() });
        }
        assert!(serde_json::from_str::<DayProfile>("[[192, 50]]").is_err());
    }
}
