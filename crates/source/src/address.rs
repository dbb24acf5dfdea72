//! Which addresses may be talked to: whoever names a source must not reach what only this machine can.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use url::{Host, Url};

/// Who named a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Whoever runs this machine: in its configuration file or on its command line. The host that is named may be
    /// anywhere; where it redirects to is checked all the same.
    Operator,
    /// Somebody who reached a listener.
    Caller,
}

/// Which hosts may have addresses that are not public.
#[derive(Debug, Clone, Default)]
pub(crate) struct Policy {
    pub(crate) allow_private: bool,
    /// Lower case, as URLs have them.
    pub(crate) allow_hosts: Vec<String>,
}

impl Policy {
    /// Whether this host's addresses are not looked at.
    pub(crate) fn is_allowed(&self, host: &str) -> bool {
        self.allow_private || self.allow_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(host))
    }

    /// Refuses an address that is written out in a URL; names are checked when they are resolved.
    pub(crate) fn check(&self, url: &Url) -> Result<(), String> {
        let literal = match url.host() {
            Some(Host::Ipv4(address)) => IpAddr::V4(address),
            Some(Host::Ipv6(address)) => IpAddr::V6(address),
            Some(Host::Domain(_)) => return Ok(()),
            None => return Err("it names no host".to_owned()),
        };
        if is_public(literal) || self.is_allowed(url.host_str().unwrap_or_default()) {
            return Ok(());
        }
        Err(refusal(&literal.to_string()))
    }
}

/// Why a host is refused and what would allow it.
pub(crate) fn refusal(host: &str) -> String {
    format!(
        "{host} is not a public address: if it is meant, allow it in the configuration, [sources] allow_hosts = \
         [\"{host}\"]"
    )
}

/// Whether an address is reached over the public network: neither this machine, nor a private network, nor the
/// metadata service of a cloud.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// Blocks with a special purpose, as RFC 6890 and its successors list them: network and length of its prefix.
const SPECIAL_V4: [(Ipv4Addr, u32); 15] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    // Multicast, and what is reserved behind it.
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

fn is_public_v4(address: Ipv4Addr) -> bool {
    let within = |network: Ipv4Addr, length: u32| {
        let mask = u32::MAX << (32 - length);
        address.to_bits() & mask == network.to_bits()
    };
    !SPECIAL_V4.iter().any(|(network, length)| within(*network, *length))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let embedded = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match segments {
        // Written for an IPv4 address: mapped, or reached through a translator or a 6to4 relay.
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            is_public_v4(embedded(high, low))
        }
        // Documentation, benchmarks, Teredo and the rest of 2001::/23.
        [0x2001, second, ..] if second < 0x200 || second == 0xdb8 => false,
        [0x3fff, second, ..] if second < 0x1000 => false,
        // All that is given out as global lies in 2000::/3.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_public() {
        for public in
            ["1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
        {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for special in [
            "0.0.0.0",
            "10.1.2.3",
            "100.100.100.200",
            "127.0.0.1",
            "127.8.8.8",
            "169.254.169.254",
            "169.254.170.2",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.168.1.1",
            "198.19.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001::1",
            "2001:db8::1",
            "3fff::1",
        ] {
            assert!(!is_public(special.parse().unwrap()), "{special}");
        }
    }

    #[test]
    fn addresses_in_urls_are_seen_however_they_are_written() {
        let policy = Policy::default();
        for hidden in [
            "https://127.0.0.1/a",
            "https://127.1/a",
            "https://2130706433/a",
            "https://0x7f.1/a",
            "https://0177.0.0.1/a",
            "https://[::1]/a",
            "https://[::ffff:127.0.0.1]/a",
            "https://169.254.169.254/a",
            "https://0/a",
        ] {
            let url = Url::parse(hidden).unwrap();
            assert!(policy.check(&url).unwrap_err().contains("not a public address"), "{hidden}");
        }
        assert!(policy.check(&Url::parse("https://1.1.1.1/a").unwrap()).is_ok());
        assert!(policy.check(&Url::parse("https://localhost/a").unwrap()).is_ok(), "names are checked when resolved");
    }

    #[test]
    fn what_is_allowed_is_not_looked_at() {
        let url = Url::parse("https://127.0.0.1:8443/a").unwrap();
        let hosts = Policy { allow_hosts: vec!["127.0.0.1".into(), "Minio.internal".into()], ..Policy::default() };
        assert!(hosts.check(&url).is_ok() && hosts.is_allowed("minio.INTERNAL") && !hosts.is_allowed("localhost"));
        assert!(Policy { allow_private: true, ..Policy::default() }.check(&url).is_ok());
    }
}
