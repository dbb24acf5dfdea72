"""Requests that the simulator of engines gets through in a second of processor time, beside the simulators of others.

All play the same: prompts of 512 tokens and answers of 128, at random moments, 20 a second for each of four replicas of Llama-3.1-8B on
an H100. vllm-sr-sim looks at whole requests, AISimulate at every step; so ours is measured at both levels. What is counted is
the processor time of the whole process, less that of a run with few requests: start and imports are no simulation. They take
turns in one run. Then the curves: the same load for each of more and more replicas, and models by the thousand on one machine.
Claims: at least 500,000 at the level of requests and 50,000 at that of steps; 1,000 replicas and 10,000 models below 2 GiB; a
request's time grows no faster than the logarithm of replicas or models.
"""

import argparse
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import harness

EXAMPLE = harness.ROOT / "target" / "release" / "examples" / "sim_speed"
PEERS = harness.ROOT / "build" / "bench" / "simulators"
PROMPT_TOKENS, OUTPUT_TOKENS, RATE, REPLICAS = 512, 128, 20.0, 4
FEW = 400
ENOUGH_BYTES = 2 << 30
CLAIMS = {"step": 50_000, "request": 500_000}
CURVE = (1, 10, 100, 1000)


def used(command, directory):
    """Processor seconds and peak resident bytes of a command, and what it printed."""
    with open(Path(directory) / "out", "w+b") as out, open(Path(directory) / "err", "w+b") as err:
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=directory)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        text = out.read().decode()
        if process.returncode:
            raise RuntimeError(f"{command[0]} exited with {process.returncode}: {err.read()[-2000:].decode()}{text[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, text


def ours(level, requests, _):
    return [EXAMPLE, level, PROMPT_TOKENS, OUTPUT_TOKENS, RATE, requests, REPLICAS]


def vllm_sr_sim(requests, directory):
    """One pool of four; a request's tokens are 640, of which it takes four fifths as the prompt."""
    fleet, lengths = Path(directory) / "fleet.json", Path(directory) / "lengths.json"
    fleet.write_text(json.dumps({"pools": [{"id": "all", "gpu": "h100", "n_gpus": REPLICAS, "max_ctx": 8192}], "router": "least_loaded"}))
    tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    lengths.write_text(json.dumps({"cdf": [[tokens, 0.0], [tokens, 1.0]]}))
    return [PEERS / "vllm-sr-sim" / "bin" / "vllm-sr-sim", "simulate-fleet", fleet, "--cdf", lengths,
            "--lam", RATE * REPLICAS, "--n-req", requests]


def aisimulate(requests, directory, source=None, load=None):
    source = source or {"type": "synthetic", "input_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    traffic = {"source": source, "load": load or {"type": "poisson", "requests_per_second": RATE * REPLICAS, "seed": 1}}
    replicas = REPLICAS
    if requests:
        traffic["stop"] = {"requests": requests}
    if load:
        replicas = 8
    engine = {"model": "meta-llama/Meta-Llama-3.1-8B", "hardware": "h100_sxm", "backend": "vllm",
              "workers": {"aggregated": {"parallelism": {"replicas": replicas}}}}
    config = Path(directory) / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"traffic": traffic, "engine": engine}))
    return [PEERS / "aisimulate" / "bin" / "aisimulate", "predict", "-c", config, "--format", "json",
            "--output-dir", Path(directory) / "aisimulate", "--overwrite"]


# What is run, and with how many requests: so many that the run takes seconds.
CONTENDERS = {
    "warmset, steps": (lambda requests, directory: ours("step", requests, directory), 400_000),
    "warmset, requests": (lambda requests, directory: ours("request", requests, directory), 4_000_000),
    "vllm-sr-sim, requests": (vllm_sr_sim, 40_000),
    "AISimulate, steps": (aisimulate, 40_000),
}


def rate(build, requests):
    """Requests per second of processor time beyond those of the start."""
    with harness.scratch() as directory:
        few, _, _ = used(build(FEW, directory), directory)
        many, peak, _ = used(build(requests, directory), directory)
    return {"requests_per_processor_second": (requests - FEW) / (many - few), "processor_seconds": many,
            "processor_seconds_of_few": few, "peak_resident_bytes": peak}


def interleaved(rounds):
    found = {name: [] for name in CONTENDERS}
    failed = {}
    for turn in range(rounds):
        for name in list(CONTENDERS)[:: 1 if turn % 2 == 0 else -1]:
            if name in failed:
                continue
            try:
                found[name].append(rate(*CONTENDERS[name]))
                print(f"{name}: {found[name][-1]['requests_per_processor_second']:.0f}", file=sys.stderr, flush=True)
            except (RuntimeError, OSError) as error:
                failed[name] = str(error)[-500:]
                print(f"{name}: {error}", file=sys.stderr)
    rates = lambda name: [run["requests_per_processor_second"] for run in found[name]]
    return {
        name: failed.get(name) or {
            "requests_per_processor_second": round(statistics.median(rates(name))),
            "all": [round(one) for one in rates(name)],
            "peak_resident_bytes": max(run["peak_resident_bytes"] for run in found[name]),
        }
        for name in CONTENDERS
    }


