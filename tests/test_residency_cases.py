"""Faults that real systems had when they load and evict models, live: each test is one of them and what is owed instead.

The models are synthetic (bytes and times declared, memory really allocated), so that a moment can be hit; the processes,
the server and its HTTP are real. Each test's name ends with the case it shows.
"""

import http.client
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import warmset
from warmset import Events, Sampler, percentile, synthetic_model, wait_for

# What an engine's process holds beside its model, rounded up: so little that one model more never fits.
PROCESS_MEBIBYTES = 4
RESERVE_MEBIBYTES = 64


def memory_for(count, megabytes):
    """A budget that holds `count` models of this size and not one more."""
    return f"{RESERVE_MEBIBYTES + count * (megabytes + PROCESS_MEBIBYTES)}MiB"


def pool_for(pool, count, megabytes, models, **tables):
    return pool(memory=memory_for(count, megabytes), reserve=f"{RESERVE_MEBIBYTES}MiB", models=models, **tables)


def spec(directory, name, megabytes=64, model=None, **fields):
    # A byte more or less makes files of the same declaration distinct.
    unique = sum(name.encode()) / warmset.MEBIBYTE
    source = synthetic_model(directory, name, megabytes + unique, **fields)
    return {"name": name, "source": source, "engine": "synthetic", **(model or {})}


def state(server, name):
    return next(model["state"] for model in server.admin_json("/admin/v1/models")["models"] if model["name"] == name)


def wait_for_state(server, name, *wanted, seconds=warmset.PATIENCE_SECONDS):
    wait_for(lambda: state(server, name) in wanted, lambda: f"{name} is {wanted}, not {state(server, name)}", seconds)


def entry(server, name):
    return next((entry for entry in server.ledger()["entries"] if entry["name"] == name), None)


def pid_of(server, name):
    """The engine process of a loaded model."""
    digest = server.digest(name)
    workers = server.admin_json("/admin/v1/workers")["workers"]
    for worker in workers:
        for engine in worker.get("engines", []):
            if engine["digest"] == digest:
                return engine["pid"]
    return None


def ask(server, name, **options):
    """One request whose answer must be whole."""
    status, headers, body = server.complete(name, **options)
    assert status == 200, (name, status, body)
    return headers


