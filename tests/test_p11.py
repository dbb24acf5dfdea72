"""200 rarely used models in memory for eight: five pinned, three chosen by worth, four requests at once per model, one of
those slots kept for critical work. The models are synthetic, so that bytes and times are exact; the processes are real.
"""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import warmset
from warmset import MEBIBYTE

MODELS = 200
PINNED = 5
FIT = 8
MODEL_MEBIBYTES = 24
# What the process of an engine holds beside its model, with room to spare: two megabytes today.
PROCESS_MEBIBYTES = 3
CONCURRENCY = 4
NAMES = [f"model-{index:03d}" for index in range(MODELS)]


@pytest.fixture(scope="module")
def server(module_pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("synthetic")
    specs = []
    for index, name in enumerate(NAMES):
        # A few bytes more each, so that every file and so every digest differs.
        source = warmset.synthetic_model(
            directory, name, MODEL_MEBIBYTES + index / MEBIBYTE, load_seconds=0.02, decode_seconds_per_token=0.005
        )
        specs.append(
            {
                "name": name,
                "source": source,
                "engine": "synthetic",
                "pin": index < PINNED,
                "parallel": CONCURRENCY,
                "max_concurrency": CONCURRENCY,
                "critical_reserve": 1,
            }
        )
    room = FIT * (MODEL_MEBIBYTES + PROCESS_MEBIBYTES)
    return module_pool(memory=f"{room + 64}MiB", reserve="64MiB", models=specs)


def states(server):
    return {model["name"]: model["state"] for model in server.admin_json("/admin/v1/models")["models"]}


def ready(server):
    return {name for name, state in states(server).items() if state == "ready"}


def test_the_pinned_are_loaded_at_start_and_stay(server):
    pinned = set(NAMES[:PINNED])
    warmset.wait_for(lambda: pinned <= ready(server), lambda: f"the pinned are ready: {sorted(ready(server))}")


def test_two_hundred_models_are_served_from_memory_for_eight(server):
    choice = random.Random(11)
    weights = [1 / (rank + 1) for rank in range(MODELS)]
    sequence = choice.choices(NAMES, weights, k=400) + NAMES
    choice.shuffle(sequence)
    counts = []

    def sample():
        counts.append(len(server.engines()))
        now = states(server)
        return {name for name in NAMES[:PINNED] if now[name] != "ready"}, server.memory()

    with warmset.Sampler(sample, pause=0.1) as sampler, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda name: (name, *server.complete(name, max_tokens=2)), sequence))
    failed = [(name, status, body) for name, status, _, body in answers if status != 200]
    assert not failed, failed[:3]
    digests = {model["name"]: model["digest"] for model in server.admin_json("/admin/v1/models")["models"]}
    assert all(headers["warmset-model-digest"] == digests[name] for name, _, headers, _ in answers)
    assert not set().union(*(missing for missing, _ in sampler.samples)), "a pinned model was not ready"
    # A spare process may wait beside the eight.
    assert max(counts) <= FIT + 1, Counter(counts)
    for _, memory in sampler.samples:
        assert warmset.used_bytes(memory) <= memory["capacity"], memory


def test_the_three_free_places_go_to_the_models_worth_most(server):
    favourites = set(NAMES[50:53])
    choice = random.Random(3)

    # Nine requests of ten are for three models; the tenth for any other.
    def settled():
        for _ in range(30):
            name = choice.choice(sorted(favourites)) if choice.random() < 0.9 else choice.choice(NAMES[60:])
            assert server.complete(name)[0] == 200
        for name in sorted(favourites):
            assert server.complete(name)[0] == 200
        return favourites <= ready(server)

    warmset.wait_for(settled, lambda: f"the favourites are resident: {sorted(ready(server))}")
    # One stranger takes at most one place, and never all three.
    assert server.complete(NAMES[199])[0] == 200
    assert len(favourites & ready(server)) >= 2


def test_one_slot_of_four_is_kept_for_critical_work(server):
    name = NAMES[0]
    digest = server.digest(name)

    def in_flight():
        return next(entry["in_flight"] for entry in server.ledger()["entries"] if entry["digest"] == digest)

    with ThreadPoolExecutor(16) as threads:
        with warmset.Sampler(in_flight, pause=0.01) as sampler:
            # Two seconds each, in turns of three: long after the critical one, whatever the machine does meanwhile.
            standard = [threads.submit(server.complete, name, max_tokens=400) for _ in range(10)]
            warmset.wait_for(lambda: in_flight() == CONCURRENCY - 1, "three of four slots are in use")
            asked = time.monotonic()
            status, _, _ = server.complete(name, max_tokens=1, service_tier="priority")
            critical_seconds = time.monotonic() - asked
            waiting = sum(not future.done() for future in standard)
            assert all(future.result()[0] == 200 for future in standard)
        all_seconds = time.monotonic() - asked
    assert status == 200
    assert max(sampler.samples) <= CONCURRENCY
    # It did not stand in the queue: others who came before it were still waiting or running when it was done.
    assert waiting > 0, (critical_seconds, all_seconds)
