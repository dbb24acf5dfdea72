//! What must hold of calculators for any input: more load never needs less, inverse answers agree, wrong input is refused.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use warmset_planner::calculate::{
    batch::{Job, Profile},
    break_even::{BreakEven, Compute, KvSize, Prices},
    decode::{Bound, Decode, weight_bytes_read},
    distribute::Distribute,
    engine_args::{Answer, Engine, Plan, Use},
    fleet::Fleet,
    hardware::Gpu,
    model::{Attention, ElementType, Experts, Layers, Model, Weights},
    paging::Paging,
    pools::Pools,
    prefill,
    prefixes::Prefixes,
    queueing::Queue,
    sessions::Sessions,
    transfer::Transfer,
    warm_set::{WarmModel, WarmSet},
};

fn fp16() -> ElementType {
    ElementType::named("fp16").unwrap()
}

/// Grouped-query attention as large models have it, with weights of so many parameters.
fn model(layers: u64, parameters: u64, window_tokens: Option<u64>) -> Model {
    let attention = Attention::Heads { kv_heads: 8, key_length: 128, value_length: 128 };
    let group = |count, window_tokens| Layers { count, attention, window_tokens, query_width: Some(2 * 8192) };
    let layers = match window_tokens {
        None => vec![group(layers, None)],
        Some(_) => vec![group(layers, window_tokens), group(1, None)],
    };
    Model { layers, weights: Some(Weights::dense(parameters, fp16()).unwrap()), heads: Some(64), ..Model::default() }
}

fn seventy() -> Model {
    model(80, 68_500_000_000, None)
}

fn warm(name: &str, steady: u64, peak: u64, per_request: u64, concurrency: u64) -> WarmModel {
    WarmModel { name: name.into(), steady, peak, per_request, concurrency }
}

fn set(models: Vec<WarmModel>, budget: u64, reserve: u64) -> WarmSet {
    WarmSet { models, budget, reserve, fragmentation: 0.0, loads_at_once: 1 }
}

#[test]
fn the_worst_moment_counts_requests_fragmentation_and_the_largest_load() {
    let models = vec![warm("a", 800, 900, 5, 4), warm("b", 400, 700, 0, 0), warm("c", 100, 100, 1, 10)];
    let answer = WarmSet { fragmentation: 0.05, loads_at_once: 1, ..set(models.clone(), 2048, 384) }.answer().unwrap();
    assert_eq!((answer.steady.used, answer.requests, answer.fragmentation, answer.loading), (1300, 30, 65, 300));
    assert_eq!((answer.worst.used, answer.worst.headroom), (1695, 1664 - 1695));
    assert!(answer.steady.fits() && !answer.worst.fits());
    // Side by side, the new version of a loads at its peak.
    assert_eq!((answer.rolls[0].model.as_str(), answer.rolls[0].side_by_side.used), ("a", 2200));
    // Two workers hold them; a third survives one of them.
    let workers = answer.workers.unwrap();
    assert_eq!((workers.at_least, workers.packed, workers.with_one_to_spare), (1, 2, 3));
    assert_eq!(workers.placement, [vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()]]);
    let two_loads = WarmSet { loads_at_once: 2, ..set(models, 2048, 384) }.answer().unwrap();
    assert_eq!(two_loads.loading, 400);
}

#[test]
fn a_set_that_means_nothing_is_refused() {
    let fine = || vec![warm("a", 1, 1, 0, 0)];
    let reason = |set: WarmSet| set.answer().unwrap_err().to_string();
    assert!(reason(set(fine(), 0, 0)).contains("worker-memory is 0"));
    assert!(reason(set(fine(), 10, 10)).contains("reserve"));
    assert!(reason(set(vec![], 10, 1)).contains("0 times"));
    assert!(reason(set(vec![warm("a", 0, 0, 0, 0)], 10, 1)).contains("model size is 0"));
    assert!(reason(set(vec![warm("a", 5, 4, 0, 0)], 10, 1)).contains("less than it keeps"));
    assert!(reason(set(vec![warm("a", 1, 1, 0, 0), warm("a", 2, 2, 0, 0)], 10, 1)).contains("twice"));
    assert!(reason(WarmSet { fragmentation: f64::NAN, ..set(fine(), 10, 1) }).contains("fragmentation"));
    assert!(reason(set(vec![warm("a", 1, u64::MAX, 0, 0)], 10, 1)).contains("check its unit"));
    assert!(reason(set(vec![warm("a", 1, 1, u64::MAX, 1)], 10, 1)).contains("check its unit"));
    assert!(reason(set(vec![warm("a", 1, 1, 1, u64::MAX)], 10, 1)).contains("concurrency"));
    let large = set(vec![warm("a", 1 << 50, 1 << 50, 1 << 50, 1 << 30)], 1 << 40, 0).answer().unwrap();
    assert!(!large.worst.fits() && large.too_large == ["a"] && large.workers.is_none());
}

