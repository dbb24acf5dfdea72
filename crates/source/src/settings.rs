//! What an operator may say about sources.

use crate::address::{Policy, Trust};
use std::{path::PathBuf, time::Duration};
use warmset_store::ARTIFACT_BYTES_MAX;

/// How long nothing may come before a transfer counts as broken.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the transfer of one file may take in all.
const TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// The pause before the first new attempt; it doubles.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Where models may come from and how long that may take.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Whether any host may have an address that is not public.
    pub allow_private: bool,
    /// Hosts that may have one.
    pub allow_hosts: Vec<String>,
    /// Certificates of authorities that are trusted beside the system's.
    pub ca_file: Option<PathBuf>,
    /// The largest file.
    pub max_bytes: u64,
    /// How long nothing may come before a transfer is tried again.
    pub stall_timeout: Duration,
    /// How long one file may take in all.
    pub timeout: Duration,
    /// The pause before a transfer is tried again the first time.
    pub retry_pause: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allow_private: false,
            allow_hosts: Vec::new(),
            ca_file: None,
            max_bytes: ARTIFACT_BYTES_MAX,
            stall_timeout: STALL_TIMEOUT,
            timeout: TIMEOUT,
            retry_pause: RETRY_PAUSE,
        }
    }
}

impl Settings {
    /// What holds for a source on `host`.
    pub(crate) fn policy(&self, trust: Trust, host: Option<&str>) -> Policy {
        let named = host.filter(|_| trust == Trust::Operator).map(str::to_owned);
        let allow_hosts = self.allow_hosts.iter().cloned().chain(named).collect();
        Policy { allow_private: self.allow_private, allow_hosts }
    }
}
