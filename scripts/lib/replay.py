"""A recorded or made-up demand, played to a real `warmset serve` in less time than it took.

The demand is what `warmset sim` replays, request by request. Models are synthetic: they declare their bytes and take their
times divided by the speed, while the server's own clock goes as many times as fast.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import warmset

MODEL_BYTES = 1 << 30
RESERVE_BYTES = 1 << 30
# Requests at once: open loop, so that a full pool of callers would be late, which is reported.
CALLERS = 512
SEQUENCES = 8
# As many as in the simulation: threads are no matter where nothing is computed.
CORES = 16
# The most a model may have running at once; what is beyond it waits in the gateway.
CONCURRENCY = 64
WAITING_MAX = 100_000
# Swaps that a calibration looks at.
CALIBRATION_SWAPS = 48
# A start of midnight, as in the simulation: a whole day then has one date.
MIDNIGHT_MARGIN_SECONDS = 60
SAY_SECONDS = 30


def simulate(scenario, *options, seed=1, trace=None):
    """The document of `warmset sim`, with the demand itself as (second, model) under "demand"."""
    with tempfile.TemporaryDirectory(prefix="warmset-demand-") as directory:
        path = Path(directory) / "demand.json"
        arguments = ["sim", str(scenario), "--seed", str(seed), "--demand", str(path), "--json", *options]
        arguments += ["--trace", str(trace)] if trace else []
        document = json.loads(warmset.run_command(arguments, timeout=600).stdout)
        document["demand"] = json.loads(path.read_text())["requests"]
    return document


def name_of(number):
    return f"model-{number:03d}"


def pool(directory, models, slots, speed, load_seconds, run_seconds, residency=None, pinned=()):
    """A server with room for so many of the models. Seconds are the machine's, not those of the demand."""
    tables = []
    for number in range(models):
        # A byte less each, so that every file and so every digest differs.
        source = Path(directory) / "models" / f"{name_of(number)}.json"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(json.dumps({"host_bytes": MODEL_BYTES - number, "allocate": False, "load_seconds": load_seconds,
                                      "decode_seconds_per_token": run_seconds}))
        tables.append({"name": name_of(number), "source": source, "engine": "synthetic", "parallel": SEQUENCES,
                       "max_concurrency": CONCURRENCY, "pin": number in pinned})
    config = {"gateway": {"queue_limit": WAITING_MAX, "queue_limit_per_model": WAITING_MAX},
              "worker": {"cores": CORES}, "residency": residency or {}, "model": tables}
    return warmset.Server(Path(directory) / "server", memory=RESERVE_BYTES + slots * MODEL_BYTES, reserve=RESERVE_BYTES,
                          config=warmset.toml(config), arguments=["--clock-speed", str(speed)],
                          environment={"TZ": midnight_zone()})


def put_ahead(server):
    """Puts a server and its engines, which have a session of their own, ahead of other programs where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{server.pid}/autogroup").write_text("-10")


def midnight_zone():
    """The time zone in which a day has just begun."""
    past = (int(time.time()) % 86_400 - MIDNIGHT_MARGIN_SECONDS) % 86_400
    return f"REPLAY+{past // 3600:02d}:{past // 60 % 60:02d}:{past % 60:02d}"


@dataclass
class Played:
    """What callers saw."""

    starts: Counter = field(default_factory=Counter)
    cold_by_model: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)
    cold_seconds: list = field(default_factory=list)
    late_seconds: list = field(default_factory=list)


def ask(server, model):
    """One request of one token: how it was started, and how long it took."""
    asked = time.perf_counter()
    status, headers, body = server.complete(name_of(model))
    if status != 200:
        raise RuntimeError(f"{status}: {body}")
    return headers["warmset-start"], time.perf_counter() - asked


def play(server, demand, speed, label="", say=False):
    """Sends every request at its second divided by the speed, whether or not earlier ones were answered."""
    played, began = Played(), time.perf_counter()

    def one(due, model):
        played.late_seconds.append(time.perf_counter() - due)
        try:
            start, seconds = ask(server, model)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the request failed
            played.failures.append(f"{name_of(model)}: {error}")
            return
        played.starts[start] += 1
        if start == "cold":
            played.cold_by_model[name_of(model)] += 1
            played.cold_seconds.append(seconds)

    said = began
    with ThreadPoolExecutor(CALLERS) as callers:
        for number, (second, model) in enumerate(demand):
            due = began + second / speed
            time.sleep(max(0.0, due - time.perf_counter()))
            callers.submit(one, due, model)
            if say and time.perf_counter() - said > SAY_SECONDS:
                said = time.perf_counter()
                print(f"{label}: {number} of {len(demand)} requests, {dict(played.starts)}", file=sys.stderr)
    return played


def calibrate(speed, run_seconds):
    """Seconds that are not declared, here and now: of a load (its process), and of the place it waits for (the end of another)."""
    with tempfile.TemporaryDirectory(prefix="warmset-calibrate-") as directory:
        with pool(directory, CALIBRATION_SWAPS, 1, speed, 0.0, run_seconds, {"forecast": False}) as server:
            put_ahead(server)
            pairs = [(ask(server, model)[1], ask(server, model)[1]) for model in range(CALIBRATION_SWAPS)]
            load = counted(server, 2 * CALIBRATION_SWAPS)["load_seconds_mean"] / speed
    swap = statistics.mean(cold - warm for cold, warm in pairs)
    return load, max(0.0, swap - load)


def counted(server, requests):
    """What the server's own metrics say of the same requests, once it has counted all of them."""
    def all_of_them():
        samples = server.metrics()
        starts, outcomes = Counter(), Counter()
        for (name, labels), value in samples.items():
            if name == "warmset_requests_total":
                starts[dict(labels)["start"]] += int(value)
                outcomes[dict(labels)["outcome"]] += int(value)
        return (samples, starts, outcomes) if sum(starts.values()) >= requests else None

    samples, starts, outcomes = warmset.wait_for(all_of_them, "every request is counted")
    total = lambda wanted, **labels: sum(
        value for (name, pairs), value in samples.items() if name == wanted and set(labels.items()) <= pairs)
    loads = total("warmset_model_loads_total", outcome="ok")
    load_seconds = total("warmset_model_load_seconds_sum")
    preloads = {outcome: int(total("warmset_model_preloads_total", outcome=outcome)) for outcome in ("used", "late", "wasted")}
    return {"starts": dict(starts), "outcomes": dict(outcomes), "loads": int(loads),
            "loads_failed": int(total("warmset_model_loads_total", outcome="failed")),
            "load_seconds_mean": load_seconds / max(loads, 1), "preloads": preloads}
