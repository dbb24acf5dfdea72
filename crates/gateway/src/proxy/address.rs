//! Where a replica is, in one spelling for each place, and whether that is this gateway itself.

use axum::http::uri::Authority;
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    str::FromStr,
    sync::Arc,
};
use url::{Host, Url};

/// The longest URL of a replica.
const URL_BYTES_MAX: usize = 2048;

/// The URL of a server, without the path of a route. `http://h`, `HTTP://H:80/` and `http://h/v1` are the same one:
/// whatever is compared, kept or shown is its one spelling.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaUrl(Arc<Parts>);

/// The text comes first: it is the identity.
#[derive(PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Parts {
    text: String,
    https: bool,
    host: Host<String>,
    port: u16,
    prefix_at: usize,
}

impl FromStr for ReplicaUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > URL_BYTES_MAX {
            return Err(format!("a URL has at most {URL_BYTES_MAX} bytes"));
        }
        let scheme = text.get(..text.find("://").unwrap_or(0)).unwrap_or_default().to_ascii_lowercase();
        let (https, standard_port) = match scheme.as_str() {
            "http" => (false, 80),
            "https" => (true, 443),
            _ => return Err(format!("{text:?} must begin with http:// or https://")),
        };
        if !text[scheme.len() + 3..].starts_with(|first: char| first.is_alphanumeric() || "[_%".contains(first)) {
            return Err(format!("{text:?} names no host"));
        }
        let url = Url::parse(text).map_err(|error| match error {
            url::ParseError::InvalidPort => format!("{text:?} has no port from 1 to 65535"),
            url::ParseError::EmptyHost => format!("{text:?} names no host"),
            _ => format!("{text:?} is no URL: write http://HOST:PORT"),
        })?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the URL of a replica must not contain a credential: give it with api_key_env".to_owned());
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(format!("{text:?} must not have a query or a fragment"));
        }
        let host = url.host().ok_or_else(|| format!("{text:?} names no host"))?.to_owned();
        let port = url.port().unwrap_or(standard_port);
        if port == 0 {
            return Err(format!("{text:?} has no port from 1 to 65535"));
        }
        let mut spelling = format!("{scheme}://{host}");
        if port != standard_port {
            spelling.push_str(&format!(":{port}"));
        }
        let prefix_at = spelling.len();
        let prefix = url.path().trim_end_matches('/');
        // Routes bring their own version.
        spelling.push_str(prefix.strip_suffix("/v1").unwrap_or(prefix).trim_end_matches('/'));
        Ok(Self(Arc::new(Parts { text: spelling, https, host, port, prefix_at })))
    }
}

impl ReplicaUrl {
    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    pub(super) fn is_https(&self) -> bool {
        self.0.https
    }

    /// What goes before the path of a route.
    pub(super) fn prefix(&self) -> &str {
        &self.0.text[self.0.prefix_at..]
    }

    /// Host and port, as the `host` header has them.
    pub(super) fn authority(&self) -> Option<Authority> {
        self.0.text[..self.0.prefix_at].split_once("://")?.1.parse().ok()
    }

    /// Where it is, if that needs no look.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self.0.host {
            Host::Domain(_) => None,
            Host::Ipv4(address) => Some((address, self.0.port).into()),
            Host::Ipv6(address) => Some((address, self.0.port).into()),
        }
    }

    /// The name that has to be looked up to know where it is, with its port.
    pub(super) fn name(&self) -> Option<(&str, u16)> {
        match &self.0.host {
            Host::Domain(name) => Some((name, self.0.port)),
            Host::Ipv4(_) | Host::Ipv6(_) => None,
        }
    }
}

impl fmt::Display for ReplicaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl fmt::Debug for ReplicaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

/// Where this gateway listens itself: a replica there would be asked by itself, for ever.
#[derive(Debug, Clone, Default)]
pub struct OwnAddresses(pub Vec<SocketAddr>);

