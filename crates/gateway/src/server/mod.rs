//! The accept loop: one hyper connection per socket behind its gate, with a limit on everything a peer can hold.

mod gate;
mod head;

use crate::lanes::Lane;
use axum::{Router, body::Body, extract::Request};
use bytes::Bytes;
use gate::{Gate, Status, Verdict};
use hyper::{
    body::{Body as _, Frame, Incoming, SizeHint},
    header::{CONNECTION, HeaderValue, TRANSFER_ENCODING},
    server::conn::http1,
    service::service_fn,
};
use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tower::ServiceExt;

/// How long the accept loop rests when the operating system has no more file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long, and for how many bytes, a closed connection is read from, so that the peer gets to read the refusal.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 64 << 20;

/// The limits of one listener.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Time to send a request's head, from its first byte; for the first request from the connection's beginning.
    pub header_timeout: Duration,
    /// Time a connection may stay open between requests.
    pub idle_timeout: Duration,
    /// Time a peer may read nothing while there is something to read.
    pub write_timeout: Duration,
    /// Bytes of a head.
    pub head_bytes_max: usize,
    /// Header fields of a request.
    pub headers_max: usize,
    /// Open connections. At the limit the oldest one without a request makes room, then the oldest whose request is not
    /// all here.
    pub connections_max: usize,
    /// Time running requests have to end at shutdown.
    pub drain_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(60),
            head_bytes_max: 16 << 10,
            headers_max: 64,
            connections_max: 4096,
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// The connections of one listener.
#[derive(Debug, Default)]
struct Connections {
    open: Mutex<(u64, BTreeMap<u64, Arc<Status>>)>,
}

impl Connections {
    /// Takes a place for a new connection; none if all are owed an answer.
    fn enter(&self, max: usize) -> Option<(u64, Arc<Status>)> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.1.len() >= max {
            self.evict(&mut open.1)?;
        }
        open.0 += 1;
        let (id, status) = (open.0, Arc::new(Status::default()));
        open.1.insert(id, status.clone());
        Some((id, status))
    }

    fn evict(&self, open: &mut BTreeMap<u64, Arc<Status>>) -> Option<()> {
        let idle = open.iter().find(|(_, status)| !status.is_answering());
        // Bodies that trickle in must not keep everybody else away.
        let oldest = idle.or_else(|| open.iter().find(|(_, status)| !status.is_owed()));
        let id = *oldest?.0;
        // Its place is free from now on; its socket closes as soon as its task runs.
        open.remove(&id)?.evict.notify_one();
        Some(())
    }

    fn leave(&self, id: u64) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&id);
    }
}

/// Serves until `shutdown` completes, then lets running requests end within the drain timeout.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    serve_on(listener, vec![Lane::here(router)], config, shutdown).await
}

/// The same, with connections shared out among lanes.
pub async fn serve_on(
    listener: TcpListener,
    lanes: Vec<Lane>,
    config: ServerConfig,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let config = Arc::new(config);
    let connections = Arc::new(Connections::default());
    let (stop, stopping) = watch::channel(false);
    let mut tasks = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = tasks.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let Some((id, status)) = connections.enter(config.connections_max) else { continue };
                    let (config, stopping, connections) = (config.clone(), stopping.clone(), connections.clone());
                    start_on(&mut tasks, Lane::freest(&lanes, id), stream, move |stream, router| async move {
                        connection(stream, router, config, status, stopping).await;
                        connections.leave(id);
                    });
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections; raise the limit of open files");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
    drop(listener);
    // Without a receiver there is no connection left.
    let _ = stop.send(true);
    let drained = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(config.drain_timeout, drained).await.is_err() {
        tracing::warn!("requests still running after the drain timeout are cut");
    }
    Ok(())
}

