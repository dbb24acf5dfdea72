"""The official `openai` package against a real model: what it sends is understood, what it expects comes back."""

import base64
import json
import struct

import openai
import pytest
from warmset import synthetic_model, wait_for

MODEL = "smollm2"


@pytest.fixture(scope="module")
def server(module_pool, models):
    spec = {"name": MODEL, "source": models["q4_1"], "context_tokens": 1024, "aliases": ["default"]}
    return module_pool(memory="1GiB", models=[spec])


def client_of(server, **options):
    options.setdefault("max_retries", 0)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120, **options)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def chat(client, content="Say hello.", **options):
    options = {"max_tokens": 12, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **options)


def test_models_are_listed_and_shown(client, server):
    listed = {model.id: model for model in client.models.list()}
    assert MODEL in listed
    assert listed[MODEL].object == "model"
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as failure:
        client.models.retrieve("missing")
    assert failure.value.code == "model_not_found"


def test_chat_answers_and_says_which_digest_answered(client, server):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Name a colour."}], max_tokens=8, temperature=0
    )
    answer = raw.parse()
    digest = server.digest(MODEL)
    assert answer.choices[0].message.content.strip()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 8
    assert raw.headers["warmset-model-digest"] == digest
    assert raw.headers["warmset-start"] in ("warm", "cold")
    assert raw.headers["warmset-request-id"]
    assert answer.system_fingerprint == "fp_" + digest.removeprefix("sha256:")[:12]


def test_the_first_request_is_cold_and_the_next_warm(server, client):
    server.cli("model", "unload", MODEL)
    starts = []
    for _ in range(2):
        raw = client.completions.with_raw_response.create(model=MODEL, prompt="One", max_tokens=1)
        starts.append(raw.headers["warmset-start"])
    assert starts == ["cold", "warm"]


def test_a_stream_is_as_the_client_expects(client):
    stream = chat(client, "Count to five.", stream=True, stream_options={"include_usage": True}, max_tokens=16)
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text.strip()
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len(reasons) == 1 and reasons[0] in ("stop", "length")
    assert chunks[-1].choices == []
    assert 0 < chunks[-1].usage.completion_tokens <= 16
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_usage_ends_with_a_reason(client):
    chunks = list(chat(client, stream=True))
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_raw_stream_ends_with_done(server):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    status, headers, text = server.post("/v1/chat/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = [line for line in text.decode().split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-1])


def test_streamed_and_whole_answers_agree(client):
    whole = chat(client, "What is the capital of France?", seed=1).choices[0].message.content
    stream = chat(client, "What is the capital of France?", seed=1, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole


def test_max_tokens_is_kept(client):
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0)
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"
    answer = chat(client, "Tell a long story.", max_tokens=openai.NOT_GIVEN, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_a_seed_repeats_an_answer(client):
    options = {"temperature": 1.0, "max_tokens": 16, "model": MODEL, "prompt": "The weather today"}
    first, again, other = (client.completions.create(seed=seed, **options).choices[0].text for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_stop_texts_end_an_answer_and_are_not_part_of_it(client):
    options = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**options).choices[0].text
    stop = whole.strip()[3:6]
    assert len(stop) == 3
    cut = client.completions.create(stop=[stop, "never written"], **options).choices[0]
    assert cut.finish_reason == "stop"
    assert stop not in cut.text
    assert cut.text == whole[: whole.index(stop)]
    streamed = client.completions.create(stop=stop, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == cut.text


def test_several_choices(client):
    answer = chat(client, "Give me a word.", n=3, temperature=1.0, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    stream = chat(client, "Give me a word.", n=2, temperature=1.0, stream=True)
    assert {choice.index for chunk in stream for choice in chunk.choices} == {0, 1}


def test_content_parts_and_system_messages(client):
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "yes."}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert answer.choices[0].message.content


def test_completions_take_tokens(client):
    answer = client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649, 314], max_tokens=3, temperature=0)
    assert answer.usage.prompt_tokens == 5
    assert answer.choices[0].text


def test_embeddings_in_both_encodings_E27(client):
    texts = ["The invoice is overdue.", "A payment is late.", "Cats sleep all day."]
    default = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64
    floats = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [entry.index for entry in default.data] == [0, 1, 2]
    for one, other in zip(default.data, floats.data, strict=True):
        assert len(one.embedding) == 576
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert default.usage.prompt_tokens > 0
    norm = sum(value * value for value in floats.data[0].embedding)
    assert norm == pytest.approx(1.0, abs=1e-3)


def test_base64_is_little_endian_floats_E27(server):
    body = {"model": MODEL, "input": "x", "encoding_format": "base64"}
    status, _, text = server.post("/v1/embeddings", body)
    assert status == 200
    packed = base64.b64decode(json.loads(text)["data"][0]["embedding"])
    assert len(struct.unpack(f"<{len(packed) // 4}f", packed)) == 576


def test_an_alias_is_the_same_model(client, server):
    raw = client.completions.with_raw_response.create(model="default", prompt="x", max_tokens=1)
    assert raw.headers["warmset-model-digest"] == server.digest(MODEL)


def test_an_unknown_model_is_a_404_that_retrying_cannot_cure(client):
    with pytest.raises(openai.NotFoundError) as failure:
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
    error = failure.value
    assert error.code == "model_not_found"
    assert error.param == "model"
    assert "gpt-4o" in error.message
    assert error.response.headers["x-should-retry"] == "false"


BAD_PARAMETERS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"stop": ["a"] * 100}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": "usage"}, "stream_options"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "not a name"}}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}}, "response_format"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"service_tier": "gold"}, "service_tier"),
]


