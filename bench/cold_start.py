"""The first token of a model that is not loaded.

Warm page cache: both sides have room for one of two models and swap, against llama.cpp's router. Claim: at most 0.6 of it.
Cold page cache (needs root): how fast a load reads the weights, against a plain sequential read of the same file in the
same run. Claim: at least 0.8 of it.
"""

import os
import time
from pathlib import Path

import harness
import warmset

ROUNDS = 9
READ_ROUNDS = 5
CONTEXT_TOKENS = 2048
SEQUENCES = 2
BLOCK_BYTES = 1 << 20


def first_token(port, model, other):
    """Has the other model loaded first, so that this one must take its place, and times this one's first token."""
    body = {"prompt": "Once", "max_tokens": 1, "temperature": 0}
    harness.Connection(port).post("/v1/completions", {"model": other, **body})
    time.sleep(0.2)  # the other's last work is over on both sides
    return harness.Connection(port).first_event_seconds("/v1/completions", {"model": model, **body})


def swap(directory, files):
    """Both routers over the same two files."""
    tables = {"model": [{"name": name, "source": path, "context_tokens": CONTEXT_TOKENS, "parallel": SEQUENCES}
                        for name, path in files.items()], "residency": {"minimum_seconds": 0}}
    server = warmset.Server(directory, memory="500MiB", reserve="128MiB", config=warmset.toml(tables))
    folder = Path(directory) / "models"
    folder.mkdir()
    for name, path in files.items():
        os.link(path, folder / f"{name}.gguf") if same_device(path, folder) else (folder / f"{name}.gguf").symlink_to(path)
    router = harness.Peer(directory, "--models-dir", folder, "--models-max", 1, "-c", CONTEXT_TOKENS * SEQUENCES, "-np",
                          SEQUENCES, "-t", harness.THREADS, "-fa", "on")
    with server, router:
        names = list(files)
        for name in names:  # both have seen both files: the page cache is warm, our sizes are measured
            first_token(server.port, name, names[0])
            first_token(router.port, name, names[0])
        figures = harness.alternate(ROUNDS, lambda: first_token(server.port, names[0], names[1]),
                                    lambda: first_token(router.port, names[0], names[1]))
        return harness.compared(*figures, "seconds to the first token")


def same_device(path, folder):
    return path.stat().st_dev == folder.stat().st_dev


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def sequential_read_seconds(path):
    drop_caches()
    block = bytearray(BLOCK_BYTES)
    asked = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass
    return time.perf_counter() - asked


def cold_read(directory, name, path):
    """Two figures: the whole load phase (reading overlaps with everything else that a load does), and what a cold disk
    adds to a load."""
    config = warmset.toml({"model": [{"name": name, "source": path, "context_tokens": CONTEXT_TOKENS, "parallel": 1}]})
    megabytes = path.stat().st_size / 1e6
    with warmset.Server(Path(directory) / "cold", memory="1GiB", reserve="128MiB", config=config) as server:
        stored = stored_file(server, path)

        def seconds_of_load(drop):
            server.cli("model", "unload", name)
            if drop:
                drop_caches()
            before = load_seconds(server, name)
            server.cli("model", "load", name)
            return load_seconds(server, name) - before

        def plain_read():
            # Pages that an engine maps are not dropped.
            server.cli("model", "unload", name)
            return sequential_read_seconds(stored)

        seconds_of_load(drop=False)
        loads, reads = harness.alternate(READ_ROUNDS, lambda: (seconds_of_load(True), seconds_of_load(False)), plain_read)
    rates = [megabytes / seconds for seconds in reads]
    whole = [megabytes / cold for cold, _ in loads]
    added = [megabytes / max(cold - warm, 1e-3) for cold, warm in loads]
    unit = "megabytes per second : plain sequential read"
    return {
        "read_page_cache_cold_whole_load": harness.compared(whole, rates, f"weights over the whole load phase, {unit}", 1),
        "read_page_cache_cold_added": harness.compared(added, rates, f"weights over what a cold disk adds, {unit}", 1),
    }


def stored_file(server, source):
    """The file in the store that has the source's size: what the engine really reads."""
    size = source.stat().st_size
    return next(path for path in server.data.rglob("*") if path.is_file() and path.stat().st_size == size)


def load_seconds(server, name):
    return server.metric("warmset_model_load_seconds_sum", model=name, phase="load")


def main():
    files = warmset.model_files()
    with harness.scratch() as directory:
        claims = {"swap_page_cache_warm": swap(directory, {"q4_1": files["q4_1"], "q4_0": files["q4_0"]})}
        if os.geteuid() == 0:
            claims.update(cold_read(directory, "f16", files["f16"]))
    harness.report("cold_start", claims, model=files["q4_1"].name, threads=harness.THREADS, rounds=ROUNDS,
                   claim="swap ratio at most 0.6, read ratio at least 0.8")


if __name__ == "__main__":
    main()
