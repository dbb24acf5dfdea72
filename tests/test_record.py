"""Recordings of a real server's machines: replayed, cut, changed, and asked what would have been."""

import contextlib
import hashlib
import http.client
import json
import os
import re
import random
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import replay as day
import warmset
from warmset import MEBIBYTE, synthetic_model

MODELS = 6
MODEL_MEGABYTES = 32
# Room for three of them.
MEMORY, RESERVE = f"{64 + 3 * MODEL_MEGABYTES + 8}MiB", "64MiB"
TIERS = ("priority", "default", "flex")
SECRET = "the secret of the heron"
# Counts of a run and of its simulation; figures that were measured stand in the user guide.
TOLERANCE_SHARE, TOLERANCE_COUNT = 0.25, 3


def name_of(number):
    return f"model-{number}"


def entries(directory):
    # A few bytes more each, so that every file and so every digest differs.
    return [
        {"name": name_of(number), "engine": "synthetic", "parallel": 2, "max_concurrency": 3,
         "source": synthetic_model(directory, name_of(number), MODEL_MEGABYTES + number / MEBIBYTE, load_seconds=0.05,
                                   decode_seconds_per_token=0.005)}
        for number in range(MODELS)
    ]


def ask(server, choice):
    number = choice.choices(range(MODELS), [1 / (rank + 1) for rank in range(MODELS)])[0]
    # A server that is killed breaks off.
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        server.complete(name_of(number), SECRET, choice.randint(1, 20), service_tier=choice.choice(TIERS))


def leave(server, choice):
    """A caller that goes away before its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=warmset.PATIENCE_SECONDS)
    body = {"model": name_of(choice.randrange(MODELS)), "prompt": SECRET, "max_tokens": 200}
    with contextlib.suppress(OSError):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        connection.close()


class Callers:
    """Callers without a pause, of all classes, some of whom go away."""

    def __init__(self, server, seed=1, clients=4):
        self.server, self.stopped, self.asked = server, threading.Event(), 0
        self.threads = [threading.Thread(target=self.run, args=(random.Random(seed + client),)) for client in range(clients)]

    def run(self, choice):
        while not self.stopped.is_set() and self.server.running():
            leave(self.server, choice) if choice.random() < 0.1 else ask(self.server, choice)
            self.asked += 1

    def more(self, count):
        seen = self.asked
        warmset.wait_for(lambda: self.asked >= seen + count, f"{count} more requests")

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def replayed(path, *options, code=0):
    result = warmset.run_command(["replay", str(path), "--json", *options], check=False)
    assert result.returncode == code, result.stderr + result.stdout
    return json.loads(result.stdout)


def refused(path, *options):
    result = warmset.run_command(["replay", str(path), *options], check=False)
    assert result.returncode == 1 and not result.stdout, result.stdout
    return result.stderr


def counts(document):
    assert document["same"] is True and document["difference"] is None, document
    return {machine["machine"]: machine["events"] for machine in document["machines"]}


def sealed(number, line):
    """A line whose sum is right, as somebody would write it who knows how."""
    rest = line[25:]
    digest = hashlib.sha256(str(number).encode() + rest).hexdigest()[:16]
    return b'{"sum":"' + digest.encode() + b'"' + rest


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A run with loads, evictions, callers who leave, a killed engine and orders, recorded from the start to the end."""
    directory = tmp_path_factory.mktemp("recorded")
    path = directory / "run.jsonl"
    config = warmset.toml({"model": entries(directory / "models")})
    server = warmset.Server(directory / "server", MEMORY, RESERVE, config, ["--record", str(path)])
    with server:
        with Callers(server) as callers:
            callers.more(40)
            server.cli("model", "load", name_of(5))
            server.cli("model", "unload", name_of(5))
            warmset.wait_for(lambda: kill_engine(server), "an engine is there to be killed")
            callers.more(40)
            server.cli("model", "pin", name_of(1))
            callers.more(40)
        assert server.metric("warmset_model_evictions_total", reason="memory") > 0
    return path


