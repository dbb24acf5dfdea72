"""`warmset gateway` in front of replicas that a test plays: what they get, what callers get, how it is run. The numbers of the
tests are those of the failure cases of routers; the machine's own (R1 to R4, R6, R7, R13, R14, R17, R19, R24) are tested in the core."""

import json
import random
import signal
import statistics
import threading
import time

import anthropic
import openai
import pytest
import warmset
from fleet import CHAT, Stream, chat, client_of, events_of, partial
from warmset import wait_for

WISH = b'"stream_options":{"include_usage":true},'


# What a replica gets and what comes back


def test_r22_a_body_reaches_the_replica_byte_for_byte(fleet):
    gateway = fleet.gateway("a")
    odd = '{ "messages" : [{"role":"user","content":"\\u00e9\\/ \\ud83d\\ude00 ü"}],"x_new":{"b":1,"a":[1e400,0.10,  -0]},\n'
    odd += '"model":"m","big":123456789012345678901234567890,"top_k":40}'
    headers = {"content-type": "application/json; charset=utf-8"}
    assert gateway.post(CHAT + "?beta=true&x=%20", odd.encode(), headers=headers)[0] == 200
    seen = fleet.replicas["a"].seen[-1]
    assert seen.body == odd.encode() and seen.path == CHAT + "?beta=true&x=%20"
    # A stream is asked for its usage, and is the same but for that.
    streamed = odd.replace('"top_k"', '"stream" : true,"top_k"').encode()
    assert gateway.post(CHAT, streamed, headers=headers)[0] == 200
    body = fleet.replicas["a"].seen[-1].body
    assert WISH in body and body.replace(WISH, b"", 1) == streamed
    # Whoever says something of this himself is not contradicted.
    for options in ("null", "{}", '{"include_usage":false}'):
        said = streamed.replace(b'"top_k"', f'"stream_options":{options},"top_k"'.encode())
        assert gateway.post(CHAT, said, headers=headers)[0] == 200
        assert fleet.replicas["a"].seen[-1].body == said


def test_r15_credentials_of_callers_stay_and_the_replicas_own_is_set(fleet, monkeypatch):
    monkeypatch.setenv("REPLICA_KEY", "replicas-own")
    replica = fleet.replica("a")
    gateway = fleet.gateway(config=f'[[replica]]\nurl = "{replica.url}/v1"\napi_key_env = "REPLICA_KEY"\n')
    headers = {
        "authorization": "Bearer secret-of-caller", "x-api-key": "secret-of-caller", "cookie": "secret-of-caller",
        "proxy-authorization": "secret-of-caller", "connection": "x-hop, keep-alive", "x-hop": "1", "te": "trailers",
        "traceparent": "00-a-b-01", "openai-beta": "new=1", "x-session-id": "s", "user-agent": "tests",
    }
    status, found, _ = gateway.post(CHAT, chat(), headers=headers)
    assert status == 200 and found["x-own"] == "kept" and found["warmset-worker"] == replica.url
    got = {name.lower(): value for name, value in replica.seen[-1].headers}
    assert got["authorization"] == "Bearer replicas-own"
    assert not any("secret" in value for value in got.values()), got
    assert {"x-hop", "te", "proxy-authorization", "cookie"}.isdisjoint(got), got
    for name in ("traceparent", "openai-beta", "x-session-id", "user-agent"):
        assert got[name] == headers[name]
    assert got["x-request-id"] == found["warmset-request-id"] and got["host"] == f"127.0.0.1:{replica.port}"
    # Without a key of its own a replica gets none.
    plain = fleet.gateway("b")
    assert plain.post(CHAT, chat(), headers=headers)[0] == 200
    assert "authorization" not in {name.lower() for name, _ in fleet.replicas["b"].seen[-1].headers}
    assert "replicas-own" not in gateway.log_path.read_text() + json.dumps(gateway.admin_json("/admin/v1/replicas"))


