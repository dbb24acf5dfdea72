//! One request: written, sent, and its answer read to the end.

use crate::Arguments;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tokio::{net::TcpStream, time::Instant};

pub type Connection = Option<http1::SendRequest<Full<Bytes>>>;

pub struct Target {
    pub addresses: Vec<String>,
    pub stream: bool,
    pub events: Option<u32>,
    pub bodies: Bodies,
}

/// What came of a request.
#[derive(Debug, Default)]
pub struct Asked {
    pub status: u16,
    pub whole: bool,
    pub first: Option<Duration>,
    pub last: Duration,
}

/// Bodies with a system prompt for each tenant and a question of their own for each request.
pub struct Bodies {
    systems: Vec<String>,
    question_bytes: usize,
    hot_share: f64,
    distinct: bool,
    stream: bool,
    output_tokens: u32,
    exponential: bool,
}

impl Bodies {
    pub fn new(arguments: &Arguments) -> Self {
        // Everybody's prompts are the same whatever else is drawn.
        let mut random = fastrand::Rng::with_seed(20);
        let systems = (0..arguments.tenants).map(|tenant| {
            let text = format!("You are the assistant of tenant {tenant}. ");
            words(text, arguments.prompt_bytes, &mut random)
        });
        Self {
            systems: systems.collect(),
            question_bytes: arguments.question_bytes,
            hot_share: arguments.hot_share,
            distinct: arguments.distinct,
            stream: arguments.stream,
            output_tokens: arguments.output_tokens,
            exponential: arguments.exponential_output,
        }
    }

    /// A body, and whose it is.
    fn draw(&self, random: &mut fastrand::Rng) -> (Bytes, usize) {
        let is_hot = self.systems.len() == 1 || random.f64() < self.hot_share;
        let tenant = if is_hot { 0 } else { random.usize(1..self.systems.len()) };
        let mean = f64::from(self.output_tokens);
        let output = if self.exponential { (-(1.0 - random.f64()).ln() * mean).ceil().max(1.0) } else { mean };
        let head = if self.distinct { format!("{:016x} ", random.u64(..)) } else { String::new() };
        let question = words(format!("question {:016x} ", random.u64(..)), self.question_bytes, random);
        let (stream, system) = (self.stream, &self.systems[tenant]);
        let body = format!(
            r#"{{"model":"mock","max_tokens":{output},"stream":{stream},"messages":[{{"role":"system","content":"{head}{system}"}},{{"role":"user","content":"{question}"}}]}}"#
        );
        (body.into(), tenant)
    }
}

/// Adds words until there are so many bytes.
fn words(mut text: String, bytes: usize, random: &mut fastrand::Rng) -> String {
    while text.len() < bytes {
        text += &format!("rule {:x} ", random.u32(..));
    }
    text.truncate(bytes.max(26));
    text
}

async fn connect(address: &str) -> Connection {
    let stream = TcpStream::connect(address).await.ok()?;
    stream.set_nodelay(true).ok()?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
    tokio::spawn(connection);
    Some(sender)
}

/// Asks once; the time counts from when the request was due.
pub async fn ask(
    target: &Target,
    router: usize,
    connection: &mut Connection,
    random: &mut fastrand::Rng,
    due: Instant,
) -> Asked {
    let address = &target.addresses[router];
    let (body, tenant) = target.bodies.draw(random);
    if connection.as_ref().is_none_or(http1::SendRequest::is_closed) {
        *connection = connect(address).await;
    }
    let tenant = format!("t{tenant}");
    // The names that peers with hashing by header look for.
    let request = Request::post("/v1/chat/completions")
        .header("host", address)
        .header("content-type", "application/json")
        .header("x-tenant", &tenant)
        .header("x-session-id", &tenant)
        .body(Full::new(body));
    let (Some(sender), Ok(request)) = (connection.as_mut(), request) else {
        tokio::time::sleep(Duration::from_millis(5)).await;
        return Asked::default();
    };
    let answered = match sender.ready().await {
        Ok(()) => sender.send_request(request).await,
        Err(error) => Err(error),
    };
    let asked = match answered {
        Ok(response) => read(target, response, due).await,
        Err(_) => None,
    };
    asked.unwrap_or_else(|| {
        *connection = None;
        Asked { last: due.elapsed(), ..Asked::default() }
    })
}

async fn read(target: &Target, response: Response<Incoming>, due: Instant) -> Option<Asked> {
    let status = response.status().as_u16();
    let (mut body, mut first, mut text) = (response.into_body(), None, Vec::new());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.ok()?.into_data() else { continue };
        first.get_or_insert_with(|| due.elapsed());
        text.extend_from_slice(&data);
    }
    let last = due.elapsed();
    let whole = if target.stream {
        let count = |word: &[u8]| text.windows(word.len()).filter(|window| *window == word).count();
        let events = target.events.is_none_or(|events| count(b"\"delta\"") == events as usize);
        events && count(b"data: [DONE]") == 1
    } else {
        text.ends_with(b"}")
    };
    Some(Asked { status, whole, first, last })
}
