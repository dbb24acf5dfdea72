"""Conversations that were not lost, against llama-server with its host prompt cache and its slots saved and restored.

Resumed: some conversations, the server stopped and started again, each goes on. There llama-server is told to save a slot after
each and to restore it before, which counts; of us nothing is asked. Interleaved: each conversation has its turn once a round,
in an order drawn anew, with one sequence and a host cache of the same bytes on both sides that holds half of them. The sides
take turns, so that each has a pause after every answer; `--back-to-back` gives none. Claim: the time to the first token is at
most half of llama-server's, p50 and p99, of turns after the first.
"""

import argparse
import contextlib
import time
from pathlib import Path

import harness
import warmset

CONTEXT_TOKENS = 2048
# What a turn adds to the conversation. Prompts differ in length, so that no side gains from where its blocks end.
TURN_TOKENS = 48
SPREAD_TOKENS = 64
# Keys and values of a token: 30 layers, 3 heads of 64 numbers of two bytes.
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
SETTLING_SECONDS_MAX = 20
NAME = "m"


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run kv_conversations", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000, help="of the first prompt of a conversation, on average")
    parser.add_argument("--conversations", type=int, default=20, help="that are interleaved")
    parser.add_argument("--held", type=int, default=10, help="for how many of them the host cache has room")
    parser.add_argument("--turns", type=int, default=2, help="of each interleaved conversation that are measured")
    parser.add_argument("--resumed", type=int, default=10, help="conversations that are resumed after a restart")
    parser.add_argument("--back-to-back", action="store_true", help="all of one side without a pause, then all of the other")
    return parser.parse_args()


