//! HTTP to the server that the command started: one connection for each request, so that dropping it is cancelling it.

use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, StatusCode,
    body::{Bytes, Incoming},
    header::{ACCEPT, CONNECTION, CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::{net::TcpStream, task::AbortHandle};

/// The longest answer, and the longest line of a stream.
const ANSWER_BYTES_MAX: usize = crate::protocol::MESSAGE_BYTES_MAX / 4;

/// Where the server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Upstream {
    pub(super) port: u16,
}

/// The connection failed, or what came over it is not HTTP.
#[derive(Debug)]
pub(super) struct Broken(pub(super) String);

impl Broken {
    fn because(error: impl std::fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// An answer whose body is still coming. Dropping it closes the connection.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    body: Incoming,
    pending: Vec<u8>,
    /// Where the search for the next line begins.
    searched: usize,
    _connection: Connection,
}

/// Ends with its owner.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Upstream {
    /// A port that nobody listens on now.
    pub(super) fn choose() -> std::io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        Ok(Self { port: listener.local_addr()?.port() })
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn send(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> Result<Answer, Broken> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let stream = TcpStream::connect(address).await.map_err(Broken::because)?;
        // Best effort: a small request must not wait for the answer to an earlier segment.
        let _ = stream.set_nodelay(true);
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(Broken::because)?;
        let connection = Connection(tokio::spawn(async move { drop(connection.await) }).abort_handle());
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, address.to_string())
            .header(CONNECTION, "close")
            .header(ACCEPT, "application/json, text/event-stream")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(Broken::because)?;
        let response = sender.send_request(request).await.map_err(Broken::because)?;
        let (head, body) = response.into_parts();
        Ok(Answer { status: head.status, body, pending: Vec::new(), searched: 0, _connection: connection })
    }

    /// Asks and takes the whole answer.
    pub(super) async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), Broken> {
        let answer = self.send(Method::GET, path, None).await?;
        let status = answer.status;
        Ok((status, answer.whole().await?))
    }
}

impl Answer {
    /// The whole body.
    pub(super) async fn whole(self) -> Result<Bytes, Broken> {
        let collected = Limited::new(self.body, ANSWER_BYTES_MAX).collect().await;
        Ok(collected.map_err(Broken::because)?.to_bytes())
    }

    /// The next line of a stream without its end; none when the body is complete. A call that is dropped loses nothing.
    pub(super) async fn line(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        loop {
            if let Some(end) = self.pending[self.searched..].iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.pending.drain(..=self.searched + end).collect();
                self.searched = 0;
                line.truncate(line.trim_ascii_end().len());
                return Ok(Some(line));
            }
            self.searched = self.pending.len();
            if self.pending.len() > ANSWER_BYTES_MAX {
                return Err(Broken(format!("a line of its answer is longer than {ANSWER_BYTES_MAX} bytes")));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.pending.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(Broken::because(error)),
                None if self.pending.is_empty() => return Ok(None),
                None => {
                    self.searched = 0;
                    return Ok(Some(std::mem::take(&mut self.pending)));
                }
            }
        }
    }
}
