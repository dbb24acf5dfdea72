//! Talks to a running server: JSON calls to its admin listener, streams from its inference listener.

use crate::config::units::format_bytes;
use anyhow::{Context, Result, bail};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, Uri,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::{
    client::legacy::{Client as HyperClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use std::time::Duration;

/// The address of the admin listener unless told otherwise.
pub(crate) const DEFAULT_ADMIN: &str = "127.0.0.1:8081";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer that is taken whole.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// The longest line of a stream.
const LINE_BYTES_MAX: usize = 64 << 20;

/// A server's listener.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    authority: String,
    http: HyperClient<HttpConnector, Full<Bytes>>,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// Nobody listens there.
    #[error(
        "no warmset server answers at {authority} ({reason}): start one with `warmset serve`, or give --server or --data"
    )]
    Unreachable {
        /// Where.
        authority: String,
        /// Why.
        reason: String,
    },
    /// The server refused, in its own words.
    #[error("{message}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What it says.
        message: String,
    },
    /// The connection broke, or the answer is no JSON.
    #[error("the server at {authority} broke off: {reason}: see its log")]
    Broken {
        /// Where.
        authority: String,
        /// Why.
        reason: String,
    },
}

impl Client {
    /// Takes `HOST:PORT` or `http://HOST:PORT`.
    pub(crate) fn new(server: &str) -> Result<Self> {
        let rest = match server.split_once("://") {
            Some(("http", rest)) => rest.trim_end_matches('/'),
            Some((scheme, _)) => bail!("{scheme}:// is not supported for --server: give HOST:PORT or http://HOST:PORT"),
            None => server,
        };
        let uri: Uri = format!("http://{rest}/").parse().with_context(|| format!("{server:?} is not HOST:PORT"))?;
        if uri.port().is_none() || uri.path() != "/" || uri.authority().is_none_or(|known| known.as_str() != rest) {
            bail!("{server:?} is not HOST:PORT or http://HOST:PORT");
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let http = HyperClient::builder(TokioExecutor::new()).build(connector);
        Ok(Self { authority: rest.to_owned(), http })
    }

    /// Where it talks to.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// The same host at another address's port, for the inference listener.
    pub(crate) fn sibling(&self, address: &str) -> Result<Self> {
        let port = address.rsplit_once(':').map(|(_, port)| port).context("an address has a port")?;
        let host = self.authority.rsplit_once(':').map_or(self.authority.as_str(), |(host, _)| host);
        Self::new(&format!("{host}:{port}"))
    }

    /// Sends a request and takes the whole JSON answer.
    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, CallError> {
        let response = self.send(method, path, body).await?;
        let status = response.status();
        let collected = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let bytes = collected.map_err(|error| self.broken(error))?.to_bytes();
        if !status.is_success() {
            return Err(CallError::Refused { status: status.as_u16(), message: message_of(status.as_u16(), &bytes) });
        }
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes).map_err(|error| self.broken(error))
    }

    /// Asks and takes the whole JSON answer.
    pub(crate) async fn get(&self, path: &str) -> Result<Value, CallError> {
        self.call(Method::GET, path, None).await
    }

    /// Sends a request and hands each line of the answer to `line` as it comes. Returns the response's headers' owner.
    pub(crate) async fn stream(
        &self,
        path: &str,
        body: &Value,
        mut line: impl FnMut(&str) -> Result<()>,
    ) -> Result<hyper::HeaderMap> {
        let response = self.send(Method::POST, path, Some(body)).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let mut incoming = response.into_body();
        let mut pending = Vec::new();
        while let Some(frame) = incoming.frame().await {
            let Ok(data) = frame.map_err(|error| self.broken(error))?.into_data() else { continue };
            pending.extend_from_slice(&data);
            if pending.len() > LINE_BYTES_MAX {
                let most = format_bytes(LINE_BYTES_MAX as u64);
                bail!("the server at {} sends a line of more than {most}", self.authority);
            }
            while status.is_success() && pending.contains(&b'\n') {
                let end = pending.iter().position(|byte| *byte == b'\n').unwrap_or(0);
                let whole: Vec<u8> = pending.drain(..=end).collect();
                line(String::from_utf8_lossy(&whole).trim_end())?;
            }
        }
        if !status.is_success() {
            let message = message_of(status.as_u16(), &pending);
            return Err(CallError::Refused { status: status.as_u16(), message }.into());
        }
        Ok(headers)
    }

