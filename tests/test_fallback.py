"""Another model answers if the wanted one cannot, and the answer says which."""

import json

import openai
import pytest
from warmset import synthetic_model, wait_for


@pytest.fixture(scope="module")
def server(module_pool, models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    cold = synthetic_model(directory, "cold", load_seconds=2.0)
    broken = synthetic_model(directory, "broken", failure="load_fails")
    worse = synthetic_model(directory, "worse", failure="load_fails", host_bytes=8192)
    entry = lambda name, source, **more: {"name": name, "source": source, "engine": "synthetic", **more}
    return module_pool(
        memory="1GiB",
        models=[
            {"name": "good", "source": models["q4_1"], "context_tokens": 512},
            entry("cold", cold, cold="reject", fallback="good"),
            entry("broken", broken, fallback="worse"),
            entry("worse", worse, fallback="good"),
            entry("alone", synthetic_model(directory, "alone", load_seconds=60.0, host_bytes=4096), cold="reject"),
        ],
    )


def ask(server, model, headers=None, **fields):
    return server.complete(model, max_tokens=2, headers=headers, **fields)


def test_a_cold_model_that_refuses_is_stood_in_for_until_it_is_warm(server):
    server.cli("model", "unload", "cold")
    status, headers, body = ask(server, "cold")
    assert status == 200 and body["model"] == "good"
    assert headers["warmset-model-digest"] == server.digest("good") and headers["warmset-fallback-for"] == "cold"
    assert body["system_fingerprint"] == "fp_" + server.digest("good").removeprefix("sha256:")[:12]

    def own_answer():
        status, headers, body = ask(server, "cold")
        return body["model"] == "cold" and headers

    headers = wait_for(own_answer, "the wanted model is loaded meanwhile")
    assert "warmset-fallback-for" not in headers


def test_a_chain_is_followed_past_every_broken_model(server):
    status, headers, body = ask(server, "broken")
    assert status == 200 and body["model"] == "good" and headers["warmset-fallback-for"] == "broken"


def test_a_stream_falls_back_before_its_first_byte(server):
    request = {"model": "broken", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    status, headers, text = server.post("/v1/chat/completions", request)
    assert status == 200 and headers["warmset-fallback-for"] == "broken"
    chunks = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"good"} and text.endswith(b"data: [DONE]\n\n")


def test_the_caller_names_who_else_may_answer(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    raw = client.completions.with_raw_response.create(
        model="alone", prompt="x", max_tokens=2, extra_body={"models": ["worse", "good"]}
    )
    assert raw.parse().model == "good" and raw.headers["warmset-fallback-for"] == "alone"
    with pytest.raises(openai.NotFoundError) as failure:
        client.completions.create(model="alone", prompt="x", extra_body={"models": ["missing"]})
    assert failure.value.param == "models"


def test_if_nobody_can_the_wanted_model_says_why(server):
    status, headers, body = ask(server, "alone", models=["worse"])
    assert (status, body["error"]["code"]) == (503, "model_loading")
    assert "retry-after" in headers and "warmset-fallback-for" not in headers


def test_what_the_caller_sent_wrong_and_embeddings_have_no_fallback(server):
    status, _, body = ask(server, "broken", temperature=9)
    assert (status, body["error"]["param"]) == (400, "temperature")
    status, _, text = server.post("/v1/embeddings", {"model": "broken", "input": "x"})
    assert status == 503 and json.loads(text)["error"]["code"] == "model_load_failed"


def test_a_job_falls_back_too_and_says_so(server):
    body = {"model": "broken", "prompt": "x", "max_tokens": 2}
    _, found, text = server.post("/v1/completions", body, headers={"prefer": "respond-async, wait=60"})
    document = json.loads(text)
    assert document["model"] == "good" and found["warmset-model-digest"] == server.digest("good")
