"""Where routers send requests: 200 tenants with system prompts of 4,096 tokens, one of them with 30 % of the requests, and 16
replicas that keep 16 such prompts each, at three loads up to 90 % of what the replicas can do.

The replicas are of bench/router: continuous batching in steps as long as those of an accelerator, a prefix cache of whole
prompts, and what vLLM tells of its load and cache. Streams in open loop, timed from when they were due. Everything goes `--speed`
times as fast, and the figures are told in the time of the replicas. Claim: at least 0.98 of the tokens of prompts cached with at most
1.6 times the mean in flight at any replica, and every first token within a second.
"""

import argparse

import harness
import routers

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


def measure(name, load, options):
    """One router in front of fresh replicas at one load."""
    tokens = (SYSTEM_BYTES + QUESTION_BYTES) // 4
    speed = options.speed
    with routers.Replicas(REPLICAS, "--batch", "--cached-prompts", CACHED_PROMPTS, "--tokens-per-prompt", tokens,
                          "--speed", speed) as replicas, routers.Router(name, replicas) as router:
        shape = ["--tenants", TENANTS, "--hot-share", HOT_SHARE, "--prompt-bytes", SYSTEM_BYTES, "--question-bytes", QUESTION_BYTES,
                 "--stream", "--output-tokens", OUTPUT_TOKENS, "--exponential-output",
                 "--target-microseconds", int(TARGET_SECONDS * 1e6 / speed), "--warm-up-seconds", 0]
        # Caches fill at a rate that an empty fleet can take.
        fill = options.fill_load
        routers.load(router, *shape, "--per-second", CAPACITY_PER_SECOND * fill * speed, "--seconds", options.fill_seconds / speed, "--seed", 7)
        replicas.reset()
        one = routers.load(router, *shape, "--per-second", CAPACITY_PER_SECOND * load * speed,
                           "--seconds", options.seconds / speed, "--patience-seconds", 5)
        figures = replicas.figures()
    due = one["answered"] + one["failed"] + one["unfinished"]
    resident = [figure["resident_microseconds"] for figure in figures]
    seconds = {point: round(one["first_microseconds"][point] * speed / 1e6, 3) for point in ("p50", "p99")}
    return {
        "cached": round(sum(f["cached_tokens"] for f in figures) / max(1, sum(f["prompt_tokens"] for f in figures)), 4),
        "most_to_mean_in_flight": round(max(resident) * REPLICAS / sum(resident), 2),
        "first_seconds": seconds,
        "within_target": round(one["within_target"] / due, 4),
        "requests": due, "failed": one["failed"], "unfinished": one["unfinished"], "broken": one["broken"],
    }


def main():
    parser = argparse.ArgumentParser(prog="bench/run router_affinity")
    parser.add_argument("--speed", type=float, default=4, help="the replicas' time passes so many times as fast")
    parser.add_argument("--seconds", type=float, default=40, help="measured, in the replicas' time")
    parser.add_argument("--fill-seconds", type=float, default=40, help="before that, to fill the caches")
    parser.add_argument("--fill-load", type=float, default=0.14)
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="as shares of what the replicas can do")
    parser.add_argument("--routers", default=",".join(routers.KINDS).replace(", tuned", " tuned"))
    options = parser.parse_args()
    names = [name.replace(" tuned", ", tuned") for name in options.routers.split(",")]
    claims = {}
    for load in map(float, options.loads.split(",")):
        claims[f"load {load}"] = {name: measure(name, load, options) for name in routers.available(names)}
    harness.report("router_affinity", claims, peer=f"{routers.PEERS}, HAProxy", replicas=REPLICAS, tenants=TENANTS,
                   speed=options.speed, capacity_per_second=CAPACITY_PER_SECOND, target_seconds=TARGET_SECONDS,
                   claim="cached at least 0.98, most to mean at most 1.6, all within the target")


if __name__ == "__main__":
    main()
