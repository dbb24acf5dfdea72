"""`warmset plan` as people and scripts use it: worked answers through the built binary, exit codes, refusals, real files, and every
example of its page."""

import json
import re
import shlex
import subprocess

import pytest
import warmset
from warmset import run_command

ANSWERS = {
    answer["id"]: answer
    for answer in json.loads((warmset.ROOT / "crates/planner/tests/golden/planner.json").read_text())
}
PAGE = warmset.ROOT / "docs" / "user-guide" / "plan.md"
GIB = 1 << 30
SEVENTY = "--layers 80 --kv-heads 8 --head-dim 128"
EIGHT = "--layers 32 --kv-heads 8 --head-dim 128"
SEVEN = "--layers 32 --kv-heads 32 --head-dim 128 --parameters 7e9"


def plan(line):
    return json.loads(run_command(["plan", *shlex.split(line), "--json"]).stdout)


def agrees(value, expected):
    """Whether a figure is a worked answer's, to the digits that are given there."""
    if isinstance(expected, (bool, int)):
        return value == expected
    digits = len(repr(expected).split(".")[1])
    return abs(value - expected) <= 0.500001 * 10**-digits


def assert_answer(name, **figures):
    answer = ANSWERS[name]["answer"]
    for key, value in figures.items():
        expected = answer
        for part in key.split("__"):
            expected = expected[part]
        assert agrees(value, expected), (name, key, value, expected)


def models_line(inputs):
    models = " ".join(f"--model {name}={size}" for name, size in inputs["models"].items())
    return f"warm-set {models} --worker-memory-mb {inputs['budget']} --reserve-mb {inputs['reserve']}"


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("warm_set")])
def test_warm_sets(name):
    answer = plan(models_line(ANSWERS[name]["inputs"]))
    assert_answer(name, fits=answer["fits"], used=answer["used_mb"], usable=answer["usable_mb"], headroom=answer["headroom_mb"])
    assert isinstance(answer["headroom_mb"], int)


def test_a_warm_set_says_what_rolling_and_losing_a_worker_take():
    answer = plan(models_line(ANSWERS["warm_set_seed_fits"]["inputs"]))
    rolls = {roll["model"]: roll for roll in answer["rolls"]}
    assert_answer("warm_set_roll_receipt_risk_side_by_side", headroom=rolls["receipt-risk"]["headroom_mb"])
    assert_answer("warm_set_roll_invoice_side_by_side", headroom=rolls["invoice-classifier"]["headroom_mb"])
    assert answer["workers"]["packed"] == 1 and answer["workers"]["with_one_to_spare"] == 2
    line = "warm-set --model a=820,peak=900,request=4.5,concurrency=8 --model b=460 --worker-memory-mb 2048 --reserve-mb 384"
    worst = plan(f"{line} --fragmentation 0.05 --workers 1")
    assert worst["worst"]["used_mb"] == 820 + 460 + 36 + 64 + 80
    assert worst["workers"]["given_hold_it"] is True and worst["workers"]["given_survive_one_loss"] is False


@pytest.mark.parametrize("name, line", [
    ("kv_bytes_per_token_70b_fp16", f"{SEVENTY} --dtype fp16"),
    ("kv_bytes_per_token_70b_fp8", f"{SEVENTY} --dtype fp8"),
    ("kv_bytes_per_token_70b_if_mha64", "--layers 80 --kv-heads 64 --head-dim 128"),
    ("kv_bytes_per_token_8b_gqa", EIGHT),
    ("kv_bytes_per_token_7b_mha", "--layers 32 --kv-heads 32 --head-dim 128"),
])
def test_kv_of_a_token(name, line):
    assert_answer(name, bytes=plan(f"kv {line} --tokens 1")["bytes_per_token"])


@pytest.mark.parametrize("name, tokens", [("kv_30k_tokens_70b", 30000), ("kv_30k_tokens_70b_30x1024", 30720)])
def test_kv_of_a_prompt(name, tokens):
    answer = plan(f"kv {SEVENTY} --tokens {tokens}")
    assert_answer(name, bytes=answer["bytes"], GiB=answer["bytes"] / GIB)


