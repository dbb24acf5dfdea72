//! Step level: taking steps together and counting pages changes nothing, whatever comes.

use crate::reference::{Story, play};
use hdrhistogram::Histogram;
use proptest::prelude::*;
use warmset_planner::batching::{
    Fleet, Level, Picoseconds, Routing, StepCost, Workload,
    cost::{Parts, TIME_MAX},
    engine::EngineSettings,
    outcome::{NOT_YET, Outcomes},
    service::Discipline,
    simulate::Simulation,
};

fn fleet() -> impl Strategy<Value = Fleet> {
    let blocks = (prop_oneof![Just(4u32), Just(8), Just(16)], 4u64..60, any::<bool>());
    let engine = (1u32..24, 0u32..40, 1u32..80, blocks).prop_map(
        |(max_sequences, more, prefill_tokens_beside, (block_tokens, blocks, prefix_cache))| EngineSettings {
            step_tokens: max_sequences + more,
            max_sequences,
            prefill_tokens_beside,
            block_tokens,
            blocks,
            prefix_cache,
        },
    );
    let parts = (1u32..2000, 0u32..3000, 0u32..50, 0u32..5, 0u32..100, 0u32..9).prop_map(
        |(fixed, weights, prefill_token, prefill_pair, sequence, context_token)| {
            let seconds = |part: u32| f64::from(part) * 1e-6;
            Parts {
                fixed_seconds: seconds(fixed),
                weights_seconds: seconds(weights),
                prefill_token_seconds: seconds(prefill_token),
                prefill_pair_seconds: seconds(prefill_pair) * 1e-3,
                sequence_seconds: seconds(sequence),
                context_token_seconds: seconds(context_token) * 1e-1,
            }
        },
    );
    (1usize..4, any::<bool>(), engine, parts).prop_map(|(replicas, least, engine, parts)| Fleet {
        replicas,
        routing: if least { Routing::LeastRequests } else { Routing::RoundRobin },
        engine,
        cost: StepCost::new(&parts).unwrap(),
        discipline: Discipline::Sharing,
    })
}

/// Requests that often come at the same instant, and prompts of chunks from a small tree.
fn workload(seed: u64, requests: u32, gap: Picoseconds) -> Workload {
    const CHUNK_TOKENS: u32 = 16;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut workload = Workload::new(CHUNK_TOKENS);
    let mut at = 0;
    for _ in 0..requests {
        at += if random.u8(..3) == 0 { 0 } else { random.u64(..=gap) };
        let prompt = random.u32(1..120);
        let output = if random.u8(..4) == 0 { random.u32(1..4) } else { random.u32(1..90) };
        let chunks = (0..prompt / CHUNK_TOKENS).scan(1u32, |parent, _| {
            *parent = *parent * 2 + random.u32(..2);
            Some(*parent)
        });
        let chunks: Vec<u32> = chunks.collect();
        workload.push(at, (prompt, output), chunks);
    }
    workload
}

fn simulated(workload: &Workload, fleet: &Fleet, level: Level) -> Outcomes {
    let mut simulation = Simulation::new(workload, fleet, level);
    while simulation.advance(TIME_MAX) {
        assert!(simulation.check(), "pages or requests do not add up");
    }
    simulation.finish()
}

fn stories(outcomes: &Outcomes) -> Vec<Story> {
    let known = |time: Picoseconds| (time != NOT_YET).then_some(time);
    let story = outcomes.requests.iter().map(|outcome| Story {
        admitted: known(outcome.admitted),
        first_token: known(outcome.first_token),
        finished: known(outcome.finished),
    });
    story.collect()
}

fn same(workload: &Workload, fleet: &Fleet) -> Result<(u64, u64), TestCaseError> {
    let plain = play(workload, fleet);
    let outcomes = simulated(workload, fleet, Level::Step);
    prop_assert_eq!(&plain.stories, &stories(&outcomes));
    prop_assert_eq!(plain.preemptions, outcomes.preemptions);
    prop_assert_eq!(plain.found_tokens, outcomes.found_tokens);
    prop_assert_eq!(plain.steps, outcomes.steps);
    let mut gaps = Histogram::<u64>::new_from(outcomes.gaps());
    gaps.reset();
    plain.gaps.iter().for_each(|gap| gaps.saturating_record(*gap));
    let counted = |gaps: &Histogram<u64>| -> Vec<(u64, u64)> {
        gaps.iter_recorded().map(|bucket| (bucket.value_iterated_to(), bucket.count_at_value())).collect()
    };
    prop_assert_eq!(counted(&gaps), counted(outcomes.gaps()));
    Ok((plain.preemptions, plain.found_tokens))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn steps_taken_together_are_the_steps_taken_one_by_one(
        fleet in fleet(),
        seed in any::<u64>(),
        requests in 1u32..60,
        gap in prop_oneof![Just(0u64), Just(1_000_000_000), Just(40_000_000_000), Just(900_000_000_000)],
    ) {
        same(&workload(seed, requests, gap), &fleet)?;
    }
}

