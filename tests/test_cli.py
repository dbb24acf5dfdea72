"""The command line as people and scripts use it: exit codes, one JSON document on stdout, one line on stderr."""

import json

import pytest
import warmset
from warmset import CommandFailed, run_command, wait_for


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


@pytest.mark.parametrize("arguments", [["nonsense"], ["model", "add"], ["serve", "--memory", "lots"], ["model", "show"]])
def test_wrong_usage_exits_with_2(arguments, tmp_path):
    result = run_command([*arguments, *(["--data", str(tmp_path)] if arguments[0] == "serve" else [])], check=False)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr


def test_a_failure_exits_with_1_and_says_what_to_do_in_one_line(server):
    for arguments in (["model", "show", "missing"], ["model", "add", "x", "/nonexistent/model.gguf"],
                      ["model", "add", "../../etc/passwd", "/etc/passwd"], ["model", "remove", "missing"]):
        result = server.cli(*arguments, check=False)
        assert result.returncode == 1, (arguments, result)
        assert result.stdout == ""
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, (arguments, result.stderr)


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


def test_adding_twice_is_harmless_and_another_file_under_the_name_is_refused(server, models):
    first = server.cli_json("model", "show", "smollm2")["digest"]
    assert server.cli_json("model", "add", "smollm2", models["q4_1"])["digest"] == first
    result = server.cli("model", "add", "smollm2", models["q8_0"], check=False)
    assert result.returncode == 1
    assert server.cli_json("model", "show", "smollm2")["digest"] == first


def test_load_and_unload(server):
    server.cli("model", "load", "smollm2")
    assert server.cli_json("model", "show", "smollm2")["state"] == "ready"
    server.cli("model", "unload", "smollm2")
    wait_for(lambda: server.cli_json("model", "show", "smollm2")["state"] == "absent", "it is unloaded")


def test_profile_measures_and_keeps_the_measurement(server):
    profile = server.cli_json("model", "profile", "smollm2", timeout=300)
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


def test_logs_of_a_model(server):
    server.cli("model", "load", "smollm2")
    assert server.cli("model", "logs", "smollm2").returncode == 0


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