def test_kv_of_other_kinds_of_attention():
    assert plan("kv --layers 61 --kv-lora-rank 512 --rope-dim 64 --dtype bf16 --tokens 1")["bytes_per_token"] == 70272
    assert plan("kv --layers 30 --kv-heads 3 --head-dim 64 --dtype q8_0")["bytes_per_token"] == 12240
    windowed = plan("kv --layers 18 --window-layers 15 --window-tokens 512 --kv-heads 1 --head-dim 256 --tokens 4096")
    assert windowed["bytes"] == 1024 * (15 * 512 + 3 * 4096)
    assert plan(f"kv {SEVENTY} --tokens 1000 --gpus 4")["bytes_per_gpu"] == 1000 * 327680 // 4


def test_sessions_that_fit():
    answer = plan(f"sessions {SEVENTY} --weights 141GB --memory 640GB --tokens 32768 --sessions 256")["sessions"]
    ceiling, planned = answer["ceiling"], answer["calibrated"]
    assert_answer(
        "kv_256_sessions_32k", per_session_bytes=planned["session_bytes"], total_bytes=planned["total_bytes"],
        times_hbm=planned["times_memory"], sessions_fit_util_1_0=ceiling["sessions_that_fit"],
        sessions_fit_util_0_9=planned["sessions_that_fit"], overflow_bytes_util_0_9=-planned["headroom_bytes"],
        nodes_needed_util_0_9=planned["replicas_needed"],
    )
    assert planned["fits"] is False


@pytest.mark.parametrize("size, shape", [("70b", SEVENTY), ("8b", EIGHT)])
def test_conversations_that_grow(size, shape):
    line = f"sessions {shape} --weights 141GB --memory 640GB --sessions 40 --tokens 4096 --grow-to-tokens 32768"
    answer = plan(line)
    grown = answer["grown"]["sessions"]["calibrated"]
    assert_answer(
        f"context_growth_4k_32k_40_chats_{size}", from_bytes=answer["sessions"]["calibrated"]["total_bytes"],
        to_bytes=grown["total_bytes"], factor=answer["grown"]["growth_factor"],
    )
    if size == "70b":
        assert_answer(
            "context_growth_fits_on_640GB", budget_bytes=grown["kv_budget_bytes"], headroom_bytes=grown["headroom_bytes"],
            chats_that_fit_at_32k=grown["sessions_that_fit"],
        )


def test_paging():
    answer = plan(f"paging {SEVENTY} --reserved-tokens 8192 --average-tokens 600 --kv-memory 435GB")
    assert_answer(
        "paging_gain_8192_vs_600", utilisation=answer["utilisation"], waste=answer["waste"], gain_ideal=answer["gain_ideal"],
        block_tokens=answer["paged_tokens"], gain_16_block=answer["gain_paged"], gain_uniform_tail=answer["gain_paged_spread"],
        sequences_contiguous_on_435GB=answer["sequences_reserved"], sequences_paged_on_435GB=answer["sequences_paged"],
    )


@pytest.mark.parametrize("size, shape", [("70b", SEVENTY), ("8b", EIGHT)])
def test_prefixes_of_tenants(size, shape):
    answer = plan(f"prefixes {shape} --tenants 200 --tokens 4096 --replicas 16 --hot-share 0.3 --load-bound 1.25")
    assert_answer(
        f"prefix_200_tenants_4k_{size}", per_tenant_bytes=answer["prefix_bytes"],
        per_replica_all_tenants_bytes=answer["all_prefixes_bytes"], fleet_round_robin_GiB=answer["fleet_bytes"] / GIB,
        per_replica_affinity_GiB=answer["affinity_bytes_per_replica"] / GIB,
    )
    assert_answer(
        "affinity_hot_tenant", round_robin_prefix_hit=answer["round_robin_same_replica"],
        hot_replica_share=answer["hot_replica_share"], hot_replica_times_mean=answer["hot_replica_times_mean"],
        cap_share=answer["bound_share"], min_replicas_for_hot=answer["replicas_for_hot_tenant"],
    )


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("decode_ceiling")])
def test_decoding(name):
    gpu = name.removeprefix("decode_ceiling_7b_fp16_")
    first = plan(f"decode {SEVEN} --gpu {gpu} --batch 1")["rows"][0]["ceiling"]
    rows = plan(f"decode {SEVEN} --gpu {gpu} --batch 1,8 --context-tokens 4096")["rows"]
    assert_answer(
        name, tok_s=first["tokens_per_second"], ms_per_token=first["seconds_per_token"] * 1e3,
        tok_s_ctx4096_mha=rows[0]["ceiling"]["tokens_per_second"],
        batch8_ctx4096_mha_total_tok_s=rows[1]["ceiling"]["tokens_per_second"],
    )


