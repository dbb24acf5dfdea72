"""Requests that are answered later: 202 for those who ask for it, durable over kill -9, cancelled, bounded, asked for by name."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import warmset
from warmset import synthetic_model, wait_for

ASYNC = {"prefer": "respond-async"}
FINAL = ("succeeded", "failed", "cancelled", "expired")


def submit(server, model, headers=ASYNC, path="/v1/completions", **fields):
    """Hands a request in and returns (status, headers, document)."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **fields}
    body = {key: value for key, value in body.items() if value is not None}
    status, found, text = server.post(path, body, headers=headers)
    return status, found, json.loads(text)


def job(server, name):
    status, _, text = server.get(f"/v1/jobs/{name}")
    assert status == 200, text
    return json.loads(text)


def ended(server, name):
    def look():
        document = job(server, name)
        return document if document["status"] in FINAL else None

    return wait_for(look, lambda: f"the job ends: {job(server, name)}")


@pytest.fixture(scope="module")
def server(module_pool, models, tmp_path_factory):
    slow = synthetic_model(tmp_path_factory.mktemp("models"), "slow", load_seconds=3.0)
    return module_pool(
        memory="1GiB",
        models=[
            {"name": "m", "source": models["q4_1"], "context_tokens": 512},
            {"name": "slow", "source": slow, "engine": "synthetic", "keep_alive": "1s"},
        ],
    )


def test_202_only_for_those_who_ask_E22(server):
    status, headers, body = server.complete("slow")
    assert status == 200 and "location" not in headers and body["choices"]
    server.cli("model", "unload", "slow")
    status, headers, document = submit(server, "slow")
    assert status == 202
    assert headers["location"] == f"/v1/jobs/{document['id']}"
    assert headers["preference-applied"] == "respond-async"
    assert 1 <= int(headers["retry-after"]) <= 120
    assert document["status"] in ("queued", "loading") and document["result"] is None


def test_a_job_shows_its_life_and_its_answer_is_what_the_route_answers(server):
    server.cli("model", "unload", "slow")
    _, _, document = submit(server, "slow")
    seen = set()

    def watch():
        found = job(server, document["id"])
        seen.add(found["status"])
        return found["status"] in FINAL

    wait_for(watch, "the job ends")
    assert "loading" in seen and "succeeded" in seen
    document = job(server, document["id"])
    assert document["start"] == "cold" and document["digest"] == server.digest("slow")
    assert document["http_status"] == 200 and document["error"] is None and document["attempts"] == 1
    _, _, direct = server.complete("slow", prompt="Once upon a time", max_tokens=4, temperature=0)
    varying = ("id", "created")
    assert {key: value for key, value in document["result"].items() if key not in varying} == {
        key: value for key, value in direct.items() if key not in varying
    }


@pytest.mark.parametrize(
    "path,fields",
    [
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/embeddings", {"prompt": None, "max_tokens": None, "temperature": None, "input": "Hi"}),
    ],
)
def test_every_route_of_a_real_model_can_be_answered_later(server, path, fields):
    status, headers, document = submit(server, "m", path=path, **fields)
    assert status == 202, document
    document = ended(server, document["id"])
    assert document["status"] == "succeeded", document
    assert document["route"] == path
    assert document["result"]["usage"]["prompt_tokens"] > 0


def test_the_answer_comes_at_once_if_it_comes_in_the_time_one_would_wait(server):
    status, headers, body = submit(server, "m", headers={"prefer": "respond-async, wait=60"})
    assert status == 200 and body["object"] == "text_completion"
    assert headers["warmset-model-digest"] == server.digest("m")
    assert headers["warmset-start"] in ("warm", "cold")
    assert headers["preference-applied"] == "respond-async, wait=60"
    server.cli("model", "unload", "slow")
    status, headers, document = submit(server, "slow", headers={"prefer": "respond-async, wait=1"})
    assert status == 202 and document["status"] in ("queued", "loading")
    # Whoever looks may wait as well.
    _, _, text = server.request("GET", headers["location"], headers={"prefer": "wait=60"})
    assert json.loads(text)["status"] == "succeeded"


