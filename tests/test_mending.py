"""What went wrong is mended by doing what the message says, without a restart and without waiting; and by a restart too."""

import pytest
import warmset
from warmset import synthetic_model, wait_for


def blob_of(server, source):
    """The stored copy of a source, which is named after its content."""
    content = source.read_bytes()
    return next(path for path in (server.data / "store" / "blobs").iterdir() if path.read_bytes() == content)


def settings_of(server, name):
    return server.cli_json("model", "show", name)


@pytest.mark.parametrize("how", ["add again", "remove and add"])
def test_a_missing_file_is_back_once_the_model_is_added_again(pool, tmp_path, how):
    server = pool(memory="512MiB")
    source = synthetic_model(tmp_path, "m", 16)
    server.cli("model", "add", "m", source, "--engine", "synthetic")
    blob_of(server, source).unlink()
    # Nor is it where it came from.
    elsewhere = source.rename(tmp_path / "elsewhere.json")
    failed = server.cli("model", "load", "m", check=False)
    assert failed.returncode != 0 and "add the model again" in failed.stderr
    assert server.complete("m")[0] == 503
    if how == "remove and add":
        server.cli("model", "remove", "m")
        assert server.ledger()["entries"] == []
    elsewhere.rename(source)
    server.cli("model", "add", "m", source, "--engine", "synthetic")
    assert server.complete("m")[0] == 200


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_lost_file_is_taken_from_its_source_again_when_it_is_missed(pool, tmp_path, harm):
    server = pool(memory="512MiB")
    source = synthetic_model(tmp_path, "m", 16)
    digest = server.cli_json("model", "add", "m", source, "--engine", "synthetic")["digest"]
    blob = blob_of(server, source)
    if harm == "gone":
        blob.unlink()
    else:
        blob.chmod(0o644)
        blob.write_bytes(b"x" + blob.read_bytes()[1:])
    assert server.complete("m")[0] == 503, "the caller who finds it out is not kept waiting"
    wait_for(lambda: server.complete("m")[0] == 200, "the model is back by itself")
    assert server.digest("m") == digest
    # Another file in its place is not what was lost.
    server.cli("model", "unload", "m")
    blob_of(server, source).unlink()
    synthetic_model(tmp_path, "m", 17)
    with warmset.Events(server) as events:
        assert server.complete("m")[0] == 503
        wait_for(lambda: any("reason" in event for event in events.all() if event["type"] == "model_restored"), "it is told")
    assert server.digest("m") == digest and server.complete("m")[0] == 503


def test_a_start_takes_a_configured_model_that_is_gone_from_its_source(pool, tmp_path):
    source = synthetic_model(tmp_path, "m", 16)
    server = pool(memory="512MiB", models=[{"name": "m", "source": source, "engine": "synthetic"}])
    blob = blob_of(server, source)
    server.stop()
    blob.unlink()
    server.start()
    assert server.complete("m")[0] == 200


def test_a_load_that_pins_leave_no_room_for_works_once_there_is_room(pool, tmp_path):
    sources = {name: synthetic_model(tmp_path, name, size) for name, size in (("pinned", 100), ("other", 101))}
    models = [{"name": name, "source": source, "engine": "synthetic"} for name, source in sources.items()]
    server = pool(memory="200MiB", reserve="64MiB", models=models)
    server.cli("model", "pin", "pinned")
    server.cli("model", "load", "pinned")
    for _ in range(2):
        refused = server.cli("model", "load", "other", check=False)
        assert refused.returncode != 0 and "unpin one" in refused.stderr
        status, headers, body = server.complete("other")
        assert (status, body["error"]["code"]) == (503, "insufficient_memory") and "retry-after" in headers
    server.cli("model", "unpin", "pinned")
    assert server.complete("other")[0] == 200


def test_a_pin_survives_a_restart_unless_the_configuration_says_otherwise(pool, tmp_path):
    model = {"name": "m", "source": synthetic_model(tmp_path, "m", 16), "engine": "synthetic"}
    server = pool(memory="512MiB", models=[model])
    server.cli("model", "pin", "m")
    server.stop()
    server.start()
    assert settings_of(server, "m")["pin"] is True
    server.stop()
    server.config = warmset.toml({"model": [{**model, "pin": False}]})
    server.start()
    assert settings_of(server, "m")["pin"] is False


def test_adding_a_model_again_changes_the_settings_that_are_said(pool, tmp_path):
    server = pool(memory="512MiB")
    source = synthetic_model(tmp_path, "m", 16)
    add = ("model", "add", "m", source, "--engine", "synthetic")
    server.cli(*add, "--priority", "batch")
    server.cli(*add, "--pin", "--parallel", "2")
    shown = settings_of(server, "m")
    assert (shown["pin"], shown["parallel"], shown["priority"]) == (True, 2, "batch")


def test_a_server_that_has_drained_says_so(pool, tmp_path):
    server = pool(memory="512MiB", models=[{"name": "m", "source": synthetic_model(tmp_path, "m", 16), "engine": "synthetic"}])
    assert server.complete("m")[0] == 200
    assert server.request("POST", "/admin/v1/drain", admin=True)[0] == 200
    warmset.wait_for(lambda: server.get("/admin/v1/workers", admin=True)[0] == 503, "the worker has shut down")
    listed = server.admin_json("/admin/v1/models")["models"]
    assert [(model["name"], model["state"]) for model in listed] == [("m", "absent")]
    assert server.complete("m")[0] == 503


def test_devices_and_actions_that_are_not_there_are_refused(pool, tmp_path):
    server = pool(memory="512MiB")
    refused = server.cli("model", "add", "m", synthetic_model(tmp_path, "m", 16), "--device", "gpu", check=False)
    assert refused.returncode != 0 and "accelerators and this server has 0" in refused.stderr
    assert server.request("POST", "/admin/v1/models/m/dance", admin=True)[0] == 404