proptest! {
    #[test]
    fn a_set_that_is_placed_fits_where_it_is(
        sizes in prop::collection::vec((1u64..1000, 0u64..200, 0u64..10, 0u64..10), 1..40), budget in 600u64..4000, lost in 0u32..20,
    ) {
        let models: Vec<WarmModel> = sizes.iter().enumerate()
            .map(|(index, (steady, load, request, concurrency))| warm(&index.to_string(), *steady, steady + load, *request, *concurrency))
            .collect();
        let set = WarmSet { fragmentation: f64::from(lost) / 100.0, ..set(models.clone(), budget, 100) };
        let answer = set.answer().unwrap();
        prop_assert_eq!(answer.steady.fits(), answer.steady.used <= u128::from(answer.usable));
        prop_assert!(answer.worst.used >= answer.steady.used);
        let Some(workers) = answer.workers else {
            prop_assert!(!answer.too_large.is_empty());
            return Ok(());
        };
        prop_assert!(workers.at_least <= workers.packed && workers.placement.len() as u64 == workers.packed);
        prop_assert_eq!(workers.placement.iter().map(Vec::len).sum::<usize>(), models.len());
        for names in &workers.placement {
            let held = models.iter().filter(|model| names.contains(&model.name)).cloned().collect();
            // One set of its own on each worker: it has room at its worst moment.
            let alone = WarmSet { models: held, ..set.clone() }.answer().unwrap();
            prop_assert!(alone.worst.headroom >= -(names.len() as i128), "{:?}", names);
        }
    }

    #[test]
    fn more_tokens_sequences_or_bytes_never_take_less(tokens in 1u64..1_000_000, more in 1u64..1000, sequences in 1u64..1000, window in 1u64..100_000) {
        let model = model(40, 1_000_000_000, Some(window));
        let bytes = |tokens, sequences| model.kv(fp16(), tokens, sequences, 1).unwrap().bytes;
        prop_assert!(bytes(tokens + more, sequences) > bytes(tokens, sequences));
        prop_assert!(bytes(tokens, sequences + more) > bytes(tokens, sequences));
        for gpus in [2, 8, 64] {
            let kv = model.kv(fp16(), tokens, sequences, gpus).unwrap();
            prop_assert!(kv.bytes_per_gpu <= kv.bytes && kv.bytes_per_gpu * 8 >= kv.bytes);
        }
    }

    #[test]
    fn the_sessions_that_fit_fit_and_one_more_does_not(memory in 1u64<<30..1u64<<42, session in 1u64..1u64<<34, weights in 0u64..1u64<<40, wanted in 1u64..100_000) {
        let sessions = Sessions { memory_bytes: memory, memory_utilisation: 0.9, weight_bytes: weights, other_bytes: 1 << 20, session_bytes: session, sessions: wanted };
        let answer = sessions.answer().unwrap();
        let room = |count| Sessions { sessions: count, ..sessions }.answer().unwrap();
        if answer.sessions_that_fit > 0 {
            prop_assert!(room(answer.sessions_that_fit).fits && room(answer.sessions_that_fit).headroom_bytes >= 0);
            prop_assert_eq!(room(answer.sessions_that_fit).replicas_needed, Some(1));
        }
        prop_assert!(!room(answer.sessions_that_fit + 1).fits && room(answer.sessions_that_fit + 1).headroom_bytes < 0);
    }

    #[test]
    fn blocks_never_lose_to_reservation_of_the_same_blocks(average in 1u64..10_000, more in 0u64..10_000, block in 1u64..256) {
        let reserved = (average + more).div_ceil(block) * block;
        let answer = Paging { reserved_tokens: reserved, average_tokens: average, block_tokens: block, budget: Some((1000, 1 << 36)) }.answer().unwrap();
        prop_assert!(answer.gain_paged >= 1.0 && answer.gain_paged <= answer.gain_ideal);
        prop_assert!(answer.sequences_paged >= answer.sequences_reserved);
        prop_assert!((answer.utilisation + answer.waste - 1.0).abs() < 1e-12);
    }

    #[test]
    fn larger_batches_take_longer_and_give_more(batch in 1u64..512, context in 0u64..100_000) {
        let model = seventy();
        let step = |batch| Decode {
            weights: model.weights.unwrap(), kv_bytes_per_sequence: model.kv_bytes(fp16(), context).unwrap(), batch,
            memory_bytes_per_second: 8.0 * 3.35e12, flops_per_second: Some(8.0 * 989e12),
        }.answer().unwrap();
        let (one, more) = (step(batch), step(batch + 1));
        prop_assert!(more.ceiling.seconds_per_token >= one.ceiling.seconds_per_token);
        prop_assert!(more.ceiling.tokens_per_second >= one.ceiling.tokens_per_second * (1.0 - 1e-12));
        // What is measured at the calibrated speed gives the efficiency back.
        let expected = one.calibrated(0.65).unwrap();
        prop_assert!((one.efficiency_of(expected.seconds_per_token).unwrap() - 0.65).abs() < 1e-9);
    }

    #[test]
    fn a_prompt_in_two_parts_takes_what_it_takes_in_one(first in 1u64..50_000, second in 1u64..50_000, window in prop::option::of(1u64..20_000)) {
        let model = model(40, 7_000_000_000, window);
        let flops = |new, known| prefill::work(&model, new, known).unwrap().flops;
        let (whole, parts) = (flops(first + second, 0), flops(first, 0) + flops(second, first));
        prop_assert!((parts / whole - 1.0).abs() < 1e-9, "{parts} and {whole}");
    }

    #[test]
    fn the_least_prefix_and_the_least_bandwidth_agree(gigabytes in 1u64..200, fixed_ms in 0u64..100, loaders in 1u64..8, window in prop::option::of(1u64..20_000)) {
        let model = model(79, 68_500_000_000, window);
        let even = BreakEven {
            model: &model, kv: KvSize::Kept(fp16()), fixed_seconds: fixed_ms as f64 / 1e3, loaders,
            compute: Compute::Work { flops_per_second: 4.0 * 989e12, efficiency: 0.4 },
        };
        let bandwidth = gigabytes as f64 * 1e9;
        match even.least_prefix_tokens(bandwidth).unwrap() {
            Some(tokens) => {
                prop_assert!(even.answer(tokens, bandwidth).unwrap().reload_pays);
                prop_assert!(even.least_bytes_per_second(tokens).unwrap().unwrap() < bandwidth * (1.0 + 1e-9));
                if tokens > 1 {
                    prop_assert!(!even.answer(tokens - 1, bandwidth).unwrap().reload_pays);
                    let least = even.least_bytes_per_second(tokens - 1).unwrap();
                    prop_assert!(least.is_none_or(|least| least > bandwidth * (1.0 - 1e-9)));
                }
                prop_assert!(even.answer(tokens * 7, bandwidth).unwrap().reload_pays, "once it pays it does for all longer ones");
            }
            None => prop_assert!(!even.answer(1_000_000, bandwidth).unwrap().reload_pays),
        }
    }

    #[test]
    fn chains_and_trees_take_what_passing_chunks_on_takes(nodes in 1u64..40, chunks in 1u64..40, fanout in 2u64..5) {
        let chunk = 1_000_000u64;
        let answer = Distribute { bytes: chunk * chunks, nodes, origin_bytes_per_second: 1e15, node_bytes_per_second: chunk as f64, chunk_bytes: chunk, fanout }.answer().unwrap();
        // A node has chunk k one second after its predecessor had it, and one after it had chunk k - 1.
        prop_assert_eq!(answer.chain_seconds.round() as u64, chunks + nodes - 1);
        let tree = tree_seconds(nodes, chunks, fanout);
        prop_assert!(tree <= answer.tree_seconds + 1e-6, "{tree} and {}", answer.tree_seconds);
        prop_assert!(nodes <= fanout || tree * 4.0 >= answer.tree_seconds, "{tree} and {}", answer.tree_seconds);
        prop_assert!(answer.floor_seconds <= answer.chain_seconds && answer.floor_seconds <= answer.doubling_seconds);
    }

    #[test]
    fn more_servers_never_wait_longer(arrivals in 0.1f64..500.0, service in 0.01f64..2.0, target in 0.0f64..1.0) {
        let queue = |servers| Queue { arrivals_per_second: arrivals, service_seconds: service, servers };
        let least = queue(1).least_servers().unwrap();
        prop_assert!(least == 1 || queue(least - 1).exponential().unwrap().is_none());
        let mut before = queue(least).exponential().unwrap().unwrap();
        for servers in least + 1..least + 10 {
            let now = queue(servers).exponential().unwrap().unwrap();
            prop_assert!(now.mean_wait_seconds <= before.mean_wait_seconds && now.wait_probability <= before.wait_probability);
            before = now;
        }
        let needed = queue(1).servers_for(target).unwrap();
        prop_assert!(queue(needed).exponential().unwrap().unwrap().wait_p99_seconds <= target);
        if needed > least {
            prop_assert!(queue(needed - 1).exponential().unwrap().unwrap().wait_p99_seconds > target);
        }
    }

    #[test]
    fn a_batch_is_done_within_its_window_by_the_instances_it_asks_for(requests in 1u64..10_000_000, window in 1u64..100, share in 0.01f64..1.0) {
        let job = Job {
            requests, prompt_tokens: 2000, cached_share: 0.5, output_tokens: 300, window_hours: window, free_shares: &[share, 1.0],
            instances: None, price_per_instance_hour: Some(20.0),
        };
        let profile = Profile { batch: 64, prefill_tokens_per_second: 8000.0, decode_tokens_per_second: 2000.0 };
        let answer = job.answer(profile).unwrap();
        prop_assert!(answer.hours.unwrap() <= window as f64);
        if answer.instances > 1 {
            prop_assert_eq!(Job { instances: Some(answer.instances - 1), ..job }.answer(profile).unwrap().hours, None);
        }
        let work = requests as f64 * (1000.0 / 8000.0 + 300.0 / 2000.0) / 3600.0;
        prop_assert!((answer.cost.unwrap() / (20.0 * work) - 1.0).abs() < 1e-9);
    }
}