@pytest.mark.parametrize("name", [name for name in ANSWERS if name.startswith("decode_efficiency")])
def test_what_was_measured_of_a_ceiling(name):
    inputs = ANSWERS[name]["inputs"]
    gpu = name.rsplit("_", 1)[1]
    # What is read of the weights, and 1,088 tokens of KV.
    line = f"decode {EIGHT} --weights {inputs['weight_bytes_read']:.0f} --gpu {gpu} --batch 1 --context-tokens 1088"
    answer = plan(f"{line} --measured-seconds-per-token {inputs['aic_tpot_ms'] / 1e3}")
    assert answer["kv_bytes_per_sequence"] == inputs["kv_read"]
    assert_answer(
        name, ideal_ms=answer["rows"][0]["ceiling"]["seconds_per_token"] * 1e3, efficiency=answer["measured_efficiency"]
    )


@pytest.mark.parametrize("gpu, name", [("a100-80gb-sxm", "8xA100"), ("h100-sxm", "8xH100")])
def test_reading_a_prompt(gpu, name):
    answer = plan(f"prefill {SEVENTY} --parameters 70.55e9 --hidden-size 8192 --gpu {gpu} --gpus 8 --tokens 8192")
    reached = answer["time"]["calibrated"]
    assert_answer(f"prefill_time_8k_70b_{name}_50pct", flops=answer["flops"], seconds=reached["seconds"])
    assert round(reached["tokens_per_second"]) == ANSWERS[f"prefill_time_8k_70b_{name}_50pct"]["answer"]["tok_s"]


@pytest.mark.parametrize("name, gpu, prefix", [
    ("8xA800", "a800-80gb-sxm", 8192), ("8xH800", "h800-sxm", 8192), ("8xA800_p1024", "a800-80gb-sxm", 1024),
    ("8xA800_p32768", "a800-80gb-sxm", 32768), ("8xA800_p131072", "a800-80gb-sxm", 131072),
])
def test_break_even_by_mooncakes_equation(name, gpu, prefix):
    line = f"break-even {SEVENTY} --heads 64 --hidden-size 8192 --parameters 70.55e9 --gpu {gpu} --gpus 8 --prefix-tokens {prefix}"
    least = plan(line)["mooncake_least_bytes_per_second"]
    assert_answer(f"reuse_break_even_bandwidth_{name}", GB_s=least / 1e9)


def test_break_even_and_its_inverses_agree():
    line = f"break-even {SEVENTY} --heads 64 --parameters 68.5e9 --gpu h100-sxm --gpus 4 --mfu 0.4"
    answer = plan(f"{line} --prefix-tokens 30000")
    tiers = {tier["tier"]: tier["calibrated"] for tier in answer["tiers"]}
    assert not tiers["eth25"]["reload_pays"] and tiers["nvme4"]["reload_pays"]
    for tier in tiers.values():
        assert tier["reload_pays"] == (tier["bytes_per_second"] > answer["least_bytes_per_second"])
        assert tier["reload_pays"] == (tier["least_prefix_tokens"] <= 30000)
    least = tiers["nvme4"]["least_prefix_tokens"]
    for tokens, pays in ((least, True), (least - 1, False)):
        at = plan(f"{line} --prefix-tokens {tokens} --tier nvme4")["tiers"][0]["calibrated"]
        assert at["reload_pays"] is pays
    # Measured on one machine: 23,040 bytes a token, 282 tokens a second.
    measured = plan("break-even --kv-bytes-per-token 23040 --prefill-tokens-per-second 282 --fixed-seconds 0 --prefix-tokens 2048")
    assert abs(measured["least_bytes_per_second"] / 6.5e6 - 1) < 0.01


