//! Replicas that compute nothing: servers with OpenAI's routes on many ports of one process.
//!
//! Without a model of computation they answer at once, which shows what a router costs. With one (`--batch`) each is a
//! server with continuous batching and a prefix cache of so many prompts, which shows where a router sends requests.

mod answer;
mod batch;

use answer::{Figures, Reply, full};
use batch::{Batch, Model};
use clap::Parser;
use http_body_util::BodyExt;
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::net::TcpListener;

#[derive(Parser)]
struct Arguments {
    /// The first port; the others follow.
    #[arg(long)]
    port: u16,
    #[arg(long, default_value_t = 4)]
    replicas: u16,
    /// Pieces of a stream where nothing is computed, and the pause between them.
    #[arg(long, default_value_t = 50)]
    pieces: u32,
    #[arg(long, default_value_t = 0)]
    pause_microseconds: u64,
    /// Compute as a server with continuous batching would.
    #[arg(long)]
    batch: bool,
    /// Prompts in the prefix cache of a replica.
    #[arg(long, default_value_t = 16)]
    cached_prompts: usize,
    /// Tokens of one cached prompt, for what the replica says of its capacity.
    #[arg(long, default_value_t = 4352)]
    tokens_per_prompt: u64,
    /// How much faster than the model of computation everything goes.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
}

/// One replica.
struct Replica {
    figures: Arc<Figures>,
    batch: Option<Batch>,
    pieces: u32,
    pause: Duration,
    capacity_tokens: u64,
}

#[derive(Deserialize)]
struct Asked {
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    max_tokens: u32,
    messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    content: String,
}

const MODELS: &str = r#"{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"mock","root":"mock","max_model_len":131072}]}"#;
const MODEL_INFO: &str =
    r#"{"model_path":"mock","tokenizer_path":"mock","is_generation":true,"served_model_name":"mock"}"#;
const SERVER_INFO: &str =
    r#"{"model_path":"mock","served_model_name":"mock","model_id":"mock","tp_size":1,"dp_size":1,"version":"0.5.0"}"#;

async fn handle(replica: Arc<Replica>, request: Request<Incoming>) -> Result<Response<Reply>, Infallible> {
    let figures = &replica.figures;
    Ok(match request.uri().path() {
        "/v1/chat/completions" => chat(&replica, request).await,
        "/v1/models" => answer::json(MODELS),
        "/get_model_info" | "/model_info" => answer::json(MODEL_INFO),
        "/get_server_info" | "/server_info" => answer::json(SERVER_INFO),
        "/get_load" | "/v1/loads" => answer::json(format!(
            r#"[{{"dp_rank":0,"num_reqs":{},"num_waiting_reqs":0,"num_tokens":0}}]"#,
            figures.in_flight()
        )),
        "/version" => answer::json(r#"{"version":"0.11.0"}"#),
        "/metrics" => Response::new(full(figures.metrics(replica.capacity_tokens))),
        "/bench/figures" => answer::json(figures.document().to_string()),
        "/bench/reset" => {
            figures.reset();
            answer::json("{}")
        }
        _ => Response::new(full("ok")),
    })
}

async fn chat(replica: &Arc<Replica>, request: Request<Incoming>) -> Response<Reply> {
    let Ok(body) = request.into_body().collect().await else { return Response::new(full("")) };
    let body = body.to_bytes();
    let mut place = replica.figures.enter();
    let Some(batch) = &replica.batch else {
        let stream = body.windows(13).any(|window| window == br#""stream":true"#);
        let usage =
            answer::Usage { prompt_tokens: body.len() as u64 / 4, cached_tokens: 0, output_tokens: replica.pieces };
        if !stream {
            place.whole = true;
            return answer::whole(usage);
        }
        return answer::paced(usage, replica.pause, place);
    };
    let Ok(asked) = serde_json::from_slice::<Asked>(&body) else {
        return Response::builder().status(400).body(full("no chat")).unwrap_or_default();
    };
    let (said, heard) = tokio::sync::mpsc::unbounded_channel();
    let prompt_bytes = asked.messages.iter().map(|message| message.content.len()).sum();
    let prefix = asked.messages.first().map(|message| message.content.as_str()).unwrap_or_default();
    batch.submit(prefix, prompt_bytes, asked.max_tokens.max(1), said);
    answer::generated(heard, asked.stream, place).await
}

async fn listen(port: u16, replica: Arc<Replica>) -> std::io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            // Without it small pieces wait for acknowledgements.
            let _ = stream.set_nodelay(true);
            let replica = replica.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| handle(replica.clone(), request));
                // A connection that breaks is its router's affair.
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    Ok(())
}

#[tokio::main(worker_threads = 1)]
async fn main() -> std::io::Result<()> {
    let arguments = Arguments::parse();
    for number in 0..arguments.replicas {
        let figures = Arc::new(Figures::default());
        let model = Model { cached_prompts: arguments.cached_prompts, speed: arguments.speed };
        let replica = Replica {
            batch: arguments.batch.then(|| Batch::start(model, figures.clone())),
            figures,
            pieces: arguments.pieces,
            pause: Duration::from_micros(arguments.pause_microseconds),
            capacity_tokens: arguments.cached_prompts as u64 * arguments.tokens_per_prompt,
        };
        listen(arguments.port + number, Arc::new(replica)).await?;
    }
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    Ok(())
}
