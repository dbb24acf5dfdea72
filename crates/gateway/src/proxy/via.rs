//! Requests that come round again. Each gateway adds itself to `via`; one that finds itself there, or too many others,
//! ends the request instead of sending it round for ever.

use crate::errors::ApiError;
use axum::http::{HeaderMap, HeaderValue, header};

/// The most gateways that a request passes.
const GATEWAYS_MAX: usize = 8;
const NAME_START: &str = "warmset-";

/// The name of one gateway among others, for as long as it runs.
#[derive(Debug)]
pub(super) struct Via {
    name: String,
    entry: Option<HeaderValue>,
}

impl Via {
    /// `unique` is this gateway's and nobody else's.
    pub(super) fn new(unique: &str) -> Self {
        let name = format!("{NAME_START}{unique}");
        let entry = HeaderValue::from_str(&format!("1.1 {name}")).ok();
        Self { name, entry }
    }

    /// Refuses what was here before, or at too many others.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let mut passed = 0;
        for name in headers.get_all(header::VIA).iter().filter_map(|value| value.to_str().ok()).flat_map(names) {
            passed += usize::from(name.starts_with(NAME_START));
            if name == self.name || passed >= GATEWAYS_MAX {
                return Err(ApiError::loop_detected());
            }
        }
        Ok(())
    }

    /// Lets the next one know whom a request has passed: those that its caller named, and this gateway.
    pub(super) fn extend(&self, from: &HeaderMap, to: &mut HeaderMap) {
        for value in from.get_all(header::VIA).iter().chain(&self.entry) {
            to.append(header::VIA, value.clone());
        }
    }
}

/// `1.1 name (comment), 1.0 other`
fn names(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').filter_map(|entry| entry.split_ascii_whitespace().nth(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_was_here_is_known_and_others_pass() {
        let (here, other) = (Via::new("aa"), Via::new("bb"));
        let mut first = HeaderMap::new();
        first.insert("via", HeaderValue::from_static("1.0 fred (warmset-aa), HTTP/1.1 proxy:80"));
        assert!(here.check(&first).is_ok());
        let mut second = HeaderMap::new();
        here.extend(&first, &mut second);
        assert!(other.check(&second).is_ok() && here.check(&second).is_err());
        let mut third = HeaderMap::new();
        other.extend(&second, &mut third);
        assert!(here.check(&third).is_err() && Via::new("cc").check(&third).is_ok());
        // What somebody between them joined into one line is the same.
        let joined: Vec<&str> = third.get_all("via").iter().map(|value| value.to_str().unwrap()).collect();
        let mut line = HeaderMap::new();
        line.insert("via", HeaderValue::from_str(&joined.join(", ")).unwrap());
        assert!(here.check(&line).is_err() && Via::new("cc").check(&line).is_ok());
    }

    #[test]
    fn a_way_has_an_end() {
        let mut headers = HeaderMap::new();
        for number in 0..GATEWAYS_MAX {
            assert!(Via::new("last").check(&headers).is_ok());
            let before = std::mem::take(&mut headers);
            Via::new(&format!("{number}")).extend(&before, &mut headers);
        }
        assert!(Via::new("last").check(&headers).is_err());
    }
}
