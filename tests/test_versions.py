"""A name comes to stand for another version under steady load: nobody sees an error, a gap, or the old one afterwards."""

import os
import pwd
import sqlite3
import threading
import time

import pytest
import warmset
from load import SteadyLoad
from warmset import synthetic_model, wait_for

NAME = "model"
DAYS = ["--canary-prompt", "List the days of the week.", "--canary-expect", "Monday"]


def versions(server, name=NAME):
    return server.cli_json("model", "versions", name)["versions"]


def add_version(server, source, name=NAME):
    document = server.cli_json("model", "add", name, source)
    assert document["candidate"] != document["digest"]
    return document["candidate"]


def kinds(server, name=NAME):
    with sqlite3.connect(server.data / "catalog.db") as catalog:
        return [kind for (kind,) in catalog.execute("SELECT kind FROM events WHERE model = ? ORDER BY id", (name,))]


@pytest.fixture
def real(pool, models):
    spec = {"name": NAME, "source": models["q4_1"], "context_tokens": 512, "parallel": 2, "pin": True}
    return pool(memory="2GiB", models=[spec], residency={"minimum_seconds": 1})


def test_promote_bad_canary_rollback_and_repoint_under_load(real, models):
    server = real
    first = server.digest(NAME)
    second = add_version(server, models["q8_0"])
    with SteadyLoad(server) as load:
        server.cli("model", "promote", NAME, second, "--by", "ada", *DAYS)
        flipped = time.monotonic()
        load.more()
        assert load.digests_asked_after(flipped) == {second}

        refused = server.cli("model", "rollback", NAME, "--by", "bob", check=False)
        assert refused.returncode == 0, refused.stderr
        back = time.monotonic()
        load.more()
        assert load.digests_asked_after(back) == {first}

        bad = server.cli("model", "promote", NAME, second, "--canary-prompt", "List the days of the week.",
                         "--canary-expect", "qqqqq", check=False)
        assert bad.returncode == 1 and "the canary scored" in bad.stderr and f"still stands for {first}" in bad.stderr
        load.more()
        assert load.digests_asked_after(back) == {first}
    assert {digest for _, _, digest in load.answers} == {first, second}
    shown = {version["digest"]: version for version in versions(server)}
    assert shown[second]["approved_by"] == "ada" and shown[first]["current"]
    # What was never passed is not kept.
    assert shown[second]["canary"]["expected"] == {"text": "Monday"}
    decisions = [kind for kind in kinds(server) if kind.startswith(("promo", "rolled"))]
    assert decisions == ["promotion_started", "promoted", "promotion_started", "rolled_back",
                         "promotion_started", "promotion_failed"]
    # A pin belongs to the name: what it stands for is pinned, and nothing else.
    wait_for(lambda: len(server.engines()) == 2, "the version that failed has left; one engine and the spare are there")
    assert server.cli_json("model", "show", NAME)["pin"] is True


def test_an_alias_is_pointed_elsewhere_under_load(real, models):
    server = real
    server.cli("model", "add", "other", models["q8_0"], "--context-tokens", "512", "--parallel", "2")
    server.cli("model", "alias", "add", "best", NAME)
    server.cli("model", "load", "other")
    refused = server.cli("model", "alias", "add", "best", "other", check=False)
    assert refused.returncode == 1 and "taken" in refused.stderr
    with SteadyLoad(server, name="best") as load:
        server.cli("model", "alias", "add", "best", "other", "--replace")
        pointed = time.monotonic()
        load.more()
    assert load.digests_asked_after(pointed) == {server.digest("other")}


def test_a_file_replaced_in_place_is_a_version_and_is_not_served_before_it_is_promoted(pool, tmp_path):
    source = synthetic_model(tmp_path, "m", 16)
    server = pool(models=[{"name": NAME, "source": source, "engine": "synthetic"}])
    first = server.digest(NAME)
    with SteadyLoad(server) as load:
        synthetic_model(tmp_path, "m", 17)
        replaced = time.monotonic()
        load.more()
        assert load.digests_asked_after(replaced) == {first}
        second = server.cli_json("model", "add", NAME, source, "--engine", "synthetic")["candidate"]
        server.cli("model", "promote", NAME, second)
        flipped = time.monotonic()
        load.more()
        assert load.digests_asked_after(flipped) == {second}
    # The configuration names the same file: at the next start nothing is taken back.
    server.stop()
    server.start()
    assert server.digest(NAME) == second
    synthetic_model(tmp_path, "m", 18)
    server.stop()
    server.start()
    third = server.digest(NAME)
    assert third not in (first, second)
    assert [version["digest"] for version in versions(server)] == [first, second, third]
    assert versions(server)[2]["approved_by"] == "configuration"


