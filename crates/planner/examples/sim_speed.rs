//! How fast the simulator of engines is, and how that depends on the number of replicas: one JSON document.
//!
//! `sim_speed LEVEL PROMPT_TOKENS OUTPUT_TOKENS PER_SECOND_AND_REPLICA REQUESTS REPLICAS` or `sim_speed LEVEL REPLICAS
//! TRACE`, `LEVEL` being `step` or `request`. Replicas are those of `scenarios/batching.toml`. What is timed is the run
//! alone; its processor time is what the operating system says of this thread, which is the only one.
#![expect(clippy::print_stdout, reason = "an example's document goes to standard output")]

use warmset_planner::batching::{
    Fleet, Level, Workload,
    cost::TIME_MAX,
    outcome::{NOT_YET, Outcomes},
    plan::{Plan, SHIPPED},
    report::Times,
    simulate, trace,
    workload::{Arrivals, Demand, Lengths},
};

fn processor_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux says what a thread has used");
    let nanoseconds: f64 = text.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number");
    nanoseconds / 1e9
}

fn peak_resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("Linux says what a process has used");
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it has a peak");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") * 1024
}

fn first_tokens(workload: &Workload, outcomes: &Outcomes) -> Option<Times> {
    let pairs = workload.requests().iter().zip(&outcomes.requests);
    let known = pairs.filter(|(_, outcome)| outcome.first_token != NOT_YET);
    Times::of(known.map(|(request, outcome)| outcome.first_token - request.arrives).collect())
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words[at].parse::<f64>().expect("a number");
    let level = if words[0] == "step" { Level::Step } else { Level::Request };
    let plan = Plan::parse(SHIPPED.1).expect("it is shipped");
    let settings = plan.settings().expect("it is shipped");
    let (workload, replicas) = if words.len() == 3 {
        (trace::read(&std::fs::read_to_string(&words[2]).expect("a trace")).expect("a trace"), number(1))
    } else {
        let demand = Demand {
            requests: number(4) as usize,
            prompt_tokens: number(1) as u32,
            output_tokens: number(2) as u32,
            lengths: Lengths::Fixed,
            arrivals: Arrivals::Poisson,
            shared_tokens: 0,
            shared_prompts: 0,
        };
        (demand.workload(number(3) * number(5), 1), number(5))
    };
    let fleet = Fleet { replicas: replicas as usize, ..settings.fleet().expect("it is shipped") };
    let before = processor_seconds();
    let outcomes = simulate(&workload, &fleet, level, TIME_MAX);
    let seconds = processor_seconds() - before;
    let requests = workload.requests().len();
    let document = serde_json::json!({
        "level": level,
        "replicas": fleet.replicas,
        "requests": requests,
        "finished": outcomes.requests.iter().filter(|outcome| outcome.finished != NOT_YET).count(),
        "processor_seconds": seconds,
        "requests_per_processor_second": requests as f64 / seconds,
        "nanoseconds_per_request": 1e9 * seconds / requests as f64,
        "peak_resident_bytes": peak_resident_bytes(),
        "steps": outcomes.steps,
        "time_to_first_token_seconds": first_tokens(&workload, &outcomes),
    });
    println!("{document}");
}
