"""`warmset gateway` when replicas fail, come and go, and callers leave. The numbers are those of the failure cases of routers."""

import asyncio
import contextlib
import email.utils
import json
import random
import socket
import threading
import time

import openai
import pytest
from fleet import CHAT, Stream, chat, client_of, events_of, partial
from warmset import resident_set_bytes, wait_for


def test_r8_a_broken_stream_says_so_and_repeats_nothing(fleet):
    gateway = fleet.gateway("a", "b")
    for shown in (False, True):
        options = {"stream_options": {"include_usage": True}} if shown else {}
        body = chat(stream=True, behave={"cut_after": 2, "pieces": 9}, **options)
        before = fleet.tries()
        status, _, text = partial(gateway, body)
        assert status == 200 and fleet.tries() == before + 1
        events = events_of(text)
        assert "[DONE]" not in text.decode() and [text.decode().count(f"<{n}>") for n in range(3)] == [1, 1, 0]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_lost" and error["type"] == "server_error"
    client = client_of(gateway)
    came = []
    with pytest.raises(openai.APIError) as failed:
        behave = {"behave": {"cut_after": 2, "pieces": 9}}
        for chunk in client.chat.completions.create(stream=True, extra_body=behave, **chat()):
            came.append(chunk.choices[0].delta.content)
    assert came == ["", "<0>", "<1>"] and failed.value.code == "engine_lost"
    # Cut in the middle of an event: nothing that is no event reaches whoever reads whole ones.
    body = chat(stream=True, behave={"cut_after": 1, "cut_inside": True, "pieces": 9})
    assert all(json.loads(event.removeprefix("data: ")) for event in events_of(partial(gateway, body)[2]))
    body["stream_options"] = {"include_usage": True}
    assert b"engine_lost" not in partial(gateway, body)[2]
    # Anthropic's clients know an event by its name.
    text = partial(gateway, {**body, "max_tokens": 5, "behave": {"cut_after": 1, "pieces": 9}}, "/v1/messages")[2]
    assert events_of(text)[-1].startswith('event: error\ndata: {"type":"error"') or b'"api_error"' in text
    wait_for(gateway.is_idle, "all have ended")
    assert gateway.metric("warmset_requests_total", outcome="failed") == gateway.metric("warmset_requests_total")


def test_r8_before_the_first_byte_another_replica_answers(fleet):
    gateway = fleet.gateway("a", "b")
    for fault in ({"drop": True}, {"status": 500}, {"status": 502}, {"status": 503}):
        for stream in (False, True):
            for name in ("a", "b"):
                wait_for(lambda: all(view["breaker"] == "closed" for view in gateway.views().values()), "both are asked")
                before = fleet.tries()
                status, _, body = gateway.post(CHAT, chat(stream=stream, behave={**fault, "at": [name]}))
                assert status == 200, (fault, body)
                if stream:
                    assert body.decode().count("<0>") == 1 and events_of(body)[-1] == "data: [DONE]"
                assert fleet.tries() - before in (1, 2)
    retried = [decision for decision in gateway.decisions() if decision["retried"]]
    assert retried and gateway.metric("warmset_retries_total", allowed="true") == len(retried)
    assert gateway.metric("warmset_requests_total") == gateway.metric("warmset_requests_total", outcome="ok") == 16
    # Both fail: two tries, one error, counted once.
    trusted = lambda view: view["breaker"] == "closed" and not view["paused_models"]  # noqa: E731
    wait_for(lambda: all(map(trusted, gateway.views().values())), lambda: f"both are asked: {gateway.views()}")
    before = fleet.tries()
    status, _, body = gateway.post(CHAT, chat(behave={"drop": True}))
    assert (status, json.loads(body)["error"]["code"], fleet.tries() - before) == (502, "engine_lost", 2)
    assert gateway.metric("warmset_requests_total") == 17