/// A tree of nodes that pass chunks on to each of their children in turn, second by second.
fn tree_seconds(nodes: u64, chunks: u64, fanout: u64) -> f64 {
    // The first node has the chunks as they come; a node's link is shared by its children.
    let mut arrival: Vec<Vec<u64>> = vec![(1..=chunks).collect()];
    for node in 1..nodes {
        let parent = ((node - 1) / fanout) as usize;
        let (child, children) = ((node - 1) % fanout, fanout.min(nodes - 1 - parent as u64 * fanout));
        let mut free = 0;
        let mine = (0..chunks as usize).map(|chunk| {
            let begins = arrival[parent][chunk].max(free);
            free = begins + children;
            begins + child + 1
        });
        let mine = mine.collect();
        arrival.push(mine);
    }
    arrival.iter().filter_map(|times| times.last()).max().copied().unwrap_or(0) as f64
}

#[test]
fn thirty_thousand_tokens_of_a_large_model_from_every_tier() {
    let model = seventy();
    let even = |gpus: f64, flops, fixed_seconds| BreakEven {
        model: &model,
        kv: KvSize::Kept(fp16()),
        fixed_seconds,
        loaders: 1,
        compute: Compute::Work { flops_per_second: gpus * flops, efficiency: 0.4 },
    };
    let four = even(4.0, 989e12, 0.005);
    // Published arithmetic for the same case: 3.34 s to compute, 2.94 GB/s to break even, and prefixes from which it pays.
    assert!((four.compute_seconds(30_000).unwrap() - 3.34).abs() < 0.01);
    assert!((even(4.0, 989e12, 0.0).least_bytes_per_second(30_000).unwrap().unwrap() / 1e9 - 2.94).abs() < 0.01);
    for (bandwidth, tokens) in [(54e9, 64), (6.8e9, 144), (11.5e9, 96)] {
        let least = four.least_prefix_tokens(bandwidth).unwrap().unwrap();
        assert!(least.abs_diff(tokens) <= 16, "{bandwidth}: {least} and {tokens}");
    }
    assert_eq!(four.least_prefix_tokens(1.15e9).unwrap().map(|tokens| tokens > 100_000), Some(true));
    let eight_fp8 = even(8.0, 2.0 * 989e12, 0.005);
    let least = eight_fp8.least_prefix_tokens(6.8e9).unwrap().unwrap();
    assert!(least.abs_diff(128_500) < 2_000, "{least}");
    let measured = BreakEven {
        compute: Compute::Measured { tokens_per_second: 282.0 },
        kv: KvSize::PerToken(23_040),
        ..even(1.0, 1.0, 0.0)
    };
    assert!((measured.least_bytes_per_second(1000).unwrap().unwrap() / 6.5e6 - 1.0).abs() < 0.01);
    // Computing that is sooner done than any reload begins: nothing pays.
    assert_eq!(even(4.0, 989e12, 10.0).least_bytes_per_second(100).unwrap(), None);
    let slow = BreakEven { compute: Compute::Measured { tokens_per_second: 1e12 }, ..even(1.0, 1.0, 0.0) };
    assert_eq!(slow.least_prefix_tokens(1e9).unwrap(), None);
}

