"""The demonstration: three real models in a memory budget that holds two, on 127.0.0.1:8080.

Every step is checked: if a cold start was not cold, or nobody was evicted, it fails and says so. KEEP=1 leaves the server
up when it is done.
"""

import collections
import contextlib
import os
import shutil
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import openai  # noqa: E402
import warmset  # noqa: E402

PORT, ADMIN_PORT = 8080, 8081
PLACE = warmset.ROOT / "build" / "demo"
MEMORY, RESERVE = "736MiB", "128MiB"
CONTEXT_TOKENS, SEQUENCES = 1024, 2
QUESTION = "What is the capital of France? Answer in one sentence."
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


class StepFailed(Exception):
    """A step of the demonstration did not happen."""


def check(held, what):
    if not held:
        raise StepFailed(what)


def title(text):
    print(f"\n\033[1m{text}\033[0m" if COLOUR else f"\n{text}")


def say(text):
    print(f"  {text}")


def mebibytes(count):
    return f"{count / warmset.MEBIBYTE:,.0f} MiB"


def check_ports():
    for port in (PORT, ADMIN_PORT):
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise StepFailed(f"port {port} is in use: stop what listens there (an earlier `make demo KEEP=1`?) and try again")


Answer = collections.namedtuple("Answer", "text tokens cached")


class Demo:
    def __init__(self, server):
        self.server = server
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none-needed", timeout=300, max_retries=0)

    def chat(self, model, expected_start):
        """One streamed chat; shows when the first word came and what was said about it."""
        asked = time.monotonic()
        raw = self.client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0, stream=True
        )
        first, words = None, ""
        for chunk in raw.parse():
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text and first is None:
                first = time.monotonic() - asked
            words += text or ""
        whole = time.monotonic() - asked
        start, digest = raw.headers["warmset-start"], raw.headers["warmset-model-digest"]
        check(words.strip(), f"{model} said nothing")
        check(start == expected_start, f"{model} was to start {expected_start}, but started {start}")
        check(digest == self.server.digest(model), f"{model} answered with another digest")
        say(f"{model}: {' '.join(words.split())!r}")
        say(f"{start} start, first word after {first:.2f} s, whole answer after {whole:.2f} s, digest {digest[:19]}…")
        return first

    def long_prompt(self, model):
        """A prompt of several hundred tokens, and how many of them were not computed."""
        text = " ".join(f"Item {number} of the list is the number {number * number}." for number in range(40))
        answer = self.client.completions.create(model=model, prompt=text, max_tokens=8, temperature=0)
        usage = answer.usage
        say(f"{model}: {usage.prompt_tokens} tokens of prompt, {usage.prompt_tokens_details.cached_tokens} of them known")
        return Answer(answer.choices[0].text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)

    def ledger(self):
        """Shows who holds which bytes."""
        memory = self.server.memory()
        check(warmset.used_bytes(memory) <= memory["capacity"], f"the ledger is over its budget: {memory}")
        resident = {
            dict(labels)["model"]: value
            for (name, labels), value in self.server.metrics().items()
            if name == "warmset_model_resident_bytes" and ("kind", "steady") in labels
        }
        for model, size in sorted(resident.items()):
            say(f"{model:<14} {mebibytes(size):>10}   measured, in the process of its engine")
        say(f"{'free':<14} {mebibytes(memory['free']):>10}   of {mebibytes(memory['capacity'])}, {mebibytes(memory['reserve'])} kept in reserve")
        return resident


def play(demo, files):
    server = demo.server
    title("Three models, catalogued by the SHA-256 of what they are; nothing is in memory yet")
    for name, path in files.items():
        added = server.cli_json("model", "add", name, path, "--context-tokens", CONTEXT_TOKENS, "--parallel", SEQUENCES)
        say(f"{name:<14} {path.name}, {mebibytes(path.stat().st_size)} on disk, {added['digest'][:19]}…")
    first, second, third = files

    title(f"A cold start: nobody has asked for {first} yet")
    cold = demo.chat(first, "cold")
    resident = demo.ledger()
    say(f"its file has {mebibytes(files[first].stat().st_size)}; in memory it takes {mebibytes(resident[first])}: budgets go by what was measured")

    title("The same question again, warm")
    warm = demo.chat(first, "warm")
    if warm >= cold:
        say("(not faster: this machine is busy with something else; once more)")
        warm = min(demo.chat(first, "warm") for _ in range(3))
    check(warm < cold, f"the warm answer ({warm:.2f} s) was not faster than the cold one ({cold:.2f} s)")

    title(f"A second model fits beside it: {second}")
    demo.chat(second, "cold")
    for _ in range(2):
        demo.chat(second, "warm")
    demo.ledger()

    title(f"A third does not: somebody must make room for {third}")
    with warmset.Events(server) as events:
        demo.chat(third, "cold")
        evicted = warmset.wait_for(
            lambda: [event for event in events.all() if event["type"] == "eviction_started"], "an eviction", seconds=30
        )
    for event in evicted:
        say(f"{event['model']} left, reason: {event['reason']}: what dropping it loses, demand times reload seconds per byte, was least")
    check(evicted[0]["model"] in (first, second), f"{evicted[0]['model']} was evicted")
    demo.ledger()
    print()
    print("\n".join("  " + line for line in server.cli("model", "list").stdout.splitlines()))

    title("A long prompt, computed once; then the server is killed and started again")
    first_answer = demo.long_prompt(third)
    check(first_answer.cached == 0, "nothing is known of a new prompt")
    warmset.wait_for(lambda: any(view["disk_blocks"] for view in kept(server)), "its KV is on disk", seconds=60)
    server.kill()
    server.start()
    again = demo.long_prompt(third)
    check(again.cached > 0, "the prompt was computed again")
    check(again.text == first_answer.text, "the answer has changed")
    say(f"the same answer; {again.cached} of {again.tokens} tokens came from disk instead of being computed")
    print("\n".join("  " + line for line in server.cli("kv").stdout.splitlines()))


def kept(server):
    return server.admin_json("/admin/v1/kv")["models"]


def main():
    files = warmset.model_files()
    chosen = {"smollm2": files["q4_1"], "smollm2-q8": files["q8_0"], "smollm2-f16": files["f16"]}
    check_ports()
    shutil.rmtree(PLACE, ignore_errors=True)
    server = warmset.Server(PLACE, MEMORY, RESERVE, ports=(PORT, ADMIN_PORT))
    title(f"warmset serve on {server.url}, admin on http://{server.admin_address}, {MEMORY} of memory, {RESERVE} of it reserved")
    server.start()
    try:
        play(Demo(server), chosen)
    except BaseException:
        server.stop()
        print(server.log_tail(2000), file=sys.stderr)
        raise
    title("What happened is kept")
    say(f"metrics    http://{server.admin_address}/metrics")
    say(f"ledger     http://{server.admin_address}/admin/v1/ledger")
    say(f"data, log  {PLACE.relative_to(warmset.ROOT)}")
    if os.environ.get("KEEP") == "1":
        say(f"the server stays up, process {server.pid}; stop it with: kill {server.pid}")
    else:
        engines = server.engines()
        server.stop()
        warmset.wait_for(lambda: not any(map(warmset.alive, engines)), "every engine is gone")
        say("the server and its engines are stopped (KEEP=1 make demo leaves them up)")


if __name__ == "__main__":
    try:
        main()
    except (StepFailed, warmset.CommandFailed, AssertionError, FileNotFoundError) as failure:
        print(f"warmset demo failed: {failure}", file=sys.stderr)
        sys.exit(1)