def test_r9_a_replica_that_never_answers_holds_up_nobody_else(fleet):
    gateway = fleet.gateway("a", "b", "c")
    deaf = fleet.replicas["b"]
    status, _, body = gateway.post(CHAT, chat(behave={"hang": True}), headers={"x-stainless-read-timeout": "0.5"})
    assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_passed")
    assert all(seen.aborted.wait(60) for replica in fleet.replicas.values() for seen in replica.seen)
    before = fleet.tries()
    deaf.deaf.set()
    statuses = [
        gateway.post(CHAT, chat(f"{n}" * 600), headers={"x-stainless-read-timeout": "0.5"})[0] for n in range(12)
    ]
    assert set(statuses) <= {200, 504} and statuses.count(504) <= 3, statuses
    wait_for(lambda: not gateway.views()[deaf.url]["healthy"], "its silence is seen")
    assert gateway.views()[deaf.url]["breaker"] != "closed" and "time" in gateway.views()[deaf.url]["trouble"]
    assert [gateway.post(CHAT, chat(f"{n}" * 700))[0] for n in range(20)] == [200] * 20
    assert fleet.tries() - before >= 20
    deaf.deaf.clear()
    wait_for(lambda: gateway.views()[deaf.url]["healthy"], "it answers again")
    reached = len(deaf.seen)
    wait_for(lambda: gateway.post(CHAT, chat(str(random.random()) * 99))[0] == 200 and len(deaf.seen) > reached, "it is asked")


def test_r10_a_replica_that_is_killed_and_comes_back_costs_at_most_one_request(fleet):
    gateway = fleet.gateway("a", "b")
    victim, ended, failed = fleet.replicas["b"], threading.Event(), []

    def load(number):
        turn = 0
        while not ended.is_set():
            turn += 1
            status, _, body = gateway.post(CHAT, chat(f"{number}-{turn} " * 50))
            if status != 200:
                failed.append((status, body))

    callers = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(victim.seen) > 20, "both are asked")
    victim.stop()
    wait_for(lambda: not gateway.views()[victim.url]["healthy"], "its end is seen")
    before = len(victim.seen)
    began = time.monotonic()
    victim.start()
    wait_for(lambda: len(victim.seen) > before + 5, "it is asked again")
    back = time.monotonic() - began
    ended.set()
    for caller in callers:
        caller.join()
    assert len(failed) <= 1, failed
    # It is looked at every second; peers need a minute.
    assert back < 20
    wait_for(lambda: gateway.views()[victim.url]["breaker"] == "closed", "it is trusted again")


def test_r11_a_replica_is_taken_away_and_put_back_without_a_restart(fleet):
    gateway = fleet.gateway("a", "b")
    leaving = fleet.replicas["b"]
    stream = None
    while stream is None:
        text = str(random.random()) * 40
        stream = Stream(gateway, chat(text, stream=True, behave={"pieces": 3, "steps": True}))
        if stream.response.getheader("warmset-worker") != leaving.url:
            stream.close()
            stream = None
    seen = leaving.seen[-1]
    listed = gateway.admin_json("/admin/v1/replicas", "DELETE", {"url": leaving.url})
    assert [view["url"] for view in listed["replicas"]] == [fleet.replicas["a"].url]
    before = len(leaving.seen)
    assert [gateway.post(CHAT, chat(f"{n}" * 500))[0] for n in range(30)] == [200] * 30
    assert len(leaving.seen) == before
    leaving.step(seen, 3)
    events = events_of(stream.response.read())
    assert events[-1] == "data: [DONE]" and sum("<" in event for event in events) == 3
    gateway.admin_json("/admin/v1/replicas", "POST", {"url": leaving.url, "slots": 4, "weight": 2.0})
    wait_for(lambda: gateway.post(CHAT, chat(str(random.random()) * 99))[0] == 200 and len(leaving.seen) > before, "it is back")
    # Nothing is taken that makes no sense, and nothing that is not there is taken away.
    for bad in ({"url": "x"}, {"url": leaving.url, "weight": 0}, {"url": leaving.url, "slots": 0}, {"uri": "x"}, {}):
        assert gateway.request("POST", "/admin/v1/replicas", bad, admin=True)[0] == 400, bad
    unknown = {"url": leaving.url, "api_key_env": "NO_SUCH_VARIABLE"}
    assert gateway.request("POST", "/admin/v1/replicas", unknown, admin=True)[0] == 400
    assert gateway.request("DELETE", "/admin/v1/replicas", {"url": "http://127.0.0.1:1"}, admin=True)[0] == 404
    assert len(gateway.views()) == 2
    # Without any there is a clear answer.
    for url in list(gateway.views()):
        gateway.admin_json("/admin/v1/replicas", "DELETE", {"url": url})
    status, headers, body = gateway.post(CHAT, chat())
    assert (status, json.loads(body)["error"]["code"]) == (503, "no_worker") and int(headers["retry-after"]) >= 1
    assert gateway.get("/health/ready")[0] == 503 and gateway.get("/health/live")[0] == 200


