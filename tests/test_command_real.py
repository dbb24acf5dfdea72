"""A model that a command serves, with a real server: llama.cpp's own, out of a Python package in an environment of its
own. Official clients in front, the operating system's word on processes behind."""

import json
import os
import signal
import threading

import openai
import pytest
from warmset import ROOT, MEBIBYTE, alive, descendants, free_ports, wait_for

SERVERS = ROOT / "tests" / "servers"
PYTHON = ROOT / "build" / "xllamacpp-venv" / "bin" / "python"
COMMAND = f"{PYTHON} {SERVERS / 'llama_server.py'} --model ${{MODEL}} --port ${{PORT}} --ctx-size ${{TOTAL_CONTEXT_TOKENS}}"
COMMAND += " --parallel ${PARALLEL} --threads 1 --alias ${NAME}"


def runtime(name="llama-server", command=COMMAND, **fields):
    return {"name": name, "command": command, **fields}


def model(name, source, runtime="llama-server", **fields):
    return {"name": name, "source": source, "runtime": runtime, "context_tokens": 512, "parallel": 2, **fields}


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120, max_retries=0)


def upstreams(server, words="llama_server.py"):
    """Processes below the server that run the command."""
    found = []
    for pid in descendants(server.pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if words.encode() in file.read():
                    found.append(pid)
        except OSError:
            pass
    return found


@pytest.fixture(scope="module")
def server(module_pool, models):
    embeddings = runtime("llama-embeddings", COMMAND + " --embeddings")
    listed = [model("chat", models["q4_1"]), model("vectors", models["q4_0"], "llama-embeddings")]
    return module_pool(memory="2GiB", runtime=[runtime(), embeddings], models=listed)


def test_a_server_is_started_on_demand_and_answers_the_official_client(server):
    client = client_of(server)
    question = [{"role": "user", "content": "Name a colour."}]
    starts = []
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(
            model="chat", messages=question, max_tokens=8, temperature=0
        )
        starts.append(raw.headers["warmset-start"])
    answer = raw.parse()
    assert starts == ["cold", "warm"]
    assert answer.choices[0].message.content.strip()
    assert answer.model == "chat" and raw.headers["warmset-model-digest"] == server.digest("chat")
    assert answer.usage.prompt_tokens > 10 and 0 < answer.usage.completion_tokens <= 8
    # The second time its server had the whole prompt in its cache.
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    completion = client.completions.create(model="chat", prompt="One, two, three,", max_tokens=4, temperature=0, n=1)
    assert completion.choices[0].text.strip() and completion.usage.completion_tokens <= 4
    assert len(upstreams(server)) == 1


def test_streams_end_with_usage_and_stop_texts_hold(server):
    client = client_of(server)
    question = [{"role": "user", "content": "Count to five."}]
    options = {"model": "chat", "messages": question, "temperature": 0, "max_tokens": 24}
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = client.chat.completions.create(**options)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    pieces = client.completions.create(model="chat", prompt="A B C D", max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces if chunk.choices).strip()


def test_embeddings_come_from_a_server_made_for_them(server):
    client = client_of(server)
    answer = client.embeddings.create(model="vectors", input=["late payment", "invoice overdue"])
    assert [item.index for item in answer.data] == [0, 1]
    assert len(answer.data[0].embedding) == 576 and answer.usage.prompt_tokens > 0
    # The other one is not made for it, and says so.
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="chat", input="x")
    assert "embeddings" in refused.value.message


