"""Where routers send requests: 200 tenants with system prompts of 4,096 tokens, one of them with 30 % of the requests, and 16
replicas that keep 16 such prompts each, at three loads up to 90 % of what the replicas can do.

The replicas are of bench/router: continuous batching in steps as long as those of an accelerator, a prefix cache of whole
prompts, and what vLLM tells of its load and cache. Streams in open loop, timed from when they were due. Everything goes `--speed`
times as fast, and the figures are told in the time of the replicas. Claim: at least 0.98 of the tokens of system prompts cached with at most
1.6 times the mean in flight at any replica, and every first token within a second.
"""

import argparse
import contextlib

import harness
import routers
import warmset

REPLICAS = 16
TENANTS = 200
HOT_SHARE = 0.3
SYSTEM_BYTES = 16384
QUESTION_BYTES = 1024
OUTPUT_TOKENS = 128
CACHED_PROMPTS = 16
# What the replicas can do where every prompt is cached, in requests a second: at 174 in open loop their queues no longer end.
CAPACITY_PER_SECOND = 174
LOADS = (0.14, 0.6, 0.9)
TARGET_SECONDS = 1.0
# After the last request was due, what is not answered by then is cut.
PATIENCE_SECONDS = 10


def measure(name, loads, options):
    """One router in front of fresh replicas, whose caches fill before the loads come one after another."""
    with contextlib.ExitStack() as stack:
        replicas = stack.enter_context(routers.Replicas(
            REPLICAS, "--batch", "--cached-prompts", CACHED_PROMPTS, "--tokens-per-prompt", (SYSTEM_BYTES + QUESTION_BYTES) // 4,
            "--speed", options.speed))
        fronts = [stack.enter_context(routers.Router(name, replicas)) for _ in range(options.gateways)]
        play(fronts, replicas, options.fill_load, options.fill_seconds, options.speed, seed=7)
        return {f"load {load}": play(fronts, replicas, load, options.seconds, options.speed, seed=1) for load in loads}


def play(fronts, replicas, load, seconds, speed, seed):
    """One load, from a quiet fleet on."""
    warmset.wait_for(lambda: not any(one["in_flight"] for one in replicas.figures()), "nothing is under way")
    replicas.reset()
    one = routers.load(
        fronts[0], "--tenants", TENANTS, "--hot-share", HOT_SHARE, "--prompt-bytes", SYSTEM_BYTES, "--question-bytes", QUESTION_BYTES,
        "--stream", "--output-tokens", OUTPUT_TOKENS, "--exponential-output", "--warm-up-seconds", 0, "--seed", seed,
        "--target-microseconds", int(TARGET_SECONDS * 1e6 / speed), "--per-second", CAPACITY_PER_SECOND * load * speed,
        "--seconds", seconds / speed, "--patience-seconds", PATIENCE_SECONDS, others=fronts[1:])
    figures = replicas.figures()
    due = one["answered"] + one["failed"] + one["unfinished"]
    resident = [figure["resident_microseconds"] for figure in figures]
    # Of what can be cached: questions are everybody's own.
    cachable = sum(figure["prompt_tokens"] for figure in figures) * SYSTEM_BYTES / (SYSTEM_BYTES + QUESTION_BYTES)
    times = {point: one["first_microseconds"][point] for point in ("p50", "p99")}
    return {
        "cached": round(sum(figure["cached_tokens"] for figure in figures) / max(1, cachable), 4),
        "most_to_mean_in_flight": round(max(resident) * REPLICAS / max(1, sum(resident)), 2),
        "first_seconds": {point: time and round(time * speed / 1e6, 3) for point, time in times.items()},
        "within_target": round(one["within_target"] / due, 4),
        "requests": due, "failed": one["failed"], "unfinished": one["unfinished"], "broken": one["broken"],
    }


def main():
    parser = argparse.ArgumentParser(prog="bench/run router_affinity")
    parser.add_argument("--speed", type=float, default=4, help="the replicas' time passes so many times as fast")
    parser.add_argument("--seconds", type=float, default=30, help="measured, in the replicas' time")
    parser.add_argument("--fill-seconds", type=float, default=40, help="before that, to fill the caches")
    parser.add_argument("--fill-load", type=float, default=0.35)
    parser.add_argument("--gateways", type=int, default=1, help="routers beside each other that do not talk")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="as shares of what the replicas can do")
    parser.add_argument("--routers", default=",".join(routers.KINDS).replace(", tuned", " tuned"))
    options = parser.parse_args()
    names = [name.replace(" tuned", ", tuned") for name in options.routers.split(",")]
    loads = [float(load) for load in options.loads.split(",")]
    claims = {name: measure(name, loads, options) for name in routers.available(names)}
    harness.report("router_affinity", claims, peer=f"{routers.PEERS}, HAProxy", replicas=REPLICAS, tenants=TENANTS,
                   gateways=options.gateways,
                   speed=options.speed, capacity_per_second=CAPACITY_PER_SECOND, target_seconds=TARGET_SECONDS,
                   claim="cached at least 0.98, most to mean at most 1.6, every first token within the target, up to the highest load")


if __name__ == "__main__":
    main()