impl OwnAddresses {
    /// Whether a connection to this address comes out here.
    pub(super) fn contains(&self, address: SocketAddr) -> bool {
        self.0.iter().any(|own| own.port() == address.port() && is_reached(own.ip(), address.ip()))
    }
}

/// Whether who listens at one address is reached by the other.
fn is_reached(listener: IpAddr, asked: IpAddr) -> bool {
    let listener = listener.to_canonical();
    let asked = match asked.to_canonical() {
        // Whoever asks for no address in particular asks this machine.
        IpAddr::V4(address) if address.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(address) if address.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        other => other,
    };
    // Listening at `::` is listening everywhere, at `0.0.0.0` for IPv4 only.
    let everywhere = listener.is_unspecified() && (listener.is_ipv6() || asked.is_ipv4());
    listener == asked || (everywhere && is_of_this_machine(asked))
}

/// Only addresses of this machine can be taken on it.
fn is_of_this_machine(address: IpAddr) -> bool {
    address.is_loopback() || UdpSocket::bind((address, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, String> {
        text.parse::<ReplicaUrl>().map(|url| url.to_string())
    }

    #[test]
    fn each_place_has_one_spelling() {
        for same in
            ["http://h:81", "http://h:81/", "http://h:81/v1", "http://h:81/v1/", "HTTP://H:81//v1", "http://h:081"]
        {
            assert_eq!(parsed(same).unwrap(), "http://h:81", "{same}");
        }
        for same in ["http://h", "http://h:80", "http://h:80/v1"] {
            assert_eq!(parsed(same).unwrap(), "http://h", "{same}");
        }
        assert_eq!(parsed("https://API.example:443/Base/v1/").unwrap(), "https://api.example/Base");
        assert_eq!(parsed("http://[0:0::1]:81").unwrap(), "http://[::1]:81");
        assert_eq!(parsed("http://127.1:81").unwrap(), "http://127.0.0.1:81");
        let url: ReplicaUrl = "https://a:8443/base/v1".parse().unwrap();
        assert_eq!(
            (url.prefix(), url.authority().unwrap().as_str(), url.name()),
            ("/base", "a:8443", Some(("a", 8443)))
        );
        let again: ReplicaUrl = url.as_str().parse().unwrap();
        assert!(url == again && url.is_https() && url.address().is_none());
    }

    #[test]
    fn what_is_no_place_is_refused() {
        for bad in [
            "localhost:8000",
            "ftp://a",
            "http://",
            "http:///v1",
            "http://a:b@c",
            "http://a@c",
            "http://a?b=c",
            "http://a#b",
            "/a",
            "",
            "http://a:99999",
            "http://a:0",
            "http://a:-1",
            "http://a b",
            "http://[::1",
            "http:a",
            "mailto:http://a",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
        assert!(parsed("http://a:99999").unwrap_err().contains("65535"));
        assert!(!parsed("http://a:secret@c").unwrap_err().contains("secret"));
        assert!(parsed(&format!("http://{}", "a/".repeat(2000))).is_err());
    }

    #[test]
    fn a_gateway_knows_its_own_addresses() {
        let own = |listen: &str, asked: &str| {
            let own = OwnAddresses(vec![listen.parse().unwrap()]);
            own.contains(asked.parse().unwrap())
        };
        for (listen, asked) in [
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("127.0.0.1:80", "0.0.0.0:80"),
            ("127.0.0.1:80", "[::ffff:127.0.0.1]:80"),
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("0.0.0.0:80", "127.8.9.1:80"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("[::]:80", "127.0.0.1:80"),
            ("[::]:80", "[::1]:80"),
        ] {
            assert!(own(listen, asked), "{asked} is {listen}");
        }
        for (listen, asked) in [
            ("127.0.0.1:80", "127.0.0.1:81"),
            ("127.0.0.1:80", "127.0.0.2:80"),
            ("0.0.0.0:80", "[::1]:80"),
            // Nobody has this one.
            ("0.0.0.0:80", "192.0.2.1:80"),
        ] {
            assert!(!own(listen, asked), "{asked} is not {listen}");
        }
    }
}
