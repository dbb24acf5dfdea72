"""A disk that is really full: a small file system in memory under the data directory."""

import os
import subprocess

import pytest
import warmset
from warmset import synthetic_model

NAME = "model"


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(place):
    """Takes the last byte, in pieces that become smaller."""
    path = place / "filler"
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(os.urandom(size)) == size:
                    pass
            except OSError:
                pass
    assert os.statvfs(place).f_bavail == 0
    return path


@pytest.fixture
def server(small_disk, tmp_path):
    spec = {"name": NAME, "source": synthetic_model(tmp_path, "one", 64), "engine": "synthetic"}
    server = warmset.Server(small_disk / "server", "400MiB", "64MiB", warmset.toml({"model": [spec]}))
    with server:
        yield server


def test_changes_are_refused_until_there_is_room_and_nobody_else_notices(server, small_disk, tmp_path):
    first = server.digest(NAME)
    second = server.cli_json("model", "add", NAME, synthetic_model(tmp_path, "two", 64.5), "--engine", "synthetic")["candidate"]
    filler = fill(small_disk)
    for _ in range(4):
        refused = server.cli("model", "promote", NAME, second, check=False)
        assert refused.returncode == 1 and "no room to write the catalog" in refused.stderr, refused.stderr
        assert f"{NAME} still stands for {first}" in refused.stderr
        assert server.complete(NAME)[0] == 200
    filler.unlink()
    assert server.cli_json("model", "promote", NAME, second)["changed"] is True
    status, headers, _ = server.complete(NAME)
    assert status == 200 and headers["warmset-model-digest"] == second


def test_what_makes_room_is_possible_on_a_full_disk(server, small_disk, tmp_path):
    second = server.cli_json("model", "add", NAME, synthetic_model(tmp_path, "two", 1), "--engine", "synthetic")["candidate"]
    server.cli("model", "add", "other", synthetic_model(tmp_path, "third", 2), "--engine", "synthetic")
    fill(small_disk)
    server.cli("model", "remove", NAME, "--digest", second)
    server.cli("model", "remove", "other")
    assert [model["name"] for model in server.cli_json("model", "list")["models"]] == [NAME]
    assert server.complete(NAME)[0] == 200