#[test]
fn keeping_pays_for_minutes_in_memory_and_hours_on_a_disk() {
    let keep = |tier_per_gigabyte_month| {
        let prices = Prices { gpus_per_hour: 10.0, tier_per_gigabyte_month, hit_probability: 1.0 };
        prices.keep_seconds(3.34, 9_830_400_000).unwrap()
    };
    assert!((keep(3.0) / 60.0 - 13.6).abs() < 0.5 && (keep(0.1) / 3600.0 - 6.8).abs() < 0.1);
}

#[test]
fn layers_are_sent_while_the_next_are_computed() {
    let transfer = Transfer { bytes: 8_000_000_000, layers: 80, prefill_seconds: Some(1.0) };
    // 0.1 s in all: each layer is faster sent than computed, and one remains.
    assert!((transfer.answer(80e9).unwrap().exposed_seconds.unwrap() - 0.1 / 80.0).abs() < 1e-12);
    // 8 s in all: the link has been behind since the first layer.
    let behind = transfer.answer(1e9).unwrap();
    assert!((behind.exposed_seconds.unwrap() - (8.0 + 1.0 / 80.0 - 1.0)).abs() < 1e-9);
    assert_eq!(Transfer { prefill_seconds: None, ..transfer }.answer(1e9).unwrap().exposed_seconds, None);
}

