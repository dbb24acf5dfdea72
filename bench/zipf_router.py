"""Ten models, room for three, asked for by Zipf's law in open loop: against llama.cpp's router with `--models-max 3`.

Arrivals are drawn once and played to both sides at the same times after their start, whether or not earlier ones were
answered. Every model is a file of its own, so that nobody gains from pages that two models share. Claim: the p99 of the
time to the whole answer is at most half the router's, and no request fails.
"""

import threading
import time
from pathlib import Path

import harness
import warmset

MODELS = 10
ROOM = 3
ZIPF = 1.0
CONTEXT_TOKENS = 1024
SEQUENCES = 2
# Requests per second, and how many: a rate that the router keeps up with on two cores, and one that it does not.
RATES = {0.5: 40, 1.5: 100}
ROUNDS = 1
MAX_TOKENS = 8
RESERVE_MIB = 128


def distinct_files(directory, source, count):
    """The same weights under different names inside the file: different models for whoever reads them."""
    data = bytearray(source.read_bytes())
    key = b"general.name"
    at = data.index(key) + len(key) + 4 + 8  # type and length of the text come before it
    files = {}
    for number in range(count):
        data[at] = ord("A") + number
        path = Path(directory) / f"m{number}.gguf"
        path.write_bytes(data)
        files[f"m{number}"] = path
    return files


def arrivals(generator, per_second, count):
    """Times and models, drawn once: exponential gaps, Zipf's law over the models."""
    weights = [1 / (rank + 1) ** ZIPF for rank in range(MODELS)]
    names = [f"m{number}" for number in range(MODELS)]
    at, drawn = 0.0, []
    for _ in range(count):
        at += generator.expovariate(per_second)
        drawn.append((at, generator.choices(names, weights)[0]))
    return drawn


def play(port, drawn):
    """Sends every request at its time on a connection of its own; returns seconds and failures."""
    seconds, failures = [None] * len(drawn), []
    began = time.perf_counter()

    def one(index, at, name):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        asked = time.perf_counter()
        body = {"model": name, "prompt": f"Once upon a time {index}", "max_tokens": MAX_TOKENS, "temperature": 0}
        try:
            harness.Connection(port).post("/v1/completions", body)
            seconds[index] = time.perf_counter() - asked
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the request failed
            failures.append(f"{name}: {error}")

    threads = [threading.Thread(target=one, args=(index, *arrival)) for index, arrival in enumerate(drawn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [value for value in seconds if value is not None], failures


def room_for_three(directory, files):
    """The budget that holds three of them and not four, from what one of them is measured to take."""
    name, path = next(iter(files.items()))
    model = {"name": name, "source": path, "context_tokens": CONTEXT_TOKENS, "parallel": SEQUENCES}
    with warmset.Server(Path(directory) / "measure", memory="2GiB", config=warmset.toml({"model": [model]})) as server:
        profile = server.cli_json("model", "profile", name)
    mebibytes = max(profile["steady_bytes"], profile["peak_bytes"]) / 2**20
    return int(RESERVE_MIB + mebibytes * (ROOM + 0.5))


def compare(server, router, per_second, count):
    """Both sides play the same arrivals."""
    drawn = arrivals(harness.generator(), per_second, count)
    played = harness.alternate(ROUNDS, lambda: play(server.port, drawn), lambda: play(router.port, drawn))
    figures = [[warmset.percentile(seconds, 99) for seconds, _ in side] for side in played]
    medians = [[warmset.percentile(seconds, 50) for seconds, _ in side] for side in played]
    failed = [[failure for _, failures in side for failure in failures] for side in played]
    return {"requests": count,
            "p99": harness.compared(*figures, "seconds to the whole answer"),
            "p50": harness.compared(*medians, "seconds to the whole answer"),
            "failed": dict(zip(("warmset", "peer"), map(len, failed))), "failures": sum(failed, [])[:8]}


def main():
    source = warmset.model_files()["q4_1"]
    with harness.scratch() as directory:
        folder = Path(directory) / "models"
        folder.mkdir()
        files = distinct_files(folder, source, MODELS)
        memory = room_for_three(directory, files)
        models = [{"name": name, "source": path, "context_tokens": CONTEXT_TOKENS, "parallel": SEQUENCES}
                  for name, path in files.items()]
        server = warmset.Server(Path(directory) / "server", memory=f"{memory}MiB", reserve=f"{RESERVE_MIB}MiB",
                                config=warmset.toml({"model": models}))
        router = harness.Peer(directory, "--models-dir", folder, "--models-max", ROOM, "-c", CONTEXT_TOKENS * SEQUENCES,
                              "-np", SEQUENCES, "-t", harness.THREADS, "-fa", "on")
        with server, router:
            for name in files:  # both have seen every file once
                for port in (server.port, router.port):
                    harness.Connection(port).post("/v1/completions", {"model": name, "prompt": "Once", "max_tokens": 1})
            claims = {f"{rate} requests per second": compare(server, router, rate, count) for rate, count in RATES.items()}
            resident = [line for line in server.ledger()["entries"] if line["state"] == "ready"]
            loads = server.metric("warmset_model_loads_total")
    harness.report("zipf_router", claims, model=source.name, models=MODELS, resident_at_the_end=len(resident),
                   loads=loads, rounds=ROUNDS, memory_mebibytes=memory, threads=harness.THREADS,
                   claim="p99 ratio at most 0.5, none failed")


if __name__ == "__main__":
    main()