proptest! {
    #[test]
    fn whole_requests_keep_their_order_and_memory_adds_up(
        fleet in fleet(),
        servers in any::<bool>(),
        seed in any::<u64>(),
        gap in prop_oneof![Just(0u64), Just(1_000_000_000), Just(40_000_000_000)],
    ) {
        let discipline = if servers { Discipline::Servers } else { Discipline::Sharing };
        let (workload, fleet) = (workload(seed, 60, gap), Fleet { discipline, ..fleet });
        let outcomes = simulated(&workload, &fleet, Level::Request);
        for (request, outcome) in workload.requests().iter().zip(&outcomes.requests) {
            let fits = fleet.engine.fits(request.prompt_tokens, request.output_tokens);
            prop_assert_eq!(outcome.refused, !fits);
            let order = [request.arrives, outcome.admitted, outcome.first_token, outcome.finished];
            prop_assert!(!fits || (order.is_sorted() && outcome.finished != NOT_YET), "{:?}", outcome);
        }
    }
}

/// Who waits has found a chunk, which then leaves for the page of one that runs: now he may read more, but his first
/// page is free.
#[test]
fn who_waits_is_looked_at_again_when_a_chunk_leaves() {
    let engine = EngineSettings {
        step_tokens: 2,
        prefill_tokens_beside: 2,
        max_sequences: 2,
        block_tokens: 8,
        blocks: 7,
        prefix_cache: true,
    };
    let cost = StepCost::new(&Parts { fixed_seconds: 1e-6, ..Parts::default() }).unwrap();
    let fleet = Fleet { replicas: 1, routing: Routing::RoundRobin, engine, cost, discipline: Discipline::Sharing };
    same(&workload(8_799_734_820_703_592_320, 9, 0), &fleet).unwrap();
}

/// The property is about something: requests give way, and find what others have read.
#[test]
fn random_workloads_run_out_of_memory_and_share() {
    let parts =
        Parts { fixed_seconds: 1e-3, prefill_token_seconds: 1e-5, context_token_seconds: 1e-7, ..Parts::default() };
    let engine = EngineSettings {
        step_tokens: 32,
        prefill_tokens_beside: 32,
        max_sequences: 8,
        block_tokens: 8,
        blocks: 40,
        prefix_cache: true,
    };
    let cost = StepCost::new(&parts).unwrap();
    let fleet = Fleet { replicas: 2, routing: Routing::RoundRobin, engine, cost, discipline: Discipline::Sharing };
    let (preemptions, found_tokens) = same(&workload(3, 200, 5_000_000_000), &fleet).unwrap();
    assert!(preemptions > 20 && found_tokens > 500, "{preemptions} {found_tokens}");
}

#[test]
fn what_no_engine_can_hold_is_refused_and_nobody_waits_behind_it() {
    let parts = Parts { fixed_seconds: 1e-3, ..Parts::default() };
    let engine = EngineSettings {
        step_tokens: 32,
        prefill_tokens_beside: 32,
        max_sequences: 8,
        block_tokens: 8,
        blocks: 4,
        prefix_cache: true,
    };
    let cost = StepCost::new(&parts).unwrap();
    let fleet = Fleet { replicas: 1, routing: Routing::RoundRobin, engine, cost, discipline: Discipline::Sharing };
    let mut workload = Workload::new(0);
    // 32 tokens of KV: a prompt of 30 and three tokens, of which the last one's KV is not needed.
    for tokens in [(30, 3), (30, 4), (5, 1)] {
        workload.push(0, tokens, None);
    }
    for level in [Level::Step, Level::Request] {
        let outcomes = warmset_planner::batching::simulate(&workload, &fleet, level, TIME_MAX);
        let done: Vec<bool> = outcomes.requests.iter().map(|outcome| outcome.finished != NOT_YET).collect();
        assert_eq!(done, [true, false, true], "{level:?}");
        assert!(outcomes.requests[1].refused);
    }
}