def test_transfers():
    answer = plan(f"transfer {SEVENTY} --tokens 8192 --requests-per-second 10")
    figures = {"bytes": answer["bytes"], "per_layer_bytes": answer["bytes_per_layer"],
               "Gbit_s_at_10_prompts_s": answer["needed_bits_per_second"] / 1e9}
    for link in answer["links"]:
        figures[f"ms__{link['link']}"] = link["ceiling"]["seconds"] * 1e3
        figures[f"one_layer_ms__{link['link']}"] = link["ceiling"]["one_layer_seconds"] * 1e3
    assert len(answer["links"]) == 10
    assert_answer("pd_transfer_8k_70b", **figures)


def test_distribution():
    line = "distribute --bytes 141GB --nodes 1000 --origin-bandwidth 100Gbit/s --node-bandwidth"
    answer = plan(f"{line} 25Gbit/s")
    stages = {stage["stage"]: stage["seconds"] for stage in answer["on_each_node"]}
    assert_answer(
        "artifact_141GB_1000_nodes", total_bytes=answer["total_bytes"], origin_only_s=answer["origin_only_seconds"],
        one_node_25Gbps_s=answer["floor_seconds"], rounds_doubling=answer["doubling_rounds"],
        doubling_25Gbps_s=answer["doubling_seconds"], chunks=answer["chunks"],
        pipelined_binary_tree_25Gbps_s=answer["tree_seconds"], pipelined_chain_25Gbps_s=answer["chain_seconds"],
        nvme_write_3GBps_s=stages["write"], sha256_2GBps_s=stages["sha256"], nvme_to_gpu_7GBps_s=stages["load"],
        one_node_10Gbps_s=plan(f"{line} 10Gbit/s")["floor_seconds"],
        one_node_100Gbps_s=plan(f"{line} 100Gbit/s")["floor_seconds"],
        origin_1Tbps_s=plan(f"{line.replace('100Gbit', '1Tbit')} 25Gbit/s")["origin_only_seconds"],
    )
    assert answer["best"] == "chain"


def test_queues():
    for servers in (5, 6):
        waiting = plan(f"queueing --arrivals-per-second 40 --service-seconds 0.1 --servers {servers}")["exponential_service"]
        assert_answer(
            f"mmc_c{servers}_lam40_mu10", p_wait=waiting["wait_probability"], Wq_s=waiting["mean_wait_seconds"],
            wait_p99_s=waiting["wait_p99_seconds"],
        )
    one = plan("queueing --arrivals-per-second 4 --service-seconds 0.1")["exponential_service"]
    assert_answer("mm1_p99_sojourn", seconds=one["response_p99_seconds"])
    constant = plan("queueing --arrivals-per-second 0.05 --service-seconds 10")["constant_service"]
    assert_answer("md1_mean_wait", rho=constant["utilisation"], seconds=constant["mean_wait_seconds"])
    # A queue that grows without end is an answer.
    endless = plan("queueing --arrivals-per-second 40 --service-seconds 0.1 --servers 4")
    assert endless["stable"] is False and endless["exponential_service"] is None and endless["least_servers"] == 5


def test_models_in_use():
    active = plan("active-models --models 100 --requests-per-second-per-model 0.037 --service-seconds 16.79")
    assert_answer("active_models_aegaeon", expected_active=active["expected_active"])


def test_engines_are_told_what_fits():
    line = f"engine-args {SEVENTY} --heads 64 --parameters 70.55e9 --gpu h100-sxm --gpus 8 --prompt-tokens 8192 --output-tokens 1024"
    answer = plan(f"{line} --average-tokens 3000")
    for use in ("interactive", "batch"):
        for engine, longest in (("vllm", "--max-model-len"), ("sglang", "--context-length")):
            part = answer[use][engine]
            flags = {flag["flag"]: flag for flag in part["flags"]}
            assert flags[longest]["value"] == "9216"
            assert all(flag["reason"] for flag in flags.values())
            assert all(f"{name} {flag['value']}" if flag["value"] else name in part["command"] for name, flag in flags.items())
            assert part["sequences"] <= part["sequences_that_fit"]
    hurried = plan(f"{line} --average-tokens 3000 --seconds-per-token 0.025")
    assert hurried["interactive"]["vllm"]["sequences"] < answer["interactive"]["vllm"]["sequences"]


