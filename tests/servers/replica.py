"""A server with OpenAI's routes in which each request chooses what goes wrong: what stands behind a gateway in its tests.

A body may have `"behave": {...}`, for all replicas or with `"at": [names]` for some:

| key | what happens |
|---|---|
| `status`, `headers`, `text` | this answer |
| `drop` | the connection ends without an answer |
| `hang` | no answer until the caller is gone |
| `pieces`, `bytes` | a stream of so many pieces, each with so many bytes of text |
| `cut_after` | the stream's connection ends after so many pieces; with `cut_inside`, in the middle of the next one |
| `steps` | each piece waits until `step()` is called |
| `audio` | so many bytes that are no text, `chunked` or with their length |

It runs in a thread of the test, which reads from `seen` what came.
"""

import asyncio
import contextlib
import json
import threading

HEADER_END = b"\r\n\r\n"


class Seen:
    """One request as it came."""

    def __init__(self, path, headers, body):
        self.path, self.headers, self.body = path, headers, body
        self.pieces_sent = 0
        self.bytes_sent = 0
        self.begun, self.ended, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.step_allowed = asyncio.Semaphore(0)

    def json(self):
        return json.loads(self.body)


class Replica:
    def __init__(self, name, models=("m",), port=0, key=None):
        self.name, self.models, self.port, self.key = name, list(models), port, key
        self.seen = []
        # What it says at /metrics, if it has that.
        self.figures = None
        # A replica that takes connections and says nothing at all, not even that it is well.
        self.deaf = threading.Event()
        self.loop = None
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(60)

    def _run(self, started):
        asyncio.set_event_loop(self.loop)
        self.tasks = set()
        serving = asyncio.start_server(self._connection, "127.0.0.1", self.port, limit=64 << 20, backlog=1024)
        self.server = self.loop.run_until_complete(serving)
        self.port = self.server.sockets[0].getsockname()[1]
        started.set()
        self.loop.run_forever()
        self.loop.close()

    def stop(self):
        """All its connections break, and nobody listens any more: what a kill does."""

        def end():
            self.server.close()
            for writer in list(self.tasks):
                writer.transport.abort()
            self.loop.call_later(0.01, self.loop.stop)

        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(end)
            self.thread.join(60)

    def step(self, seen, count=1):
        def allow():
            for _ in range(count):
                seen.step_allowed.release()

        self.loop.call_soon_threadsafe(allow)

    async def _connection(self, reader, writer):
        self.tasks.add(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.tasks.discard(writer)
            with contextlib.suppress(Exception):
                writer.close()

    async def _exchange(self, reader, writer):
        head = await reader.readuntil(HEADER_END)
        line, *fields = head[: -len(HEADER_END)].decode("latin-1").split("\r\n")
        method, path, _ = line.split(" ")
        headers = [tuple(field.split(": ", 1)) for field in fields]
        length = int(dict((name.lower(), value) for name, value in headers).get("content-length", 0))
        body = await reader.readexactly(length)
        if self.deaf.is_set():
            await reader.read()
            return False
        if method == "GET":
            return await self._look(path, writer)
        seen = Seen(path, headers, body)
        self.seen.append(seen)
        gone = asyncio.ensure_future(reader.read(1))
        answering = asyncio.ensure_future(self._answer(seen, writer))
        try:
            await asyncio.wait([gone, answering], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or answering.exception():
                seen.aborted.set()
                return False
            seen.ended.set()
            return answering.result()
        finally:
            answering.cancel()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await gone

    async def _look(self, path, writer):
        if path == "/health":
            return await self._write(writer, 200, b"{}")
        if path == "/v1/models":
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
            return await self._write(writer, 200, json.dumps(listed).encode())
        if path == "/metrics" and self.figures is not None:
            return await self._write(writer, 200, self.figures.encode(), "text/plain")
        return await self._write(writer, 404, b"{}")

    async def _write(self, writer, status, body, kind="application/json", headers=()):
        fields = [("content-type", kind), ("content-length", str(len(body))), *headers]
        writer.write(self._head(status, fields) + body)
        await writer.drain()
        return True

    @staticmethod
    def _head(status, fields):
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode("latin-1")

    async def _answer(self, seen, writer):
        asked = {}
        with contextlib.suppress(ValueError):
            asked = json.loads(seen.body)
        behave = asked.get("behave", {})
        if self.name not in behave.get("at", [self.name]):
            behave = {}
        seen.begun.set()
        if behave.get("hang"):
            await asyncio.Event().wait()
        if behave.get("drop"):
            writer.transport.abort()
            return False
        if "status" in behave:
            headers = behave.get("headers", {}).items()
            return await self._write(writer, behave["status"], behave.get("text", "{}").encode(), headers=headers)
        if "audio" in behave:
            return await self._audio(behave, writer)
        if asked.get("stream"):
            return await self._stream(seen, asked, behave, writer)
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": self.name}}
        said = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return await self._write(writer, 200, json.dumps(said).encode(), headers=[("x-own", "kept")])

    async def _audio(self, behave, writer):
        data = bytes(number % 256 for number in range(behave["audio"]))
        if not behave.get("chunked"):
            return await self._write(writer, 200, data, "audio/mpeg")
        writer.write(self._head(200, [("content-type", "audio/mpeg"), ("transfer-encoding", "chunked")]))
        for start in range(0, len(data), 1000):
            self._chunk(writer, data[start : start + 1000])
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    @staticmethod
    def _chunk(writer, data):
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def _stream(self, seen, asked, behave, writer):
        options = asked.get("stream_options") or {}
        writer.write(self._head(200, [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]))
        base = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}

        def event(**fields):
            return f"data: {json.dumps({**base, **fields})}\n\n".encode()

        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        self._chunk(writer, event(choices=[first]))
        pieces = behave.get("pieces", 3)
        for number in range(pieces):
            if behave.get("steps"):
                await seen.step_allowed.acquire()
            text = f"<{number}>" + "x" * behave.get("bytes", 0)
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            data = event(choices=[choice])
            if number == behave.get("cut_after"):
                if behave.get("cut_inside"):
                    self._chunk(writer, data[:20])
                await writer.drain()
                # What was written goes out before the connection ends.
                writer.close()
                return False
            self._chunk(writer, data)
            await writer.drain()
            seen.pieces_sent += 1
            seen.bytes_sent += len(data)
        self._chunk(writer, event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
        if options.get("include_usage"):
            usage = {"prompt_tokens": 11, "completion_tokens": pieces, "total_tokens": 11 + pieces}
            usage["prompt_tokens_details"] = {"cached_tokens": 5}
            self._chunk(writer, event(choices=[], usage=usage))
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