def test_the_official_client_gets_a_job_and_its_result(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    raw = client.completions.with_raw_response.create(model="m", prompt="x", max_tokens=2, extra_headers=ASYNC)
    assert raw.status_code == 202
    document = ended(server, json.loads(raw.text)["id"])
    answer = openai.types.Completion.model_validate(document["result"])
    assert answer.usage.completion_tokens == 2


def test_what_is_wrong_is_refused_before_anything_is_kept(server):
    kept = server.cli_json("jobs", "list")["jobs"]
    assert submit(server, "nothing")[0] == 404
    status, headers, body = submit(server, "m", max_tokens=-1)
    assert (status, body["error"]["param"], headers["x-should-retry"]) == (400, "max_tokens", "false")
    assert submit(server, "m", headers={**ASYNC, "idempotency-key": "x" * 256})[0] == 400
    assert server.cli_json("jobs", "list")["jobs"] == kept


def test_a_job_that_fails_holds_the_error_of_the_route(server):
    _, _, document = submit(server, "m", prompt="word " * 3000)
    document = ended(server, document["id"])
    assert document["status"] == "failed" and document["result"] is None
    assert document["error"]["code"] == "context_length_exceeded" and document["http_status"] == 400


def test_a_stream_says_itself_what_it_waits_for(server):
    server.cli("model", "unload", "slow")
    status, headers, text = server.post(
        "/v1/completions", {"model": "slow", "prompt": "x", "max_tokens": 2, "stream": True}, headers=ASYNC
    )
    assert status == 200 and "preference-applied" not in headers
    assert b": loading" in text and text.endswith(b"data: [DONE]\n\n")


def test_a_job_can_be_taken_back_once_and_only_while_it_has_not_ended(server):
    server.cli("model", "unload", "slow")
    _, _, document = submit(server, "slow")
    status, _, text = server.request("DELETE", f"/v1/jobs/{document['id']}")
    assert status == 200 and json.loads(text)["status"] == "cancelled"
    assert server.request("DELETE", f"/v1/jobs/{document['id']}")[0] == 200
    assert job(server, document["id"])["status"] == "cancelled"
    _, _, document = submit(server, "m")
    ended(server, document["id"])
    status, headers, text = server.request("DELETE", f"/v1/jobs/{document['id']}")
    assert (status, json.loads(text)["error"]["code"]) == (409, "job_finished")
    assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize("prefer", ["wait=abc", "respond-async, wait=-1", "wait", "respond-async=maybe"])
def test_nonsense_under_a_name_we_know_is_told_and_other_names_are_passed_over(server, prefer):
    status, headers, body = submit(server, "m", headers={"prefer": prefer})
    assert (status, body["error"]["param"]) == (400, "prefer"), body
    assert "location" not in headers and prefer.split(",")[-1].split("=")[0].strip() in body["error"]["message"]
    assert submit(server, "m", headers={"prefer": "return=minimal, x-wait=abc"})[0] == 200
    _, _, document = submit(server, "m")
    status, _, text = server.request("GET", f"/v1/jobs/{document['id']}", headers={"prefer": prefer})
    assert (status, json.loads(text)["error"]["param"]) == (400, "prefer")


def test_jobs_are_counted_while_they_wait_and_when_they_end(server):
    server.cli("model", "unload", "slow")
    wait_for(lambda: server.metric("warmset_jobs_unfinished") == 0, "those of other tests have ended")
    before = server.metric("warmset_jobs_total", outcome="cancelled"), server.metric("warmset_jobs_total", outcome="succeeded")
    _, _, document = submit(server, "slow")
    # In one look: between two of them it comes from one state into the next.
    assert server.metric("warmset_jobs_unfinished") == 1
    server.request("DELETE", f"/v1/jobs/{document['id']}")
    _, _, document = submit(server, "m")
    ended(server, document["id"])
    after = server.metric("warmset_jobs_total", outcome="cancelled"), server.metric("warmset_jobs_total", outcome="succeeded")
    assert after == (before[0] + 1, before[1] + 1)
    wait_for(lambda: server.metric("warmset_jobs_unfinished") == 0, "nothing is left")


def test_a_list_shows_the_digest_that_answered(pool, tmp_path):
    """A job waits while its name comes to mean something else: the list says what it ran on, as the answer does."""
    one, two = (synthetic_model(tmp_path, name, size, load_seconds=seconds) for name, size, seconds in (("one", 16, 60.0), ("two", 17, 0.0)))
    server = pool(models=[{"name": "m", "source": one, "engine": "synthetic"}])
    digest = server.digest("m")
    _, _, document = submit(server, "m")
    wait_for(lambda: job(server, document["id"])["status"] == "loading", "the job waits for the first version")
    server.kill()
    server.config = warmset.toml({"model": [{"name": "m", "source": two, "engine": "synthetic"}]})
    server.start()
    done = ended(server, document["id"])
    assert done["status"] == "succeeded" and done["digest"] == server.digest("m") != digest
    (listed,) = server.cli_json("jobs", "list")["jobs"]
    assert listed["digest"] == done["digest"]


def test_jobs_nobody_has_E24(server):
    for method in ("GET", "DELETE"):
        status, headers, text = server.request(method, "/v1/jobs/job_00000000000000000000000000000000")
        assert (status, json.loads(text)["error"]["code"]) == (404, "job_not_found")
        assert headers["x-should-retry"] == "false"
    assert server.get("/v1/jobs/..%2f..%2fetc")[0] == 404


def test_the_command_line_lists_shows_and_cancels(server):
    server.cli("model", "unload", "slow")
    _, _, document = submit(server, "slow")
    listed = server.cli_json("jobs", "list")["jobs"]
    assert listed[0]["id"] == document["id"]
    assert document["id"] in server.cli("jobs", "list").stdout
    assert server.cli_json("jobs", "cancel", document["id"])["status"] == "cancelled"
    assert server.cli_json("jobs", "show", document["id"])["status"] == "cancelled"
    assert "cancelled" in server.cli("jobs", "show", document["id"]).stdout
    failed = server.cli("jobs", "show", "job_1", check=False)
    assert failed.returncode == 1 and "no such job" in failed.stderr


def test_a_key_means_one_job_also_after_a_restart_E25(pool, models):
    server = pool(memory="1GiB", models=[{"name": "m", "source": models["q4_1"], "context_tokens": 512}])
    headers = {**ASYNC, "idempotency-key": "order-17"}
    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(lambda _: submit(server, "m", headers=headers), range(8)))
    assert {status for status, _, _ in answers} == {202}
    names = {document["id"] for _, _, document in answers}
    assert len(names) == 1
    first = ended(server, names.pop())
    status, _, body = submit(server, "m", headers=headers, max_tokens=5)
    assert (status, body["error"]["code"]) == (422, "idempotency_key_reused")
    server.kill()
    server.start()
    status, found, document = submit(server, "m", headers=headers)
    assert status == 202 and found["location"] == f"/v1/jobs/{first['id']}"
    assert document["result"] == first["result"] and document["attempts"] == 1
    status, _, answer = submit(server, "m", headers={**headers, "prefer": "respond-async, wait=5"})
    assert status == 200 and answer == first["result"]