def test_pools_batches_and_fleets():
    model = f"{SEVENTY} --heads 64 --parameters 70.55e9 --gpu h100-sxm --gpus 8"
    pools = plan(f"pd-pools {model} --prompt-tokens 8192 --output-tokens 256 --requests-per-second 10")
    assert pools["prefill_utilisation"] <= 0.7 and pools["decode_utilisation"] <= 0.7
    assert abs(pools["transfer_bytes_per_second"] * 8 / 1e9 - 214.7) < 0.1
    batch = plan(f"batch {model} --prompt-tokens 2000 --output-tokens 300 --requests 100000 --price-per-instance-hour 20")
    costs = [float(row["cost"]) for row in batch["rows"]]
    assert costs == sorted(costs, reverse=True) and all(row["hours"] <= 8 for row in batch["rows"])
    assert batch["rows"][-1]["batch"] == batch["sequences_that_fit"]
    measured = plan(
        "batch --prefill-tokens-per-second 282 --decode-tokens-per-second 109 --requests 100 --prompt-tokens 512 --output-tokens 64"
    )
    assert abs(measured["rows"][0]["instance_hours"] - 100 * (512 / 282 + 64 / 109) / 3600) < 1e-9
    fleet = plan("fleet --requests-per-second 40 --service-seconds 0.1 --requests-per-replica 1 --wait-p99-seconds 0.2")
    assert (fleet["replicas_to_keep_up"], fleet["replicas_for_target"], fleet["replicas"]) == (5, 6, 7)


def test_real_gguf_files(models):
    for name in ("q4_1", "q4_0", "q8_0", "f16"):
        assert plan(f"kv --gguf {models[name]} --tokens 1")["bytes_per_token"] == 23040
    sizes = {name: plan(f"decode --gguf {models[name]} --gpu-bandwidth 20GB/s")["weight_bytes"] for name in models}
    assert sizes["f16"] > sizes["q8_0"] > sizes["q4_1"] > sizes["q4_0"] > 80_000_000
    # Fifteen of gemma's eighteen layers see 512 tokens.
    gemma = plan(f"kv --gguf {models['gemma']} --tokens 4096")
    assert gemma["bytes"] == 1024 * (15 * 512 + 3 * 4096)
    # 134,515,008 parameters; all but the table of embeddings, which is the output layer too, are multiplied for each token.
    work = plan(f"prefill --gguf {models['f16']} --gpu-flops 1e12 --tokens 1000")
    assert abs(work["linear_flops"] / (2 * 1000 * (134_515_008 - 49_152 * 576)) - 1) < 0.001
    warm = plan(f"warm-set --gguf a={models['q4_1']} --gguf b={models['q8_0']} --worker-memory-mb 2048 --reserve-mb 128")
    assert warm["fits"] and 900 < warm["used_mb"] < 1500, "the files, and four sequences of 4,096 tokens each"


def test_a_config_of_transformers(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert plan(f"kv --hf-config {path}")["bytes_per_token"] == 131072
    assert abs(plan(f"decode --hf-config {path} --gpu l40s")["weight_bytes"] / 16_060_522_496 - 1) < 0.001
    assert plan(f"decode --hf-config {path} --gpu l40s --weights 5GB")["weight_bytes"] == 5_000_000_000
    # Experts: a step of one sequence reads 8 of 128 of each layer, a large batch nearly all.
    experts = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128,
        "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
    }
    path.write_text(json.dumps(experts))
    answer = plan(f"decode --hf-config {path} --gpu h100-sxm --batch 1,1024")
    one, many = (row["weight_bytes_read"] for row in answer["rows"])
    assert abs(answer["weight_bytes"] / 61_064_245_248 - 1) < 0.001 and 6e9 < one < 7e9 and many > 0.97 * answer["weight_bytes"]
    # Weights that are quantised in a way the file does not spell out need their size, and have it.
    path.write_text(json.dumps({**experts, "quantization_config": {"quant_method": "awq"}}))
    refused = run_command(["plan", "decode", "--hf-config", str(path), "--gpu", "h100-sxm"], check=False)
    assert refused.returncode == 1 and "--weights SIZE" in refused.stderr
    sized = plan(f"decode --hf-config {path} --gpu h100-sxm --batch 1 --weights 16GB")
    assert sized["weight_bytes"] == 16_000_000_000 and 1.5e9 < sized["rows"][0]["weight_bytes_read"] < 2e9
    path.write_text(json.dumps({**config, "model_type": "mamba2"}))
    refused = run_command(["plan", "kv", "--hf-config", str(path)], check=False)
    assert refused.returncode == 1 and "not understood" in refused.stderr and "config.json" in refused.stderr


