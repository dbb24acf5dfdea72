"""What the router's benchmarks share: replicas that compute nothing, each router in front of them, and the load."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import harness
import warmset

TOOLS = harness.ROOT / "build" / "bench" / "router-target" / "release"
ROUTERS = harness.ROOT / "build" / "bench" / "routers"
PEERS = "sglang-router 0.3.2, smg 1.13.0, vllm-router 0.1.17"
# The routers in Python's packages look for a tokenizer on a hub before they listen.
START_SECONDS = 120
PRIORITY = -15

# Name: the program, its policy, and what else it gets.
KINDS = {
    "warmset": ("warmset", "", []),
    "sglang round_robin": ("sglang", "round_robin", []),
    "sglang cache_aware": ("sglang", "cache_aware", []),
    "sglang cache_aware, tuned": (
        "sglang", "cache_aware", ["--balance-abs-threshold", "8", "--balance-rel-threshold", "1.2"]),
    "smg cache_aware": ("smg", "cache_aware", []),
    "smg prefix_hash": ("smg", "prefix_hash", []),
    "vllm consistent_hash": ("vllm", "consistent_hash", []),
    "vllm cache_aware": ("vllm", "cache_aware", []),
    "haproxy 125": ("haproxy", "125", []),
    "haproxy 200": ("haproxy", "200", []),
}


def available(names):
    return [name for name in names if KINDS[name][0] != "haproxy" or shutil.which("haproxy")]


def free_block(count):
    """The first of so many ports in a row that nobody listens on."""
    while True:
        first = warmset.free_ports(1)[0]
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                probe = stack.enter_context(contextlib.closing(warmset.socket.socket()))
                probe.bind(("127.0.0.1", port))
            return first


def start(command, log):
    """A process in a session of its own, put ahead of other programs where the kernel groups by session: all alike."""
    process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               start_new_session=True)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(PRIORITY))
    return process


def get(port, path):
    connection = warmset.http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Process:
    """Something that listens; ended with the block."""

    def __enter__(self):
        self.log = tempfile.TemporaryFile()
        self.process = start(self.command(), self.log)
        try:
            warmset.wait_for(self.is_ready, lambda: f"{self.command()} is ready", seconds=START_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def is_ready(self):
        if self.process.poll() is not None:
            self.log.seek(0)
            raise RuntimeError(f"it exited: {self.log.read()[-2000:]!r}")
        with contextlib.suppress(OSError, warmset.http.client.HTTPException):
            return self.answers()
        return False

    def resident_bytes(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024


class Replicas(Process):
    def __init__(self, count, *arguments):
        self.count, self.arguments = count, arguments
        self.port = free_block(count)

    def command(self):
        return [TOOLS / "replicas", "--port", self.port, "--replicas", self.count, *self.arguments]

    def answers(self):
        return get(self.port + self.count - 1, "/health")[0] == 200

    def urls(self):
        return [f"http://127.0.0.1:{self.port + number}" for number in range(self.count)]

    def reset(self):
        for number in range(self.count):
            get(self.port + number, "/bench/reset")

    def figures(self):
        return [json.loads(get(self.port + number, "/bench/figures")[1]) for number in range(self.count)]


class Router(Process):
    def __init__(self, name, replicas):
        self.name, self.replicas = name, replicas
        self.kind, self.policy, self.more = KINDS[name]
        self.port, self.other_port = warmset.free_ports(2)
        self.directory = tempfile.TemporaryDirectory(prefix="warmset-bench-")

    def command(self):
        urls = self.replicas.urls()
        if self.kind == "warmset":
            replicas = [part for url in urls for part in ("--replica", url)]
            return [warmset.BINARY, "gateway", "--listen", f"127.0.0.1:{self.port}", "--admin-listen",
                    f"127.0.0.1:{self.other_port}", "--data", self.directory.name, *replicas]
        if self.kind == "haproxy":
            return ["haproxy", "-db", "-f", self.haproxy_file(urls)]
        launch = [] if self.kind == "vllm" else ["launch"]
        level = "warning" if self.kind == "vllm" else "warn"
        program = "smg" if self.kind == "smg" else f"{self.kind}-router"
        return [ROUTERS / self.kind / "bin" / program, *launch, "--host", "127.0.0.1", "--port", self.port,
                "--prometheus-host", "127.0.0.1", "--prometheus-port", self.other_port, "--policy", self.policy,
                "--log-level", level, "--worker-startup-check-interval", 1, *self.more, "--worker-urls", *urls]

    def haproxy_file(self, urls):
        """Consistent hashing with bounded loads, by the header that names the tenant."""
        servers = "".join(f" server s{number} {url.removeprefix('http://')}\n" for number, url in enumerate(urls))
        path = Path(self.directory.name) / "haproxy.cfg"
        path.write_text(
            "global\n nbthread 1\n maxconn 4000\ndefaults\n mode http\n option http-no-delay\n timeout connect 5s\n"
            f" timeout client 600s\n timeout server 600s\nfrontend f\n bind 127.0.0.1:{self.port}\n default_backend b\n"
            f"backend b\n balance hdr(x-tenant)\n hash-type consistent\n hash-balance-factor {self.policy}\n{servers}")
        return path

    def answers(self):
        """Every replica is there: some routers answer before they have found them all."""
        body = json.dumps({"model": "mock", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]})
        connection = warmset.http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            if connection.getresponse().status != 200:
                return False
        finally:
            connection.close()
        if self.kind not in ("sglang", "smg", "vllm"):
            return True
        status, text = get(self.port, "/workers")
        return status != 200 or text.count(b"://") >= self.replicas.count

    def __exit__(self, *_):
        super().__exit__()
        self.directory.cleanup()


def load(router, *arguments, others=()):
    """What the load measured, with the router's processor time; requests are shared out among it and the others."""
    addresses = ",".join(f"127.0.0.1:{one.port}" for one in (router, *others))
    command = [TOOLS / "load", "--address", addresses, "--process", router.process.pid, *arguments]
    with tempfile.TemporaryFile() as output:
        process = start(command, output)
        if process.wait() != 0:
            raise RuntimeError(f"{command} failed")
        output.seek(0)
        # The log of a failure and the document go the same way.
        return json.loads(output.read().splitlines()[-1])
