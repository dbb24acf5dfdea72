"""`warmset sim batching`: engines step by step and as queues, from made-up and from recorded requests."""

import gzip
import json

import pytest
from warmset import ROOT, run_command

SCENARIO = (ROOT / "scenarios" / "batching.toml").read_text()


def simulated(path, *arguments):
    return json.loads(run_command(["sim", str(path), "--json", *arguments]).stdout)


def written(tmp_path, *changes):
    text = SCENARIO
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def shipped():
    return simulated("batching")


def rows(document, level):
    return [row for row in document["rows"] if row["level"] == level]


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(shipped):
    assert simulated("batching") == shipped
    assert simulated("batching", "--seed", "2")["rows"] != shipped["rows"]


def test_its_tables_fit_a_terminal():
    lines = run_command(["sim", "batching", "--compare", "request"]).stdout.splitlines()
    tables = [line for line in lines if line.startswith(" ")]
    assert len(tables) == 2 * (1 + 3) and max(map(len, tables)) <= 100, lines


def test_replicas_keep_up_until_more_comes_than_they_can_do(shipped):
    for level in ("step", "request"):
        slow, shipped_rate, overload = rows(shipped, level)
        assert [row["offered_requests_per_second"] > row["capacity_requests_per_second"] for row in rows(shipped, level)] \
            == [False, False, True]
        for row in (slow, shipped_rate):
            assert row["keeps_up"] and row["finished"] == row["requests"] == 40_000 and row["unfinished"] == 0
            times = row["latency"]["time_to_first_token_seconds"]
            assert 0 < times["p50"] <= times["p90"] <= times["p99"] < row["latency"]["end_to_end_seconds"]["p50"]
            assert row["latency"]["queue_wait_seconds"]["p99"] <= times["p99"]
        # What has no end has no percentile.
        assert overload["verdict"] == "does not keep up" and overload["latency"] is None
        assert overload["present_at_last_arrival"] > 10 * shipped_rate["present_at_last_arrival"]
    assert slow["latency"]["end_to_end_seconds"]["p50"] < shipped_rate["latency"]["end_to_end_seconds"]["p50"]


def test_both_levels_agree_about_what_replicas_can_do(shipped):
    step, request = rows(shipped, "step")[0], rows(shipped, "request")[0]
    assert 0.8 < request["capacity_requests_per_second"] / step["capacity_requests_per_second"] < 1.25
    assert simulated("batching", "--compare", "request")["rows"] == rows(shipped, "request")


def test_little_memory_makes_requests_begin_again_and_large_ones_refused(tmp_path):
    path = written(tmp_path, ("block_tokens = 16", "block_tokens = 16\nkv_tokens = 4000"), ("requests = 40_000", "requests = 400"),
                   ("[40.0, 80.0, 200.0]", "[80.0]"))
    row = simulated(path, "--compare", "step")["rows"][0]
    assert row["preemptions"] > 0 and row["finished"] == 400 and row["memory_max_share"] > 0.95
    path = written(tmp_path, ("block_tokens = 16", "block_tokens = 16\nkv_tokens = 600"), ("requests = 40_000", "requests = 40"))
    for row in simulated(path)["rows"]:
        assert row["refused"] == 40 and row["unfinished"] == 0 and row["finished"] == 0


def test_shared_beginnings_are_found_and_not_read_again(tmp_path):
    changes = [("requests = 40_000", "requests = 4_000"), ("[40.0, 80.0, 200.0]", "[40.0]")]
    shared = ("output_tokens = 128", "output_tokens = 128\nshared_tokens = 448\nshared_prompts = 20")
    plain = simulated(written(tmp_path, *changes), "--compare", "step")["rows"][0]
    found = simulated(written(tmp_path, *changes, shared), "--compare", "step")["rows"][0]
    assert plain["prefix_hit_share"] is None and found["prefix_hit_share"] > 0.8
    first = "time_to_first_token_seconds"
    assert found["latency"][first]["p50"] < plain["latency"][first]["p50"]


def test_recorded_requests_of_both_forms_are_played(tmp_path):
    lines = [
        {"timestamp": 1000 * number, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 10 + number]}
        for number in range(20)
    ]
    path = tmp_path / "requests.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    one = written(tmp_path, ("replicas = 4", "replicas = 1"))
    row = simulated(one, "--trace", str(path), "--compare", "step")["rows"][0]
    # All but the first find two blocks of 512 tokens.
    assert row["finished"] == 20 and row["prefix_hit_share"] == pytest.approx(19 * 1024 / (20 * 1100))
    table = tmp_path / "requests.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    document = simulated(one, "--trace", str(table))
    assert [row["finished"] for row in document["rows"]] == [2, 2] and document["demand"] == str(table)


def test_measured_steps_take_the_place_of_data_sheets(tmp_path):
    samples = "".join(
        f"[[batching.sample]]\nsequences = {sequences}\ncontext_tokens = {sequences * context}\n"
        f"seconds = {0.01 + 0.001 * sequences + 1e-7 * sequences * context}\n"
        for sequences in (1, 4, 16) for context in (100, 1000)
    )
    path = written(tmp_path, ("requests = 40_000", "requests = 100"))
    path.write_text(path.read_text() + samples)
    settings = simulated(path)["settings"]
    assert settings["cost"]["fixed_seconds"] == pytest.approx(0.01, rel=1e-3)
    assert settings["cost"]["sequence_seconds"] == pytest.approx(0.001, rel=1e-3)
    assert settings["fit"]["relative_error"] < 1e-6


@pytest.mark.parametrize(("before", "after", "word"), [
    ("replicas = 4", "replicas = 0", "replicas"),
    ("step_tokens = 8192", "step_tokens = 8", "max_sequences"),
    ("block_tokens = 16", "block_tokens = 0", "block_tokens"),
    ("prompt_tokens = 512", "prompt_tokens = 0", "prompt_tokens"),
    ("routing = \"round_robin\"", "routing = \"by_magic\"", "by_magic"),
    ("heads = 32", "head = 32", "head"),
    ("h100-sxm", "h999", "h999"),
    ("[40.0, 80.0, 200.0]", "[-1.0]", "requests_per_second"),
    ("[batching.gpu]\nname = \"h100-sxm\"\n", "", "model and gpu"),
])
def test_wrong_input_is_refused_by_its_name(tmp_path, before, after, word):
    result = run_command(["sim", str(written(tmp_path, (before, after))), "--json"], check=False)
    assert result.returncode == 1 and word in result.stderr and not result.stdout, result.stderr


def test_options_of_other_scenarios_and_unknown_levels_are_refused():
    assert "is for other scenarios" in run_command(["sim", "batching", "--slots", "8"], check=False).stderr
    assert "there are step, request" in run_command(["sim", "batching", "--compare", "lru"], check=False).stderr
