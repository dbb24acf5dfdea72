"""What the simulator says of a server that it was not fitted on, beside what that server did.

A server is recorded under workload A, and what engines cost is found from that recording. Workload B has other models of other sizes,
another rate and another budget; it is played to a real server, too, and simulated with the costs of A. Both several times, in turn.
What real models take alone is a matter of how their weights are written, which A cannot tell of B: they are profiled before, each by
itself. Claim: loads, evictions and requests that found their model ready within 5 %, p50 and p99 of cold waits and of answers within
15 %, in the means over the rounds. How far the real thing is from itself is shown beside it: B is played to a server once more,
the same requests at the same moments.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import replay
import warmset
from warmset import MEBIBYTE

RESERVE_BYTES = 256 * MEBIBYTE
SEQUENCES = 8
COUNTS = ("loads", "evictions", "warm")
TIMES = ("cold_wait_p50_seconds", "cold_wait_p99_seconds", "answer_p50_seconds", "answer_p99_seconds")
COUNTS_WITHIN, TIMES_WITHIN = 0.05, 0.15
# A synthetic load takes so long, and so much longer for each gibibyte.
LOAD_SECONDS, LOAD_SECONDS_PER_GIBIBYTE = 0.05, 0.4
PREFILL_SECONDS, DECODE_SECONDS = 0.0002, 0.01


@dataclass
class Workload:
    """What is asked of how many models, in room for which share of their bytes."""

    models: int
    megabytes: tuple
    # Requests a second; for real engines what they need of the machine's time, so that a slower one gets fewer.
    rate: float
    zipf: float
    room: float
    prompt_tokens: tuple
    output_tokens: tuple
    seed: int


SYNTHETIC = {
    "a": Workload(12, (192, 768), 4.0, 0.8, 0.5, (8, 64), (2, 24), 1),
    "b": Workload(18, (96, 1280), 2.5, 1.1, 0.35, (16, 200), (4, 60), 2),
}
# Each file with several contexts, which are models of their own that share the file's pages.
REAL_FILES = {"a": ("q4_0", "q4_1", "gemma"), "b": ("q8_0", "f16")}
REAL_CONTEXTS = {"a": (512, 640), "b": (576, 704, 832)}
REAL = {
    "a": Workload(6, (), 0.5, 0.8, 0.5, (16, 80), (4, 24), 3),
    "b": Workload(6, (), 0.4, 1.0, 0.4, (24, 120), (4, 32), 4),
}
KINDS = {"synthetic": SYNTHETIC, "llama": REAL, "saturated": {**REAL, "b": replace(REAL["b"], rate=1.1)}}
# Loads for each request, about, of the real workloads.
LOADS_PER_REQUEST = 0.7


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run sim_judged", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="synthetic,llama", help="of synthetic, llama and saturated (llama with more than it can do)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each workload is played")
    parser.add_argument("--requests", type=int, default=300, help="requests of a synthetic workload")
    parser.add_argument("--keep", type=Path, help="an empty directory for the recordings, to ask them something else")
    parser.add_argument("--real-requests", type=int, default=90, help="requests of a real one")
    return parser.parse_args()


def synthetic_models(directory, workload):
    """Tables of the configuration, and the bytes of all of them."""
    generator = random.Random(workload.seed)
    tables, total = [], 0
    for number in range(workload.models):
        # A few bytes more each, so that every file and so every digest differs.
        size = int(generator.uniform(*workload.megabytes) * MEBIBYTE) + number
        load = LOAD_SECONDS + LOAD_SECONDS_PER_GIBIBYTE * size / (1 << 30)
        source = warmset.synthetic_model(directory, replay.name_of(number), size / MEBIBYTE, allocate=False, load_seconds=load,
                                         prefill_seconds_per_token=PREFILL_SECONDS, decode_seconds_per_token=DECODE_SECONDS)
        tables.append({"name": replay.name_of(number), "engine": "synthetic", "source": source})
        total += size
    return tables, total


def real_models(which):
    files = warmset.model_files()
    pairs = [(files[name], context) for context in REAL_CONTEXTS[which] for name in REAL_FILES[which]]
    tables = [{"name": replay.name_of(number), "source": path, "context_tokens": context}
              for number, (path, context) in enumerate(pairs)]
    return tables


def measured(directory, tables):
    """What all models take together, pages that they share once, and what each takes alone."""
    with server_of(directory, tables, 8 << 30) as server:
        replay.put_ahead(server)
        profiles = [server.cli_json("model", "profile", table["name"], timeout=600) for table in tables]
        return server.memory()["resident"], profiles


def rate_of(workload, profiles):
    """Requests a second that need this share of the machine's time where they come one after the other."""
    weights = [1 / (rank + 1) ** workload.zipf for rank in range(workload.models)]
    mean = lambda values: sum(weight * value for weight, value in zip(weights, values)) / sum(weights)
    request = mean(statistics.mean(workload.prompt_tokens) / profile["prefill_tokens_per_second"]
                   + statistics.mean(workload.output_tokens) / profile["decode_tokens_per_second"] for profile in profiles)
    load = mean(profile["load_seconds"] + profile["warm_up_seconds"] for profile in profiles)
    return workload.rate / (request + LOADS_PER_REQUEST * load)