/// Has a connection driven by a lane.
fn start_on<Driven: Future<Output = ()> + Send + 'static>(
    tasks: &mut JoinSet<()>,
    lane: Option<&Lane>,
    stream: TcpStream,
    drive: impl FnOnce(TcpStream, Router) -> Driven + Send + 'static,
) {
    let Some(lane) = lane else { return };
    let (router, seat) = (lane.routes.clone(), lane.seat());
    let Some(handle) = &lane.handle else {
        let driven = drive(stream, router);
        tasks.spawn(async move {
            driven.await;
            drop(seat);
        });
        return;
    };
    tasks.spawn_on(
        async move {
            // The lane's own runtime hears of what comes.
            if let Ok(stream) = stream.into_std().and_then(TcpStream::from_std) {
                drive(stream, router).await;
            }
            drop(seat);
        },
        handle,
    );
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn connection(
    stream: TcpStream,
    router: Router,
    config: Arc<ServerConfig>,
    status: Arc<Status>,
    mut stopping: watch::Receiver<bool>,
) {
    // A connection that is gone already will say so on its first read.
    let _ = stream.set_nodelay(true);
    let parser_bytes_max = config.head_bytes_max * 2 + 8192;
    let headers_max = config.headers_max;
    let gate = Gate::new(stream, config, status.clone());
    let answering = status.clone();
    let service = service_fn(move |request| Box::pin(answer(router.clone(), answering.clone(), request)));
    let mut builder = http1::Builder::new();
    builder.header_read_timeout(None).max_buf_size(parser_bytes_max).max_headers(headers_max + 1).half_close(false);
    let mut connection = builder.serve_connection(gate, service);
    let mut stop_seen = false;
    loop {
        tokio::select! {
            biased;
            // Errors are those of the peer; what can be said to it is in the gate.
            _ = poll_fn(|context| connection.poll_without_shutdown(context)) => break,
            () = status.evict.notified() => return,
            _ = stopping.wait_for(|stop| *stop), if !stop_seen => {
                stop_seen = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    }
    let (stream, verdict, unread) = connection.into_parts().io.into_parts();
    close(stream, verdict, unread).await;
}

/// One request through the router. The connection counts as answering until the response body is gone.
async fn answer(
    router: Router,
    status: Arc<Status>,
    request: Request<Incoming>,
) -> Result<hyper::Response<Guarded>, Infallible> {
    let chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let guard = Answering(status.clone());
    let request = request.map(|body| Body::new(Incomplete::new(body, status)));
    let mut response = router.oneshot(request).await?;
    if chunked {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response.map(|body| Guarded { body, _guard: guard }))
}

struct Answering(Arc<Status>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.answered();
    }
}

/// A request's body that says when all of it is here.
struct Incomplete {
    body: Incoming,
    status: Arc<Status>,
}

impl Incomplete {
    fn new(body: Incoming, status: Arc<Status>) -> Self {
        if body.is_end_stream() {
            status.received();
        }
        Self { body, status }
    }
}

impl hyper::body::Body for Incomplete {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        if frame.is_none() || this.body.is_end_stream() {
            this.status.received();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response body that knows when it is gone.
struct Guarded {
    body: Body,
    _guard: Answering,
}

impl hyper::body::Body for Guarded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Says the verdict, if there is one, ends the stream and, if the peer may still be sending, reads on for a while:
/// closing a socket with unread bytes would take the answer away from the peer.
async fn close(mut stream: TcpStream, verdict: Option<Verdict>, unread: bool) {
    let goodbye = async {
        if let Some(verdict) = verdict {
            stream.write_all(refusal(verdict).as_bytes()).await?;
        }
        stream.shutdown().await?;
        let (mut left, mut bytes) = (LINGER_BYTES_MAX, vec![0; 64 << 10]);
        while unread && left > 0 {
            match stream.read(&mut bytes).await? {
                0 => break,
                count => left = left.saturating_sub(count),
            }
        }
        io::Result::Ok(())
    };
    // A peer that is gone or slow misses nothing it asked for.
    let _ = tokio::time::timeout(LINGER, goodbye).await;
}

fn refusal(verdict: Verdict) -> String {
    let (status, reason) = match verdict {
        Verdict::Malformed(reason) => ("400 Bad Request", reason),
        Verdict::TooLarge => ("431 Request Header Fields Too Large", "the request's head is too large"),
        Verdict::TooSlow => ("408 Request Timeout", "the request's head did not come in time"),
    };
    let error = serde_json::json!({"error": {
        "message": reason, "type": "invalid_request_error", "param": null, "code": null,
    }});
    let body = error.to_string();
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}
