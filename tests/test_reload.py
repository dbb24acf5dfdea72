"""`warmset admin reload`: what changed in the file is changed, everything else stays as it is (case L17)."""

import json
import time

import pytest
from https import FileServer
from load import SteadyLoad
from warmset import synthetic_model, toml, wait_for


def write(server, **tables):
    server.config = toml(tables)
    (server.directory / "warmset.toml").write_text(server.config)


@pytest.fixture
def sources(tmp_path):
    return {name: str(synthetic_model(tmp_path / "models", name, megabytes=index + 1)) for index, name in enumerate("abcd")}


def model(name, sources, **fields):
    return {"name": name, "source": sources[name], "engine": "synthetic", **fields}


def pid_of(server, name):
    engines = server.admin_json("/admin/v1/workers")["workers"][0]["engines"]
    return next((engine["pid"] for engine in engines if engine["name"] == name), None)


def test_only_what_changed_is_touched(pool, sources, tmp_path):
    models = [model("a", sources), model("b", sources, aliases=["old"]), model("c", sources)]
    server = pool(memory="600MiB", reserve="128MiB", models=models)
    for name in "abc":
        assert server.complete(name)[0] == 200
    pids = {name: pid_of(server, name) for name in "abc"}
    assert all(pids.values())
    by_hand = server.cli_json("model", "add", "hand", sources["d"], "--engine", "synthetic")

    models = [model("a", sources), model("b", sources, aliases=["new"], parallel=2, priority="batch"),
              {"name": "e", "source": str(synthetic_model(tmp_path / "models", "e", megabytes=9)), "engine": "synthetic"}]
    write(server, model=models, worker={"cores": 1}, gateway={"queue_limit": 7})
    document = server.cli_json("admin", "reload")
    assert document["added"] == ["e"] and document["changed"] == ["b"] and document["removed"] == ["c"]
    assert document["unchanged"] == 1 and document["reloading"] == ["b"]
    assert document["needs_restart"] == ["gateway.queue_limit", "worker.cores"]

    assert pid_of(server, "a") == pids["a"], "what did not change is still warm, in the same process"
    wait_for(lambda: pid_of(server, "b") != pids["b"] and pid_of(server, "c") is None, "what changed starts again, what is gone ends")
    for name in ("a", "b", "new", "e", "hand"):
        assert server.complete(name)[0] == 200, name
    for name in ("c", "old"):
        assert server.complete(name)[0] == 404, name
    shown = server.cli_json("model", "show", "b")
    assert (shown["parallel"], shown["priority"], shown["aliases"]) == (2, "batch", ["new"])
    assert server.cli_json("model", "show", "hand")["digest"] == by_hand["digest"], "what the file never named stays"
    assert "no model has changed" in server.cli("admin", "reload").stdout
    # A restart finds the same.
    server.stop()
    server.start()
    assert {listed["name"] for listed in server.cli_json("model", "list")["models"]} == {"a", "b", "e", "hand"}


def test_a_source_replaced_in_place_is_noticed(pool, sources, tmp_path):
    server = pool(memory="600MiB", reserve="128MiB", models=[model("a", sources), model("b", sources)])
    assert server.complete("b")[0] == 200
    before, pid = server.digest("a"), pid_of(server, "b")
    synthetic_model(tmp_path / "models", "a", megabytes=7)
    document = server.cli_json("admin", "reload")
    assert document["changed"] == ["a"] and document["unchanged"] == 1
    assert server.digest("a") != before and pid_of(server, "b") == pid
    status, headers, _ = server.complete("a")
    assert status == 200 and headers["warmset-model-digest"] == server.digest("a")


