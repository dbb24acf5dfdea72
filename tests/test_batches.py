"""Files and batches, driven by the official `openai` package against a real model: what it uploads is answered line by line,
in the batch class, once, also over kill -9."""

import io
import json

import openai
import pytest
import warmset
from warmset import synthetic_model, wait_for

FINAL = ("completed", "failed", "expired", "cancelled")


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=warmset.PATIENCE_SECONDS)


def line(number, url="/v1/completions", **body):
    body = {"model": "m", "prompt": f"Number {number}:", "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": {k: v for k, v in body.items() if v is not None}}


def upload(client, lines):
    text = "\n".join(text if isinstance(text, str) else json.dumps(text) for text in lines)
    return client.files.create(file=("lines.jsonl", io.BytesIO(text.encode())), purpose="batch")


def begin(client, lines, endpoint="/v1/completions", **options):
    return client.batches.create(
        input_file_id=upload(client, lines).id, endpoint=endpoint, completion_window="24h", **options
    )


def ended(client, batch):
    """The batch once it has ended, however long that takes as long as its lines are answered."""
    def look():
        found = client.batches.retrieve(batch.id)
        return found if found.status in FINAL else None

    def so_far():
        found = client.batches.retrieve(batch.id)
        return found.status, found.request_counts

    return wait_for(look, lambda: f"the batch ends: {client.batches.retrieve(batch.id)}", pause=0.1, progress=so_far)


def records(client, file_id):
    if file_id is None:
        return {}
    entries = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_name = {entry["custom_id"]: entry for entry in entries}
    assert len(by_name) == len(entries), "no line was answered twice"
    return by_name


