"""Models from where people keep them: real transfers over TLS, real stores of other tools, a real S3 protocol server."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import gguf
import pytest
import warmset
from https import FileServer
from warmset import run_command, synthetic_model, wait_for

NAME = "SmolLM2.gguf"
# Who sends may hold a transfer for as long as a test takes to look at it.
HELD = {"stall_timeout": "600s"}


@pytest.fixture
def files(tmp_path, models):
    with FileServer(tmp_path, {f"/{NAME}": models["q4_1"]}) as server:
        yield server


def answer(server, model, prompt="The capital of France is"):
    status, _, body = server.complete(model, prompt, max_tokens=8, temperature=0)
    assert status == 200, body
    return body["choices"][0]["text"]


def test_a_model_is_fetched_by_a_server_and_answers(pool, files, models):
    server = pool(memory="800MiB", reserve="128MiB", sources=files.sources())
    local = server.cli_json("model", "add", "local", models["q4_1"])
    server.cli("model", "remove", "local")
    added = server.cli_json("model", "add", "far", files.url(f"/{NAME}"))
    assert added["digest"] == local["digest"], "the same bytes are the same model, wherever they come from"
    assert "Paris" in answer(server, "far")
    assert added["fetch_seconds"] > 0
    [measured] = server.cli_json("model", "show", "far")["measurements"]
    assert measured["download_seconds"] == added["fetch_seconds"]
    assert server.metric("warmset_model_load_seconds_count", model="far", phase="fetch") == 1
    # What is here is not fetched again.
    assert server.cli_json("model", "add", "far", files.url(f"/{NAME}"), "--parallel", "2")["parallel"] == 2
    assert len(files.requests) == 1


def test_a_server_starts_without_what_is_far_and_brings_it_here(pool, files, models, tmp_path):
    """One model is here, one comes slowly, one cannot be had: only callers of the two others wait."""
    near = {"name": "near", "source": synthetic_model(tmp_path, "near"), "engine": "synthetic"}
    far = {"name": "far", "source": files.url(f"/{NAME}"), "context_tokens": 512}
    lost = {"name": "lost", "source": files.url("/absent.gguf"), "pin": True}
    files.hold_after = 1 << 20
    server = pool(memory="800MiB", reserve="128MiB", models=[near, far, lost], sources=files.sources(**HELD))
    assert server.complete("near")[0] == 200
    status, headers, body = server.complete("far")
    assert status == 503 and body["error"]["code"] == "model_loading" and int(headers["retry-after"]) > 0
    assert "being fetched" in body["error"]["message"]
    status, _, body = server.complete("lost")
    assert status == 503 and "404" in body["error"]["message"], body
    assert server.complete("nobody")[0] == 404
    # A file that is read again begins nothing twice.
    assert server.cli_json("admin", "reload")["unchanged"] == 3
    files.go_on.set()
    wait_for(lambda: server.complete("far")[0] == 200, "the model that was far is here")
    assert len(files.ranges(f"/{NAME}")) == 1
    server.stop()
    server.start()
    assert server.complete("far")[0] == 200 and server.complete("near")[0] == 200


def test_a_server_refuses_addresses_that_are_not_public_E11(pool, files):
    server = pool(memory="400MiB", reserve="128MiB", sources={"ca_file": str(files.ca_file)})
    for source in [files.url(f"/{NAME}"), f"https://127.0.0.1:{files.port}/{NAME}", "https://169.254.169.254/latest/a.gguf"]:
        status, _, body = server.post("/admin/v1/models", {"name": "a", "source": source}, admin=True)
        assert status == 422, body
        assert "not a public address" in json.loads(body)["error"]["message"]
    assert files.requests == []


def test_a_fetch_is_seen_while_it_lasts(pool, files, models):
    files.hold_after = 20 << 20
    server = pool(memory="800MiB", reserve="128MiB", sources=files.sources(**HELD))
    with warmset.Events(server) as events:
        body = {"name": "far", "source": files.url(f"/{NAME}?token=SECRET")}
        adding = threading.Thread(target=lambda: server.post("/admin/v1/models", body, admin=True))
        adding.start()

        def fetch():
            [found] = server.admin_json("/admin/v1/models")["fetches"] or [None]
            return found if found and found["done_bytes"] >= 20 << 20 else None

        found = wait_for(fetch, "the fetch is listed")
        assert found["name"] == "far" and found["total_bytes"] == models["q4_1"].stat().st_size
        assert found["bytes_per_second"] > 0 and found["seconds_left"] > 0
        assert "far" in (listed := server.cli("model", "list").stdout) and "fetching" in listed and "left" in listed
        # Other changes do not wait for it.
        server.cli("model", "add", "near", models["q4_0"])
        files.go_on.set()
        adding.join()
        wait_for(lambda: any(event["type"] == "fetch_finished" for event in events.all()), "its end is told")
        assert {"fetch_started", "fetch_progress"} <= {event["type"] for event in events.all()}
        assert "SECRET" not in json.dumps(events.all())
    assert server.admin_json("/admin/v1/models")["fetches"] == []


def test_a_caller_that_gives_up_ends_its_fetch_and_the_next_goes_on(pool, files, models):
    files.hold_after = 20 << 20
    server = pool(memory="800MiB", reserve="128MiB", sources=files.sources(**HELD))
    body = json.dumps({"name": "far", "source": files.url(f"/{NAME}")})
    caller = socket.create_connection(("127.0.0.1", server.admin_port))
    head = f"POST /admin/v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    caller.sendall((head + body).encode())
    fetches = lambda: server.admin_json("/admin/v1/models")["fetches"]
    wait_for(lambda: any(fetch["done_bytes"] >= 20 << 20 for fetch in fetches()), "some of it has come")
    caller.close()
    wait_for(lambda: fetches() == [], "nobody wants it any more")
    files.hold_after = None
    files.go_on.set()
    # Until what it had is written, the file is still its own.
    add = lambda: server.cli("model", "add", "far", files.url(f"/{NAME}"), check=False)
    wait_for(lambda: "being fetched already" not in add().stderr, "the next has the file")
    assert server.cli_json("model", "show", "far")["size_bytes"] == models["q4_1"].stat().st_size
    assert int(files.ranges(f"/{NAME}")[1].removeprefix("bytes=").rstrip("-")) >= 20 << 20


def test_a_fetch_without_a_server_survives_kill_9(tmp_path, files, models):
    size = models["q4_1"].stat().st_size
    files.hold_after = 40 << 20
    data = tmp_path / "data"
    command = [str(warmset.BINARY), "model", "add", "far", files.url(f"/{NAME}"), "--data", str(data), "--json"]
    environment = {**os.environ, "SSL_CERT_FILE": str(files.ca_file)}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    unfinished = data / "store" / "unfinished"

    def written():
        return sum(path.stat().st_size for path in unfinished.glob("*") if path.suffix != ".json") if unfinished.exists() else 0

    before = wait_for(lambda: written() >= (40 << 20) and written(), "40 MiB have come")
    first.kill()
    first.wait()
    files.hold_after = None
    files.go_on.set()
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=warmset.PATIENCE_SECONDS)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    ranges = files.ranges(f"/{NAME}")
    assert ranges[0] is None and ranges[1] is not None
    assert before <= int(ranges[1].removeprefix("bytes=").rstrip("-")) < size
    assert document["files"][0]["sha256"] == "sha256:" + hashlib.sha256(models["q4_1"].read_bytes()).hexdigest()
    assert list(unfinished.iterdir()) == []


def test_a_split_model_is_one_model(tmp_path, pool, models):
    parts = gguf.split(models["q4_1"], tmp_path / "parts", 3)
    with FileServer(tmp_path, {f"/{part.name}": part for part in parts}) as files:
        server = pool(memory="800MiB", reserve="128MiB", sources=files.sources())
        local = server.cli_json("model", "add", "parts", parts[0])
        assert [file["name"] for file in local["files"]] == [f"model-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
        split_answer = answer(server, "parts")
        assert "Paris" in split_answer
        server.cli("model", "remove", "parts")
        far = server.cli_json("model", "add", "far", files.url(f"/{parts[0].name}"))
        assert far["digest"] == local["digest"]
        assert answer(server, "far") == split_answer
        refused = server.cli("model", "add", "x", parts[1], check=False)
        assert "give the part 00001" in refused.stderr
        server.cli("model", "add", "whole", models["q4_1"])
        assert answer(server, "whole") == split_answer


def test_what_is_no_model_is_refused_after_it_came(tmp_path, pool):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"<html>Sign in</html>")
    with FileServer(tmp_path, {"/bad.gguf": bad}) as files:
        server = pool(memory="400MiB", reserve="128MiB", sources=files.sources())
        status, _, body = server.post("/admin/v1/models", {"name": "a", "source": files.url("/bad.gguf")}, admin=True)
        assert status == 422 and b"unsupported format" in body, body
        assert list((server.data / "store" / "blobs").iterdir()) == []


def hub(commit, repository, files):
    """Answers as Hugging Face does, for one repository of {path: file}."""
    hashes = {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in files.items()}

    def reply(path):
        path = path.split("?")[0]
        if path.startswith(f"/api/models/{repository}/revision/"):
            siblings = [
                {"rfilename": name, "size": file.stat().st_size,
                 "lfs": {"sha256": hashes[name], "size": file.stat().st_size, "pointerSize": 134}}
                for name, file in files.items()
            ]
            body = json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()
            return 200, {"Content-Type": "application/json"}, body
        return None

    return reply, {f"/{repository}/resolve/{commit}/{name}": file for name, file in files.items()}


def test_a_hubs_file_is_pinned_to_a_commit(tmp_path, models):
    commit = "0123456789abcdef0123456789abcdef01234567"
    reply, paths = hub(commit, "org/repo", {"m.gguf": models["q4_1"]})
    with FileServer(tmp_path, paths, reply) as files:
        environment = {"HF_ENDPOINT": f"https://localhost:{files.port}", "SSL_CERT_FILE": str(files.ca_file),
                       "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_SECRET", "RUST_LOG": "trace"}
        place = ["--data", str(tmp_path / "data"), "--json"]
        result = run_command(["model", "add", "far", "hf://org/repo/m.gguf", *place], env=environment)
        document = json.loads(result.stdout)
        assert document["source"] == "hf://org/repo/m.gguf"
        assert document["pinned_source"] == f"hf://org/repo/m.gguf@{commit}"
        assert document["fetch_seconds"] > 0
        assert all(headers.get("authorization") == "Bearer hf_SECRET" for _, headers in files.requests)
        assert "SECRET" not in result.stderr and "SECRET" not in result.stdout
        assert not (tmp_path / "hf").exists(), "other tools' stores are never written"


def test_an_ollama_store_is_read_and_never_written(tmp_path, models):
    store = tmp_path / "ollama"
    digest = hashlib.sha256(models["q4_0"].read_bytes()).hexdigest()
    manifest = store / "manifests/registry.ollama.ai/library/smollm2/135m"
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": models["q4_0"].stat().st_size}]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = store / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir()
    blob.write_bytes(models["q4_0"].read_bytes())
    before = sorted(store.rglob("*"))
    place = ["--data", str(tmp_path / "data"), "--json"]
    environment = {"OLLAMA_MODELS": str(store)}
    added = json.loads(run_command(["model", "add", "small", "ollama://smollm2:135m", *place], env=environment).stdout)
    assert added["files"][0]["sha256"] == f"sha256:{digest}"
    assert sorted(store.rglob("*")) == before
    changed = bytearray(blob.read_bytes())
    changed[-1] ^= 1
    blob.write_bytes(changed)
    refused = run_command(["model", "add", "other", "ollama://smollm2:135m", *place], env=environment, check=False)
    assert refused.returncode == 1 and "damaged" in refused.stderr


@contextlib.contextmanager
def s3_server(directory):
    """rclone's S3 server: its own implementation of the protocol, which checks signatures."""
    (directory / "bucket").mkdir(parents=True)
    [port] = warmset.free_ports(1)
    rclone = Path(sys.executable).with_name("rclone")
    command = [str(rclone), "serve", "s3", str(directory), "--addr", f"127.0.0.1:{port}", "--auth-key", "KEY,SECRET",
               "--config", os.devnull]
    log = open(directory.parent / "rclone.log", "wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)

    def answers():
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
        except urllib.error.HTTPError:
            return True  # it asks for a signature
        except OSError:
            return False
        return True

    try:
        wait_for(answers, lambda: f"the S3 server answers: {(directory.parent / 'rclone.log').read_text()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_an_object_of_s3_is_fetched_with_credentials_as_aws_tools_find_them(tmp_path, models):
    with s3_server(tmp_path / "s3") as endpoint:
        folder = tmp_path / "s3" / "bucket" / "some models"
        folder.mkdir()
        (folder / "m.gguf").write_bytes(models["q4_0"].read_bytes())
        source, place = "s3://bucket/some models/m.gguf", ["--data", str(tmp_path / "data"), "--json"]
        common = {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
        keys = {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET"}
        wrong = run_command(["model", "add", "a", source, *place], check=False,
                            env={**common, **keys, "AWS_SECRET_ACCESS_KEY": "OTHER", "AWS_ENDPOINT_URL": endpoint})
        assert wrong.returncode == 1 and "403" in wrong.stderr and "credentials" in wrong.stderr, wrong.stderr
        added = json.loads(run_command(["model", "add", "a", source, *place], env={**common, **keys, "AWS_ENDPOINT_URL": endpoint}).stdout)
        expected = "sha256:" + hashlib.sha256(models["q4_0"].read_bytes()).hexdigest()
        assert added["files"][0]["sha256"] == expected
        # From the files that AWS's own tools write.
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws" / "credentials").write_text("[other]\naws_access_key_id = KEY\naws_secret_access_key = SECRET\n")
        (tmp_path / ".aws" / "config").write_text(f"[profile other]\nregion = us-east-1\nendpoint_url = {endpoint}\n")
        run_command(["model", "remove", "a", *place])
        again = json.loads(run_command(["model", "add", "a", source, *place], env={**common, "AWS_PROFILE": "other"}).stdout)
        assert again["digest"] == added["digest"]
        missing = run_command(["model", "add", "b", "s3://bucket/absent.gguf", *place], check=False, env={**common, "AWS_PROFILE": "other"})
        assert missing.returncode == 1 and "404" in missing.stderr, missing.stderr


def test_what_ollama_has_is_listed_and_added(tmp_path, models):
    store = tmp_path / "ollama"
    (store / "blobs").mkdir(parents=True)
    for name, path in {"smollm2/135m": models["q4_0"], "smollm2/135m-q8": models["q8_0"]}.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (store / "blobs" / f"sha256-{digest}").write_bytes(path.read_bytes())
        manifest = store / "manifests/registry.ollama.ai/library" / name
        manifest.parent.mkdir(parents=True, exist_ok=True)
        kinds = {"model": (digest, path.stat().st_size), "params": ("0" * 64, 1)}
        layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{found}", "size": size}
                  for kind, (found, size) in kinds.items()]
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    listed = json.loads(run_command(["import", "ollama", str(store), "--json"]).stdout)["models"]
    assert [(model["name"], model["left_behind"]) for model in listed] == [("smollm2:135m", ["params"]), ("smollm2:135m-q8", ["params"])]
    place, environment = ["--data", str(tmp_path / "data"), "--json"], {"OLLAMA_MODELS": str(store)}
    result = run_command(["import", "ollama", "--all", *place], env=environment)
    assert [model["name"] for model in json.loads(result.stdout)["added"]] == ["smollm2:135m", "smollm2:135m-q8"]
    assert "params" in result.stderr
    absent = run_command(["import", "ollama", "--add", "absent", *place], env=environment, check=False)
    assert absent.returncode == 1 and "absent" in absent.stderr


def test_a_llama_swap_configuration_is_taken_over(tmp_path, pool, models):
    """What comes out is a configuration that a server starts with."""
    source = tmp_path / "config.yaml"
    source.write_text(f"""
macros:
  server: /usr/bin/llama-server --port ${{PORT}} --ctx-size 4096
groups:
  all: {{ members: [small, big] }}
models:
  small:
    cmd: |
      ${{server}} --model {models["q4_0"]}
    aliases: [tiny]
    ttl: 60
  big:
    cmd: ${{server}} --model {models["q4_1"]}
""")
    target = tmp_path / "warmset.toml"
    result = run_command(["import", "llama-swap", str(source), "--to", str(target)])
    assert "groups" in result.stderr and str(target) in result.stdout
    again = run_command(["import", "llama-swap", str(source), "--to", str(target)], check=False)
    assert again.returncode == 1, "nothing is written over"
    server = warmset.Server(tmp_path / "server", "800MiB", "128MiB", target.read_text())
    with server:
        listed = server.cli_json("model", "list")["models"]
        assert [(m["name"], m["engine"], m["aliases"], m["keep_alive_seconds"]) for m in listed] == [
            ("big", "command", [], None), ("small", "command", ["tiny"], 60.0)]
