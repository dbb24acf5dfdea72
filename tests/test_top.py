"""`warmset top` and the figures per model: what callers saw is what operators see, on a terminal and off it."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest
from warmset import BINARY, PATIENCE_SECONDS, CommandFailed, synthetic_model, wait_for

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def server(module_pool, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    slow = synthetic_model(directory, "slow", megabytes=16, load_seconds=0.5, prefill_seconds_per_token=0.01)
    listed = [{"name": "slow", "source": slow, "engine": "synthetic"}]
    listed += [{"name": "idle", "source": synthetic_model(directory, "idle"), "engine": "synthetic", "pin": True}]
    server = module_pool(memory="512MiB", reserve="64MiB", models=listed)
    for _ in range(20):
        status, _, _ = server.complete("slow", "a b c", max_tokens=2)
        assert status == 200
    return server


def test_percentiles_are_kept_per_model_warm_and_cold_apart(server):
    document = server.cli_json("model", "show", "slow")
    warm, cold = document["latency"]["warm"], document["latency"]["cold"]
    assert (cold["first_token"]["count"], warm["first_token"]["count"]) == (1, 19)
    # Half a second of loading lies between them, whatever the machine.
    assert cold["first_token"]["p50_seconds"] >= 0.5
    assert 0.03 <= warm["first_token"]["p50_seconds"] <= warm["first_token"]["p99_seconds"]
    assert warm["duration"]["p50_seconds"] >= warm["first_token"]["p50_seconds"] * 0.93
    assert document["first_request_penalty_seconds"] is None
    assert server.cli_json("model", "show", "idle")["latency"] is None
    text = server.cli("model", "show", "slow").stdout
    assert re.search(r"warm first token: +\S+ \S+/\S+ \S+ \(p50/p99 of 19\)", text), text
    assert "WARM p50/p99" in server.cli("model", "list").stdout
    server.cli("model", "profile", "slow")
    assert server.cli_json("model", "show", "slow")["first_request_penalty_seconds"] is not None


def test_one_snapshot_is_one_document(server):
    document = server.cli_json("top")
    models = {model["name"]: model for model in document["models"]}
    assert set(models) == {"slow", "idle"} and models["slow"]["state"] == "ready"
    assert models["slow"]["held_bytes"] >= 16 << 20 and models["slow"]["demand_per_second"] > 0
    assert models["slow"]["worth"] > 0 and models["slow"]["queued"] == 0
    [host] = document["memory"]["tiers"]
    assert host["capacity_bytes"] == 512 << 20
    assert any(event["kind"] == "load_finished" and event["data"]["model"] == "slow" for event in document["events"])


def test_a_frame_is_printed_where_there_is_no_terminal(server):
    for arguments in (["top"], ["top", "--once"]):
        text = server.cli(*arguments).stdout
        lines = text.splitlines()
        assert lines[0].startswith(f"warmset {server.admin_address}  2 models, 2 ready"), text
        assert lines[1].startswith("host") and "█" in lines[1] and "of 512.0 MiB" in lines[1]
        assert any(line.startswith("idle*") for line in lines) and any("load_finished" in line for line in lines)
        assert "\x1b" not in text


def test_without_a_server_there_is_nothing_to_watch(tmp_path):
    for place in (["--data", str(tmp_path / "none")], ["--server", "127.0.0.1:9"]):
        result = subprocess.run([str(BINARY), "top", *place], capture_output=True, text=True, timeout=60)
        assert result.returncode == 1 and "start" in result.stderr, result.stderr
    assert not (tmp_path / "none").exists()


class Screen:
    """`warmset top` on a terminal of its own."""

    def __init__(self, server, *arguments):
        self.text = ""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", LINES="30", COLUMNS="150")
            os.execv(BINARY, [str(BINARY), "top", "--server", server.admin_address, *arguments])
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 150, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def read(self):
        while select.select([self.terminal], [], [], 0.05)[0]:
            try:
                data = os.read(self.terminal, 65536)
            except OSError:
                return
            if not data:
                return
            self.text += data.decode(errors="replace")

    def shows(self, words):
        def seen():
            self.read()
            return words in ESCAPE.sub(" ", self.text)

        wait_for(seen, lambda: f"the screen shows {words!r}: {self.text[-3000:]!r}")

    def press(self, keys):
        os.write(self.terminal, keys.encode())

    def ended(self):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it did not end")


def test_a_terminal_shows_changes_follows_keys_and_is_left_as_it_was(server):
    screen = Screen(server, "--interval", "0.2")
    screen.shows("slow")
    screen.shows("idle*")
    screen.shows("ready")
    screen.press("n")
    server.cli("model", "unload", "slow")
    screen.shows("absent")
    screen.press("q")
    assert screen.ended() == 0
    screen.read()
    # The other screen was entered and left again.
    assert "\x1b[?1049h" in screen.text and "\x1b[?1049l" in screen.text


def test_a_server_that_goes_away_is_said_and_control_c_ends_it(pool, tmp_path):
    model = {"name": "one", "source": synthetic_model(tmp_path, "one"), "engine": "synthetic"}
    server = pool(memory="256MiB", models=[model])
    screen = Screen(server, "--interval", "0.1")
    screen.shows("one")
    server.stop()
    screen.shows("no")
    screen.press("\x03")
    assert screen.ended() == 0


def test_an_interval_that_makes_no_sense_is_refused(server):
    with pytest.raises(CommandFailed) as refused:
        server.cli("top", "--interval", "0")
    assert refused.value.returncode == 2
    events = json.loads(server.get("/admin/v1/events?recent=1", admin=True)[2])["events"]
    assert len(events) == 1
