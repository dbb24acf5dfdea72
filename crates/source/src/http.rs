//! Requests to servers that nobody vouches for: checked addresses, checked redirects, credentials for one host only.

use crate::{
    address::{Policy, is_public, refusal},
    error::FetchError,
    location::shown,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, USER_AGENT},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{HttpConnector, dns::Name},
    },
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{
    io,
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use url::Url;

/// Redirects that are followed.
const REDIRECTS_MAX: usize = 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest document that is read whole: what a hub says about a repository.
const DOCUMENT_BYTES_MAX: usize = 32 << 20;
/// What is read from a connection at once: a transfer is faster in large pieces.
const READ_BUFFER_BYTES: usize = 512 << 10;
const AGENT: &str = concat!("warmset/", env!("CARGO_PKG_VERSION"));

/// What this machine trusts, read once.
pub(crate) fn trusted(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, FetchError> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!("a certificate authority of this system cannot be read: {error}");
    }
    roots.add_parsable_certificates(found.certs);
    if let Some(path) = ca_file {
        let wrong = |reason: String| FetchError::Local(format!("[sources] ca_file {}: {reason}", path.display()));
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
        let mut added = 0;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
            added += 1;
        }
        if added == 0 {
            return Err(wrong("it holds no certificate in PEM form".to_owned()));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let versions = versions.map_err(|error| FetchError::Local(format!("TLS cannot be set up: {error}")))?;
    Ok(Arc::new(versions.with_root_certificates(roots).with_no_client_auth()))
}

/// Resolves names to addresses that may be talked to. The connection goes to just these addresses.
#[derive(Clone)]
struct CheckedResolver(Arc<Policy>);

type Resolving = Pin<Box<dyn Future<Output = io::Result<std::vec::IntoIter<SocketAddr>>> + Send>>;

impl tower::Service<Name> for CheckedResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Resolving;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let policy = self.0.clone();
        Box::pin(async move {
            let host = name.as_str();
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            if policy.is_allowed(host) {
                return Ok(found.into_iter());
            }
            let public: Vec<SocketAddr> = found.into_iter().filter(|address| is_public(address.ip())).collect();
            if public.is_empty() {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, refusal(host)));
            }
            Ok(public.into_iter())
        })
    }
}

/// A client for one source.
pub(crate) struct Http {
    client: Client<HttpsConnector<HttpConnector<CheckedResolver>>, Empty<Bytes>>,
    policy: Arc<Policy>,
    /// How long a server may take to begin its answer.
    timeout: Duration,
}

impl Http {
    pub(crate) fn new(tls: &Arc<ClientConfig>, policy: Policy, timeout: Duration) -> Self {
        let policy = Arc::new(policy);
        let mut connector = HttpConnector::new_with_resolver(CheckedResolver(policy.clone()));
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(ClientConfig::clone(tls))
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .http1_max_buf_size(READ_BUFFER_BYTES)
            .build(connector);
        Self { client, policy, timeout }
    }

