"""A disk that is throttled until bringing KV back loses: what the server does about it, against doing always what is right.

A generated model, small to compute and large to keep (one layer with 32 heads of 256 for keys and values), whose prefixes lie
on a disk that is throttled (control group `blkio`, direct reads) from far below to far above where both take as long, up
and down again. Measured at each step: the server's time to the answer, one after the other with a server that keeps nothing and
computes the same length. Always reloading is calculated: the time to the answer from host memory, and the bytes by what a plain
direct read takes in the same control group. Claim: the server loses at most 5 % against the better of both. Beside it the same
by calculation for a model of 70 billion parameters. Needs root and the first version of control groups.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import harness  # puts scripts/lib in reach
import gguf  # isort: skip
import warmset

SHAPE = {"width": 32, "layers": 1, "heads": 32, "key_value_heads": 32, "head_width": 256, "inner": 32}
CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 64
# Keys and values of two bytes.
BLOCK_BYTES = BLOCK_TOKENS * 2 * SHAPE["layers"] * SHAPE["key_value_heads"] * SHAPE["head_width"] * 2
PREFIX_BLOCKS = 8
PREFIXES = 5
MEGABYTE = 1_000_000
BLKIO = Path("/sys/fs/cgroup/blkio")
NAME = "m"
READER = """
import mmap, os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
file, size, buffer = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECT), int(sys.argv[3]), mmap.mmap(-1, 1 << 21)
began, done = time.perf_counter(), 0
while done < size:
    done += os.preadv(file, [buffer], done)
