//! Worked answers: every figure of `golden/planner.json`, to the digits that are given there.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use warmset_planner::calculate::{
    break_even::mooncake_least_bytes_per_second,
    decode::Decode,
    distribute::Distribute,
    fleet::expected_active,
    hardware::Gpu,
    model::{Attention, ElementType, Layers, Model, Weights},
    paging::Paging,
    prefill,
    prefixes::Prefixes,
    queueing::Queue,
    sessions::Sessions,
    transfer::Transfer,
    warm_set::{WarmModel, WarmSet},
};

const GB: f64 = 1e9;
const KIB: f64 = 1024.0;
const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1_073_741_824.0;
const MEMORY_640_GB: u64 = 640_000_000_000;

type Computed = BTreeMap<String, f64>;

/// The inputs of an answer.
struct Inputs<'a>(&'a Map<String, Value>);

impl Inputs<'_> {
    fn number(&self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap()
    }

    fn count(&self, name: &str) -> u64 {
        let number = self.number(name);
        assert!(number.fract() == 0.0, "{name}");
        number as u64
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

fn computed<const N: usize>(figures: [(&str, f64); N]) -> Computed {
    figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[test]
fn every_figure_is_reproduced() {
    let answers: Vec<Value> = serde_json::from_str(include_str!("golden/planner.json")).unwrap();
    assert_eq!(answers.len(), 47);
    let mut faults = Vec::new();
    for answer in &answers {
        let id = answer["id"].as_str().unwrap();
        let found = calculate(id, &Inputs(answer["inputs"].as_object().unwrap()));
        let mut expected = BTreeMap::new();
        flatten("", &answer["answer"], &mut expected);
        assert_eq!(
            found.keys().collect::<Vec<_>>(),
            expected.keys().collect::<Vec<_>>(),
            "{id}: not every figure is calculated"
        );
        for (name, text) in &expected {
            // The file rounds this one to whole tokens.
            let digit = if id.starts_with("prefill_time") && name == "tok_s" { 1.0 } else { last_digit(text) };
            let (value, tolerance) = (text.parse::<f64>().unwrap(), digit * 0.500_001);
            if (found[name] - value).abs() > tolerance {
                faults.push(format!("{id}: {name} is {} and should be {text}", found[name]));
            }
        }
    }
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// Figures by name; what is written in words is a quotation.
fn flatten(prefix: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    for (name, value) in value.as_object().unwrap() {
        let name = format!("{prefix}{name}");
        match value {
            Value::Object(_) => flatten(&format!("{name}."), value, into),
            Value::Bool(truth) => drop(into.insert(name, u8::from(*truth).to_string())),
            Value::Number(number) => drop(into.insert(name, number.to_string())),
            _ => assert_eq!(name, "paper"),
        }
    }
}

/// The unit of the last digit; whole numbers are exact, or as exact as floating point is.
fn last_digit(text: &str) -> f64 {
    match text.split_once('.') {
        Some((_, digits)) if text.len() < 15 => 10f64.powi(-(digits.len() as i32)),
        _ => 1e-6,
    }
}

fn calculate(id: &str, inputs: &Inputs) -> Computed {
    let kind = |prefix: &str| id.starts_with(prefix);
    if kind("kv_bytes_per_token") {
        bytes_per_token(id, inputs)
    } else if kind("kv_30k") {
        kv_of_tokens(id, inputs)
    } else if kind("kv_256") {
        sessions(inputs)
    } else if kind("paging") {
        paging(inputs)
    } else if kind("prefix_200") {
        prefixes(inputs)
    } else if kind("affinity") {
        hot_tenant(inputs)
    } else if kind("context_growth_fits") {
        growth_fits(inputs)
    } else if kind("context_growth") {
        growth(inputs)
    } else if kind("decode_ceiling") {
        decode_ceiling(id, inputs)
    } else if kind("decode_efficiency") {
        decode_efficiency(id, inputs)
    } else if kind("warm_set") {
        warm_set(inputs)
    } else if kind("pd_transfer") {
        transfer(inputs)
    } else if kind("prefill_time") {
        prefill_time(inputs)
    } else if kind("reuse_break_even") {
        reuse(inputs)
    } else if kind("artifact") {
        artifact(inputs)
    } else if kind("active_models") {
        let active =
            expected_active(inputs.count("models"), inputs.number("rate_per_model"), inputs.number("service_s"));
        computed([("expected_active", active.unwrap())])
    } else {
        queueing(id, inputs)
    }
}

fn heads(kv_heads: u64, head_dim: u64) -> Attention {
    Attention::Heads { kv_heads, key_length: head_dim, value_length: head_dim }
}

/// A model whose tokens take so many bytes in its cache.
fn model_of(bytes_per_token: u64) -> Model {
    let (layers, kv_heads) = match bytes_per_token {
        327_680 => (80, 8),
        131_072 => (32, 8),
        524_288 => (32, 32),
        other => panic!("no model has {other} bytes for a token"),
    };
    Model::uniform(layers, heads(kv_heads, 128))
}

fn fp16() -> ElementType {
    ElementType::named("fp16").unwrap()
}

fn bytes_per_token(id: &str, inputs: &Inputs) -> Computed {
    let model = Model::uniform(inputs.count("layers"), heads(inputs.count("kv_heads"), inputs.count("head_dim")));
    let element = ElementType::named(if inputs.count("dtype_bytes") == 1 { "fp8" } else { "fp16" }).unwrap();
    let bytes = model.kv_bytes_per_token(element).unwrap() as f64;
    let mut figures = computed([("bytes", bytes)]);
    if id.ends_with("70b_fp16") {
        figures.insert("KiB".into(), bytes / KIB);
    }
    figures
}

fn kv_of_tokens(id: &str, inputs: &Inputs) -> Computed {
    let model = model_of(inputs.count("bytes_per_token"));
    let bytes = model.kv(fp16(), inputs.count("tokens"), 1, 1).unwrap().bytes as f64;
    let mut figures = computed([("bytes", bytes), ("GiB", bytes / GIB)]);
    if id == "kv_30k_tokens_70b" {
        figures.insert("GB".into(), bytes / GB);
    }
    figures
}

fn sessions(inputs: &Inputs) -> Computed {
    let model = model_of(inputs.count("bytes_per_token"));
    let session_bytes = model.kv_bytes(fp16(), inputs.count("tokens")).unwrap();
    let with = |memory_utilisation| {
        let sessions = Sessions {
            memory_bytes: inputs.count("hbm_bytes"),
            memory_utilisation,
            weight_bytes: inputs.count("weights_bytes"),
            other_bytes: 0,
            session_bytes,
            sessions: inputs.count("sessions"),
        };
        sessions.answer().unwrap()
    };
    let (all, most) = (with(1.0), with(inputs.number("util")));
    computed([
        ("per_session_bytes", session_bytes as f64),
        ("per_session_GiB", session_bytes as f64 / GIB),
        ("total_bytes", all.total_bytes as f64),
        ("total_GB", all.total_bytes as f64 / GB),
        ("total_GiB", all.total_bytes as f64 / GIB),
        ("times_hbm", all.times_memory),
        ("sessions_fit_util_1_0", all.sessions_that_fit as f64),
        ("sessions_fit_util_0_9", most.sessions_that_fit as f64),
        ("overflow_bytes_util_0_9", -most.headroom_bytes as f64),
        ("nodes_needed_util_0_9", most.replicas_needed.unwrap() as f64),
    ])
}

fn paging(inputs: &Inputs) -> Computed {
    let paging = Paging {
        reserved_tokens: inputs.count("reserved_tokens"),
        average_tokens: inputs.count("avg_tokens"),
        block_tokens: inputs.count("block"),
        budget: Some((model_of(327_680).kv_bytes_per_token(fp16()).unwrap(), 435_000_000_000)),
    };
    let answer = paging.answer().unwrap();
    computed([
        ("utilisation", answer.utilisation),
        ("waste", answer.waste),
        ("gain_ideal", answer.gain_ideal),
        ("block_tokens", answer.paged_tokens as f64),
        ("gain_16_block", answer.gain_paged),
        ("gain_uniform_tail", answer.gain_paged_spread),
        ("sequences_contiguous_on_435GB", answer.sequences_reserved.unwrap() as f64),
        ("sequences_paged_on_435GB", answer.sequences_paged.unwrap() as f64),
    ])
}

fn prefixes(inputs: &Inputs) -> Computed {
    let prefix_bytes = model_of(inputs.count("bytes_per_token")).kv_bytes(fp16(), inputs.count("tokens")).unwrap();
    let prefixes = Prefixes {
        tenants: inputs.count("tenants"),
        prefix_bytes,
        replicas: inputs.count("replicas"),
        hot_share: 0.0,
        load_bound: 1.25,
        room_bytes: None,
    };
    let answer = prefixes.answer().unwrap();
    computed([
        ("per_tenant_bytes", answer.prefix_bytes as f64),
        ("per_tenant_MiB", answer.prefix_bytes as f64 / MIB),
        ("per_replica_all_tenants_bytes", answer.all_prefixes_bytes as f64),
        ("per_replica_GiB", answer.all_prefixes_bytes as f64 / GIB),
        ("fleet_round_robin_GiB", answer.fleet_bytes as f64 / GIB),
        ("per_replica_affinity_GiB", answer.affinity_bytes_per_replica as f64 / GIB),
    ])
}

fn hot_tenant(inputs: &Inputs) -> Computed {
    let prefixes = Prefixes {
        tenants: inputs.count("tenants"),
        prefix_bytes: 1,
        replicas: inputs.count("replicas"),
        hot_share: inputs.number("hot_share"),
        load_bound: inputs.number("load_cap_c"),
        room_bytes: None,
    };
    let answer = prefixes.answer().unwrap();
    computed([
        ("round_robin_prefix_hit", answer.round_robin_same_replica),
        ("hot_replica_share", answer.hot_replica_share),
        ("hot_replica_times_mean", answer.hot_replica_times_mean),
        ("cap_share", answer.bound_share),
        ("min_replicas_for_hot", answer.replicas_for_hot_tenant as f64),
    ])
}

fn growth(inputs: &Inputs) -> Computed {
    let model = model_of(inputs.count("bytes_per_token"));
    let bytes = |tokens| model.kv(fp16(), inputs.count(tokens), inputs.count("chats"), 1).unwrap().bytes as f64;
    let (from, to) = (bytes("from_tokens"), bytes("to_tokens"));
    computed([
        ("from_bytes", from),
        ("from_GiB", from / GIB),
        ("to_bytes", to),
        ("to_GiB", to / GIB),
        ("factor", to / from),
    ])
}

fn growth_fits(inputs: &Inputs) -> Computed {
    let sessions = Sessions {
        memory_bytes: inputs.count("hbm_bytes"),
        memory_utilisation: inputs.number("util"),
        weight_bytes: inputs.count("weights_bytes"),
        other_bytes: 0,
        session_bytes: model_of(327_680).kv_bytes(fp16(), 32_768).unwrap(),
        sessions: 40,
    };
    let answer = sessions.answer().unwrap();
    assert_eq!((answer.total_bytes, answer.fits), (inputs.count("need_bytes"), true));
    computed([
        ("budget_bytes", answer.kv_budget_bytes as f64),
        ("headroom_bytes", answer.headroom_bytes as f64),
        ("chats_that_fit_at_32k", answer.sessions_that_fit as f64),
    ])
}

/// The GPU that an answer's name ends with; its bandwidth is what the answer was calculated with.
fn gpu_of(id: &str, inputs: &Inputs) -> Gpu {
    let name = id.rsplit('_').next().unwrap();
    let gpu = Gpu::named(name).unwrap();
    assert_eq!(gpu.memory_bytes_per_second, inputs.number("bandwidth"), "{name}");
    gpu
}

fn decode_ceiling(id: &str, inputs: &Inputs) -> Computed {
    let gpu = gpu_of(id, inputs);
    let weights = Weights::dense(7_000_000_000, fp16()).unwrap();
    assert_eq!(weights.bytes, inputs.count("weight_bytes"));
    let step = |batch, context_tokens| {
        let kv = Model::uniform(32, heads(32, 128)).kv_bytes(fp16(), context_tokens).unwrap();
        let decode = Decode {
            weights,
            kv_bytes_per_sequence: kv,
            batch,
            memory_bytes_per_second: gpu.memory_bytes_per_second,
            flops_per_second: Some(gpu.bf16_flops_per_second),
        };
        decode.answer().unwrap().ceiling
    };
    computed([
        ("tok_s", step(1, 0).tokens_per_second),
        ("ms_per_token", step(1, 0).seconds_per_token * 1e3),
        ("tok_s_ctx4096_mha", step(1, 4096).tokens_per_second),
        ("batch8_ctx4096_mha_total_tok_s", step(8, 4096).tokens_per_second),
    ])
}

fn decode_efficiency(id: &str, inputs: &Inputs) -> Computed {
    let gpu = gpu_of(id, inputs);
    let all = Weights::of_bytes(inputs.count("weight_bytes")).unwrap();
    let decode = Decode {
        weights: Weights { step_bytes: inputs.count("weight_bytes_read"), ..all },
        kv_bytes_per_sequence: inputs.count("kv_read"),
        batch: 1,
        memory_bytes_per_second: gpu.memory_bytes_per_second,
        flops_per_second: None,
    };
    let answer = decode.answer().unwrap();
    let efficiency = answer.efficiency_of(inputs.number("aic_tpot_ms") / 1e3).unwrap();
    // What the table says of the kind of memory is near what was measured.
    assert!((efficiency - gpu.decode_efficiency).abs() < 0.04, "{id}");
    computed([("ideal_ms", answer.ceiling.seconds_per_token * 1e3), ("efficiency", efficiency)])
}

fn warm_set(inputs: &Inputs) -> Computed {
    let models = inputs.0["models"].as_object().unwrap().iter().map(|(name, size)| WarmModel {
        name: name.clone(),
        steady: size.as_u64().unwrap(),
        peak: size.as_u64().unwrap(),
        per_request: 0,
        concurrency: 0,
    });
    let set = WarmSet {
        models: models.collect(),
        budget: inputs.count("budget"),
        reserve: inputs.count("reserve"),
        fragmentation: 0.0,
        loads_at_once: 1,
    };
    let answer = set.answer().unwrap();
    assert_eq!(answer.steady, answer.worst);
    computed([
        ("fits", f64::from(u8::from(answer.steady.fits()))),
        ("used", answer.steady.used as f64),
        ("usable", answer.usable as f64),
        ("headroom", answer.steady.headroom as f64),
    ])
}

fn transfer(inputs: &Inputs) -> Computed {
    let model = model_of(inputs.count("bytes_per_token"));
    let bytes = model.kv_bytes(fp16(), inputs.count("tokens")).unwrap();
    let transfer = Transfer { bytes, layers: model.layer_count().unwrap(), prefill_seconds: None };
    let mut figures = computed([
        ("bytes", bytes as f64),
        ("GiB", bytes as f64 / GIB),
        ("GB", bytes as f64 / GB),
        ("per_layer_bytes", (bytes / 80) as f64),
        ("Gbit_s_at_10_prompts_s", transfer.bits_per_second(10.0).unwrap() / 1e9),
    ]);
    for (name, speed) in inputs.0["links_Bps"].as_object().unwrap() {
        let link = warmset_planner::calculate::hardware::Link::named(name).unwrap();
        assert_eq!(Some(link.ceiling_bytes_per_second), speed.as_f64(), "{name}");
        let answer = transfer.answer(link.ceiling_bytes_per_second).unwrap();
        figures.insert(format!("ms.{name}"), answer.seconds * 1e3);
        figures.insert(format!("one_layer_ms.{name}"), answer.one_layer_seconds * 1e3);
    }
    figures
}

fn prefill_time(inputs: &Inputs) -> Computed {
    let width = 2 * inputs.count("d_model");
    let layers = Layers {
        count: inputs.count("layers"),
        attention: heads(8, 128),
        window_tokens: None,
        query_width: Some(width),
    };
    let model = Model {
        layers: vec![layers],
        weights: Some(Weights::dense(inputs.count("params"), fp16()).unwrap()),
        ..Model::default()
    };
    let tokens = inputs.count("tokens");
    let work = prefill::work(&model, tokens, 0).unwrap();
    let speed = work.speed(tokens, inputs.number("peak"), inputs.number("mfu")).unwrap();
    computed([("flops", work.flops), ("seconds", speed.seconds), ("tok_s", speed.tokens_per_second)])
}

fn reuse(inputs: &Inputs) -> Computed {
    if inputs.has("d") {
        let given = ["d", "a", "b", "gqa", "s"].map(|name| inputs.count(name));
        assert_eq!(given, [8192, 4, 22, 8, 2]);
    }
    let least = mooncake_least_bytes_per_second(inputs.number("G"), inputs.count("prefix"), 8192, 8.0, 2.0).unwrap();
    computed([("GB_s", least / GB)])
}

fn artifact(inputs: &Inputs) -> Computed {
    let with = |origin_bytes_per_second, node_bytes_per_second| {
        let distribute = Distribute {
            bytes: inputs.count("bytes"),
            nodes: inputs.count("nodes"),
            origin_bytes_per_second,
            node_bytes_per_second,
            chunk_bytes: inputs.count("chunk"),
            fanout: 2,
        };
        distribute.answer().unwrap()
    };
    let (origin, node) = (inputs.number("origin_Bps"), inputs.number("node_Bps"));
    let answer = with(origin, node);
    assert_eq!(answer.best, "chain");
    let at = |bytes_per_second: f64| with(1e15, bytes_per_second).floor_seconds;
    computed([
        ("total_bytes", answer.total_bytes as f64),
        ("origin_only_s", answer.origin_only_seconds),
        ("origin_1Tbps_s", with(125e9, node).origin_only_seconds),
        ("one_node_25Gbps_s", answer.floor_seconds),
        ("one_node_10Gbps_s", at(1.25e9)),
        ("one_node_100Gbps_s", at(12.5e9)),
        ("rounds_doubling", answer.doubling_rounds as f64),
        ("doubling_25Gbps_s", answer.doubling_seconds),
        ("chunks", answer.chunks as f64),
        ("pipelined_binary_tree_25Gbps_s", answer.tree_seconds),
        ("pipelined_chain_25Gbps_s", answer.chain_seconds),
        ("nvme_write_3GBps_s", at(3e9)),
        ("sha256_2GBps_s", at(2e9)),
        ("nvme_to_gpu_7GBps_s", at(7e9)),
    ])
}

fn queueing(id: &str, inputs: &Inputs) -> Computed {
    let arrivals_per_second = inputs.number("lam");
    let service_seconds = if inputs.has("mu") { 1.0 / inputs.number("mu") } else { inputs.number("service_s") };
    let servers = if inputs.has("c") { inputs.count("c") } else { 1 };
    let queue = Queue { arrivals_per_second, service_seconds, servers };
    match id {
        "md1_mean_wait" => {
            let answer = queue.constant().unwrap().unwrap();
            computed([("rho", answer.utilisation), ("seconds", answer.mean_wait_seconds)])
        }
        "mm1_p99_sojourn" => {
            let answer = queue.exponential().unwrap().unwrap();
            computed([("seconds", answer.response_p99_seconds.unwrap())])
        }
        _ => {
            let answer = queue.exponential().unwrap().unwrap();
            computed([
                ("p_wait", answer.wait_probability),
                ("Wq_s", answer.mean_wait_seconds),
                ("wait_p99_s", answer.wait_p99_seconds),
            ])
        }
    }
}

#[test]
fn the_node_of_640_gb_is_eight_gpus_of_the_table() {
    assert_eq!(8 * Gpu::named("a100-80gb-sxm").unwrap().memory_bytes, MEMORY_640_GB);
}
