"""How fast a model comes from a web server to verified and ready.

A real model is served over HTTPS on loopback. Timed is all of `POST /admin/v1/models`: the transfer, its hash, making it
durable, reading its header, the catalog. Beside it, on the same machine and in turns: writing as many bytes to the same
disk and making them durable, and SHA-256 of as many bytes in memory, with OpenSSL, one core. Claim: at least 0.8 of the slower of the
two. The web server of this benchmark takes its share of the same processors; what is left with nothing
done to the bytes is reported as well.
"""

import contextlib
import hashlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import time
from pathlib import Path

import harness
import warmset
from https import FileServer

ROUNDS = 5
CHUNK_BYTES = 1 << 20


def large_model(directory):
    """The largest of the test models, as 32-bit floats where its tool is built: a transfer should take longer than its start."""
    source = warmset.model_files()["f16"]
    tool = harness.ROOT / "target" / "release" / "examples" / "requantise"
    if not tool.exists():
        return source
    target = Path(directory) / "SmolLM2-135M-Instruct.F32.gguf"
    subprocess.run([str(tool), str(source), str(target), "F32"], check=True, capture_output=True)
    return target


def write_seconds(directory, data):
    began = time.perf_counter()
    path = Path(directory) / "written"
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(data), CHUNK_BYTES):
            file.write(memoryview(data)[begin : begin + CHUNK_BYTES])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def hash_seconds(data):
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - began


def receive_seconds(files, path, size):
    """What the client's side of TLS takes, with nothing done to the bytes."""
    context = ssl.create_default_context(cafile=files.ca_file)
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", files.port)) as plain, context.wrap_socket(plain, server_hostname="localhost") as stream:
        stream.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        buffer, received = bytearray(CHUNK_BYTES), 0
        while received < size:
            received += stream.recv_into(buffer)
    return time.perf_counter() - began


def add_seconds(server, files, path):
    body = json.dumps({"name": "far", "source": files.url(path)})
    began = time.perf_counter()
    status, _, text = server.post("/admin/v1/models", body, headers={"content-type": "application/json"}, admin=True)
    seconds = time.perf_counter() - began
    assert status == 200, text
    server.cli("model", "remove", "far")
    return seconds


def prefer(server):
    """The server has a session of its own: it gets the precedence that this process has, where the kernel groups by session."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{server.pid}/autogroup").write_text("-10")


def main():
    with harness.scratch() as directory:
        model = large_model(directory)
        data = model.read_bytes()
        size = len(data)
        with FileServer(directory, {"/m.gguf": model}) as files:
            config = warmset.toml({"sources": files.sources()})
            with warmset.Server(directory, memory="1GiB", config=config) as server:
                prefer(server)
                add_seconds(server, files, "/m.gguf")
                rounds = []
                for _ in range(ROUNDS):
                    rounds.append({
                        "write": write_seconds(directory, data), "hash": hash_seconds(data),
                        "add": add_seconds(server, files, "/m.gguf"), "receive": receive_seconds(files, "/m.gguf", size),
                    })
    rate = {key: size / statistics.median(one[key] for one in rounds) / 1e6 for key in rounds[0]}
    slower = min(rate["write"], rate["hash"])
    claims = {
        "fetched_to_ready_megabytes_per_second": round(rate["add"]),
        "disk_write_megabytes_per_second": round(rate["write"]),
        "sha256_megabytes_per_second": round(rate["hash"]),
        "tls_receive_alone_megabytes_per_second": round(rate["receive"]),
        "share_of_the_slower": round(rate["add"] / slower, 3),
        "share_of_receive_alone": round(rate["add"] / rate["receive"], 3),
    }
    harness.report("fetch", claims, peer="the machine itself", model=model.name, bytes=size, rounds=ROUNDS, claim="at least 0.8 of the slower of disk write and SHA-256")


if __name__ == "__main__":
    main()
