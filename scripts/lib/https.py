"""Serves files over HTTPS on loopback, with ranges, for the tests of fetching and for its benchmark."""

import http.server
import re
import ssl
import subprocess
import threading
from pathlib import Path

CHUNK_BYTES = 1 << 20


def certificate(directory):
    """A certificate for localhost that signs itself: (certificate, key)."""
    certificate, key = Path(directory) / "ca.pem", Path(directory) / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server.owner
        server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        answer = server.answer(self.path) if server.answer else None
        if answer is not None:
            return self.send(*answer)
        path = server.files.get(self.path.split("?")[0])
        if path is None:
            return self.send(404, {}, b"")
        self.send_file(path)

    def send(self, status, headers, body):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, path):
        size = path.stat().st_size
        tag = f'"{size}-{path.stat().st_mtime_ns}"'
        begin = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and self.headers.get("If-Range", tag) == tag and int(wanted[1]) < size:
            begin = int(wanted[1])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(size - begin))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(begin)
            sent = begin
            while chunk := file.read(CHUNK_BYTES):
                self.wfile.write(chunk)
                sent += len(chunk)
                self.server.owner.pace(sent)

    def log_message(self, *_):
        pass


class Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # clients that go away are what some tests are about


class FileServer:
    """Serves `files` ({path: file}). `answer(path)` may give (status, headers, body) instead."""

    def __init__(self, directory, files=None, answer=None):
        self.files = dict(files or {})
        self.answer = answer
        self.requests = []
        # Bytes after which it waits until the test lets it go on.
        self.hold_after = None
        self.go_on = threading.Event()
        self.ca_file, key = certificate(directory)
        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.http.owner = self
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca_file, key)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)

    def pace(self, sent):
        if self.hold_after is not None and sent >= self.hold_after:
            self.go_on.wait()

    def url(self, path):
        return f"https://localhost:{self.port}{path}"

    def sources(self, **more):
        """The [sources] that let a server fetch from here."""
        return {"allow_hosts": ["localhost"], "ca_file": str(self.ca_file), **more}

    def ranges(self, path):
        return [headers.get("range") for asked, headers in self.requests if asked.split("?")[0] == path]

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.http.shutdown()
        self.http.server_close()
