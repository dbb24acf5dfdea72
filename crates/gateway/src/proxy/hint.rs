//! How long a replica asks to be left alone: `retry-after`, in seconds or as a date, and `retry-after-ms`.

use axum::http::{HeaderMap, HeaderName, header};
use std::time::{Duration, SystemTime};
use warmset_core::routing::RETRY_AFTER_MAX;

const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// Reads the hint of an answer and makes it one that callers can take as it stands: in seconds, and no longer than the
/// gateway itself believes it.
pub(super) fn tame(headers: &mut HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let exact = text(RETRY_AFTER_MS).and_then(|text| number(text, Duration::from_millis));
    let coarse =
        text(header::RETRY_AFTER).and_then(|text| number(text, Duration::from_secs).or_else(|| date(text, now)));
    let wait = exact.or(coarse)?.min(RETRY_AFTER_MAX);
    // Rounded up: who comes back too early is sent away again.
    let milliseconds = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    headers.insert(header::RETRY_AFTER, milliseconds.div_ceil(1000).into());
    if exact.is_some() {
        headers.insert(RETRY_AFTER_MS, milliseconds.into());
    } else {
        headers.remove(RETRY_AFTER_MS);
    }
    Some(wait)
}

/// A whole number, however large; some servers write a fraction.
fn number(text: &str, unit: fn(u64) -> Duration) -> Option<Duration> {
    let whole = text.split_once('.').map_or(text, |(whole, _)| whole);
    let is_number = !whole.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let value = is_number.then(|| whole.parse().unwrap_or(u64::MAX / 1000))?;
    Some(unit(value) + unit(u64::from(whole.len() < text.len())))
}

/// A date that has passed asks for no wait.
fn date(text: &str, now: SystemTime) -> Option<Duration> {
    let until = httpdate::parse_http_date(text).ok()?;
    Some(until.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use proptest::prelude::*;

    fn tamed(pairs: &[(&'static str, &str)]) -> (Option<Duration>, HeaderMap) {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, HeaderValue::from_str(value).unwrap());
        }
        let now = httpdate::parse_http_date("Fri, 31 Dec 1999 23:59:00 GMT").unwrap();
        (tame(&mut headers, now), headers)
    }

    #[test]
    fn seconds_dates_and_milliseconds_are_understood_and_never_endless() {
        let after = "retry-after";
        for (pairs, seconds, shown) in [
            (&[(after, "7")][..], 7.0, "7"),
            (&[(after, " 7 ")], 7.0, "7"),
            (&[(after, "0")], 0.0, "0"),
            (&[(after, "1.5")], 2.0, "2"),
            (&[(after, "86400")], 120.0, "120"),
            (&[(after, "99999999999999999999999999")], 120.0, "120"),
            (&[(after, "Fri, 31 Dec 1999 23:59:30 GMT")], 30.0, "30"),
            (&[(after, "Friday, 31-Dec-99 23:59:30 GMT")], 30.0, "30"),
            (&[(after, "Sat, 01 Jan 2050 00:00:00 GMT")], 120.0, "120"),
            (&[(after, "Fri, 31 Dec 1999 23:00:00 GMT")], 0.0, "0"),
            (&[(after, "3"), ("retry-after-ms", "2500")], 2.5, "3"),
            (&[("retry-after-ms", "900000")], 120.0, "120"),
        ] {
            let (wait, headers) = tamed(pairs);
            assert_eq!(wait, Some(Duration::from_secs_f64(seconds)), "{pairs:?}");
            assert_eq!(headers[after], shown, "{pairs:?}");
            assert!(headers.get(RETRY_AFTER_MS).is_none_or(|value| value.to_str().unwrap().len() <= 6));
        }
        for none in ["", "soon", "-1", "1e9", "Fri, 31 Dec"] {
            let (wait, headers) = tamed(&[(after, none)]);
            assert_eq!((wait, headers[after].to_str().unwrap()), (None, none));
        }
    }

    proptest! {
        #[test]
        fn no_hint_does_harm(text in "[ -~]{0,40}", exact in "[ -~]{0,20}") {
            let mut headers = HeaderMap::new();
            headers.insert("retry-after", HeaderValue::from_str(&text).unwrap());
            headers.insert("retry-after-ms", HeaderValue::from_str(&exact).unwrap());
            prop_assert!(tame(&mut headers, SystemTime::UNIX_EPOCH).is_none_or(|wait| wait <= RETRY_AFTER_MAX));
        }
    }
}
