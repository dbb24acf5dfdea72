"""What the simulator says of a server that it was not fitted on, beside what that server did.

A server is recorded under workload A, and what engines cost is found from that recording alone. Workload B has other models of other
sizes, another rate and another budget; it is played to a real server, too, and simulated with the costs of A. Both several times, in
turn. Claim: loads, evictions and requests that found their model ready within 5 %, p50 and p99 of cold waits and of answers within 15 %.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass
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
    "a": Workload(6, (), 0.7, 0.8, 0.5, (16, 80), (4, 24), 3),
    "b": Workload(6, (), 0.5, 1.0, 0.4, (24, 120), (4, 32), 4),
}


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run sim_judged", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="synthetic,llama", help="synthetic, llama, or both")
    parser.add_argument("--rounds", type=int, default=3, help="how often each workload is played")
    parser.add_argument("--requests", type=int, default=300, help="requests of a synthetic workload")
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


def measured_bytes(directory, tables):
    """What all models take together, pages that they share once."""
    with server_of(directory, tables, 8 << 30) as server:
        for number in range(len(tables)):
            ask(server, number, 8, 1)
        return server.memory()["resident"]


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
    path = Path(directory) / "run.jsonl"
    with server_of(Path(directory) / "server", tables, memory, "--record", str(path)) as server:
        replay.put_ahead(server)
        return path, play(server, requests)


def judged(observed, costs):
    """What happened, and the same simulated: with its own times, and with the costs of the other recording."""
    document = json.loads(warmset.run_command(["replay", str(observed), "--costs", str(costs), "--json"], timeout=600).stdout)
    return {"live": document["recorded"], "with_its_own_times": document["simulated"], "with_the_others_costs": document["what_if"],
            "costs": document["costs"]}


def ratio(simulated, live):
    return round(simulated / live, 3) if live else None


def rounds_of(given, engines, count):
    """Each workload in turn, several times: B judged by the costs of the A just before it."""
    workloads, rows = SYNTHETIC if engines == "synthetic" else REAL, []
    with harness.scratch() as directory:
        tables, memory = {}, {}
        for which, workload in workloads.items():
            place = Path(directory) / which
            if engines == "synthetic":
                tables[which], total = synthetic_models(place / "models", workload)
            else:
                tables[which] = real_models(which)
                total = measured_bytes(place / "measured", tables[which])
            memory[which] = RESERVE_BYTES + int(total * workload.room)
        for turn in range(given.rounds):
            paths, failures = {}, []
            for which, workload in workloads.items():
                place = Path(directory) / f"{which}-{turn}"
                place.mkdir()
                requests = drawn(workload, count, 100 * workload.seed + turn)
                paths[which], failed = recorded(place, tables[which], memory[which], requests)
                failures += failed
            row = judged(paths["b"], paths["a"])
            row["failures"] = failures[:8]
            rows.append(row)
            print(f"{engines}, round {turn + 1}: {json.dumps(row)}", file=sys.stderr)
    return rows, memory


def verdicts(rows, simulated):
    """Medians over the rounds of simulated by live, and whether they are within the bounds."""
    found = {}
    for figures, within in ((COUNTS, COUNTS_WITHIN), (TIMES, TIMES_WITHIN)):
        for figure in figures:
            ratios = [ratio(row[simulated][figure], row["live"][figure]) for row in rows]
            known = [one for one in ratios if one is not None]
            median = statistics.median(known) if known else None
            found[figure] = {"live": statistics.median(row["live"][figure] for row in rows),
                             "simulated": statistics.median(row[simulated][figure] for row in rows),
                             "ratio": median, "ratios": ratios, "within": median is not None and abs(median - 1) <= within}
    return found


def main():
    given = arguments()
    claims, facts = {}, {}
    for engines in given.engines.split(","):
        count = given.requests if engines == "synthetic" else given.real_requests
        rows, memory = rounds_of(given, engines, count)
        found = verdicts(rows, "with_the_others_costs")
        claims |= {f"{engines}: {figure}": verdict["within"] for figure, verdict in found.items()}
        facts[engines] = {"requests": count, "memory_bytes": memory, "with_the_others_costs": found,
                          "with_its_own_times": verdicts(rows, "with_its_own_times"), "rounds": rows}
    harness.report("sim_judged", claims, peer=None, workloads={
        "synthetic": {name: vars(one) for name, one in SYNTHETIC.items()}, "llama": {name: vars(one) for name, one in REAL.items()},
        "files": REAL_FILES, "contexts": REAL_CONTEXTS}, **facts)


if __name__ == "__main__":
    main()
