"""A day of many rarely used models, played in minutes to the real server with synthetic engines.

The requests are those of `warmset sim`, at its instants divided by the speed; the server's own clock goes as many times as
fast. Each policy that is Warmset's runs live; LRU, five pins with LRU and the fixed keep-alive are the planner's models of
them on the same requests and the same memory. Claim: cold starts are rarer than with any of these, and no request fails.
"""

import argparse
import json
import sys

import harness
import replay
import warmset

PINS = 5
# What is given to the server under [residency]; pins are given to models.
LIVE = {
    "warmset": {},
    "no-preload": {"forecast": ["intervals", "time_of_day"]},
    "no-forecast": {"forecast": False},
    "warmset-pins": {},
}
PEERS = ("lru", "pinned-lru", "keep-alive")


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run azure_replay", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="a day of the Azure Functions trace of 2019, .csv or .csv.gz; without it made-up demand")
    parser.add_argument("--scenario", default="rare-models", help="as for `warmset sim`")
    parser.add_argument("--speed", type=int, default=240, help="how many times as fast the day passes")
    parser.add_argument("--slots", default="8,16", help="models that fit into memory")
    parser.add_argument("--policies", default="warmset,no-preload,no-forecast", help=", ".join(LIVE))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.slots = [int(slots) for slots in given.slots.split(",")]
    given.policies = given.policies.split(",")
    unknown = set(given.policies) - set(LIVE)
    if unknown:
        parser.error(f"no such policy: {', '.join(sorted(unknown))}; there are {', '.join(LIVE)}")
    return given


def most_called(demand):
    """The models that were asked for most often; of equals the first."""
    calls = {}
    for _, model in demand:
        calls[model] = calls.get(model, 0) + 1
    return sorted(calls, key=lambda model: (-calls[model], model))[:PINS]


def simulated(given, *options):
    """The simulator's document, and its cold shares by room and policy."""
    slots = ",".join(map(str, given.slots))
    document = replay.simulate(given.scenario, "--slots", slots, *options, seed=given.seed, trace=given.trace)
    return document, {(row["slots"], row["policy"]): row["cold_share"] for row in document["rows"]}


def run_live(given, day, slots, policy, load_seconds):
    """One policy with so much room, live."""
    demand, pinned = day["demand"], most_called(day["demand"]) if policy == "warmset-pins" else ()
    with harness.scratch() as directory:
        server = replay.pool(directory, day["models"], slots, given.speed, load_seconds, day["run_seconds"] / given.speed,
                             LIVE[policy], pinned)
        with server:
            replay.put_ahead(server)
            played = replay.play(server, demand, given.speed, f"{policy}, room for {slots}", say=True)
            counts = replay.counted(server, len(demand))
    cold = played.starts["cold"]
    agrees = counts["starts"].get("cold", 0) == cold
    if not agrees:
        print(f"the server counts {counts['starts']}, callers {dict(played.starts)}", file=sys.stderr)
    of_the_day = lambda seconds: round(seconds * given.speed, 1)
    return {
        "cold_share": cold / len(demand), "cold": cold, "warm": played.starts["warm"],
        "failed": len(played.failures), "failures": played.failures[:8],
        "server_counts_the_same": agrees, "server": counts,
        "cold_answer_seconds_of_the_day": {share: of_the_day(warmset.percentile(played.cold_seconds or [0.0], share))
                                           for share in (50, 99)},
        "sent_late_seconds_of_the_day": {share: of_the_day(warmset.percentile(played.late_seconds, share))
                                         for share in (50, 99, 100)},
    }


def figures(given, live, shares, slots):
    """Live beside simulated beside the peers, for one size of memory."""
    percent = lambda share: round(100 * share, 2)
    rows = {}
    for policy in given.policies:
        found = live[slots, policy]
        rows[policy] = {"live_percent": percent(found["cold_share"])}
        if (slots, policy) in shares["as declared"]:
            rows[policy] |= {
                "simulated_percent": percent(shares["as declared"][slots, policy]),
                "simulated_with_live_load_time_percent": percent(shares[slots, policy][slots, policy]),
                "difference_points": percent(found["cold_share"] - shares["as declared"][slots, policy]),
                "difference_with_live_load_time_points":
                    percent(found["cold_share"] - shares[slots, policy][slots, policy]),
            }
    peers = {peer: shares["as declared"][slots, peer] for peer in PEERS}
    ours = live[slots, given.policies[0]]["cold_share"]
    return {
        "cold_share": rows,
        "peers_simulated_percent": {peer: percent(share) for peer, share in peers.items()},
        f"ratio_of_{given.policies[0]}_live_to": {peer: round(ours / share, 3) for peer, share in peers.items()},
        "holds": all(ours < share for share in peers.values())
        and not any(live[slots, policy]["failed"] for policy in given.policies),
        "live": {policy: live[slots, policy] for policy in given.policies},
    }


def main():
    given = arguments()
    day, declared = simulated(given)
    process_seconds, place_seconds = replay.calibrate(given.speed, day["run_seconds"] / given.speed)
    # In the simulation a place is free at once: all of it together is to take as long as a load does there.
    load_seconds = max(0.0, day["load_seconds"] / given.speed - process_seconds - place_seconds)
    live, shares = {}, {"as declared": declared}
    for slots in given.slots:
        for policy in given.policies:
            found = live[slots, policy] = run_live(given, day, slots, policy, load_seconds)
            print(f"{policy}, room for {slots}: {json.dumps(found)}", file=sys.stderr)
            if (slots, policy) in declared:
                # What it took on this machine beside all else, so that what is left of a difference has another reason.
                seconds = found["server"]["load_seconds_mean"] + place_seconds * given.speed
                found["load_with_place_seconds_of_the_day"] = round(seconds, 2)
                shares[slots, policy] = simulated(given, "--compare", policy, "--load-seconds", f"{seconds}")[1]
    claims = {f"room for {slots}": figures(given, live, shares, slots) for slots in given.slots}
    harness.report(
        "azure_replay", claims, peer="the planner's models of LRU, five pins with LRU and a keep-alive of ten minutes",
        demand="the trace" if given.trace else "made up", scenario=given.scenario, seed=given.seed, speed=given.speed,
        models=day["models"], requests=len(day["demand"]), load_seconds=day["load_seconds"],
        process_seconds=round(process_seconds, 4),
        place_seconds=round(place_seconds, 4), load_seconds_declared=round(load_seconds, 4),
        claim="rarer cold starts than any peer, none failed")


if __name__ == "__main__":
    main()
