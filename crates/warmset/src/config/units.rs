//! Sizes and durations as people write them.

use std::time::Duration;
use warmset_core::Bytes;

const SIZE_UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
];
const DURATION_UNITS: [(&str, f64); 7] =
    [("", 1.0), ("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0), ("us", 0.000_001)];
/// A hundred years: longer is a mistake.
const DURATION_SECONDS_MAX: f64 = 3_155_760_000.0;

/// Parses `2GiB`, `1.5 GiB`, `500MB` or a number of bytes.
pub(crate) fn parse_bytes(text: &str) -> Result<Bytes, String> {
    let wrong = || format!("{text:?} is not a size: write for instance \"2GiB\", \"384MiB\" or a number of bytes");
    let (number, unit) = split_unit(text.trim());
    let unit = unit.trim().to_ascii_uppercase();
    let (_, factor) = SIZE_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(*factor).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * *factor as f64;
    if bytes.is_finite() && (0.0..1e18).contains(&bytes) { Ok(bytes as Bytes) } else { Err(wrong()) }
}

/// Parses `500ms`, `5m`, `1h30m` or a number of seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration: write for instance \"500ms\", \"30s\", \"5m\" or \"1h30m\"");
    let mut rest = text.trim();
    let mut seconds = 0.0;
    if rest.is_empty() {
        return Err(wrong());
    }
    while !rest.is_empty() {
        let (number, after) = split_unit(rest);
        let end = after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len());
        let unit = after[..end].trim();
        let (_, factor) = DURATION_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        seconds += number.parse::<f64>().map_err(|_| wrong())? * factor;
        rest = &after[end..];
    }
    duration_of_seconds(seconds).ok_or_else(wrong)
}

/// A duration of so many seconds, unless it is absurd.
pub(crate) fn duration_of_seconds(seconds: f64) -> Option<Duration> {
    (0.0..=DURATION_SECONDS_MAX).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// Splits after the number at the start.
fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text.split_at(end)
}

/// A size for people.
pub(crate) fn format_bytes(bytes: Bytes) -> String {
    const NAMES: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut index = 0;
    while value >= 1024.0 && index + 1 < NAMES.len() {
        value /= 1024.0;
        index += 1;
    }
    if index == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", NAMES[index]) }
}

/// Seconds for people.
pub(crate) fn format_seconds(seconds: f64) -> String {
    if seconds < 0.001 {
        format!("{:.0} µs", seconds * 1e6)
    } else if seconds < 1.0 {
        format!("{:.0} ms", seconds * 1e3)
    } else {
        format!("{seconds:.2} s")
    }
}

/// A span of time as people say it: two units at most.
pub(crate) fn format_span(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3_600 => format!("{} min {} s", whole / 60, whole % 60),
        3_600..86_400 => format!("{} h {} min", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_two_units_at_most() {
        let spans = [7.4, 61.0, 5_400.0, 90_000.0].map(format_span);
        assert_eq!(spans, ["7 s", "1 min 1 s", "1 h 30 min", "1 d 1 h"]);
    }
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("2GiB", 2 << 30),
            ("2 gib", 2 << 30),
            ("384MiB", 384 << 20),
            ("1.5KiB", 1536),
            ("500MB", 500_000_000),
            ("7B", 7),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for bad in ["", "lots", "-1", "GiB", "1.2.3", "2G", "99999999999TiB", "1e3"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, milliseconds) in
            [("500ms", 500), ("5m", 300_000), ("90", 90_000), ("1h30m", 5_400_000), ("0.5s", 500), ("2 s", 2_000)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for bad in ["", "soon", "-5s", "5x", "m", "1000000000000d"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_and_times_are_written_for_people() {
        assert_eq!(format_bytes(1023), "1023 B");
        assert_eq!(format_bytes(98_362_432), "93.8 MiB");
        assert_eq!(format_seconds(0.25), "250 ms");
        assert_eq!(format_seconds(2.5), "2.50 s");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_without_a_panic(text in ".{0,20}") {
            let _ = parse_bytes(&text);
            let _ = parse_duration(&text);
        }
    }
}
