"""Host memory that models and KV share by worth, against every fixed split of it, on work that shifts between both.

Synthetic engines of declared bytes and times, so that several servers play the same requests at the same moments and only their
decisions differ. Three kinds of phases: many models are asked for in turn; long conversations with few; both. One server moves the
boundary as it always does, the others have a fixed part for KV (`slices` keep models out of it). Scored are the seconds that
callers wait for their first token beyond what it takes where everything is warm. Claim: less with the moving boundary than with
every fixed split.
"""

import argparse
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import harness
import warmset

MODEL_MEBIBYTES = 16
MODELS = 14
CHATS = 3
LOAD_SECONDS = 1.0
PREFILL_SECONDS = 0.001
TOKEN_BYTES = 16 << 10
SHARED_MEBIBYTES = 192
RESERVE_MEBIBYTES = 64
BLOCK_TOKENS = 64
FIRST_TOKENS, TURN_TOKENS = 8 * BLOCK_TOKENS, BLOCK_TOKENS // 2
TURNS_MAX = 24
SHORT_TOKENS = 16
PARTS_FOR_KV = (0.0, 0.25, 0.5, 0.75)
PHASES = ("models", "conversations", "both", "models", "conversations")


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run kv_currency", description=__doc__.splitlines()[0])
    parser.add_argument("--phase-seconds", type=float, default=36)
    parser.add_argument("--requests-per-second", type=float, default=2.0)
    parser.add_argument("--half-life-seconds", type=float, default=20, help="demand_half_life_seconds: phases are short, too")
    parser.add_argument("--protection-seconds", type=float, default=3, help="priority_protection_seconds")
    parser.add_argument("--seed", type=int, default=20)
    return parser.parse_args()


def zipf(draw, count, exponent=0.7):
    return draw.choices(range(count), [1 / (rank + 1) ** exponent for rank in range(count)])[0]


class Conversations:
    """Each goes on with every turn, and begins anew when it has become long."""

    def __init__(self, draw, count):
        self.draw, self.said, self.turns = draw, [None] * count, [0] * count
        for number in range(count):
            self.begin(number)

    def begin(self, number):
        self.said[number], self.turns[number] = self.tokens(FIRST_TOKENS), 0

    def tokens(self, count):
        return self.draw.choices(harness.TOKEN_IDS, k=count)

    def next(self, number):
        if self.turns[number] == TURNS_MAX:
            self.begin(number)
        self.turns[number] += 1
        self.said[number] = self.said[number] + self.tokens(TURN_TOKENS)
        return f"chat{number % CHATS}", self.said[number]


def workload(given):
    """(second, phase, name of the model, prompt), the same for every server."""
    draw = random.Random(given.seed)
    requests, at = [], 0.0
    for number, phase in enumerate(PHASES):
        # Whom people talk to changes from phase to phase.
        models = draw.sample(range(MODELS), MODELS if phase == "models" else 5)
        conversations = Conversations(draw, 14 if phase == "conversations" else 6)
        end = at + given.phase_seconds
        while at < end:
            talks = phase == "conversations" or (phase == "both" and draw.random() < 0.5)
            if talks:
                one = conversations.next(zipf(draw, len(conversations.said), 0.4))
            else:
                one = f"model{models[zipf(draw, len(models))]}", draw.choices(harness.TOKEN_IDS, k=SHORT_TOKENS)
            requests.append((at, number, *one))
            at += draw.expovariate(given.requests_per_second)
        at = end
    return requests


