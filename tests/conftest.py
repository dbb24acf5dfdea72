"""Whole-system tests: the built binary, real models, official clients, and what the operating system says.

Run with `make test`, or `build/venv/bin/python -m pytest tests` once the binary and the models are there.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "lib"))

import warmset  # noqa: E402
from fleet import Fleet  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def binary():
    assert warmset.BINARY.exists(), f"{warmset.BINARY} is missing: run `make build`"
    return warmset.BINARY


@pytest.fixture(scope="session")
def models():
    return warmset.model_files()


class Pools:
    """Starts servers and, at the end, stops them and checks what they leave behind."""

    def __init__(self, directory):
        self.directory = directory
        self.servers = []

    def __call__(self, memory="1GiB", reserve="128MiB", models=(), wait=True, arguments=(), environment=None, **tables):
        """Starts a server; `models` and `tables` become its configuration."""
        tables = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
        if models:
            tables["model"] = [{key: value for key, value in model.items() if value is not None} for model in models]
        config = warmset.toml(tables) if tables else None
        place = self.directory / f"server{len(self.servers)}"
        server = warmset.Server(place, memory, reserve, config, arguments, environment=environment)
        self.servers.append(server)
        return server.start(wait)

    def close(self):
        for server in self.servers:
            engines = server.engines() if server.running() else []
            code = server.stop()
            assert "panicked at" not in server.log_path.read_text(errors="replace"), server.log_tail()
            assert code in (0, None, -9), f"the server exited with {code}\n{server.log_tail()}"
            warmset.wait_for(lambda: not any(map(warmset.alive, engines)), "no engine outlives its server")


@pytest.fixture
def pool(tmp_path):
    pools = Pools(tmp_path)
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def module_pool(tmp_path_factory):
    pools = Pools(tmp_path_factory.mktemp("pool"))
    yield pools
    pools.close()


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()