# Each version takes 64 MiB and what its process takes beside it: one fits, two do not.
NARROW = {"memory": "150MiB", "reserve": "64MiB"}


def narrow_pool(pool, directory, cold="wait", load_seconds=1.0, second=None):
    spec = {"name": NAME, "source": synthetic_model(directory, "one", 64, load_seconds=0.1), "engine": "synthetic", "cold": cold}
    server = pool(**NARROW, models=[spec])
    server.cli("model", "load", NAME)
    options = second or {}
    source = synthetic_model(directory, "two", 64.5, load_seconds=load_seconds, **options)
    candidate = server.cli_json("model", "add", NAME, source, "--engine", "synthetic")["candidate"]
    return server, server.digest(NAME), candidate


def test_versions_that_do_not_fit_together_follow_each_other_as_announced(pool, tmp_path):
    server, first, second = narrow_pool(pool, tmp_path)
    preview = server.cli_json("model", "promote", NAME, second, "--dry-run")
    assert preview["strategy"] == "drain_then_load" and preview["changed"] is False
    assert preview["callers"].startswith("a gap:") and "callers wait" in preview["callers"]
    assert server.digest(NAME) == first and server.cli_json("model", "show", NAME)["state"] == "ready"
    with SteadyLoad(server) as load:
        done = server.cli_json("model", "promote", NAME, second)
        flipped = time.monotonic()
        load.more()
    assert done["changed"] and done["strategy"] == "drain_then_load"
    assert load.digests_asked_after(flipped) == {second}
    # Callers waited for as long as the load took, and nobody got anything else.
    assert {digest for _, _, digest in load.answers} == {first, second}
    assert server.metric("warmset_model_evictions_total") == 1


def test_callers_that_waited_for_a_version_that_fails_get_the_old_one(pool, tmp_path):
    server, first, second = narrow_pool(pool, tmp_path, second={"failure": "load_fails"})
    with SteadyLoad(server) as load:
        failed = server.cli("model", "promote", NAME, second, check=False)
        assert failed.returncode == 1 and f"{NAME} still stands for {first}" in failed.stderr
        load.more()
    assert {digest for _, _, digest in load.answers} == {first}


def test_callers_that_do_not_wait_are_told_so_during_the_gap(pool, tmp_path):
    server, first, second = narrow_pool(pool, tmp_path, cold="reject", load_seconds=3.0)
    assert "refused" in server.cli_json("model", "promote", NAME, second, "--dry-run")["callers"]
    promotion = threading.Thread(target=lambda: server.cli("model", "promote", NAME, second))
    promotion.start()
    refusals = []

    def refused():
        status, headers, body = server.complete(NAME)
        if status == 503:
            refusals.append((body["error"]["code"], headers.get("retry-after")))
        return bool(refusals)

    wait_for(refused, "a caller is refused while neither version is there")
    promotion.join()
    assert all(code == "model_loading" and 1 <= int(after) <= 120 for code, after in refusals)
    assert server.complete(NAME)[0] == 200 and server.digest(NAME) == second


@pytest.mark.parametrize("moment", ["loading", "promoted"])
def test_a_killed_server_comes_back_with_one_version_or_the_other(pool, tmp_path, moment):
    # Killed in the middle of a load, that load need not end.
    server, first, second = narrow_pool(pool, tmp_path, load_seconds=60.0 if moment == "loading" else 2.0)
    promotion = threading.Thread(target=lambda: server.cli("model", "promote", NAME, second, check=False))
    promotion.start()
    if moment == "loading":
        wait_for(lambda: "promotion_started" in kinds(server), "the promotion has begun")
    else:
        wait_for(lambda: "promoted" in kinds(server), "the name stands for the new version")
    server.kill()
    promotion.join()
    server.start()
    assert server.digest(NAME) == (first if moment == "loading" else second)
    assert server.complete(NAME)[0] == 200