def test_a_full_queue_is_429_and_not_202_E23(pool, tmp_path):
    slow = synthetic_model(tmp_path, "slow", load_seconds=60.0)
    server = pool(models=[{"name": "slow", "source": slow, "engine": "synthetic"}], gateway={"jobs_max": 3})
    names = [submit(server, "slow")[2]["id"] for _ in range(3)]
    status, headers, body = submit(server, "slow")
    assert (status, body["error"]["code"]) == (429, "job_queue_full")
    assert 1 <= int(headers["retry-after"]) <= 120 and "location" not in headers
    server.request("DELETE", f"/v1/jobs/{names[0]}")
    assert submit(server, "slow")[0] == 202


def test_a_cold_model_can_be_async_by_itself(pool, tmp_path):
    slow = synthetic_model(tmp_path, "slow", load_seconds=2.0)
    server = pool(models=[{"name": "slow", "source": slow, "engine": "synthetic", "cold": "async"}])
    status, headers, document = submit(server, "slow", headers={})
    assert status == 202 and "preference-applied" not in headers
    assert ended(server, document["id"])["status"] == "succeeded"
    status, headers, body = submit(server, "slow", headers={})
    assert status == 200 and headers["warmset-start"] == "warm" and body["choices"]


def test_a_job_of_a_model_that_refuses_when_cold_is_answered_all_the_same(pool, tmp_path):
    slow = synthetic_model(tmp_path, "slow", load_seconds=2.0)
    server = pool(models=[{"name": "slow", "source": slow, "engine": "synthetic", "cold": "reject"}])
    status, headers, body = server.complete("slow")
    assert (status, body["error"]["code"]) == (503, "model_loading")
    assert 1 <= int(headers["retry-after"]) <= 120 and "x-should-retry" not in headers
    document = ended(server, submit(server, "slow")[2]["id"])
    assert document["status"] == "succeeded" and document["attempts"] == 1


