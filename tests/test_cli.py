"""The command line as people and scripts use it: exit codes, one JSON document on stdout, one line on stderr."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warmset
from warmset import CommandFailed, run_command, synthetic_model, wait_for


@pytest.fixture(scope="module")
def server(module_pool, models):
    server = module_pool(memory="800MiB", reserve="128MiB")
    server.cli("model", "add", "smollm2", models["q4_1"])
    return server


def test_help_and_version():
    assert "serve" in run_command(["--help"]).stdout
    assert run_command(["--version"]).stdout.startswith("warmset ")
    for command in (["serve"], ["model"], ["model", "add"], ["run"], ["doctor"], ["completions"]):
        assert "Usage" in run_command([*command, "--help"]).stdout, command


@pytest.mark.parametrize("arguments", [
    ["nonsense"], ["model", "add"], ["serve", "--memory", "lots"], ["model", "show"],
    ["serve", "--server", "127.0.0.1:1"], ["run", "x", "--temperature", "nan"], ["model", "add", "x", "/x.gguf", "--parallel", "65"],
])
def test_wrong_usage_exits_with_2(arguments, tmp_path):
    result = run_command([*arguments, *(["--data", str(tmp_path)] if arguments[0] == "serve" else [])], check=False)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr


def test_a_failure_exits_with_1_and_says_what_to_do_in_one_line(server):
    for arguments in (["model", "show", "missing"], ["model", "add", "x", "/nonexistent/model.gguf"],
                      ["model", "add", "../../etc/passwd", "/etc/passwd"], ["model", "remove", "missing"],
                      ["model", "add", "x", "/tmp"], ["run", "missing", "hello"]):
        result = server.cli(*arguments, check=False)
        assert result.returncode == 1, (arguments, result)
        assert result.stdout == ""
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, (arguments, result.stderr)


def test_a_result_that_cannot_be_written_is_no_success():
    command = [warmset.BINARY, "plan", "queueing", "--arrivals-per-second", "1", "--service-seconds", "0.5", "--json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1 and "cannot be written" in result.stderr, result
    # A reader that has what it wants is no failure.
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        assert subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, timeout=60).returncode == 0


def test_no_server_and_no_data_is_a_clear_failure():
    port = warmset.free_ports(1)[0]
    result = run_command(["model", "list", "--server", f"127.0.0.1:{port}"], check=False)
    assert result.returncode == 1
    assert str(port) in result.stderr


def test_models_are_added_shown_listed_and_removed(server, models):
    added = server.cli_json("model", "add", "second", models["q4_0"], "--pin", "--max-concurrency", "3")
    assert added["digest"].startswith("sha256:")
    shown = server.cli_json("model", "show", "second")
    assert shown["digest"] == added["digest"]
    assert shown["pin"] is True
    listed = {model["name"]: model for model in server.cli_json("model", "list")["models"]}
    assert set(listed) >= {"smollm2", "second"}
    assert listed["smollm2"]["digest"] != listed["second"]["digest"]
    # People get a table.
    table = server.cli("model", "list").stdout
    assert "second" in table and "{" not in table
    server.cli("model", "unpin", "second")
    assert server.cli_json("model", "show", "second")["pin"] is False
    server.cli("model", "remove", "second")
    with pytest.raises(CommandFailed):
        server.cli("model", "show", "second")
    assert server.complete("second")[0] == 404


def test_adding_twice_is_harmless_and_another_file_under_the_name_changes_nothing_for_callers(server, models):
    first = server.cli_json("model", "show", "smollm2")["digest"]
    assert server.cli_json("model", "add", "smollm2", models["q4_1"])["digest"] == first
    added = server.cli_json("model", "add", "smollm2", models["q8_0"])
    assert added["digest"] == first and added["candidate"] != first
    server.cli("model", "remove", "smollm2", "--digest", added["candidate"])
    assert server.cli_json("model", "show", "smollm2")["digest"] == first


def test_load_and_unload(server):
    server.cli("model", "load", "smollm2")
    assert server.cli_json("model", "show", "smollm2")["state"] == "ready"
    server.cli("model", "unload", "smollm2")
    wait_for(lambda: server.cli_json("model", "show", "smollm2")["state"] == "absent", "it is unloaded")


def test_a_pinned_model_that_is_unloaded_says_that_it_stays_out(server, tmp_path):
    server.cli("model", "add", "pinned", synthetic_model(tmp_path, "pinned"), "--engine", "synthetic", "--pin")
    try:
        wait_for(lambda: server.cli_json("model", "show", "pinned")["state"] == "ready", "it is loaded")
        assert "pinned, and stays out until somebody asks" in server.cli("model", "unload", "pinned").stdout
        wait_for(lambda: server.cli_json("model", "show", "pinned")["state"] == "absent", "it is unloaded")
        assert server.complete("pinned")[0] == 200
    finally:
        server.cli("model", "remove", "pinned")


def test_profile_measures_and_keeps_the_measurement(server):
    profile = server.cli_json("model", "profile", "smollm2", timeout=1200)
    assert profile["digest"] == server.digest("smollm2")
    assert 0 < profile["load_seconds"]
    # More than the file is resident, and loading takes at least what stays.
    assert profile["steady_bytes"] > 90_000_000
    assert profile["peak_bytes"] >= profile["steady_bytes"] * 0.99
    assert profile["prefill_tokens_per_second"] > 0
    assert profile["decode_tokens_per_second"] > 0
    # 30 layers, 3 key-value heads of 64, keys and values, two bytes each.
    assert profile["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2
    shown = server.cli_json("model", "show", "smollm2")
    assert shown["measurements"]


def test_run_answers_a_prompt(server):
    result = server.cli("run", "smollm2", "Say hello.", "--max-tokens", 16)
    assert result.stdout.strip()


def test_run_says_what_is_wrong_with_its_input(server):
    command = [str(warmset.BINARY), "run", "smollm2", "--server", server.admin_address]
    result = subprocess.run(command, input=b"abc\xff", capture_output=True, timeout=60)
    assert result.returncode == 1
    assert b"not UTF-8 text" in result.stderr
    assert "`warmset model list`" in server.cli("run", "missing", "hello", check=False).stderr
    assert "is a directory" in server.cli("model", "add", "x", "/tmp", check=False).stderr


def test_logs_of_a_model(server, tmp_path):
    server.cli("model", "load", "smollm2")
    assert server.cli("model", "logs", "smollm2").returncode == 0
    server.cli("model", "add", "silent", synthetic_model(tmp_path, "silent"), "--engine", "synthetic")
    assert "silent has logged nothing yet" in server.cli("model", "logs", "silent").stdout
    server.cli("model", "remove", "silent")


def test_logs_are_read_without_a_server(tmp_path):
    data = ["--data", str(tmp_path / "data")]
    path = synthetic_model(tmp_path, "quiet")
    added = json.loads(run_command(["model", "add", "quiet", str(path), "--engine", "synthetic", "--json", *data]).stdout)
    assert "quiet has logged nothing yet" in run_command(["model", "logs", "quiet", *data]).stdout
    logs = tmp_path / "data" / "logs"
    logs.mkdir(exist_ok=True)
    (logs / f"{added['digest'].removeprefix('sha256:')}.log").write_text("one\ntwo\nthree\n")
    assert run_command(["model", "logs", "quiet", "-n", "2", *data]).stdout == "two\nthree\n"


def test_doctor_makes_nothing(tmp_path):
    place = tmp_path / "new"
    result = run_command(["doctor", "--data", str(place), "--json"])
    assert "holds nothing yet" in result.stdout
    assert not place.exists()


def test_doctor_looks_at_the_files_of_models_with_and_without_a_server(tmp_path):
    server = warmset.Server(tmp_path, memory="300MiB", reserve="64MiB")
    path = synthetic_model(tmp_path, "small")

    def doctor(check=True):
        place = ["--data", str(server.data)] + (["--server", server.admin_address] if server.running() else [])
        checks = json.loads(run_command(["doctor", "--json", *place], check=check).stdout)["checks"]
        return {name: [check for check in checks if check["name"] == name] for name in {check["name"] for check in checks}}

    with server:
        server.cli("model", "add", "small", path, "--engine", "synthetic")
        checks = doctor()
        assert "the server's pool takes 300.0 MiB, 64.0 MiB of it reserved" in checks["memory"][0]["detail"]
        assert "1 file of 1 model" in checks["artifacts"][0]["detail"]
        assert checks["server"][0]["detail"].endswith("1 model")
        # The server says where its files are; a directory that is another's is said, not guessed.
        alone = run_command(["doctor", "--json", "--server", server.admin_address])
        assert "1 file of 1 model" in alone.stdout
        elsewhere = run_command(["doctor", "--json", "--server", server.admin_address, "--data", str(tmp_path / "other")])
        assert "is not this server's" in elsewhere.stdout and not (tmp_path / "other").exists()
    assert "1 file of 1 model" in doctor()["artifacts"][0]["detail"]
    [blob] = (server.data / "store" / "blobs").iterdir()
    whole = blob.read_bytes()
    for damage in (lambda: blob.unlink(), lambda: blob.write_bytes(whole[:-1])):
        blob.unlink(missing_ok=True)
        blob.write_bytes(whole)
        with server:
            damage()
            [online] = doctor(check=False)["artifacts"]
        [offline] = doctor(check=False)["artifacts"]
        assert online["status"] == offline["status"] == "failed"
        assert online["detail"] == offline["detail"] and "small" in online["detail"]


def test_doctor_reports_as_json_and_as_text(server):
    report = server.cli_json("doctor")
    assert report["checks"]
    assert {check["status"] for check in report["checks"]} <= {"ok", "warning", "failed"}
    assert server.cli("doctor").stdout


@pytest.mark.parametrize("shell,word", [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete -c warmset")])
def test_completions(shell, word):
    assert word in run_command(["completions", shell]).stdout


def test_configuration_errors_are_reported_all_at_once_with_their_lines(tmp_path):
    config = tmp_path / "bad.toml"
    config.write_text('[gateway]\nlisten = "127.0.0.1:1"\nlistne = "x"\n\n[worker]\nmemory = "lots"\n')
    result = run_command(["serve", "--config", str(config), "--data", str(tmp_path / "data")], check=False)
    assert result.returncode in (1, 2)
    assert "bad.toml" in result.stderr
    assert "listne" in result.stderr and "3" in result.stderr
    assert "lots" in result.stderr and "6" in result.stderr


def test_slices_that_do_not_fit_are_named_with_file_and_line(tmp_path):
    config = tmp_path / "slices.toml"
    config.write_text('[worker]\nreserve = "64MiB"\nslices = [{ name = "a", memory = "1GiB" }]\n')
    arguments = ["serve", "--config", str(config), "--data", str(tmp_path / "data"), "--memory", "512MiB"]
    result = run_command(arguments, check=False)
    assert result.returncode == 1
    assert "slices.toml:3: the slices take 1.0 GiB, more than the 448.0 MiB" in result.stderr


def test_a_memory_of_next_to_nothing_is_refused_and_one_beyond_the_machine_is_warned_about(tmp_path):
    result = run_command(["serve", "--memory", "2", "--data", str(tmp_path / "data")], check=False)
    assert result.returncode == 1
    assert "is a unit missing, as in --memory 2GiB?" in result.stderr
    with warmset.Server(tmp_path, memory="8000GiB", reserve="1GiB") as server:
        assert "the memory of 7.8 TiB is more than" in server.log_tail()


def test_a_relative_data_directory_is_the_servers_own(tmp_path):
    model = {"name": "near", "engine": "synthetic", "source": synthetic_model(tmp_path, "near")}
    server = warmset.Server(tmp_path, memory="300MiB", reserve="64MiB", config=warmset.toml({"model": [model]}))
    server.data = Path("data")
    with server:
        # The engine works in another directory and finds its file all the same.
        assert server.complete("near")[0] == 200
    assert (tmp_path / "data" / "catalog.db").exists()
    listed = subprocess.run([str(warmset.BINARY), "model", "list", "--json"], cwd=tmp_path, capture_output=True, check=True,
                            env={**os.environ, "WARMSET_DATA": "data"}, timeout=60)
    assert [model["name"] for model in json.loads(listed.stdout)["models"]] == ["near"]


def test_a_hangup_drains_like_a_termination(tmp_path):
    path = synthetic_model(tmp_path, "slow", decode_seconds_per_token=0.02)
    model = {"name": "slow", "engine": "synthetic", "source": path, "pin": True}
    server = warmset.Server(tmp_path, memory="300MiB", reserve="64MiB", config=warmset.toml({"model": [model]}))
    with server, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.complete, "slow", max_tokens=100, ignore_eos=True)
        wait_for(lambda: server.metric("warmset_running_requests") == 1, "it runs")
        server.process.send_signal(signal.SIGHUP)
        status, _, body = answer.result()
        assert status == 200 and body["usage"]["completion_tokens"] == 100
        server.process.wait(60)
        assert server.process.returncode == 0, server.log_tail()


def test_a_log_filter_that_nobody_understands_is_told(tmp_path):
    result = run_command(["model", "list", "--data", str(tmp_path / "data")], env={"RUST_LOG": "warmset=loud"})
    assert 'RUST_LOG="warmset=loud" is not understood' in result.stderr


def test_the_command_line_works_without_a_server(tmp_path, models):
    data = ["--data", str(tmp_path / "data")]
    added = json.loads(run_command(["model", "add", "offline", str(models["q4_1"]), "--json", *data]).stdout)
    listed = json.loads(run_command(["model", "list", "--json", *data]).stdout)["models"]
    assert [(model["name"], model["digest"]) for model in listed] == [("offline", added["digest"])]
    run_command(["model", "remove", "offline", *data])
    assert json.loads(run_command(["model", "list", "--json", *data]).stdout)["models"] == []


def test_a_second_server_on_the_same_data_is_refused(server):
    second = warmset.Server(server.directory / "second")
    second.data = server.data
    second.start(wait=False)
    wait_for(lambda: second.process.poll() is not None, "the second server gives up")
    assert second.process.returncode == 1
    assert server.complete("smollm2")[0] == 200


def test_a_lost_file_of_a_version_that_is_not_current_is_seen_before_anybody_needs_it(tmp_path):
    server = warmset.Server(tmp_path, memory="300MiB", reserve="64MiB")
    with server:
        server.cli("model", "add", "m", synthetic_model(tmp_path, "one"), "--engine", "synthetic")
        [before] = (server.data / "store" / "blobs").iterdir()
        two = synthetic_model(tmp_path, "two", 2)
        candidate = server.cli_json("model", "add", "m", two, "--engine", "synthetic")["candidate"]
        [lost] = set((server.data / "store" / "blobs").iterdir()) - {before}
        lost.unlink()
        for arguments in (["--data", str(server.data)], ["--server", server.admin_address]):
            seen = run_command(["doctor", *arguments], check=False)
            assert seen.returncode == 1 and f"m: {lost}" in seen.stdout, seen.stdout
        for dry_run in (["--dry-run"], []):
            refused = server.cli("model", "promote", "m", candidate, *dry_run, check=False)
            assert refused.returncode == 1 and "gone from the store: add it again" in refused.stderr, refused.stderr
        server.cli("model", "add", "m", two, "--engine", "synthetic")
        assert server.cli_json("model", "promote", "m", candidate)["changed"] is True


def test_the_router_is_simulated_beside_the_rules_it_replaces():
    def rows(*arguments):
        result = run_command(["sim", "shared-prompts", "--json", *arguments])
        return json.loads(result.stdout)["rows"]

    both = rows("--compare", "warmset,round-robin")
    assert both == rows("--compare", "round-robin,warmset"), "the same scenario and seed give the same figures"
    ours = [row for row in both if row["policy"] == "warmset"]
    others = [row for row in both if row["policy"] == "round-robin"]
    for mine, other in zip(ours, others, strict=True):
        assert mine["hit_share"] >= 0.98 and mine["max_to_mean_in_flight"] <= 1.6 and mine["within_target_share"] >= 0.998
        assert other["hit_share"] < 0.4
    assert rows("--seed", "2", "--compare", "warmset") != ours
    assert "is for other scenarios" in run_command(["sim", "shared-prompts", "--slots", "8"], check=False).stderr


def fits_a_terminal(text):
    """Lines of tables begin with a space."""
    lines = [line for line in text.splitlines() if line.startswith(" ")]
    return len(lines) > 3 and max(map(len, lines)) <= 100


def is_whole_alone(html):
    """A page that needs nothing else, and runs nothing."""
    return "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html and "<script" not in html


def test_a_pool_of_machines_is_simulated_shared_and_dedicated(tmp_path):
    text = (warmset.ROOT / "scenarios" / "capacity.toml").read_text()
    # Two hours around the burst and the loss: the whole day takes longer than a test should.
    for old, new in (("hours = 24", "hours = 1.5\nstart_hour = 9"), ("at_hours = 10", "at_hours = 0.25"), ("at_hours = 14.5", "at_hours = 1")):
        assert old in text
        text = text.replace(old, new)
    path, page = tmp_path / "pool.toml", tmp_path / "pool.html"
    path.write_text(text)
    outputs = [run_command(["sim", str(path), "--json", "--html", str(page)]).stdout for _ in range(2)]
    assert outputs[0] == outputs[1], "the same scenario and seed give the same bytes"
    document = json.loads(outputs[0])
    rows = {row["arrangement"]: row for row in document["rows"]}
    assert set(rows) == {"shared", "shared, unplaced", "dedicated"}
    for row in rows.values():
        assert row["requests"] == document["requests"]
        assert row["requests"] == row["answered"] + row["refused"] + row["broken"] + row["unfinished"]
        assert len(row["away"]) == 1 and {team["team"] for team in row["teams"]} == {"chat", "code", "departments", "batch"}
    html = page.read_text()
    assert html.count("<svg") == 4 and is_whole_alone(html)
    shown = run_command(["sim", str(path)]).stdout
    assert fits_a_terminal(shown), shown
    sizes = shown.split("AS PROMISED\n")[1].splitlines()
    assert len(sizes) == len(document["fleets"]) > 1
    for line, fleet in zip(sizes, document["fleets"]):
        why = line.split("no: ")[-1].split()
        assert line.endswith("yes") if fleet["met"] else why[0] in {"chat", "code", "departments", "batch"}, line
    text = text.replace("zipf = 1.0", "zipff = 1.0", 1)
    path.write_text(text)
    refused = run_command(["sim", str(path)], check=False)
    assert refused.returncode == 1 and "zipff" in refused.stderr, refused.stderr
    assert "is for other scenarios" in run_command(["sim", "capacity", "--slots", "8"], check=False).stderr


def test_what_was_played_live_stands_beside_what_is_simulated(tmp_path):
    text = (warmset.ROOT / "scenarios" / "capacity-live.toml").read_text()
    for old, new in (("hours = 0.13333333333333333", "hours = 0.02"), ("at_hours = 0.04", "at_hours = 0.01"), ("at_hours = 0.09", "at_hours = 0.015")):
        assert old in text
        text = text.replace(old, new)
    scenario, exported, played, page = (tmp_path / name for name in ("pool.toml", "demand.json", "live.json", "pool.html"))
    scenario.write_text(text)
    run_command(["sim", str(scenario), "--demand", str(exported)])
    demand = json.loads(exported.read_text())
    assert [arrangement["arrangement"] for arrangement in demand["arrangements"]] == ["shared", "dedicated"]
    counts = {"loads": 3, "failed_loads": 0, "evictions": 1, "preloads_used": 0, "preloads_wasted": 0, "parked": 0}
    seen = lambda number, request: {
        "number": number, "second": request["second"], "model": request["model"], "machine": 0, "cold": False,
        "first_token_seconds": 0.25, "end": "answered", "refusal": None, "ended_seconds": 1.5}
    of = lambda teams: [seen(number, request) for number, request in enumerate(demand["requests"])
                        if demand["models"][request["model"]] in teams]
    fleets = lambda arrangement: [{"counts": [counts] * len(demand["pool"]["team"]), "absences": [], "memory": [], "requests": of(fleet["teams"])}
                                  for fleet in arrangement["fleets"]]
    live = {"seed": 1, "arrangements": [{"arrangement": one["arrangement"], "fleets": fleets(one)} for one in demand["arrangements"]]}
    played.write_text(json.dumps(live))
    command = ["sim", str(scenario), "--live", str(played), "--html", str(page)]
    document = json.loads(run_command([*command, "--json"]).stdout)
    rows = {row["arrangement"]: row for row in document["rows"]}
    assert set(rows) == {"shared", "shared, unplaced", "dedicated", "shared, live", "dedicated, live"}
    for name in ("shared", "dedicated"):
        row = rows[f"{name}, live"]
        assert row["answered"] == row["requests"] == document["requests"] and row["cost"] == rows[name]["cost"]
        assert row["first_token_p99_seconds"] == 0.25 and row["answer_p50_seconds"] == 1.5
        both = next(one for one in document["compared"] if (one["arrangement"], one["team"]) == (name, "all"))["first_token_p50_seconds"]
        assert both["live"] == 0.25 and both["simulated"] == rows[name]["first_token_p50_seconds"]
        assert both["ratio"] == pytest.approx(both["live"] / both["simulated"])
    assert rows["shared, live"]["counts"]["loads"] == 3 * len(demand["pool"]["team"])
    shown = run_command(command).stdout
    assert "Live beside simulated" in page.read_text() and "Simulated / live" in shown and fits_a_terminal(shown), shown
    for arguments, words in (
        ([*command, "--seed", "2"], "give --seed 1"),
        (["sim", "capacity", "--live", str(played)], "was played from another one"),
        (["sim", str(scenario), "--live", str(tmp_path / "missing.json")], "cannot read"),
        (["sim", str(scenario), "--live", str(scenario)], "cannot be read"),
        (["sim", "rare-models", "--live", str(played)], "is for other scenarios"),
    ):
        refused = run_command(arguments, check=False)
        assert refused.returncode == 1 and words in refused.stderr, refused.stderr


def test_what_changes_in_a_pool_is_simulated_with_and_without(tmp_path):
    page = tmp_path / "changes.html"
    outputs = [run_command(["sim", "changes", "--json", "--html", str(page)]).stdout for _ in range(2)]
    assert outputs[0] == outputs[1], "the same scenario and seed give the same bytes"
    document = json.loads(outputs[0])
    names = ["as described", "none joins", "there from the beginning", "no new version", "no region lost", "weights everywhere"]
    assert [row["variant"] for row in document["rows"]] == names
    windows = [window["what"] for window in document["rows"][0]["windows"]]
    assert windows == ["burst of chat", "rollout of chat 1", "loss of north"]
    for row in document["rows"]:
        assert row["requests"] == document["requests"]
        assert row["requests"] == row["answered"] + row["refused"] + row["broken"] + row["unfinished"]
        moments = row["moments"]
        assert sum(moment["requests"] for moment in moments) == row["requests"] and len(moments) == 60
        assert all(moment["requests"] == 0 or moment["first_token_p99_seconds"] is not None for moment in moments)
    text = run_command(["sim", "changes"]).stdout
    html = page.read_text()
    for shown in (text, html):
        assert all(word in shown for word in (*names, *windows, "side by side")), shown
    assert html.count("<svg") == 2 + len(windows) and is_whole_alone(html)
    assert fits_a_terminal(text), text
    path = tmp_path / "pool.toml"
    path.write_text((warmset.ROOT / "scenarios" / "changes.toml").read_text().replace("up_after_seconds = ", "up_after = 1 # "))
    refused = run_command(["sim", str(path)], check=False)
    assert refused.returncode == 1 and "up_after" in refused.stderr, refused.stderr
    assert "is for other scenarios" in run_command(["sim", "changes", "--demand", "x"], check=False).stderr


def test_memory_that_models_and_conversations_share_is_simulated(tmp_path):
    page, demand = tmp_path / "shared.html", tmp_path / "demand.json"
    command = ["sim", "models-and-conversations", "--json", "--html", str(page)]
    outputs = [run_command([*command, "--demand", str(demand)]).stdout for _ in range(2)]
    assert outputs[0] == outputs[1], "the same scenario and seed give the same bytes"
    document = json.loads(outputs[0])
    assert len(json.loads(demand.read_text())["requests"]) == document["requests"]
    rows = {row["policy"]: row for row in document["rows"]}
    moving, fixed = rows["moving"], [row for name, row in rows.items() if name.startswith("fixed-")]
    assert len(fixed) == 5
    for row in rows.values():
        assert row["waited_seconds"] == pytest.approx(sum(phase["waited_seconds"] for phase in row["phases"]))
    # By a fifth at least: a boundary that only follows would be a tie with the best.
    assert moving["waited_seconds"] < 0.8 * min(row["waited_seconds"] for row in fixed)
    assert document["ratio_to_best_fixed"] == pytest.approx(moving["waited_seconds"] / rows[document["best_fixed"]]["waited_seconds"])
    shares = {phase["phase"]: phase["kv_share"] for phase in moving["phases"]}
    assert shares["models"] < 0.1 < shares["talk"] and shares["models 2"] < 0.1 < shares["talk 2"], shares
    assert is_whole_alone(page.read_text())
    shown = run_command(["sim", "models-and-conversations", "--compare", "moving,fixed-50", "--seed", "2"]).stdout
    assert fits_a_terminal(shown) and "the moving boundary waits" in shown, shown
    path = tmp_path / "shared.toml"
    path.write_text((warmset.ROOT / "scenarios" / "models-and-conversations.toml").read_text().replace("load_seconds = ", "load_hours = 1 # "))
    refused = run_command(["sim", str(path)], check=False)
    assert refused.returncode == 1 and "load_hours" in refused.stderr, refused.stderr
    assert "fixed-50" in run_command(["sim", "models-and-conversations", "--compare", "fixed-51"], check=False).stderr
    assert "is for other scenarios" in run_command(["sim", "models-and-conversations", "--slots", "8"], check=False).stderr


def test_many_models_and_one_loader_are_simulated(tmp_path):
    text = (warmset.ROOT / "scenarios" / "two-hundred-models.toml").read_text()
    path, page = tmp_path / "loader.toml", tmp_path / "loader.html"
    path.write_text(text.replace("requests = 4_000", "requests = 300"))
    outputs = [run_command(["sim", str(path), "--json", "--html", str(page)]).stdout for _ in range(2)]
    assert outputs[0] == outputs[1], "the same scenario and seed give the same bytes"
    rows = json.loads(outputs[0])["rows"]
    assert {row["policy"] for row in rows} == {"pinned-lru", "warmset"} and not any(row["unanswered"] for row in rows)
    assert page.read_text().count("<svg") == 5
    path.write_text(text.replace("pinned = 5", "pinned = 50"))
    refused = run_command(["sim", str(path)], check=False)
    assert refused.returncode == 1 and "slots" in refused.stderr, refused.stderr
