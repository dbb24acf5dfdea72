"""Replicas that fail on purpose and gateways in front of them, for the tests."""

import contextlib
import http.client
import json
import socket
import sys

import openai
from warmset import PATIENCE_SECONDS, ROOT, Gateway

sys.path.insert(0, str(ROOT / "tests" / "servers"))

from replica import Replica  # noqa: E402

CHAT = "/v1/chat/completions"


class Fleet:
    """Replicas and gateways of one test."""

    def __init__(self, directory):
        self.directory, self.replicas, self.gateways = directory, {}, []

    def replica(self, name, **options):
        self.replicas[name] = Replica(name, **options)
        return self.replicas[name]

    def gateway(self, *names, config=None, wait=True):
        for name in names:
            if name not in self.replicas:
                self.replica(name)
        gateway = Gateway(self.directory / f"g{len(self.gateways)}", [self.replicas[name].url for name in names], config)
        self.gateways.append(gateway)
        return gateway.start(wait)

    def tries(self):
        return sum(len(replica.seen) for replica in self.replicas.values())

    def close(self):
        for gateway in self.gateways:
            code = gateway.stop()
            log = gateway.log_path.read_text(errors="replace")
            assert "panicked at" not in log, log[-4000:]
            assert code in (0, None, -9), f"the gateway exited with {code}\n{gateway.log_tail()}"
        for replica in self.replicas.values():
            replica.stop()


def chat(text="hello", **fields):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def events_of(body):
    """The events of a stream as texts."""
    return [event for event in body.decode().split("\n\n") if event]


class Stream:
    """A stream that is read by hand. What the kernel takes for the reader before it reads can be limited."""

    def __init__(self, gateway, body, path=CHAT, receive_buffer_bytes=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_SECONDS)
        if receive_buffer_bytes is not None:
            self.connection.connect()
            self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        self.response = self.connection.getresponse()

    def event(self):
        lines = b""
        while True:
            line = self.response.readline()
            if line in (b"", b"\n"):
                return lines.decode()
            lines += line

    def close(self):
        """The caller goes away, at once."""
        sock = self.connection.sock or self.response.fp.raw._sock
        sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()


def client_of(gateway):
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="callers-key", max_retries=0, timeout=PATIENCE_SECONDS)


def partial(gateway, body, path=CHAT):
    """What of an answer came before it broke."""
    stream = Stream(gateway, body, path)
    text = b""
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        while piece := stream.response.read1():
            text += piece
    return stream.response.status, None, text