@contextmanager
def waiting_for_ever(server, name):
    """A request that waits for a load that never ends, until the server is killed."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.complete, name)
        try:
            yield
            assert not waiting.done(), waiting.result()
        finally:
            server.kill()
        assert isinstance(waiting.exception(), (http.client.HTTPException, OSError)), waiting.exception()


def facts(events, kind, name=None):
    return [event for event in events.all() if event["type"] == kind and name in (None, event.get("model"))]


def test_a_cold_model_is_not_evicted_before_its_own_request_has_run_L1(pool, tmp_path):
    server = pool_for(pool, 1, 64, [spec(tmp_path, name, load_seconds=0.3, decode_seconds_per_token=0.02) for name in "ab"])
    rounds = 3
    with Events(server) as events, ThreadPoolExecutor(2) as threads:
        for _ in range(rounds):
            for name in "ab":
                server.cli("model", "unload", name)
            first = threads.submit(ask, server, "a", max_tokens=5)
            wait_for(lambda: state(server, "a") != "absent", "a is on its way")
            second = threads.submit(ask, server, "b", max_tokens=5)
            assert first.result()["warmset-start"] == second.result()["warmset-start"] == "cold"
        # There is room for one: whoever had left before its own request ran would have been loaded again for it.
        begun = lambda: [event["model"] for event in facts(events, "load_started")]  # noqa: E731
        wait_for(lambda: len(begun()) >= 2 * rounds, lambda: f"all loads are told: {begun()}")
        assert begun() == ["a", "b"] * rounds


def test_simultaneous_cold_requests_all_finish_L2(pool, tmp_path):
    names = "abcd"
    server = pool_for(pool, 1, 64, [spec(tmp_path, name, load_seconds=0.2) for name in names])
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            ask(server, "a")
            list(threads.map(lambda name: ask(server, name), "bcd"))
    assert server.metric("warmset_oldest_pending_load_seconds") == 0


def test_a_victim_that_gets_a_request_does_not_block_the_load_L3(pool, tmp_path):
    server = pool_for(pool, 1, 32, [spec(tmp_path, name, 32, decode_seconds_per_token=0.001) for name in "ab"])
    choice = random.Random(1)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda name: ask(server, name, max_tokens=2), [choice.choice("ab") for _ in range(120)]))
    wait_for(lambda: server.metric("warmset_oldest_pending_load_seconds") == 0, "no load is stuck")
    assert server.get("/health/ready")[0] == 200


def test_a_load_that_sticks_is_seen_L3(pool, tmp_path):
    # Room for three by measurement is room for two by estimate, before anything was measured.
    server = pool_for(pool, 3, 32, [spec(tmp_path, "stuck", 32, failure="load_hangs"), spec(tmp_path, "fine", 32)])
    with waiting_for_ever(server, "stuck"):
        wait_for(lambda: server.metric("warmset_oldest_pending_load_seconds") > 1, "the metric rises")
        ask(server, "fine")


def test_a_hot_model_does_not_feel_a_cold_one_load_L4(pool, tmp_path):
    # What the load costs in time is measured by bench/interference; here a load that never ends holds nobody up.
    models = [spec(tmp_path, "hot", 64), spec(tmp_path, "cold", 64, failure="load_hangs")]
    server = pool_for(pool, 2, 64, models)
    ask(server, "hot", max_tokens=4)
    with waiting_for_ever(server, "cold"):
        wait_for_state(server, "cold", "loading")
        for _ in range(100):
            ask(server, "hot", max_tokens=4)
        assert state(server, "cold") == "loading"


def test_an_engine_that_ignores_the_stop_is_killed_L5(pool, tmp_path):
    models = [spec(tmp_path, "deaf", failure="ignores_stop"), spec(tmp_path, "next")]
    server = pool_for(pool, 1, 64, models)
    ask(server, "deaf")
    pid = pid_of(server, "deaf")
    assert warmset.alive(pid)
    overlaps = []

    def sample():
        # The order matters: a process that is alive after its successor began to load has given nothing back yet.
        loading = state(server, "next") in ("loading", "ready")
        if loading and warmset.alive(pid):
            overlaps.append(server.ledger())

    with Sampler(sample, pause=0.01):
        ask(server, "next")
        assert not warmset.alive(pid)
        ask(server, "deaf")
    assert not overlaps
    assert pid_of(server, "deaf") != pid


def test_eviction_waits_for_a_running_stream_L6(pool, tmp_path):
    models = [spec(tmp_path, "long", decode_seconds_per_token=0.02), spec(tmp_path, "next")]
    server = pool_for(pool, 1, 64, models)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=warmset.PATIENCE_SECONDS)
    body = json.dumps({"model": "long", "prompt": "x", "max_tokens": 60, "stream": True, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    stream = connection.getresponse()
    first = stream.readline()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(ask, server, "next")
        text = first + stream.read()
        assert b"[DONE]" in text and b'"finish_reason":"length"' in text.replace(b" ", b"")
        other.result()


def test_no_request_is_lost_between_requests_and_evictions_L6(pool, tmp_path):
    names = "abc"
    server = pool_for(pool, 2, 32, [spec(tmp_path, name, 32, decode_seconds_per_token=0.002) for name in names])
    choice = random.Random(6)
    ended = threading.Event()

    def evict():
        while not ended.is_set():
            server.request("POST", f"/admin/v1/models/{choice.choice(names)}/unload", admin=True)

    evictor = threading.Thread(target=evict, daemon=True)
    evictor.start()
    try:
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda name: ask(server, name, max_tokens=5), [choice.choice(names) for _ in range(150)]))
    finally:
        ended.set()
        evictor.join()


def test_a_load_evicts_only_what_it_needs_cheapest_first_L7(pool, tmp_path):
    names = [f"m{index}" for index in range(5)]
    # Loads long enough that the machine's noise in their measured times does not turn the order round.
    server = pool_for(pool, 5, 24, [spec(tmp_path, name, 24, load_seconds=1.0) for name in [*names, "new"]])
    for rank, name in enumerate(names):
        for _ in range(2 + 8 * rank):
            ask(server, name)
    with Events(server) as events:
        ask(server, "new")
        wait_for(lambda: facts(events, "eviction_finished"), "somebody left")
    assert [event["model"] for event in facts(events, "eviction_started")] == ["m0"]
    assert [state(server, name) for name in names[1:]] == ["ready"] * 4


def test_two_hot_models_with_room_for_one_swap_at_a_bounded_rate_L8(pool, tmp_path):
    residency_seconds = 1.0
    models = [spec(tmp_path, name, load_seconds=0.4, decode_seconds_per_token=0.002) for name in "ab"]
    knobs = {"minimum_seconds": residency_seconds, "thrash_window_seconds": 10, "thrash_threshold": 0.05}
    server = pool_for(pool, 1, 64, models, residency=knobs)
    outcomes = []
    started = time.monotonic()
    alarms = Events(server)
    with alarms, ThreadPoolExecutor(4) as threads:

        raised = lambda: any(event["raised"] for event in facts(alarms, "thrash_alarm"))  # noqa: E731

        def hammer(name):
            # On a busy machine as long as it takes to swap a few times.
            while time.monotonic() - started < 8 or not raised() and time.monotonic() - started < warmset.PATIENCE_SECONDS:
                status, headers, _ = server.complete(name, max_tokens=2)
                outcomes.append(status)
                if status != 200:
                    assert status in (429, 503), status
                    assert 0 < float(headers["retry-after"]) <= 120

        list(threads.map(hammer, "abab"))
        took = time.monotonic() - started
        swaps = len(facts(alarms, "load_finished"))
        assert outcomes.count(200) > 0
        assert 2 <= swaps <= took / residency_seconds + 2, (swaps, took)
        wait_for(raised, "the thrash alarm fires")


def test_two_hundred_cycles_leave_nothing_behind_L9(pool, tmp_path):
    server = pool_for(pool, 1, 16, [spec(tmp_path, name, 16) for name in "ab"])
    for _ in range(100):
        for name in "ab":
            ask(server, name)
    wait_for(lambda: state(server, "b") == "ready" and state(server, "a") == "absent", "b alone is loaded")

    def drift():
        system = warmset.private_bytes(pid_of(server, "b"))
        system += sum(warmset.artifact_bytes([pid_of(server, "b")], server.data).values())
        ledger = server.memory()["resident"]
        return abs(ledger - system) / system

    wait_for(lambda: drift() < 0.01, lambda: f"the ledger drifts by {drift():.3%}", pause=0.5)
    assert len(server.engines()) <= 2  # b, and the spare


def test_a_pair_that_does_not_fit_is_served_in_turn_L10(pool, tmp_path):
    server = pool_for(pool, 1, 128, [spec(tmp_path, name, 128) for name in "ab"])
    with Sampler(server.memory) as sampler, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: ask(server, name), "abababab"))
    for memory in sampler.samples:
        assert warmset.used_bytes(memory) <= memory["capacity"], memory
    assert server.metric("warmset_model_evictions_total", reason="crashed") == 0


def test_a_model_larger_than_the_budget_is_an_honest_refusal_L10(pool, tmp_path):
    server = pool_for(pool, 1, 64, [spec(tmp_path, "huge", 400), spec(tmp_path, "small", 16)])
    # An estimate alone refuses nobody: the first try shows that it does not fit, and its process dies of its cap.
    status, headers, body = server.complete("huge")
    for _ in range(2):
        assert (status, body["error"]["code"]) == (507, "model_too_large"), body
        assert "memory" in body["error"]["message"]
        assert headers["x-should-retry"] == "false" and "retry-after" not in headers
        status, headers, body = server.complete("huge")
    assert server.metric("warmset_model_loads_total", model="huge") == 1, "it is tried once"
    assert warmset.used_bytes(server.memory()) <= server.memory()["capacity"]
    ask(server, "small")


def test_probes_scrapes_and_listings_are_no_use_L12(pool, tmp_path):
    server = pool_for(pool, 2, 32, [spec(tmp_path, name, 32, model={"keep_alive": "2s"}) for name in "ab"])
    ask(server, "a")

    def look():
        for path in ("/health/live", "/health/ready", "/v1/models", "/v1/models/a", "/v1/models/b"):
            assert server.get(path)[0] == 200, path
        for path in ("/metrics", "/admin/v1/models", "/admin/v1/ledger", "/admin/v1/workers"):
            assert server.get(path, admin=True)[0] == 200, path

    with Sampler(look, pause=0.02):
        wait_for_state(server, "a", "absent")
    # Metrics hear of it a moment after the state has changed.
    wait_for(lambda: server.metric("warmset_model_evictions_total", reason="keep_alive") == 1, "its end is counted")
    assert server.metric("warmset_model_loads_total") == 1


def test_a_load_outlives_the_request_that_asked_for_it_L13(pool, tmp_path):
    server = pool_for(pool, 1, 32, [spec(tmp_path, "slow", 32, load_seconds=2.5)], gateway={"first_byte_timeout": "500ms"})
    status, headers, body = server.complete("slow")
    assert status in (503, 504), body
    assert state(server, "slow") in ("verifying", "loading", "ready")
    wait_for_state(server, "slow", "ready")
    assert ask(server, "slow")["warmset-start"] == "warm"


def leave_early(server, name):
    """A request whose caller goes away while the model loads."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_for_state(server, name, "loading")
    connection.close()


