"""A prefix that is kept, against computing it again, through HTTP: the first token of the same prompt.

The prompt is in the engine's own sequence (device), in host memory (another prompt had the sequence meanwhile), or on disk (the
server was killed and started again; its page cache is dropped). Claims: host at most 1/250 of computing, disk at most 1/100,
device below both; and each at most 1.25 times the bytes over the bandwidth of plain copies in the same run plus one decode
step.
"""

import argparse
import mmap
import os
import statistics
import time
from pathlib import Path

import harness
import warmset

CONTEXT_TOKENS = 4352
PREFIX_TOKENS = 4096
BLOCK_TOKENS = 64
COPY_ROUNDS = 5
# How often each prefix is brought back from each tier.
RESTORES = 3
READ_BYTES = 2 << 20
NAME = "m"


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run kv_restore", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix-tokens", type=int, default=PREFIX_TOKENS)
    return parser.parse_args()


def ask(server, tokens):
    return harness.Connection(server.port).first_event_seconds(
        "/v1/completions", {"model": NAME, "prompt": tokens, "max_tokens": 1, "temperature": 0})


def view(server):
    return server.admin_json("/admin/v1/kv")


def hits(server, tier):
    return sum(model["hit_tokens"][tier] for model in view(server)["models"])


def wait_saved(server, blocks):
    warmset.wait_for(lambda: sum(model["disk_blocks"] for model in view(server)["models"]) >= blocks,
                     lambda: f"{blocks} blocks are on disk: {view(server)}", seconds=600)


def decode_step_seconds(server, tokens, steps=16):
    """One step at that depth, the prompt being there already."""
    def seconds(count):
        asked = time.perf_counter()
        body = {"model": NAME, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        harness.Connection(server.port).post("/v1/completions", body)
        return time.perf_counter() - asked
    return (seconds(steps + 1) - seconds(1)) / steps


def copy_bytes_per_second(size):
    """One plain copy in memory that was touched before."""
    source, target = bytearray(os.urandom(1 << 20)) * (size >> 20), bytearray(size >> 20 << 20)
    best = []
    for _ in range(COPY_ROUNDS):
        began = time.perf_counter()
        target[:] = source
        best.append(len(source) / (time.perf_counter() - began))
    return statistics.median(best)


def direct_read_bytes_per_second(path, size):
    """One plain sequential read past the page cache, in large pieces."""
    buffer = mmap.mmap(-1, READ_BYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        began, done = time.perf_counter(), 0
        while done < size and (read := os.preadv(descriptor, [buffer], done)) > 0:
            done += read
        return done / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def drop_caches():
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def from_a_cold_disk(server, generator, tokens, blocks, figures):
    server.kill()
    server.start()
    ask(server, harness.random_tokens(generator, 2 * BLOCK_TOKENS))  # the model is loaded, and nothing else
    warmset.wait_for(lambda: sum(model["disk_blocks"] for model in view(server)["models"]) >= blocks, "all is found")
    drop_caches()
    figures["disk"].append(ask(server, tokens))
    # Fewer than all where a reload fell behind and was given up.
    figures["disk_tokens"].append(hits(server, "disk"))
    assert figures["disk_tokens"][-1] > 0, view(server)


def one_round(server, generator, prefix_tokens, figures):
    blocks = prefix_tokens // BLOCK_TOKENS
    tokens = harness.random_tokens(generator, prefix_tokens + 1)
    before = sum(model["disk_blocks"] for model in view(server)["models"])
    figures["recompute"].append(ask(server, tokens))
    wait_saved(server, before + blocks)
    for _ in range(RESTORES):
        figures["device"].append(ask(server, tokens))
    for _ in range(RESTORES):
        ask(server, harness.random_tokens(generator, 2 * BLOCK_TOKENS))  # takes the only sequence
        host = hits(server, "host")
        figures["host"].append(ask(server, tokens))
        assert hits(server, "host") - host == prefix_tokens, view(server)
    figures["decode_step"].append(decode_step_seconds(server, tokens))
    for _ in range(RESTORES):
        from_a_cold_disk(server, generator, tokens, before + blocks, figures)
    size = blocks * view(server)["models"][0]["block_bytes"]
    figures["copy"].append(copy_bytes_per_second(size))
    segment = max((server.data / "kv").iterdir(), key=lambda path: path.stat().st_size)
    figures["read"].append(direct_read_bytes_per_second(segment, size))
    return size


def claims(figures, size):
    median = {name: statistics.median(values) for name, values in figures.items()}
    result = {"seconds_to_the_first_token": {name: [round(value, 4) for value in figures[name]]
                                             for name in ("recompute", "device", "host", "disk")}}
    for tier, bandwidth in (("device", None), ("host", "copy"), ("disk", "read")):
        possible = median["decode_step"] + (size / median[bandwidth] if bandwidth else 0.0)
        result[tier] = {
            "times_faster_than_computing": round(median["recompute"] / median[tier], 1),
            "ratio_to_bytes_over_bandwidth_plus_one_step": round(median[tier] / possible, 2),
        }
    result["disk_tokens"] = figures["disk_tokens"]
    result["decode_step_seconds"] = round(median["decode_step"], 4)
    result["copy_gigabytes_per_second"] = round(median["copy"] / 1e9, 2)
    result["read_gigabytes_per_second"] = round(median["read"] / 1e9, 2)
    return result


def main():
    given, generator = arguments(), harness.generator()
    files = warmset.model_files()
    tables = {"model": [{"name": NAME, "source": files["q4_1"], "context_tokens": CONTEXT_TOKENS, "parallel": 1, "pin": True}],
              "kv": {"host": "768MiB", "disk": "2GiB"}}
    names = ("recompute", "device", "host", "disk", "disk_tokens", "decode_step", "copy", "read")
    figures = {name: [] for name in names}
    with harness.scratch() as directory:
        server = warmset.Server(directory, memory="3GiB", reserve="256MiB", config=warmset.toml(tables))
        with server:
            ask(server, harness.random_tokens(generator, 8))
            for _ in range(given.rounds):
                size = one_round(server, generator, given.prefix_tokens, figures)
    harness.report("kv_restore", claims(figures, size), model=files["q4_1"].name, prefix_tokens=given.prefix_tokens,
                   prefix_bytes=size, rounds=given.rounds,
                   claim="host at least 250, disk at least 100 times as fast as computing; each at most 1.25 of what is possible")


if __name__ == "__main__":
    main()
