//! Request level: queues whose answers are known in closed form.

use warmset_planner::{
    batching::{
        Fleet, Level, Routing, StepCost, Workload,
        cost::{Parts, TIME_MAX, seconds},
        engine::EngineSettings,
        outcome::Outcomes,
        service::Discipline,
        simulate,
        workload::{Arrivals, Demand, Lengths},
    },
    calculate::queueing::Queue,
};

/// How far from the closed form a run may be.
const TOLERANCE: f64 = 0.01;

/// A replica whose service is a number of tokens, each of the same time; the prompt's token is the first of them.
fn fleet(servers: u32, token_seconds: f64, parts: Parts, discipline: Discipline) -> Fleet {
    let fixed = if parts == Parts::default() { Parts { fixed_seconds: token_seconds, ..parts } } else { parts };
    Fleet {
        replicas: 1,
        routing: Routing::RoundRobin,
        engine: EngineSettings {
            step_tokens: servers,
            max_sequences: servers,
            prefill_tokens_beside: servers,
            block_tokens: 16,
            blocks: 1 << 40,
            prefix_cache: false,
        },
        cost: StepCost::new(&fixed).unwrap(),
        discipline,
    }
}

fn requests(count: usize, per_second: f64, output_tokens: u32, lengths: Lengths, seed: u64) -> Workload {
    let demand = Demand {
        requests: count,
        prompt_tokens: 1,
        output_tokens,
        lengths,
        arrivals: Arrivals::Poisson,
        shared_tokens: 0,
        shared_prompts: 0,
    };
    println!("seed {seed}: {demand:?} at {per_second} a second");
    demand.workload(per_second, seed)
}

fn mean_wait(workload: &Workload, outcomes: &Outcomes) -> f64 {
    let waits = workload.requests().iter().zip(&outcomes.requests);
    let sum: f64 = waits.map(|(request, outcome)| seconds(outcome.admitted - request.arrives)).sum();
    sum / workload.requests().len() as f64
}

fn assert_near(what: &str, simulated: f64, known: f64) {
    println!("{what}: {simulated:.6} simulated, {known:.6} known, {:.3} %", 100.0 * (simulated / known - 1.0));
    assert!((simulated / known - 1.0).abs() < TOLERANCE, "{what}: {simulated} {known}");
}

#[test]
fn servers_with_exponential_times_wait_as_erlang_says() {
    // As in the answers that the calculators are held against: five and six servers, and one.
    for (servers, arrivals_per_second, service_seconds, count, seed) in
        [(5, 40.0, 0.1, 8_000_000, 1), (6, 40.0, 0.1, 4_000_000, 2), (1, 4.0, 0.1, 2_000_000, 3)]
    {
        let tokens = 10_000;
        let fleet = fleet(servers, service_seconds / f64::from(tokens), Parts::default(), Discipline::Servers);
        let workload = requests(count, arrivals_per_second, tokens, Lengths::Exponential, seed);
        let outcomes = simulate(&workload, &fleet, Level::Request, TIME_MAX);
        let queue = Queue { arrivals_per_second, service_seconds, servers: u64::from(servers) };
        let known = queue.exponential().unwrap().unwrap();
        assert_near(&format!("M/M/{servers} wait"), mean_wait(&workload, &outcomes), known.mean_wait_seconds);
        let waited = workload.requests().iter().zip(&outcomes.requests);
        let waited = waited.filter(|(request, outcome)| outcome.admitted > request.arrives).count();
        assert_near(&format!("M/M/{servers} P(wait)"), waited as f64 / count as f64, known.wait_probability);
    }
}

#[test]
fn one_server_with_constant_times_waits_as_pollaczek_and_khinchine_say() {
    let (arrivals_per_second, service_seconds, tokens) = (5.0, 0.1, 1000);
    let fleet = fleet(1, service_seconds / f64::from(tokens), Parts::default(), Discipline::Servers);
    let workload = requests(2_000_000, arrivals_per_second, tokens, Lengths::Fixed, 4);
    let outcomes = simulate(&workload, &fleet, Level::Request, TIME_MAX);
    let known = Queue { arrivals_per_second, service_seconds, servers: 1 }.constant().unwrap().unwrap();
    assert_near("M/D/1 wait", mean_wait(&workload, &outcomes), known.mean_wait_seconds);
}

/// Processor sharing: the mean time in the system is `s / (1 - rho)` whatever the distribution of lengths (Kleinrock,
/// Queueing Systems II, section 4.4).
#[test]
fn sharing_takes_as_long_as_processor_sharing() {
    for (lengths, seed) in [(Lengths::Fixed, 5), (Lengths::Exponential, 6)] {
        let (service_seconds, tokens, rate) = (0.1, 10_000, 6.0);
        // A step takes a token's time for each that is served, and reading takes next to none.
        let parts = Parts {
            sequence_seconds: service_seconds / f64::from(tokens),
            prefill_token_seconds: 1e-12,
            ..Parts::default()
        };
        let fleet = fleet(100_000, 0.0, parts, Discipline::Sharing);
        let workload = requests(2_000_000, rate, tokens, lengths, seed);
        let outcomes = simulate(&workload, &fleet, Level::Request, TIME_MAX);
        let times = workload.requests().iter().zip(&outcomes.requests);
        let mean: f64 = times.map(|(request, outcome)| seconds(outcome.finished - request.arrives)).sum::<f64>()
            / workload.requests().len() as f64;
        assert_near(&format!("{lengths:?} sharing"), mean, service_seconds / (1.0 - rate * service_seconds));
    }
}
