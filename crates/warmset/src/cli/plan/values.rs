//! Numbers, sizes and speeds as people write them, without a digit lost. What is no number is wrong usage; what is a number and means
//! nothing, such as one below zero, is refused by whoever calculates with it.

use anyhow::{Result, bail};

/// Digits that are believed: more overflow what is calculated with.
const DIGITS_MAX: usize = 30;
const SIZE_UNITS: [(&str, i128); 10] = [
    ("", 1),
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];
/// Bits per second, as makers of networks count.
const BIT_UNITS: [(&str, f64); 3] = [("mbit", 1e6), ("gbit", 1e9), ("tbit", 1e12)];
/// Bytes of a megabyte: sizes of models are told in it.
const MEGABYTE: i128 = 1_000_000;

/// A decimal number times a factor, if that is whole.
fn exactly(text: &str, factor: i128) -> Option<i128> {
    let (text, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (text, 0),
    };
    let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || digits.len() > DIGITS_MAX || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let scale = exponent - fraction.len() as i32;
    let mut number = digits.parse::<i128>().ok()?.checked_mul(factor)?;
    if number != 0 {
        for _ in 0..scale.unsigned_abs().min(DIGITS_MAX as u32 * 2) {
            number = if scale > 0 { number.checked_mul(10)? } else { divided(number)? };
        }
    }
    Some(if negative { -number } else { number })
}

fn divided(number: i128) -> Option<i128> {
    (number % 10 == 0).then_some(number / 10)
}

/// A whole number: `4096`, `70.55e9`.
pub(super) fn whole(text: &str) -> Result<i128, String> {
    exactly(text.trim(), 1).ok_or_else(|| format!("{text:?} is not a whole number: write for instance 4096 or 8e9"))
}

/// A size: `141GB`, `1.5GiB` or a number of bytes.
pub(super) fn size(text: &str) -> Result<i128, String> {
    let wrong = || format!("{text:?} is not a size: write for instance 141GB, 1.5GiB or a number of bytes");
    let (number, unit) = split_unit(text);
    let (_, factor) = SIZE_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    exactly(number, *factor).ok_or_else(wrong)
}

/// A speed: `3.35TB/s`, `25Gbit/s` or bytes per second.
pub(super) fn speed(text: &str) -> Result<f64, String> {
    let wrong = || format!("{text:?} is not a speed: write for instance 3.2GB/s, 25Gbit/s or bytes per second");
    let (number, unit) = split_unit(text);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.strip_suffix("/s").unwrap_or(&unit);
    if let Some((_, bits)) = BIT_UNITS.iter().find(|(name, _)| *name == unit) {
        return Ok(number * bits / 8.0);
    }
    let (_, factor) = SIZE_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    Ok(number * *factor as f64)
}

/// Megabytes, as a number without a unit, in bytes.
pub(super) fn megabytes(text: &str) -> Result<i128, String> {
    let wrong = || format!("{text:?} is not a number of megabytes: write a plain number such as 820, without a unit");
    exactly(text.trim(), MEGABYTE).ok_or_else(wrong)
}

/// Splits after the number at the start; the unit in small letters.
fn split_unit(text: &str) -> (&str, String) {
    let text = text.trim();
    let in_number = |(index, character): &(usize, char)| {
        let sign = *character == '-' && (*index == 0 || text[..*index].ends_with(['e', 'E']));
        let exponent = matches!(character, 'e' | 'E')
            && text[index + 1..].starts_with(|next: char| next.is_ascii_digit() || next == '-');
        sign || exponent || character.is_ascii_digit() || *character == '.'
    };
    let end = text.char_indices().find(|place| !in_number(place)).map_or(text.len(), |(index, _)| index);
    (&text[..end], text[end..].trim().to_ascii_lowercase())
}

/// A count or size that a calculator takes.
pub(super) fn count(name: &str, value: i128) -> Result<u64> {
    match u64::try_from(value) {
        Ok(count) => Ok(count),
        Err(_) if value < 0 => bail!("{name} is {value}: give a number of at least 0"),
        Err(_) => bail!("{name} is {value}: that is more than can be calculated with, check its unit"),
    }
}

/// The same of something that may be left out.
pub(super) fn optional(name: &str, value: Option<i128>) -> Result<Option<u64>> {
    value.map(|value| count(name, value)).transpose()
}

/// Megabytes of so many bytes, exactly.
pub(super) fn as_megabytes(bytes: i128) -> serde_json::Value {
    if bytes % MEGABYTE == 0 {
        (bytes / MEGABYTE).to_string().parse().unwrap_or_default()
    } else {
        (bytes as f64 / MEGABYTE as f64).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn no_digit_is_lost() {
        for (text, bytes) in [
            ("141GB", 141_000_000_000),
            ("2.3GB", 2_300_000_000),
            ("0.29 gb", 290_000_000),
            ("1.5KiB", 1536),
            ("-1GB", -1_000_000_000),
            ("7", 7),
            ("1e3", 1000),
            ("1.4e1GB", 14_000_000_000),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!((whole("70.55e9"), whole("-5"), whole("0")), (Ok(70_550_000_000), Ok(-5), Ok(0)));
        assert_eq!(
            (megabytes("820"), megabytes("0.5"), megabytes("-264")),
            (Ok(820_000_000), Ok(500_000), Ok(-264_000_000))
        );
        for (text, speed_bytes) in [("3.35TB/s", 3.35e12), ("25Gbit/s", 3.125e9), ("1.15gb/s", 1.15e9), ("100", 100.0)]
        {
            assert_eq!(speed(text), Ok(speed_bytes), "{text}");
        }
        assert_eq!(
            (as_megabytes(820_000_000).to_string(), as_megabytes(-1_500_000).to_string()),
            ("820".into(), "-1.5".into())
        );
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for text in ["", "lots", "1.5", "nan", "1e-1", "--1", "1_000", "5GB"] {
            assert!(whole(text).is_err(), "{text}");
        }
        for text in ["", "GB", "1.5.2GB", "2G", "3 apples", "0.3", "1e400"] {
            assert!(size(text).is_err(), "{text}");
        }
        for text in ["820MB", "0.0000001", "x"] {
            assert!(megabytes(text).is_err(), "{text}");
        }
        assert!(speed("fast").is_err() && speed("3 GB/h").is_err());
        assert!(count("tokens", -5).unwrap_err().to_string().contains("tokens is -5"));
        assert!(count("tokens", i128::from(u64::MAX) + 1).unwrap_err().to_string().contains("check its unit"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_without_a_panic(text in ".{0,40}") {
            let _ = (whole(&text), size(&text), speed(&text), megabytes(&text));
        }

        #[test]
        fn any_number_is_read_as_it_is(number in -1_000_000_000_000i128..1_000_000_000_000) {
            prop_assert_eq!(whole(&number.to_string()), Ok(number));
            prop_assert_eq!(megabytes(&number.to_string()), Ok(number * MEGABYTE));
        }
    }
}
