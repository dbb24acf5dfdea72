//! Who may administrate: holders of an admin key once there is one; before that only programs on this machine, and
//! never a web page that a browser on this machine happens to show.

use super::AdminError;
use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};
use std::{net::IpAddr, sync::Arc};

/// The admin keys, as the SHA-256 of each.
#[derive(Debug, Clone, Default)]
pub struct AdminAccess {
    /// SHA-256 hashes; empty while no key was ever made.
    pub key_hashes: Vec<[u8; 32]>,
}

/// The form in which an admin key is kept.
pub fn hash_admin_key(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

pub(crate) async fn guard(State(access): State<Arc<AdminAccess>>, request: Request, next: Next) -> Response {
    match check(&access, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check(access: &AdminAccess, headers: &HeaderMap) -> Result<(), AdminError> {
    if !access.key_hashes.is_empty() {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let hash = bearer.map(hash_admin_key);
        // Hashes are compared, so the time it takes says nothing about a key.
        if hash.is_some_and(|hash| access.key_hashes.contains(&hash)) {
            return Ok(());
        }
        return Err(AdminError { status: 401, message: "an admin key is needed: Authorization: Bearer KEY".into() });
    }
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("not text"));
    let origin = text(header::ORIGIN).map(|origin| origin.split_once("://").map_or(origin, |(_, host)| host));
    if text(header::HOST).into_iter().chain(origin).all(is_this_machine) {
        return Ok(());
    }
    let message = "without an admin key only programs on this machine may call, by a loopback address";
    Err(AdminError { status: 403, message: message.into() })
}

/// Whether a host, with or without a port, names this machine: anything else may be a name that somebody else
/// pointed here.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| ((*name).parse().unwrap(), header::HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn with_a_key_only_its_holders_may_call() {
        let access = AdminAccess { key_hashes: vec![hash_admin_key("secret")] };
        assert!(check(&access, &headers(&[("authorization", "Bearer secret")])).is_ok());
        for wrong in ["Bearer wrong", "Bearer ", "secret", "Basic secret", "bearer secret"] {
            assert_eq!(check(&access, &headers(&[("authorization", wrong)])).unwrap_err().status, 401, "{wrong}");
        }
        assert_eq!(check(&access, &headers(&[("host", "localhost")])).unwrap_err().status, 401);
    }

    #[test]
    fn without_a_key_web_pages_and_foreign_names_are_kept_out() {
        let access = AdminAccess::default();
        for fine in [
            &[("host", "127.0.0.1:8081")][..],
            &[("host", "localhost:8081"), ("origin", "http://localhost:3000")],
            &[("host", "[::1]:8081")],
        ] {
            assert!(check(&access, &headers(fine)).is_ok(), "{fine:?}");
        }
        for bad in [
            &[("host", "evil.example:8081")][..],
            &[("host", "localhost.evil.example")],
            &[("host", "127.0.0.1"), ("origin", "https://evil.example")],
            &[("host", "127.0.0.1"), ("origin", "null")],
        ] {
            assert_eq!(check(&access, &headers(bad)).unwrap_err().status, 403, "{bad:?}");
        }
    }
}
