"""A server with OpenAI's routes that does what no real one does on purpose: the faults that a command can have."""

import argparse
import contextlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import time

arguments = argparse.ArgumentParser()
arguments.add_argument("--port", type=int, required=True)
arguments.add_argument("--fault", default="none")
arguments.add_argument("--no-health", action="store_true")
given = arguments.parse_args()

if given.fault == "exits":
    print("loading", flush=True)
    print("cannot find the flux capacitor", file=sys.stderr, flush=True)
    sys.exit(3)
if given.fault in ("ignores_sigterm", "never_healthy"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if given.fault == "detaches":
    # A child of a child in a session of its own, which no signal to a group reaches.
    subprocess.Popen(["sh", "-c", "setsid sleep 987654 & sleep 987654"], start_new_session=True)
if given.fault == "floods":
    for number in range(200_000):
        print(f"line {number} " + "x" * 80)
    sys.stdout.flush()

held = []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health" and given.no_health:
            self.answer(404, {"error": "not found"})
        elif self.path == "/health" and given.fault == "never_healthy":
            self.answer(503, {"error": {"message": "Loading model"}})
        elif self.path in ("/health", "/v1/models"):
            self.answer(200, {"data": [{"id": "crafted-model"}]})
        else:
            self.answer(404, {"error": "not found"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if given.fault == "eats_memory" and asked.get("max_tokens") != 1:
            while True:
                held.append(bytearray(b"x") * (8 << 20))
        if asked.get("stream"):
            return self.stream(asked)
        if given.fault == "refuses":
            return self.answer(400, {"error": {"message": "the prompt is longer than the context", "type": "x"}})
        told = {"env": dict(os.environ), "asked": asked, "cwd": os.getcwd(), "uid": os.getuid(), "argv": sys.argv}
        choice = {"index": 0, "text": json.dumps(told), "finish_reason": "stop"}
        choice["message"] = {"role": "assistant", "content": choice["text"]}
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        self.answer(200, {"choices": [choice], "usage": usage})

    def stream(self, asked):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        count = 0
        while given.fault == "endless" or count < 3:
            text = f"word{count} "
            choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": None}
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            self.wfile.flush()
            count += 1
            if given.fault == "endless":
                time.sleep(0.05)
        if given.fault == "cuts_off":
            return
        choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        # Whoever hung up has been counted.
        print("a caller hung up", flush=True)


def listening():
    if given.fault != "wrong_port":
        return Server(("127.0.0.1", given.port), Handler)
    # Below the ports that the kernel hands out: the one next to ours may be that of an outgoing connection.
    while True:
        with contextlib.suppress(OSError):
            server = Server(("127.0.0.1", random.randrange(18000, 31000)), Handler)
            print(f"listening on {server.server_port}", flush=True)
            return server


print("crafted server begins", flush=True)
listening().serve_forever()