def kill_engine(server):
    """kill -9 of the engine of a model that is in memory."""
    pids = [pid for worker in server.admin_json("/admin/v1/workers")["workers"] for pid in engine_pids(worker)]
    for pid in pids[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def engine_pids(worker):
    return [engine["pid"] for engine in worker["engines"]]


def test_a_run_from_start_to_end_replays_to_the_same_actions(recording):
    document = replayed(recording)
    events = counts(document)
    assert events["gateway"] > 300 and events["worker"] > 500, events
    assert (document["whole"], document["ended"]) == (True, "the server has ended")
    text = recording.read_text()
    assert "Crashed" in text and "EvictionStarted" in text and "Cancelled" in text
    people = warmset.run_command(["replay", str(recording)]).stdout
    assert "the gateway did the same" in people and "the worker did the same" in people


def test_a_recording_has_no_prompts_and_is_for_its_owner_only(recording):
    assert SECRET not in recording.read_text()
    assert recording.stat().st_mode & 0o777 == 0o600


def test_the_first_difference_is_named(recording, tmp_path):
    lines = recording.read_bytes().split(b"\n")
    place = next(index for index, line in enumerate(lines) if b'{"Assigned":' in line and b'{"Start":' in line)
    event, actions = lines[place].split(b'"actions":')
    digest = event.split(b'"digest":"')[1].split(b'"')[0]
    another = next(word for word in recording.read_bytes().split(b'"') if word.startswith(b"sha256:") and word != digest)
    other = event.replace(digest, another) + b'"actions":' + actions
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"\n".join([*lines[:place], sealed(place + 1, other), *lines[place + 1:]]))
    document = replayed(path, code=1)
    difference = document["difference"]
    assert document["same"] is False
    assert (difference["machine"], difference["line"]) == ("worker", place + 1)
    assert "Assigned" in difference["event"] and difference["recorded"] != difference["replayed"]
    result = warmset.run_command(["replay", str(path)], check=False)
    assert result.returncode == 1 and "the worker does something else" in result.stderr
    assert "\n  - " in result.stdout and "\n  + " in result.stdout, result.stdout


def test_what_is_no_recording_or_was_changed_is_refused_with_its_line(recording, tmp_path):
    lines = recording.read_bytes().split(b"\n")
    path = tmp_path / "bad.jsonl"

    def refusal(content):
        path.write_bytes(content)
        return refused(path)

    assert "no recording of warmset" in refusal(b'{"a":1}\n')
    assert "no recording of warmset" in refusal(b"")
    assert "no recording of warmset" in refusal(b"\0" * 5000)
    assert "line 6" in refusal(b"\n".join(lines[:5] + lines[6:])), "a line is missing"
    swapped = lines[:5] + [lines[6], lines[5]] + lines[7:]
    assert "line 6" in refusal(b"\n".join(swapped)), "lines have changed places"
    assert "line 4" in refusal(b"\n".join([*lines[:3], lines[3].replace(b"1", b"2", 1), *lines[4:]]))
    form = int(re.search(rb'"version":(\d+)', lines[0])[1])
    for other in (form - 1, 99):
        head = sealed(1, lines[0].replace(b'"version":%d' % form, b'"version":%d' % other))
        assert f"form {other}" in refusal(b"\n".join([head, *lines[1:]]))
        assert f"form {other}" in refused(path, "--memory", "1GiB")
    assert "no machine is in it" in refusal(lines[0] + b"\n")
    assert "cannot read" in refused(tmp_path / "missing.jsonl")


def test_a_cut_recording_replays_up_to_its_end(recording, tmp_path):
    text = recording.read_bytes()
    path = tmp_path / "cut.jsonl"
    for share in (0.3, 0.6, 0.9):
        path.write_bytes(text[: int(len(text) * share)])
        document = replayed(path)
        assert counts(document)["worker"] > 0 and document["whole"] is False
    assert "was cut" in warmset.run_command(["replay", str(path)]).stdout


def test_a_killed_server_leaves_a_recording_that_replays(pool, tmp_path):
    path = tmp_path / "run.jsonl"
    server = pool(MEMORY, RESERVE, entries(tmp_path), arguments=["--record", str(path)])
    with Callers(server) as callers:
        callers.more(30)
        server.kill()
    document = replayed(path)
    assert counts(document)["worker"] > 100 and document["whole"] is False
    server.start()
    assert (tmp_path / "run.jsonl.before").exists(), "the next start does not destroy it"
    assert counts(replayed(tmp_path / "run.jsonl.before")) == counts(document)


def test_only_a_recording_makes_room_for_another(tmp_path):
    notes, directory, run = tmp_path / "notes.toml", tmp_path / "directory", tmp_path / "run.jsonl"
    notes.write_text("mine\n")
    directory.mkdir()
    run.write_bytes(b"")
    (tmp_path / "run.jsonl.before").write_text("mine, too\n")
    for path, named in ((notes, notes), (directory, directory), (run, tmp_path / "run.jsonl.before")):
        result = warmset.run_command(["serve", "--record", str(path), "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"], check=False)
        assert result.returncode == 1 and f"{named} is no recording" in result.stderr, result
    assert notes.read_text() == "mine\n" and directory.is_dir() and run.exists()
    assert not list(tmp_path.glob("notes.toml.before")) + list(tmp_path.glob("directory.before"))