def test_r12_answers_that_are_no_text_and_errors_pass_as_they_are(fleet):
    gateway = fleet.gateway("a")
    for chunked in (False, True):
        asked = {"model": "m", "input": "hello", "behave": {"audio": 70_001, "chunked": chunked}}
        status, headers, body = gateway.post("/v1/audio/speech", asked)
        assert status == 200 and headers["content-type"] == "audio/mpeg"
        assert body == bytes(number % 256 for number in range(70_001))
        assert ("content-length" in headers) != chunked
    text = '{"error": {"message": "no such thing \\u00fc", "type": "invalid_request_error",  "code": "odd"}}'
    for status in (400, 404, 422):
        found = gateway.post(CHAT, chat(behave={"status": status, "text": text, "headers": {"x-why": "odd"}}))
        assert (found[0], found[1]["x-why"], found[2]) == (status, "odd", text.encode())
        assert found[1]["content-length"] == str(len(text))
    # An answer without a body has ended as well.
    assert gateway.post(CHAT, chat(behave={"status": 200, "text": ""}))[0] == 200
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    assert gateway.post("/v1/audio/transcriptions", form, headers=kind)[0] == 200
    assert fleet.replicas["a"].seen[-1].body == form
    assert gateway.metric("warmset_requests_total", model="m", outcome="ok") == 7
    assert gateway.metric("warmset_requests_total") == 7 and gateway.is_idle()


def test_models_are_listed_and_strangers_are_refused_in_the_callers_dialect(fleet):
    fleet.replica("a", models=["m", "org/large"])
    fleet.replica("b", models=["m", "n"])
    gateway = fleet.gateway("a", "b")
    client = client_of(gateway)
    assert [model.id for model in client.models.list()] == ["m", "n", "org/large"]
    assert client.models.retrieve("org/large").id == "org/large"
    with pytest.raises(openai.NotFoundError) as failed:
        client.chat.completions.create(model="other", messages=[])
    assert failed.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    messages = anthropic.Anthropic(base_url=gateway.url, api_key="x", max_retries=0)
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    # Only those who serve a model are asked for it. A request that names none is for whoever it reaches.
    for _ in range(6):
        assert gateway.post(CHAT, {**chat(), "model": "n"})[0] == 200
    assert not fleet.replicas["a"].seen and len(fleet.replicas["b"].seen) == 6
    assert gateway.post("/tokenize", {"content": "x"})[0] == 200
    # What configures or stops a replica is for nobody.
    for path in ("/v1/unload", "/slots/0", "/props", "/shutdown"):
        assert gateway.post(path, {})[0] == 404
    assert fleet.tries() == 7


def test_r16_usage_is_metered_and_shown_to_whoever_asked_for_it(fleet):
    gateway = fleet.gateway("a")
    client = client_of(gateway)
    silent = list(client.chat.completions.create(stream=True, **chat()))
    assert all(chunk.choices and chunk.usage is None for chunk in silent)
    asked = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **chat()))
    assert asked[-1].usage.prompt_tokens == 11 and len(asked) == len(silent) + 1
    assert client.chat.completions.create(**chat()).usage.prompt_tokens == 11
    tokens = lambda kind: gateway.metric("warmset_tokens_total", model="m", kind=kind)  # noqa: E731
    assert [tokens(kind) for kind in ("prompt", "completion", "cached")] == [33, 9, 15]
    # A stream that is cut, and one whose caller leaves, are metered by what came.
    cut = partial(gateway, chat(stream=True, behave={"cut_after": 2, "pieces": 9}))
    assert b"engine_lost" in cut[2] and tokens("completion") == 9 + 2
    stream = Stream(gateway, chat(stream=True, behave={"pieces": 9, "steps": True}))
    seen = fleet.replicas["a"].seen[-1]
    fleet.replicas["a"].step(seen, 4)
    while "<3>" not in stream.event():
        pass
    stream.close()
    assert seen.aborted.wait(60)
    wait_for(gateway.is_idle, "the request has ended")
    assert tokens("completion") == 9 + 2 + 4


# Streams


def test_r23_pieces_come_as_they_are_sent(fleet):
    gateway = fleet.gateway("a")
    replica, turns = fleet.replicas["a"], 40
    through, direct = [], []
    for options in ({}, {"stream_options": {"include_usage": True}}):
        for place, waits in ((gateway, through), (replica, direct)):
            stream = Stream(place, chat(stream=True, behave={"pieces": turns, "steps": True}, **options))
            stream.event()
            seen = replica.seen[-1]
            for number in range(turns):
                # The next piece is sent once this one is here: with any buffering this would never end.
                began = time.monotonic()
                replica.step(seen)
                assert f"<{number}>" in stream.event()
                waits.append(time.monotonic() - began)
    # Nagle's wait for an acknowledgement is 40 ms. Where the machine is so busy that it takes as long without a gateway, that counts.
    bound = max(0.035, 4 * statistics.median(direct))
    assert statistics.median(through) < bound, (statistics.median(through), statistics.median(direct))