def test_a_job_has_its_time_and_so_has_its_answer(pool, tmp_path):
    slow = synthetic_model(tmp_path, "slow", load_seconds=60.0)
    fast = synthetic_model(tmp_path, "fast")
    server = pool(
        models=[{"name": name, "source": file, "engine": "synthetic"} for name, file in (("slow", slow), ("fast", fast))],
        gateway={"job_time_to_live": "5s"},
    )
    # A load of its own would be a matter of how busy the machine is.
    server.cli("model", "load", "fast")
    document = ended(server, submit(server, "slow")[2]["id"])
    assert document["status"] == "expired" and document["error"]["code"] == "job_expired"
    document = ended(server, submit(server, "fast")[2]["id"])
    assert document["status"] == "succeeded"


def test_the_better_tier_goes_first(pool, tmp_path):
    """One at a time: what was handed in last as `priority` is answered before what waits as `flex`."""
    # The load is still under way when the last one is handed in, and several of the others take seconds after it.
    model = synthetic_model(tmp_path, "one", load_seconds=3.0, decode_seconds_per_token=0.05)
    server = pool(models=[{"name": "one", "source": model, "engine": "synthetic", "max_concurrency": 1, "parallel": 1}])
    tiers = ["flex"] * 8 + ["priority"]
    names = [submit(server, "one", max_tokens=10, service_tier=tier)[2]["id"] for tier in tiers]
    urgent = wait_for(lambda: job(server, names[-1])["status"] == "succeeded", "the urgent one is answered")
    assert urgent
    # Looked at from the last one on: those in front end while the others are asked for.
    assert sum(job(server, name)["status"] != "succeeded" for name in reversed(names[:-1])) > 0