#[test]
fn experts_are_read_as_far_as_a_batch_uses_them() {
    let experts = Experts { bytes: 128_000, count: 128, used: 8 };
    let weights = Weights {
        bytes: 130_000,
        step_bytes: 1_000,
        experts: Some(experts),
        prompt_parameters: 1,
        token_parameters: 1,
    };
    let read = |batch| weight_bytes_read(&weights, batch).unwrap();
    assert_eq!((read(1), read(100_000)), (9_000, 129_000));
    assert!((1..200).all(|batch| read(batch) <= read(batch + 1)));
    let wrong = Weights { experts: Some(Experts { used: 129, ..experts }), ..weights };
    assert!(weight_bytes_read(&wrong, 1).unwrap_err().to_string().contains("129 of 128"));
}

#[test]
fn a_large_batch_of_a_large_model_is_bound_by_multiplying() {
    let step = |batch| {
        let decode = Decode {
            weights: Weights::dense(8_000_000_000, fp16()).unwrap(),
            kv_bytes_per_sequence: 0,
            batch,
            memory_bytes_per_second: 3.35e12,
            flops_per_second: Some(989e12),
        };
        decode.answer().unwrap()
    };
    // 989e12 / 3.35e12 = 295 operations for a byte: at two bytes and two operations a parameter, 295 sequences.
    assert_eq!((step(295).bound, step(296).bound), (Bound::Memory, Bound::Compute));
}