def test_r18_long_prompts_hold_up_nobody(fleet):
    gateway = fleet.gateway("a", "b")
    body = json.dumps(chat("word " * 200_000)).encode()
    ended, long_waits, looks = threading.Event(), [], []

    def load():
        while not ended.is_set():
            began = time.monotonic()
            assert gateway.post(CHAT, body, headers={"content-type": "application/json"})[0] == 200
            long_waits.append(time.monotonic() - began)

    callers = [threading.Thread(target=load) for _ in range(6)]
    for caller in callers:
        caller.start()
    while len(long_waits) < 60 or len(looks) < 20:
        began = time.monotonic()
        assert gateway.get("/health/live")[0] == 200
        looks.append(time.monotonic() - began)
    ended.set()
    for caller in callers:
        caller.join()
    # However fast this machine is: whoever looks does not stand in line behind prompts.
    assert len(looks) >= 20 and statistics.median(looks) < statistics.median(long_waits)


# Operation


def test_a_gateway_that_is_told_to_stop_finishes_what_runs(fleet):
    gateway = fleet.gateway("a")
    stream = Stream(gateway, chat(stream=True, behave={"pieces": 3, "steps": True}))
    stream.event()
    gateway.process.send_signal(signal.SIGTERM)
    wait_for(lambda: gateway.get("/health/ready")[0] == 503, "nothing new is taken")
    status, headers, body = gateway.post(CHAT, chat())
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining") and "retry-after" in headers
    fleet.replicas["a"].step(fleet.replicas["a"].seen[-1], 3)
    assert events_of(stream.response.read())[-1] == "data: [DONE]"
    assert gateway.process.wait(60) == 0


def test_a_gateway_is_small_when_nobody_asks(fleet):
    gateway = fleet.gateway("a")
    assert gateway.post(CHAT, chat())[0] == 200
    # What the start needed was given back; the program goes on without it.
    assert warmset.resident_set_bytes(gateway.pid) < 18e6
    assert gateway.metric("warmset_requests_total") == 1


def test_decisions_say_why_and_prompts_come_back_to_whoever_has_them(fleet):
    gateway = fleet.gateway("a", "b", "c")
    for turn in range(4):
        for tenant in range(6):
            prompt = f"You are assistant number {tenant}. " * 60
            messages = [{"role": "system", "content": prompt}, {"role": "user", "content": f"question {turn}"}]
            status, headers, _ = gateway.post(CHAT, {"model": "m", "messages": messages}, headers={"warmset-explain": "1"})
            assert status == 200 and "replica=" in headers["warmset-decision"]
    decisions = gateway.decisions()
    assert len(decisions) == 24 and {decision["outcome"] for decision in decisions} == {"ok"}
    # All but the first of each tenant, and the few that come when owners are planned anew.
    warm = [decision for decision in decisions if decision["decision"] == "affinity"]
    assert len(warm) >= 12 and all(decision["expected_cached_tokens"] > 50 for decision in warm)
    first = gateway.decisions(limit=1)[0]
    assert first["candidates"][0]["replica"] == first["replica"]
    assert first["counted_cached_tokens"] == 5 and first["first_output_seconds"] > 0
    assert gateway.metric("warmset_routed_total", decision="affinity") == len(warm)
    assert gateway.metric("warmset_routed_total") == 24
    for name in ("warmset_time_to_first_token_seconds_count", "warmset_request_duration_seconds_count"):
        assert gateway.metric(name, model="m") == 24
    assert gateway.metric("warmset_replica_up") == 3


def test_a_name_stands_for_its_addresses(fleet):
    replica = fleet.replica("a")
    gateway = fleet.gateway(config=f'[[replica]]\nurl = "http://localhost:{replica.port}"\n')
    names = [view["name"] for view in gateway.admin_json("/admin/v1/replicas")["replicas"] if view["healthy"]]
    assert names == [f"http://localhost:{replica.port}@127.0.0.1:{replica.port}"]
    assert gateway.post(CHAT, chat())[0] == 200


