"""Starts the built `warmset` as its users do and looks at it from outside: for the tests, the demo and the benchmarks.

Nothing here knows the inside of the server: it speaks the command line, HTTP and /proc.
"""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("WARMSET_BINARY", ROOT / "target" / "release" / "warmset"))
MODELS = ROOT / "build" / "models"
# The kernel hands out ephemeral ports from 32768 up: fixed ports stay below, so that no outgoing connection takes one.
PORTS = range(18000, 31000)
handed_out = set()
MEBIBYTE = 1 << 20
# Generous on purpose: a wait ends when its condition holds, and this only bounds a test that has failed.
PATIENCE_SECONDS = 300


def model_files():
    """The real test models by short name; missing ones are named with the command that makes them."""
    files = {
        "q4_1": MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf",
        "q4_0": MODELS / "SmolLM2-135M-Instruct.Q4_0.gguf",
        "q8_0": MODELS / "SmolLM2-135M-Instruct.Q8_0.gguf",
        "f16": MODELS / "SmolLM2-135M-Instruct.F16.gguf",
        "gemma": MODELS / "gemma-3-270m.Q4_K_M.gguf",
    }
    missing = [str(path) for path in files.values() if not path.exists()]
    if missing:
        raise FileNotFoundError(f"run `make models` first; missing: {', '.join(missing)}")
    return files


def free_ports(count):
    """Ports that nobody listens on now, and that nobody here was given before: it may listen only later."""
    chosen = []
    while len(chosen) < count:
        port = random.choice(PORTS)
        if port in handed_out and len(handed_out) < len(PORTS) // 2:
            continue
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in chosen:
            chosen.append(port)
    handed_out.update(chosen)
    return chosen


def wait_for(condition, what, seconds=PATIENCE_SECONDS, pause=0.02, progress=None):
    """Polls until `condition()` is true and returns its value. Where `progress()` says how far long work is, patience begins
    anew whenever that has changed."""
    deadline, last = time.monotonic() + seconds, None
    while True:
        value = condition()
        if value:
            return value
        if progress is not None and (now := progress()) != last:
            deadline, last = time.monotonic() + seconds, now
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(pause)


class CommandFailed(Exception):
    """A `warmset` command that did not exit with 0."""

    def __init__(self, arguments, result):
        super().__init__(f"warmset {' '.join(map(str, arguments))} exited with {result.returncode}: {result.stderr.strip()}")
        self.returncode = result.returncode
        self.stdout = result.stdout
        self.stderr = result.stderr


