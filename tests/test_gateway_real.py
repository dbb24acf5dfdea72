"""`warmset gateway` in front of real replicas: llama.cpp's server out of a Python package, a real model, OpenAI's client."""

import random
import signal
import subprocess
import threading
import urllib.request

import openai
import pytest
from warmset import ROOT, Gateway, free_ports, wait_for

PYTHON = ROOT / "build" / "xllamacpp-venv" / "bin" / "python"
SCRIPT = ROOT / "tests" / "servers" / "llama_server.py"
WORDS = "river stone paper window garden music winter letter silver market island summer engine forest".split()


class LlamaServer:
    """One replica: a process that can be killed and started again on its port."""

    def __init__(self, model, log):
        self.model, self.log, self.port = model, log, free_ports(1)[0]
        self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [PYTHON, SCRIPT, "--model", self.model, "--port", str(self.port), "--alias", "smollm"]
        command += ["--ctx-size", "4096", "--parallel", "4", "--threads", "1"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self

    def is_well(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture
def replicas(tmp_path, models):
    replicas = [LlamaServer(models["q4_0"], tmp_path / f"replica{number}.log").start() for number in range(2)]
    for replica in replicas:
        wait_for(replica.is_well, "the replica is well")
    yield replicas
    for replica in replicas:
        replica.kill()


@pytest.fixture
def gateway(tmp_path, replicas):
    gateway = Gateway(tmp_path / "gateway", [replica.url for replica in replicas]).start()
    yield gateway
    code = gateway.stop()
    log = gateway.log_path.read_text(errors="replace")
    assert code == 0 and "panicked at" not in log, log[-4000:]


def client_of(gateway):
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", timeout=120, max_retries=0)


def conversation(tenant, question, words=330):
    chance = random.Random(tenant)
    system = " ".join(chance.choice(WORDS) for _ in range(words))
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def test_prompts_are_found_where_the_decision_said(gateway):
    client = client_of(gateway)
    for turn in range(5):
        for tenant in range(4):
            answer = client.chat.completions.create(
                model="smollm", messages=conversation(tenant, f"Question {turn}?"), max_tokens=4, temperature=0
            )
            assert answer.choices[0].message.content
    decisions = gateway.decisions()
    assert len(decisions) == 20 and all(decision["outcome"] == "ok" for decision in decisions)
    for decision in decisions:
        # What was expected to be found of the prompt is what the replica found.
        expected = decision["expected_cached_tokens"] / decision["prompt_tokens"]
        found = decision["counted_cached_tokens"] / decision["counted_prompt_tokens"]
        assert abs(expected - found) < 0.1, decision
    # All but the first of each tenant, and the few that come when owners are planned anew.
    assert sum(decision["decision"] == "affinity" for decision in decisions) >= 10
    # Once one prompt was counted, the length of others is known.
    assert all(abs(d["prompt_tokens"] / d["counted_prompt_tokens"] - 1) < 0.1 for d in decisions[:-1]), decisions
    counted = sum(decision["counted_cached_tokens"] for decision in decisions)
    prompts = sum(decision["counted_prompt_tokens"] for decision in decisions)
    assert gateway.metric("warmset_tokens_total", model="smollm", kind="cached") == counted
    assert gateway.metric("warmset_tokens_total", model="smollm", kind="prompt") == prompts


def test_streams_are_as_the_replica_sends_them_and_metered_though_nobody_asked(gateway, replicas):
    client = client_of(gateway)
    asked = {"model": "smollm", "messages": conversation(1, "Count to five.", 20), "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content and all(chunk.choices for chunk in chunks)
    direct = openai.OpenAI(base_url=f"{replicas[0].url}/v1", api_key="unused", timeout=120, max_retries=0)
    plain = list(direct.chat.completions.create(stream=True, **asked))
    assert text == "".join(choice.delta.content or "" for chunk in plain for choice in chunk.choices)
    assert gateway.metric("warmset_tokens_total", kind="completion") == 2 * whole.usage.completion_tokens
    before = gateway.metric("warmset_tokens_total", kind="completion")
    # A caller that leaves is metered by what it got, and the replica stops at once.
    stream = client.chat.completions.create(stream=True, **{**asked, "max_tokens": 2000, "messages": conversation(2, "Tell.", 9)})
    got = [chunk for chunk, _ in zip(stream, range(6))]
    stream.close()
    wait_for(gateway.is_idle, "the request has ended")
    metered = gateway.metric("warmset_tokens_total", kind="completion") - before
    assert len(got) - 1 <= metered < 2000
    assert gateway.metric("warmset_requests_total", outcome="cancelled") == 1


def test_a_replica_is_killed_and_started_again_under_load(gateway, replicas):
    client, ended = client_of(gateway), threading.Event()
    answers, errors, lock = [], [], threading.Lock()

    def load(number):
        turn = 0
        while not ended.is_set():
            turn += 1
            messages = conversation(number, f"Question {turn}?", 40)
            asked = {"model": "smollm", "messages": messages, "max_tokens": 12, "temperature": 0}
            try:
                if turn % 2:
                    answer = client.chat.completions.create(**asked)
                    finished = answer.choices[0].finish_reason
                else:
                    finished = None
                    for chunk in client.chat.completions.create(stream=True, **asked):
                        finished = chunk.choices[0].finish_reason or finished
                with lock:
                    answers.append(finished)
            except openai.APIError as error:
                with lock:
                    errors.append(error)

    callers = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    victim = replicas[1]
    try:
        for _ in range(2):
            before = len(answers)
            wait_for(lambda: len(answers) > before + 12, "requests are answered")
            wait_for(lambda: gateway.views()[victim.url]["in_flight"] > 0, "the victim has something to do")
            victim.kill()
            before = len(answers)
            wait_for(lambda: len(answers) > before + 12, "the other one goes on")
            victim.start()
            wait_for(victim.is_well, "it is back")
            wait_for(lambda: gateway.views()[victim.url]["in_flight"] > 0, "it is asked again")
    finally:
        ended.set()
        for caller in callers:
            caller.join(120)
    # Each was answered as a whole or ended with an error that says what happened.
    assert all(finished in ("stop", "length") for finished in answers), answers
    assert all(error.code in ("engine_lost", "no_worker") for error in errors), errors
    assert len(errors) <= 2 * len(callers), errors
    wait_for(gateway.is_idle, "nothing is left")
    assert gateway.metric("warmset_requests_total") == len(answers) + len(errors)
    assert gateway.metric("warmset_requests_total", outcome="ok") == len(answers)