print(done / (time.perf_counter() - began))
"""


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run kv_break_even", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes-per-second", type=float, nargs="+", default=[2.5, 5, 10, 20, 40, 80, 160])
    parser.add_argument("--rounds", type=int, default=3, help="over all prefixes at each step")
    parser.add_argument("--fresh", action="store_true", help="a new server for each step, which knows nothing yet")
    return parser.parse_args()


class Throttle:
    """A control group whose reads from one disk are limited."""

    def __init__(self, directory):
        number = os.stat(directory).st_dev
        partition = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        disk = partition.parent if (partition / "partition").exists() else partition
        self.device = (disk / "dev").read_text().strip()
        self.group = BLKIO / f"warmset-bench-{os.getpid()}"

    def __enter__(self):
        self.group.mkdir()
        return self

    def __exit__(self, *_):
        self.group.rmdir()

    def limit(self, bytes_per_second):
        (self.group / "blkio.throttle.read_bps_device").write_text(f"{self.device} {int(bytes_per_second)}\n")

    def take(self, pid):
        (self.group / "cgroup.procs").write_text(str(pid))

    def read_bytes_per_second(self, path, size):
        """What a plain direct read takes here."""
        command = [sys.executable, "-c", READER, str(self.group / "cgroup.procs"), str(path), str(size)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def seconds_to_answer(server, tokens):
    """Of one token: the weights mean nothing, so that it may have no text to be streamed."""
    connection, body = harness.Connection(server.port), {"model": NAME, "prompt": tokens, "max_tokens": 1, "temperature": 0}
    asked = time.perf_counter()
    connection.post("/v1/completions", body)
    return time.perf_counter() - asked


def view(server):
    document = server.admin_json("/admin/v1/kv")
    return document, document["models"][0]


def tables(model, kv):
    return warmset.toml({"model": [{"name": NAME, "source": model, "context_tokens": CONTEXT_TOKENS, "parallel": 1, "pin": True}],
                         "kv": kv})


def kept(directory, model, prefixes):
    """A server with host memory for so many prefixes and a block."""
    kv = {"host": (prefixes * PREFIX_BLOCKS + 1) * (BLOCK_BYTES + 4096), "disk": "1GiB", "disk_free": 0}
    return warmset.Server(directory, memory="2GiB", reserve="256MiB", config=tables(model, kv))


def keep(directory, model, prompts):
    """Puts all prefixes on disk."""
    with kept(directory, model, 4 * len(prompts)) as server:
        for count, tokens in enumerate(prompts, 1):
            seconds_to_answer(server, tokens)
            warmset.wait_for(lambda: view(server)[1]["disk_blocks"] >= count * PREFIX_BLOCKS, lambda: view(server))


def ask_one(server, tokens):
    """Seconds, and what was done with the prefix; none if a part of it was in host memory by chance."""
    _, before = view(server)
    seconds = seconds_to_answer(server, tokens)
    _, after = view(server)
    if after["hit_tokens"]["host"] > before["hit_tokens"]["host"]:
        return None
    for what in ("abandoned", "recomputed", "reloaded"):
        if after[what] > before[what]:
            return seconds, what
    return seconds, "not_found"


def host_seconds(server, generator, tokens):
    """To the answer with the prefix in host memory."""
    found = []
    for _ in range(5):
        seconds_to_answer(server, tokens)
        seconds_to_answer(server, harness.random_tokens(generator, BLOCK_TOKENS // 2))  # takes the only sequence
        _, before = view(server)
        seconds = seconds_to_answer(server, tokens)
        _, after = view(server)
        if after["hit_tokens"]["host"] - before["hit_tokens"]["host"] == PREFIX_BLOCKS * BLOCK_TOKENS:
            found.append(seconds)
    return statistics.median(found)


def step(server, none, throttle, generator, prompts, megabytes, rounds, from_host):
    """One bandwidth: all prefixes some times, in turn with computing as many tokens."""
    throttle.limit(megabytes * MEGABYTE)
    segment = max((server.data / "kv").iterdir(), key=lambda path: path.stat().st_size)
    size = PREFIX_BLOCKS * BLOCK_BYTES
    asked, computed = [], []
    for _ in range(rounds):
        for tokens in prompts:
            asked.append(ask_one(server, tokens))
            computed.append(seconds_to_answer(none, harness.random_tokens(generator, len(tokens))))
    read = throttle.read_bytes_per_second(segment, size)
    asked = [one for one in asked if one is not None]
    document, model = view(server)
    recompute, reload = statistics.median(computed), from_host + size / read
    best = min(recompute, reload)
    reloads = [seconds for seconds, what in asked if what == "reloaded"]
    believed = document["disk_read_bytes_per_second"]
    return {
        "megabytes_per_second": megabytes,
        "read_megabytes_per_second": round(read / MEGABYTE, 2),
        "recompute_seconds": round(recompute, 3), "reload_seconds_calculated": round(reload, 3),
        "reload_seconds_measured": round(statistics.median(reloads), 3) if reloads else None,
        "server_seconds": round(statistics.mean(seconds for seconds, _ in asked), 3),
        "decisions": {what: sum(other == what for _, other in asked) for what in ("recomputed", "reloaded", "abandoned", "not_found")},
        "regret": round(sum(seconds for seconds, _ in asked) / (len(asked) * best) - 1, 4),
        "believed": {"break_even_megabytes_per_second": round(model["break_even_bytes_per_second"] / MEGABYTE, 2),
                     "disk_megabytes_per_second": believed and round(believed / MEGABYTE, 2)},
        "sums": [sum(seconds for seconds, _ in asked), len(asked) * best, len(asked)],
    }  # fmt: skip


def sweep(directory, model, throttle, given, generator):
    prompts = [harness.random_tokens(generator, PREFIX_BLOCKS * BLOCK_TOKENS + 1) for _ in range(PREFIXES)]
    keep(f"{directory}/kept", model, prompts)
    # Each prefix that is brought back takes the place of the one before.
    server = kept(f"{directory}/kept", model, 1)
    none = warmset.Server(f"{directory}/none", memory="2GiB", reserve="256MiB", config=tables(model, {"host": 0}))
    rising = sorted(given.megabytes_per_second)

    def begin():
        throttle.limit(1e12)
        server.start()
        for pid in [server.pid, *server.engines()]:
            throttle.take(pid)

    with none, contextlib.ExitStack() as stack:
        begin()
        stack.callback(server.stop)
        from_host = host_seconds(server, generator, prompts[0])
        if not given.fresh:
            for _ in range(3):
                seconds_to_answer(server, harness.random_tokens(generator, PREFIX_BLOCKS * BLOCK_TOKENS))
        steps = []
        for direction, order in (("up", rising), ("down", rising[::-1])):
            for megabytes in order:
                if given.fresh:
                    server.stop()
                    begin()
                found = step(server, none, throttle, generator, prompts, megabytes, given.rounds, from_host)
                steps.append({"direction": direction, **found})
                print(steps[-1], file=sys.stderr)
        return from_host, steps


def seventy_billion():
    """The same decision by calculation: 30,000 tokens of a model of 70 billion parameters with 8 heads for keys and values."""
    tokens, layers, width, parameters = 30_000, 80, 8192, 68.5e9
    size = tokens * 2 * layers * 8 * 128 * 2
    operations = 2 * parameters * tokens + 4 * layers * width * tokens * (tokens + 1) / 2
    computers = {"4 H100, 16 bits": 4 * 989e12 * 0.4, "8 H100, 16 bits": 8 * 989e12 * 0.4, "8 H100, 8 bits": 8 * 1979e12 * 0.4}
    ways = {"PCIe 5": 54e9, "NVMe of generation 5": 14e9, "NVMe of generation 4": 6.8e9, "100 Gbit/s": 11.5e9, "25 Gbit/s": 2.9e9,
            "10 Gbit/s": 1.15e9}  # fmt: skip
    rows = []
    for computer, rate in computers.items():
        recompute = operations / rate
        reloads = {way: {"seconds": round(size / bandwidth, 2), "reload": size / bandwidth < recompute}
                   for way, bandwidth in ways.items()}
        rows.append({"on": computer, "recompute_seconds": round(recompute, 2),
                     "break_even_gigabytes_per_second": round(size / recompute / 1e9, 2), "ways": reloads})
    return {"tokens": tokens, "gigabytes": round(size / 1e9, 2), "at": rows}


def main():
    given, generator = arguments(), harness.generator()
    with harness.scratch() as directory, Throttle(directory) as throttle:
        model = gguf.with_random_weights(warmset.model_files()["q4_1"], Path(directory) / "wide.gguf", **SHAPE)
        from_host, steps = sweep(directory, model, throttle, given, generator)
    server, best, asked = (sum(numbers) for numbers in zip(*(one.pop("sums") for one in steps)))
    begins = next((one["megabytes_per_second"] for one in steps
                   if one["direction"] == "up" and one["decisions"]["reloaded"] > one["decisions"]["recomputed"]), None)
    claims = {"regret": round(server / best - 1, 4),
              "begins_to_reload_at_megabytes_per_second": begins, "from_host_seconds": round(from_host, 4), "steps": steps}
    harness.report("kv_break_even", claims, shape=SHAPE, prefix_tokens=PREFIX_BLOCKS * BLOCK_TOKENS,
                   prefix_bytes=PREFIX_BLOCKS * BLOCK_BYTES, requests=asked, **vars(given), seventy_billion_by_calculation=seventy_billion(),
                   claim="the server loses at most 5 % against the better of both at every bandwidth together")


if __name__ == "__main__":
    main()