@pytest.mark.parametrize("line, code, words", [
    ("warm-set --model a=1 --worker-memory-mb 0", 1, "worker-memory is 0"),
    ("warm-set --model a=1 --worker-memory-mb -5", 1, "worker-memory-mb is -5"),
    ("warm-set --model a=-1 --worker-memory-mb 5", 1, "the size of a is -1"),
    ("warm-set --model a=0 --worker-memory-mb 5", 1, "model size is 0"),
    ("warm-set --model a=1 --worker-memory-mb 5 --reserve-mb -1", 1, "reserve-mb is -1"),
    ("warm-set --model a=1 --worker-memory-mb 5 --reserve-mb 5", 1, "nothing would be left"),
    ("warm-set --model a=1 --model a=2 --worker-memory-mb 5", 1, "given twice"),
    ("warm-set --model a=820MiB --worker-memory-mb 2048", 2, "without a unit"),
    ("warm-set --model a --worker-memory-mb 2048", 2, "NAME=MB"),
    ("warm-set --model a=1,weight=3 --worker-memory-mb 2048", 2, "NAME=MB"),
    ("warm-set --worker-memory-mb 2048", 1, "0 times"),
    ("kv --layers 0 --kv-heads 8 --head-dim 128", 1, "layers is 0"),
    ("kv --layers -1 --kv-heads 8 --head-dim 128", 1, "layers is -1"),
    ("kv --layers 80 --kv-heads 8 --head-dim 128 --tokens 0", 1, "tokens is 0"),
    ("kv --layers 80 --kv-heads 8 --head-dim 128 --tokens 99999999999999999999", 1, "check its unit"),
    ("kv --layers 80 --kv-heads 8 --head-dim 128 --tokens 9999999999999999", 1, "too large"),
    ("kv --layers 80 --kv-heads 8 --head-dim 128 --tokens 1.5", 2, "not a whole number"),
    ("kv --layers 80 --kv-heads 8 --head-dim 128 --dtype fp17", 1, "there are fp32"),
    ("kv --layers 80", 1, "give --kv-heads and --head-dim"),
    ("kv", 1, "layers is 0"),
    ("kv --layers 80 --kv-heads 8", 2, "--head-dim"),
    ("kv --layers 8 --kv-heads 8 --head-dim 128 --window-layers 9 --window-tokens 5", 1, "there are 8 layers"),
    ("kv --gguf /nonexistent.gguf", 1, "/nonexistent.gguf"),
    ("kv --gguf /etc/hostname", 1, "GGUF"),
    ("kv --gguf a.gguf --head-dim 3", 2, "cannot be used with"),
    ("kv --hf-config a.json --window-layers 3", 2, "cannot be used with"),
    ("kv --gguf a.gguf --layers 3 --kv-heads 1 --head-dim 1", 2, "cannot be used with"),
    ("decode --parameters 7e9", 1, "give --gpu NAME"),
    ("decode --parameters 7e9 --gpu h900", 1, "there are a100-40gb-sxm"),
    ("decode --parameters 7e9 --gpu l4 --gpus 0", 1, "gpus is 0"),
    ("decode --parameters 7e9 --gpu-bandwidth 0", 1, "bandwidth is 0"),
    # Of what the answer does not depend on, too.
    ("prefill --parameters 7e9 --gpu-flops 1e12 --tokens 10 --dtype nonsense", 1, "nonsense"),
    ("decode --parameters 7e9 --gpu h100-sxm --mfu 7", 1, "mfu is 7"),
    ("kv --layers 2 --kv-heads 2 --head-dim 64 --tokens 1 --parameters=-5", 1, "parameters is -5"),
    ("batch --prefill-tokens-per-second 282 --decode-tokens-per-second 109 --requests 9 --prompt-tokens 5 --output-tokens 6 --gpu none",
     1, "none"),
    ("decode --parameters 7e9 --gpu-bandwidth nan", 2, "is not a speed"),
    ("decode --parameters 7e9 --gpu l4 --efficiency 1.5", 1, "share above 0"),
    ("decode --parameters 7e9 --gpu l4 --batch 0", 1, "batch is 0"),
    ("decode --weights 7G --gpu l4", 2, "is not a size"),
    ("decode --gpu l4", 1, "give --weights SIZE"),
    ("prefill --layers 2 --kv-heads 2 --head-dim 64 --gpu l4 --tokens 5", 1, "parameters are not known"),
    ("queueing --arrivals-per-second nan --service-seconds 1", 1, "arrivals-per-second is NaN"),
    ("queueing --arrivals-per-second inf --service-seconds 1", 1, "arrivals-per-second is inf"),
    ("queueing --arrivals-per-second -1 --service-seconds 1", 1, "arrivals-per-second is -1"),
    ("queueing --arrivals-per-second 1 --service-seconds 0", 1, "service-seconds is 0"),
    ("queueing --arrivals-per-second 1 --service-seconds 1 --servers 0", 1, "servers is 0"),
    ("queueing --arrivals-per-second 1e9 --service-seconds 1", 1, "at most 1000000"),
    ("distribute --bytes 0 --nodes 5 --origin-bandwidth 1GB/s --node-bandwidth 1GB/s", 1, "bytes is 0"),
    ("distribute --bytes 5GB --nodes 5 --origin-bandwidth fast --node-bandwidth 1GB/s", 2, "25Gbit/s"),
    ("distribute --bytes 5GB --nodes 5 --origin-bandwidth 1GB/s --node-bandwidth 1GB/s --fanout 1", 1, "fanout is 1"),
    ("transfer --layers 2 --kv-heads 2 --head-dim 64 --tokens 5 --link tape", 1, "NAME=SPEED"),
    ("paging --reserved-tokens 100 --average-tokens 200", 1, "cannot be more"),
    ("fleet --requests-per-second 1 --service-seconds 1 --requests-per-replica 1 --wait-p99-seconds -1", 1, "wait-p99-seconds is -1"),
    ("nonsense", 2, "nonsense"),
])
def test_what_means_nothing_is_refused(line, code, words):
    result = run_command(["plan", *shlex.split(line), "--json"], check=False)
    assert (result.returncode, result.stdout) == (code, ""), result
    assert words in result.stderr
    if code == 1:
        assert len(result.stderr.strip().splitlines()) == 1


def examples():
    """Every `$ warmset ...` of the page with what stands below it."""
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        command, output = block.split("\n", 1)
        while command.endswith("\\"):
            line, output = output.split("\n", 1)
            command = command[:-1] + line.strip()
        yield command.removeprefix("$ "), output


def test_every_command_has_an_example():
    help_text = run_command(["plan", "--help"]).stdout
    commands = re.findall(r"^  ([a-z][a-z-]+) ", help_text.split("Commands:")[1].split("Options:")[0], re.MULTILINE)
    shown = {command.split()[2] for command, _ in examples()}
    assert set(commands) - {"help"} == shown


@pytest.mark.parametrize("command, output", list(examples()), ids=lambda text: " ".join(text.split()[1:3]))
def test_examples_are_what_is_printed(command, output, models):
    words = shlex.split(command)
    assert words[0] == "warmset"
    printed = subprocess.run(
        [str(warmset.BINARY), *words[1:]], capture_output=True, text=True, cwd=warmset.ROOT, check=True, timeout=60
    ).stdout
    assert printed == output
