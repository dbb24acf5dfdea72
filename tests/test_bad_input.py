"""Hostile and broken input against a live server: refused at the edge, named in the answer, felt by nobody else."""

import http.client
import json
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import openai
import pytest
import warmset
from warmset import MEBIBYTE, percentile, synthetic_model, wait_for

MODEL = "fine"


@pytest.fixture(scope="module")
def server(module_pool, models):
    return module_pool(memory="800MiB", reserve="128MiB", models=[{"name": MODEL, "source": models["q4_1"], "context_tokens": 512}])


@pytest.fixture(autouse=True)
def still_serves(request):
    """Whatever a test did to the shared server, it must still answer."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        status, _, body = server.complete(MODEL)
        assert status == 200, body


def raw(server, request, seconds=30):
    """Sends bytes and returns everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(request)
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
        return received


def requests_seen(server):
    return sum(value for (name, _), value in server.metrics().items() if name == "warmset_requests_total")


def error_of(body):
    error = json.loads(body)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


# 1: connections that never finish a header


def test_half_open_connections_are_closed_and_others_do_not_feel_them_E1(server):
    def latencies(count):
        found = []
        for _ in range(count):
            asked = time.monotonic()
            assert server.get("/v1/models")[0] == 200
            found.append(time.monotonic() - asked)
        return found

    before = descriptors(server)
    idle = latencies(200)
    slow = []
    for index in range(1000):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        if index % 2:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        slow.append(connection)
    ended = threading.Event()

    def drip():
        while not ended.wait(1.0):
            for connection in slow[1::2]:
                try:
                    connection.send(b"x")
                except OSError:
                    pass

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    try:
        busy = latencies(200)
        assert server.complete(MODEL)[0] == 200
        # All of them are closed by the server, however they drip.
        wait_for(lambda: descriptors(server) <= before + 20, lambda: f"{descriptors(server)} descriptors, {before} before", pause=0.5)
    finally:
        ended.set()
        dripping.join()
        for connection in slow:
            connection.close()
    # The bound is meant for a quiet machine; a floor of 50 ms keeps the scheduler's noise out of it.
    assert percentile(busy, 50) < max(2 * percentile(idle, 99), 0.05)


def descriptors(server):
    return len(os.listdir(f"/proc/{server.pid}/fd"))


# 2: messages whose length can be read in two ways

BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
LENGTH = f"Content-Length: {len(BODY)}\r\n".encode()
START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
SMUGGLING = {
    "length-and-chunked": START + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "two-lengths": START + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "space-before-colon": START + b"Content-Length : 5\r\n\r\n" + BODY,
    "folded-header": START + LENGTH + b"X-Folded: a\r\n b\r\n\r\n" + BODY,
    "negative-length": START + b"Content-Length: -1\r\n\r\n" + BODY,
    "unknown-coding": START + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "two-hosts": START + b"Host: y\r\n" + LENGTH + b"\r\n" + BODY,
}


@pytest.mark.parametrize("name", SMUGGLING)
def test_ambiguous_messages_are_refused_and_the_connection_closed_E2(server, name):
    before = requests_seen(server)
    answer = raw(server, SMUGGLING[name])
    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert answer.count(b"HTTP/1.1") == 1
    assert requests_seen(server) == before