def server(directory, name, given, kv_mebibytes=None):
    """With the boundary where it always is, moved by worth, or with so much for KV."""
    fields = {"megabytes": MODEL_MEBIBYTES, "allocate": False, "load_seconds": LOAD_SECONDS, "prefill_seconds_per_token": PREFILL_SECONDS}
    names = [(f"model{number}", {}) for number in range(MODELS)]
    names += [(f"chat{number}", {"kv_bytes_per_token": TOKEN_BYTES}) for number in range(CHATS)]
    pool = {"pool": "models"} if kv_mebibytes else {}
    models = [{"name": model, "engine": "synthetic", "context_tokens": 4096, "parallel": 2, **pool,
               # The seed is in the bytes: otherwise all would be one artifact.
               "source": warmset.synthetic_model(f"{directory}/specs", model, **fields, **more,
                                                 decode_seconds_per_token=1e-6 * (1 + place))}
              for place, (model, more) in enumerate(names)]
    worker = {}
    if kv_mebibytes:
        worker["slices"] = [{"name": "models", "memory": f"{SHARED_MEBIBYTES - kv_mebibytes}MiB"}]
    host = SHARED_MEBIBYTES if kv_mebibytes is None else kv_mebibytes
    tables = {"worker": worker, "kv": {"host": f"{host}MiB" if host else 0, "disk": 0}, "model": models,
              "residency": {"demand_half_life_seconds": given.half_life_seconds,
                            "priority_protection_seconds": given.protection_seconds}}
    return warmset.Server(f"{directory}/{name}", memory=f"{SHARED_MEBIBYTES + RESERVE_MEBIBYTES}MiB",
                          reserve=f"{RESERVE_MEBIBYTES}MiB", config=warmset.toml(tables))


def play(one, requests, began):
    """Asks each at its time; (phase, seconds) of all."""
    local, found = threading.local(), [None] * len(requests)

    def ask(number, phase, model, tokens):
        if not hasattr(local, "connection"):
            local.connection = harness.Connection(one.port)
        asked = time.perf_counter()
        local.connection.post("/v1/completions", {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0})
        found[number] = phase, time.perf_counter() - asked

    with ThreadPoolExecutor(32) as threads:
        waiting = []
        for number, (at, *rest) in enumerate(requests):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            waiting.append(threads.submit(ask, number, *rest))
        for request in waiting:
            request.result()
    return found


def figures(one, found):
    metrics = one.admin_json("/admin/v1/kv")
    models = metrics.get("models", [])
    tokens = {tier: sum(model["hit_tokens"][tier] for model in models) for tier in ("device", "host")}
    seconds = [seconds for _, seconds in found]
    return {
        "seconds": round(sum(seconds), 1),
        "by_phase": [round(sum(seconds for phase, seconds in found if phase == number), 1) for number in range(len(PHASES))],
        "p50": round(warmset.percentile(seconds, 50), 4), "p99": round(warmset.percentile(seconds, 99), 3),
        "loads": round(one.metric("warmset_model_loads_total")), "hit_tokens": tokens,
    }  # fmt: skip


def main():
    given = arguments()
    requests = workload(given)
    with harness.scratch() as directory:
        servers = {"moving": server(directory, "moving", given)}
        for part in PARTS_FOR_KV:
            servers[f"fixed_{part:.0%}_for_kv"] = server(directory, f"fixed{part}", given, int(part * SHARED_MEBIBYTES))
        try:
            for one in servers.values():
                one.start()
            began = time.perf_counter() + 1
            with ThreadPoolExecutor(len(servers)) as threads:
                playing = {name: threads.submit(play, one, requests, began) for name, one in servers.items()}
                found = {name: figures(servers[name], one.result()) for name, one in playing.items()}
        finally:
            for one in servers.values():
                one.stop()
    best = min((one["seconds"], name) for name, one in found.items() if name != "moving")
    claims = {"ratio_to_the_best_fixed_split": round(found["moving"]["seconds"] / best[0], 3), "best_fixed_split": best[1], **found}
    harness.report("kv_currency", claims, phases=PHASES, requests=len(requests), **vars(given), shared_mebibytes=SHARED_MEBIBYTES,
                   model_mebibytes=MODEL_MEBIBYTES, load_seconds=LOAD_SECONDS, prefill_seconds_per_token=PREFILL_SECONDS,
                   kv_bytes_per_token=TOKEN_BYTES, claim="ratio below 1: seconds to the first token of all requests together")


if __name__ == "__main__":
    main()
