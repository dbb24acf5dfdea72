"""Tokens per second, decoding at 1, 4 and 8 requests at once and reading prompts of 512 and 2,048 tokens.

Against llama.cpp's own server: the same file, threads, context, batch sizes and key-value types. Claim: at least 1.0 of it.
"""

import harness
import warmset

ROUNDS = 5
SEQUENCES = 8
CONTEXT_TOKENS = 2560
DECODED_TOKENS = 96
PROMPT_TOKENS = 16


def servers(directory, model):
    config = warmset.toml({"model": [{"name": "m", "source": model, "context_tokens": CONTEXT_TOKENS, "parallel": SEQUENCES,
                                      "max_concurrency": SEQUENCES, "pin": True}]})
    ours = warmset.Server(directory, memory="3GiB", config=config)
    peer = harness.Peer(directory, "-m", model, "-c", CONTEXT_TOKENS * SEQUENCES, "-np", SEQUENCES, "-t", harness.THREADS,
                        "-tb", harness.THREADS, "-b", 2048, "-ub", 512, "-fa", "on", "--no-cache-prompt")
    return ours, peer


def decode_rate(port, count, generator):
    """Generated tokens per second of all requests together, from the first request to the last answer."""
    connections = [harness.Connection(port) for _ in range(count)]

    def call(connection):
        body = {"model": "m", "prompt": harness.random_tokens(generator, PROMPT_TOKENS), "max_tokens": DECODED_TOKENS,
                "temperature": 0, "ignore_eos": True}
        answer = connection.post("/v1/completions", body)
        return answer["usage"]["completion_tokens"]

    tokens, seconds = harness.together(connections, call)
    assert tokens == [DECODED_TOKENS] * len(connections), tokens
    return sum(tokens) / seconds


def prefill_rate(port, generator, length):
    """Prompt tokens per second of one request that generates one token."""
    connection = harness.Connection(port)

    def call(connection):
        body = {"model": "m", "prompt": harness.random_tokens(generator, length), "max_tokens": 1, "temperature": 0}
        return connection.post("/v1/completions", body)["usage"]["prompt_tokens"]

    (tokens,), seconds = harness.together([connection], call)
    assert tokens == length, tokens
    return tokens / seconds


def main():
    model = warmset.model_files()["q4_1"]
    generator = harness.generator()
    claims = {}
    with harness.scratch() as directory:
        server, peer = servers(directory, model)
        with server, peer:
            for port in (server.port, peer.port):
                decode_rate(port, SEQUENCES, generator)  # both warm
            for count in (1, 4, 8):
                figures = harness.alternate(ROUNDS, lambda: decode_rate(server.port, count, generator),
                                            lambda: decode_rate(peer.port, count, generator))
                claims[f"decode_{count}_at_once"] = harness.compared(*figures, "tokens per second", 1)
            for length in (512, 2048):
                figures = harness.alternate(ROUNDS, lambda: prefill_rate(server.port, generator, length),
                                            lambda: prefill_rate(peer.port, generator, length))
                claims[f"prefill_{length}"] = harness.compared(*figures, "tokens per second", 1)
    harness.report("decode", claims, model=model.name, threads=harness.THREADS, rounds=ROUNDS, claim="ratio at least 1.0")


if __name__ == "__main__":
    main()
