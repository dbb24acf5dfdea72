//! The `Prefer` header (RFC 7240), as far as it speaks of waiting, and `Idempotency-Key`. Preferences with other names
//! are passed over, as the RFC wants it; a value that one of ours cannot have is a mistake of the caller's and is told.

use crate::errors::ApiError;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use std::time::Duration;

pub(crate) const PREFER: HeaderName = HeaderName::from_static("prefer");
pub(crate) const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The longest wait that is granted: some proxies close quiet connections.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(120);
/// The longest key.
pub(crate) const KEY_BYTES_MAX: usize = 255;

/// What a caller prefers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Preference {
    /// A job is fine.
    pub(crate) respond_async: bool,
    /// It would wait so long for the answer itself.
    pub(crate) wait: Option<Duration>,
}

impl Preference {
    /// Reads every `Prefer` header. Of several values of one preference the first counts.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut found = Self::default();
        for value in headers.get_all(PREFER) {
            let text = value.to_str().map_err(|_| wrong("must be visible ASCII characters"))?;
            for preference in outside_quotes(text, ',') {
                let plain = outside_quotes(preference, ';').next().unwrap_or_default();
                let (name, value) = plain.split_once('=').unwrap_or((plain, ""));
                let value = value.trim().trim_matches('"').trim();
                match name.trim().to_ascii_lowercase().as_str() {
                    "respond-async" if value.is_empty() => found.respond_async = true,
                    "respond-async" => return Err(wrong("respond-async has no value: leave it out")),
                    "wait" => {
                        let wait = seconds(value).ok_or_else(|| wrong("wait must be a whole number of seconds"))?;
                        found.wait = found.wait.or(Some(wait));
                    }
                    _ => {}
                }
            }
        }
        Ok(found)
    }

    /// What was granted, for the answer.
    pub(crate) fn applied(self) -> Option<HeaderValue> {
        if !self.respond_async {
            return None;
        }
        let text = match self.wait {
            Some(wait) => format!("respond-async, wait={}", wait.as_secs()),
            None => "respond-async".to_owned(),
        };
        HeaderValue::from_str(&text).ok()
    }
}

fn wrong(what: &str) -> ApiError {
    ApiError::param("prefer", format!("prefer: {what}"))
}

/// Digits only; more of them than fit mean as long as possible.
fn seconds(text: &str) -> Option<Duration> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| Duration::from_secs(text.parse().unwrap_or(u64::MAX)).min(WAIT_MAX))
}

/// Splits a header where a separator stands outside of quotes.
fn outside_quotes(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    text.split(move |letter| {
        is_quoted ^= letter == '"';
        letter == separator && !is_quoted
    })
}

/// The caller's own name for a request.
pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let key = value.to_str().ok().map(str::trim).filter(|key| !key.is_empty() && key.len() <= KEY_BYTES_MAX);
    let wrong = || ApiError::body(format!("idempotency-key must be 1 to {KEY_BYTES_MAX} visible ASCII characters"));
    key.map(|key| Some(key.to_owned())).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[&'static str]) -> Preference {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(PREFER, HeaderValue::from_static(value));
        }
        Preference::of(&headers).unwrap()
    }

    fn refused(value: &'static [u8]) -> String {
        let mut headers = HeaderMap::new();
        headers.append(PREFER, HeaderValue::from_bytes(value).unwrap());
        Preference::of(&headers).unwrap_err().message().to_owned()
    }

    #[test]
    fn preferences_are_read_in_every_form() {
        let prefers =
            |respond_async, wait: Option<u64>| Preference { respond_async, wait: wait.map(Duration::from_secs) };
        assert_eq!(read(&[]), prefers(false, None));
        assert_eq!(read(&["respond-async"]), prefers(true, None));
        assert_eq!(read(&["Respond-Async, wait=10"]), prefers(true, Some(10)));
        assert_eq!(read(&["return=minimal", "wait = \"5\" ; x=1,respond-async"]), prefers(true, Some(5)));
        assert_eq!(read(&["wait=99999"]), prefers(false, Some(WAIT_MAX.as_secs())));
        assert_eq!(read(&["wait=99999999999999999999999"]), prefers(false, Some(WAIT_MAX.as_secs())));
        assert_eq!(read(&["respond-async=, wait=0", ",, ;"]), prefers(true, Some(0)));
        assert_eq!(read(&["wait=1, wait=9"]), prefers(false, Some(1)));
    }

    #[test]
    fn other_names_are_passed_over_and_nonsense_under_our_own_is_told() {
        let none = Preference::default();
        assert_eq!(read(&["foo", "wait-for=abc, x=\"a, wait=abc\"; wait=abc", "handling=lenient"]), none);
        for value in [b"wait=abc" as &[u8], b"wait", b"wait=-1", b"wait=1.5", b"wait=+3", b"respond-async, wait=5s"] {
            assert_eq!(refused(value), "prefer: wait must be a whole number of seconds", "{value:?}");
        }
        assert!(refused(b"respond-async=yes").contains("no value"));
        assert!(refused(b"wait=\xff").contains("ASCII"));
    }

    #[test]
    fn what_is_granted_is_said() {
        assert_eq!(read(&["wait=3"]).applied(), None);
        assert_eq!(read(&["respond-async"]).applied().unwrap(), "respond-async");
        assert_eq!(read(&["respond-async, wait=3"]).applied().unwrap(), "respond-async, wait=3");
    }

    #[test]
    fn keys_are_bounded() {
        let key = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(IDEMPOTENCY_KEY, HeaderValue::from_bytes(text.as_bytes()).unwrap());
            idempotency_key(&headers)
        };
        assert_eq!(idempotency_key(&HeaderMap::new()).unwrap(), None);
        assert_eq!(key(" abc-1 ").unwrap().as_deref(), Some("abc-1"));
        assert!(key("").is_err() && key(&"x".repeat(KEY_BYTES_MAX + 1)).is_err() && key("\u{e4}").is_err());
    }
}