@pytest.mark.parametrize("fields,param", BAD_PARAMETERS, ids=[str(fields)[:40] for fields, _ in BAD_PARAMETERS])
def test_bad_parameters_are_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as failure:
        chat(client, extra_body=fields)
    assert failure.value.type == "invalid_request_error"
    assert failure.value.param is not None and failure.value.param.split(".")[0].split("[")[0] == param
    assert failure.value.message


def test_a_prompt_longer_than_the_context_is_refused(client):
    with pytest.raises(openai.BadRequestError) as failure:
        chat(client, "word " * 3000)
    assert failure.value.code == "context_length_exceeded"
    assert "1024" in failure.value.message


def test_an_answer_ends_where_the_context_does(client):
    answer = client.completions.create(model=MODEL, prompt="word " * 1000, max_tokens=500, temperature=0)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.total_tokens <= 1024


def test_the_client_retries_a_cold_refusal_until_the_model_is_warm(pool, tmp_path):
    model = synthetic_model(tmp_path, "cold", load_seconds=1.0)
    server = pool(models=[{"name": "cold", "source": model, "engine": "synthetic", "cold": "reject"}])
    with pytest.raises(openai.InternalServerError) as failure:
        client_of(server).completions.create(model="cold", prompt="x", max_tokens=1)
    assert failure.value.status_code == 503
    assert failure.value.code == "model_loading"
    assert 0 < float(failure.value.response.headers["retry-after"]) <= 120
    answer = client_of(server, max_retries=10).completions.create(model="cold", prompt="x", max_tokens=1)
    assert answer.choices[0].text is not None


def test_a_full_queue_is_a_429_and_the_client_gets_through(pool, tmp_path):
    model = synthetic_model(tmp_path, "slow", decode_seconds_per_token=0.05)
    spec = {"name": "slow", "source": model, "engine": "synthetic", "max_concurrency": 1, "parallel": 1}
    server = pool(models=[spec], gateway={"queue_limit": 1})
    server.complete("slow")
    patient, impatient = client_of(server, max_retries=20), client_of(server)

    def ask(client, max_tokens):
        try:
            return client.completions.create(model="slow", prompt="x", max_tokens=max_tokens).choices[0].finish_reason
        except openai.APIStatusError as error:
            assert 0 < float(error.response.headers["retry-after"]) <= 120
            return error.status_code

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as threads:
        # Answers of two seconds: all six are there before the first one has its answer.
        outcomes = list(threads.map(lambda _: ask(impatient, 40), range(6)))
        assert 429 in outcomes, outcomes
        assert {outcome for outcome in outcomes if outcome != 429} <= {"length", "stop"}
        outcomes = list(threads.map(lambda _: ask(patient, 8), range(6)))
        assert set(outcomes) <= {"length", "stop"}, outcomes


def test_a_load_that_cannot_succeed_is_not_retried(pool, tmp_path):
    model = synthetic_model(tmp_path, "broken", failure="load_fails")
    server = pool(models=[{"name": "broken", "source": model, "engine": "synthetic"}])
    with pytest.raises(openai.APIStatusError) as failure:
        client_of(server, max_retries=5).completions.create(model="broken", prompt="x", max_tokens=1)
    assert failure.value.status_code >= 500
    assert failure.value.response.headers["x-should-retry"] == "false"
    assert sum(value for (name, labels), value in server.metrics().items()
               if name == "warmset_requests_total" and ("model", "broken") in labels) == 1


def test_a_client_that_leaves_frees_its_slot(server, client):
    # It does not end by itself before anybody looks.
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    wait_for(lambda: server.metric("warmset_running_requests", model=MODEL) == 1, "the request runs")
    stream.close()
    wait_for(lambda: server.metric("warmset_running_requests", model=MODEL) == 0, "its slot is free")