def test_a_load_nobody_waits_for_is_given_up_L14(pool, tmp_path):
    server = pool_for(pool, 1, 32, [spec(tmp_path, "slow", 32, load_seconds=60)])
    leave_early(server, "slow")
    wait_for_state(server, "slow", "absent")
    assert server.metric("warmset_model_loads_total", outcome="ok") == 0


def test_a_load_somebody_else_waits_for_goes_on_L14(pool, tmp_path):
    # It lasts until the other one has been seen to leave, on a busy machine, too.
    server = pool_for(pool, 1, 32, [spec(tmp_path, "slow", 32, load_seconds=4.0)])
    with ThreadPoolExecutor(1) as thread:
        patient = thread.submit(ask, server, "slow")
        leave_early(server, "slow")
        assert patient.result()["warmset-start"] == "cold"
    wait_for(lambda: server.metric("warmset_model_loads_total", outcome="ok") > 0, "the load is counted")
    assert server.metric("warmset_model_loads_total", outcome="ok") == 1


def test_a_wrong_estimate_is_replaced_by_the_measurement_L15(pool, models):
    """The first load goes by an estimate; the second by what was measured, whatever the estimate was."""
    server = pool(memory="1GiB", reserve="128MiB", models=[{"name": "m", "source": models["q4_0"], "context_tokens": 512}])
    ask(server, "m")
    wait_for(lambda: entry(server, "m")["measured"], "the ledger goes by measurement")
    server.cli("model", "unload", "m")
    wait_for_state(server, "m", "absent")
    ask(server, "m")
    assert entry(server, "m")["measured"]
    pid = pid_of(server, "m")

    def agrees():
        system = warmset.private_bytes(pid) + sum(warmset.artifact_bytes([pid], server.data).values())
        ledger = server.memory()["resident"]
        return abs(ledger - system) <= 0.02 * system

    wait_for(agrees, "ledger and operating system agree", pause=0.5)
    server.stop()
    server.start()
    # A measurement outlives the server that made it.
    shown = server.cli_json("model", "show", "m")
    assert shown["measurements"], shown