def test_a_prompt_beyond_the_context_is_the_callers_fault(server):
    with pytest.raises(openai.BadRequestError) as refused:
        client_of(server).completions.create(model="chat", prompt="word " * 3000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"


def test_the_ledger_holds_the_whole_tree_and_show_and_logs_know_the_runtime(server):
    server.cli("model", "load", "chat")
    document = server.cli_json("model", "show", "chat")
    assert (document["engine"], document["runtime"], document["state"]) == ("command", "llama-server", "ready")
    assert document["measured"] and document["architecture"]
    size = document["size_bytes"]
    # Weights of 94 MB mapped, Python and llama.cpp beside them.
    assert size < document["steady_bytes"] < size + 600 * MEBIBYTE, document["steady_bytes"]
    lines = server.cli_json("model", "logs", "chat")["lines"]
    assert any("listening on http://127.0.0.1:" in line for line in lines), lines[-5:]
    assert "llama-server" in server.cli("model", "show", "chat").stdout


def test_a_profile_measures_speed_through_the_server(server):
    # Most of a minute where nothing else runs.
    measured = server.cli_json("model", "profile", "chat", timeout=1200)
    assert measured["decode_tokens_per_second"] > 0 and measured["prefill_tokens_per_second"] > 0
    assert measured["load_seconds"] > 0 and measured["steady_bytes"] > 0


def test_unloading_leaves_no_process(server):
    server.cli("model", "load", "chat")
    before = upstreams(server)
    assert before
    server.cli("model", "unload", "chat")
    assert not [pid for pid in before if alive(pid) and pid in upstreams(server, "--alias\0chat")]
    assert server.cli_json("model", "show", "chat")["state"] == "absent"


def test_a_server_killed_in_mid_stream_ends_the_stream_with_an_error_and_comes_back(server):
    client = client_of(server)
    server.cli("model", "load", "chat")
    stream = client.completions.create(
        model="chat", prompt="Once upon a time", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    [upstream] = upstreams(server, "--alias\0chat")
    os.kill(upstream, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    answer = client.completions.create(model="chat", prompt="One", max_tokens=1)
    assert answer.usage.completion_tokens == 1


def test_a_caller_that_hangs_up_frees_the_slot_of_the_server(server):
    client = client_of(server)
    for _ in range(3):
        stream = client.completions.create(
            model="chat", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    # Two slots, three abandoned streams: were any still running, this would wait for hundreds of tokens.
    wait_for(
        lambda: server.cli_json("model", "show", "chat").get("in_flight") == 0, "no request runs after its caller left"
    )


def test_killing_the_server_leaves_no_process_of_any_command(pool, models):
    server = pool(memory="1GiB", runtime=[runtime()], models=[model("chat", models["q4_1"], pin=True)])
    wait_for(lambda: server.cli_json("model", "show", "chat")["state"] == "ready", "the pinned model is ready")
    below = descendants(server.pid)
    assert len(below) >= 3
    server.kill()
    wait_for(lambda: not any(map(alive, below)), lambda: f"nothing of {below} is left")


def test_two_runtimes_that_cannot_share_a_process_run_side_by_side(pool, models):
    """Two environments: another interpreter, other variables, one real server and one that is not llama.cpp at all."""
    crafted = f"python3 {SERVERS / 'crafted_server.py'} --port ${{PORT}}"
    runtimes = [runtime(env={"WHICH": "one"}), runtime("other", crafted, env={"WHICH": "${NAME}"}, cwd="/tmp")]
    listed = [model("chat", models["q4_1"]), {"name": "talk", "source": "command:org/talk", "runtime": "other"}]
    server = pool(memory="1GiB", runtime=runtimes, models=listed)
    client = client_of(server)
    texts = {}

    def ask(name):
        question = [{"role": "user", "content": "Hi."}]
        answer = client.chat.completions.create(model=name, messages=question, max_tokens=4)
        texts[name] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=[name]) for name in ("chat", "talk")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = json.loads(texts["talk"])
    assert told["env"]["WHICH"] == "talk" and told["cwd"] == "/tmp" and texts["chat"].strip()
    states = {name: server.cli_json("model", "show", name)["state"] for name in ("chat", "talk")}
    assert states == {"chat": "ready", "talk": "ready"}
    entries = server.ledger()["entries"]
    assert all(entry["measured"] for entry in entries) and len(entries) == 2


def test_memory_for_one_makes_two_take_turns_and_the_first_one_s_server_ends(pool, models):
    listed = [model("one", models["q4_1"]), model("two", models["q4_0"])]
    residency = {"minimum_seconds": 0, "priority_protection_seconds": 0}
    server = pool(memory="400MiB", reserve="64MiB", runtime=[runtime()], models=listed, residency=residency)
    client = client_of(server)
    for name in ("one", "two", "one"):
        client.completions.create(model=name, prompt="One", max_tokens=1)
        assert len(upstreams(server)) == 1, name
    assert server.metric("warmset_model_evictions_total", reason="memory") >= 2


def test_log_probabilities_and_schemas_pass_through(server):
    client = client_of(server)
    question = [{"role": "user", "content": "Name a colour."}]
    options = {"model": "chat", "messages": question, "max_tokens": 3, "temperature": 0}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **options)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 3 and all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    text = client.completions.create(model="chat", prompt="One, two,", max_tokens=2, temperature=0, logprobs=1)
    assert len(text.choices[0].logprobs.token_logprobs) == 2
