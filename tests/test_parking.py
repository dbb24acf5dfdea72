"""Running requests that give way to others of a higher class, and go on where they stopped, with real models."""

import http.client
import json
import os
import signal
import threading

import pytest
import warmset

LONG, OTHER = "long", "other"
TOKENS = 400
PROMPT = "Tell me a long story about a river, a stone and a lamp."
GREEDY = {"temperature": 0}
DRAWN = {"temperature": 0.8, "seed": 11, "top_p": 0.9, "frequency_penalty": 0.3}


class Stream(threading.Thread):
    """Reads one streamed completion: its text as it comes, its comments, its usage, and how it ended."""

    def __init__(self, server, **fields):
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=warmset.PATIENCE_SECONDS)
        body = {"model": LONG, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}, "service_tier": "flex", **fields}
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        self.pieces, self.comments, self.usage, self.error, self.complete = [], [], None, None, False
        self.start()

    def run(self):
        try:
            for line in self.connection.getresponse():
                self.take(line.decode().strip())
        except (http.client.HTTPException, OSError) as error:
            self.error = self.error or repr(error)

    def take(self, line):
        if line.startswith(":"):
            self.comments.append(line)
        elif line == "data: [DONE]":
            self.complete = True
        elif line.startswith("data:"):
            chunk = json.loads(line[5:])
            self.error = chunk.get("error") or self.error
            self.usage = chunk.get("usage") or self.usage
            self.pieces.extend(choice["text"] for choice in chunk.get("choices", ()) if choice["text"])

    def until(self, pieces):
        warmset.wait_for(lambda: len(self.pieces) >= pieces or not self.is_alive(), f"{pieces} pieces of text",
                         progress=lambda: len(self.pieces))
        assert len(self.pieces) >= pieces, (self.error, self.comments)

    def text(self):
        warmset.wait_for(lambda: not self.is_alive(), "it ends", progress=lambda: len(self.pieces))
        self.join()
        assert self.complete and self.error is None, (self.error, self.comments[-3:])
        # What is found of the same prompt another time is no matter of parking.
        del self.usage["prompt_tokens_details"]
        return "".join(self.pieces), self.usage

    def parks(self):
        return self.comments.count(": parked")

    def waits_for_park(self):
        """How often it was parked, once its reader has heard of it."""
        warmset.wait_for(lambda: self.parks() or not self.is_alive(), "it is parked")
        return self.parks()


@pytest.fixture(scope="module")
def server(module_pool, models):
    """Two models of which each fits with room for some states beside it, and both do not."""
    entries = [
        {"name": LONG, "source": str(models["q4_1"]), "context_tokens": 2048, "parallel": 1},
        {"name": OTHER, "source": str(models["q8_0"]), "context_tokens": 2048, "parallel": 1},
    ]
    # One thread: steps of several are made at the pace of the slowest on a busy machine.
    return module_pool(memory="430MiB", reserve="128MiB", models=entries, worker={"cores": 1})


def critical(server, tokens=1):
    status, _, body = server.complete(OTHER, "A lamp is", tokens, service_tier="priority", temperature=0)
    assert status == 200, body
    return body


def parked(server):
    return server.metric("warmset_requests_parked_total", model=LONG)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_batch_that_is_parked_three_times_says_what_it_says_undisturbed(server, sampling):
    alone = Stream(server, **sampling).text()
    before = parked(server)
    with warmset.Events(server) as events:
        stream = Stream(server, **sampling)
        for park in range(3):
            stream.until(60 * (park + 1) + len(stream.pieces) % 7)
            critical(server)
        assert stream.text() == alone
        kinds = lambda: [event["type"] for event in events.all()]  # noqa: E731
        warmset.wait_for(lambda: kinds().count("request_resumed") >= 3, lambda: f"all of it is told: {kinds()}")
    assert alone[1]["completion_tokens"] == TOKENS
    assert parked(server) - before == 3
    assert stream.parks() >= 3, stream.comments
    assert kinds().count("request_parked") == kinds().count("request_resumed") == 3


def test_the_only_sequence_of_a_model_goes_to_a_higher_class(server):
    alone = Stream(server, **GREEDY).text()
    before = parked(server)
    stream = Stream(server, **GREEDY)
    stream.until(50)
    status, _, body = server.complete(LONG, "A lamp is", 20, service_tier="priority", **GREEDY)
    assert status == 200, body
    assert not stream.complete, "it was not waited for"
    assert stream.text() == alone
    assert (parked(server) - before, stream.parks()) == (1, 1)


def test_a_caller_who_does_not_stream_just_waits(server):
    alone = Stream(server, **GREEDY).text()
    before, answer = parked(server), {}

    def ask():
        answer["body"] = server.complete(LONG, PROMPT, TOKENS, service_tier="flex", ignore_eos=True, **GREEDY)

    caller = threading.Thread(target=ask)
    caller.start()
    warmset.wait_for(lambda: server.metric("warmset_running_requests", model=LONG) == 1, "it runs")
    critical(server)
    caller.join(warmset.PATIENCE_SECONDS)
    status, _, body = answer["body"]
    del body["usage"]["prompt_tokens_details"]
    assert (status, body["choices"][0]["text"], body["usage"]) == (200, *alone)
    assert parked(server) - before == 1


def test_an_engine_that_is_killed_loses_nobody_who_is_parked(server):
    alone = Stream(server, **DRAWN).text()
    stream = Stream(server, **DRAWN)
    stream.until(50)
    higher = Stream(server, model=OTHER, service_tier="priority", max_tokens=1500, **GREEDY)
    higher.until(3)
    assert stream.waits_for_park() == 1
    line = next(entry for entry in server.ledger()["entries"] if entry["name"] == LONG)
    assert (line["parked"], line["waiting"]) == (1, 1)
    assert server.memory()["kv"] > 0
    for pid in server.engines():
        os.kill(pid, signal.SIGKILL)
    higher.join(warmset.PATIENCE_SECONDS)
    assert not higher.complete
    assert stream.text() == alone


def test_a_caller_who_leaves_while_parked_leaves_nothing_behind(server):
    stream = Stream(server, **GREEDY)
    stream.until(50)
    higher = Stream(server, model=OTHER, service_tier="priority", max_tokens=300, **GREEDY)
    higher.until(3)
    assert stream.waits_for_park() == 1
    stream.connection.sock.shutdown(2)
    warmset.wait_for(lambda: server.metric("warmset_parked_requests") == 0, "nobody is parked")
    higher.text()
    warmset.wait_for(lambda: server.metric("warmset_running_requests") == 0, "nobody runs")


def test_parking_can_be_switched_off(pool, models):
    entries = [{"name": name, "source": str(models[kind]), "context_tokens": 2048, "parallel": 1}
               for name, kind in [(LONG, "q4_1"), (OTHER, "q8_0")]]
    server = pool(memory="430MiB", reserve="128MiB", models=entries, worker={"cores": 1}, residency={"park": False})
    stream = Stream(server, max_tokens=150, **GREEDY)
    stream.until(10)
    critical(server)
    assert len(stream.pieces) > 100, "it ran on to its end first"
    stream.text()
    assert parked(server) == 0
