//! A web server over real sockets and real TLS that answers as a test wants, byte for byte.

use sha2::{Digest as _, Sha256};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tokio_rustls::{TlsAcceptor, rustls};
use warmset_core::Digest;
use warmset_source::{Environment, FetchError, Fetcher, Gathered, Location, Part, Settings, Trust};
use warmset_store::Store;

/// Much longer than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Where the range that is asked for begins.
    pub(crate) fn from(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What to do with the connection once the bytes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    Close,
    /// Keep silent until the test ends.
    Stall,
}

pub(crate) type Reply = (Vec<u8>, Then);

/// An answer with these headers; the length is that of the body unless a header says otherwise.
pub(crate) fn reply(status: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    let mut head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !headers.iter().any(|(name, _)| ["content-length", "transfer-encoding"].contains(name)) {
        head += &format!("content-length: {}\r\n", body.len());
    }
    ([head.as_bytes(), b"\r\n", body].concat(), Then::Close)
}

/// What an honest server with ranges answers.
pub(crate) fn honest(asked: &Asked, file: &[u8], tag: &str) -> Reply {
    let same = asked.header("if-range").is_none_or(|wanted| wanted == tag);
    match asked.from().filter(|from| same && *from < file.len()) {
        Some(from) => {
            let range = format!("bytes {from}-{}/{}", file.len() - 1, file.len());
            reply("206 Partial Content", &[("content-range", &range), ("etag", tag)], &file[from..])
        }
        None => reply("200 OK", &[("etag", tag)], file),
    }
}

/// The first `sent` bytes of an answer.
pub(crate) fn cut(reply: Reply, sent: usize) -> Reply {
    let (bytes, then) = reply;
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
    (bytes[..head + sent].to_vec(), then)
}

/// A server and what it was asked.
pub(crate) struct Server {
    pub(crate) port: u16,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) store: Arc<Store>,
}

impl Server {
    /// Serves with a certificate for `localhost` and 127.0.0.1 that signs itself.
    pub(crate) async fn start(answer: impl Fn(&Asked, usize) -> Reply + Send + Sync + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let key = rcgen::generate_simple_self_signed(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        std::fs::write(directory.path().join("ca.pem"), key.cert.pem()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let private = rustls::pki_types::PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![key.cert.der().clone()], private)
            .unwrap();
        let (listener, acceptor) =
            (TcpListener::bind("127.0.0.1:0").await.unwrap(), TlsAcceptor::from(Arc::new(config)));
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let store = Arc::new(Store::open(&directory.path().join("store")).unwrap());
        let (answer, seen) = (Arc::new(answer), asked.clone());
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, answer, seen) = (acceptor.clone(), answer.clone(), seen.clone());
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(socket).await else { return };
                    let Some(request) = read_request(&mut stream).await else { return };
                    let turn = {
                        let mut seen = seen.lock().unwrap();
                        seen.push(request.clone());
                        seen.len() - 1
                    };
                    let (bytes, then) = answer(&request, turn);
                    let _ = stream.write_all(&bytes).await;
                    let _ = stream.flush().await;
                    if then == Then::Stall {
                        std::future::pending::<()>().await;
                    }
                    let _ = stream.shutdown().await;
                });
            }
        });
        Self { port, asked, directory, store }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.port)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// Trusts this server's certificate and its address, and tries again at once. Silence is waited for much longer than any
    /// test takes, so that a busy machine is not taken for a server that stalls.
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            allow_hosts: vec!["localhost".to_owned()],
            ca_file: Some(self.ca_file()),
            stall_timeout: LONG,
            retry_pause: Duration::from_millis(1),
            ..Settings::default()
        }
    }

    pub(crate) fn ca_file(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    pub(crate) async fn fetch(&self, source: &str) -> Result<Gathered, FetchError> {
        self.fetch_with(source, self.settings(), Environment::default()).await
    }

    pub(crate) async fn fetch_with(
        &self,
        source: &str,
        settings: Settings,
        environment: Environment,
    ) -> Result<Gathered, FetchError> {
        let fetcher = Fetcher::new(settings, environment);
        let location = Location::parse(source).unwrap();
        fetcher.gather(&location, true, Trust::Caller, &self.store, &mut |_, _| {}).await
    }

    /// The bytes of each part, once in the store.
    pub(crate) fn publish(&self, gathered: Gathered) -> Vec<Vec<u8>> {
        let parts = gathered.parts.into_iter().map(|part| match part {
            Part::Fetched { staging, sha256 } => {
                let stored = self.store.publish_staged(staging, sha256).unwrap();
                assert!(self.store.verify_full(&stored.sha256, &mut |_, _| {}).is_ok());
                std::fs::read(stored.path).unwrap()
            }
            Part::Local { path, .. } => std::fs::read(path).unwrap(),
        });
        parts.collect()
    }

    /// Nothing complete is in the store; what is unfinished does not count.
    pub(crate) fn is_empty(&self) -> bool {
        self.store.list().unwrap().is_empty()
    }
}

async fn read_request(stream: &mut (impl AsyncReadExt + Unpin)) -> Option<Asked> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let text = String::from_utf8(head).ok()?;
    let mut lines = text.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let pairs = lines.filter_map(|line| line.split_once(": "));
    Some(Asked { path, headers: pairs.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect() })
}

/// Bytes that differ everywhere.
pub(crate) fn file(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index / 7 + index % 251) as u8).collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}
