"""The edge cases that no other test holds, each named by its number in docs/edge-cases.md: the built binary, official clients,
real sockets, a real clock that is set back, a real catalog that is locked or damaged."""

import hashlib
import json
import os
import signal
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx2
import openai
import pytest
import warmset
from https import FileServer
from warmset import MEBIBYTE, WallClock, percentile, synthetic_model, wait_for

MESSAGES = [{"role": "user", "content": "x"}]
ASYNC = {"prefer": "respond-async"}


def synthetic(directory, name, megabytes=16, **fields):
    """The table of a synthetic model; what begins with an underscore is the model's own."""
    own = {key[1:]: fields.pop(key) for key in list(fields) if key.startswith("_")}
    return {"name": name, "source": synthetic_model(directory, name, megabytes, **own), "engine": "synthetic", **fields}


def submit(server, model, headers=ASYNC, **fields):
    body = {"model": model, "prompt": "x", "max_tokens": 4, **fields}
    status, found, text = server.post("/v1/completions", body, headers=headers)
    return status, found, json.loads(text)


def job(server, name):
    return json.loads(server.get(f"/v1/jobs/{name}")[2])


def state(server, name):
    return {model["name"]: model["state"] for model in server.admin_json("/admin/v1/models")["models"]}[name]


def begin_stream(server, model, max_tokens, receive_bytes=None):
    """Asks for a stream on a socket of its own and returns it once the head of the answer is there."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    assert connection.recv(64).startswith(b"HTTP/1.1 200")
    return connection


# ---- E6, E9: names of files and digests that are none ----


@pytest.mark.parametrize("digest", ["sha256:../../x", "sha256:" + "AB" * 32, "sha256:ab", "md5:" + "ab" * 16, "../../etc/passwd"])
def test_a_strange_digest_names_no_version_E6(pool, tmp_path, digest):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m")])
    status, _, text = server.post("/admin/v1/models/m/promote", {"digest": digest}, admin=True)
    message = json.loads(text)["error"]["message"]
    assert status in (400, 404, 422) and ("has no version" in message or "too short" in message), text
    assert server.complete("m")[0] == 200


def test_safetensors_are_refused_by_name_and_by_content_E9(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB")
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    contents = {"whole": len(header).to_bytes(8, "little") + header + bytes(4), "huge-header": b"\xff" * 8 + b"{}"}
    for name, content in contents.items():
        for suffix in ("safetensors", "gguf"):
            path = tmp_path / f"{name}.{suffix}"
            path.write_bytes(content)
            result = server.cli("model", "add", name, path, check=False)
            assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1, result
    assert server.cli_json("model", "list")["models"] == []


# ---- E12: transfers that stop, lie, flip a bit, and a disk without room ----


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped_E12(pool, tmp_path, models):
    source, cuts = models["q4_1"], []
    with FileServer(tmp_path, {"/m.gguf": source}) as files:
        whole = source.stat().st_size

        def cut_at_sixty_percent(sent):
            if len(cuts) < 2 and sent >= whole * 6 // 10 and (not cuts or sent > cuts[-1] + MEBIBYTE):
                cuts.append(sent)
                raise ConnectionError("cut by the test")

        files.pace = cut_at_sixty_percent
        server = pool(memory="800MiB", reserve="128MiB", sources=files.sources(retry_pause="10ms"))
        added = server.cli_json("model", "add", "m", files.url("/m.gguf"))
        asked = [headers for _, headers in files.requests]
        assert len(cuts) == 2 and len(asked) == 3, asked
        assert asked[0].get("range") is None
        assert all("range" in headers and "if-range" in headers for headers in asked[1:]), asked
        assert int(asked[1]["range"].removeprefix("bytes=").rstrip("-")) > whole // 2
        assert added["files"][0]["sha256"] == "sha256:" + hashlib.sha256(source.read_bytes()).hexdigest()
        assert server.complete("m")[0] == 200


def test_a_flipped_bit_is_never_served_E12(pool, tmp_path, models):
    """Flipped on its way, the bytes are another model than the one that the configuration names; flipped on the disk, they are
    set aside when they would be loaded."""
    server = pool(memory="800MiB", reserve="128MiB")
    digest = server.cli_json("model", "add", "m", models["q4_1"])["digest"]
    server.stop()
    content = bytearray(models["q4_1"].read_bytes())
    content[len(content) // 2] ^= 1
    flipped = tmp_path / "flipped.gguf"
    flipped.write_bytes(content)
    with FileServer(tmp_path, {"/m.gguf": flipped}) as files:
        tables = {"sources": files.sources(), "model": [{"name": "far", "source": files.url("/m.gguf"), "digest": digest}]}
        other = warmset.Server(tmp_path / "other", "800MiB", "128MiB", warmset.toml(tables))
        with other:
            refused = wait_for(lambda: (found := other.complete("far"))[0] == 503 and "has digest" in str(found[2]) and found, "it is told")
            assert refused[2]["error"]["code"] == "model_loading"
            assert other.cli_json("model", "list")["models"] == []
    [blob] = [path for path in (server.data / "store" / "blobs").rglob("*") if path.is_file()]
    blob.chmod(0o644)
    blob.write_bytes(content)
    server.start()
    status, _, body = server.complete("m")
    assert status == 503 and body["error"]["code"] == "model_load_failed", body
    assert any((server.data / "store" / "quarantine").iterdir())
    server.cli("model", "add", "m", models["q4_1"])
    assert server.complete("m")[0] == 200, "the right bytes heal it"


# ---- E13, E21: what is cut off raises in both official clients ----


def streams(server, model):
    """Every way in which the official clients stream."""
    chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    claude = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=60)
    options = {"model": model, "stream": True}
    return {
        "completions": lambda: chat.completions.create(prompt="x", max_tokens=100_000, **options),
        "chat": lambda: chat.chat.completions.create(messages=MESSAGES, max_tokens=100_000, **options),
        "responses": lambda: chat.responses.create(input="x", max_output_tokens=100_000, **options),
        "messages": lambda: claude.messages.create(messages=MESSAGES, max_tokens=100_000, **options),
    }


@pytest.mark.parametrize("victim", ["engine", "server"])
@pytest.mark.parametrize("kind", ["completions", "chat", "responses", "messages"])
def test_a_stream_cut_by_kill_9_raises_in_the_official_clients_E13_E21(pool, tmp_path, kind, victim):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m", _decode_seconds_per_token=0.01)])
    stream, seen = iter(streams(server, "m")[kind]()), 0
    with pytest.raises((openai.APIError, anthropic.APIError, httpx2.HTTPError)):
        for _ in stream:
            seen += 1
            if seen == 8:
                if victim == "server":
                    server.kill()
                else:
                    for pid in server.engines():
                        signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL)
    assert seen >= 8, "it was cut in the middle, not before"


# ---- E17: everybody wants another model at once, and one caller gives up soon ----


def test_the_warm_do_not_feel_fifty_cold_models_E17(pool, tmp_path):
    cold = [synthetic(tmp_path, f"cold-{index}", 24 + index / MEBIBYTE, _load_seconds=0.1) for index in range(50)]
    warm = synthetic(tmp_path, "warm", 24, pin=True, _decode_seconds_per_token=0.002)
    server = pool(memory="320MiB", reserve="64MiB", models=[warm, *cold])

    def ask_warm(count):
        took = []
        for _ in range(count):
            asked = time.monotonic()
            status, headers, body = server.complete("warm", max_tokens=8)
            assert (status, headers["warmset-start"]) == (200, "warm"), body
            took.append(time.monotonic() - asked)
        return took

    alone = ask_warm(40)
    with ThreadPoolExecutor(60) as threads:
        answers = [threads.submit(server.complete, f"cold-{index}") for index in range(50)]
        # One in a hurry: no answer in time is an answer that retrying cannot cure.
        hurried = [threads.submit(server.complete, f"cold-{index}", headers={"x-stainless-read-timeout": "0.05"}) for index in range(40, 50)]
        jobs = [threads.submit(submit, server, f"cold-{index}") for index in range(5)]
        beside = ask_warm(40)
        for status, headers, body in (answer.result() for answer in answers):
            assert status in (200, 429, 503), body
            assert status == 200 or 0 < float(headers["retry-after"]) <= 120
        for status, headers, body in (answer.result() for answer in hurried):
            assert status in (200, 429, 503, 504), body
            assert status != 504 or (headers["x-should-retry"], body["error"]["code"]) == ("false", "deadline_passed")
        assert {answer.result()[0] for answer in jobs} == {202}
    # Fifty engines begin and end beside it on the same cores: a bound against being stuck behind them, not a speed.
    assert percentile(beside, 50) < max(10 * percentile(alone, 99), 1.0), (percentile(alone, 99), percentile(beside, 50))


# ---- E18: a catalog that is locked, then damaged ----


def test_a_locked_catalog_stops_changes_and_nothing_else_E18(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m")])
    assert server.complete("m")[0] == 200
    holder = sqlite3.connect(server.data / "catalog.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(submit, server, "m")
            for _ in range(50):
                status, headers, body = server.complete("m")
                assert (status, headers["warmset-start"]) == (200, "warm"), body
            status, headers, body = waiting.result()
        assert (status, body["error"]["code"]) == (503, "jobs_unavailable"), body
        assert 0 < float(headers["retry-after"]) <= 120 and headers.get("x-should-retry") != "false"
        # What only reads the catalog is answered too.
        assert server.cli_json("model", "list")["models"][0]["name"] == "m"
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    status, _, document = submit(server, "m")
    assert status == 202
    wait_for(lambda: job(server, document["id"])["status"] == "succeeded", "the job is answered")


def test_a_damaged_catalog_is_felt_by_no_warm_request_and_named_at_the_next_start_E18(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m")])
    assert server.complete("m")[0] == 200
    path = server.data / "catalog.db"
    with sqlite3.connect(path) as catalog:
        catalog.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(path, "r+b") as file:
        file.write(b"\xff" * 4096)
    for _ in range(50):
        status, headers, body = server.complete("m")
        assert (status, headers["warmset-start"]) == (200, "warm"), body
    assert submit(server, "m")[0] in (202, 503), "it may be noticed late, and is never a crash"
    assert server.complete("m")[0] == 200
    server.kill()
    for name in ("catalog.db-wal", "catalog.db-shm"):
        (server.data / name).unlink(missing_ok=True)
    with open(path, "r+b") as file:
        file.write(b"\xff" * 4096)
    server.start(wait=False)
    assert server.process.wait(warmset.PATIENCE_SECONDS) == 1
    assert "is damaged" in server.log_tail(1000) and "restore the file" in server.log_tail(1000), server.log_tail()
    server.process = None  # that it ended with 1 is right here


# ---- E20: SIGTERM under load ----


def test_sigterm_under_load_loses_nobody_who_was_accepted_E20(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m", parallel=4, _decode_seconds_per_token=0.01)])
    streams = [begin_stream(server, "m", 100) for _ in range(4)]
    engines = server.engines()
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        received = b""
        while chunk := stream.recv(65536):
            received += chunk
        assert b"data: [DONE]" in received, received[-300:]
    assert server.process.wait(warmset.PATIENCE_SECONDS) == 0
    wait_for(lambda: not any(map(warmset.alive, engines)), "no engine is left")


# ---- E26: a caller that does not read ----


def test_a_caller_that_does_not_read_is_cut_and_its_slot_freed_E26(pool, tmp_path):
    server = pool(memory="512MiB", reserve="64MiB", models=[synthetic(tmp_path, "m", parallel=1, max_concurrency=1, context_tokens=8_000_000)])
    assert server.complete("m")[0] == 200
    before = warmset.resident_set_bytes(server.pid)
    slow = begin_stream(server, "m", 4_000_000, receive_bytes=4096)
    with warmset.Sampler(lambda: warmset.resident_set_bytes(server.pid), 0.2) as sampler:
        wait_for(lambda: server.metric("warmset_running_requests", model="m") == 0, "its slot is free", pause=0.2)
    assert max(sampler.samples) - before < 256 * MEBIBYTE, "what is held for it is bounded"
    assert server.complete("m")[0] == 200, "the only slot is free for the next"
    received = b""
    with slow:
        try:
            while chunk := slow.recv(1 << 20):
                received = (received + chunk)[-4096:]
        except ConnectionResetError:
            pass
    assert b"data: [DONE]" not in received, "it never looks complete"


# ---- E28: work that was done for a caller that left is counted, once ----


def test_work_for_a_caller_that_left_is_counted_once_E28(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m", _decode_seconds_per_token=0.01)])
    tokens = lambda kind: server.metric("warmset_tokens_total", model="m", kind=kind)
    _, _, body = server.complete("m", max_tokens=5)
    assert (tokens("prompt"), tokens("completion")) == (body["usage"]["prompt_tokens"], 5)
    prompt = tokens("prompt")
    connection = begin_stream(server, "m", 100_000)
    received = b""
    while received.count(b"data: ") < 20:
        received += connection.recv(65536)
    connection.close()
    wait_for(lambda: server.metric("warmset_running_requests", model="m") == 0, "its slot is free")
    wait_for(lambda: tokens("completion") > 5, "what was computed is counted")
    counted = tokens("completion") - 5
    assert 19 <= counted < 100_000 and tokens("prompt") == 2 * prompt
    assert server.metric("warmset_requests_total", model="m", outcome="cancelled") == 1
    server.complete("m", max_tokens=5)
    assert (tokens("completion"), tokens("prompt")) == (counted + 10, 3 * prompt), "and not again"


# ---- E29: a load that takes longer than clients wait ----


def test_the_hint_for_a_long_load_is_one_that_clients_follow_and_a_job_is_offered_E29(pool, tmp_path):
    spec = synthetic(tmp_path, "m", cold="reject", _load_seconds=600.0)
    server = pool(memory="256MiB", reserve="64MiB", models=[spec])
    status, headers, body = server.complete("m")
    assert (status, body["error"]["code"]) == (503, "model_loading")
    assert 100 <= float(headers["retry-after"]) <= 120 and headers.get("x-should-retry") != "false"
    assert "respond-async" in body["error"]["message"]
    status, headers, document = submit(server, "m")
    assert status == 202 and 100 <= float(headers["retry-after"]) <= 120
    server.request("DELETE", f"/v1/jobs/{document['id']}")


# ---- E30: the clock on the wall is set back ----


def test_a_clock_set_back_an_hour_changes_no_duration_and_schedules_follow_it_E30(pool, tmp_path):
    clock = WallClock(tmp_path)
    # Half past twelve: a window is open, and an hour earlier it was not.
    clock.set_to("12:30")
    server = pool(
        memory="512MiB", reserve="64MiB", environment=clock.environment, gateway={"job_time_to_live": "4s"}, residency={"restore": False},
        models=[synthetic(tmp_path, "m", _decode_seconds_per_token=0.01, parallel=2),
                synthetic(tmp_path, "brief", 17, keep_alive="1s"),
                synthetic(tmp_path, "endless", 18, _load_seconds=600.0),
                synthetic(tmp_path, "planned", 19, schedule=["12:00-13:00 UTC"])],
    )  # fmt: skip
    wait_for(lambda: state(server, "planned") == "ready", "the window is open")
    assert server.complete("m")[0] == 200 and server.complete("brief")[0] == 200
    stream = begin_stream(server, "m", 150)
    _, _, late = submit(server, "endless")
    set_back = time.monotonic()
    clock.shift(-3600)
    # What runs goes on, what is asked is answered, and no figure is an hour off.
    received = b""
    with stream:
        while b"data: [DONE]" not in received:
            received += stream.recv(65536) or pytest.fail("the stream was cut")
    status, _, body = server.complete("m")
    assert status == 200 and abs(body["created"] - clock.now()) < 60, "callers see the clock as it is"
    seconds = server.metric("warmset_request_duration_seconds_sum", model="m")
    assert 0 < seconds < time.monotonic() - set_back + 60
    # Times to live and keep-alive count on.
    wait_for(lambda: job(server, late["id"])["status"] == "expired", lambda: f"it expires: {job(server, late['id'])}")
    wait_for(lambda: state(server, "brief") == "absent", "keep-alive ends")
    # The schedule follows the wall, told within half a minute: half past eleven is before the window, and the model may leave.
    server.cli("model", "unload", "planned")
    wait_for(lambda: state(server, "planned") == "absent", "it may leave")
    # After a restart with the clock still set back a job has no more time than it had.
    _, _, late = submit(server, "endless")
    server.kill()
    clock.shift(-3600)
    server.start()
    wait_for(lambda: job(server, late["id"])["status"] == "expired", lambda: f"it expires: {job(server, late['id'])}")
    assert state(server, "planned") == "absent", "half past ten is before its window"
    clock.shift(+2 * 3600)
    wait_for(lambda: state(server, "planned") == "ready", "the window is open again")
    assert server.complete("m")[0] == 200


def test_a_batch_whose_day_is_over_says_so_of_every_line_that_was_not_answered_E30(pool, tmp_path):
    """Twenty-four hours as the wall tells them, through the running server: it stops, a day goes by, the next one ends the batch."""
    clock = WallClock(tmp_path)
    server = pool(memory="256MiB", reserve="64MiB", environment=clock.environment,
                  models=[synthetic(tmp_path, "quick"), synthetic(tmp_path, "endless", 17, _load_seconds=600.0)])  # fmt: skip
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    lines = [{"custom_id": str(number), "method": "POST", "url": "/v1/completions",
              "body": {"model": "quick" if number < 3 else "endless", "prompt": "x", "max_tokens": 1}} for number in range(6)]  # fmt: skip
    file = client.files.create(file=("lines.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert batch.expires_at - batch.created_at == 24 * 3600
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3, "what can be answered is")
    server.kill()
    clock.shift(23 * 3600)
    server.start()
    assert client.batches.retrieve(batch.id).status == "in_progress"
    server.kill()
    clock.shift(2 * 3600)
    server.start()
    ended = wait_for(lambda: (found := client.batches.retrieve(batch.id)).status == "expired" and found, "it expires")
    assert (ended.request_counts.completed, ended.request_counts.failed) == (3, 3)
    errors = [json.loads(line) for line in client.files.content(ended.error_file_id).text.splitlines()]
    assert {(line["custom_id"], line["error"]["code"]) for line in errors} == {(str(n), "batch_expired") for n in (3, 4, 5)}
    answers = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    assert {line["custom_id"] for line in answers} == {"0", "1", "2"}


# ---- what is counted is described ----


def test_every_metric_is_in_the_guide(pool, tmp_path):
    server = pool(memory="256MiB", reserve="64MiB", models=[synthetic(tmp_path, "m")])
    server.complete("m")
    text = server.get("/metrics", admin=True)[2].decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    guide = (warmset.ROOT / "docs" / "user-guide" / "metrics.md").read_text()
    assert names and {name for name in names if f"`{name}`" not in guide} == set()