#[test]
fn pools_are_as_large_as_their_work() {
    let pools = Pools {
        requests_per_second: 10.0,
        prompt_tokens: 8192,
        cached_share: 0.0,
        output_tokens: 256,
        prefill_tokens_per_second: 26_054.0,
        decode_tokens_per_second: 2_000.0,
        decode_batch: 64,
        utilisation: 0.7,
        prompt_kv_bytes: 2_684_354_560,
    };
    let answer = pools.answer().unwrap();
    // 3.14 instances read and 1.28 generate without a pause.
    assert_eq!((answer.prefill_instances, answer.decode_instances, answer.instances_together), (5, 2, 7));
    assert!((answer.sequences_decoding - 10.0 * 256.0 * 64.0 / 2_000.0).abs() < 1e-9);
    assert!((answer.transfer_bytes_per_second * 8.0 / 1e9 - 214.7).abs() < 0.1);
    assert!(answer.prefill_utilisation <= 0.7 && answer.decode_utilisation <= 0.7);
    let cached = Pools { cached_share: 0.75, ..pools }.answer().unwrap();
    assert_eq!((cached.prefill_instances, cached.decode_instances), (2, 2));
    assert!(Pools { cached_share: 1.0, ..pools }.answer().unwrap_err().to_string().contains("cached-share"));
}

#[test]
fn a_fleet_keeps_its_target_when_one_is_lost() {
    let fleet = Fleet {
        requests_per_second: 40.0,
        service_seconds: 0.1,
        requests_per_replica: 1,
        wait_p99_seconds: 0.2,
        spare_replicas: 1,
    };
    let answer = fleet.answer().unwrap();
    assert_eq!((answer.replicas_to_keep_up, answer.replicas_for_target, answer.replicas), (5, 6, 7));
    assert!(
        answer.waiting.wait_p99_seconds <= 0.2
            && answer.waiting_with_spares.wait_p99_seconds < answer.waiting.wait_p99_seconds
    );
    let pooled = Fleet { requests_per_replica: 4, ..fleet }.answer().unwrap();
    assert_eq!(pooled.replicas_for_target, 2);
}

#[test]
fn a_tenant_within_the_bound_needs_no_second_replica() {
    let prefixes = |hot_share, load_bound| Prefixes {
        tenants: 200,
        prefix_bytes: 1,
        replicas: 10,
        hot_share,
        load_bound,
        room_bytes: Some(19),
    };
    let answer = |hot_share, load_bound| prefixes(hot_share, load_bound).answer().unwrap();
    assert_eq!([0.0, 0.1, 0.2, 0.3, 1.0].map(|share| answer(share, 1.0).replicas_for_hot_tenant), [1, 1, 2, 3, 10]);
    assert_eq!((answer(0.3, 1.25).prefixes_per_replica, answer(0.3, 1.25).affinity_fits), (Some(19), Some(false)));
    assert!(prefixes(0.3, 0.5).answer().is_err() && prefixes(1.5, 1.0).answer().is_err());
}

#[test]
fn sizes_beyond_all_memory_are_refused_and_do_not_overflow() {
    let sessions = Sessions {
        memory_bytes: 1 << 40,
        memory_utilisation: 0.9,
        weight_bytes: u64::MAX,
        other_bytes: 0,
        session_bytes: 1,
        sessions: 1,
    };
    assert!(sessions.answer().unwrap_err().to_string().contains("check their units"));
    let model = seventy();
    let gpu = Gpu { memory_bytes: u64::MAX, ..Gpu::named("h100-sxm").unwrap() };
    let plan = Plan {
        model: &model,
        kv: fp16(),
        gpu,
        gpus: 64,
        prompt_tokens: 1,
        output_tokens: 1,
        average_tokens: 1,
        seconds_per_token: None,
        activation_bytes: 0,
    };
    for engine in [Engine::Vllm, Engine::Sglang] {
        assert_eq!(plan.answer(engine, Use::Batch).unwrap().tensor_parallel, 1);
    }
}