@pytest.fixture(scope="module")
def server(module_pool, models, tmp_path_factory):
    slow = synthetic_model(tmp_path_factory.mktemp("models"), "slow", decode_seconds_per_token=0.05)
    return module_pool(
        memory="1GiB",
        models=[
            {"name": "m", "source": models["q4_1"], "context_tokens": 512},
            {"name": "slow", "source": slow, "engine": "synthetic"},
        ],
    )


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def test_files_come_back_as_they_were_handed_in(client):
    content = b"\x00one\ntwo\r\n" * 50_000
    file = client.files.create(file=("some name.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "some name.jsonl", "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert file.id in [listed.id for listed in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(file.id)


def test_lists_have_pages(client):
    made = [upload(client, [line(number)]).id for number in range(5)]
    seen = [file.id for file in client.files.list(limit=2)]
    assert len(seen) == len(set(seen)) and set(made) <= set(seen)


def test_bad_uploads_are_refused(client, server):
    with pytest.raises(openai.BadRequestError) as failure:
        client.files.create(file=io.BytesIO(b"x"), purpose="fine-tune")
    assert failure.value.param == "purpose"
    assert server.post("/v1/files", {"purpose": "batch"})[0] == 400
    cut = b"--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\nhalf"
    status, _, text = server.request("POST", "/v1/files", cut, {"content-type": "multipart/form-data; boundary=b"})
    assert status == 400, text
    assert not list((server.data / "files").glob("*.partial"))


def test_a_batch_of_a_real_model_is_answered_line_by_line(client, server):
    chat = "/v1/chat/completions"
    messages = [{"role": "user", "content": "Say hello."}]
    lines = [line(number, url=chat, prompt=None, messages=messages) for number in range(6)]
    lines.append(line(6, url=chat, prompt=None, messages=messages, temperature=9))
    lines.append(line(7, url=chat, prompt=None, messages=messages, model="nothing"))
    batch = begin(client, lines, chat, metadata={"for": "test"})
    assert batch.object == "batch" and batch.status in ("validating", "in_progress")
    batch = ended(client, batch)
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (8, 6, 2)
    assert batch.metadata == {"for": "test"} and batch.completed_at >= batch.in_progress_at
    good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert set(good) == {f"line-{number}" for number in range(6)} and set(bad) == {"line-6", "line-7"}
    for entry in good.values():
        assert entry["response"]["status_code"] == 200 and entry["error"] is None and entry["response"]["request_id"]
        answer = openai.types.chat.ChatCompletion.model_validate(entry["response"]["body"])
        assert answer.choices[0].message.content and answer.system_fingerprint.startswith("fp_")
    assert bad["line-6"]["response"]["status_code"] == 400
    assert bad["line-6"]["response"]["body"]["error"]["param"] == "temperature"
    assert bad["line-7"]["response"]["body"]["error"]["code"] == "model_not_found"
    made = client.files.retrieve(batch.output_file_id)
    assert made.purpose == "batch_output" and made.filename == f"{batch.id}_output.jsonl"
    assert batch.id in [listed.id for listed in client.batches.list()]


def test_embeddings_in_a_batch(client):
    lines = [line(n, url="/v1/embeddings", prompt=None, max_tokens=None, temperature=None, input="x") for n in range(3)]
    batch = ended(client, begin(client, lines, "/v1/embeddings"))
    good = records(client, batch.output_file_id)
    assert len(good) == 3 and len(good["line-0"]["response"]["body"]["data"][0]["embedding"]) == 576


def test_a_file_that_is_no_batch_fails_with_every_fault(client):
    lines = [line(0), line(0), "not json", line(1, url="/v1/embeddings"), line(2, stream=True)]
    batch = ended(client, begin(client, lines))
    assert batch.status == "failed" and batch.output_file_id is None
    faults = {fault.line: fault.code for fault in batch.errors.data}
    assert faults == {2: "duplicate_custom_id", 3: "invalid_json_line", 4: "mismatched_endpoint", 5: "invalid_request"}
    batch = ended(client, begin(client, [""]))
    assert batch.status == "failed" and batch.errors.data[0].code == "empty_file"


def test_bad_batches_are_refused(client):
    file = upload(client, [line(0)])
    good = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for wrong in ({"endpoint": "/v1/models"}, {"completion_window": "1h"}, {"metadata": {"x": "y" * 1000}}):
        with pytest.raises(openai.BadRequestError) as failure:
            client.batches.create(**{**good, **wrong})
        assert failure.value.param == next(iter(wrong))
    with pytest.raises(openai.NotFoundError) as failure:
        client.batches.create(**{**good, "input_file_id": "file-missing"})
    assert failure.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_missing")


def test_lists_and_their_parameters_make_sense_or_are_refused(client, server):
    for path, param in (("batches?after=zzz", "after"), ("files?after=zzz", "after"), ("files?order=up", "order"), ("batches?limit=x", "limit")):
        status, _, text = server.get(f"/v1/{path}")
        assert (status, json.loads(text)["error"]["param"]) == (400, param), text


def test_a_byte_order_mark_before_the_first_line_is_passed_over(client):
    lines = ["\ufeff" + json.dumps(line(0)), line(1)]
    batch = ended(client, begin(client, lines))
    assert (batch.status, batch.request_counts.completed) == ("completed", 2), batch


def test_the_command_line_lists_shows_and_cancels_batches(client, server, pool, tmp_path):
    done = ended(client, begin(client, [line(0)]))
    shown = server.cli_json("batches", "show", done.id)
    assert (shown["status"], shown["request_counts"]["completed"]) == ("completed", 1)
    assert server.cli_json("batches", "list", "-n", "1")["batches"][0]["id"] == done.id
    assert done.id in server.cli("batches", "list").stdout and "completed" in server.cli("batches", "show", done.id).stdout
    going = begin(client, [line(number, model="slow", max_tokens=20) for number in range(100)])
    assert server.cli_json("batches", "cancel", going.id)["status"] in ("cancelling", "cancelled")
    assert ended(client, going).status == "cancelled"
    for arguments, words in ((("cancel", done.id), "ended already"), (("show", "batch_1"), "no such batch"), (("show", "../x"), "is no batch")):
        failed = server.cli("batches", *arguments, check=False)
        assert failed.returncode == 1 and words in failed.stderr, failed
    # Without a server it works on the data directory; the next server carries it out.
    slow = synthetic_model(tmp_path, "slow", decode_seconds_per_token=0.5)
    other = pool(models=[{"name": "slow", "source": slow, "engine": "synthetic"}])
    batch = begin(client_of(other), [line(number, model="slow", max_tokens=200) for number in range(30)])
    other.kill()
    assert other.cli_json("batches", "list")["batches"][0]["id"] == batch.id
    assert other.cli_json("batches", "cancel", batch.id)["status"] == "cancelling"
    other.start()
    assert ended(client_of(other), batch).status == "cancelled"
    assert other.cli_json("batches", "show", batch.id)["request_counts"]["completed"] == 0


def test_a_batch_can_be_taken_back_and_keeps_what_it_has(client):
    lines = [line(number, model="slow", max_tokens=20) for number in range(100)]
    batch = begin(client, lines)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, "a line is answered")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled" and 0 < batch.request_counts.completed < 100
    assert len(records(client, batch.output_file_id)) == batch.request_counts.completed
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(ended(client, begin(client, [line(0)])).id)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_leaves_room_for_those_who_wait(client, server):
    """While a long batch runs, a caller never waits for one of its lines: a slot is always left."""
    batch = begin(client, [line(number, model="slow", max_tokens=40) for number in range(60)])
    running = lambda: server.metric("warmset_running_requests", model="slow")  # noqa: E731
    wait_for(lambda: running() > 0, "lines run")
    for _ in range(5):
        # Who has just been answered is counted for a moment longer. A line in the last slot would be there for two seconds.
        assert min(running() for _ in range(5)) <= 3
        status, headers, _ = server.complete("slow", max_tokens=1)
        assert status == 200
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    ended(client, batch)


def test_kill_9_runs_no_line_again_that_was_answered(pool, models):
    server = pool(memory="1GiB", models=[{"name": "m", "source": models["q4_1"], "context_tokens": 512}])
    client = client_of(server)
    count = 120
    lines = [line(number, max_tokens=8, seed=number, temperature=1) for number in range(count)]
    batch = begin(client, lines)
    answered = {}
    for turn in range(4):
        before = len(answered)
        # More than before, or all of them: the machine may have answered the rest while nobody looked.
        done = lambda: client.batches.retrieve(batch.id).request_counts.completed  # noqa: E731
        wait_for(lambda: done() > before or before == count, "lines are answered")
        engines = server.engines()
        server.kill()
        wait_for(lambda: not any(map(warmset.alive, engines)), "no engine is left")
        (partial,) = (server.data / "files").glob("file-out-*")
        found = {}
        for text in partial.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                found[json.loads(text)["custom_id"]] = text.strip()
        assert answered.items() <= found.items(), "what was answered stays as it was"
        answered = found
        server.start()
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.request_counts.completed == count
    text = client.files.content(batch.output_file_id).text
    whole = {json.loads(entry)["custom_id"]: entry for entry in text.splitlines()}
    assert len(whole) == len(text.splitlines()) == count
    assert answered.items() <= whole.items()


def test_a_drain_keeps_the_rest_of_a_batch_for_the_next_start(pool, tmp_path):
    model = synthetic_model(tmp_path, "slow", decode_seconds_per_token=0.02)
    server = pool(models=[{"name": "m", "source": model, "engine": "synthetic"}])
    client = client_of(server)
    batch = begin(client, [line(number, max_tokens=10) for number in range(60)])
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed > 2, "lines are answered")
    assert server.stop() == 0
    server.start()
    batch = ended(client, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 60, 0)
    assert len(records(client, batch.output_file_id)) == 60


def test_fifty_thousand_lines_and_not_one_more(pool, tmp_path):
    """Read line by line: the server's memory does not grow with the file."""
    server = pool(models=[{"name": "m", "source": synthetic_model(tmp_path, "m"), "engine": "synthetic"}])
    client = client_of(server)
    before = warmset.resident_set_bytes(server.pid)
    batch = begin(client, [line(number) for number in range(50_000)])
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", "the file is acceptable")
    assert client.batches.retrieve(batch.id).request_counts.total == 50_000
    assert warmset.resident_set_bytes(server.pid) - before < 64 << 20
    client.batches.cancel(batch.id)
    ended(client, batch)
    batch = ended(client, begin(client, [line(number) for number in range(50_001)]))
    assert batch.status == "failed" and batch.errors.data[0].code == "too_many_lines"