    /// Asks and hands each piece of the answer on as it comes.
    pub(crate) async fn pieces(&self, path: &str, mut piece: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let response = self.send(Method::GET, path, None).await?;
        let status = response.status();
        if !status.is_success() {
            let collected = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            let bytes = collected.map_err(|error| self.broken(error))?.to_bytes();
            let message = message_of(status.as_u16(), &bytes);
            return Err(CallError::Refused { status: status.as_u16(), message }.into());
        }
        let mut incoming = response.into_body();
        while let Some(frame) = incoming.frame().await {
            if let Ok(data) = frame.map_err(|error| self.broken(error))?.into_data() {
                piece(&data)?;
            }
        }
        Ok(())
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Response<Incoming>, CallError> {
        let uri = format!("http://{}{path}", self.authority);
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(bytes))
            .map_err(|error| self.broken(error))?;
        self.http.request(request).await.map_err(|error| {
            if error.is_connect() {
                CallError::Unreachable { authority: self.authority.clone(), reason: root_cause(&error) }
            } else {
                self.broken(error)
            }
        })
    }

    fn broken(&self, error: impl std::fmt::Display) -> CallError {
        CallError::Broken { authority: self.authority.clone(), reason: error.to_string() }
    }
}

/// What lies at the bottom of an error: "connection refused" rather than "client error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}

/// The message in an error answer.
fn message_of(status: u16, body: &[u8]) -> String {
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    // What a command asks for is always there on the right listener.
    if status == 404 && (body.is_empty() || parsed["error"]["code"] == "unknown_url") {
        return "this is not the admin listener of a `warmset serve`: give its address with --server".to_owned();
    }
    let message = parsed["error"]["message"].as_str().or(parsed["error"].as_str());
    message.map_or_else(|| format!("the server answered with status {status}"), str::to_owned)
}

/// A model's admin path. Model names hold no character that a path segment must escape but the slash.
pub(crate) fn model_path(name: &str, action: &str) -> String {
    let mut path = String::from("/admin/v1/models/");
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"._-:@".contains(&byte) {
            path.push(char::from(byte));
        } else {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    path + action
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_named_by_address_or_url() {
        for (text, authority) in
            [("127.0.0.1:8081", "127.0.0.1:8081"), ("http://localhost:1/", "localhost:1"), ("[::1]:8081", "[::1]:8081")]
        {
            assert_eq!(Client::new(text).unwrap().authority(), authority);
        }
        for bad in ["", "localhost", "https://x:1", "x:1/path", "x y:1", ":1x"] {
            assert!(Client::new(bad).is_err(), "{bad}");
        }
        let sibling = Client::new("host:8081").unwrap().sibling("0.0.0.0:8080").unwrap();
        assert_eq!(sibling.authority(), "host:8080");
    }

    #[test]
    fn errors_speak_the_servers_words() {
        assert_eq!(message_of(404, br#"{"error":{"message":"no such model"}}"#), "no such model");
        assert_eq!(message_of(500, br#"{"error":"broken"}"#), "broken");
        assert_eq!(message_of(502, b"<html>"), "the server answered with status 502");
        let elsewhere = br#"{"error":{"message":"there is nothing at /admin/v1/models","code":"unknown_url"}}"#;
        for (status, body) in [(404, &elsewhere[..]), (404, &b""[..])] {
            assert!(message_of(status, body).contains("not the admin listener"));
        }
        assert_eq!(model_path("org/a:7b", "/pin"), "/admin/v1/models/org%2Fa:7b/pin");
    }
}