#[test]
fn engines_are_told_what_fits() {
    let model = seventy();
    let plan = |gpus, gpu| Plan {
        model: &model,
        kv: fp16(),
        gpu: Gpu::named(gpu).unwrap(),
        gpus,
        prompt_tokens: 8192,
        output_tokens: 1024,
        average_tokens: 4096,
        seconds_per_token: None,
        activation_bytes: 6_000_000_000,
    };
    let vllm = |plan: Plan, used_for| plan.answer(Engine::Vllm, used_for);
    let interactive = vllm(plan(8, "h100-sxm"), Use::Interactive).unwrap();
    let batch = vllm(plan(8, "h100-sxm"), Use::Batch).unwrap();
    assert_eq!((interactive.tensor_parallel, batch.tensor_parallel), (4, 4));
    // 0.9 * 80 GB - 137 GB / 4 - 6 GB a GPU, and a quarter of 327,680 bytes for each token.
    assert_eq!(interactive.kv_bytes_per_gpu, 72_000_000_000 - 34_250_000_000 - 6_000_000_000);
    assert_eq!(interactive.sequences_that_fit, 31_750_000_000 / (81_920 * 4096));
    let value = |answer: &Answer, name: &str| {
        answer.flags.iter().find(|flag| flag.flag == name).and_then(|flag| flag.value.clone()).unwrap()
    };
    assert_eq!(value(&interactive, "--max-model-len"), "9216");
    let steps = [&interactive, &batch].map(|answer| value(answer, "--max-num-batched-tokens"));
    assert_eq!(steps, ["2048", "16384"]);
    assert!(batch.sequences > interactive.sequences);
    assert!(interactive.command.starts_with("vllm serve MODEL --tensor-parallel-size 4 --max-model-len 9216 "));
    assert!(interactive.command.ends_with(" --enable-prefix-caching"), "a switch has no value");
    // SGLang's part has room for the weights and for what it is asked for.
    for used_for in [Use::Interactive, Use::Batch] {
        let sglang = plan(8, "h100-sxm").answer(Engine::Sglang, used_for).unwrap();
        let fraction: f64 = value(&sglang, "--mem-fraction-static").parse().unwrap();
        let needed = 137e9 / 4.0 + (sglang.sequences * 81_920 * 4096) as f64;
        assert!(needed <= fraction * 80e9 && needed > 0.9 * fraction * 80e9, "{used_for:?}: {fraction}");
    }
    // Two are enough where each has more memory; one is not.
    assert_eq!(vllm(plan(8, "h200-sxm"), Use::Interactive).unwrap().tensor_parallel, 2);
    assert!(vllm(plan(1, "h100-sxm"), Use::Interactive).unwrap_err().to_string().contains("too few"));
    // Callers who want a token in 25 ms get fewer sequences together than memory has room for.
    let hurried = Plan { seconds_per_token: Some(0.025), ..plan(8, "h100-sxm") };
    let fewer = vllm(hurried, Use::Interactive).unwrap().sequences;
    assert!(fewer < interactive.sequences && fewer > 1, "{fewer}");
    assert_eq!(vllm(hurried, Use::Batch).unwrap(), batch);
    assert!(vllm(Plan { seconds_per_token: Some(0.001), ..hurried }, Use::Interactive).is_err());
    let q8 = Plan { kv: ElementType::named("q8_0").unwrap(), ..plan(8, "h100-sxm") };
    assert!(vllm(q8, Use::Batch).unwrap_err().to_string().contains("no cache that vLLM"));
    let short = Model { context_tokens: Some(8192), ..model.clone() };
    let long = Plan { model: &short, ..plan(8, "h100-sxm") };
    assert!(vllm(long, Use::Batch).unwrap_err().to_string().contains("made for 8192"));
}