def grows(points, name):
    """Whether nanoseconds grow no faster than the logarithm: from the first size on, by no more than their digits do."""
    first, last = points[0], points[-1]
    ratio = last["nanoseconds_per_request"] / first["nanoseconds_per_request"]
    return ratio, math.log2(2 * last[name]) / math.log2(2 * first[name])


def replica_curve(level, each):
    """The same load for each of so many replicas."""
    points = []
    for replicas in CURVE:
        with harness.scratch() as directory:
            requests = max(each * replicas, 100_000)
            _, _, text = used([EXAMPLE, level, PROMPT_TOKENS, OUTPUT_TOKENS, RATE, requests, replicas], directory)
        told = json.loads(text)
        points.append({"replicas": replicas, "requests": requests, "peak_resident_bytes": told["peak_resident_bytes"],
                       "nanoseconds_per_request": round(told["nanoseconds_per_request"], 1)})
    return points


SCENARIO = """
description = "models by the thousand on one machine"
slots = [{slots}]
load_seconds = 5.0
run_seconds = 1.0
days = 1

[[group]]
models = {models}
pattern = "random"
every_minutes = [{every}, {every}]
"""


def model_curve(requests):
    """core::Worker on one machine with more and more models, a tenth of them in memory, and the same number of requests. What a
    run takes that has next to none (making the models known) is taken off."""
    points = []
    for models in (100, 1000, 10_000):
        with harness.scratch() as directory:
            path = Path(directory) / "models.toml"
            command = [harness.warmset.BINARY, "sim", path, "--compare", "warmset", "--json"]
            path.write_text(SCENARIO.format(slots=models // 10, models=models, every=min(1440.0 * models, 100_000.0)))
            start_seconds, _, few = used(command, directory)
            path.write_text(SCENARIO.format(slots=models // 10, models=models, every=max(1440.0 * models / requests, 1.0)))
            seconds, peak, text = used(command, directory)
        told = json.loads(text)
        told["requests"] -= json.loads(few)["requests"]
        seconds -= start_seconds
        points.append({"models": models, "requests": told["requests"], "peak_resident_bytes": peak,
                       "nanoseconds_per_request": round(1e9 * seconds / told["requests"], 1)})
    return points


def recorded(path):
    """Mooncake's recorded conversations on eight replicas, as far as AISimulate reads them, too."""
    with harness.scratch() as directory:
        plain = Path(directory) / "trace.jsonl"
        data = Path(path).read_bytes()
        plain.write_bytes(gzip.decompress(data) if path.endswith(".gz") else data)
        requests = plain.read_text().count("\n")
        told = json.loads(used([EXAMPLE, "step", 8, plain], directory)[2])
        found = {"requests": requests, "warmset, steps": told}
        try:
            command = aisimulate(None, directory, {"type": "trace", "paths": [str(plain)], "format": "mooncake"}, {"type": "trace_timestamps"})
            seconds, _, _ = used(command, directory)
            few, _, _ = used(aisimulate(FEW, directory), directory)
            found["AISimulate, steps"] = {"requests_per_processor_second": round(requests / (seconds - few)), "processor_seconds": seconds}
        except RuntimeError as error:
            found["AISimulate, steps"] = str(error)[-500:]
    return found


def main():
    parser = argparse.ArgumentParser(prog="bench/run sim_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", help="recorded requests of Mooncake's form, .jsonl or .jsonl.gz")
    given = parser.parse_args()
    rates = interleaved(given.rounds)
    replicas = {level: replica_curve(level, each) for level, each in (("step", 2_000), ("request", 10_000))}
    models = model_curve(500)
    claims = {
        f"{level}s: at least {least} requests per processor second":
            rates[f"warmset, {level}s"]["requests_per_processor_second"] >= least
        for level, least in CLAIMS.items()
    }
    peaks = [replicas["step"][-1], replicas["request"][-1], models[-1]]
    claims["1,000 replicas and 10,000 models below 2 GiB"] = all(one["peak_resident_bytes"] < ENOUGH_BYTES for one in peaks)
    growth = {}
    for what, points, name in (("steps", replicas["step"], "replicas"), ("requests", replicas["request"], "replicas"),
                               ("models", models, "models")):
        ratio, bound = grows(points, name)
        growth[what] = {"time_of_a_request_grew_by": round(ratio, 2), "logarithm_grew_by": round(bound, 2)}
        claims[f"{what}: no faster than the logarithm"] = ratio <= bound
    facts = {"recorded": recorded(given.trace)} if given.trace else {}
    harness.report("sim_speed", claims, peer="vllm-sr-sim 0.1.0.dev20260713123629, aisimulate 0.13.0.dev202610270000000085",
                   rates=rates, by_replicas=replicas, by_models=models, growth=growth, **facts)


if __name__ == "__main__":
    main()