def test_headers_have_a_limit_E2(server):
    answer = raw(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431"), answer[:200]
    many = b"".join(b"X-%d: y\r\n" % index for index in range(5000))
    answer = raw(server, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431"), answer[:200]


def test_binary_rubbish_is_no_request_E2(server):
    for rubbish in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 500):
        answer = raw(server, rubbish)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408", b"HTTP/1.1 505")), answer[:100]


# 3: sizes and numbers out of all proportion


def test_a_body_over_the_limit_is_refused_before_it_is_read_E3(server):
    before = warmset.resident_set_bytes(server.pid)
    sent, chunk = 0, b"a" * MEBIBYTE
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(START + b"Content-Length: 209715200\r\n\r\n")
        try:
            while sent < 200 * MEBIBYTE:
                connection.sendall(chunk)
                sent += len(chunk)
        except OSError:
            pass  # it stopped listening, as it should
        try:
            answer = connection.recv(65536)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413"), answer[:200]
    assert sent < 200 * MEBIBYTE
    assert warmset.resident_set_bytes(server.pid) - before < 64 * MEBIBYTE


def test_a_body_over_the_limit_without_a_length_is_refused_too_E3(server):
    chunk = b"100000\r\n" + b"a" * MEBIBYTE + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(START + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 200:
                connection.sendall(chunk)
                sent += 1
        except OSError:
            pass
    assert sent < 200


def test_deep_json_is_refused_E3(server):
    body = b'{"model":"fine","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    status, _, answer = server.post("/v1/chat/completions", body, headers={"content-type": "application/json"})
    assert status == 400
    assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields,param",
    [({"n": 10**9}, "n"), ({"max_tokens": 2**63}, "max_tokens"), ({"max_tokens": 10**30}, "max_tokens"),
     ({"stop": ["a"] * 1_000_000}, "stop"), ({"temperature": 1e308}, "temperature"), ({"seed": "x"}, "seed"),
     ({"logit_bias": {str(index): 1 for index in range(200_000)}}, "logit_bias"), ({"model": 7}, "model")],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_numbers_out_of_proportion_are_named_E3(server, fields, param):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status in (400, 413), answer[:200]
    if status == 400:
        assert (error_of(answer)["param"] or "").split(".")[0] == param


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"model":"fine"', b'{"model":"fine","prompt":"\xff"}',
                                  b'{"model":"fine","model":"fine","messages":1e999}'])  # fmt: skip
def test_broken_json_is_a_400_E3(server, body):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        status, _, answer = server.post(path, body, headers={"content-type": "application/json"})
        assert status == 400, (path, body, answer[:200])
        assert error_of(answer)["message"]


# 4: templates from callers, templates that never end