def test_kill_9_loses_no_job_and_answers_each_once(pool, models):
    server = pool(memory="1GiB", models=[{"name": "m", "source": models["q4_1"], "context_tokens": 512}])
    accepted, refused = [], []
    stop = threading.Event()

    def keep_asking(number):
        index = 0
        while not stop.is_set():
            index += 1
            try:
                headers = {**ASYNC, "idempotency-key": f"{number}-{index}"}
                status, _, document = submit(server, "m", headers=headers, max_tokens=8)
            except OSError:
                time.sleep(0.01)
                continue
            except (json.JSONDecodeError, warmset.http.client.HTTPException):
                continue
            (accepted if status == 202 else refused).append(document.get("id"))

    callers = [threading.Thread(target=keep_asking, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for turn in range(4):
        wanted = len(accepted) + 6
        wait_for(lambda: len(accepted) >= wanted, "jobs are accepted")
        engines = server.engines()
        server.kill()
        wait_for(lambda: not any(map(warmset.alive, engines)), "no engine is left")
        server.start()
    stop.set()
    for caller in callers:
        caller.join()
    assert not refused
    documents = {name: ended(server, name) for name in accepted}
    assert {document["status"] for document in documents.values()} == {"succeeded"}, documents
    assert all(1 <= document["attempts"] <= 5 for document in documents.values())
    assert any(document["attempts"] > 1 for document in documents.values()), "a kill hit a job that ran"
    # An answer that was there stays as it was.
    server.kill()
    server.start()
    for name, document in documents.items():
        assert job(server, name) == document


def test_what_kills_the_server_again_and_again_is_given_up(pool, tmp_path):
    slow = synthetic_model(tmp_path, "slow", load_seconds=60.0)
    server = pool(models=[{"name": "slow", "source": slow, "engine": "synthetic"}])
    name = submit(server, "slow")[2]["id"]
    for attempt in range(1, 6):
        begun = lambda: job(server, name)["attempts"] == attempt and job(server, name)["status"] == "loading"
        wait_for(begun, "it is begun and its engine is there")
        engines = server.engines()
        server.kill()
        wait_for(lambda: not any(map(warmset.alive, engines)), "no engine is left")
        server.start()
    document = ended(server, name)
    assert (document["status"], document["error"]["code"], document["attempts"]) == ("failed", "job_given_up", 5)


def test_a_drain_keeps_what_waits_for_the_next_start(pool, tmp_path):
    model = synthetic_model(tmp_path, "one", decode_seconds_per_token=0.05)
    server = pool(models=[{"name": "one", "source": model, "engine": "synthetic", "max_concurrency": 1, "parallel": 1}])
    names = [submit(server, "one", max_tokens=10)[2]["id"] for _ in range(12)]
    assert server.stop() == 0
    listed = {entry["id"]: entry for entry in server.cli_json("jobs", "list")["jobs"]}
    assert set(listed) == set(names)
    waiting = [name for name in names if listed[name]["status"] == "queued"]
    assert waiting and all(listed[name]["attempts"] == 0 for name in waiting)
    assert server.cli_json("jobs", "cancel", waiting[-1])["status"] == "cancelled"
    server.start()
    for name in names:
        assert ended(server, name)["status"] == ("cancelled" if name == waiting[-1] else "succeeded")


# ---- OpenAI's responses in the background ----


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=warmset.PATIENCE_SECONDS, max_retries=0)


def response_ended(client, name):
    def look():
        found = client.responses.retrieve(name)
        return None if found.status in ("queued", "in_progress") else found

    return wait_for(look, lambda: f"the response ends: {client.responses.retrieve(name)}")


def test_a_response_in_the_background_is_queued_then_made_and_kept_under_one_id(pool, models):
    server = pool(memory="1GiB", models=[{"name": "m", "source": models["q4_1"], "context_tokens": 512}])
    client = client_of(server)
    asked = {"model": "m", "input": "Name a colour.", "max_output_tokens": 8, "temperature": 0}
    more = {"instructions": "Be brief.", "metadata": {"a": "b"}}
    queued = client.responses.create(background=True, store=True, **asked, **more)
    assert (queued.object, queued.status, queued.background) == ("response", "queued", True)
    assert (queued.instructions, queued.metadata, queued.output) == ("Be brief.", {"a": "b"}, [])
    done = response_ended(client, queued.id)
    assert done.status in ("completed", "incomplete")
    assert (done.id, done.created_at, done.background) == (queued.id, queued.created_at, True)
    assert done.output_text == client.responses.create(**asked, **more).output_text
    document = job(server, queued.id.replace("resp_", "job_"))
    assert document["status"] == "succeeded" and document["route"] == "/v1/responses"
    server.kill()
    server.start()
    assert client.responses.retrieve(queued.id) == done, "an answer that was there stays as it was"
    with pytest.raises(openai.ConflictError) as failure:
        client.responses.cancel(queued.id)
    assert failure.value.code == "job_finished"
    long = response_ended(client, client.responses.create(model="m", input="word " * 3000, background=True).id)
    assert (long.status, long.error.code) == ("failed", "context_length_exceeded") and long.error.message


def test_a_response_in_the_background_outlives_the_server_and_can_be_taken_back(pool, tmp_path):
    slow = synthetic_model(tmp_path, "slow", load_seconds=60.0)
    fast = synthetic_model(tmp_path, "fast")
    files = {"slow": slow, "fast": fast}
    server = pool(models=[{"name": name, "source": file, "engine": "synthetic"} for name, file in files.items()])
    client = client_of(server)
    waiting = client.responses.create(model="slow", input="x", instructions="Be brief.", background=True)
    wait_for(lambda: client.responses.retrieve(waiting.id).status == "in_progress", "its model is being loaded")
    server.kill()
    server.start()
    found = client.responses.retrieve(waiting.id)
    assert found.status in ("queued", "in_progress") and found.instructions == "Be brief."
    for _ in range(2):
        cancelled = client.responses.cancel(waiting.id)
        assert (cancelled.id, cancelled.status, cancelled.error) == (waiting.id, "cancelled", None)
    assert client.responses.retrieve(waiting.id).status == "cancelled"
    # Begun or not when the server ended, the next one makes it.
    left = client.responses.create(model="fast", input="x", max_output_tokens=2, background=True)
    server.kill()
    server.start()
    assert response_ended(client, left.id).status in ("completed", "incomplete")


def test_responses_that_are_not_in_the_background(server):
    client = client_of(server)
    for fields, param in [({"stream": True}, "stream"), ({"store": False}, "store")]:
        with pytest.raises(openai.BadRequestError) as failure:
            client.responses.create(model="m", input="x", background=True, **fields)
        assert failure.value.param == param
    answered = client.responses.create(model="m", input="x", max_output_tokens=2)
    _, _, other = submit(server, "m")
    for name in (answered.id, other["id"], other["id"].replace("job_", "resp_"), "resp_", "x"):
        for ask in (client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as failure:
                ask(name)
            assert failure.value.code == "response_not_found"
    queued = client.responses.create(model="m", input="x", max_output_tokens=2, background=True)
    with pytest.raises(openai.BadRequestError) as failure:
        list(client.responses.retrieve(queued.id, stream=True))
    assert failure.value.param == "stream"
