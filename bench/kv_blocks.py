"""How fast blocks of KV go to a disk and come back.

Objects of 2 MiB are stored, made durable, and loaded with four loads under way, by `store::segments` (in the open and encrypted), by
the foyer crate, by LMCache's file system backend (`lmcache bench l2`), and, to know the disk, by plain direct I/O: the same pieces, a
sync every 32 objects as the segments do, as many readers. All in turns on the same file system, each round with a directory of its own.

The same durability: the segments sync each batch before they say where it lies; the peers sync nothing, so their files are synced
afterwards and that counts. The same cache: none. What goes past direct I/O is dropped from the page cache between store and load. The
segments compare every block they load with its checksum; foyer does so too; LMCache has none.

Then a store with a million blocks is started, with nothing of it in the page cache: when it is open, and when it knows all of them. And the
blocks of prompts are looked up among a million, by the machine that decides: each is found, counted and put in order.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import harness

EXAMPLE = harness.ROOT / "target" / "release" / "examples" / "segments_speed"
LOOKUP = EXAMPLE.with_name("kv_lookup")
FOYER = harness.ROOT / "build" / "bench" / "blocks-target" / "release" / "blocks-bench"
LMCACHE = harness.ROOT / "build" / "bench" / "lmcache" / "bin" / "lmcache"
OBJECT_BYTES = 2 << 20
CONCURRENCY = 4
BATCH = 32
MANY_BLOCKS = 1_000_000
LOOKUP_ROUNDS = 5
TIMEOUT_SECONDS = 600


def command(*arguments, **options):
    arguments = [str(argument) for argument in arguments]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, **options).stdout


def of_segments(kind):
    def measure(directory, objects):
        return json.loads(command(EXAMPLE, directory, kind, objects, OBJECT_BYTES, CONCURRENCY))

    return measure


def of_foyer(io):
    def measure(directory, objects):
        result = json.loads(command(FOYER, directory, io, objects, OBJECT_BYTES, CONCURRENCY))
        assert result["hits"] == objects, result
        return result

    return measure


def sync_and_forget(directory):
    """Makes files durable and drops them from the page cache; returns the seconds of the first."""
    began = time.perf_counter()
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    handles = [os.open(path, os.O_RDONLY) for path in files]
    for handle in handles:
        os.fdatasync(handle)
    seconds = time.perf_counter() - began
    for handle in handles:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return seconds


def of_lmcache(direct):
    def measure(directory, objects):
        adapter = json.dumps({"type": "fs", "base_path": str(directory), **({"use_odirect": True} if direct else {})})
        rounds = objects // BATCH
        seconds = {}
        for operation in ("store", "load"):
            output = command(
                LMCACHE, "bench", "l2", "--l2-adapter", adapter, "--num-keys", BATCH, "--data-size-kb", OBJECT_BYTES >> 10,
                "--rounds", rounds, "--warmup-rounds", 0, "--only", operation, "--l1-align-bytes", 4096 if direct else 1,
                "--format", "json", env={**os.environ, "LMCACHE_DISABLE_BANNER": "1"},
            )
            figures = json.JSONDecoder().raw_decode(output[output.index("{\n") :])[0]["metrics"]["op_0"]
            assert figures["total_success"] == objects, figures
            seconds[operation] = figures["duration_avg_ms"] * rounds / 1000
            if operation == "store":
                seconds["store"] += sync_and_forget(directory)
        return {f"{name}_bytes_per_second": objects * OBJECT_BYTES / spent for name, spent in seconds.items()}

    return measure


def systems():
    known = {
        "plain": of_segments("plain"),
        "segments": of_segments("segments"),
        "segments_encrypted": of_segments("encrypted"),
        "foyer_psync": of_foyer("psync"),
        "foyer_uring": of_foyer("uring"),
    }
    if LMCACHE.exists():
        known |= {"lmcache_fs": of_lmcache(False), "lmcache_fs_direct": of_lmcache(True)}
    return known


def measure(rounds, objects, place):
    known = systems()
    results = {name: [] for name in known}
    names = list(known)
    for number in range(rounds):
        # Who begins changes, since the disk wavers.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with harness.scratch(place) as directory:
                results[name].append(known[name](Path(directory), objects))
    return results


def start(place):
    with harness.scratch(place) as directory:
        command(EXAMPLE, directory, "fill", MANY_BLOCKS)
        os.sync()
        dropped = True
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        except OSError:
            dropped = False
        return {**json.loads(command(EXAMPLE, directory, "start", 0)), "page_cache_was_dropped": dropped}


def lookups():
    rounds = [json.loads(command(LOOKUP, MANY_BLOCKS)) for _ in range(LOOKUP_ROUNDS)]
    return {**rounds[0], **{name: statistics.median(one[name] for one in rounds) for name in ("blocks_per_second", "keys_per_second")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--objects", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--directory", help="on the disk that is meant")
    parser.add_argument("--start", action=argparse.BooleanOptionalAction, default=True, help="the start with a million blocks too")
    options = parser.parse_args()
    results = measure(options.rounds, options.objects, options.directory)
    figures = {}
    for name, rounds in results.items():
        figures[name] = {}
        for operation in ("store", "load"):
            rates = sorted(one[f"{operation}_bytes_per_second"] / 1e6 for one in rounds)
            figures[name][f"{operation}_megabytes_per_second"] = {
                "median": round(statistics.median(rates)), "least": round(rates[0]), "most": round(rates[-1]),
            }
    median = lambda name, operation: figures[name][f"{operation}_megabytes_per_second"]["median"]  # noqa: E731
    peers = [name for name in figures if name.startswith(("foyer", "lmcache"))]
    shares = {}
    for operation in ("store", "load"):
        best = max(peers, key=lambda name: median(name, operation))
        shares[f"{operation}_share_of_plain"] = round(median("segments", operation) / median("plain", operation), 2)
        shares[f"{operation}_by_best_peer"] = round(median("segments", operation) / median(best, operation), 2)
        shares[f"{operation}_best_peer"] = best
        shares[f"{operation}_encrypted_share"] = round(
            median("segments_encrypted", operation) / median("segments", operation), 2
        )
    harness.report(
        "kv_blocks",
        {**figures, **shares, "lookup": lookups(), **({"start": start(options.directory)} if options.start else {})},
        peer="foyer 0.22.6" + (", LMCache 0.5.6" if LMCACHE.exists() else "; LMCache is not installed"),
        objects=options.objects,
        object_bytes=OBJECT_BYTES,
        concurrency=CONCURRENCY,
        rounds=options.rounds,
        claim="store and load at least 0.8 of plain direct I/O, load at least twice the best peer, a million blocks known within 10 s, "
        "a million lookups a second",
    )


if __name__ == "__main__":
    main()