def test_what_is_wrong_with_a_promotion_is_said_and_changes_nothing(pool, tmp_path):
    server, first, second = narrow_pool(pool, tmp_path)

    def refused(*arguments):
        result = server.cli("model", *arguments, check=False)
        assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1, result.stderr
        return result.stderr

    assert "has no version" in refused("promote", NAME, "ab" * 32)
    assert "too short" in refused("promote", NAME, "abc")
    assert "no model is named" in refused("promote", "nobody", second)
    assert "nothing to go back to" in refused("rollback", NAME)
    assert "between 1 and 16384 bytes" in refused("promote", NAME, second, "--canary-prompt", "x", "--canary-expect", "")
    assert "has no canary yet" in refused("promote", NAME, second, "--canary-score", "0.9")
    assert "is what model stands for" in refused("remove", NAME, "--digest", first)
    assert server.cli("model", "promote", NAME, check=False).returncode == 2
    assert server.cli("model", "promote", NAME, second, "--canary-score", "2", check=False).returncode == 2
    assert server.cli_json("model", "promote", NAME, first)["changed"] is False
    assert "stands for this version already" in refused("promote", NAME, first, *DAYS)
    large = synthetic_model(tmp_path, "large", 512)
    third = server.cli_json("model", "add", NAME, large, "--engine", "synthetic")["candidate"]
    server.cli_json("model", "profile", NAME, "--digest", second)
    assert "still stands for" in refused("promote", NAME, third)
    assert server.digest(NAME) == first and server.complete(NAME)[0] == 200
    server.cli("model", "remove", NAME, "--digest", third)
    assert [version["digest"] for version in versions(server)] == [first, second]
    assert versions(server)[1]["approved_by"] is None and versions(server)[1]["canary"]["given"] is False


def test_without_a_server_a_version_is_promoted_on_the_data_directory(pool, models):
    spec = {"name": NAME, "source": models["q4_1"], "context_tokens": 512}
    server = pool(models=[spec])
    first = server.digest(NAME)
    server.stop()
    second = add_version(server, models["q8_0"])
    done = server.cli_json("model", "promote", NAME, second, *DAYS)
    assert done["changed"] and done["canary_score"]["score"] == 1.0 and done["from"] == first
    assert server.cli_json("model", "rollback", NAME)["digest"] == first
    failed = server.cli("model", "promote", NAME, second, *DAYS[:3], "qqqqq", check=False)
    assert failed.returncode == 1 and "the canary scored" in failed.stderr
    server.start()
    assert server.digest(NAME) == first


def test_who_approves_is_the_account_where_no_variable_names_a_user(pool, tmp_path):
    server, _, second = narrow_pool(pool, tmp_path)
    server.stop()
    arguments = ["model", "promote", NAME, second, "--data", str(server.data), "--json"]
    warmset.run_command(arguments, env={"USER": "", "LOGNAME": ""})
    (promoted,) = [version for version in versions(server) if version["digest"] == second]
    assert promoted["approved_by"] == pwd.getpwuid(os.getuid()).pw_name


def test_a_model_that_no_longer_answers_as_approved_is_not_given_to_callers(pool, models):
    """The canary of the approved digest is asked again by a new worker, before its first caller."""
    server = pool(models=[{"name": NAME, "source": models["q4_1"], "context_tokens": 512}])
    profiled = server.cli_json("model", "profile", NAME, timeout=1200)
    assert profiled["canary"]["expected"]["text"]
    server.stop()
    server.start()
    server.cli("model", "load", NAME)
    assert server.metric("warmset_model_load_seconds_sum", phase="canary") > 0
    server.stop()
    with sqlite3.connect(server.data / "catalog.db") as catalog:
        catalog.execute("UPDATE versions SET canary = json_set(canary, '$.expected.text', 'zzzz zzzz zzzz')")
    server.start()
    status, _, body = server.complete(NAME)
    assert status == 503 and "the canary scored" in body["error"]["message"], body
    wait_for(lambda: server.cli_json("model", "show", NAME)["state"] == "failed", "the load has failed")
