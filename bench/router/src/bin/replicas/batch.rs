//! A server with continuous batching: steps of prefill and decoding, slots, and a prefix cache of whole prompts.
//!
//! Times are those of one accelerator with a model of about eight billion weights. A step that is late by the machine's
//! timers does not make the next one late: steps follow each other in the time that they should take.

use crate::answer::{Figures, Said, Usage};
use std::{
    collections::VecDeque,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::Instant,
};

const STEP_MILLISECONDS: f64 = 12.0;
const DECODING_MILLISECONDS: f64 = 0.25;
const PREFILL_MILLISECONDS: f64 = 0.1;
const PREFILL_TOKENS_PER_STEP: u64 = 2048;
const SLOTS: usize = 64;
const BYTES_PER_TOKEN: usize = 4;
/// Tokens of one event of a stream, so that clients and routers spend their time on requests.
const TOKENS_PER_EVENT: u32 = 4;

pub struct Model {
    pub cached_prompts: usize,
    pub speed: f64,
}

/// A request at a replica.
struct Job {
    prefix: u64,
    prefix_tokens: u64,
    tokens: u64,
    output: u32,
    said: UnboundedSender<Said>,
    /// Known once its turn came.
    left: Option<u64>,
    cached: u64,
    given: u32,
}

/// The way into a replica.
pub struct Batch(UnboundedSender<Job>);

impl Batch {
    pub fn start(model: Model, figures: Arc<Figures>) -> Self {
        let (sender, receiver) = unbounded_channel();
        tokio::spawn(Steps { model, figures, ..Steps::new(receiver) }.run());
        Self(sender)
    }

    pub fn submit(&self, prefix: &str, prompt_bytes: usize, output: u32, said: UnboundedSender<Said>) {
        let mut hasher = DefaultHasher::new();
        prefix.hash(&mut hasher);
        let prefix_tokens = (prefix.len() / BYTES_PER_TOKEN) as u64;
        let tokens = (prompt_bytes / BYTES_PER_TOKEN) as u64;
        let job = Job { prefix: hasher.finish(), prefix_tokens, tokens, output, said, left: None, cached: 0, given: 0 };
        // The replica lives as long as the process.
        let _ = self.0.send(job);
    }
}

struct Steps {
    model: Model,
    figures: Arc<Figures>,
    arrivals: UnboundedReceiver<Job>,
    waiting: VecDeque<Job>,
    decoding: Vec<Job>,
    /// The least recently used first.
    cache: VecDeque<u64>,
}

impl Steps {
    fn new(arrivals: UnboundedReceiver<Job>) -> Self {
        let (model, figures) = (Model { cached_prompts: 1, speed: 1.0 }, Arc::default());
        Self { model, figures, arrivals, waiting: VecDeque::new(), decoding: Vec::new(), cache: VecDeque::new() }
    }

    async fn run(mut self) {
        let mut at = Instant::now();
        loop {
            if self.waiting.is_empty() && self.decoding.is_empty() {
                let Some(job) = self.arrivals.recv().await else { return };
                self.waiting.push_back(job);
                at = Instant::now();
            }
            while let Ok(job) = self.arrivals.try_recv() {
                self.waiting.push_back(job);
            }
            let (prefilled, first) = self.prefill();
            let decoding = self.decoding.len() as f64 * DECODING_MILLISECONDS;
            let milliseconds = STEP_MILLISECONDS + decoding + prefilled as f64 * PREFILL_MILLISECONDS;
            self.figures.busy_microseconds.fetch_add((milliseconds * 1000.0) as u64, Relaxed);
            at += Duration::from_secs_f64(milliseconds / 1000.0 / self.model.speed);
            tokio::time::sleep_until(at).await;
            self.decode(first);
        }
    }

    /// Spends a step's budget of prompts in the order of their arrival; returns it, and whose prompts are read.
    fn prefill(&mut self) -> (u64, Vec<Job>) {
        let (mut budget, mut read) = (PREFILL_TOKENS_PER_STEP, Vec::new());
        while budget > 0 && self.decoding.len() + read.len() < SLOTS {
            let Some(job) = self.waiting.front_mut() else { break };
            if job.said.is_closed() {
                self.waiting.pop_front();
                continue;
            }
            let left = *job.left.get_or_insert_with(|| {
                job.cached = if touch(&mut self.cache, job.prefix) { job.prefix_tokens } else { 0 };
                self.figures.prompt_tokens.fetch_add(job.tokens, Relaxed);
                self.figures.cached_tokens.fetch_add(job.cached, Relaxed);
                // The last token of a prompt is always computed.
                (job.tokens - job.cached).max(1)
            });
            let spent = left.min(budget);
            budget -= spent;
            job.left = Some(left - spent);
            if left > spent {
                break;
            }
            let (prefix, Some(job)) = (job.prefix, self.waiting.pop_front()) else { break };
            self.keep(prefix);
            read.push(job);
        }
        (PREFILL_TOKENS_PER_STEP - budget, read)
    }

    /// What was read is found from now on.
    fn keep(&mut self, prefix: u64) {
        if !touch(&mut self.cache, prefix) {
            self.cache.push_back(prefix);
            if self.cache.len() > self.model.cached_prompts {
                self.cache.pop_front();
            }
        }
    }

    /// Everyone gets a token; those whose prompt was just read their first.
    fn decode(&mut self, first: Vec<Job>) {
        self.decoding.extend(first);
        self.decoding.retain_mut(|job| {
            job.given += 1;
            let is_over = job.given >= job.output;
            let is_told = job.given % TOKENS_PER_EVENT == 1 || is_over;
            let is_heard = !is_told || job.said.send(Said::Piece).is_ok();
            if is_over {
                let usage = Usage { prompt_tokens: job.tokens, cached_tokens: job.cached, output_tokens: job.output };
                // Whoever asked may be gone.
                let _ = job.said.send(Said::Done(usage));
            }
            is_heard && !is_over
        });
    }
}

/// Whether it is there; then it is the most recently used.
fn touch(cache: &mut VecDeque<u64>, prefix: u64) -> bool {
    let place = cache.iter().position(|known| *known == prefix);
    if let Some(place) = place {
        cache.remove(place);
        cache.push_back(prefix);
    }
    place.is_some()
}
