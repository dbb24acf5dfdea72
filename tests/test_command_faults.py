"""What a command can do wrong, and what callers, operators and the machine get: with a server made to fail."""

import contextlib
import json
import os
import re
import signal
import time

import openai
import pytest
from warmset import MEBIBYTE, ROOT, CommandFailed, alive, descendants, wait_for

CRAFTED = ROOT / "tests" / "servers" / "crafted_server.py"


def command(fault="none", *more):
    return " ".join(["python3", str(CRAFTED), "--port", "${PORT}", "--fault", fault, *more])


def serve(pool, fault="none", *more, runtime=None, memory="512MiB", worker=None, **fields):
    runtimes = [{"name": "crafted", "command": command(fault, *more), **(runtime or {})}]
    listed = [{"name": "talk", "source": "command:org/talk", "runtime": "crafted", **fields}]
    tables = {"runtime": runtimes, "models": listed}
    return pool(memory=memory, reserve="64MiB", **tables, **({"worker": worker} if worker else {}))


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=60, max_retries=0)


def ask(server, **fields):
    """What the crafted server was told."""
    answer = client_of(server).completions.create(model="talk", prompt="Hi", **fields)
    return json.loads(answer.choices[0].text), answer


def tree(server):
    return [pid for pid in descendants(server.pid) if pid not in server.engines()]


def sleepers(server):
    """The processes that detach themselves, and the shell that begins them."""
    found = []
    for pid in descendants(server.pid):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
            found += [(pid, words)] if b"987654" in words else []
    return found


def failing_load(server):
    with pytest.raises(CommandFailed) as failed:
        server.cli("model", "load", "talk")
    return failed.value.stderr


def test_a_command_gets_its_own_environment_and_nothing_of_the_server_s(pool, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    runtime = {"env": {"ALPHA": "a b $${PORT}", "MODEL_NAME": "${NAME}:${MODEL}"}, "cwd": "/usr"}
    server = serve(pool, runtime=runtime, context_tokens=100)
    told, answer = ask(server, max_tokens=5, seed=7, temperature=0.5, stop=["x"], extra_body={"top_k": 3})
    environment = told["env"]
    assert environment["ALPHA"] == "a b ${PORT}" and environment["MODEL_NAME"] == "talk:org/talk"
    assert "SECRET_OF_THE_SERVER" not in environment and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert set(environment) <= {"PATH", "ALPHA", "MODEL_NAME", "CUDA_VISIBLE_DEVICES", "LC_CTYPE", "PWD"}, environment
    assert told["cwd"] == "/usr"
    asked = told["asked"]
    assert (asked["model"], asked["prompt"], asked["seed"], asked["top_k"]) == ("crafted-model", "Hi", 7, 3)
    assert (asked["max_tokens"], asked["temperature"], asked["stop"]) == (5, 0.5, ["x"])
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 2, 3)


def test_a_server_without_a_route_for_health_is_asked_for_its_models(pool):
    server = serve(pool, "none", "--no-health")
    assert ask(server)[0]["asked"]["prompt"] == "Hi"


def test_a_command_runs_as_another_user_where_root_may_do_that(pool, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    script = tmp_path / "server.py"
    script.write_text(CRAFTED.read_text())
    for directory in [tmp_path, *tmp_path.parents]:
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(directory.stat().st_mode | 0o001)
    runtime = {"user": "nobody", "command": f"python3 {script} --port ${{PORT}}"}
    server = serve(pool, runtime=runtime)
    assert ask(server)[0]["uid"] == 65534
    processes = tree(server)
    server.kill()
    wait_for(lambda: not any(map(alive, processes)), "nothing of the other user's is left")


def test_an_unknown_user_and_an_unknown_program_are_said_at_once(pool):
    server = serve(pool, runtime={"user": "no-such-user"})
    assert "no user no-such-user" in failing_load(server)
    server = serve(pool, runtime={"command": "no-such-program ${PORT}"})
    assert "no-such-program cannot be started" in failing_load(server)
    server = serve(pool, runtime={"cwd": "/no/such/place"})
    assert "/no/such/place is not a directory" in failing_load(server)


def test_a_command_that_exits_at_once_is_noticed_with_its_last_words(pool):
    server = serve(pool, "exits")
    before = time.monotonic()
    text = failing_load(server)
    assert "ended before it could serve: exit code 3" in text and "cannot find the flux capacitor" in text
    assert time.monotonic() - before < 60
    status, headers, body = server.complete("talk")
    assert status == 503 and "flux capacitor" in body["error"]["message"], body
    assert int(headers["retry-after"]) >= 1
    wait_for(lambda: not tree(server), "nothing is left of it")


@pytest.mark.parametrize("fault", ["never_healthy", "wrong_port"])
def test_a_command_that_never_serves_is_given_up_in_time_and_leaves_nothing(pool, fault):
    # Time enough for the server to begin to listen on a machine that is busy with other things.
    server = serve(pool, fault, runtime={"health_timeout": "8s"})
    text = failing_load(server)
    assert "within 8 s" in text and "${PORT}" in text and "crafted server begins" in text
    port = int(re.search(r"127\.0\.0\.1:(\d+)", text)[1])
    listens = int(re.search(r"listening on (\d+)", text)[1]) if fault == "wrong_port" else port
    assert f"It listens on {listens};" in text and (listens != port) == (fault == "wrong_port"), text
    wait_for(lambda: not tree(server), "nothing is left of it")


def test_a_flood_of_output_is_kept_within_bounds_and_holds_nothing_up(pool):
    server = serve(pool, "floods")
    assert ask(server)
    logs = list((server.data / "logs").iterdir())
    assert sum(log.stat().st_size for log in logs) <= 3 * MEBIBYTE
    logged = lambda: server.cli_json("model", "logs", "talk", "--lines", "5")["lines"]  # noqa: E731
    # What is read of a pipe is written down a moment after it was said.
    wait_for(lambda: logged()[-1] == "crafted server begins", lambda: f"the last line is there: {logged()}")
    lines = logged()
    assert lines[-1] == "crafted server begins" and lines[0].startswith("line 19999")


def test_a_server_that_ignores_sigterm_is_killed_at_the_deadline(pool):
    server = serve(pool, "ignores_sigterm", worker={"stop_deadline": "1s"})
    assert ask(server)
    processes = tree(server)
    server.cli("model", "unload", "talk")
    assert not any(map(alive, processes)) and server.memory()["resident"] == 0


@pytest.mark.parametrize("how", ["unload", "kill_engine", "kill_server"])
def test_processes_that_detach_themselves_are_found_and_ended(pool, how):
    server = serve(pool, "detaches")
    assert ask(server)
    # The shell has come as far as both of them.
    both = lambda: sum(words.startswith(b"sleep\0") for _, words in sleepers(server)) == 2  # noqa: E731
    wait_for(both, lambda: f"they have begun: {sleepers(server)}")
    sleeping = [pid for pid, _ in sleepers(server)]
    assert len(sleeping) >= 2
    if how == "unload":
        server.cli("model", "unload", "talk")
    elif how == "kill_engine":
        [engine] = [entry["pid"] for entry in server.admin_json("/admin/v1/workers")["workers"][0]["engines"]]
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: server.cli_json("model", "show", "talk")["state"] != "ready", "the end is noticed")
        # The ledger counts its memory until all of them are gone.
        assert not any(map(alive, sleeping))
    else:
        server.kill()
    wait_for(lambda: not any(map(alive, sleeping)), "nothing that came of the command is left")


