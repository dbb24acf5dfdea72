//! Prints what the llama engine does on this machine, without processes and HTTP around it: load, first token,
//! prefill and decode rates, as one JSON document. `engine_speed MODEL [THREADS] [PARALLEL] [CONTEXT] [prefill|decode|none]
//! [ROUNDS]`.

use serde_json::{Value, json};
use std::{collections::BTreeMap, io::Write, path::PathBuf, time::Instant};
use warmset_engine::{
    llama::LlamaEngine,
    port::Engine,
    protocol::{
        EngineKind, FromEngine, GenerateJob, KvGrant, LoadRequest, Output, Prompt, Sampling, Timings, ToEngine, Usage,
    },
};

const DECODE_TOKENS: u32 = 128;
/// Short, since the rate includes computing it.
const DECODE_PROMPT_TOKENS: u32 = 8;

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
        output: Output::default(),
        kv_domain: None,
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
            self.engine.handle(ToEngine::Grant { request, source: KvGrant::Recompute { known: 0 } }, &mut |_| {});
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

    /// Rates per second of wall clock (the best round) and per second of processor time (over all rounds), which stays
    /// meaningful on a busy machine as long as one thread is used.
    fn rates(&mut self, tokens: f64, rounds: usize, jobs: impl Fn() -> Vec<GenerateJob>) -> Value {
        let cpu_begin = cpu_seconds();
        let mut best: f64 = 0.0;
        for _ in 0..rounds {
            let (_, seconds) = self.run(jobs());
            best = best.max(tokens / seconds);
        }
        let cpu = (cpu_seconds() - cpu_begin) / rounds as f64;
        json!({ "tokens_per_second": best, "tokens_per_cpu_second": tokens / cpu })
    }
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
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
        command: None,
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
    let rounds = number(5, 3).max(1) as usize;
    for tokens in
        [512, 2048].into_iter().filter(|tokens| *tokens < info.context_tokens && ["", "prefill"].contains(&only))
    {
        report[format!("prefill_{tokens}")] = bench.rates(f64::from(tokens), rounds, || vec![job(tokens, 1)]);
    }
    for concurrent in [1, 4, 8].into_iter().filter(|_| ["", "decode"].contains(&only)) {
        let jobs = || (0..concurrent).map(|_| job(DECODE_PROMPT_TOKENS, DECODE_TOKENS)).collect();
        report[format!("decode_{concurrent}")] = bench.rates(f64::from(concurrent * DECODE_TOKENS), rounds, jobs);
    }
    report["memory_used"] = memory();
    writeln!(std::io::stdout(), "{report:#}").expect("standard output is open");
}