def test_r11_a_file_is_read_again(fleet):
    a, b = fleet.replica("a"), fleet.replica("b")
    table = "[[replica]]\nurl = \"{}\"\n".format
    gateway = fleet.gateway(config=table(a.url))
    assert list(gateway.views()) == [a.url]
    path = gateway.directory / "gateway.toml"
    path.write_text(table(a.url) + table(b.url))
    gateway.admin_json("/admin/v1/reload", "POST")
    assert set(gateway.views()) == {a.url, b.url}
    path.write_text(table(b.url) + "weight = -1\n")
    status, _, body = gateway.request("POST", "/admin/v1/reload", admin=True)
    assert status == 422 and b"weight" in body and set(gateway.views()) == {a.url, b.url}
    path.write_text(table(b.url))
    gateway.admin_json("/admin/v1/reload", "POST")
    assert [gateway.post(CHAT, chat(f"{n}"))[0] for n in range(5)] == [200] * 5
    assert not a.seen and len(b.seen) == 5


def test_r20_replicas_come_and_go_under_load_and_every_request_ends(fleet):
    gateway = fleet.gateway("a", "b", "c")
    moving = [fleet.replicas["b"], fleet.replicas["c"]]
    ended, answers = threading.Event(), []

    def load(number):
        turn = 0
        while not ended.is_set():
            turn += 1
            answers.append(gateway.post(CHAT, chat(f"{number}-{turn} " * 30, stream=turn % 2 == 0)))

    callers = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for turn in range(20):
        replica, before = moving[turn % 2], len(answers)
        gateway.admin_json("/admin/v1/replicas", "DELETE", {"url": replica.url})
        wait_for(lambda: len(answers) > before + 4, "requests go on")
        gateway.admin_json("/admin/v1/replicas", "POST", {"url": replica.url})
    ended.set()
    for caller in callers:
        caller.join()
    assert {status for status, _, _ in answers} == {200}
    assert all(b"[DONE]" in body for _, headers, body in answers if headers["content-type"] == "text/event-stream")
    wait_for(gateway.is_idle, "nothing is left of them")


@pytest.mark.parametrize("status", [429, 503])
def test_r21_a_hint_to_wait_is_honoured_and_nobody_is_asked_again_and_again(fleet, status):
    gateway = fleet.gateway("a")
    hint = {"status": status, "headers": {"retry-after": "7"}, "text": '{"error":{"message":"busy"}}'}
    found = gateway.post(CHAT, chat(behave=hint))
    assert found[0] == status and found[1]["retry-after"] == "7" and b"busy" in found[2]
    # Until then the replica is left alone, and callers hear for how long.
    began = time.monotonic()
    later = gateway.post(CHAT, chat())
    if time.monotonic() - began < 6:
        assert later[0] == 503 and 1 <= int(later[1]["retry-after"]) <= 7
        assert fleet.tries() == 1
    # Where there is another one it answers instead.
    gateway = fleet.gateway("a", "b")
    names = {}
    for name in ("a", "b"):
        found = gateway.post(CHAT, chat("x", behave={**hint, "at": [name]}))
        names[name] = found[0]
    assert names == {"a": 200, "b": 200} or sorted(names.values()) == [200, status]


def test_r21_a_replica_that_fails_is_not_asked_again_and_again(fleet):
    gateway = fleet.gateway("a")
    assert gateway.post(CHAT, chat(behave={"status": 500}))[0] == 500
    assert fleet.tries() == 1
    for _ in range(50):
        gateway.post(CHAT, chat(behave={"status": 500}))
    # The breaker lets a request through now and then, and each request is tried once.
    assert fleet.tries() < 25
    assert gateway.metric("warmset_requests_total") == 51


