"""Steady load from official clients, and what each of them got."""

import threading
import time

import openai
from warmset import PATIENCE_SECONDS, wait_for


class SteadyLoad:
    """Official clients that ask for one name without a pause; what each answer was, and when it was asked for."""

    def __init__(self, server, name="model", clients=2, max_tokens=4):
        self.server, self.name, self.max_tokens = server, name, max_tokens
        self.answers, self.starts, self.errors = [], [], []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(number % 2 == 1,)) for number in range(clients)]

    def ask(self, client, stream):
        asked = time.monotonic()
        arguments = {"model": self.name, "messages": [{"role": "user", "content": "Say hello."}],
                     "max_tokens": self.max_tokens, "temperature": 0}
        raw = client.chat.completions.with_raw_response.create(stream=stream, **arguments)
        digest = raw.headers["warmset-model-digest"]
        self.starts.append(raw.headers["warmset-start"])
        parsed = raw.parse()
        chunks = list(parsed) if stream else [parsed]
        # An answer is made by one version and says so in its head and in its body.
        assert {chunk.system_fingerprint for chunk in chunks} == {"fp_" + digest.removeprefix("sha256:")[:12]}
        self.answers.append((asked, time.monotonic(), digest))

    def run(self, stream):
        client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_SECONDS)
        while not self.stopped.is_set():
            try:
                self.ask(client, stream)
            except Exception as error:  # noqa: BLE001 - whatever a caller would see
                self.errors.append(error)
                self.stopped.set()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        wait_for(lambda: len(self.answers) >= 4 or self.errors, "callers are answered")
        return self

    def __exit__(self, *_):
        seen = len(self.answers)
        wait_for(lambda: len(self.answers) >= seen + 4 or self.errors, "callers go on being answered")
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        assert self.errors == []

    def digests_asked_after(self, moment):
        return {digest for asked, _, digest in self.answers if asked > moment}

    def more(self, count=6):
        seen = len(self.answers)
        wait_for(lambda: len(self.answers) >= seen + count or self.errors, "callers go on being answered")
