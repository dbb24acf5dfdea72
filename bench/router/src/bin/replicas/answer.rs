//! Answers as OpenAI's servers write them, and what a replica counts.

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{Response, body::Frame};
use serde_json::{Value, json};
use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use tokio::sync::mpsc::{UnboundedReceiver, channel};

pub type Reply = BoxBody<Bytes, Infallible>;

/// What was asked and given.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u32,
}

/// What comes out of a computation.
#[derive(Debug, Clone, Copy)]
pub enum Said {
    Piece,
    Done(Usage),
}

/// What one replica counts.
#[derive(Debug, Default)]
pub struct Figures {
    requests: AtomicU64,
    in_flight: AtomicI64,
    /// Summed over all requests: divided by the time it is the mean in flight.
    resident_microseconds: AtomicU64,
    cut: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
    pub busy_microseconds: AtomicU64,
}

/// A request that is here; dropped before its end, its caller went away.
pub struct Place {
    figures: Arc<Figures>,
    since: Instant,
    pub whole: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.figures.in_flight.fetch_sub(1, Relaxed);
        self.figures.resident_microseconds.fetch_add(self.since.elapsed().as_micros() as u64, Relaxed);
        self.figures.cut.fetch_add(u64::from(!self.whole), Relaxed);
    }
}

impl Figures {
    pub fn enter(self: &Arc<Self>) -> Place {
        self.requests.fetch_add(1, Relaxed);
        self.in_flight.fetch_add(1, Relaxed);
        Place { figures: self.clone(), since: Instant::now(), whole: false }
    }

    pub fn in_flight(&self) -> i64 {
        self.in_flight.load(Relaxed)
    }

    pub fn metrics(&self, capacity_tokens: u64) -> String {
        format!(
            "vllm:num_requests_running{{model_name=\"mock\"}} {}\nvllm:num_requests_waiting{{model_name=\"mock\"}} 0\n\
             vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"{}\"}} 1\n",
            self.in_flight(),
            capacity_tokens / 16
        )
    }

    pub fn document(&self) -> Value {
        json!({
            "requests": self.requests.load(Relaxed), "in_flight": self.in_flight(), "cut": self.cut.load(Relaxed),
            "resident_microseconds": self.resident_microseconds.load(Relaxed),
            "prompt_tokens": self.prompt_tokens.load(Relaxed), "cached_tokens": self.cached_tokens.load(Relaxed),
            "busy_microseconds": self.busy_microseconds.load(Relaxed),
        })
    }

    pub fn reset(&self) {
        let counters = [&self.requests, &self.resident_microseconds, &self.cut];
        for counter in counters.into_iter().chain([&self.prompt_tokens, &self.cached_tokens, &self.busy_microseconds]) {
            counter.store(0, Relaxed);
        }
    }
}

pub fn full(text: impl Into<Bytes>) -> Reply {
    Full::new(text.into()).boxed()
}

pub fn json(text: impl Into<Bytes>) -> Response<Reply> {
    let mut response = Response::new(full(text));
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("application/json"));
    response
}

fn usage_json(usage: Usage) -> String {
    let Usage { prompt_tokens, cached_tokens, output_tokens } = usage;
    let total = prompt_tokens + u64::from(output_tokens);
    format!(
        r#"{{"prompt_tokens":{prompt_tokens},"completion_tokens":{output_tokens},"total_tokens":{total},"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}}}"#
    )
}

/// An answer that is no stream.
pub fn whole(usage: Usage) -> Response<Reply> {
    json(format!(
        r#"{{"id":"cmpl-1","object":"chat.completion","created":1700000000,"model":"mock","choices":[{{"index":0,"message":{{"role":"assistant","content":"Hello from a replica, this is a reply of a few dozen tokens."}},"finish_reason":"stop"}}],"usage":{}}}"#,
        usage_json(usage)
    ))
}

fn piece(number: u32) -> Bytes {
    format!("data: {{\"id\":\"cmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"tok{number} \"}},\"finish_reason\":null}}]}}\n\n").into()
}

fn last(usage: Usage) -> Bytes {
    format!("data: {{\"id\":\"cmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[],\"usage\":{}}}\n\ndata: [DONE]\n\n", usage_json(usage)).into()
}

fn events(pieces: impl futures_util::Stream<Item = Bytes> + Send + Sync + 'static) -> Response<Reply> {
    use futures_util::StreamExt;
    let body = StreamBody::new(pieces.map(|bytes| Ok(Frame::data(bytes))));
    let mut response = Response::new(BodyExt::boxed(body));
    response.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static("text/event-stream"));
    response
}

/// A stream whose pieces are made one by one, as an engine does: nothing gathers them here.
pub fn paced(usage: Usage, pause: Duration, place: Place) -> Response<Reply> {
    let (sender, receiver) = channel(4);
    tokio::spawn(async move {
        // All of it: it is dropped when the stream has ended.
        let mut place = place;
        for number in 0..usage.output_tokens {
            if sender.send(piece(number)).await.is_err() {
                return;
            }
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        }
        place.whole = sender.send(last(usage)).await.is_ok();
        drop(place);
    });
    events(stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver))))
}

/// What a computation says, as it says it or whole.
pub async fn generated(mut said: UnboundedReceiver<Said>, stream: bool, mut place: Place) -> Response<Reply> {
    if !stream {
        while let Some(said) = said.recv().await {
            if let Said::Done(usage) = said {
                place.whole = true;
                return whole(usage);
            }
        }
        return Response::new(full(""));
    }
    events(stream::unfold((said, place, 0), async |(mut said, mut place, number)| {
        let bytes = match said.recv().await? {
            Said::Piece => piece(number),
            Said::Done(usage) => {
                place.whole = true;
                last(usage)
            }
        };
        Some((bytes, (said, place, number + 1)))
    }))
}
