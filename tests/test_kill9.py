"""kill -9 of the server while it loads: nothing of the catalog is lost, no engine outlives it, and it starts again."""

import random
import threading
import time

import openai
import warmset

ROUNDS = 6


def test_kill_9_during_loads_loses_nothing(pool, models, tmp_path):
    server = pool(memory="800MiB", reserve="128MiB")
    catalog = {}
    for name, file in (("a", models["q4_1"]), ("b", models["q4_0"]), ("c", models["q8_0"])):
        server.cli("model", "add", name, file)
        catalog[name] = server.digest(name)
    choice = random.Random(9)
    for turn in range(ROUNDS):
        server.cli("model", "pin" if turn % 2 == 0 else "unpin", "a")
        callers = [threading.Thread(target=ask_and_ignore, args=(server, name), daemon=True) for name in catalog]
        for caller in callers:
            caller.start()
        warmset.wait_for(lambda: loading_or_loaded(server) or not server.running(), "a load is under way")
        # Somewhere in the load, or just after it: whatever the moment, nothing may be lost.
        time.sleep(choice.uniform(0, 0.4))
        engines = server.engines()
        server.kill()
        warmset.wait_for(lambda: not any(map(warmset.alive, engines)), "no engine is left")
        for caller in callers:
            caller.join()

        # Without a server, the command line reads the data directory.
        listed = {model["name"]: model for model in server.cli_json("model", "list")["models"]}
        assert {name: model["digest"] for name, model in listed.items()} == catalog
        assert listed["a"]["pin"] is (turn % 2 == 0)
        server.start()
    for name, digest in catalog.items():
        status, headers, body = server.complete(name)
        assert status == 200, (name, body)
        assert headers["warmset-model-digest"] == digest


def ask_and_ignore(server, name):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    try:
        client.completions.create(model=name, prompt="Once", max_tokens=200)
    except openai.OpenAIError:
        pass  # the server was killed under it


def loading_or_loaded(server):
    try:
        return any(model["state"] in ("loading", "ready") for model in server.admin_json("/admin/v1/models")["models"])
    except (OSError, AssertionError):
        return False


def test_an_added_model_is_whole_or_absent(pool, models):
    """The server dies while a file is copied into the store: afterwards the model is there, verified, or not there."""
    server = pool(memory="600MiB", reserve="128MiB")
    for turn in range(4):
        adding = threading.Thread(target=server.cli, args=("model", "add", f"m{turn}", models["f16"]),
                                  kwargs={"check": False}, daemon=True)
        adding.start()
        time.sleep(0.05 * turn)
        server.kill()
        adding.join()
        listed = [model["name"] for model in server.cli_json("model", "list")["models"]]
        server.start()
        for name in listed:
            assert server.complete(name)[0] == 200, name
