"""What `warmset sim` says of an engine's callers, beside what callers of the real one saw.

The steps of SmolLM2 are measured first, one kind at a time: prompts of several lengths alone, one to eight answers at a time, behind short and
long prompts. The cost model is fitted from these alone. Then requests of other lengths come at random moments, at two rates, to a
real `warmset serve` and, the very same, to the simulator at the level of steps. Claim: p50 of the first token and of the whole
answer within 15 %; p99 is told, too, of so few requests.
"""

import argparse
import http.client
import json
import random
import sys
import threading
import time

import harness
import replay
import warmset

NAME = "m"
CONTEXT_TOKENS = 1536
SEQUENCES = 8
# What the engine composes its steps by: crates/engine/src/llama.
STEP_TOKENS, BESIDE_TOKENS = 512, 128
PROMPTS = (32, 64, 128, 256, 512)
AT_ONCE = (1, 2, 4, 8)
DECODED_TOKENS = 48
TOLERANCE = 0.15
CLAIMED = ("time_to_first_token_seconds", "end_to_end_seconds")


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run sim_live", description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="0.5,1.0", help="requests per second")
    parser.add_argument("--requests", type=int, default=90, help="requests at each rate")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind of step")
    given = parser.parse_args()
    given.rates = [float(rate) for rate in given.rates.split(",")]
    return given


def times(port, prompt, tokens):
    """When each piece of a stream came, after the request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    asked = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
    found = [time.perf_counter() - asked for line in response if line.startswith(b"data: {") and harness.has_text(json.loads(line[6:]))]
    connection.close()
    return found


def measured_steps(port, generator, rounds):
    """Steps as the simulator takes them, each with its seconds."""
    samples = []
    for _ in range(rounds):
        for length in PROMPTS:
            first = times(port, harness.random_tokens(generator, length), 2)[0]
            samples.append({"prefill_tokens": length, "seconds": first})
        for count in AT_ONCE:
            for length in (16, 512):
                prompts = [harness.random_tokens(generator, length) for _ in range(count)]
                streams = harness.together(prompts, lambda prompt: times(port, prompt, DECODED_TOKENS))[0]
                # All of them generate from the last first token to the first last one.
                begins, ends = max(one[0] for one in streams), min(one[-1] for one in streams)
                steps = step_seconds(streams, begins, ends)
                context = length + DECODED_TOKENS // 2
                samples.append({"sequences": count, "context_tokens": count * context, "seconds": steps})
    return samples


def step_seconds(streams, begins, ends):
    """Seconds of a step in which all generate: of the pieces that came in that time, by their number."""
    counts = [sum(begins <= at <= ends for at in one) for one in streams]
    return (ends - begins) / max(1, max(counts) - 1)


def drawn(generator, rate, count):
    """Moments, prompt tokens and answer tokens."""
    at, requests = 0.0, []
    for _ in range(count):
        at += generator.expovariate(rate)
        requests.append((at, generator.randint(24, 200), generator.randint(4, 40)))
    return requests


def live(port, requests, generator):
    """Sends each at its moment; first tokens and whole answers."""
    prompts = [harness.random_tokens(generator, prompt) for _, prompt, _ in requests]
    found, began = [None] * len(requests), time.perf_counter() + 0.5

    def one(number):
        at, _, tokens = requests[number]
        time.sleep(max(0.0, began + at - time.perf_counter()))
        found[number] = times(port, prompts[number], tokens)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(found):
        raise RuntimeError("not every request was answered")
    return {"time_to_first_token_seconds": [one[0] for one in found], "end_to_end_seconds": [one[-1] for one in found]}


def scenario(samples):
    lines = [
        'description = "SmolLM2 on this machine, from measured steps"', "requests_per_second = [1.0]", "[batching]", "replicas = 1",
        "[batching.demand]", "requests = 1", "prompt_tokens = 1", "output_tokens = 1", "[batching.engine]",
        f"step_tokens = {STEP_TOKENS}", f"prefill_tokens_beside = {BESIDE_TOKENS}", f"max_sequences = {SEQUENCES}",
        f"kv_tokens = {SEQUENCES * CONTEXT_TOKENS}", "prefix_cache = false",
    ]
    for sample in samples:
        lines += ["[[batching.sample]]", *(f"{key} = {value}" for key, value in sample.items())]
    return "\n".join(lines) + "\n"


def table(requests):
    """The same requests as a table of Azure's form."""
    row = lambda at, prompt, tokens: f"2026-01-01 {int(at // 3600):02d}:{int(at // 60) % 60:02d}:{at % 60:010.7f},{prompt},{tokens}"
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(row(*request) for request in requests)]) + "\n"


def simulated(directory, samples, requests):
    path, trace = f"{directory}/live.toml", f"{directory}/requests.csv"
    for name, text in ((path, scenario(samples)), (trace, table(requests))):
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    return json.loads(warmset.run_command(["sim", path, "--trace", trace, "--compare", "step", "--json"]).stdout)


def main():
    given, generator = arguments(), harness.generator()
    model = warmset.model_files()["q4_1"]
    tables = {"model": [{"name": NAME, "source": model, "context_tokens": CONTEXT_TOKENS, "parallel": SEQUENCES,
                         "max_concurrency": SEQUENCES, "pin": True}], "kv": {"host": 0}}
    rows, claims = [], {}
    with harness.scratch() as directory:
        server = warmset.Server(directory, memory="2GiB", reserve="256MiB", config=warmset.toml(tables))
        with server:
            replay.put_ahead(server)
            times(server.port, harness.random_tokens(generator, 64), 8)  # warm
            samples = measured_steps(server.port, generator, given.rounds)
            for rate in given.rates:
                print(f"{given.requests} requests, {rate} a second", file=sys.stderr)
                requests = drawn(random.Random(int(rate * 1000)), rate, given.requests)
                seen = live(server.port, requests, generator)
                document = simulated(directory, samples, requests)
                row, = document["rows"]
                compared = {}
                for what in CLAIMED:
                    said = (row["latency"] or {}).get(what) or {}
                    real = {share: warmset.percentile(seen[what], share) for share in (50, 99)}
                    compared[what] = {
                        f"p{share}": {"live": round(real[share], 4), "simulated": round(said.get(f"p{share}", 0.0), 4),
                                      "ratio": round(said.get(f"p{share}", 0.0) / real[share], 3)}
                        for share in real
                    }
                    claims[f"{rate} a second, {what} p50 within 15 %"] = abs(compared[what]["p50"]["ratio"] - 1) <= TOLERANCE
                rows.append({"requests_per_second": rate, "verdict": row["verdict"],
                             "offered_share_of_capacity": row["offered_share_of_capacity"], **compared})
    harness.report("sim_live", claims, model=model.name, threads=harness.THREADS, samples=samples,
                   fit=document["settings"]["fit"], rows=rows, peer=None)


if __name__ == "__main__":
    main()