def server_of(directory, tables, memory, *options):
    tables = [{**table, "parallel": SEQUENCES, "max_concurrency": 64} for table in tables]
    config = {"kv": {"host": 0}, "model": tables}
    return warmset.Server(directory, memory=memory, reserve=RESERVE_BYTES, config=warmset.toml(config), arguments=options)


def ask(server, number, prompt_tokens, output_tokens, generator=None):
    """One request; prompts differ, so that none is found computed."""
    generator = generator or random.Random(number)
    prompt = harness.random_tokens(generator, prompt_tokens)
    status, _, body = server.complete(replay.name_of(number), prompt, output_tokens, temperature=0, ignore_eos=True)
    if status != 200:
        raise RuntimeError(f"{status}: {body}")


def drawn(workload, count, seed):
    """(moment, model, prompt tokens, output tokens), one after the other."""
    generator = random.Random(seed)
    weights = [1 / (rank + 1) ** workload.zipf for rank in range(workload.models)]
    at, requests = 0.0, []
    for _ in range(count):
        at += generator.expovariate(workload.rate)
        model, = generator.choices(range(workload.models), weights)
        requests.append((at, model, generator.randint(*workload.prompt_tokens), generator.randint(*workload.output_tokens)))
    return requests


def play(server, requests):
    """Sends each at its moment, whether or not earlier ones were answered. How many failed."""
    failed, began = [], time.perf_counter() + 0.5

    def one(at, model, prompt_tokens, output_tokens):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        try:
            ask(server, model, prompt_tokens, output_tokens, random.Random(at))
        except (OSError, RuntimeError) as error:
            failed.append(str(error))

    threads = [threading.Thread(target=one, args=request) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def recorded(directory, tables, memory, requests):
    """The recording of a workload, and what failed of it."""
    directory.mkdir()
    path = directory / "run.jsonl"
    with server_of(directory / "server", tables, memory, "--record", str(path)) as server:
        replay.put_ahead(server)
        return path, play(server, requests)


def replayed(recording, *options):
    return json.loads(warmset.run_command(["replay", str(recording), *options, "--json"], timeout=600).stdout)


def judged(paths):
    """What happened, and the same simulated: with its own times, and with the costs of the other recording, with profiles and without."""
    costs = ["--costs", str(paths["a"])]
    alone = replayed(paths["b"], *costs)
    best = replayed(paths["b"], *costs, "--profiles", str(paths["profiles"])) if "profiles" in paths else alone
    return {"live": best["recorded"], "live_again": replayed(paths["again"], *costs)["recorded"], "with_its_own_times": best["simulated"],
            "with_the_others_costs": best["what_if"], "without_profiles": alone["what_if"], "costs": best["costs"]}


def ratio(simulated, live):
    return round(simulated / live, 3) if live else None


@dataclass
class Prepared:
    """A workload's models, its memory, its requests a second and, of real models, what each takes alone."""

    tables: list
    memory: int
    rate: float
    profiles: list


def prepared(directory, kind, which, workload):
    if kind == "synthetic":
        (tables, total), rate, profiles = synthetic_models(directory / "models", workload), workload.rate, []
    else:
        tables = real_models(which)
        total, profiles = measured(directory / "measured", tables)
        rate = rate_of(workload, profiles)
    return Prepared(tables, RESERVE_BYTES + int(total * workload.room), rate, profiles)


def round_of(directory, kind, turn, count):
    """Each workload once, profiled just before it is played: B judged by the costs of A. What came of it, and its files."""
    paths, profiles, settings, failures = {}, [], {}, []
    for which, workload in KINDS[kind].items():
        place = directory / f"{which}-{turn}"
        place.mkdir()
        ready = prepared(place, kind, which, workload)
        requests = drawn(replace(workload, rate=ready.rate), count, 100 * workload.seed + turn)
        for name in ("a",) if which == "a" else ("b", "again"):
            paths[name], failed = recorded(place / name, ready.tables, ready.memory, requests)
            failures += failed
        profiles += ready.profiles
        settings[which] = {"memory_bytes": ready.memory, "requests_per_second": round(ready.rate, 3)}
    if profiles:
        paths["profiles"] = directory / f"profiles-{turn}.json"
        paths["profiles"].write_text("\n".join(json.dumps(profile) for profile in profiles))
    return {**judged(paths), "settings": settings, "load_average": os.getloadavg()[0], "failures": failures[:8]}, paths


def rounds_of(given, kind, count):
    """Several rounds, one after the other."""
    rows = []
    with harness.scratch() as directory:
        for turn in range(given.rounds):
            row, paths = round_of(Path(directory), kind, turn, count)
            rows.append(row)
            print(f"{kind}, round {turn + 1}: {json.dumps(row)}", file=sys.stderr, flush=True)
            for name, path in paths.items() if given.keep else ():
                shutil.copy(path, given.keep / f"{kind}-{turn}-{name}.jsonl")
    return rows


def verdicts(rows, other):
    """Means over the rounds, another run's by the live one's, whether they are within the bounds, and each round's ratio."""
    found = {}
    for figures, within in ((COUNTS, COUNTS_WITHIN), (TIMES, TIMES_WITHIN)):
        for figure in figures:
            live, said = [statistics.mean(row[which][figure] for row in rows) for which in ("live", other)]
            found[figure] = {"live": live, other: said, "ratio": ratio(said, live),
                             "ratios": [ratio(row[other][figure], row["live"][figure]) for row in rows],
                             "within": live > 0 and abs(said / live - 1) <= within}
    return found


def main():
    given = arguments()
    claims, facts = {}, {}
    for kind in given.engines.split(","):
        count = given.requests if kind == "synthetic" else given.real_requests
        rows = rounds_of(given, kind, count)
        found = verdicts(rows, "with_the_others_costs")
        claims |= {f"{kind}: {figure}": verdict["within"] for figure, verdict in found.items()}
        others = {which: verdicts(rows, which) for which in ("live_again", "with_its_own_times", "without_profiles")}
        facts[kind] = {"requests": count, "with_the_others_costs": found, **others, "rounds": rows}
    harness.report("sim_judged", claims, peer=None, workloads={
        kind: {name: vars(one) for name, one in workloads.items()} for kind, workloads in KINDS.items()},
        files=REAL_FILES, contexts=REAL_CONTEXTS, **facts)


if __name__ == "__main__":
    main()