def test_a_pinned_model_whose_process_dies_comes_back_L16(pool, tmp_path):
    models = [spec(tmp_path, "pinned", model={"pin": True}), spec(tmp_path, "other")]
    server = pool_for(pool, 1, 64, models)
    wait_for_state(server, "pinned", "ready")
    pid = pid_of(server, "pinned")
    os.kill(pid, signal.SIGKILL)
    # Meanwhile its bytes are still its own: nobody else gets in.
    status, headers, body = server.complete("other")
    assert status == 503 and "retry-after" in headers, body
    wait_for(lambda: state(server, "pinned") == "ready" and pid_of(server, "pinned") not in (None, pid), "it is back")
    ask(server, "pinned")
    shown = server.cli_json("model", "show", "pinned")
    assert shown["pin"] is True


def test_a_load_counts_as_work_when_idle_models_leave_and_when_the_server_stops_L18(pool, tmp_path):
    """Neither a keep-alive shorter than the load nor a stop in the middle of it costs the caller its answer."""
    # Long enough to be seen loading.
    models = [spec(tmp_path, "slow", 32, load_seconds=5.0, model={"keep_alive": "100ms"})]
    server = pool_for(pool, 1, 32, models)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ask, server, "slow")
        wait_for_state(server, "slow", "loading")
        server.process.send_signal(signal.SIGTERM)
        assert waiting.result()["warmset-start"] == "cold"
    assert server.process.wait(warmset.PATIENCE_SECONDS) == 0