def test_a_stream_that_the_server_cuts_off_never_ends_cleanly(pool):
    server = serve(pool, "cuts_off")
    stream = client_of(server).completions.create(model="talk", prompt="Hi", stream=True)
    with pytest.raises(openai.APIError) as failed:
        list(stream)
    assert "broke the answer off" in str(failed.value)
    # The server lives, and so does the model.
    assert server.cli_json("model", "show", "talk")["state"] == "ready"


def test_a_refusal_of_the_server_keeps_its_kind(pool):
    server = serve(pool, "refuses")
    with pytest.raises(openai.BadRequestError) as refused:
        client_of(server).completions.create(model="talk", prompt="Hi")
    assert refused.value.code == "context_length_exceeded" and "longer than the context" in refused.value.message


def test_a_caller_that_hangs_up_is_hung_up_on_at_the_server(pool):
    server = serve(pool, "endless")
    stream = client_of(server).completions.create(model="talk", prompt="Hi", stream=True)
    next(iter(stream))
    stream.close()
    lines = lambda: server.cli_json("model", "logs", "talk")["lines"]  # noqa: E731
    wait_for(lambda: "a caller hung up" in lines(), "the server sees its caller go")


def test_over_its_memory_cap_a_server_dies_alone(pool):
    server = serve(pool, "eats_memory", memory_cap="256MiB", memory="1GiB")
    with pytest.raises(openai.APIError):
        client_of(server).completions.create(model="talk", prompt="Hi", max_tokens=9)
    wait_for(lambda: server.cli_json("model", "show", "talk")["state"] != "ready", "the end is noticed")
    assert server.get("/health/live")[0] == 200


def test_a_changed_runtime_is_another_digest_and_an_unchanged_one_is_not(pool):
    server = serve(pool, runtime={"env": {"A": "1"}})
    server.cli("model", "add", "by-hand", "command:x", "--engine", "command", "--runtime", "crafted")
    before = {name: server.digest(name) for name in ("talk", "by-hand")}
    server.stop()
    server.start()
    assert {name: server.digest(name) for name in before} == before
    server.stop()
    server.config = server.config.replace('A = "1"', 'A = "2"')
    server.start()
    after = {name: server.digest(name) for name in before}
    assert all(after[name] != before[name] for name in before)
    answer = client_of(server).completions.create(model="by-hand", prompt="Hi")
    assert json.loads(answer.choices[0].text)["env"]["A"] == "2"


def test_what_is_wrong_with_a_runtime_is_said_with_its_line(pool, tmp_path):
    config = tmp_path / "wrong.toml"
    config.write_text(
        '[[runtime]]\nname = "a"\ncommand = "serve ${PROT}"\n'
        '[[runtime]]\nname = "b"\ncommand = "serve --port 80"\ncwd = "here"\n'
        '[[model]]\nname = "m"\nsource = "command:x"\nruntime = "c"\n'
    )
    server = pool.directory / "unused"
    from warmset import run_command

    result = run_command(["serve", "--config", str(config), "--data", str(server)], check=False)
    assert result.returncode == 1
    for expected in [":3: runtime.command: there is no variable ${PROT}", ":6: runtime.command: neither command nor env",
                     ":7: runtime.cwd", ":11: model.runtime: there is no [[runtime]] c"]:
        assert expected in result.stderr, (expected, result.stderr)


def test_a_command_needs_a_server_with_its_runtime(pool):
    server = serve(pool)
    with pytest.raises(CommandFailed, match="there is no runtime nothing: there are crafted"):
        server.cli("model", "add", "x", "command:x", "--runtime", "nothing")
    with pytest.raises(CommandFailed, match="needs a runtime"):
        server.cli("model", "add", "x", "command:x", "--engine", "command")
    server.stop()
    with pytest.raises(CommandFailed, match="define it as"):
        server.cli("model", "add", "x", "command:x", "--runtime", "crafted")
