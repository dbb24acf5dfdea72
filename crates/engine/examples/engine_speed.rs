//! Prints what the llama engine does on this machine, without processes and HTTP around it: load, first token,
//! prefill and decode rates, as one JSON document. `engine_speed MODEL [THREADS] [PARALLEL] [CONTEXT] [prefill|decode|none]`.

use serde_json::{Value, json};
use std::{collections::BTreeMap, io::Write, path::PathBuf, time::Instant};
use warmset_engine::{
    llama::LlamaEngine,
    port::Engine,
    protocol::{EngineKind, FromEngine, GenerateJob, KvGrant, LoadRequest, Prompt, Sampling, Timings, ToEngine, Usage},
};

const DECODE_TOKENS: u32 = 128;
const DECODE_PROMPT_TOKENS: u32 = 64;
const ROUNDS: usize = 3;

fn job(prompt_tokens: u32, max_tokens: u32) -> GenerateJob {
    // Tokens of ordinary words, different enough that nothing is special about them.
    let tokens = (0..prompt_tokens).map(|index| 1000 + index * 37 % 20_000).collect();
    GenerateJob {
        prompt: Prompt::Tokens { tokens },
        choices: 1,
        max_tokens: Some(max_tokens),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        stop: Vec::new(),
        ignore_end: true,
        stream: true,
    }
}

struct Bench {
    engine: LlamaEngine,
    next_request: u64,
}

impl Bench {
    /// Runs jobs at the same time until all are done; their usage and timings, and the seconds it took.
    fn run(&mut self, jobs: Vec<GenerateJob>) -> (Vec<(Usage, Timings)>, f64) {
        let begin = Instant::now();
        let mut open = BTreeMap::new();
        for job in jobs {
            self.next_request += 1;
            let request = self.next_request;
            self.engine.handle(ToEngine::Generate { request, job: Box::new(job) }, &mut |message| {
                assert!(matches!(message, FromEngine::Prepared { .. }), "{message:?}");
            });
            self.engine.handle(ToEngine::Grant { request, source: KvGrant::Recompute }, &mut |_| {});
            open.insert(request, ());
        }
        let mut done = Vec::new();
        while done.len() < open.len() {
            self.engine.step(&mut |message| match message {
                FromEngine::Done { usage, timings, .. } => done.push((usage, timings)),
                FromEngine::Failed { message, .. } => panic!("{message}"),
                _ => {}
            });
        }
        (done, begin.elapsed().as_secs_f64())
    }

    fn prefill_rate(&mut self, tokens: u32) -> f64 {
        best((0..ROUNDS).map(|_| f64::from(tokens) / self.run(vec![job(tokens, 1)]).1))
    }

    /// Tokens per second over all choices, from the last one's first token on.
    fn decode_rate(&mut self, concurrent: u32) -> f64 {
        best((0..ROUNDS).map(|_| {
            let jobs = (0..concurrent).map(|_| job(DECODE_PROMPT_TOKENS, DECODE_TOKENS)).collect();
            let (done, _) = self.run(jobs);
            let slowest = done.iter().map(|(_, timings)| timings.decode_seconds).fold(0.0, f64::max);
            f64::from(concurrent * (DECODE_TOKENS - 1)) / slowest
        }))
    }
}

fn best(rates: impl Iterator<Item = f64>) -> f64 {
    rates.fold(0.0, f64::max)
}

fn resident_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(field));
    line.and_then(|line| line.split_whitespace().nth(1)).and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn memory() -> Value {
    json!({ "anonymous_mib": resident_kib("RssAnon") / 1024, "file_mib": resident_kib("RssFile") / 1024 })
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |index: usize, otherwise: u32| arguments.get(index).and_then(|text| text.parse().ok()).unwrap_or(otherwise);
    let Some(model) = arguments.first() else {
        eprintln!("usage: engine_speed MODEL [THREADS] [PARALLEL] [CONTEXT]");
        return;
    };
    let (threads, parallel, context_tokens) = (number(1, 2), number(2, 8), number(3, 4096));
    let begin = Instant::now();
    let mut engine = LlamaEngine::new();
    let start_seconds = begin.elapsed().as_secs_f64();
    let request = LoadRequest {
        engine: EngineKind::Llama,
        files: vec![PathBuf::from(model)],
        context_tokens,
        parallel,
        threads,
        accelerators: Vec::new(),
    };
    let before = memory();
    let begin = Instant::now();
    let info = engine.load(&request, &mut |_| {}).unwrap_or_else(|failure| panic!("{}", failure.message));
    let mut bench = Bench { engine, next_request: 0 };
    let (first, _) = bench.run(vec![job(16, 1)]);
    let first_token_seconds = begin.elapsed().as_secs_f64();
    let after_load = memory();
    let mut report = json!({
        "start_seconds": start_seconds,
        "load_seconds": info.load_seconds,
        "warm_up_seconds": info.warm_up_seconds,
        "first_prompt_seconds": first[0].1.first_token_seconds,
        "load_to_first_token_seconds": first_token_seconds,
        "memory_before": before,
        "memory_loaded": after_load,
    });
    let only = arguments.get(4).map_or("", String::as_str);
    for tokens in
        [512, 2048].into_iter().filter(|tokens| *tokens < info.context_tokens && ["", "prefill"].contains(&only))
    {
        report[format!("prefill_{tokens}_tokens_per_second")] = json!(bench.prefill_rate(tokens));
    }
    for concurrent in [1, 4, 8].into_iter().filter(|_| ["", "decode"].contains(&only)) {
        report[format!("decode_{concurrent}_tokens_per_second")] = json!(bench.decode_rate(concurrent));
    }
    report["memory_used"] = memory();
    writeln!(std::io::stdout(), "{report:#}").expect("standard output is open");
}