def test_each_place_is_one_replica_however_it_is_written(fleet):
    replica = fleet.replica("a")
    table = "[[replica]]\nurl = \"{}\"\n".format
    gateway = fleet.gateway("a", config=table(f"HTTP://127.0.0.1:{replica.port}/v1/"))
    assert list(gateway.views()) == [replica.url]
    for same in (f"{replica.url}/", f"{replica.url}/v1", f"http://127.1:{replica.port}"):
        assert len(gateway.admin_json("/admin/v1/replicas", "POST", {"url": same})["replicas"]) == 1
    gateway.directory.joinpath("gateway.toml").write_text(table(replica.url) + table(f"{replica.url}/v1"))
    status, _, body = gateway.request("POST", "/admin/v1/reload", admin=True)
    assert status == 422 and b"named twice" in body
    assert gateway.admin_json("/admin/v1/replicas", "DELETE", {"url": f"{replica.url}//v1"})["replicas"] == []


def test_administration_answers_errors_as_json_in_plain_words(fleet):
    gateway = fleet.gateway("a")
    url = fleet.replicas["a"].url
    for method, path, body, status in (
        ("GET", "/admin/v1/nothing", None, 404),
        ("PUT", "/admin/v1/replicas", None, 405),
        ("POST", "/metrics", None, 405),
        ("POST", "/admin/v1/replicas", b"", 400),
        ("POST", "/admin/v1/replicas", b"[]", 400),
        ("POST", "/admin/v1/replicas", b"{", 400),
        ("POST", "/admin/v1/replicas", b"\xff", 400),
        ("POST", "/admin/v1/replicas", b'"text"', 400),
        ("POST", "/admin/v1/replicas", {"url": 7}, 400),
        ("POST", "/admin/v1/replicas", {"url": url, "slots": "x"}, 400),
        ("POST", "/admin/v1/replicas", {"url": url, "slots": -1}, 400),
        ("POST", "/admin/v1/replicas", {"url": url, "models": [1]}, 400),
        ("POST", "/admin/v1/replicas", {"url": url, "weight": {}}, 400),
        ("POST", "/admin/v1/replicas", {"url": url, "wait": 1}, 400),
        ("POST", "/admin/v1/replicas", {"url": "http://127.0.0.1:99999"}, 400),
        ("POST", "/admin/v1/replicas", {"url": f"http://127.0.0.1:{gateway.port}"}, 400),
        ("DELETE", "/admin/v1/replicas", {"url": url, "slots": 1}, 400),
        ("GET", "/admin/v1/decisions?limit=x", None, 400),
    ):
        found, headers, text = gateway.request(method, path, body, admin=True)
        assert (found, headers["content-type"]) == (status, "application/json"), (method, path, body, text)
        message = json.loads(text)["error"]["message"]
        for word in ("struct", "expected", "u32", "f64", "sequence", "map", "`", "Named", "Written"):
            assert word not in message, message
    assert list(gateway.views()) == [url]


def test_the_help_names_what_the_gateway_reads():
    text = warmset.run_command(["gateway", "--help"]).stdout
    assert "--replica" in text and "--json" in text and "--server" not in text and "--data" not in text
    assert "--data" in warmset.run_command(["model", "list", "--help"]).stdout
    for unused in (["--server", "127.0.0.1:1"], ["--data", "/tmp/x"]):
        with pytest.raises(warmset.CommandFailed) as failed:
            warmset.run_command(["gateway", *unused])
        assert failed.value.returncode == 2 and unused[0] in failed.value.stderr


def test_nothing_starts_without_a_replica_or_with_a_bad_one(tmp_path):
    for arguments in ([], ["--replica", "localhost"], ["--replica", "http://key:word@host"], ["--replica", "http://127.0.0.1:99999"], ["--admin-listen", "0.0.0.0:0"]):
        with pytest.raises(warmset.CommandFailed) as failed:
            warmset.run_command(["gateway", "--listen", "127.0.0.1:0", *arguments], timeout=30)
        assert "replica" in failed.value.stderr or "http://" in failed.value.stderr or "loopback" in failed.value.stderr
