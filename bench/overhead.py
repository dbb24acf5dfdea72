"""What the server adds to a warm request.

With a synthetic engine whose work takes no time, everything a caller waits for is ours: HTTP, admission, queue, the way to
the engine's process and back. Claim: p50 below 1 ms. Beside it the same one-token request to a real model, ours and
llama.cpp's own server in turns, and the fastest thing the client can measure: a health probe.
"""

import statistics
import time

import harness
import warmset

REQUESTS = 2000
ROUNDS = 200
WARM_UP = 100
# The peer's threads spin for a while after their last work: whoever is measured next would pay for it.
PAUSE_SECONDS = 0.02


def seconds(call):
    asked = time.perf_counter()
    call()
    return time.perf_counter() - asked


def milliseconds(values):
    return {"p50_ms": round(statistics.median(values) * 1e3, 4), "p99_ms": round(warmset.percentile(values, 99) * 1e3, 4)}


def probe(connection):
    connection.connection.request("GET", "/health/live")
    connection.connection.getresponse().read()


def main():
    model = warmset.model_files()["q4_1"]
    with harness.scratch() as directory:
        synthetic = warmset.synthetic_model(directory, "instant", allocate=False)
        config = warmset.toml({"model": [
            {"name": "instant", "source": synthetic, "engine": "synthetic", "pin": True},
            {"name": "m", "source": model, "context_tokens": 1024, "parallel": 1, "pin": True}]})
        peer = harness.Peer(directory, "-m", model, "-c", 1024, "-np", 1, "-t", harness.THREADS, "-fa", "on")
        with warmset.Server(directory, memory="1GiB", config=config) as server, peer:
            ours, theirs = harness.Connection(server.port), harness.Connection(peer.port)
            body = {"prompt": "Hi", "max_tokens": 1, "temperature": 0}
            for _ in range(WARM_UP):
                ours.post("/v1/completions", {"model": "instant", **body})
            added = [seconds(lambda: ours.post("/v1/completions", {"model": "instant", **body})) for _ in range(REQUESTS)]
            floor = [seconds(lambda: probe(ours)) for _ in range(REQUESTS)]

            def one_token(connection):
                time.sleep(PAUSE_SECONDS)
                return seconds(lambda: connection.post("/v1/completions", {"model": "m", **body}))

            figures = harness.alternate(ROUNDS, lambda: one_token(ours), lambda: one_token(theirs))
    real = harness.compared([value * 1e3 for value in figures[0]], [value * 1e3 for value in figures[1]], "milliseconds, p50")
    del real["warmset_all"], real["peer_all"]
    claims = {"added_by_the_server": milliseconds(added), "client_and_socket_alone": milliseconds(floor), "one_token_real_model": real}
    harness.report("overhead", claims, model=model.name, requests=REQUESTS, claim="added p50 below 1 ms")


if __name__ == "__main__":
    main()