def test_r21_a_hint_is_capped_read_as_a_date_too_and_shown(fleet):
    gateway = fleet.gateway("a", "b", "c")
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    for hint, least, most in (("86400", 120, 120), (date, 90, 100), ("9" * 30, 120, 120)):
        behave = {"status": 429, "headers": {"retry-after": hint}, "text": '{"error":{"message":"busy"}}'}
        asked = [view["url"] for view in gateway.views().values() if not view["paused_models"]]
        assert len(asked) > 0
        found = gateway.post(CHAT, chat(behave=behave))
        while found[0] == 200 and len(asked) > 1:
            found = gateway.post(CHAT, chat(behave=behave))
        assert found[0] == 429 and least <= int(found[1]["retry-after"]) <= most, (hint, found)
        pauses = [pause for view in gateway.views().values() for pause in view["paused_models"]]
        assert pauses and all(pause["model"] == "m" and pause["reason"] == "retry_after" for pause in pauses)
        assert all(time.time() + 60 < pause["until"] < time.time() + 121 for pause in pauses), pauses
        assert {view["breaker"] for view in gateway.views().values()} == {"closed"}
        for url in asked:
            gateway.admin_json("/admin/v1/replicas", "POST", {"url": url, "slots": random.randrange(10, 10_000)})


def test_a_model_that_fails_leaves_its_replicas_other_models_alone(fleet):
    fleet.replica("a", models=["m", "n"])
    gateway = fleet.gateway("a")
    for _ in range(12):
        gateway.post(CHAT, chat(behave={"status": 500}))
    view = gateway.views()[fleet.replicas["a"].url]
    assert view["breaker"] == "closed" and view["healthy"]
    for pause in view["paused_models"]:
        assert (pause["model"], pause["reason"]) == ("m", "failing") and pause["until"] < time.time() + 60
    assert gateway.metric("warmset_replica_up") == 1
    before = fleet.tries()
    assert before < 12, "the failing model is not asked again and again"
    assert [gateway.post(CHAT, {**chat(), "model": "n"})[0] for _ in range(20)] == [200] * 20
    # It comes back by itself, as soon as it answers.
    wait_for(lambda: gateway.post(CHAT, chat())[0] == 200, "the model is asked again")
    assert [gateway.post(CHAT, chat())[0] for _ in range(5)] == [200] * 5
    assert gateway.views()[fleet.replicas["a"].url]["paused_models"] == []


def test_a_replica_that_wants_another_protocol_has_not_answered(fleet):
    gateway = fleet.gateway("a")
    for status in (101, 102):
        found = gateway.post(CHAT, chat(behave={"status": status, "headers": {"upgrade": "x", "connection": "upgrade"}}),
                             headers={"x-stainless-read-timeout": "5"})
        # What is no answer is waited for, or is none.
        assert found[0] in (502, 504) and json.loads(found[2])["error"]["code"] in ("engine_lost", "deadline_passed")
    gateway = fleet.gateway("a", "b")
    for name in ("a", "b"):
        behave = {"status": 101, "headers": {"upgrade": "x", "connection": "upgrade"}, "at": [name]}
        wait_for(lambda: all(view["breaker"] == "closed" for view in gateway.views().values()), "both are asked")
        assert gateway.post(CHAT, chat(name * 500, behave=behave))[0] == 200


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("process_start_time_seconds 1.7e9\n", "process_start_time_seconds 1.8e9\n"),
        ("llamacpp:prompt_tokens_total 4000\n", "llamacpp:prompt_tokens_total 10\n"),
        ('sglang:prompt_tokens_total{a="b"} 4000\n', 'sglang:prompt_tokens_total{a="b"} 0\n'),
    ],
)
def test_r14_another_life_of_a_replica_is_known_by_its_figures(fleet, before, after):
    replica = fleet.replica("a")
    replica.figures = before
    gateway = fleet.gateway("a")
    held = lambda: gateway.views()[replica.url]["held_tokens"]  # noqa: E731
    assert gateway.post(CHAT, chat("word " * 2000))[0] == 200 and held() > 200
    # What only grows says nothing.
    replica.figures = before.replace("4000", "5000")
    looks = gateway.post(CHAT, chat("word " * 2000))
    assert looks[0] == 200 and held() > 200
    replica.figures = after
    wait_for(lambda: held() == 0, "what it held is forgotten")