def test_a_refused_file_changes_nothing_and_says_everything(pool, sources):
    server = pool(memory="600MiB", reserve="128MiB", models=[model("a", sources)])
    server.cli("model", "add", "hand", sources["d"], "--engine", "synthetic", "--alias", "mine")
    assert server.complete("a")[0] == 200
    pid, before = pid_of(server, "a"), server.cli_json("model", "list")["models"]

    def refused(**tables):
        write(server, **tables)
        result = server.cli("admin", "reload", check=False)
        assert result.returncode == 1, result
        assert pid_of(server, "a") == pid
        after = server.cli_json("model", "list")["models"]
        assert [(m["name"], m["digest"], m["parallel"]) for m in after] == [(m["name"], m["digest"], m["parallel"]) for m in before]
        return result.stderr

    text = refused(model=[{"name": "a", "sauce": "x"}], worker={"memory": "lots"})
    assert "sauce" in text and "source is missing" in text and "worker.memory" in text
    text = refused(model=[model("b", sources), model("d", sources, pool="none")])
    assert "none" in text
    text = refused(model=[model("a", sources, parallel=2), model("b", sources),
                          {"name": "c", "source": "/nowhere.json", "engine": "synthetic"},
                          {"name": "d", "source": sources["a"], "engine": "llama"},
                          {"name": "mine", "source": sources["c"], "engine": "synthetic"}])
    assert "/nowhere.json" in text and "unsupported format" in text and "the name mine is hand's" in text
    assert len(list((server.data / "store" / "blobs").iterdir())) == 2, "nothing is left of what was tried"
    write(server, model=[model("a", sources), model("b", sources)])
    assert server.cli_json("admin", "reload")["added"] == ["b"]


def test_a_far_source_and_its_allowance_come_with_the_file(pool, sources, tmp_path, models):
    with FileServer(tmp_path, {"/m.gguf": models["q4_0"]}) as files:
        server = pool(memory="800MiB", reserve="128MiB", models=[model("a", sources)])
        far = {"name": "far", "source": files.url("/m.gguf")}
        write(server, model=[model("a", sources), far])
        assert "certificate" in server.cli("admin", "reload", check=False).stderr
        write(server, model=[model("a", sources), far], sources=files.sources())
        assert server.cli_json("admin", "reload")["added"] == ["far"]
        assert server.complete("far", "The capital of France is", max_tokens=4)[0] == 200


def test_without_a_file_there_is_nothing_to_read(pool):
    server = pool(memory="400MiB", reserve="128MiB")
    result = server.cli("admin", "reload", check=False)
    assert result.returncode == 1 and "without --config" in result.stderr


def test_a_file_replaced_in_place_takes_over_without_a_gap_or_an_error(pool, tmp_path):
    """Callers ask all the time while the file is replaced and read again: none gets an error, none the old one afterwards."""
    source = synthetic_model(tmp_path, "m", 16, load_seconds=0.5)
    server = pool(memory="600MiB", reserve="128MiB", models=[{"name": "m", "source": source, "engine": "synthetic"}])
    first = server.digest("m")
    server.cli("model", "load", "m")
    with SteadyLoad(server, name="m") as load:
        synthetic_model(tmp_path, "m", 17, load_seconds=0.5)
        document = server.cli_json("admin", "reload")
        reloaded = time.monotonic()
        load.more()
    second = server.digest("m")
    assert second != first and document["changed"] == ["m"] and document["failed"] == []
    assert load.digests_asked_after(reloaded) == {second}
    assert set(load.starts) == {"warm"}, "the new version was loaded before anybody got it"

    synthetic_model(tmp_path, "m", 18, failure="load_fails")
    with SteadyLoad(server, name="m") as load:
        result = server.cli("admin", "reload", "--json", check=False)
        load.more()
    document = json.loads(result.stdout)
    assert result.returncode == 1 and [failed["name"] for failed in document["failed"]] == ["m"]
    assert document["changed"] == [] and "1 model not changed" in result.stderr
    assert {digest for _, _, digest in load.answers} == {second} and server.digest("m") == second


def test_what_is_in_the_store_needs_its_source_no_more(pool, tmp_path):
    source = synthetic_model(tmp_path, "m")
    server = pool(models=[{"name": "m", "source": source, "engine": "synthetic"}])
    digest = server.digest("m")
    source.unlink()
    document = server.cli_json("admin", "reload")
    assert document["changed"] == [] and document["unchanged"] == 1
    server.stop()
    server.start()
    assert server.digest("m") == digest and server.complete("m")[0] == 200


def test_after_a_rollback_the_file_changes_nothing(pool, tmp_path):
    source = synthetic_model(tmp_path, "m")
    server = pool(models=[{"name": "m", "source": source, "engine": "synthetic"}])
    first = server.digest("m")
    synthetic_model(tmp_path, "m", 2)
    assert server.cli_json("admin", "reload")["changed"] == ["m"]
    server.cli("model", "rollback", "m", "--by", "ada")
    document = server.cli_json("admin", "reload")
    assert server.digest("m") == first, "who went back wants to stay there"
    assert (document["changed"], document["failed"], document["unchanged"]) == ([], [], 1)
