"""What a cold model's load does to a hot one: p99 of the hot model's requests during loads against before, in one run.

The pool itself: a hot model whose engine computes nothing on the processor, beside a cold one of the same kind. Claim: at
most 1.1. Shared cores: a real model decodes while a real one loads, which needs processor time of its own; no claim.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import harness
import warmset

ROUNDS = 30
BEFORE_SECONDS = 1.0
DECLARED = {"decode_seconds_per_token": 0.004, "load_seconds": 1.0}


def round_of_both(server, body):
    """Latencies of the hot model for a while before a load of the cold one, and during it."""
    server.cli("model", "unload", "cold")
    connection = harness.Connection(server.port)

    def measure(condition):
        latencies = []
        while condition():
            asked = time.perf_counter()
            connection.post("/v1/completions", {"model": "hot", **body})
            latencies.append(time.perf_counter() - asked)
        return latencies

    until = time.perf_counter() + BEFORE_SECONDS
    before = measure(lambda: time.perf_counter() < until)
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(server.complete, "cold", max_tokens=1)
        during = measure(lambda: not load.done())
        assert load.result()[0] == 200
    return before, during


def compared(directory, memory, models):
    server = warmset.Server(directory, memory=memory, reserve="64MiB", config=warmset.toml({"model": models}))
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
    with server:
        round_of_both(server, body)
        rounds = [round_of_both(server, body) for _ in range(ROUNDS)]
    before = [value for one, _ in rounds for value in one]
    during = [value for _, other in rounds for value in other]
    result = {"unit": "seconds of a request of 4 tokens", "requests_before": len(before), "requests_during": len(during)}
    for share in (50, 99):
        one, other = warmset.percentile(before, share), warmset.percentile(during, share)
        result |= {f"p{share}_before": round(one, 4), f"p{share}_during": round(other, 4),
                   f"p{share}_ratio": round(other / one, 3)}
    return result


def main():
    files = warmset.model_files()
    with harness.scratch() as directory:
        declared = [{"name": name, "engine": "synthetic", "source": warmset.synthetic_model(directory, name, size, **DECLARED)}
                    for name, size in (("hot", 64), ("cold", 65))]
        real = [{"name": name, "source": files[file], "context_tokens": 2048, "parallel": 1}
                for name, file in (("hot", "q4_1"), ("cold", "q8_0"))]
        claims = {
            "the_pool_itself": compared(f"{directory}/declared", "300MiB", declared),
            "shared_cores": compared(f"{directory}/real", "1GiB", real),
        }
    harness.report("interference", claims, model=files["q4_1"].name, threads=harness.THREADS, rounds=ROUNDS,
                   claim="p99 ratio of the pool itself at most 1.1")


if __name__ == "__main__":
    main()