def test_a_full_disk_ends_the_recording_and_not_the_server(pool, tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    try:
        path = place / "run.jsonl"
        server = pool(MEMORY, RESERVE, entries(tmp_path), arguments=["--record", str(path)])
        with Callers(server) as callers:
            warmset.wait_for(lambda: "the recording ends here" in server.log_tail(100_000), "the disk is full")
            callers.more(20)
        assert server.complete(name_of(0))[0] == 200
        document = replayed(path)
        assert counts(document)["worker"] > 10 and document["whole"] is False
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(scope="module")
def busy(module_pool, tmp_path_factory):
    server = module_pool(MEMORY, RESERVE, entries(tmp_path_factory.mktemp("models")))
    with Callers(server, seed=100) as callers:
        callers.more(20)
        yield server, callers


def test_a_running_server_is_recorded_from_the_middle_on(busy, tmp_path):
    server, callers = busy
    path = tmp_path / "run.jsonl"
    with ThreadPoolExecutor(1) as thread:
        recording = thread.submit(server.cli_json, "admin", "record", "--out", path, "--seconds", "3")
        warmset.wait_for(lambda: recording.done() or path.exists() and path.stat().st_size > 0, "the recording has begun")
        seen = callers.asked
        taken = recording.result()
        asked = callers.asked - seen
    assert taken["ended"] == "its time is over" and taken["bytes"] == path.stat().st_size
    document = replayed(path)
    # Each request makes several events, whatever the machine gets done in three seconds.
    assert counts(document)["worker"] > max(asked, 10) and document["ended"] == "its time is over"
    assert path.stat().st_mode & 0o777 == 0o600 and SECRET not in path.read_text()
    again = server.cli("admin", "record", "--out", path, "--seconds", "1", check=False)
    assert again.returncode == 1 and "exists" in again.stderr, "nothing is written over"


def test_an_interrupt_ends_a_recording_and_there_is_one_at_a_time(busy, tmp_path):
    server, callers = busy
    path, other = tmp_path / "run.jsonl", tmp_path / "other.jsonl"
    command = [str(warmset.BINARY), "admin", "record", "--out", str(path), "--json", "--server", server.admin_address]
    taking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    warmset.wait_for(lambda: path.exists() and path.stat().st_size > 0, "the recording has begun")
    second = server.cli("admin", "record", "--out", other, check=False)
    assert second.returncode == 1 and "is being made already" in second.stderr and not other.exists()
    callers.more(20)
    taking.send_signal(signal.SIGINT)
    assert json.loads(taking.communicate(timeout=warmset.PATIENCE_SECONDS)[0])["ended"] == "it was interrupted"
    document = replayed(path)
    assert counts(document)["worker"] > 10 and document["ended"] == "it was interrupted"
    warmset.wait_for(lambda: server.cli("admin", "record", "--out", other, "--seconds", "1", check=False).returncode == 0,
                     "the next one may begin")


def test_what_a_recording_cannot_be_told_is_refused(busy, tmp_path):
    server, _ = busy
    for query, words in (("foo=1", "there is no parameter foo here"), ("max_bytes=0", "max_bytes must be at least 1"),
                         ("seconds=0", "seconds must be at least 1"), ("seconds=x", "must be a number")):
        status, _, body = server.get(f"/admin/v1/recording?{query}", admin=True)
        assert status == 400 and words in body.decode(), body
    for path in ("/admin/v1/events?recents=1", "/admin/v1/models/none/logs?line=1"):
        assert server.get(path, admin=True)[0] == 400, path
    refused = server.cli("admin", "record", "--out", tmp_path / "run.jsonl", "--max-bytes", "0", check=False)
    assert refused.returncode == 2 and "holds nothing" in refused.stderr and not (tmp_path / "run.jsonl").exists()


def test_a_recording_keeps_to_its_size(busy, tmp_path):
    server, _ = busy
    path = tmp_path / "run.jsonl"
    taken = server.cli_json("admin", "record", "--out", path, "--max-bytes", "128KiB")
    assert "largest size" in taken["ended"] and path.stat().st_size <= 128 << 10
    assert counts(replayed(path))["worker"] > 0
    empty = tmp_path / "empty.jsonl"
    assert "largest size" in server.cli_json("admin", "record", "--out", empty, "--max-bytes", "1")["ended"]


def test_requests_that_gave_way_are_in_a_recording(pool, models, tmp_path):
    path = tmp_path / "run.jsonl"
    specs = [{"name": name, "source": str(models[file]), "context_tokens": 1024, "parallel": 1}
             for name, file in (("long", "q4_1"), ("other", "q8_0"))]
    server = pool("430MiB", "128MiB", specs, worker={"cores": 1}, arguments=["--record", str(path)])
    # It runs, and does not wait for a load, when the other one comes.
    server.cli("model", "load", "long")
    batch = threading.Thread(target=server.complete, args=("long", "Tell me a story.", 300),
                             kwargs={"service_tier": "flex", "ignore_eos": True})
    batch.start()
    warmset.wait_for(lambda: server.metric("warmset_running_requests", model="long") == 1, "it runs")
    assert server.complete("other", "A lamp is", 1, service_tier="priority")[0] == 200
    batch.join(warmset.PATIENCE_SECONDS)
    assert server.metric("warmset_requests_parked_total", model="long") >= 1
    server.stop()
    assert counts(replayed(path))["worker"] > 10
    assert '"ParkTake"' in path.read_text()


SCENARIO = """
description = "a few models with a timer each, and some that are asked for at random"
slots = [4]
load_seconds = 5.0
run_seconds = 2.0
days = 1

[[group]]
models = 4
pattern = "periodic"
every_minutes = [5, 5]
jitter = 0.05

[[group]]
models = 8
pattern = "random"
every_minutes = [5, 40]
burst = 3
"""
# Three hours in less than a minute.
SPEED, SECONDS, SLOTS = 240, 3 * 3_600, 4


@pytest.fixture(scope="module")
def hours(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hours")
    scenario, path = directory / "few.toml", directory / "run.jsonl"
    scenario.write_text(SCENARIO)
    document = day.simulate(scenario, "--compare", "warmset", seed=3)
    demand = [request for request in document["demand"] if request[0] < SECONDS]
    server = day.pool(directory, document["models"], SLOTS, SPEED, document["load_seconds"] / SPEED, document["run_seconds"] / SPEED)
    server.arguments += ["--record", str(path)]
    with server:
        day.play(server, demand, SPEED)
    return path, len(demand)


def test_a_simulation_with_the_costs_of_a_run_counts_what_the_run_counted(hours):
    path, requests = hours
    document = replayed(path, "--policy", "warmset")
    recorded, simulated = document["recorded"], document["simulated"]
    assert recorded["requests"] == requests == recorded["warm"] + recorded["cold"]
    assert simulated == document["what_if"], "nothing was asked to be other"
    for figure in ("warm", "cold", "loads", "evictions"):
        allowed = max(TOLERANCE_SHARE * recorded[figure], TOLERANCE_COUNT)
        assert abs(simulated[figure] - recorded[figure]) <= allowed, (figure, recorded, simulated)
    assert replayed(path, "--policy", "warmset") == document, "the same recording gives the same figures"


def test_a_simulation_with_the_costs_of_a_recording_is_close_to_it_and_says_what_it_found(hours, tmp_path):
    path, requests = hours
    document = replayed(path, "--costs", path)
    recorded, simulated, costs = document["recorded"], document["what_if"], document["costs"]
    assert simulated["requests"] == requests == costs["requests"] and costs["loads"] > 10
    for figure in ("warm", "cold", "loads", "evictions"):
        allowed = max(TOLERANCE_SHARE * recorded[figure], TOLERANCE_COUNT)
        assert abs(simulated[figure] - recorded[figure]) <= allowed, (figure, recorded, simulated)
    # Profiles of other models change nothing.
    profiles = tmp_path / "profiles.json"
    profile = {"digest": "sha256:" + "0" * 64, "load_seconds": 1.0, "warm_up_seconds": 0.1,
               "prefill_tokens_per_second": 100.0, "decode_tokens_per_second": 10.0}
    profiles.write_text(json.dumps(profile, indent=2) + json.dumps(profile))
    assert replayed(path, "--costs", path, "--profiles", profiles)["what_if"] == simulated
    profiles.write_text("[]")
    assert "model profile" in refused(path, "--costs", path, "--profiles", profiles)


def test_more_memory_loads_less_and_none_is_refused(hours):
    path, requests = hours
    everything = replayed(path, "--memory", "16GiB")
    assert everything["what_if"]["evictions"] == 0 and everything["what_if"]["loads"] <= 12
    less = replayed(path, "--memory", "3GiB")["what_if"]
    # Where loads take long beside them, callers wait for the same one: then there are fewer, and still fewer callers are served at once.
    assert less["warm"] < everything["simulated"]["warm"], (less, everything)
    assert less["warm"] + less["cold"] + less["rejected"] == requests
    shown = warmset.run_command(["replay", str(path), "--policy", "no-preload"]).stdout
    assert "WHAT IF" in shown and all(len(line) <= 100 for line in shown.splitlines()[:-1]), shown
    assert "leaves nothing" in refused(path, "--memory", "1MiB")
    assert "no-forecast" in refused(path, "--policy", "lru")