    /// Asks, follows redirects, and takes the answer whatever its status. `secret` goes to the host that is named and
    /// to no other.
    pub(crate) async fn get(
        &self,
        first: &Url,
        headers: &HeaderMap,
        secret: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, FetchError> {
        let (mut url, mut secret) = (first.clone(), secret.cloned());
        for _ in 0..=REDIRECTS_MAX {
            self.check(first, &url)?;
            let response = self.send(&url, headers, secret.as_ref()).await?;
            let Some(next) = next_of(&url, &response)? else { return Ok(response) };
            if next.origin() != url.origin() {
                secret = None;
            }
            url = next;
        }
        let reason = format!("it redirects more than {REDIRECTS_MAX} times");
        Err(FetchError::Lies { location: shown(first), reason })
    }

    /// Asks for a JSON document.
    pub(crate) async fn document(
        &self,
        url: &Url,
        secret: Option<&HeaderValue>,
    ) -> Result<serde_json::Value, FetchError> {
        let response = self.get(url, &HeaderMap::new(), secret).await?;
        check_status(url, response.status())?;
        let read = Limited::new(response.into_body(), DOCUMENT_BYTES_MAX).collect();
        let broken = |reason: String| FetchError::Broken { location: shown(url), reason };
        let read = tokio::time::timeout(self.timeout, read).await.map_err(|_| broken("it stalls".to_owned()))?;
        let bytes = read.map_err(|error| broken(error.to_string()))?.to_bytes();
        serde_json::from_slice(&bytes).map_err(|error| FetchError::Lies {
            location: shown(url),
            reason: format!("its answer is no JSON: {error}"),
        })
    }

    fn check(&self, first: &Url, url: &Url) -> Result<(), FetchError> {
        let refused = |reason: String| FetchError::Refused { location: shown(url), reason };
        match url.scheme() {
            "https" => {}
            "http" if first.scheme() == "http" => {}
            "http" => return Err(refused(format!("{} redirects from https:// to http://", shown(first)))),
            _ => return Err(refused(format!("{} redirects to it", shown(first)))),
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(refused(format!("{} redirects to a URL with a user name", shown(first))));
        }
        self.policy.check(url).map_err(refused)
    }

    async fn send(
        &self,
        url: &Url,
        headers: &HeaderMap,
        secret: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, FetchError> {
        let broken = |reason: String| FetchError::Broken { location: shown(url), reason };
        let mut request = Request::get(url.as_str())
            .header(USER_AGENT, AGENT)
            // What is hashed must be the file, not a packed form of it.
            .header(ACCEPT_ENCODING, "identity")
            .body(Empty::new())
            .map_err(|error| broken(error.to_string()))?;
        request.headers_mut().extend(headers.clone());
        if let Some(secret) = secret {
            request.headers_mut().insert(AUTHORIZATION, secret.clone());
        }
        match tokio::time::timeout(self.timeout, self.client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(failure(url, &error)),
            Err(_) => Err(broken("it does not answer in time".to_owned())),
        }
    }
}

/// What lies at the bottom of an error. An address that was refused is not a broken connection.
fn failure(url: &Url, error: &(dyn std::error::Error + 'static)) -> FetchError {
    let mut deepest = error;
    let (mut denied, mut distrusted) = (false, false);
    while let Some(source) = deepest.source() {
        deepest = source;
        if let Some(error) = deepest.downcast_ref::<io::Error>() {
            denied |= error.kind() == io::ErrorKind::PermissionDenied;
            distrusted |= is_distrust(error);
        }
    }
    let (location, mut reason) = (shown(url), deepest.to_string());
    if distrusted {
        reason += ": if it is meant, give its authority in [sources] ca_file or SSL_CERT_FILE";
    }
    if denied || distrusted {
        FetchError::Refused { location, reason }
    } else {
        FetchError::Broken { location, reason }
    }
}

/// Whether a certificate was refused. The layers of a connection wrap the reason several times.
fn is_distrust(error: &io::Error) -> bool {
    let Some(inner) = error.get_ref() else { return false };
    match inner.downcast_ref::<io::Error>() {
        Some(wrapped) => is_distrust(wrapped),
        None => matches!(inner.downcast_ref(), Some(rustls::Error::InvalidCertificate(_))),
    }
}

/// Where an answer sends us.
fn next_of(url: &Url, response: &Response<Incoming>) -> Result<Option<Url>, FetchError> {
    use StatusCode as Code;
    let redirects =
        [Code::MOVED_PERMANENTLY, Code::FOUND, Code::SEE_OTHER, Code::TEMPORARY_REDIRECT, Code::PERMANENT_REDIRECT];
    if !redirects.contains(&response.status()) {
        return Ok(None);
    }
    let target = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let next = target.and_then(|target| url.join(target).ok());
    let lies = || FetchError::Lies { location: shown(url), reason: "it redirects to what is no URL".to_owned() };
    next.ok_or_else(lies).map(Some)
}

/// Refuses every answer that holds no file.
pub(crate) fn check_status(url: &Url, status: StatusCode) -> Result<(), FetchError> {
    if status.is_success() {
        return Ok(());
    }
    let hint = match status.as_u16() {
        401 | 403 => {
            "it wants credentials: give them, or check that they may read this (hf://: HF_TOKEN; s3://: AWS_*)"
        }
        404 | 410 => "there is no such file: check the source",
        429 => "it has had too many requests: try again later",
        500.. => "its server fails: try again later",
        _ => "it gives no file",
    };
    Err(FetchError::Status { location: shown(url), status: status.as_u16(), hint })
}
