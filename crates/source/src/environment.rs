//! What this process's environment says about other tools: where they keep models, and what gives access to hubs.

use hyper::header::HeaderValue;
use std::{fmt, path::PathBuf};
use url::Url;

const HUB_ENDPOINT: &str = "https://huggingface.co";
/// The longest token that is believed.
const TOKEN_BYTES_MAX: usize = 4096;
/// Where Ollama's packages keep models when it runs as a service.
const OLLAMA_SERVICE: &str = "/usr/share/ollama/.ollama/models";

/// What the environment says.
#[derive(Clone, Default)]
pub struct Environment {
    /// The hub that `hf://` means; none is huggingface.co.
    pub hub_endpoint: Option<String>,
    /// What gives access to it. Never shown.
    pub hub_token: Option<String>,
    /// Where Hugging Face's own tools keep what they have downloaded.
    pub hub_cache: Option<PathBuf>,
    /// Whether the hub must not be asked.
    pub hub_offline: bool,
    /// Where Ollama keeps models, the first that is there.
    pub ollama_models: Vec<PathBuf>,
}

impl fmt::Debug for Environment {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Environment").field("hub_endpoint", &self.hub_endpoint).finish_non_exhaustive()
    }
}

impl Environment {
    /// Reads it, by the names that Hugging Face's and Ollama's own tools use.
    pub fn read() -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let home = path("HOME");
        let cache = path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
        let hub_home = path("HF_HOME").or_else(|| Some(cache?.join("huggingface")));
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(hub_home.as_ref()?.join("token")));
        let from_file = || std::fs::read_to_string(token_file?).ok();
        let ollama = path("OLLAMA_MODELS").map_or_else(
            || {
                let own = home.as_ref().map(|home| home.join(".ollama/models"));
                own.into_iter().chain([PathBuf::from(OLLAMA_SERVICE)]).collect()
            },
            |named| vec![named],
        );
        Self {
            hub_endpoint: text("HF_ENDPOINT"),
            hub_token: text("HF_TOKEN").or_else(from_file).map(|token| token.trim().to_owned()),
            hub_cache: path("HF_HUB_CACHE").or_else(|| Some(hub_home.as_ref()?.join("hub"))),
            hub_offline: text("HF_HUB_OFFLINE")
                .is_some_and(|value| ["1", "true", "yes", "on"].contains(&value.to_lowercase().as_str())),
            ollama_models: ollama,
        }
    }

    /// The hub's address.
    pub(crate) fn hub(&self) -> Result<Url, String> {
        let text = self.hub_endpoint.as_deref().unwrap_or(HUB_ENDPOINT);
        let url = Url::parse(text).ok().filter(|url| ["https", "http"].contains(&url.scheme()) && url.has_host());
        url.ok_or_else(|| format!("HF_ENDPOINT is {text:?}: give a URL such as {HUB_ENDPOINT}"))
    }

    /// What proves who asks. It goes nowhere unencrypted but to this machine.
    pub(crate) fn hub_secret(&self, hub: &Url) -> Option<HeaderValue> {
        let token = self.hub_token.as_ref().filter(|token| !token.is_empty() && token.len() <= TOKEN_BYTES_MAX)?;
        let here = hub.host_str().is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host));
        if hub.scheme() != "https" && !here {
            tracing::warn!("the token for {hub} is not sent: it is no https:// address");
            return None;
        }
        let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}