@pytest.mark.parametrize("fields", [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}])
def test_templates_from_callers_are_refused_E4(server, fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 400
    assert "chat_template" in answer.decode()


def test_a_template_that_never_ends_fails_its_own_request_only_E4(server, models, tmp_path):
    endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}"
    server.cli("model", "add", "endless", gguf.with_chat_template(models["q4_1"], tmp_path / "endless.gguf", endless))
    server.cli("model", "load", "endless")
    body = {"model": "endless", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with ThreadPoolExecutor(1) as thread:
        hostile = thread.submit(server.post, "/v1/chat/completions", body)
        assert server.complete(MODEL)[0] == 200
        status, _, answer = hostile.result()
    assert status in (400, 422)
    assert error_of(answer)["code"] == "template_error"
    # The same model answers what needs no template.
    assert server.complete("endless")[0] == 200
    server.cli("model", "remove", "endless")


# 5 and 6: names and digests that look like paths

NAMES = ["../../etc/passwd", "a/..%2f", "..%2f..%2fetc%2fpasswd", "CON", "fine\0", "x" * 4096, "FINE", "f\u0456ne", "", " fine", "fine/", "/etc/passwd"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_a_strange_name_is_an_unknown_model_E5(server, name):
    status, _, answer = server.post("/v1/completions", {"model": name, "prompt": "x"})
    assert status == 404, answer[:200]
    assert error_of(answer)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/v1/models/" + "x" * 4096])
def test_a_strange_path_is_not_found_E5(server, path):
    assert server.get(path)[0] in (400, 404)
    assert server.get(path.replace("/v1/", "/admin/v1/"), admin=True)[0] in (400, 404)


@pytest.mark.parametrize("digest", ["sha256:../../x", "sha256:" + "AB" * 32, "sha256:ab", "md5:" + "ab" * 16, "../../x"])
def test_a_strange_digest_is_refused_before_it_is_a_path_E6(pool, models, tmp_path, digest):
    config = warmset.toml({"model": [{"name": "m", "source": models["q4_1"], "digest": digest}]})
    path = tmp_path / "warmset.toml"
    path.write_text(config)
    result = warmset.run_command(["serve", "--config", str(path), "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"], check=False)
    assert result.returncode != 0
    assert "digest" in result.stderr


# 7 and 9: files that are not what they claim


@pytest.mark.parametrize("name", gguf.hostile_files())
def test_a_gguf_that_lies_is_refused_E7(server, tmp_path, name):
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(gguf.hostile_files()[name])
    before = warmset.resident_set_bytes(server.pid)
    result = server.cli("model", "add", f"hostile-{name}", path, check=False, timeout=60)
    assert result.returncode == 1, result
    assert len(result.stderr.strip().splitlines()) == 1
    assert warmset.resident_set_bytes(server.pid) - before < 32 * MEBIBYTE
    assert f"hostile-{name}" not in [model["name"] for model in server.cli_json("model", "list")["models"]]


def test_a_real_model_cut_short_is_refused_E7(server, models, tmp_path):
    whole = models["q4_1"].read_bytes()
    for name, length in (("half", len(whole) // 2), ("tail", len(whole) - 1), ("head", 4096)):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(whole[:length])
        assert server.cli("model", "add", f"cut-{name}", path, check=False).returncode == 1


class Payload:
    def __reduce__(self):
        return os.system, ("true",)


def test_what_can_run_code_is_never_read_E9(server, tmp_path):
    zip_archive = b"PK\x03\x04" + bytes(64) + b"archive/data.pkl"
    for name, content in (("pickle", pickle.dumps(Payload())), ("torch", zip_archive), ("text", b"#!/bin/sh\nexit 0\n")):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        result = server.cli("model", "add", f"odd-{name}", path, check=False)
        assert result.returncode == 1, name
    for kind in ("directory", "fifo"):
        path = tmp_path / f"{kind}.gguf"
        path.mkdir() if kind == "directory" else os.mkfifo(path)
        assert server.cli("model", "add", f"odd-{kind}", path, check=False, timeout=30).returncode == 1


# 13: an engine that dies


def synthetic_pool(pool, directory, **models):
    specs = []
    for name, fields in models.items():
        cap = fields.pop("memory_cap", None)
        specs.append({"name": name, "source": synthetic_model(directory, name, 16 + len(name) / MEBIBYTE, **fields),
                      "engine": "synthetic", "memory_cap": cap})
    # Soon enough for a test, late enough for a machine that is busy with other things.
    return pool(memory="512MiB", reserve="64MiB", models=specs, worker={"hang_deadline": "5s"})


def neighbours_unharmed(server, name, action):
    """Runs an action while a neighbour is asked all the time; every answer must be whole."""
    ended = threading.Event()
    outcomes = []

    def ask():
        while not ended.is_set():
            outcomes.append(server.complete(name, max_tokens=2)[0])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    # It is warm before anything happens, and is asked while it does, however soon that is over.
    wait_for(lambda: outcomes or not asking.is_alive(), "the neighbour answers")
    try:
        return action()
    finally:
        ended.set()
        asking.join()
        assert outcomes and set(outcomes) == {200}, outcomes


def stream_until_it_ends(server, name):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    chunks = []
    for chunk in client.completions.create(model=name, prompt="x", max_tokens=50, stream=True):
        chunks.append(chunk)
    return chunks


def test_a_crash_in_mid_stream_is_an_error_for_that_stream_only_E13(pool, tmp_path):
    server = synthetic_pool(pool, tmp_path, crashes={"failure": "generate_crashes"}, neighbour={"decode_seconds_per_token": 0.002})

    def crash():
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            stream_until_it_ends(server, "crashes")
        # A whole answer cannot come either: an error, never half a text as if it were whole.
        status, _, body = server.complete("crashes", max_tokens=50)
        assert status >= 500, body

    neighbours_unharmed(server, "neighbour", crash)


def test_a_real_engine_killed_in_mid_stream_E13(pool, models):
    server = pool(memory="800MiB", reserve="128MiB", models=[{"name": "m", "source": models["q4_1"], "context_tokens": 2048}])
    server.cli("model", "load", "m")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    stream = client.completions.create(model="m", prompt="Once upon a time", max_tokens=1500, stream=True)
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        for index, _ in enumerate(stream):
            if index == 3:
                for pid in server.engines():
                    os.kill(pid, signal.SIGKILL)
    # The next caller gets a new engine.
    assert server.complete("m")[0] == 200


def test_a_load_that_crashes_backs_off_E13(pool, tmp_path):
    server = synthetic_pool(pool, tmp_path, crashes={"failure": "load_crashes"}, neighbour={})
    started = time.monotonic()

    def storm():
        answers = [server.complete("crashes") for _ in range(60)]
        assert all(status >= 500 for status, _, _ in answers)
        assert all(0 < float(headers["retry-after"]) <= 120 for status, headers, _ in answers if "retry-after" in headers)

    neighbours_unharmed(server, "neighbour", storm)
    took = time.monotonic() - started
    loads = server.metric("warmset_model_loads_total", model="crashes")
    # Sixty requests are not sixty starts: the pause doubles after each failure.
    assert 1 <= loads <= 3 + took, loads


# 14: an engine that hangs, a caller that leaves


def test_an_engine_that_hangs_is_killed_and_its_slot_freed_E14(pool, tmp_path):
    server = synthetic_pool(pool, tmp_path, hangs={"failure": "generate_hangs"}, neighbour={"decode_seconds_per_token": 0.002})

    def hang():
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            stream_until_it_ends(server, "hangs")

    neighbours_unharmed(server, "neighbour", hang)
    wait_for(lambda: server.metric("warmset_running_requests", model="hangs") == 0, "its slot is free")


def test_a_caller_that_leaves_while_queued_is_gone_E14(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB", models=[{
        "name": "slow", "source": synthetic_model(tmp_path, "slow", decode_seconds_per_token=0.02), "engine": "synthetic",
        "parallel": 1, "max_concurrency": 1}])
    server.complete("slow")
    body = json.dumps({"model": "slow", "prompt": "x", "max_tokens": 1000, "stream": True})
    connections = []
    for _ in range(4):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connections.append(connection)
    wait_for(lambda: server.metric("warmset_queue_depth") == 3, "three wait")
    for connection in connections:
        connection.close()
    wait_for(lambda: server.metric("warmset_queue_depth") == 0, "nobody waits")
    wait_for(lambda: server.metric("warmset_running_requests", model="slow") == 0, "nothing runs")
    assert server.complete("slow")[0] == 200


# 16: loads at the same time, memory beyond what was declared


def test_simultaneous_cold_requests_share_one_load_E16(pool, tmp_path):
    server = synthetic_pool(pool, tmp_path, cold={"load_seconds": 0.5})
    with ThreadPoolExecutor(20) as threads:
        statuses = list(threads.map(lambda _: server.complete("cold")[0], range(20)))
    assert set(statuses) == {200}
    assert server.metric("warmset_model_loads_total", model="cold") == 1


def test_an_engine_over_its_cap_dies_alone_E16(pool, tmp_path):
    server = synthetic_pool(pool, tmp_path, greedy={"failure": "eats_memory", "memory_cap": "96MiB"},
                            neighbour={"decode_seconds_per_token": 0.002})

    def eat():
        status, _, body = server.complete("greedy", max_tokens=1000)
        assert status >= 500, body

    neighbours_unharmed(server, "neighbour", eat)


# 17: everybody wants another model at once


def test_fifty_cold_models_at_once_E17(pool, tmp_path):
    names = [f"cold-{index}" for index in range(50)]
    specs = [{"name": name, "source": synthetic_model(tmp_path, name, 24 + index / MEBIBYTE, load_seconds=0.1), "engine": "synthetic"}
             for index, name in enumerate(names)]
    warm = {"name": "warm", "source": synthetic_model(tmp_path, "warm", 24, decode_seconds_per_token=0.002), "engine": "synthetic", "pin": True}
    server = pool(memory="320MiB", reserve="64MiB", models=[warm, *specs])
    wait_for(lambda: server.complete("warm")[0] == 200, "the warm model answers")
    def storm():
        with warmset.Sampler(server.memory, 0.05) as sampler, ThreadPoolExecutor(50) as threads:
            answers = list(threads.map(server.complete, names))
        for memory in sampler.samples:
            assert warmset.used_bytes(memory) <= memory["capacity"], memory
        return answers

    answers = neighbours_unharmed(server, "warm", storm)
    for status, headers, body in answers:
        assert status in (200, 429, 503), body
        if status != 200:
            assert 0 < float(headers["retry-after"]) <= 120
    assert sum(status == 200 for status, _, _ in answers) > 0
