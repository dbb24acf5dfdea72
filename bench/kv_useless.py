"""Tokens per second where nothing is ever asked twice: with the KV tier and without it, in turn.

Two servers of the same model, one with [kv] host = 0, which keeps nothing. Every prompt is new. Claim: at least 0.97 with it.
"""

import argparse

import harness
import warmset

CONTEXT_TOKENS = 1024
SEQUENCES = 2
PROMPT_TOKENS = 16
DECODED_TOKENS = 128
NAME = "m"


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run kv_useless", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def server(directory, model, kv):
    tables = {"model": [{"name": NAME, "source": model, "context_tokens": CONTEXT_TOKENS, "parallel": SEQUENCES,
                         "max_concurrency": SEQUENCES, "pin": True}], "kv": kv}
    return warmset.Server(directory, memory="2GiB", reserve="256MiB", config=warmset.toml(tables))


def decode_rate(port, generator):
    """Generated tokens per second of all requests together, from the first request to the last answer."""
    bodies = [{"model": NAME, "prompt": harness.random_tokens(generator, PROMPT_TOKENS), "max_tokens": DECODED_TOKENS,
               "temperature": 0, "ignore_eos": True} for _ in range(SEQUENCES)]
    waiting = [(harness.Connection(port), body) for body in bodies]
    answers, seconds = harness.together(waiting, lambda one: one[0].post("/v1/completions", one[1]))
    tokens = [answer["usage"]["completion_tokens"] for answer in answers]
    assert tokens == [DECODED_TOKENS] * SEQUENCES, tokens
    return sum(tokens) / seconds


def main():
    given, generator = arguments(), harness.generator()
    model = warmset.model_files()["q4_1"]
    with harness.scratch() as directory:
        tier = server(f"{directory}/on", model, {"host": "256MiB", "disk": "1GiB"})
        none = server(f"{directory}/off", model, {"host": 0})
        with tier, none:
            for one in (tier, none):
                decode_rate(one.port, generator)  # both warm
            figures = harness.alternate(given.rounds, lambda: decode_rate(tier.port, generator),
                                        lambda: decode_rate(none.port, generator))
            saved, = tier.admin_json("/admin/v1/kv")["models"]
    compared = harness.compared(*figures, "tokens per second", 1)
    compared = {name.replace("warmset", "tier").replace("peer", "no_tier"): value for name, value in compared.items()}
    assert saved["saved_blocks"] > 0 and sum(saved["hit_tokens"].values()) == 0, saved
    harness.report("kv_useless", {f"decode_{SEQUENCES}_at_once": compared}, model=model.name, rounds=given.rounds,
                   threads=harness.THREADS, saved_blocks=saved["saved_blocks"], claim="ratio at least 0.97")


if __name__ == "__main__":
    main()
