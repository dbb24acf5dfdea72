"""Ten models over five real files in memory for about three: 500 requests from eight official clients, popularity by Zipf.

No request fails, every answer names the digest that its model has, and the ledger keeps to the budget throughout and to
what the operating system says at rest.
"""

import random
import threading
from collections import Counter

import openai
import pytest
import warmset

REQUESTS = 500
CLIENTS = 8
ZIPF_EXPONENT = 1.1
MEMORY = "900MiB"
RESERVE = "128MiB"
# What a page that two processes touch differently, or an allocator's last page, may make the figures differ by.
REST_TOLERANCE = 0.02
# How much of the budget request buffers may take from the reserve for a moment.
GROWTH_TOLERANCE = 0.01


@pytest.fixture(scope="module")
def server(module_pool, models):
    specs = [
        {"name": f"{name}-{context}", "source": path, "context_tokens": context, "parallel": 2}
        for name, path in models.items()
        for context in (256, 384)
    ]
    return module_pool(memory=MEMORY, reserve=RESERVE, models=specs)


def zipf_sequence(names, count, seed):
    weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in range(len(names))]
    return random.Random(seed).choices(names, weights, k=count)


class Client(threading.Thread):
    """One caller who takes the next request as soon as its last is answered."""

    def __init__(self, server, requests):
        super().__init__(daemon=True)
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=280, max_retries=2)
        self.requests = requests
        self.answers = []
        self.failures = []

    def run(self):
        for index, model in iter(lambda: next(self.requests, None), None):
            try:
                self.answers.append((model, *self.ask(index, model)))
            except openai.OpenAIError as error:
                self.failures.append(f"{model}: {error!r}")

    def ask(self, index, model):
        options = {"model": model, "max_tokens": 3, "temperature": 0}
        messages = [{"role": "user", "content": f"Number {index}."}]
        if index % 3 == 0:
            raw = self.client.chat.completions.with_raw_response.create(messages=messages, stream=True, **options)
            chunks = list(raw.parse())
            assert any(choice.finish_reason for chunk in chunks for choice in chunk.choices), model
            return raw.headers["warmset-model-digest"], raw.headers["warmset-start"], chunks[0].system_fingerprint
        raw = self.client.chat.completions.with_raw_response.create(messages=messages, **options)
        return raw.headers["warmset-model-digest"], raw.headers["warmset-start"], raw.parse().system_fingerprint


class Shared:
    """An iterator that several threads may share."""

    def __init__(self, items):
        self.items = iter(items)
        self.lock = threading.Lock()

    def __next__(self):
        with self.lock:
            return next(self.items)


@pytest.mark.timeout(3000)
def test_ten_models_share_memory_for_three(server):
    names = [model["name"] for model in server.cli_json("model", "list")["models"]]
    assert len(names) == 10
    digests = {name: server.digest(name) for name in names}
    assert len(set(digests.values())) == 10
    random.Random(5).shuffle(names)
    requests = Shared(enumerate(zipf_sequence(names, REQUESTS, seed=2)))
    clients = [Client(server, requests) for _ in range(CLIENTS)]
    with warmset.Sampler(server.memory) as sampler:
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    failures = [failure for client in clients for failure in client.failures]
    answers = [answer for client in clients for answer in client.answers]
    assert not failures, failures[:5]
    assert len(answers) == REQUESTS
    for model, digest, _, fingerprint in answers:
        assert digest == digests[model], model
        assert fingerprint == "fp_" + digest.removeprefix("sha256:")[:12]

    assert len(sampler.samples) > 50
    for memory in sampler.samples:
        models = sum(memory[state] for state in ("loading", "resident", "unloading"))
        assert models + memory["overhead"] <= memory["capacity"], memory
        # A model that grows while it runs (llama.cpp touches its buffers as batches grow) takes that from the reserve,
        # which is there for it, until the deficit is evicted.
        assert models <= (memory["capacity"] - memory["reserve"]) * (1 + GROWTH_TOLERANCE), memory
    starts = Counter(start for _, _, start, _ in answers)
    assert starts["warm"] > 0 and starts["cold"] > 0, starts
    # More models were wanted than fit, so somebody had to leave.
    assert server.metric("warmset_model_evictions_total", reason="memory") > 0


def test_at_rest_the_ledger_is_what_the_operating_system_says(server):
    warmset.wait_for(lambda: at_rest(server), "nothing runs, loads or unloads")

    def compare():
        engines = loaded_engines(server)
        private = sum(map(warmset.private_bytes, engines))
        shared = sum(warmset.artifact_bytes(engines, server.data).values())
        return server.memory()["resident"], private + shared

    # The ledger is measured at intervals: it agrees once it has looked after the last request.
    def agrees():
        ledger, system = compare()
        return abs(ledger - system) <= REST_TOLERANCE * system

    warmset.wait_for(agrees, lambda: f"ledger and operating system agree within 2 %: {compare()}", pause=0.5)


def loaded_engines(server):
    """Engine processes that map an artifact; the spare one does not."""
    return [pid for pid in server.engines() if warmset.artifact_bytes([pid], server.data)]


def at_rest(server):
    memory = server.memory()
    running = server.metric("warmset_running_requests")
    return memory["loading"] == memory["unloading"] == running == 0