def test_r5_a_caller_that_leaves_is_seen_by_the_replica(fleet):
    gateway = fleet.gateway("a")
    replica = fleet.replicas["a"]
    # In the middle of a stream that has nothing to say, and before the first byte.
    stream = Stream(gateway, chat(stream=True, behave={"pieces": 3, "steps": True}))
    stream.event()
    stream.close()
    assert replica.seen[-1].aborted.wait(60)
    body = json.dumps(chat(behave={"hang": True})).encode()
    connection = socket.create_connection(("127.0.0.1", gateway.port))
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    wait_for(lambda: len(replica.seen) == 2 and replica.seen[-1].begun.is_set(), "it is on its way")
    connection.close()
    assert replica.seen[-1].aborted.wait(60)
    wait_for(gateway.is_idle, "nothing is left of them")
    assert gateway.metric("warmset_requests_total", outcome="cancelled") == 2


def test_r5_thousands_that_leave_at_any_point_leave_nothing_behind(fleet):
    gateway = fleet.gateway("a", "b")
    asyncio.run(leave_at_random(gateway, 10_000, 64))
    wait_for(gateway.is_idle, "all counters are back at zero")
    for replica in fleet.replicas.values():
        for seen in list(replica.seen):
            assert wait_for(lambda: seen.aborted.is_set() or seen.ended.is_set(), "the replica saw it end")
    metrics = gateway.metrics()
    assert all(value == 0 for (name, _), value in metrics.items() if name == "warmset_replica_running_requests")
    assert gateway.post(CHAT, chat())[0] == 200
    if "a replica does not answer" in gateway.log_path.read_text():
        # A look at a replica that this process was too busy to answer in time: that is a fault, until it answers again.
        closed = lambda: all(view["breaker"] == "closed" for view in gateway.views().values())  # noqa: E731
        wait_for(lambda: gateway.post(CHAT, chat(str(random.random()) * 99))[0] == 200 and closed(), "both are trusted again")
    assert {view["breaker"] for view in gateway.views().values()} == {"closed"}, "callers who leave are no faults"


async def leave_at_random(gateway, count, at_once):
    chance, gate = random.Random(7), asyncio.Semaphore(at_once)

    async def one(number):
        async with gate:
            behave = {"pieces": 500} if number % 3 else {"hang": True}
            body = json.dumps(chat(f"{number % 50} " * 300, stream=number % 2 == 0, behave=behave)).encode()
            request = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            # In its head, in its body, before its first byte or anywhere in its stream.
            writer.write(request[: chance.choice([40, len(request) // 2, len(request), len(request), len(request)])])
            with contextlib.suppress(asyncio.TimeoutError, OSError, asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readexactly(chance.randrange(1, 20_000)), chance.random() * 0.05)
            writer.transport.abort()

    await asyncio.gather(*(one(number) for number in range(count)))


def test_a_slow_reader_takes_bounded_memory_and_holds_up_nobody(fleet):
    gateway = fleet.gateway("a")
    before = resident_set_bytes(gateway.pid)
    size = 64 << 20
    stream = Stream(gateway, chat(stream=True, behave={"pieces": size >> 14, "bytes": 1 << 14}), receive_buffer_bytes=1 << 18)
    seen = fleet.replicas["a"].seen[-1]
    last = [-1, 0]

    def stands_still():
        last[1] = last[1] + 1 if last[0] == seen.bytes_sent else 0
        last[0] = seen.bytes_sent
        return last[1] > 25 and seen.bytes_sent > 0

    wait_for(stands_still, "the replica has to wait")
    assert seen.bytes_sent < size // 2 and not seen.ended.is_set()
    assert resident_set_bytes(gateway.pid) - before < 16 << 20
    assert gateway.post(CHAT, chat())[0] == 200
    # It gets everything in the end.
    text = stream.response.read()
    assert text.count(b"data: ") == (size >> 14) + 3 and text.endswith(b"data: [DONE]\n\n")
