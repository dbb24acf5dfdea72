//! What a calculator takes: numbers that mean something. Everything else is refused with its name and what to give.

use std::borrow::Cow;

/// Resolution of shares: a millionth, so that a share of a number of bytes is exact.
const SHARE_PARTS: u64 = 1_000_000;
/// Above this a whole number is no longer exact as floating point.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// Why an input is not calculated with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {problem}")]
pub struct Refused {
    /// What it is about, as the caller names it.
    pub name: &'static str,
    /// What is wrong and what to do.
    pub problem: Cow<'static, str>,
}

/// Makes a refusal.
pub fn refused(name: &'static str, problem: impl Into<Cow<'static, str>>) -> Refused {
    Refused { name, problem: problem.into() }
}

/// A count that must be there.
pub fn at_least_one(name: &'static str, value: u64) -> Result<u64, Refused> {
    if value == 0 { Err(refused(name, "is 0: give at least 1")) } else { Ok(value) }
}

/// A rate, size or time above zero.
pub fn positive(name: &'static str, value: f64) -> Result<f64, Refused> {
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(refused(name, format!("is {value}: give a finite number above 0")))
    }
}

/// A rate, size or time that may be zero.
pub fn not_negative(name: &'static str, value: f64) -> Result<f64, Refused> {
    if value.is_finite() && value >= 0.0 {
        Ok(value)
    } else {
        Err(refused(name, format!("is {value}: give a finite number of at least 0")))
    }
}

/// A part of a whole: above 0, at most 1.
pub fn share(name: &'static str, value: f64) -> Result<f64, Refused> {
    if value > 0.0 && value <= 1.0 {
        Ok(value)
    } else {
        Err(refused(name, format!("is {value}: give a share above 0 and at most 1, such as 0.9")))
    }
}

/// A part of a whole that may be nothing.
pub fn share_or_none(name: &'static str, value: f64) -> Result<f64, Refused> {
    if (0.0..=1.0).contains(&value) {
        Ok(value)
    } else {
        Err(refused(name, format!("is {value}: give a share from 0 to 1, such as 0.3")))
    }
}

/// A whole number out of a calculation in floating point, unless it is too large to be exact.
pub fn whole(name: &'static str, value: f64) -> Result<u64, Refused> {
    if (0.0..=EXACT_MAX).contains(&value) { Ok(value as u64) } else { Err(too_large(name)) }
}

/// A result that is a number.
pub fn finite(name: &'static str, value: f64) -> Result<f64, Refused> {
    if value.is_finite() { Ok(value) } else { Err(too_large(name)) }
}

/// The product of whole numbers, if it can be held.
pub fn product(name: &'static str, factors: &[u64]) -> Result<u64, Refused> {
    let product = factors.iter().try_fold(1u64, |product, factor| product.checked_mul(*factor));
    product.ok_or_else(|| too_large(name))
}

/// The sum of whole numbers, if it can be held.
pub fn sum(name: &'static str, terms: impl IntoIterator<Item = u64>) -> Result<u64, Refused> {
    let sum = terms.into_iter().try_fold(0u64, u64::checked_add);
    sum.ok_or_else(|| too_large(name))
}

/// A share of a whole number, rounded down; the share counts in millionths.
pub fn part_of(whole: u64, share: f64) -> u64 {
    let parts = (share * SHARE_PARTS as f64).round() as u128;
    (u128::from(whole) * parts / u128::from(SHARE_PARTS)) as u64
}

fn too_large(name: &'static str) -> Refused {
    refused(name, "is too large to be calculated with: check the units of what it is made of")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_nothing_is_refused_with_its_name() {
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(positive("rate", value).unwrap_err().to_string().starts_with("rate is "), "{value}");
            assert!(share("share", value).is_err(), "{value}");
        }
        assert!(not_negative("time", -0.1).is_err() && not_negative("time", 0.0).is_ok());
        assert!(share("share", 1.000_001).is_err() && share_or_none("share", 0.0).is_ok());
        assert!(at_least_one("tokens", 0).unwrap_err().to_string().contains("give at least 1"));
        assert!(product("bytes", &[u64::MAX, 2]).unwrap_err().to_string().contains("too large"));
        assert!(sum("bytes", [u64::MAX, 1]).is_err());
        assert!(whole("bytes", 1e17).is_err() && finite("seconds", f64::INFINITY).is_err());
    }

    #[test]
    fn a_share_of_bytes_is_exact() {
        assert_eq!(part_of(640_000_000_000, 0.9), 576_000_000_000);
        assert_eq!(part_of(u64::MAX, 1.0), u64::MAX);
        assert_eq!(part_of(10, 0.05), 0);
    }
}
