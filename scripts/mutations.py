#!/usr/bin/env python3
"""Plants the mistakes of scripts/mutations.toml in core's rules, one at a time, and tells which seed of its tests catches each.

Everything happens in a copy of the crates below build/mutations, with a target directory of its own: what is being worked on is neither
changed nor compiled again. Each mistake takes half a minute to a minute to compile. One JSON document at the end; exits with 1 if a
mistake was caught by nobody, or if the tests fail without one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "mutations"
COPIED = ["crates", "Cargo.toml", "Cargo.lock", ".cargo", "rustfmt.toml", "clippy.toml"]
# A mistake may keep a machine busy for ever, which is caught, too.
SECONDS_MAX = 240
# Who judges: the binary, its tests, and which variable names one seed of theirs.
JUDGES = {
    "schedules": ("schedules", "every_schedule_keeps_the_invariants_and_answers_everybody", None),
    "pool": ("pool", "every_caller_gets_exactly_one_last_word_and_all_permits_return", None),
    "gateway properties": ("warmset_core", "gateway::properties", "PROPTEST_RNG_SEED"),
    "kv properties": ("warmset_core", "kv::properties", "PROPTEST_RNG_SEED"),
    "routing properties": ("warmset_core", "routing::properties", "PROPTEST_RNG_SEED"),
}
BUILD = ["cargo", "test", "--release", "--locked", "--quiet", "-p", "warmset-core", "--no-run", "--message-format=json"]
# What is compiled for a binary.
TARGETS = {"schedules": ["--test", "schedules"], "pool": ["--test", "pool"], "warmset_core": ["--lib"]}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="mistakes whose name contains this")
    parser.add_argument("--seeds", type=int, default=300, help="schedules that each judge plays")
    parser.add_argument("--property-seeds", type=int, default=8, help="seeds of the properties, hundreds of cases each")
    return parser.parse_args()


def copy_of_the_crates():
    """The tracked files as they lie here; unchanged ones keep their time, so that they are not compiled again."""
    names = subprocess.run(["git", "ls-files", "-z", "--", *COPIED], cwd=ROOT, check=True, capture_output=True).stdout
    wanted = [name.decode() for name in names.split(b"\0") if name and (ROOT / name.decode()).exists()]
    for name in wanted:
        put(name, (ROOT / name).read_bytes())
    for path in (PLACE / "crates").rglob("*"):
        if path.is_file() and str(path.relative_to(PLACE)) not in set(wanted):
            path.unlink()


def put(name, content):
    path = PLACE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


def planted(mutation):
    """The file with the mistake in it, and without."""
    before = (PLACE / mutation["file"]).read_text()
    if before.count(mutation["old"]) != 1:
        sys.exit(f"{mutation['name']}: its place stands {before.count(mutation['old'])} times in {mutation['file']}")
    return before.replace(mutation["old"], mutation["new"]), before


def build(judges):
    """The binaries of these judges, by name."""
    command = [*BUILD, *(word for name in sorted({JUDGES[judge][0] for judge in judges}) for word in TARGETS[name])]
    result = subprocess.run(command, cwd=PLACE, env=environment(), capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"it does not compile: {result.stderr[-3000:]}")
    messages = (json.loads(line) for line in result.stdout.splitlines() if line.startswith("{"))
    found = [message for message in messages if message.get("executable")]
    return {message["target"]["name"]: message["executable"] for message in found}


def environment(**more):
    # Seeds come from here alone, and what failed once is not tried first the next time.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PROPTEST_", "WARMSET_"))}
    return kept | {"CARGO_TARGET_DIR": str(PLACE / "target"), "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1",
                   "PROPTEST_MAX_SHRINK_ITERS": "0", "RUST_BACKTRACE": "0", **more}


def run(binary, tests, **variables):
    """None if all is well, else what was said."""
    try:
        result = subprocess.run([binary, tests], cwd=PLACE / "crates" / "core", env=environment(**variables),
                                capture_output=True, text=True, timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired as expired:
        return f"no end in {SECONDS_MAX} seconds\n{(expired.stdout or b'').decode()}"
    return None if result.returncode == 0 else result.stdout + result.stderr


def verdict(judge, binaries, given):
    """The seed that fails, and what it says; none if all of them pass."""
    binary, tests, variable = JUDGES[judge]
    if variable:
        for seed in range(given.property_seeds):
            if said := run(binaries[binary], tests, **{variable: str(seed)}):
                return {"judge": judge, "seed": seed, "says": reason(said)}
        return None
    said = run(binaries[binary], tests, WARMSET_SEEDS=str(given.seeds))
    if said is None:
        return None
    seeds = re.findall(r"WARMSET_SEED=(\d+)", said)
    return {"judge": judge, "seed": int(seeds[-1]) if seeds else None, "says": reason(said)}


def reason(said):
    """The line that follows the first panic, without what a whole machine looks like."""
    lines = said.splitlines()
    after = [lines[place + 1] for place, line in enumerate(lines[:-1]) if "panicked at" in line]
    text = next((line.strip() for line in after if line.strip()), lines[0] if lines else "")
    return text[:200]


def judged(judges, given):
    binaries = build(judges)
    return [found for judge in judges if (found := verdict(judge, binaries, given))]


def main():
    given = arguments()
    with open(ROOT / "scripts" / "mutations.toml", "rb") as file:
        mutations = [one for one in tomllib.load(file)["mutation"] if not given.only or given.only in one["name"]]
    copy_of_the_crates()
    broken = judged({judge: None for one in mutations for judge in one["judges"]}, given)
    if broken:
        sys.exit(f"the tests fail without a mistake: {broken}")
    rows = []
    for mutation in mutations:
        changed, before = planted(mutation)
        began = time.monotonic()
        put(mutation["file"], changed.encode())
        try:
            caught = judged(mutation["judges"], given)
        finally:
            put(mutation["file"], before.encode())
        rows.append({key: mutation[key] for key in ("name", "promise", "file")} | {"caught_by": caught})
        who = ", ".join(f"{one['judge']} (seed {one['seed']})" for one in caught) or "NOBODY"
        print(f"{mutation['name']}: {who}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    uncaught = [row["name"] for row in rows if not row["caught_by"]]
    document = {"mutations": len(rows), "caught": len(rows) - len(uncaught), "uncaught": uncaught, "seeds": given.seeds,
                "property_seeds": given.property_seeds, "rows": rows}
    print(json.dumps(document, indent=2))
    sys.exit(1 if uncaught else 0)


if __name__ == "__main__":
    main()
