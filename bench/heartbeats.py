"""What callers who wait cost: 10,000 streams that wait for one model, each told its place again and again.

The model never becomes ready while it is measured. Claim: the server's own process grows by less than 200 MiB.
"""

import json
import resource
import selectors
import socket
import time

import harness
import warmset

STREAMS = 10_000
LIMIT_MIB = 200
LOAD_SECONDS = 3600
# After the last stream has heard its place, so that every stream has been through the heartbeat.
SETTLE_SECONDS = 12


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with harness.scratch() as directory:
        model = warmset.synthetic_model(directory, "never", allocate=False, load_seconds=LOAD_SECONDS)
        config = warmset.toml({
            "gateway": {"queue_limit": 2 * STREAMS, "queue_limit_per_model": 2 * STREAMS, "first_byte_timeout": "1h",
                        "drain_timeout": 0, "connections_max": STREAMS + 100},
            "model": [{"name": "never", "source": model, "engine": "synthetic"}]})
        with warmset.Server(directory, memory="1GiB", config=config) as server:
            body = json.dumps({"model": "never", "prompt": "x" * 100, "max_tokens": 8, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            before = warmset.resident_set_bytes(server.pid)
            asked = time.perf_counter()
            heard = open_streams(server.port, head.encode() + body)
            opened_seconds = time.perf_counter() - asked
            time.sleep(SETTLE_SECONDS)
            after = warmset.resident_set_bytes(server.pid)
            probe = time.perf_counter()
            assert server.get("/health/live")[0] == 200
            probe_seconds = time.perf_counter() - probe
            comments = sum(count_comments(connection) for connection in heard)
            for connection in heard:
                connection.close()
            warmset.wait_for(lambda: sum(
                value for (name, _), value in server.metrics().items() if name == "warmset_queue_depth") == 0,
                "every stream is let go")
            left = warmset.resident_set_bytes(server.pid)
    mebibytes = lambda value: round(value / warmset.MEBIBYTE, 1)
    grown = mebibytes(after - before)
    claims = {"streams": STREAMS, "grown_mib": grown, "limit_mib": LIMIT_MIB, "holds": grown < LIMIT_MIB,
              "kib_per_stream": round((after - before) / STREAMS / 1024, 2), "before_mib": mebibytes(before),
              "after_they_left_mib": mebibytes(left), "opened_seconds": round(opened_seconds, 2),
              "probe_among_them_ms": round(probe_seconds * 1e3, 1), "comments_heard": comments}
    harness.report("heartbeats", claims, claim=f"10,000 waiting streams below {LIMIT_MIB} MiB")


def open_streams(port, request):
    """Opens every stream and returns when each has heard its place."""
    connections = []
    waiting = selectors.DefaultSelector()
    for _ in range(STREAMS):
        connection = socket.create_connection(("127.0.0.1", port), timeout=120)
        connection.sendall(request)
        connection.setblocking(False)
        waiting.register(connection, selectors.EVENT_READ)
        connections.append(connection)
    deadline = time.monotonic() + 120
    seen = {}
    while len(waiting.get_map()) and time.monotonic() < deadline:
        for key, _ in waiting.select(timeout=1):
            data = seen[key.fd] = seen.get(key.fd, b"") + key.fileobj.recv(65536)
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a stream was answered {data[:200]!r}")
            if b"\n: " in data:
                waiting.unregister(key.fileobj)
    if len(waiting.get_map()):
        raise RuntimeError(f"{len(waiting.get_map())} streams heard nothing")
    return connections


def count_comments(connection):
    try:
        return connection.recv(1 << 20).count(b"\n: ")
    except BlockingIOError:
        return 0


if __name__ == "__main__":
    main()