def first_token_seconds(port, tokens):
    body = {"model": NAME, "prompt": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return harness.Connection(port).first_event_seconds("/v1/completions", body)


class Ours:
    """The server with [kv]; nobody tells it what to keep."""

    def __init__(self, directory, model, host_mebibytes):
        tables = {"model": [{"name": NAME, "source": model, "context_tokens": CONTEXT_TOKENS, "parallel": 1, "pin": True}],
                  "kv": {"host": f"{host_mebibytes}MiB", "disk": "4GiB"}}
        self.server = warmset.Server(directory, memory="2GiB", reserve="256MiB", config=warmset.toml(tables))

    def start(self):
        self.server.start()
        return self

    def stop(self):
        self.server.stop()

    def ask(self, tokens):
        return first_token_seconds(self.server.port, tokens)

    def keep(self, _):
        """Nothing is asked of it; what it does by itself is waited for, as llama-server's saving is."""
        deadline, before = time.monotonic() + SETTLING_SECONDS_MAX, None
        while time.monotonic() < deadline and (now := self.view()["disk_written_bytes"]) != before:
            before = now
            time.sleep(0.5)

    def bring_back(self, _):
        pass

    def view(self):
        return self.server.admin_json("/admin/v1/kv")

    def figures(self):
        view = self.view()
        model, = view["models"]
        names = ("lookup_tokens", "hit_tokens", "reloaded", "recomputed", "abandoned", "saved_blocks", "evicted_blocks")
        bandwidth = "disk_read_bytes_per_second"
        return {**{name: model[name] for name in names}, "saves_lost": view["saves_lost"], bandwidth: view[bandwidth]}


class Theirs:
    """llama-server with its prompt cache in host memory, and a folder for slots."""

    def __init__(self, directory, model, host_mebibytes):
        self.directory, slots = directory, Path(directory) / "slots"
        slots.mkdir()
        self.arguments = ("-m", model, "-c", CONTEXT_TOKENS, "-np", 1, "-t", harness.THREADS, "-tb", harness.THREADS, "-b", 2048,
                          "-ub", 512, "-fa", "on", "--cache-ram", host_mebibytes, "--slot-save-path", slots)

    def start(self):
        self.peer = harness.Peer(self.directory, *self.arguments)
        return self

    def stop(self):
        self.peer.__exit__()

    def ask(self, tokens):
        return first_token_seconds(self.peer.port, tokens)

    def keep(self, number):
        self.slot("save", number)

    def bring_back(self, number):
        self.slot("restore", number)

    def slot(self, action, number):
        harness.Connection(self.peer.port).post(f"/slots/0?action={action}", {"filename": f"{number}.bin"})


def prompts(generator, count, tokens):
    spread = min(SPREAD_TOKENS // 2, tokens // 4)
    return [harness.random_tokens(generator, tokens + generator.randrange(-spread, spread)) for _ in range(count)]


def played(sides, calls, back_to_back):
    """What each call takes on each side: in turn, or all of one side without a pause and then all of the other."""
    found = [[None] * len(calls) for _ in sides]
    # Always in the same order: otherwise every second call would follow the one before without a pause.
    order = [(place, number) for place in range(len(calls)) for number in range(len(sides))]
    for place, number in sorted(order, key=lambda one: one[1]) if back_to_back else order:
        found[number][place] = calls[place](sides[number])
    return found


def resume(side, number, tokens):
    """Seconds of bringing a conversation back, and to the first token of its next turn, the former included."""
    began = time.perf_counter()
    side.bring_back(number)
    bringing = time.perf_counter() - began
    return bringing, bringing + side.ask(tokens)


def compared(ours, peer):
    quantiles = {f"p{share}": [warmset.percentile(side, share) for side in (ours, peer)] for share in (50, 99)}
    ratios = {name: {"warmset": round(one, 4), "peer": round(other, 4), "ratio": round(one / other, 3)}
              for name, (one, other) in quantiles.items()}
    return {"unit": "seconds to the first token", **ratios, "warmset_all": [round(value, 3) for value in ours],
            "peer_all": [round(value, 3) for value in peer]}


def after_a_restart(sides, given, generator):
    begun = prompts(generator, given.resumed, given.tokens)
    for side in sides:
        for number, prompt in enumerate(begun):
            side.ask(prompt)
            side.keep(number)
        side.stop()
        side.start()
        side.ask(harness.random_tokens(generator, 16))  # the model is loaded, and nothing else
    resumed = [prompt + harness.random_tokens(generator, TURN_TOKENS) for prompt in begun]
    calls = [lambda side, number=number, prompt=prompt: resume(side, number, prompt) for number, prompt in enumerate(resumed)]
    ours, peer = played(sides, calls, given.back_to_back)
    restoring = round(warmset.percentile([bringing for bringing, _ in peer], 50), 4)
    seconds = [[seconds for _, seconds in side] for side in (ours, peer)]
    return {**compared(*seconds), "peer_restoring_a_slot_p50": restoring}


def in_turns(sides, given, generator):
    said = prompts(generator, given.conversations, given.tokens)
    tokens = list(said)
    for _ in range(given.turns):
        for number in generator.sample(range(given.conversations), given.conversations):
            said[number] = said[number] + harness.random_tokens(generator, TURN_TOKENS)
            tokens.append(said[number])
    found = played(sides, [lambda side, tokens=one: side.ask(tokens) for one in tokens], given.back_to_back)
    first = {name: round(warmset.percentile(side[:given.conversations], 50), 3)
             for name, side in zip(("warmset", "peer"), found)}
    return {**compared(*(side[given.conversations:] for side in found)), "first_turns_p50": first}


def main():
    given, generator = arguments(), harness.generator()
    model = warmset.model_files()["q4_1"]
    longest = given.tokens + SPREAD_TOKENS // 2 + given.turns * TURN_TOKENS
    host_mebibytes = -(-given.held * longest * TOKEN_BYTES // warmset.MEBIBYTE)
    with harness.scratch() as directory, contextlib.ExitStack() as stack:
        claims, figures = {}, {}
        for name, measure in (("resumed_after_a_restart", after_a_restart), ("interleaved", in_turns)):
            sides = []
            for kind in (Ours, Theirs):
                place = Path(directory) / name / kind.__name__
                place.mkdir(parents=True)
                sides.append(kind(place, model, host_mebibytes).start())
                stack.callback(sides[-1].stop)
                sides[-1].ask(harness.random_tokens(generator, 16))  # both warm
            claims[name] = measure(sides, given, generator)
            figures[name] = sides[0].figures()
            stack.close()
    harness.report("kv_conversations", claims, model=model.name, **vars(given), turn_tokens=TURN_TOKENS,
                   host_mebibytes=host_mebibytes, threads=harness.THREADS, figures_of_the_tier=figures,
                   claim="p50 and p99 ratios at most 0.5")


if __name__ == "__main__":
    main()
