//! Schedules: when a model is to be warm whatever its demand, as `"Mon-Fri 08:00-18:00 Europe/Berlin"`.

use jiff::{SignedDuration, Timestamp, ZonedDateTime, tz::TimeZone};
use std::time::Duration;

/// Windows one model may have.
pub(crate) const WINDOWS_MAX: usize = 16;
const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const MINUTES_A_DAY: i32 = 24 * 60;

/// A part of the day on some days of the week.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    /// From Monday.
    days: [bool; 7],
    from_minute: i32,
    /// Not after `from_minute` if it ends on the next day.
    until_minute: i32,
    zone: TimeZone,
}

impl Window {
    /// Reads `[DAYS] HH:MM-HH:MM [ZONE]`: every day and the machine's own zone unless said otherwise.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            format!("{text:?} is no schedule: {what}; write for instance \"Mon-Fri 08:00-18:00 Europe/Berlin\"")
        };
        let mut words = text.split_whitespace().peekable();
        let days = match words.next_if(|word| !word.contains(':')) {
            Some(word) => parse_days(word).ok_or_else(|| wrong("days are Mon, Mon-Fri or Mon,Wed,Fri"))?,
            None => [true; 7],
        };
        let times = words.next().and_then(|word| word.split_once('-')).ok_or_else(|| wrong("it has no HH:MM-HH:MM"))?;
        let time = |word| parse_minute(word).ok_or_else(|| wrong("times are 00:00 to 24:00"));
        let (from_minute, until_minute) = (time(times.0)?, time(times.1)?);
        if from_minute == until_minute {
            return Err(wrong("it begins when it ends: a whole day is 00:00-24:00"));
        }
        let zone = match words.next() {
            Some(name) => TimeZone::get(name).map_err(|_| wrong("the time zone is not known here"))?,
            None => TimeZone::system(),
        };
        if words.next().is_some() {
            return Err(wrong("there is something after the time zone"));
        }
        Ok(Self { days, from_minute, until_minute, zone })
    }

    /// Whether it is open at this moment, or will be within `lead`.
    pub(crate) fn is_open(&self, now: Timestamp, lead: Duration) -> bool {
        let later = SignedDuration::try_from(lead).ok().and_then(|lead| now.checked_add(lead).ok()).unwrap_or(now);
        [now, later].into_iter().any(|at| self.contains(&at.to_zoned_datetime(self.zone.clone())))
    }

    fn contains(&self, at: &ZonedDateTime) -> bool {
        let minute = i32::from(at.hour()) * 60 + i32::from(at.minute());
        let weekday = usize::try_from(at.weekday().to_monday_zero_offset()).unwrap_or(0) % 7;
        let on = |day: usize| self.days.get(day).copied().unwrap_or(false);
        if self.from_minute < self.until_minute {
            return on(weekday) && (self.from_minute..self.until_minute).contains(&minute);
        }
        // What began yesterday ends today.
        on(weekday) && minute >= self.from_minute || on((weekday + 6) % 7) && minute < self.until_minute
    }
}

/// Reads all windows of a model.
pub(crate) fn parse_all(texts: &[String]) -> Result<Vec<Window>, String> {
    if texts.len() > WINDOWS_MAX {
        return Err(format!("a model can have at most {WINDOWS_MAX} schedules"));
    }
    texts.iter().map(|text| Window::parse(text)).collect()
}

fn parse_days(text: &str) -> Option<[bool; 7]> {
    let day = |word: &str| DAYS.iter().position(|known| word.eq_ignore_ascii_case(known));
    let mut days = [false; 7];
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (day(first)?, day(last)?);
        // Sat-Mon goes around the end of the week.
        for offset in 0..=(last + 7 - first) % 7 {
            *days.get_mut((first + offset) % 7)? = true;
        }
    }
    Some(days)
}

fn parse_minute(text: &str) -> Option<i32> {
    let (hour, minute) = text.split_once(':')?;
    let number = |word: &str| (word.len() == 2).then(|| word.parse::<u8>().ok()).flatten().map(i32::from);
    let (hour, minute) = (number(hour)?, number(minute)?);
    let sum = hour * 60 + minute;
    (minute < 60 && sum <= MINUTES_A_DAY).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(schedule: &str, at: &str) -> bool {
        Window::parse(schedule).unwrap().is_open(at.parse().unwrap(), Duration::ZERO)
    }

    #[test]
    fn office_hours_follow_their_zone_and_its_summer_time() {
        let office = "Mon-Fri 08:00-18:00 Europe/Berlin";
        assert!(open(office, "2026-11-30T07:00:00Z") && !open(office, "2026-11-30T06:59:59Z"));
        assert!(open(office, "2026-07-06T06:00:00Z"), "an hour earlier in summer");
        assert!(!open(office, "2026-11-30T17:00:00Z") && !open(office, "2026-11-29T10:00:00Z"), "Sunday");
    }

    #[test]
    fn nights_end_on_the_next_day_and_weeks_wrap() {
        let night = "Fri 22:00-06:00 UTC";
        assert!(open(night, "2026-11-27T23:00:00Z") && open(night, "2026-11-28T05:59:00Z"));
        assert!(!open(night, "2026-11-27T05:00:00Z") && !open(night, "2026-11-28T22:30:00Z"));
        assert!(open("Sat-Mon 00:00-24:00 UTC", "2026-11-29T23:59:59Z"));
        assert!(!open("Sat-Mon 00:00-24:00 UTC", "2026-12-01T00:00:00Z"));
    }

    #[test]
    fn it_opens_early_enough_to_load() {
        let window = Window::parse("08:00-09:00 UTC").unwrap();
        let before = "2026-11-29T07:59:30Z".parse().unwrap();
        assert!(window.is_open(before, Duration::from_secs(60)) && !window.is_open(before, Duration::ZERO));
    }

    #[test]
    fn what_is_no_schedule_is_refused_with_an_example() {
        for text in [
            "",
            "always",
            "Mon",
            "Mon-Foo 08:00-09:00",
            "08:00",
            "8:00-9:00",
            "08:00-08:00",
            "08:60-09:00",
            "23:00-24:01",
            "08:00-09:00 Mars/Olympus",
            "08:00-09:00 UTC now",
        ] {
            let reason = Window::parse(text).unwrap_err();
            assert!(reason.contains("Mon-Fri 08:00-18:00 Europe/Berlin"), "{reason}");
        }
        assert!(parse_all(&vec!["08:00-09:00".to_owned(); 17]).unwrap_err().contains("at most 16"));
    }
}