class Server:
    """One `warmset serve` in a directory of its own."""

    def __init__(self, directory, memory="2GiB", reserve=None, config=None, arguments=(), ports=None, environment=None):
        self.directory = Path(directory)
        self.data = self.directory / "data"
        self.log_path = self.directory / "server.log"
        self.port, self.admin_port = ports or free_ports(2)
        self.budget = memory
        self.reserve = reserve
        self.config = config
        self.arguments = list(arguments)
        self.environment = environment or {}
        self.process = None
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_address(self):
        return f"127.0.0.1:{self.admin_port}"

    @property
    def pid(self):
        return self.process.pid

    def command(self):
        command = [str(BINARY), "serve", "--listen", f"127.0.0.1:{self.port}", "--admin-listen", self.admin_address]
        command += ["--data", str(self.data), "--memory", str(self.budget)]
        if self.reserve is not None:
            command += ["--reserve", str(self.reserve)]
        if self.config is not None:
            path = self.directory / "warmset.toml"
            path.write_text(self.config)
            command += ["--config", str(path)]
        return command + self.arguments

    def start(self, wait=True):
        log = open(self.log_path, "ab")
        self.process = subprocess.Popen(
            self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory, start_new_session=True,
            env={**os.environ, **self.environment},
        )
        log.close()
        if wait:
            self.wait_until_ready()
        return self

    def wait_until_ready(self):
        def ready():
            code = self.process.poll()
            if code is not None:
                raise AssertionError(f"the server exited with {code}:\n{self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.get("/health/ready")[0] == 200
            return False

        wait_for(ready, lambda: f"the server is ready\n{self.log_tail()}")

    def log_tail(self, characters=4000):
        return self.log_path.read_text(errors="replace")[-characters:] if self.log_path.exists() else ""

    def stop(self, seconds=120):
        """Ends the server as an operator does, and waits until it is gone. Returns its exit code."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the server did not stop within {seconds} s of SIGTERM\n{self.log_tail()}")
        return self.process.returncode

    def kill(self):
        """kill -9 of the server alone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    # HTTP without a client library, to see exactly what comes back.

    def request(self, method, path, body=None, headers=None, admin=False, timeout=PATIENCE_SECONDS):
        """Status, headers (lower case) and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port if admin else self.port, timeout=timeout)
        headers = dict(headers or {})
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            headers.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def get(self, path, admin=False):
        return self.request("GET", path, admin=admin)

    def post(self, path, body, **options):
        return self.request("POST", path, body=body, **options)

    def admin_json(self, path, method="GET", body=None):
        status, _, text = self.request(method, path, body=body, admin=True)
        if status >= 300:
            raise AssertionError(f"{method} {path} answered {status}: {text[:500]!r}")
        return json.loads(text) if text else None

    def ledger(self):
        return self.admin_json("/admin/v1/ledger")

    def memory(self, tier="host"):
        """The ledger's sums for one tier, in bytes, all of the same moment, and what the server itself takes."""
        memory = self.ledger()["memory"]
        found = next(entry for entry in memory["tiers"] if entry["tier"] == tier)
        sums = {name.removesuffix("_bytes"): value for name, value in found.items() if name != "tier"}
        return {**sums, "overhead": memory["overhead_bytes"]}

    def metrics(self):
        """Every sample as {(name, frozenset of label pairs): value}."""
        status, _, text = self.get("/metrics", admin=True)
        assert status == 200, status
        return parse_metrics(text.decode())

    def metric(self, name, **labels):
        """The sum over all samples of this name that carry these labels."""
        wanted = set(labels.items())
        return sum(value for (found, pairs), value in self.metrics().items() if found == name and wanted <= pairs)

    def complete(self, model, prompt="Hello", max_tokens=1, headers=None, timeout=PATIENCE_SECONDS, **fields):
        """One completion: status, headers, decoded body."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, **fields}
        status, found, text = self.post("/v1/completions", body, headers=headers, timeout=timeout)
        return status, found, json.loads(text)

    # The command line.

    def cli(self, *arguments, check=True, input=None, timeout=PATIENCE_SECONDS):
        """Runs a command against this server while it runs, else on its data directory."""
        arguments = [str(argument) for argument in arguments]
        place = ["--server", self.admin_address] if self.running() else ["--data", str(self.data)]
        return run_command(arguments + place, check=check, input=input, timeout=timeout)

    def cli_json(self, *arguments, **options):
        return json.loads(self.cli(*arguments, "--json", **options).stdout)

    def running(self):
        return self.process is not None and self.process.poll() is None

    def digest(self, name):
        return self.cli_json("model", "show", name)["digest"]

    def engines(self):
        """Process ids of the engine processes."""
        return engine_processes(self.pid)


class Gateway(Server):
    """One `warmset gateway` in front of these URLs."""

    def __init__(self, directory, replicas, config=None):
        super().__init__(directory, config=config)
        self.replicas = replicas

    def command(self):
        command = [str(BINARY), "gateway", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--admin-listen", self.admin_address]
        if self.config is not None:
            path = self.directory / "gateway.toml"
            path.write_text(self.config)
            command += ["--config", str(path)]
        for replica in self.replicas:
            command += ["--replica", replica]
        return command

    def views(self):
        return {view["url"]: view for view in self.admin_json("/admin/v1/replicas")["replicas"]}

    def decisions(self, limit=1000):
        return self.admin_json(f"/admin/v1/decisions?limit={limit}")["decisions"]

    def is_idle(self):
        """Whether no request is at any replica."""
        return all(view["in_flight"] == 0 for view in self.views().values())


def run_command(arguments, check=True, input=None, timeout=PATIENCE_SECONDS, env=None):
    """Runs `warmset` with these arguments."""
    environment = {**os.environ, "NO_COLOR": "1", **(env or {})}
    result = subprocess.run(
        [str(BINARY), *arguments], capture_output=True, text=True, input=input or "", timeout=timeout, env=environment
    )
    if check and result.returncode != 0:
        raise CommandFailed(arguments, result)
    return result


def parse_metrics(text):
    """Prometheus text as {(name, frozenset of label pairs): value}."""
    samples = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if "{" in line:
            name, rest = line.split("{", 1)
            labels, value = rest.rsplit("}", 1)
            pairs = frozenset(
                (key, content.strip('"')) for key, content in (pair.split("=", 1) for pair in split_labels(labels))
            )
        else:
            name, value = line.split(" ", 1)
            pairs = frozenset()
        samples[(name, pairs)] = float(value.split()[0])
    return samples


def split_labels(labels):
    """Splits `a="x,y",b="z"` at the commas between labels."""
    part, quoted = "", False
    for character in labels:
        if character == '"':
            quoted = not quoted
        if character == "," and not quoted:
            yield part
            part = ""
        else:
            part += character
    if part:
        yield part


def used_bytes(memory):
    """Everything of a tier that is not free: what must never exceed its capacity."""
    return sum(memory[state] for state in ("reserve", "loading", "resident", "unloading", "kv"))


# What the operating system says.


def parent_of(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def alive(pid):
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid):
    """Every process that came of this one and still runs."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := parent_of(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return sorted(child for child in found if alive(child))


def engine_processes(server_pid):
    """The children of a server that run the same binary as an engine."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and parent_of(int(entry)) == server_pid and alive(int(entry)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if any(b"engine" in word for word in words[:3]):
                    found.append(int(entry))
    return sorted(found)


def memory_maps(pid):
    """(file or None, inode, figures in bytes) of every mapping of a process."""
    maps = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split(maxsplit=5)
            if "-" in words[0] and not words[0].endswith(":"):
                path = words[5] if len(words) > 5 else ""
                maps.append((path if path.startswith("/") else None, (words[3], words[4]), {}))
            elif words[0].endswith(":") and words[-1] == "kB":
                maps[-1][2][words[0][:-1]] = int(words[1]) * 1024
    return maps


def private_bytes(pid):
    """Anonymous memory of one process: heap, stacks, private copies of file pages, and shared memory."""
    total = 0
    for path, _, figures in memory_maps(pid):
        shared_memory = path is not None and (path.startswith("/memfd:") or path.startswith("/dev/shm/"))
        total += figures.get("Rss", 0) if shared_memory else figures.get("Anonymous", 0)
    return total


def artifact_bytes(pids, below):
    """Resident pages of the artifact files below a folder, by inode, each counted once."""
    below = str(Path(below).resolve())
    pages = {}
    for pid in pids:
        of_process = {}
        for path, inode, figures in memory_maps(pid):
            if path is not None and path.startswith(below):
                file_pages = figures.get("Rss", 0) - figures.get("Anonymous", 0)
                of_process[inode] = of_process.get(inode, 0) + file_pages
        for inode, bytes_mapped in of_process.items():
            # Several processes may have touched different pages; the largest is at least what one of them holds.
            pages[inode] = max(pages.get(inode, 0), bytes_mapped)
    return pages


def resident_set_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) * 1024


# Models whose bytes, times and failures are declared.


def synthetic_model(directory, name, megabytes=1, allocate=True, **fields):
    """Writes the file of a synthetic model and returns its path. Names are part of no digest, so bytes tell them apart."""
    spec = {"host_bytes": int(megabytes * MEBIBYTE), "allocate": allocate, **fields}
    path = Path(directory) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec, sort_keys=True))
    return path


def toml_value(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(str(value))


def toml(tables):
    """Writes configuration: {"worker": {...}, "model": [{...}, {...}]}."""
    lines = []
    for name, content in tables.items():
        for table in content if isinstance(content, list) else [content]:
            lines.append(f"[[{name}]]" if isinstance(content, list) else f"[{name}]")
            lines += [f"{key} = {toml_value(value)}" for key, value in table.items()]
            lines.append("")
    return "\n".join(lines)


class WallClock:
    """A clock on the wall that a test sets, for servers with its `environment`; what measures durations goes on as it is."""

    LIBRARY = "libfaketimeMT.so.1"

    def __init__(self, directory):
        self.offset_seconds = 0
        self.file = Path(directory) / "clock"
        libraries = list(Path("/usr/lib").glob(f"**/faketime/{self.LIBRARY}"))
        assert libraries, f"{self.LIBRARY} is missing: run `make deps`"
        self.environment = {
            "LD_PRELOAD": str(libraries[0]), "FAKETIME_TIMESTAMP_FILE": str(self.file), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip
        self.shift(0)

    def now(self):
        return time.time() + self.offset_seconds

    def shift(self, seconds):
        self.offset_seconds += seconds
        # In one step: a server reads it at any moment.
        new = self.file.with_suffix(".new")
        new.write_text(f"{self.offset_seconds:+d}")
        new.rename(self.file)

    def set_to(self, hour_and_minute):
        """To this time of the day in UTC."""
        hour, minute = map(int, hour_and_minute.split(":"))
        now = time.gmtime(self.now())
        self.shift((hour - now.tm_hour) * 3600 + (minute - now.tm_min) * 60 - now.tm_sec)


class Sampler(threading.Thread):
    """Calls a function again and again in the background and keeps what it returned."""

    def __init__(self, sample, pause=0.03):
        super().__init__(daemon=True)
        self.sample = sample
        self.pause = pause
        self.samples = []
        self.error = None
        self.ended = threading.Event()

    def run(self):
        try:
            while not self.ended.is_set():
                self.samples.append(self.sample())
                self.ended.wait(self.pause)
        except Exception as error:  # handed to the test that stops the sampler
            self.error = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, kind, *_):
        self.ended.set()
        self.join()
        if self.error is not None and kind is None:
            raise self.error


class Events(threading.Thread):
    """Follows /admin/v1/events and keeps every event with the time it came; with `after` = 0 those before it, too."""

    def __init__(self, server, after=None):
        super().__init__(daemon=True)
        self.events = []
        self.connection = http.client.HTTPConnection("127.0.0.1", server.admin_port, timeout=PATIENCE_SECONDS)
        path = "/admin/v1/events" + ("" if after is None else f"?after={after}")
        self.connection.request("GET", path, headers={"accept": "text/event-stream"})
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.status

    def run(self):
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            kind = None
            for line in self.response:
                if line.startswith(b"event:"):
                    kind = line[6:].strip().decode()
                elif line.startswith(b"data:"):
                    self.events.append((time.monotonic(), {"type": kind, **json.loads(line[5:])}))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.join(5)

    def all(self):
        return [event for _, event in list(self.events)]


def percentile(values, share):
    """The nearest-rank percentile."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * share // 100))
    return ordered[int(rank) - 1]
