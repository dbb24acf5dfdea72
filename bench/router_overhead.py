"""What a router costs: processor time and added time to a request, with replicas that answer at once, and its memory.

Closed loops through each router in turn, several rounds; the same load straight to the replicas tells what is added. Claim:
at most half the processor time of sglang-router's cache_aware for requests, and of the best peer for streams; added p50 and p99
below every peer's; below 20 MB when idle, and flat over any number of distinct prompts.
"""

import argparse
import contextlib
import statistics

import harness
import routers

NAMES = ["warmset", "sglang cache_aware", "smg cache_aware", "vllm consistent_hash", "vllm cache_aware"]
REPLICAS = 4
CASES = {
    "400 bytes": ["--connections", 32, "--prompt-bytes", 400],
    "16 KiB": ["--connections", 32, "--prompt-bytes", 16384],
    "50 events at once": ["--connections", 32, "--stream", "--events", 50],
    "50 events, 10 ms apart": ["--connections", 32, "--stream", "--events", 50],
    "400 bytes, one at a time": ["--connections", 1, "--prompt-bytes", 400],
    "400 bytes, eight at a time": ["--connections", 8, "--prompt-bytes", 400],
}
PACED = "50 events, 10 ms apart"


class Direct:
    """The replicas without a router."""

    def __init__(self, replicas):
        self.port, self.process = replicas.port, replicas.process


def measure(instant, paced, names, seconds, rounds):
    """Every case through every router, in turns; the replicas alone as well."""
    found = {case: {name: [] for name in [*names, "no router"]} for case in CASES}
    with contextlib.ExitStack() as stack:
        fronts = {}
        for name in names:
            fronts[name] = [stack.enter_context(routers.Router(name, replicas)) for replicas in (instant, paced)]
        fronts["no router"] = [Direct(instant), Direct(paced)]
        idle = {name: fronts[name][0].resident_bytes() for name in names}
        for turn in range(rounds):
            order = list(fronts) if turn % 2 == 0 else list(reversed(fronts))
            for case, arguments in CASES.items():
                for name in order:
                    front = fronts[name][case == PACED]
                    found[case][name].append(
                        routers.load(front, "--seconds", seconds, "--tenants", 200, "--seed", turn + 1, *arguments))
    return found, idle


def summary(found, names):
    """Medians of the rounds, what is added to no router, and the ratios of processor time."""
    claims = {}
    for case, by_name in found.items():
        def median(name, pick):
            return statistics.median(pick(one) for one in by_name[name])
        cpu = {name: round(median(name, lambda one: one["cpu_microseconds_per_request"]), 1) for name in names}
        added = {}
        for point in ("p50", "p99"):
            times = "first_microseconds" if "events" in case else "last_microseconds"
            base = median("no router", lambda one: one[times][point])
            added[point] = {name: round(median(name, lambda one: one[times][point]) - base) for name in names}
        faults = {name: sum(one["failed"] + one["broken"] for one in by_name[name]) for name in names}
        claims[case] = {
            "cpu_microseconds_per_request": cpu,
            "cpu_microseconds_all": {
                name: [round(one["cpu_microseconds_per_request"], 1) for one in by_name[name]] for name in names},
            "ratio_of_cpu": {name: round(cpu["warmset"] / cpu[name], 3) for name in names if name != "warmset"},
            "added_microseconds" + (" to the first event" if "events" in case else ""): added,
            "per_second": {name: round(median(name, lambda one: one["per_second"])) for name in by_name},
            "failed_or_broken": faults,
        }
    return claims


def memory(names, prompts):
    """Resident set as distinct prompts of 400 bytes come, in tenths."""
    found = {}
    for name in names:
        with routers.Replicas(REPLICAS) as replicas, routers.Router(name, replicas) as router:
            sizes = [router.resident_bytes()]
            for part in range(10):
                one = routers.load(router, "--connections", 32, "--warm-up-seconds", 0, "--seconds", 1, "--distinct",
                                   "--requests", prompts // 10, "--seed", part + 1)
                sizes.append(one["resident_bytes"])
            found[name] = [round(size / 1e6, 1) for size in sizes]
    return found


def main():
    parser = argparse.ArgumentParser(prog="bench/run router_overhead")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1_000_000, help="distinct prompts for the memory of warmset")
    parser.add_argument("--peer-prompts", type=int, default=100_000, help="the same for the others, which keep the text")
    parser.add_argument("--routers", default=",".join(NAMES))
    arguments = parser.parse_args()
    names = arguments.routers.split(",")
    with routers.Replicas(REPLICAS) as instant, routers.Replicas(REPLICAS, "--pause-microseconds", 10_000) as paced:
        found, idle = measure(instant, paced, names, arguments.seconds, arguments.rounds)
    claims = summary(found, names)
    claims["idle"] = {"unit": "megabytes resident", **{name: round(size / 1e6, 1) for name, size in idle.items()}}
    if arguments.prompts:
        ours, peers = [name for name in names if name == "warmset"], [name for name in names if name != "warmset"]
        claims["megabytes resident, at first and after each tenth of the prompts"] = {
            "prompts": {"warmset": arguments.prompts, "peers": arguments.peer_prompts},
            **memory(ours, arguments.prompts), **memory(peers, arguments.peer_prompts)}
    harness.report("router_overhead", claims, peer=routers.PEERS, replicas=REPLICAS, rounds=arguments.rounds,
                   claim="processor time at most half, below 20 MB when idle, flat memory")


if __name__ == "__main__":
    main()
